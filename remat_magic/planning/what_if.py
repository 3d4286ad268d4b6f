"""What if: for each value that a policy saves, or does not, what the other choice would change, by itself.

It is reckoned on the graph that plans are made on, without a trace of each choice.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from remat_magic import devices
from remat_magic.facts.facts import Facts
from remat_magic.planning.graph import Graph
from remat_magic.planning.planner import Objective, Planner, planner, saved_by
from remat_magic.policies import resolve
from remat_magic.records import Listed, Plan, PlannedValue, RematError, Report, WhatIf

__all__ = ["Outcome", "Outcomes", "what_if"]

_Policy = str | Plan | Callable[..., Any]


def what_if(
    facts: Facts,
    policy: _Policy = "as_written",
    at: str | None = None,
    *,
    device: str | devices.Device | None = None,
    by: str = "flops",
    namespace: Mapping[str, Any] | None = None,
) -> Listed[WhatIf]:
    """``Trace.what_if``, worked out on the graph that plans are made on, all in one go."""
    if by not in ("flops", "seconds"):
        raise RematError(f"by={by!r} is nothing to rank by: choose 'flops' or 'seconds'.")
    chosen = devices.default() if device is None else devices.get(device)
    if by == "seconds" and chosen is None:
        raise RematError("The device that JAX runs on is not known here: name one by device=, or register it.")
    facts = facts if device is None else facts.on(chosen)
    if isinstance(policy, Plan):
        at = policy.at
    choices = planner(facts, at)
    report = facts.report(policy, choices.at if not isinstance(policy, Plan) else None, namespace)
    if report.backward_error:
        raise RematError(report.backward_error)
    names = _names_saved(choices, policy, namespace)
    objective = Objective(chosen)
    costs = None if chosen is None else objective.costs(choices.graph, choices.parts.backward).nodes
    outcomes = Outcomes(choices.graph, names, costs)
    base = outcomes.base
    rows = _Rows(choices, outcomes, report)
    against = policy if isinstance(policy, Plan) else report.policy
    own = not (isinstance(policy, Plan) or _is_key(facts, report.policy))
    nearest, same = report, _figures(base) == _figures(report)
    if not same or own:
        # What the policy keeps no choice of names does, or only its object stands for it: start from the nearest.
        by_value = rows.plan(base, ", by value", ", by value") if base.used else "nothing_saveable"
        nearest = facts.report(by_value, None if isinstance(by_value, Plan) else choices.at)
        if _figures(nearest) != _figures(base):
            raise RematError(
                f"JAX saves or recomputes otherwise at {choices.at!r} than is reckoned for {report.policy}, so that "
                "the effect of single values is not known: choose at='sites', or one site."
            )
        against = by_value if own and same else against
    # What is told is of the report that is shown, which the nearest choice of names may differ from by itself.
    aside = objective.of(nearest) - objective.of(report) if chosen is not None else 0.0
    changes = [rows.row(name, chosen, against, aside) for name in rows.names]
    return Listed(sorted((row for row in changes if not row.loses), key=lambda row: _rank(row, by)))


def _figures(of: Outcome | Report) -> tuple[int, int]:
    return of.saved_bytes, of.recomputed_flops


def _rank(row: WhatIf, by: str) -> tuple[int, float, int, str]:
    worth = row.flops_per_byte if by == "flops" or row.seconds_per_byte is None else row.seconds_per_byte
    if row.change == "save":
        return 0, -worth, -abs(row.saved_bytes), row.value.key
    return 1, worth, -abs(row.saved_bytes), row.value.key


def _names_saved(
    choices: Planner, policy: str | Plan | Callable[..., Any], namespace: Mapping[str, Any] | None
) -> frozenset[str]:
    """The names of the values that a policy, or a plan, saves at the planner's place."""
    if isinstance(policy, Plan) and policy.names:
        return frozenset(value.key for value in policy.names)
    if isinstance(policy, Plan):
        policy = policy.policy
    facts = choices.facts
    resolved = resolve(policy, facts.engine.names, namespace, facts.engine.function_name)
    return saved_by(facts, choices.parts, resolved)


