"""What a call's callee really is: which function is differentiated, by which of its arguments.

Evaluated objects are recognised, not their spelling: a gradient may be stored, jitted or made elsewhere. All of JAX's
transformations leave functions that look alike (one shared outer code object, ``__wrapped__`` set on each), so a
wrapper is known by its code object, compared with that of a probe made with the same transformation, and what it wraps
is read from its closure. That needs no private name of JAX, and where a future version differs the wrapper is unknown
and said to be.
"""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import print_saved_residuals

from remat_magic.notebook.apply import original_of
from remat_magic.records import RematError

__all__ = ["Callee", "chain", "is_checkpoint", "makes_a_function", "recognise", "spread"]


@dataclass(frozen=True, slots=True)
class Callee:
    """A function and the arguments of its call, as ``rm.trace`` takes them.

    ``wrt`` are positions in ``args`` (None: every inexact leaf). ``bound`` of the ``args`` come first without standing
    in the call: what a partial or a method holds. ``notes`` are sentences for the reader.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrt: int | tuple[int, ...] | None = None
    has_aux: bool = False
    bound: int = 0
    notes: tuple[str, ...] = ()


def recognise(callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee:
    """The function that ``callee(*args, **kwargs)`` differentiates, or that it calls. Peels one gradient, no more.

    Raises:
        RematError: where the call is none that has a backward pass.
    """
    if not callable(callee):
        raise RematError(
            f"what is called is not a function but of type {type(callee).__name__}: call the function to inspect."
        )
    if isinstance(callee, type | types.BuiltinFunctionType):
        raise RematError(
            f"`{callee.__name__}` is not a function that JAX differentiates: end the cell with the call to inspect, "
            "such as loss(params, x)."
        )
    found = _from_function_taker(callee, args, kwargs) or _from_gradient(callee, args, kwargs)
    if found is None:
        return spread(Callee(callee, args, kwargs))
    found = spread(found)
    return replace(found, wrt=_shifted(found))


def spread(callee: Callee) -> Callee:
    """Let partials, methods and callable pytrees become leading arguments; leave everything else alone."""
    fun, args, kwargs, bound = callee.fun, callee.args, callee.kwargs, callee.bound
    while True:
        fun = original_of(fun)
        if isinstance(fun, functools.partial):
            args, kwargs, bound = (*fun.args, *args), {**fun.keywords, **kwargs}, bound + len(fun.args)
            fun = fun.func
        elif (method := _method(fun)) is not None:
            fun, owner = method
            args, bound = (owner, *args), bound + 1
        elif _is_jitted(fun) and original_of(fun.__wrapped__) is not fun.__wrapped__:
            fun = original_of(fun.__wrapped__)
        else:
            break
    return replace(callee, fun=fun, args=args, kwargs=kwargs, bound=bound, notes=(*callee.notes, *_notes(fun)))


def chain(fun: Any) -> Iterator[Any]:
    """The function and what it wraps, outermost first, as far as wrappers tell."""
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)


def is_checkpoint(fun: Any) -> bool:
    """Whether this very object is what ``jax.checkpoint`` returns."""
    return _code(_inside(fun)) in _probes().checkpoint


def makes_a_function(callee: Any) -> bool:
    """Whether a call of this is no call yet: ``jax.grad(f)`` alone, without the arguments of ``f``."""
    makers = (jax.grad, jax.value_and_grad, jax.jacrev, jax.jit, jax.checkpoint, jax.vmap, functools.partial)
    return any(callee is maker for maker in makers)


class _Gradient(NamedTuple):
    fun: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool


class _Probes(NamedTuple):
    """Code objects by what makes them."""

    boundary: frozenset[types.CodeType]
    grad: frozenset[types.CodeType]
    value_and_grad: frozenset[types.CodeType]
    forward: frozenset[types.CodeType]
    checkpoint: frozenset[types.CodeType]


def _probe(x: Any) -> Any:
    return x


@functools.cache
def _probes() -> _Probes:
    def codes(*made: Any) -> frozenset[types.CodeType]:
        return frozenset(code for code in map(_code, made) if code is not None)

    boundary = codes(jax.grad(_probe)) & codes(jax.vmap(_probe))

    def inside(made: Any) -> Any:
        return _free(made).get("fun", made) if _code(made) in boundary else made

    return _Probes(
        boundary=boundary,
        grad=codes(inside(jax.grad(_probe)), inside(jax.grad(_probe, has_aux=True))),
        value_and_grad=codes(inside(jax.value_and_grad(_probe)), inside(jax.jacrev(_probe))),
        forward=codes(inside(jax.jacfwd(_probe))),
        checkpoint=codes(inside(jax.checkpoint(_probe))),
    )


def _code(fun: Any) -> types.CodeType | None:
    return fun.__code__ if isinstance(fun, types.FunctionType) else None


def _free(fun: types.FunctionType) -> dict[str, Any]:
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _inside(fun: Any) -> Any:
    """What stands under the wrapper that JAX puts around most of its API to filter tracebacks."""
    return _free(fun).get("fun", fun) if _code(fun) in _probes().boundary else fun


def _gradient(fun: Any) -> _Gradient | None:
    inner = _inside(fun)
    code = _code(inner)
    if code is None:
        return None
    if code in _probes().grad:
        return _gradient(_free(inner).get("value_and_grad_f"))
    if code in _probes().value_and_grad:
        free = _free(inner)
        if {"fun", "argnums", "has_aux"} <= free.keys():
            return _Gradient(free["fun"], free["argnums"], free["has_aux"])
    return None


def _is_jitted(fun: Any) -> bool:
    return isinstance(fun, type(_jitted_probe())) and hasattr(fun, "__wrapped__")


@functools.cache
def _jitted_probe() -> Any:
    return jax.jit(_probe)


def _method(fun: Any) -> tuple[Any, Any] | None:
    """The function and the object of a bound method; a callable pytree is its own ``__call__``.

    Pytrees that wrap a function (equinox has such) keep what they hold: they are wrappers, not models.
    """
    if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
        return fun.__func__, fun.__self__
    if isinstance(fun, types.FunctionType) or hasattr(fun, "__wrapped__") or jax.tree_util.all_leaves([fun]):
        return None
    call: Any = fun.__call__
    return (call.__func__, call.__self__) if hasattr(call, "__func__") else None


def _from_function_taker(callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.vjp(f, *primals)`` and its like."""
    if callee is jax.jvp:
        raise RematError("jax.jvp is forward mode, which saves nothing for a backward pass: inspect f(...) itself.")
    if not any(callee is taker for taker in (jax.vjp, jax.linearize, print_saved_residuals)):
        return None
    if not args or not callable(args[0]):
        raise RematError(f"{callee.__name__} takes the function first: {callee.__name__}(f, x).")
    has_aux = callee is not print_saved_residuals and bool(kwargs.get("has_aux", False))
    if callee is not print_saved_residuals:
        kwargs = {}
    return Callee(args[0], args[1:], kwargs, has_aux=has_aux)


