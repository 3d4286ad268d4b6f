"""The single operations that programs by chance are made of (tests/generated.py).

Each takes any values: operands are brought to the shape and type that it needs. They stand one to a line or function,
since this file is the user's source of what is inspected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# ----------------------------------------------------------------------------------------- bringing operands into shape


def floating(x: Any) -> Any:
    """The value as real floating point of its own width."""
    if jnp.iscomplexobj(x):
        return jnp.real(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def fit(x: Any, shape: tuple[int, ...]) -> Any:
    """The value in another shape: repeated, cut or padded."""
    if x.shape == shape:
        return x
    size = int(np.prod(shape))
    if x.size == size:
        return jnp.reshape(x, shape)
    if x.ndim == 0:
        return jnp.broadcast_to(x, shape)
    flat = jnp.ravel(x)[:size]
    return jnp.reshape(jnp.pad(flat, (0, size - flat.size), constant_values=0.5), shape)


def like(x: Any, other: Any) -> Any:
    """The value in the shape and type of another."""
    x = fit(x, other.shape)
    if x.dtype == other.dtype:
        return x
    if jnp.issubdtype(other.dtype, jnp.floating):
        x = floating(x)
    elif not jnp.issubdtype(other.dtype, jnp.complexfloating):
        x = jnp.real(x)
    return x.astype(other.dtype)


def rows(x: Any) -> Any:
    """The value as a matrix."""
    if x.ndim == 2:
        return x
    return jnp.reshape(x, (-1, x.shape[-1])) if x.ndim and x.size else fit(x, (2, 2))


def filled(x: Any) -> Any:
    """The value, or where it has no elements a vector."""
    return x if x.size and x.ndim else fit(x, (3,))


def indices(x: Any, size: int) -> Any:
    """Integers below ``size`` that come from a value."""
    return jax.lax.stop_gradient(jnp.abs(jnp.real(jnp.ravel(filled(x))[:3]) * 2).astype(jnp.int32) % max(size, 1))


def predicate(x: Any) -> Any:
    return jnp.real(jnp.sum(x)) > 0.7


# ----------------------------------------------------------------------------------------------------------- operations

UNARY: tuple[Callable[[Any], Any], ...] = (
    lambda x: jnp.sin(x),
    lambda x: jnp.cos(x) * 2,
    lambda x: jnp.tanh(x),
    lambda x: jnp.exp(-jnp.abs(x)),
    lambda x: jnp.log(1.5 + x * x),
    lambda x: jax.nn.sigmoid(x),
    lambda x: jax.lax.rsqrt(1 + x * x),
    lambda x: jnp.sqrt(x * x + 1),
    lambda x: jax.lax.integer_pow(x, 3),
    lambda x: jnp.clip(x, -0.5, 0.75),
    lambda x: jax.nn.relu(x),
    lambda x: jax.nn.gelu(x),
    lambda x: jax.nn.softmax(filled(x)),
    lambda x: jax.nn.logsumexp(filled(x), axis=-1),
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: -x,
    lambda x: jnp.abs(x),
    lambda x: x,
    lambda x: jax.lax.stop_gradient(x),
    lambda x: jax.lax.erf(x),
    lambda x: jnp.maximum(x, 0.2),
    lambda x: x**2.5 if x.dtype != jnp.float16 else x,
    lambda x: jnp.arctan2(x, 1 + x),
    lambda x: jnp.expm1(-jnp.abs(x)) + jnp.log1p(jnp.abs(x)),
    lambda x: jax.nn.silu(x),
    lambda x: jax.lax.reduce_precision(x, 5, 4),
    lambda x: jax.lax.optimization_barrier(x),
    lambda x: jnp.round(x) + jnp.sign(x),
    lambda x: jax.lax.cbrt(1 + jnp.abs(x)),
    lambda x: jnp.square(x) * jnp.floor(x + 0.5),
    lambda x: jnp.nan_to_num(x),
    lambda x: jax.lax.lgamma(1.5 + jnp.abs(x)),
    lambda x: jax.nn.glu(jnp.concatenate([jnp.ravel(x), jnp.ravel(x)])) if x.size else x,
    lambda x: jax.device_put(x),
    lambda x: jax.nn.standardize(filled(x), axis=-1),
    lambda x: jax.lax.log1p(jnp.abs(x)) * jax.lax.erf_inv(0.3 * jnp.tanh(x)) if x.dtype != jnp.float16 else x,
)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y,
    lambda x, y: x / (1.5 + y * y),
    lambda x, y: jnp.maximum(x, y),
    lambda x, y: jnp.where(x > y, jnp.sin(x), y),
    lambda x, y: (1 + jnp.abs(x)) ** jnp.tanh(y),
    lambda x, y: jnp.logaddexp(x, y),
    lambda x, y: jnp.hypot(x + 2, y),
)
SHAPED: tuple[Callable[[Any], Any], ...] = (
    lambda x: jnp.sum(x),
    lambda x: jnp.mean(filled(x), axis=0),
    lambda x: jnp.max(filled(x), axis=-1),
    lambda x: jnp.prod(filled(x)[:2] * 0.5, axis=0),
    lambda x: jnp.var(filled(x)),
    lambda x: jnp.ravel(x),
    lambda x: rows(x).T,
    lambda x: jnp.broadcast_to(x, (2, *x.shape)) if x.ndim < 3 else x[0],
    lambda x: jnp.concatenate([filled(x), filled(x)], axis=0) if x.size < 40 else jnp.ravel(x)[:5],
    lambda x: filled(x)[::2],
    lambda x: jnp.flip(x),
    lambda x: jnp.pad(x, 1) if x.size < 30 else jnp.ravel(x)[1:6],
    lambda x: jnp.sort(filled(x), axis=-1),
    lambda x: jnp.cumsum(filled(x), axis=0),
    lambda x: jnp.cumprod(filled(x) * 0.9, axis=-1),
    lambda x: jnp.tril(rows(x)),
    lambda x: jnp.linalg.norm(filled(x) + 0.1),
    lambda x: jnp.squeeze(x[None], 0),
    lambda x: x[:0] if x.ndim else x,
    lambda x: jax.lax.top_k(jnp.ravel(filled(x)), 1)[0],
    lambda x: jnp.median(filled(x)),
    lambda x: jnp.split(rows(x), [1], axis=0)[0],
    lambda x: jax.lax.associative_scan(jnp.multiply, jnp.ravel(filled(x))[:6]),
    lambda x: jnp.roll(filled(x), 1),
    lambda x: jax.lax.cumlogsumexp(filled(x), axis=0),
    lambda x: jax.lax.cummax(filled(x), axis=0, reverse=True),
    lambda x: jax.lax.reduce_window(
        fit(x, (1, 4, 4, 1)), np.asarray(-np.inf, x.dtype), jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    lambda x: jax.lax.reduce_window(
        fit(x, (1, 4, 4, 1)), np.asarray(0, x.dtype), jax.lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"
    ),
    lambda x: jnp.take_along_axis(filled(x), jnp.argsort(filled(x), axis=-1), axis=-1),
    lambda x: jnp.argmax(filled(x), axis=-1),
    lambda x: jnp.zeros((0,), x.dtype) * x[:0] if x.ndim == 1 else x[..., None],
    lambda x: jnp.repeat(jnp.ravel(filled(x))[:4], 2),
    lambda x: jnp.swapaxes(rows(x), 0, 1)[None],
    lambda x: jnp.diag(jnp.ravel(filled(x))[:3]),
    lambda x: jnp.tile(jnp.ravel(filled(x))[:3], (2, 1)),
    lambda x: jax.ops.segment_sum(jnp.ravel(filled(x))[:4], jnp.asarray([0, 1, 0, 1])[: filled(x).size], 2),
    lambda x: jnp.min(filled(x)) + jnp.ptp(filled(x)),
    lambda x: jnp.interp(jnp.ravel(filled(x))[:3], jnp.arange(3.0), jnp.ravel(fit(x, (3,)))),
)
TYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int32", "complex128", "int8", "uint32")


def dot(x: Any, y: Any, n: int) -> Any:
    x, y = floating(x), floating(y)
    match n % 10:
        case 0:
            return jnp.einsum("bij,bjk->bik", fit(x, (2, 3, 2)), fit(y, (2, 2, 3)))
        case 1:
            return jnp.vdot(jnp.ravel(x), fit(y, (x.size,)))
        case 2:
            return jnp.einsum("ij,jk,kl->il", fit(x, (2, 3)), fit(y, (3, 2)), fit(x, (2, 2)))
        case 3:
            return jax.lax.dot_general(
                fit(x, (2, 3)), fit(y, (2, 3)), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        case 4:
            return jnp.matmul(fit(x, (2, 3)), fit(y, (3, 2)), precision=jax.lax.Precision.HIGHEST)
        case 5:
            return jax.nn.dot_product_attention(fit(x, (1, 3, 2, 2)), fit(y, (1, 3, 2, 2)), fit(x, (1, 3, 2, 2)))
        case 6:
            return jax.lax.ragged_dot(fit(x, (4, 2)), fit(y, (2, 2, 3)), jnp.asarray([1, 3], jnp.int32))
        case 7:
            return jnp.outer(jnp.ravel(filled(x))[:4], jnp.ravel(filled(y))[:3])
        case _:
            x = rows(x)
            return x @ fit(y, (x.shape[1], 3)).astype(x.dtype)


def convolution(x: Any, y: Any, n: int) -> Any:
    x, y = fit(floating(x), (1, 5, 5, 2)), fit(floating(y), (2, 2, 2, 1 + n % 2))
    return jax.lax.conv_general_dilated(
        x, y.astype(x.dtype), (1 + n % 2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def indexed(x: Any, y: Any, n: int) -> Any:
    x = filled(x)
    at = indices(y, x.shape[0])
    match n % 9:
        case 0:
            return jnp.take(x, at, axis=0)
        case 1:
            return x.at[at].add(like(y, x[: at.shape[0]])[0] if x.shape[0] >= at.shape[0] else x[at])
        case 2:
            return jax.lax.dynamic_slice_in_dim(x, at[0], 1, axis=0)
        case 3:
            return jax.lax.dynamic_update_slice_in_dim(x, like(y, x[:1]), at[0], axis=0)
        case 4:
            return x.at[at].set(0)
        case 5:
            return x.at[at].multiply(2, mode="drop") if jnp.issubdtype(x.dtype, jnp.floating) else x
        case 6:
            return x.at[at[0]].max(jnp.zeros((), x.dtype)) if not jnp.iscomplexobj(x) else x
        case 7:
            return jnp.take(x, at, axis=0, mode="wrap")
        case _:
            return x[at[0]]


def random(x: Any, key: Any, n: int) -> Any:
    key = jax.random.fold_in(key, n)
    match n % 6:
        case 0:
            return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
        case 1:
            return x + jax.random.normal(key, x.shape, x.dtype)
        case 2:
            return x * (jax.random.bits(key, x.shape, "uint32") % 3).astype(x.dtype)
        case 3:
            one, two = jax.random.split(key)
            return x * jax.random.uniform(one, x.shape, x.dtype) + jax.random.uniform(two, (), x.dtype)
        case 4:
            return jax.random.permutation(key, filled(x))
        case _:
            return jax.random.categorical(key, filled(x).astype(jnp.float32))


def linear_algebra(x: Any, n: int) -> Any:
    a = fit(floating(x), (2, 2)).astype(jnp.float32)
    a = a @ a.T + jnp.diag(jnp.asarray([2, 3], a.dtype))
    match n % 10:
        case 0:
            return jnp.linalg.cholesky(a)
        case 1:
            return jnp.linalg.solve(a, jnp.ones(2, a.dtype))
        case 2:
            return jnp.linalg.inv(a)
        case 3:
            return jnp.abs(jnp.fft.fft(a))
        case 4:
            return jnp.linalg.qr(a)[1]
        case 5:
            return jnp.linalg.eigh(a)[0]
        case 6:
            return jnp.linalg.svd(a, compute_uv=False)
        case 7:
            return jax.scipy.linalg.solve_triangular(a, jnp.ones(2, a.dtype), lower=True)
        case 8:
            return jnp.linalg.slogdet(a)[1]
        case _:
            return jnp.fft.irfft(jnp.fft.rfft(a))


def complex_numbers(x: Any, y: Any, n: int) -> Any:
    """Of complex operands, or made complex here."""
    x = x if jnp.iscomplexobj(x) else jax.lax.complex(*(2 * [floating(x).astype(jnp.float32)]))
    match n % 6:
        case 0:
            return jnp.exp(1j * x)
        case 1:
            return jnp.real(x) + jnp.imag(x)
        case 2:
            return jnp.conj(x) * like(y, x)
        case 3:
            return jnp.abs(x + 1)
        case 4:
            return jax.lax.complex(jnp.real(x), jnp.sin(jnp.imag(x)))
        case _:
            return x / (1 + jnp.abs(x))


def callback(x: Any, n: int) -> Any:
    """Python that runs on the values: pure, for debugging, or one that says nothing of its derivative."""
    if n % 2:
        jax.debug.callback(lambda *_: None, x)
        return x
    fixed = jax.lax.stop_gradient(x)
    kind = jax.ShapeDtypeStruct(fixed.shape, fixed.dtype)
    return x + jax.pure_callback(lambda x: np.asarray(x) * 0, kind, fixed, vmap_method="sequential")
