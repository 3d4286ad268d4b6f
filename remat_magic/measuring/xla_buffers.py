"""Where the values of a compiled program lie, and what of each memory is in use: of XLA's buffer assignment.

Where a value lies says what is shared: values at the same bytes of one allocation (what a loop carries, an operand
that is overwritten, a donated argument) count once. So the peak is at most what XLA allocates from the first step to
the last: it is less by results that are not written yet, and by gaps between temporaries.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from remat_magic.records import MemorySpace

__all__ = ["Allocation", "Value", "alive_at", "bytes_held", "read_buffers", "spaces_of"]

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")

_HOST = "5"  # XLA's number of the host's memory, on each platform
# Of the GPU's memory a part has a number of its own, 1, for collective operations; on a TPU that is VMEM.
_DEVICE = {"gpu": {"0", "1"}, "cpu": {"0"}, "tpu": {"0"}}
_BESIDE = {"1": "VMEM", "2": "SMEM"}  # on a TPU: openxla.org/xla/shapes


class Value(NamedTuple):
    """Where a value lies, from its first step to its last."""

    name: str
    part: str  # of a tuple
    first: int
    last: int
    allocation: int
    offset: int
    size: int
    space: str
    type: str


@dataclass(slots=True)
class Allocation:
    """Memory that XLA asks for as one piece: its bytes, what else its line says, and which memory it is."""

    size: int
    header: str
    space: str
    argument: bool


def read_buffers(
    text: str, platform: str
) -> tuple[dict[int, Allocation], dict[tuple[str, str], tuple[int, int, int, str, str]]]:
    """The allocations, and for each value its allocation, offset, size, memory and type."""
    allocations: dict[int, Allocation] = {}
    places: dict[tuple[str, str], tuple[int, int, int, str, str]] = {}
    number = -1
    for line in text.splitlines():
        if header := _ALLOCATION.match(line):
            number = int(header[1])
            words = f", {header[3]}"
            color = _COLOR.search(words)
            space = _space(color[1] if color else "0", platform)
            allocations[number] = Allocation(int(header[2]), words, space, argument=", parameter " in words)
        elif (value := _VALUE.match(line)) and "thread-local" not in allocations[number].header:
            space = allocations[number].space
            places[value[1], value[2] or ""] = (number, int(value[4]), int(value[3]), space, value[5])
    return allocations, places


def _space(number: str, platform: str) -> str:
    if number in _DEVICE[platform]:
        return "device"
    if number == _HOST:
        return "host"
    return _BESIDE.get(number, f"S({number})") if platform == "tpu" else f"S({number})"


def spaces_of(allocations: Iterable[Allocation]) -> tuple[MemorySpace, ...]:
    """What is allocated, by memory. What a reduction holds while it runs is left out, as XLA's own sizes do."""
    sizes: dict[str, Counter[str]] = {"device": Counter()}
    for allocation in allocations:
        header = allocation.header
        if ", thread-local" not in header:
            constant, output = ", constant" in header, ", maybe-live-out" in header
            kind = "argument" if allocation.argument else "constant" if constant else "output" if output else "temp"
            sizes.setdefault(allocation.space, Counter())[f"{kind}_bytes"] += allocation.size
    return tuple(MemorySpace(name, **size) for name, size in sizes.items())


def bytes_held(values: Iterable[Value], allocations: dict[int, Allocation], steps: int) -> list[int]:
    """The bytes of the device's memory in use at each step."""
    starts, ends = defaultdict[int, list[Value]](list), defaultdict[int, list[Value]](list)
    for value in values:
        if value.space == "device" and not allocations[value.allocation].argument:
            starts[value.first].append(value)
            ends[value.last + 1].append(value)
    live = defaultdict[int, set[Value]](set)
    in_use: dict[int, int] = {}
    arguments = sum(place.size for place in allocations.values() if place.argument and place.space == "device")
    held = list[int]()
    for step in range(steps):
        changed = set[int]()
        for value in ends[step]:
            live[value.allocation].discard(value)
            changed.add(value.allocation)
        for value in starts[step]:
            live[value.allocation].add(value)
            changed.add(value.allocation)
        for allocation in changed:
            in_use[allocation] = _covered(live[allocation])
        held.append(arguments + sum(in_use.values()))
    return held


def _covered(values: Iterable[Value]) -> int:
    """The bytes of an allocation that these values lie in."""
    end = total = 0
    for offset, stop in sorted((value.offset, value.offset + value.size) for value in values):
        total += max(0, stop - max(offset, end))
        end = max(end, stop)
    return total


def alive_at(values: Iterable[Value], allocations: dict[int, Allocation], step: int) -> list[tuple[Value, int]]:
    """What is held at a step, each with the bytes that none before it has: of two that lie together the bigger one.

    Of two of one size it is the later. The memory of an argument is held throughout, whatever lies there.
    """
    there = defaultdict[int, list[Value]](list)
    for value in values:
        if value.first <= step <= value.last or allocations[value.allocation].argument:
            there[value.allocation].append(value)
    alive = list[tuple[Value, int]]()
    for number, lying in there.items():
        now = [value for value in lying if value.first <= step <= value.last] or lying[:1]
        counted = list[Value]()
        for value in sorted(now, key=lambda value: (-value.size, -value.first)):
            nbytes = _covered([*counted, value]) - _covered(counted)
            counted.append(value)
            if nbytes:
                alive.append((value, nbytes))
        if allocations[number].argument and (rest := allocations[number].size - _covered(counted)):
            alive[-1] = (alive[-1][0], alive[-1][1] + rest)
    return alive