def _from_gradient(callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.grad(f)(...)``, ``jit(value_and_grad(f))(...)`` and their like, stored ones too."""
    while (gradient := _gradient(callee)) is None:
        if isinstance(callee, functools.partial):
            args, kwargs = (*callee.args, *args), {**callee.keywords, **kwargs}
            callee = callee.func
        elif _is_jitted(callee):
            callee = callee.__wrapped__
        else:
            return None
    positions = gradient.argnums if isinstance(gradient.argnums, tuple) else (gradient.argnums,)
    outside = [position for position in positions if not -len(args) <= position < len(args)]
    if outside:
        raise RematError(
            f"argnums={gradient.argnums} asks for argument {outside[0]}, and the call has {len(args)} positional ones."
        )
    wrt = tuple(position % len(args) for position in positions)
    return Callee(
        gradient.fun, args, kwargs, wrt=wrt if isinstance(gradient.argnums, tuple) else wrt[0], has_aux=gradient.has_aux
    )


def _shifted(callee: Callee) -> int | tuple[int, ...] | None:
    match callee.wrt:
        case None:
            return None
        case tuple() as positions:
            return tuple(position + callee.bound for position in positions)
        case position:
            return position + callee.bound


def _notes(fun: Any) -> Iterator[str]:
    """What the reader must know about a wrapper that is traced as it is."""
    name = getattr(fun, "__name__", type(fun).__name__)
    for layer in chain(fun):
        if _gradient(layer) is not None or _code(layer) in _probes().forward:
            yield f"`{name}` is itself a derivative: what is shown is what differentiating it once more saves."
            return
        if not hasattr(layer, "__wrapped__"):
            return
        if not _is_known(layer):
            yield (
                f"`{name}` is traced together with a wrapper that remat_magic does not know; if that takes a gradient, "
                "inspect the function inside it instead."
            )
            return


def _is_known(layer: Any) -> bool:
    """Whether a wrapper computes what it wraps: JAX's own do, derivatives aside, and the decorators of libraries.

    Objects of other libraries are not taken for granted: equinox's gradients are such.
    """
    code = _code(layer)
    if code is None:
        return type(layer).__module__.partition(".")[0] in ("jax", "jaxlib")
    libraries = {
        Path(jax.__file__).parent,
        *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
    }
    return not libraries.isdisjoint(Path(code.co_filename).parents)
