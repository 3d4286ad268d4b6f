"""What single operations cost: published counts, and what JAX itself writes out."""

import math

import jax
import jax.numpy as jnp
import jax.scipy.special
import pytest
from jax import lax
from jax._src.lax.linalg import geqrf
from jax.ad_checkpoint import checkpoint_name

from remat_magic.facts.cost import FREE, Cost, equation_cost
from remat_magic.jaxprs.walk import walk
from tests.cost_helpers import S, cost_of, flops_of, only

# ------------------------------------------------------------------------------------------------------- one by one


N, M = 64, 48
FORMULAS = {
    "elementwise": (lambda x: jnp.sin(x) + x, 2 * N, S(N)),
    "comparison and choice": (lambda x: jnp.where(x > 0, x, 0), N, S(N)),
    "square": (lambda x: x**2, N, S(N)),
    "tenth power": (lambda x: x**10, 4 * N, S(N)),  # 1010: three squarings, one product
    "minus cube": (lambda x: x**-3, 3 * N, S(N)),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), 2 * N, S(N)),
    "movement": (lambda x: jnp.concatenate([x.reshape(8, 8).T, jnp.zeros((1, 8))])[::2], 0, S(N)),
    "conversion": (lambda x: x.astype(jnp.bfloat16), 0, S(N)),
    "sum": (lambda x: x.sum(1), N * (M - 1), S(N, M)),
    "product of all": (lambda x: jnp.prod(x), N * M - 1, S(N, M)),
    "argmax": (lambda x: lax.argmax(x, 0, jnp.int32), (N - 1) * M, S(N, M)),
    "any": (lambda x: lax.reduce_or_p.bind(x, axes=(0,)), N - 1, S(N, dtype="bool")),
    "general reduction": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)), 2 * (N - 1) * M, S(N, M)),
    "cumulative sum": (lambda x: lax.cumsum(x, 1), N * (M - 1), S(N, M)),
    "cumulative logsumexp": (lambda x: lax.cumlogsumexp(x, 0), 5 * (N - 1), S(N)),
    "cumulative of nothing": (lambda x: lax.cummax(x, 0), 0, S(0)),
    "sort": (lambda x: lax.sort(x, dimension=0), M * N * 6, S(N, M)),
    "sort by two keys": (lambda x, y: lax.sort((x, y), num_keys=2), 2 * N * 6, S(N), S(N)),
    "top k": (lambda x: lax.top_k(x, 8), N * 3, S(N)),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "VALID"), (N - 2) * 2, S(N)),
    "general pool": (lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b + 1, (3,), (3,), "SAME"), 22 * 2 * 2, S(N)),
    "fft": (jnp.fft.fft, round(M * 5 * N * 6), S(M, N, dtype="complex64")),
    "real fft": (lambda x: lax.fft(x, "RFFT", (N,)), round(M * 2.5 * N * 6), S(M, N)),
    "inverse real fft": (lambda x: lax.fft(x, "IRFFT", (N,)), round(2.5 * N * 6), S(N // 2 + 1, dtype="complex64")),
    "two-dimensional fft": (
        lambda x: lax.fft(x, "FFT", (8, 16)), 3 * 5 * 128 * 7, S(3, 8, 16, dtype="complex64")
    ),
}  # fmt: skip


@pytest.mark.parametrize(("f", "expected", "args"), [(f, n, args) for f, n, *args in FORMULAS.values()], ids=FORMULAS)
def test_operations_cost_what_their_formulas_say(f, expected, args):
    assert flops_of(f, *args) == expected


def test_scatters_cost_one_operation_per_update():
    x, i, u = S(N), S(5, dtype="int32"), S(5)
    add = jax.make_jaxpr(lambda x, i, u: x.at[i].add(u))(x, i, u)
    put = jax.make_jaxpr(lambda x, i, u: x.at[i].set(u))(x, i, u)
    apply = jax.make_jaxpr(lambda x, i: x.at[i].apply(lambda y: jnp.sin(y) * 2))(x, i)
    assert equation_cost(only(add, "scatter-add")).flops == 5
    assert equation_cost(only(put, "scatter")).flops == 0
    assert equation_cost(only(apply, "scatter")).flops == 10


def test_a_gradient_of_pooling_visits_each_window():
    f = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (4,), "VALID")  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda x, ct: jax.vjp(f, x)[1](ct))(S(N), S(N // 4))
    assert equation_cost(only(jaxpr, "select_and_scatter_add")).flops == (N // 4) * 4


LINALG = {
    "cholesky": (lax.linalg.cholesky, N**3 / 3, S(N, N)),
    "batched": (lax.linalg.cholesky, 5 * round(N**3 / 3), S(5, N, N)),
    "complex": (lax.linalg.cholesky, 4 * round(N**3 / 3), S(N, N, dtype="complex64")),
    "lu": (lax.linalg.lu, 2 * N**3 / 3, S(N, N)),
    "tall lu": (lax.linalg.lu, N * M**2 - M**3 / 3, S(N, M)),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), 2 * (2 * N * M**2 - 2 * M**3 / 3), S(N, M)),
    "geqrf": (geqrf, 2 * N * M**2 - 2 * M**3 / 3, S(N, M)),
    "wide geqrf": (geqrf, 2 * N * M**2 - 2 * M**3 / 3, S(M, N)),
    "householder product": (
        lax.linalg.householder_product, 4 * N * M * 8 - 2 * (N + M) * 64 + 4 * 512 / 3, S(N, M), S(8)
    ),
    "triangular solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), N**2 * M, S(N, N), S(N, M)),
    "from the right": (lambda a, b: lax.linalg.triangular_solve(a, b), N**2 * M, S(N, N), S(M, N)),
    "eigh": (lax.linalg.eigh, 9 * N**3, S(N, N)),
    "eig": (lax.linalg.eig, 25 * N**3, S(N, N)),
    "eigenvalues": (
        lambda x: lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False),
        10 * N**3, S(N, N),
    ),
    "schur": (lax.linalg.schur, 25 * N**3, S(N, N)),
    "hessenberg": (lax.linalg.hessenberg, 10 * N**3 / 3, S(N, N)),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x), 4 * N**3 / 3, S(N, N)),
    "tridiagonal solve": (lax.linalg.tridiagonal_solve, 8 * N, S(N), S(N), S(N), S(N, 1)),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), 14 * N * M**2 + 8 * M**3, S(M, N)),
    "full svd": (lax.linalg.svd, 4 * N**2 * M + 8 * N * M**2 + 9 * M**3, S(N, M)),
    "singular values": (lambda x: lax.linalg.svd(x, compute_uv=False), 4 * N * M**2 - 4 * M**3 / 3, S(N, M)),
    "rank-one update": (lax.linalg.cholesky_update, 3 * N**2, S(N, N), S(N)),
    "symmetric product": (lax.linalg.symmetric_product, N * (N + 1) * M, S(N, M), S(N, N)),
}  # fmt: skip


