"""Plans: what is promised is what JAX does, and no choice is better."""

import dataclasses
import itertools
import json
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax
from remat_magic.planning.graph_building import build
from remat_magic.planning.kept_copies import kept_copies
from remat_magic.planning.planner import Planner, planner
from remat_magic.planning.problem import Problem
from remat_magic.records import Plan, PlannedValue, RematError
from tests.benchmarks import models, named_models
from tests.plan_helpers import (
    BUILT_IN,
    EACH_PLACE,
    INEXACT,
    MODELS_AT,
    as_reckoned,
    recurrent,
    small_or_named,
    traced,
    transformer,
)
from tests.programs import KINDS, PROGRAMS, f32
from tests.volume import usually


def applied(trace, names, at):
    """JAX's own figures if just these names are saved."""
    parts = trace.engine.dissect(at)
    if not names:
        report = trace.report("nothing_saveable", at)
    else:
        values = tuple(PlannedValue(name, 0) for name in sorted(names))
        fingerprint = parts.naming.fingerprint
        draft = Plan(trace.function_name, parts.at, "test", 0, 0, 0, 0, names=values, fingerprint=fingerprint)
        report = trace.report(draft)
    return report.saved_bytes, report.recomputed_flops


# ----------------------------------------------------------------------------------- what is promised is what JAX does


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_a_plan_is_what_jax_does(name, at):
    trace = traced(name)
    least = trace.preview("nothing_saveable", at).saved_bytes
    most = trace.preview("none", at).saved_bytes
    for part in (0.0, 0.3, 0.6, 0.9):
        budget = int(least + part * max(most - least, 0))
        plan = trace.plan(budget, at)
        assert plan.saved_bytes <= budget
        assert plan.bound <= plan.recomputed_flops
        report = trace.report(plan)
        assert (plan.saved_bytes, plan.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
        if plan.predicted_bytes is not None and as_reckoned(trace, at):
            assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)


@pytest.mark.parametrize("name", usually(sorted({*PROGRAMS} - INEXACT), *{*KINDS} - INEXACT))
def test_any_choice_of_names_does_what_is_reckoned(name):
    trace = traced(name)
    if not as_reckoned(trace, "function"):
        return
    graph, names = build(trace.engine.dissect("function")), list(trace.engine.dissect("function").naming.values)
    dice = random.Random(name)
    for choice in [(), names, *(dice.sample(names, dice.randint(0, len(names))) for _ in range(3))]:
        used = graph.used(choice)
        assert graph.predict(choice) == graph.predict(used) == applied(trace, used, "function")


@pytest.mark.parametrize(("model", "at"), MODELS_AT)
def test_models_are_planned_exactly(model, at):
    trace = traced(model)
    if (at == "sites" and not trace.engine.sites) or not as_reckoned(trace, at):
        return
    least = trace.preview("nothing_saveable", at).saved_bytes
    most = trace.preview("none", at).saved_bytes
    for part in (0.2, 0.5):
        plan = trace.plan(int(least + part * (most - least)), at)
        assert plan.names
        assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)
        assert plan.gap <= 0.011
        assert sum(value.nbytes for value in plan.names) <= plan.saved_bytes
        assert all(value.source is not None for value in plan.names)


# ------------------------------------------------------------------------------------------------- no choice is better


