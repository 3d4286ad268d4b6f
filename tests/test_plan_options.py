"""Plans for a peak, for seconds, with offloading, and several plans side by side."""

import dataclasses
import itertools
import random
import re

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import units
from remat_magic.facts.times import times
from remat_magic.planning import peak_plans, saved_plans
from remat_magic.planning.graph_building import build
from remat_magic.planning.planner import objective, planner
from remat_magic.planning.problem import Problem
from remat_magic.records import Plan, PlannedValue, RematError
from remat_magic.units import parse_bytes
from tests.benchmarks import models, named_models
from tests.plan_helpers import (
    BUILT_IN,
    EACH_MODEL,
    EACH_PLACE,
    INEXACT,
    MODELS,
    MODELS_AT,
    TRANSFORMERS,
    as_reckoned,
    traced,
    transformer,
)
from tests.programs import PROGRAMS, f32
from tests.volume import usually

# ---------------------------------------------------------------------------------------------------- keys of plans


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(transformer(2, site=True), id="small"),
        pytest.param(named_models.transformer(2, 32, 16, 2, scanned=False), id="named", marks=pytest.mark.slow),
    ],
)
def test_plans_compared_have_keys_of_their_own(model):
    trace = rm.trace(*flat(model))
    budget = trace.preview("none", "sites").saved_bytes // 2
    peak = int((trace.report("none", "sites").peak_bytes or 0) * 0.8)
    plans = [
        trace.plan(budget, "sites"),
        trace.plan(budget, "function"),
        trace.plan(budget, "sites", separately=True),
        trace.plan(budget, "sites", cost="seconds", device="H100 SXM"),
        trace.plan(peak, "sites", of="peak"),
    ]
    # Other choices for the same words, as plans of other sessions may be.
    plans += [dataclasses.replace(plans[0], names=plans[0].names[:1]), dataclasses.replace(plans[1], policy="plan(9)")]
    plans += [dataclasses.replace(plans[2], policy="plan(9)")]
    found = trace.compare([*plans, plans[0]], device="H100 SXM")
    keys = [row.policy for row in found.rows]
    assert keys == [
        f"plan({budget})",
        f"plan({budget} at function)",
        f"plan({budget}, one by one)",
        f"plan({budget}, seconds on H100 SXM)",
        f"plan(peak {peak})",
        f"plan({budget}) #2",
        "plan(9)",
        "plan(9) at sites",
        f"plan({budget})",
    ]
    within = f"plan within {units.nbytes(budget)}"
    labels = [found.row(key).label for key in keys]
    assert labels == [
        within,
        f"{within} at function",
        f"{within}, one by one",
        f"{within}, seconds on H100 SXM",
        f"plan within {units.nbytes(peak)} of peak",
        f"{within} #2",
        f"{within} at function",  # the label of the plan that was given another key here
        f"{within}, one by one at sites",
        within,
    ]
    assert [plan.label for plan in plans[:5]] == labels[:5]
    shown = found._repr_html_()
    assert all(label in shown for label in labels)
    assert "plan(" not in re.sub(r'="[^"]*"', "", shown)  # keys stand only where scripts read them
    for plan, key in zip(plans, keys, strict=False):
        report = trace.report(plan)
        row = found.row(key)
        assert (row.at, row.saved_bytes, row.recomputed_flops) == (plan.at, report.saved_bytes, report.recomputed_flops)
    assert found.difference(keys[0], keys[5]).residuals_only_in_a  # its other values
    refused = trace.compare([plans[0]], at="function")
    assert refused.rows[0].policy == keys[0]
    assert "leave `at` out" in refused.rows[0].error


# ---------------------------------------------------------------------------------------------------------- peaks


@pytest.mark.parametrize(("model", "at"), MODELS_AT)
def test_no_plan_exceeds_its_peak(model, at):
    trace = traced(model)
    if at == "sites" and not trace.engine.sites:
        return
    most = trace.report("none", at).peak_bytes
    assert most is not None
    for part in (0.9, 0.75):
        try:
            plan = trace.plan(part, at, of="peak")
        except RematError as error:
            least = 1.01 * parse_bytes(" ".join(str(error).split("the least found is ")[1].split()[:2]))
            assert least > int(part * most)
            continue
        report = trace.report(plan)
        assert (plan.peak_bytes, plan.recomputed_flops) == (report.peak_bytes, report.recomputed_flops)
        assert plan.peak_bytes <= plan.budget_bytes == int(part * most)
        assert plan.of == "peak"
        assert plan.bound <= plan.recomputed_flops
        for key in BUILT_IN:  # none of these fits and costs less
            other = trace.report(key, at)
            assert other.peak_bytes > plan.budget_bytes or other.recomputed_flops >= plan.recomputed_flops


