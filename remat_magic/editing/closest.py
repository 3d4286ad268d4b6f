"""The best choice among what the source can name.

A plan chooses among all values of a program, and many of these have no expression: they are made inside a library's
function, or one expression makes the values of all layers. Here values that one place of the source names are chosen
together, and those that none names cannot be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_magic.editing.choice import Place
from remat_magic.editing.values import Skeleton, Value
from remat_magic.facts.facts import Facts
from remat_magic.planning.graph import Grouped
from remat_magic.planning.planner import planner
from remat_magic.planning.solve import Problem
from remat_magic.records import Plan, PlannedValue, Report

__all__ = ["closest", "grouped"]

_ATTEMPTS = 4


def grouped(program: Skeleton, keys: Iterable[str], offered: Sequence[Place]) -> dict[str, int]:
    """For each value that a place of the source names the number of that place among ``offered``.

    A place that names few values is preferred, and no two name one value.

    Args:
        program: the program with all its values named.
        keys: these names, in the order of the program.
        offered: the places.
    """
    best: dict[Value, str] = {}
    for key in keys:
        for value in program.names.get(key, {}):
            known = best.get(value)
            if known is None or len(program.names[key]) <= len(program.names[known]):
                best[value] = key
    assigned: dict[str, int] = {}
    sizes = [sum(place.values.values()) for place in offered]
    for number in sorted(range(len(offered)), key=lambda each: (sizes[each], offered[each].rank)):
        asked = {value for value, yes in offered[number].values.items() if yes}
        mine = {best[value] for value in asked if value in best}
        if (
            asked
            and asked <= best.keys()
            and mine.isdisjoint(assigned)
            and all(program.names[key].keys() <= asked for key in mine)
        ):
            assigned.update(dict.fromkeys(mine, number))
    return assigned


def closest(facts: Facts, plan: Plan, assigned: Mapping[str, int]) -> tuple[Plan, list[int]] | None:
    """The plan of places within a plan's budget that recomputes least, and these places; None where there is none.

    Args:
        facts: of the traced function.
        plan: the plan.
        assigned: what ``grouped`` gave.
    """
    found = planner(facts, plan.at, False)
    parts, whole = found.parts, found.graph
    graph = Grouped.of(whole, {key: str(number) for key, number in assigned.items()})
    problem = Problem(graph)
    limit = allowed = plan.budget_bytes or plan.saved_bytes
    for _ in range(_ATTEMPTS):
        solution = problem.solve(allowed, 10.0, 0.01)
        if solution is None:
            return None
        chosen = graph.used(solution.names)
        if not chosen:
            return None
        keys = [key for key in parts.naming.values if str(assigned.get(key)) in chosen]
        report: Report = facts.report(_draft(facts, plan, keys, parts, None))
        if report.saved_bytes <= limit:
            return _draft(facts, plan, keys, parts, report), sorted({assigned[key] for key in keys})
        allowed -= report.saved_bytes - limit
        if allowed < 0:
            return None
    return None


def _draft(facts: Facts, plan: Plan, keys: Sequence[str], parts: Any, report: Report | None) -> Plan:
    return Plan(
        facts.engine.function_name,
        parts.at,
        f"{plan.policy} in the source",
        plan.budget_bytes,
        report.saved_bytes if report else 0,
        report.recomputed_flops if report else 0,
        0,
        tuple(PlannedValue(key, 0, name=parts.naming.values[key].name) for key in keys),
        fingerprint=parts.naming.fingerprint,
    )
