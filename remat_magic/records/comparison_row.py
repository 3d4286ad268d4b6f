"""A row of a comparison: what one policy costs, by estimate and as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat_magic.records.base import Labelled
from remat_magic.records.measurement import Measurement
from remat_magic.records.timeline import Times

Offloading = Literal["", "moved", "kept", "unknown"]


@dataclass(frozen=True, slots=True)
class ComparisonRow(Labelled):
    """What one policy costs. Of a policy that fails there is nothing but the ``error``, a sentence.

    ``same_as`` are the keys of policies that do just the same and have no row of their own, ``same_labels`` what
    people call them. ``peak_bytes`` and ``times`` are estimates, and what XLA needs is to be expected between
    ``peak_low`` and ``peak_high``; ``measurement`` is XLA's word and the clock's, None where nothing was measured.

    ``pareto`` tells that no other row is better in one of the estimated peak and cost (``adds``) without being worse in
    the other. ``offloading`` tells whether XLA moves to the host what the policy offloads: "moved", "kept" on the
    device, or "unknown"; it is empty where nothing is offloaded. Only what is moved is ranked. ``of_devices`` tells
    whose the figures are that are not measured, where several devices share the work (``Report.of_devices``); what XLA
    counts is always of one. ``repeated_communicated_bytes`` are as in ``Report``.
    """

    policy: str
    at: str
    saved_bytes: int | None = None
    argument_bytes: int | None = None
    offloaded_bytes: int | None = None
    forward_flops: int | None = None
    repeated_flops: int | None = None
    deferred_flops: int | None = None
    recomputed_flops: int | None = None
    peak_bytes: int | None = None
    peak_low: int | None = None
    peak_high: int | None = None
    times: Times | None = None
    repeated_communicated_bytes: int | None = None
    measurement: Measurement | None = None
    pareto: bool = False
    same_as: tuple[str, ...] = ()
    complete: bool = True
    code: str = ""
    error: str = ""
    label: str = ""
    same_labels: tuple[str, ...] = ()
    offloading: Offloading = ""
    of_devices: str = ""

    def __post_init__(self) -> None:
        """Use keys for what is called by no other name."""
        Labelled.__post_init__(self)
        if not self.same_labels:
            object.__setattr__(self, "same_labels", self.same_as)

    @property
    def adds(self) -> float | None:
        """What the policy adds: seconds by estimate, or where no device is known recomputed FLOPs; None if unknown.

        What the compiler is known to keep on the device has another peak than the estimate, so that it is not ranked.
        """
        if self.offloading in ("unknown", "kept"):
            return None
        if self.times is None:
            return self.recomputed_flops
        return None if self.times.offload is None else self.times.extra
