"""The user's function with a policy applied, for any arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _compat
from remat_magic.analysis import explain
from remat_magic.analysis.selection import Selection
from remat_magic.analysis.sites import Rewriter
from remat_magic.analysis.source import Spans
from remat_magic.analysis.values import abstract


def with_policy(
    fun: Callable[..., Any],
    name: str,
    selection: Selection,
    chooser: Callable[[Selection, Spans], Callable[[Any], Any]],
    tracing: Callable[[], AbstractContextManager[None]],
    named: Callable[[Selection, Any], Any],
) -> Callable[..., Any]:
    """A function like ``fun`` that traces it at every call, and rewrites what it traced.

    Args:
        fun: the function.
        name: what to call it in errors.
        selection: the policies.
        chooser: tells for a selection which policy a checkpoint equation gets; reads source positions with the spans.
        tracing: the settings to trace under.
        named: gives the values of a jaxpr the names that a selection's policy is of, if it is of such names.
    """

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        dynamic = [not isinstance(leaf, (float, complex)) and abstract(leaf) is not None for leaf in leaves]
        arrays = [leaf for leaf, yes in zip(leaves, dynamic, strict=True) if yes]
        static: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            given = iter(values)
            filled = [next(given) if yes else leaf for leaf, yes in zip(leaves, dynamic, strict=True)]
            inner_args, inner_kwargs = tree_unflatten(tree, filled)
            results, out_tree = tree_flatten(fun(*inner_args, **inner_kwargs))
            is_array = [abstract(item) is not None or isinstance(item, (bool, int)) for item in results]
            others = [item for item, yes in zip(results, is_array, strict=True) if not yes]
            static[:] = [out_tree, is_array, others]
            return [item for item, yes in zip(results, is_array, strict=True) if yes]

        with tracing():
            closed = named(selection, jax.make_jaxpr(flat)(*arrays))
            if selection.at_sites:
                closed = Rewriter(chooser(selection, Spans()))(closed)
            evaluate = _compat.as_function(closed)
            if selection.whole is not None:
                evaluate = jax.checkpoint(evaluate, policy=selection.whole)
            with explain.failures(name, selection.policy):
                results = iter(evaluate(*arrays))
        out_tree, is_array, others = static
        rest = iter(others)
        return tree_unflatten(out_tree, [next(results) if yes else next(rest) for yes in is_array])

    return applied
