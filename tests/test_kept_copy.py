"""The copy of the widget that is kept with the notebook: of the chosen device, and made where nobody waits for it."""

import asyncio
import html as html_module
import re
import subprocess
import sys
import threading

import comm
import jax
import pytest

import remat_magic as rm
from remat_magic import devices
from remat_magic.views import format as fmt
from remat_magic.views import html
from remat_magic.widget import RematWidget, live_view
from remat_magic.widget import idle as idle_module
from remat_magic.widget import rendered as rendered_module
from remat_magic.widget import widget as widget_module
from remat_magic.widget.idle import forget
from tests.programs import f32
from tests.test_estimate import attention_layers
from tests.test_widget import FakeComm, FakeShell, Screen, layers, messages, tell


@pytest.fixture
def browser(monkeypatch):
    """A kernel with a browser that listens."""
    monkeypatch.setattr(comm, "create_comm", FakeComm)
    monkeypatch.setattr(widget_module, "_kernel", object)


def step(ws, x):
    gradients = jax.grad(layers)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)


def said_by_the_widget(widget, policy, device):
    """The peaks that a reader is shown of a choice on a device: in the list, headline, bar, table and picture."""
    of = {"policy": policy, "at": "function", "device": device}
    tell(widget, type="choose", policy=policy, at="function", serial=0)
    for kind, more in (("choices", {"policies": [policy]}), ("compare", {"width": 900}), ("peak", {}), ("memory", {})):
        tell(widget, type=kind, **of, **more)
    apart = re.search(r'data-apart="([^"]*)"', widget._frame)[1]
    parts = messages(widget, "peak")[-1] if f"&quot;{device}&quot;" in apart else widget._view["parts"]
    (listed,) = [row["peak"] for row in messages(widget, "choices")[-1]["rows"] if policy in row["keys"]]
    table, memory = messages(widget, "compare")[-1]["html"], messages(widget, "memory")[-1]["html"]
    (row,) = re.findall(r'<tr[^>]*aria-current="true".*?</tr>', table)
    return {"list": listed, "headline": parts["totals"], "bar": parts["peak"], "table": row, "picture": memory}


@pytest.mark.each_once
@pytest.mark.parametrize("device", ["H100 SXM", "TPU v5e", "H100 SXM x8"])
@pytest.mark.parametrize("function", [layers, step])
def test_list_headline_bar_table_picture_and_what_is_kept_have_one_peak(browser, monkeypatch, function, device):
    """That of the report as on the device, which is another one than on this machine."""
    trace = rm.trace(function, [f32(257, 257)] * 4, f32(300, 257))
    screen, widget = Screen(), RematWidget(trace, "none", device=device)
    monkeypatch.setattr(live_view, "get_ipython", lambda: screen)
    widget._kept.publish(screen, widget._good)
    for policy in ("none", "dots_saveable", "nothing_saveable"):
        here, there = trace.report(policy, "function"), trace.report(policy, "function", device=device)
        assert here.peak_bytes != there.peak_bytes == trace.timeline(policy, "function", device=device).peak_bytes
        told = fmt.nbytes(there.peak_bytes)
        for where, text in said_by_the_widget(widget, policy, device).items():
            assert re.search(rf"(?<![\d.]){re.escape(told)}", text), where
            assert not re.search(rf"(?<![\d.]){re.escape(fmt.nbytes(here.peak_bytes))} (?:by|of)", text), where
        kept = screen.shown[-1][0]
        assert f"peak of {told}" in kept
        assert f"peak of {fmt.nbytes(here.peak_bytes)}" not in kept
        assert f", with peaks as on {device}; run" in kept


def test_a_kept_copy_is_of_the_device_that_the_widget_shows(browser, monkeypatch):
    """Chosen by the reader or for the cell: peaks as reports as on it have them, and what is left of it."""
    trace = rm.trace(layers, [f32(257, 257)] * 3, f32(1000, 257))
    screen, widget, named = Screen(), RematWidget(trace, "none"), RematWidget(trace, "none", device="TPU v5e")
    monkeypatch.setattr(live_view, "get_ipython", lambda: screen)
    monkeypatch.setattr(idle_module, "UNIT", float("inf"))  # however slow this machine is
    widget._kept.publish(screen, widget._good)
    widget._publish(widget.report, 0, widget._rendered)
    while widget.prefetch():
        pass
    keys = ("none", "nothing_saveable")
    here, on_tpu, on_gpu = (
        [f"peak of {fmt.nbytes(trace.report(key, device=device).peak_bytes)}" for key in keys]
        for device in (None, "TPU v5e", "H100 SXM")
    )
    assert {*here}.isdisjoint({*on_tpu, *on_gpu})
    assert {*on_tpu}.isdisjoint(on_gpu)

    def kept():
        return screen.shown[-1][0]

    assert all(peak in kept() for peak in here)
    assert "left of" not in kept()
    for device, there in (("TPU v5e", on_tpu), ("H100 SXM", on_gpu)):
        tell(widget, type="device", device=device)
        assert all(peak in kept() for peak in there)
        assert not any(peak in kept() for peak in {*here, *on_tpu, *on_gpu}.difference(there))
        assert f"left of {device}, {fmt.nbytes(devices.usable_bytes(devices.get(device)))}" in kept()
        assert f", with peaks as on {device}; run" in kept()
        assert f"Peaks are as on {device}." in widget._rendered.kept(widget.report)["text/plain"]
    # What is offered by nobody changes nothing.
    count = len(screen.shown)
    tell(widget, type="device", device="<b>")
    assert len(screen.shown) == count
    tell(widget, type="device", device="")
    assert "left of" not in kept()
    assert on_tpu[0] in named._rendered.kept(named.report)["text/html"]


