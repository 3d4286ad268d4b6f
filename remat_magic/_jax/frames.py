"""The jaxpr that this thread is making: where in it the trace stands."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.tree_util import tree_leaves

from remat_magic._jax.private import courtesy

_trace_now: Any = courtesy("jax._src.core.trace_ctx", "places that have no checkpoint are not offered")

ELSEWHERE = object()
"""What ``staged`` gives where operations are carried out otherwise than by writing them down, as under ``jax.jvp``."""


def staged() -> Any:
    """The trace that makes the innermost jaxpr that is being made; ``vmap`` writes what it maps into that one too.

    None where no jaxpr is made. Who keeps it longer than it lasts leaks tracers.
    """
    stage: Any = getattr(_trace_now, "trace", None)
    while type(stage).__name__ == "BatchTrace":
        stage = stage.parent_trace
    if hasattr(getattr(stage, "frame", None), "tracing_eqns"):
        return stage
    return None if stage is None or type(stage).__name__ == "EvalTrace" else ELSEWHERE


def equations_of(stage: Any) -> Sequence[Any]:
    """The equations that a trace of JAX's, as ``staged`` gives it, has written so far."""
    return stage.frame.tracing_eqns


def inputs_of(stage: Any) -> Sequence[Any]:
    """The variables of such a trace that are the inputs of the jaxpr that it makes."""
    return stage.frame.invars


def variables(values: Any) -> list[Any]:
    """The variables, in the jaxpr that is being made, of the traced arrays in a pytree; none where it is no pytree."""
    try:
        flat = tree_leaves(values)
    except Exception:  # noqa: BLE001 - of a class of the user's, or a dictionary whose keys have no order
        return []
    leaves = []
    for leaf in flat:
        while type(leaf).__name__ == "BatchTracer":
            leaf = leaf.val
        if isinstance(leaf, Tracer):
            leaves.append(getattr(leaf, "val", None))
    return leaves


def makers(equations: Sequence[Any], begin: int) -> dict[int, tuple[int, int]]:
    """For the identity of each variable that is made by these equations, from number ``begin`` on, its place.

    That is the number of the equation and of the output.
    """
    eqns = ((number, _standing(eqn)) for number, eqn in enumerate(equations[begin:], begin))
    return {id(var): (number, i) for number, eqn in eqns if eqn is not None for i, var in enumerate(eqn.outvars)}


def tracebacks(equations: Sequence[Any]) -> list[Any]:
    """The traceback of each equation of a jaxpr that is being made; None for one that JAX has dropped again."""
    eqns = map(_standing, equations)
    return [None if eqn is None else eqn.source_info.traceback for eqn in eqns]


def _standing(equation: Any) -> Any:
    return equation() if isinstance(equation, weakref.ref) else equation  # 0.11: by a weak reference