@pytest.mark.parametrize(("f", "expected", "args"), [(f, n, args) for f, n, *args in LINALG.values()], ids=LINALG)
def test_linear_algebra_costs_what_textbooks_say(f, expected, args):
    jaxpr = jax.make_jaxpr(f)(*args)
    largest = max((equation_cost(eqn) for _, eqn in walk(jaxpr)), key=lambda cost: cost.flops)
    assert largest.flops == pytest.approx(expected, abs=1)


def test_solving_is_one_factorisation_and_two_triangles():
    n = 256
    assert flops_of(jnp.linalg.solve, S(n, n), S(n)) == pytest.approx(2 * n**3 / 3 + 2 * n**2, rel=0.02)


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


@pytest.mark.parametrize("name", ["threefry4x32", "philox2x32", "philox4x32"])
def test_other_ciphers_cost_what_they_are_lowered_to(name):
    module = pytest.importorskip(f"jax._src.random.{name}", reason="from jax 0.12 on")
    operands = [S(100, dtype="uint32")] * {"threefry4x32": 8, "philox2x32": 3, "philox4x32": 6}[name]
    bind = lambda *args: getattr(module, f"{name}_p").bind(*args)  # noqa: E731
    assert flops_of(bind, *operands) == flops_of(getattr(module, f"_{name}_lowering"), *operands)


@pytest.mark.parametrize(("bits", "partitionable"), [(8, True), (8, False), (32, True), (32, False)])
def test_random_bits_are_ciphered_blocks(bits, partitionable):
    key = jax.eval_shape(lambda: jax.random.key(0))
    f = lambda key: jax.random.bits(key, (100,), f"uint{bits}")  # noqa: E731
    with jax.threefry_partitionable(partitionable):
        blocks = 100 if partitionable else math.ceil(math.ceil(100 * bits / 32) / 2)
        assert flops_of(f, key) == blocks * (119 + partitionable)


def test_keys_made_from_keys():
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert flops_of(lambda key: jax.random.split(key, 6), key) == 6 * 119
    assert flops_of(lambda key: jax.random.fold_in(key, 3), key) == 119


def test_generators_of_the_backend_are_not_guessed():
    f = lambda seed: jax.random.bits(jax.random.key(seed, impl="rbg"), (8,))  # noqa: E731
    assert cost_of(f, S(dtype="int32")).uncosted == ("random_bits", "random_seed")


# --------------------------------------------------------------------------------------------------------------- bytes


def test_bytes_are_what_is_read_and_written():
    assert cost_of(jnp.matmul, S(8, 16), S(16, 4, dtype="float32")).bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert cost_of(jnp.sin, S(64, dtype="bfloat16")).bytes == 2 * 2 * 64


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.reshape(8, 8),
        lambda x: checkpoint_name(x, "x"),
        lambda x: lax.optimization_barrier(x),
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
    ],
    ids=["reshape", "name", "barrier", "bitcast"],
)
def test_views_move_nothing(f):
    assert cost_of(f, S(64)) == FREE


def test_indexing_touches_what_it_names():
    row = 32 * 4
    assert cost_of(lambda x: lax.slice(x, (3, 0), (4, 32)), S(64, 32)).bytes == 2 * row
    update = jax.make_jaxpr(lambda x, u: lax.dynamic_update_slice(x, u, (3, 0)))(S(64, 32), S(1, 32))
    assert equation_cost(only(update, "dynamic_update_slice")).bytes == 2 * row + 2 * 4
    gather = jax.make_jaxpr(lambda x, i: x[i])(S(64, 32), S(5, dtype="int32"))
    assert equation_cost(only(gather, "gather")) == Cost(0, 2 * 5 * row + 5 * 4)
