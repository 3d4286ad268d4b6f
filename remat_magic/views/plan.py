"""The frontier of budget against recomputation, and what a plan saves, as HTML."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from remat_magic.records import FrontierPoint, Plan, PlannedValue, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.svg import Frame, colours, element, identifier, picture, text, text_width, ticks, truncate
from remat_magic.views.tables import planned_cells, table, td

__all__ = [
    "UNPASTED",
    "beyond_text",
    "chosen_text",
    "frontier_svg",
    "known_points",
    "plan_html",
    "plan_meaning",
    "plan_rows",
    "plan_sentences",
    "point_text",
    "slider_place",
]

UNPASTED = "a plan is an edit of your source; widget.plan.save(path) keeps it too"

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
        least = f"; {_claims(point.unreached)[0]}" if point.unreached else "; proven least"
    else:
        least = f"; {_never_less(point.unreached)} {fmt.flops(point.bound)}"
    return f"{fmt.nbytes(point.budget_bytes)}: {fmt.flops(point.recomputed_flops)} again{share}{least}"


def beyond_text(below: FrontierPoint, above: FrontierPoint, forward_flops: int | None) -> str:
    """What budgets between two have: the smaller one's plan at least, and the larger one's bound at most."""
    share = f", {fmt.percent(below.recomputed_flops, forward_flops)} of the forward pass" if forward_flops else ""
    least = f"{_never_less(above.unreached)} {fmt.flops(above.bound)}"
    return f"at most {fmt.flops(below.recomputed_flops)} again{share}; {least}"


def _never_less(unreached: Sequence[str]) -> str:
    return f"no choice of {_claims(unreached)[1]} has less than" if unreached else "never less than"


def _claims(unreached: Sequence[str]) -> tuple[str, str]:
    """What may be said of a choice that none was found to be better than, and what none is better of."""
    considered = "the values considered" if any(where.startswith("values inside") for where in unreached) else "names"
    return f"the least of all choices of {considered}", considered


def known_points(points: Sequence[FrontierPoint], choices: Sequence[Report | Plan]) -> list[FrontierPoint]:
    """The points, with what is known to do better in their place: policies of JAX's, and plans that were made."""
    better = [(what.recomputed_flops, *_held(what)) for what in choices]
    points = list(points)
    for number, point in enumerate(points):
        fits = [choice for choice in better if choice[1] <= point.budget_bytes]
        flops, saved, moved = min(fits, default=(point.recomputed_flops, point.saved_bytes, 0))
        if flops < point.recomputed_flops and not moved:
            points[number] = replace(point, saved_bytes=saved, recomputed_flops=flops)
        points[number] = replace(points[number], bound=min(point.bound, flops))
    return points


def _held(what: Report | Plan) -> tuple[int, int]:
    """The bytes that are kept, on the device and off it, and those off it."""
    return what.saved_bytes + what.offloaded_bytes, what.offloaded_bytes


def slider_place(points: Sequence[FrontierPoint], plan: Plan) -> float:
    """Where a plan's budget is among those of the points: 2.5 is in the middle between the third and the fourth."""
    budgets = [point.budget_bytes for point in points]
    budget = min(max(_budget(plan), budgets[0]), budgets[-1])
    above = bisect.bisect_left(budgets, budget)
    if budgets[above] == budget:
        return float(above)
    return above - 1 + (budget - budgets[above - 1]) / (budgets[above] - budgets[above - 1])


def _budget(plan: Plan) -> int:
    """What a plan is drawn at: its budget of saved bytes; what it saves, where the budget is of something else."""
    return plan.saved_bytes + plan.offloaded_bytes if plan.of == "peak" or plan.offloaded_bytes else plan.budget_bytes


def chosen_text(plan: Plan) -> str:
    """What a chosen plan comes to, as a stop of the slider says it."""
    point = FrontierPoint(plan.budget_bytes, plan.saved_bytes, plan.recomputed_flops, int(plan.bound), plan.unreached)
    text = point_text(point, plan.forward_flops)
    return text.replace(": ", f" of peak{_there(plan)}: ", 1) if plan.of == "peak" else text


