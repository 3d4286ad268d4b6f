"""An estimate of the device memory that a forward and a backward pass need at most.

The live equations are gone through in the order of the jaxprs, and every value is live from the equation that makes it
to the last one that reads it:

* Arguments and constants are live throughout; residuals from where they are made to their last reader in the backward
  pass; the function's outputs and the gradients to the end. An argument that is saved is not counted again; one that
  is given back is copied. A residual that nothing reads is not made; one that is a view of another one takes memory of
  its own.
* Views (``reshape``, names, barriers) and broadcasts need no memory of their own, but hold what they show.
* An elementwise operation, an indexed update and a loop's carry write over an operand of the same size that dies there,
  as XLA's buffer assignment has it. This also stands for fusion, of which the steps of a chain need no memory.
* Calls are part of the program around them. Loops and branches need, on top of what is live outside, what one iteration
  or the most demanding branch needs inside; a loop holds its stacked inputs and outputs outside and a slice inside.
* Values in another memory ("host") take none of the device's.
* On a mesh it is what one device holds: its parts of what is spread, and what it has whole.
* On a TPU other rules hold as well: see ``buffers.DeviceMemory``.

XLA orders and fuses as it likes, so this is an estimate; it tells policies apart, and says where the peak is.
``docs/estimates.md`` has how far it is from what XLA needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import MADE_ANEW, TRANSPOSE, WRITES_OVER_ANY, WRITES_OVER_FIRST
from remat_magic.engine.gradients import half_of
from remat_magic.engine.steps import Halves, Step
from remat_magic.facts.buffers import (
    NOTHING,
    PLAIN,
    Buffers,
    DeviceMemory,
    LiveBuffer,
    Liveness,
    ScheduledStep,
    described,
    liveness,
    scheduled,
)
from remat_magic.facts.kernels import fused_away, fused_operands, fuses
from remat_magic.facts.residuals import saved_values
from remat_magic.jaxprs.one_device import Spread
from remat_magic.jaxprs.straight_line import Operation, StraightLines
from remat_magic.jaxprs.walk import LiveEquations, TypeOf, own_type, walk
from remat_magic.records import ArgumentRole, Half, Moment, Phase

Inner = dict[tuple[int, int], "Schedule"]
"""One run of a body, by its identity and the first slice of a stack."""


class Schedule(Buffers):
    """Steps on numbered buffers: made by ``run`` and the like; then it says what is live when."""

    def __init__(
        self,
        inner: Inner | None = None,
        type_of: TypeOf = own_type,
        on: DeviceMemory = PLAIN,
    ) -> None:
        super().__init__(type_of, on)
        self.steps: list[ScheduledStep] = []
        self._needs_of: dict[int, tuple[list[int], slice, int]] = {}  # by the identity of the equation
        self._in_kernels: dict[int, tuple[int, ...]] = {}  # of what stands for what kernels make, what these read
        self._inner: Inner = {} if inner is None else inner
        self._around: dict[int, tuple[StraightLines, Operation]] = {}  # by the identity of the equation
        self._scheduled: list[ScheduledStep] | None = None
        self._alive: Liveness | None = None

    def arrive(self, phase: Phase, buffers: Sequence[int]) -> None:
        """Append a step that makes buffers of nothing."""
        self.steps.append(ScheduledStep((phase, 0), (), tuple(buffers)))

    def give_back(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Hold results of these types to the end.

        Each has memory of its own: arguments are copied, and what is given back twice is.
        """
        last = self.steps[-1].where if self.steps else ("forward", 0)
        self.outputs = {NOTHING}
        for number, aval in zip(results, avals, strict=True):
            own = number
            if number in self.outputs or number in self.throughout:
                own = self.buffer(aval, LiveBuffer(0, aval, copy_of=self.content(number) or LiveBuffer(0)))
                self.steps.append(ScheduledStep(last, (number,), (own,)))
                self.copies.add(own)
            self.outputs.add(own)

    def own_buffers(self, forward: Any, outputs: int, results: Sequence[int], read: Sequence[bool]) -> list[int]:
        """The buffers of the residuals, given those of all results of the forward half, and which residuals are read.

        What is saved as several values is in several buffers: a view of another residual, or what a broadcast shows.
        Where XLA fuses, it does so with what reads them.
        """
        jaxpr = _jax.open_jaxpr(forward)
        buffers = [*results[outputs:]]
        if self.on.fuses:
            return buffers
        assigned: set[int] = set()
        makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        for value in saved_values(forward, outputs):
            shown = buffers[value.leaves[0]]
            if _jax.is_literal(value.atom) or value.atom not in makers or not any(read[leaf] for leaf in value.leaves):
                continue
            if shown in assigned or self.sizes[shown] < self.nbytes(self.type_of(value.atom)):
                own = self.buffer(
                    self.type_of(value.atom), LiveBuffer(0, self.type_of(value.atom), makers[value.atom], value.atom)
                )
                self.steps.append(ScheduledStep(("forward", len(jaxpr.eqns) - 1), (shown,), (own,)))
                for leaf in value.leaves:
                    buffers[leaf] = own
            assigned.add(shown)
        return buffers

    # ------------------------------------------------------------------------------------------------------------ steps

    def run(self, lines: StraightLines, jaxpr: Any, inputs: Sequence[int], half: Half) -> list[int]:
        """Append the steps of a whole jaxpr; the buffers of its outputs."""
        flat = lines(jaxpr)
        if self.on.tiled:
            self.lay_out(flat)
        if self.on.fuses and flat.fused_away is None:
            flat.fused_away = fused_away(jaxpr, lines, matmuls=self.on.matmuls)
        never, again = flat.fused_away or (set[int](), set[int]())
        in_kernels: dict[int, int] = {}  # of what is computed anew, the buffers without bytes that stand for it there
        buffers = [NOTHING] * len(flat.types)  # by the number of the value
        for number, buffer in zip(flat.inputs, inputs, strict=True):
            buffers[number] = buffer
        for key, number in flat.constants.items():
            buffers[number] = self.constant(key, flat.types[number])
        begin = 0
        for index, end in enumerate(flat.ends):
            where = half, index
            for line in flat.lines[begin:end]:
                operation, reads, makes = line
                operands = [buffers[number] for number in reads]
                if in_kernels and fuses(line, matmuls=self.on.matmuls):
                    operands = [in_kernels.get(number, buffers[number]) for number in reads]
                if operation.name in MADE_ANEW and not operation.leaves:
                    buffers[makes[0]] = operands[0] if operands else NOTHING
                    continue
                if self.on.views and operation.name == TRANSPOSE and not self._is_in_kernel(operands[0]):
                    buffers[makes[0]] = operands[0]
                    continue
                for number, result in zip(makes, self.add(lines, where, operation, operands), strict=True):
                    buffers[number] = result
                    if number in again:
                        in_kernels[number] = result = self.buffer(None)
                        read = (self._in_kernels.get(operand, (operand,)) for operand in operands)
                        self._in_kernels[result] = tuple(dict.fromkeys(chain.from_iterable(read)))
                    if number in never:
                        self.sizes[result] = 0
                        self.instead[result] = self._read_for(operands)
            begin = end
        return [buffers[number] for number in flat.outputs]

    def add(
        self, lines: StraightLines, where: tuple[Phase, int], operation: Operation, operands: Sequence[int]
    ) -> Sequence[int]:
        """Append an operation; the buffers of its results."""
        eqn, first = operation.eqn, len(self.sizes)
        sizes, over, need = self._needs_of.get(id(eqn)) or self._needs(lines, operation)
        self.sizes += sizes
        results, overwritable = range(first, first + len(sizes)), operands[over]
        if self._in_kernels:
            operands, overwritable = self._read_for(operands), self._read_for(overwritable)
        self.steps.append(ScheduledStep(where, operands, results, overwritable, need, eqn))
        return results

    def _is_in_kernel(self, number: int) -> bool:
        return number in self.instead or number in self._in_kernels

    def _read_for(self, operands: Sequence[int]) -> tuple[int, ...]:
        """What is read for operands: they, and what the kernel reads that makes them for itself."""
        if self._in_kernels.keys().isdisjoint(operands):
            return tuple(operands)
        in_kernel = (number for operand in operands for number in self._in_kernels.get(operand, ()))
        return (*operands, *dict.fromkeys(in_kernel))

    def _needs(self, lines: StraightLines, operation: Operation) -> tuple[list[int], slice, int]:
        """The bytes of each result, the operands that may be written over, and the bytes needed inside."""
        eqn = operation.eqn
        sizes = [self.nbytes(self.type_of(var)) for var in eqn.outvars]
        inside = max((self._inside(lines, eqn, body).highest()[0] for body in operation.bodies), default=0)
        self._around[id(eqn)] = lines, operation
        if operation.bodies and operation.bodies[0].kind != "loop":
            inside = max(0, inside - sum(sizes))  # what leaves a branch is the equation's result already
        if self.on.tiled and (rows := _jax.rows_put(eqn)) is not None:
            inside += self.on.by_rows(self.type_of(rows))
        needs = self._needs_of[id(eqn)] = sizes, _overwritable(operation), inside
        return needs

    def _inside(self, lines: StraightLines, eqn: Any, body: _jax.Body) -> Schedule:
        """One run of a body: what it needs on top of its operands, which are held outside.

        The slices that a scan hands to an iteration are copies, but for those that kernels take from the stack
        themselves; carries live in the loop's own buffers.
        """
        slices = _first_slice(eqn, body)
        key = id(body.jaxpr), slices
        if key in self._inner:
            return self._inner[key]
        schedule = self._inner[key] = self.new()
        sliced = [
            schedule.buffer(self.type_of(var), LiveBuffer(0, self.type_of(var), eqn, var))
            for var in body.jaxpr.invars[slices:]
        ]
        schedule.arrive("backward", sliced)
        if self.on.views:
            for number in fused_operands(body.jaxpr, lines) - {*range(slices)}:
                schedule.discard(sliced[number - slices])
        outputs = schedule.run(lines, body.jaxpr, [NOTHING] * slices + sliced, "backward")
        if _jax.is_scan(eqn) and self.on.views:  # what is stacked is written into the stack where it is made
            carries = len(_jax.carried_operands(eqn))
            outputs, stacked = outputs[:carries], outputs[carries:]
            schedule.written_outside({*stacked} - {*outputs, *sliced})
        schedule.outputs = {*outputs}
        return schedule

    def written_outside(self, buffers: set[int]) -> None:
        """These are written into memory that is counted elsewhere, unless something reads them here."""
        for number in buffers.difference(*(step.reads for step in self.steps)):
            self.sizes[number] = 0

    def new(self) -> Schedule:
        """An empty one for a body, which knows what is inside that this one knows."""
        return Schedule(self._inner, self.type_of, self.on.inside)

    def saved_inside(self, eqn: Any) -> int:
        """The bytes of residuals among what an equation needs inside."""
        del eqn
        return 0

    # ------------------------------------------------------------------------------------------------ what is live when

    def over_time(self) -> tuple[tuple[Moment, ...], tuple[Any, ...], list[tuple[int, int, LiveBuffer]]]:
        """The timeline, the equation of each moment (None where values merely arrive), and what is live when.

        A buffer comes with its first moment and the first without it. What a result is written over is
        left out, so that the bytes of what is live add up to the moment's.
        """
        steps, alive = self._ordered(), self._liveness()
        rows = described(steps, self, alive.made_at, alive.ranges)
        live = [(*when, value) for when, value in zip(alive.ranges.values(), rows, strict=True)]
        inside: dict[int, list[LiveBuffer]] = {}  # by the identity of the equation: calls of one body share theirs
        for at, step in enumerate(steps):
            if step.inside:
                if id(step.eqn) not in inside:
                    inside[id(step.eqn)] = self.live_inside(step.eqn)
                live += [(at, at + 1, value) for value in inside[id(step.eqn)]]
        moments = tuple(Moment(*step.where, *of_step) for step, of_step in zip(steps, alive.bytes, strict=True))
        return moments, tuple(step.eqn for step in steps), live

    def highest(self, before_update: bool = False) -> tuple[int, int]:
        """The most bytes that are live at once, or before the update, and the position of the first step with them."""
        totals = list(map(sum, self._liveness().bytes))
        if before_update:
            phases = (step.where[0] for step in self._ordered())
            totals = [0 if phase == "update" else total for phase, total in zip(phases, totals, strict=True)]
        most = max(totals)
        return most, totals.index(most)

    def phase(self, at: int) -> Phase:
        """The phase of the step at a position of the schedule."""
        return self._ordered()[at].where[0]

    def _liveness(self) -> Liveness:
        if self._alive is None:
            self._alive = liveness(self._ordered(), self, self.saved_inside)
        return self._alive

    def _ordered(self) -> list[ScheduledStep]:
        """The steps in the order in which they are taken to run."""
        if self._scheduled is None:
            self._scheduled = scheduled(self.steps, self, self._around)
        return self._scheduled

    def live_at(self, at: int, besides: Collection[int] = ()) -> list[LiveBuffer]:
        """What is live during the step at a position of the schedule, some buffers left out."""
        steps, alive = self._ordered(), self._liveness()
        numbers = [
            number for number, (first, end) in alive.ranges.items() if first <= at < end and number not in besides
        ]
        step = steps[at]
        live = described(steps, self, alive.made_at, numbers)
        return live + (self.live_inside(step.eqn) if step.inside else [])

    def live_inside(self, eqn: Any) -> list[LiveBuffer]:
        """What the body of an equation that needs most holds at most; one sum where it is not all known."""
        lines, operation = self._around[id(eqn)]
        if not operation.bodies:
            return [LiveBuffer(self._needs_of[id(eqn)][2], eqn=eqn)]
        body = max(operation.bodies, key=lambda body: self._inside(lines, eqn, body).highest()[0])
        schedule, slices = self._inside(lines, eqn, body), {*body.jaxpr.invars}
        live = schedule.live_at(schedule.highest()[1], () if body.kind == "loop" else schedule.outputs)
        live = [it._replace(eqn=eqn) if it.var in slices else it for it in live]  # of calls of one body, of this one
        _, _, needed = self._needs_of[id(eqn)]
        return live if sum(value.bytes for value in live) == needed else [LiveBuffer(needed, eqn=eqn)]


