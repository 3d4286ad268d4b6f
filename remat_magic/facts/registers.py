"""Which values of a straight line take no memory where XLA fuses: they stay in registers, or are made there again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import BROADCASTS, FUSIBLE, MADE_ANEW, MATMULS, REDUCTIONS
from remat_magic.facts.kernels import in_registers
from remat_magic.jaxprs.straight_line import LITERAL, Line, StraightLine, StraightLines

__all__ = ["fused_operands", "fuses", "normalized", "strided", "unheld"]

_NOT_MADE_AGAIN = BROADCASTS | REDUCTIONS | MATMULS


def unheld(
    jaxpr: Any, lines: StraightLines, in_memory: Collection[int], alone: Collection[int], *, matmuls: bool
) -> tuple[set[int], set[int]]:
    """The values that are never held, and those that are held no longer than for what does not fuse.

    A kernel that reads what an elementwise operation makes may run that operation itself: XLA fuses a producer into
    each of its consumers. It has the operands if something reads them as late anyway, or if they take less than what is
    made of them.

    Args:
        jaxpr: whose values they are, by their numbers.
        lines: the straight lines.
        in_memory: what every kernel but the one that makes it reads from memory.
        alone: those of these that are not even in its registers: they are a kernel's only results.
        matmuls: as for ``fuses``.
    """
    flat = lines(jaxpr)
    never = in_registers(jaxpr, lines).difference(alone)
    last, last_fused, last_other = dict[int, int](), dict[int, int](), dict[int, int]()
    for index, line in enumerate(flat.lines):
        for number in line.reads:
            last[number] = index
            (last_fused if fuses(line, matmuls=matmuls) else last_other)[number] = index
    for number in flat.outputs:
        last[number] = last_other[number] = len(flat.lines)
    for line in reversed(flat.lines):
        for number in line.makes:
            if number in never:
                for read in line.reads:
                    last[read] = max(last.get(read, 0), last.get(number, 0))
    again = set[int]()
    read_for: dict[int, set[int]] = {}  # for what is not held for its kernel
    for line in flat.lines:
        reads = {read for number in line.reads if number != LITERAL for read in read_for.get(number, (number,))}
        for number in line.makes:
            end = last_fused.get(number, -1)
            if number in never or line.operation.name in MADE_ANEW:
                read_for[number] = reads
            elif (
                fuses(line, matmuls=matmuls)
                and line.operation.name not in _NOT_MADE_AGAIN
                and number not in in_memory
                and end > last_other.get(number, -1)
            ):
                kept_for_it = [read for read in reads if last[read] < end]
                if sum([_jax.nbytes(flat.types[read]) for read in kept_for_it]) < _jax.nbytes(flat.types[number]):
                    last.update(dict.fromkeys(kept_for_it, end))
                    read_for[number] = reads
                    (again if number in last_other else never).add(number)
    return never, again


def normalized(flat: StraightLine) -> set[int]:
    """What elementwise operations make of values and of a reduction that is spread over them: a softmax, a norm.

    XLA for GPUs makes one kernel of such a reduction and of what reads it spread out.
    """
    reduced, results = set[int](), set[int]()
    for line in flat.lines:
        if fuses(line):
            reads = {number for number in line.reads if number != LITERAL}
            if line.operation.name in REDUCTIONS or (reads and reads <= reduced):
                reduced.update(line.makes)
            elif reads & reduced:
                results.update(line.makes)
    return results


def strided(flat: StraightLine) -> set[int]:
    """Every so many elements of a value, and values with room between their elements."""
    return {number for line in flat.lines if _jax.is_strided(line.operation.eqn) for number in line.makes}


def fused_operands(jaxpr: Any, lines: StraightLines) -> set[int]:
    """The positions of the inputs that nothing but kernels of fused operations read: a slice of a stack is such."""
    flat = lines(jaxpr)
    whole = {number for line in flat.lines if not fuses(line) for number in line.reads}.union(flat.outputs)
    return {position for position, number in enumerate(flat.inputs) if number not in whole}


def fuses(line: Line, *, matmuls: bool = False) -> bool:
    """Whether an operation runs in one kernel with what makes its operands; ``matmuls``: these do so as well.

    So then does what puts one element into each row, as the gradient of a loss that takes one of each row's
    probabilities: XLA for TPUs makes a comparison and a selection of it.
    """
    name, eqn = line.operation.name, line.operation.eqn
    if line.operation.bodies:
        return False
    return name in FUSIBLE or name in REDUCTIONS or (matmuls and (name in MATMULS or _jax.is_one_hot(eqn)))