def test_what_is_saved_is_held_at_the_peak():  # on which the bound of such plans rests
    for name in PROGRAMS:
        for key in ("none", "dots_saveable", "nothing_saveable"):
            try:
                report = traced(name).report(key, "function")
            except RematError as error:
                assert "complex" in str(error)
                continue
            assert report.peak_bytes >= report.saved_bytes


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(transformer(2, batch=4096), id="small"),
        pytest.param(models.transformer(2), id="GPT-2", marks=pytest.mark.slow),
    ],
)
def test_on_a_device_nothing_is_proven_of_a_plan_for_a_peak(model):
    """There a peak can be lower than what is saved: values are narrower, or in another memory."""
    trace = rm.trace(*flat(model))
    for device in (None, "TPU v5e"):
        plan = trace.plan(peak="90%", at=trace.default_at, device=device, cost="flops")  # of a TPU 87% is the least
        assert plan.recomputed_flops > 0
        assert (plan.bound > 0) == (device is None)


@pytest.mark.parametrize("name", ["three_layers", "scanned_relu", "scanned_checkpoint"])
def test_a_small_plan_for_a_peak_against_all_choices(name):
    trace = traced(name)
    at = trace.default_at
    names = Problem(build(trace.engine.dissect(at))).names
    choices = itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))
    fingerprint = trace.engine.dissect(at).naming.fingerprint
    values = [tuple(PlannedValue(name, 0) for name in choice) for choice in choices if choice]
    draft = Plan(trace.function_name, at, "test", 0, 0, 0, 0, fingerprint=fingerprint)
    reports = [trace.report(dataclasses.replace(draft, names=each)) for each in values]
    reports += [trace.report(key, at) for key in BUILT_IN]
    for budget in sorted({report.peak_bytes for report in reports}):
        best = min(report.recomputed_flops for report in reports if report.peak_bytes <= budget)
        plan = trace.plan(budget, at, of="peak", gap=0.0)
        assert plan.bound <= best  # a bound of all choices
        assert plan.recomputed_flops == best  # the search is no proof, yet finds it in these
    least = units.nbytes(min(report.peak_bytes for report in reports))
    with pytest.raises(RematError, match=f"the least found is {least} "):
        trace.plan(min(report.peak_bytes for report in reports) - 1, at, of="peak")


# --------------------------------------------------------------------------------------- seconds, and the host's memory

SLOW = rm.devices.Device("slow", {"f32": 1e9}, 1e8, 1e9, 10**9, 1e10, "invented: arithmetic so slow that a link pays")


@pytest.mark.each_once
@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize("device", ["H100 SXM", "TPU v5e"])
def test_seconds_are_those_of_the_report(model, device):
    trace = traced(model)
    least = trace.preview("nothing_saveable").saved_bytes
    budget = int(least + 0.4 * (trace.preview("none").saved_bytes - least))
    plan, fewest = trace.plan(budget, cost="seconds", device=device), trace.plan(budget)
    assert (plan.cost, plan.device, plan.host_bandwidth) == ("seconds", device, None)
    assert plan.seconds == times(trace.report(plan), device).extra
    assert plan.seconds <= times(trace.report(fewest), device).extra  # what spares FLOPs takes no less time
    assert plan.saved_bytes <= budget
    assert plan.bound_seconds <= plan.predicted_seconds
    assert 0 <= plan.gap <= 1


@pytest.mark.parametrize("model", EACH_MODEL)
def test_all_recomputation_in_seconds_is_near_the_reports(model):
    trace = traced(model)
    for device in ("H100 SXM", "TPU v5e", SLOW):
        found = planner(trace.facts, trace.default_at, False)
        reckoned = found.problem(objective("seconds", device, None)).measure(())[1]
        told = times(trace.report("nothing_saveable"), device).recomputed
        # Nodes that recompute and differentiate at once count for their recomputation alone.
        assert reckoned == pytest.approx(told, rel=0.35)


@pytest.mark.parametrize(("name", "at"), EACH_PLACE)
def test_any_choice_that_is_offloaded_is_what_is_reckoned(name, at):
    trace = traced(name)
    if not as_reckoned(trace, at) or name in INEXACT:
        return
    found = planner(trace.facts, at, False)
    dice = random.Random(name)
    for _ in range(2):
        names = found.graph.used([name for name in found.parts.naming.values if dice.random() < 0.6])
        moved = frozenset(name for name in names if dice.random() < 0.5)
        if names:
            report = trace.report(found.draft("test", 0, tuple(found.values(names, moved))))
            assert found.graph.figures(names, moved) == (
                report.saved_bytes,
                report.recomputed_flops,
                report.offloaded_bytes,
            )