@pytest.mark.parametrize(
    "name", ["three_layers", "named_tanh", "scanned_relu", "mixed_precision", "scanned_checkpoint"]
)
def test_a_small_plan_is_the_best_of_all_choices(name):
    trace = traced(name)
    at = trace.default_at
    names = Problem(build(trace.engine.dissect(at))).names
    assert len(names) <= 7  # every subset is traced
    choices = itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))
    everything = [applied(trace, choice, at) for choice in choices]
    built_in = [trace.report(key, at) for key in BUILT_IN]
    everything += [(report.saved_bytes, report.recomputed_flops) for report in built_in]
    for budget in sorted({saved for saved, _ in everything}):
        best = min(flops for saved, flops in everything if saved <= budget)
        assert trace.plan(budget, at, gap=0.0).recomputed_flops == best


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_never_worse_than_a_policy_of_jax(name, at):
    trace = traced(name)
    for key in BUILT_IN:
        try:
            report = trace.report(key, at)
        except RematError as error:
            assert "complex" in str(error)
            continue
        plan = trace.plan(report.saved_bytes, at)
        assert plan.recomputed_flops <= report.recomputed_flops
        assert plan.saved_bytes <= report.saved_bytes


def test_a_plan_needs_no_policy_of_jax_that_is_a_choice_of_names(monkeypatch):
    """Where JAX saves otherwise than was reckoned under each of its policies, there is none to compare with."""
    fun, args = PROGRAMS["attention"]
    expected = rm.trace(fun, *args).plan("50%", "function")
    monkeypatch.setattr(Planner, "saved_by", lambda self, key: None)
    plan = rm.trace(fun, *args).plan("50%", "function")
    assert (plan.saved_bytes, plan.recomputed_flops) == (expected.saved_bytes, expected.recomputed_flops)


def test_names_in_branches_are_choices():
    """JAX keeps them by name, where no plan names single values; of two conditionals with one name, both or none."""

    def fun(p, ws, x):
        for w in ws:

            def first(x, w):
                return jnp.tanh(checkpoint_name(jnp.sin(x @ w) @ w, "kept"))

            x = jax.lax.switch(p, [first, lambda x, w: checkpoint_name(jnp.cos(x @ w), "other"), first], x, w)
        return x.sum()

    trace = rm.trace(fun, jax.ShapeDtypeStruct((), "int32"), [f32(8, 8)] * 2, f32(4, 8))
    for names in (("kept",), ("other",), ("kept", "other")):
        named = trace.report(f"save_only_these_names({', '.join(map(repr, names))})", "function")
        plan = trace.plan(named.saved_bytes, "function")
        if not _jax.remat3():
            assert plan.recomputed_flops <= named.recomputed_flops
        assert "values inside the branches of a conditional" in plan.unreached
        again = Plan.from_json(plan.to_json())
        assert trace.report(again).saved_bytes == plan.saved_bytes


def test_values_in_branches_are_said_to_be_no_choices():
    """JAX keeps a named value of a branch, which no plan names; where that would be better, no plan claims the best."""

    def fun(p, x):
        def first(x):
            return jnp.tanh(checkpoint_name(jnp.sin(x @ x), "kept"))

        return jax.lax.cond(p, first, jnp.cos, x).sum()

    args = jax.ShapeDtypeStruct((), "bool"), f32(8, 8)
    trace = rm.trace(fun, *args)
    assert trace.report("save_only_these_names('kept')", "function").saved_bytes == 8 * 8 * 4
    for budget in (0, 8 * 8 * 4):
        for of in ("saved", "peak"):
            plan = trace.plan(budget if of == "saved" else "100%", "function", of=of)
            assert plan.status.endswith("Values inside the branches of a conditional are not among the choices.")
    assert "branches" not in traced("three_layers").plan(64).status
    outside = rm.trace(lambda p, x: jax.lax.cond(p, lambda x: x, lambda x: x, jnp.sin(x @ x)).sum(), *args)
    assert "branches" not in outside.plan(64, "function").status


@small_or_named(transformer(2, scanned=True), named_models.transformer(2, 32, 16, 2, scanned=True))
def test_more_bytes_never_cost_more(model):
    fun, args = model
    trace = rm.trace(fun, *args)
    points = trace.frontier(8)
    assert len(points) == 8
    assert [p.recomputed_flops for p in points] == sorted((p.recomputed_flops for p in points), reverse=True)
    # All that autodiff keeps by itself fits the last budget.
    assert points[-1].recomputed_flops == points[-1].bound == trace.report("none").recomputed_flops
    for point in points:
        assert point.saved_bytes <= point.budget_bytes
        assert point.bound <= point.recomputed_flops
        assert trace.plan(point.budget_bytes, gap=0.0).recomputed_flops <= point.recomputed_flops


