"""The copy of the widget that is kept with the notebook: small, of the chosen device, and made where nobody waits."""

import asyncio
import re
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import pytest

import remat_magic as rm
from remat_magic import devices
from remat_magic.records import Note, Program, ProgramLine, SourceText
from remat_magic.views import format as fmt
from remat_magic.views import html
from remat_magic.widget import RematWidget
from remat_magic.widget import idle as idle_module
from remat_magic.widget import rendered as rendered_module
from remat_magic.widget import widget as widget_module
from remat_magic.widget.idle import forget
from remat_magic.widget.rendered import MOST_BYTES, Rendered
from tests.programs import f32
from tests.test_widget import KEYS, FakeShell, FakeTrace, Screen, browser, layers, messages, tell  # noqa: F401 - a fixture
from tests.views_records import blocks, small


class Kernel(FakeShell, Screen):
    """A shell that runs cells and shows outputs, and notes which thread shows one."""

    def __init__(self):
        FakeShell.__init__(self)
        Screen.__init__(self)
        self.threads = []

    def publish(self, data, transient, update=False):
        self.threads.append(threading.current_thread())
        Screen.publish(self, data, transient, update)


@pytest.fixture
def screen(browser, monkeypatch):  # noqa: F811
    """What runs cells and shows outputs, and waits for cells, however slow this machine is."""
    kernel = Kernel()
    monkeypatch.setattr(idle_module, "_DELAY", 0.01)
    monkeypatch.setattr(idle_module, "UNIT", float("inf"))
    monkeypatch.setattr(widget_module, "get_ipython", lambda: kernel)
    yield kernel
    forget(kernel)


def look_ahead(widget):
    while widget.prefetch():
        pass


def displayed(screen, trace, *args, **options):
    """A widget whose copy is there, and in step."""
    widget = RematWidget(trace, *args, **options)
    screen.after()
    widget._copy.publish(screen, widget._rendered, widget._good)
    widget._publish(widget.report, 0, widget._rendered)
    look_ahead(widget)
    return widget


# ------------------------------------------------------------------------------------------------ what it has, in bytes

VALUE = blocks(1).residuals[1]
ROWS = tuple(
    replace(VALUE, name=f"value_{line}", source=replace(VALUE.source, line=line, end_line=line))
    for line in range(1, 401)
)
LINES = tuple(ProgramLine(f"    b{number}:f32[5] = sin a", None, "sin") for number in range(3000))
SOURCE = (SourceText("/tmp/ipykernel_7/1.py", 3, "layer", 1, "def layer(x):\n" + "    x = jnp.sin(x)\n" * 1000),)
LONG = f"names(save={[f'block_{number}_attention_output' for number in range(1500)]})"
NOTES = tuple(Note("saved-in-vain", f"'h{number}' is saved in vain.") for number in range(2000))
OTHERS = [html.others_row(small(policy=f"names(save=['x{number}'])")) for number in range(200)]

