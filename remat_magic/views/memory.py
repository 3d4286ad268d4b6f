"""Memory: what is alive at the peak as a bar, memory over time as a picture, and what XLA says of both.

The picture is stacked by the lines that hold it: SVG in HTML, which needs no script.
"""

from __future__ import annotations

import html
import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic.errors import printable
from remat_magic.records import (
    Exhausted,
    LiveKind,
    LiveValue,
    Measurement,
    Moment,
    Phase,
    Report,
    SourceSpan,
    Timeline,
    XlaBuffer,
    XlaMemory,
)
from remat_magic.views import format as fmt
from remat_magic.views.format import escape, line_key, linked, ticks
from remat_magic.views.tables import (
    KEYS,
    Home,
    Part,
    Row,
    Table,
    at_source,
    cell,
    expression_html,
    near,
    size,
    table_html,
    typed,
)
from remat_magic.views.values import home_of

# What is alive anyway comes first. By the kind of a value: how it is called, and by what it is coloured.
ROLES = {
    "parameter": ("parameters", "arguments"),
    "argument": ("arguments", "arguments"),
    "state": ("optimizer state", "state"),
    "batch": ("batch", "batch"),
    "constant": ("constants", "constants"),
    "residual": ("saved for backward", "saved"),
    "gradient": ("gradients", "gradients"),
    "output": ("results", "returned"),
    "temporary": ("temporaries", "temporaries"),
}


TOP_ROWS = 10  # of a table of what is live
_LEAST = 1000  # what is less than one of so many is no part of the list


def peak_parts(report: Report) -> list[tuple[str, str, int]]:
    """What is alive at the peak: of each kind how it is called, by what it is coloured, and its bytes."""
    sums = dict(report.peak_by_kind)
    return [(*words, sums[kind]) for kind, words in ROLES.items() if sums.get(kind)]


def role_of(kind: str) -> str:
    """By what a kind of value is coloured."""
    return ROLES[kind][1]


def live_in_xla(memory: XlaMemory, timeline: Timeline) -> list[LiveValue]:
    """What is live at the peak of XLA's program, in the estimate's kinds; the estimate tells what its arguments are."""
    arguments: dict[str, LiveKind] = {
        life.value.argument: life.value.kind for life in timeline.lives if life.value.argument
    }
    here = [buffer for buffer in memory.alive if buffer.space == "device"]
    kinds: list[LiveKind] = [
        arguments.get(buffer.op_name, "argument") if buffer.role == "argument" else _XLA_KINDS[buffer.role]
        for buffer in here
    ]
    return [
        LiveValue(buffer.type, buffer.nbytes, kind, buffer.opcode, source=buffer.source)
        for buffer, kind in zip(here, kinds, strict=True)
    ]


_XLA_KINDS: dict[str, LiveKind] = {
    "output": "output",
    "constant": "constant",
    "saved": "residual",
    "carried": "temporary",
    "temporary": "temporary",
}


def peak_bar_html(report: Report, memory: tuple[str, int] | None = None, estimate: bool = False) -> str:
    """The bar of a report's estimate; nothing where that is not known.

    It is as long as the peak or the ``memory`` that it is to fit (its name and bytes), whichever is more. With
    ``estimate`` it says that it is one, since a compiler's word stands above.
    """
    peak, parts = report.peak_bytes, peak_parts(report)
    if not peak or not parts:
        return ""
    caption = f"Alive at the estimated peak of {fmt.about(peak, report.peak_low, report.peak_high)}"
    lead = f"by estimate, {fmt.nbytes(peak)}:" if estimate else ""
    return _bar(parts, peak, max(peak, report.peak_high or 0), memory, caption, lead)


def compiled_bar_html(values: Sequence[LiveValue], needed: int, memory: tuple[str, int]) -> str:
    """The bar of what XLA's program holds at its peak, and of what is allocated besides."""
    sums = {kind: sum(value.nbytes for value in values if value.kind == kind) for kind in ROLES}
    parts = [(*words, sums[kind]) for kind, words in ROLES.items() if sums[kind]]
    if (idle := needed - sum(sums.values())) > 0:
        parts.append(("allocated and not in use then", "constants", idle))
    return _bar(parts, needed, needed, memory, f"Held at the peak of the compiled program, {fmt.nbytes(needed)}")


