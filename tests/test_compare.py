"""Policies side by side: the reports' own numbers, the front by brute force, failures as rows."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic.records import Measurement
from remat_magic.units import parse_bytes
from remat_magic.views import choices as compare_view
from tests.benchmarks.models import transformer
from tests.cost_helpers import S
from tests.programs import EACH_PROGRAM, PROGRAMS, f32

DEVICE = "A100 80GB SXM"


def traced(name):
    fun, args = PROGRAMS[name]
    return rm.trace(fun, *args)


@functools.cache
def _blocks():
    fun, args = transformer(2, site=True)
    return rm.trace(fun, *args)


@pytest.fixture
def blocks(remat2):
    return _blocks()


def measured(policy, at, temp_bytes=1000, **others):
    """A record of what XLA said of a policy."""
    return Measurement(
        policy,
        at,
        device="one GPU",
        temp_bytes=temp_bytes,
        argument_bytes=200,
        output_bytes=30,
        compile_seconds=1.5,
        run_seconds=0.25,
        flops=7_000_000_000,
        findings=("XLA undid it.",),
        **others,
    )


# ------------------------------------------------------------------------------------------------------------- the rows


def test_rows_are_the_reports(remat3):
    trace = traced("attention")
    for row in trace.compare(device=DEVICE).rows:
        report = trace.report(row.policy, device=DEVICE)
        assert (row.policy, row.at, row.code) == (report.policy, report.at, report.code)
        for name in ("saved_bytes", "argument_bytes", "offloaded_bytes", "forward_flops", "repeated_flops",
                     "deferred_flops", "recomputed_flops", "peak_bytes"):  # fmt: skip
            assert getattr(row, name) == getattr(report, name)
        assert row.times.device == DEVICE
        assert row.times.total == row.times.forward + row.times.backward + row.times.offload


@pytest.mark.parametrize("name", ["attention", "named_layers", "scanned_checkpoint", "binary8"])
def test_every_choice_is_there_once(name, remat3):
    """Each in a row of its own or named by the row that does the same, and no row twice."""
    trace = traced(name)
    comparison = trace.compare(device=DEVICE)
    policies = [policy for row in comparison.rows for policy in (row.policy, *row.same_as)]
    assert len(set(policies)) == len(policies)
    wanted = {trace.report(choice.key).policy for choice in trace.choices()}
    assert set(policies) == wanted
    assert comparison.rows[0].policy == "as_written"
    again = trace.compare(device=DEVICE)
    assert again.rows == comparison.rows


def test_a_policy_that_fails_is_a_row():
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError

    trace = traced("three_layers")
    comparison = trace.compare(["dots_savable", broken, "none"], device=DEVICE)
    assert "did you mean 'dots_saveable'?" in comparison.rows[0].error
    assert comparison.rows[1].policy == "broken"
    assert "ZeroDivisionError" in comparison.rows[1].error
    assert [row.peak_bytes is None for row in comparison.rows] == [True, True, False]
    assert [row.pareto for row in comparison.rows] == [False, False, True]


def test_policies_of_ones_own_are_found_by_name():
    def mine(primitive, *_args, **_params):
        return primitive.name == "sin"

    trace = traced("three_layers")
    trace.report(mine)  # a trace offers what it has seen, and its name alone leads nowhere
    assert "mine" in [choice.key for choice in trace.choices()]
    assert not [row.error for row in trace.compare(device=DEVICE).rows if row.error]
    named = trace.compare(device=DEVICE, namespace={"mine": mine})
    assert named.row("mine").peak_bytes == trace.report(mine, device=DEVICE).peak_bytes


def test_every_row_says_why_there_is_no_backward_pass():
    fun = lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()  # noqa: E731
    comparison = rm.trace(fun, S(3)).compare(device=DEVICE)
    assert all("cannot differentiate a while_loop" in row.error for row in comparison.rows)
    assert not any(row.pareto for row in comparison.rows)
    with pytest.raises(rm.RematError, match="No compared policy of <lambda> has a known peak"):
        comparison.best("1 GB")


def test_a_device_that_is_not_known_is_refused_and_without_one_there_are_no_times(monkeypatch):
    from remat_magic import devices

    trace = traced("three_layers")
    with pytest.raises(rm.RematError, match="No device is called"):
        trace.compare(device="H1000")
    monkeypatch.setattr(devices, "default", lambda: None)
    unknown = trace.compare()
    assert unknown.device is None
    assert {row.times for row in unknown.rows} == {None}
    assert any(row.pareto for row in unknown.rows)


# ------------------------------------------------------------------------------------------------------------ the front


@pytest.mark.parametrize("name", EACH_PROGRAM)
def test_the_front_by_brute_force(name):
    """A row is on it exactly if none is as good in both and better in one."""
    rows = traced(name).compare(device=DEVICE).rows
    points = {row.policy: (row.peak_bytes, row.adds) for row in rows if not row.error and row.adds is not None}
    for row in rows:
        if row.policy not in points:
            assert not row.pareto
            continue
        mine = points[row.policy]
        beaten = any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in points.values())
        assert row.pareto != beaten
    assert not points or any(row.pareto for row in rows)


def test_offloading_is_not_free(blocks):
    """It recomputes as little as saving does, and pays on the way to the host."""
    comparison = blocks.compare(["dots_with_no_batch_dims_saveable", "offload_dot_with_no_batch_dims"], device=DEVICE)
    saved, moved = comparison.rows
    assert moved.offloaded_bytes == saved.saved_bytes - moved.saved_bytes
    assert moved.times.extra > saved.times.extra


def test_what_xla_does_not_offload_is_not_ranked(remat3):
    """Most of what unrolled code offloads stays on the device, and all of it on a CPU, which has one memory."""

    def layer(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))

    def unrolled(ws, x):
        for w in ws:
            x = layer(x, w)
        return x.sum()

    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()

    moved, kept = "names(offload=['h'])", "save_only_these_names('h')"
    for fun, ws, states in (
        (unrolled, [f32(16, 16)] * 3, {DEVICE: "kept", "this CPU": "kept"}),
        (scanned, f32(3, 16, 16), {DEVICE: "moved", "this CPU": "kept"}),
    ):
        trace = rm.trace(fun, ws, f32(8, 16))
        for device, state in states.items():
            comparison = trace.compare([moved, kept], "function", device=device)
            assert [row.offloading for row in comparison.rows] == [state, ""]
            assert comparison.row(kept).pareto
            row = comparison.rows[0]
            assert any(note.startswith(f"Not ranked: {row.label};") for note in comparison.notes) == (state == "kept")
            assert not (state == "kept" and row.pareto)


def test_the_best_is_the_fastest_within_the_limit(blocks):
    comparison = blocks.compare(device=DEVICE)
    peaks = sorted(row.peak_bytes for row in comparison.rows)
    for limit in peaks:
        best = comparison.best(limit)
        assert best.peak_bytes <= limit
        within = [row for row in comparison.rows if row.peak_bytes <= limit]
        assert best.times.extra == min(row.times.extra for row in within)
    assert comparison.best("1 TB").times.extra == 0
    with pytest.raises(rm.RematError, match=r"peak of at most 1,000 bytes: .* comes nearest with [0-9,]+\."):
        comparison.best("1 kB")
    with pytest.raises(rm.RematError, match="peak_bytes='lots' is no number of bytes"):
        comparison.best("lots")


# --------------------------------------------------------------------------------------------------------- measurements


def test_measurements_stand_beside_the_estimates():
    """That of a policy that does the same too; of the device before others; what failed is said."""
    trace, here = traced("three_layers"), measured("none", "function")
    there = replace(here, device=DEVICE, needed_bytes=1500, available_bytes=1000, fits=False, run_seconds=None)
    compare = functools.partial(trace.compare, device=DEVICE)
    (row,) = [row for row in compare(measurements=[here, measured("dots_saveable", "layer")]) if row.measurement]
    assert "none" in (row.policy, *row.same_as)
    assert row.measurement == here
    for results in ([here, there], [there, here]):
        comparison = compare(["none"], measurements=results)
        assert comparison[0].measurement == there
        assert "1.50 kB, 500 B too much" in compare_view.comparison_html(comparison)
    failed = compare(["none"], measurements=[replace(here, error="Out of memory.")])
    assert "Out of memory." in compare_view.comparison_html(failed)


# ---------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("2 GiB", 2 * 2**30), ("1.5 GB", 1_500_000_000), ("1.5gb", 1_500_000_000), ("512 MiB", 2**29), ("10", 10),
     ("1,000 bytes", 1000), ("1e9", 10**9), (".5 kB", 500), ("3 TB", 3 * 10**12), (7, 7), (1e9, 10**9), ("0 B", 0)],
)  # fmt: skip
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "2 GiG", "two GB", "-1 GB", "1.5.2 GB", "2 G", -1, True, None, float("nan")]
)
def test_what_is_no_size(text):
    with pytest.raises(rm.RematError, match="write one like '2 GiB' or '1.5 GB'"):
        parse_bytes(text)
