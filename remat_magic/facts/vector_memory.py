"""Which values are in the memory beside the compute units: those for which there is room as long as they live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["LiveBuffer", "placed"]


class LiveBuffer(NamedTuple):
    """A buffer by its number: the first step that holds it, the one that holds it no more, and its bytes."""

    first: int
    end: int
    size: int
    number: int


def placed(buffers: Iterable[LiveBuffer], used: Sequence[int], capacity: int) -> tuple[set[int], int]:
    """The numbers of the buffers that are there, and the bytes that are in use then.

    The biggest come first, since XLA goes by the bytes that are moved. Each has one place as long as it lives, the
    first gap that is wide enough.

    Args:
        buffers: each once.
        used: for each step what is in use already.
        capacity: the bytes of the memory.
    """
    numbers = set[int]()
    there = [(step, step + 1, 0, size) for step, size in enumerate(used) if size]  # with the first and the last byte
    highest = max(used, default=0)
    for first, end, size, number in sorted(
        buffers, key=lambda buffer: (-buffer.size, buffer.end - buffer.first, buffer)
    ):
        if not 0 < size <= capacity:
            continue
        at = 0
        for begin, stop in sorted(
            [(begin, stop) for other, until, begin, stop in there if other < end and first < until]
        ):
            if begin - at >= size:
                break
            at = max(at, stop)
        if at + size <= capacity:
            numbers.add(number)
            there.append((first, end, at, at + size))
            highest = max(highest, at + size)
    return numbers, highest
