"""JAX's transformations: the functions that they return, and the ``vmap`` calls of a program while it is traced."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from remat_magic._jax.private import Replaced, courtesy, do_without
from remat_magic._jax.shardings import is_key
from remat_magic.errors import RematError

# They share one outer code object, and all have ``__wrapped__``. So a wrapper is known by its code object, which that
# of a probe made with the same transformation is, and what it wraps is read from its closure. Where JAX differs, a
# wrapper is not known, and callers say so.


class GradWrapper(NamedTuple):
    """What ``jax.grad`` or its like was given."""

    fun: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool


def gradient_in(fun: Any) -> GradWrapper | None:
    """What this very object differentiates, if ``jax.grad``, ``jax.value_and_grad`` or ``jax.jacrev`` made it."""
    inner = _inside(fun)
    code = _code(inner)
    if code is None:
        return None
    if code in _codes().grad:
        return gradient_in(_closure(inner).get("value_and_grad_f"))
    if code in _codes().value_and_grad:
        closure = _closure(inner)
        if {"fun", "argnums", "has_aux"} <= closure.keys():
            return GradWrapper(closure["fun"], closure["argnums"], closure["has_aux"])
    return None


def is_boundary(code: types.CodeType) -> bool:
    """Whether code is that of the wrapper around most functions of JAX, and around what its transformations make."""
    return code in _codes().boundary


def behind_boundary(frame: types.FrameType) -> Any:
    """The function that such a wrapper, whose frame this is, calls with its arguments; None of other frames."""
    return frame.f_locals.get("fun") if is_boundary(frame.f_code) else None


def mapped_in(fun: Any) -> tuple[Any, Callable[..., Any]] | None:
    """What this very object maps, if ``jax.vmap`` made it, and what maps another function in the same way."""
    inner = _inside(fun)
    if _code(inner) not in _codes().vmap:
        return None
    options = _closure(inner)
    return options.pop("fun"), functools.partial(jax.vmap, **options)


def is_checkpointed(fun: Any) -> bool:
    """Whether this very object is what ``jax.checkpoint`` returns."""
    return _code(_inside(fun)) in _codes().checkpoint


def is_forward_derivative(fun: Any) -> bool:
    """Whether this very object is what ``jax.jacfwd`` returns."""
    return _code(fun) in _codes().forward


def is_backward_pass(fun: Any) -> bool:
    """Whether this very object is the backward pass that ``jax.vjp`` returns."""
    return isinstance(fun, _backward_pass())


@functools.cache
def _backward_pass() -> type:
    kind = type(jax.vjp(_probe, 1.0)[1])
    return type(None) if kind is types.FunctionType else kind


def is_jitted(fun: Any) -> bool:
    """Whether this very object is what ``jax.jit`` returns."""
    return isinstance(fun, type(_jitted())) and hasattr(fun, "__wrapped__")


def is_jitted_plainly(fun: Any) -> bool:
    """Whether this very object is what ``jax.jit`` returns that is told nothing but a function."""
    own, plain = getattr(fun, "_jit_info", ()), getattr(_jitted(), "_jit_info", ())
    return is_jitted(fun) and bool(own) and own[2:] == plain[2:]  # the first two are of the function


def asks_shardings(fun: Any) -> bool:
    """Whether what ``jax.jit`` returned was told how arguments or results are spread (jax 0.10 to 0.12)."""

    def shardings_of(jitted: Any) -> list[Any]:
        info = getattr(jitted, "_jit_info", None)
        return [*getattr(info, "in_shardings_leaves", ()), *getattr(info, "out_shardings_leaves", ())]

    nothing = tuple(map(type, shardings_of(_jitted())))
    return any(not isinstance(sharding, nothing) for sharding in shardings_of(fun))


class _Codes(NamedTuple):
    """Code objects by what makes them; ``boundary`` filters tracebacks around most of JAX's API."""

    boundary: frozenset[types.CodeType]
    grad: frozenset[types.CodeType]
    value_and_grad: frozenset[types.CodeType]
    forward: frozenset[types.CodeType]
    checkpoint: frozenset[types.CodeType]
    vmap: frozenset[types.CodeType]


def _probe(x: Any) -> Any:
    return x