def _bar(
    parts: Sequence[tuple[str, str, int]],
    peak: int,
    high: int,
    memory: tuple[str, int] | None,
    caption: str,
    lead: str = "",
) -> str:
    """Parts that add up to ``peak``, and how much more it may be, over a list that says the same in words."""
    scale = max(high, memory[1] if memory else 0)
    bars = [_piece(role, nbytes / scale, f"{word} {fmt.nbytes(nbytes)}") for word, role, nbytes in parts]
    if high > peak:
        bars.append(_piece("doubt", (high - peak) / scale, f"it may be {fmt.nbytes(high)}"))
    items = [f'<li class="remat-label">{lead}</li>'] if lead else []
    items += [
        f'<li title="{fmt.exact(nbytes, "bytes")}"><i class="remat-role remat-role-{role}"></i> {word} '
        f"<b>{fmt.nbytes(nbytes)}</b></li>"
        for word, role, nbytes in sorted(parts, key=lambda part: -part[2])
        if _LEAST * nbytes >= peak
    ]
    if memory:
        name, capacity = escape(memory[0]), fmt.nbytes(memory[1])
        left = f"left:{100 * memory[1] / scale:.2f}%"
        bars.append(f'<i class="remat-limit" style="{left}" title="{name} has {capacity}"></i>')
        items.append(f'<li><i class="remat-limit-key"></i> {name} <b>{capacity}</b></li>')
    return (
        f'<div class="remat-peak-bar"><div class="remat-stack" aria-hidden="true">{"".join(bars)}</div>'
        f'<ul class="remat-roles" aria-label="{caption}">{"".join(items)}</ul></div>'
    )


def _piece(role: str, share: float, title: str) -> str:
    return f'<i class="remat-role remat-role-{role}" style="width:{100 * share:.2f}%" title="{title}"></i>'


# ----------------------------------------------------------------------------------------------------- memory over time


COLUMNS = 400  # of the picture, each of which shows the highest of its moments
_PART = 200  # what never comes to one of so many parts of the peak is among the others
_LINES = 12  # lines with a colour of their own; the others are one grey
_FAR = 2.5  # a device with so many times the peak is not drawn
_PASSES: tuple[Phase, ...] = ("forward", "backward", "update")

_GREYS = {"parameter": "#9e9e9e", "argument": "#9e9e9e", "state": "#bdbdbd", "batch": "#7d8a91", "constant": "#b0a89f"}
# Cool is saved, warm is temporary, green is given back: as in the bar of the peak.
_COOL = ("#1976d2", "#64b5f6", "#3949ab", "#26a6b8", "#7e57c2", "#90a4e8", "#00796b", "#4dd0e1", "#5c6bc0", "#b39ddb",
         "#0d47a1", "#80cbc4")  # fmt: skip
_WARM = ("#ef6c00", "#ffb74d", "#c2452d", "#f2a08c", "#a1662f", "#ffd54f", "#e57373", "#bf8f5f", "#f48fb1", "#d4a017",
         "#8d5a4a", "#ffab91")  # fmt: skip
