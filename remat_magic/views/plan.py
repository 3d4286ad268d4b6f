"""What a plan saves, as HTML."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from remat_magic.records import Plan, PlannedValue
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import planned_cells, table, td

UNPASTED = "a plan is an edit of your source; widget.plan.save(path) keeps it too"


def plan_meaning(plan: Plan) -> str:
    """What a plan does, one line."""
    peak = f"an estimated peak{_there(plan)}" if plan.of == "peak" else "saved bytes"
    whose = f", {plan.of_devices}" if plan.of_devices else ""
    return f"Recompute as little as possible within {fmt.nbytes(plan.budget_bytes)} of {peak}{whose}."


def _there(plan: Plan) -> str:
    """The device that a peak is as on, after the word."""
    return f" on {plan.peak_device}" if plan.peak_device else ""


def plan_sentences(plan: Plan) -> list[str]:
    """What a plan saves and recomputes, and how good it is."""
    again = fmt.flops(plan.recomputed_flops)
    share = (
        f" ({fmt.percent(plan.recomputed_flops, plan.forward_flops)} of the forward pass)" if plan.forward_flops else ""
    )
    # Of what is proven best the status says so.
    least = f", no choice of names less than {fmt.flops(plan.bound)}" if plan.gap and plan.bound else ""
    saves, budget = f"Saves {fmt.nbytes(plan.saved_bytes)}", fmt.nbytes(plan.budget_bytes)
    if plan.of == "saved":
        saves += f" of {budget}"
    elif plan.peak_bytes is not None:
        about = fmt.about(plan.peak_bytes, plan.peak_low, plan.peak_high)
        peak = f"Peaks at {about} of {budget} by estimate{_there(plan)}"
        saves = f"{peak}; saves {fmt.nbytes(plan.saved_bytes)}"
    facts = [
        f"{saves}, {plan.of_devices}" if plan.of_devices else saves,
        f"offloads {fmt.nbytes(plan.offloaded_bytes)}" if plan.offloaded_bytes else "",
        f"recomputes {again}{share}{least}",
        f"solved in {fmt.seconds(plan.solve_seconds)}",
    ]
    return [f"{'; '.join(filter(None, facts))}.", *filter(None, [plan.status])]


def plan_html(plan: Plan) -> str:
    """What a plan saves, how good it is, and what to do with it."""
    facts, *status = plan_sentences(plan)
    status_html = "".join(f'<p class="remat-empty">{escape(sentence)}</p>' for sentence in status)
    return f"<p>{escape(facts)}</p>{status_html}{_values(plan.names)}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Values of a plan that one operation of one expression makes: ``value`` is the first, ``nbytes`` are of all.

    ``times`` tells how many, and of how many that it makes; ``numbers`` which of these, in the order of the program.
    """

    value: PlannedValue
    nbytes: int
    times: str
    numbers: str


def plan_rows(values: Sequence[PlannedValue]) -> list[PlanRow]:
    """The values of a plan by the operation and expression that make them, those of most bytes first."""
    groups: dict[Hashable, list[PlannedValue]] = {}
    for value in values:
        groups.setdefault((value.origin, value.name, value.offloaded), []).append(value)
    return sorted((_plan_row(group) for group in groups.values()), key=lambda row: -row.nbytes)


def _plan_row(group: Sequence[PlannedValue]) -> PlanRow:
    first = group[0]
    times = sum(value.times for value in group)
    shown_times, numbers = f"x{times:,}" if times > 1 else "", ""
    if len(group) < first.alike:
        shown_times = f"{len(group):,} of {first.alike:,}"
        numbers = f"number {_ranges([value.number + 1 for value in group])} in the order of the program"
    return PlanRow(first, sum(value.nbytes for value in group), shown_times, numbers)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: ``1-7, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _values(values: Sequence[PlannedValue]) -> str:
    rows = list[str]()
    for row in plan_rows(values):
        size = td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes"))
        kind = td("kind", "offload" if row.value.offloaded else "save")
        cells = [size, kind, *planned_cells(row.value, row.times, row.numbers)]
        rows.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    if not rows:
        return '<p class="remat-empty">A policy of JAX\'s own does it: no value needs a name.</p>'
    heads = [("Size", "num"), ("Kind", "kind"), ("Value", "type"), ("Made by", "made")]
    return table("Values that the plan keeps", heads, rows)
