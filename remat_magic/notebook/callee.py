"""Which function is inspected, and with which arguments: from an evaluated call, or from what a cell defines.

Objects are recognised, not their spelling: a gradient may be stored, jitted or made elsewhere.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals

from remat_magic import libraries
from remat_magic._jax.wrappers import (
    asks_shardings,
    gradient_in,
    is_backward_pass,
    is_checkpoint,
    is_forward_derivative,
    is_jitted,
)
from remat_magic.notebook.rebinding import original_of
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file

__all__ = [
    "Callee",
    "called",
    "consumes",
    "defined",
    "differentiates",
    "gives_result",
    "is_meant",
    "makes_a_function",
    "notes_of_wrappers",
    "prepares",
    "with_arguments",
]

# Of JAX's own functions those that are called for what comes out of others.
_CONSUMERS = (jax.block_until_ready, jax.device_get, jax.device_put, jax.debug.print)
_CONSUMING_MODULES = sys.stdlib_module_names | {"numpy", "IPython", "matplotlib", "pandas", "rich", "tqdm"}


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
        return _name(self.fun)

    def saying(self, remark: str) -> Callee:
        """With one more note in front; none if it is empty."""
        return replace(self, notes=(remark, *self.notes)) if remark else self

    def layers(self) -> Iterator[Any]:
        """The function and what it wraps, outermost first, as far as wrappers tell."""
        return _layers(self.fun)

    def layers_of_loss(self) -> Iterator[Any]:
        """The same of ``loss``."""
        return _layers(self.loss)


# ------------------------------------------------------------------------------------------------------ from a call


def called(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee:
    """The function that the call ``fun(*args, **kwargs)`` differentiates, or that it calls.

    One gradient is taken off, no more.

    Raises:
        RematError: where the call is none that has a backward pass.
    """
    if not callable(fun):
        raise RematError(
            f"what is called is not a function but of type {type(fun).__name__}: call the function to inspect."
        )
    if consumes(fun):
        raise RematError(
            f"`{_name(fun)}` is not a function that JAX differentiates: end the cell with the call to inspect, "
            "such as loss(params, x)."
        )
    if is_backward_pass(fun):
        raise RematError("this is the backward pass of a call of jax.vjp before it: inspect that, jax.vjp(f, x).")
    if inspect.iscoroutinefunction(fun):
        raise RematError(f"`{_name(fun)}` is a coroutine, which JAX cannot trace: call the function that it awaits.")
    fun = original_of(fun if (lowered := _lowers(fun)) is None else lowered)
    if isinstance(fun, functools.partial) and _takes_the_function(fun.func):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    differentiated = _in_function_taker(fun, args, kwargs) or _in_gradient(fun, args, kwargs)
    callee = _spread(differentiated or Callee(fun, args, kwargs))
    if libraries.is_gradient(fun) and callee.loss is None:
        callee = replace(callee, gradient=Callee(fun, args, kwargs, loss=callee.fun))
    match callee.wrt:  # which counted from the arguments of the call
        case None:
            return callee
        case tuple() as positions:
            return replace(callee, wrt=tuple(position + callee.bound for position in positions))
        case position:
            return replace(callee, wrt=position + callee.bound)


def makes_a_function(fun: Any) -> bool:
    """Whether a call of this is no call yet: ``jax.grad(f)`` alone, without the arguments of ``f``."""
    makers = (jax.grad, jax.value_and_grad, jax.jacrev, jax.jit, jax.checkpoint, jax.vmap, functools.partial)
    return any(fun is maker for maker in makers)


def consumes(fun: Any) -> bool:
    """Whether a function is called for its effect, or makes another thing of a result: ``print``, ``float``.

    Where a call is in its brackets, that is meant.
    """
    if isinstance(fun, type | types.BuiltinFunctionType) or any(fun is consumer for consumer in _CONSUMERS):
        return not makes_a_function(fun)
    function = getattr(fun, "__func__", fun)
    if not isinstance(function, types.FunctionType):
        return False
    module = str(function.__globals__.get("__name__"))  # functools.wraps gives __module__ to what it wraps
    return module.partition(".")[0] in _CONSUMING_MODULES or module.endswith((".tree_util", ".tree"))


def gives_result(fun: Any, steps: Sequence[str]) -> bool:
    """Whether steps from what a call of this returns are steps from arrays or trees of them, as ``.mean()`` is.

    Args:
        fun: the function.
        steps: names of attributes, ``"[]"`` and ``"()"``.
    """
    if _takes_the_function(fun) or _lowers(fun) is not None:
        return True
    if consumes(fun) or makes_a_function(fun):
        return False
    names = {"[]", "block_until_ready", "tolist", *dir(jax.Array), *dir(dict), *dir(tuple)}
    calls_method = all(before != "[]" for before, step in itertools.pairwise(steps) if step == "()")
    return calls_method and all(step in names or step == "()" for step in steps)


def prepares(fun: Any) -> bool:
    """Whether a function only prepares or reads something, as ``jnp.ones`` and ``optimizer.init`` do, or ``float``.

    All others are gradients, or code of the user's own.
    """
    if consumes(fun) or makes_a_function(fun) or not callable(fun) or is_backward_pass(fun):
        return True
    if differentiates(fun) or _lowers(fun) is not None:
        return False
    return not any(libraries.applies_a_model(layer) or _is_users(layer) for layer in _layers(fun))


def differentiates(fun: Any) -> bool:
    """Whether a call of this takes a gradient, or makes ready to."""
    return any(_takes_the_function(layer) or libraries.is_gradient(layer) for layer in _layers(fun))


def is_meant(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call whose result the cell uses is the one to inspect: it gives something to differentiate."""
    if prepares(fun):
        return False
    try:
        callee = called(fun, args, kwargs)
    except RematError:
        return True  # which says what is wrong
    leaves = jax.tree.leaves((callee.args, dict(callee.kwargs)))
    return any(isinstance(leaf, float | complex) or _is_inexact(leaf) for leaf in leaves)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact)