@small_or_named(transformer(3, site=True), named_models.transformer(3, 32, 16, 2, scanned=False))
def test_layers_one_by_one_are_no_worse_than_together(model):
    fun, args = model
    trace = rm.trace(fun, *args)
    least = trace.preview("nothing_saveable").saved_bytes
    budget = int(least + 0.3 * (trace.preview("none").saved_bytes - least))
    together, apart = trace.plan(budget), trace.plan(budget, separately=True)
    assert (apart.saved_bytes, apart.recomputed_flops) == (apart.predicted_bytes, apart.predicted_flops)
    assert apart.bound <= together.recomputed_flops
    assert apart.recomputed_flops <= together.recomputed_flops * 1.01  # the solvers' gap
    assert {value.times for value in together.names} == {3}
    assert {value.times for value in apart.names} == {1}


def test_a_value_saved_in_a_loop_counts_every_time():
    trace = traced("scanned_relu")  # 8 iterations, the matmul's result f32[4]
    plan = trace.plan(8 * 16, "function")
    (value,) = plan.names
    assert (value.nbytes, value.times, value.type) == (8 * 16, 8, "f32[4]")
    assert plan.saved_bytes == 8 * 16


def test_what_stays_the_same_in_a_loop_is_saved_once():
    def fun(ws, x):
        def outer(c, inner_ws):
            mask = jnp.arange(4) * 2.0  # the same in every iteration of both
            shift = jnp.sin(c)  # changes with the outer loop alone

            def inner(d, w):
                return jnp.tanh(w @ d) * jnp.cos(mask) + jnp.exp(shift), None

            c, _ = jax.lax.scan(inner, c, inner_ws)
            return jnp.sin(c), None

        return jnp.sin(jax.lax.scan(outer, x, ws)[0]).sum()

    parts = rm.trace(fun, f32(3, 2, 4, 4), f32(4)).engine.dissect("function")
    found: dict[str, set[int]] = {}
    for name, times in kept_copies(parts.naming).items():
        value = parts.naming.values[name]
        found.setdefault(_jax.primitive_name(value.eqn) if value.output is not None else "carry", set()).add(times)
    assert found["tanh"] == {3 * 2}
    assert found["exp"] == {3}
    assert found["cos"] == found["mul"] - {6} == {1}
    assert found["sin"] == {3, 1}  # in the outer loop, and behind it
    assert found["carry"] == {6, 3}


# --------------------------------------------------------------------------------- values in rules and in shard_map


@jax.custom_vjp
def attend(q, k, v):
    return attend_forward(q, k, v)[0]


def attend_forward(q, k, v):
    scores = q @ k.T
    lse = checkpoint_name(jax.nn.logsumexp(scores, axis=-1), "lse")
    out = checkpoint_name(jnp.exp(scores - lse[:, None]) @ v, "out")
    return out, (q, k, v, out, lse)


def attend_backward(residuals, g):
    q, k, v, out, lse = residuals
    p = jnp.exp(q @ k.T - lse[:, None])
    scores = p * (g @ v.T - (g * out).sum(-1, keepdims=True))
    return scores @ k, scores.T @ q, p.T @ g


attend.defvjp(attend_forward, attend_backward)


@jax.custom_vjp
def bent(x, low, step):
    return jnp.tanh(x) * jnp.sin(x) + low + step


def bent_forward(x, low, step):
    """As equinox's loops, it takes no tangents but those of its first argument."""
    assert x.perturbed
    assert not low.perturbed
    assert not step.perturbed
    made = jnp.tanh(x.value) * jnp.sin(x.value)
    return made + low.value + step.value, (x.value, jnp.exp(made))


