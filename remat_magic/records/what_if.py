"""What one value alone would change if it were saved, or computed again: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from remat_magic.records.plan import Plan, PlannedValue

__all__ = ["WhatIf"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What it would change to save one recomputed value, or to recompute one that is saved, and nothing else.

    ``saved_bytes`` and ``recomputed_flops`` are differences to what ``against`` does, exact in bytes and FLOPs;
    ``seconds`` is the estimated difference on ``device``, None where no device is known. ``plan`` does it, and
    ``against`` is what it is compared with: both are what ``trace.report`` takes. That is the policy itself where a
    choice among the values does just the same, else the plan that saves all that the policy answers for.

    Where equal layers go the other way together, it is of ``count`` values, of which ``value`` is the first.
    """

    change: Literal["save", "recompute"]
    value: PlannedValue
    saved_bytes: int
    recomputed_flops: int
    seconds: float | None
    device: str
    plan: Plan
    against: str | Plan
    count: int = 1

    @property
    def flops_per_byte(self) -> float:
        """The FLOPs that each byte of the value spares: infinite where it takes none."""
        return _ratio(-self.recomputed_flops, self.saved_bytes)

    @property
    def seconds_per_byte(self) -> float | None:
        """The seconds that each byte of the value spares, by estimate: infinite where it takes none."""
        return None if self.seconds is None else _ratio(-self.seconds, self.saved_bytes)


def _ratio(spared: float, taken: int) -> float:
    """Spared for each byte taken, of a change or of its reverse."""
    if taken == 0:
        return math.copysign(math.inf, spared) if spared else 0.0
    # To save it spares something and takes bytes; to recompute it is the reverse of both. What is good, or bad, in both
    # ways at once is no exchange.
    if spared and (spared > 0) != (taken > 0):
        return math.inf if spared > 0 else -math.inf
    return spared / taken
