"""Where XLA takes long to say how it spreads values, it is asked when it is told to, and nothing is mixed."""

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic.engine import primal
from remat_magic.records import RematError
from remat_magic.views.plans import plan_meaning, plan_sentences
from remat_magic.widget import RematWidget
from remat_magic.widget.panels import Request
from tests.programs import f32
from tests.test_widget import browser, messages, tell, workers_of  # noqa: F401 - a fixture
from tests.views_records import plain

LAYERS, WIDTH, BATCH = 2, 32, 64
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
    monkeypatch.setattr(primal, "_LARGE", 5)
    return traced(), at_once


FIGURES = (
    *("saved_bytes", "peak_bytes", "peak_by_kind", "forward_flops", "backward_flops"),
    *("communicated_bytes", "of_devices", "notes"),
)


@pytest.mark.slow
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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------------------- in the widget


def asked(widget):
    """Press the widget's button, and wait for what comes of it."""
    tell(widget, type="one-device")
    for worker in workers_of(widget):
        worker.join(600)


@pytest.mark.slow
def test_the_widget_asks_when_it_is_told_to(browser, long):  # noqa: F811
    trace, at_once = long
    widget = RematWidget(trace, at="function")
    tell(widget, type="hello")
    plan = trace.plan("60%", "function")
    widget._choose_plan(plan, 4)
    widget._worker.join()
    key = widget.policy
    assert widget.report.of_devices == TOGETHER
    assert TOGETHER in widget._view["parts"]["totals"]
    assert 'data-action="one-device"' in widget._frame
    asked(widget)
    assert 'data-action="one-device"' not in widget._frame
    assert (widget.policy, widget.at, widget.plan) == (key, "function", plan)  # the reader's own choice stays
    assert widget.report.of_devices == ONE
    assert widget.report.saved_bytes == at_once.report(plan).saved_bytes
    assert {ONE in view["parts"]["totals"] for view in widget._rendered.complete().values()} == {True}
    frame = widget._frame
    asked(widget)  # twice is once
    assert widget._frame == frame
    widget.close()


def test_what_is_worked_out_meanwhile_is_not_shown_after(browser, long):  # noqa: F811
    """A choice that is looked ahead at when the widget turns is of all devices together, and so is a table."""
    widget = RematWidget(long[0], at="function")
    step, panel = widget._prefetch.step, next(panel for panel in widget._panels if panel.key == "choices")

    def meanwhile(result):
        widget.comm.sent.clear()
        asked(widget)
        return result

    widget._prefetch.step = lambda *args: meanwhile(step(*args))
    widget.prefetch()
    assert not [message for message in messages(widget, "view") if TOGETHER in message["view"]["parts"]["totals"]]
    assert {ONE in view["parts"]["totals"] for view in widget._rendered.complete().values()} == {True}
    panel._work(Request({"type": "tried", "policy": "none", "at": "function", "device": ""}))
    assert messages(widget, "tried") == []  # which the old panel has worked out
    widget.close()


def test_the_widget_says_why_xla_cannot_be_asked(browser, long, monkeypatch):  # noqa: F811
    widget = RematWidget(long[0], at="function")
    monkeypatch.setattr("remat_magic._jax.propagated", lambda *_: 1 / 0)
    asked(widget)
    (said,) = messages(widget, "say")
    assert said["error"]
    assert "division by zero" in said["text"]
    assert 'data-action="one-device"' in widget._frame  # to be tried again
    assert widget.report.of_devices == TOGETHER
    widget.close()
