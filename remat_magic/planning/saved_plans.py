"""The least recomputation within a budget of saved bytes.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from remat_magic.planning.choices import BUILT_IN
from remat_magic.planning.plan_records import Request, of_report, order, with_bound
from remat_magic.planning.planner import Planner
from remat_magic.planning.problem import Problem, Solution
from remat_magic.records import Plan, PlannedValue, RematError, Report

__all__ = ["BEYOND_NAMES", "within_saved"]

BEYOND_NAMES = ("none", "everything_saveable")  # these keep what no name reaches
_ATTEMPTS = 4
_TRIED = 4  # names, whose subsets are tried where a policy reaches further by them


def within_saved(
    choices: Planner,
    request: Request,
    limit: int,
    seconds: float,
    gap: float,
    *,
    names_only: bool = False,
    policies: Sequence[str] = BUILT_IN,
    worth: Callable[[Solution], bool] = lambda solution: True,
) -> Plan | None:
    """The best plan that saves at most ``limit`` bytes, None where more is saved whatever is chosen.

    With ``names_only`` it is a choice of names even where a policy of JAX's costs less; the ``policies`` are those that
    are looked at. What is not ``worth`` it is not traced, and None is returned.
    """
    problem = choices.problem(request.objective)
    as_names, other_keys = _built_in(choices, limit, problem, policies)
    best: Plan | None = None
    bound, spent, allowed = 0.0, 0.0, limit
    for attempt in range(_ATTEMPTS):
        solution = problem.solve(allowed, seconds, gap)
        if solution is None:
            break
        spent += solution.seconds
        bound = solution.bound if attempt == 0 else bound
        if attempt == 0:
            if not solution.proven and request.objective.device is None:
                mixed = choices.hull(0.5).mixed(allowed)
                as_names += [mixed] if mixed is not None else []
            # The solver stops within its gap: a policy of JAX's may be the better choice of names.
            solution = min([solution, *as_names], key=lambda choice: choice.cost)
        if not worth(solution):
            return None
        applied = _applied(choices, request, solution)
        if applied.saved_bytes <= limit:
            best = with_bound(applied, solution, bound, spent)
            break
        if not solution.names:
            break
        # JAX saves more than was predicted: leave that much room.
        allowed = max(allowed - (applied.saved_bytes - limit), choices.graph.predict(())[0])
    if best is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest = choices.problem().solve(limit, seconds, gap)
        other = None if fewest is None else _applied(choices, request, fewest)
        if other is not None and other.saved_bytes <= limit and (other.seconds or 0) < (best.seconds or 0):
            cost = problem.measure(fewest.names)[1] if fewest is not None else 0.0
            best = with_bound(replace(other, predicted_seconds=cost), None, bound, spent)
    for key in () if names_only else other_keys:
        best = _better(choices, key, request, best, bound)
    return best


def _built_in(
    choices: Planner, limit: int, problem: Problem, policies: Sequence[str]
) -> tuple[list[Solution], list[str]]:
    """Those of JAX's own policies that stay within the limit: as choices of names, and keys of the others."""
    as_names: list[Solution] = []
    others: list[str] = []
    own_names = _own_names(choices)
    for key in (*policies, *own_names):
        try:
            saved = choices.facts.saved_bytes(key, choices.at)
        except RematError:  # complex values, which this JAX cannot save
            continue
        if saved > limit:
            continue
        if key in own_names:
            others.append(key)
            continue
        names = choices.saved_by(key)
        exact = names is not None and choices.graph.predict(names)[0] == saved
        if names is not None and exact:
            as_names.append(Solution(names, saved, problem.measure(names)[1], 0, False, 0.0))
        if key in BEYOND_NAMES or not exact:
            others.append(key)
    return as_names, others


def _own_names(choices: Planner) -> list[str]:
    """The policies that save some of the program's own names, where these reach what a plan's names do not.

    Inside the branches of a conditional JAX keeps a value by its name. Of many names only the hidden ones are tried.
    """
    naming, names = choices.parts.naming, choices.facts.engine.names
    if not naming.unreached or choices.facts.engine.remat3:
        return []
    if len(names) > _TRIED:
        reached = {value.name for value in naming.values.values()}
        names = [name for name in names if name not in reached][:_TRIED]
    subsets = (subset for count in range(1, len(names) + 1) for subset in itertools.combinations(names, count))
    return [f"save_only_these_names({', '.join(map(repr, subset))})" for subset in subsets]


def _applied(choices: Planner, request: Request, solution: Solution) -> Plan:
    """The plan of a solution, with the figures of the report that JAX gives for it."""
    values = tuple(choices.values(solution.names, solution.offloaded))
    draft = choices.draft(request.key, request.budget, values, request.label)
    report = choices.facts.report(draft if values else "nothing_saveable", None if values else choices.at)
    figures = choices.graph.figures(solution.names, solution.offloaded)
    applied = replace(
        of_report(report, request),
        predicted_bytes=figures.saved_bytes,
        predicted_flops=figures.recomputed_flops,
        predicted_offloaded_bytes=figures.offloaded_bytes,
        predicted_seconds=None if request.objective.device is None else solution.cost,
    )
    if not values:
        return applied
    return replace(
        applied,
        names=values,
        fingerprint=draft.fingerprint,
        separately=draft.separately,
        together=draft.together,
        code=_code(choices, report, values),
    )


def _code(choices: Planner, report: Report, values: tuple[PlannedValue, ...]) -> str:
    """What to paste if the program's own names do the same."""
    if any(value.name is None or value.offloaded for value in values):
        return ""
    own = sorted({value.name for value in values if value.name})
    named = choices.facts.report(f"save_only_these_names({', '.join(map(repr, own))})", choices.at)
    same = (named.saved_bytes, named.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
    return named.code if same else ""


def _better(choices: Planner, key: str, request: Request, best: Plan | None, bound: float) -> Plan | None:
    """The plan of a policy of JAX's, if it costs less than the best so far."""
    least = None if best is None else order(best)[0]
    if least == 0:
        return best
    report = choices.facts.report(key, choices.at)
    if report.backward_error or (least is not None and request.objective.of(report) >= least):
        return best
    gain = "recomputes less" if request.objective.device is None else "takes less time"
    text = f"{key} {gain} within the budget than any choice of names that was found."
    spent = 0.0 if best is None else best.solve_seconds
    better = replace(of_report(report, request), status=text, solve_seconds=spent)
    if better.seconds is None:
        return replace(better, bound=min(int(bound), report.recomputed_flops))
    return replace(better, bound_seconds=min(bound, better.seconds))
