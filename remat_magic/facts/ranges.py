"""How far what XLA needs may be from an estimated peak, by what was measured of other programs.

What is given to a program and what it gives back has the size that it has. In doubt is the rest: each byte of it counts
at least for a part and at most for a multiple of itself, by the device and by what makes it. What layers stack is the
surest; of what is stacked step by step, convolved, taken or put by index, sorted, or complex there may be copies. The
figures are in ``measured_ranges.py``, which ``tests/benchmarks/estimates.py`` makes of what XLA's compilers said. What
a TPU's compiler puts into VMEM takes no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from remat_magic import _jax
from remat_magic.facts.buffers import DeviceMemory, Held
from remat_magic.facts.measured_ranges import RANGES
from remat_magic.facts.memory import Schedule

ON_CHIP = 128 << 20  # bytes of a TPU's VMEM, which its compiler uses first, and which are no device memory
_MANY = 32  # steps of a loop: what it stacks is then of steps in time, not of layers

What = Literal["layers", "plain", "moved"]


class Doubt(NamedTuple):
    """The bytes of a peak that are sure, and those that are not, by what makes them."""

    device: Literal["GPU", "TPU"]
    sure: int
    unsure: Counter[What]


def doubt(held: Iterable[Held], on: DeviceMemory) -> Doubt:
    """What is sure and what is in doubt of the values that are held at a peak."""
    sure, unsure = 0, Counter[What]()
    for value in held:
        if value.argument is not None or value.constant or value.output:
            sure += value.bytes
        else:
            unsure[_what(value)] += value.bytes
    return Doubt("TPU" if on.tiled else "GPU", sure, unsure)


def _what(value: Held) -> What:
    eqn = value.eqn
    if eqn is None:
        return "plain"
    if _jax.is_scan(eqn) and value.var in eqn.outvars[len(_jax.carried_operands(eqn)) :]:
        return "moved" if _jax.scan_length(eqn) >= _MANY else "layers"
    return "plain" if (_jax.is_plain(eqn) or _jax.bodies(eqn)) and not _jax.is_complex(value.aval) else "moved"


def peak_range(schedule: Schedule, peak: int, at: int, held: Iterable[Held]) -> tuple[int, int]:
    """Between which bytes XLA's word on the peak of a schedule is to be expected, given when it is and what is held.

    All that is held in the update of a step may be sure, and the gradient before it need more than is estimated.
    Of no device it is the peak itself: then it is counted by the program's own types, and says nothing of XLA.
    """
    if not schedule.on.fuses:
        return peak, peak
    low, high = _range(peak, held, schedule.on)
    if schedule.phase(at) == "update":
        gradient, before = schedule.highest(before_update=True)
        high = max(high, _range(gradient, schedule.held(before), schedule.on)[1])
    return low, high


def _range(most: int, held: Iterable[Held], on: DeviceMemory) -> tuple[int, int]:
    """That of one moment, by the bytes that are held then and what they are."""
    doubted = doubt(held, on)
    low, high = (
        doubted.sure + sum(round(RANGES[doubted.device, what][end] * size) for what, size in doubted.unsure.items())
        for end in (0, 1)
    )
    return min(most, max(doubted.sure, low - ON_CHIP * on.tiled)), max(most, high)
