"""Programs by chance: a Hypothesis strategy for JAX functions of every shape that autodiff has to deal with.

A program is data: steps on a growing list of values, some of which hold a program of their own (a loop's body, a
branch, what a checkpoint is put around). Every step takes any values, since operands are brought to the shape and type
that it needs, so that any list of steps is a program, shrinks well, and runs on other shapes too. ``repr`` of a program
can be pasted into a regression test.

The single operations stand in tests/generated_operations.py.
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

from tests import generated_operations as ops
from tests.generated_operations import fit, floating, indices, like, predicate

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

    def under(self, policy: str | None, sites: Callable[[Step], bool], own: bool) -> Program:
        """The program as if another policy (None: no checkpoint) had been written at some of its sites.

        Args:
            policy: the policy.
            sites: of which checkpoint steps.
            own: whether at the program's own decorator.
        """

        def changed(body: Body | None) -> Body | None:
            if body is None:
                return None
            steps = []
            for step in body.steps:
                here = bool(step.site) and sites(step)
                new = dataclasses.replace(step, body=changed(step.body), other=changed(step.other))
                steps.append(dataclasses.replace(new, policy=policy or NO_CHECKPOINT) if here else new)
            return dataclasses.replace(body, steps=tuple(steps))

        body = changed(self.body)
        assert body is not None
        decorator = (policy or "") if own and self.decorator in POLICIES else self.decorator
        return dataclasses.replace(self, body=body, decorator=decorator)

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
                return [ops.UNARY[n % len(ops.UNARY)](floating(x))]
            case "binary":
                return [ops.BINARY[n % len(ops.BINARY)](floating(x), like(floating(y), floating(x)))]
            case "product":  # of whatever type the operands are
                return [x * like(y, x)]
            case "shaped":
                return [ops.SHAPED[n % len(ops.SHAPED)](floating(x))]
            case "dot":
                return [ops.dot(x, like(y, jnp.zeros(y.shape, floating(x).dtype)), n)]
            case "convolution":
                return [ops.convolution(x, y, n)]
            case "indexed":
                return [ops.indexed(x, y, n)]
            case "random":
                key = jax.random.key(n) if self._key is None else self._key
                return [ops.random(floating(x), key, n)]
            case "algebra":
                return [ops.linear_algebra(x, n)]
            case "type":
                return [
                    like(x, jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(ops.TYPES[n % len(ops.TYPES)])))
                ]
            case "complex":
                return [ops.complex_numbers(x, y, n)]
            case "callback":
                return [ops.callback(x, n)]
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
        x, inner = ops.rows(floating(operands[0])), self._body(step.body)
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
_RARE = ("convolution", "indexed", "random", "algebra", "type", "constant", "name tree", "complex", "callback")
_CALLS = ("jit", "shared", "scope", "vmap", "custom_jvp", "custom_vjp", "grad", "shard_map")
_LOOPS = ("scan", "layers", "map", "fori", "while")
_NESTING = (*_CALLS, *_LOOPS)
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


def steps_of(body: Body | None) -> int:
    """How many steps a body has, at any depth."""
    return sum(1 + steps_of(step.body) + steps_of(step.other) for step in body.steps) if body else 0


_LARGEST = 60  # One in ten is larger, and would take half of the time.
_shapes = st.sampled_from([(), (3,), (2, 3), (4, 4), (0, 3), (1,), (2, 2, 3), (0,), (1, 1)])
_dtypes = (
    *("float32", "float32", "float32", "bfloat16", "float16", "complex64", "int32", "bool", "key"),
    *("float64", "int8", "uint32"),
)


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
    return st.builds(
        Program,
        st.tuples(first, others).map(lambda pair: (pair[0], *pair[1])),
        deep.flatmap(lambda depth: bodies(depth, frozenset(without))).filter(lambda body: steps_of(body) <= _LARGEST),
        st.sampled_from(["flat", "flat", "dictionary", "keyword", "nested"]),
        st.sampled_from(["scalar", "scalar", "all", "dictionary", "twice", "input", "constant"]),
        st.sampled_from(["", "", "", "jit", *ON_DEVICE[:3]]),
        st.booleans(),
        st.sampled_from([False, False, False, "float64" in dtypes]),
        st.sampled_from([False, False, True]),
    )


MIXES: dict[str, Callable[[Any, Any], Any]] = {
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "gelu": lambda x, w: jax.nn.gelu(x @ w),
    "relu": lambda x, w: jax.nn.relu(x @ w),
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "residual": lambda x, w: x + jnp.sin(x @ w),
    "norm": lambda x, w: jax.nn.standardize(x) @ w,
}


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
