"""The graph that plans are made on, and what one policy keeps of its values: the ground for advice on single values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from remat_magic import devices
from remat_magic.facts.facts import Facts
from remat_magic.planning.planner import Objective, Planner, offloaded_by, saved_by
from remat_magic.planning.planner import planner as planner_at
from remat_magic.planning.problem import Costs
from remat_magic.planning.reckoned import Outcome, Outcomes
from remat_magic.policies import resolve
from remat_magic.records import PlannedValue, RematError, Report, SourceSpan

__all__ = ["Ground", "Group", "ground"]


@dataclass(frozen=True, slots=True)
class Group:
    """Values that the user can only decide on together: of one checkpoint name, or of one expression.

    ``keys`` are their names in the graph, ``first`` is one of them; ``nbytes`` is what all ``times`` take.
    """

    keys: tuple[str, ...]
    first: PlannedValue
    nbytes: int
    times: int

    @property
    def name(self) -> str | None:
        """The checkpoint name that the program itself gives them."""
        return self.first.name

    @property
    def text(self) -> str:
        """What to call them: the name, or the expression."""
        source = self.first.source
        return repr(self.name) if self.name else f"`{source.expression}`" if source else self.first.primitive


class Ground:
    """What a policy keeps (``kept``) and offloads (``moved``) of the values of the graph, by their names there.

    Args:
        planner: the planner for the place.
        report: what JAX does under the policy.
        kept: the values that the policy saves.
        moved: those that it offloads.
    """

    def __init__(self, planner: Planner, report: Report, kept: frozenset[str], moved: frozenset[str]) -> None:
        self.planner, self.report, self.kept, self.moved = planner, report, kept, moved
        self._costs: dict[str, Costs] = {}
        self.outcomes = Outcomes(planner.graph, kept | moved, None)

    @cached_property
    def exact(self) -> bool:
        """Whether the graph has the figures of JAX's report, so that what it says of changes holds for the policy."""
        figures = self.planner.graph.figures(self.kept | self.moved, self.moved)
        report = self.report
        return figures == (report.saved_bytes, report.recomputed_flops, report.offloaded_bytes)

    def values(self, keys: Collection[str]) -> list[PlannedValue]:
        """The values with some names, in the order of the program."""
        return [value for key, value in self.planner.every_value().items() if key in keys]

    def by_name_or_line(self, keys: Collection[str]) -> list[Group]:
        """Values grouped by their checkpoint name, or by the expression that makes them; the others are left out."""
        groups: dict[Any, list[PlannedValue]] = {}
        for value in self.values(keys):
            if value.name or value.source:
                groups.setdefault(value.name or value.source, []).append(value)
        return [_group(values) for values in groups.values()]

    def nameable(self, keys: Collection[str]) -> list[Group]:
        """Values grouped as the user can name them: what has a name, and what is the value of an expression.

        An expression can make several values, as a call of a library's function does; its own is the one made last.
        """
        every = self.planner.every_value().values()
        counts: dict[SourceSpan, Counter[tuple[str, int | None]]] = {}
        last: dict[SourceSpan, tuple[str, int | None]] = {}
        for value in every:
            if value.source and value.output is not None:
                counts.setdefault(value.source, Counter())[value.primitive, value.output] += 1
                last[value.source] = value.primitive, value.output
        groups: dict[Any, list[PlannedValue]] = {}
        for value in self.values(keys):
            if value.name:
                groups.setdefault(value.name, []).append(value)
            elif value.source and last.get(value.source) == (value.primitive, value.output):
                groups.setdefault(value.source, []).append(value)
        return [
            _group(values)
            for where, values in groups.items()
            # As often as what is made least often there, or one run of the expression makes several such values.
            if isinstance(where, str) or counts[where][last[where]] == min(counts[where].values())
        ]

    def change(self, groups: Iterable[Group]) -> Outcome:
        """What it comes to if all values of some groups are decided the other way."""
        return self.outcomes.toggled(*(key for group in groups for key in group.keys))

    def seconds(self, groups: Iterable[Group], device: devices.Device) -> float:
        """The estimated time that recomputing takes longer, or less long, if these are decided the other way."""
        chosen = self.kept | self.moved
        keys = frozenset(key for group in groups for key in group.keys)
        return self._recomputing(chosen ^ keys, device) - self._recomputing(chosen, device)

    def _recomputing(self, chosen: Collection[str], device: devices.Device) -> float:
        costs = self._costs.get(device.name)
        if costs is None:
            costs = self._costs[device.name] = Objective(device).costs(self.planner.graph, self.planner.parts.backward)
        return sum(costs.nodes[node] for node in self.planner.graph.running(chosen))


def _group(values: list[PlannedValue]) -> Group:
    keys = tuple(value.key for value in values)
    return Group(keys, values[0], sum(value.nbytes for value in values), sum(value.times for value in values))


def ground(facts: Facts, report: Report, policy: Any, namespace: Mapping[str, Any] | None) -> Ground | None:
    """The ground for a policy, None where there is none: a graph cannot be made, or a policy does not answer.

    Args:
        facts: of the traced function.
        report: of the policy.
        policy: as for ``trace.report``, no plan.
        namespace: of the policy's identifiers.
    """
    try:
        place = planner_at(facts, report.at, False)
        resolved = resolve(policy, facts.engine.names, namespace, facts.engine.function_name)
        kept = saved_by(facts, place.parts, resolved)
        moved = offloaded_by(facts, place.parts, resolved)
    except RematError:
        return None
    keys = place.every_value().keys()
    return Ground(place, report, kept & keys, moved & keys)
