"""What is known of equinox, flax nnx and optax. None of them is imported to tell: who uses one has imported it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from remat_magic._jax import wrappers

__all__ = ["ModuleGradient", "is_gradient", "is_jitted", "lifted", "loss_of_equinox", "loss_of_nnx", "loss_of_optax"]


def _probe(x: Any) -> Any:
    return x


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _made_by_equinox(fun: Any, *transforms: str) -> bool:
    equinox = sys.modules.get("equinox")
    makers = [getattr(equinox, name, None) for name in transforms if equinox is not None]
    return any(maker is not None and type(fun) is type(maker(_probe)) for maker in makers)


def is_jitted(fun: Any) -> bool:
    """Whether this very object is what ``eqx.filter_jit`` or ``nnx.jit`` returns, which have what they jit inside."""
    of_nnx = type(fun).__module__ == "flax.nnx.transforms.compilation" and hasattr(fun, "__wrapped__")
    return of_nnx or _made_by_equinox(fun, "filter_jit")


# -------------------------------------------------------------------------------------------------------- gradients


def loss_of_equinox(fun: Any) -> Any:
    """What ``eqx.filter_grad`` or ``eqx.filter_value_and_grad`` was given; None where neither made this object."""
    return fun.__wrapped__ if _made_by_equinox(fun, "filter_grad", "filter_value_and_grad") else None


def loss_of_optax(fun: Any) -> Any:
    """What ``optax.value_and_grad_from_state`` was given; None where that did not make this object."""
    make = getattr(sys.modules.get("optax"), "value_and_grad_from_state", None)
    same = make is not None and isinstance(fun, types.FunctionType) and fun.__code__ is make(_probe).__code__
    return _closure(fun).get("value_fn") if same else None


class ModuleGradient(NamedTuple):
    """What ``nnx.grad`` or ``nnx.value_and_grad`` was given; ``of`` makes such a gradient of another function."""

    loss: Callable[..., Any]
    of: Callable[[Callable[..., Any]], Callable[..., Any]]


def loss_of_nnx(fun: Any) -> ModuleGradient | None:
    """What this very object differentiates, if ``nnx.grad`` or ``nnx.value_and_grad`` made it."""
    nnx = _nnx()
    inner = getattr(fun, "__wrapped__", fun)  # nnx wraps it in the context of its updates
    if nnx is None or not isinstance(inner, types.FunctionType) or inner.__module__ != nnx.grad.__module__:
        return None
    closure = _closure(inner)
    options = {name: closure[name] for name in ("has_aux", "graph") if name in closure}
    if (filters := closure.get("index_filter")) is not None:
        argnums = tuple(nnx.DiffState(position, state.filter) for position, state in filters.items())
        loss: Any = closure.get("f")
    elif (gradient := wrappers.gradient_in(closure.get("gradded_fn"))) is not None:  # modules as plain pytrees
        options["graph_updates"] = False
        argnums, loss = gradient.argnums, getattr(gradient.fun, "f", None)
    else:
        return None
    return None if loss is None else ModuleGradient(loss, lambda other: nnx.grad(other, argnums=argnums, **options))


def is_gradient(fun: Any) -> bool:
    """Whether JAX or a library made this object to take a gradient, jitted or not, and it does nothing else."""
    while is_jitted(fun) or wrappers.is_jitted(fun):
        fun = fun.__wrapped__
    makers = (wrappers.gradient_in, loss_of_equinox, loss_of_optax, loss_of_nnx)
    return any(made_by(fun) is not None for made_by in makers)


def _closure(fun: types.FunctionType) -> dict[str, Any]:
    return dict(zip(fun.__code__.co_freevars, (cell.cell_contents for cell in fun.__closure__ or ()), strict=True))


# ---------------------------------------------------------------------------------------------------------- modules


def lifted(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]], fun: Callable[..., Any], args: Any, kwargs: Any
) -> Callable[..., Any] | None:
    """``transform(fun)`` for arguments that hold modules of nnx, which ``fun`` may change; None where they hold none.

    A transformation that traces sees pytrees. So nnx's own way is gone: it takes modules apart around the
    transformation and puts them together within it, and afterwards gives the user's ones the new values.
    """
    nnx = _nnx()
    if nnx is None:
        return None
    kinds = (nnx.Module, nnx.Variable, nnx.Optimizer)
    if not any(
        isinstance(leaf, kinds) for leaf in jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, kinds))
    ):
        return None
    tag = "remat_magic"

    def with_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fun(*args, **kwargs)

    general = importlib.import_module("flax.nnx.transforms.general")
    pure = transform(general.merge_inputs(with_all, ctxtag=tag))
    whole = nnx.update_context(tag)(general.split_inputs(pure, ctxtag=tag))
    return lambda *args, **kwargs: whole(args, kwargs)
