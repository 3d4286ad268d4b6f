"""Which values nothing but matmuls of the default precision read: a TPU holds them in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import TRANSPOSE
from remat_magic.facts.step_order import ScheduledStep
from remat_magic.jaxprs.straight_line import Operation, StraightLines

__all__ = ["read_by_matmuls"]


def read_by_matmuls(
    steps: Sequence[ScheduledStep], around: Mapping[int, tuple[StraightLines, Operation]]
) -> tuple[set[int], dict[int, list[int]]]:
    """The buffers that nothing but matmuls read, and for each the loops that read it for nothing else, as positions.

    Those of which slices, or several side by side, are read so are among them.

    Args:
        steps: all of them.
        around: for the identity of an equation with bodies the lines that it is from, and its operation.
    """
    matmuls, others, loops = set[int](), set[int](), dict[int, list[int]]()
    for index in reversed(range(len(steps))):  # what reads a result is met before what makes it
        step = steps[index]
        if step.eqn is not None and (_jax.takes_bfloat16(step.eqn) or _moves(step, matmuls, others)):
            matmuls.update(step.reads)
            continue
        inside = _inside(*around[id(step.eqn)]) if id(step.eqn) in around else []
        for number, only in zip(step.reads, [*inside, *[False] * (len(step.reads) - len(inside))], strict=True):
            if only:
                matmuls.add(number)
                loops.setdefault(number, []).insert(0, index)
            elif only is not None:
                others.add(number)
    return matmuls - others, loops


def _moves(step: ScheduledStep, matmuls: set[int], others: set[int]) -> bool:
    """Whether a step moves elements of what it reads, unchanged, to where nothing but matmuls read them."""
    return _jax.rearranges(step.eqn) and matmuls.issuperset(step.makes) and others.isdisjoint(step.makes)


def _inside(lines: StraightLines, operation: Operation) -> list[bool | None]:
    """For each operand of a scan whether its body reads it with nothing but matmuls; None where it does not at all."""
    if not _jax.is_scan(operation.eqn):
        return []
    carried = _jax.carried_operands(operation.eqn)
    only = _inputs(lines, operation.bodies[0].jaxpr)
    return [False if index in carried else yes for index, yes in enumerate(only)]


def _inputs(lines: StraightLines, jaxpr: Any) -> list[bool | None]:
    flat = lines(jaxpr)
    shown: dict[int, int] = {}  # of transposes, what they show
    matmuls, others = set[int](), {*flat.outputs}
    for operation, reads, makes in flat.lines:
        read = [shown.get(number, number) for number in reads]
        if operation.name == TRANSPOSE:
            shown[makes[0]] = read[0]
            continue
        inside = _inside(lines, operation) if operation.bodies else [_jax.takes_bfloat16(operation.eqn)] * len(read)
        for number, only in zip(read, inside or [False] * len(read), strict=True):
            if only is not None:
                (matmuls if only else others).add(number)
    others.update(shown[number] for number in flat.outputs if number in shown)
    return [None if number not in matmuls and number not in others else number not in others for number in flat.inputs]
