"""Which residuals XLA does not keep: kernels that read them make them again of what is held anyway, or of less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remat_magic import _jax
from remat_magic._jax.primitives import BROADCASTS, FUSIBLE, MATMULS, REDUCTIONS
from remat_magic.facts.step_order import ScheduledStep, last_uses

__all__ = ["fused_again", "made_again"]

_SMALL = 1 / 32  # of a value: what it is made of besides, such as a number for each row of it
_MOST = 96  # XLA for GPUs fuses no further where a kernel would read more


def made_again(
    steps: Sequence[ScheduledStep],
    saved: set[int],
    lasting: set[int],
    written: set[int],
    checkpoints: Mapping[int, object],
    sizes: Sequence[int],
    *,
    matmuls: bool,
) -> dict[int, tuple[int, ...]]:
    """The residuals that are made again where they are read, and what is read there instead.

    XLA fuses an elementwise operation into every kernel that reads it, those of the backward half too, and then keeps
    what it reads. What something else reads is in memory. So is what goes into a checkpoint, or out of it: its barriers
    do not let kernels through.

    Args:
        steps: all of them, in the order of the jaxprs.
        saved: the buffers of residuals, those that are held to the end left out.
        lasting: the buffers that are held to the end.
        written: those that kernels read from memory, whatever could make them again.
        checkpoints: for what a checkpoint makes, which one.
        sizes: the bytes of each.
        matmuls: a matmul's kernel runs what makes its operands, too.
    """
    in_memory = lasting | written
    for step in steps:
        checkpoint = checkpoints.get(step.makes[0]) if step.makes else None
        fuses = _fuses(step, matmuls=matmuls)
        in_memory.update([number for number in step.reads if not fuses or checkpoints.get(number) != checkpoint])
    reads_of: dict[int, Sequence[int]] = {}  # of what can be made again
    made_of: dict[int, frozenset[int]] = {}  # the last of these that cannot
    alike: dict[frozenset[int], list[int]] = {}  # residuals that are made of the same
    for step in steps:
        for number in step.makes if _name(step) in FUSIBLE and len(step.makes) == 1 else ():
            reads = [read for read in step.reads if sizes[read] or read in made_of]  # no literals, so that equals meet
            operands = frozenset[int]().union(*(made_of.get(read, {read}) for read in reads))
            if number not in in_memory and len(operands) <= _MOST:
                reads_of[number], made_of[number] = reads, operands
                if number in saved and sizes[number]:
                    alike.setdefault(operands, []).append(number)
    held = lasting | saved.difference(*alike.values())
    again: dict[int, tuple[int, ...]] = {}
    for numbers in alike.values():
        operands_of = {number: _nearest(number, reads_of, held) for number in numbers}
        operands = set[int]().union(*operands_of.values())
        if sum([sizes[operand] for operand in operands - held]) < sum([sizes[number] for number in numbers]):
            again.update((number, tuple(sorted(nearest))) for number, nearest in operands_of.items())
            held |= operands
        else:
            held.update(numbers)
    return again


def fused_again(
    steps: Sequence[ScheduledStep], changed: set[int], in_memory: set[int], sizes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """What else is made again where it is read, now that residuals are: what takes no less than what it is made of.

    Matmuls run what makes their operands, too.

    Args:
        steps: all of them, with what is read for residuals that are made again.
        changed: the buffers that are made by kernels that read for such.
        in_memory: the buffers that are in memory whatever could make them again.
        sizes: the bytes of each.

    Returns:
        For each buffer that is not held what is read instead.
    """
    last = last_uses(steps)
    in_memory = in_memory.union(*(step.reads for step in steps if not _fuses(step, matmuls=True)))
    again: dict[int, tuple[int, ...]] = {}
    for step in steps:
        if len(step.makes) != 1 or _name(step) not in FUSIBLE - BROADCASTS or in_memory.issuperset(step.makes):
            continue
        (number,) = step.makes
        if number in changed or not again.keys().isdisjoint(step.reads):
            reads = dict.fromkeys(read for own in step.reads for read in (own, *again.get(own, ())))
            kept_for_it = [read for read in reads if last[read] < last[number]]
            large = [sizes[read] for read in kept_for_it if sizes[read] > _SMALL * sizes[number]]
            if sum(large) <= sizes[number]:
                again[number] = (*reads,)
                last.update(dict.fromkeys(kept_for_it, last[number]))
    return again


def _nearest(number: int, reads_of: Mapping[int, Sequence[int]], held: set[int]) -> set[int]:
    """What a buffer is made again of: on the way to each of its makers, the first that is held."""
    seen, todo, nearest = set[int](), [*reads_of[number]], set[int]()
    while todo:
        read = todo.pop()
        if read not in seen:
            seen.add(read)
            if read in reads_of and read not in held:
                todo += reads_of[read]
            else:
                nearest.add(read)
    return nearest


def _fuses(step: ScheduledStep, *, matmuls: bool) -> bool:
    name = _name(step)
    return name in FUSIBLE or name in REDUCTIONS or (matmuls and name in MATMULS)


def _name(step: ScheduledStep) -> str:
    return "" if step.eqn is None else _jax.primitive_name(step.eqn)
