"""XLA's own memory over time, drawn over the estimate, with what is held at its peak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_magic.records import Measurement, XlaBuffer, XlaMemory
from remat_magic.views import format as fmt
from remat_magic.views.svg import Frame, colours, element, text
from remat_magic.views.tables import HeldRow, held_table

_POINTS = 720  # steps drawn at most; of several in one place the highest is
XLA_STYLE = (
    f".remat-svg .remat-xla{{fill:none;stroke:{colours['fg']};stroke-width:2}}"
    f".remat-svg .remat-xla-peak{{fill:{colours['back']};stroke:{colours['fg']};stroke-width:2}}"
)
_ROLES = {
    "argument": "arguments",
    "output": "results",
    "constant": "constants",
    "saved": "saved",
    "carried": "carried by loops",
    "temporary": "temporaries",
}


def xla_name(measured: Measurement) -> str:
    """What the curve is called."""
    return f"XLA for {measured.device}"


def xla_curve(frame: Frame, memory: XlaMemory, backward: float | None, end: float) -> str:
    """The curve, with its peak.

    Args:
        frame: where it is drawn.
        memory: what XLA holds in each of its steps.
        backward: where the backward pass begins on the frame's horizontal axis, None where there is none.
        end: where the last pass ends.
    """
    steps = len(memory.held)
    split = memory.backward if backward is not None and memory.backward else None

    def across(step: float) -> float:
        """XLA's steps are stretched: its passes begin where the estimate's do."""
        if split is None or backward is None:
            return frame.x(end * step / steps)
        if step < split:
            return frame.x(backward * step / split)
        return frame.x(backward + (end - backward) * (step - split) / max(1, steps - split))

    edges = {number * steps // _POINTS for number in range(_POINTS + 1)} | (
        {split} if split is not None else set[int]()
    )
    stretches = [(first, last) for first, last in itertools.pairwise(sorted(edges))]
    path = "".join(
        f"{'L' if number else 'M'}{across(first):.1f},{(y := frame.y(max(memory.held[first:last]))):.1f}"
        f"L{across(last):.1f},{y:.1f}"
        for number, (first, last) in enumerate(stretches)
    )
    x, y = across(memory.peak + 0.5), frame.y(memory.peak_bytes)
    peak = element("circle", cx=x, cy=y, r=4, class_="remat-xla-peak")
    place = (x - frame.left) / (frame.right - frame.left) * frame.most_x
    return element("g", element("path", d=path, class_="remat-xla"), data_stretch="") + element(
        "g", peak, data_place=f"{place:.2f}"
    )


def xla_legend(x: float, y: float, label: str) -> str:
    """The line and its name."""
    return (
        element("line", x1=x, x2=x + 16, y1=y - 4, y2=y - 4, class_="remat-xla")
        + element("circle", cx=x + 8, cy=y - 4, r=3, class_="remat-xla-peak")
        + text(x + 21, y, label, class_="remat-axis")
    )


def xla_words(measured: Measurement, memory: XlaMemory) -> str:
    """One sentence: the peak, and what is allocated besides."""
    rest = ""
    if measured.needed_bytes is not None and measured.needed_bytes > memory.peak_bytes:
        idle = fmt.nbytes(measured.needed_bytes - memory.peak_bytes)
        rest = f"; with {idle} that is allocated and holds nothing then, the program needs "
        rest += fmt.nbytes(measured.needed_bytes)
    unknown = f" The sizes of {fmt.count(memory.unknown, 'buffer')} are not known." if memory.unknown else ""
    quick = ", compiled quickly," if measured.effort == "quick" else ""
    at_peak = f"Held at the peak of XLA's program for {measured.device}{quick} {fmt.nbytes(memory.peak_bytes)}"
    return f"{at_peak}{rest}.{unknown}"


def _what(buffer: XlaBuffer) -> str:
    """An argument's name, or the last part of JAX's path to the operation."""
    if buffer.role == "argument":
        return buffer.op_name or buffer.name
    return buffer.op_name.rpartition("/")[2] or buffer.opcode


def _sums(buffers: Sequence[XlaBuffer]) -> str:
    sums = {role: sum(buffer.nbytes for buffer in buffers if buffer.role == role) for role in _ROLES}
    most = sorted(sums.items(), key=lambda item: -item[1])
    return ", ".join(f"{_ROLES[role]} {fmt.nbytes(nbytes)}" for role, nbytes in most if nbytes)


def held_by_xla_html(measured: Measurement, memory: XlaMemory, top: int) -> str:
    """The table of what XLA's program holds at its peak, the biggest first; its rows add up to the peak.

    Args:
        measured: the compiled program.
        memory: its memory over time.
        top: how many rows; the others are one together.
    """
    here = [buffer for buffer in memory.alive if buffer.space == "device"]
    groups: dict[tuple[object, ...], list[XlaBuffer]] = {}
    for buffer in here:
        groups.setdefault((buffer.role, buffer.type, _what(buffer), buffer.source, buffer.library), []).append(buffer)
    alike = sorted(groups.values(), key=lambda group: -sum(buffer.nbytes for buffer in group))
    rows = [
        HeldRow(len(group), sum(buffer.nbytes for buffer in group), first.type, _ROLES[first.role], _what(first),
                first.source, first.library)
        for group in alike
        for first in group[:1]
    ]  # fmt: skip
    elsewhere = sum(buffer.nbytes for buffer in memory.alive if buffer.space != "device")
    others = f" In other memories, besides: {fmt.nbytes(elsewhere)}." if elsewhere else ""
    caption = f"{xla_words(measured, memory)} By role: {_sums(here)}.{others}"
    return held_table(caption, "Role", rows, top, "buffer")