bent.defvjp(bent_forward, lambda saved, g: (g * jnp.cos(saved[0]) * saved[1], None, None), symbolic_zeros=True)


@pytest.mark.parametrize("seen", [False, True], ids=["at first", "after a report"])
def test_a_rule_that_refuses_tangents_is_asked_as_jax_asks_it(seen):
    def loss(x, low, step):
        for _ in range(3):
            x = bent(x, jax.lax.stop_gradient(low), step)
        return (x**2).sum()

    args = f32(64), f32(64), jax.ShapeDtypeStruct((), "int32")
    trace = rm.trace(loss, *args)
    before = trace.report("everything_saveable", "function").saved_bytes if seen else None
    plan = trace.plan(512, "function")
    assert plan.saved_bytes == trace.report(plan).saved_bytes <= 512
    if not _jax.remat3():
        assert {"exp", "tanh"} <= {
            _jax.primitive_name(value.eqn) for value in trace.engine.dissect("function").naming.values.values()
        }
    again = rm.trace(loss, *args).report("everything_saveable", "function").saved_bytes
    assert again == trace.report("everything_saveable", "function").saved_bytes == (before or again)
    values = (jnp.arange(64.0), jnp.ones(64), 1)
    for function in (trace.function(plan), plan.apply(loss)):
        np.testing.assert_allclose(jax.jit(jax.grad(function))(*values), jax.jit(jax.grad(loss))(*values), rtol=1e-6)
    # Where nothing was asked for yet, the values that the plan saves are found as well.
    applied = rm.trace(plan.apply(loss), *args)
    assert applied.report().saved_bytes == plan.saved_bytes
    assert not applied.gradients
    edit = rm.trace(loss, *args).edit(plan)
    assert len(edit.unnamed) == len(plan.names)
    assert all("is made in the rule of a custom derivative" in why for why in edit.unnamed)


@pytest.fixture(scope="module")
def attentive():
    """Three layers of an attention that names its output and its log-sum-exp in its forward rule, as MaxText does."""

    def loss(layers, x):
        for w in layers:
            x = x + jnp.tanh(attend(x @ w[0], x @ w[1], x @ w[2]) @ w[3])
        return (x**2).sum()

    return rm.trace(loss, [f32(4, 8, 8)] * 3, f32(16, 8))


def test_names_in_the_rules_of_custom_derivatives_are_choices(attentive):
    named = attentive.report("save_only_these_names('out', 'lse')", "function")
    plan = attentive.plan(named.saved_bytes, "function")
    assert plan.recomputed_flops <= named.recomputed_flops
    assert (plan.predicted_bytes, plan.predicted_flops) == (plan.saved_bytes, plan.recomputed_flops)
    if _jax.remat3():  # there no policy reaches into a rule, and no bound is of what is in it
        assert "values inside the rules of custom derivatives" in plan.unreached
        assert "the rules of custom derivatives are not among the choices" in plan.status
        return
    assert not any("rules" in where for where in plan.unreached)
    assert {"out", "lse"} <= {
        value.name for value in planner(attentive.facts, "function", False).every_value().values()
    }
    assert all(value.source is not None for value in plan.names)
    # Each call of the rule is decided by itself.
    for budget in (plan.saved_bytes // 3, plan.saved_bytes // 2):
        less = attentive.plan(budget, "function")
        assert (less.predicted_bytes, less.predicted_flops) == (less.saved_bytes, less.recomputed_flops)


def test_a_plan_of_values_in_a_rule_can_be_applied_and_kept(attentive):
    plan = attentive.plan("40%", "function")
    again = Plan.from_json(plan.to_json())
    fun = attentive.engine.traced
    anew = rm.trace(fun, [f32(4, 8, 8)] * 3, f32(16, 8)).report(again)
    assert (anew.saved_bytes, anew.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    chance = np.random.default_rng(0)
    args = [chance.normal(0, 0.3, (4, 8, 8)).astype("f4")] * 3, chance.normal(0, 1, (16, 8)).astype("f4")
    for ours, jaxs in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(each))(*args)) for each in (again.apply(fun), fun)), strict=True
    ):
        np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=1e-4)


