"""What a device's compiler makes of a schedule: the order of its steps, what is not held, and what lies where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_magic import _jax
from remat_magic.facts.buffers import Buffers
from remat_magic.facts.held import Held
from remat_magic.facts.narrowing import read_by_matmuls
from remat_magic.facts.remade import fused_again, made_again
from remat_magic.facts.results import over_donated, within_results
from remat_magic.facts.step_order import ScheduledStep, brought_forward, put_off, results_put_off
from remat_magic.facts.sweep import lives
from remat_magic.jaxprs.straight_line import Operation, StraightLines

__all__ = ["arranged"]


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
    changed = _make_again(steps, buffers) if on.fuses else set[int]()
    if on.narrows:
        _narrow(steps, buffers, around)
    if on.matmuls:
        in_memory = buffers.lasting | buffers.written | buffers.saved | buffers.gradients
        _read_instead(steps, fused_again(steps, changed, in_memory, buffers.sizes), buffers)
    order = put_off(steps, buffers.kept | buffers.gradients) if on.delays else steps
    order = brought_forward(order, buffers.lasting, buffers.sizes)
    if on.puts_off:
        order = results_put_off(order, buffers.lasting, buffers.sizes)
    if on.reserves:
        _place_results(order, buffers)
    return order


def _make_again(steps: list[ScheduledStep], buffers: Buffers) -> set[int]:
    """Let kernels that read certain residuals make them again, and read what these are made of; what they make."""
    lasting = buffers.lasting
    again = made_again(
        steps,
        buffers.saved - lasting,
        lasting,
        buffers.written,
        buffers.checkpoints,
        buffers.sizes,
        matmuls=buffers.on.matmuls,
    )
    return _read_instead(steps, again, buffers)


def _read_instead(steps: list[ScheduledStep], again: Mapping[int, tuple[int, ...]], buffers: Buffers) -> set[int]:
    """Let what is made again take no bytes, and kernels read what it is made of; what these make."""
    changed = set[int]()
    for number in again:
        buffers.discard(number)
    for index, step in enumerate(steps):
        if not again.keys().isdisjoint(step.reads):
            reads, over = (
                (*numbers, *{read for number in numbers for read in again.get(number, ())}.difference(numbers))
                for numbers in (step.reads, step.over)
            )
            steps[index] = step._replace(reads=reads, over=over)
            changed.update(step.makes)
    return changed


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


def _place_results(steps: list[ScheduledStep], buffers: Buffers) -> None:
    """Let results lie where donated arguments do, and what is gone before they are written where they do."""
    results = buffers.results
    buffers.lay_out_results(steps)
    for number in over_donated(results, buffers.donated - buffers.kept, buffers.sizes):
        buffers.discard(number)
    if buffers.on.shares:
        live = lives(steps, buffers, reserved=set())
        others = live.keys() - buffers.lasting
        for number in within_results(live, results, others, buffers.sizes):
            buffers.discard(number)