@pytest.mark.parametrize("model", EACH_MODEL)
def test_what_is_offloaded_is_what_jax_offloads(model):
    trace, (fun, args) = traced(model), MODELS[model]()
    at = trace.default_at
    least = trace.preview("nothing_saveable", at).saved_bytes
    budget = int(least + 0.3 * (trace.preview("none", at).saved_bytes - least))
    plan = trace.plan(budget, at, device=SLOW, offload=True)
    assert plan.offloaded_bytes == plan.predicted_offloaded_bytes > 0
    assert plan.offloaded_bytes == sum(value.nbytes for value in plan.names if value.offloaded)
    assert (plan.saved_bytes, plan.recomputed_flops) == (plan.predicted_bytes, plan.predicted_flops)
    assert plan.saved_bytes <= budget
    assert plan.host_bandwidth == SLOW.host_bandwidth
    alone = trace.plan(budget, at, cost="seconds", device=SLOW)
    assert plan.seconds < alone.seconds  # moving costs less than computing here
    assert alone.offloaded_bytes == 0
    # Written out and read, it does the same.
    again = trace.report(Plan.from_json(plan.to_json()))
    assert again.offloaded_bytes == plan.offloaded_bytes
    applied = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (applied.offloaded_bytes, applied.saved_bytes) == (plan.offloaded_bytes, plan.saved_bytes)
    # A slow link moves nothing.
    assert trace.plan(budget, at, device=SLOW, offload=1.0).offloaded_bytes == 0


@pytest.mark.parametrize("name", ["three_layers", "named_tanh"])
def test_a_small_plan_with_offloading_is_the_best_of_all_choices(name):
    trace = traced(name)
    found = planner(trace.facts, "function", False)
    least = objective("seconds", SLOW, 1e8)
    problem = found.problem(least)
    every, (_, _, moved_bytes) = frozenset(problem.names), found.graph.figures(problem.names, problem.names)
    there_and_back = problem.measure(every, every)[1] - problem.measure(every)[1]
    assert there_and_back == pytest.approx(2 * moved_bytes / 1e8)
    everything = []
    for choice in itertools.product((None, False, True), repeat=len(problem.names)):
        names = found.graph.used([name for name, kept in zip(problem.names, choice, strict=True) if kept is not None])
        moved = {name for name, kept in zip(problem.names, choice, strict=True) if kept} & names
        everything.append(problem.measure(names, moved))
    for budget in sorted({saved for saved, _ in everything}):
        solution = problem.solve(budget, 10.0, 0.0)
        assert solution is not None
        assert solution.saved_bytes <= budget
        assert solution.cost == pytest.approx(min(cost for saved, cost in everything if saved <= budget), rel=1e-6)
        assert solution.bound <= solution.cost * (1 + 1e-9)


def test_what_plans_cannot_do_is_told():
    trace = traced("three_layers")
    with pytest.raises(RematError, match="nothing that a budget can be of"):
        trace.plan(10, of="temperature")
    with pytest.raises(RematError, match="nothing that a plan can make least"):
        trace.plan(10, cost="money")
    with pytest.raises(RematError, match="No device is called"):
        trace.plan(10, cost="seconds", device="abacus")
    unlinked = dataclasses.replace(SLOW, name="unlinked", host_bandwidth=None)
    with pytest.raises(RematError, match="give offload= in bytes/s"):
        trace.plan(10, device=unlinked, offload=True)
    assert trace.plan(10, device=unlinked, offload="16 GB/s").host_bandwidth == 16e9
    with pytest.raises(RematError, match="moves nothing"):
        trace.plan(10, device=unlinked, offload=0)
    with pytest.raises(RematError, match="no number of bytes"):
        trace.plan(10, device=unlinked, offload="fast")


# ------------------------------------------------------------------------------------------------- what runs out


def flat(function_and_arguments):
    fun, args = function_and_arguments
    return fun, *args


def key_of(plan):
    return plan.of, plan.policy, plan.budget_bytes, plan.saved_bytes, plan.peak_bytes, plan.names


@pytest.mark.parametrize("part", usually([0.6, 0.9], 0.9))
def test_a_budget_says_what_it_is_of(part):
    trace = traced("scanned transformer")
    assert key_of(trace.plan(saved=part, at="sites")) == key_of(trace.plan(part, "sites"))
    assert key_of(trace.plan(peak=part, at="sites")) == key_of(trace.plan(part, "sites", of="peak"))
    for budgets in ({}, {"saved": 0.5, "peak": 0.5}, {"budget": 0.5, "peak": 0.5}):
        with pytest.raises(rm.RematError, match="one budget"):
            trace.plan(at="sites", **budgets)


def lowered(status):
    """What a sentence says lowers the peak, and to what."""
    ((label, peak),) = re.findall(r"\. ([^.]+(?:\.\d+)?[^.]*) lowers it to (\S+ \w+)\.", status)
    return label, peak


