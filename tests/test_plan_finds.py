"""A plan for a peak is no worse than any choice that is known: each policy at each place, and what was made before."""

import contextlib
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import units
from remat_magic.facts import reports as reports_module
from remat_magic.records import RematError
from remat_magic.units import parse_bytes
from tests.benchmarks import named_models
from tests.generated import programs, steps_of
from tests.plan_helpers import BUILT_IN, transformer
from tests.programs import f32
from tests.test_generated import examples, traced
from tests.test_steps import step_of_value_and_grad
from tests.volume import usually


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


UNHURRIED = 600.0  # so that no search is cut short

MODELS = {
    "scanned MLP": (scanned, ({"up": f32(6, 16, 64), "down": f32(6, 64, 16)}, f32(64, 16))),
    "transformer": transformer(2),
    "training step": (step_of_value_and_grad, ([f32(16, 16)] * 4, f32(32, 16), f32(32, 16))),
    "checkpoints": (nested, (f32(16, 16), f32(32, 16))),
    "named transformer": named_models.transformer(4, 32, 16, 2, scanned=False),
}
BUDGETS = usually(["some", "all"], "some")


def new(model):
    fun, args = MODELS[model]
    return rm.trace(fun, *args)


def every_choice(trace, places, device=None):
    """JAX's own answer for each policy at each place."""
    for at, policy in itertools.product(places, BUILT_IN):
        try:
            report = trace.report(policy, at, device=device)
        except RematError as error:
            assert "complex" in str(error)
            continue
        if not report.backward_error and report.peak_bytes is not None:
            yield report


def places_of(trace):
    sites = ["sites"] if any(not site.possible for site in trace.sites) else []
    return ["function", *sites, *(site.key for site in trace.sites)]


@functools.cache
def asked(model, device=None):
    """A trace that was asked for all of these, and the answers."""
    trace = new(model)
    return trace, tuple(every_choice(trace, places_of(trace), device))


def choices_of(model, device=None):
    return asked(model, device)[1]


