"""The frontier of budget against recomputation, and what a plan saves, as HTML."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from remat_magic.records import FrontierPoint, Plan, PlannedValue, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.svg import Frame, colours, element, identifier, picture, text, ticks, truncate
from remat_magic.views.tables import planned_cells, table, td

__all__ = [
    "UNPASTED",
    "beyond_text",
    "frontier_svg",
    "plan_html",
    "plan_meaning",
    "plan_rows",
    "plan_sentences",
    "point_text",
]

UNPASTED = "a plan has no line to paste: Apply binds it, widget.plan.save(path) keeps it"

_STYLE = (
    f".remat-svg .remat-bound{{fill:{colours['accent']};fill-opacity:.12;stroke:none}}"
    f".remat-svg .remat-plans{{fill:none;stroke:{colours['accent']};stroke-width:1.5}}"
    f".remat-svg .remat-stop{{fill:{colours['back']};stroke:{colours['accent']}}}"
    f".remat-svg .remat-stop.remat-at{{fill:{colours['accent']};stroke-width:4}}"
    f".remat-svg .remat-known{{stroke:{colours['dim']};stroke-width:1.5}}"
    f".remat-svg .remat-label{{paint-order:stroke;stroke:{colours['back']};stroke-width:3px}}"
)


def point_text(point: FrontierPoint, forward_flops: int | None) -> str:
    """What can be had within a budget, as one line."""
    share = f", {fmt.percent(point.recomputed_flops, forward_flops)} of the forward pass" if forward_flops else ""
    if point.bound == point.recomputed_flops:
        least = "; the least of all choices of names" if point.unreached else "; proven least"
    else:
        least = f"; {_never_less(point)} {fmt.flops(point.bound)}"
    return f"{fmt.nbytes(point.budget_bytes)}: {fmt.flops(point.recomputed_flops)} again{share}{least}"


def beyond_text(below: FrontierPoint, above: FrontierPoint, forward_flops: int | None) -> str:
    """What budgets between two have: the smaller one's plan at least, and the larger one's bound at most."""
    share = f", {fmt.percent(below.recomputed_flops, forward_flops)} of the forward pass" if forward_flops else ""
    return f"at most {fmt.flops(below.recomputed_flops)} again{share}; {_never_less(above)} {fmt.flops(above.bound)}"


def _never_less(point: FrontierPoint) -> str:
    return "no choice of names has less than" if point.unreached else "never less than"


def frontier_svg(
    points: Sequence[FrontierPoint], policies: Sequence[Report] = (), width: int = 680, *, together: bool = False
) -> str:
    """The least recomputation for each budget, with the policies that are known already.

    Args:
        points: by budget, as reckoned.
        policies: complete reports at the same place.
        width: in pixels.
        together: whether the points are of choices that are the same in equal layers.
    """
    height = 260
    shaded = "shaded: nothing is possible" + (" with equal layers together" if together else "")
    title = "Budget of saved bytes against recomputed FLOPs"
    if not points:
        words = [text(12, 24, "There is nothing to choose here.", class_="remat-axis")]
        return picture(identifier(title), width, 40, title, "Nothing to show.", words, "")
    most_x = max(*(point.budget_bytes for point in points), *(report.saved_bytes for report in policies), 1)
    most_y = max(*(point.recomputed_flops for point in points), *(report.recomputed_flops for report in policies), 1)
    across, upward = ticks(most_x), ticks(most_y)
    frame = Frame(84, 34, width - 26, height - 46, across[-1], upward[-1])
    places = [(frame.x(point.budget_bytes), frame.y(point.recomputed_flops)) for point in points]
    # In steps: a budget between two has the plan of the smaller one at least, and the bound of the larger one at most.
    plans = f"M{places[0][0]:.1f},{places[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    bounds = f"M{places[0][0]:.1f},{frame.bottom:.1f}" + "".join(
        f"V{frame.y(point.bound):.1f}H{x:.1f}" for point, (x, _) in zip(points[1:], places[1:], strict=True)
    )
    parts = [
        frame.vertical_axis(upward, "recomputed FLOPs", lambda mark: fmt.flops(round(mark))),
        frame.horizontal_axis(across, "saved bytes", lambda mark: fmt.nbytes(round(mark))),
        element("path", d=f"{bounds}V{frame.bottom:.1f}z", class_="remat-bound"),
        element("path", d=plans, class_="remat-plans"),
        *(
            element("circle", cx=x, cy=y, r=4, class_="remat-stop", data_stop=number)
            for number, (x, y) in enumerate(places)
        ),
        *_policy_marks(policies, frame),
        text(
            frame.right,
            frame.top - 16,
            f"○ a plan   \N{MULTIPLICATION SIGN} a policy   {shaded}",
            text_anchor="end",
            class_="remat-axis",
            aria_hidden="true",
        ),
    ]
    description = (
        f"{fmt.count(len(points), 'budget')}, from {point_text(points[0], None)} to {point_text(points[-1], None)}."
    )
    return picture(identifier(title, points), width, height, title, description, parts, _STYLE)


def _policy_marks(policies: Sequence[Report], frame: Frame) -> list[str]:
    """A cross and a label for each policy; of those at one place only the first."""
    parts, taken = list[str](), list[tuple[float, float]]()
    for report in policies:
        x, y = frame.x(report.saved_bytes), frame.y(report.recomputed_flops)
        inside = element(
            "title",
            escape(
                f"{report.label}: {fmt.nbytes(report.saved_bytes)} saved, {fmt.flops(report.recomputed_flops)} again"
            ),
        )
        inside += element("path", d=f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8", class_="remat-known")
        if all(abs(x - other) > 60 or abs(y - above) > 12 for other, above in taken):
            end = x > (frame.left + frame.right) / 2
            label = truncate(report.label, 34)
            anchor = "end" if end else "start"
            inside += text(x - 8 if end else x + 8, y - 6, label, text_anchor=anchor, class_="remat-label")
            taken.append((x, y))
        parts.append(element("g", inside))
    return parts


def plan_meaning(plan: Plan) -> str:
    """What a plan does, one line."""
    peak = "an estimated peak" if plan.of == "peak" else "saved bytes"
    return f"Recompute as little as possible within {fmt.nbytes(plan.budget_bytes)} of {peak}."


def plan_sentences(plan: Plan) -> list[str]:
    """What a plan saves and recomputes, and how good it is."""
    again = fmt.flops(plan.recomputed_flops)
    share = (
        f" ({fmt.percent(plan.recomputed_flops, plan.forward_flops)} of the forward pass)" if plan.forward_flops else ""
    )
    best, possible = "proven best", "the least possible"
    if plan.unreached:
        best = possible = "the least of all choices of names"
    least = f"at most {max(plan.gap, 0.0001):.2%} above {possible}" if plan.gap else best
    facts = [
        f"Saves {fmt.nbytes(plan.saved_bytes)} of {fmt.nbytes(plan.budget_bytes)}",
        f"offloads {fmt.nbytes(plan.offloaded_bytes)}" if plan.offloaded_bytes else "",
        f"recomputes {again}{share}, {least}",
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
        what, kind, where = planned_cells(row.value, row.times, row.numbers)
        size = td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes"))
        cells = [size, kind, td("kind", "offload" if row.value.offloaded else "save"), what, where]
        rows.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    if not rows:
        return '<p class="remat-empty">A policy of JAX\'s own does it: no value needs a name.</p>'
    heads = [("Size", "num"), ("Type", "type"), ("Kind", "kind"), ("What", "what"), ("Source", "source")]
    return table("Values that the plan keeps", heads, rows)
