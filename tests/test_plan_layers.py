"""Equal layers decided together, although each is traced by itself: what one expression makes goes one way."""

import itertools
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.planning.equal_layers import equal_layers
from remat_magic.planning.planner import planner
from remat_magic.records import Plan, RematError
from tests.plan_helpers import BUILT_IN, MODELS_AT, PLACES, as_reckoned, traced
from tests.programs import KINDS, f32
from tests.test_what_if import is_what_jax_does


def layers(weights, x):
    """A loop that JAX unrolls: each of its expressions makes a value in each of three layers."""
    for w in weights:
        h = x @ w
        x = jnp.tanh(jnp.sin(h)) * h
    return (x**2).sum()


ARGS = ([f32(4, 4)] * 3, f32(2, 4))


def groups(trace, at="function"):
    """The names of all values that could be saved, by what makes them."""
    found = defaultdict(set)
    for value in planner(trace.facts, at, False).every_value().values():
        found[value.origin].add(value.key)
    return list(found.values())


def budgets(trace, at):
    least, most = (trace.preview(key, at).saved_bytes for key in ("nothing_saveable", "none"))
    return [int(least + part * max(most - least, 0)) for part in (0.0, 0.3, 0.6, 0.9)]


# Of the programs that have no site one of a kind; each of the others at its sites.
@pytest.mark.parametrize(
    ("name", "at"),
    [pytest.param(name, at, marks=() if at == "sites" or name in KINDS else pytest.mark.slow) for name, at in PLACES],
)
def test_a_plan_is_what_jax_does(name, at):
    trace = traced(name)
    for budget in budgets(trace, at):
        plan, better = trace.plan(budget, at, together=True), trace.plan(budget, at)
        assert plan.saved_bytes <= budget
        # Each choice of groups is one of values, so that the bound of these holds, and the plan is no better.
        assert better.bound <= plan.bound <= plan.recomputed_flops
        report = trace.report(plan)
        assert (plan.saved_bytes, plan.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
        if plan.predicted_bytes is not None and as_reckoned(trace, at):
            assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)


@pytest.mark.parametrize(("model", "at"), MODELS_AT)
def test_models(model, at):
    trace = traced(model)
    if (at == "sites" and not trace.engine.sites) or not as_reckoned(trace, at):
        return
    each = planner(trace.facts, at, False)
    alike = equal_layers(each.every_value().values(), each.parts)
    named = 0
    for budget in budgets(trace, at):
        plan = trace.plan(budget, at, together=True)
        keys = {value.key for value in plan.names}
        # In all or in none, as far as they are read: the last layer may have a value that no gradient needs.
        assert each.graph.used({name for group in alike if keys & {*group} for name in group}) == keys
        named += len(keys)
        assert plan.gap <= 0.011
        if plan.predicted_bytes is not None:
            assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)
    assert named
    for key in BUILT_IN:
        report = trace.report(key, at)
        plan = trace.plan(report.saved_bytes, at, together=True)
        assert plan.saved_bytes <= report.saved_bytes
        assert plan.recomputed_flops <= report.recomputed_flops


def test_no_choice_of_groups_is_better():
    trace = rm.trace(layers, *ARGS)
    graph = planner(trace.facts, "function", False).graph
    names = groups(trace)
    assert [len(each) for each in names].count(3) >= 4
    assert len(names) <= 12
    choices = [
        graph.predict(frozenset().union(*some))
        for count in range(len(names) + 1)
        for some in itertools.combinations(names, count)
    ]
    choices += [(r.saved_bytes, r.recomputed_flops) for r in (trace.report(key, "function") for key in BUILT_IN)]
    apart = 0
    for budget in sorted({saved + more for saved, _ in choices for more in (0, 32)}):  # a value of one layer takes 32
        best = min(flops for saved, flops in choices if saved <= budget)
        plan = trace.plan(budget, "function", together=True, gap=0.0)
        assert plan.recomputed_flops == best
        assert plan.bound <= best
        assert trace.plan_bound(budget, "function", together=True).bound <= best
        apart += trace.plan(budget, "function", gap=0.0).recomputed_flops < best
    assert apart  # where some layers' values fit, and all do not
    points = trace.frontier(9, "function", together=True)
    for point in points:
        assert point.recomputed_flops >= min(flops for saved, flops in choices if saved <= point.budget_bytes)
        assert point.bound <= min(flops for saved, flops in choices if saved <= point.budget_bytes)


