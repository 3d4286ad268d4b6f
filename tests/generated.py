"""Programs by chance: a Hypothesis strategy for JAX functions of every shape that autodiff has to deal with.

A program is data: steps on a growing list of values, some of which hold a program of their own (a loop's body, a
branch, what a checkpoint is put around). Every step takes any values, since operands are brought to the shape and type
that it needs, so that any list of steps is a program, shrinks well, and runs on other shapes too. ``repr`` of a program
can be pasted into a regression test. Operations stand one to a line or function: this file is the source that is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax._src import config
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

NAMES = ("a", "b", "c")
P = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "nothing_saveable": None,
    "everything_saveable": P.everything_saveable,
    "dots_saveable": P.dots_saveable,
    "dots_with_no_batch_dims_saveable": P.dots_with_no_batch_dims_saveable,
    "save_only_these_names('a')": P.save_only_these_names("a"),
    "save_only_these_names('b', 'c')": P.save_only_these_names("b", "c"),
    "save_any_names_but_these('a')": P.save_any_names_but_these("a"),
    "save_anything_except_these_names('a')": P.save_anything_except_these_names("a"),
    "offload_dot_with_no_batch_dims": P.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_and_offload_only_these_names": P.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots_saveable | save_only_these_names('c')": P.save_from_both_policies(
        P.dots_saveable, P.save_only_these_names("c")
    ),
}
NO_CHECKPOINT = "none"  # instead of a step's policy: nothing is put around its function
ON_DEVICE = tuple(key for key in POLICIES if "offload" not in key)  # what can run on the CPU's one memory


class _Printed:
    """Hypothesis' own text of a value that it drew doubles its work at each level of nesting: minutes, here."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True)
class Step(_Printed):
    """One operation: ``operands`` count back over the values so far, ``n`` is whatever the operation makes of it."""

    op: str
    operands: tuple[int, ...] = (0, 1)
    n: int = 0
    body: Body | None = None
    other: Body | None = None
    policy: str = ""

    @property
    def site(self) -> str:
        """The function that a checkpoint is put around here, by which its site goes; empty for other steps."""
        if self.op == "checkpoint":
            return ("first", "second", "<lambda>")[self.n % 3]
        return "shared" if self.op == "shared" and self.n % 3 else ""


