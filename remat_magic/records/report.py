"""What one policy does at one place: residuals, recomputation, programs, sites."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass

from remat_magic.records.base import Displayed, Labelled, display, write
from remat_magic.records.note import Note
from remat_magic.records.operation import Equation, Kernel, dearest, total_flops
from remat_magic.records.program import Program
from remat_magic.records.residual import Kind, Residual
from remat_magic.records.source import Site, SourceText


@dataclass(frozen=True, slots=True, repr=False)
class Report(Displayed, Labelled):
    """What one policy does at one place.

    A report of the forward half alone (``complete`` is False) has the residuals without ``needed_by``, no backward
    program and nothing recomputed. ``backward_error`` is a sentence where the function has a forward half but no
    backward one (a dynamic ``while_loop``). ``notes`` are sentences the reader must see (stale traces, unknowns).
    ``sources`` is the user's own text that the program was traced from, the same in every report of one trace.
    ``peak_low`` and ``peak_high`` are the range in which what XLA needs is to be expected, on the report's
    device; of none both are ``peak_bytes``. ``peak_by_kind`` has the bytes that are held at the estimated peak by their
    kind (``LiveValue.kind``), which add up to ``peak_bytes``.
    ``devices`` tells how many share the work. All bytes and FLOPs are of one of them; of all together where not
    ``per_device``, since XLA alone decides how intermediates are spread (automatic sharding).
    ``forward_communicated_bytes`` and ``backward_communicated_bytes`` are those of the results of collectives that one
    device has: with automatic sharding of all that XLA has in each half, compiled by itself, None where that is not
    known; else of those that the program names in a ``shard_map`` or ``pmap``.
    """

    policy: str
    at: str
    residuals: tuple[Residual, ...] = ()
    recomputed: tuple[Equation, ...] = ()
    forward: Program = dataclasses.field(default=Program())
    backward: Program = dataclasses.field(default=Program())
    sites: tuple[Site, ...] = ()
    names: tuple[str, ...] = ()
    code: str = ""
    function: str = ""
    signature: str = ""
    wrt: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    forward_flops: int | None = None
    backward_flops: int | None = None
    peak_bytes: int | None = None
    peak_low: int | None = None
    peak_high: int | None = None
    uncosted: tuple[str, ...] = ()
    complete: bool = True
    backward_error: str = ""
    forward_kernels: tuple[Kernel, ...] = ()
    backward_kernels: tuple[Kernel, ...] = ()
    recomputed_kernels: tuple[Kernel, ...] = ()
    sources: tuple[SourceText, ...] = ()
    label: str = ""
    peak_by_kind: tuple[tuple[str, int], ...] = ()
    devices: int = 1
    per_device: bool = True
    forward_communicated_bytes: int | None = 0
    backward_communicated_bytes: int | None = 0

    @property
    def of_devices(self) -> str:
        """Whose the figures are where several devices share the work: "of one of 8 devices"; empty for one."""
        if self.devices == 1:
            return ""
        return f"of one of {self.devices} devices" if self.per_device else f"of all {self.devices} devices together"

    @property
    def together(self) -> int:
        """``saved_bytes`` of all devices together, with each copy of what several hold."""
        return self.saved_bytes * (self.devices if self.per_device else 1)

    @property
    def in_update(self) -> str:
        """The note that the peak is in what a training step does after its gradient; empty where it is not there."""
        return next((note for note in self.notes if note.kind == "peak-in-update"), "")

    def save_html(self, path: str | os.PathLike[str], others: Iterable[Report] = ()) -> None:
        """Write the report, both programs in full, as one HTML file that needs neither scripts nor a network.

        Args:
            path: the file, replaced if it is there.
            others: reports of the same function under other policies, whose figures are told beside it.

        Raises:
            RematError: the file cannot be written.
        """
        write(path, display().page_html(self, others))

    def _bytes_of(self, *kinds: Kind) -> int:
        return sum(residual.nbytes for residual in self.residuals if residual.kind in kinds and not residual.dropped)

    @property
    def saved_bytes(self) -> int:
        """Bytes of intermediates kept on the device: the memory that the policy costs.

        What nothing reads is not kept once the program is compiled. A report of the forward half alone cannot tell,
        and counts it.
        """
        return self._bytes_of("intermediate")

    @property
    def unread_bytes(self) -> int:
        """Bytes of intermediates that JAX lists and nothing reads: in no memory, nor in ``peak_bytes``."""
        return sum(residual.nbytes for residual in self.residuals if residual.dropped)

    @property
    def argument_bytes(self) -> int:
        """Bytes of residuals that are arguments, which are alive anyway."""
        return self._bytes_of("argument")

    @property
    def constant_bytes(self) -> int:
        """Bytes of residuals that the function captured from outside, literals included."""
        return self._bytes_of("constant", "literal")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of intermediates moved to another memory."""
        return self._bytes_of("offloaded")

    @property
    def repeated(self) -> tuple[Equation, ...]:
        """The operations that ran forward and run again."""
        return tuple(equation for equation in self.recomputed if equation.repeated)

    @property
    def deferred(self) -> tuple[Equation, ...]:
        """The operations that run only in the backward pass (the cos of a sin)."""
        return tuple(equation for equation in self.recomputed if not equation.repeated)

    @property
    def repeated_flops(self) -> int:
        """FLOPs of the repeated operations whose cost is known; the others are in ``uncosted``.

        Of a conditional, the branch counts that recomputes most.
        """
        return total_flops(equation for equation in dearest(self.recomputed) if equation.repeated)

    @property
    def deferred_flops(self) -> int:
        """FLOPs of the deferred operations whose cost is known."""
        return total_flops(equation for equation in dearest(self.recomputed) if not equation.repeated)

    @property
    def communicated_bytes(self) -> int | None:
        """``forward_communicated_bytes + backward_communicated_bytes``; None where one is not known."""
        ahead, back = self.forward_communicated_bytes, self.backward_communicated_bytes
        return None if ahead is None or back is None else ahead + back

    @property
    def repeated_communicated_bytes(self) -> int:
        """What one device has of the results of collectives that ran forward and run again, in bytes.

        Counted as in ``Measurement.communicated_bytes``, of the collectives that the program names in a ``shard_map``
        or ``pmap``: those that XLA inserts elsewhere are in the compiled program only.
        """
        return sum(equation.communicated_bytes for equation in dearest(self.recomputed) if equation.repeated)

    @property
    def recomputed_flops(self) -> int:
        """``repeated_flops + deferred_flops``."""
        return total_flops(dearest(self.recomputed))
