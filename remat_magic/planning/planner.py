"""A planning problem at one place of a traced function, and what its solutions are when JAX applies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from remat_magic import _jax
from remat_magic.engine.engine import Dissection
from remat_magic.engine.plan_values import find_again, occurrences
from remat_magic.facts.facts import Facts
from remat_magic.planning.alike import alike_values
from remat_magic.planning.answers import answered
from remat_magic.planning.graph import Graph, Grouped, build
from remat_magic.planning.hull import Hull
from remat_magic.planning.objective import Objective
from remat_magic.planning.solve import Problem, Solution
from remat_magic.policies import resolve
from remat_magic.records import FrontierPoint, Plan, PlannedValue, RematError, Report

__all__ = ["BUILT_IN", "Asked", "Planner", "best_of_groups", "of_report", "planner"]

BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
_BEYOND_NAMES = ("none", "everything_saveable")  # these keep what no name reaches, such as the cosine of a sine
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan was asked for: its key, what people call it, its budget, and what is to be least."""

    key: str
    label: str
    budget: int
    objective: Objective
    of: str = "saved"


@dataclass(frozen=True, slots=True, eq=False)
class Planner:
    """The graph of a function at a place; ``most`` bytes are saved there without a checkpoint.

    Where equal layers are decided together, ``group`` tells for each value's name that of its group, by which the graph
    and all choices go.
    """

    facts: Facts
    parts: Dissection
    graph: Graph
    separately: bool
    most: int
    group: Mapping[str, str] | None = None
    _problems: dict[Any, Problem] = field(default_factory=dict)
    _hulls: list[Hull] = field(default_factory=list)
    _bare: list[int] = field(default_factory=list)
    _every: dict[str, PlannedValue] = field(default_factory=dict)

    @property
    def at(self) -> str:
        """Where the policy is."""
        return self.parts.at

    @property
    def together(self) -> bool:
        """Whether equal layers are decided together, also those that share no body."""
        return self.group is not None

    def grouped(self, group: Mapping[str, str]) -> Planner:
        """A planner of whole groups: ``group`` tells that of each value that may be saved, by the value's name."""
        graph, every = Grouped.of(self.graph, group), self.every_value()
        return replace(self, graph=graph, group=group, _problems={}, _hulls=[], _every=every)

    def problem(self, objective: Objective | None = None) -> Problem:
        """The integer programme for what is to be least, FLOPs by default."""
        objective = objective or Objective()
        known = self._problems.get(objective.key)
        if known is None:
            costs = objective.costs(self.graph, self.parts.backward)
            alike = () if self.together else alike_values(self.every_value().values(), self.parts)
            known = Problem(self.graph, costs, alike)
            self._problems[objective.key] = known
        return known

    def hull(self, seconds: float) -> Hull:
        """The hull of all choices for FLOPs; when first asked for, so many seconds are spent on it."""
        if not self._hulls:
            made = Hull(self.problem())
            made.refine(None, seconds)
            self._hulls.append(made)
        return self._hulls[0]

    def point(self, budget: int, saved: int, flops: float, bound: float) -> FrontierPoint:
        """What choices of names come to within a budget, or autodiff without a checkpoint where that fits and is less.

        It may keep what no name reaches, such as the cosine of a sine.
        """
        if self.most <= budget:
            if not self._bare:
                self._bare.append(sum(each.flops or 0 for each in self.facts.recomputed("none", self.at)))
            if self._bare[0] < flops:
                saved, flops = self.most, self._bare[0]
        return FrontierPoint(budget, saved, int(flops), int(min(bound, flops)))

    def within(self, asked: Asked, limit: int, seconds: float, gap: float, *, names_only: bool = False) -> Plan | None:
        """The best plan that saves at most ``limit`` bytes, None where more is saved whatever is chosen.

        With ``names_only`` it is a choice of names even where a policy of JAX's costs less.
        """
        problem = self.problem(asked.objective)
        alike, others = self._built_in(limit, problem)
        found: Plan | None = None
        bound, spent, allowed = 0.0, 0.0, limit
        for attempt in range(_ATTEMPTS):
            solution = problem.solve(allowed, seconds, gap)
            if solution is None:
                break
            spent += solution.seconds
            bound = solution.bound if attempt == 0 else bound
            if attempt == 0:
                if not solution.proven and asked.objective.device is None:
                    hull = self.hull(0.5)
                    alike += filter(None, (hull.mixed(allowed), hull.between(allowed, 1.0)))
                # The solver stops within its gap: a policy of JAX's may be the better choice of names.
                solution = min(solution, *alike, key=lambda each: each.cost)
            applied = self.apply(asked, solution)
            if applied.saved_bytes <= limit:
                found = _told(applied, solution, bound, spent)
                break
            allowed -= applied.saved_bytes - limit  # JAX saves more than was reckoned: leave that much room
            if allowed < 0:
                break
        if found is not None and asked.objective.device is not None:
            # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
            fewest = self.problem().solve(limit, seconds, gap)
            other = None if fewest is None else self.apply(asked, fewest)
            if other is not None and other.saved_bytes <= limit and (other.seconds or 0) < (found.seconds or 0):
                cost = problem.measure(fewest.names)[1] if fewest is not None else 0.0
                found = _told(replace(other, predicted_seconds=cost), None, bound, spent)
        for key in () if names_only else others:
            found = self._better(key, asked, found, bound)
        return found

    def _built_in(self, limit: int, problem: Problem) -> tuple[list[Solution], list[str]]:
        """Those of JAX's own policies that stay within the limit: as choices of names, and keys of the others."""
        alike: list[Solution] = []
        others: list[str] = []
        for key in BUILT_IN:
            try:
                saved = self.facts.preview(key, self.at).saved_bytes
            except RematError:  # complex values, which this JAX cannot save
                continue
            if saved > limit:
                continue
            names, exact = self.names_of(key, saved)
            if exact:
                alike.append(Solution(names, saved, problem.measure(names)[1], 0, False, 0.0))
            if key in _BEYOND_NAMES or not exact:
                others.append(key)
        return alike, others

    def names_of(self, key: str, saved: int) -> tuple[frozenset[str], bool]:
        """The names of what a policy saves, and whether these take just the bytes that JAX then saves."""
        plain = callable(resolve(key).policy)
        own = answered(self.facts, self.parts, resolve(key)) if plain else frozenset[str]()
        names = self.graph.used(own if self.group is None else {self.group[name] for name in own & self.group.keys()})
        return names, plain and self.graph.predict(names)[0] == saved

    def keys_of(self, plan: Plan) -> frozenset[str]:
        """The names of a plan's values here, which a program that has changed since may give other numbers."""
        keys = frozenset(value.key for value in plan.names)
        if plan.fingerprint == self.parts.naming.fingerprint:
            return keys
        return frozenset(find_again(plan, self.parts.naming, self.parts.index)[0].values())

    def draft(self, key: str, budget: int, values: tuple[PlannedValue, ...], label: str = "") -> Plan:
        """A plan that saves some values, with no figures yet."""
        naming = self.parts.naming
        return Plan(
            self.facts.engine.function_name,
            self.at,
            key,
            budget,
            0,
            0,
            0,
            values,
            separately=self.separately,
            together=self.together,
            fingerprint=naming.fingerprint,
            label=label,
        )

    def apply(self, asked: Asked, solution: Solution) -> Plan:
        """The plan of a solution, with the figures of the report that JAX gives for it."""
        values = tuple(self.values(solution.names, solution.offloaded))
        draft = self.draft(asked.key, asked.budget, values, asked.label)
        report = self.facts.report(draft if values else "nothing_saveable", None if values else self.at)
        made = of_report(report, asked)
        figures = self.graph.figures(solution.names, solution.offloaded)
        made = replace(
            made,
            predicted_bytes=figures.saved_bytes,
            predicted_flops=figures.recomputed_flops,
            predicted_offloaded_bytes=figures.offloaded_bytes,
            predicted_seconds=None if asked.objective.device is None else solution.cost,
        )
        if not values:
            return made
        decided = {"separately": self.separately, "together": self.together}
        made = replace(made, names=values, fingerprint=draft.fingerprint, **decided)
        return replace(made, code=self._code(report, values))

    def values(self, names: Collection[str], offloaded: Collection[str] = ()) -> Iterator[PlannedValue]:
        """The values that names are given to, as far as they are read, in the order of the program."""
        sizes = self.graph.own_sizes(self.graph.used_gates(names))
        every = self.every_value()
        if self.group is not None:
            offloaded = {name for name, group in self.group.items() if group in offloaded}
        for value in self._values(sizes, offloaded):
            yield replace(value, number=every[value.key].number, alike=every[value.key].alike)

    def every_value(self) -> dict[str, PlannedValue]:
        """All values that could be saved, by name, each with its bytes where nothing else is saved."""
        if not self._every:
            values = [*self._values(self.graph.sizes(self.graph.gates), ())]
            alike = Counter(value.origin for value in values)
            before: Counter[Any] = Counter()
            for value in values:
                self._every[value.key] = replace(value, number=before[value.origin], alike=alike[value.origin])
                before[value.origin] += 1
        return self._every

    def _values(self, sizes: Mapping[str, tuple[int, int]], offloaded: Collection[str]) -> Iterator[PlannedValue]:
        named = self.parts.naming.values
        where = occurrences(self.parts.naming, self.parts.index) if sizes else {}
        for key in (name for name in named if name in sizes):
            made = named[key]
            eqn, output = made.eqn, made.output
            place = self.parts.index.place(eqn)
            yield PlannedValue(
                key,
                *sizes[key],
                _jax.type_text(made.aval),
                _jax.primitive_name(eqn) if output is not None else "",
                made.name,
                place.source if place else None,
                place.path if place else (),
                output,
                where[key].number,
                where[key].count,
                key in offloaded,
                place.library if place else None,
            )

    def _code(self, report: Report, values: tuple[PlannedValue, ...]) -> str:
        """What to paste if the program's own names do the same."""
        if any(value.name is None or value.offloaded for value in values):
            return ""
        own = sorted({value.name for value in values if value.name})
        same = self.facts.report(f"save_only_these_names({', '.join(map(repr, own))})", self.at)
        alike = (same.saved_bytes, same.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
        return same.code if alike else ""

    def _better(self, key: str, asked: Asked, found: Plan | None, bound: float) -> Plan | None:
        """The plan of a policy of JAX's, if it costs less than what was found."""
        least = None if found is None else (found.recomputed_flops if found.seconds is None else found.seconds)
        if least == 0:
            return found
        report = self.facts.report(key, self.at)
        if report.backward_error or (least is not None and asked.objective.of(report) >= least):
            return found
        what = "recomputes less" if asked.objective.device is None else "takes less time"
        text = f"{key} {what} within the budget than any choice of names that was found."
        spent = 0.0 if found is None else found.solve_seconds
        made = replace(of_report(report, asked), status=text, solve_seconds=spent)
        if made.seconds is None:
            return replace(made, bound=min(int(bound), report.recomputed_flops))
        return replace(made, bound_seconds=min(bound, made.seconds), predicted_seconds=made.seconds)


def planner(facts: Facts, at: Any, separately: bool, together: bool = False) -> Planner:
    """The planner for a place of a trace, made once.

    Raises:
        RematError: as ``trace.dissect``; equal layers cannot be decided both ``separately`` and ``together``.
    """
    if separately and together:
        raise RematError("equal layers are decided separately or together: give one of these, not both.")
    at = facts.engine.default_at if at is None else at
    key = (__name__, str(at), separately, together)
    known = facts.memo.get(key)
    if known is None and together:
        each = planner(facts, at, False)
        every = each.every_value()
        group = {name: names[0] for names in alike_values(every.values(), each.parts) for name in names}
        known = facts.memo[key] = each.grouped(group)
    if known is None:
        parts = facts.engine.dissect(at, separately)
        most = facts.preview("none", at).saved_bytes
        known = facts.memo[key] = Planner(facts, parts, build(parts), separately, most)
    return known


def best_of_groups(facts: Facts, plan: Plan, group: Mapping[str, str]) -> Plan | None:
    """The best plan within another's budget that saves each group of values as a whole or not at all.

    Args:
        facts: of the traced function.
        plan: the other plan.
        group: the group of each value that may be saved, by the value's name.

    Returns:
        The plan, or None where none saves anything.
    """
    asked = Asked(f"{plan.policy} in the source", f"{plan.label} in the source", plan.budget_bytes, Objective())
    planner_of_groups = planner(facts, plan.at, False).grouped(group)
    best = planner_of_groups.within(asked, plan.budget_bytes or plan.saved_bytes, 10.0, 0.01, names_only=True)
    return best if best is not None and best.names else None


def of_report(report: Report, asked: Asked) -> Plan:
    """A report as a plan, without its values and with nothing said of a bound."""
    objective = asked.objective
    return Plan(
        report.function,
        report.at,
        report.policy,
        asked.budget,
        report.saved_bytes,
        report.recomputed_flops,
        0,
        code=report.code,
        forward_flops=report.forward_flops,
        peak_bytes=report.peak_bytes,
        uncosted=report.uncosted,
        of=asked.of,
        cost=objective.cost,
        device="" if objective.device is None else objective.device.name,
        host_bandwidth=objective.link,
        offloaded_bytes=report.offloaded_bytes,
        seconds=None if objective.device is None else objective.of(report),
        label=report.label,
    )


def _told(applied: Plan, solution: Solution | None, bound: float, spent: float) -> Plan:
    """A plan with its bound, and a sentence on how sure it is."""
    if applied.cost == "seconds":
        found = replace(applied, bound_seconds=min(bound, applied.predicted_seconds or 0.0), solve_seconds=spent)
    else:
        found = replace(applied, bound=min(int(bound), applied.recomputed_flops), solve_seconds=spent)
    exact = (found.saved_bytes, found.offloaded_bytes, found.recomputed_flops) == (
        found.predicted_bytes,
        found.predicted_offloaded_bytes,
        found.predicted_flops,
    )
    departs = "" if exact else " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    if found.gap == 0:
        what = "takes less time, as reckoned" if found.cost == "seconds" else "recomputes less"
        same = " that is the same in equal layers" if found.together else ""
        return replace(found, status=f"No choice of names{same} within the budget {what}.{departs}")
    why = ", where the solver's time was up" if solution is not None and not solution.proven else ""
    what = "the time that is added, as reckoned," if found.cost == "seconds" else "what is recomputed"
    same = " by a choice that is the same in equal layers" if found.together else ""
    least = f"At most {max(found.gap, 0.0001):.2%} of {what} could be spared{same}"
    return replace(found, status=f"{least}{why}.{departs}")
