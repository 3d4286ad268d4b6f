"""Plans for a peak, for seconds, with offloading, at a place that is chosen, and several plans side by side."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import units
from remat_magic.facts.times import times
from remat_magic.planning.planner import objective, planner
from remat_magic.records import Plan, RematError
from remat_magic.units import parse_bytes
from tests.plan_helpers import BUILT_IN, MODELS, traced, transformer
from tests.programs import KINDS, f32
from tests.test_plan import SLOW
from tests.test_steps import step_of_value_and_grad


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


def named(w, x):
    for _ in range(2):
        x = checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "layer")
    return (inner(around(x, w), w) ** 2).sum()


PEAKED = {
    "scanned MLP": (scanned, ({"up": f32(6, 16, 64), "down": f32(6, 64, 16)}, f32(64, 16))),
    "training step": (step_of_value_and_grad, ([f32(16, 16)] * 4, f32(32, 16), f32(32, 16))),
    "checkpoints": (nested, (f32(16, 16), f32(32, 16))),
}


def new(model):
    fun, args = PEAKED[model]
    return rm.trace(fun, *args)


# ---------------------------------------------------------------------------------------------------------- peaks


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("checkpoints", None),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in itertools.product(PEAKED, (None, "TPU v5e"))),
    ],
)
def test_a_plan_for_a_peak_is_no_worse_than_any_choice_that_is_known(model, device):
    """Each policy at each place, and what was made or asked for before; below the least of all there is no plan."""
    trace = new(model)
    plans = [trace.plan(saved="40%")]
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


@pytest.mark.slow
def test_a_plan_for_a_peak_at_a_place_is_no_worse_than_jaxs_policies_there():
    for model in MODELS:
        trace = traced(model)
        most = trace.report("none", "sites").peak_bytes
        plan = trace.plan(0.9, "sites", of="peak")
        report = trace.report(plan)
        assert (plan.peak_bytes, plan.recomputed_flops) == (report.peak_bytes, report.recomputed_flops)
        assert plan.peak_bytes <= plan.budget_bytes == int(0.9 * most)
        assert plan.bound <= plan.recomputed_flops
        for key in BUILT_IN:
            other = trace.report(key, "sites")
            assert other.peak_bytes > plan.budget_bytes or other.recomputed_flops >= plan.recomputed_flops


@pytest.mark.slow
def test_what_was_asked_for_in_passing_is_found():
    """A policy by the program's own names, at a place where a plan tries few others."""
    trace = rm.trace(named, f32(16, 16), f32(64, 16))
    for name in ("product", "layer"):
        asked = trace.report(f"save_only_these_names({name!r})", "function")
        assert trace.plan(peak=asked.peak_bytes).recomputed_flops <= asked.recomputed_flops


@pytest.mark.slow
def test_policies_of_ones_own_and_offloading_are_no_choices():
    trace = new("checkpoints")
    own = trace.report(lambda prim, *_, **__: prim.name == "dot_general", "function")
    moved = trace.report("offload_dot_with_no_batch_dims('device', 'pinned_host')", "sites")
    assert moved.offloaded_bytes > 0
    plan = trace.plan(peak=own.peak_bytes)
    assert plan.policy != own.policy
    assert plan.offloaded_bytes == 0


def test_what_is_saved_is_held_at_the_peak():  # on which the bound of such plans rests
    for name in KINDS:
        for key in ("none", "dots_saveable", "nothing_saveable"):
            try:
                report = traced(name).report(key, "function")
            except RematError as error:
                assert "complex" in str(error)
                continue
            assert report.peak_bytes >= report.saved_bytes


@pytest.mark.slow
def test_on_a_device_nothing_is_proven_of_a_plan_for_a_peak():
    """There a peak can be lower than what is saved: values are narrower, or in another memory."""
    trace = rm.trace(*flat(transformer(2, batch=4096)))
    for device in (None, "TPU v5e"):
        plan = trace.plan(peak="90%", at=trace.default_at, device=device, cost="flops")  # of a TPU 87% is the least
        assert plan.recomputed_flops > 0
        assert (plan.bound > 0) == (device is None)


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
    assert plan.bound_seconds <= plan.predicted_seconds
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
    with pytest.raises(RematError, match="no share of the cost"):
        trace.plan(10, gap=-0.1)
    for at in (["function"], {"function": "none"}):
        with pytest.raises(RematError, match="a plan is for one place"):
            trace.plan(10, at)
    with pytest.raises(RematError, match="give 1 or more"):  # plans would go by a search of nothing
        trace.places(most=0)


# ------------------------------------------------------------------------------------------------------------- budgets


def flat(function_and_arguments):
    fun, args = function_and_arguments
    return fun, *args