_GREEN = ("#43a047", "#a5d6a7", "#7cb342", "#2e7d5b", "#c0ca33", "#66bb9a")
_FAMILIES = {"residual": _COOL, "gradient": _GREEN, "output": _GREEN, "temporary": _WARM}
_REST = "#cfd2d6"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one line of the source holds in one role, or what has no line: ``live`` has its bytes at each moment."""

    kind: str
    largest: LiveValue
    count: int
    live: tuple[int, ...]
    colour: str = ""

    @property
    def life(self) -> tuple[int, int]:
        """The first moment that holds any of it, and the one after the last."""
        return (
            next(number for number, size in enumerate(self.live) if size),
            next(len(self.live) - number for number, size in enumerate(reversed(self.live)) if size),
        )


def layers(timeline: Timeline) -> list[Layer]:
    """All that is live at any moment, from the bottom up: the lines that have most are coloured."""
    groups: dict[tuple[str, object], list[tuple[int, int, LiveValue]]] = {}
    for life in timeline.lives:
        source = life.value.source
        line = (source.file, source.cell, source.line) if source and life.value.kind in _FAMILIES else None
        groups.setdefault((life.value.kind, line), []).append((life.first, life.end, life.value))
    ranked = sorted(
        (_layer(kind, lives, len(timeline.moments)) for (kind, _), lives in groups.items()),
        key=lambda layer: -max(layer.live),
    )
    coloured = dict.fromkeys(_FAMILIES.values(), 0)
    least = timeline.peak_bytes / _PART
    shown, rest = list[Layer](), list[Layer]()
    for layer in ranked:
        family = _FAMILIES.get(layer.kind)
        if max(layer.live) < least:
            rest.append(layer)
        elif family is None:
            shown.append(replace(layer, colour=_GREYS[layer.kind]))
        elif layer.largest.source is None or sum(coloured.values()) == _LINES:
            rest.append(layer)
        else:
            shown.append(replace(layer, colour=family[coloured[family] % len(family)]))
            coloured[family] += 1
    shown.sort(key=lambda layer: [*ROLES].index(layer.kind))  # what is alive anyway lies at the bottom
    if rest:
        live = tuple(map(sum, zip(*(layer.live for layer in rest), strict=True)))
        shown.append(Layer("", rest[0].largest, sum(layer.count for layer in rest), live, _REST))
    return shown


def _layer(kind: str, lives: Sequence[tuple[int, int, LiveValue]], moments: int) -> Layer:
    changes = [0] * (moments + 1)
    for first, end, value in lives:
        changes[first] += value.nbytes
        changes[end] -= value.nbytes
    largest = max((value for _, _, value in lives), key=lambda value: value.nbytes)
    return Layer(kind, largest, len(lives), tuple(itertools.accumulate(changes))[:moments])


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where moments lie, as parts of the whole: ``edges`` has the beginning of each, and the end."""

    edges: tuple[float, ...]
    seconds: float

    def columns(self, heights: Sequence[int]) -> list[int]:
        """For each column of the picture the highest of the moments that are in it."""
        shown = list[int]()
        for column in range(COLUMNS):
            first = max(0, bisect_left(self.edges, column / COLUMNS) - 1)
            end = max(first + 1, bisect_left(self.edges, (column + 1) / COLUMNS))
            shown.append(max(range(first, min(end, len(heights))), key=heights.__getitem__))
        return shown


def _axis(timeline: Timeline) -> _Axis:
    total = sum(timeline.seconds)
    takes = timeline.seconds if total else [1] * len(timeline.moments)
    edges = itertools.accumulate(takes, initial=0.0)
    return _Axis(tuple(edge / sum(takes) for edge in edges), total)


def _phases(moments: Sequence[Moment]) -> list[tuple[Phase, int, int]]:
    """The forward and the backward pass, and the update of a training step: each with its first moment and its end.

    A pass goes on to the beginning of the next one, whatever operations of the forward half are put off until then.
    """
    reached = itertools.accumulate((_PASSES.index(moment.half) for moment in moments), max)
    phases: list[tuple[Phase, int, int]] = []
    start = 0
    for phase, stretch in itertools.groupby(reached):
        end = start + len(list(stretch))
        phases.append((_PASSES[phase], start, end))
        start = end
    return phases


def runs(moment: Moment) -> str:
    """The pass of a moment, and what runs then: ``backward, sin In[3]:4``."""
    where = " ".join(filter(None, [moment.primitive, fmt.location(moment.source)]))
    return f"{moment.half}, {where}" if where else moment.half


