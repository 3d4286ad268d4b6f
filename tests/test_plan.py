"""Plans: a table of programs and budgets against brute force, and what JAX, the solver and a compiler say of them."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax, units
from remat_magic.engine import retrace
from remat_magic.facts.times import times
from remat_magic.planning import solver
from remat_magic.planning.graph import Graph, saved_copies
from remat_magic.planning.search import objective, planner
from remat_magic.planning.solver import Problem
from remat_magic.records import Plan, PlannedValue, RematError
from remat_magic.views import format as fmt
from remat_magic.views.plans import plan_sentences
from tests.benchmarks import models
from tests.plan_helpers import BUILT_IN, EACH_PLACE, INEXACT, MODELS, as_reckoned, traced, transformer
from tests.programs import KINDS, PROGRAMS, f32
from tests.test_steps import step_of_value_and_grad

ON = "H100 SXM"
SLOW = rm.devices.Device("slow", {"f32": 1e9}, 1e8, 1e9, 10**9, 1e10, "invented: arithmetic so slow that a link pays")


def applied(trace, names, at, moved=()):
    """JAX's own report if just these names are saved, those that are moved in the host's memory."""
    if not names:
        return trace.report("nothing_saveable", at)
    values = tuple(PlannedValue(name, 0, offloaded=name in moved) for name in sorted(names))
    fingerprint = trace.engine.dissect(at).naming.fingerprint
    return trace.report(Plan(trace.function_name, at, "test", 0, 0, 0, 0, names=values, fingerprint=fingerprint))


def flat(function_and_arguments):
    fun, args = function_and_arguments
    return fun, *args


def figures(report):
    return report.saved_bytes, report.recomputed_flops


# ------------------------------------------------------------------------------------ what is promised is what JAX does


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
        assert "differ from those that the plan was made by" not in plan.status or not as_reckoned(trace, at)


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


# -------------------------------------------------------------------------------------------------- no choice is better


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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32).map(random.Random).map(random_graph), st.booleans())
def test_the_solver_finds_the_best_of_all_choices(graph, grouped):
    """Of any graph, and of its names in pairs; what runs is followed here by hand."""
    sizes = {name: size for name, (size, _) in graph.sizes(graph.gates).items()}
    group = {name: str(int(name[1]) // 2) for name in sizes} if grouped else None
    problem = Problem(graph, group=group)
    units = {}
    for name in sizes:
        units.setdefault(group[name] if group else name, []).append(name)
    found = []
    for chosen in itertools.product((False, True), repeat=len(units)):
        names = {name for unit, yes in zip(units.values(), chosen, strict=True) if yes for name in unit}
        running = [node for node, needed in enumerate(graph.needed) if needed]
        for node in running:  # which grows meanwhile
            running += [
                read
                for read in graph.reads[node]
                if read not in running and graph.gates.get(read, ("",))[0] not in names
            ]
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


@pytest.mark.parametrize("blocks", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_unrolled_layers_of_gpt_2_are_within_a_hundredth(blocks):
    fun, args = models.transformer(blocks)
    trace = rm.trace(fun, *args)
    found, most = planner(trace.facts, "function"), trace.report("none", "function").saved_bytes
    least = found.graph.predict(())[0]
    for part in (0.1, 0.2, 0.5):
        solution = found.problem().solve(int(least + part * (most - least)))
        assert solution.cost - solution.bound <= 0.01 * solution.cost
        assert solution.saved_bytes <= least + part * (most - least)


def test_a_search_ends_after_some_nodes_or_a_time(monkeypatch):
    asked, own = [], solver.milp
    monkeypatch.setattr(solver, "milp", lambda *a, **k: asked.append(k["options"]["node_limit"]) or own(*a, **k))
    trace = rm.trace(*flat(PROGRAMS["attention"]))
    trace.plan("40%", "function", gap=0.0)
    assert asked == [solver.NODES]
    monkeypatch.setattr(solver, "_SECONDS", 0.0)
    plan = trace.plan("30%", "function")
    assert plan.bound <= plan.recomputed_flops


def test_a_value_smaller_than_the_solver_sees():
    """Eight bytes are nothing beside 400 MB, but more than a budget that has no room for them."""

    def fun(w, v, x):
        return jnp.sum(jnp.exp(jnp.sin(x @ w))) * jnp.sum(jnp.sin(jnp.sin(v)))

    found = planner(rm.trace(fun, f32(10_000, 10_000), f32(2), f32(10_000, 10_000)).facts, "function").problem()
    for budget in (0, 4, 8, 400_000_000, 400_000_004):
        assert found.solve(budget).saved_bytes <= budget


# -------------------------------------------------------------------------------------------------------- within a peak


def block(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def scanned(params, x):
    return (jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2).sum()


def inner(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


@jax.checkpoint
def around(x, w):
    return inner(inner(x, w), w)


def nested(w, x):
    for _ in range(3):
        x = around(x, w)
    return (inner(x, w) ** 2).sum()


PEAKED = {
    "scanned MLP": (scanned, ({"up": f32(6, 16, 64), "down": f32(6, 64, 16)}, f32(64, 16))),
    "training step": (step_of_value_and_grad, ([f32(16, 16)] * 4, f32(32, 16), f32(32, 16))),
    "checkpoints": (nested, (f32(16, 16), f32(32, 16))),
}


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("checkpoints", None),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in itertools.product(PEAKED, (None, "TPU v5e"))),
    ],
)
def test_a_plan_for_a_peak_is_no_worse_than_any_choice_that_is_known(model, device):
    """Each policy at each place, and what was made or asked for before; below the least of all there is no plan."""
    trace = rm.trace(*flat(PEAKED[model]))
    plans = [trace.plan(saved="40%")]
    trace.report(lambda prim, *_, **__: prim.name == "dot_general", "function")  # no key says which it is
    sites = ["sites"] if any(not site.possible for site in trace.sites) else []
    places = ["function", *sites, *(site.key for site in trace.sites)]
    asked = [trace.report(policy, at, device=device) for at, policy in itertools.product(places, BUILT_IN)]
    asked += [trace.report(plan, device=device) for plan in plans]
    if model == "checkpoints":
        asked.append(trace.report(at={"around": "none", "inner": "nothing_saveable"}, device=device))
    peaks = sorted({report.peak_bytes for report in asked})
    for budget in (peaks[0], peaks[len(peaks) // 2]):
        least = min(report.recomputed_flops for report in asked if report.peak_bytes <= budget)
        plan = trace.plan(peak=budget, device=device)
        assert plan.peak_bytes <= budget == plan.budget_bytes
        assert plan.recomputed_flops <= least
        report = trace.report(plan, device=device)
        assert (report.peak_bytes, report.recomputed_flops) == (plan.peak_bytes, plan.recomputed_flops)
    error = None
    least = peaks[0]
    while error is None:
        try:
            least = trace.plan(peak=least - 1, device=device).peak_bytes
        except RematError as refusal:
            error = refusal
    assert f"the least found is {units.apart(least - 1, least)[1]} (" in str(error)


@pytest.mark.parametrize("share", ["60%", "70%"])
def test_a_plan_for_a_peak_takes_few_retraces(monkeypatch, share):
    """Few choices are tried where one fills the peak."""
    made, work = [], retrace.backward_half
    monkeypatch.setattr(retrace, "backward_half", lambda *args, **more: made.append(work) or work(*args, **more))
    fun, args = transformer(4)
    trace = rm.trace(fun, *args)
    plan = trace.plan(peak=share, compile=False)
    most = 20  # 28 and 26 where all is tried that is on the grid
    assert 0 < len(made) <= most
    report = trace.report(plan)
    assert report.complete
    same = ("saved_bytes", "peak_bytes", "recomputed_flops", "forward_flops", "uncosted")
    assert [getattr(report, name) for name in same] == [getattr(plan, name) for name in same]


def test_what_is_saved_is_held_at_the_peak():  # on which the bound of such plans rests
    for name in KINDS:
        for key in ("none", "dots_saveable", "nothing_saveable"):
            try:
                report = traced(name).report(key, "function")
            except RematError as error:
                assert "complex" in str(error)
                continue
            assert report.peak_bytes >= report.saved_bytes


def refuse(prim, *_, **params):
    raise ValueError(f"no policy for {prim}")


def test_a_peak_in_bytes_needs_no_peak_without_a_checkpoint(remat2):
    """JAX cannot trace this function without its own checkpoint: what is inside then has a policy that raises."""
    refused = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w), policy=refuse)

    @jax.checkpoint
    def governed(w, x):
        return (refused(w, refused(w, x)) ** 2).sum()

    trace = rm.trace(governed, f32(8, 8), f32(32, 8))
    with pytest.raises(RematError):
        trace.report("none")
    peak = trace.report("nothing_saveable", "sites").peak_bytes
    assert trace.plan(peak=peak).peak_bytes <= peak
    with pytest.raises(RematError, match="Give the budget in bytes"):
        trace.plan(peak="50%")


@pytest.mark.parametrize("device", ["H100 SXM", "TPU v5e"])
def test_a_plan_says_where_only_a_part_of_its_range_fits(device):
    trace = traced("scanned transformer")
    report = trace.report("nothing_saveable", device=device)
    close, roomy = (trace.plan(peak=peak, device=device) for peak in (report.peak_bytes, "1 TB"))
    told = trace.report(close if close.names else close.policy, close.at, device=device)
    assert (close.peak_low, close.peak_high) == (told.peak_low, high := told.peak_high)
    assert close.peak_low < close.peak_bytes <= close.budget_bytes < high
    assert fmt.about(close.peak_bytes, close.peak_low, high) in plan_sentences(close)[0]
    assert f"may be up to {units.nbytes(high)}, which is more" in close.status
    assert "may be up to" not in roomy.status
    assert "may be up to" not in trace.plan(peak="90%").status  # of no device there is no range


# --------------------------------------------------------------------------------------- seconds, and the host's memory


@pytest.mark.parametrize("device", ["H100 SXM", "TPU v5e"])
def test_seconds_are_those_of_the_report(device):
    trace = traced("scanned transformer")
    least = trace.preview("nothing_saveable").saved_bytes
    budget = int(least + 0.4 * (trace.preview("none").saved_bytes - least))
    plan, fewest = trace.plan(budget, cost="seconds", device=device), trace.plan(budget)
    assert (plan.cost, plan.device, plan.host_bandwidth) == ("seconds", device, None)
    assert plan.seconds == times(trace.report(plan), device).extra
    assert plan.seconds <= times(trace.report(fewest), device).extra  # what spares FLOPs takes no less time
    assert plan.saved_bytes <= budget
    assert plan.bound_seconds <= plan.seconds
    assert 0 <= plan.gap <= 1
    # All recomputation in seconds is near the report's: nodes that differentiate at once count for it alone.
    found = planner(trace.facts, trace.default_at)
    reckoned = found.problem(objective("seconds", device, None)).measure(())[1]
    assert reckoned == pytest.approx(times(trace.report("nothing_saveable"), device).recomputed, rel=0.35)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_offloaded_is_what_jax_offloads(model):
    trace, (fun, args) = traced(model), MODELS[model]()
    at = trace.default_at
    least = trace.preview("nothing_saveable", at).saved_bytes
    budget = int(least + 0.3 * (trace.preview("none", at).saved_bytes - least))
    plan = trace.plan(budget, at, device=SLOW, offload=True)
    assert plan.offloaded_bytes > 0
    assert plan.offloaded_bytes == sum(value.nbytes for value in plan.names if value.offloaded)
    assert "differ from those that the plan was made by" not in plan.status
    assert plan.saved_bytes <= budget
    assert plan.host_bandwidth == SLOW.host_bandwidth
    alone = trace.plan(budget, at, cost="seconds", device=SLOW)
    assert plan.seconds < alone.seconds  # moving costs less than computing here
    assert alone.offloaded_bytes == 0
    applied = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (applied.offloaded_bytes, applied.saved_bytes) == (plan.offloaded_bytes, plan.saved_bytes)
    # A slow link moves nothing.
    assert trace.plan(budget, at, device=SLOW, offload=1.0).offloaded_bytes == 0


# ---------------------------------------------------------------------------------------------------- what is asked for


UNLINKED = dataclasses.replace(SLOW, name="unlinked", host_bandwidth=None)
REFUSED = [
    ({"budget": 10, "of": "temperature"}, "choose 'saved' or 'peak'"),
    ({"budget": 10, "cost": "money"}, "choose 'flops' or 'seconds'"),
    ({"budget": 10, "cost": "seconds", "device": "abacus"}, "known are"),
    ({"budget": 10, "device": UNLINKED, "offload": True}, "give offload= in bytes/s"),
    ({"budget": 10, "device": UNLINKED, "offload": 0}, "give the bandwidth"),
    ({"budget": 10, "device": UNLINKED, "offload": "fast"}, "no number of bytes"),
    ({"budget": 10, "gap": -0.1}, "give 0 or more"),
    ({"budget": 10, "at": ["function"]}, "one place"),
    ({"budget": 10, "at": {"function": "none"}}, "one place"),
    ({"budget": "a lot"}, "no number of bytes"),
    ({}, "give saved="),
    ({"saved": 0.5, "peak": 0.5}, "give saved="),
    ({"budget": 0.5, "peak": 0.5}, "give saved="),
]


@pytest.mark.parametrize(("options", "mend"), REFUSED)
def test_what_plans_cannot_do_is_told_with_the_mend(options, mend):
    with pytest.raises(RematError, match=mend):
        traced("three_layers").plan(**options)


def test_budgets_are_bytes_texts_or_shares_of_one_thing():
    trace = traced("three_layers")
    most, peak = trace.report("none").saved_bytes, trace.report("none").peak_bytes
    assert trace.plan("1 kB").budget_bytes == 1000
    assert trace.plan(saved=40).budget_bytes == 40
    assert trace.plan(0.5).budget_bytes == trace.plan(saved="50%").budget_bytes == most // 2
    assert trace.plan(1.0, of="peak").budget_bytes == trace.plan(peak="100%").budget_bytes == peak
    assert trace.plan(1.0).recomputed_flops == 0  # all that autodiff saves by itself
    assert trace.plan(10, device=UNLINKED, offload="16 GB/s").host_bandwidth == 16e9
    with pytest.raises(RematError, match="keeps 96 B"):  # what sites keep anyway is not to be planned away
        traced("scanned_checkpoint").plan(10, "sites")


@pytest.mark.slow
def test_plans_compared_have_keys_of_their_own():
    trace = rm.trace(*flat(transformer(2, site=True)))
    budget = trace.preview("none", "sites").saved_bytes // 2
    plans = [trace.plan(budget, "sites"), trace.plan(budget, "function"), trace.plan(peak=2 * budget, at="sites")]
    plans.append(dataclasses.replace(plans[0], names=plans[0].names[:1]))  # as plans of other sessions may be
    found = trace.compare([*plans, plans[0]], device="H100 SXM")
    keys = [f"plan({budget})", f"plan({budget} at function)", f"plan(peak {2 * budget})", f"plan({budget}) #2"]
    assert [row.policy for row in found.rows] == [*keys, keys[0]]
    assert len({found.row(key).label for key in keys}) == len(keys)
    for plan, key in zip(plans, keys, strict=True):
        report, row = trace.report(plan), found.row(key)
        assert (row.at, row.saved_bytes, row.recomputed_flops) == (plan.at, report.saved_bytes, report.recomputed_flops)
    refused = trace.compare([plans[0]], at="function")
    assert "leave `at` out" in refused.rows[0].error


# --------------------------------------------------------------------------------------------------------------- places


@pytest.mark.slow
def test_a_plan_chooses_its_place():
    """Where the peak is not lower at the usual place, no plan fits there, or another place is known to be better."""
    trace = rm.trace(*flat(transformer(2, scanned=True)))
    without = trace.report("none").peak_bytes
    usual, plan = trace.plan(saved="40%", at="function"), trace.plan(saved="40%")
    assert usual.peak_bytes > without
    assert "Its estimated peak is hardly lower than without a checkpoint there" in usual.status
    assert plan.at == trace.report(plan).at == "block"
    assert "The place, block, was chosen with the plan; at another place less may be recomputed." in plan.status
    assert usual.recomputed_flops < plan.recomputed_flops
    assert plan.saved_bytes <= plan.budget_bytes == usual.budget_bytes
    assert plan.peak_bytes < 0.8 * without
    with pytest.raises(RematError, match="No plan at 'function'"):
        trace.plan(peak=0.8, at="function")
    plan = trace.plan(peak=0.8)
    assert plan.at == "block"
    assert trace.report(plan).peak_bytes == plan.peak_bytes <= plan.budget_bytes == int(0.8 * without)


def test_a_plan_that_fits_nowhere_but_elsewhere():
    @jax.checkpoint
    def head(w, x):
        return jnp.sin(x @ w)

    def layer(w, x):
        return jnp.tanh(jnp.sin(x @ w) @ w)

    def loss(w, x):
        for _ in range(6):
            x = layer(w, x)
        return head(w, x).sum()

    trace = rm.trace(loss, f32(16, 16), f32(512, 16))
    with pytest.raises(rm.RematError, match="too few"):
        trace.plan("50%", at="sites")
    plan = trace.plan("50%")
    assert plan.at == "layer"
    assert trace.report(plan).saved_bytes <= trace.report("none", "sites").saved_bytes // 2
    assert trace.plan("1%").at == "function"  # where nothing is saved if nothing needs to be


@pytest.mark.parametrize("budget", ["10%", "50%"])
def test_where_checkpoints_that_are_there_keep_too_much_a_plan_goes_elsewhere(budget):
    """Scanned steps with a checkpoint keep what they carry, whatever is chosen at these."""

    def member(p, x):
        body = jax.checkpoint(lambda x, p: (x + jax.nn.relu(x @ p["a"]) @ p["c"], None))
        return (jax.lax.scan(body, x, p)[0] ** 2).mean()

    def ensemble(ps, x):
        return jax.vmap(member, (0, None))(ps, x).sum()

    trace = rm.trace(ensemble, {"a": f32(2, 3, 4, 6), "c": f32(2, 3, 6, 4)}, f32(3, 4))
    with pytest.raises(rm.RematError):
        trace.plan(budget, at="sites")
    plan = trace.plan(budget)
    assert plan.at != "sites"
    assert trace.report(plan if plan.names else plan.policy, plan.at).saved_bytes <= plan.budget_bytes


def test_complex_values_are_said_to_be_no_choices():
    """JAX cannot save them under a policy: what a plan saves is real, and its bound is of that alone."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(jnp.fft.ifft(jnp.fft.fft(x) * w).real) * x
        return (x**2).sum()

    trace = rm.trace(loss, [jax.ShapeDtypeStruct((16,), "complex64")] * 3, f32(8, 16))
    for options in ({"budget": "40%"}, {"peak": "90%"}):
        plan = trace.plan(**options)
        report = trace.report(plan if plan.names else plan.policy, plan.at)
        assert figures(report) == figures(plan)
        assert not any("c64" in row.dtype for row in report.residuals if row.kind == "intermediate")
        assert "complex values" in plan.unreached
        assert "Plans cannot choose complex values" in plan.status
    assert "complex values" not in traced("three_layers").plan(64).unreached