@functools.cache
def _codes() -> _Codes:
    def codes(*functions: Any) -> frozenset[types.CodeType]:
        return frozenset(code for code in map(_code, functions) if code is not None)

    boundary = codes(jax.grad(_probe)) & codes(jax.vmap(_probe))

    def inside(fun: Any) -> Any:
        return _closure(fun).get("fun", fun) if _code(fun) in boundary else fun

    return _Codes(
        boundary=boundary,
        grad=codes(inside(jax.grad(_probe)), inside(jax.grad(_probe, has_aux=True))),
        value_and_grad=codes(inside(jax.value_and_grad(_probe)), inside(jax.jacrev(_probe))),
        forward=codes(inside(jax.jacfwd(_probe))),
        checkpoint=codes(inside(jax.checkpoint(_probe))),
        vmap=codes(inside(jax.vmap(_probe))),
    )


@functools.cache
def _jitted() -> Any:
    return jax.jit(_probe)


def _code(fun: Any) -> types.CodeType | None:
    return fun.__code__ if isinstance(fun, types.FunctionType) else None


def _closure(fun: types.FunctionType) -> dict[str, Any]:
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _inside(fun: Any) -> Any:
    """What stands under the wrapper that filters tracebacks."""
    return _closure(fun).get("fun", fun) if _code(fun) in _codes().boundary else fun


# ------------------------------------------------------------------------------------------------------ vmap in parts


# ``jax.vmap``, and with it what equinox, flax and haiku make of it, calls ``batching.batch`` (JAX 0.10 to 0.12). While
# a trace looks for such calls, another function stands there, for the thread of that trace alone. In parts a call is
# ``jax.lax.map`` over equal parts of its examples, each under a checkpoint.

NO_BREAK = "\N{NO-BREAK SPACE}"
"""In the name of a part stands for a space, which JAX takes for the end of a name."""

_EFFECT = "no vmap is offered in parts"
_unnamed = courtesy("jax._src.core.no_axis_name", _EFFECT)
_in_thread = threading.local()  # .ask: that of this thread, if its trace takes hold of vmaps
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "")
# What calls the functions that users give to JAX; elsewhere in JAX a vmap is one of JAX's own.
_FILES = "partial_eval", "batching", "ad", "linear_util", "api_util", "ad_checkpoint", "custom_derivatives"
_GENERAL = tuple(f"{os.sep}{name}.py" for name in _FILES)


class VmapCall(NamedTuple):
    """A call of a ``vmap``: what is mapped, for how many examples, by whose frame, and ``in_axes`` with ``out_axes``.

    ``arguments`` is how many it has, 0 where some are by name; ``refused`` why it cannot be done in parts, as the end
    of a sentence, empty where it can.
    """

    function: Any
    size: int
    frame: FrameType
    axes: tuple[Any, Any]
    arguments: int
    refused: str


Ask = Callable[[VmapCall], "tuple[str, int] | None"]
"""Is told of a call; gives what its part is to be called, and how many parts there are to be. None: not in parts."""


@contextlib.contextmanager
def mapping(ask: Ask) -> Iterator[None]:
    """Have this thread's ``vmap`` calls asked about; an interrupt between any two steps undoes it."""
    before: Ask | None = getattr(_in_thread, "ask", None)
    with _place.taken():
        try:
            _in_thread.ask = ask
            yield
        finally:
            _in_thread.ask = before


def why_no_vmaps() -> str:
    """Why no ``vmap`` can be taken hold of in this JAX, a sentence; empty where it can."""
    lacks = "jax._src.interpreters.batching.batch" if _place.own is None else "jax._src.core.no_axis_name"
    return "" if _place.own and _unnamed else f"jax {jax.__version__} has no {lacks}, without which {_EFFECT}."


