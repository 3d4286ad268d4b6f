"""The functions that JAX's transformations return, and what stands inside them.

They all look alike: one shared outer code object, and ``__wrapped__`` set on each. So a wrapper is known by its code
object, which a probe made with the same transformation shares, and what it wraps is read from its closure. Where a
future JAX differs, a wrapper is not known, and callers say so.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


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


def is_checkpoint(fun: Any) -> bool:
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
