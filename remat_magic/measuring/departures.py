"""Where a compiled program departs from what the report says, one sentence each; nothing where that is not sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_magic import _jax, units
from remat_magic.records import Measurement, Note, Report

# A saving has to be this large a part of the memory without the checkpoint to be missed, and the temporary bytes have
# to have fallen by less than this part of it, for the sentence that it does not show.
_LARGE, _SMALL = 0.2, 0.1


def offload_kept(residual_types: Sequence[Any], modules: Sequence[_jax.Module] | None) -> tuple[Note, ...]:
    """Whether nothing of what a policy offloads is in the host's memory in the compiled program.

    Args:
        residual_types: of the gradient that was compiled.
        modules: what XLA made of it; None where the backend does not give them.
    """
    moved = sum(_jax.nbytes(aval) for aval in residual_types if _jax.memory_space(aval))
    if not moved or not modules or any(row.on_host for module in modules for row in module.instructions):
        return ()
    sentence = (
        f"XLA keeps on the device what the policy offloads: nothing of its {units.nbytes(moved)} is in the host's "
        "memory in the compiled program, so that they take as much as if they were saved."
    )
    return (Note("offload-kept", sentence),)


def without_effect(measured: Sequence[tuple[Report | None, Measurement]]) -> dict[int, Note]:
    """Savings on paper that temporary memory does not show, compared with "none" at the same place.

    XLA takes operations of the recomputation for those of the forward pass where no barrier keeps them apart, drops a
    forward pass that only the backward pass read, and computes cheap residuals again in fusions rather than keep them.

    Args:
        measured: reports with their measurements; None of what there is no report.

    Returns:
        Notes by the number of the measurement.
    """
    plain = {
        report.at: (report, measurement)
        for report, measurement in measured
        if report is not None and report.policy == "none" and measurement.temp_bytes is not None
    }
    notes: dict[int, Note] = {}
    for number, (report, measurement) in enumerate(measured):
        if report is None or report.policy == "none" or report.at not in plain or measurement.temp_bytes is None:
            continue
        without, reference = plain[report.at]
        assert reference.temp_bytes is not None
        if (measurement.device, measurement.devices) != (reference.device, reference.devices):
            continue
        less = without.saved_bytes - report.saved_bytes
        fallen = reference.temp_bytes - measurement.temp_bytes
        of_all = 1 if report.per_device else reference.devices
        if less < _LARGE * max(reference.temp_bytes, 1) * of_all or fallen > _SMALL * less:
            continue
        notes[number] = Note(
            "no-gain",
            f"{report.policy} saves {units.nbytes(less)} less than no checkpoint, yet XLA's temporary memory is "
            f"{units.nbytes(measurement.temp_bytes)} against {units.nbytes(reference.temp_bytes)}: "
            "it gains nothing here.",
        )
    return notes
