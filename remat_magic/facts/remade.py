"""Which residuals XLA does not keep: kernels that read them make them again of what is held anyway, or of less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remat_magic import _jax
from remat_magic._jax.primitives import BROADCASTS, FUSIBLE, REDUCTIONS
from remat_magic.facts.step_order import ScheduledStep

__all__ = ["made_again"]

_MOST = 96  # XLA for GPUs fuses no further where a kernel would read more


def made_again(
    steps: Sequence[ScheduledStep],
    saved: set[int],
    lasting: set[int],
    barred: set[int],
    checkpoints: Mapping[int, object],
    sizes: Sequence[int],
) -> dict[int, tuple[int, ...]]:
    """The residuals that are made again where they are read, and what is read there instead.

    XLA fuses an elementwise operation into every kernel that reads it, those of the backward half too, and then keeps
    what it reads. What something else reads, such as a matmul, is in memory. So is what goes into a checkpoint, or out
    of it: its barriers do not let kernels through.

    Args:
        steps: all of them, in the order of the jaxprs.
        saved: the buffers of residuals, those that are held to the end left out.
        lasting: the buffers that are held to the end.
        barred: those that go through a barrier.
        checkpoints: for what a checkpoint makes, which one.
        sizes: the bytes of each.
    """
    in_memory = lasting | barred
    for step in steps:
        checkpoint = checkpoints.get(step.makes[0]) if step.makes else None
        fuses = _fuses(step)
        in_memory.update([number for number in step.reads if not fuses or checkpoints.get(number) != checkpoint])
    made_of: dict[int, frozenset[int]] = {}
    alike: dict[frozenset[int], list[int]] = {}  # residuals that are made of the same
    for step in steps:
        for number in step.makes if _elementwise(step) else ():
            operands = frozenset[int]().union(*(made_of.get(read, {read}) for read in step.reads))
            if number not in in_memory and len(operands) <= _MOST:
                made_of[number] = operands
                if number in saved and sizes[number]:
                    alike.setdefault(operands, []).append(number)
    held = lasting | saved.difference(*alike.values())
    return {
        number: tuple(sorted(operands))
        for operands, numbers in alike.items()
        if sum([sizes[operand] for operand in operands - held]) < sum([sizes[number] for number in numbers])
        for number in numbers
    }


def _name(step: ScheduledStep) -> str:
    return "" if step.eqn is None else _jax.primitive_name(step.eqn)


def _fuses(step: ScheduledStep) -> bool:
    """Whether a step runs in one kernel with what makes its operands."""
    name = _name(step)
    return name in FUSIBLE or name in REDUCTIONS


def _elementwise(step: ScheduledStep) -> bool:
    name = _name(step)
    return name in FUSIBLE - BROADCASTS and len(step.makes) == 1
