"""What else could be done: within other budgets, with single values, and by advice."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from remat_magic.records.plan import Plan, PlannedValue
from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class Advice:
    """Something about a policy, or about the program, that costs memory or has no effect, and how to mend it.

    ``kind`` names the rule, ``sentence`` says what is wrong and where, ``mend`` what to do. ``figure`` is what the mend
    changes in ``unit``, None where that is not known. ``source`` is the line that ``sentence`` speaks of. ``policy`` at
    ``at`` is what to try, where one policy mends it, ``code`` the part of ``mend`` that is code to paste; empty where
    it is in words.

    ``stake`` are the bytes, saved or held at the peak, that it speaks of, None where that is not known. ``share`` is
    what part of the estimated peak these are, or of all FLOPs the ``figure`` is, whichever is more: what has more at
    stake is said first.
    """

    kind: str
    sentence: str
    mend: str
    figure: int | None = None
    unit: Literal["", "bytes", "FLOPs"] = ""
    source: SourceSpan | None = None
    policy: str = ""
    at: str = ""
    stake: int | None = None
    share: float = 0.0
    code: str = ""

    def __post_init__(self) -> None:
        """What is at stake are the bytes of the figure, where it is in bytes and nothing else is said."""
        if self.stake is None and self.unit == "bytes":
            object.__setattr__(self, "stake", self.figure)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON: bytes and FLOPs as numbers, None where unknown."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What it would change to save one recomputed value, or to recompute one that is saved, and nothing else.

    ``saved_bytes`` and ``recomputed_flops`` are the report of ``plan`` less the one that was asked about, exact in
    bytes and FLOPs; ``seconds`` is the estimated difference on ``device``, None where no device is known. ``against``
    is what was asked about: the policy's key, the plan, or for a policy object a plan that does the same. Where the
    policy keeps what no name does (the cosine of a sine), each row gives that up besides, and says what it comes to.
    """

    change: Literal["save", "recompute"]
    value: PlannedValue
    saved_bytes: int
    recomputed_flops: int
    seconds: float | None
    device: str
    plan: Plan
    against: str | Plan

    @property
    def loses(self) -> bool:
        """Whether it makes something worse and nothing better: bytes saved, FLOPs recomputed, or time."""
        changes = self.saved_bytes, self.recomputed_flops, self.seconds or 0.0
        return max(changes) > 0 and min(changes) >= 0

    @property
    def flops_per_byte(self) -> float:
        """The FLOPs that each byte of the value spares: infinite where it takes none."""
        return _ratio(-self.recomputed_flops, self.saved_bytes)


def _ratio(spared_flops: float, saved_bytes: int) -> float:
    """Spared for each byte taken, of a change or of its reverse."""
    if saved_bytes == 0:
        return math.copysign(math.inf, spared_flops) if spared_flops else 0.0
    # To save it spares something and takes bytes; to recompute it is the reverse of both. What is good, or bad, in both
    # ways at once is no exchange.
    if spared_flops and (spared_flops > 0) != (saved_bytes > 0):
        return math.inf if spared_flops > 0 else -math.inf
    return spared_flops / saved_bytes
