"""Pictures: policies by memory and cost, and memory over time. Hand-written SVG, which needs no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from remat_magic.model import ComparisonRow, LiveValue, Moment, Timeline

from . import format as fmt
from .svg import Frame, colours, element, identifier, picture, text, text_width, ticks, truncate

__all__ = ["pareto_svg", "timeline_html", "timeline_svg"]

# ------------------------------------------------------------------------------------------------------ memory and cost

_LABEL = 30  # characters of a policy's key beside its point
_HALF = 6.5  # pixels from the middle of a point to its edge

_PARETO_STYLE = (
    f".remat-svg .remat-front{{fill:none;stroke:{colours['accent']};stroke-width:1.5;stroke-dasharray:5 3}}"
    f".remat-svg .remat-point{{cursor:pointer}}"
    f".remat-svg .remat-point:focus-visible{{outline:2px solid {colours['accent']};outline-offset:2px}}"
    f".remat-svg .remat-best{{fill:{colours['accent']};stroke:{colours['accent']}}}"
    f".remat-svg .remat-other{{fill:{colours['back']};stroke:{colours['dim']};stroke-width:1.5}}"
    f".remat-svg .remat-ring{{fill:none;stroke:{colours['fg']};stroke-width:1.5}}"
    f".remat-svg .remat-leader{{stroke:{colours['dim']};stroke-width:.75}}"
    ".remat-svg .remat-chosen-label{font-weight:bold}"
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
        return truncate(self.row.policy, _LABEL)


def _cost(row: ComparisonRow, timed: bool) -> float | None:
    if not timed:
        return row.recomputed_flops
    return None if row.times is None or row.times.offload is None else row.times.extra


def _said(point: _Point, timed: bool) -> str:
    cost = fmt.seconds(point.cost) if timed else fmt.flops(round(point.cost))
    more = "estimated for recomputation and offloading" if timed else "recomputed"
    front = ", on the front" if point.row.pareto else ""
    same = f", same as {', '.join(point.row.same_as)}" if point.row.same_as else ""
    return f"{point.row.policy}{same}: peak {fmt.nbytes(point.memory)} (estimated), {cost} {more}{front}"


def pareto_svg(rows: Sequence[ComparisonRow], chosen: str = "", width: int = 680, height: int = 340) -> str:
    """Every policy by its estimated peak and by what it adds, with the front of those that no other beats.

    A point is a button with the policy in ``data-policy``. What it adds is in estimated seconds where all rows have
    them, else in recomputed FLOPs. Rows without a peak (those that fail) are left out, and counted in the description.

    Args:
        rows: a comparison's.
        chosen: the policy to mark.
        width: in pixels.
        height: in pixels.
    """
    timed = any(row.times for row in rows) and all(row.times or row.peak_bytes is None for row in rows)
    shown = [
        (row, row.peak_bytes, cost)
        for row in rows
        if row.peak_bytes is not None and (cost := _cost(row, timed)) is not None
    ]
    left_out = len(rows) - len(shown)
    title = "Estimated peak memory against what recomputation adds"
    if not shown:
        words = [text(12, 24, "No policy with a known peak and cost.", class_="remat-axis")]
        return picture(identifier(title, rows), width, 40, title, "Nothing to show.", words, "")
    across = ticks(max(memory for _, memory, _ in shown))
    upward = ticks(max(cost for _, _, cost in shown))
    frame = Frame(64, 34, width - 26, height - 46, across[-1], upward[-1])
    points = [
        _Point(row, frame.x(memory), frame.y(cost), memory, cost, bool(chosen) and chosen in (row.policy, *row.same_as))
        for row, memory, cost in shown
    ]
    unit = "estimated seconds that recomputation and offloading add" if timed else "recomputed FLOPs"
    parts = [
        frame.vertical_axis(upward, unit, lambda mark: fmt.seconds(mark) if timed else fmt.flops(round(mark))),
        frame.horizontal_axis(across, "estimated peak memory", lambda mark: fmt.nbytes(round(mark))),
        _front_line(points, frame),
    ]
    labels = _placed(points, frame)
    parts += [
        _point(point, labels.get(index), timed)
        for index, point in sorted(enumerate(points), key=lambda pair: (pair[1].memory, pair[1].cost))
    ]
    parts.append(_pareto_legend(frame, chosen != "" and any(point.chosen for point in points)))
    omitted = f" {fmt.count(left_out, 'policy')} without a known peak and cost left out." if left_out == 1 else ""
    if left_out > 1:
        omitted = f" {left_out} policies without a known peak and cost left out."
    best = ", ".join(point.row.policy for point in sorted(points, key=lambda point: point.memory) if point.row.pareto)
    description = f"{fmt.count(len(points), 'point')}. On the front, from least memory: {best}.{omitted}"
    return picture(identifier(title, rows, chosen), width, height, title, description, parts, _PARETO_STYLE)


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
    said = _said(point, timed)
    inside = element("title", escape(said))
    if label is not None:
        x, y, anchor, far = label
        if far:
            edge = y - 4 if y > point.y else y + 2
            inside += element("line", x1=point.x, y1=point.y, x2=x, y2=edge, class_="remat-leader")
        bold = "remat-label remat-chosen-label" if point.chosen else "remat-label"
        inside += text(x, y, point.label, text_anchor=anchor, class_=bold)
    if point.chosen:
        size = _HALF + 4
        ring = {"x": point.x - size, "y": point.y - size, "width": 2 * size, "height": 2 * size}
        inside += element("rect", **ring, class_="remat-ring")
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
        aria_label=said,
        aria_pressed=str(point.chosen).lower(),
    )


_Box = tuple[float, float, float, float]


def _placed(points: Sequence[_Point], frame: Frame) -> dict[int, tuple[float, float, str, bool]]:
    """For each point where its label goes, as x, y, anchor and whether a line must lead to it; none without room.

    Greedy: the chosen policy and those on the front first, each in the nearest free place around its point.
    """
    taken: list[_Box] = [(p.x - _HALF, p.y - _HALF, p.x + _HALF, p.y + _HALF) for p in points]
    placed: dict[int, tuple[float, float, str, bool]] = {}
    order = sorted(range(len(points)), key=lambda i: (not points[i].chosen, not points[i].row.pareto, points[i].memory))
    for index in order:
        point = points[index]
        wide = text_width(point.label)
        for x, y, anchor, far in _places(point):
            start = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
            box = (start, y - 10, start + wide, y + 3)
            within = 2 <= box[0] and box[2] <= frame.right + 24 and frame.top - 6 <= box[1] and box[3] <= frame.bottom
            if within and not any(_overlap(box, other) for other in taken):
                taken.append(box)
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


def _pareto_legend(frame: Frame, marked: bool) -> str:
    y = frame.top - 16
    entries = [("◆", "on the front"), ("○", "another is better")] + ([("□", "chosen")] if marked else [])
    line = "   ".join(f"{sign} {word}" for sign, word in entries)
    return text(frame.right, y, line, text_anchor="end", class_="remat-axis", aria_hidden="true")


# ---------------------------------------------------------------------------------------------------- memory over time

_BARS = 360  # moments drawn at most; of several in one place the highest is
_KINDS = ("arguments", "residuals", "temporaries")

_TIMELINE_STYLE = (
    f".remat-svg .remat-arguments{{fill:{colours['quiet']};fill-opacity:.35}}"
    f".remat-svg .remat-residuals{{fill:{colours['accent']};fill-opacity:.85}}"
    f".remat-svg .remat-temporaries{{fill:{colours['warm']};fill-opacity:.28}}"
    f".remat-svg .remat-hatch{{stroke:{colours['back']};stroke-width:1.5;stroke-opacity:.7}}"
    f".remat-svg .remat-dot{{fill:{colours['fg']};fill-opacity:.55}}"
    f".remat-svg .remat-halves{{stroke:{colours['fg']};stroke-dasharray:2 3}}"
    f".remat-svg .remat-peak{{stroke:{colours['fg']};stroke-width:1.5;fill:{colours['fg']}}}"
)


def _thinned(moments: Sequence[Moment], most: int) -> list[tuple[int, Moment]]:
    """At most so many moments with their places: of each stretch the highest one, so that no maximum is lost."""
    if len(moments) <= most:
        return list(enumerate(moments))
    edges = [number * len(moments) // most for number in range(most + 1)]
    return [
        max(((place, moments[place]) for place in range(start, end)), key=lambda pair: pair[1].bytes)
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def timeline_svg(timeline: Timeline, width: int = 680, height: int = 300) -> str:
    """What is held from the first operation of the forward pass to the last of the backward one, and the peak."""
    moments = timeline.moments
    title = f"Estimated memory over the forward and backward pass under {timeline.policy}"
    name = identifier(title, timeline.at, timeline.function, len(moments), timeline.peak_bytes)
    upward = ticks(timeline.peak_bytes)
    frame = Frame(64, 52, width - 14, height - 34, max(len(moments), 1), upward[-1])
    shown = _thinned(moments, _BARS)
    forward = sum(moment.half == "forward" for moment in moments)
    parts = [_patterns(name), frame.vertical_axis(upward, "estimated memory", lambda mark: fmt.nbytes(round(mark)))]
    starts = [frame.x(place) for place, _ in shown[1:]]
    edges = [frame.left, *starts, frame.right]
    below = [0] * len(shown)
    for kind in _KINDS:
        above = [base + getattr(moment, kind) for base, (_, moment) in zip(below, shown, strict=True)]
        if above != below:
            path = _band(edges, [frame.y(each) for each in above], [frame.y(each) for each in below])
            parts.append(element("path", d=path, class_=f"remat-{kind}"))
            if kind != "arguments":
                parts.append(element("path", d=path, fill=f"url(#{name}-{kind})"))
        below = above
    parts.append(frame.horizontal_axis((), "", str))
    parts.append(_halves(frame, forward, len(moments)))
    parts.append(_peak(frame, timeline))
    parts.append(_timeline_legend(name, frame))
    peak = moments[timeline.peak]
    description = (
        f"{fmt.count(forward, 'moment')} forward, {fmt.count(len(moments) - forward, 'moment')} backward. "
        f"{_peak_words(timeline)}: arguments {fmt.nbytes(peak.arguments)}, residuals {fmt.nbytes(peak.residuals)}, "
        f"temporaries {fmt.nbytes(peak.temporaries)}."
    )
    return picture(name, width, height, title, description, parts, _TIMELINE_STYLE)


def _band(edges: Sequence[float], above: Sequence[float], below: Sequence[float]) -> str:
    """The outline between two staircases."""
    there = "".join(f"L{edges[i]:.1f},{y:.1f}H{edges[i + 1]:.1f}" for i, y in enumerate(above))
    back = "".join(f"L{edges[i + 1]:.1f},{below[i]:.1f}H{edges[i]:.1f}" for i in reversed(range(len(below))))
    return f"M{there[1:]}{back}z"


def _patterns(name: str) -> str:
    hatch = element("line", x1=0, y1=0, x2=0, y2=6, class_="remat-hatch")
    dot = element("circle", cx=2, cy=2, r=0.8, class_="remat-dot")
    size = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    return element(
        "defs",
        element("pattern", hatch, id=f"{name}-residuals", patternTransform="rotate(45)", **size)
        + element("pattern", dot, id=f"{name}-temporaries", **size),
    )


def _halves(frame: Frame, forward: int, moments: int) -> str:
    middle = frame.x(forward)
    parts = [element("line", x1=middle, x2=middle, y1=frame.top, y2=frame.bottom, class_="remat-halves")]
    for word, start, end in (("forward", 0, forward), ("backward", forward, moments)):
        if end > start:
            centre = frame.x((start + end) / 2)
            parts.append(text(centre, frame.bottom + 17, word, text_anchor="middle", class_="remat-axis"))
    return "".join(parts)


def _peak_words(timeline: Timeline) -> str:
    moment = timeline.moments[timeline.peak]
    where = " ".join(filter(None, [moment.primitive, fmt.location(moment.source)]))
    return f"Peak {fmt.nbytes(timeline.peak_bytes)}, {moment.half}" + (f", {where}" if where else "")


def _peak(frame: Frame, timeline: Timeline) -> str:
    x, y = frame.x(timeline.peak + 0.5), frame.y(timeline.peak_bytes)
    words = truncate(_peak_words(timeline), 70)
    wide = text_width(words)
    start = min(max(x - wide / 2, frame.left), frame.right - wide)
    return (
        element("path", d=f"M{x:.1f},{y:.1f}l-4,-7h8z", class_="remat-peak")
        + element("line", x1=x, x2=x, y1=y, y2=frame.bottom, class_="remat-peak", stroke_dasharray="1 3")
        + text(start, frame.top - 12 if y < frame.top + 16 else y - 12, words, class_="remat-label")
    )


def _timeline_legend(name: str, frame: Frame) -> str:
    parts, x = list[str](), frame.left + 110
    for kind in _KINDS:
        box = {"x": x, "y": 6, "width": 16, "height": 10}
        parts.append(element("rect", **box, class_=f"remat-{kind}"))
        if kind != "arguments":
            parts.append(element("rect", **box, fill=f"url(#{name}-{kind})"))
        parts.append(text(x + 21, 15, kind, class_="remat-axis"))
        x += 36 + text_width(kind) + 14
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------ held at the peak


def _folded(values: Sequence[LiveValue]) -> list[tuple[int, LiveValue]]:
    """Values that differ in nothing shown with their number, those of most bytes together first."""
    groups: dict[LiveValue, int] = {}
    for value in values:
        groups[value] = groups.get(value, 0) + 1
    return sorted(((count, value) for value, count in groups.items()), key=lambda pair: -pair[0] * pair[1].nbytes)


def _what(value: LiveValue) -> str:
    if value.argument is not None:
        return f"argument {value.argument}"
    if not value.type:
        return f"inside {value.primitive}" if value.primitive else "inside a loop"
    return value.primitive or ("constant" if value.kind == "constant" else "cotangent")


def timeline_html(timeline: Timeline, top: int = 10, width: int = 680) -> str:
    """The picture with a table of what is held at the peak, to stand inside an element of class ``remat``."""
    folded = _folded(timeline.alive)
    rows = list[str]()
    for count, value in folded[:top]:
        total = count * value.nbytes
        times = f' <span class="remat-times">x{count}</span>' if count > 1 else ""
        expression = value.source.expression if value.source else ""
        place = f'<span class="remat-place">{escape(fmt.location(value.source))}</span>' if value.source else ""
        rows.append(
            f'<tr class="remat-row"><td class="remat-num" title="{fmt.exact(total, "bytes")}">{fmt.nbytes(total)}</td>'
            f'<td class="remat-type"><code>{escape(value.type)}</code>{times}</td>'
            f'<td class="remat-kind">{escape(value.kind)}</td><td class="remat-what"><code>{escape(_what(value))}</code></td>'
            f'<td class="remat-source">{place} <code title="{escape(expression)}">{escape(expression)}</code></td></tr>'
        )
    rest = folded[top:]
    if rest:
        number, total = sum(count for count, _ in rest), sum(count * value.nbytes for count, value in rest)
        exact = fmt.exact(total, "bytes")
        rows.append(
            f'<tr class="remat-row"><td class="remat-num" title="{exact}">{fmt.nbytes(total)}</td>'
            f'<td colspan="4">in {fmt.count(number, "more value")}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col" class="remat-{kind}">{head}</th>'
        for head, kind in (("Size", "num"), ("Type", "type"), ("Kind", "kind"), ("What", "what"), ("Source", "source"))
    )
    caption = f"Held at the peak, {fmt.nbytes(timeline.peak_bytes)} by estimate"
    return (
        f'{timeline_svg(timeline, width)}<table class="remat-table"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
