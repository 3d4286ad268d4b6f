"""The kernels of a program: their FLOPs beside the cost table's, their bytes beside XLA's own count."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_magic as rm
from remat_magic.devices import get
from remat_magic.facts.cost import jaxpr_cost
from remat_magic.facts.kernels import kernels_of
from remat_magic.facts.times import seconds
from remat_magic.records import Kernel
from tests.benchmarks.models import block
from tests.cost_helpers import S
from tests.programs import KINDS, PROGRAMS
from tests.volume import usually


def kernels(f, *args):
    return kernels_of(jax.make_jaxpr(f)(*args))[0]


def moved(of_program):
    return sum(kernel.bytes * kernel.times for kernel in of_program)


def computed(of_program):
    return sum(kernel.flops * kernel.times for kernel in of_program)


N = 1000
X = S(N)
UNIT = 4 * N


# ------------------------------------------------------------------------------------------------------------- by hand


def test_a_chain_is_one_kernel():
    """Read once, written once, whatever stands between."""
    assert kernels(lambda x: jnp.exp(jnp.sin(x) * 2 + 1), X) == (Kernel(4 * N, 2 * UNIT, "f32", "vector"),)


def test_what_several_read_is_read_once_and_written_where_it_leaves():
    """x in; the sine, which leaves, and its square out."""

    def f(x):
        y = jnp.sin(x)
        return y, y * y

    (kernel,) = kernels(f, X)
    assert kernel.bytes == 3 * UNIT


def test_a_matmul_reads_and_writes_memory():
    """The sine is written for the matmul to read; the cosine is taken of what the matmul wrote."""
    both = kernels(lambda x, w: jnp.cos(jnp.sin(x) @ w), S(8, 16), S(16, 4))
    x, w, y = 4 * 8 * 16, 4 * 16 * 4, 4 * 8 * 4
    assert both == (
        Kernel(8 * 16, 2 * x, "f32", "vector"),
        Kernel(2 * 8 * 16 * 4, x + w + y, "f32", "matmul"),
        Kernel(8 * 4, 2 * y, "f32", "vector"),
    )


def test_a_reduction_takes_from_registers_and_ends_its_kernel():
    """x in, one sum out; then x in again with the sum, which was not there before."""
    both = kernels(lambda x: x / jnp.sin(x).sum(), X)
    assert [kernel.bytes for kernel in both] == [UNIT + 4, 2 * UNIT + 4]


def test_broadcasts_and_masks_are_not_read():
    """A bias is read as it is, and a mask is made where it is used."""
    mask = lambda x: jnp.where(lax.broadcasted_iota("int32", (50, N), 1) < 3, x, 0)  # noqa: E731
    assert moved(kernels(lambda x, b: x + b, S(50, N), X)) == 101 * UNIT
    assert moved(kernels(mask, S(50, N))) == 100 * UNIT


def test_slices_read_what_they_give():
    assert moved(kernels(lambda x: jnp.sin(x[:10]), X)) == 2 * 40


def test_dtypes_and_units_are_told_apart():
    both = kernels(lambda a, b: (a @ b).astype("float32") * 2, S(8, 8, dtype="bfloat16"), S(8, 8, dtype="bfloat16"))
    assert [(kernel.dtype, kernel.unit) for kernel in both] == [("bf16", "matmul"), ("f32", "vector")]


def test_loops_run_as_often_as_they_say():
    body = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=7)[0]  # noqa: E731
    assert kernels(body, X) == (Kernel(N, 2 * UNIT, "f32", "vector", 7),)
    nested = lambda x: lax.scan(lambda c, _: (body(c), None), x, length=3)[0]  # noqa: E731
    assert kernels(nested, X) == (Kernel(N, 2 * UNIT, "f32", "vector", 21),)


def test_equal_kernels_are_merged():
    def f(x):
        for _ in range(5):
            x = lax.sort(x)
        return x

    (kernel,) = kernels(f, X)
    assert kernel.times == 5


def test_what_is_not_known_stays_unknown():
    loop = lambda x: lax.while_loop(lambda c: c.sum() < 10, jnp.sin, x)  # noqa: E731
    of_loop = kernels(loop, X)
    assert of_loop
    assert not any(kernel.known for kernel in of_loop)
    lu = kernels(lambda x: jnp.linalg.eigvals(x), S(4, 4))
    uncosted = jaxpr_cost(jax.make_jaxpr(jnp.linalg.eigvals)(S(4, 4))).uncosted
    assert any(kernel.flops is None for kernel in lu) == bool(uncosted)


@pytest.mark.parametrize("times", [1, 10])
def test_equal_kernels_in_a_loop_of_unknown_length_add_up(times):
    """Each runs at least once in every run of the loop, and in a scan of three the loop runs three times."""

    def f(x):
        for _ in range(times):
            x = lax.sort(x)
        return x

    loop = lambda x: lax.while_loop(lambda c: c[0] < 10, f, x)  # noqa: E731
    device = get("H100 SXM")
    (once,) = kernels(lax.sort, X)
    alone = seconds([once], device)[0]
    for in_all, fun in ((times, loop), (3 * times, lambda x: lax.scan(lambda c, _: (loop(c), None), x, length=3)[0])):
        taken, all_known = seconds([kernel for kernel in kernels(fun, X) if kernel.bytes == once.bytes], device)
        assert not all_known
        assert taken == pytest.approx(in_all * alone)


# ------------------------------------------------------------------------------------------------------ on all programs

COMPLEX = {"complex_numbers"}  # which JAX refuses under dots_saveable


@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["as_written", "nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("name", usually(sorted({*PROGRAMS} - COMPLEX), *{*KINDS} - COMPLEX))
def test_no_flop_is_lost(name, policy, remat3):
    """Kernels share out the very FLOPs that the cost table counts, recomputation's included."""
    fun, args = PROGRAMS[name]
    report = rm.trace(fun, *args).report(policy, "function")
    assert not report.uncosted
    assert computed(report.forward_kernels) == report.forward_flops
    assert computed(report.backward_kernels) == report.backward_flops
    assert computed(report.recomputed_kernels) == report.recomputed_flops
    assert moved(report.recomputed_kernels) <= moved(report.backward_kernels)
    assert not report.recomputed_kernels or report.recomputed