def test_the_widget_and_what_is_kept_note_a_peak_by_the_order_of_a_device(browser, monkeypatch):
    """Around attention layers XLA may recompute all scores at once: far more than one after another."""
    layer = {name: f32(256, 256) for name in "qkvo"}
    trace = rm.trace(attention_layers, [layer] * 4, f32(32, 512, 256))
    policy, device = "dots_with_no_batch_dims_saveable", "H100 SXM"
    screen, widget = Screen(), RematWidget(trace, policy, device=device)
    monkeypatch.setattr(live_view, "get_ipython", lambda: screen)
    widget._kept.publish(screen, widget._good)
    widget._publish(widget.report, 0, widget._rendered)
    noted = html_module.escape(trace.report(policy, "function", device=device).by_order.text)
    tell(widget, type="peak", policy=policy, at="function", device=device)
    assert noted
    assert noted in messages(widget, "peak")[-1]["notes"]
    assert noted in screen.shown[-1][0]
    assert noted not in widget._view["parts"]["notes"]  # which is of no device


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
def ahead(browser, monkeypatch):
    """A kernel that waits for cells, a trace for its widget, and the threads that make reports, with the device."""
    monkeypatch.setattr(idle_module, "_DELAY", 0.01)
    monkeypatch.setattr(idle_module, "UNIT", 60.0)
    kernel, asked, report = Kernel(), [], rm.Trace.report

    def noted(self, *args, device=None, **options):
        asked.append((threading.current_thread(), device))
        return report(self, *args, device=device, **options)

    monkeypatch.setattr(live_view, "get_ipython", lambda: kernel)
    monkeypatch.setattr(rm.Trace, "report", noted)
    yield kernel, rm.trace(layers, [f32(8, 8)] * 3, f32(4, 8)), asked
    forget(kernel)


async def until(is_so):
    for _ in range(3000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


@pytest.mark.parametrize("device", ["TPU v5e", "H100 SXM"])
def test_what_is_kept_for_a_device_is_made_between_cells_and_not_on_the_main_thread(ahead, device):
    """Which has the next cell to run, and for 48 layers would not begin it for seconds."""
    kernel, trace, asked = ahead

    async def session():
        kernel.before("one")
        widget = RematWidget(trace, "none", device=device)
        widget._kept.publish(kernel, widget._good)
        widget._publish(widget.report, 0, widget._rendered)
        in_cell = len(asked)
        assert {thread for thread, _ in asked} == {threading.main_thread()}
        kernel.threads.clear()
        kernel.after()
        keys = {choice.key for choice in trace.choices()}
        await until(lambda: all(f"<code>{key}</code>" in kernel.shown[-1][0] for key in keys - {"as_written"}))
        later = asked[in_cell:]
        assert len([on for _, on in later if on is not None]) >= len(keys) - 1
        assert threading.main_thread() not in {thread for thread, _ in later}
        assert kernel.threads
        assert threading.main_thread() not in kernel.threads

    asyncio.run(session())


def test_what_is_kept_waits_for_a_cell_that_begins_meanwhile(ahead, monkeypatch):
    kernel, trace, asked = ahead
    folded = html.folded

    def first_of_many(*args):
        if not kernel.began:
            kernel.began = True
            kernel.before("two")
        return folded(*args)

    async def session():
        kernel.before("one")
        widget = RematWidget(trace, "none", device="TPU v5e")
        widget._kept.publish(kernel, widget._good)
        kernel.began = False
        monkeypatch.setattr(rendered_module.html, "folded", first_of_many)
        kernel.after()
        await until(lambda: kernel.began)
        widget._idle._worker.join()
        count, shown = len(asked), len(kernel.shown)
        await asyncio.sleep(0.1)
        assert (len(asked), len(kernel.shown)) == (count, shown) == (count, 1)
        kernel.after()
        await until(lambda: "<code>nothing_saveable</code>" in kernel.shown[-1][0])
        assert len(asked) > count

    asyncio.run(session())


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


def test_a_kernel_that_ends_waits_for_what_was_begun_and_begins_nothing_more():
    """A thread in the midst of XLA's code, when Python is taken down around it, could crash it."""
    ran = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=400, check=False)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["begun", "done"], "")