def frontier_svg(
    points: Sequence[FrontierPoint],
    policies: Sequence[Report] = (),
    width: int = 680,
    *,
    chosen: Plan | None = None,
) -> str:
    """The least recomputation for each budget, with the policies that are known already.

    What is moved to the host is drawn where it would be if it were kept on the device: so it can be compared, and is
    marked as of another kind.

    Args:
        points: by budget, as reckoned.
        policies: complete reports at the same place.
        width: in pixels.
        chosen: the plan that is chosen, to be marked.
    """
    height = 276
    by_names = any(point.unreached for point in points)
    shaded = "shaded: nothing is possible" + (", by names" if by_names else "")
    title = "Budget of saved bytes against recomputed FLOPs"
    if not points:
        words = [text(12, 24, "There is nothing to choose here.", class_="remat-axis")]
        return picture(identifier(title), width, 40, title, "Nothing to show.", words, "")
    choices = [*policies, *([chosen] if chosen else [])]
    points = known_points(points, choices)
    places = sorted({(_held(what)[0], what.recomputed_flops) for what in choices})
    stairs = [(point.budget_bytes, point.recomputed_flops) for point in points]
    stairs = sorted(
        {*stairs, *((_held(what)[0], what.recomputed_flops) for what in choices if not what.offloaded_bytes)}
    )
    most_x = max(*(point.budget_bytes for point in points), *(x for x, _ in places), 1)
    most_y = max(*(point.recomputed_flops for point in points), *(y for _, y in places), 1)
    across, upward = ticks(most_x), ticks(1.1 * most_y)  # with room for labels above
    frame = Frame(84, 50, width - 26, height - 46, across[-1], upward[-1])
    # In steps: a budget between two has the plan of the smaller one at least, and the bound of the larger one at most.
    least = itertools.accumulate((flops for _, flops in stairs), min)
    steps = [(frame.x(x), frame.y(flops)) for (x, _), flops in zip(stairs, least, strict=True)]
    plans = f"M{steps[0][0]:.1f},{steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    first, last = points[0].budget_bytes, points[-1].budget_bytes
    edges = sorted({*(point.budget_bytes for point in points), *(x for x, _ in places if first < x < last)})
    bounds = f"M{frame.x(first):.1f},{frame.bottom:.1f}"
    for left, right in itertools.pairwise(edges):
        bound = next(point.bound for point in points if point.budget_bytes >= right)
        bound = min([bound, *(flops for x, flops in places if x <= left)])  # what is there is possible
        bounds += f"V{frame.y(bound):.1f}H{frame.x(right):.1f}"
    moved = "\N{WHITE UP-POINTING TRIANGLE} offloads, both memories together · " * any(
        report.offloaded_bytes for report in policies
    )
    parts = [
        frame.vertical_axis(upward, "recomputed FLOPs", lambda mark: fmt.flops(round(mark))),
        frame.horizontal_axis(across, "saved bytes", lambda mark: fmt.nbytes(round(mark))),
        element("path", d=f"{bounds}V{frame.bottom:.1f}z", class_="remat-bound"),
        element("path", d=plans, class_="remat-plans"),
        *(
            element(
                "circle",
                cx=frame.x(point.budget_bytes),
                cy=frame.y(point.recomputed_flops),
                r=4,
                class_="remat-stop",
                data_stop=number,
            )
            for number, point in enumerate(points)
        ),
        *_policy_marks(policies, frame),
        _chosen_mark(chosen, frame) if chosen else "",
        *(
            text(frame.right, y, line, text_anchor="end", class_="remat-axis", aria_hidden="true")
            for y, line in _legend(f"○ a plan · \N{MULTIPLICATION SIGN} a policy · {moved}", shaded, frame)
        ),
    ]
    description = (
        f"{fmt.count(len(points), 'budget')}, from {point_text(points[0], None)} to {point_text(points[-1], None)}."
    )
    return picture(identifier(title, points), width, height, title, description, parts, _STYLE)


def _legend(marks: str, shaded: str, frame: Frame) -> list[tuple[float, str]]:
    """What the marks and the shade are, with the height of each line: one where there is room for it, else two."""
    if text_width(marks + shaded) < frame.right:
        return [(frame.top - 34, marks + shaded)]
    return [(frame.top - 38, marks.removesuffix(" · ")), (frame.top - 25, shaded)]


def _chosen_mark(plan: Plan, frame: Frame) -> str:
    """The dot of the chosen plan."""
    x, y = min(frame.x(_budget(plan)), frame.right), frame.y(plan.recomputed_flops)
    inside = element("title", escape(f"{plan.label}: {chosen_text(plan)}"))
    inside += element("circle", cx=x, cy=y, r=5, class_="remat-stop remat-at")
    return element("g", inside, class_="remat-chosen", data_plan=plan.policy)


def _policy_marks(policies: Sequence[Report], frame: Frame) -> list[str]:
    """A cross and a label for each policy; of those at one place only the first."""
    parts, labelled = list[str](), list[tuple[float, float]]()
    for report in policies:
        kept_bytes, moved = _held(report)
        x, y = frame.x(kept_bytes), frame.y(report.recomputed_flops)
        off = f", {fmt.nbytes(moved)} moved to the host" if moved else ""
        figures = f"{fmt.nbytes(report.saved_bytes)} saved{off}, {fmt.flops(report.recomputed_flops)} again"
        inside = element("title", escape(f"{report.label}: {figures}"))
        cross, triangle = f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8", f"M{x - 5:.1f},{y + 4:.1f}l5,-9l5,9z"
        inside += element("path", d=triangle if moved else cross, class_="remat-known", fill="none")
        if all(abs(x - other) > 60 or abs(y - above) > 12 for other, above in labelled):
            end = x > (frame.left + frame.right) / 2
            label = truncate(report.label, 34)
            anchor = "end" if end else "start"
            inside += text(x - 8 if end else x + 8, y - 6, label, text_anchor=anchor, class_="remat-label")
            labelled.append((x, y))
        parts.append(element("g", inside))
    return parts


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
    least = ""  # the status says how sure other plans are: of one for seconds no FLOPs are proven
    if not plan.gap:
        least = _claims(plan.unreached)[0] if plan.unreached else "proven best"
    elif plan.bound:
        least = f"{_never_less(plan.unreached)} {fmt.flops(plan.bound)}"
    saves, budget = f"Saves {fmt.nbytes(plan.saved_bytes)}", fmt.nbytes(plan.budget_bytes)
    if plan.of == "saved":
        saves += f" of {budget}"
    elif plan.peak_bytes is not None:
        peak = f"Peaks at {fmt.nbytes(plan.peak_bytes)} of {budget} (estimated{_there(plan)})"
        saves = f"{peak}; saves {fmt.nbytes(plan.saved_bytes)}"
    facts = [
        f"{saves}, {plan.of_devices}" if plan.of_devices else saves,
        f"offloads {fmt.nbytes(plan.offloaded_bytes)}" if plan.offloaded_bytes else "",
        f"recomputes {again}{share}{f', {least}' if least else ''}",
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
