"""What operations, loops and programs cost: tables of FLOPs and bytes, by textbooks, brute force, JAX and XLA."""

import functools
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.special
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic._jax.formulas import FLOPS
from remat_magic._jax.primitives import names
from remat_magic.facts.cost import Cost, equation_cost, jaxpr_cost
from remat_magic.jaxprs.walk import walk
from remat_magic.records import dearest
from remat_magic.views.source import line_rows
from remat_magic.views.values import recomputed_rows
from tests.cost_helpers import S, cost_of, flops_of, only

N, M = 64, 48
I32, C64, F8, F8_SCALE = "int32", "complex64", "float8_e4m3fn", "float8_e8m0fnu"


def product(n):
    return 2 * n**3


# ------------------------------------------------------------------------------------------------------ tables of FLOPs


def narrow(a, b):
    return lax.dot(a, b, preferred_element_type=jnp.float32)


def crossed(a, b):
    return lax.dot_general(a, b, (((0, 3), (2, 1)), ((2,), (0,))))


def by_groups(a, b, sizes):
    return lax.ragged_dot_general(a, b, sizes, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []))


def scaled(a, b, x, y):
    return lax.scaled_dot(a, b, lhs_scale=x, rhs_scale=y)


def back(fun):
    """A function's value and its gradients in all operands but the last, which is the cotangent."""
    return lambda *args: jax.vjp(fun, *args[:-1])[1](args[-1])


@jax.custom_jvp
def custom_jvp(x):
    return x @ x


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))


@jax.custom_vjp
def custom_vjp(x):
    return x @ x


custom_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct,))


def scans(*lengths):
    def fun(x):
        step = lambda x: x @ x  # noqa: E731
        for length in lengths:

            def step(x, inner=step, n=length):
                return lax.scan(lambda c, _: (inner(c), None), x, length=n)[0]

        return step(x)

    return fun


def solve(a, b):
    by_ones = lambda matvec, b: b @ jnp.ones((8, 8))  # noqa: E731
    return lax.custom_linear_solve(lambda x: a @ x, b, by_ones, by_ones)


