"""Where the compiled program departs from what the report says, one sentence each; nothing where that is not sure.

What was found out about XLA (CPU, jaxlib of jax 0.10.2 and 0.12.0.1): it takes operations of the recomputation for
those of the forward pass where no barrier keeps them apart (``prevent_cse=False``, and on 0.10.2 with one, in programs
without loops), so that their values stay in memory; it drops a forward pass that only the backward pass read; and it
computes elementwise residuals again in fusions rather than keep them.

Matrix multiplications and convolutions are counted in the jaxpr and in the compiled program: XLA neither splits them
nor runs them twice of its own accord. The size of one is the number of elements of its result and the product of those
of its two operands, which stays the same when XLA reshapes or transposes them, or writes the one as the other.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax, units
from remat_magic.engine.halves import Gradient
from remat_magic.facts.recomputation import Recomputation
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.jaxprs.walk import Scope, walk
from remat_magic.records import Measurement, Note, Report

__all__ = [
    "contractions",
    "departures",
    "forward_is_dead",
    "in_program",
    "kept_less",
    "recomputation_of",
    "undone",
    "without_effect",
]


Size = tuple[int, int]


def in_program(jaxpr: Any) -> Counter[Size] | None:
    """How often each size runs in the live code of a jaxpr, each branch of a conditional counted.

    Returns:
        None where a ``while`` loop of unknown length holds one of them.
    """
    body = _jax.open_jaxpr(jaxpr)
    live = LiveEquations(body)
    return of_equations((scope, eqn) for scope, eqn in walk(body, live) if live(eqn))


def of_equations(equations: Iterable[tuple[Scope, Any]]) -> Counter[Size] | None:
    """How often each size runs among these equations; None where the length of a loop around one is not known."""
    counts: Counter[Size] = Counter()
    for scope, eqn in equations:
        size = _size(eqn)
        if size is None:
            continue
        if scope.times is None:
            return None
        counts[size] += scope.times
    return counts


def _size(eqn: Any) -> Size | None:
    if not _jax.is_matmul(eqn):
        return None
    left, right = (math.prod(atom.aval.shape) for atom in eqn.invars[:2])
    return math.prod(eqn.outvars[0].aval.shape), left * right


# A saving has to be this large a part of the memory without the checkpoint to be missed, and the temporary bytes have
# to have fallen by less than this part of it, for the sentence that it does not show.
_LARGE, _SMALL = 0.2, 0.1


def departures(
    gradient: Gradient, modules: Sequence[_jax.Module] | None, measured: Measurement, saved_bytes: int
) -> tuple[Note, ...]:
    """What one compiled program shows by itself.

    Args:
        gradient: the program as it was lowered.
        modules: what XLA made of it; None where the backend does not give them.
        measured: its measurement.
        saved_bytes: the report's.
    """
    recomputation = recomputation_of(gradient)
    notes = (
        Note("offload-kept", offload_kept(gradient, modules) if modules else ""),
        Note(
            "checkpoint-undone",
            undone(gradient, recomputation, modules[0]) if modules and measured.devices == 1 else "",
        ),
        Note("forward-dropped", forward_is_dead(gradient, recomputation)),
        Note("kept-less", kept_less(measured, saved_bytes)),
    )
    return tuple(note for note in notes if note)


def offload_kept(gradient: Gradient, modules: Sequence[_jax.Module]) -> str:
    """Whether nothing that the policy offloads is in the host's memory in the compiled program."""
    moved = sum(_jax.nbytes(aval) for aval in gradient.forward.residual_types if _jax.memory_space(aval))
    if not moved or any(row.on_host for module in modules for row in module.instructions):
        return ""
    return (
        f"XLA keeps on the device what the policy offloads: nothing of its {units.nbytes(moved)} is in the host's "
        "memory in the compiled program, so that they take as much as if they were saved."
    )


def recomputation_of(gradient: Gradient) -> Recomputation:
    """What the backward half of a gradient recomputes."""
    half = gradient.forward
    return Recomputation(half.closed, gradient.backward, gradient.provenances, len(half.residual_types))


