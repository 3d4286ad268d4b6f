"""The integer program that plans are solutions of: made small, counted, bounded, and within reach of many values."""

import itertools
import random
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import remat_magic as rm
from remat_magic.planning import hull, reduction
from remat_magic.planning.graph import Graph
from remat_magic.planning.planner import planner
from remat_magic.planning.problem import Problem
from remat_magic.planning.reduction import IntegerProgram, summed
from tests.benchmarks import models
from tests.plan_helpers import EACH_MODEL, MODELS, TRANSFORMERS, traced, transformer
from tests.programs import KINDS, PROGRAMS, f32
from tests.volume import usually

# ---------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize("name", [*usually(sorted(PROGRAMS), *KINDS), *EACH_MODEL])
def test_a_graph_may_be_reduced(name, monkeypatch):
    """With a variable for each operation and all names to choose from, the optimum is the same."""
    if name in MODELS:  # whose layers, at their sites, have the same names
        fun, args = MODELS[name]()
        trace = rm.trace(fun, *args)
        found = planner(trace.facts, trace.default_at, False)
    else:
        found = planner(traced(name).facts, "function", False)
    small = found.problem()
    monkeypatch.setattr(reduction, "groups", lambda _, nodes, gates: {node: node for node in nodes})
    monkeypatch.setattr(reduction, "replaceable", lambda *_: frozenset())
    large = Problem(found.graph)
    assert len(small.graph.flops) <= len(large.graph.flops)
    assert set(small.names) <= set(large.names)
    most, flops = large.measure(large.names)[0], large.measure(())[1]
    for i in range(1, 6):
        budget = i * most // 6
        bounds = [problem.relax(budget) or 0.0 for problem in (small, large)]
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-6, abs=1e-6 * flops + 1)
        if len(large.names) <= 100:
            best, other = small.solve(budget, 60.0, 0.0), large.solve(budget, 60.0, 0.0)
            assert (best is None) == (other is None)
            assert best is None or best.cost == pytest.approx(other.cost, rel=1e-6, abs=1e-6 * flops + 1)
    for names in (large.names, large.names[::2], large.names[::3], ()):
        used = [name for name in names if name in small.names]
        # What is reckoned on the small graph is what is reckoned on the large one.
        assert small.measure(used) == large.measure(used)
        assert small.measure(names) == large.measure(names)


def test_values_that_another_stands_in_for_are_none_to_choose():
    def fun(w, v, b, x):
        y = jnp.tanh((x @ w).reshape(4, 4, 8) + b)
        return jnp.sum(jnp.sin(y.transpose(1, 0, 2).astype("float32") * 2.0) @ v)

    trace = rm.trace(fun, f32(8, 8), f32(8, 8), f32(8), f32(16, 8))
    found = planner(trace.facts, "function", False)
    kept = [value.primitive for key, value in found.every_value().items() if key in found.problem().names]
    made = [value.primitive for value in found.every_value().values()]
    assert {"dot_general", "reshape", "transpose", "tanh", "add", "mul"} <= set(made)
    # The ends of each chain: what goes into tanh (its derivative reads its unnamed result), what goes into sin, and
    # what comes out of it, for v's gradient. Not the product before its bias, nor what is between tanh and sin. The
    # bias as a matrix may be chosen, and never is, since it is had for nothing.
    assert sorted(kept) == ["add", "broadcast_in_dim", "mul", "sin"]
    for budget in ("50%", "100%", 10**6):
        assert "broadcast_in_dim" not in [value.primitive for value in trace.plan(budget, "function").names]


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


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32).map(random.Random).map(random_graph))
def test_the_best_choices_of_a_reduced_graph_are_the_best(graph):
    """All choices of all names are tried, for each sum of bytes, with the bytes of a name those of all its gates."""
    small = reduction.reduced(graph, graph.flops)
    whole = graph.sizes(graph.gates)

    def best(graph, names):
        found = {}
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1)):
            running = graph.running(chosen)
            leaves = {leaf for node in running for leaf in graph.leaves[node]}
            size = sum(whole[name][0] for name in chosen) + sum(graph.leaf_bytes[leaf] for leaf in leaves)
            cost = sum(graph.flops[node] for node in running)
            found[size] = min(cost, found.get(size, cost))
        return lambda budget: min((cost for size, cost in found.items() if size <= budget), default=None)

    kept = sorted({gate[0] for gate in small.gates.values()})
    ours, every = best(small, kept), best(graph, sorted(whole))
    for budget in range(20):
        assert ours(budget) == every(budget)


def unrolled(layers=4):
    """Layers in a Python loop, whose values have names of their own."""

    def fun(ws, x):
        for w in ws:
            x = x + jnp.tanh(jnp.sin(x @ w) @ w)
        return x.sum()

    return fun, ([f32(16, 16)] * layers, f32(8, 16))