def _is_key(facts: Facts, key: str) -> bool:
    """Whether a policy's key says by itself which it is, and not by a name in the user's program."""
    try:
        resolve(key, facts.engine.names, None, facts.engine.function_name)
    except RematError:
        return False
    return True


class _Rows:
    """What is changed, and the plans that do it, beside the choice that they differ from."""

    def __init__(self, choices: Planner, outcomes: Outcomes, report: Report) -> None:
        self._choices, self._outcomes, self._report = choices, outcomes, report
        self._saved, self._again = report.saved_bytes, report.recomputed_flops  # sums over all that it tells of
        self._order = {name: i for i, name in enumerate(choices.parts.naming.values)}
        self._values = choices.every_value()
        self._used = sorted(outcomes.base.used, key=self._order.__getitem__)
        self._kept = [self._values[name] for name in self._used]

    @property
    def names(self) -> list[str]:
        """What can go the other way: the names whose values are saved, then those of what is computed again."""
        recomputed = sorted(self._outcomes.recomputed, key=self._order.__getitem__)
        return [*self._used, *recomputed]

    def row(self, name: str, device: devices.Device | None, against: str | Plan, aside: float) -> WhatIf:
        """What it changes in the report to decide a name the other way, with ``aside`` seconds besides."""
        base, after, value = self._outcomes.base, self._outcomes.toggled(name), self._values[name]
        saving = name not in self._outcomes.chosen
        sign = "+" if saving else "-"
        where = f" {value.source.place}" if value.source else ""
        return WhatIf(
            "save" if saving else "recompute",
            value,
            after.saved_bytes - self._saved,
            after.recomputed_flops - self._again,
            None if device is None else after.seconds - base.seconds + aside,
            "" if device is None else device.name,
            # Values of one line read alike: only their names tell plans apart.
            self.plan(after, f" {sign} {name}", f" {sign} {value.name or value.primitive or 'carry'}{where}"),
            against,
        )

    def plan(self, outcome: Outcome, key: str, label: str) -> Plan:
        """The plan of a choice, with what is reckoned of it for its figures; what it is called begins as the report."""
        used = self._outcomes.base.used
        values: list[PlannedValue] = self._kept
        if outcome.used != used:
            gone, new = used - outcome.used, outcome.used - used
            values = [value for value in values if value.key not in gone] if gone else list(values)
            for name in new:
                where = bisect.bisect(values, self._order[name], key=lambda value: self._order[value.key])
                values.insert(where, self._values[name])
        key, label = f"{self._report.policy}{key}", f"{self._report.label}{label}"
        draft = self._choices.draft(key, outcome.saved_bytes, tuple(values), label)
        if not values:
            draft = replace(draft, policy="nothing_saveable", label="", fingerprint="")
        return replace(
            draft,
            saved_bytes=outcome.saved_bytes,
            recomputed_flops=outcome.recomputed_flops,
            predicted_bytes=outcome.saved_bytes,
            predicted_flops=outcome.recomputed_flops,
            status="What one value changes, as reckoned.",
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a choice comes to, and the names in it whose saved values are read."""

    saved_bytes: int
    recomputed_flops: int
    seconds: float
    used: frozenset[str]


class Outcomes:
    """A choice of names, and what it is when one name is taken out of it or put into it.

    ``base`` is what the choice itself comes to, ``recomputed`` the names of the values that are computed again under it
    and could be saved.

    Args:
        graph: the graph.
        chosen: the names.
        seconds: of each node, or None.
    """

    def __init__(self, graph: Graph, chosen: Collection[str], seconds: Sequence[float] | None) -> None:
        count = len(graph.flops)
        leaves = {leaf: count + i for i, leaf in enumerate(graph.leaf_bytes)}
        self._source = count + len(leaves)
        rows: list[Sequence[int]] = [
            (*graph.reads[n], *(leaves[leaf] for leaf in graph.leaves[n])) for n in range(count)
        ]
        rows += [()] * len(leaves)
        rows.append([n for n in range(count) if graph.needed[n]])
        starts = np.cumsum([0, *map(len, rows)])
        columns = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(starts[-1]))
        self._rows, self._starts = columns.copy(), starts
        self._matrix = csr_array((np.ones(len(columns)), columns, starts), shape=(len(rows), len(rows)))
        self._flops = np.array([*graph.flops, *[0] * (len(leaves) + 1)], np.int64)
        # In whole picoseconds: what changes nothing is to differ by nothing, in whatever order it is summed.
        in_seconds = np.array([*(seconds or [0.0] * count), *[0.0] * (len(leaves) + 1)])
        self._picoseconds = np.rint(in_seconds * 1e12).astype(np.int64)
        self._leaf = np.array([*[0] * count, *graph.leaf_bytes.values(), 0], np.int64)
        self._names = list(dict.fromkeys(name for name, _, _ in graph.gates.values()))
        number = {name: i for i, name in enumerate(self._names)}
        self._name = np.full(len(rows), -1)
        self._passed = np.zeros(len(rows))
        self._bytes = np.zeros(len(self._names), np.int64)
        self._copies = np.zeros(len(self._names), np.int64)
        self._gates: dict[str, list[int]] = {}
        for gate, (name, size, passed) in graph.gates.items():
            self._gates.setdefault(name, []).append(gate)
            self._name[gate], self._passed[gate] = number[name], passed
            self._bytes[number[name]], self._copies[number[name]] = size, graph.copies.get(name, passed)
        self._closed = np.zeros(len(rows), bool)
        self.chosen = frozenset(chosen)
        for name in self.chosen & self._gates.keys():
            self._set(name, True)
        reached = self._reached()
        # Other outcomes differ from the choice itself by few names of thousands.
        self._base_used, self._used_in_base = frozenset[str](), np.zeros(len(self._names), bool)
        self.base = self._outcome(reached)
        self._base_used = self.base.used
        self._used_in_base = np.array([name in self._base_used for name in self._names], bool)
        passing = self._name[reached[~self._closed[reached]]]
        self.recomputed = frozenset(self._names[i] for i in np.unique(passing[passing >= 0]))

    def _set(self, name: str, closed: bool) -> None:
        """Let nothing through the gates of a name, or all: a gate that is closed leads to itself alone."""
        indices: Any = self._matrix.indices
        for gate in self._gates[name]:
            row = slice(self._starts[gate], self._starts[gate + 1])
            indices[row] = gate if closed else self._rows[row]
            self._closed[gate] = closed

    def _reached(self) -> Any:
        """What runs, and the gates where it reads saved values."""
        return breadth_first_order(self._matrix, self._source, return_predecessors=False)

    def _outcome(self, reached: Any) -> Outcome:
        closed = self._closed[reached]
        gates, again = reached[closed], reached[~closed]
        times = np.bincount(self._name[gates], self._passed[gates], len(self._names)).astype(np.int64)
        saved = int((np.minimum(times, self._copies) * self._bytes).sum() + self._leaf[reached].sum())
        flops, seconds = int(self._flops[again].sum()), int(self._picoseconds[again].sum()) * 1e-12
        changed = np.flatnonzero((times > 0) != self._used_in_base)
        return Outcome(saved, flops, seconds, self._base_used.symmetric_difference(self._names[i] for i in changed))

    def toggled(self, *names: str) -> Outcome:
        """The choice without those of some names that are in it, and with those that are not."""
        for name in names:
            self._set(name, name not in self.chosen)
        try:
            return self._outcome(self._reached())
        finally:
            for name in names:
                self._set(name, name in self.chosen)