def test_budgets_are_bytes_texts_or_shares_of_one_thing():
    trace = traced("three_layers")
    most, peak = trace.report("none").saved_bytes, trace.report("none").peak_bytes
    assert trace.plan("1 kB").budget_bytes == 1000
    assert trace.plan(saved=40).budget_bytes == 40
    assert trace.plan(0.5).budget_bytes == trace.plan(saved="50%").budget_bytes == most // 2
    assert trace.plan(1.0, of="peak").budget_bytes == trace.plan(peak="100%").budget_bytes == peak
    assert trace.plan(1.0).recomputed_flops == 0  # all that autodiff saves by itself
    with pytest.raises(RematError, match="no number of bytes"):
        trace.plan("a lot")
    for budgets in ({}, {"saved": 0.5, "peak": 0.5}, {"budget": 0.5, "peak": 0.5}):
        with pytest.raises(RematError, match="one budget"):
            trace.plan(**budgets)


def test_what_sites_keep_anyway_is_not_to_be_planned_away():
    with pytest.raises(RematError, match="nothing_saveable at 'sites' keeps 96 B"):
        traced("scanned_checkpoint").plan(10, "sites")
    with pytest.raises(RematError, match="one place"):
        traced("scanned_checkpoint").plan(10, {"layer": "none"})


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


# -------------------------------------------------------------------------------------------------------------- places


def lowered(status):
    """What a sentence says lowers the peak, and to what."""
    ((label, peak),) = re.findall(r"\. ([^.]+(?:\.\d+)?[^.]*) lowers it to (\S+ \w+)\.", status)
    return label, peak


def test_a_plan_that_gains_nothing_says_so():
    """Around a function that scans a plan saves less, and all of it comes back at once; on the scan's body not."""
    trace = rm.trace(*flat(transformer(2, scanned=True)))
    plan = trace.plan(saved="10%", at="function")
    assert plan.peak_bytes >= trace.report("none").peak_bytes
    label, peak = lowered(plan.status)
    assert peak == units.nbytes(trace.report(*label.split(" at ")).peak_bytes)
    assert parse_bytes(peak) < 0.8 * plan.peak_bytes
    assert "lowers it to" not in traced("scanned transformer").plan(saved="10%", at="sites").status


@pytest.mark.slow
def test_a_plan_chooses_its_place():
    """Where the peak is not lower at the usual place, no plan fits there, or another place is known to be better."""
    trace = rm.trace(*flat(transformer(2, scanned=True)))
    without = trace.report("none").peak_bytes
    usual, plan = trace.plan(saved="40%", at="function"), trace.plan(saved="40%")
    assert usual.peak_bytes > without
    assert plan.at == trace.report(plan).at == "block"
    assert "Its place, block, was chosen with it." in plan.status
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
    with pytest.raises(rm.RematError, match="too few: nothing_saveable at 'sites'"):
        trace.plan("1%")


@pytest.mark.slow
def test_a_plan_of_several_places_is_applied():
    """Each place with its policy, as the row of the search has them."""
    fun, args = PEAKED["checkpoints"]
    trace = rm.trace(fun, *args)
    report = trace.report(at={"around": "none", "inner": "nothing_saveable"})
    plan = dataclasses.replace(trace.plan(peak="95%"), policy="mixed", at=report.at, names=())
    applied = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (applied.saved_bytes, applied.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)


# ---------------------------------------------------------------------------------------------------- keys of plans


@pytest.mark.slow
def test_plans_compared_have_keys_of_their_own():
    trace = rm.trace(*flat(transformer(2, site=True)))
    budget = trace.preview("none", "sites").saved_bytes // 2
    peak = int((trace.report("none", "sites").peak_bytes or 0) * 0.8)
    plans = [
        trace.plan(budget, "sites"),
        trace.plan(budget, "function"),
        trace.plan(budget, "sites", cost="seconds", device="H100 SXM"),
        trace.plan(peak, "sites", of="peak"),
    ]
    plans.append(dataclasses.replace(plans[0], names=plans[0].names[:1]))  # as plans of other sessions may be
    found = trace.compare([*plans, plans[0]], device="H100 SXM")
    within = f"plan within {units.nbytes(budget)}"
    expected = {
        f"plan({budget})": within,
        f"plan({budget} at function)": f"{within} at function",
        f"plan({budget}, seconds on H100 SXM)": f"{within}, seconds on H100 SXM",
        f"plan(peak {peak})": f"plan within {units.nbytes(peak)} of peak",
        f"plan({budget}) #2": f"{within} #2",
    }
    assert [row.policy for row in found.rows] == [*expected, f"plan({budget})"]
    assert {key: found.row(key).label for key in expected} == expected
    for plan, key in zip(plans, expected, strict=True):
        report, row = trace.report(plan), found.row(key)
        assert (row.at, row.saved_bytes, row.recomputed_flops) == (plan.at, report.saved_bytes, report.recomputed_flops)
    refused = trace.compare([plans[0]], at="function")
    assert "leave `at` out" in refused.rows[0].error
