"""Where XLA takes long to say how it spreads values, it is asked in the background, and nothing is mixed meanwhile."""

import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic.engine import primal
from remat_magic.engine.engine import Engine
from remat_magic.records import RematError
from remat_magic.views.plan import plan_meaning, plan_sentences
from remat_magic.views.text import plain
from remat_magic.widget import RematWidget
from tests.programs import f32
from tests.test_widget import browser, messages, tell, workers_of  # noqa: F401 - a fixture

LAYERS, WIDTH, BATCH = 3, 32, 64
TOGETHER, ONE = "of all 8 devices together", "of one of 8 devices"


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def step(ws, x):
    value, gradient = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient), value


def traced():
    function = jax.jit(step, in_shardings=(P("model"), P("data")))
    with jax.set_mesh(rm.mesh("data=4,model=2")):
        return rm.trace(function, [f32(WIDTH, WIDTH)] * LAYERS, f32(BATCH, WIDTH))


@functools.cache
def asked_at_once():
    trace = traced()
    trace.report()  # asks XLA
    return trace


@pytest.fixture
def long(monkeypatch):
    """A trace of a program that takes long to ask about, and the same with XLA asked at once."""
    at_once = asked_at_once()
    monkeypatch.setattr(primal, "_MOST_ASKED", 5)
    return traced(), at_once


FIGURES = (
    *("saved_bytes", "peak_bytes", "peak_by_kind", "forward_flops", "backward_flops"),
    *("communicated_bytes", "of_devices", "notes"),
)


def test_asked_later_xla_says_the_same(long):
    trace, at_once = long
    assert (trace.postponed, at_once.postponed, at_once.of_one_device()) == (True, False, at_once)
    (note,) = (note for note in trace.notes if note.kind == "devices-together")
    assert "more than 5 operations, which takes long; trace.of_one_device() asks all the same" in note
    report = trace.report("none", "function")
    assert report.of_devices == TOGETHER
    assert "trace.of_one_device()" in plain(report)
    one = trace.of_one_device()
    assert (one.postponed, one.gradient, one.function_name) == (False, trace.gradient, "loss")
    for policy in ("none", "nothing_saveable", "dots_saveable"):
        now, wanted = one.report(policy, "function"), at_once.report(policy, "function")
        assert [getattr(now, figure) for figure in FIGURES] == [getattr(wanted, figure) for figure in FIGURES]
        assert now.of_devices == ONE
        assert trace.report(policy, "function").of_devices == TOGETHER
    assert one.step.parameter_bytes == at_once.step.parameter_bytes
    assert one.of_gradient("none").report().of_devices == ONE  # what is made of it asks, too
    assert {row.of_devices for row in one.compare(["none"])} == {ONE}


def test_a_plan_says_whose_bytes_it_counts_and_holds_for_both(long):
    trace, _ = long
    plan = trace.plan("60%", "function")
    one = trace.of_one_device()
    assert (plan.of_devices, one.plan("60%", "function").of_devices) == (TOGETHER, ONE)
    assert plan_meaning(plan).endswith(f"of saved bytes, {TOGETHER}.")
    assert TOGETHER in plan_sentences(plan)[0]
    assert one.report(plan).of_devices == ONE
    assert 0 < one.report(plan).saved_bytes < trace.report(plan).saved_bytes
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan


def test_where_xla_cannot_be_asked_of_one_device_says_why(long, monkeypatch):
    trace, _ = long
    monkeypatch.setattr("remat_magic._jax.propagated", lambda *_: 1 / 0)
    with pytest.raises(RematError, match="XLA cannot be asked how loss is spread over the devices: .*division by zero"):
        trace.of_one_device()
    assert trace.report().of_devices == TOGETHER


@pytest.fixture
def held(monkeypatch):
    """XLA does not answer before this is set."""
    go, ask = threading.Event(), Engine.of_one_device

    def waits(engine):
        assert go.wait(600)
        return ask(engine)

    monkeypatch.setattr(Engine, "of_one_device", waits)
    yield go
    go.set()


def notes_of(widget):
    return widget._view["parts"]["notes"]


def test_the_widget_turns_when_xla_has_answered(browser, long, held):  # noqa: F811
    trace, at_once = long
    widget = RematWidget(trace, at="function")
    tell(widget, type="hello")
    tell(widget, type="choose", policy="nothing_saveable", at="function", serial=3)
    plan = trace.plan("60%", "function")
    widget._choose_plan(plan, 4)
    widget._worker.join()
    key = widget.policy
    assert widget.report.of_devices == TOGETHER
    assert "XLA is being asked in the background" in notes_of(widget)
    assert TOGETHER in widget._view["parts"]["totals"]
    assert messages(widget, "anew") == []
    held.set()
    widget._xla_worker.join(600)
    for worker in workers_of(widget):
        worker.join()
    assert (widget.policy, widget.at) == (key, "function")  # the reader's own choice, and none of the first
    assert widget.plan == plan
    assert widget.report.of_devices == ONE
    assert widget.report.saved_bytes == at_once.report(plan).saved_bytes
    assert ONE in widget._view["parts"]["totals"]
    assert "XLA" not in notes_of(widget)
    assert len(messages(widget, "anew")) == 1
    assert {ONE in view["parts"]["totals"] for view in widget._rendered.complete().values()} == {True}
    tell(widget, type="choose", policy="none", at="function", serial=9)
    assert widget.report.saved_bytes == at_once.report("none", "function").saved_bytes
    widget.close()


