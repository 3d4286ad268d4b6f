"""XLA's own memory over time, drawn over the estimate, with what is held at its peak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_magic.records import Measurement, XlaBuffer, XlaMemory
from remat_magic.views import format as fmt
from remat_magic.views.svg import element
from remat_magic.views.tables import HeldRow, held_table

_POINTS = 720  # steps drawn at most; of several in one place the highest is
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


def xla_curve(memory: XlaMemory, backward: float | None, most: float, width: int) -> str:
    """The curve, in a picture that is 100 high.

    Args:
        memory: what XLA holds in each of its steps.
        backward: the part of the picture before the backward pass, None where there is none.
        most: the bytes at its upper end.
        width: of the picture.
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
    return element("path", d=path, class_="remat-xla")


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
