"""Which place, and which policy there: every row against the report of the same choice, the front by brute force."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.plan_helpers import transformer
from tests.programs import f32

DEVICE = "A100 80GB SXM"


@functools.cache
def blocks(**options):
    fun, args = transformer(2, **options)
    return rm.trace(fun, *args)


@functools.cache
def places(**options):
    return blocks(**options).places(device=DEVICE)


@pytest.mark.slow
def test_rows_are_the_reports(remat2):
    trace = blocks(site=True)
    found = places(site=True)
    assert {row.at for row in found} > {"sites", "function", "block=none, _attention=nothing_saveable"}
    for row in found:
        report = trace.report(row.policy, row.at, device=DEVICE)
        for name in ("at", "code", "saved_bytes", "peak_bytes", "repeated_flops", "recomputed_flops"):
            assert getattr(row, name) == getattr(report, name), name
        assert row.label == (row.at if row.policy == "mixed" else f"{row.policy} at {row.at}")
        for other in row.same_as:
            same = trace.report(*(other.split(" at ") if " at " in other else ("mixed", other)), device=DEVICE)
            assert (same.saved_bytes, same.peak_bytes) == (row.saved_bytes, row.peak_bytes)
            assert same.recomputed_flops == row.recomputed_flops


def test_a_place_without_a_checkpoint_is_as_if_it_were_written_there(remat2):
    """The row of an undecorated block against JAX's own answer for the decorated one."""
    found, decorated = places(), blocks(site=True)
    for policy in ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"):
        row, by_hand = found.row(policy, "block"), decorated.report(policy, "sites", device=DEVICE)
        for name in ("saved_bytes", "peak_bytes", "repeated_flops", "recomputed_flops"):
            assert getattr(row, name) == getattr(by_hand, name), name
        assert "jax.checkpoint" in row.code
    assert min(found, key=lambda row: row.peak_bytes).at == "block"
    assert found.best("100 GiB").policy == "none"


@pytest.mark.slow
def test_checkpoints_are_taken_off_and_moved(remat2):
    trace = blocks(site=True)
    moved = places(site=True).row("mixed", "block=none, _attention=nothing_saveable")
    by_mapping = trace.report(at={"block": "none", "_attention": "nothing_saveable"}, device=DEVICE)
    alone = blocks().report("nothing_saveable", "_attention", device=DEVICE)
    assert moved.peak_bytes == by_mapping.peak_bytes == alone.peak_bytes
    assert moved.at == by_mapping.at


@pytest.mark.slow
def test_places_that_cannot_matter_are_left_out_and_said(remat2):
    def small(x):
        return jnp.sin(x[:1]) * 2

    def outer(x):
        return inner(x)

    def inner(x):
        return jnp.sin(jnp.cos(x) * x)

    def fun(x):
        return (outer(outer(x)) * small(x)).sum()

    found = rm.trace(fun, f32(4000)).places()  # on a GPU no checkpoint lowers the peak: all that is saved is made again
    assert "Not tried, since its values are less than a thousandth of all: small." in found.not_tried
    assert "Not tried, since a checkpoint on inner does the same: outer." in found.not_tried
    assert not {row.at for row in found} & {"small", "outer"}
    assert any("no matrix product is recomputed" in sentence for sentence in found.not_tried)


def heat(u, k):
    def step(u, _):
        return u + k * (jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u), None

    return (jax.lax.scan(step, u, None, length=100)[0] ** 2).sum()


def waves(c, wavelet):
    def step(state, s):
        u, before = state
        new = 2 * u - before + 1e-6 * c**2 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u)
        return (new.at[4, 5].add(s), u), new[::4, 3]

    zero = jnp.zeros((16, 16))
    return (jax.lax.scan(step, (zero, zero), wavelet)[1] ** 2).mean()


def powers(w, x):
    return (jax.lax.fori_loop(0, 64, lambda i, x: x @ w, x) ** 2).sum()


def recurrence(w, xs):
    def cell(h, x):
        return jnp.tanh(h @ w + x), None

    return (jax.lax.scan(cell, jnp.zeros((32, 16)), xs)[0] ** 2).sum()


STEPPED = {
    "heat": (heat, (f32(1024), f32())),
    "waves": (waves, (f32(16, 16), f32(100))),
    "matrix powers": (powers, (f32(32, 32), f32(32, 32))),
    "recurrence": (recurrence, (f32(16, 16), f32(100, 32, 16))),
    "under vmap": (lambda us, k: jax.vmap(heat, (0, None))(us, k).sum(), (f32(4, 256), f32())),
    "under jit": (lambda u, k: jax.jit(heat)(u, k), (f32(1024), f32())),
    "a training step": (lambda c, w: c - jax.grad(waves)(c, w), (f32(16, 16), f32(100))),
}
IN_CI = "heat", "waves", "a training step"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.slow) for n in STEPPED])
def test_steps_that_save_little_but_what_they_carry_are_grouped(name):
    """A checkpoint of one gains nothing, of several almost everything: on the front, and in plans."""
    fun, args = STEPPED[name]
    trace = rm.trace(fun, *args)
    without = trace.report("none").peak_bytes
    (group,) = (site.key for site in trace.groups)
    found = trace.places()
    grouped = [row for row in found if row.pareto and group in row.at]
    assert min(row.peak_bytes for row in grouped) < 0.65 * without
    one = trace.report("nothing_saveable", group.split("/")[0])
    plan = trace.plan(peak=0.65)
    assert plan.peak_bytes <= 0.65 * without
    if one.peak_bytes > 0.9 * without:
        assert group in plan.at
        assert group in trace.plan("30%").at
    reasons_hold(trace, found)


