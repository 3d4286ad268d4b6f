"""A row of a comparison: what one policy costs, by estimate and as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from remat_magic.records.base import Labelled
from remat_magic.records.measurement import Effort, Measurement
from remat_magic.records.timeline import Times

Offloading = Literal["", "moved", "kept", "unknown"]
Ranking = Literal["estimate", "compiled"]


@dataclass(frozen=True, slots=True)
class ComparisonRow(Labelled):
    """What one policy costs. Of a policy that fails there is nothing but the ``error``, a sentence.

    ``same_as`` are the keys of policies that do just the same and have no row of their own, ``same_labels`` what
    people call them. ``peak_bytes`` and ``times`` are
    estimates, and what XLA needs is to be expected between ``peak_low`` and ``peak_high``; the ``measured_*`` fields
    are XLA's and the clock's, None where nothing was measured, and ``findings``
    are sentences on where the compiled program departs from the report. ``measured_fits`` tells of a device that is not
    here whether the compiled program fits in it, ``needed_bytes`` and ``available_bytes`` by what,
    ``measured_rematerialized`` how many instructions XLA computes again by itself.

    ``ranked_by`` tells what the row is ranked by, ``"estimate"`` or ``"compiled"`` (``Comparison.ranked_by``), and
    ``pareto`` that no other row is better in one of memory (``ranked_bytes``) and cost (``adds``) without being worse
    in the other, and that it fits, where that is known. ``offloading`` tells whether XLA moves to the host what the
    policy offloads: "moved", "kept" on the device, or "unknown"; it is empty where nothing is offloaded. By the
    estimate only what is moved is ranked. ``of_devices`` tells whose the figures are that are not measured,
    where several devices share the work (``Report.of_devices``); what XLA counts is always of one.
    ``repeated_communicated_bytes`` are as in ``Report``.
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
    measured_bytes: int | None = None
    measured_temp_bytes: int | None = None
    measured_seconds: float | None = None
    measured_compile_seconds: float | None = None
    measured_flops: float | None = None
    repeated_communicated_bytes: int | None = None
    measured_communicated_bytes: int | None = None
    simulated_devices: int = 0
    measured_collectives: str = ""
    measured_device: str = ""
    measured_effort: Effort = "full"
    measured_rematerialized: int | None = None
    measured_fits: bool | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    findings: tuple[str, ...] = ()
    pareto: bool = False
    same_as: tuple[str, ...] = ()
    complete: bool = True
    code: str = ""
    error: str = ""
    label: str = ""
    same_labels: tuple[str, ...] = ()
    offloading: Offloading = ""
    of_devices: str = ""
    ranked_by: Ranking = "estimate"

    def __post_init__(self) -> None:
        """Use keys for what is called by no other name."""
        Labelled.__post_init__(self)
        if not self.same_labels:
            object.__setattr__(self, "same_labels", self.same_as)

    @property
    def ranked_bytes(self) -> int | None:
        """The memory that the row is ranked by: what XLA's compiler says that it needs, or the estimated peak."""
        return self.needed_bytes if self.ranked_by == "compiled" else self.peak_bytes

    @property
    def adds(self) -> float | None:
        """What the policy adds: seconds by estimate, or where no device is known recomputed FLOPs; None if unknown.

        What the compiler is known to keep on the device takes no time to offload; what the estimate is of then has
        another peak, so that it is not ranked.
        """
        compiled = self.ranked_by == "compiled"
        if self.offloading == "unknown" or (self.offloading == "kept" and not compiled):
            return None
        if self.times is None:
            return self.recomputed_flops
        if self.offloading == "kept":
            return self.times.recomputed
        return None if self.times.offload is None else self.times.extra

    def stands_for(self, policy: str, at: str) -> bool:
        """Whether the row is of a choice: its own, or one that does just the same, by its key or its label."""
        own = at == self.at and policy in (self.policy, *self.same_as)
        return own or f"{policy} at {at}" in self.same_as or at in self.same_as  # policies at several places are the at

    def measured(self, result: Measurement) -> ComparisonRow:
        """The row with what was measured of its policy."""
        return replace(
            self,
            measured_bytes=result.total_bytes,
            measured_temp_bytes=result.temp_bytes,
            measured_seconds=result.run_seconds,
            measured_compile_seconds=result.compile_seconds,
            measured_flops=result.flops,
            measured_communicated_bytes=result.communicated_bytes,
            measured_collectives=", ".join(
                f"{collective.runs:,} {collective.kind}: {collective.bytes:,} bytes"
                for collective in result.collectives or ()
            ),
            measured_device=result.device,
            simulated_devices=result.devices if result.simulated else 0,
            measured_effort=result.effort,
            measured_rematerialized=result.rematerialized,
            measured_fits=result.fits,
            needed_bytes=result.needed_bytes,
            available_bytes=result.available_bytes,
            findings=result.findings,
            error=self.error or result.error,
        )
