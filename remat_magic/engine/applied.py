"""The user's function with a policy applied, for any arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.failures import failures
from remat_magic.engine.gradients import under_policy
from remat_magic.engine.sites import Identity
from remat_magic.jaxprs.values import Returned, abstract
from remat_magic.libraries import lifted

Rewrite = Callable[[Any, Calls], tuple[Any, Any]]
"""Gives for a jaxpr, and the calls recorded when it was traced, another, and the policy of a checkpoint around it."""


def step_with_policy(
    step: Callable[..., Any], inside: Identity, policy: str, rewrite: Rewrite, remat3: bool
) -> Callable[..., Any]:
    """A training step like ``step``, with a function that it differentiates inside rewritten.

    The step itself is called, so that what it does besides, its ``jit`` with all options included, stays as it is. JAX
    keeps what it compiles for one policy apart from the user's, and from other policies'.

    Args:
        step: the function.
        inside: the function that is differentiated, by its definition.
        policy: the key of what is written into it, for errors.
        rewrite: writes it.
        remat3: whether to trace with jax_remat3.
    """
    generation, earlier = _jax.Generation(), Calls()

    def instead(closed: Any, calls: Calls) -> Callable[..., Any]:
        return evaluation(*rewrite(closed, calls))

    @functools.wraps(step)
    def applied(*args: Any, **kwargs: Any) -> Any:
        # A trace that looks for gradients gets new ones: what stands compiled takes none any more.
        own = _jax.Generation() if _jax.is_holding() else generation
        with _jax.tracing(own, remat3, _jax.x64()), under_policy(inside, instead, earlier), failures(inside[0], policy):
            return step(*args, **kwargs)

    return applied


def evaluation(closed: Any, policy: Any) -> Callable[..., Any]:
    """A flat function that evaluates a jaxpr, under a checkpoint with that policy if there is one."""
    evaluate = _jax.as_function(closed)
    return evaluate if policy is None else jax.checkpoint(evaluate, policy=policy)


def with_policy(
    fun: Callable[..., Any],
    name: str,
    policy: str,
    rewrite: Rewrite,
    tracing: Callable[[], AbstractContextManager[None]],
    calls: Calls,
) -> Callable[..., Any]:
    """``fun``, traced at every call; ``rewrite`` gives for its jaxpr another, and the policy of one around it.

    ``calls`` are those of the trace that was made before, with the same caches of JAX.
    """
    earlier = Calls(calls)

    def of_pytrees(fun: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            dynamic = [
                not isinstance(leaf, (float, complex, np.generic)) and abstract(leaf) is not None for leaf in leaves
            ]
            arrays = [leaf for leaf, yes in zip(leaves, dynamic, strict=True) if yes]
            returned = Returned()

            def flat(*values: Any) -> list[Any]:
                given = iter(values)
                filled = [next(given) if yes else leaf for leaf, yes in zip(leaves, dynamic, strict=True)]
                inner_args, inner_kwargs = tree_unflatten(tree, filled)
                return returned.arrays(fun(*inner_args, **inner_kwargs))

            with tracing():
                with recording(earlier) as calls:
                    closed = jax.make_jaxpr(flat)(*arrays)
                evaluate = evaluation(*rewrite(closed, calls))
                earlier.keep(calls, closed)
                with failures(name, policy):
                    return returned.with_arrays(evaluate(*arrays))

        return traced

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        function = lifted(of_pytrees, fun, args, kwargs) or of_pytrees(fun)
        return function(*args, **kwargs)

    return applied