def _stand_in(fun: Any, axis: Any, in_axes: Any, out_axes: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of JAX's own, which gives what maps ``fun``."""
    mapped = _place.found(fun, axis, in_axes, out_axes, *args, **kwargs)
    ask: Ask | None = getattr(_in_thread, "ask", None)
    if ask is None or _unnamed is None:
        return mapped
    try:
        call = _call_of(fun, axis, in_axes)
    except (AttributeError, LookupError, TypeError) as error:
        do_without(f"vmap as it was ({type(error).__name__}: {error})", _EFFECT)
        return mapped
    wanted = ask(call)
    if wanted is None:
        return mapped

    def part_of(size: int, axes: Sequence[int | None]) -> Any:
        for store in fun.stores:  # of what the function returned last
            if store is not None:
                store.reset()
        return _place.found(fun, replace(axis, size=size), axes, out_axes, *args, **kwargs)

    return SimpleNamespace(call_wrapped=_in_parts(part_of, axis.size, in_axes, out_axes, *wanted))


def _call_of(fun: Any, axis: Any, in_axes: Sequence[Any]) -> VmapCall:
    own = sys._getframe(2)  # of what `jax.vmap` returns
    known, frame, refused = own.f_locals, own.f_back, ""
    while frame is not None and is_boundary(frame.f_code):
        frame = frame.f_back
    assert frame is not None
    file = frame.f_code.co_filename
    if axis.name is not _unnamed and axis.name is not None:
        refused = f"its axis has a name, {axis.name!r}, over which it may communicate"
    elif axis.spmd_name is not None or axis.explicit_mesh_axis is not None:
        refused = "its axis lies on a mesh of devices"
    elif file.startswith(_FOLDER) and not file.endswith(_GENERAL):
        refused = "it is one of JAX's own"
    elif not all(at is None or type(at) is int for at in in_axes) or all(at is None for at in in_axes):
        refused = "no axis of an argument is mapped"
    arguments = 0 if known["kwargs"] else len(known["args"])
    return VmapCall(fun.f, axis.size, frame, (known["in_axes"], known["out_axes"]), arguments, refused)


def _in_parts(
    part_of: Callable[..., Any], size: int, in_axes: Sequence[int | None], out_axes: Any, name: str, parts: int
) -> Callable[..., tuple[list[Any], Any]]:
    """What is called with the arguments, and gives the results and which axes of them are mapped."""

    def whole(*values: Any) -> tuple[list[Any], Any]:
        pairs, axes_of_results = [*zip(values, in_axes, strict=True)], list[Any]()

        def part(mapped: Sequence[Any]) -> list[Any]:
            given = iter(mapped)
            full = [value if axis is None else next(given) for value, axis in pairs]
            results, inferred = part_of(size // parts, in_axes).call_wrapped(*full)
            axes_of_results[:] = inferred, out_axes() if callable(out_axes) else out_axes
            return list(results)

        part.__name__ = part.__qualname__ = name.replace(" ", NO_BREAK)
        mapped = [cut(value, axis % jnp.ndim(value), parts) for value, axis in pairs if axis is not None]
        results, (inferred, axes) = jax.lax.map(jax.checkpoint(part), mapped), axes_of_results
        if not all(axis is None or type(axis) is int for axis in axes):
            raise RematError(f"{name}: its out_axes are no numbers, which is not done in parts.")
        pairs = zip(results, axes, strict=True)
        return [it[0] if axis is None else joined(it, axis % (it.ndim - 1)) for it, axis in pairs], inferred

    return whole


def cut(value: Any, axis: int, parts: int) -> Any:
    """An array in equal parts of one axis, along a new first one."""
    shape = value.shape
    value = jnp.asarray(value).reshape(*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :])
    return jnp.moveaxis(value, axis, 0)


def joined(value: Any, axis: int) -> Any:
    """What ``cut`` has cut, in one again."""
    whole = jnp.moveaxis(value, 0, axis)
    return whole.reshape(*whole.shape[:axis], whole.shape[axis] * whole.shape[axis + 1], *whole.shape[axis + 2 :])


_place = Replaced("jax._src.interpreters.batching.batch", _EFFECT, _stand_in)


def has_other_bits(eqn: Any) -> bool:
    """Whether an equation handles random keys of which a ``vmap`` makes other bits than single calls do."""
    types = [atom.aval for atom in (*eqn.invars, *eqn.outvars) if hasattr(atom.aval, "dtype")]
    of_keys = any(is_key(aval) and "rbg" in aval.dtype._impl.name for aval in types)
    return of_keys or eqn.primitive.name == "rng_bit_generator"
