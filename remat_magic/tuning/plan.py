"""Plans: the least recomputation within a budget of saved bytes, and the frontier of all budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _compat
from remat_magic.analysis.bodies import type_text
from remat_magic.analysis.positions import positions
from remat_magic.analysis.trace import Dissection
from remat_magic.model import FrontierPoint, Plan, PlannedValue, RematError, Report
from remat_magic.policies import resolve
from remat_magic.tuning.graph import build
from remat_magic.tuning.sizes import parse_bytes
from remat_magic.tuning.solve import Problem, Solution

__all__ = ["frontier", "plan"]

_BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
_BEYOND_NAMES = ("none", "everything_saveable")  # these keep what no name reaches, such as the cosine of a sine
_ATTEMPTS = 4


def plan(
    trace: Any,
    budget: int | float | str,
    at: str | None = None,
    *,
    separately: bool = False,
    seconds: float = 10.0,
    gap: float = 0.01,
) -> Plan:
    """What to save within a budget so that the fewest FLOPs are recomputed.

    Every intermediate gets a checkpoint name, and an integer programme chooses among them. The choice is then applied
    and traced, so that what the plan says of it is what JAX does; where one of JAX's own policies fits the budget and
    recomputes less (it can keep what no name reaches, such as the cosine of a sine), the plan is that policy.

    Args:
        trace: what ``remat_magic.trace`` gave.
        budget: of saved bytes: a number, a text like ``"2 GiB"``, or as a float from 0 to 1 the fraction of what is
            saved without a checkpoint there.
        at: one place or all sites, as for ``trace.report``.
        separately: decide equal layers that share one body (the calls of one checkpointed or jitted function) one by
            one, not together; slower.
        seconds: the time limit of the solver.
        gap: how far from the best, relatively, the solver may stop.

    Raises:
        RematError: the budget is no size, or less is never saved at this place; no such site; no backward half.
    """
    planner = _planner(trace, at, separately)
    limit = _budget(budget, planner.most)
    alike, others = planner.built_in(trace, limit)
    found, bound, spent = None, 0, 0.0
    allowed = limit
    for attempt in range(_ATTEMPTS):
        solution = planner.problem.solve(allowed, seconds, gap)
        if solution is None:
            break
        spent += solution.seconds
        bound = solution.bound if attempt == 0 else bound
        # The solver stops within its gap: a policy of JAX's may be the better choice of names.
        solution = min(solution, *alike, key=lambda each: each.recomputed_flops) if attempt == 0 else solution
        applied = planner.apply(trace, solution, limit)
        if applied.saved_bytes <= limit:
            found = replace(applied, bound=min(bound, applied.recomputed_flops), solve_seconds=spent)
            found = replace(found, status=_status(found, solution))
            break
        allowed -= applied.saved_bytes - limit  # JAX saves more than was reckoned: leave that much room
        if allowed < 0:
            break
    for key in others:
        found = _better(trace, key, planner.at, found, limit, bound)
    if found is None:
        least = trace.preview("nothing_saveable", planner.at).saved_bytes
        raise RematError(
            f"{limit:,} bytes are too few: nothing_saveable at {planner.at!r} keeps {least:,} bytes of "
            f"{trace.function_name} already; raise the budget, or plan for at='function'."
        )
    return found


def frontier(
    trace: Any, points: int = 20, at: Any = None, *, separately: bool = False, seconds: float = 1.0
) -> tuple[FrontierPoint, ...]:
    """The least recomputation for evenly spaced budgets, from the least to all that is saved without a checkpoint.

    Each budget costs one linear programme, whose few undecided values are tried out; what time is left goes into
    integer programmes where the distance from the bound is largest. The figures are reckoned, not traced.

    Args:
        trace: what ``remat_magic.trace`` gave.
        points: how many budgets.
        at: as for ``plan``.
        separately: as for ``plan``.
        seconds: how long to go on improving.

    Raises:
        RematError: as ``plan``; fewer than two points.
    """
    if points < 2:
        raise RematError(f"a frontier has two points or more, not {points}.")
    planner = _planner(trace, at, separately)
    least, _ = planner.problem.graph.predict(())
    most = max(planner.most, least)
    budgets = [least + (most - least) * i // (points - 1) for i in range(points)]
    found = planner.problem.sweep(budgets, seconds)
    return tuple(
        FrontierPoint(
            budget, solution.saved_bytes, solution.recomputed_flops, min(solution.bound, solution.recomputed_flops)
        )
        for budget, solution in zip(budgets, found, strict=True)
        if solution is not None
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """A problem with what is needed to tell and to apply its solutions; ``most`` is saved without a checkpoint."""

    parts: Dissection
    problem: Problem
    separately: bool
    most: int

    @property
    def at(self) -> str:
        """Where the policy is."""
        return self.parts.at

    def built_in(self, trace: Any, limit: int) -> tuple[list[Solution], list[str]]:
        """Those of JAX's own policies that stay within the limit: as choices of names, and keys of the others.

        A policy is a choice of names if these take just the bytes that JAX then saves.
        """
        alike: list[Solution] = []
        others: list[str] = []
        graph = self.problem.graph
        for key in _BUILT_IN:
            try:
                saved = trace.preview(key, self.at).saved_bytes
            except RematError:  # complex values, which this JAX cannot save
                continue
            if saved > limit:
                continue
            policy = resolve(key).policy
            names = graph.used(frozenset(self._answered(policy)) if callable(policy) else frozenset())
            reckoned, flops = graph.predict(names)
            if callable(policy) and reckoned == saved:
                alike.append(Solution(names, saved, flops, 0, False, 0.0))
            if key in _BEYOND_NAMES or not callable(policy) or reckoned != saved:
                others.append(key)
        return alike, others

    def _answered(self, policy: Any) -> Iterator[str]:
        """The names of the values that a policy saves when it is asked about the operations that make them."""
        for name, value in self.parts.naming.values.items():
            if value.output is not None:
                types = [atom.aval for atom in value.eqn.invars]
                if policy(value.eqn.primitive, *types, **value.eqn.params) is True:
                    yield name

    def apply(self, trace: Any, solution: Solution, budget: int) -> Plan:
        """The plan of a solution, with the figures of the report that JAX gives for it."""
        values = tuple(self._values(solution))
        if not values:
            report = trace.report("nothing_saveable", self.at)
            return self._filled(_of_report(report, budget, report.policy, 0), solution)
        draft = Plan(
            trace.function_name,
            self.at,
            f"plan({budget})",
            budget,
            0,
            0,
            0,
            values,
            separately=self.separately,
            fingerprint=self.parts.naming.fingerprint,
        )
        report = trace.report(draft)
        made = replace(
            _of_report(report, budget, draft.policy, 0),
            names=values,
            separately=self.separately,
            fingerprint=draft.fingerprint,
        )
        return self._filled(replace(made, code=self._code(trace, report, values)), solution)

    def _filled(self, made: Plan, solution: Solution) -> Plan:
        return replace(made, predicted_bytes=solution.saved_bytes, predicted_flops=solution.recomputed_flops)

    def _values(self, solution: Solution) -> Iterator[PlannedValue]:
        graph, names = self.problem.graph, self.parts.naming.values
        sizes = graph.sizes(graph.used_gates(solution.names))
        where = positions(self.parts.naming, self.parts.index) if sizes else {}
        for key in (name for name in names if name in sizes):
            made = names[key]
            eqn, output = made.eqn, made.output
            place = self.parts.index.place(eqn)
            yield PlannedValue(
                key,
                *sizes[key],
                type_text(made.aval),
                _compat.primitive_name(eqn) if output is not None else "",
                made.name,
                place.source if place else None,
                place.path if place else (),
                output,
                where[key].occurrence,
                where[key].occurrences,
            )

    def _code(self, trace: Any, report: Report, values: tuple[PlannedValue, ...]) -> str:
        """What to paste if the program's own names do the same."""
        own = sorted({value.name for value in values if value.name})
        if any(value.name is None for value in values):
            return ""
        same = trace.report(f"save_only_these_names({', '.join(map(repr, own))})", self.at)
        alike = (same.saved_bytes, same.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
        return same.code if alike else ""


def _planner(trace: Any, at: Any, separately: bool) -> _Planner:
    at = trace.default_at if at is None else at
    key = (__name__, str(at), separately)
    known = trace.memo.get(key)
    if known is None:
        parts = trace.dissect(at, separately)
        most = trace.preview("none", at).saved_bytes
        known = trace.memo[key] = _Planner(parts, Problem(build(parts)), separately, most)
    return known


def _budget(budget: int | float | str, most: int) -> int:
    if isinstance(budget, float) and 0.0 <= budget <= 1.0:
        return int(budget * most)
    return parse_bytes(budget, "budget")


def _of_report(report: Report, budget: int, policy: str, bound: int) -> Plan:
    return Plan(
        report.function,
        report.at,
        policy,
        budget,
        report.saved_bytes,
        report.recomputed_flops,
        bound,
        code=report.code,
        forward_flops=report.forward_flops,
        peak_bytes=report.peak_bytes,
        uncosted=report.uncosted,
    )


def _better(trace: Any, key: str, at: str, found: Plan | None, limit: int, bound: int) -> Plan | None:
    """The plan of a policy of JAX's, if it recomputes less than what was found."""
    fewest = None if found is None else found.recomputed_flops
    if fewest == 0:
        return found
    report = trace.report(key, at)
    if report.backward_error or (fewest is not None and report.recomputed_flops >= fewest):
        return found
    made = _of_report(report, limit, report.policy, min(bound, report.recomputed_flops))
    text = f"{key} recomputes less within the budget than any choice of names that was found."
    return replace(made, status=text, solve_seconds=0.0 if found is None else found.solve_seconds)


def _status(found: Plan, solution: Solution) -> str:
    exact = (found.saved_bytes, found.recomputed_flops) == (solution.saved_bytes, solution.recomputed_flops)
    departs = "" if exact else " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    if found.gap == 0:
        return f"No choice of names within the budget recomputes less.{departs}"
    why = "" if solution.proven else ", where the solver's time was up"
    return f"At most {max(found.gap, 0.0001):.2%} of what is recomputed could be spared{why}.{departs}"