def holds(trace, choices, budgets="all", **options):
    """The peak of a choice, as a budget, has a plan that does no more work: of each, or of some."""
    peaks = sorted({report.peak_bytes for report in choices})
    for budget in peaks if budgets == "all" else {peaks[0], peaks[len(peaks) // 2]}:
        least = min(report.recomputed_flops for report in choices if report.peak_bytes <= budget)
        plan = trace.plan(**{"seconds": UNHURRIED, "peak": budget, **options})
        assert plan.peak_bytes <= budget == plan.budget_bytes
        assert plan.recomputed_flops <= least, (budget, plan.label)
        report = trace.report(plan, device=options.get("device"))
        assert (report.peak_bytes, report.recomputed_flops) == (plan.peak_bytes, plan.recomputed_flops)


ON = [*((model, None) for model in MODELS), ("scanned MLP", "TPU v5e"), ("training step", "TPU v5e")]
USUAL = [("checkpoints", None), ("scanned MLP", "TPU v5e")]


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(
    ("model", "device"), [usual if usual in USUAL else pytest.param(*usual, marks=pytest.mark.slow) for usual in ON]
)
def test_every_policy_at_every_place_is_found(model, device, budgets):
    holds(new(model), choices_of(model, device), budgets, device=device, cost="flops")


def test_a_checkpoint_within_a_checkpointed_block_is_known():
    """What the block repeats takes less then: no place around it has so low a peak."""
    fun, args = transformer(2, site=True)
    lowest = rm.trace(fun, *args).report("nothing_saveable", "_attention").peak_bytes
    assert lowest < rm.trace(fun, *args).report("nothing_saveable", "block").peak_bytes
    assert rm.trace(fun, *args).plan(peak=lowest).peak_bytes <= lowest


@pytest.mark.parametrize("model", usually(MODELS, "training step"))
def test_also_when_nothing_was_asked_before(model):
    choices = choices_of(model)
    peaks = sorted({report.peak_bytes for report in choices})
    for budget in (peaks[0], peaks[len(peaks) // 2]):
        holds(new(model), [report for report in choices if report.peak_bytes == budget])


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("model", usually(MODELS, "checkpoints"))
def test_a_place_that_is_given_is_no_worse(model, budgets):
    trace = new(model)
    for at in places_of(trace)[:3]:
        holds(trace, [report for report in choices_of(model) if report.at == at], budgets, at=at)


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("model", usually(MODELS, "checkpoints"))
def test_what_is_known_is_weighed_however_little_time_there_is(model, budgets):
    trace, choices = asked(model)
    holds(trace, choices, budgets, seconds=0)
    for at in places_of(trace)[:2]:
        holds(trace, [report for report in choices if report.at == at], budgets, at=at, seconds=0)


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("model", usually(["scanned MLP", "training step"], "training step"))
def test_seconds_are_no_more_than_of_any_choice(model, budgets):
    trace, device = new(model), "H100 SXM"
    rows = trace.places(device=device, seconds=600).rows
    for row in rows if budgets == "all" else rows[::5]:
        plan = trace.plan(seconds=UNHURRIED, peak=row.peak_bytes, cost="seconds", device=device)
        assert plan.peak_bytes <= row.peak_bytes
        assert plan.seconds <= row.times.extra * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [12, 60])
@examples(3)
@given(data=st.data())
def test_programs_by_chance(remat3, largest, data):
    some = programs(depth=2, without=("grad", "callback"))
    program = data.draw(some.filter(lambda program: steps_of(program.body) <= largest))
    trace = traced(program)
    searched = {row.at for row in trace.places(seconds=600).rows if not row.error}
    other = traced(program)
    choices = [*every_choice(other, [at for at in places_of(other) if at in searched])]
    if choices:
        peaks = sorted({report.peak_bytes for report in choices})
        chosen = {peaks[0], peaks[len(peaks) // 2], peaks[-1]}
        least = {budget: min(r.recomputed_flops for r in choices if r.peak_bytes <= budget) for budget in chosen}
        for budget in chosen:
            plan = trace.plan(seconds=UNHURRIED, peak=budget)
            assert plan.peak_bytes <= budget
            assert plan.recomputed_flops <= least[budget], plan.label
        is_refused(trace, peaks[0])


def is_refused(trace, least):
    """Below the least of all there is no plan, and that least is told; values that are chosen may have less."""
    error = None
    while error is None:
        try:
            least = trace.plan(seconds=UNHURRIED, peak=least - 1).peak_bytes
        except RematError as refusal:
            error = refusal
    assert f"the least found is {units.apart(least - 1, least)[1]} (" in str(error)
    assert trace.plan(seconds=UNHURRIED, peak=least).peak_bytes == least


def refuse(prim, *_, **params):
    raise ValueError(f"no policy for {prim}")


@functools.partial(jax.checkpoint, policy=refuse)
def refused(w, x):
    return jnp.sin(jnp.sin(x @ w) @ w)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
def governed(w, x):
    return (refused(w, refused(w, x)) ** 2).sum()


def test_a_peak_in_bytes_needs_no_peak_without_a_checkpoint(remat2):
    """JAX cannot trace this function without its own checkpoint: what is inside then has a policy that raises."""
    trace = rm.trace(governed, f32(8, 8), f32(32, 8))
    with pytest.raises(RematError):
        trace.report("none")
    choices = [trace.report("none", "sites"), trace.report("nothing_saveable", "sites")]
    holds(trace, choices, seconds=10)
    with pytest.raises(RematError, match="Give the budget in bytes"):
        trace.plan(peak="50%")


# Of the small transformer a plan is found, or not, 1% below what saving nothing needs, as it is asked for.
@pytest.mark.parametrize("model", usually([model for model in MODELS if model != "transformer"], "scanned MLP"))
def test_what_is_refused_is_less_than_any_choice(model):
    least = min(report.peak_bytes for report in choices_of(model))
    is_refused(new(model), least)
    with pytest.raises(RematError) as refusal:
        new(model).plan(seconds=UNHURRIED, peak=1)
    number, unit = re.search(r"the least found is (\S+) (\w+) \(", str(refusal.value)).groups()
    assert parse_bytes(f"{number} {unit}") <= parse_bytes(units.nbytes(least))  # as it is rounded


@pytest.mark.slow  # of how much is worked out
def test_a_refusal_works_out_little_more_than_a_plan(monkeypatch):
    made = []
    full = reports_module.full
    monkeypatch.setattr(reports_module, "full", lambda *args: made.append(args) or full(*args))
    for model in ("scanned MLP", "training step", "checkpoints"):
        peaks = sorted({report.peak_bytes for report in choices_of(model)})
        made.clear()
        new(model).plan(seconds=UNHURRIED, peak=peaks[len(peaks) // 2])
        plan = len(made)
        made.clear()
        with pytest.raises(RematError):
            new(model).plan(seconds=UNHURRIED, peak=1)
        assert len(made) <= 3 * plan, model


# --------------------------------------------------------------------------------------------- what was made before


SHARES_AND_PLACES = [*itertools.product(("20%", "60%"), ("function", "sites"))]


@pytest.mark.parametrize(
    ("model", "made", "share", "seconds"),
    [
        ("transformer", [("30%", "function"), ("60%", "block")], "70%", 0),
        pytest.param("named transformer", SHARES_AND_PLACES, "40%", UNHURRIED, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_was_made_before_is_found(model, made, share, seconds):
    trace = new(model)
    earlier = [trace.plan(saved=part, at=at) for part, at in made]
    for plan in earlier:
        other = trace.plan(seconds=seconds, peak=plan.peak_bytes)
        assert other.peak_bytes <= plan.peak_bytes
        assert other.recomputed_flops <= plan.recomputed_flops
        there = trace.plan(seconds=seconds, peak=plan.peak_bytes, at=plan.at)
        assert there.recomputed_flops <= plan.recomputed_flops
        assert there.label.startswith(f"plan within {units.nbytes(plan.peak_bytes)} of peak")
    apart = trace.plan(saved=share, at=made[-1][1], separately=True)
    together = trace.plan(seconds=UNHURRIED, peak=apart.peak_bytes, at=made[-1][1], together=True)
    assert together.together
    assert not together.separately


def test_what_was_asked_for_in_passing_is_found():
    """A policy by the program's own names, at a place where a plan tries few others; and policies at two places."""

    def loss(w, x):
        for _ in range(2):
            x = checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "layer")
        return (inner(around(x, w), w) ** 2).sum()

    trace = rm.trace(loss, f32(16, 16), f32(64, 16))
    asked = [trace.report(f"save_only_these_names({name!r})", "function") for name in ("product", "layer")]
    asked.append(trace.report(at={"around": "none", "inner": "nothing_saveable"}))
    holds(trace, asked)


def test_policies_of_ones_own_and_offloading_are_no_choices():
    trace = new("checkpoints")
    own = trace.report(lambda prim, *_, **__: prim.name == "dot_general", "function")
    moved = trace.report("offload_dot_with_no_batch_dims('device', 'pinned_host')", "sites")
    assert moved.offloaded_bytes > 0
    assert trace.plan(seconds=UNHURRIED, peak=own.peak_bytes).policy != own.policy
    for at in ("sites", None):
        with contextlib.suppress(RematError):  # it may need less than all that stays on the device
            assert trace.plan(seconds=UNHURRIED, peak=moved.peak_bytes, at=at).offloaded_bytes == 0


def test_a_plan_of_several_places_is_applied():
    """Each place with its policy, as the row of the search has them."""
    fun, args = MODELS["checkpoints"]
    trace = rm.trace(fun, *args)
    report = trace.report(at={"around": "none", "inner": "nothing_saveable"})
    plan = dataclasses.replace(trace.plan(seconds=UNHURRIED, peak="95%"), policy="mixed", at=report.at, names=())
    applied = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (applied.saved_bytes, applied.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