def timeline_html(
    timeline: Timeline,
    compiled: Measurement | None = None,
    limit: tuple[str, int] | None = None,
    live: bool = False,
) -> str:
    """The picture of the estimate with a table of what is live at its peak, to stand in an element of class ``remat``.

    XLA's own memory over time is drawn too, if the program was ``compiled``; ``limit`` is the device's name and bytes.
    """
    found, axis = layers(timeline), _axis(timeline)
    by_xla = compiled.timeline if compiled is not None else None
    highest = max(timeline.peak_bytes, by_xla.peak_bytes if by_xla else 0)
    if limit is not None and limit[1] > _FAR * highest:
        limit = None
    marks = ticks(max(highest, limit[1] if limit else 0))
    shown = axis.columns([moment.bytes for moment in timeline.moments])
    phases = _phases(timeline.moments)
    picture = _areas(found, shown, marks[-1], lambda layer: _layer_words(layer, timeline, axis))
    key = below = ""
    if compiled is not None and by_xla is not None:
        backward = next((axis.edges[start] for phase, start, _ in phases if phase == "backward"), None)
        picture += xla_curve(by_xla, backward, marks[-1], COLUMNS)
        key = f'<p class="remat-xla-key">{escape(xla_name(compiled))}</p>'
        below = table_html(xla_table(compiled, by_xla, timeline))
    about = fmt.about(timeline.peak_bytes, timeline.peak_low, timeline.peak_high)
    said = f"At the peak, {runs(timeline.moments[timeline.peak])}: {about} by estimate"
    table = table_html(layers_table(timeline, live))
    heading = f'<p class="remat-time-said" data-said>{escape(said)}</p>'
    end = ""
    if limit is not None:
        style, label = f"bottom:{100 * limit[1] / marks[-1]:.2f}%", f"{escape(limit[0])}: {fmt.nbytes(limit[1])}"
        end = f'<i class="remat-limit-line" style="{style}"><span>{label}</span></i>'
    scripted = _lookup(timeline, found, shown, axis, said) if live else ""
    keys = f' tabindex="0" role="slider" aria-label="Moment" aria-valuemin="1" aria-valuemax="{COLUMNS}" {KEYS}'
    return (
        f'<div class="remat-time"{scripted}>{heading}<div class="remat-plot"{keys if live else ""}>'
        f'{_upward(marks)}<div class="remat-area">'
        f"{_svg(timeline, picture, compiled)}{end}"
        f'<i class="remat-peak-mark" style="left:{50 * sum(axis.edges[timeline.peak : timeline.peak + 2]):.2f}%" '
        'title="the peak"></i><i class="remat-cursor" hidden></i></div>'
        f"{_onward(axis, len(timeline.moments), phases)}</div>{key}{table}</div>{below}"
    )


def _svg(timeline: Timeline, picture: str, compiled: Measurement | None) -> str:
    over = timeline.step or "the forward and backward pass"
    title = f"Memory over the time of {over} under {timeline.policy}, by estimate"
    if compiled is not None and compiled.timeline is not None:
        title += f". The line: {xla_name(compiled)}. {xla_words(compiled, compiled.timeline)}"
    return (
        f'<svg class="remat-svg" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(title)}">{picture}</svg>'
    )


def _areas(found: Sequence[Layer], shown: Sequence[int], most: float, words: Callable[[Layer], str]) -> str:
    """An area for each layer, on those below."""
    parts, below = list[str](), [0] * len(shown)
    for number, layer in enumerate(found):
        above = [base + layer.live[moment] for base, moment in zip(below, shown, strict=True)]
        path = _outline(above, below, most)
        if path:
            title = f"<title>{escape(words(layer))}</title>"
            parts.append(f'<path d="{path}" fill="{layer.colour}" data-layer="{number}">{title}</path>')
        below = above
    return "".join(parts)


def _outline(above: Sequence[int], below: Sequence[int], most: float) -> str:
    """The outlines between two staircases, wherever one is higher than the other."""

    def stairs(heights: Sequence[int], columns: Sequence[int]) -> str:
        steps, y = list[str](), None
        for column in columns:
            if heights[column] != y:
                y = heights[column]
                steps.append(f"{'' if not steps else f'H{column}'}V{100 - 100 * y / most:.2f}")
        return "".join(steps)

    path = ""
    for there, stretch in itertools.groupby(range(len(above)), lambda column: above[column] > below[column]):
        columns = list(stretch)
        if there:
            first, end = columns[0], columns[-1] + 1
            back = [(below[column], column) for column in reversed(columns)]
            path += f"M{first},{100 - 100 * below[first] / most:.2f}{stairs(above, columns)}H{end}"
            for y, steps in itertools.groupby(back, lambda pair: pair[0]):
                path += f"V{100 - 100 * y / most:.2f}H{[*steps][-1][1]}"
            path += "z"
    return path


def _upward(marks: Sequence[float]) -> str:
    labels = "".join(
        f'<span style="bottom:{100 * mark / marks[-1]:.2f}%">{fmt.nbytes(round(mark))}</span>' for mark in marks
    )
    return f'<div class="remat-upward" aria-hidden="true">{labels}</div>'


