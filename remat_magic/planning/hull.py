"""The lower convex hull of all choices, bytes against cost, found by pricing bytes.

If a byte costs so much, what is best to save is a linear programme without a budget. Its solutions for all prices are
the corners of the hull, and the lines between corners bound what lies between them: this is the bound of the linear
programme with a budget, for every budget at once.
"""

from __future__ import annotations

import bisect
import threading
import time
from dataclasses import replace

from remat_magic.planning.solve import Problem, Solution

__all__ = ["Hull"]

_CLOSE = 0.005  # what is so near the bound is not improved
_WIDER = (3, 0)  # how many corners more on each side; with few it is quick, but may have the wrong ones
_SECONDS = 0.2  # for each programme; most take a fifth of it


class Hull:
    """The corners of the lower hull that are known, and the lines that bound it from below."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._lock = threading.Lock()
        nothing, everything = problem.measure(()), problem.measure(problem.names)
        self._corners: list[tuple[int, float]] = sorted({nothing, everything})  # bytes and cost
        self._lines: list[tuple[float, float]] = [(0.0, problem.priced(0.0)[0])]  # price of a byte, and the least cost
        self._names = {nothing: frozenset[str](), everything: frozenset(problem.names)}
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

    def mixed(self, budget: int) -> Solution | None:
        """A choice within a budget between the corners around it: up to some point of the program the one's.

        Equal layers are worth the same, so that corners differ in all of them at once; what lies between is to decide
        for some as the one corner does, and for the others as the other. None where none fits.
        """
        began = time.perf_counter()
        self.refine(budget, 0.1)
        bound, place, corners = self._around(budget)
        if not place:
            return None
        near = corners[place - 1 : place + 1]
        cost, saved, names = self._cut(budget, near[0][0], near[0][1], near[-1][1], (1 + _CLOSE) * bound)
        names = self._problem.graph.used(names)
        return Solution(names, saved, cost, min(bound, cost), False, time.perf_counter() - began)

    def between(self, budget: int, seconds: float) -> Solution | None:
        """A choice within a budget by a programme that decides on what corners near it differ in alone.

        Better than mixing two corners in the order of the program, and slower.
        """
        began = time.perf_counter()
        bound, place, corners = self._around(budget)
        best: Solution | None = None
        for more in _WIDER if place else ():
            left = min(_SECONDS, seconds - (time.perf_counter() - began))
            if left <= 0 or (best is not None and best.cost - bound <= _CLOSE * best.cost):
                break
            sets = [names for _, names in corners[max(0, place - 1 - more) : place + 1 + more]]
            always, some = frozenset.intersection(*sets), frozenset.union(*sets)
            found, ended = self._problem.between(budget, always, frozenset(self._problem.names) - some, left)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
            if ended:  # fewer corners leave less open: there is nothing better in it
                break
        if best is None:
            return None
        return replace(best, bound=min(bound, best.cost), seconds=time.perf_counter() - began)

    def _around(self, budget: int) -> tuple[float, int, list[tuple[tuple[int, float], frozenset[str]]]]:
        """The bound for a budget, the number of the first corner beyond it, and all corners with their names."""
        with self._lock:
            bound = max(cost - price * budget for price, cost in self._lines)
            corners = [(corner, self._names[corner]) for corner in self._corners]
        return bound, next((i for i, (corner, _) in enumerate(corners) if corner[0] > budget), len(corners)), corners

    def _cut(
        self, budget: int, below: tuple[int, float], few: frozenset[str], many: frozenset[str], enough: float
    ) -> tuple[float, int, frozenset[str]]:
        """The best of one corner's choice up to a point of the program, and another's behind it: cost, bytes, names.

        The other way round is not tried where the first costs no more than ``enough``.
        """
        place = {name: i for i, name in enumerate(self._problem.names)}
        best: tuple[float, int, frozenset[str]] = (below[1], below[0], few)
        for first, second in ((few, many), (many, few)):
            if best[0] <= enough:
                break
            cuts = sorted(place[name] for name in few ^ many)
            low, high = 0, len(cuts)
            while low <= high:  # the more of one of them, the more bytes: not always, so that all that fits is kept
                middle = (low + high) // 2
                cut = cuts[middle] if middle < len(cuts) else len(place)
                names = frozenset([*(n for n in first if place[n] < cut), *(n for n in second if place[n] >= cut)])
                saved, cost = self._problem.measure(names)
                if saved <= budget:
                    best = min(best, (cost, saved, names), key=lambda each: each[:2])
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
                between = self._open(budget)
                if between is None:
                    return
                left, right = between
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