def reasons_hold(trace, found, device=None):
    """What was not tried is tried here: where the peak was said to be hardly lower it is, and no product is saved."""
    without = trace.report("none", "sites" if trace.engine.primal.table.sites else "function", device=device)
    for sentence in found.not_tried:
        labels = re.findall(r"(\w+_saveable) at ([^,]+?)(?=[,.] |\.$|, )", sentence.partition(": ")[2])
        for policy, at in labels:
            report, nothing = (trace.report(key, at, device=device) for key in (policy, "nothing_saveable"))
            if "hardly lower" in sentence:
                assert report.peak_bytes > 0.98 * without.peak_bytes, (sentence, policy, at)
            if "product" in sentence:
                assert report.saved_bytes == nothing.saved_bytes, (sentence, policy, at)


@pytest.mark.slow
def test_products_kept_lower_a_peak_that_keeping_nothing_does_not(remat2):
    """Around the whole function on a GPU: without products all is made again at once, with them bit by bit."""
    trace = rm.trace(*(lambda fun, args: (fun, *args))(*transformer(4)))
    device = "H100 SXM"
    peaks = {key: trace.report(key, "function", device=device).peak_bytes for key in ("none", "nothing_saveable")}
    assert peaks["nothing_saveable"] >= peaks["none"]
    found = trace.places(device=device)
    assert found.row("dots_saveable", "function").peak_bytes < 0.9 * peaks["none"]
    reasons_hold(trace, found, device)


def test_the_front_comes_first(remat2):
    rows = places(site=True).rows

    def beats(a, b):
        (peak, cost), (other_peak, other_cost) = [(row.peak_bytes, row.times.extra) for row in (a, b)]
        return peak <= other_peak and cost <= other_cost and (peak, cost) != (other_peak, other_cost)

    assert [row.pareto for row in rows] == [not any(beats(other, row) for other in rows) for row in rows]
    front = [row for row in rows if row.pareto]
    assert list(rows[: len(front)]) == front
    assert [row.peak_bytes for row in front] == sorted(row.peak_bytes for row in front)


@pytest.mark.slow
def test_a_plan_for_a_device_is_made_of_what_was_found_for_it(remat2):
    fun, args = transformer(2, scanned=True, batch=4096)
    trace, there = rm.trace(fun, *args), "TPU v5e"
    found = trace.places(device=there)
    peak = trace.report("nothing_saveable", "function", device=there).peak_bytes
    row = max((row for row in found if row.pareto and row.peak_bytes < 0.8 * peak), key=lambda row: row.peak_bytes)
    plan = trace.plan(peak=row.peak_bytes, device=there)
    assert plan.peak_bytes <= row.peak_bytes
    assert plan.peak_bytes == trace.report(plan, device=there).peak_bytes
    assert plan.recomputed_flops <= trace.report(row.policy, row.at).recomputed_flops


def test_a_search_ends_after_some_choices_and_says_so():
    """What has no checkpoint and what is as written are rows besides."""
    fun, args = STEPPED["heat"]
    for trace in (rm.trace(fun, *args), rm.trace(jax.checkpoint(fun), *args)):
        found = trace.places(device=DEVICE, most=2)
        labels = [label for row in found for label in (row.label, *row.same_as)]
        assert len(labels) == 2 + 2
        assert {"none", "as_written"} <= {label.split(" at ")[0] for label in labels}
        assert any("2 choices were tried" in sentence for sentence in found.not_tried)
    with pytest.raises(rm.RematError, match="known are"):
        trace.places(device="H1000")
    with pytest.raises(rm.RematError, match="give 1 or more"):  # plans would go by a search of nothing
        trace.places(most=0)


def test_a_choice_that_fails_is_a_row():
    fun = lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()  # noqa: E731
    found = rm.trace(fun, f32(3)).places(device=DEVICE)
    assert all("cannot differentiate a while_loop" in row.error for row in found)


def test_what_changes_nothing_goes_by_the_name_of_no_checkpoint():
    def keep(x):
        return x * 2.0  # saves nothing by itself

    def fun(x):
        for _ in range(4):
            x = keep(x)
        return jnp.sin(x).sum()

    found = rm.trace(fun, f32(4000)).places()
    (row,) = [row for row in found if "nothing_saveable at keep" in row.same_as]
    assert row.label == "none at function"
    assert found.row("nothing_saveable", "keep") is row
