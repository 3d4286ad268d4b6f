"""Going through the steps of a schedule: what is held during each, and how long each buffer is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from remat_magic.facts.buffers import NOTHING, Buffers
from remat_magic.facts.held import Held
from remat_magic.facts.step_order import ScheduledStep, last_uses, written_over
from remat_magic.records import Moment

__all__ = ["StepBytes", "described", "lives", "sweep"]


class StepBytes(NamedTuple):
    """The bytes that are held during a step."""

    step: ScheduledStep
    arguments: int
    residuals: int
    temporaries: int

    @property
    def moment(self) -> Moment:
        """The same as a record."""
        return Moment(*self.step.where, self.arguments, self.residuals, self.temporaries)


def sweep(steps: Sequence[ScheduledStep], buffers: Buffers, saved_inside: Callable[[Any], int]) -> Iterator[StepBytes]:
    """Go through the steps and yield what is held during each.

    ``saved_inside`` tells the bytes of residuals among what an equation needs inside.
    """
    sizes, lasting = buffers.sizes, buffers.lasting
    dying_at = _dying_at(last_uses(steps), lasting)
    arguments = sum(sizes[number] for number in buffers.throughout)
    saved = buffers.saved - buffers.throughout
    reserved = buffers.reserved
    held_bytes = sum(sizes[number] for number in reserved)
    held_residuals = 0
    for index, step in enumerate(steps):
        for number in step.makes:
            if number in reserved:
                continue
            if number in buffers.donated:
                arguments += sizes[number]
                continue
            held_bytes += sizes[number]
            if number in saved:
                held_residuals += sizes[number]
        dying = dying_at.get(index, ())
        reused = sum(sizes[number] for number in written_over(step, dying, sizes)) if dying and step.over else 0
        inside = saved_inside(step.eqn) if step.inside else 0
        temporaries = held_bytes - held_residuals - reused + step.inside - inside
        yield StepBytes(step, arguments, held_residuals + inside, temporaries)
        for number in dying:
            if number in buffers.donated:
                arguments -= sizes[number]
                continue
            held_bytes -= sizes[number]
            if number in saved:
                held_residuals -= sizes[number]


def lives(
    steps: Sequence[ScheduledStep], buffers: Buffers, reserved: set[int] | None = None
) -> dict[int, tuple[int, int]]:
    """For each buffer the first step that holds it, and the one that holds it no more.

    What a result is written over is held no more by the step that reads it last. ``reserved`` are there from the
    beginning, by default those that the device reserves.
    """
    lasting = buffers.lasting
    throughout = buffers.throughout | (buffers.reserved if reserved is None else reserved)
    live: dict[int, tuple[int, int]] = {number: (0, len(steps)) for number in sorted(throughout)}
    last = last_uses(steps)
    dying_at = _dying_at(last, lasting)
    for index, step in enumerate(steps):
        for number in step.makes:
            if number not in live:
                live[number] = index, len(steps) if number in lasting else last[number] + 1
        if step.over and index in dying_at:
            for number in written_over(step, dying_at[index], buffers.sizes):
                live[number] = live[number][0], index
    del live[NOTHING]
    return live


def described(steps: Sequence[ScheduledStep], buffers: Buffers, numbers: Iterable[int]) -> list[Held]:
    """What buffers hold."""
    saved = buffers.saved - buffers.throughout
    origins = {
        number: (buffers.type_of(var), step.eqn, var)
        for step in steps
        if step.eqn is not None
        for number, var in zip(step.makes, step.eqn.outvars, strict=True)
    }
    contents = {number: buffers.content(number) or Held(0, *origins.get(number, ())) for number in numbers}
    return [
        replace(
            content,
            aval=buffers.narrowed.get(number, content.aval),
            bytes=buffers.sizes[number],
            residual=number in saved,
            gradient=number in buffers.gradients,
            output=number in buffers.kept,
        )
        for number, content in contents.items()
    ]


def _dying_at(last: dict[int, int], lasting: set[int]) -> dict[int, list[int]]:
    """For each step the buffers that are not held after it."""
    dying_at: dict[int, list[int]] = {}
    for number, index in last.items():
        if number not in lasting:
            dying_at.setdefault(index, []).append(number)
    return dying_at
