"""A bound for a moving slider: the hull of all choices is found once, and read off thereafter."""

from __future__ import annotations

from typing import Any

from remat_magic.model import FrontierPoint
from remat_magic.tuning.plan import budget_bytes
from remat_magic.tuning.planner import planner

__all__ = ["plan_bound"]


def plan_bound(
    trace: Any,
    budget: int | float | str,
    at: Any = None,
    *,
    separately: bool = False,
    together: bool = False,
    first: float = 2.0,
    seconds: float = 0.04,
) -> FrontierPoint:
    """A bound on what any plan within a budget recomputes, and the best choice within it that is known so far.

    The first call at a place takes JAX's tracing and up to ``first`` seconds for the hull; later ones read it off, and
    go on with it for up to ``seconds`` where it is not complete. The figures are reckoned, not traced.

    Args:
        trace: what ``remat_magic.trace`` gave.
        budget: of saved bytes, as for ``trace.plan``.
        at: as for ``trace.plan``.
        separately: as for ``trace.plan``.
        together: as for ``trace.plan``.
        first: how long the first call may search, in seconds.
        seconds: how long the others may.

    Raises:
        RematError: as ``trace.plan``.
    """
    found = planner(trace, at, separately, together)
    limit = budget_bytes(budget, found.most)
    return found.point(limit, *found.hull(first).at(limit, seconds))
