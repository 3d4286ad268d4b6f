"""The device memory of a whole training step: its own equations, and in the place of each gradient both its halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.engine.differentiated import half_of
from remat_magic.engine.steps import Halves, Step
from remat_magic.facts.device_memory import PLAIN, DeviceMemory
from remat_magic.facts.held import Held
from remat_magic.facts.memory import live_lines
from remat_magic.facts.schedule import InnerPeaks, Schedule
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.jaxprs.one_device import Spread, TypeOf, own_type
from remat_magic.jaxprs.straight_line import Operation, StraightLines
from remat_magic.jaxprs.values import is_inexact
from remat_magic.jaxprs.walk import walk
from remat_magic.records import Phase

__all__ = ["step_schedule"]

_Lines = tuple[StraightLines, StraightLines]


def step_schedule(step: Step, halves: Mapping[int, Halves], on: DeviceMemory = PLAIN) -> Schedule:
    """The schedule of a step.

    Arguments are held throughout, but for those that are donated, which are freed after their last reader and may be
    written over; what the step returns is held to the end.

    Args:
        step: the step.
        halves: those of each call that stands for a gradient.
        on: how the device holds values.
    """
    jaxpr = _jax.open_jaxpr(step.closed)
    schedule = _StepSchedule(halves, {}, {}, _spread(step, halves), on)
    arguments = list[int]()
    for number, (var, donated) in enumerate(zip(jaxpr.invars, step.donated, strict=True)):
        make = schedule.buffer if donated and not on.reserves else schedule.permanent
        arguments.append(make(schedule.type_of(var), Held(0, schedule.type_of(var), argument=number)))
        if donated:
            schedule.donated.add(arguments[-1])
    if not on.reserves:
        schedule.arrive("forward", sorted(schedule.donated))
    lines = StraightLines(
        LiveEquations(jaxpr), lambda eqn: half_of(eqn) is not None, type_of=schedule.type_of, merges=on.merges
    )
    results = schedule.run(lines, step.closed, arguments, "forward")
    schedule.give_back(results, list(map(schedule.type_of, jaxpr.outvars)))
    schedule.gradients -= schedule.kept
    return schedule


def _spread(step: Step, halves: Mapping[int, Halves]) -> TypeOf:
    """How the values of a step are spread, those of the gradients in it included."""
    if not any(isinstance(both.forward.type_of, Spread) for both in halves.values()):
        return own_type
    spread, given = Spread(), dict[Any, Any]()
    if step.asked is not None:
        spread.take(step.asked)
    for _, eqn in walk(step.closed, once=True):
        part = half_of(eqn)
        half = halves[part[1]].forward if part is not None and part[0] == "forward" else None
        if half is not None and isinstance(half.type_of, Spread):
            spread.take(half.type_of)
            inputs = _jax.open_jaxpr(half.closed).invars
            pairs = zip(eqn.invars[len(eqn.invars) - len(inputs) :], inputs, strict=True)
            given.update((atom, half.type_of(var)) for atom, var in pairs if half.type_of(var) is not var.aval)
    spread.learn(step.closed, given)
    return spread


class _StepSchedule(Schedule):
    """A schedule in which the calls that stand for the halves of gradients are these halves."""

    def __init__(
        self,
        halves: Mapping[int, Halves],
        lines: dict[int, _Lines],
        inner_peaks: InnerPeaks,
        type_of: TypeOf,
        on: DeviceMemory,
    ) -> None:
        super().__init__(inner_peaks, type_of, on)
        self._halves = halves
        self._lines = lines  # of halves, by the number of the call
        self._residuals: dict[int, list[int]] = {}  # by the buffer that links the halves of a gradient
        self._within_half = self._updating = False
        self._saved_inside: dict[int, int] = {}  # by the identity of an equation

    def new(self) -> Schedule:
        """As ``Schedule.new``, with the same halves."""
        return _StepSchedule(self._halves, self._lines, self._inner_peaks, self.type_of, self.on.inside)

    def add(
        self, lines: StraightLines, where: tuple[Phase, int], operation: Operation, operands: Sequence[int]
    ) -> Sequence[int]:
        """As ``Schedule.add``; of a call that stands for a half, the steps of that half."""
        part = None if self._within_half else half_of(operation.eqn)
        if part is None:
            if not self._within_half:
                inside = any(half_of(eqn) for body in operation.bodies for _, eqn in walk(body.jaxpr, once=True))
                where = ("backward" if inside else "update" if self._updating else where[0], where[1])
                self._updating = self._updating or inside
            return super().add(lines, where, operation, operands)
        half, number = part
        forward, backward, *_ = self._halves[number]
        if number not in self._lines:
            first = _jax.open_jaxpr(forward.closed)
            live = LiveEquations(_jax.open_jaxpr(backward))
            self._lines[number] = live_lines(first, forward.outputs, live, self.type_of, merges=self.on.merges)
        ahead, back = self._lines[number]
        self._within_half = True
        try:
            if half == "forward":
                inputs = operands[len(operands) - len(_jax.open_jaxpr(forward.closed).invars) :]
                results = self.run(ahead, forward.closed, inputs, "forward")
                residuals = len(forward.residual_types)
                read = back.live.inputs if isinstance(back.live, LiveEquations) else [True] * residuals
                saved = self.own_buffers(forward.closed, forward.outputs, results, read)
                self.saved.update({buffer for buffer, yes in zip(saved, read, strict=False) if yes} - {*inputs})
                link = self.buffer(operation.eqn.outvars[-1].aval)
                self._residuals[link] = saved
                return [*results[: forward.outputs], link]
            given = operands[len(operands) - len(forward.output_types) :]
            cotangents = [buffer for buffer, aval in zip(given, forward.output_types, strict=True) if is_inexact(aval)]
            link = next(buffer for buffer in operands if buffer in self._residuals)
            gradients = self.run(back, backward, [*self._residuals[link], *cotangents], "backward")
            self.gradients.update(gradients)
            self._updating = True
            return gradients
        finally:
            self._within_half = False

    def saved_inside(self, eqn: Any) -> int:
        """As ``Schedule.saved_inside``: of a loop whose body takes a gradient, at the peak in there."""
        if id(eqn) not in self._saved_inside:
            takes = any(half_of(inner) for body in _jax.bodies(eqn) for _, inner in walk(body.jaxpr, once=True))
            held = self.held_inside(eqn) if takes else ()
            self._saved_inside[id(eqn)] = sum(buffer.bytes for buffer in held if buffer.residual)
        return self._saved_inside[id(eqn)]
