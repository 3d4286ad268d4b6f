"""Which values are in the memory beside the compute units: those for which there is room as long as they live."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

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


class _Room:
    """The places that are taken: first step, step after the last, first byte, byte after the last.

    An array, since each buffer is held against all places, of which there may be thousands.
    """

    def __init__(self, in_use: np.ndarray, most: int) -> None:
        self._places = np.concatenate([in_use, np.zeros((most, 4), np.int64)])
        self._count = len(in_use)

    def take(self, buffer: LiveBuffer, capacity: int) -> bool:
        """Take the first gap that is wide enough as long as a buffer lives, if there is one."""
        places = self._places[: self._count]
        meanwhile = places[(places[:, 0] < buffer.end) & (buffer.first < places[:, 1])]
        meanwhile = meanwhile[np.argsort(meanwhile[:, 2])]
        below = np.maximum.accumulate(np.concatenate([[0], meanwhile[:, 3]]))  # what is taken up to each of them
        gaps = np.flatnonzero(meanwhile[:, 2] - below[:-1] >= buffer.size)
        at = int(below[gaps[0]] if gaps.size else below[-1])
        if at + buffer.size > capacity:
            return False
        self._places[self._count] = buffer.first, buffer.end, at, at + buffer.size
        self._count += 1
        return True

    @property
    def top(self) -> int:
        """The byte after the last that is taken."""
        return int(self._places[: self._count, 3].max(initial=0))


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
    steps = [(step, step + 1, 0, size) for step, size in enumerate(used) if size]
    in_use = np.array(steps, np.int64).reshape(-1, 4)
    candidates = sorted([buffer for buffer in buffers if 0 < buffer.size <= capacity], key=_rank)
    chosen: list[LiveBuffer] = []
    room, repacks = _Room(in_use, len(candidates)), _REPACKS
    for buffer in candidates:
        if room.take(buffer, capacity):
            chosen.append(buffer)
        elif repacks:
            repacks -= 1
            packed = _Room(in_use, len(candidates))
            biggest_first = sorted([*chosen, buffer], key=lambda buffer: (-buffer.size, _rank(buffer)))
            if all(packed.take(other, capacity) for other in biggest_first):
                room = packed
                chosen.append(buffer)
    return {buffer.number for buffer in chosen}, room.top


def _rank(buffer: LiveBuffer) -> tuple[float, int, int, int, int]:
    gain = buffer.size if buffer.gain is None else buffer.gain
    return -gain / math.sqrt(buffer.size), -buffer.size, buffer.end - buffer.first, buffer.first, buffer.number