DOTS = {
    **{
        f"matmul {m}x{k}x{n} in {batch}": (
            jnp.matmul, 2 * math.prod(batch) * m * k * n, S(*batch, m, k), S(*batch, k, n)
        )
        for m, k, n in [(1, 1, 1), (64, 128, 32), (7, 1, 9), (0, 4, 5)] for batch in [(), (2, 3)]
    },
    **{
        dtype: (narrow, 2 * 8 * 16 * 4, S(8, 16, dtype=dtype), S(16, 4, dtype=dtype))
        for dtype in ("bfloat16", "int8", F8)
    },
    "several axes in any order": (crossed, 2 * 7 * 5 * 6 * 3 * 4, S(3, 5, 7, 4), S(7, 4, 3, 6)),
    "matrix and vector": (jnp.matmul, 2 * 5 * 4, S(5, 4), S(4)),
    "inner product": (jnp.vdot, 2 * 9, S(9), S(9)),
    "gradient of a matmul": (back(jnp.matmul), 3 * 2 * 8 * 16 * 4, S(8, 16), S(16, 4), S(8, 4)),
    # A row meets the matrix of one group.
    "ragged": (lax.ragged_dot, 2 * 12 * 4 * 6, S(12, 4), S(7, 4, 6), S(7, dtype=I32)),
    "ragged, contracted": (by_groups, 2 * 12 * 4 * 6, S(12, 4), S(12, 6), S(7, dtype=I32)),
    "scaled": (
        scaled, 2 * 8 * 64 * 4, S(8, 64, dtype=F8), S(64, 4, dtype=F8), S(8, 2, dtype=F8_SCALE),
        S(2, 4, dtype=F8_SCALE),
    ),
    "scaled_matmul": (
        jax.nn.scaled_matmul, 2 * 3 * 8 * 64 * 4, S(3, 8, 64, dtype=F8), S(3, 4, 64, dtype=F8),
        S(3, 8, 2, dtype=F8_SCALE), S(3, 4, 2, dtype=F8_SCALE),
    ),
}  # fmt: skip
CALLS = {
    "jit": jax.jit(lambda x: x @ x),
    "nested jit": jax.jit(jax.jit(lambda x: x @ x)),
    "checkpoint": jax.checkpoint(lambda x: x @ x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "linear call": lambda x: jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, ct: r.T @ ct, x, x),
    "named": lambda x: checkpoint_name(x @ x, "y"),
    "checkpoint in scan": lambda x: lax.scan(lambda c, _: (jax.checkpoint(lambda c: c @ c)(c), None), x, length=1)[0],
}
LOOPS = {
    "scan in scan": (scans(5, 7), 35 * product(4), S(4, 4)),
    "scan of nothing": (scans(5, 0), 0, S(4, 4)),
    "fori_loop": (lambda x: lax.fori_loop(3, 10, lambda i, x: x @ x, x), 7 * (product(4) + 1), S(4, 4)),
    "linear solve, its solver alone": (solve, 2 * 8 * 8, S(8, 8), S(8)),
}
FORMULAS = {
    "elementwise": (lambda x: jnp.sin(x) + x, 2 * N, S(N)),
    "comparison and choice": (lambda x: jnp.where(x > 0, x, 0), N, S(N)),
    "square": (lambda x: x**2, N, S(N)),
    "tenth power": (lambda x: x**10, 4 * N, S(N)),  # 1010: three squarings, one product
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), 2 * N, S(N)),
    "movement": (lambda x: jnp.concatenate([x.reshape(8, 8).T, jnp.zeros((1, 8))])[::2], 0, S(N)),
    "sum": (lambda x: x.sum(1), N * (M - 1), S(N, M)),
    "product of all": (lambda x: jnp.prod(x), N * M - 1, S(N, M)),
    "argmax": (lambda x: lax.argmax(x, 0, jnp.int32), (N - 1) * M, S(N, M)),
    "general reduction": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)), 2 * (N - 1) * M, S(N, M)),
    "cumulative sum": (lambda x: lax.cumsum(x, 1), N * (M - 1), S(N, M)),
    "cumulative logsumexp": (lambda x: lax.cumlogsumexp(x, 0), 5 * (N - 1), S(N)),
    "sort": (lambda x: lax.sort(x, dimension=0), M * N * 6, S(N, M)),
    "sort by two keys": (lambda x, y: lax.sort((x, y), num_keys=2), 2 * N * 6, S(N), S(N)),
    "top k": (lambda x: lax.top_k(x, 8), N * 3, S(N)),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "VALID"), (N - 2) * 2, S(N)),
    "general pool": (lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b + 1, (3,), (3,), "SAME"), 22 * 2 * 2, S(N)),
}  # fmt: skip
TABLE = DOTS | LOOPS | FORMULAS | {name: (call, product(8), S(8, 8)) for name, call in CALLS.items()}


@pytest.mark.parametrize(("f", "expected", "args"), [(f, n, args) for f, n, *args in TABLE.values()], ids=TABLE)
def test_operations_cost_what_their_formulas_say(f, expected, args):
    assert flops_of(lambda *given: f(*given), *args) == expected


LINALG = {
    "cholesky": (lax.linalg.cholesky, N**3 / 3, S(N, N)),
    "batched": (lax.linalg.cholesky, 5 * round(N**3 / 3), S(5, N, N)),
    "lu": (lax.linalg.lu, 2 * N**3 / 3, S(N, N)),
    "tall lu": (lax.linalg.lu, N * M**2 - M**3 / 3, S(N, M)),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), 2 * (2 * N * M**2 - 2 * M**3 / 3), S(N, M)),
    "triangular solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), N**2 * M, S(N, N), S(N, M)),
    "from the right": (lambda a, b: lax.linalg.triangular_solve(a, b), N**2 * M, S(N, N), S(M, N)),
    "eigh": (lax.linalg.eigh, 9 * N**3, S(N, N)),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), 14 * N * M**2 + 8 * M**3, S(M, N)),
    "full svd": (lax.linalg.svd, 4 * N**2 * M + 8 * N * M**2 + 9 * M**3, S(N, M)),
    "singular values": (lambda x: lax.linalg.svd(x, compute_uv=False), 4 * N * M**2 - 4 * M**3 / 3, S(N, M)),
}  # fmt: skip


@pytest.mark.parametrize(("f", "expected", "args"), [(f, n, args) for f, n, *args in LINALG.values()], ids=LINALG)
def test_linear_algebra_costs_what_textbooks_say(f, expected, args):
    jaxpr = jax.make_jaxpr(f)(*args)
    largest = max((equation_cost(eqn) for _, eqn in walk(jaxpr)), key=lambda cost: cost.flops)
    assert largest.flops == pytest.approx(expected, abs=1)


