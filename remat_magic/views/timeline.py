"""The picture of memory over time, with what is held at the peak. Hand-written SVG, which needs no script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_magic.records import LiveValue, Measurement, Moment, Phase, Timeline
from remat_magic.views import format as fmt
from remat_magic.views.alive import KINDS, lookup, lookup_attribute, runs, thinned, value_words
from remat_magic.views.svg import Frame, colours, element, identifier, picture, text, text_width, ticks, truncate
from remat_magic.views.tables import TOP_ROWS, HeldRow, held_table
from remat_magic.views.xla_memory import XLA_STYLE, held_by_xla_html, xla_curve, xla_legend, xla_name, xla_words

_BARS = 360  # moments drawn at most; of several in one place the highest is
_WIDTH, _LEFT, _TOP, _RIGHT, _HEIGHT, _LINE = 680, 64, 52, 14, 192, 17  # pixels: all, margins, plot, a line of words
_AXIS = "estimated memory"
_PASSES: tuple[Phase, ...] = ("forward", "backward", "update")
_TIME = "time: moments, one after another"

_TIMELINE_STYLE = (
    f".remat-svg .remat-arguments{{fill:{colours['quiet']};fill-opacity:.35}}"
    f".remat-svg .remat-residuals{{fill:{colours['accent']};fill-opacity:.85}}"
    f".remat-svg .remat-temporaries{{fill:{colours['warm']};fill-opacity:.28}}"
    f".remat-svg .remat-hatch{{stroke:{colours['back']};stroke-width:1.5;stroke-opacity:.7}}"
    f".remat-svg .remat-dot{{fill:{colours['fg']};fill-opacity:.55}}"
    f".remat-svg .remat-halves{{stroke:{colours['fg']};stroke-dasharray:2 3}}"
    f".remat-svg .remat-peak{{stroke:{colours['fg']};stroke-width:1.5;fill:{colours['fg']}}}"
    f".remat-svg .remat-label{{paint-order:stroke;stroke:{colours['back']};stroke-width:3px}}"
    ".remat-svg [data-stretch] path{vector-effect:non-scaling-stroke}"
)


def timeline_svg(timeline: Timeline, compiled: Measurement | None = None) -> str:
    """What is held from the first operation of the forward pass to the last of the backward one, and the peak.

    Of a training step, to the end of its update. Over it, XLA's own for a device that it was ``compiled`` for.
    """
    by_xla = compiled.timeline if compiled is not None else None
    moments = timeline.moments
    over = f"the whole of {timeline.step}" if timeline.step else "the forward and backward pass"
    title = f"Estimated memory over {over} under {timeline.policy}"
    name = identifier(title, timeline.at, timeline.function, len(moments), timeline.peak_bytes)
    frame = _frame(timeline, compiled)
    phases = _phases(moments)
    parts = [
        _definitions(name, frame),
        frame.vertical_axis(ticks(frame.most_y), _AXIS, lambda mark: fmt.nbytes(round(mark))),
    ]
    curves = _areas(name, frame, thinned(moments, _BARS))
    legend, about_curve = "", ""
    if compiled is not None and by_xla is not None:
        backward = next((start for phase, start, _ in phases if phase == "backward"), None)
        curves += xla_curve(frame, by_xla, backward, len(moments))
        legend = xla_legend(frame.left, frame.bottom + 4 * _LINE, xla_name(compiled))
        about_curve = f" The line: {xla_words(compiled, by_xla)} XLA's steps are stretched to the estimate's passes."
    parts.append(element("g", curves, clip_path=f"url(#{name}-clip)"))
    marks = [mark for mark in ticks(len(moments)) if mark <= len(moments)]
    parts.append(frame.horizontal_axis((), "", str))
    parts.append(element("g", _ticks(frame, marks), class_="remat-ticks"))
    parts.append(_phase_labels(frame, phases))
    parts.append(text(frame.left, frame.bottom + 3 * _LINE - 2, _TIME, class_="remat-axis"))
    parts += [legend, _peak(frame, timeline)]
    parts.append(_timeline_legend(name, frame))
    peak = moments[timeline.peak]
    lengths = ", ".join(f"{fmt.count(end - start, 'moment')} {phase}" for phase, start, end in phases)
    description = (
        f"{lengths}. "
        f"{_peak_words(timeline)}: arguments {fmt.nbytes(peak.arguments)}, residuals {fmt.nbytes(peak.residuals)}, "
        f"temporaries {fmt.nbytes(peak.temporaries)}.{about_curve}"
    )
    style = _TIMELINE_STYLE + XLA_STYLE * (by_xla is not None)
    height = frame.bottom + (3 + (by_xla is not None)) * _LINE + 8
    return picture(name, _WIDTH, height, title, description, parts, style)


def _frame(timeline: Timeline, compiled: Measurement | None) -> Frame:
    """Where the moments and bytes of all that is drawn are."""
    peaks = [timeline.peak_bytes]
    if compiled is not None and compiled.timeline is not None:
        peaks.append(compiled.timeline.peak_bytes)
    most = max(len(timeline.moments), 1)
    return Frame(_LEFT, _TOP, _WIDTH - _RIGHT, _TOP + _HEIGHT, most, ticks(max(peaks))[-1])


def _areas(name: str, frame: Frame, shown: Sequence[tuple[int, Moment]]) -> str:
    """Of each kind of memory one area, on those below."""
    parts = list[str]()
    edges = [frame.left, *(frame.x(place) for place, _ in shown[1:]), frame.right]
    below = [0] * len(shown)
    for kind in KINDS:
        above = [base + getattr(moment, kind) for base, (_, moment) in zip(below, shown, strict=True)]
        if above != below:
            path = _band(edges, [frame.y(value) for value in above], [frame.y(value) for value in below])
            outline = f"{name}-{kind}-area"  # written once, painted twice: such paths are long
            parts.append(element("defs", element("path", d=path, id=outline, data_area=kind)))
            parts.append(element("use", href=f"#{outline}", class_=f"remat-{kind}"))
            if kind != "arguments":
                parts.append(element("use", href=f"#{outline}", fill=f"url(#{name}-{kind})"))
        below = above
    return "".join(parts)


def _ticks(frame: Frame, marks: Sequence[float]) -> str:
    def label(mark: float) -> str:
        words = f"{mark:,.0f}"
        x = min(frame.x(mark), frame.right + _RIGHT - text_width(words) / 2)  # the last one is not cut off
        return text(x, frame.bottom + 15, words, text_anchor="middle", class_="remat-tick")

    return "".join(
        element("line", x1=frame.x(mark), x2=frame.x(mark), y1=frame.bottom, y2=frame.bottom + 4, class_="remat-base")
        + label(mark)
        for mark in marks
    )


def _band(edges: Sequence[float], above: Sequence[float], below: Sequence[float]) -> str:
    """The outline between two staircases."""
    upper = "".join(f"L{edges[i]:.1f},{y:.1f}H{edges[i + 1]:.1f}" for i, y in enumerate(above))
    lower = "".join(f"L{edges[i + 1]:.1f},{below[i]:.1f}H{edges[i]:.1f}" for i in reversed(range(len(below))))
    return f"M{upper[1:]}{lower}z"


def _definitions(name: str, frame: Frame) -> str:
    hatch = element("line", x1=0, y1=0, x2=0, y2=6, class_="remat-hatch")
    dot = element("circle", cx=2, cy=2, r=0.8, class_="remat-dot")
    size = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    return element(
        "defs",
        element("pattern", hatch, id=f"{name}-residuals", patternTransform="rotate(45)", **size)
        + element("pattern", dot, id=f"{name}-temporaries", **size)
        + element("clipPath", _plot(frame), id=f"{name}-clip"),
    )


def _plot(frame: Frame) -> str:
    sizes = {"width": frame.right - frame.left, "height": frame.bottom - frame.top + 9}
    return element("rect", x=frame.left, y=frame.top - 8, **sizes, class_="remat-plot")


def _phases(moments: Sequence[Moment]) -> list[tuple[str, int, int]]:
    """The forward and the backward pass, and the update of a training step: each with its first moment and its end.

    A pass goes on to the beginning of the next one, whatever operations of the forward half are put off until then.
    """
    reached = itertools.accumulate((_PASSES.index(moment.half) for moment in moments), max)
    phases: list[tuple[str, int, int]] = []
    start = 0
    for phase, stretch in itertools.groupby(reached):
        end = start + len(list(stretch))
        phases.append((_PASSES[phase], start, end))
        start = end
    return phases


def _phase_labels(frame: Frame, phases: Sequence[tuple[str, int, int]]) -> str:
    parts = list[str]()
    for word, start, end in phases:
        if start:
            line = {"x1": frame.x(start), "x2": frame.x(start), "y1": frame.top, "y2": frame.bottom}
            parts.append(element("line", **line, class_="remat-halves", data_place=start))
        if frame.x(end) - frame.x(start) > text_width(word):
            centre, place = frame.x((start + end) / 2), {"data_first": start, "data_end": end}
            label = text(centre, frame.bottom + 2 * _LINE - 2, word, text_anchor="middle", class_="remat-axis", **place)
            parts.append(label)
    return "".join(parts)


def _about(timeline: Timeline) -> str:
    return fmt.about(timeline.peak_bytes, timeline.peak_low, timeline.peak_high)


def _peak_words(timeline: Timeline) -> str:
    return f"Peak {_about(timeline)}, {runs(timeline.moments[timeline.peak])}"


def _peak(frame: Frame, timeline: Timeline) -> str:
    """The mark of the peak, and its words: above the highest line where they would meet the axis's name below."""
    place = timeline.peak + 0.5
    x, y = frame.x(place), frame.y(timeline.peak_bytes)
    words = truncate(_peak_words(timeline), 70)
    wide = text_width(words)
    high = y < frame.top + 16
    # Up there stands the title of the axis too.
    least = frame.left + (text_width(_AXIS) - 40 if high else 0)
    start = min(max(x - wide / 2, least), frame.right - wide)
    mark = element("path", d=f"M{x:.1f},{y:.1f}l-4,-7h8z", class_="remat-peak") + element(
        "line", x1=x, x2=x, y1=y, y2=frame.bottom, class_="remat-peak", stroke_dasharray="1 3"
    )
    place_of = {"data_label": f"{place}", "data_least": f"{least:.1f}", "data_wide": f"{wide:.1f}"}
    return element("g", mark, data_place=f"{place}") + text(
        start, frame.top - 12 if high else y - 12, words, class_="remat-label", **place_of
    )


