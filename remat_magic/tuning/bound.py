"""A bound for a moving slider: the lower hull of all choices, found once by pricing bytes, and read off thereafter.

If a byte costs so much, what is best to save is a linear programme without a budget. Its solutions for all prices are
the corners of the lower convex hull of all choices (bytes against cost), and the lines between corners bound what lies
between them: this is the bound of the linear programme with a budget, for every budget at once.
"""

from __future__ import annotations

import bisect
import threading
import time
from typing import Any

from remat_magic.model import FrontierPoint
from remat_magic.tuning.plan import budget_bytes
from remat_magic.tuning.planner import planner
from remat_magic.tuning.solve import Problem

__all__ = ["Hull", "plan_bound"]


def plan_bound(
    trace: Any,
    budget: int | float | str,
    at: Any = None,
    *,
    separately: bool = False,
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
        first: how long the first call may search, in seconds.
        seconds: how long the others may.

    Raises:
        RematError: as ``trace.plan``.
    """
    found = planner(trace, at, separately)
    limit = budget_bytes(budget, found.most)
    key = (__name__, found.at, separately)
    hull = trace.memo.get(key)
    if hull is None:
        hull = trace.memo[key] = Hull(found.problem())
        hull.refine(None, first)
    saved, flops, bound = hull.at(limit, seconds)
    return FrontierPoint(limit, saved, int(flops), int(min(bound, flops)))


class Hull:
    """The corners of the lower hull that are known, and the lines that bound it from below."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._lock = threading.Lock()
        nothing, everything = problem.measure(()), problem.measure(problem.names)
        self._corners: list[tuple[int, float]] = sorted({nothing, everything})  # bytes and cost
        self._lines: list[tuple[float, float]] = [(0.0, problem.priced(0.0)[0])]  # price of a byte, and the least cost
        self._done: set[tuple[int, int]] = set()  # between these two corners, by bytes, there is none
        self._longest = 0.0  # seconds that one programme took

    def at(self, budget: int, seconds: float) -> tuple[int, float, float]:
        """Bytes and cost of the best known choice within a budget, and the bound; searches on for some time."""
        self.refine(budget, seconds)
        with self._lock:
            bound = max(cost - price * budget for price, cost in self._lines)
            within = [corner for corner in self._corners if corner[0] <= budget] or self._corners[:1]
            saved, cost = min(within, key=lambda corner: (corner[1], corner[0]))
            return saved, cost, bound

    def refine(self, budget: int | None, seconds: float) -> None:
        """Look for more corners: around a budget, or all of them."""
        end = time.perf_counter() + seconds
        with self._lock:
            while (began := time.perf_counter()) + self._longest < end:
                between = self._open(budget)
                if between is None:
                    return
                left, right = between
                price = (left[1] - right[1]) / (right[0] - left[0])
                cost, names = self._problem.priced(price)
                corner = self._problem.measure(names)
                self._longest = max(self._longest, time.perf_counter() - began)
                self._lines.append((price, cost))
                # Below the line from left to right, or it is an edge of the hull.
                lower = corner[1] + price * corner[0] < (left[1] + price * left[0]) * (1 - 1e-9)
                if lower and left[0] < corner[0] < right[0]:
                    bisect.insort(self._corners, corner)
                else:
                    self._done.add((left[0], right[0]))

    def _open(self, budget: int | None) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """Two corners that there may be another between, the widest apart, or those around a budget."""
        pairs = [
            (left, right)
            for left, right in zip(self._corners, self._corners[1:], strict=False)
            if (left[0], right[0]) not in self._done
            and left[0] < right[0]
            and left[1] > right[1]
            and (budget is None or left[0] <= budget <= right[0])
        ]
        return max(pairs, key=lambda pair: (pair[1][0] - pair[0][0]) * (pair[0][1] - pair[1][1]), default=None)