# Of one equation: what is scattered, and the windows of a pooling's gradient.
EQUATIONS = {
    "scatter-add": (lambda x, i, u: x.at[i].add(u), 5, S(N), S(5, dtype=I32), S(5)),
    "scatter": (lambda x, i, u: x.at[i].set(u), 0, S(N), S(5, dtype=I32), S(5)),
    "scatter-apply": (lambda x, i: x.at[i].apply(lambda y: jnp.sin(y) * 2), 10, S(N), S(5, dtype=I32)),
    "select_and_scatter_add": (
        back(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (4,), "VALID")), (N // 4) * 4, S(N), S(N // 4)
    ),
    "cond": (  # the worst of its branches
        lambda i, x: lax.switch(i, [lambda x: x, lambda x: x @ x @ x, jnp.sin], x), 2 * product(8), S(dtype=I32),
        S(8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_costs_what_it_does(name):
    f, expected, *args = EQUATIONS[name]
    assert equation_cost(only(jax.make_jaxpr(f)(*args), name.removesuffix("-apply"))).flops == expected


def kernel_equation(name, *operands, **params):
    """An equation of a kernel that JAX binds on a GPU alone, as far as a formula looks at it."""
    invars = [SimpleNamespace(aval=jax.core.ShapedArray(s.shape, s.dtype)) for s in operands]
    return SimpleNamespace(primitive=SimpleNamespace(name=name), params=params, invars=invars, outvars=invars[:1])


@pytest.mark.parametrize(("half", "products"), [("fwd", 2), ("bwd", 5)])
def test_attention_kernels_count_their_products(half, products):
    b, t, s, n, h = 2, 16, 32, 4, 8
    none = [S(0)] * 7
    name = f"dot_product_attention_{half}_wrapper"
    seq_first = kernel_equation(name, S(b, t, n, h), S(b, s, 2, h), S(b, s, 2, h), *none, layout=0)
    heads_first = kernel_equation(name, S(b, n, t, h), S(b, 2, s, h), S(b, 2, s, h), *none, layout=1)
    expected = products * 2 * b * n * t * s * h
    assert equation_cost(seq_first).flops == equation_cost(heads_first).flops == expected
    pages = [*none[:5], S(b, 1, 4, 1, dtype="int32"), S(b, 1, 4, 1, dtype="int32")]
    paged = kernel_equation(name, S(b, t, n, h), S(b, s, 2, h), S(b, s, 2, h), *pages, layout=0)
    assert equation_cost(paged).uncosted == (name,)


# -------------------------------------------------------------------------------------------------------- convolutions

CONVOLUTIONS = {
    "same": {"padding": "SAME"},
    "valid": {"padding": "VALID"},
    "strided": {"padding": "SAME", "window_strides": (2, 2)},
    "far padding": {"padding": ((5, 0), (0, 7))},
    "cropped": {"padding": ((-1, 0), (-2, 1))},
    "dilated kernel": {"padding": "SAME", "rhs_dilation": (2, 3)},
    "transposed": {"padding": ((2, 1), (1, 1)), "lhs_dilation": (2, 3)},
    "feature groups": {"padding": "SAME", "feature_group_count": 2},
    "batch groups": {"padding": "SAME", "batch_group_count": 2},
}


def convolution(options):
    options = {"window_strides": (1, 1), **options}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def convolution_arguments(options):
    return S(4, 9, 10, 6), S(3, 2, 6 // options.get("feature_group_count", 1), 8)


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_count_the_products_of_two_elements(options):
    """A convolution of ones is, at each output, the number of its products; padding and holes are zeros."""
    f = convolution(options)
    image, kernel = convolution_arguments(options)
    ones = jnp.ones(image.shape)
    if isinstance(options["padding"], tuple):  # written out, since XLA's own handling of cropping is not always right
        holes = (0, *(n - 1 for n in options.get("lhs_dilation", (1, 1))), 0)
        edges = ((0, 0), *options["padding"], (0, 0))
        ones = lax.pad(ones, 0.0, [(*edge, hole) for edge, hole in zip(edges, holes, strict=True)])
        options = {**options, "padding": "VALID", "lhs_dilation": (1, 1)}
    products = convolution(options)(ones, jnp.ones(kernel.shape))
    assert flops_of(f, image, kernel) == 2 * int(products.sum())


# ------------------------------------------------------------------------------------------------------- random numbers


def test_threefry_counts_the_operations_that_jax_writes_out():
    try:
        from jax._src.random import threefry2x32 as module  # 0.12
    except ImportError:
        from jax._src import prng as module
    u32 = S(100, dtype="uint32")
    written_out = lambda k, l, x, y: module._threefry2x32_lowering(k, l, x, y, use_rolled_loops=False)  # noqa: E731, E741
    bind = lambda *args: module.threefry2x32_p.bind(*args)  # noqa: E731
    assert flops_of(bind, *[u32] * 4) == flops_of(written_out, *[u32] * 4)


@pytest.mark.parametrize(("bits", "partitionable"), [(8, True), (8, False), (32, True), (32, False)])
def test_random_bits_are_ciphered_blocks(bits, partitionable):
    key = jax.eval_shape(lambda: jax.random.key(0))
    f = lambda key: jax.random.bits(key, (100,), f"uint{bits}")  # noqa: E731
    with jax.threefry_partitionable(partitionable):
        blocks = 100 if partitionable else math.ceil(math.ceil(100 * bits / 32) / 2)
        assert flops_of(f, key) == blocks * (119 + partitionable)


# ------------------------------------------------------------------------------------------------ XLA's own accounting


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def attention(p, x):
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    x = x + jnp.einsum("bnts,bsnh,nhd->btd", weights, v, p["o"])
    return jnp.mean((x + jax.nn.gelu(x @ p["up"]) @ p["down"]) ** 2)


def convnet(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(convolution({"padding": "SAME", "window_strides": (2, 2)})(x, kernel))
    return jnp.sum(x**2)


def spectral(weights, x):
    """A Fourier layer."""
    transformed = jnp.einsum("hio,bhi->bho", weights, jnp.fft.rfft(x.reshape(x.shape[0], 2, -1))[..., :16])
    return jnp.sum(jnp.abs(transformed) ** 2)


CONVOLVED = (4, 9, 10, 6), (3, 2, 6, 8)
BLOCK = {"qkv": S(3, 64, 4, 16), "o": S(4, 16, 64), "up": S(64, 256), "down": S(256, 64)}
XLA = {
    "mlp gradient": (jax.grad(mlp), 0.02, [S(128, 256), S(256, 64)], S(32, 128)),
    "transformer gradient": (jax.grad(attention), 0.02, BLOCK, S(2, 32, 64)),
    "convnet gradient": (jax.grad(convnet, (0, 1)), 0.02, [S(3, 3, 16, 32), S(3, 3, 32, 64)], S(4, 32, 32, 16)),
    "sum": (lambda x: x.sum(0), 0, S(64, 128)),
    "max": (jnp.max, 0, S(64, 128)),
    "fused": (lambda x: x * x + x, 0, S(64, 128)),
    "fft": (jnp.fft.fft, 0, S(4, 64, dtype=C64)),
    "fft of an odd length": (jnp.fft.fft, 0, S(4, 63, dtype=C64)),
    "real fft": (lambda x: lax.fft(x, "RFFT", (64,)), 0, S(3, 64)),
    "inverse real fft": (lambda x: lax.fft(x, "IRFFT", (64,)), 0, S(33, dtype=C64)),
    "two-dimensional fft": (lambda x: lax.fft(x, "FFT", (8, 16)), 0, S(3, 8, 16, dtype=C64)),
    "complex matmul": (jnp.matmul, 0, S(2, 3, 8, dtype=C64), S(8, 5, dtype=C64)),
    "complex convolution": (convolution({"padding": "SAME"}), 0.05, *(S(*s, dtype=C64) for s in CONVOLVED)),
    **{
        f"complex {name}": (getattr(jnp, name), 0, S(64, dtype=C64))
        for name in ("sin", "cos", "exp", "square", "conj", "real", "imag", "negative", "sum", "abs", "exp2", "log1p")
    },
    **{
        f"complex {name}": (getattr(jnp, name), 0.02, S(64, dtype=C64))
        for name in ("sqrt", "log", "sinh", "cosh", "arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh")
    },
    "complex logistic": (lax.logistic, 0, S(64, dtype=C64)),
    "greater of two complex numbers": (lax.max, 0, S(64, dtype=C64), S(64, dtype=C64)),
    "complex product and sum": (lambda x, y: x * y + x, 0, S(64, dtype=C64), S(64, dtype=C64)),
    "complex gradient": (jax.grad(spectral, (0, 1)), 0.02, S(2, 16, 16, dtype=C64), S(4, 256, 16)),
}


@pytest.mark.parametrize("name", XLA)
def test_agrees_with_xla(name):
    """Where matmuls dominate, and exactly on simple arithmetic."""
    f, off, *args = XLA[name]
    assert flops_of(f, *args) == pytest.approx(jax.jit(f).lower(*args).compile().cost_analysis()["flops"], rel=off)


def test_a_checkpointed_gradient_costs_one_forward_pass_more(remat3):
    plain, again = (flops_of(jax.grad(f), BLOCK, S(2, 32, 64)) for f in (attention, jax.checkpoint(attention)))
    assert again - plain == pytest.approx(flops_of(attention, BLOCK, S(2, 32, 64)), rel=0.05)


# --------------------------------------------------------------------------------------------------------------- bytes

ROW = 32 * 4
BYTES = {
    "matmul": (jnp.matmul, 4 * (8 * 16 + 16 * 4 + 8 * 4), S(8, 16), S(16, 4)),
    "elementwise": (jnp.sin, 2 * 2 * 64, S(64, dtype="bfloat16")),
    "reshape": (lambda x: x.reshape(8, 8), 0, S(64)),
    "name": (lambda x: checkpoint_name(x, "x"), 0, S(64)),
    "barrier": (lax.optimization_barrier, 0, S(64)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), 0, S(64)),
    "slice": (lambda x: lax.slice(x, (3, 0), (4, 32)), 2 * ROW, S(64, 32)),
    "scan": (lambda x, ws: lax.scan(lambda c, w: (c @ w, c), x, ws), 12 * 3 * 8 * 8 * 4, S(8, 8), S(12, 8, 8)),
}


@pytest.mark.parametrize(("f", "expected", "args"), [(f, n, args) for f, n, *args in BYTES.values()], ids=BYTES)
def test_bytes_are_what_is_read_and_written(f, expected, args):
    assert cost_of(f, *args).bytes == expected


def test_indexing_touches_what_it_names():
    update = jax.make_jaxpr(lambda x, u: lax.dynamic_update_slice(x, u, (3, 0)))(S(64, 32), S(1, 32))
    assert equation_cost(only(update, "dynamic_update_slice")).bytes == 2 * ROW + 2 * 4
    gather = jax.make_jaxpr(lambda x, i: x[i])(S(64, 32), S(5, dtype=I32))
    assert equation_cost(only(gather, "gather")) == Cost(0, 2 * 5 * ROW + 5 * 4)


# --------------------------------------------------------------------------------------------------------------- loops

UNCOUNTED = {
    "data": lambda n, x: lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x),
    "bound": lambda n, x: lax.fori_loop(0, n, lambda i, x: x @ x, x),
    "counted": lambda n, x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] @ s[1]), (0, x)),
}