def _onward(axis: _Axis, moments: int, phases: Sequence[tuple[Phase, int, int]]) -> str:
    """What the horizontal axis has: its numbers, the passes, and what it is."""
    whole: float = axis.seconds or moments
    numbers = "".join(
        f'<span style="left:{100 * mark / whole:.2f}%">{fmt.seconds(mark) if axis.seconds else f"{mark:,.0f}"}</span>'
        for mark in ticks(whole)
        if mark <= 0.96 * whole
    )
    passes = "".join(
        f'<span style="left:{100 * left:.2f}%;width:{100 * width:.2f}%">{phase if width > 0.07 else ""}</span>'
        for phase, start, end in phases
        if (width := axis.edges[end] - (left := axis.edges[start])) > 0
    )
    unit = "estimated time" if axis.seconds else "operations, one after another (choose a device for times)"
    return (
        f'<div class="remat-onward" aria-hidden="true">{numbers}</div>'
        f'<div class="remat-passes" aria-hidden="true">{passes}</div><div class="remat-axis">{unit}</div>'
    )


# ---------------------------------------------------------------------------------------------------- what holds it


def _role(layer: Layer) -> str:
    return ROLES[layer.kind][0] if layer.kind in ROLES else "of several kinds"


def _source(layer: Layer) -> SourceSpan | None:
    return layer.largest.source if layer.kind in _FAMILIES else None


def _what(layer: Layer) -> str:
    source = _source(layer)
    return source.expression if source else "" if layer.kind else fmt.count(layer.count, "other value")


def _time(axis: _Axis, part: float) -> str:
    """The time, to be followed by more; nothing where it is not known."""
    return f"{fmt.seconds(part * axis.seconds)}, " if axis.seconds else ""


def _when(timeline: Timeline, axis: _Axis, moment: int) -> str:
    """A moment in words: its time, where that is known, and its pass."""
    half = timeline.moments[min(moment, len(timeline.moments) - 1)].half
    return f"{_time(axis, axis.edges[moment])}{half}"


def _life_words(layer: Layer, timeline: Timeline, axis: _Axis) -> str:
    first, end = layer.life
    if (first, end) == (0, len(timeline.moments)):
        return "held throughout"
    return f"held from {_when(timeline, axis, first)} to {_when(timeline, axis, end)}"


def _layer_words(layer: Layer, timeline: Timeline, axis: _Axis) -> str:
    """A layer on hover: ``softmax(s), In[2]:14, saved for backward: up to 25.8 GB, held from forward to backward``."""
    what = ", ".join(filter(None, [_what(layer), fmt.location(_source(layer)), _role(layer)]))
    return f"{what}: up to {fmt.nbytes(max(layer.live))}, {_life_words(layer, timeline, axis)}"


def layers_table(timeline: Timeline, live: bool = False) -> Table:
    """What holds the memory at the peak, the most first, and below what is gone or to come by then."""
    axis, home, rows = _axis(timeline), home_of(life.value.source for life in timeline.lives), list[Row]()
    for number, layer in sorted(enumerate(layers(timeline)), key=lambda pair: -pair[1].live[timeline.peak]):
        nbytes, (first, end) = layer.live[timeline.peak], layer.life
        left, width = 100 * axis.edges[first], 100 * (axis.edges[end] - axis.edges[first])
        strip = f'<i style="margin-left:{left:.1f}%;width:{width:.1f}%;background:{layer.colour}"></i>'
        swatch = f'<i class="remat-swatch" style="background:{layer.colour}"></i>'
        cells = (
            size(nbytes, fmt.nbytes(nbytes) if nbytes else ""),
            cell(fmt.percent(nbytes, timeline.peak_bytes) if nbytes else ""),
            cell(Part(_words(layer), html=f"{swatch} {_line(layer, home, live)}")),
            cell(_role(layer)),
            cell(Part("", html=strip), hover=_life_words(layer, timeline, axis)),
        )
        rows.append(Row(cells, f' data-layer="{number}"{linked(_source(layer))}'))
    heads = (("Size", "num"), ("Share", "num"), ("Line", "held"), ("What it is", "kind"), ("When", "life"))
    return Table("What holds the memory", heads, rows, "layers")