def test_what_was_worked_out_before_is_not_shown_after(browser, long, held):  # noqa: F811
    """A table that is on its way when the widget turns is of all devices together."""
    trace, _ = long
    widget = RematWidget(trace, at="function")
    begun, go = threading.Event(), threading.Event()
    compare = next(panel for panel in widget._panels if panel.key == "compare")
    compared = compare._compared

    def slow(request):
        begun.set()
        html = compared(request)
        assert go.wait(600)
        return html

    compare._compared = slow
    request = {"type": "compare", "policy": "none", "at": "function", "device": "", "width": 680}
    widget.comm.callback({"content": {"data": {"method": "custom", "content": request}}, "buffers": []})
    assert begun.wait(600)
    held.set()
    widget._xla_worker.join(600)
    go.set()
    for worker in workers_of(widget):
        worker.join()
    assert [message for message in messages(widget, "compare") if not message.get("unfinished")] == []
    tell(widget, **request)
    (message,) = [message for message in messages(widget, "compare") if not message.get("unfinished")]
    assert ONE in message["html"]
    assert TOGETHER not in message["html"]
    widget.close()


def test_what_is_looked_ahead_at_meanwhile_is_not_shown_after(browser, long, held):  # noqa: F811
    widget = RematWidget(long[0], at="function")
    ahead = widget._prefetch.step

    def slow(*args):
        found = ahead(*args)
        held.set()
        widget._xla_worker.join(600)
        return found

    widget._prefetch.step = slow
    widget.prefetch()
    for worker in workers_of(widget):
        worker.join()
    assert {ONE in view["parts"]["totals"] for view in widget._rendered.complete().values()} == {True}
    assert not [message for message in messages(widget, "view") if TOGETHER in message["view"]["parts"]["totals"]]
    widget.close()


def test_places_that_are_tried_meanwhile_are_not_shown_after(browser, long, held, monkeypatch):  # noqa: F811
    widget = RematWidget(long[0], at="function")
    compare = next(panel for panel in widget._panels if panel.key == "compare")
    offer = type(compare._live).offer

    def slow(live, plans):
        offer(live, plans)
        held.set()
        widget._xla_worker.join(600)

    monkeypatch.setattr(type(compare._live), "offer", slow)
    tell(widget, type="places", policy="none", at="function", device="", width=680)
    turned = next(number for number, sent in enumerate(widget.comm.sent) if "anew" in str(sent.get("content")))
    after = [sent["content"] for sent in widget.comm.sent[turned:] if sent["method"] == "custom"]
    assert not [message for message in after if TOGETHER in message.get("html", "")]
    assert not compare._found or compare._found.rows[0].of_devices == ONE
    widget.close()


def test_a_choice_of_no_use_does_not_end_the_asking(browser, long, held):  # noqa: F811
    """The worker takes it back in its time."""
    widget = RematWidget(long[0], at="function")
    widget._wishes.wish("no_such_policy", "function", 9, lambda _: None)
    held.set()
    widget._xla_worker.join(600)
    for worker in workers_of(widget):
        worker.join()
    assert widget.report.of_devices == ONE
    assert len(messages(widget, "anew")) == 1
    widget.close()


def test_the_widget_says_why_xla_cannot_be_asked(browser, long, held, monkeypatch):  # noqa: F811
    trace, _ = long
    widget = RematWidget(trace, at="function")
    monkeypatch.setattr("remat_magic._jax.propagated", lambda *_: 1 / 0)
    held.set()
    widget._xla_worker.join(600)
    (said,) = messages(widget, "say")
    assert said["error"]
    assert "division by zero" in said["text"]
    assert "is being asked" not in notes_of(widget)
    assert widget.report.of_devices == TOGETHER
    widget.close()


def test_a_widget_that_is_closed_meanwhile_stays_closed(browser, long, held):  # noqa: F811
    widget = RematWidget(long[0], at="function")
    channel = widget.comm
    widget.close()
    channel.sent.clear()
    held.set()
    widget._xla_worker.join(600)
    assert repr(widget) == "RematWidget(closed)"
    assert channel.sent == []


def test_where_nobody_looks_nothing_is_asked(long, monkeypatch):
    monkeypatch.setattr(Engine, "of_one_device", lambda _: 1 / 0)
    widget = RematWidget(long[0], at="function")
    assert widget._xla_worker._thread is None
    assert widget.report.of_devices == TOGETHER
    widget.close()
