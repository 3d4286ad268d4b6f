"""Functions to inspect, one for each way in which JAX nests, saves or names values; used by several tests.

Each entry gives a function and its arguments as shapes. All are small: the tests compare counts and types, and some
evaluate them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

F32 = jnp.float32


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def program(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fun.__name__] = (fun, args)
        return fun

    return register


@program(f32(5, 4), f32(6, 5), f32(7, 6), f32(4))
def three_layers(w1, w2, w3, x):
    for w in (w1, w2, w3):
        x = jnp.sin(w @ x)
    return x.sum()


@program(f32(5, 4), f32(6, 5), f32(4))
def named_layers(w1, w2, x):
    x = checkpoint_name(jnp.sin(w1 @ x), "a")
    return checkpoint_name(jnp.sin(w2 @ x), "b").sum()


@program(f32(4, 4), f32(4))
def named_tanh(w, x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h") @ w))


@program({"w": f32(4, 4), "b": f32(4)}, f32(3, 4))
def dictionary(params, x):
    return jnp.mean(jax.nn.gelu(x @ params["w"] + params["b"]) ** 2)


@program(f32(8, 4, 4), f32(4))
def scanned_relu(ws, x):
    return jax.lax.scan(lambda c, w: (jax.nn.relu(w @ c), None), x, ws)[0].sum()


@program(f32(3, 2, 4, 4), f32(4))
def nested_scan(ws, x):
    def outer(c, inner_ws):
        c, ys = jax.lax.scan(lambda d, w: (jnp.tanh(w @ d), jnp.cos(d)), c, inner_ws)
        return jnp.sin(c), ys.sum()

    c, ys = jax.lax.scan(outer, x, ws)
    return c.sum() + ys.sum()


@program(f32(6, 4, 4), f32(4))
def scanned_checkpoint(ws, x):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(c, w):
        return jnp.sin(w @ c), None

    return jax.lax.scan(layer, x, ws)[0].sum()


@program(f32(4, 4), f32(4))
def jitted_helper(w, x):
    @jax.jit
    def helper(w, x):
        return jnp.sin(w @ x) * x

    return helper(w, helper(w, x)).sum()


@program(f32(4))
def conditional(x):
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x) * 2, lambda x: jnp.exp(x) + jnp.tanh(x), x).sum()


@program(f32(4, 4), f32(4))
def fori(w, x):
    return jax.lax.fori_loop(0, 5, lambda i, c: jnp.tanh(w @ c) + i, x).sum()


@jax.custom_jvp
def _log1pexp(x):
    return jnp.log(1.0 + jnp.exp(x))


@_log1pexp.defjvp
def _log1pexp_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _log1pexp(x), t * (1 - 1 / (1 + jnp.exp(x)))


@program(f32(4, 4), f32(4))
def custom_jvp(w, x):
    return _log1pexp(w @ _log1pexp(x)).sum()


@jax.custom_vjp
def _clipped(x):
    return jnp.sin(x)


def _clipped_fwd(x):
    return jnp.sin(x), (checkpoint_name(jnp.cos(x), "rule"),)


def _clipped_bwd(residuals, g):
    return (jnp.clip(g * residuals[0], -1, 1),)


_clipped.defvjp(_clipped_fwd, _clipped_bwd)


@program(f32(4, 4), f32(4))
def custom_vjp(w, x):
    return _clipped(w @ _clipped(x)).sum()


@program(f32(4, 4), f32(3, 4))
def vmapped(w, xs):
    return jax.vmap(lambda x: jnp.sin(w @ x) @ x)(xs).sum()


@program(f32(4, 4), f32(4))
def nested_checkpoint(w, x):
    inner = jax.checkpoint(lambda x: jnp.sin(w @ x))
    outer = jax.checkpoint(lambda x: jnp.cos(inner(jnp.exp(x))))
    return outer(outer(x)).sum()


@program(f32(2, 8, 16), f32(16, 48), f32(16, 16))
def attention(x, wqkv, wo):
    q, k, v = jnp.split(x @ wqkv, 3, axis=-1)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 4.0)
    return jnp.sum(checkpoint_name(jnp.einsum("bts,bsd->btd", weights, v), "context") @ wo)


@program(f32(1, 8, 8, 3), f32(3, 3, 3, 4))
def convolution(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.max(jax.nn.relu(y), axis=(1, 2)).sum()


@program(f32(10, 4), jax.ShapeDtypeStruct((3,), jnp.int32))
def embedding(table, tokens):
    return jnp.sum(jnp.sin(table[tokens]) ** 2)


@program(f32(4), jax.ShapeDtypeStruct((), jnp.float32))
def power(x, exponent):
    return jnp.sum(x**exponent + x**3)


@program(f32(4, 4), f32(4))
def repeated_value(w, x):
    y = jnp.sin(w @ x)
    return (y @ y + jnp.exp(y) @ x) * 3.0


@program(jax.ShapeDtypeStruct((4,), jnp.complex64))
def complex_numbers(x):
    return jnp.abs(jnp.fft.fft(x) * x).sum()


@program(jax.ShapeDtypeStruct((4, 4), jnp.bfloat16), f32(4))
def mixed_precision(w, x):
    return jnp.sum(jnp.sin((w @ x.astype(jnp.bfloat16)).astype(F32)))


@program(f32(4, 4), f32(4))
def several_outputs(w, x):
    y = jnp.tanh(w @ x)
    return {"loss": y.sum(), "count": jnp.arange(3), "y": y}


@program(f32(4, 4), f32(4))
def constant_captured(w, x):
    mask = jnp.arange(4) % 2 == 0
    return jnp.where(mask, jnp.sin(w @ x), 0.0).sum()


@program(f32(0, 4), f32(4))
def empty(w, x):
    return jnp.sin(w @ x).sum() + jnp.sin(x).sum()


def binary_chain(n: int) -> Callable[[Any], Any]:
    """A chain of n sines under recursive (binary) checkpointing."""

    def chain(n: int) -> Callable[[Any], Any]:
        if n == 1:
            return jnp.sin
        first, second = chain(n // 2), chain(n - n // 2)
        if n == 2:  # two in a row are not worth a checkpoint
            return lambda x: second(first(x))
        return lambda x: second(jax.checkpoint(first)(x))

    return chain(n)


@program(f32(4))
def binary8(x):
    return binary_chain(8)(x).sum()


# One of a kind, for the usual run: plain, a loop, checkpoints in it and in each other, branches, rules, calls, types.
KINDS = ("three_layers", "scanned_checkpoint", "nested_checkpoint", "conditional", "custom_vjp", "jitted_helper")
KINDS += ("mixed_precision", "complex_numbers", "embedding", "dictionary")


def some_of(values: Iterable[Any], *usual: Any) -> list[Any]:
    """All values for a parameter of a test, of which the usual run tries some."""
    return [pytest.param(value, marks=() if value in usual else pytest.mark.slow) for value in values]


EACH_PROGRAM = some_of(PROGRAMS, *KINDS)


def in_turn(values: Iterable[Any]) -> list[Any]:
    """For each program one of some values, for two parameters of a test."""
    kinds_first = sorted(PROGRAMS, key=lambda name: name not in KINDS)
    pairs = zip(kinds_first, itertools.cycle(values), strict=False)
    return [pytest.param(*pair, marks=() if pair[0] in KINDS else pytest.mark.slow) for pair in pairs]


CHECKPOINTED = ("scanned_checkpoint", "nested_checkpoint", "binary8")  # those of the above that have sites
