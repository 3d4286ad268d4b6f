"""What a device's compiler makes of a schedule: the order of its steps, what is not held, and what lies where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import FUSIBLE, INDEXED, MATMULS, REDUCTIONS, TRANSPOSE
from remat_magic.facts.buffers import (
    Buffers,
    Held,
    ScheduledStep,
    brought_forward,
    put_off,
)
from remat_magic.jaxprs.straight_line import Operation, StraightLines

# ---------------------------------------------------------------------------------------------------- where results lie


def over_donated(results: Collection[int], donated: Collection[int], sizes: Sequence[int]) -> list[int]:
    """The results that lie where a donated argument of the same size does."""
    free = Counter(sizes[number] for number in donated)
    placed: list[int] = []
    for number in sorted(results):
        if free[sizes[number]]:
            free[sizes[number]] -= 1
            placed.append(number)
    return placed


# ---------------------------------------------------------------------------------------------- what kernels make again


_MOST = 96  # XLA for GPUs fuses no further where a kernel would read more


def made_again(steps: Sequence[ScheduledStep], buffers: Buffers) -> dict[int, tuple[int, ...]]:
    """The residuals that are made again where they are read, and what is read there instead.

    XLA fuses an elementwise operation into every kernel that reads it, those of the backward half too, and then keeps
    what it reads. What something else reads is in memory. Residuals that are held to the end are left out.
    """
    sizes, lasting = buffers.sizes, buffers.lasting
    saved = buffers.saved - lasting
    whole = [step.reads for step in steps if not _fuses(step, matmuls=buffers.on.matmuls)]
    in_memory = (lasting | buffers.written).union(*whole)
    reads_of: dict[int, Sequence[int]] = {}  # of what can be made again, or is in registers
    made_of: dict[int, frozenset[int]] = {}  # the last of these that cannot
    alike: dict[frozenset[int], list[int]] = {}  # residuals that are made of the same
    for step in steps:
        fusible = _name(step) in FUSIBLE or (not buffers.on.matmuls and _name(step) == "gather")
        for number in step.makes:
            in_register = number in buffers.instead
            if not in_register and (number in in_memory or not fusible or len(step.makes) > 1):
                continue
            reads = [read for read in step.reads if sizes[read] or read in made_of]  # no literals, so that equals meet
            operands = frozenset[int]().union(*(made_of.get(read, {read}) for read in reads))
            if in_register or len(operands) <= _MOST:
                reads_of[number], made_of[number] = reads, frozenset(islice(operands, _MOST + 1))
                if number in saved and sizes[number]:
                    alike.setdefault(operands, []).append(number)
    held = lasting | saved.difference(*alike.values())
    again: dict[int, tuple[int, ...]] = {}
    known: dict[int, frozenset[int]] = {}
    for numbers in alike.values():
        operands_of = {number: _nearest(number, reads_of, held, known) for number in numbers}
        operands = set[int]().union(*operands_of.values())
        if sum([sizes[operand] for operand in operands - held]) < sum([sizes[number] for number in numbers]):
            again.update((number, tuple(sorted(nearest))) for number, nearest in operands_of.items())
            held |= operands
        else:
            held.update(numbers)
            known.clear()  # what is held besides stands at the end of nobody's way
    return again


def _nearest(
    number: int, reads_of: Mapping[int, Sequence[int]], held: set[int], known: dict[int, frozenset[int]]
) -> frozenset[int]:
    """What a buffer is made again of: on the way to each of its makers, the first that is held.

    ``known`` has it of others that are not held, and is added to.
    """
    todo = [number]
    while todo:
        here = todo[-1]
        unheld = [read for read in reads_of[here] if read in reads_of and read not in held]
        missing = [read for read in unheld if read not in known]
        if not missing:
            todo.pop()
            known[here] = frozenset(reads_of[here]).difference(unheld).union(*(known[read] for read in unheld))
        todo += missing
    return known[number]


def _fuses(step: ScheduledStep, *, matmuls: bool) -> bool:
    name = _name(step)
    return name in FUSIBLE or name in REDUCTIONS or name in (MATMULS if matmuls else INDEXED)


def _name(step: ScheduledStep) -> str:
    return "" if step.eqn is None else _jax.primitive_name(step.eqn)


# --------------------------------------------------------------------------------------------- what is held in bfloat16


def read_by_matmuls(
    steps: Sequence[ScheduledStep], around: Mapping[int, tuple[StraightLines, Operation]]
) -> tuple[set[int], dict[int, list[int]]]:
    """The buffers that nothing but matmuls read, and for each the loops that read it for nothing else, as positions.

    Args:
        steps: all of them.
        around: for the identity of an equation with bodies the lines that it is from, and its operation.
    """
    matmuls, others, loops = set[int](), set[int](), dict[int, list[int]]()
    for index in reversed(range(len(steps))):  # what reads a result is met before what makes it
        step = steps[index]
        if step.eqn is not None and _jax.takes_bfloat16(step.eqn):
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


# ------------------------------------------------------------------------------------------------------------ all of it


def arranged(
    steps: list[ScheduledStep], buffers: Buffers, around: Mapping[int, tuple[StraightLines, Operation]]
) -> list[ScheduledStep]:
    """The steps in the order in which they are taken to run.

    What is not held takes no bytes from here on.

    Args:
        steps: in the order of the jaxprs.
        buffers: what they read and make.
        around: for the identity of an equation with bodies the lines that it is from, and its operation.
    """
    on = buffers.on
    read = {number for step in steps for number in step.reads} | buffers.kept
    for step in steps:
        if step.eqn is not None and _jax.is_scan(step.eqn):  # its dead stacks are not made
            for number in step.makes:
                buffers.sizes[number] *= number in read
    if on.fuses:
        for number, reads in made_again(steps, buffers).items():
            buffers.discard(number)
            buffers.instead[number] = reads
            buffers.again.add(number)
    if on.narrows:
        _narrow(steps, buffers, around)
    buffers.lay_out_results(steps)
    order = brought_forward(put_off(steps, buffers.kept | buffers.gradients), buffers)
    if on.reserves:
        for number in over_donated(buffers.results, buffers.donated - buffers.kept, buffers.sizes):
            buffers.discard(number)
    return order


def _narrow(
    steps: list[ScheduledStep], buffers: Buffers, around: Mapping[int, tuple[StraightLines, Operation]]
) -> None:
    """Hold in bfloat16 what only matmuls read, and what loops take slices of for them, from the first one on."""
    types: dict[int, Any] = buffers.types(steps)
    narrow, in_loops = read_by_matmuls(steps, around)
    for number in narrow - buffers.lasting - buffers.donated:
        half = _jax.narrowed(types.get(number))
        if half is not None and buffers.sizes[number]:
            buffers.sizes[number], buffers.narrowed[number] = buffers.nbytes(half), half
    converted: list[tuple[int, ScheduledStep]] = []
    for number, loops in in_loops.items():
        half = _jax.narrowed(types.get(number)) if number in buffers.throughout else None
        if half is not None:
            first = steps[loops[0]]
            copy = buffers.buffer(half, Held(0, half, first.eqn))
            converted.append((loops[0], ScheduledStep(first.where, (number,), (copy,))))
            for index in loops:
                steps[index] = steps[index]._replace(reads=(*steps[index].reads, copy))
    for index, step in sorted(converted, key=lambda pair: -pair[0]):
        steps.insert(index, step)
