"""The estimated peak as on a device, beside sizes that XLA's compilers gave, and on programs counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_magic as rm
from remat_magic import _jax, devices
from remat_magic.facts.buffers import DeviceMemory, ScheduledStep, written_over
from remat_magic.facts.memory import both_halves
from tests import test_plan_fits
from tests.benchmarks.named_models import shape, transformer
from tests.test_memory import halves

TPU, GPU = "TPU v5e", "H100 SXM"
NHWC = ("NHWC", "HWIO", "NHWC")


def held(fun, *args, device=None, policy="as_written"):
    """The estimated peak in bytes."""
    return rm.trace(fun, *args).timeline(policy, device=device).peak_bytes


# As XLA's buffer assignments have them, of programs compiled for a TPU v5e.
@pytest.mark.parametrize(
    ("aval", "lanes", "nbytes"),
    [
        (shape(), (), 512),
        (shape(256), (), 1024),
        (shape(1, 256), (), 1024),
        (shape(12, 256), (), 16384),
        (shape(4, 4, 128), (), 8192),
        (shape(128, 128, dtype=jnp.bool_), (), 16384),
        (shape(12, 256, 3, 4, 64), (), 9437184),
        (shape(4, 128, 4, 64, dtype=jnp.bfloat16), (), 262144),
        (shape(1, 1, 40, 120), (), 20480),
        (shape(16, 96, 96, 40), (0, 3), 75497472),
    ],
    ids=str,
)
def test_a_tpu_pads_to_tiles(aval, lanes, nbytes):
    assert _jax.tiled_nbytes(aval, lanes) == nbytes


def test_only_convolutions_fix_which_dimension_is_padded():
    def convolved(x, w):
        return (jnp.sin(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)) ** 2).sum()

    def multiplied(x, w):
        return (jnp.sin(x @ w[0, 0]) ** 2).sum()

    # 16 images of 32 channels: 128 lanes hold 32 of them; 1024 rows and columns have no need of that.
    images, kernel = shape(16, 1024, 1024, 32), shape(1, 1, 32, 32)
    gigabytes = 16 * 1024 * 1024 * 32 * 4
    # The images and their gradient, what is given and, in bfloat16, its cotangent: these two take 4 times their bytes.
    assert held(multiplied, images, kernel, device=TPU) == pytest.approx((2 + 1 + 1 / 2) * gigabytes, rel=1e-4)
    assert held(convolved, images, kernel, device=TPU) == pytest.approx((2 + 4 + 4 / 2) * gigabytes, rel=1e-4)


# ------------------------------------------------------------------------------------------------------ fused chains


WIDE, SQUARE = shape(4096, 1024), shape(1024, 1024)
VALUE, WEIGHT = 4096 * 1024 * 4, 1024 * 1024 * 4


def fused(fun, *args):
    """What is held at the peak where chains are fused, in a device without tiles or a memory of its own."""
    return at_peak(both_halves(*halves(fun, *args), on=DeviceMemory(fuses=True)))


def at_peak(schedule):
    return schedule.held(schedule.highest()[1])


def test_a_chain_between_matmuls_is_not_held():
    @jax.checkpoint
    def gelu(x, w):
        return (jax.nn.gelu(x @ w) @ w).sum()

    arguments, gradients = VALUE + WEIGHT, WEIGHT
    # What the chain of the derivative reads and makes: what goes into the gelu, and the cotangent of what comes out.
    assert sum(value.bytes for value in fused(gelu, WIDE, SQUARE)) <= arguments + gradients + 2 * VALUE + 8
    plain = at_peak(both_halves(*halves(gelu, WIDE, SQUARE)))
    assert sum(value.bytes for value in plain) >= arguments + gradients + 4 * VALUE


def test_what_is_held_anyway_is_read_instead_of_what_is_made_of_it():
    @jax.checkpoint
    def silu(x, w):
        h = x @ w
        return (((h * jax.nn.sigmoid(h)) @ w) ** 2).sum()

    def big(values):
        return {value.eqn.primitive.name for value in values if value.bytes == VALUE and value.eqn is not None}

    assert "logistic" in big(at_peak(both_halves(*halves(silu, WIDE, SQUARE))))
    assert "logistic" not in big(fused(silu, WIDE, SQUARE))


# --------------------------------------------------------------------------------------------------------------- TPUs


def scanned(precision=None):
    def layer(x, w):
        h = jnp.dot(x, w, precision=precision)
        return jnp.tanh(jnp.dot(h, w, precision=precision)), None

    def loss(ws, x):
        return lax.scan(layer, x, ws)[0].sum()

    return loss, (shape(8, 2048, 2048), shape(8192, 2048))


def test_what_only_matmuls_read_is_held_in_bfloat16():
    loss, args = scanned()
    alive = rm.trace(loss, *args).timeline("dots_saveable", "function", device=TPU).alive
    types = {value.type for value in alive if value.kind == "residual"}
    exact, args = scanned(lax.Precision.HIGHEST)
    in_full = rm.trace(exact, *args).timeline("dots_saveable", "function", device=TPU)
    assert "bf16[8,8192,2048]" in types
    assert not any(value.type.startswith("bf16") for value in in_full.alive)


def test_what_is_put_beside_another_for_a_matmul_is_held_in_bfloat16():
    def loss(w, v, x, y):
        return (jnp.concatenate([x @ v, y], 1) @ w).sum()

    values = shape(32768, 2048)
    lives = rm.trace(loss, shape(4096, 4096), shape(2048, 2048), values, values).timeline(device=TPU).lives
    held = [life.value.type for life in lives if life.first == 0 and life.value.primitive == "dot_general"]
    assert "bf16[32768,2048]" in held  # what the concatenation reads; the other products are results


def test_weights_of_a_loop_are_converted_before_it():
    loss, args = scanned()
    alive = rm.trace(loss, *args).timeline("nothing_saveable", "function", device=TPU).alive
    assert ("bf16[8,2048,2048]", 8 * 2048 * 2048 * 2) in {(value.type, value.nbytes) for value in alive}


# ---------------------------------------------------------------------------------------------------------- agreement


@functools.cache
def trace():
    fun, args = transformer(2, scanned=False)
    return rm.trace(fun, *args)


@pytest.mark.parametrize("device", [TPU, GPU])
def test_a_timeline_adds_up(device):
    for policy in ("none", "nothing_saveable", "dots_saveable"):
        timeline = trace().timeline(policy, device=device)
        moment = timeline.moments[timeline.peak]
        assert timeline.peak_bytes == max(each.bytes for each in timeline.moments)
        assert sum(value.nbytes for value in timeline.alive) == moment.bytes
        assert timeline.alive_bytes("argument") + timeline.alive_bytes("constant") == moment.arguments
        assert timeline.alive_bytes("residual") == moment.residuals
        for number, each in enumerate(timeline.moments):
            assert sum(value.nbytes for value in timeline.alive_at(number)) == each.bytes
        report = trace().facts.on(devices.get(device)).report(policy)
        assert sum(size for _, size in report.peak_by_kind) == report.peak_bytes == timeline.peak_bytes


@pytest.mark.parametrize("device", [TPU, GPU])
def test_tables_have_the_peak_of_their_device(device):
    for rows in (trace().compare(device=device), trace().places(device=device, seconds=2)):
        for row in rows:
            peak = trace().timeline(row.policy, row.at, device=device).peak_bytes if row.policy != "mixed" else None
            assert row.peak_bytes == peak or peak is None


def test_a_plan_of_a_peak_is_of_its_device():
    limit = trace().timeline("dots_saveable", device=TPU).peak_bytes
    plan = trace().plan(peak=limit, at="sites", device=TPU)
    assert plan.peak_bytes == trace().timeline(plan, device=TPU).peak_bytes <= limit
    assert plan.peak_bytes != trace().report(plan).peak_bytes


def test_of_no_device_and_of_a_cpu_are_the_same():
    plain = trace().report("nothing_saveable").peak_bytes
    assert trace().timeline("nothing_saveable").peak_bytes == plain
    assert trace().timeline("nothing_saveable", device=devices.THIS_CPU).peak_bytes == plain
    peaks = {trace().timeline("nothing_saveable", device=device).peak_bytes for device in (TPU, GPU)}
    assert len({plain, *peaks}) == 3
    with pytest.raises(rm.RematError, match="did you mean 'TPU v5p'"):
        trace().timeline(device="TPU v5x")


def _block(w, x):
    return jnp.tanh(x @ w) @ w


def _loss(ws, x):
    for w in ws:
        x = _block(w, x)
    return jnp.sum(x**2)


def test_an_edit_keeps_to_a_budget_as_on_the_device_of_its_plan():
    trace = rm.trace(_loss, [shape(200, 200)] * 6, shape(40000, 200))
    plan = trace.plan(peak="80%", at="_block", device=TPU, together=True)
    edit = trace.edit(plan)
    assert edit.verified
    assert edit.peak_bytes == plan.peak_bytes == trace.report(plan, device=TPU).peak_bytes <= plan.budget_bytes
    assert trace.report(plan).peak_bytes != plan.peak_bytes  # as on no device
    assert edit.excess_bytes == 0


def _spread_out(ws, x):
    def layer(x, w):
        return jnp.sin(jnp.cos(x @ w) @ w)

    for w in ws:
        x = layer(x, w)
    return jnp.sum(x**2)


def test_advice_speaks_of_the_peak_on_the_device():
    trace = rm.trace(_spread_out, [shape(200, 200)] * 6, shape(400100, 200))  # 28 rows short of whole tiles
    first = trace.advice(device=TPU)[0]
    now, then = (trace.report(*choice, device=TPU) for choice in (("as_written",), (first.policy, first.at)))
    assert first.kind == "no-checkpoint-there"
    assert first.figure == now.peak_bytes - then.peak_bytes
    assert first.figure != trace.report().peak_bytes - trace.report(first.policy, first.at).peak_bytes


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"])
def test_what_has_no_bytes_is_in_no_memory_that_is_written_over(policy):
    """In groups of layers a sum of no bytes, since it is made again, reads what only stands for another value."""

    trace = rm.trace(test_plan_fits.loss, *test_plan_fits.ARGS)
    timeline = trace.timeline(policy, "block/2", device=TPU)
    # The sweep and the lives of buffers are two ways to the same bytes.
    assert timeline.peak_bytes == trace.report(policy, "block/2", device=TPU).peak_bytes
    assert timeline.peak_bytes == max(moment.bytes for moment in timeline.moments)


def test_what_a_result_is_written_over_is_of_its_size_and_has_bytes():
    step = ScheduledStep(("backward", 0), (1, 2, 3), (4,), (1, 2, 3))
    assert written_over(step, {1, 2, 3}, [0, 0, 8, 4, 8]) == [2]
    assert written_over(step, {1, 3}, [0, 0, 8, 4, 0]) == []
