"""Which function is inspected, and with which arguments: from an evaluated call.

Objects are recognised, not their spelling: a gradient may be stored, jitted or made elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from jax.core import Tracer

from remat_magic import libraries
from remat_magic._jax.wrappers import asks_shardings, gradient_in, is_backward_pass, is_forward_derivative, is_jitted
from remat_magic.libraries import layers
from remat_magic.notebook.functions import consumes, lowered_by, name_of, takes_the_function
from remat_magic.notebook.rebinding import original_of
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file


@dataclass(frozen=True, slots=True)
class Callee:
    """A function and the arguments of its call, as ``rm.trace`` takes them.

    ``wrt`` are positions in ``args`` (None: every inexact leaf). ``bound`` of the ``args`` come first without standing
    in the call: what a partial or a method holds. ``notes`` are sentences for the reader. Where ``fun`` is a gradient
    that is traced as it is, ``loss`` is what it is of; where it was taken off, ``gradient`` is the call as it stood.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrt: int | tuple[int, ...] | None = None
    has_aux: bool = False
    bound: int = 0
    notes: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    gradient: Callee | None = None

    @property
    def name(self) -> str:
        """The function's own name, or its type's."""
        return name_of(self.fun)

    def saying(self, remark: str) -> Callee:
        """With one more note in front; none if it is empty."""
        return replace(self, notes=(remark, *self.notes)) if remark else self


