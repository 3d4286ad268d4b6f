"""How far what XLA needs may be from an estimated peak, by what was measured of other programs.

What is given to a program and what it gives back has the size that it has. In doubt is the rest. It is classed by the
device and by what most of it is, and ``measured_ranges.py`` has for each class between which parts of the estimate
XLA's compilers were: ``tests/benchmarks/estimates.py`` makes that table. Of what a loop stacks step by step XLA may
hold a second copy in another layout, when the loop backwards begins. A TPU's compiler may pad the rows of what is taken
or put by index, and what it puts into VMEM takes no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from remat_magic import _jax
from remat_magic._jax.primitives import FUSIBLE, MATMULS, REDUCTIONS
from remat_magic.facts.buffers import DeviceMemory, Held
from remat_magic.facts.measured_ranges import RANGES
from remat_magic.facts.memory import Schedule

_ON_CHIP = 128 << 20  # bytes of a TPU's VMEM, which its compiler uses first, and which are no device memory
_MANY = 32  # steps of a loop: what it stacks is then of steps in time, not of layers
_MUCH = 0.2  # of what is in doubt: so much of what is hard to foresee decides

What = Literal["products", "elements", "layers", "steps", "moved"]


class Doubt(NamedTuple):
    """What is sure of a peak, in bytes, what there may be more of it, and what most of the rest is."""

    sure: int
    more: int
    device: Literal["GPU", "TPU"]
    what: What


def doubt(held: Iterable[Held], on: DeviceMemory) -> Doubt:
    """What is in doubt of the values that are held at a peak."""
    sure, twice, padding = 0, 0, 0
    unsure: Counter[What] = Counter({"products": 0})
    for value in held:
        if value.argument is not None or value.constant or value.output:
            sure += value.bytes
            continue
        what = _what(value)
        unsure[what] += value.bytes
        rows = on.by_rows(value.aval) if on.tiled else 0
        if what == "steps":
            twice = max(twice, value.bytes, rows)
        elif what == "moved":
            padding += max(0, rows - value.bytes)
    most = max(unsure, key=unsure.__getitem__)
    if unsure["moved"] > _MUCH * unsure.total():
        most = "moved"
    return Doubt(sure, twice + padding, "TPU" if on.tiled else "GPU", most)


def _what(value: Held) -> What:
    eqn = value.eqn
    if eqn is None:
        return "elements"
    if _jax.is_scan(eqn) and value.var in eqn.outvars[len(_jax.carried_operands(eqn)) :]:
        return "steps" if _jax.scan_length(eqn) >= _MANY else "layers"
    name = _jax.primitive_name(eqn)
    if name in MATMULS:
        return "products"
    others = name not in FUSIBLE and name not in REDUCTIONS and not _jax.bodies(eqn)
    return "moved" if others or _jax.is_complex(value.aval) else "elements"


def peak_range(peak: int, held: Iterable[Held], schedule: Schedule) -> tuple[int, int]:
    """Between which bytes XLA's word on a peak is to be expected, given what is held there.

    At most it is what is held where XLA recomputes all before the first gradient, if that is more. Of no device it is
    the peak itself: then it is counted by the program's own types, and says nothing of XLA.
    """
    on = schedule.on
    if not on.fuses:
        return peak, peak
    sure, more, device, what = doubt(held, on)
    least, most = RANGES[device, what]
    low, high = (sure + round(part * (peak - sure)) for part in (least, most))
    return max(min(sure, peak), low - _ON_CHIP * on.tiled), max(high + more, schedule.highest_at_once())