@pytest.mark.parametrize("f", UNCOUNTED.values(), ids=UNCOUNTED)
def test_loops_of_unknown_length_count_once_and_say_so(f):
    jaxpr = jax.make_jaxpr(f)(S(dtype="int32"), S(4, 4))
    cost = jaxpr_cost(jaxpr)
    assert cost.uncosted == ("while",)
    assert product(4) <= cost.flops <= product(4) + 2 * 16


# ------------------------------------------------------------------------------------------------------------ uncosted


def called(x):
    return jax.pure_callback(lambda x: x, x, x)


def unknown(x):
    y = called(x) + jax.ffi.ffi_call("unknown", x)(x)
    return lax.igamma(y, y) + y


UNKNOWN = {
    "in any branch": (
        lambda p, x: lax.cond(p, lambda x: x @ x, called, x), product(8), ["pure_callback"], S(dtype="bool"), S(8, 8)
    ),
    "without a formula": (unknown, 2 * 16, ["ffi_call", "igamma", "pure_callback"], S(16)),
    "a generator of the backend": (
        lambda seed: jax.random.bits(jax.random.key(seed, impl="rbg"), (8,)), 0, ["random_bits", "random_seed"],
        S(dtype=I32),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_formula_covers_is_named(name):
    f, flops, uncosted, *args = UNKNOWN[name]
    cost = cost_of(f, *args)
    assert (cost.flops, [*cost.uncosted]) == (flops, uncosted)
    assert cost.bytes > 0


def test_pallas_kernels_cost_what_their_author_says():
    pl = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] * 2

    def f(estimate):
        return lambda x: pl.pallas_call(kernel, out_shape=S(8), cost_estimate=estimate)(x)

    assert cost_of(f(None), S(8)) == Cost(0, 64, ("pallas_call",))
    estimate = pl.CostEstimate(flops=8, transcendentals=3, bytes_accessed=70)
    assert cost_of(f(estimate), S(8)) == Cost(11, 70)


def test_high_level_primitives_are_written_out():
    """jax 0.12 has jnp.searchsorted as one primitive, 0.10 as the loop that it stands for."""
    cost = cost_of(lambda a, x: jnp.searchsorted(a, x), S(64), S(5))
    assert cost.uncosted == ()
    assert 5 * 6 <= cost.flops <= 5 * 6 * 20
    assert cost_of(jnp.frexp, S(16)).uncosted == ()


LIST_PRIMITIVES = """
import gc, importlib, json, pkgutil, warnings
warnings.simplefilter("ignore")
import jax._src
from jax.extend.core import Primitive
for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
    parts = set(module.name.replace("_", ".").split("."))
    if parts & {"pallas", "test", "mosaic", "internal", "cloud", "debugger", "tpu", "clusters", "thunky"}:
        continue
    try:
        importlib.import_module(module.name)
    except Exception:  # optional dependencies
        pass
print(json.dumps(sorted({object.name for object in gc.get_objects() if isinstance(object, Primitive)})))
"""

BY_THEIR_BODIES = names(
    """
    call call_hi_primitive call_hi_primitive_linearized closed_call composite compute_on cond core_call
    custom_jvp_call custom_jvp_call_jaxpr custom_linear_solve custom_partitioning custom_vjp_call custom_vmap_call
    eval_jaxpr jaxpr_call jit linear_call mpmd_map pallas_call reduce reduce_window remat2 remat_opt run_scoped
    run_state scan scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter shard_map
    while xla_metadata_call core_map
    """
)
UNCOSTED = {
    "another program, which its equation does not show": """
        buffer_callback call_exported cudnn_fusion custom_fusion fusible ffi_call io_callback pure_callback
        tpu_custom_call xla_ffi_call
    """,
    "iterates until it converges": "igamma igammac igamma_grad_a regularized_incomplete_beta random_gamma",
    "its algorithm is the backend's": "rng_bit_generator rng_uniform threefry4x32 philox2x32 philox4x32",
    "a factorisation that few programs have": """
        cholesky_update eig geqp3 geqrf hessenberg householder_product ormqr schur symmetric_product tridiagonal
        tridiagonal_solve
    """,
    "only within kernels, whose bodies are not entered": """
        bitcast conv delay dma_start dma_wait get_barrier_semaphore masked_load masked_swap matmul_acc_lhs
        matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs num_programs pack_elementwise program_id
        program_order roll semaphore_read semaphore_signal semaphore_wait stochastic_round unpack_elementwise
    """,
    "only while JAX traces or differentiates": """
        box_get box_set create_linear custom_lin log_extend log_read new_box new_log prng_join prng_random_bits
        prng_seed prng_split trace_value unreachable
    """,
}


@pytest.mark.slow
def test_every_primitive_of_jax_is_covered_or_known_not_to_be():
    ran = subprocess.run(
        [sys.executable, "-c", LIST_PRIMITIVES], capture_output=True, text=True, check=True, timeout=300
    )
    registered = set(json.loads(ran.stdout.splitlines()[-1]))
    assert len(registered) > 250
    known = {name for names in UNCOSTED.values() for name in names.split()}
    thunks = {name for name in registered if name.startswith("thunky.")}  # of XLA:GPU's own instruction language
    assert registered - set(FLOPS) - BY_THEIR_BODIES - known - thunks == set()
    assert known.isdisjoint(FLOPS)


# ----------------------------------------------------------------------------------- what is repeated, and how often


def more_than_without(trace, policy):
    """The FLOPs that the backward pass has more under a policy: what it repeats."""
    backward = trace.report(policy, "function").backward_flops
    return backward - trace.report("none", "function").backward_flops


def turning(condition):
    """A product, and a loop of products whose result the derivative multiplies by."""

    def f(w, x, n):
        y = jnp.sin(x @ w)
        fixed, weights = lax.stop_gradient(y), lax.stop_gradient(w)
        turned = lax.while_loop(condition(n), lambda s: (s[0] + 1, jnp.sin(s[1] @ weights)), (0, fixed))[1]
        return jnp.sum(y * turned)

    return rm.trace(f, S(32, 32), S(8, 32), S(dtype="int32"))


PRODUCT = 2 * 8 * 32 * 32


def quantised(x, w):
    """A product of bytes: the one that makes int32."""
    left, right = jnp.round(x).astype(jnp.int8), jnp.round(w).astype(jnp.int8)
    return lax.dot(left, right, preferred_element_type=jnp.int32).astype(jnp.float32)


def in_other_words(x, w):
    left, right = (jnp.round(each).astype("int8") for each in (x, w))
    numbers = (((1,), (0,)), ((), ()))
    return lax.dot_general(left, right, numbers, preferred_element_type=jnp.int32).astype("float32")


def ruled(rule, function=quantised):
    """With a backward rule; ``rule`` gives what the forward rule calls."""
    whole = jax.custom_vjp(function)
    whole.defvjp(lambda x, w: (rule(whole)(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    return whole


def forward_ruled(rule):
    whole = jax.custom_jvp(quantised)
    whole.defjvp(lambda given, t: (rule(whole)(*given), t[0] @ given[1] + given[0] @ t[1]))
    return whole


RULED = {
    "calls itself": ruled(lambda whole: whole),
    "its function": ruled(lambda _: quantised),
    "other words": ruled(lambda _: in_other_words),
    "jitted": ruled(lambda _: jax.jit(in_other_words)),
    "checkpointed": ruled(lambda _: quantised, jax.checkpoint(quantised)),
    "of a custom_jvp": forward_ruled(lambda whole: whole),
    "of a custom_jvp, other words": forward_ruled(lambda _: in_other_words),
}
AROUND = {
    "plain": lambda f: lambda x, w: jnp.sin(f(x, w)),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (jnp.sin(f(c, w)), None), x, length=3)[0],
    "vmap": lambda f: lambda x, w: jnp.sin(jax.vmap(f, (0, None))(x.reshape(2, 4, 32), w)),
    "jit": lambda f: lambda x, w: jnp.sin(jax.jit(f)(jnp.sin(jax.jit(f)(x, w)), w)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", RULED)
def test_a_product_that_runs_in_both_halves_is_repeated(remat3, name, around):
    """By a count of what makes int32 in both: no gradient does."""

    def products(jaxpr):
        found = [scope.times for scope, eqn in walk(jaxpr) if eqn.outvars and eqn.outvars[0].aval.dtype == jnp.int32]
        return sum(found)

    trace = rm.trace(lambda x, w: AROUND[around](RULED[name])(x, w).sum(), S(8, 32), S(32, 32))
    again = [each for each in trace.report("nothing_saveable", "function").recomputed if "i32" in each.outputs[0]]
    ahead, back = (half("nothing_saveable", "function") for half in (trace.forward, trace.backward))
    assert products(ahead) == products(back) > 0
    assert sum(each.flops for each in again if each.repeated) == products(back) * PRODUCT
    assert all(each.repeated for each in again)


def two_products(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def recomputing(function):
    """A function whose backward rule runs it again."""
    whole = jax.custom_vjp(function)
    whole.defvjp(lambda w, x: (function(w, x), (w, x)), lambda saved, g: jax.vjp(function, *saved)[1](g))
    return whole


def attention_rule(w, x):
    """Attention whose rule makes its scores again, from what it keeps of their sums."""

    def scores(q, k, sums):
        return jnp.exp(q @ k.T - sums)

    def forward(q, k):
        sums = jax.nn.logsumexp(q @ k.T, -1, keepdims=True)
        return scores(q, k, sums) @ k, (q, k, sums)

    def backward(saved, g):
        q, k, sums = saved
        p = jnp.exp(jnp.dot(q, k.T) - sums)
        d = p * (g @ k.T - (p * (g @ k.T)).sum(-1, keepdims=True))
        return d @ k, d.T @ q + p.T @ g

    whole = jax.custom_vjp(lambda q, k: forward(q, k)[0])
    whole.defvjp(forward, backward)
    return whole(x @ w, x)


def rule_in_scan(w, x):
    return lax.scan(lambda c, _: (recomputing(two_products)(w, c), None), x, length=3)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, w, x):
    return lax.fori_loop(0, 1, lambda _, z: f(w, z), f(w, x))


def fixed_point_forward(f, w, x):
    s = fixed_point(f, w, x)
    return s, (w, s)


def fixed_point_backward(f, saved, g):
    w, s = saved
    return (*jax.vjp(lambda w: f(w, s), w)[1](g), jnp.zeros_like(s))


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


# What the rules run again, in parts of the product of w and x; None: nothing of what ran before.
BY_RULES = {
    "its function": (recomputing(two_products), 2),
    "its jitted function": (recomputing(jax.jit(two_products)), 2),
    "in a scan": (rule_in_scan, 6),
    "attention": (attention_rule, 8 / 32),
    "at a fixed point": (lambda w, x: fixed_point(lambda w, z: jnp.tanh(z @ w), w, x), 1),
    "what is saved": (lambda w, x: ruled(lambda _: quantised)(x, w), None),
    "no rule": (two_products, None),
    "a derivative": (lambda w, x: jax.nn.relu(jax.nn.gelu(x @ w)), None),
}


@pytest.mark.parametrize("policy", ["none", "dots_saveable", "nothing_saveable"])
@pytest.mark.parametrize("name", BY_RULES)
def test_what_a_rule_runs_again_is_told(remat3, name, policy):
    """It is no policy's, and counted by none."""
    fun, products = BY_RULES[name]
    report = rm.trace(lambda w, x: fun(w, x).sum(), S(32, 32), S(8, 32)).report(policy, "function")
    notes = [note for note in report.notes if note.kind == "rule-repeats"]
    assert bool(notes) == bool(products)
    for note in notes:
        figure = float(note.split("under every policy: ")[1].split(" kFLOPs")[0]) * 1e3
        assert products * PRODUCT <= figure < 1.2 * products * PRODUCT
        assert "dot_general" in note.about


@pytest.mark.models
@pytest.mark.parametrize("kind", ["while", "scan"])
def test_a_checkpointed_loop_of_equinox_runs_its_steps_again(kind):
    loops = pytest.importorskip("equinox.internal")

    def loss(w, x):
        step = lambda x: jnp.tanh(x @ w)  # noqa: E731
        if kind == "while":
            return loops.while_loop(
                lambda x: x.max() < 9.0, step, x, max_steps=64, kind="checkpointed", checkpoints=4
            ).sum()
        steps = jnp.zeros(64)
        return loops.scan(lambda x, _: (step(x), None), x, steps, kind="checkpointed", checkpoints=4)[0].sum()

    (note,) = (note for note in rm.trace(loss, S(32, 32), S(8, 32)).report().notes if note.kind == "rule-repeats")
    assert {"dot_general", "tanh"} <= {*note.about}
    assert "for each turn of a loop of unknown length" in note


def test_a_repeated_loop_costs_one_turn_at_least(remat3):
    """So that no plan takes a loop for free."""
    trace = turning(lambda n: lambda s: s[0] < n)
    report = trace.report("nothing_saveable", "function")
    inside = [equation for equation in report.recomputed if "while" in equation.path]
    products = [equation for equation in inside if equation.primitive == "dot_general"]
    assert [(each.flops, each.times, each.known) for each in products] == [(PRODUCT, None, False)]
    assert report.recomputed_flops == more_than_without(trace, "nothing_saveable")
    assert "while" in report.uncosted
    assert trace.plan(1.0, "function").recomputed_flops < PRODUCT


def switching(n, w, x):
    """Of one product, of two, and of none."""
    branches = [lambda x: jnp.tanh(x @ w), lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), lambda x: x]
    return jnp.sum(lax.switch(n, branches, x) ** 2)


def looping_switch(n, w, x):
    return lax.scan(lambda c, i: (c + switching(i + n, w, x * c), None), 1.0, jnp.arange(5))[0]


@pytest.mark.parametrize(("fun", "times"), [(switching, 1), (looping_switch, 5)])
def test_a_repeated_conditional_costs_its_dearest_branch(remat3, fun, times):
    """And so says everything that adds up what is recomputed."""
    trace = rm.trace(fun, S(dtype="int32"), S(32, 32), S(8, 32))
    report = trace.report("nothing_saveable", "function")
    products = [equation for equation in report.recomputed if equation.primitive == "dot_general"]
    assert len(products) == 3  # in two branches
    assert sum(equation.flops for equation in dearest(products)) == 2 * times * PRODUCT
    assert 2 * times * PRODUCT < report.recomputed_flops < 2.2 * times * PRODUCT
    assert report.repeated_flops + report.deferred_flops == report.recomputed_flops <= report.backward_flops
    assert sum(kernel.flops * kernel.times for kernel in report.recomputed_kernels) == report.recomputed_flops
    plan = trace.plan(0, "function")
    assert plan.recomputed_flops == report.recomputed_flops
    assert "differ from those that the plan was made by" not in plan.status
    rows = [row for row in recomputed_rows(report) if row.primitive == "dot_general"]
    assert all(row.flops <= 2 * times * PRODUCT for row in rows)
    assert max(row.flops for row in line_rows(report)) <= report.recomputed_flops