def test_a_bound_by_counts_is_one():
    """How many are saved of the values of equal layers is a whole number whichever they are."""
    fun, args = unrolled()
    problem = planner(rm.trace(fun, *args).facts, "function", False).problem()
    most, _ = problem.measure(problem.names)
    better = 0
    for i in range(1, 16):
        budget = i * most // 16
        best, line = Problem(problem.graph.whole).solve(budget, 20.0, 0.0), problem.relax(budget)
        bound, choice = problem.count(budget, 20.0, 0.0)
        assert choice is None or choice.saved_bytes <= budget
        assert bound <= best.cost * (1 + 1e-6)
        assert choice is None or best.cost <= choice.cost * (1 + 1e-6)
        better += bound > 1.001 * line
    assert better  # it is there to be nearer than the linear program


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sums_of_variables_bound_a_program(data):
    """Whatever is taken for alike, no choice undercuts the program of the sums; all are tried."""
    count = data.draw(st.integers(1, 7))
    row = st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from([1.0, -1.0])), min_size=1, max_size=3)
    rows = data.draw(st.lists(row.map(dict), max_size=8))
    few = st.integers(0, 2).map(float)
    vector = st.lists(few, min_size=count, max_size=count).map(np.array)
    cost, amounts = data.draw(vector), data.draw(vector)
    limits = np.array([data.draw(st.sampled_from([0.0, -1.0, 1.0])) for _ in rows])
    matrix = np.zeros((len(rows), count))
    for number, terms in enumerate(rows):
        for at, factor in terms.items():
            matrix[number, at] = factor
    low = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=count, max_size=count)))
    whole = IntegerProgram(cost, amounts, low, np.ones(count), np.ones(count), csr_array(matrix), limits)
    small = summed(whole, data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    budget = float(data.draw(st.integers(0, 2 * count)))
    every = np.array(list(itertools.product((0.0, 1.0), repeat=count)))
    fits = (every >= low).all(1) & (every @ amounts <= budget) & (every @ matrix.T <= limits).all(1)
    if not fits.any():
        return
    best = (every @ (cost + 1e-6 * amounts))[fits].min()
    found = small.program.run(budget, 10.0, 0.0)
    assert found.fun <= best + 1e-6
    for choice in every[fits]:  # its sums keep to the small program, and cost the same
        sums = np.bincount(small.member_of, choice, minlength=len(small.program.cost))
        assert (small.program.matrix @ sums <= small.program.limits + 1e-9).all()
        assert sums @ small.program.cost == pytest.approx(choice @ cost)
        assert sums @ small.program.amounts == pytest.approx(choice @ amounts)
        assert (sums >= small.program.low).all()
        assert (sums <= small.program.high).all()


def test_layers_in_any_number_are_as_large_as_a_few():
    """What the counting solves does not grow with the layers, and is the linear program's optimum or better."""
    sizes = []
    for layers in (6, 12, 24):
        fun, args = unrolled(layers)
        found = planner(rm.trace(fun, *args).facts, "function", False)
        problem = found.problem()
        sizes.append(len(problem._summed.program.cost))
        for i in range(1, 6):
            budget = i * found.most // 6
            assert problem.count(budget, 20.0, 0.0)[0] >= problem.relax(budget) * (1 - 1e-6)
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_value_smaller_than_the_solver_sees():
    """Eight bytes are nothing beside 400 MB, but more than a budget that has no room for them."""

    def fun(w, v, x):
        y = jnp.sin(x @ w)
        return jnp.sum(jnp.exp(y)) * jnp.sum(jnp.sin(jnp.sin(v)))

    trace = rm.trace(fun, f32(10_000, 10_000), f32(2), f32(10_000, 10_000))
    plan = trace.plan(0, "function")
    assert plan.saved_bytes == 0
    found = planner(trace.facts, "function", False).problem()
    for budget in (0, 4, 8, 400_000_000, 400_000_004):
        assert found.solve(budget, 10.0, 0.01).saved_bytes <= budget


# ------------------------------------------------------------------------------------------------- bounds for a slider


@pytest.mark.parametrize("name", ["three_layers", "named_tanh", "scanned_relu", "attention", "nested_scan"])
def test_a_bound_is_the_linear_programs(name):
    trace = traced(name)
    found = planner(trace.facts, "function", False)
    problem, bare = found.problem(), trace.report("none", "function").recomputed_flops
    most = problem.measure(problem.names)[0]
    choices = itertools.chain.from_iterable(itertools.combinations(problem.names, k) for k in range(5))
    measured = [problem.measure(choice) for choice in itertools.islice(choices, 2000)]
    for i in range(12):
        point = trace.plan_bound(i * most // 11, "function")
        bound = problem.relax(point.budget_bytes)
        assert bound is not None
        if found.most <= point.budget_bytes:  # what autodiff keeps without a checkpoint fits, and may be less
            bound = min(bound, bare)
        # Of the whole, for which the solver's tolerance is meant.
        assert point.bound == pytest.approx(bound, rel=1e-6, abs=1e-6 * problem.measure(())[1] + 1)
        assert all(point.bound <= cost for saved, cost in measured if saved <= point.budget_bytes)
        assert point.saved_bytes <= point.budget_bytes
        assert (point.saved_bytes, point.recomputed_flops) in [
            (0, problem.measure(())[1]),
            (found.most, bare),
            *measured,
        ] or len(problem.names) > 4


@pytest.mark.parametrize("transformer", TRANSFORMERS)
def test_a_slider_does_not_wait(monkeypatch, transformer):
    """By a clock on which each program takes 15 ms: no step begins one that would end after its 40.

    What they take by a real one, benchmarks/plans.py tells.
    """
    clock = SimpleNamespace(now=0.0)
    solved = Problem.priced

    def priced(problem, price):
        clock.now += 0.015
        return solved(problem, price)

    monkeypatch.setattr(Problem, "priced", priced)
    clocks = SimpleNamespace(thread_time=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(hull, "time", clocks)
    fun, args = transformer(4)
    trace = rm.trace(fun, *args)
    most = planner(trace.facts, None, False).most
    trace.plan_bound(0.5, first=0.1)
    spent, points = [], []
    for i in range(40):
        began = clock.now
        points.append(trace.plan_bound(i * most // 39, seconds=0.04))
        spent.append(clock.now - began)
    assert 0.015 <= max(spent) <= 0.04
    assert spent[-1] == 0
    bounds = [point.bound for point in points]
    assert bounds == sorted(bounds, reverse=True)
    known = [point.recomputed_flops for point in points]
    assert known == sorted(known, reverse=True)
    assert all(point.bound <= point.recomputed_flops for point in points)


@pytest.mark.parametrize(
    ("blocks", "values", "separately"),
    [(4, 300, False), *(pytest.param(19, 1500, each, marks=pytest.mark.slow) for each in (False, True))],
)
def test_fifteen_hundred_values_within_a_hundredth(blocks, values, separately):
    fun, args = models.transformer(blocks)
    trace = rm.trace(fun, *args)
    found = planner(trace.facts, None, separately)
    assert len(found.every_value()) >= values
    least = found.graph.predict(())[0]
    dots = trace.preview("dots_saveable", "function").saved_bytes  # where the linear program's bound is 40% low
    for budget in (dots, *(int(least + part * (found.most - least)) for part in (0.1, 0.2, 0.25, 0.3, 0.5))):
        # Some 0.2 s on an idle machine; the rest is for a busy one, since the solver stops when it is there.
        solution = found.problem().solve(budget, 10.0, 0.01)
        assert solution is not None
        assert solution.saved_bytes <= budget
        assert solution.cost - solution.bound <= 0.01 * solution.cost


@pytest.mark.parametrize(
    ("model", "share"),
    [
        pytest.param(transformer(4), 0.9, id="small"),
        pytest.param(models.transformer(12), 0.8, id="GPT-2", marks=pytest.mark.slow),
    ],
)
def test_equal_layers_are_counted_where_telling_them_apart_does_not_end(model, share, monkeypatch):
    fun, args = model
    trace = rm.trace(fun, *args)
    dots = trace.report("dots_saveable", "function")
    problem, run = planner(trace.facts, "function", False).problem(), IntegerProgram.run

    def counted(program, *args, **decided):
        assert decided or program is not problem._program, "each layer is decided by itself"
        return run(program, *args, **decided)

    monkeypatch.setattr(IntegerProgram, "run", counted)
    plan = trace.plan(dots.saved_bytes, "function")
    assert plan.gap <= 0.01
    assert plan.recomputed_flops < share * dots.recomputed_flops
    assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)


@pytest.mark.parametrize("model", EACH_MODEL)
def test_between_corners_choices_are_mixed(model):
    found = planner(traced(model).facts, "function", True)
    problem, least = found.problem(), found.graph.predict(())[0]
    for i in range(6):
        budget = least + i * (found.most - least) // 5
        mixed = found.hull(1.0).mixed(budget)
        assert mixed is not None
        assert (mixed.saved_bytes, mixed.cost) == problem.measure(mixed.names)
        assert mixed.saved_bytes <= budget
        assert mixed.bound <= mixed.cost <= problem.measure(())[1]


@pytest.mark.parametrize("model", EACH_MODEL)
def test_points_of_the_frontier_are_near_their_bounds(model):
    # Time enough for a busy machine: it is not taken where all points are within a hundredth.
    for point in traced(model).frontier(20, seconds=60.0):
        assert point.recomputed_flops - point.bound <= 0.01 * point.recomputed_flops + 1
