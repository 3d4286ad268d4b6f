"""The widget's logic, on a trace that is a table of reports: no engine, no kernel, no browser."""

import asyncio
import gc
import re
import threading
import time
import weakref
from dataclasses import replace

import comm
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import devices
from remat_magic.facts import program_text
from remat_magic.records import Choice, Program, ProgramLine, RematError, Site
from remat_magic.views.memory import peak_bar_html
from remat_magic.widget import RematWidget
from remat_magic.widget import idle as idle_module
from remat_magic.widget import widget as widget_module
from remat_magic.widget.idle import IdleTime
from tests.programs import f32
from tests.views_records import EVIL, small

KEYS = ("as_written", "none", "dots_saveable", "nothing_saveable")


class FakeTrace:
    """The surface that the widget uses; ``slow`` seconds are spent on every half."""

    function_name, signature, wrt, default_at = "loss", "loss(x f32[4]) -> f32[]", ("x",), "function"
    names, stale, notes = ("a", "b"), (), ()
    gradients, gradient = (), None
    sites = (Site("layer:4", "layer", 12, "nothing_saveable"), Site("head:9", "head", 1, "none"))
    groups = vmaps = ()
    mesh_devices, postponed, step_name = 1, False, ""

    def __init__(self, slow=0.0, failing=()):
        self.lock, self.slow, self.failing = threading.RLock(), slow, failing
        self.reports, self.asked = {}, []

    def choices(self):
        return tuple(Choice(key, key, f"What {key} means.") for key in KEYS)

    def _check(self, policy, at, namespace):
        if policy in (namespace or {}):
            policy = f"{policy} #2"
        if policy not in KEYS and not policy.startswith(("names(", "mine")):
            raise RematError(f"{policy!r} is not a policy: did you mean 'dots_saveable'?")
        if at not in ("function", "sites", *(site.key for site in self.sites)):
            raise RematError(f"{at!r} is not a site of loss.")
        return policy, at

    def preview(self, policy="as_written", at=None, namespace=None):
        key = self._check(policy, at or self.default_at, namespace)
        with self.lock:
            self.asked.append(("preview", *key))
            if key in self.reports:
                return self.reports[key]
            time.sleep(self.slow)
            return small(
                policy=key[0], at=key[1], complete=False, recomputed=(), backward=Program(), code=f"# {key[0]}"
            )

    def report(self, policy="as_written", at=None, namespace=None):
        key = self._check(policy, at or self.default_at, namespace)
        with self.lock:
            self.asked.append(("report", *key))
            if key[0] in self.failing:
                raise TypeError(f"{EVIL} raised")
            if key not in self.reports:
                time.sleep(self.slow)
                self.reports[key] = small(policy=key[0], at=key[1], code=f"# {key[0]}")
            return self.reports[key]

    def cached(self, policy="as_written", at=None, namespace=None):
        return self.reports.get(self._check(policy, at or self.default_at, namespace))

    def advice(self, policy="as_written", at=None, namespace=None, *, device=None, quick=False):
        return []

    def function(self, policy="as_written", at=None, namespace=None):
        return lambda: self._check(policy, at, namespace)


class FakeComm:
    """A channel that keeps what is sent on it."""

    def __init__(self, **_):
        self.comm_id, self.sent = f"comm{id(self)}", []
        self._reply_subshell_id = None

    def on_msg(self, callback):
        self.callback = callback

    def send(self, data, buffers=None):
        self._reply_subshell_id = "the cell's"
        self.sent.append(data)

    def close(self):
        pass


@pytest.fixture
def browser(monkeypatch):
    """A kernel with a browser that listens."""
    monkeypatch.setattr(comm, "create_comm", FakeComm)
    monkeypatch.setattr(widget_module, "_kernel", object)
    monkeypatch.setattr(idle_module, "UNIT", float("inf"))  # however slow this machine is


@pytest.fixture
def widget(browser):
    widget = RematWidget(FakeTrace())
    yield widget
    widget.close()


def tell(widget, **content):
    """A message from the browser, and the end of what it sets off."""
    widget.comm.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    for worker in workers_of(widget):
        worker.join()


def workers_of(widget):
    panels = (*widget._panels, widget._screen)
    workers = (worker for panel in panels for worker in panel._workers.values())
    return [
        widget._worker,
        *dict.fromkeys(widget._workers.values()),
        widget._screen.searching,
        *dict.fromkeys(workers),
    ]