# --------------------------------------------------------------------------------------------------- beside XLA's count


def mlp(params, x):
    for w, b in params:
        x = jax.nn.gelu(x @ w + b)
    return jnp.mean(x**2)


def convnet(params, x):
    for w in params:
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = x.mean((0, 1, 2), keepdims=True)
        variance = ((x - mean) ** 2).mean((0, 1, 2), keepdims=True)
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5))
    return jnp.mean(x**2)


def one_block(params, x):
    return block(params, x).sum()


def block_shapes(w=768):
    sizes = {"qkv": (w, 3 * w), "qkv_bias": (3 * w,), "out": (w, w), "up": (w, 4 * w), "up_bias": (4 * w,),
             "down": (4 * w, w)}  # fmt: skip
    sizes |= dict.fromkeys(("out_bias", "norm1", "norm1_bias", "norm2", "norm2_bias", "down_bias"), (w,))
    return {name: S(*size) for name, size in sizes.items()}


def logistic(w, x):
    return jax.nn.log_softmax(x @ w).mean()


BESIDE_XLA = {
    "mlp": (mlp, [(S(512, 512), S(512))] * 3, S(256, 512)),
    "convnet": (convnet, [S(3, 3, 3, 32), S(3, 3, 32, 64)], S(8, 32, 32, 3)),
    "transformer block": (one_block, block_shapes(), S(2, 256, 768)),
    "softmax": (logistic, S(256, 512), S(512, 256)),
}


@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["none", "dots_saveable", "nothing_saveable"])
@pytest.mark.parametrize("name", BESIDE_XLA)
def test_bytes_are_those_of_the_compiled_step(name, policy, remat3):
    """Of a whole value_and_grad within a factor of 1.7, where counting every operand and result is 1.9 to 4 off."""
    fun, *args = BESIDE_XLA[name]
    trace = rm.trace(fun, *args)
    report = trace.report(policy)
    step = jax.jit(jax.value_and_grad(trace.function(policy), tuple(range(len(args)))))
    analysis = step.lower(*args).compile().cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    ours = (moved(report.forward_kernels) + moved(report.backward_kernels)) / analysis["bytes accessed"]
    halves = (trace.forward(policy), trace.backward(policy))
    naive = sum(jaxpr_cost(half).bytes for half in halves) / analysis["bytes accessed"]
    assert 1 / 1.7 < ours < 1.7
    assert abs(math.log(ours)) < abs(math.log(naive))
    assert (computed(report.forward_kernels) + computed(report.backward_kernels)) == pytest.approx(
        analysis["flops"], rel=0.03
    )