@dataclasses.dataclass(frozen=True)
class Body(_Printed):
    """Steps and the values that they give back, which may be inputs, or the same value twice."""

    steps: tuple[Step, ...]
    results: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Program(_Printed):
    """A function: the types of its arguments, how they and its results are packed, and what it does.

    ``x64`` tells whether it is for 64-bit types, ``static`` whether it also takes arguments that are no arrays.
    """

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    body: Body
    packing: str = "flat"
    results: str = "scalar"
    decorator: str = ""
    has_aux: bool = False
    x64: bool = False
    static: bool = False

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        return _decorated(functools.partial(_call, self), self.decorator)

    def statics(self) -> dict[str, Any]:
        """Keyword arguments that are no arrays, which the function takes or leaves."""
        # jax.checkpoint knows static arguments by position only.
        return STATICS if self.static and self.decorator not in POLICIES else {}

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        """What it is to be traced under."""
        return config.enable_x64(self.x64)

    def under(self, policy: str, function: str | None = None) -> Program:
        """The program as if this policy (or ``NO_CHECKPOINT``) had been written at its sites, or at a function's."""

        def changed(body: Body | None) -> Any:
            return body and dataclasses.replace(body, steps=tuple(map(of_step, body.steps)))

        def of_step(step: Step) -> Step:
            here = step.site and function in (None, step.site)
            inner = {"body": changed(step.body), "other": changed(step.other)}
            return dataclasses.replace(step, **inner, policy=policy if here else step.policy)

        own = self.decorator in POLICIES and function in (None, _call.__name__)
        decorator = policy.replace(NO_CHECKPOINT, "") if own else self.decorator
        return dataclasses.replace(self, body=changed(self.body), decorator=decorator)

    def pack(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        values = list(values)
        if self.packing == "dictionary":
            return ({"p": {str(i): value for i, value in enumerate(values[:-1])}}, values[-1]), {}
        if self.packing == "keyword":
            return tuple(values[:-1]), {"last": values[-1]}
        if self.packing == "nested":
            return ((values[0], None, [values[1:], ()]),), {}
        return tuple(values), {}

    def shapes(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as types."""
        return self.pack([_type(shape, dtype) for shape, dtype in self.inputs])

    def values(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as arrays."""
        return self.pack([_value(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(self.inputs)])


STATICS: dict[str, Any] = {"mode": "text", "train": True, "how": jnp.sin, "nothing": None}


def _type(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, jax.random.key(0).dtype if dtype == "key" else jnp.dtype(dtype))


def _value(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(rng.uniform(0.3, 0.9, shape)).astype(dtype)
    return jnp.asarray(rng.integers(0, 2, shape)).astype(dtype)


# ------------------------------------------------------------------------- operations, of whatever they are given


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


def _solvable(x: Any) -> Any:
    a = fit(floating(x), (2, 2)).astype(jnp.float32)
    return a @ a.T + jnp.diag(jnp.asarray([2, 3], a.dtype))


def _complex(x: Any) -> Any:
    return x if jnp.iscomplexobj(x) else jax.lax.complex(*(2 * [floating(x).astype(jnp.float32)]))


def _matmul(x: Any, y: Any) -> Any:
    x = rows(x)
    return x @ fit(y, (x.shape[1], 3)).astype(x.dtype)


DOTS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: jnp.einsum("bij,bjk->bik", fit(x, (2, 3, 2)), fit(y, (2, 2, 3))),
    lambda x, y: jnp.vdot(jnp.ravel(x), fit(y, (x.size,))),
    lambda x, y: jnp.einsum("ij,jk,kl->il", fit(x, (2, 3)), fit(y, (3, 2)), fit(x, (2, 2))),
    lambda x, y: jax.lax.dot_general(
        fit(x, (2, 3)), fit(y, (2, 3)), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ),
    lambda x, y: jnp.matmul(fit(x, (2, 3)), fit(y, (3, 2)), precision=jax.lax.Precision.HIGHEST),
    lambda x, y: jax.nn.dot_product_attention(fit(x, (1, 3, 2, 2)), fit(y, (1, 3, 2, 2)), fit(x, (1, 3, 2, 2))),
    lambda x, y: jax.lax.ragged_dot(fit(x, (4, 2)), fit(y, (2, 2, 3)), jnp.asarray([1, 3], jnp.int32)),
    lambda x, y: jnp.outer(jnp.ravel(filled(x))[:4], jnp.ravel(filled(y))[:3]),
    _matmul,
    _matmul,
)
INDEXED: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda x, at, y: jnp.take(x, at, axis=0),
    lambda x, at, y: x.at[at].add(like(y, x[: at.shape[0]])[0] if x.shape[0] >= at.shape[0] else x[at]),
    lambda x, at, y: jax.lax.dynamic_slice_in_dim(x, at[0], 1, axis=0),
    lambda x, at, y: jax.lax.dynamic_update_slice_in_dim(x, like(y, x[:1]), at[0], axis=0),
    lambda x, at, y: x.at[at].set(0),
    lambda x, at, y: x.at[at].multiply(2, mode="drop") if jnp.issubdtype(x.dtype, jnp.floating) else x,
    lambda x, at, y: x.at[at[0]].max(jnp.zeros((), x.dtype)) if not jnp.iscomplexobj(x) else x,
    lambda x, at, y: jnp.take(x, at, axis=0, mode="wrap"),
    lambda x, at, y: x[at[0]],
)
RANDOM: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, key: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0),
    lambda x, key: x + jax.random.normal(key, x.shape, x.dtype),
    lambda x, key: x * (jax.random.bits(key, x.shape, "uint32") % 3).astype(x.dtype),
    lambda x, key: x * jax.random.uniform(jax.random.split(key)[0], x.shape, x.dtype) + jax.random.uniform(key),
    lambda x, key: jax.random.permutation(key, filled(x)),
    lambda x, key: jax.random.categorical(key, filled(x).astype(jnp.float32)),
)
ALGEBRA: tuple[Callable[[Any], Any], ...] = (
    lambda a: jnp.linalg.cholesky(a),
    lambda a: jnp.linalg.solve(a, jnp.ones(2, a.dtype)),
    lambda a: jnp.linalg.inv(a),
    lambda a: jnp.abs(jnp.fft.fft(a)),
    lambda a: jnp.linalg.qr(a)[1],
    lambda a: jnp.linalg.eigh(a)[0],
    lambda a: jnp.linalg.svd(a, compute_uv=False),
    lambda a: jax.scipy.linalg.solve_triangular(a, jnp.ones(2, a.dtype), lower=True),
    lambda a: jnp.linalg.slogdet(a)[1],
    lambda a: jnp.fft.irfft(jnp.fft.rfft(a)),
)
COMPLEX: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: jnp.exp(1j * x),
    lambda x, y: jnp.real(x) + jnp.imag(x),
    lambda x, y: jnp.conj(x) * like(y, x),
    lambda x, y: jnp.abs(x + 1),
    lambda x, y: jax.lax.complex(jnp.real(x), jnp.sin(jnp.imag(x))),
    lambda x, y: x / (1 + jnp.abs(x)),
)