@pytest.mark.slow
def test_a_plan_of_several_places_is_applied():
    """Each place with its policy, as the row of the search has them."""
    fun, args = PEAKED["checkpoints"]
    trace = rm.trace(fun, *args)
    report = trace.report(at={"around": "none", "inner": "nothing_saveable"})
    plan = dataclasses.replace(trace.plan(peak="95%"), policy="mixed", at=report.at, names=())
    applied = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (applied.saved_bytes, applied.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)


# ------------------------------------------------------------------------------------------------ where values are made


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
            assert "values inside the branches of a conditional" in plan.unreached
            assert "Plans cannot choose values inside the branches of a conditional" in plan.status
    assert "branches" not in traced("three_layers").plan(64).status
    outside = rm.trace(lambda p, x: jax.lax.cond(p, lambda x: x, lambda x: x, jnp.sin(x @ x)).sum(), *args)
    assert "branches" not in outside.plan(64, "function").status


def test_a_place_in_a_branch_says_that_its_values_are_no_choices():
    def hot(x):
        return jnp.sin(jnp.sin(checkpoint_name(x @ x, "a")) @ x)

    def loss(flag, x):
        return jax.lax.cond(flag, hot, jnp.cos, x).sum()

    trace = rm.trace(loss, jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((64, 64), "float32"))
    named = trace.report("save_only_these_names('a')", at="hot")
    plan = trace.plan(named.saved_bytes, at="hot")
    assert "values inside the branches of a conditional" in plan.unreached
    assert "No choice of names" not in plan.status


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
    for name, copies in saved_copies(parts.naming).items():
        value = parts.naming.values[name]
        found.setdefault(_jax.primitive_name(value.eqn) if value.output is not None else "carry", set()).add(copies)
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