def _words(layer: Layer) -> str:
    return ", ".join(filter(None, [_what(layer), fmt.location(_source(layer))])) or _role(layer)


def _line(layer: Layer, home: Home | None, live: bool) -> str:
    source = _source(layer)
    if source is None:
        return escape(_what(layer)) or escape(_role(layer))
    where = escape(near(source, home))
    place = f'<span class="remat-place">{where}</span>'
    if live:
        place = (
            f'<button type="button" class="remat-link remat-place" data-pick="{line_key(source)}" aria-pressed="false" '
            f'title="Mark this line everywhere; once more takes it back" {KEYS}>{where}</button>'
        )
    return f"{expression_html(source.expression)}, {place}"


# ------------------------------------------------------------------------------------------------------- for a script


def _lookup(timeline: Timeline, found: Sequence[Layer], shown: Sequence[int], axis: _Axis, said: str) -> str:
    """The attribute ``data-time``: for the script, the bytes of each layer in each column of the picture."""

    def changes(values: Sequence[Any]) -> list[tuple[int, Any]]:
        """The columns from which on something else is so."""
        return [(at, value) for at, value in enumerate(values) if not at or value != values[at - 1]]

    data = {
        "columns": COLUMNS,
        "said": [
            printable(f"{_time(axis, (column + 0.5) / COLUMNS)}{runs(timeline.moments[moment])}")
            for column, moment in enumerate(shown)
        ],
        "live": [changes([layer.live[moment] for moment in shown]) for layer in found],
        "peak": shown.index(timeline.peak) if timeline.peak in shown else 0,
        "atPeak": printable(said),
    }
    return f' data-time="{html.escape(json.dumps(data, separators=(",", ":")))}"'


# -------------------------------------------------------------------------------------------------------- as XLA has it


_POINTS = 720  # steps drawn at most; of several in one place the highest is


def xla_name(measured: Measurement) -> str:
    """What the curve is called."""
    return f"XLA for {measured.device}"


def xla_curve(memory: XlaMemory, backward: float | None, most: float, width: int) -> str:
    """The curve of XLA's schedule, in a picture of a width that is 100 high, which is ``most`` bytes.

    ``backward`` is the part of the picture before the backward pass, None where there is none.
    """
    steps = len(memory.held)
    split = memory.backward if backward is not None and memory.backward else None

    def across(step: float) -> float:
        """XLA's steps are stretched: its passes begin where the estimate's do."""
        if split is None or backward is None:
            return width * step / steps
        if step < split:
            return width * backward * step / split
        return width * (backward + (1 - backward) * (step - split) / max(1, steps - split))

    edges = {number * steps // _POINTS for number in range(_POINTS + 1)} | (
        {split} if split is not None else set[int]()
    )
    stretches = [(first, last) for first, last in itertools.pairwise(sorted(edges))]
    path = "".join(
        f"{'L' if number else 'M'}{across(first):.1f},{(y := 100 - 100 * max(memory.held[first:last]) / most):.2f}"
        f"L{across(last):.1f},{y:.2f}"
        for number, (first, last) in enumerate(stretches)
    )
    return f'<path d="{path}" class="remat-xla"/>'


def xla_words(measured: Measurement, memory: XlaMemory) -> str:
    """One sentence: the peak, and what is allocated besides."""
    rest = ""
    if measured.needed_bytes is not None and measured.needed_bytes > memory.peak_bytes:
        idle = fmt.nbytes(measured.needed_bytes - memory.peak_bytes)
        rest = f"; another {idle} is allocated and not in use then, so the program needs "
        rest += fmt.nbytes(measured.needed_bytes)
    unknown = f" The sizes of {fmt.count(memory.unknown, 'buffer')} are not known." if memory.unknown else ""
    quick = ", compiled quickly," if measured.effort == "quick" else ""
    at_peak = f"Held at the peak of XLA's program for {measured.device}{quick} {fmt.nbytes(memory.peak_bytes)}"
    return f"{at_peak}{rest}.{unknown}"


