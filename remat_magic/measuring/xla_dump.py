"""XLA's own memory over time, from the texts that it writes with ``compiler_options={"xla_dump_to": FOLDER}``.

What these texts look like is known here, in ``xla_buffers`` and in ``xla_module`` alone (jaxlib of jax 0.10.2 and
0.12.0.1: CPU, GPU, TPU; they are also written where a compilation runs out of memory). Three are read: the live range
of each value over the flattened schedule, in which the bodies of loops stand once; where in which allocation a value
lies, and its padded size; and the scheduled module, for the instructions and the lines of Python that they come from.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import replace
from pathlib import Path

from remat_magic.jaxprs.spans import cell_number, characters
from remat_magic.measuring.xla_buffers import Allocation, Value, alive_at, bytes_held, read_buffers, spaces_of
from remat_magic.measuring.xla_module import (
    ScheduledModule,
    first_backward,
    frames_of,
    is_forward,
    is_read_by_backward,
    maker_of,
    read_module,
)
from remat_magic.records import SourceSpan, XlaBuffer, XlaMemory
from remat_magic.records.xla_memory import XlaRole

__all__ = ["read_dump", "with_texts"]

_RANGES, _BUFFERS = "after_optimizations-live-range.txt", "after_optimizations-buffer-assignment.txt"
_STEP = re.compile(r"^    \d+:(\S+)$", re.M)
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.M)
_PEAK = re.compile(r"Live ranges at (\d+) \(peak\)")
_NOTED = re.compile(r"\(cumulative: (\d+) bytes\)")


def read_dump(folder: str | Path) -> XlaMemory | None:
    """The memory over time of the program whose dump is in a folder, of the longest one of several.

    Lines of source have neither their text nor the number of their cell, which this process may not know: see
    ``with_texts``.

    Returns:
        None where XLA wrote no schedule or no buffers.
    """
    ranges_file = max(Path(folder).glob(f"*{_RANGES}"), key=lambda path: path.stat().st_size, default=None)
    if ranges_file is None:
        return None
    stem = ranges_file.name.removesuffix(_RANGES)
    buffers_file, module_file = (ranges_file.with_name(stem + end) for end in (_BUFFERS, "after_optimizations.txt"))
    if not buffers_file.is_file() or not module_file.is_file():
        return None
    platform = next((name for name in ("cpu", "gpu") if stem.endswith(f"{name}_")), "tpu")
    ranges, buffers, module = (path.read_text("utf-8", "replace") for path in (ranges_file, buffers_file, module_file))
    return _joined(ranges, buffers, module, platform)


def with_texts(memory: XlaMemory) -> XlaMemory:
    """With the texts of the lines of source and the numbers of cells, as this process knows them now."""

    def completed(span: SourceSpan | None) -> SourceSpan | None:
        if span is None:
            return None
        text, last = (linecache.getline(span.file, line).rstrip("\n") for line in (span.line, span.end_line))
        columns = {"column": characters(text, span.column), "end_column": characters(last, span.end_column)}
        return replace(span, text=text, cell=cell_number(span.file), **columns)

    alive = (
        replace(buffer, source=completed(buffer.source), library=completed(buffer.library)) for buffer in memory.alive
    )
    return replace(memory, alive=tuple(alive))


def _joined(ranges: str, buffers: str, module_text: str, platform: str) -> XlaMemory | None:
    steps = tuple(_STEP.findall(ranges))
    allocations, places = read_buffers(buffers, platform)
    values, unknown = list[Value](), 0
    for name, index, first, last in _RANGE.findall(ranges):
        place = places.get((name, index))
        if place is None:
            unknown += 1
        else:
            values.append(Value(name, index, int(first), min(int(last), len(steps) - 1), *place))
    if not steps or not values:
        return None
    module = read_module(module_text)
    held = bytes_held(values, allocations, len(steps))
    peak = max(range(len(held)), key=held.__getitem__)
    alive = (
        _buffer(value, nbytes, allocations[value.allocation], module)
        for value, nbytes in alive_at(values, allocations, peak)
    )
    noted, sums = _PEAK.search(ranges), _NOTED.findall(ranges)
    return XlaMemory(
        steps=steps,
        held=tuple(held),
        peak=peak,
        alive=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)),
        backward=first_backward(steps, module),
        noted_peak=int(noted[1]) if noted else None,
        noted_bytes=int(sums[-1]) if noted and sums else None,
        unknown=unknown,
        spaces=spaces_of(allocations.values()),
    )


def _role(value: Value, allocation: Allocation, module: ScheduledModule, maker: str) -> XlaRole:
    own = module.instructions.get(value.name)
    if allocation.argument:
        return "argument" if own is not None and own.opcode == "parameter" else "output"
    if ", constant" in allocation.header:
        return "constant"
    if "maybe-live-out" in allocation.header:
        return "output"
    if own is not None and own.opcode == "parameter" and value.name in module.loops:
        return "carried"
    producer = module.instructions.get(maker)
    if producer and is_forward(producer.op_name) and is_read_by_backward(value.name, value.part, module, set()):
        return "saved"
    return "temporary"


def _buffer(value: Value, nbytes: int, allocation: Allocation, module: ScheduledModule) -> XlaBuffer:
    maker = maker_of(value.name, value.part, module)
    own, producer = module.instructions.get(value.name), module.instructions.get(maker)
    source, library = frames_of(producer.frame, module) if producer else (None, None)
    return XlaBuffer(
        name=f"{value.name}{{{value.part}}}" if value.part else value.name,
        nbytes=nbytes,
        first=value.first,
        last=value.last,
        opcode=own.opcode if own else "",
        type=re.sub(r"\{[^{}]*\}", "", value.type),
        role=_role(value, allocation, module, maker),
        space=value.space,
        op_name=producer.op_name if producer else "",
        source=source,
        library=library,
    )