def test_steps_of_one_expression_are_told_apart():
    """Each of gelu's products has a group of its own, of as many values as there are layers."""

    def fun(weights, x):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return x.sum()

    trace = rm.trace(fun, *ARGS)
    rows = trace.what_if("nothing_saveable", "function", device="H100 SXM", together=True)
    products = [row for row in rows if row.value.primitive == "mul"]
    assert len(products) >= 4
    assert {row.count for row in products} <= {2, 3}  # the last layer's are not all needed
    each = {value.key: value for value in planner(trace.facts, "function", False).every_value().values()}
    assert {row.value.alike for row in products} == {sum(v.origin == products[0].value.origin for v in each.values())}


def test_layers_of_a_library():
    """Of its values a line of the library is known, if none of the user's."""
    made = compile(
        "def fun(weights, x):\n    for w in weights:\n        x = (x @ w) * 2.0\n    return (x ** 2).sum()\n",
        str(Path(jax.__file__).parent.parent / "some_library" / "model.py"),
        "exec",
    )
    space = {}
    exec(made, space)
    trace = rm.trace(space["fun"], *ARGS)
    values = planner(trace.facts, "function", False).every_value().values()
    assert not any(value.source for value in values)
    assert [value.primitive for value in values].count("mul") == 3
    rows = trace.what_if("nothing_saveable", "function", device="H100 SXM", together=True)
    assert max(row.count for row in rows) == 3


def test_a_plan_says_how_it_was_made():
    trace = rm.trace(layers, *ARGS)
    budget = budgets(trace, "function")[1]
    plan = trace.plan(budget, together=True)
    assert plan.together
    assert plan.names
    assert plan.policy == f"plan({budget}, equal layers together)"
    assert "the same in equal layers" in plan.status
    assert Plan.from_json(plan.to_json()) == plan
    assert not trace.plan(budget).together
    assert "equal layers" not in trace.plan(budget).status
    data = plan.to_dict()
    del data["together"]  # as files had it before
    assert not Plan.from_dict(data).together
    with pytest.raises(RematError, match="give one of these, not both"):
        trace.plan(budget, separately=True, together=True)


def test_seconds_and_the_host_too():
    trace = rm.trace(layers, *ARGS)
    # To a host that is reached at once goes what may not stay on the device.
    there = {"device": "H100 SXM"}  # whose peak is lowest without a checkpoint: the values are made again anyway
    for budget, more in (
        ("90%", {"cost": "seconds"} | there),
        (0, {"offload": "1000000 GB/s"} | there),
        ("90%", {"of": "peak"}),
    ):
        plan = trace.plan(budget, "function", together=True, **more)
        keys = {value.key for value in plan.names}
        assert keys
        moved = {value.key for value in plan.names if value.offloaded}
        assert bool(moved) == ("offload" in more)
        assert all(len(group) == 1 or (keys & group) in (set(), group) for group in groups(trace))
        assert all(len(group) == 1 or (moved & group) in (set(), group) for group in groups(trace))
        assert trace.report(plan).saved_bytes == plan.saved_bytes


def test_the_source_can_say_it():
    """One name at one expression does it, and the edited text saves just what was planned."""
    trace = rm.trace(jax.checkpoint(layers), *ARGS)
    plan = trace.plan(budgets(trace, "function")[2], together=True)
    edit = trace.edit(plan)
    assert edit.verified
    assert len(plan.names) == 3 * len(edit.names) > 0


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_what_if(policy):
    trace = rm.trace(layers, *ARGS)
    each = trace.what_if(policy, "function", device="H100 SXM")
    rows = trace.what_if(policy, "function", device="H100 SXM", together=True)
    assert sum(row.count for row in rows) == len(each)
    assert {(row.change, row.value.origin, row.count) for row in rows} == {
        (change, origin, len([*same]))
        for (change, origin), same in itertools.groupby(
            sorted(each, key=lambda row: (row.change, repr(row.value.origin))),
            key=lambda row: (row.change, row.value.origin),
        )
    }
    for row in rows:
        assert is_what_jax_does(trace, "function", row)
        if row.count > 1 and row.plan.names:
            assert row.plan.policy.endswith(f" x{row.count}")
