"""Which values are in the memory beside the compute units: those for which there is room as long as they live."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["COPIES", "LiveBuffer", "placed"]

COPIES = 8
"""A value waits there to be read for no longer than it takes to fill the whole memory so many times.

What waits longer XLA moves out, and fetches it again: ``xla_msa_max_overlap_to_mem_size_async_copy_ratio``, as libtpu
0.0.50 notes it in its dumps. ``tests/test_vector_memory.py`` has the programs that are just below it and above.
"""
_REPACKS = 4
"""How often XLA packs anew all that is there: ``xla_msa_max_repacks``."""


class LiveBuffer(NamedTuple):
    """A buffer by its number: the first step that holds it, the one that holds it no more, and its bytes.

    ``gain`` is the time that is won where it is there; None: in proportion to its bytes.
    """

    first: int
    end: int
    size: int
    number: int
    gain: int | None = None


_Place = tuple[int, int, int, int]
"""The first step, the one after the last, the first byte, the one after the last."""


def placed(buffers: Iterable[LiveBuffer], used: Sequence[int], capacity: int) -> tuple[set[int], int]:
    """The numbers of the buffers that are there, and the bytes that are in use then.

    Those by which most is won come first, in parts of the square root of their bytes, as XLA has it. Each has one place
    as long as it lives, the first gap that is wide enough. Where there is none all are packed anew, the biggest first,
    but for a few times only.

    Args:
        buffers: each once.
        used: for each step what is in use already.
        capacity: the bytes of the memory.
    """
    in_use: list[_Place] = [(step, step + 1, 0, size) for step, size in enumerate(used) if size]
    chosen: list[LiveBuffer] = []
    places, repacks = [*in_use], _REPACKS
    for buffer in sorted([buffer for buffer in buffers if 0 < buffer.size <= capacity], key=_rank):
        place = _place(buffer, places, capacity)
        if place is None and repacks:
            repacks -= 1
            packed = _packed([*chosen, buffer], in_use, capacity)
            if packed is not None:
                places = packed
                chosen.append(buffer)
        elif place is not None:
            places.append(place)
            chosen.append(buffer)
    return {buffer.number for buffer in chosen}, max([stop for *_, stop in places], default=0)


def _rank(buffer: LiveBuffer) -> tuple[float, int, int, int, int]:
    gain = buffer.size if buffer.gain is None else buffer.gain
    return -gain / math.sqrt(buffer.size), -buffer.size, buffer.end - buffer.first, buffer.first, buffer.number


def _packed(buffers: Iterable[LiveBuffer], in_use: Iterable[_Place], capacity: int) -> list[_Place] | None:
    """Places for all of these, the biggest first; None where one finds none."""
    places = [*in_use]
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.size, _rank(buffer))):
        place = _place(buffer, places, capacity)
        if place is None:
            return None
        places.append(place)
    return places


def _place(buffer: LiveBuffer, places: Iterable[_Place], capacity: int) -> _Place | None:
    """The first gap that is wide enough as long as a buffer lives."""
    at = 0
    meanwhile = [(begin, stop) for first, end, begin, stop in places if first < buffer.end and buffer.first < end]
    for begin, stop in sorted(meanwhile):
        if begin - at >= buffer.size:
            break
        at = max(at, stop)
    return (buffer.first, buffer.end, at, at + buffer.size) if at + buffer.size <= capacity else None