def _timeline_legend(name: str, frame: Frame) -> str:
    parts, x = list[str](), frame.left + 110
    for kind in KINDS:
        box = {"x": x, "y": 6, "width": 16, "height": 10}
        parts.append(element("rect", **box, class_=f"remat-{kind}"))
        if kind != "arguments":
            parts.append(element("rect", **box, fill=f"url(#{name}-{kind})"))
        parts.append(text(x + 21, 15, kind, class_="remat-axis"))
        x += 36 + text_width(kind) + 14
    return "".join(parts)


# ----------------------------------------------------------------------------------------------------- held at the peak


def _folded(values: Sequence[LiveValue]) -> list[tuple[int, LiveValue]]:
    """Values that differ in nothing shown with their number, those of most bytes together first."""
    groups: dict[LiveValue, int] = {}
    for value in values:
        groups[value] = groups.get(value, 0) + 1
    return sorted(((count, value) for value, count in groups.items()), key=lambda pair: -pair[0] * pair[1].nbytes)


_WORDS = {
    "residual": "saved",
    "parameter": "parameters",
    "state": "optimizer state",
    "batch": "batch",
    "gradient": "gradients",
    "output": "returned",
    "temporary": "temporaries",
    "constant": "constants",
}


def _sums(timeline: Timeline) -> str:
    """Of a training step what each kind of value takes, the most first."""
    if not timeline.step:
        return ""
    sums = sorted(((timeline.alive_bytes(kind), word) for kind, word in _WORDS.items()), reverse=True)
    return ": " + ", ".join(f"{word} {fmt.nbytes(nbytes)}" for nbytes, word in sums if nbytes)


