"""Choices for many budgets in little time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_magic.tuning.solve import Problem, Solution

__all__ = ["sweep"]


def sweep(
    problem: Problem,
    budgets: Sequence[int],
    seconds: float,
    start: Callable[[int], Solution | None],
    near: Callable[[int, float], Solution | None] | None = None,
) -> list[Solution | None]:
    """A choice for each of ascending budgets; what time is left goes where the bound is farthest.

    Args:
        problem: the programme.
        budgets: in bytes.
        seconds: how long to go on improving.
        start: gives a first choice for a budget.
        near: gives a better one for a budget within so many seconds, before the whole programme is tried.
    """

    def whole(budget: int, seconds: float) -> Solution | None:
        return problem.solve(budget, seconds, 0.01)

    end = time.perf_counter() + seconds
    found = [start(budget) for budget in budgets]
    attempts = {index: [*filter(None, (near,)), whole] for index in range(len(budgets))}
    while attempts:
        _share(found)
        widest, index = max((_gap(found[index]), index) for index in attempts)
        left = end - time.perf_counter()
        if not widest or left <= 0:
            break
        attempt = attempts[index].pop(0)
        if not attempts[index]:
            del attempts[index]
        better, known = attempt(budgets[index], min(left, max(0.3, seconds / 5))), found[index]
        if better is not None and known is not None:
            bound = max(better.bound, known.bound)
            found[index] = replace(min(better, known, key=lambda each: each.cost), bound=bound)
    _share(found)
    return found


def _share(found: list[Solution | None]) -> None:
    """What fits a smaller budget fits a larger one."""
    for index in range(1, len(found)):
        small, large = found[index - 1], found[index]
        if small is not None and large is not None and small.cost < large.cost:
            found[index] = replace(small, bound=large.bound)


def _gap(solution: Solution | None) -> float:
    """The cost between a solution and its bound, none if this is less than a hundredth of it."""
    if solution is None or 100 * (solution.cost - solution.bound) < solution.cost:
        return 0
    return solution.cost - solution.bound
