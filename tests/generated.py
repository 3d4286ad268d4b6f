"""Programs by chance: a Hypothesis strategy for JAX functions of every shape that autodiff has to deal with.

A program is data: steps on a growing list of values, some of which hold a program of their own (a loop's body, a
branch, what a checkpoint is put around). Every step takes any values, since operands are brought to the shape and type
that it needs, so that any list of steps is a program, shrinks well, and runs on other shapes too. ``repr`` of a program
can be pasted into a regression test.

The operations stand one to a line or function in this file: it is the user's source of what is inspected.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

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
ON_DEVICE = tuple(key for key in POLICIES if "offload" not in key)  # what can run on the CPU's one memory


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: ``operands`` count back over the values so far, ``n`` is whatever the operation makes of it."""

    op: str
    operands: tuple[int, ...] = (0, 1)
    n: int = 0
    body: Body | None = None
    other: Body | None = None
    policy: str = ""


@dataclasses.dataclass(frozen=True)
class Body:
    """Steps and the values that they give back, which may be inputs, or the same value twice."""

    steps: tuple[Step, ...]
    results: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function: the types of its arguments, how they and its results are packed, and what it does."""

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    body: Body
    packing: str = "flat"
    results: str = "scalar"
    decorator: str = ""
    has_aux: bool = False

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        return _decorated(functools.partial(_call, self), self.decorator)

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


def _type(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, jax.random.key(0).dtype if dtype == "key" else jnp.dtype(dtype))


def _value(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(rng.uniform(0.3, 0.9, shape)).astype(dtype)
    return jnp.asarray(rng.integers(0, 2, shape)).astype(dtype)


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

_UNARY: tuple[Callable[[Any], Any], ...] = (
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
)
_BINARY: tuple[Callable[[Any, Any], Any], ...] = (
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
_SHAPED: tuple[Callable[[Any], Any], ...] = (
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
)
_TYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int32")


def _dot(x: Any, y: Any, n: int) -> Any:
    x, y = floating(x), floating(y)
    if n % 5 == 0:
        return jnp.einsum("bij,bjk->bik", fit(x, (2, 3, 2)), fit(y, (2, 2, 3)))
    if n % 5 == 1:
        return jnp.vdot(jnp.ravel(x), fit(y, (x.size,)))
    if n % 5 == 2:
        return jnp.einsum("ij,jk,kl->il", fit(x, (2, 3)), fit(y, (3, 2)), fit(x, (2, 2)))
    if n % 5 == 3:
        return jax.lax.dot_general(
            fit(x, (2, 3)), fit(y, (2, 3)), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    x = rows(x)
    return x @ fit(y, (x.shape[1], 3)).astype(x.dtype)


def _convolution(x: Any, y: Any, n: int) -> Any:
    x, y = fit(floating(x), (1, 5, 5, 2)), fit(floating(y), (2, 2, 2, 1 + n % 2))
    return jax.lax.conv_general_dilated(
        x, y.astype(x.dtype), (1 + n % 2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _indexed(x: Any, y: Any, n: int) -> Any:
    x = filled(x)
    at = indices(y, x.shape[0])
    if n % 5 == 0:
        return jnp.take(x, at, axis=0)
    if n % 5 == 1:
        return x.at[at].add(like(y, x[: at.shape[0]])[0] if x.shape[0] >= at.shape[0] else x[at])
    if n % 5 == 2:
        return jax.lax.dynamic_slice_in_dim(x, at[0], 1, axis=0)
    if n % 5 == 3:
        return jax.lax.dynamic_update_slice_in_dim(x, like(y, x[:1]), at[0], axis=0)
    return x.at[at].set(0)


def _random(x: Any, key: Any, n: int) -> Any:
    key = jax.random.fold_in(key, n)
    if n % 3 == 0:
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)
    if n % 3 == 1:
        return x + jax.random.normal(key, x.shape, x.dtype)
    return x * (jax.random.bits(key, x.shape, "uint32") % 3).astype(x.dtype)


def _linear_algebra(x: Any, n: int) -> Any:
    a = fit(floating(x), (2, 2)).astype(jnp.float32)
    a = a @ a.T + 2 * jnp.eye(2, dtype=a.dtype)
    if n % 4 == 0:
        return jnp.linalg.cholesky(a)
    if n % 4 == 1:
        return jnp.linalg.solve(a, jnp.ones(2, a.dtype))
    if n % 4 == 2:
        return jnp.linalg.inv(a)
    return jnp.abs(jnp.fft.fft(a))


class Machine:
    """Runs a program's steps."""

    def __init__(self, key: Any = None) -> None:
        self._key = key

    def run(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """The results of a body on these values."""
        values = list(values)
        for step in body.steps:
            operands = [values[-1 - i % len(values)] for i in step.operands]
            values += self._step(step, operands, values)
        return [values[-1 - i % len(values)] for i in body.results]

    def _step(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        x, y = operands[0], operands[-1]
        n = step.n
        match step.op:
            case "unary":
                return [_UNARY[n % len(_UNARY)](floating(x))]
            case "binary":
                return [_BINARY[n % len(_BINARY)](floating(x), like(floating(y), floating(x)))]
            case "product":  # of whatever type the operands are
                return [x * like(y, x)]
            case "shaped":
                return [_SHAPED[n % len(_SHAPED)](floating(x))]
            case "dot":
                return [_dot(x, like(y, jnp.zeros(y.shape, floating(x).dtype)), n)]
            case "convolution":
                return [_convolution(x, y, n)]
            case "indexed":
                return [_indexed(x, y, n)]
            case "random":
                key = jax.random.key(n) if self._key is None else self._key
                return [_random(floating(x), key, n)]
            case "algebra":
                return [_linear_algebra(x, n)]
            case "type":
                return [like(x, jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(_TYPES[n % len(_TYPES)])))]
            case "constant":
                return [x + like(jnp.asarray(np.arange(4.0, dtype=np.float32)), x)]
            case "name":
                return [checkpoint_name(x, NAMES[n % len(NAMES)])]
            case "name tree":
                return list(checkpoint_name((x, y), NAMES[n % len(NAMES)]))
            case _:
                return getattr(self, f"_{step.op}")(step, operands, values)

    def _body(self, body: Body | None, *, captured: Sequence[Any] = ()) -> Callable[..., list[Any]]:
        assert body is not None
        return lambda *operands: self.run(body, [*captured, *operands])

    def _captured(self, step: Step, values: list[Any]) -> list[Any]:
        return values[-2:] if step.n % 2 else []

    def _jit(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        return jax.jit(self._body(step.body, captured=self._captured(step, values)))(*operands)

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
        return jax.checkpoint(function, policy=POLICIES[step.policy], prevent_cse=bool(step.n % 4))(*operands)

    def _vmap(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        batched, *others = operands
        batched = jnp.stack([batched, batched * 2]) if step.n % 3 else fit(batched, (2, 3))
        inner = self._body(step.body, captured=self._captured(step, values))
        axes = (0, *(None for _ in others))
        return jax.vmap(inner, axes, out_axes=0)(batched, *others)

    def _scan(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        carry, *others = operands
        length = (1, 2, 3, 3, 0)[step.n % 5]
        inner = self._body(step.body, captured=self._captured(step, values))

        def layer(carry, x):
            first, *rest = inner(carry, x)
            return like(first, carry), rest or None

        xs = jnp.stack([floating(others[-1])] * length) if length else jnp.zeros((0, 2), jnp.float32)
        unroll = 2 if length == 3 and step.n % 2 else 1
        carry, ys = jax.lax.scan(layer, carry, xs, reverse=bool(step.n % 3), unroll=unroll)
        return [carry, *(ys or ())]

    def _map(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))
        return list(jax.lax.map(lambda x: inner(x), jnp.stack([operands[0]] * 2)))

    def _fori(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        inner = self._body(step.body, captured=self._captured(step, values))
        return [jax.lax.fori_loop(0, 2 + step.n % 2, lambda i, c: like(inner(c * (i + 1))[0], c), operands[0])]

    def _while(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        """A loop of a length that only running it tells, on what is not differentiated."""
        start = jax.lax.stop_gradient(operands[0])
        inner = self._body(step.body)

        def more(carry):
            return (carry[0] < 2) | (jnp.real(jnp.sum(carry[1])) < -1e6)

        def layer(carry):
            return carry[0] + 1, like(inner(carry[1])[0], start)

        return [jax.lax.while_loop(more, layer, (0, start))[1]]

    def _cond(self, step: Step, operands: list[Any], values: list[Any]) -> list[Any]:
        captured = self._captured(step, values)
        one, two = self._body(step.body, captured=captured), self._body(step.other, captured=captured)
        types = jax.eval_shape(one, *operands)

        def other(*operands):
            results = two(*operands)
            return [like(results[i % len(results)], kind) for i, kind in enumerate(types)]

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
        inner = self._body(step.body)

        def scalar(x):
            return sum(jnp.sum(floating(result).astype(jnp.float32)) for result in inner(x, *operands[1:]))

        return [jax.grad(scalar)(floating(operands[0]))]


def _call(program: Program, *args: Any, **kwargs: Any) -> Any:
    leaves = jax.tree.leaves((args, kwargs))
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
        return jax.jit(fun)
    if decorator in POLICIES:
        return jax.checkpoint(fun, policy=POLICIES[decorator])
    return fun


# ------------------------------------------------------------------------------------------------------------- strategy

_PLAIN = ("unary", "binary", "shaped", "dot", "name", "product")
_RARE = ("convolution", "indexed", "random", "algebra", "type", "constant", "name tree")
_NESTING = ("jit", "scope", "vmap", "scan", "map", "fori", "while", "custom_jvp", "custom_vjp", "grad")
_numbers = st.integers(0, 30)
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
    plain = st.builds(
        Step, st.sampled_from([op for op in _PLAIN if op not in without]), st.tuples(_backwards, _backwards), _numbers
    )
    rare = st.builds(
        Step, st.sampled_from([op for op in _RARE if op not in without]), st.tuples(_backwards, _backwards), _numbers
    )
    if depth == 0:
        return st.one_of(plain, plain, rare)
    inner = st.deferred(lambda: bodies(depth - 1, without))
    operands = st.lists(_backwards, min_size=2, max_size=3).map(tuple)
    nesting = [op for op in _NESTING if op not in without]
    nested = st.builds(Step, st.sampled_from(nesting), operands, _numbers, inner)
    branching = st.builds(Step, st.just("cond"), operands, _numbers, inner, inner)
    checkpoint = st.builds(
        Step, st.just("checkpoint"), operands, _numbers, inner, policy=st.sampled_from(sorted(POLICIES))
    )
    return st.one_of(plain, plain, rare, nested, branching, checkpoint)


_shapes = st.sampled_from([(), (3,), (2, 3), (4, 4), (0, 3), (1,), (2, 2, 3)])
_dtypes = ("float32", "float32", "float32", "bfloat16", "float16", "complex64", "int32", "bool", "key")


def programs(
    depth: int = 3, dtypes: Sequence[str] = _dtypes, without: Sequence[str] = ()
) -> st.SearchStrategy[Program]:
    """Whole functions; the first argument can always be differentiated.

    Args:
        depth: how deep loops, branches, calls and checkpoints nest.
        dtypes: of the arguments.
        without: operations that must not occur.
    """
    first = st.tuples(_shapes, st.sampled_from([d for d in dtypes if d.startswith(("float", "bf", "complex"))]))
    others = st.lists(st.tuples(_shapes, st.sampled_from(dtypes)), min_size=1, max_size=3)
    return st.builds(
        Program,
        st.tuples(first, others).map(lambda pair: (pair[0], *pair[1])),
        bodies(depth, frozenset(without)),
        st.sampled_from(["flat", "flat", "dictionary", "keyword", "nested"]),
        st.sampled_from(["scalar", "scalar", "all", "dictionary", "twice", "input", "constant"]),
        st.sampled_from(["", "", "", "jit", *ON_DEVICE[:3]]),
        st.booleans(),
    )


def steps_in(body: Body | None, runs: int = 1) -> list[tuple[Step, int]]:
    """Every step at any depth with how often its equations run, as the program says."""
    found: list[tuple[Step, int]] = []
    for step in body.steps if body else ():
        found.append((step, runs))
        times = {"scan": (1, 2, 3, 3, 0)[step.n % 5], "map": 2, "fori": 2 + step.n % 2}.get(step.op, 1)
        found += steps_in(step.body, runs * times)
        found += steps_in(step.other, runs)
        if step.op == "cond" and not step.n % 2:  # a switch whose third branch is the first again
            found += steps_in(step.body, runs)
    return found