def test_what_takes_long_is_heard_at_once(widget, monkeypatch):
    """Else the browser takes a kernel that works for one that is gone."""
    done: list[str] = []
    monkeypatch.setattr(
        widget._answering["tried"], "handle", lambda _: done.append(widget.comm.sent[-1]["content"]["type"])
    )
    tell(widget, type="tried", at="function", serial=1)
    assert done == ["heard"]


def views(widget):
    """The views published so far: (policy, complete)."""
    states = [message["state"]["_view"] for message in widget.comm.sent if "_view" in message.get("state", {})]
    return [(state["policy"], state["complete"]) for state in states]


def messages(widget, kind):
    customs = [message["content"] for message in widget.comm.sent if message["method"] == "custom"]
    return [content for content in customs if content["type"] == kind]


def test_it_works_where_there_is_no_kernel():
    trace = FakeTrace()
    widget = RematWidget(trace)
    assert (widget.policy, widget.at, widget.report.policy) == ("as_written", "function", "as_written")
    widget.policy = "dots_saveable"
    assert widget.report is trace.reports["dots_saveable", "function"]
    assert widget.function() == ("dots_saveable", "function")
    assert repr(widget) == "RematWidget(loss, policy='dots_saveable')"
    assert widget._worker._thread is None
    widget.close()


def test_choices_at_the_start():
    trace = FakeTrace()
    widget = RematWidget(trace, "none", "layer:4", title="After In[3]")
    assert trace.asked == [("preview", "none", "layer:4")]  # and what nobody asked for is not traced
    assert (widget.report.policy, widget.report.at) == ("none", "layer:4")
    assert "After In[3]" in widget._frame
    assert all("After In[3]" in text for text in widget._rendered.copy(widget.report).values())
    assert repr(widget) == "RematWidget(loss, policy='none', at='layer:4')"
    with pytest.raises(RematError, match="'nonsense' is not a policy"):
        RematWidget(FakeTrace(), "nonsense")


def test_devices_are_offered_by_one_by_as_many_as_the_mesh_has_and_as_was_asked():
    def offered(**options):
        trace = FakeTrace()
        trace.mesh_devices = options.pop("mesh_devices", 1)
        select = re.search(r'<select [^>]*data-control="device".*?</select>', RematWidget(trace, **options)._frame)[0]
        return re.findall(r'value="([^"]*)"( selected)?>([^<]*)', select)

    every = offered()
    assert [name for name, *_ in every] == ["", *(name for name in devices.names() if name != devices.THIS_CPU), "?"]
    assert every[0] == ("", " selected", "choose one: does it fit?")
    several = [row for row in offered(mesh_devices=8) if row not in every]
    assert [name for name, *_ in several] == [*devices.meshes(8)]
    assert offered(device="tpu V5e:4x4")[-2] == ("TPU v5e:4x4", " selected", "TPU v5e:4x4, 16.9 GB")
    assert offered(device="24 GiB")[-2] == ("24 GiB", " selected", "24 GiB")
    with pytest.raises(RematError, match="such as 'TPU v5e:2x4'"):
        RematWidget(FakeTrace(), device="TPU v5e:3x3")


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


def test_a_widget_begins_with_the_accelerator_that_is_here(browser, monkeypatch):
    """Unless the cell names another."""
    monkeypatch.setattr(devices, "accelerator", lambda: devices.get("H100 SXM"))
    trace = rm.trace(layers, [f32(8, 8)] * 3, f32(4, 8))
    for asked_for, begins_with in ((None, "H100 SXM"), ("TPU v5e", "TPU v5e"), ("", "")):
        frame = RematWidget(trace, "none", device=asked_for)._frame
        assert f'<option value="{begins_with}" selected>' in frame


def test_a_kept_copy_of_what_does_not_fit_says_by_how_much():
    report = replace(small(), peak_bytes=30 * 10**9, peak_by_kind=(("residual", 30 * 10**9),))
    bar = peak_bar_html(report, ("TPU v5e", 16 * 10**9))
    assert "TPU v5e <b>16.0 GB</b>" in bar
    assert 'class="remat-limit" style="left:53.33%"' in bar


@pytest.mark.parametrize(("trait", "value"), [("policy", "nonsense"), ("at", "nowhere")])
def test_a_bad_choice_raises_and_changes_nothing(widget, trait, value):
    widget.policy = "dots_saveable"
    with pytest.raises(RematError, match=value):
        setattr(widget, trait, value)
    assert (widget.policy, widget.at, widget.report.policy) == ("dots_saveable", "function", "dots_saveable")


