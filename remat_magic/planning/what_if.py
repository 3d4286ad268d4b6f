"""What if: for each value that a policy saves, or does not, what the other choice would change, by itself.

It is reckoned on the graph that plans are made on, without a trace of each choice.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Any

import numpy as np

from remat_magic import devices
from remat_magic.engine.engine import ONE_PLACE
from remat_magic.engine.selection import Selection
from remat_magic.facts.facts import Variant
from remat_magic.planning.graph import Run
from remat_magic.planning.planner import Objective, Planner, planner, saved_by
from remat_magic.policies import MIXED
from remat_magic.records import Listed, Plan, PlannedValue, RematError, Report, WhatIf


def what_if(variant: Variant, device: devices.Device | None, against: Plan | None = None) -> Listed[WhatIf]:
    """``Trace.what_if``, on the graph that plans are made on; ``against`` is the plan that the choice was asked by."""
    chosen, facts, selection = device or devices.default(), variant.facts, variant.selection
    if selection.policy == MIXED:
        raise RematError(ONE_PLACE)
    choices = planner(facts, selection.at)
    report = variant.report(device)
    if report.backward_error:
        raise RematError(report.backward_error)
    names = _names_saved(choices, selection)
    objective = Objective(chosen)
    costs = [] if chosen is None else objective.costs(choices.graph, choices.parts.backward).nodes
    # Whole, so that what changes nothing differs by nothing, in whatever order it is summed.
    picoseconds = np.rint(np.array([*costs]) * 1e12).astype(np.int64)
    base = choices.graph.run(names)
    rows = _Rows(choices, names, base, picoseconds, report)
    nearest = report
    if _figures(base) != _figures(report):
        # What the policy keeps no choice of names does: start from the nearest.
        by_value = rows.plan(base, ", by value", ", by value") if base.used else "nothing_saveable"
        nearest = facts.under(by_value, choices.at).report(device)
        if _figures(nearest) != _figures(base):
            raise RematError(
                f"The effect of single values at {choices.at!r} is not known, since JAX does not save there what "
                f"{report.policy} was expected to save: choose at='sites', or one site."
            )
    # What is told is of the report that is shown, which the nearest choice of names may differ from by itself.
    aside = objective.of(nearest) - objective.of(report) if chosen is not None else 0.0
    changes = [rows.row(name, chosen, against or report.policy, aside) for name in rows.names]
    return Listed(sorted((row for row in changes if not row.loses), key=_rank))


def _figures(of: Run | Report) -> tuple[int, int]:
    return of.saved_bytes, of.recomputed_flops


def _rank(row: WhatIf) -> tuple[int, float, int, str]:
    saves = row.change == "save"
    worth = -row.flops_per_byte if saves else row.flops_per_byte
    return 0 if saves else 1, worth, -abs(row.saved_bytes), row.value.key


def _names_saved(choices: Planner, selection: Selection) -> frozenset[str]:
    """The names of the values that a policy, or a plan, saves at the planner's place."""
    if selection.plan is not None:
        return frozenset(value.key for value in selection.plan.names)
    assert selection.resolved is not None  # it is at one place
    return saved_by(choices.facts, choices.parts, selection.resolved)


class _Rows:
    """What is changed, and the plans that do it, beside the choice that they differ from."""

    def __init__(self, choices: Planner, chosen: frozenset[str], base: Run, picoseconds: Any, report: Report) -> None:
        self._choices, self._chosen, self._base, self._report = choices, chosen, base, report
        self._picoseconds = picoseconds
        self._saved, self._again = report.saved_bytes, report.recomputed_flops  # sums over all that it tells of
        self._order = {name: i for i, name in enumerate(choices.parts.naming.values)}
        self._values = choices.every_value()
        self._used = sorted(base.used, key=self._order.__getitem__)
        self._kept = [self._values[name] for name in self._used]

    @property
    def names(self) -> list[str]:
        """What can go the other way: the names whose values are saved, then those of what is computed again."""
        recomputed = sorted(self._base.recomputed, key=self._order.__getitem__)
        return [*self._used, *recomputed]

    def row(self, name: str, device: devices.Device | None, against: str | Plan, aside: float) -> WhatIf:
        """What it changes in the report to decide a name the other way, with ``aside`` seconds besides."""
        base, value = self._base, self._values[name]
        after = self._choices.graph.run(self._chosen ^ {name})
        saving = name not in self._chosen
        sign = "+" if saving else "-"
        where = f" {value.source.place}" if value.source else ""
        return WhatIf(
            "save" if saving else "recompute",
            value,
            after.saved_bytes - self._saved,
            after.recomputed_flops - self._again,
            None if device is None else self._seconds(after) - self._seconds(base) + aside,
            "" if device is None else device.name,
            # Values of one line read alike: only their names tell plans apart.
            self.plan(after, f" {sign} {name}", f" {sign} {value.name or value.primitive or 'carry'}{where}"),
            against,
        )

    def _seconds(self, run: Run) -> float:
        return int(self._picoseconds[run.nodes].sum()) * 1e-12

    def plan(self, outcome: Run, key: str, label: str) -> Plan:
        """The plan of a choice, with what is reckoned of it for its figures; what it is called begins as the report."""
        used, now = self._base.used, outcome.used
        values: list[PlannedValue] = self._kept
        if now != used:
            gone, new = used - now, now - used
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
            status="The effect of one value, by estimate.",
        )
