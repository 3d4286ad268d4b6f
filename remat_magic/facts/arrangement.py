"""What a device's compiler makes of a schedule: the order of its steps, what is not held, and what lies where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.facts.buffers import Buffers
from remat_magic.facts.held import Held
from remat_magic.facts.narrowing import read_by_matmuls
from remat_magic.facts.remade import fused_again, made_again
from remat_magic.facts.results import over_donated, within_results
from remat_magic.facts.step_clock import BodyTime, Clock
from remat_magic.facts.step_order import ScheduledStep, brought_forward, last_uses, put_off, results_put_off
from remat_magic.facts.sweep import lives
from remat_magic.facts.vector_memory import LiveBuffer, placed
from remat_magic.jaxprs.straight_line import Operation, StraightLines

__all__ = ["InTime", "arranged"]


class InTime(NamedTuple):
    """Steps in the order in which they run; where there is a vector memory, their clock, and the bytes in use there."""

    steps: list[ScheduledStep]
    clock: Clock | None = None
    vector_bytes: int = 0


def arranged(
    steps: list[ScheduledStep],
    buffers: Buffers,
    around: Mapping[int, tuple[StraightLines, Operation]],
    bodies: Mapping[int, BodyTime],
) -> InTime:
    """The steps in the order in which they are taken to run.

    What is not held, or not in the device's own memory, takes no bytes from here on.

    Args:
        steps: in the order of the jaxprs.
        buffers: what they read and make.
        around: for the identity of an equation with bodies the lines that it is from, and its operation.
        bodies: what loops and branches take, by the identity of their equation.
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
    return _place_in_vector_memory(order, buffers, bodies) if on.vector_memory else InTime(order)


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


def _place_in_vector_memory(steps: list[ScheduledStep], buffers: Buffers, bodies: Mapping[int, BodyTime]) -> InTime:
    """Let values lie in the vector memory where it has room; results are made there, and copied when they are."""
    results, sizes, capacity = buffers.reserved, buffers.sizes, buffers.on.vector_memory
    clock = Clock(steps, buffers, bodies)
    gains = clock.gains()
    waiting = {number for number, wait in clock.waits().items() if wait > buffers.on.longest_wait}
    apart = buffers.throughout | results | waiting
    live_buffers = [
        LiveBuffer(*life, sizes[number], number, gains[number])
        for number, life in lives(steps, buffers).items()
        if number not in apart
    ]
    last = last_uses(steps)
    for index, step in enumerate(steps):
        live_buffers += [
            LiveBuffer(index, last[number] + 1, sizes[number], number, gains[number])
            for number in step.makes
            if number in results
        ]
    used = [bodies[id(step.eqn)].vector_bytes if id(step.eqn) in bodies else 0 for step in steps]
    in_vector_memory, vector_bytes = placed(live_buffers, used, capacity)
    for number in in_vector_memory - results:
        buffers.discard(number)
    return InTime(steps, clock, vector_bytes)