def test_python_does_what_the_dropdown_does(browser):
    from_python, from_browser = RematWidget(FakeTrace()), RematWidget(FakeTrace())
    from_python.policy = "dots_saveable"
    from_python._worker.join()
    tell(from_browser, type="choose", policy="dots_saveable", at="function", serial=1)
    assert views(from_python) == views(from_browser) == [("dots_saveable", False), ("dots_saveable", True)]
    assert from_python.policy == from_browser.policy == "dots_saveable"
    assert from_python._view == from_browser._view


def test_the_residuals_are_shown_before_the_backward_half(widget):
    tell(widget, type="choose", policy="none", at="function", serial=1)
    assert views(widget) == [("none", False), ("none", True)]
    first = next(message["state"]["_view"] for message in widget.comm.sent if "_view" in message.get("state", {}))
    assert "f32[6,1000]" in first["parts"]["residuals"]
    assert first["meaning"] == "What none means."
    assert first["counts"] == {"values": 4, "notes": 2}


def test_rapid_toggling_ends_on_the_last(browser):
    widget = RematWidget(FakeTrace(slow=0.02))
    keys = [KEYS[number % 4] for number in range(40)] + ["dots_saveable"]
    for serial, key in enumerate(keys, 1):
        content = {"type": "choose", "policy": key, "at": "function", "serial": serial}
        widget.comm.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    widget._worker.join()
    assert (widget.policy, widget.report.policy) == ("dots_saveable", "dots_saveable")
    assert views(widget)[-1] == ("dots_saveable", True)
    assert widget._view["serial"] == len(keys)
    assert len(views(widget)) < len(keys)  # what nobody waits for any more is not traced


@pytest.mark.parametrize(
    ("trait", "value", "ends"),
    [
        ("policy", "as_written", ("as_written", "sites")),  # what was shown before the click: it is taken back
        ("policy", "none", ("none", "sites")),
        ("at", "function", ("dots_saveable", "function")),
        ("at", "layer:4", ("dots_saveable", "layer:4")),
    ],
)
def test_an_assignment_while_a_click_is_traced_has_the_last_word(browser, trait, value, ends):
    """The other trait keeps what was clicked."""
    widget = RematWidget(FakeTrace(slow=0.1))
    content = {"type": "choose", "policy": "dots_saveable", "at": "sites", "serial": 1}
    widget.comm.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    setattr(widget, trait, value)
    widget._worker.join()
    assert (widget.policy, widget.at) == (widget._view["policy"], widget._view["at"]) == ends


def test_names_become_a_policy(widget):
    states = {"a": "save", "b": "offload", "c": "recompute"}
    tell(widget, type="names", names=states, at="function", serial=1)
    assert widget.policy == "names(save=['a'], offload=['b'])"
    assert widget._view["names"] == {"a": "save", "b": "offload", "c": "recompute"}


def test_a_policy_of_the_users_own_is_looked_up(browser):
    mine = {"mine": object()}
    widget = RematWidget(FakeTrace(), namespace=mine)
    tell(widget, type="choose", policy="mine", at="function", serial=1)
    assert widget.policy == "mine #2"  # as the trace calls it
    assert widget.report.policy == "mine #2"
    widget.policy = "none"
    widget.policy = "mine #2"
    assert widget.report.policy == "mine #2"


def test_an_error_is_shown_and_the_last_good_view_stays(widget):
    tell(widget, type="choose", policy="dots_saveable", at="function", serial=1)
    widget.comm.sent.clear()
    tell(widget, type="choose", policy="nonsense", at="function", serial=2)
    (said,) = messages(widget, "say")
    assert said == {"type": "say", "error": True, "serial": 2,
                    "text": "'nonsense' is not a policy: did you mean 'dots_saveable'?"}  # fmt: skip
    assert widget.policy == widget._view["policy"] == "dots_saveable"
    assert widget._view["complete"]
    widget.at = "sites"  # of the policy that is shown, not of the one that failed
    assert (widget.report.policy, widget.report.at) == ("dots_saveable", "sites")


def test_a_policy_that_fails_in_the_backward_half_is_left_again(browser):
    widget = RematWidget(FakeTrace(failing=("none",)))
    tell(widget, type="choose", policy="dots_saveable", at="function", serial=1)
    tell(widget, type="choose", policy="none", at="function", serial=2)
    assert widget.policy == widget._view["policy"] == "dots_saveable"
    assert messages(widget, "say")[-1]["text"] == f"TypeError: {EVIL} raised"  # placed as text, not as HTML