def _overwritable(operation: Operation) -> slice:
    """The operands that a result may be written over."""
    if operation.name in WRITES_OVER_ANY:
        return slice(None)
    if operation.name in WRITES_OVER_FIRST:
        return slice(1)
    carried = _jax.carried_operands(operation.eqn)
    return slice(carried.start, carried.stop)


def _first_slice(eqn: Any, body: _jax.Body) -> int:
    """The index of the first of a body's inputs that is a slice of a stacked operand; their number without any."""
    return _jax.carried_operands(eqn).stop if _jax.is_scan(eqn) else len(body.jaxpr.invars)


def both_halves(
    forward: Any,
    backward: Any,
    outputs: int,
    live: LiveEquations | None = None,
    type_of: TypeOf = own_type,
    on: DeviceMemory = PLAIN,
) -> Schedule:
    """The schedule of a function and its gradient.

    The outputs of ``forward`` are the function's own ``outputs`` and then the residuals; the inputs of ``backward`` are
    the residuals, in that order, and then the cotangents. ``live`` is the live code of that, where it is known, and
    ``on`` how a device holds values.
    """
    first, second = _jax.open_jaxpr(forward), _jax.open_jaxpr(backward)
    residuals = len(first.outvars) - outputs
    if residuals < 0 or len(second.invars) < residuals:
        raise ValueError(f"{len(second.invars)} backward inputs are not {residuals} residuals and the cotangents")
    live = live or LiveEquations(second)
    forward_lines, backward_lines = live_lines(first, outputs, live, type_of, merges=on.merges)
    schedule = Schedule(type_of=type_of, on=on)
    arguments = [
        schedule.permanent(type_of(var), LiveBuffer(0, type_of(var), argument=i)) for i, var in enumerate(first.invars)
    ]
    results = schedule.run(forward_lines, forward, arguments, "forward")
    saved = schedule.own_buffers(forward, outputs, results, live.inputs)
    cotangents = [schedule.buffer(type_of(var), LiveBuffer(0, type_of(var))) for var in second.invars[residuals:]]
    schedule.arrive("backward", cotangents)
    schedule.saved = {number for number, yes in zip(saved, live.inputs, strict=False) if yes}
    gradients = schedule.run(backward_lines, backward, [*saved, *cotangents], "backward")
    given_back = [*first.outvars[:outputs], *second.outvars]
    schedule.give_back([*results[:outputs], *gradients], list(map(type_of, given_back)))
    schedule.gradients = {*gradients} - {*arguments, *saved, *results[:outputs]}
    return schedule


