"""The steps that a schedule runs, and the order that a scheduler which keeps memory low gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from remat_magic.records import Phase

__all__ = ["ScheduledStep", "brought_forward", "last_uses", "put_off", "results_put_off", "written_over"]


class ScheduledStep(NamedTuple):  # thousands are made for each report, and a frozen dataclass takes thrice as long
    """Something that happens at once: what it reads and makes, what may be written over, and what it needs inside."""

    where: tuple[Phase, int]
    reads: Sequence[int]
    makes: Sequence[int]
    over: Sequence[int] = ()
    inside: int = 0
    eqn: Any = None


def last_uses(steps: Sequence[ScheduledStep]) -> dict[int, int]:
    """For each buffer the last step that reads or makes it."""
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.reads:
            last[number] = index
        for number in step.makes:
            last[number] = index
    return last


def put_off(steps: Sequence[ScheduledStep], wanted: set[int]) -> list[ScheduledStep]:
    """The steps, those of the backward half put off until the first gradient that needs them is due.

    JAX writes all that a checkpoint recomputes before the first operation that uses any of it; XLA's scheduler keeps
    memory low and has no reason to run it in that order.
    """
    due: dict[int, int] = {}  # for each buffer the step at which it is first asked for
    keys = list(range(len(steps)))
    for index in reversed(range(len(steps))):
        step = steps[index]
        if step.where[0] == "backward" and wanted.isdisjoint(step.makes):
            keys[index] = min((due[number] for number in step.makes if number in due), default=index)
        key = keys[index]
        for number in step.reads:
            if due.get(number, key) >= key:
                due[number] = key
    return [steps[index] for index in sorted(range(len(steps)), key=keys.__getitem__)]


def brought_forward(steps: list[ScheduledStep], lasting: set[int], sizes: Sequence[int]) -> list[ScheduledStep]:
    """The steps, those of the backward half that free more than they make run as soon as they can.

    Such is the product that is a weight's gradient: JAX writes it, or the sum that it is part of, where the gradient is
    done with, and its operands would be held until then.
    """
    first = next((index for index, step in enumerate(steps) if step.where[0] == "backward"), len(steps))
    readers = _readers(steps, first)
    left = {number: len(reading) for number, reading in readers.items()}
    waiting = [0] * len(steps)  # for how many buffers that are not made yet
    for index in range(first, len(steps)):
        for number in steps[index].makes:
            for reader in readers.get(number, ()):
                waiting[reader] += 1
    done = [index < first for index in range(len(steps))]
    order = steps[:first]
    shrinks_by = [-step.inside - sum([sizes[number] for number in step.makes]) for step in steps]  # if it runs next

    def one_is_left(number: int) -> None:
        for reader in () if number in lasting else readers[number]:  # of which all but one have run
            shrinks_by[reader] += sizes[number]

    for number in [number for number, count in left.items() if count == 1]:
        one_is_left(number)

    for index in range(first, len(steps)):
        if done[index]:
            continue
        todo = [index]
        while todo:
            here = todo.pop()
            if done[here]:
                continue
            done[here] = True
            step = steps[here]
            order.append(step)
            able: list[int] = []
            for number in {*step.reads}:
                left[number] -= 1
                if left[number] == 1:
                    one_is_left(number)
                    able += readers[number]
            for number in step.makes:
                for reader in readers.get(number, ()):
                    waiting[reader] -= 1
                    able.append(reader)
            todo += [other for other in able if not done[other] and not waiting[other] and shrinks_by[other] > 0]
    return order


def results_put_off(steps: list[ScheduledStep], lasting: set[int], sizes: Sequence[int]) -> list[ScheduledStep]:
    """The steps, those of the forward half that only results need put off until nothing that takes less can run.

    The loss itself is such a result: no gradient needs it, and what is large on the way to it, as a softmax over many
    words that one is taken of, is made when memory is free again.
    """
    first = next((index for index, step in enumerate(steps) if step.where[0] == "backward"), len(steps))
    needed = {number for step in steps[first:] for number in step.reads}
    for step in reversed(steps[:first]):
        if not needed.isdisjoint(step.makes):
            needed.update(step.reads)
    left = {number: len(reading) for number, reading in _readers(steps, 0).items()}

    def growth(step: ScheduledStep) -> int:
        dying = [number for number in {*step.reads} if left[number] == 1 and number not in lasting]
        return step.inside + sum([sizes[number] for number in step.makes]) - sum([sizes[number] for number in dying])

    order: list[ScheduledStep] = []
    waiting: deque[ScheduledStep] = deque()

    def run(step: ScheduledStep) -> None:
        order.append(step)
        for number in {*step.reads}:
            left[number] -= 1

    for index, step in enumerate(steps):
        if index < first and step.reads and needed.isdisjoint(step.makes):
            waiting.append(step)
            continue
        while waiting and growth(waiting[0]) <= max(growth(step), 0):
            run(waiting.popleft())
        run(step)
    return [*order, *waiting]


def _readers(steps: Sequence[ScheduledStep], first: int) -> dict[int, list[int]]:
    """For each buffer the steps that read it, from the first of some half on."""
    readers: dict[int, list[int]] = {}
    for index in range(first, len(steps)):
        for number in {*steps[index].reads}:
            readers.setdefault(number, []).append(index)
    return readers


def written_over(step: ScheduledStep, dying: Collection[int], sizes: Sequence[int]) -> list[int]:
    """The operands that die with the step and that a result of the same size is written over.

    What has no bytes is in no memory that could be written over.
    """
    free = sorted([number for number in {*dying} & {*step.over} if sizes[number]])
    if len(free) == len(step.makes) == 1:
        return free if sizes[free[0]] == sizes[step.makes[0]] else []
    reused: list[int] = []
    for result in step.makes:
        over = next((number for number in free if sizes[number] == sizes[result]), None)
        if over is not None:
            free.remove(over)
            reused.append(over)
    return reused
