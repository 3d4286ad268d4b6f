"""Where the compiled program departs from what the report says, one sentence each; nothing where that is not sure.

What was found out about XLA (CPU, jaxlib of jax 0.10.2 and 0.12.0.1): it takes operations of the recomputation for
those of the forward pass where no barrier keeps them apart (``prevent_cse=False``, and on 0.10.2 with one, in programs
without loops), so that their values stay in memory; it drops a forward pass that only the backward pass read; and it
computes elementwise residuals again in fusions rather than keep them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from remat_magic import _jax, units
from remat_magic.engine.halves import Gradient
from remat_magic.facts.contractions import in_program, of_equations, runs
from remat_magic.facts.dead_code import LiveEquations
from remat_magic.facts.recomputation import Recomputation
from remat_magic.jaxprs.walk import walk
from remat_magic.measuring.hlo import contractions
from remat_magic.records import Measurement, Report

__all__ = ["between", "findings", "forward_is_dead", "kept_less", "undone"]

# A saving has to be this large a part of the memory without the checkpoint to be missed, and the temporary bytes have
# to have fallen by less than this part of it, for the sentence that it does not show.
_LARGE, _SMALL = 0.2, 0.1


def findings(gradient: Gradient, text: str | None, measured: Measurement, saved_bytes: int) -> tuple[str, ...]:
    """What one compiled program shows by itself.

    Args:
        gradient: the program as it was lowered.
        text: its HLO after XLA's optimizations; None where the backend does not give it.
        measured: its measurement.
        saved_bytes: the report's.
    """
    recomputation = recomputation_of(gradient)
    found = (
        undone(gradient, recomputation, text) if text and measured.devices == 1 else "",
        forward_is_dead(gradient, recomputation),
        kept_less(measured, saved_bytes),
    )
    return tuple(sentence for sentence in found if sentence)


def recomputation_of(gradient: Gradient) -> Recomputation:
    """What the backward half of a gradient recomputes."""
    half = gradient.forward
    return Recomputation(half.closed, gradient.backward, gradient.index, len(half.residual_types))


def undone(gradient: Gradient, recomputation: Recomputation, text: str) -> str:
    """Whether XLA took recomputed matrix multiplications or convolutions for those of the forward pass.

    Two counts must agree for each size: as many as are missing from the compiled program, compared with the jaxpr that
    was lowered, must be missing from those marked as recomputation, compared with the report. Sizes for which they do
    not agree are left out, since XLA may have rewritten these for reasons of its own.
    """
    repeated = of_equations((scope, eqn) for scope, eqn in recomputation.equations if recomputation.repeated(eqn))
    written = in_program(gradient.jaxpr)
    if not repeated or not written:
        return ""
    compiled = contractions(text)
    if compiled is None:
        return ""
    gone = {
        size: count - compiled.recomputed[size]
        for size, count in repeated.items()
        if written[size] - compiled.all[size] == count - compiled.recomputed[size] > 0
    }
    missing, total = sum(gone.values()), repeated.total()
    if not missing:
        return ""
    loose = any(_prevents_nothing(eqn) for eqn, _ in walk(recomputation.top.jaxpr)) or any(
        _prevents_nothing(eqn) for eqn, _ in walk(gradient.index.closed)
    )
    mend = "leave prevent_cse at its default, True" if loose else "lax.scan over the layers keeps the two apart"
    return (
        f"XLA undoes the checkpoint: of the {total} matrix multiplications and convolutions that the backward pass "
        f"repeats, the compiled program repeats {total - missing} and keeps the forward pass's results instead; {mend}."
    )


def _prevents_nothing(eqn: Any) -> bool:
    return _jax.is_checkpoint(eqn) and _jax.prevents_cse(eqn) is False


def forward_is_dead(gradient: Gradient, recomputation: Recomputation) -> str:
    """Whether the backward pass computes everything again, once, and reads nothing that the forward pass computed.

    Seen in the jaxprs: XLA drops what nothing reads in any case.
    """
    jaxpr = _jax.open_jaxpr(gradient.forward.closed)
    kept = _jax.replace_eqns(jaxpr, jaxpr.eqns, jaxpr.outvars[gradient.outputs :])
    live = LiveEquations(kept)
    if any(live(eqn) and not _jax.bodies(eqn) and not _jax.is_transparent(eqn) for eqn, _ in walk(kept)):
        return ""
    again: Counter[tuple[int, str]] = Counter()
    for scope, eqn in recomputation.equations:
        if recomputation.repeated(eqn):
            times = runs(scope)
            if times is None:
                return ""
            again[_operation(eqn)] += times
    before: Counter[tuple[int, str]] = Counter()
    for eqn, times in walk(jaxpr):
        before[_operation(eqn)] += times or 0
    if not again or again - before:  # a checkpoint within the checkpoint does repeat work
        return ""
    return (
        "The checkpoint is around everything, and the backward pass computes all of it again: where only the gradients "
        "are used, XLA drops the forward pass as dead code, so that the checkpoint neither repeats work nor saves "
        "memory."
    )


def _operation(eqn: Any) -> tuple[int, str]:
    return id(_jax.traceback_of(eqn)), _jax.primitive_name(eqn)


def kept_less(measured: Measurement, saved_bytes: int) -> str:
    """Whether the residuals cannot all be in memory at once: they are temporaries, or lie where outputs will be."""
    if measured.temp_bytes is None or measured.output_bytes is None or measured.devices > 1:
        return ""
    room = measured.temp_bytes + measured.output_bytes
    missing = saved_bytes - room
    if missing <= _SMALL * saved_bytes:
        return ""
    return (
        f"XLA keeps less than autodiff saves: {units.nbytes(saved_bytes)} of residuals do not fit into its "
        f"{units.nbytes(room)} of temporaries and outputs; the rest it computes again in fusions, or never stores."
    )


def between(measured: Sequence[tuple[Report, Measurement]]) -> dict[int, str]:
    """Savings on paper that temporary memory does not show, compared with "none" at the same place.

    Args:
        measured: reports with their measurements.

    Returns:
        Sentences by the index of the measurement.
    """
    plain = {
        report.at: (report, found)
        for report, found in measured
        if report.policy == "none" and found.temp_bytes is not None
    }
    sentences: dict[int, str] = {}
    for number, (report, found) in enumerate(measured):
        if report.policy == "none" or report.at not in plain or found.temp_bytes is None:
            continue
        without, reference = plain[report.at]
        assert reference.temp_bytes is not None
        if (found.device, found.devices) != (reference.device, reference.devices):
            continue
        less = without.saved_bytes - report.saved_bytes
        fallen = reference.temp_bytes - found.temp_bytes
        if less < _LARGE * max(reference.temp_bytes, 1) * reference.devices or fallen > _SMALL * less:
            continue
        sentences[number] = (
            f"{report.policy} saves {units.nbytes(less)} less than no checkpoint, yet XLA's temporary memory is "
            f"{units.nbytes(found.temp_bytes)} against {units.nbytes(reference.temp_bytes)}: it gains nothing here."
        )
    return sentences
