"""The picture of memory over time, with what is held at the peak. Hand-written SVG, which needs no script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_magic.records import LiveValue, Measurement, Moment, Timeline
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.svg import Frame, colours, element, identifier, picture, text, text_width, ticks, truncate
from remat_magic.views.xla_memory import XLA_STYLE, held_by_xla_html, xla_curve, xla_legend, xla_name, xla_words

__all__ = ["timeline_html", "timeline_svg"]

_BARS = 360  # moments drawn at most; of several in one place the highest is
_AXIS = "estimated memory"
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
        for start, end in itertools.pairwise(edges)
    ]


def timeline_svg(timeline: Timeline, width: int = 680, height: int = 300, compiled: Measurement | None = None) -> str:
    """What is held from the first operation of the forward pass to the last of the backward one, and the peak.

    Of a training step, to the end of its update. Over it, XLA's own for a device that it was ``compiled`` for.
    """
    by_xla = compiled.timeline if compiled is not None else None
    moments = timeline.moments
    over = f"the whole of {timeline.step}" if timeline.step else "the forward and backward pass"
    title = f"Estimated memory over {over} under {timeline.policy}"
    name = identifier(title, timeline.at, timeline.function, len(moments), timeline.peak_bytes)
    upward = ticks(max(timeline.peak_bytes, by_xla.peak_bytes if by_xla is not None else 0))
    frame = Frame(64, 52, width - 14, height - (56 if by_xla is not None else 34), max(len(moments), 1), upward[-1])
    shown = _thinned(moments, _BARS)
    parts = [_patterns(name), frame.vertical_axis(upward, _AXIS, lambda mark: fmt.nbytes(round(mark)))]
    starts = [frame.x(place) for place, _ in shown[1:]]
    edges = [frame.left, *starts, frame.right]
    below = [0] * len(shown)
    for kind in _KINDS:
        above = [base + getattr(moment, kind) for base, (_, moment) in zip(below, shown, strict=True)]
        if above != below:
            path = _band(edges, [frame.y(value) for value in above], [frame.y(value) for value in below])
            outline = f"{name}-{kind}-area"  # written once, painted twice: such paths are long
            parts.append(element("defs", element("path", d=path, id=outline)))
            parts.append(element("use", href=f"#{outline}", class_=f"remat-{kind}"))
            if kind != "arguments":
                parts.append(element("use", href=f"#{outline}", fill=f"url(#{name}-{kind})"))
        below = above
    parts.append(frame.horizontal_axis((), "", str))
    phases = _phases(moments)
    parts.append(_phase_labels(frame, phases))
    said = ""
    if compiled is not None and by_xla is not None:
        backward = next((start for phase, start, _ in phases if phase == "backward"), None)
        parts.append(xla_curve(frame, by_xla, backward, len(moments)))
        parts.append(xla_legend(frame.right, height - 2, xla_name(compiled)))
        said = f" The line: {xla_words(compiled, by_xla)} XLA's steps are stretched to the estimate's passes."
    parts.append(_peak(frame, timeline))
    parts.append(_timeline_legend(name, frame))
    peak = moments[timeline.peak]
    lengths = ", ".join(f"{fmt.count(end - start, 'moment')} {phase}" for phase, start, end in phases)
    description = (
        f"{lengths}. "
        f"{_peak_words(timeline)}: arguments {fmt.nbytes(peak.arguments)}, residuals {fmt.nbytes(peak.residuals)}, "
        f"temporaries {fmt.nbytes(peak.temporaries)}.{said}"
    )
    return picture(name, width, height, title, description, parts, _TIMELINE_STYLE + XLA_STYLE * bool(said))


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


def _phases(moments: Sequence[Moment]) -> list[tuple[str, int, int]]:
    """The forward and the backward pass, and the update of a training step: each with its first moment and its end."""
    phases: list[tuple[str, int, int]] = []
    start = 0
    for phase, stretch in itertools.groupby(moments, key=lambda moment: moment.half):
        end = start + len(list(stretch))
        phases.append((phase, start, end))
        start = end
    return phases


def _phase_labels(frame: Frame, phases: Sequence[tuple[str, int, int]]) -> str:
    parts = [
        element("line", x1=frame.x(start), x2=frame.x(start), y1=frame.top, y2=frame.bottom, class_="remat-halves")
        for _, start, _ in phases[1:]
    ]
    for word, start, end in phases:
        if frame.x(end) - frame.x(start) > text_width(word):
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
    high = y < frame.top + 16
    # Up there stands the title of the axis too.
    start = min(max(x - wide / 2, frame.left + (text_width(_AXIS) - 40 if high else 0)), frame.right - wide)
    return (
        element("path", d=f"M{x:.1f},{y:.1f}l-4,-7h8z", class_="remat-peak")
        + element("line", x1=x, x2=x, y1=y, y2=frame.bottom, class_="remat-peak", stroke_dasharray="1 3")
        + text(start, frame.top - 12 if high else y - 12, words, class_="remat-label")
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


# ----------------------------------------------------------------------------------------------------- held at the peak


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


def held_rows(timeline: Timeline, top: int = 10) -> list[tuple[int, LiveValue, str]]:
    """What is held at the peak, the most bytes first: the bytes of all that are alike, one of them, and what it is."""
    return [(count * value.nbytes, value, _what(value)) for count, value in _folded(timeline.alive)[:top]]


def timeline_html(timeline: Timeline, top: int = 10, width: int = 680, compiled: Measurement | None = None) -> str:
    """The picture with a table of what is held at the peak, to stand inside an element of class ``remat``.

    Args:
        timeline: the estimate.
        top: how many rows a table has.
        width: of the picture, in pixels.
        compiled: the same program as XLA compiled it for a device; its own memory over time is drawn and told too.
    """
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
            f'<td class="remat-kind">{escape(value.kind)}</td>'
            f'<td class="remat-what"><code>{escape(_what(value))}</code></td>'
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
    of_step = f" of {timeline.step}" if timeline.step else ""
    caption = f"Held at the peak{of_step}, {fmt.nbytes(timeline.peak_bytes)} by estimate{_sums(timeline)}"
    by_xla = compiled.timeline if compiled is not None else None
    return (
        f"{timeline_svg(timeline, width, 322 if by_xla is not None else 300, compiled)}"
        f"{held_by_xla_html(compiled, by_xla, top) if compiled is not None and by_xla is not None else ''}"
        '<table class="remat-table remat-stacks">'
        f'<caption style="text-align:left">{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
