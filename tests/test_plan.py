"""Plans: what is promised is what JAX does, and no choice is better: a table of programs and budgets."""

import itertools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax
from remat_magic.planning import solver
from remat_magic.planning.graph import Graph, kept_copies
from remat_magic.planning.planner import objective, planner
from remat_magic.planning.solver import Problem
from remat_magic.records import Plan, PlannedValue, RematError
from tests.benchmarks import models
from tests.plan_helpers import BUILT_IN, EACH_PLACE, INEXACT, as_reckoned, traced, transformer
from tests.programs import PROGRAMS, f32

SLOW = rm.devices.Device("slow", {"f32": 1e9}, 1e8, 1e9, 10**9, 1e10, "invented: arithmetic so slow that a link pays")


def applied(trace, names, at, moved=()):
    """JAX's own report if just these names are saved, those that are moved in the host's memory."""
    if not names:
        return trace.report("nothing_saveable", at)
    values = tuple(PlannedValue(name, 0, offloaded=name in moved) for name in sorted(names))
    fingerprint = trace.engine.dissect(at).naming.fingerprint
    return trace.report(Plan(trace.function_name, at, "test", 0, 0, 0, 0, names=values, fingerprint=fingerprint))


def figures(report):
    return report.saved_bytes, report.recomputed_flops


# ----------------------------------------------------------------------------------- what is promised is what JAX does


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_a_plan_is_what_jax_does_and_no_worse_than_its_policies(name, at):
    trace = traced(name)
    budgets = {}
    for key in BUILT_IN:
        try:
            report = trace.report(key, at)
        except RematError as error:
            assert "complex" in str(error)
            continue
        budgets[report.saved_bytes] = min(report.recomputed_flops, budgets.get(report.saved_bytes, 2**63))
    least, most = min(budgets), max(budgets)
    for budget in {*budgets, int(least + 0.3 * (most - least)), int(least + 0.7 * (most - least))}:
        plan = trace.plan(budget, at)
        assert plan.saved_bytes <= budget == plan.budget_bytes
        assert plan.bound <= plan.recomputed_flops <= min(flops for saved, flops in budgets.items() if saved <= budget)
        assert figures(plan) == figures(trace.report(plan))
        assert not plan.timed_out
        if plan.predicted_bytes is not None and as_reckoned(trace, at):
            assert figures(plan) == (plan.predicted_bytes, plan.predicted_flops)


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_any_choice_of_names_does_what_is_reckoned(name, at):
    trace = traced(name)
    if not as_reckoned(trace, at) or name in INEXACT:
        return
    found, dice = planner(trace.facts, at), random.Random(name)
    names = [*found.parts.naming.values]
    for choice in [names, *(dice.sample(names, dice.randint(1, len(names))) for _ in range(2))]:
        used = found.graph.used(choice)
        moved = frozenset(name for name in used if dice.random() < 0.4)
        report = applied(trace, used, at, moved)
        assert found.graph.predict(choice) == found.graph.predict(used)
        assert found.graph.figures(used, moved) == (*figures(report), report.offloaded_bytes)


# ------------------------------------------------------------------------------------------------- no choice is better


SMALL = ["named_tanh", "scanned_relu", "mixed_precision", "scanned_checkpoint"]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_plan_is_the_best_of_all_choices(name):
    """Within saved bytes and within a peak: every subset of the names is traced."""
    trace = traced(name)
    at = trace.default_at
    names = Problem(planner(trace.facts, at).graph).names
    assert len(names) <= 7
    subsets = itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))
    reports = [*(applied(trace, subset, at) for subset in subsets), *(trace.report(key, at) for key in BUILT_IN)]
    for of, size in (("saved", "saved_bytes"), ("peak", "peak_bytes")):
        for budget in sorted({getattr(report, size) for report in reports}):
            best = min(report.recomputed_flops for report in reports if getattr(report, size) <= budget)
            plan = trace.plan(budget, at, of=of, gap=0.0)
            assert plan.bound <= best  # a bound of all choices
            assert plan.recomputed_flops == best
            assert getattr(plan, size) <= budget
    least = min(report.peak_bytes for report in reports)
    with pytest.raises(RematError, match=f"the least found is {rm.units.nbytes(least)} "):
        trace.plan(peak=least - 1, at=at)


@pytest.mark.parametrize("name", ["three_layers", "named_tanh"])
def test_a_small_plan_with_offloading_is_the_best_of_all_choices(name):
    found = planner(traced(name).facts, "function")
    problem = found.problem(objective("seconds", SLOW, 1e8))
    every, (_, _, moved_bytes) = frozenset(problem.names), found.graph.figures(problem.names, problem.names)
    there_and_back = problem.measure(every, every)[1] - problem.measure(every)[1]
    assert there_and_back == pytest.approx(2 * moved_bytes / 1e8)
    everything = []
    for choice in itertools.product((None, False, True), repeat=len(problem.names)):
        names = found.graph.used([name for name, kept in zip(problem.names, choice, strict=True) if kept is not None])
        moved = {name for name, kept in zip(problem.names, choice, strict=True) if kept} & names
        everything.append(problem.measure(names, moved))
    for budget in sorted({saved for saved, _ in everything}):
        solution = problem.solve(budget, 0.0)
        assert solution.saved_bytes <= budget
        assert solution.cost == pytest.approx(min(cost for saved, cost in everything if saved <= budget), rel=1e-6)
        assert solution.bound <= solution.cost * (1 + 1e-9)


