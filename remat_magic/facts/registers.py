"""Which values of a straight line take no memory where XLA fuses: they stay in registers, or are made there again."""

from __future__ import annotations

from typing import Any

from remat_magic._jax.primitives import BROADCASTS, FUSIBLE, REDUCTIONS
from remat_magic.facts.kernels import in_registers
from remat_magic.jaxprs.straight_line import LITERAL, Line, StraightLines

__all__ = ["fused_operands", "fuses", "unheld"]


def unheld(jaxpr: Any, lines: StraightLines) -> tuple[set[int], set[int]]:
    """The values that are never held, and those that are held no longer than for what does not fuse.

    A kernel that reads what an elementwise operation makes may run that operation itself: XLA fuses a producer into
    each of its consumers. It has the operands if something reads them as late anyway.
    """
    flat = lines(jaxpr)
    never = in_registers(jaxpr, lines)
    last, last_fused, last_other = dict[int, int](), dict[int, int](), dict[int, int]()
    for index, line in enumerate(flat.lines):
        for number in line.reads:
            last[number] = index
            (last_fused if fuses(line) else last_other)[number] = index
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
        reads = {each for number in line.reads if number != LITERAL for each in read_for.get(number, (number,))}
        for number in line.makes:
            end = last_fused.get(number, -1)
            if number in never:
                read_for[number] = reads
            elif (
                line.operation.name in FUSIBLE - BROADCASTS
                and not line.operation.bodies
                and end > last_other.get(number, -1)
                and all(last[each] >= end for each in reads)
            ):
                read_for[number] = reads
                (again if number in last_other else never).add(number)
    return never, again


def fused_operands(jaxpr: Any, lines: StraightLines) -> set[int]:
    """The positions of the inputs that nothing but kernels of fused operations read: a slice of a stack is such."""
    flat = lines(jaxpr)
    whole = {number for line in flat.lines if not fuses(line) for number in line.reads}.union(flat.outputs)
    return {position for position, number in enumerate(flat.inputs) if number not in whole}


def fuses(line: Line) -> bool:
    """Whether an operation runs in one kernel with what makes its operands."""
    return not line.operation.bodies and (line.operation.name in FUSIBLE or line.operation.name in REDUCTIONS)