@pytest.mark.slow
def test_names_in_the_rules_of_custom_derivatives_are_choices():
    """Three layers of an attention that names its output and its log-sum-exp in its forward rule, as MaxText does."""

    def loss(layers, x):
        for w in layers:
            x = x + jnp.tanh(attend(x @ w[0], x @ w[1], x @ w[2]) @ w[3])
        return (x**2).sum()

    args = [f32(4, 8, 8)] * 3, f32(16, 8)
    trace = rm.trace(loss, *args)
    named = trace.report("save_only_these_names('out', 'lse')", "function")
    plan = trace.plan(named.saved_bytes, "function")
    assert plan.recomputed_flops <= named.recomputed_flops
    assert "differ from those that the plan was made by" not in plan.status
    inside = any("rules of custom derivatives" in where for where in plan.unreached)
    assert inside == _jax.remat3()  # there no policy reaches into a rule, and no bound is of what is in it
    if inside:
        return
    assert {"out", "lse"} <= {value.name for value in planner(trace.facts, "function").every_value().values()}
    less = trace.plan(plan.saved_bytes // 3, "function")  # each call of the rule is decided by itself
    assert "differ from those that the plan was made by" not in less.status
    assert figures(rm.trace(loss, *args).report(less)) == figures(less)
    arrays = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(0, 0.1, leaf.shape).astype("f4"), args)
    ours, theirs = (jax.tree.leaves(jax.jit(jax.grad(each))(*arrays)) for each in (less.apply(loss), loss))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


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