def random_graph(dice):
    """Operations in the order of a program, most with a gate behind, some with one name for two gates."""
    graph = Graph()
    sizes = {f"n{i}": dice.randint(1, 3) for i in range(6)}
    fresh, values = list(sizes), []

    def add(flops, needed, reads, leaves=()):
        graph.flops.append(flops)
        graph.needed.append(needed)
        graph.reads.append(tuple(reads))
        graph.leaves.append(tuple(leaves))
        graph.leaf_bytes.update(dict.fromkeys(leaves, 2))
        graph.operations.append(())
        return len(graph.flops) - 1

    for _ in range(dice.randint(2, 9)):
        reads = dice.sample(values[-3:], min(len(values), dice.choice([1, 1, 2])))
        leaves = [0] if dice.random() < 0.15 else []
        value = add(dice.choice([0, 0, 1, 2]), dice.random() < 0.1, reads, leaves)
        if dice.random() < 0.7 and (fresh or dice.random() < 0.5):
            name = fresh.pop() if fresh and dice.random() < 0.85 else dice.choice(list(sizes))
            value = add(0, False, [value])
            graph.gates[value] = (name, sizes[name], 1)
        values.append(value)
    add(0, True, dice.sample(values, min(len(values), dice.randint(1, 3))))
    return graph


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 2**32).map(random.Random).map(random_graph), st.booleans())
def test_the_solver_finds_the_best_of_all_choices(graph, grouped):
    """Of any graph, and of its names in pairs, with the bytes of a name those of all its gates."""
    sizes = {name: size for name, (size, _) in graph.sizes(graph.gates).items()}
    group = {name: str(int(name[1]) // 2) for name in sizes} if grouped else None
    problem = Problem(graph, group=group)
    units = {}
    for name in sizes:
        units.setdefault(group[name] if group else name, []).append(name)
    found = []
    for chosen in itertools.product((False, True), repeat=len(units)):
        names = {name for unit, yes in zip(units.values(), chosen, strict=True) if yes for name in unit}
        running = graph.running(names)
        leaves = {leaf for node in running for leaf in graph.leaves[node]}
        size = sum(sizes[name] for name in names) + sum(graph.leaf_bytes[leaf] for leaf in leaves)
        found.append((size, sum(graph.flops[node] for node in running)))
    for budget in (2, 5, 9):
        best = min((cost for size, cost in found if size <= budget), default=None)
        solution = problem.solve(budget, 0.0)
        if best is None:
            continue  # what is not read takes no bytes, so that more may fit than was summed
        assert solution.saved_bytes <= budget
        assert solution.bound <= solution.cost <= best
        assert problem.relax(budget) <= best


def test_groups_of_values_are_saved_as_a_whole():
    trace = traced("three_layers")
    graph = planner(trace.facts, "function").graph
    names = Problem(graph).names
    group = dict.fromkeys(names[:2], "pair")
    for budget in range(0, 200, 20):
        solution = Problem(graph, group=group).solve(budget, 0.0)
        assert solution.names in (frozenset(), graph.used(names[:2]))


@pytest.mark.parametrize("blocks", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_unrolled_layers_of_gpt_2_are_within_a_hundredth(blocks):
    fun, args = models.transformer(blocks)
    found = planner(rm.trace(fun, *args).facts, "function")
    least = found.graph.predict(())[0]
    for part in (0.1, 0.2, 0.5):
        solution = found.problem().solve(int(least + part * (found.most - least)))
        assert solution.cost - solution.bound <= 0.01 * solution.cost
        assert solution.saved_bytes <= least + part * (found.most - least)


@pytest.mark.slow
def test_a_plan_whose_solver_met_its_time_limit_says_so(monkeypatch):
    fun, args = transformer(2)
    monkeypatch.setattr(solver, "_SECONDS", 0.0)
    plan = rm.trace(fun, *args).plan("40%", "function")
    assert plan.timed_out
    assert "time limit" in plan.status
    assert plan.bound <= plan.recomputed_flops == rm.trace(fun, *args).report(plan).recomputed_flops
    assert Plan.from_json(plan.to_json()).timed_out


@pytest.mark.slow
def test_a_search_ends_after_some_nodes(monkeypatch):
    """It is given a number of nodes, whatever is asked for, and what it has by then is a plan with a bound."""
    asked = []
    own = solver.milp
    monkeypatch.setattr(solver, "milp", lambda *a, **k: asked.append(k["options"]["node_limit"]) or own(*a, **k))
    fun, args = transformer(2)
    trace = rm.trace(fun, *args)
    trace.plan("40%", "function", gap=0.0)
    assert asked == [solver.NODES]
    trace.plan(peak="90%", at="function")
    trace.frontier(3)
    assert max(asked[1:]) < solver.NODES


def test_values_that_another_stands_in_for_are_none_to_choose():
    def fun(w, v, b, x):
        y = jnp.tanh((x @ w).reshape(4, 4, 8) + b)
        return jnp.sum(jnp.sin(y.transpose(1, 0, 2).astype("float32") * 2.0) @ v)

    trace = rm.trace(fun, f32(8, 8), f32(8, 8), f32(8), f32(16, 8))
    found = planner(trace.facts, "function")
    kept = [value.primitive for key, value in found.every_value().items() if key in found.problem().names]
    # The ends of each chain: what goes into tanh (its derivative reads its unnamed result), what goes into sin, and
    # what comes out of it, for v's gradient. Not the product before its bias, nor what is between tanh and sin.
    assert sorted(kept) == ["add", "broadcast_in_dim", "mul", "sin"]


def test_a_value_smaller_than_the_solver_sees():
    """Eight bytes are nothing beside 400 MB, but more than a budget that has no room for them."""

    def fun(w, v, x):
        return jnp.sum(jnp.exp(jnp.sin(x @ w))) * jnp.sum(jnp.sin(jnp.sin(v)))

    found = planner(rm.trace(fun, f32(10_000, 10_000), f32(2), f32(10_000, 10_000)).facts, "function").problem()
    for budget in (0, 4, 8, 400_000_000, 400_000_004):
        assert found.solve(budget).saved_bytes <= budget


@pytest.mark.slow
def test_more_bytes_never_cost_more():
    fun, args = transformer(2, scanned=True)
    trace = rm.trace(fun, *args)
    points = trace.frontier(6, "function")
    assert len(points) == 6
    assert [p.recomputed_flops for p in points] == sorted((p.recomputed_flops for p in points), reverse=True)
    # All that autodiff keeps by itself fits the last budget.
    assert points[-1].recomputed_flops == points[-1].bound == trace.report("none").recomputed_flops
    for point in points:
        assert point.saved_bytes <= point.budget_bytes
        assert point.bound <= point.recomputed_flops
        assert trace.plan(point.budget_bytes, "function", gap=0.0).recomputed_flops <= point.recomputed_flops
    with pytest.raises(RematError, match="two points"):
        trace.frontier(1)


# --------------------------------------------------------------------------------------- where values are made


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "seen", [pytest.param(False, id="at first", marks=pytest.mark.slow), pytest.param(True, id="after a report")]
)
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


@pytest.mark.slow
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
    assert {"out", "lse"} <= {value.name for value in planner(attentive.facts, "function").every_value().values()}
    assert all(value.source is not None for value in plan.names)
    # Each call of the rule is decided by itself.
    for budget in (plan.saved_bytes // 3, plan.saved_bytes // 2):
        less = attentive.plan(budget, "function")
        assert (less.predicted_bytes, less.predicted_flops) == (less.saved_bytes, less.recomputed_flops)


@pytest.mark.slow
def test_a_plan_of_values_in_a_rule_can_be_applied_and_kept(attentive):
    plan = attentive.plan("40%", "function")
    again = Plan.from_json(plan.to_json())
    fun = attentive.engine.traced
    anew = rm.trace(fun, [f32(4, 8, 8)] * 3, f32(16, 8)).report(again)
    assert (anew.saved_bytes, anew.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    chance = np.random.default_rng(0)
    args = [chance.normal(0, 0.1, (4, 8, 8)).astype("f4")] * 3, chance.normal(0, 1, (16, 8)).astype("f4")
    for ours, jaxs in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(each))(*args)) for each in (again.apply(fun), fun)), strict=True
    ):
        np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=1e-4)


