"""The least cost for all budgets at once: a lower hull, which no choice of names can undercut.

If a byte costs so much, what is best to save is a linear program without a
budget. Its solutions for all prices are the corners of the lower convex hull of all choices, bytes against cost, and
the lines between corners bound what lies between them: this is the bound of the linear program with a budget, for every
budget at once.
"""

from __future__ import annotations

import bisect
import threading
import time

from remat_magic.planning.problem import Problem, Solution

__all__ = ["Hull"]

_CLOSE = 0.005  # what is so near the bound is not improved
_Corner = tuple[int, float]  # bytes and cost


class Hull:
    """The corners of the lower hull that are known, and the lines that bound it from below.

    May be used from any thread.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._lock = threading.Lock()
        nothing, everything = problem.measure(()), problem.measure(problem.names)
        self._corners: list[_Corner] = sorted({nothing, everything})
        self._lines: list[tuple[float, float]] = [(0.0, problem.priced(0.0)[0])]  # price of a byte, and the least cost
        self._names = {nothing: frozenset[str](), everything: frozenset(problem.names)}
        self._done: set[tuple[int, int]] = set()  # between these two corners, by bytes, there is none
        self._longest = 0.0  # seconds that one linear program took

    def at(self, budget: int, seconds: float) -> tuple[int, float, float]:
        """Bytes and cost of the best known choice within a budget, and the bound; searches on for some time."""
        self.refine(budget, seconds)
        with self._lock:
            bound = max(cost - price * budget for price, cost in self._lines)
            within = [corner for corner in self._corners if corner[0] <= budget] or self._corners[:1]
            saved, cost = min(within, key=lambda corner: (corner[1], corner[0]))
            return saved, cost, bound

    def mixed(self, budget: int) -> Solution | None:
        """A choice within a budget between the corners around it: up to some point of the program the one's.

        Equal layers are worth the same, so that corners differ in all of them at once; what lies between is to decide
        for some as the one corner does, and for the others as the other. None where none fits.
        """
        began = time.perf_counter()
        self.refine(budget, 0.1)
        with self._lock:
            bound = max(cost - price * budget for price, cost in self._lines)
            beyond = bisect.bisect(self._corners, budget, key=lambda corner: corner[0])
            if not beyond:
                return None
            below, above = self._corners[beyond - 1], self._corners[min(beyond, len(self._corners) - 1)]
            few, many = self._names[below], self._names[above]
        cost, saved, names = self._cut(budget, below, few, many, (1 + _CLOSE) * bound)
        names = self._problem.graph.used(names)
        return Solution(names, saved, cost, min(bound, cost), False, time.perf_counter() - began)

    def _cut(
        self, budget: int, below: _Corner, few: frozenset[str], many: frozenset[str], enough: float
    ) -> tuple[float, int, frozenset[str]]:
        """The best of one corner's choice up to a point of the program, and another's behind it: cost, bytes, names.

        The other way round is not tried where the first costs no more than ``enough``.
        """
        position = {name: i for i, name in enumerate(self._problem.names)}
        best: tuple[float, int, frozenset[str]] = (below[1], below[0], few)
        for first, second in ((few, many), (many, few)):
            if best[0] <= enough:
                break
            cuts = sorted(position[name] for name in few ^ many)
            low, high = 0, len(cuts)
            while low <= high:  # the more of one of them, the more bytes: not always, so that all that fits is kept
                middle = (low + high) // 2
                cut = cuts[middle] if middle < len(cuts) else len(position)
                before = (name for name in first if position[name] < cut)
                names = frozenset([*before, *(name for name in second if position[name] >= cut)])
                saved, cost = self._problem.measure(names)
                if saved <= budget:
                    best = min(best, (cost, saved, names), key=lambda choice: choice[:2])
                if (saved <= budget) == (first is many):
                    low = middle + 1
                else:
                    high = middle - 1
        return best

    def refine(self, budget: int | None, seconds: float) -> None:
        """Look for more corners: around a budget, or all of them.

        ``seconds`` are this thread's own, as a busy machine would give far fewer corners in as many by the clock.
        """
        end = time.thread_time() + seconds
        with self._lock:
            while (began := time.thread_time()) + self._longest < end:
                neighbours = self._open(budget)
                if neighbours is None:
                    return
                left, right = neighbours
                price = (left[1] - right[1]) / (right[0] - left[0])
                cost, names = self._problem.priced(price)
                corner = self._problem.measure(names)
                self._longest = max(self._longest, time.thread_time() - began)
                self._lines.append((price, cost))
                self._names.setdefault(corner, names)
                # Below the line from left to right, or it is an edge of the hull.
                lower = corner[1] + price * corner[0] < (left[1] + price * left[0]) * (1 - 1e-9)
                if lower and left[0] < corner[0] < right[0]:
                    bisect.insort(self._corners, corner)
                else:
                    self._done.add((left[0], right[0]))

    def _open(self, budget: int | None) -> tuple[_Corner, _Corner] | None:
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