def _convolution(x: Any, y: Any, n: int) -> Any:
    x, y = fit(floating(x), (1, 5, 5, 2)), fit(floating(y), (2, 2, 2, 1 + n % 2))
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, y.astype(x.dtype), (1 + n % 2, 1), "SAME", dimension_numbers=numbers)


def _callback(x: Any, n: int) -> Any:
    """Python that runs on the values: pure, for debugging, or one that says nothing of its derivative."""
    if n % 2:
        jax.debug.callback(lambda *_: None, x)
        return x
    fixed = jax.lax.stop_gradient(x)
    kind = jax.ShapeDtypeStruct(fixed.shape, fixed.dtype)
    return x + jax.pure_callback(lambda x: np.asarray(x) * 0, kind, fixed, vmap_method="sequential")


def _at(table: Sequence[Any], n: int) -> Any:
    return table[n % len(table)]


# Each of two values and a number.
OPERATIONS: dict[str, Callable[[Any, Any, int], Any]] = {
    "unary": lambda x, y, n: _at(UNARY, n)(floating(x)),
    "binary": lambda x, y, n: _at(BINARY, n)(floating(x), like(floating(y), floating(x))),
    "product": lambda x, y, n: x * like(y, x),  # of whatever type the operands are
    "shaped": lambda x, y, n: _at(SHAPED, n)(floating(x)),
    "dot": lambda x, y, n: _at(DOTS, n)(floating(x), floating(like(y, jnp.zeros(y.shape, floating(x).dtype)))),
    "convolution": _convolution,
    "indexed": lambda x, y, n: _at(INDEXED, n)(filled(x), indices(y, filled(x).shape[0]), y),
    "algebra": lambda x, y, n: _at(ALGEBRA, n)(_solvable(x)),
    "type": lambda x, y, n: like(x, jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(_at(TYPES, n)))),
    "complex": lambda x, y, n: _at(COMPLEX, n)(_complex(x), y),
    "callback": lambda x, y, n: _callback(x, n),
    "constant": lambda x, y, n: x + like(jnp.asarray(np.arange(4.0, dtype=np.float32)), x),
    "name": lambda x, y, n: checkpoint_name(x, _at(NAMES, n)),
}