# What there is, and at least how many rows of values, lines of source, lines of jaxprs and other choices a copy has.
REPORTS = {
    "small": (small(), 3, (4, 1, 5, 3)),
    "twelve blocks": (blocks(12), 9, (7, 1, 5, 9)),
    "many values": (small(residuals=ROWS), 200, (15, 15, 5, 15)),
    "long jaxprs": (small(forward=Program(LINES, 3000)), 0, (4, 1, 0, 0)),
    "a long source": (small(sources=SOURCE), 3, (4, 1, 5, 3)),
    "a long policy": (small(policy=LONG, code=LONG, notes=NOTES), 3, (4, 1, 5, 3)),
    "all of that": (small(residuals=ROWS, forward=Program(LINES, 3000), sources=SOURCE), 200, (15, 15, 0, 15)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_copy_has_values_source_and_figures_in_60_kilobytes(name):
    report, others, least = REPORTS[name]
    rendered = Rendered("After In[3]", ())
    rendered._others = {("", f"other {number}", "function"): row for number, row in enumerate(OTHERS[:others])}
    kept = rendered.copy(report)
    assert sum(len(text.encode()) for text in kept.values()) <= MOST_BYTES == 60_000
    page = kept["text/html"]
    assert not re.findall("<script|<select|<button| data-k=", page)
    programs = "".join(re.findall("<pre.*?</pre>", page, re.DOTALL))
    rows = ('<tr class="remat-row', '<td class="remat-ln"', '<td class="remat-policy"')
    values, lines, choices = map(page.count, rows)
    for number, needed in zip((values, lines, programs.count("\n"), choices), least, strict=True):
        assert number >= needed, (values, lines, choices)
    # What is left out is counted, or told where it is.
    assert bool(programs) != ("<code>report.forward.text</code>" in page)
    assert (f"{others - choices} more choice" in page) == (choices < others)
    more = re.search(r"([\d,]+) more note", page)
    noted = page.count(" in vain.") + (int(more[1].replace(",", "")) if more else 0)
    assert noted == (len(NOTES) if report.notes is NOTES else 0)
    assert all("After In[3]" in text for text in kept.values())


def test_a_choice_sends_no_copy_and_sixty_send_one(screen):
    """Each click is a view for the browser; what is kept follows when the kernel is idle."""
    widget = displayed(screen, FakeTrace(), "none")
    assert [update for _, update in screen.shown] == [False, True]  # with the figures of the others
    assert all(f"<code>{key}</code>" in screen.shown[-1][0] for key in KEYS if key != "as_written")
    for number in range(60):
        tell(widget, type="choose", policy=f"mine{number}", at="function", serial=number + 1)
    assert len(screen.shown) == 2
    look_ahead(widget)
    assert len(screen.shown) == 3
    copy, is_update = screen.shown[-1]
    assert is_update
    assert len(copy.encode()) < MOST_BYTES
    assert "Policy mine59" in re.sub("<[^>]*>", "", copy)
    look_ahead(widget)  # nothing has changed
    assert len(screen.shown) == 3


# --------------------------------------------------------------------------------------------------------- its device


def step(ws, x):
    gradients = jax.grad(layers)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)


def said_by_the_widget(widget, policy, device):
    """The peaks that a reader is shown of a choice on a device: in the list, headline, bar and picture."""
    of = {"policy": policy, "at": "function", "device": device}
    tell(widget, type="choose", policy=policy, at="function", serial=0)
    for kind, more in (
        ("choices", {"policies": [policy]}),
        ("screen", {}),
        ("memory", {}),
    ):
        tell(widget, type=kind, **of, **more)
    parts = messages(widget, "screen")[-1]
    (listed,) = [row["peak"] for row in messages(widget, "choices")[-1]["rows"] if policy in row["keys"]]
    memory = messages(widget, "memory")[-1]["html"]
    return {"list": listed, "headline": parts["verdict"], "bar": parts["bar"], "picture": memory}


@pytest.mark.parametrize(("function", "device"), [(layers, "H100 SXM"), (layers, "TPU v5e"), (step, "H100 SXM x8")])
def test_list_headline_bar_picture_and_what_is_kept_have_one_peak(screen, function, device):
    """That of the report as on the device, which is another one than on this machine."""
    trace = rm.trace(function, [f32(257, 257)] * 4, f32(300, 257))
    widget = displayed(screen, trace, "none", device=device)
    for policy in ("dots_saveable", "nothing_saveable"):
        here, there = trace.report(policy, "function"), trace.report(policy, "function", device=device)
        assert here.peak_bytes != there.peak_bytes == trace.timeline(policy, "function", device=device).peak_bytes
        told = fmt.nbytes(there.peak_bytes)
        for where, text in said_by_the_widget(widget, policy, device).items():
            assert re.search(rf"(?<![\d.]){re.escape(told)}", text), where
            assert not re.search(rf"(?<![\d.]){re.escape(fmt.nbytes(here.peak_bytes))} (?:by|of)", text), where
        look_ahead(widget)
        kept = screen.shown[-1][0]
        assert f"peak of {fmt.about(there.peak_bytes, there.peak_low, there.peak_high)}" in kept
        assert f"peak of {fmt.nbytes(here.peak_bytes)}" not in kept
        assert f", with peaks as on {device}; run" in kept


def test_a_kept_copy_is_of_the_device_that_the_widget_shows(screen):
    """Chosen by the reader or for the cell: the peaks of all choices, and what is left of it."""
    trace = rm.trace(layers, [f32(257, 257)] * 3, f32(1000, 257))
    named = RematWidget(trace, "none", device="TPU v5e")
    widget = displayed(screen, trace, "none")

    def peak_of(key, device):
        return fmt.nbytes(trace.report(key, device=device or None).peak_bytes)

    named_devices = ("", "TPU v5e", "H100 SXM")
    peaks = {device: {peak_of(key, device) for key in ("none", "nothing_saveable")} for device in named_devices}
    assert len(set.union(*peaks.values())) == sum(map(len, peaks.values()))
    for device in (*named_devices, ""):
        tell(widget, type="device", device=device)
        look_ahead(widget)
        kept = screen.shown[-1][0]
        told = {*re.findall(r"[\d.]+ [kMG]B", kept)}
        assert {other for other, figures in peaks.items() if figures <= told} == {device}
        memory = device and fmt.nbytes(devices.usable_bytes(devices.get(device)))
        assert (f"of {memory}, " in kept and f"{device} <b>{memory}</b>" in kept) == bool(device)
    count = len(screen.shown)
    tell(widget, type="device", device="<b>")  # which is offered by nobody
    look_ahead(widget)
    assert len(screen.shown) == count
    assert (
        fmt.nbytes(trace.report("none", device="TPU v5e").peak_bytes) in named._rendered.copy(named.report)["text/html"]
    )


# ------------------------------------------------------------------------------------------------------ when it is made


async def until(is_so):
    for _ in range(3000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def test_what_is_kept_is_made_between_cells_and_not_on_the_main_thread(screen):
    """Which has the next cell to run; a cell that begins meanwhile is waited for."""
    trace, row, began = rm.trace(layers, [f32(8, 8)] * 3, f32(4, 8)), html.others_row, []

    def begins_a_cell(report):
        if not began:
            began.append(report)
            screen.before("two")
        return row(report)

    async def session(monkeypatch):
        screen.before("one")
        widget = RematWidget(trace, "none", device="TPU v5e")
        widget._copy.publish(screen, widget._rendered, widget._good)
        monkeypatch.setattr(rendered_module.html, "others_row", begins_a_cell)
        screen.threads.clear()
        screen.after()
        await until(lambda: began)
        widget._idle._worker.join()
        assert len(screen.shown) == 1
        screen.after()
        await until(lambda: "<code>nothing_saveable</code>" in screen.shown[-1][0])
        assert screen.threads
        assert threading.main_thread() not in screen.threads

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(session(monkeypatch))


AT_THE_END = """
import asyncio, threading, time
from remat_magic.widget import idle

class Shell:
    def __init__(self):
        self.events, self.callbacks = self, {}
    def register(self, event, callback):
        self.callbacks[event] = callback

class Widget:
    def prefetch(self):
        print("begun", flush=True)
        begun.set()
        time.sleep(0.5)
        print("done", flush=True)
        return True

async def session():
    idle.idle_time(shell).keep(widget, None)
    shell.callbacks["post_run_cell"](None)
    while not begun.is_set():
        await asyncio.sleep(0.01)

idle._DELAY = 0.0
shell, widget, begun = Shell(), Widget(), threading.Event()
asyncio.run(session())
"""


@pytest.mark.slow
def test_a_kernel_that_ends_waits_for_what_was_begun_and_begins_nothing_more():
    """A thread in the midst of XLA's code, when Python is taken down around it, could crash it."""
    ran = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=400, check=False)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["begun", "done"], "")
