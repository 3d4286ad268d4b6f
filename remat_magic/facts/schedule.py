"""A schedule: the steps that a program comes to on numbered buffers, with those that its loops and branches need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import MADE_ANEW, TRANSPOSE, WRITES_OVER_ANY, WRITES_OVER_FIRST
from remat_magic.facts.arrangement import arranged
from remat_magic.facts.buffers import NOTHING, Buffers
from remat_magic.facts.device_memory import PLAIN, DeviceMemory
from remat_magic.facts.held import Held, Peak
from remat_magic.facts.registers import fused_operands, fuses, normalized, strided, unheld
from remat_magic.facts.residuals import saved_values
from remat_magic.facts.step_order import ScheduledStep
from remat_magic.facts.sweep import StepBytes, described, lives, sweep
from remat_magic.jaxprs.one_device import TypeOf, own_type
from remat_magic.jaxprs.straight_line import Operation, StraightLines
from remat_magic.records import Half, Moment, Phase

__all__ = ["InnerPeaks", "Schedule"]

InnerPeaks = dict[tuple[int, int], int]
"""What one run of a body needs, by its identity and the first slice of a stack."""


class Schedule(Buffers):
    """Steps on numbered buffers: made by ``run`` and the like, and then asked what is held when."""

    def __init__(
        self,
        inner_peaks: InnerPeaks | None = None,
        type_of: TypeOf = own_type,
        on: DeviceMemory = PLAIN,
    ) -> None:
        super().__init__(type_of, on)
        self.steps: list[ScheduledStep] = []
        self._needs_of: dict[int, tuple[list[int], slice, int]] = {}  # by the identity of the equation
        self._instead: dict[int, tuple[int, ...]] = {}  # of what stays in registers, what its kernel reads
        self._inner_peaks: InnerPeaks = {} if inner_peaks is None else inner_peaks
        self._around: dict[int, tuple[StraightLines, Operation]] = {}  # by the identity of the equation
        self._arranged: list[ScheduledStep] | None = None

    # -------------------------------------------------------------------------------------------------------- residuals

    def arrive(self, phase: Phase, buffers: Sequence[int]) -> None:
        """Append a step that makes buffers of nothing."""
        self.steps.append(ScheduledStep((phase, 0), (), tuple(buffers)))

    def give_back(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Hold results of these types to the end.

        Where results are reserved each has memory of its own: arguments are copied, and what is given back twice is.
        """
        self.kept = {*results}
        if not self.on.reserves:
            return
        last = self.steps[-1].where if self.steps else ("forward", 0)
        self.kept = {NOTHING}
        for number, aval in zip(results, avals, strict=True):
            own = number
            if number in self.kept or number in self.throughout:
                own = self.buffer(aval, Held(0, aval))
                self.steps.append(ScheduledStep(last, (number,), (own,)))
            self.kept.add(own)

    def own_buffers(self, forward: Any, outputs: int, results: Sequence[int], read: Sequence[bool]) -> list[int]:
        """The buffers of the residuals, given those of all results of the forward half, and which residuals are read.

        What is saved as several values is held as several: a view of another residual, or what a broadcast shows. Where
        XLA fuses, it does so with what reads them.
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
                    self.type_of(value.atom), Held(0, self.type_of(value.atom), makers[value.atom], value.atom)
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
        written, never, again = self._unheld(jaxpr, lines)
        start = len(self.steps)  # tells this run from others
        in_kernels: dict[int, int] = {}  # of what is made again, the buffers without bytes that stand for it there
        buffers = [NOTHING] * len(flat.types)  # by the number of the value
        for number, buffer in zip(flat.inputs, inputs, strict=True):
            buffers[number] = buffer
        for key, number in flat.constants.items():
            buffers[number] = self.constant(key, flat.types[number])
        begin = 0
        for index, end in enumerate(flat.ends):
            for line in flat.lines[begin:end]:
                operation, reads, makes = line
                operands = [buffers[number] for number in reads]
                if in_kernels and fuses(line, matmuls=self.on.matmuls):
                    operands = [in_kernels.get(number, buffers[number]) for number in reads]
                if operation.name in MADE_ANEW and not operation.leaves:
                    buffers[makes[0]] = operands[0] if operands else NOTHING
                    continue
                if self.on.views and operation.name == TRANSPOSE and operands[0] not in self._instead:
                    buffers[makes[0]] = operands[0]
                    continue
                for number, result in zip(makes, self.add(lines, (half, index), operation, operands), strict=True):
                    buffers[number] = result
                    if number in flat.apart:
                        self.checkpoints[result] = start, flat.apart[number]
                    if number in again:
                        in_kernels[number] = result = self.buffer(None)
                    if number in never or number in again:
                        self.sizes[result] = 0
                        self._instead[result] = self._read_for(operands)
            begin = end
        self.written.update(buffers[number] for number in written)
        return [buffers[number] for number in flat.outputs]

    def _unheld(self, jaxpr: Any, lines: StraightLines) -> tuple[set[int], set[int], set[int]]:
        """The values of a jaxpr that are not made again as residuals, and those of ``registers.unheld``."""
        flat = lines(jaxpr)
        in_memory = flat.barred | (normalized(flat) if self.on.normalizes else set())
        apart = strided(flat)
        alone = apart if self.on.tiled else set[int]()
        if not self.on.fuses:
            return in_memory, set(), set()
        return in_memory | apart, *unheld(jaxpr, lines, in_memory | alone, alone, matmuls=self.on.matmuls)

    def add(
        self, lines: StraightLines, where: tuple[Phase, int], operation: Operation, operands: Sequence[int]
    ) -> Sequence[int]:
        """Append an operation; the buffers of its results."""
        sizes, over, need = self._needs(lines, operation)
        results = range(len(self.sizes), len(self.sizes) + len(sizes))
        self.sizes += sizes
        overwritable = tuple(operands[over]) if self.on.normalizes else self._read_for(operands[over])
        self.steps.append(ScheduledStep(where, self._read_for(operands), results, overwritable, need, operation.eqn))
        return results

    def _read_for(self, operands: Sequence[int]) -> tuple[int, ...]:
        """What is read for operands: they, and for those in registers also what is read for these."""
        if not self._instead:
            return tuple(operands)
        in_kernel = (number for operand in operands for number in self._instead.get(operand, ()))
        return (*operands, *dict.fromkeys(in_kernel))  # each once: chains that part and meet would double them

    def _needs(self, lines: StraightLines, operation: Operation) -> tuple[list[int], slice, int]:
        """The bytes of each result, the operands that may be written over, and the bytes needed inside."""
        eqn = operation.eqn
        needs = self._needs_of.get(id(eqn))
        if needs is None:
            sizes = [self.nbytes(self.type_of(var)) for var in eqn.outvars]
            inside = max((self._inner_peak(lines, eqn, body) for body in operation.bodies), default=0)
            self._around[id(eqn)] = lines, operation
            if operation.bodies and operation.bodies[0].kind != "loop":
                inside = max(0, inside - sum(sizes))  # what leaves a branch is the equation's result already
            needs = self._needs_of[id(eqn)] = sizes, _overwritable(operation), inside
        return needs

    def _inner_peak(self, lines: StraightLines, eqn: Any, body: _jax.Body) -> int:
        """The most that one run of a body needs on top of its operands, which are held outside."""
        key = (id(body.jaxpr), _first_slice(eqn, body))
        if key not in self._inner_peaks:
            self._inner_peaks[key] = self._inside(lines, eqn, body).highest()[0]
        return self._inner_peaks[key]

    def _inside(self, lines: StraightLines, eqn: Any, body: _jax.Body) -> Schedule:
        """One run of a body.

        The slices that a scan hands to an iteration are copies, but for those that kernels take from the stack
        themselves; carries live in the loop's own buffers.
        """
        slices = _first_slice(eqn, body)
        schedule = self.new()
        sliced = [
            schedule.buffer(self.type_of(var), Held(0, self.type_of(var), eqn, var))
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
        schedule.kept = {*outputs}
        return schedule

    def written_outside(self, buffers: set[int]) -> None:
        """These are written into memory that is held elsewhere, unless something reads them here."""
        for number in buffers.difference(*(step.reads for step in self.steps)):
            self.sizes[number] = 0

    def new(self) -> Schedule:
        """An empty one for a body, which knows the peaks inside that this one knows."""
        return Schedule(self._inner_peaks, self.type_of, self.on.inside)

    def saved_inside(self, eqn: Any) -> int:
        """The bytes of residuals among what an equation needs inside."""
        del eqn
        return 0

    # ------------------------------------------------------------------------------------------------ what is held when

    def peak(self) -> Peak:
        """The most that is held at once."""
        most, at = self.highest()
        return Peak(most, self._ordered()[at].where)

    def over_time(self) -> tuple[tuple[Moment, ...], tuple[Any, ...], list[tuple[int, int, Held]]]:
        """The timeline, the equation of each moment (None where values merely arrive), and what is held when.

        What is held comes with its first moment and the one that holds it no more. What a result is written over is
        left out, so that the bytes of what is held add up to the moment's.
        """
        swept, steps = list(self._sweep()), self._ordered()
        live = lives(steps, self)
        held = [(*live[number], value) for number, value in zip(live, described(steps, self, live), strict=True)]
        inside: dict[int, list[Held]] = {}  # by the identity of the equation: calls of one body share theirs
        for at, step in enumerate(steps):
            if step.inside:
                if id(step.eqn) not in inside:
                    inside[id(step.eqn)] = self.held_inside(step.eqn)
                held += [(at, at + 1, value) for value in inside[id(step.eqn)]]
        moments = tuple(step_bytes.moment for step_bytes in swept)
        return moments, tuple(step_bytes.step.eqn for step_bytes in swept), held

    def highest(self) -> tuple[int, int]:
        """The most bytes that are held at once, and the position of the first step that holds them."""
        totals = [step_bytes.arguments + step_bytes.residuals + step_bytes.temporaries for step_bytes in self._sweep()]
        most = max(totals)
        return most, totals.index(most)

    def _sweep(self) -> Iterator[StepBytes]:
        return sweep(self._ordered(), self, self.saved_inside)

    def _ordered(self) -> list[ScheduledStep]:
        """The steps in the order in which they are taken to run."""
        if self._arranged is None:
            self._arranged = arranged(self.steps, self, self._around)
        return self._arranged

    def held(self, at: int, besides: Collection[int] = ()) -> list[Held]:
        """What is held during the step at a position of the sweep, some buffers left out."""
        steps = self._ordered()
        live = lives(steps, self).items()
        alive = [number for number, (first, end) in live if first <= at < end and number not in besides]
        step = steps[at]
        return described(steps, self, alive) + (self.held_inside(step.eqn) if step.inside else [])

    def held_inside(self, eqn: Any) -> list[Held]:
        """What the body of an equation that needs most holds at most; one sum where it is not all known."""
        lines, operation = self._around[id(eqn)]
        body = max(operation.bodies, key=lambda body: self._inner_peak(lines, eqn, body))
        schedule = self._inside(lines, eqn, body)
        held = schedule.held(schedule.highest()[1], () if body.kind == "loop" else schedule.kept)
        _, _, needed = self._needs(lines, operation)
        return held if sum(value.bytes for value in held) == needed else [Held(needed, eqn=eqn)]


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