def test_the_mask_of_a_custom_jvp_is_a_choice():
    """What ``jax.nn.relu`` keeps of its operand is a quarter of it in bytes; and only what is no tangent is named."""
    trace = rm.trace(lambda x, w: jnp.sin(jax.nn.relu(x @ w)).sum(), f32(8, 8), f32(8, 8))
    every = planner(trace.facts, "function", False).every_value()
    masks = [key for key, value in every.items() if value.type == "bool[8,8]"]
    assert len(masks) == (0 if _jax.remat3() else 1)
    for key in masks:
        assert applied(trace, {key}, "function") == planner(trace.facts, "function", False).graph.predict({key})


@pytest.mark.parametrize("replicated", [False, True])
def test_values_inside_shard_map_are_choices_of_one_devices_bytes(replicated):
    """Each device keeps its part, or a copy of what is the same on all of them."""
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def body(w, x):
        w = jnp.cos(w) @ w  # the same on all devices
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h") @ w)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec("d"), check_vma=not replicated)
    trace = rm.trace(lambda w, x: (mapped(w, x) ** 2).sum(), f32(8, 8), f32(16, 8))
    choices = planner(trace.facts, "function", False)
    assert "h" in {value.name for value in choices.every_value().values()}
    for key in choices.every_value():
        assert applied(trace, {key}, "function") == choices.graph.predict({key}), choices.every_value()[key]
    named = trace.report("save_only_these_names('h')", "function")
    assert trace.plan(named.saved_bytes, "function").recomputed_flops <= named.recomputed_flops


# ------------------------------------------------------------------------------------------------------------- applied


def test_the_function_computes_the_same():
    fun, args = recurrent(4, 2)
    trace = rm.trace(fun, *args)
    plan = trace.plan(0.4)
    assert plan.names
    chance = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: chance.normal(0, 0.1, leaf.shape).astype("f4"), args)
    planned = trace.function(plan)
    expected = jax.jit(jax.value_and_grad(fun))(*values)
    found = jax.jit(jax.value_and_grad(planned))(*values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found, expected)


def test_a_plan_serves_other_batches_and_refuses_other_programs():
    trace = traced("dictionary")
    plan = trace.plan(0.5)
    assert plan.names
    w = {"w": f32(4, 4), "b": f32(4)}
    planned = rm.trace(trace.function(plan), w, f32(5, 4))  # traced with 3 rows
    assert {row.shape[0] for row in planned.report("as_written").residuals if row.kind == "intermediate"} == {5}
    with pytest.raises(RematError, match="another program"):
        traced("three_layers").report(plan)
    with pytest.raises(RematError, match="leave `at` out"):
        trace.report(plan, "sites")


def test_reports_of_a_plan_do_not_show_the_names_it_gave():
    trace = traced("named_tanh")
    report = trace.report(trace.plan(32, "function"))
    assert {residual.name for residual in report.residuals} <= {None, "h"}
    assert {equation.name for equation in report.recomputed} <= {None, "h"}
    assert "remat_magic" not in "".join(trace.names)


def test_names_of_the_program_make_code():
    def fun(w, x):
        h = checkpoint_name(x @ w, "h")
        return jnp.sum(jnp.sin(h) * jnp.cos(h))  # autodiff alone saves four times as much

    trace = rm.trace(fun, f32(64, 64), f32(64))
    plan = trace.plan(256)
    assert [value.name for value in plan.names] == ["h"]
    assert "save_only_these_names('h')" in plan.code
    # Where no name of the program's own reaches, there is nothing to paste.
    assert traced("three_layers").plan(50).code == ""