def _xla_what(buffer: XlaBuffer) -> str:
    """An argument's name, or the last part of JAX's path to the operation."""
    if buffer.role == "argument":
        return buffer.op_name or buffer.name
    return buffer.op_name.rpartition("/")[2] or buffer.opcode


def xla_table(measured: Measurement, memory: XlaMemory, timeline: Timeline) -> Table:
    """What XLA's program holds at its peak, the biggest first, in the words of the bar; the rows add up to the peak."""
    here = [buffer for buffer in memory.alive if buffer.space == "device"]
    rows = [
        (buffer.nbytes, buffer.type, ROLES[value.kind][0], _xla_what(buffer), buffer.source, buffer.library)
        for buffer, value in zip(here, live_in_xla(memory, timeline), strict=True)
    ]
    elsewhere = sum(buffer.nbytes for buffer in memory.alive if buffer.space != "device")
    others = f" In other memories, besides: {fmt.nbytes(elsewhere)}." if elsewhere else ""
    return _buffers_table(f"{xla_words(measured, memory)}{others}", "What it is", rows)


_Buffer = tuple[int, str, str, str, SourceSpan | None, SourceSpan | None]  # bytes, type, kind, what, line, library's


def _buffers_table(caption: str, kind: str, buffers: Iterable[_Buffer]) -> Table:
    """What is live at a peak, what is alike in one row, the biggest first; the last row has the rest.

    The ``caption`` stands above, ``kind`` is the head of the column of kinds.
    """
    groups: dict[tuple[str, str, str, SourceSpan | None, SourceSpan | None], list[int]] = {}
    for nbytes, type_, kind_, what, source, library in buffers:
        groups.setdefault((type_, kind_, what, source, library), []).append(nbytes)
    rows = sorted(groups.items(), key=lambda row: -sum(row[1]))
    body = list[Row]()
    for (type_, kind_, what, source, library), sizes in rows[:TOP_ROWS]:
        of_library = [" ", Part(library.place, "library")] if library else []
        made = cell(Part(what, "code"), *at_source(source), *of_library)
        body.append(Row((size(sum(sizes)), typed(type_, len(sizes)), cell(kind_), made)))
    if rest := [nbytes for _, sizes in rows[TOP_ROWS:] for nbytes in sizes]:
        more = fmt.count(len(rest), "more buffer")
        body.append(Row((size(sum(rest)), cell(), cell(), cell(f"in {more}"))))
    heads = (("Size", "num"), ("Value", "type"), (kind, "kind"), ("Made by", "made"))
    return Table(caption, heads, body, visible=True)


# ------------------------------------------------------------------------------------------------ where it is exhausted


_PARTS = 4  # of what a program needs, those that are shown


def exhausted_sentences(record: Exhausted) -> list[str]:
    """What could not be had, and what that means."""
    where = {"host": " of the host", "device": ""}.get(record.memory, f" in {record.memory}")
    wanted = ""
    if record.wanted_bytes is not None:
        wanted = f": {fmt.nbytes(record.wanted_bytes)} {'wanted' if record.when != 'running' else 'wanted at once'}"
    if record.available_bytes is not None and record.wanted_bytes is not None:
        over = record.wanted_bytes - record.available_bytes
        wanted += f", {fmt.nbytes(record.available_bytes)} available"
        wanted += f", {fmt.nbytes(over)} too much" if over > 0 else ", but not in one piece"
    sentences = [f"Out of memory{where} while {record.when}{wanted}."]
    largest = sorted(record.parts, key=lambda part: -part[1])[:_PARTS]
    if largest:
        sentences.append(f"XLA counts: {', '.join(f'{name} {fmt.nbytes(size)}' for name, size in largest if size)}.")
    if record.memory == "vmem":
        sentences.append("That is the fast memory of one kernel: smaller blocks in it help, and no checkpoint does.")
    elif not record.buffers:
        sentences.append("XLA lists no buffers here. %%remat on the code that ran shows what takes the memory.")
    return sentences


def exhausted_table(record: Exhausted) -> Table:
    """The largest buffers, those that are alike together, under the sentences."""
    caption = f"{' '.join(exhausted_sentences(record))} The largest buffers:"
    buffers = ((it.nbytes, it.type, it.kind, it.what, it.source, None) for it in record.buffers)
    return _buffers_table(caption, "Kind", buffers)