def test_apply(browser):
    seen = []

    def apply(widget):
        seen.append((widget.policy, widget.function()))
        return "`loss` now runs under none."

    widget = RematWidget(FakeTrace(), "none", apply=apply)
    tell(widget, type="apply", serial=0)
    assert seen == [("none", ("none", "function"))]
    assert messages(widget, "say")[-1]["text"] == "`loss` now runs under none."


def test_what_is_chosen_and_applied_at_once_is_applied(browser, monkeypatch):
    """The thread that works choices out may not have come to the last one when the button is pressed."""
    seen = []
    widget = RematWidget(FakeTrace(), "none", apply=lambda widget: seen.append((widget.policy, widget.at)) or "")
    monkeypatch.setattr(widget._worker, "post", lambda wish: None)
    tell(widget, type="choose", policy="dots_saveable", at="function", serial=1)
    assert widget.policy == "none"
    tell(widget, type="apply", serial=1)
    assert seen == [("dots_saveable", "function")]
    # What cannot be looked at is not applied.
    tell(widget, type="choose", policy="nonsense", at="function", serial=2)
    tell(widget, type="apply", serial=2)
    assert seen == [("dots_saveable", "function")]
    assert messages(widget, "say")[-1]["error"]


def test_hello_is_answered_with_all_that_is_known(widget):
    for serial, key in enumerate(KEYS, 1):
        tell(widget, type="choose", policy=key, at="function", serial=serial)
    widget.comm.sent.clear()
    tell(widget, type="hello")
    assert [content["type"] for content in (message["content"] for message in widget.comm.sent)] == [
        "hello",
        *["view"] * 4,
    ]
    assert {content["view"]["policy"] for content in messages(widget, "view")} == set(KEYS)


def test_a_page_that_lost_the_newest_view_gets_it_again(widget):
    """Hello is answered with what that is."""
    widget.policy = "none"
    widget._worker.join()
    tell(widget, type="hello")
    (newest,) = [content["newest"] for content in messages(widget, "hello")]
    assert newest.items() <= widget._view.items()
    assert (newest["policy"], newest["complete"]) == ("none", True)
    widget.comm.sent.clear()
    tell(widget, type="lost")
    (state,) = [message["state"] for message in widget.comm.sent if message["method"] == "update"]
    assert (state["_view"], state["_frame"]) == (widget._view, widget._frame)


def test_big_programs_are_not_laid_out_until_they_are_asked_for(browser, monkeypatch):
    laid_out, lines = [], tuple(ProgramLine(f"v{number} = sin a") for number in range(3000))
    monkeypatch.setattr(program_text, "program", lambda name: laid_out.append(name) or Program(lines, 3000))
    trace = FakeTrace()
    forward, backward = (program_text.LiveProgram(3000, name) for name in ("forward", "backward"))
    trace.reports["none", "function"] = small(policy="none", forward=forward, backward=backward)
    widget = RematWidget(trace, "none")
    kept = widget._rendered.copy(widget.report)
    assert "6,000 equations are not kept in the notebook" in kept["text/html"]
    assert "Saved for the backward pass" in kept["text/plain"]
    assert not laid_out
    tell(widget, type="jaxprs", policy="none", at="function", serial=0)
    (answer,) = messages(widget, "jaxprs")
    assert [len(answer["bodies"][half]) for half in ("forward", "backward")] == [30, 30]
    assert laid_out == ["forward", "backward"]


def test_the_next_message_may_come_on_any_subshell(widget):
    widget.policy = "none"
    widget._worker.join()
    assert not hasattr(widget.comm, "_reply_subshell_id")


def test_prefetching_fills_in_the_others(widget):
    widget.policy = "none"
    widget._worker.join()
    widget.comm.sent.clear()
    while widget.prefetch():
        pass
    assert {content["view"]["policy"] for content in messages(widget, "view")} == {*KEYS} - {"none"}
    assert widget.policy == "none"
    assert views(widget) == []


class Screen:
    """The part of a shell that shows outputs; itself its own publisher."""

    def __init__(self):
        self.display_pub, self.shown = self, []

    def publish(self, data, transient, update=False):
        self.shown.append((data["text/html"], update))


def test_prefetching_stops_where_it_would_be_felt(browser, monkeypatch):
    monkeypatch.setattr(idle_module, "UNIT", -1.0)  # every retrace takes longer
    trace = FakeTrace()
    widget = RematWidget(trace, "none")
    assert widget.prefetch() is False
    assert len(trace.reports) == 1
    assert widget.prefetch() is False
    assert len(trace.reports) == 1


