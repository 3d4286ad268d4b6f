"""Choices for many budgets in little time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_magic.planning.solve import Problem, Solution

__all__ = ["sweep"]


def sweep(
    problem: Problem, budgets: Sequence[int], seconds: float, start: Callable[[int], Solution | None]
) -> list[Solution | None]:
    """A choice for each of ascending budgets; what time is left goes where the bound is farthest.

    Args:
        problem: the programme.
        budgets: in bytes.
        seconds: how long to go on improving, in this thread's own time.
        start: gives a first choice for a budget.
    """
    end = time.thread_time() + seconds
    found = [start(budget) for budget in budgets]
    todo = set(range(len(budgets)))
    while True:
        _share(found)
        # Of equal ones the smallest budget: what is found for it fits the larger ones.
        widest, number = max(((_gap(found[index]), -index) for index in todo), default=(0.0, 0))
        left = end - time.thread_time()
        if not widest or left <= 0:
            return found
        index = -number
        todo.remove(index)
        better, known = problem.solve(budgets[index], min(left, max(0.5, seconds / 5)), 0.01), found[index]
        if better is not None and known is not None:
            bound = max(better.bound, known.bound)
            found[index] = replace(min(better, known, key=lambda each: each.cost), bound=bound)


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