class Machine:
    """Runs a program's steps."""

    def __init__(self, key: Any = None) -> None:
        self._key = key

    def run(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """The results of a body on these values."""
        values = list(values)
        for step in body.steps:
            operands = [values[-1 - i % len(values)] for i in step.operands]
            if step.op in OPERATIONS:
                values.append(OPERATIONS[step.op](operands[0], operands[-1], step.n))
            else:
                values += getattr(self, f"_{step.op}")(step, operands, values)
        return [values[-1 - i % len(values)] for i in body.results]

    def _random(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        key = jax.random.key(step.n) if self._key is None else self._key
        return [_at(RANDOM, step.n)(floating(operands[0]), jax.random.fold_in(key, step.n))]

    def _names(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        return list(checkpoint_name((operands[0], operands[-1]), _at(NAMES, step.n)))

    def _body(self, body: Body | None, *, captured: Sequence[Any] = ()) -> Callable[..., list[Any]]:
        assert body is not None
        return lambda *operands: self.run(body, [*captured, *operands])

    def _captured(self, step: Step, values: list[Any]) -> list[Any]:
        return values[-2:] if step.n % 2 else []

    def _jit(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))
        return jax.jit(inner, inline=step.n % 5 == 4)(*operands)

    def _shared(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """One function called several times, which JAX traces once."""
        inner = self._body(step.body, captured=self._captured(step, values))

        def shared(*operands):
            return [like(inner(*operands)[0], operands[0])]

        bare = not step.site or step.policy == NO_CHECKPOINT
        function = shared if bare else jax.checkpoint(shared, policy=POLICIES.get(step.policy))
        function = jax.jit(function) if step.n % 3 != 1 else function
        first = function(*operands)
        return [*function(first[0], *operands[1:]), *first]

    def _scope(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        if step.n % 2:
            return jax.named_call(self._body(step.body), name="named")(*operands)
        with jax.named_scope("scope"):
            return self._body(step.body)(*operands)

    def _checkpoint(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))

        def first(*operands):
            return inner(*operands)

        def second(*operands):
            return inner(*operands)

        function = (first, second, inner)[step.n % 3]
        if step.policy == NO_CHECKPOINT:
            return function(*operands)
        return jax.checkpoint(function, policy=POLICIES[step.policy], prevent_cse=bool(step.n % 4))(*operands)

    def _vmap(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        batched, *others = operands
        batched = jnp.stack([batched, batched * 2]) if step.n % 3 else fit(batched, (2, 3))
        inner = self._body(step.body, captured=self._captured(step, values))
        axes = (0, *(None for _ in others))
        if step.n % 5 == 4:

            def with_sum(*operands):
                results = inner(*operands)
                return [*results, jax.lax.psum(results[0], "lanes")]

            return jax.vmap(with_sum, axes, out_axes=0, axis_name="lanes")(batched, *others)
        return jax.vmap(inner, axes, out_axes=0)(batched, *others)

    def _shard_map(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """A function of each device's part, on one device: of everything, or of rows that are its own."""
        inner = self._body(step.body)

        def of_device(*operands):
            results = inner(*operands)
            return [*results, jax.lax.psum(floating(results[0]), "devices")] if step.n % 2 else results

        spec = PartitionSpec("devices") if step.n % 3 == 0 and all(map(jnp.ndim, operands)) else PartitionSpec()
        mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
        mapped = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
        return list(mapped(*operands))

    def _scan(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        carry, *others = operands
        length = trips(step)
        inner = self._body(step.body, captured=self._captured(step, values))
        alone = step.n % 4 == 3  # xs=None

        def layer(carry, x):
            carry, count = carry
            first, *rest = inner(carry, others[-1] if alone else x)
            return (like(first, carry), count + 1), rest or None

        xs = jnp.stack([floating(others[-1])] * length) if length else jnp.zeros((0, 2), jnp.float32)
        unroll: int | bool = 2 if length == 3 and step.n % 2 else step.n % 7 == 6
        (carry, count), ys = jax.lax.scan(
            layer, (carry, 0), None if alone else xs, length, reverse=bool(step.n % 3), unroll=unroll
        )
        return [carry, count, *(ys or ())]

    def _map(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))
        # In batches: one of a loop, and what is left over by itself.
        batch, length = (2, 3) if step.n % 3 == 2 else (None, 2)
        return list(jax.lax.map(lambda x: inner(x), jnp.stack([operands[0]] * length), batch_size=batch))

    def _fori(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))
        return [jax.lax.fori_loop(0, 2 + step.n % 2, lambda i, c: like(inner(c * (i + 1))[0], c), operands[0])]

    def _while(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """A loop that only running ends, or that counts to a number: JAX cannot go backward through it."""
        start = operands[0] if step.n % 8 == 7 else jax.lax.stop_gradient(operands[0])
        inner = self._body(step.body)

        def more(carry):
            return carry[0] < 3 if step.n % 3 == 2 else (carry[0] < 2) | (jnp.real(jnp.sum(carry[1])) < -1e6)

        def layer(carry):
            return carry[0] + 1, like(inner(carry[1])[0], start)

        return [jax.lax.while_loop(more, layer, (0, start))[1]]

    def _layers(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """Layers over weights that are stacked, one for each, or that all share; scanned or written out."""
        x, inner = rows(floating(operands[0])), self._body(step.body)
        weights = fit(floating(operands[-1]), (LAYERS, x.shape[1], x.shape[1])).astype(x.dtype)

        def layer(x, weight):
            return like(inner(x @ weight)[0], x)

        if step.n % 4 == 0:
            return [jax.lax.scan(lambda x, weight: (layer(x, weight), None), x, weights)[0]]
        if step.n % 4 == 1:
            return [jax.lax.scan(lambda x, _: (layer(x, weights[0]), None), x, length=LAYERS)[0]]
        for number in range(LAYERS):
            x = layer(x, weights[number if step.n % 4 == 2 else 0])
        return [x]

    def _cond(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        captured = self._captured(step, values)
        one, two = self._body(step.body, captured=captured), self._body(step.other, captured=captured)
        types = jax.eval_shape(one, *operands)

        def other(*operands):
            results = two(*operands)
            return [like(results[i % len(results)], kind) for i, kind in enumerate(types)]

        if step.n % 6 == 5:  # without operands: all is captured
            return jax.lax.cond(predicate(operands[0]), lambda: one(*operands), lambda: other(*operands))
        if step.n % 2:
            return jax.lax.cond(predicate(operands[0]), one, other, *operands)
        index = indices(operands[0], 3)[0]
        return jax.lax.switch(
            index, [one, other, lambda *operands: [like(x * 1, x) for x in one(*operands)]], *operands
        )

    def _custom_jvp(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = Machine()._body(step.body)

        @jax.custom_jvp
        def custom(*operands):
            return inner(*operands)

        @custom.defjvp
        def rule(primals, tangents):
            results, moved = jax.jvp(lambda *operands: inner(*operands), primals, tangents)
            if step.n % 2:
                results = [checkpoint_name(result, NAMES[step.n % len(NAMES)]) for result in results]
            return results, moved

        return custom(*operands)

    def _custom_vjp(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = Machine()._body(step.body)

        @jax.custom_vjp
        def custom(*operands):
            return inner(*operands)

        def forward(*operands):
            results = inner(*operands)
            return results, (checkpoint_name(operands[0], NAMES[step.n % len(NAMES)]), operands[1:])

        def backward(saved, cotangents):
            first, others = saved
            return jax.vjp(lambda *operands: inner(*operands), first, *others)[1](cotangents)

        custom.defvjp(forward, backward)
        return custom(*operands)

    def _grad(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """A derivative inside, one way or another."""
        inner = self._body(step.body)
        x, others = floating(operands[0]), operands[1:]
        if step.n % 4 == 1:
            return jax.jvp(lambda x: inner(x, *others), (x,), (jnp.ones_like(x),))[1]
        if step.n % 4 == 2:
            results, push = jax.linearize(lambda x: inner(x, *others), x)
            return [*results, *push(jnp.sin(x))]

        def scalar(x):
            return sum(jnp.sum(floating(result).astype(jnp.float32)) for result in inner(x, *others))

        return [jax.grad(scalar)(x)]


LAYERS = 3


def trips(step: Step) -> int:
    """How often a scan's body runs."""
    return (1, 2, 3, 3, 0)[step.n % 5]


def _call(program: Program, *args: Any, **kwargs: Any) -> Any:
    leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "dtype")]
    key = next((leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)), None)
    values = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    results = Machine(None if key is None else jnp.ravel(key)[0]).run(program.body, values)
    loss = sum(jnp.sum(floating(result).astype(jnp.float32)) for result in results)
    out = {
        "scalar": lambda: loss,
        "all": lambda: (loss, results),
        "dictionary": lambda: {"loss": loss, "none": None, "count": jnp.arange(2), "others": tuple(results)},
        "twice": lambda: [results[0], loss, results[0]],
        "input": lambda: (loss, values[0], values[-1]),
        "constant": lambda: (loss, jnp.ones(2), 3),
    }[program.results]()
    if not program.has_aux:
        return out
    return out, {"seen": results[-1], **({} if program.decorator else {"text": "aux"})}  # jit returns arrays only


def _decorated(fun: Callable[..., Any], decorator: str) -> Callable[..., Any]:
    if decorator == "jit":
        return jax.jit(fun, static_argnames=tuple(STATICS))
    if decorator in POLICIES:
        return jax.checkpoint(fun, policy=POLICIES[decorator])
    return fun


# ------------------------------------------------------------------------------------------------------------- strategy

_PLAIN = ("unary", "binary", "shaped", "dot", "name", "product")
_RARE = ("convolution", "indexed", "random", "algebra", "type", "constant", "names", "complex", "callback")
_NESTING = ("jit", "shared", "scope", "vmap", "custom_jvp", "custom_vjp", "grad", "shard_map")
_NESTING += ("scan", "layers", "map", "fori", "while")
_numbers = st.integers(0, 59)
_backwards = st.one_of(st.just(0), st.integers(0, 6))


def bodies(depth: int, without: frozenset[str] = frozenset()) -> st.SearchStrategy[Body]:
    """Bodies that nest ``depth`` deep at most, without some operations."""
    return st.builds(
        Body,
        st.lists(steps(depth, without), min_size=1, max_size=4 if depth else 3).map(tuple),
        st.lists(_backwards, min_size=1, max_size=2).map(tuple),
    )


@functools.cache
def steps(depth: int, without: frozenset[str] = frozenset()) -> st.SearchStrategy[Step]:
    """Single steps."""

    def among(ops: Sequence[str]) -> Any:
        return st.sampled_from([op for op in ops if op not in without])

    two = st.tuples(_backwards, _backwards)
    plain, rare = st.builds(Step, among(_PLAIN), two, _numbers), st.builds(Step, among(_RARE), two, _numbers)
    if depth == 0:
        return st.one_of(plain, plain, rare)
    inner = st.deferred(lambda: bodies(depth - 1, without))
    operands = st.lists(_backwards, min_size=2, max_size=3).map(tuple)
    nested = st.builds(Step, among(_NESTING), operands, _numbers, inner)
    branching = st.builds(Step, st.just("cond"), operands, _numbers, inner, inner)
    policies = st.sampled_from(sorted(POLICIES))
    checkpoint = st.builds(Step, st.just("checkpoint"), operands, _numbers, inner, policy=policies)
    return st.one_of(plain, plain, rare, nested, branching, checkpoint)


_LARGEST = 60  # One in ten is larger, and would take half of the time.
_shapes = st.sampled_from([(), (3,), (2, 3), (4, 4), (0, 3), (1,), (2, 2, 3), (0,), (1, 1)])
_dtypes = ("float32", "float32", "float32", "bfloat16", "float16", "complex64", "int32", "bool", "key")
_dtypes += ("float64", "int8", "uint32")


def programs(
    depth: int = 4, dtypes: Sequence[str] = _dtypes, without: Sequence[str] = ()
) -> st.SearchStrategy[Program]:
    """Whole functions; the first argument can always be differentiated.

    Args:
        depth: how deep loops, branches, calls and checkpoints nest at most.
        dtypes: of the arguments.
        without: operations that must not occur.
    """
    first = st.tuples(_shapes, st.sampled_from([d for d in dtypes if d.startswith(("float", "bf", "complex"))]))
    others = st.lists(st.tuples(_shapes, st.sampled_from(dtypes)), min_size=1, max_size=3)
    # Few go all the way down: the deepest take many seconds to trace.
    deep = st.sampled_from([each for each in (2, 2, 3, 3, 3, 4) if each <= depth])
    body = deep.flatmap(lambda depth: bodies(depth, frozenset(without)))
    return st.builds(
        Program,
        st.tuples(first, others).map(lambda pair: (pair[0], *pair[1])),
        body.filter(lambda body: len(steps_in(body)) <= _LARGEST),
        st.sampled_from(["flat", "flat", "dictionary", "keyword", "nested"]),
        st.sampled_from(["scalar", "scalar", "all", "dictionary", "twice", "input", "constant"]),
        st.sampled_from(["", "", "", "jit", *ON_DEVICE[:3]]),
        st.booleans(),
        st.sampled_from([False, False, False, "float64" in dtypes]),
        st.sampled_from([False, False, True]),
    )


def steps_in(body: Body | None, runs: int = 1) -> list[tuple[Step, int]]:
    """Every step at any depth with how often its equations run, as the program says."""
    found: list[tuple[Step, int]] = []
    for step in body.steps if body else ():
        found.append((step, runs))
        times = {"scan": trips(step), "map": 2, "fori": 2 + step.n % 2, "shared": 2, "layers": LAYERS}.get(step.op, 1)
        found += steps_in(step.body, runs * times)
        found += steps_in(step.other, runs)
        if step.op == "cond" and not step.n % 2:  # a switch whose third branch is the first again
            found += steps_in(step.body, runs)
    return found