def undone(gradient: Gradient, recomputation: Recomputation, module: _jax.Module) -> str:
    """Whether XLA took recomputed matrix multiplications or convolutions for those of the forward pass.

    Two counts must agree for each size: as many as are missing from the compiled program, compared with the jaxpr that
    was lowered, must be missing from those marked as recomputation, compared with the report. Sizes for which they do
    not agree are left out, since XLA may have rewritten these for reasons of its own.
    """
    repeated = of_equations((scope, eqn) for scope, eqn in recomputation.equations if recomputation.repeated(eqn))
    written = in_program(gradient.jaxpr)
    if not repeated or not written:
        return ""
    compiled = contractions(module)
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
    loose = any(_prevents_nothing(eqn) for _, eqn in walk(recomputation.top.jaxpr)) or any(
        _prevents_nothing(eqn) for _, eqn in walk(gradient.provenances.closed)
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
    if any(live(eqn) and not _jax.bodies(eqn) and not _jax.is_transparent(eqn) for _, eqn in walk(kept)):
        return ""
    again: Counter[tuple[int, str]] = Counter()
    for scope, eqn in recomputation.equations:
        if recomputation.repeated(eqn):
            if scope.times is None:
                return ""
            again[_operation(eqn)] += scope.times
    before: Counter[tuple[int, str]] = Counter()
    for scope, eqn in walk(jaxpr):
        before[_operation(eqn)] += scope.times or 0
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
    room = measured.temp_bytes + measured.output_bytes - (measured.alias_bytes or 0)
    missing = saved_bytes - room
    if missing <= _SMALL * saved_bytes:
        return ""
    return (
        f"XLA keeps less than autodiff saves: {units.nbytes(saved_bytes)} of residuals do not fit into its "
        f"{units.nbytes(room)} of temporaries and outputs; the rest it computes again in fusions, or never stores."
    )


def without_effect(measured: Sequence[tuple[Report, Measurement]]) -> dict[int, Note]:
    """Savings on paper that temporary memory does not show, compared with "none" at the same place.

    Args:
        measured: reports with their measurements.

    Returns:
        Notes by the number of the measurement.
    """
    plain = {
        report.at: (report, measurement)
        for report, measurement in measured
        if report.policy == "none" and measurement.temp_bytes is not None
    }
    notes: dict[int, Note] = {}
    for number, (report, measurement) in enumerate(measured):
        if report.policy == "none" or report.at not in plain or measurement.temp_bytes is None:
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


# -------------------------------------------------------------------------------- contractions in the compiled program

_LIBRARY = re.compile(r"gemm|matmul|conv", re.IGNORECASE)  # cuBLAS, cuDNN, oneDNN
_MARK = "rematted_computation"  # the name that JAX puts on what a checkpoint makes run again
_AGAIN = ("async-update", "async-done")  # name once more the computation that was begun


@dataclass(slots=True)
class _Counts:
    """How often each size of matrix multiplication and convolution runs, and how often as marked recomputation."""

    all: Counter[Size] = field(default_factory=Counter[Size])
    recomputed: Counter[Size] = field(default_factory=Counter[Size])

    def add(self, other: _Counts, times: int) -> None:
        """Add that many runs of another computation."""
        for counter, added in ((self.all, other.all), (self.recomputed, other.recomputed)):
            for size, count in added.items():
                counter[size] += count * times


def contractions(module: _jax.Module) -> _Counts | None:
    """Count the matrix multiplications and convolutions that a compiled program runs.

    Loops count as often as they run, each branch of a conditional counts.

    Returns:
        None where a loop of unknown length holds one of them.
    """

    @functools.cache
    def of(number: int) -> _Counts | None:
        """Of one run of a computation."""
        within, total = module.computations[number], _Counts()
        for instruction in within.instructions.values():
            opcode = instruction.opcode
            if opcode in ("dot", "convolution") or (opcode == "custom-call" and _LIBRARY.search(instruction.target)):
                operands = [within.instructions[operand].result for operand in instruction.operands[:2]]
                size = _jax.elements(instruction.result), math.prod(map(_jax.elements, operands))
                total.all[size] += 1
                total.recomputed[size] += _MARK in instruction.op_name
            loop = opcode == "while"
            times = _jax.trips(module, instruction, number) if loop else 1
            for called in () if opcode in _AGAIN else instruction.called[:1] if loop else instruction.called:
                inner = of(called)
                if inner is None or (times is None and inner.all):
                    return None
                total.add(inner, times or 1)
        return total

    return of(module.entry)