def called(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee:
    """The function that the call ``fun(*args, **kwargs)`` differentiates, or that it calls: one gradient is taken off.

    RematError where the call is none that has a backward pass.
    """
    if not callable(fun):
        raise RematError(
            f"what is called is not a function but of type {type(fun).__name__}: call the function to inspect."
        )
    if consumes(fun):
        raise RematError(
            f"`{name_of(fun)}` is not a function that JAX differentiates: end the cell with the call to inspect, "
            "such as loss(params, x)."
        )
    if is_backward_pass(fun):
        raise RematError("this is the backward pass of a call of jax.vjp before it: inspect that, jax.vjp(f, x).")
    if inspect.iscoroutinefunction(fun):
        raise RematError(f"`{name_of(fun)}` is a coroutine, which JAX cannot trace: call the function that it awaits.")
    fun = original_of(fun if (lowered := lowered_by(fun)) is None else lowered)
    if isinstance(fun, functools.partial) and takes_the_function(fun.func):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    differentiated = _in_function_taker(fun, args, kwargs) or _in_gradient(fun, args, kwargs)
    callee = _spread(differentiated or Callee(fun, args, kwargs))
    if libraries.is_gradient(fun) and callee.loss is None:
        callee = replace(callee, gradient=Callee(fun, args, kwargs, loss=callee.fun))
    wrt = callee.wrt  # which counted from the arguments of the call
    if isinstance(wrt, tuple):
        wrt = tuple(position + callee.bound for position in wrt)
    return replace(callee, wrt=wrt + callee.bound if isinstance(wrt, int) else wrt)


def may_be_inspected(callee: Callee, last: bool) -> bool:
    """Whether a call is given something to differentiate; else it only prepares something, or trains all by itself.

    Where the cell ends with the call alone (``last``), arrays of integers suffice: a model may be an object.
    """
    leaves = _leaves(callee.args, callee.kwargs)
    if any(isinstance(leaf, Iterator) for leaf in leaves):  # of batches, which a trace would take from it
        return False
    kinds = [getattr(leaf, "dtype", bool) for leaf in leaves]
    inexact = any(jnp.issubdtype(kind, jnp.inexact) or (last and kind is not bool) for kind in kinds)
    return inexact or any(isinstance(leaf, float | complex) for leaf in leaves)


def with_shapes_for_donated(callee: Callee) -> Callee:
    """With types in the place of arrays that were donated, and have no values any more."""

    def is_donated(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()

    def stand_in(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_donated(leaf) else leaf

    given = (callee.args, dict(callee.kwargs))
    if not any(map(is_donated, jax.tree.leaves(given))):
        return callee
    args, kwargs = jax.tree.map(stand_in, given)
    return replace(callee, args=args, kwargs=kwargs)


def has_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether some arguments have no values to run on."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in _leaves(args, kwargs))


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """All leaves, iterators among them, which JAX warns of."""
    return jax.tree.leaves((args, dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, Iterator))


def cannot_be_traced(error: Exception) -> bool:
    """Whether a function that raised this while it was traced may train: it does, or looks at values."""
    errors = jax.errors
    of_jax = (errors.ConcretizationTypeError, errors.TracerArrayConversionError, errors.UnexpectedTracerError)
    return isinstance(error, (RematError, *of_jax, errors.NonConcreteBooleanIndexError))


def _in_function_taker(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.vjp(f, *primals)`` and its like."""
    if fun is jax.jvp:
        raise RematError("jax.jvp is forward mode, which saves nothing for a backward pass: inspect f(...) itself.")
    if not takes_the_function(fun):
        return None
    if not args or not callable(args[0]):
        raise RematError(f"{fun.__name__} takes the function first: {fun.__name__}(f, x).")
    if fun is libraries.vjp_of_nnx():  # its modules are no arguments of JAX's: its gradient is traced as it is
        loss = original_of(args[0])
        return Callee(libraries.gradient_by(fun, loss, kwargs), args[1:], loss=loss)
    if fun in (jax.eval_shape, print_saved_residuals):  # which hand all keywords on
        return Callee(args[0], args[1:], kwargs)
    return Callee(args[0], args[1:], has_aux=bool(kwargs.get("has_aux", False)))


def _in_gradient(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.grad(f)(...)``, ``jit(value_and_grad(f))(...)`` and their like, stored ones and libraries' too."""
    given, spread = (fun, args, kwargs), False
    while (gradient := gradient_in(fun)) is None:
        if isinstance(fun, functools.partial):
            args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
            fun = fun.func
        elif is_jitted(fun) or libraries.is_jitted(fun):
            spread = spread or asks_shardings(fun)
            fun = fun.__wrapped__
        elif args and (loss := libraries.loss_of_equinox(fun)) is not None:
            return Callee(loss, args, kwargs, wrt=0, has_aux=bool(getattr(fun, "_has_aux", False)))
        elif args and (loss := libraries.loss_of_optax(fun)) is not None:
            return Callee(loss, args, {name: value for name, value in kwargs.items() if name != "state"}, wrt=0)
        elif (of_modules := libraries.loss_of_nnx(fun)) is not None:
            loss = original_of(of_modules.loss)
            # What nnx differentiates of a module only nnx knows: its gradient is traced, and the loss found in there.
            if loss is of_modules.loss:
                return Callee(*given, loss=loss)
            return Callee(of_modules.of(loss), args, kwargs, loss=loss)
        else:
            return None
    if spread:  # how is said around the gradient, which is therefore traced, and the loss found in there
        return Callee(*given, loss=gradient.fun)
    argnums = gradient.argnums if isinstance(gradient.argnums, tuple) else (gradient.argnums,)
    outside = [position for position in argnums if not -len(args) <= position < len(args)]
    if outside:
        raise RematError(
            f"argnums={gradient.argnums} asks for argument {outside[0]}, and the call has {len(args)} positional ones."
        )
    wrt = tuple(position % len(args) for position in argnums)
    is_number = not isinstance(gradient.argnums, tuple)
    return Callee(gradient.fun, args, kwargs, wrt=wrt[0] if is_number else wrt, has_aux=gradient.has_aux)


def _spread(callee: Callee) -> Callee:
    """Let partials, methods and callable pytrees become leading arguments; leave everything else alone."""
    fun, args, kwargs, bound = callee.fun, callee.args, callee.kwargs, callee.bound
    while True:
        fun = original_of(fun)
        if isinstance(fun, functools.partial):
            args, kwargs, bound = (*fun.args, *args), {**fun.keywords, **kwargs}, bound + len(fun.args)
            fun = fun.func
        elif (method := libraries.method_of(fun)) is not None:
            fun, owner = method
            args, bound = (owner, *args), bound + 1
        elif is_jitted(fun) and original_of(fun.__wrapped__) is not fun.__wrapped__:
            fun = original_of(fun.__wrapped__)
        else:
            break
    notes = (*callee.notes, *_notes_of_wrappers(fun))
    return replace(callee, fun=fun, args=args, kwargs=kwargs, bound=bound, notes=notes)


def _notes_of_wrappers(fun: Any) -> Iterator[str]:
    """What the reader must know about a wrapper that is traced as it is."""
    name = name_of(fun)
    for layer in layers(fun):
        if gradient_in(layer) is not None or is_forward_derivative(layer):
            yield f"`{name}` is itself a derivative: what is shown is what differentiating it once more saves."
            return
        if not hasattr(layer, "__wrapped__"):
            return
        if not _computes_what_it_wraps(layer):
            yield (
                f"`{name}` is traced together with a wrapper that remat_magic does not know; if that takes a gradient, "
                "inspect the function inside it instead."
            )
            return


def _computes_what_it_wraps(layer: Any) -> bool:
    """JAX's own wrappers do, derivatives aside, and so do the decorators of libraries.

    Objects of other libraries are not taken for granted: equinox's gradients are such.
    """
    if not isinstance(layer, types.FunctionType):
        return type(layer).__module__.partition(".")[0] in ("jax", "jaxlib", "flax") or libraries.is_jitted(layer)
    return not is_user_file(layer.__code__.co_filename)
