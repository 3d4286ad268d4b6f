"""What if: for each value that a policy saves, or does not, what the other choice would change, by itself.

It is estimated on the graph that plans are made on, without a trace of each choice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from remat_magic import devices
from remat_magic.engine.engine import ONE_PLACE
from remat_magic.facts.facts import Variant
from remat_magic.planning.graph import Run
from remat_magic.planning.search import Objective, planner, saved_by
from remat_magic.policies import MIXED
from remat_magic.records import Listed, Plan, RematError, Report, WhatIf


def what_if(variant: Variant, device: devices.Device | None, against: Plan | None = None) -> Listed[WhatIf]:
    """``Trace.what_if``, on the graph that plans are made on; ``against`` is the plan that gave the choice."""
    chosen, facts, selection = device or devices.default(), variant.facts, variant.selection
    if selection.policy == MIXED:
        raise RematError(ONE_PLACE)
    choices = planner(facts, selection.at)
    report = variant.report(device)
    if report.backward_error:
        raise RematError(report.backward_error)
    if selection.plan is not None:
        names = frozenset(value.key for value in selection.plan.names)
    else:
        assert selection.resolved is not None  # it is at one place
        names = saved_by(facts, choices.parts, selection.resolved)
    objective = Objective(chosen)
    costs = [] if chosen is None else objective.costs(choices.graph, choices.parts.backward).nodes
    # Whole, so that what changes nothing differs by nothing, in whatever order it is summed.
    picoseconds = np.rint(np.array([*costs]) * 1e12).astype(np.int64)
    base, values = choices.graph.run(names), choices.every_value()
    order = {name: i for i, name in enumerate(choices.parts.naming.values)}

    def seconds(run: Run) -> float:
        return int(picoseconds[run.nodes].sum()) * 1e-12

    def plan(run: Run, key: str, label: str) -> Plan:
        """What it comes to by the graph, as a plan; it is called as the report that is changed, and what changes."""
        saved = tuple(values[name] for name in sorted(run.used, key=order.__getitem__))
        key, label = f"{report.policy}{key}", f"{report.label}{label}"
        draft = replace(
            choices.draft(key, run.saved_bytes, saved, label),
            saved_bytes=run.saved_bytes,
            recomputed_flops=run.recomputed_flops,
            status="The effect of one value, by estimate.",
        )
        return draft if saved else replace(draft, policy="nothing_saveable", label="", fingerprint="")

    nearest = report
    if _figures(base) != _figures(report):
        # What the policy saves no choice of names does: start from the nearest.
        by_value = plan(base, ", by value", ", by value") if base.used else "nothing_saveable"
        nearest = facts.under(by_value, choices.at).report(device)
        if _figures(nearest) != _figures(base):
            raise RematError(
                f"The effect of single values at {choices.at!r} is not known, since JAX does not save there what "
                f"{report.policy} was expected to save: choose at='sites', or one site."
            )
    # Effects are on the report that is shown, which the nearest choice of names may differ from by itself.
    aside = objective.of(nearest) - objective.of(report) if chosen is not None else 0.0

    saved_bytes, recomputed_flops = report.saved_bytes, report.recomputed_flops  # sums over all its rows

    def row(name: str) -> WhatIf:
        """What it changes to decide a name the other way."""
        value, after, saving = values[name], choices.graph.run(names ^ {name}), name not in names
        sign, where = "+" if saving else "-", f" {value.source.place}" if value.source else ""
        return WhatIf(
            "save" if saving else "recompute",
            value,
            after.saved_bytes - saved_bytes,
            after.recomputed_flops - recomputed_flops,
            None if chosen is None else seconds(after) - seconds(base) + aside,
            "" if chosen is None else chosen.name,
            # Values of one line read alike: only their names tell plans apart.
            plan(after, f" {sign} {name}", f" {sign} {value.name or value.primitive or 'carry'}{where}"),
            against or report.policy,
        )

    # What can go the other way: the values that are saved, then those that are computed again.
    changes = [row(name) for some in (base.used, base.recomputed) for name in sorted(some, key=order.__getitem__)]
    return Listed(sorted((change for change in changes if not change.loses), key=_rank))


def _figures(of: Run | Report) -> tuple[int, int]:
    return of.saved_bytes, of.recomputed_flops


def _rank(row: WhatIf) -> tuple[int, float, int, str]:
    saves = row.change == "save"
    worth = -row.flops_per_byte if saves else row.flops_per_byte
    return 0 if saves else 1, worth, -abs(row.saved_bytes), row.value.key