@pytest.mark.parametrize("transformer", TRANSFORMERS)
def test_a_plan_that_gains_nothing_says_so(transformer):
    """Around a function that scans a plan saves less, and all of it comes back at once; on the scan's body not."""
    trace = rm.trace(*flat(transformer(3, scanned=True)))
    plan = trace.plan(saved="10%", at="function")
    assert plan.peak_bytes >= trace.report("none").peak_bytes
    assert "less is saved than without a checkpoint, but the estimated peak is" in plan.status
    # What lowers it is said at once, and after a search the one of all places that adds least.
    label, peak = lowered(plan.status)
    assert peak == units.nbytes(trace.report(*label.split(" at ")).peak_bytes)
    assert parse_bytes(peak) < 0.8 * plan.peak_bytes
    places = trace.places(seconds=60)
    label, peak = lowered(trace.plan(saved="20%", at="function").status)
    row = next(row for row in places if row.label == label)
    assert units.nbytes(row.peak_bytes) == peak
    assert row.peak_bytes == trace.report(row.policy, row.at).peak_bytes < 0.8 * plan.peak_bytes
    useful = traced("scanned transformer").plan(saved="10%", at="sites")
    assert "less is saved" not in useful.status


@pytest.mark.parametrize("transformer", TRANSFORMERS)
def test_a_plan_for_saved_bytes_chooses_its_place(transformer):
    """Where the peak is not lower at the usual place, no plan fits there, or another place is known to be better."""
    trace = rm.trace(*flat(transformer(3, scanned=True)))
    usual, plan = trace.plan(saved="40%", at="function"), trace.plan(saved="40%")
    assert usual.peak_bytes > trace.report("none").peak_bytes
    report = trace.report(plan)
    assert (plan.at, report.at) == ("block", "block")
    assert plan.status.endswith("Its place, block, was chosen with it.")
    assert report.saved_bytes == plan.saved_bytes <= plan.budget_bytes == usual.budget_bytes
    assert report.peak_bytes == plan.peak_bytes < 0.8 * trace.report("none").peak_bytes
    assert key_of(plan) == key_of(trace.plan(saved=plan.budget_bytes, at="block"))
    assert trace.plan("40%").at == "block"

    # Unrolled, the usual place is as good as another.
    unrolled = rm.trace(*flat(transformer(2)))
    assert key_of(unrolled.plan("40%")) == key_of(unrolled.plan("40%", at="function"))


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
    with pytest.raises(rm.RematError, match="too few: nothing_saveable at 'sites'"):
        trace.plan("1%")


@pytest.mark.parametrize("transformer", TRANSFORMERS)
def test_a_plan_for_a_peak_chooses_its_place(transformer):
    """Around a function that scans nothing lowers the peak; on the scan's body it does."""
    trace = rm.trace(*flat(transformer(3, scanned=True)))
    without = trace.report("none").peak_bytes
    with pytest.raises(rm.RematError, match="No plan at 'function'"):
        trace.plan(peak=0.8, at="function")
    plan = trace.plan(peak=0.8)
    report = trace.report(plan)
    assert plan.at == report.at == "block"
    assert report.peak_bytes == plan.peak_bytes <= plan.budget_bytes == int(0.8 * without)
    assert plan.recomputed_flops <= trace.plan(peak=plan.budget_bytes, at="block").recomputed_flops
    rows = trace.places(seconds=60)
    for row in rows:  # no row that fits recomputes less
        assert row.peak_bytes > plan.budget_bytes or row.recomputed_flops >= plan.recomputed_flops
    least = min(row.peak_bytes for row in rows)
    with pytest.raises(rm.RematError, match=f"the least found is {re.escape(units.nbytes(least))}"):
        trace.plan(peak=1000)


@pytest.mark.slow  # of how much is traced; both searches are tried whole
@pytest.mark.parametrize("share", ["45%", "60%", "85%"])
def test_what_cannot_win_within_a_peak_is_not_traced(monkeypatch, share):
    def found():
        applied = []
        own = saved_plans._applied
        monkeypatch.setattr(saved_plans, "_applied", lambda *args: applied.append(args) or own(*args))
        fun, args = models.transformer(4)
        plan = rm.trace(fun, *args).plan(peak=share, seconds=120)  # so that neither search is cut short
        monkeypatch.setattr(saved_plans, "_applied", own)
        return plan, len(applied)

    plan, few = found()
    monkeypatch.setattr(peak_plans._PeakSearch, "_cannot_win", lambda *_: False)
    monkeypatch.setattr(peak_plans._PeakSearch, "_has_floor", False)
    exhaustive, many = found()
    assert plan.peak_bytes <= plan.budget_bytes
    assert few < 0.8 * many
    # Solutions are within the solver's gap of the best, and the last steps are spared where they gain no more.
    assert plan.recomputed_flops <= exhaustive.recomputed_flops * 1.02
