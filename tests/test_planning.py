"""What the tab Choices answers: what is shown is what the trace itself says of plans, single values and edits."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import units
from remat_magic.records import Plan, Report
from remat_magic.views.plans import edit_html, flip_key, plan_html, plan_meaning, what_if_html
from remat_magic.widget import RematWidget
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import Choices, Request
from tests.widget_frame import Browser


def loss(Ws, x):
    def step(x, W):
        y = jnp.tanh(x @ W)
        return jnp.sin(y) * y, None

    return jax.lax.scan(step, x, Ws)[0].sum()


ARGUMENTS = (jax.ShapeDtypeStruct((8, 16, 16), "float32"), jax.ShapeDtypeStruct((4, 16), "float32"))


@pytest.fixture
def trace():
    return rm.trace(loss, *ARGUMENTS)


@pytest.fixture
def browser():
    return Browser()


@pytest.fixture
def planning(trace, browser):
    live = LiveTrace(trace)
    panel = Choices(live, browser, browser.choose)
    yield panel
    live.close()
    panel.close()


def ask(planning, kind, **more):
    planning.handle(Request({"type": kind, "policy": "nothing_saveable", "at": "function", **more}))


def test_a_plan_is_shown_by_its_budget(trace):
    widget = RematWidget(trace, at="function")
    plan = trace.plan(0.5, "function")
    widget._choose_plan(plan, 1)
    widget._worker.join()
    view = widget._render(trace.report(plan))
    # The key is for programs; its label, and what stands in place of code, are for readers.
    assert view["policy"] == plan.policy == f"plan({plan.budget_bytes} at {plan.at})".replace(" at function", "")
    assert view["label"] == f"plan within {units.nbytes(plan.budget_bytes)}"
    assert view["unpasted"].startswith("a plan needs an edit of your source")
    assert view["planned"]  # for which a button leads to the edit
    assert not widget._render(trace.report("none", "function"))["planned"]
    assert view["label"] in view["parts"]["totals"] or plan.policy not in view["parts"]["totals"]
    assert widget._render(trace.report("none", "function"))["unpasted"] == "your source as it is"
    # Another choice for the same words is another policy: its own figures, and a label that tells it apart.
    other = dataclasses.replace(plan, names=plan.names[:1])
    widget._choose_plan(other, 2)
    widget._choose_plan(plan, 3)
    assert [*widget._live.plans()] == [plan.policy, f"{plan.policy} #2"]
    widget.policy = f"{plan.policy} #2"
    assert widget.report.saved_bytes == trace.report(other).saved_bytes != trace.report(plan).saved_bytes
    assert widget._render(widget.report)["label"] == f"{plan.label} #2"
    widget.close()


def test_a_click_does_what_it_says(planning, browser, trace):
    ask(planning, "what-if")
    html = browser.of("what-if")["html"]
    rows = trace.what_if("nothing_saveable", "function")
    assert len(re.findall("data-flip=", html)) == sum(any((r.saved_bytes, r.recomputed_flops, r.seconds)) for r in rows)
    ask(planning, "flip", flip=flip_key(rows[0]), serial=3)
    planning._workers["flip"].join()
    ((plan, serial),) = browser.chosen
    assert serial == 3
    before = trace.report(rows[0].against, None if isinstance(rows[0].against, Plan) else "function")
    after = trace.report(plan)
    # The figures of the row are those of JAX.
    assert after.saved_bytes - before.saved_bytes == rows[0].saved_bytes
    assert after.recomputed_flops - before.recomputed_flops == rows[0].recomputed_flops


def test_a_click_on_an_older_list_chooses_nothing_else(planning, browser, trace):
    """The list that the browser shows may be older than the newest: a row's place in it says nothing."""
    ask(planning, "what-if")
    browser.of("what-if")
    ask(planning, "what-if", policy="everything_saveable")
    planning._workers["what-if"].join()
    clicked = trace.what_if("nothing_saveable", "function")[0]
    ask(planning, "flip", flip=flip_key(clicked), serial=3)
    planning._workers["flip"].join()
    assert browser.chosen == []
    assert browser.of("flip")["error"] == ("That list is outdated: open it again, and choose from the new one")
    again = trace.what_if("everything_saveable", "function")[0]
    ask(planning, "flip", flip=flip_key(again), serial=4)
    planning._workers["flip"].join()
    assert [plan for plan, _ in browser.chosen] == [again.plan]


def test_the_edit_is_a_diff_that_was_verified(planning, browser, trace):
    ask(planning, "edit", policy="dots_saveable")
    html = browser.of("edit")["html"]
    assert trace.edit("dots_saveable", "function").verified
    assert "verified by tracing it" in html
    assert "+@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)" in html


def test_closed_it_answers_nothing(planning, browser):
    planning._live.close()
    planning.close()
    for kind in ("plan", "what-if", "edit"):
        ask(planning, kind, budget=1)
        planning._workers[kind].join()
    assert browser.messages == browser.chosen == []


# ------------------------------------------------------------------------------------------------------------ the views


# What is recomputed, the bound, and what is said of both: what is proven best the status says.
PROVEN = [
    (10, 10, "10 FLOPs."),
    (10, 5, "10 FLOPs (any choice of names: at least 5 FLOPs)."),
    (10, 0, "10 FLOPs."),  # as for a peak on a device, where no bound is known
]


@pytest.mark.parametrize(("flops", "bound", "text"), PROVEN)
def test_a_plan_says_its_budget_and_what_is_proven(flops, bound, text):
    plan = Plan("f", "function", "dots_saveable", 100, 90, flops, bound, of="peak")
    assert plan_meaning(plan) == "Recompute as little as possible within 100 B of an estimated peak."
    assert f"recomputes {text}" in plan_html(plan)
    assert "no value needs a name" in plan_html(plan)


def test_nothing_to_choose_is_said():
    assert "No single value" in what_if_html(())
    assert Report("none", "function").policy == "none"
    assert "There is nothing to edit" in edit_html(rm.trace(loss, *ARGUMENTS).edit("as_written"))