def live_lines(
    first: Any, outputs: int, live: LiveEquations, type_of: TypeOf = own_type, *, merges: bool = False
) -> tuple[StraightLines, StraightLines]:
    """The straight lines of both halves, given the live code of the backward one, by which that of the other goes.

    A residual that nothing reads is not made. ``merges``: as for ``StraightLines``.
    """
    wanted = [True] * outputs + live.inputs[: len(first.outvars) - outputs]
    return (
        StraightLines(LiveEquations(first, wanted), type_of=type_of, merges=merges),
        StraightLines(live, type_of=type_of, merges=merges),
    )


_Lines = tuple[StraightLines, StraightLines]


def step_schedule(
    step: Step, halves: Mapping[int, Halves], on: DeviceMemory, known: dict[Any, StraightLines]
) -> Schedule:
    """The schedule of a step, with the halves of each call that stands for a gradient.

    ``known`` keeps the straight lines of the step itself, which are the same whatever the halves are.
    Arguments are live throughout, but for those that are donated, which are freed after their last reader and may be
    written over; what the step returns is live to the end.
    """
    jaxpr = _jax.open_jaxpr(step.closed)
    schedule = _StepSchedule(step, halves, {}, {}, _spread(step, halves), on)
    arguments = list[int]()
    for number, (var, donated) in enumerate(zip(jaxpr.invars, step.donated, strict=True)):
        make = schedule.buffer if donated and not on.reserves else schedule.permanent
        aval = schedule.type_of(var)
        arguments.append(make(aval, LiveBuffer(0, aval, argument=number, role=step.roles[number])))
        if donated:
            schedule.donated.add(arguments[-1])
    if not on.reserves:
        schedule.arrive("forward", sorted(schedule.donated))
    key = on, schedule.type_of
    if key not in known:
        known.clear()  # of a mesh the types are others each time
        known[key] = StraightLines(
            LiveEquations(jaxpr), lambda eqn: half_of(eqn) is not None, type_of=schedule.type_of, merges=on.merges
        )
    results = schedule.run(known[key], step.closed, arguments, "forward")
    schedule.give_back(results, list(map(schedule.type_of, jaxpr.outvars)))
    schedule.gradients -= schedule.outputs
    return schedule