def held_rows(timeline: Timeline) -> list[HeldRow]:
    """What is held at the peak, the most bytes together first."""
    return [
        HeldRow(count, count * value.nbytes, value.type, value.kind, value_words(value), value.source)
        for count, value in _folded(timeline.alive)
    ]


def timeline_html(
    timeline: Timeline,
    top: int = TOP_ROWS,
    compiled: Measurement | None = None,
    live: bool = False,
) -> str:
    """The picture with a table of what is held at the peak, to stand inside an element of class ``remat``.

    Args:
        timeline: the estimate.
        top: how many rows a table has.
        compiled: the same program as XLA compiled it for a device; its own memory over time is drawn and told too.
        live: whether a script is at hand, which tells of other moments what it tells of the peak, and zooms.
    """
    of_step = f" of {timeline.step}" if timeline.step else ""
    caption = f"Held at the peak{of_step}, {_about(timeline)} by estimate{_sums(timeline)}"
    by_xla = compiled.timeline if compiled is not None else None
    svg = timeline_svg(timeline, compiled)
    by_compiler = held_by_xla_html(compiled, by_xla, top) if compiled is not None and by_xla is not None else ""
    table = held_table(caption, "Kind", held_rows(timeline), top, "value")
    if not live:
        return f"{svg}{by_compiler}{table}"
    frame = _frame(timeline, compiled)
    ends = {"left": frame.left, "right": frame.right, "above": frame.top, "bottom": frame.bottom, "most": frame.most_y}
    data = lookup_attribute({**lookup(timeline, top), **ends})
    return f'<div class="remat-time" {data}><div class="remat-time-picture">{svg}</div>{table}</div>{by_compiler}'
