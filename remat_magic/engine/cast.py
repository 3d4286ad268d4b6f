"""A program in which what is differentiated casts some of its arguments first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.engine.engine import Engine


def with_cast(engine: Engine, arguments: Collection[str], kind: str) -> Engine | None:
    """A trace with all f32 in some arguments cast to ``kind``; None where the function closes over one of them.

    Its Python runs again.

    Raises:
        Exception: whatever it raises then.
    """
    leaves, types, given = engine.primal.signature.leaves, list[Any](), engine.given.fun
    if engine.inside is not None:
        inner = engine.inside.function
        leaves, types = inner.primals, [*inner.closed.in_avals]
        if any(leaf.argument in arguments for leaf in inner.constants.values()):
            return None
    wide = [leaf.argument in arguments and leaf.is_array and _jax.short_dtype(leaf.value) == "f32" for leaf in leaves]

    def casting(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def cast(*args: Any, **kwargs: Any) -> Any:
            values, tree = jax.tree.flatten((args, kwargs))
            values = [value.astype(kind) if yes else value for value, yes in zip(values, wide, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, values)
            return fun(*args, **kwargs)

        return cast

    def hold(fun: Callable[..., Any], args: tuple[Any, ...], _: bool) -> Callable[..., Any]:
        return casting(fun) if [*map(jax.typeof, jax.tree.leaves(args))] == types else fun

    @functools.wraps(given)
    def holding(*args: Any, **kwargs: Any) -> Any:
        with _jax.holding(hold):
            return given(*args, **kwargs)

    return engine.retraced(casting(given) if engine.inside is None else holding)