def _spread(step: Step, halves: Mapping[int, Halves]) -> TypeOf:
    """How the values of a step are spread, those of the gradients in it included."""
    if not any(isinstance(both.forward.type_of, Spread) for both in halves.values()):
        return own_type
    spread, given = Spread(), dict[Any, Any]()
    if step.given.answer.spread is not None:
        spread.take(step.given.answer.spread)
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

    of_step = True

    def __init__(
        self,
        step: Step,
        halves: Mapping[int, Halves],
        lines: dict[int, _Lines],
        inner: Inner,
        type_of: TypeOf,
        on: DeviceMemory,
    ) -> None:
        super().__init__(inner, type_of, on)
        self._step, self._halves = step, halves
        self._lines = lines  # of halves, by the number of the call
        self._residuals: dict[int, list[int]] = {}  # by the buffer that links the halves of a gradient
        self._within_half = self._updating = False
        self._saved_inside: dict[int, int] = {}  # by the identity of an equation

    def new(self) -> Schedule:
        """As ``Schedule.new``, with the same halves."""
        return _StepSchedule(self._step, self._halves, self._lines, self._inner, self.type_of, self.on.inside)

    def role_of(self, key: int) -> ArgumentRole | None:
        """As ``Schedule.role_of``."""
        return self._step.constants.get(key)

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
        forward_lines, backward_lines = self._lines[number]
        self._within_half = True
        try:
            if half == "forward":
                inputs = operands[len(operands) - len(_jax.open_jaxpr(forward.closed).invars) :]
                results = self.run(forward_lines, forward.closed, inputs, "forward")
                residuals = len(forward.residual_types)
                read = (
                    backward_lines.live.inputs if isinstance(backward_lines.live, LiveEquations) else [True] * residuals
                )
                saved = self.own_buffers(forward.closed, forward.outputs, results, read)
                self.saved.update({buffer for buffer, yes in zip(saved, read, strict=False) if yes} - {*inputs})
                link = self.buffer(operation.eqn.outvars[-1].aval)
                self._residuals[link] = saved
                return [*results[: forward.outputs], link]
            given = operands[len(operands) - len(forward.output_types) :]
            cotangents = [
                buffer for buffer, aval in zip(given, forward.output_types, strict=True) if _jax.is_inexact(aval)
            ]
            link = next(buffer for buffer in operands if buffer in self._residuals)
            gradients = self.run(backward_lines, backward, [*self._residuals[link], *cotangents], "backward")
            self.gradients.update(gradients)
            self._updating = True
            return gradients
        finally:
            self._within_half = False

    def saved_inside(self, eqn: Any) -> int:
        """As ``Schedule.saved_inside``: of a loop whose body takes a gradient, at the peak in there."""
        if id(eqn) not in self._saved_inside:
            takes = any(half_of(inner) for body in _jax.bodies(eqn) for _, inner in walk(body.jaxpr, once=True))
            live = self.live_inside(eqn) if takes else ()
            self._saved_inside[id(eqn)] = sum(buffer.bytes for buffer in live if buffer.residual)
        return self._saved_inside[id(eqn)]
