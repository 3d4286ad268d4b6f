"""FLOPs of dots and convolutions, held against symbolic counts, brute force and XLA's cost analysis."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.special
import pytest
from jax import lax

from remat_magic.facts.cost import equation_cost
from tests.cost_helpers import S, flops_of

# ------------------------------------------------------------------------------------------------------------ the dots

SIZES = [(1, 1, 1), (3, 4, 5), (64, 128, 32), (7, 1, 9), (0, 4, 5)]


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
@pytest.mark.parametrize("batch", [(), (6,), (2, 3)])
def test_matmul_is_two_b_m_k_n(m, k, n, batch):
    assert flops_of(jnp.matmul, S(*batch, m, k), S(*batch, k, n)) == 2 * math.prod(batch) * m * k * n


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_narrow_types_multiply_as_often(dtype):
    f = lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32)  # noqa: E731
    assert flops_of(f, S(8, 16, dtype=dtype), S(16, 4, dtype=dtype)) == 2 * 8 * 16 * 4


def test_complex_matmul_takes_four_real_ones():
    c64 = "complex64"
    assert flops_of(jnp.matmul, S(3, 4, dtype=c64), S(4, 5, dtype=c64)) == 4 * 2 * 3 * 4 * 5


def test_contracted_axes_may_be_several_in_any_order():
    f = lambda a, b: lax.dot_general(a, b, (((0, 3), (2, 1)), ((2,), (0,))))  # noqa: E731
    assert flops_of(f, S(3, 5, 7, 4), S(7, 4, 3, 6)) == 2 * 7 * 5 * 6 * 3 * 4


def test_matrix_vector_and_inner_products_are_two_flops_a_product():
    assert flops_of(jnp.matmul, S(5, 4), S(4)) == 2 * 5 * 4
    assert flops_of(jnp.vdot, S(9), S(9)) == 2 * 9


def test_gradient_of_a_matmul_is_two_matmuls_more():
    m, k, n = 8, 16, 4
    f = lambda a, b, ct: jax.vjp(jnp.matmul, a, b)[1](ct)  # noqa: E731
    assert flops_of(f, S(m, k), S(k, n), S(m, n)) == 3 * 2 * m * k * n


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_ragged_dot_meets_one_group_per_row(groups):
    m, k, n = 12, 4, 6
    sizes = S(groups, dtype="int32")
    assert flops_of(lax.ragged_dot, S(m, k), S(groups, k, n), sizes) == 2 * m * k * n
    contracting = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    f = lambda a, b, g: lax.ragged_dot_general(a, b, g, contracting)  # noqa: E731
    assert flops_of(f, S(m, k), S(m, n), sizes) == 2 * m * k * n


def test_scaled_dots_count_as_dots():
    f8, scale = "float8_e4m3fn", "float8_e8m0fnu"
    f = lambda a, b, x, y: lax.scaled_dot(a, b, lhs_scale=x, rhs_scale=y)  # noqa: E731
    args = S(8, 64, dtype=f8), S(64, 4, dtype=f8), S(8, 2, dtype=scale), S(2, 4, dtype=scale)
    assert flops_of(f, *args) == 2 * 8 * 64 * 4
    args = S(3, 8, 64, dtype=f8), S(3, 4, 64, dtype=f8), S(3, 8, 2, dtype=scale), S(3, 4, 2, dtype=scale)
    assert flops_of(jax.nn.scaled_matmul, *args) == 2 * 3 * 8 * 64 * 4


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


def test_valid_convolution_is_the_textbook_formula():
    batch, size, kernel, inputs, outputs = 2, 12, 3, 6, 8
    f = convolution({"padding": "VALID"})
    out = size - kernel + 1
    expected = 2 * batch * out**2 * outputs * kernel**2 * inputs
    assert flops_of(f, S(batch, size, size, inputs), S(kernel, kernel, inputs, outputs)) == expected
    grouped = convolution({"padding": "VALID", "feature_group_count": 3})
    assert flops_of(grouped, S(batch, size, size, inputs), S(kernel, kernel, inputs // 3, 9)) == (
        2 * batch * out**2 * 9 * kernel**2 * inputs // 3
    )


def test_gradients_of_a_strided_convolution_cost_as_much_each():
    """Both transposes multiply the very same pairs of elements, whatever padding and dilation JAX writes them with."""
    f = convolution({"padding": "SAME", "window_strides": (2, 2)})
    image, kernel = convolution_arguments({})
    out = jax.eval_shape(f, image, kernel)
    both = flops_of(lambda x, w, ct: jax.vjp(f, x, w)[1](ct), image, kernel, out)
    assert both == 3 * flops_of(f, image, kernel)


# ------------------------------------------------------------------------------------------------- XLA's own accounting


def xla_flops(f, *args):
    analysis = jax.jit(f).lower(*args).compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def attention(x, wqkv, wo):
    q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, wqkv)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k), -1e9))
    return jnp.einsum("bnts,bsnh,nhd->btd", weights, v, wo)


def block(x, params):
    x = x + attention(x, params["qkv"], params["o"])
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


BLOCK = {"qkv": S(3, 64, 4, 16), "o": S(4, 16, 64), "up": S(64, 256), "down": S(256, 64)}


def transformer(layers, x):
    for params in layers:
        x = block(x, params)
    return jnp.mean(x**2)


def convnet(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(convolution({"padding": "SAME", "window_strides": (2, 2)})(x, kernel))
    return jnp.sum(x**2)


MODELS = {
    "matmul": (jnp.matmul, S(64, 96), S(96, 32)),
    "mlp": (mlp, [S(128, 256), S(256, 64)], S(32, 128)),
    "mlp gradient": (jax.grad(mlp), [S(128, 256), S(256, 64)], S(32, 128)),
    "transformer": (transformer, [BLOCK] * 2, S(2, 32, 64)),
    "transformer gradient": (jax.grad(transformer), [BLOCK] * 2, S(2, 32, 64)),
    "convnet gradient": (jax.grad(convnet, (0, 1)), [S(3, 3, 16, 32), S(3, 3, 32, 64)], S(4, 32, 32, 16)),
    **{name: (convolution(options), *convolution_arguments(options)) for name, options in CONVOLUTIONS.items()},
}


@pytest.mark.parametrize(("f", "args"), [(f, args) for f, *args in MODELS.values()], ids=MODELS)
def test_agrees_with_xla_where_matmuls_dominate(f, args):
    assert flops_of(f, *args) == pytest.approx(xla_flops(f, *args), rel=0.02)


def test_a_checkpointed_gradient_costs_one_forward_pass_more():
    params, x = [BLOCK] * 2, S(2, 32, 64)
    plain = flops_of(jax.grad(transformer), params, x)
    f = lambda p, x: transformer(p, x)  # noqa: E731
    checkpointed = flops_of(jax.grad(jax.checkpoint(f)), params, x)
    assert checkpointed - plain == pytest.approx(flops_of(transformer, params, x), rel=0.05)


@pytest.mark.parametrize(
    "f", [lambda x: x.sum(0), lambda x: jnp.max(x), lambda x: x * x + x], ids=["sum", "max", "fma"]
)
def test_agrees_with_xla_exactly_on_simple_arithmetic(f):
    assert flops_of(f, S(64, 128)) == xla_flops(f, S(64, 128))
