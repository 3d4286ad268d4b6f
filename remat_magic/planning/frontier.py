"""Many budgets at once: the frontier, and the bound for a slider. The figures are those of the graph, not traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_magic.facts.facts import Facts
from remat_magic.planning.costs import budget_bytes
from remat_magic.planning.planner import Planner, planner
from remat_magic.planning.problem import Problem, Solution
from remat_magic.records import FrontierPoint, Listed, RematError

__all__ = ["frontier", "plan_bound"]


def frontier(
    facts: Facts,
    points: int = 20,
    at: str | None = None,
    *,
    separately: bool = False,
    together: bool = False,
    seconds: float = 1.0,
) -> Listed[FrontierPoint]:
    """``Trace.frontier``.

    The hull bounds all budgets, and between its corners choices are mixed; what time is left goes into integer programs
    where the distance from the bound is largest. Mixing earns its place: without it the points of 48 blocks are 12%
    from their bounds on average when the time is up, with it 1.4%.
    """
    if points < 2:
        raise RematError(f"a frontier has two points or more, not {points}.")
    choices = planner(facts, at, separately, together)
    least, _ = choices.graph.predict(())
    most = max(choices.most, least)
    budgets = [least + (most - least) * i // (points - 1) for i in range(points)]
    began = time.thread_time()
    hull = choices.hull(seconds / 2)
    left = seconds - (time.thread_time() - began)
    solutions = _improved(choices.problem(), budgets, left, hull.mixed)
    return Listed(
        _point(choices, budget, solution.saved_bytes, solution.cost, solution.bound)
        for budget, solution in zip(budgets, solutions, strict=True)
        if solution is not None
    )


def plan_bound(
    facts: Facts,
    budget: float | str,
    at: str | None = None,
    *,
    separately: bool = False,
    together: bool = False,
    first: float = 2.0,
    seconds: float = 0.04,
) -> FrontierPoint:
    """``Trace.plan_bound``."""
    choices = planner(facts, at, separately, together)
    limit = budget_bytes(budget, choices.most)
    return _point(choices, limit, *choices.hull(first).at(limit, seconds))


def _point(choices: Planner, budget: int, saved: int, flops: float, bound: float) -> FrontierPoint:
    """What choices of names come to within a budget, or autodiff without a checkpoint where that fits and is less.

    It may keep what no name reaches, such as the cosine of a sine.
    """
    if choices.most <= budget and choices.flops_without_checkpoint() < flops:
        saved, flops = choices.most, choices.flops_without_checkpoint()
    return FrontierPoint(budget, saved, int(flops), int(min(bound, flops)), choices.unreached)


def _improved(
    problem: Problem, budgets: Sequence[int], seconds: float, start: Callable[[int], Solution | None]
) -> list[Solution | None]:
    """A choice for each of ascending budgets; what time is left goes where the bound is farthest.

    Args:
        problem: the problem.
        budgets: in bytes.
        seconds: how long to go on improving, in this thread's own time.
        start: gives a first choice for a budget.
    """
    end = time.thread_time() + seconds
    solutions = [start(budget) for budget in budgets]
    todo = set(range(len(budgets)))
    while True:
        _share(solutions)
        # Of equal ones the smallest budget: what is found for it fits the larger ones.
        widest, negative = max(((_gap(solutions[number]), -number) for number in todo), default=(0.0, 0))
        left = end - time.thread_time()
        if not widest or left <= 0:
            return solutions
        number = -negative
        todo.remove(number)
        better, before = problem.solve(budgets[number], min(left, max(0.5, seconds / 5)), 0.01), solutions[number]
        if better is not None and before is not None:
            bound = max(better.bound, before.bound)
            solutions[number] = replace(min(better, before, key=lambda solution: solution.cost), bound=bound)


def _share(solutions: list[Solution | None]) -> None:
    """What fits a smaller budget fits a larger one."""
    for number in range(1, len(solutions)):
        small, large = solutions[number - 1], solutions[number]
        if small is not None and large is not None and small.cost < large.cost:
            solutions[number] = replace(small, bound=large.bound)


def _gap(solution: Solution | None) -> float:
    """The cost between a solution and its bound, none if this is less than a hundredth of it."""
    if solution is None or 100 * (solution.cost - solution.bound) < solution.cost:
        return 0
    return solution.cost - solution.bound