# ------------------------------------------------------------------------------------------------------------- budgets


def test_budgets_are_bytes_texts_or_fractions():
    trace = traced("three_layers")
    most = trace.report("none").saved_bytes
    assert trace.plan("1 kB").budget_bytes == 1000
    assert trace.plan(40).budget_bytes == 40
    assert trace.plan(0.5).budget_bytes == most // 2
    assert trace.plan(1.0).recomputed_flops == 0  # all that autodiff saves by itself
    with pytest.raises(RematError, match="no number of bytes"):
        trace.plan("a lot")


def test_what_sites_keep_anyway_is_not_to_be_planned_away():
    with pytest.raises(RematError, match="nothing_saveable at 'sites' keeps 96 B"):
        traced("scanned_checkpoint").plan(10, "sites")
    with pytest.raises(RematError, match="one place"):
        traced("scanned_checkpoint").plan(10, {"layer": "none"})
    with pytest.raises(RematError, match="two points"):
        traced("three_layers").frontier(1)


def test_the_linear_programme_bounds_and_large_programs_are_quick():
    fun, args = models.transformer(12, scanned=True)
    trace = rm.trace(fun, *args)
    plan = trace.plan(0.2)
    assert plan.gap <= 0.01
    assert plan.forward_flops is not None
    # A fifth of the bytes spares most of the work, which a checkpoint of everything does again.
    assert plan.recomputed_flops < 0.2 * trace.report("nothing_saveable").recomputed_flops


# ------------------------------------------------------------------------------------------------------------- on paper


def test_a_plan_can_be_written_out_and_read():
    trace = traced("attention")
    plan = trace.plan(0.5)
    assert plan.names
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    # In another session: the same program, traced anew.
    report = traced("attention").report(again)
    assert (report.saved_bytes, report.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)


HOSTILE = [
    None,
    [],
    {},
    {"budget_bytes": -1},
    {"budget_bytes": True},
    {"saved_bytes": "12"},
    {"solve_seconds": float("nan")},
    {"solve_seconds": float("inf")},
    {"names": "abc"},
    {"names": [{"key": "x"}]},
    {"names": [None]},
    {"uncosted": [1]},
    {"at": None},
    {"separately": 1},
    {"__class__": "x"},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_what_is_no_plan_is_refused(change):
    good = Plan("f", "function", "none", 1, 1, 0, 0).to_dict()
    assert Plan.from_dict(good)
    with pytest.raises(RematError):
        Plan.from_dict({**good, **change} if isinstance(change, dict) and change else change)


def test_a_plan_of_names_that_there_are_not_is_refused():
    trace = traced("attention")
    plan = trace.plan(0.5)
    with pytest.raises(RematError, match="another program"):
        trace.report(dataclasses.replace(plan, names=(PlannedValue("x", 1),)))
    with pytest.raises(RematError, match="no checkpoint site"):
        trace.report(dataclasses.replace(plan, at="nowhere"))


def test_values_are_not_seen_before_all_are_known(monkeypatch):
    """A panel asks for what-ifs while a plan is made: neither thread is handed what the other is still filling."""
    fun, args = PROGRAMS["three_layers"]
    expected = list(planner(rm.trace(fun, *args).facts, "function", False).every_value())
    choices, origin = planner(rm.trace(fun, *args).facts, "function", False), PlannedValue.origin.fget
    accesses, seen = itertools.count(1), []

    def asked_meanwhile(value):
        if next(accesses) == len(expected) + 3:  # all are counted, and the first one may be stored
            thread = threading.Thread(target=lambda: seen.append(list(choices.every_value())))
            thread.start()
            thread.join()
        return origin(value)

    monkeypatch.setattr(PlannedValue, "origin", property(asked_meanwhile))
    assert list(choices.every_value()) == expected
    assert seen == [expected]