def test_the_mask_of_a_custom_jvp_is_a_choice():
    """What ``jax.nn.relu`` keeps of its operand is a quarter of it in bytes; and only what is no tangent is named."""
    trace = rm.trace(lambda x, w: jnp.sin(jax.nn.relu(x @ w)).sum(), f32(8, 8), f32(8, 8))
    every = planner(trace.facts, "function").every_value()
    masks = [key for key, value in every.items() if value.type == "bool[8,8]"]
    assert len(masks) == (0 if _jax.remat3() else 1)
    for key in masks:
        assert figures(applied(trace, {key}, "function")) == planner(trace.facts, "function").graph.predict({key})


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
    choices = planner(trace.facts, "function")
    assert "h" in {value.name for value in choices.every_value().values()}
    for key in choices.every_value():
        assert figures(applied(trace, {key}, "function")) == choices.graph.predict({key}), choices.every_value()[key]
    named = trace.report("save_only_these_names('h')", "function")
    assert trace.plan(named.saved_bytes, "function").recomputed_flops <= named.recomputed_flops


def test_values_are_not_seen_before_all_are_known(monkeypatch):
    """A panel asks for what-ifs while a plan is made: neither thread is handed what the other is still filling."""
    fun, args = PROGRAMS["three_layers"]
    expected = list(planner(rm.trace(fun, *args).facts, "function").every_value())
    choices, origin = planner(rm.trace(fun, *args).facts, "function"), PlannedValue.origin.fget
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