def _is_users(fun: Any) -> bool:
    """Whether a function, or the class of an object, is the user's own."""
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if code is not None:
        return is_user_file(code.co_filename)
    module = sys.modules.get(type(fun).__module__)
    file = getattr(module, "__file__", None)
    return module is not builtins and (not file or is_user_file(file))


def _in_function_taker(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.vjp(f, *primals)`` and its like."""
    if fun is jax.jvp:
        raise RematError("jax.jvp is forward mode, which saves nothing for a backward pass: inspect f(...) itself.")
    if not _takes_the_function(fun):
        return None
    if not args or not callable(args[0]):
        raise RematError(f"{fun.__name__} takes the function first: {fun.__name__}(f, x).")
    if fun is libraries.vjp_of_nnx():  # its modules are no arguments of JAX's: its gradient is traced as it is
        loss = original_of(args[0])
        return Callee(libraries.gradient_by(fun, loss, kwargs), args[1:], loss=loss)
    if fun in (jax.eval_shape, print_saved_residuals):  # which hand all keywords on
        return Callee(args[0], args[1:], kwargs)
    return Callee(args[0], args[1:], has_aux=bool(kwargs.get("has_aux", False)))


def _takes_the_function(fun: Any) -> bool:
    takers = (jax.vjp, jax.linearize, jax.eval_shape, print_saved_residuals)
    of_equinox = getattr(sys.modules.get("equinox"), "filter_vjp", None)
    return fun is not None and any(fun is taker for taker in (*takers, of_equinox, libraries.vjp_of_nnx()))


def _lowers(fun: Any) -> Any:
    """The jitted function that this is the ``lower``, or a similar method, of; None for anything else."""
    owner: Any = getattr(fun, "__self__", None)
    return owner if is_jitted(owner) and fun in (owner.lower, owner.trace, owner.eval_shape) else None


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
    one = not isinstance(gradient.argnums, tuple)
    return Callee(gradient.fun, args, kwargs, wrt=wrt[0] if one else wrt, has_aux=gradient.has_aux)


def _spread(callee: Callee) -> Callee:
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
        elif is_jitted(fun) and original_of(fun.__wrapped__) is not fun.__wrapped__:
            fun = original_of(fun.__wrapped__)
        else:
            break
    return replace(
        callee, fun=fun, args=args, kwargs=kwargs, bound=bound, notes=(*callee.notes, *notes_of_wrappers(fun))
    )


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


def notes_of_wrappers(fun: Any) -> Iterator[str]:
    """What the reader must know about a wrapper that is traced as it is."""
    name = _name(fun)
    for layer in _layers(fun):
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


def _name(fun: Any) -> str:
    return str(getattr(fun, "__name__", type(fun).__name__))


def _layers(fun: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)


# ------------------------------------------------------------------------------------------------- without a call


def defined(
    namespace: Mapping[str, Any], functions: Sequence[tuple[str, bool, tuple[str, ...]]]
) -> tuple[Callable[..., Any], str]:
    """The function of a cell that is meant, and a remark where several could be.

    It is the one decorated with ``jax.checkpoint``, or rather the one that calls that; without any, the one that no
    other of the cell's calls. Of several, the last.

    Args:
        namespace: the user's, after the cell has run.
        functions: names to which the cell gives functions, or (False) what a call returned, each with the names used
            in it. What a call returned counts if it is checkpointed.

    Raises:
        RematError: where there is none.
    """
    uses = {name: set(used) for name, _, used in functions if callable(namespace.get(name))}
    for _ in uses:
        for name, used in uses.items():
            uses[name] = used.union(*(uses[other] for other in used & uses.keys()))
    checkpointed = {name for name in uses if _is_checkpointed(namespace[name])}
    candidates = {name: uses[name] for name, is_function, _ in functions if name in uses and is_function}
    candidates = {name: uses[name] for name in uses if name in candidates or name in checkpointed}
    if checkpointed:
        candidates = {name: used for name, used in candidates.items() if checkpointed & {name, *used}}
    inside = {other for name, used in candidates.items() for other in used if other != name}
    *others, chosen = [name for name in candidates if name not in inside] or candidates or [None]
    if chosen is None:
        raise RematError(
            "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, "
            "or define one function in the cell."
        )
    if not others:
        return namespace[chosen], ""
    names = " and ".join(f"`{name}`" for name in (*others, chosen))
    return namespace[chosen], (
        f"The cell defines {names}: the last is inspected; to choose another, end the cell with its call, such as "
        f"{others[-1]}(...)."
    )


def _is_checkpointed(fun: Any) -> bool:
    return callable(fun) and any(is_checkpoint(layer) for layer in _layers(fun))


def with_arguments(fun: Any, written: str | None, namespace: Mapping[str, Any], variables: Mapping[str, Any]) -> Callee:
    """A function with arguments that no call gives.

    Args:
        fun: the function, which may be a gradient.
        written: the arguments as between a call's brackets; None: ``variables`` with the names of the parameters.
        namespace: where ``written`` is evaluated.
        variables: the namespace without what IPython itself put there.

    Raises:
        RematError: a name or a variable is missing, or the call is none that has a backward pass. What else goes wrong
            in ``written`` is raised as it is.
    """
    __tracebackhide__ = True
    if written is not None:
        return called(fun, *_written_arguments(written, namespace))
    args, kwargs, used = _arguments_by_name(fun, variables)
    callee = called(fun, args, kwargs)
    if not used:
        return callee
    note = f"Arguments: your variable{'s' * (len(used) > 1)} {', '.join(used)}."
    return replace(callee, notes=(note, *callee.notes))


def _written_arguments(written: str, namespace: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    __tracebackhide__ = True
    code = f"(lambda *args, **kwargs: (args, kwargs))(\n{written}\n)"
    try:
        return eval(compile(code, "<--args>", "eval"), dict(namespace))  # noqa: S307  (the user's own Python)
    except NameError as error:
        if error.name is None or error.name in namespace:
            raise
        raise RematError(f"--args names `{error.name}`, which is not defined: assign it, or name another.") from None


def _arguments_by_name(
    fun: Callable[..., Any], variables: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """The variables with the names of the parameters, and which names were used.

    Parameters with a default may lack a variable; ``*args`` and ``**kwargs`` get nothing.
    """
    name = _name(fun)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        raise RematError(f"the parameters of `{name}` cannot be read: give its arguments with --args.") from None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    missing: list[str] = []
    positional = True
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            positional = False
        elif parameter.name not in variables:
            positional = False
            if parameter.default is parameter.empty:
                missing.append(parameter.name)
        elif positional and parameter.kind is not parameter.KEYWORD_ONLY:
            args.append(variables[parameter.name])
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            kwargs[parameter.name] = variables[parameter.name]
    if missing:
        raise RematError(
            f"`{name}` needs {' and '.join(f'`{parameter}`' for parameter in missing)}, and no variable has "
            f"{'this name' if len(missing) == 1 else 'these names'}: assign {'it' if len(missing) == 1 else 'them'}, "
            f'or give the arguments with --args "...".'
        )
    return tuple(args), kwargs, [parameter.name for parameter in parameters][: len(args)] + list(kwargs)
