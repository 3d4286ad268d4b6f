"""The picture of policies by memory and cost. Hand-written SVG, which needs no script."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat_magic.records import ComparisonRow
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.svg import Frame, colours, element, identifier, picture, text, text_width, ticks, truncate

_HEIGHT = 356  # pixels of the whole picture
_LABEL = 30  # characters of a policy's key beside its point
_HALF = 6.5  # pixels from the middle of a point to its edge

_PARETO_STYLE = (
    f".remat-svg .remat-front{{fill:none;stroke:{colours['accent']};stroke-width:1.5;stroke-dasharray:5 3}}"
    f".remat-svg .remat-capacity{{stroke:{colours['fg']};stroke-width:1.5}}"
    f".remat-svg .remat-point{{cursor:pointer}}"
    f".remat-svg .remat-point:focus-visible{{outline:2px solid {colours['accent']};outline-offset:2px}}"
    f".remat-svg .remat-best{{fill:{colours['accent']};stroke:{colours['accent']}}}"
    f".remat-svg .remat-other{{fill:{colours['back']};stroke:{colours['dim']};stroke-width:1.5}}"
    f".remat-svg .remat-ring{{fill:none;stroke:{colours['fg']};stroke-width:1.5}}"
    f".remat-svg .remat-label{{paint-order:stroke;stroke:{colours['back']};stroke-width:3px}}"
    f".remat-svg .remat-leader{{stroke:{colours['dim']};stroke-width:.75}}"
    ".remat-svg .remat-point[aria-pressed=true] .remat-label{font-weight:bold}"
    ".remat-svg .remat-point:not([aria-pressed=true]) .remat-ring{display:none}"
)


@dataclass(frozen=True, slots=True)
class _Point:
    row: ComparisonRow
    x: float
    y: float
    memory: int
    cost: float
    chosen: bool

    @property
    def label(self) -> str:
        row = self.row
        placed = row.label == f"{row.policy} at {row.at}"  # the place first, of which there are more than policies
        return truncate(f"{row.at}: {row.policy.removesuffix('_saveable')}" if placed else row.label, _LABEL)


def stands_for(row: ComparisonRow) -> tuple[str, ...]:
    """The policies of a row, with their places where it has one of its own: how it is told that it shows the chosen."""
    placed = f"{row.policy} at {row.at}"
    if row.label in (placed, row.at):
        return (placed, *row.same_as)
    # A plan's label can have its place, among policies of one place too.
    return (row.policy, *([placed] if row.label.endswith(f" at {row.at}") else []), *row.same_as)


def _said(point: _Point, timed: bool) -> str:
    cost = fmt.seconds(point.cost) if timed else fmt.flops(round(point.cost))
    of_what = "estimated for recomputation and offloading" if timed else "recomputed"
    row = point.row
    front = ", on the front" if row.pareto else ", too much" if row.measured_fits is False else ""
    same = f", same as {', '.join(row.same_labels)}" if row.same_as else ""
    memory = fmt.nbytes(point.memory)
    memory_needed = f"needs {memory} (compiled)" if row.ranked_by == "compiled" else f"peak {memory} (estimated)"
    return f"{row.label}{same}: {memory_needed}, {cost} {of_what}{front}"


def pareto_svg(rows: Sequence[ComparisonRow], chosen: str = "", width: int = 680) -> str:
    """Every policy by its memory and by what it adds, with the front of those that no other beats.

    The memory is what the rows are ranked by: what XLA's compiler needs, with a line where the device ends, or the
    estimated peak. A point is a button with the policy in ``data-policy``. What it adds is in estimated seconds where
    all rows have them, else in recomputed FLOPs. Rows without a peak (those that fail) are left out, and counted in the
    description.

    Args:
        rows: a comparison's.
        chosen: the policy to mark.
        width: in pixels.
    """
    timed = any(row.times for row in rows)  # all of a comparison, or none
    compiled = any(row.ranked_by == "compiled" for row in rows)
    shown = [(row, row.ranked_bytes, row.adds) for row in rows if row.ranked_bytes is not None and row.adds is not None]
    left_out = len(rows) - len(shown)
    memory_axis = "memory that XLA's compiler needs" if compiled else "estimated peak memory"
    title = f"{memory_axis[0].upper()}{memory_axis[1:]} against what recomputation adds"
    if not shown:
        words = [text(12, 24, "No policy with a known peak and cost.", class_="remat-axis")]
        return picture(identifier(title, rows), width, 40, title, "Nothing to show.", words, "")
    across = ticks(max(memory for _, memory, _ in shown))
    upward = ticks(max(cost for _, _, cost in shown))
    frame = Frame(64, 50, width - 26, _HEIGHT - 46, across[-1], upward[-1])
    points = [
        _Point(row, frame.x(memory), frame.y(cost), memory, cost, bool(chosen) and chosen in stands_for(row))
        for row, memory, cost in shown
    ]
    unit = "estimated seconds that recomputation and offloading add" if timed else "recomputed FLOPs"
    capacity = _capacity_at(shown, frame) if compiled else None
    parts = [
        frame.vertical_axis(upward, unit, lambda mark: fmt.seconds(mark) if timed else fmt.flops(round(mark))),
        frame.horizontal_axis(across, memory_axis, lambda mark: fmt.nbytes(round(mark))),
        _capacity(capacity, frame) if capacity else "",
        _front_line(points, frame),
    ]
    labels = _placed(points, frame, upward, capacity)
    parts += [
        _point(point, labels.get(index), timed)
        for index, point in sorted(enumerate(points), key=lambda pair: (pair[1].row.pareto, pair[1].memory))
    ]
    parts.append(_pareto_legend(frame, any(point.chosen for point in points), compiled))
    omitted = f" {fmt.count(left_out, 'policy')} without a known peak and cost left out." if left_out == 1 else ""
    if left_out > 1:
        omitted = f" {left_out} policies without a known peak and cost left out."
    best = ", ".join(point.row.label for point in sorted(points, key=lambda point: point.memory) if point.row.pareto)
    description = f"{fmt.count(len(points), 'point')}. On the front, from least memory: {best}.{omitted}"
    return picture(identifier(title, rows, chosen), width, _HEIGHT, title, description, parts, _PARETO_STYLE)


def _capacity_at(shown: Sequence[tuple[ComparisonRow, int, float]], frame: Frame) -> float | None:
    """Where the line stands beyond which nothing fits; None where the picture does not reach so far."""
    available = max((row.available_bytes or 0 for row, _, _ in shown), default=0)
    x = frame.x(available)
    return x if available and x <= frame.right else None


def _capacity(x: float, frame: Frame) -> str:
    line = element("line", x1=x, x2=x, y1=frame.top, y2=frame.bottom, class_="remat-capacity")
    return line + text(x - 4, frame.top + 10, _FITS, text_anchor="end", class_="remat-axis")


def _front_line(points: Sequence[_Point], frame: Frame) -> str:
    """Down to the right in steps: what is on its lower left no policy reaches."""
    best = sorted({(point.x, point.y) for point in points if point.row.pareto})
    if not best:
        return ""
    path = f"M{best[0][0]:.1f},{frame.top:.1f}V{best[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in best[1:])
    return element("path", d=f"{path}H{frame.right:.1f}", class_="remat-front")


def _diamond(x: float, y: float, half: float) -> str:
    return f"M{x:.1f},{y - half:.1f}l{half},{half}l{-half},{half}l{-half},{-half}z"


def _point(point: _Point, label: tuple[float, float, str, bool] | None, timed: bool) -> str:
    description = _said(point, timed)
    inside = element("title", escape(description))
    if label is not None:
        x, y, anchor, far = label
        if far:
            edge = y - 4 if y > point.y else y + 2
            inside += element("line", x1=point.x, y1=point.y, x2=x, y2=edge, class_="remat-leader")
        inside += text(x, y, point.label, text_anchor=anchor, class_="remat-label")
    size = _HALF + 4
    ring = {"x": point.x - size, "y": point.y - size, "width": 2 * size, "height": 2 * size}
    inside += element("rect", **ring, class_="remat-ring")  # seen on the chosen one, which a script may change
    if point.row.pareto:
        inside += element("path", d=_diamond(point.x, point.y, _HALF), class_="remat-best")
    else:
        inside += element("circle", cx=point.x, cy=point.y, r=_HALF - 1.5, class_="remat-other")
    return element(
        "g",
        inside,
        class_="remat-point",
        tabindex=0,
        role="button",
        data_policy=point.row.policy,
        data_at=point.row.at,
        data_same="\n".join(stands_for(point.row)),
        aria_label=description,
        aria_pressed=str(point.chosen).lower(),
    )


_Box = tuple[float, float, float, float]
_FITS = "fits"


def _placed(
    points: Sequence[_Point], frame: Frame, upward: Sequence[float], capacity: float | None
) -> dict[int, tuple[float, float, str, bool]]:
    """For each point where its label goes, as x, y, anchor and whether a line must lead to it; none without room.

    The numbers of the vertical axis, ``upward``, and the line of the ``capacity`` with its word are left readable.

    Greedy: the chosen policy and those on the front first, each in the nearest free place around its point.
    """
    occupied: list[_Box] = []
    for p in points:
        half = _HALF + 4 if p.chosen else _HALF
        occupied.append((p.x - half, p.y - half, p.x + half, p.y + half))
    occupied += [(2, frame.y(mark) - 8, frame.left - 4, frame.y(mark) + 6) for mark in upward]
    if capacity is not None:
        occupied.append((capacity - 4 - text_width(_FITS), frame.top, capacity, frame.top + 13))
        occupied.append((capacity - 1, frame.top, capacity + 1, frame.bottom))
    corners = sorted({(p.x, p.y) for p in points if p.row.pareto})
    if corners:
        occupied.append((corners[0][0] - 1, frame.top, corners[0][0] + 1, corners[0][1]))
        occupied.append((corners[-1][0], corners[-1][1] - 1, frame.right, corners[-1][1] + 1))
    for (x, y), (next_x, next_y) in itertools.pairwise(corners):
        occupied += [(x, y - 1, next_x, y + 1), (next_x - 1, y, next_x + 1, next_y)]
    placed: dict[int, tuple[float, float, str, bool]] = {}
    order = sorted(range(len(points)), key=lambda i: (not points[i].chosen, not points[i].row.pareto, points[i].memory))
    for index in order:
        point = points[index]
        wide = text_width(point.label)
        for x, y, anchor, far in _places(point):
            start = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
            box = (start, y - 10, start + wide, y + 3)
            within = (
                box[0] >= 2 and box[2] <= frame.right + 24 and frame.top - 6 <= box[1] and box[3] <= frame.bottom - 2
            )
            if within and not any(_overlap(box, other) for other in occupied):
                occupied.append(box)
                placed[index] = (x, y, anchor, far)
                break
    return placed


def _places(point: _Point) -> Iterator[tuple[float, float, str, bool]]:
    beside = _HALF + (8 if point.chosen else 4)
    yield point.x + beside, point.y + 4, "start", False
    yield point.x - beside, point.y + 4, "end", False
    yield point.x, point.y - beside - 3, "middle", False
    yield point.x, point.y + beside + 10, "middle", False
    for distance in (22, 36, 50, 64, 78, 92):
        for up in (-1, 1):
            for anchor, aside in (("start", 10), ("end", -10), ("middle", 0)):
                yield point.x + aside, point.y + up * distance, anchor, True


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _pareto_legend(frame: Frame, marked: bool, compiled: bool) -> str:
    y = frame.top - 34  # above the name of the axis
    other = "beaten, or too big" if compiled else "another is better"
    entries = [("◆", "on the front"), ("○", other)] + ([("□", "chosen")] if marked else [])
    line = " · ".join(f"{sign} {word}" for sign, word in entries)
    return text(frame.right, y, line, text_anchor="end", class_="remat-axis", aria_hidden="true")