def test_prefetching_skips_what_fails(browser):
    widget = RematWidget(FakeTrace(failing=("none",)))
    while widget.prefetch():
        pass
    assert {policy for policy, _ in widget._live.trace.reports} == {*KEYS} - {"none"}
    assert messages(widget, "say") == []


def test_close_lets_go_of_everything(browser):
    trace = FakeTrace()
    widget = RematWidget(trace, apply=lambda _: "", namespace={"x": 1})
    widget.policy = "none"
    widget._worker.join()
    layout, gone = widget.layout, weakref.ref(trace)
    widget.close()
    widget.close()  # twice is once
    del trace
    gc.collect()
    assert gone() is None
    assert layout.comm is None
    assert (widget._rendered.complete(), widget._view, widget._frame) == ({}, {}, "")
    assert repr(widget) == "RematWidget(closed)"
    for name in ("report", "function"):
        with pytest.raises(RematError, match="closed"):
            getattr(widget, name)
    with pytest.raises(RematError, match="closed"):
        widget.policy = "dots_saveable"


class FakeEvents:
    def __init__(self):
        self.callbacks = {"pre_run_cell": [], "post_run_cell": []}

    def register(self, event, callback):
        self.callbacks[event].append(callback)

    def unregister(self, event, callback):
        self.callbacks[event].remove(callback)


class FakeShell:
    def __init__(self):
        self.events = FakeEvents()

    def before(self, cell_id):
        for callback in self.events.callbacks["pre_run_cell"]:
            callback(type("Info", (), {"cell_id": cell_id}))

    def after(self):
        for callback in self.events.callbacks["post_run_cell"]:
            callback(None)


def test_a_cell_that_runs_again_closes_its_widgets():
    shell = FakeShell()
    idle = IdleTime(shell)
    shell.before("one")
    first, kept = RematWidget(FakeTrace()), RematWidget(FakeTrace())
    idle.keep(first, None)  # the running cell's
    idle.keep(kept, "two")
    shell.after()
    shell.before("three")
    assert (first._live.closed, kept._live.closed) == (False, False)
    shell.before("one")
    assert first._live.closed
    assert not kept._live.closed
    idle.stop()
    assert shell.events.callbacks == {"pre_run_cell": [], "post_run_cell": []}


def test_what_was_chosen_to_be_fitted_stays_with_the_cell_that_runs_again(browser, monkeypatch):
    """And is carried nowhere else; what the widget began with is looked up anew."""
    shell = FakeShell()
    idle = IdleTime(shell)
    monkeypatch.setattr(widget_module, "idle_time", lambda _: idle)
    for chosen, then in (("TPU v5e", "TPU v5e"), ("", ""), ("24 GiB", "24 GiB")):
        shell.before("one")
        tell(RematWidget(FakeTrace()), type="device", device=chosen)
        shell.after()
        shell.before("two")
        assert RematWidget(FakeTrace())._live.device == ""
        shell.after()
        shell.before("one")
        assert RematWidget(FakeTrace())._live.device == then
        assert RematWidget(FakeTrace(), device="H200")._live.device == "H200"  # which the cell says now
        shell.after()
    idle.stop()


class Prefetching:
    """Something that prefetches ``times`` times."""

    chosen_device = None

    def __init__(self, times):
        self.left, self.closed = times, False

    def prefetch(self):
        self.left -= 1
        return self.left > 0

    def close(self):
        self.closed = True


def test_prefetching_happens_between_cells_only(monkeypatch):
    monkeypatch.setattr(idle_module, "_DELAY", 0.03)
    monkeypatch.setattr(idle_module, "_PAUSE", 0.001)
    shell = FakeShell()

    async def session():
        idle = IdleTime(shell)
        older, newer = Prefetching(3), Prefetching(2)
        shell.before("one")
        idle.keep(older, "one")
        idle.keep(newer, "one")
        await asyncio.sleep(0.05)
        assert (older.left, newer.left) == (3, 2)  # a cell is running
        shell.after()
        shell.before("two")  # the next of "Run All": the timer is cancelled
        await asyncio.sleep(0.05)
        assert (older.left, newer.left) == (3, 2)
        shell.after()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if older.left == 0:
                break
        assert (older.left, newer.left) == (0, 0)
        await asyncio.sleep(0.05)
        assert (older.left, newer.left) == (0, 0)  # nothing runs on
        idle.resume(older)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if older.left < 0:
                break
        assert older.left == -1
        idle.stop()

    asyncio.run(session())
