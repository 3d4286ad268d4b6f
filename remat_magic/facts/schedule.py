"""A schedule: steps on numbered buffers, and what is held while each runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.primitives import MADE_ANEW, TRANSPOSE, WRITES_OVER_ANY, WRITES_OVER_FIRST
from remat_magic.facts.device_memory import PLAIN, DeviceMemory
from remat_magic.facts.held import Held, Peak
from remat_magic.facts.narrowing import read_by_matmuls
from remat_magic.facts.registers import fused_operands, fuses, normalized, strided, unheld
from remat_magic.facts.remade import made_again
from remat_magic.facts.residuals import saved_values
from remat_magic.facts.results import over_donated, within_results
from remat_magic.facts.step_order import ScheduledStep, brought_forward, last_uses, put_off, written_over
from remat_magic.facts.vector_memory import LiveBuffer, placed
from remat_magic.jaxprs.one_device import TypeOf, own_type
from remat_magic.jaxprs.straight_line import Operation, StraightLines
from remat_magic.records import Half, Moment, Phase

__all__ = ["Schedule"]

_NOTHING = 0  # the buffer of what takes no memory: literals


class _StepBytes(NamedTuple):
    """The bytes that are held during a step."""

    step: ScheduledStep
    arguments: int
    residuals: int
    temporaries: int


def _moment(step_bytes: _StepBytes) -> Moment:
    return Moment(*step_bytes.step.where, step_bytes.arguments, step_bytes.residuals, step_bytes.temporaries)


class Schedule:
    """Steps on numbered buffers.

    Attributes:
        kept: the buffers that are not freed after their last reader.
        saved: those of residuals.
        gradients: those of gradients that something reads later on.
        donated: those of arguments that may be written over; where results are reserved, these lie in them.
        type_of: tells the type of a variable, with how it is spread over a mesh.
        on: how the device holds values.
    """

    def __init__(
        self,
        inner_peaks: dict[tuple[int, int], tuple[int, int]] | None = None,
        type_of: TypeOf = own_type,
        on: DeviceMemory = PLAIN,
    ) -> None:
        self.type_of = type_of
        self.on = on
        self.steps: list[ScheduledStep] = []
        self.kept: set[int] = set()
        self.saved: set[int] = set()
        self.gradients: set[int] = set()
        self.donated: set[int] = set()
        self._sizes: list[int] = [0]
        self._contents: dict[int, Held] = {}
        self._needs_of: dict[int, tuple[list[int], slice, int]] = {}  # by the identity of the equation
        self._narrowed: dict[int, Any] = {}  # the types of what is held in bfloat16 instead of float32
        self._lanes: dict[tuple[int, ...], tuple[int, int]] = {}  # of the shapes that convolutions take and make
        self._instead: dict[int, tuple[int, ...]] = {}  # of what stays in registers, what its kernel reads
        self._checkpoints: dict[int, tuple[int, int]] = {}  # of what checkpoints make, which of them
        self._written: set[int] = set()  # what kernels read from memory, whatever could make it again
        self._permanent = {_NOTHING}
        self._constants: dict[int, int] = {}
        self._inner_peaks = {} if inner_peaks is None else inner_peaks
        self._vector_inside: dict[int, int] = {}  # what bodies use of the vector memory, by the equation's identity
        self.vector_bytes = 0
        self._around: dict[int, tuple[StraightLines, Operation]] = {}  # by the identity of the equation
        self._order: list[ScheduledStep] | None = None

    # ------------------------------------------------------------------------------------------------------- buffers

    def buffer(self, aval: Any, content: Held | None = None) -> int:
        """A new one for a value of that type; its ``content``, if it may be asked for."""
        self._sizes.append(self._nbytes(aval))
        number = len(self._sizes) - 1
        if content is not None:
            self._contents[number] = content
        return number

    def _nbytes(self, aval: Any) -> int:
        return self.on.nbytes(aval, self._lanes.get(_jax.local_shape(aval), ()) if self._lanes else ())

    def permanent(self, aval: Any, content: Held) -> int:
        """A new one which is there from the beginning to the end."""
        number = self.buffer(aval, content)
        self._permanent.add(number)
        return number

    def arrive(self, phase: Phase, buffers: Sequence[int]) -> None:
        """Append a step that makes buffers of nothing."""
        self.steps.append(ScheduledStep((phase, 0), (), tuple(buffers)))

    def _constant(self, key: int, aval: Any) -> int:
        """The one buffer of a constant, wherever it is met."""
        if key not in self._constants:
            self._constants[key] = self.permanent(aval, Held(0, aval, constant=True))
        return self._constants[key]

    def give_back(self, results: Sequence[int], avals: Sequence[Any]) -> None:
        """Hold results of these types to the end.

        Where results are reserved each has memory of its own: arguments are copied, and what is given back twice is.
        """
        self.kept = {*results}
        if not self.on.reserves:
            return
        last = self.steps[-1].where if self.steps else ("forward", 0)
        self.kept = {_NOTHING}
        for number, aval in zip(results, avals, strict=True):
            own = number
            if number in self.kept or number in self._permanent:
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
            if shown in assigned or self._sizes[shown] < self._nbytes(self.type_of(value.atom)):
                own = self.buffer(
                    self.type_of(value.atom), Held(0, self.type_of(value.atom), makers[value.atom], value.atom)
                )
                self.steps.append(ScheduledStep(("forward", len(jaxpr.eqns) - 1), (shown,), (own,)))
                for leaf in value.leaves:
                    buffers[leaf] = own
            assigned.add(shown)
        return buffers

    # --------------------------------------------------------------------------------------------------------- steps

    def run(self, lines: StraightLines, jaxpr: Any, inputs: Sequence[int], half: Half) -> list[int]:
        """Append the steps of a whole jaxpr; the buffers of its outputs."""
        flat = lines(jaxpr)
        if self.on.tiled:
            for operation, _, _ in flat.lines:
                for atom, lanes in _jax.lanes_of_convolution(operation.eqn):
                    self._lanes[_jax.local_shape(self.type_of(atom))] = lanes
        written, never, again = self._unheld(jaxpr, lines)
        start = len(self.steps)  # tells this run from others
        in_kernels: dict[int, int] = {}  # of what is made again, the buffers without bytes that stand for it there
        buffers = [_NOTHING] * len(flat.types)  # by the number of the value
        for number, buffer in zip(flat.inputs, inputs, strict=True):
            buffers[number] = buffer
        for key, number in flat.constants.items():
            buffers[number] = self._constant(key, flat.types[number])
        begin = 0
        for index, end in enumerate(flat.ends):
            for line in flat.lines[begin:end]:
                operation, reads, makes = line
                operands = [buffers[number] for number in reads]
                if in_kernels and fuses(line, matmuls=self.on.matmuls):
                    operands = [in_kernels.get(number, buffers[number]) for number in reads]
                if operation.name in MADE_ANEW and not operation.leaves:
                    buffers[makes[0]] = operands[0] if operands else _NOTHING
                    continue
                if self.on.views and operation.name == TRANSPOSE and operands[0] not in self._instead:
                    buffers[makes[0]] = operands[0]
                    continue
                for number, result in zip(makes, self.add(lines, (half, index), operation, operands), strict=True):
                    buffers[number] = result
                    if number in flat.apart:
                        self._checkpoints[result] = start, flat.apart[number]
                    if number in again:
                        in_kernels[number] = result = self.buffer(None)
                    if number in never or number in again:
                        self._sizes[result] = 0
                        self._instead[result] = self._read_for(operands)
            begin = end
        self._written.update(buffers[number] for number in written)
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
        results = range(len(self._sizes), len(self._sizes) + len(sizes))
        self._sizes += sizes
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
            sizes = [self._nbytes(self.type_of(var)) for var in eqn.outvars]
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
            inside = self._inside(lines, eqn, body)
            self._inner_peaks[key] = inside.highest()[0], inside.vector_bytes
        peak, vector = self._inner_peaks[key]
        self._vector_inside[id(eqn)] = max(self._vector_inside.get(id(eqn), 0), vector)
        return peak

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
        outputs = schedule.run(lines, body.jaxpr, [_NOTHING] * slices + sliced, "backward")
        if self.on.views and _jax.is_scan(eqn):  # what is stacked is written into the stack where it is made
            carries = _jax.carried_operands(eqn)
            outputs, stacked = outputs[: len(carries)], outputs[len(carries) :]
            schedule.written_outside({*stacked} - {*outputs, *sliced})
        schedule.kept = {*outputs}
        return schedule

    def discard(self, buffer: int) -> None:
        """Let a buffer take no memory."""
        self._sizes[buffer] = 0

    def written_outside(self, buffers: set[int]) -> None:
        """These are written into memory that is held elsewhere, unless something reads them here."""
        for number in buffers.difference(*(step.reads for step in self.steps)):
            self._sizes[number] = 0

    def new(self) -> Schedule:
        """An empty one for a body, which knows the peaks inside that this one knows."""
        return Schedule(self._inner_peaks, self.type_of, self.on.inside)

    def saved_inside(self, eqn: Any) -> int:
        """The bytes of residuals among what an equation needs inside."""
        del eqn
        return 0

    # --------------------------------------------------------------------------------------------------------- sweep

    def peak(self) -> Peak:
        """The most that is held at once."""
        most, at = self.highest()
        return Peak(most, self._ordered()[at].where)

    def over_time(self) -> tuple[tuple[Moment, ...], tuple[Any, ...], list[tuple[int, int, Held]]]:
        """The timeline, the equation of each moment (None where values merely arrive), and what is held when.

        What is held comes with its first moment and the one that holds it no more. What a result is written over is
        left out, so that the bytes of what is held add up to the moment's.
        """
        swept = list(self.sweep())
        lives = self._lives()
        held = [(*lives[number], value) for number, value in zip(lives, self._described(lives), strict=True)]
        inside: dict[int, list[Held]] = {}  # by the identity of the equation: calls of one body share theirs
        for at, step in enumerate(self._ordered()):
            if step.inside:
                if id(step.eqn) not in inside:
                    inside[id(step.eqn)] = self.held_inside(step.eqn)
                held += [(at, at + 1, value) for value in inside[id(step.eqn)]]
        return tuple(map(_moment, swept)), tuple(step_bytes.step.eqn for step_bytes in swept), held

    def sweep(self) -> Iterator[_StepBytes]:
        """Go through the steps and yield what is held during each."""
        sizes, lasting = self._sizes, self.kept | self._permanent
        steps = self._ordered()
        dying_at: dict[int, list[int]] = {}
        for number, index in last_uses(steps).items():
            if number not in lasting:
                dying_at.setdefault(index, []).append(number)
        arguments = sum(sizes[number] for number in self._permanent)
        saved = self.saved - self._permanent
        reserved = self._reserved()
        held_bytes = sum(sizes[number] for number in reserved)
        held_residuals = 0
        for index, step in enumerate(steps):
            for number in step.makes:
                if number in reserved:
                    continue
                if number in self.donated:
                    arguments += sizes[number]
                    continue
                held_bytes += sizes[number]
                if number in saved:
                    held_residuals += sizes[number]
            dying = dying_at.get(index, ())
            reused = sum(sizes[number] for number in written_over(step, dying, sizes)) if dying and step.over else 0
            inside = self.saved_inside(step.eqn) if step.inside else 0
            temporaries = held_bytes - held_residuals - reused + step.inside - inside
            yield _StepBytes(step, arguments, held_residuals + inside, temporaries)
            for number in dying:
                if number in self.donated:
                    arguments -= sizes[number]
                    continue
                held_bytes -= sizes[number]
                if number in saved:
                    held_residuals -= sizes[number]

    def highest(self) -> tuple[int, int]:
        """The most bytes that are held at once, and the position of the first step that holds them."""
        totals = [step_bytes.arguments + step_bytes.residuals + step_bytes.temporaries for step_bytes in self.sweep()]
        most = max(totals)
        return most, totals.index(most)

    def _ordered(self) -> list[ScheduledStep]:
        """The steps in the order in which they are taken to run."""
        if self._order is None:
            read = {number for step in self.steps for number in step.reads} | self.kept
            for step in self.steps:
                if step.eqn is not None and _jax.is_scan(step.eqn):  # its dead stacks are not made
                    for number in step.makes:
                        self._sizes[number] *= number in read
            if self.on.fuses:
                self._make_again()
            if self.on.narrows:
                self._narrow()
            delayed = put_off(self.steps, self.kept | self.gradients)
            self._order = brought_forward(delayed, self.kept | self._permanent, self._sizes)
            if self.on.reserves:
                self._place_results()
            if self.on.vector_memory:
                self._place_in_vector_memory()
        return self._order

    def _make_again(self) -> None:
        """Let kernels that read certain residuals make them again, and read what these are made of."""
        lasting = self.kept | self._permanent
        again = made_again(
            self.steps,
            self.saved - lasting,
            lasting,
            self._written,
            self._checkpoints,
            self._sizes,
            matmuls=self.on.matmuls,
        )
        for number in again:
            self._sizes[number] = 0
        for index, step in enumerate(self.steps):
            if not again.keys().isdisjoint(step.reads):
                reads, over = (
                    (*numbers, *{read for number in numbers for read in again.get(number, ())}.difference(numbers))
                    for numbers in (step.reads, step.over)
                )
                self.steps[index] = step._replace(reads=reads, over=over)

    def _place_results(self) -> None:
        """Let results lie where donated arguments do, and what is gone before they are written where they do."""
        results = self.kept - self._permanent - {_NOTHING}
        if self._lanes:  # what is given back is laid out as arguments are, whatever a convolution makes
            types = self._types()
            for number in results & types.keys():
                self._sizes[number] = self.on.nbytes(types[number])
        for number in over_donated(results, self.donated - self.kept, self._sizes):
            self._sizes[number] = 0
        if self.on.shares:
            lives = self._lives(reserved=set())
            others = lives.keys() - self.kept - self._permanent
            for number in within_results(lives, results, others, self._sizes):
                self._sizes[number] = 0

    def _place_in_vector_memory(self) -> None:
        """Let values lie in the vector memory where it has room; results are made there, and copied when they are."""
        steps, results, sizes = self._ordered(), self._reserved(), self._sizes
        apart = self._permanent | results
        live_buffers = [
            LiveBuffer(*life, sizes[number], number) for number, life in self._lives().items() if number not in apart
        ]
        last = last_uses(steps)
        for index, step in enumerate(steps):
            live_buffers += [
                LiveBuffer(index, last[number] + 1, sizes[number], number) for number in step.makes if number in results
            ]
        used = [self._vector_inside.get(id(step.eqn), 0) if step.eqn is not None else 0 for step in steps]
        in_vector_memory, self.vector_bytes = placed(live_buffers, used, self.on.vector_memory)
        for number in in_vector_memory - results:
            sizes[number] = 0

    def _reserved(self) -> set[int]:
        """The buffers that are there from the beginning, though something makes them."""
        return self.kept - self._permanent - {_NOTHING} if self.on.reserves else set()

    def _narrow(self) -> None:
        """Hold in bfloat16 what only matmuls read, and what loops take slices of for them, from the first one on."""
        types = self._types()
        narrow, in_loops = read_by_matmuls(self.steps, self._around)
        for number in narrow - self.kept - self._permanent - self.donated:
            half = _jax.narrowed(types.get(number))
            if half is not None and self._sizes[number]:
                self._sizes[number], self._narrowed[number] = self._nbytes(half), half
        converted: list[tuple[int, ScheduledStep]] = []
        for number, loops in in_loops.items():
            half = _jax.narrowed(types.get(number)) if number in self._permanent else None
            if half is not None:
                first = self.steps[loops[0]]
                copy = self.buffer(half, Held(0, half, first.eqn))
                converted.append((loops[0], ScheduledStep(first.where, (number,), (copy,))))
                for index in loops:
                    self.steps[index] = self.steps[index]._replace(reads=(*self.steps[index].reads, copy))
        for index, step in sorted(converted, key=lambda pair: -pair[0]):
            self.steps.insert(index, step)

    def _types(self) -> dict[int, Any]:
        """The types of buffers, as far as they are known."""
        types = {number: content.aval for number, content in self._contents.items() if content.aval is not None}
        for step in self.steps:
            if step.eqn is not None:
                types.update(zip(step.makes, map(self.type_of, step.eqn.outvars), strict=True))
        return types

    def held(self, at: int, besides: Collection[int] = ()) -> list[Held]:
        """What is held during the step at a position of the sweep, some buffers left out."""
        lives = self._lives().items()
        alive = [number for number, (first, end) in lives if first <= at < end and number not in besides]
        step = self._ordered()[at]
        return self._described(alive) + (self.held_inside(step.eqn) if step.inside else [])

    def _lives(self, reserved: set[int] | None = None) -> dict[int, tuple[int, int]]:
        """For each buffer the first step that holds it, and the one that holds it no more.

        What a result is written over is held no more by the step that reads it last. ``reserved`` are there from the
        beginning, by default those that the device reserves.
        """
        steps, lasting = self._ordered(), self.kept | self._permanent
        throughout = self._permanent | (self._reserved() if reserved is None else reserved)
        lives: dict[int, tuple[int, int]] = {number: (0, len(steps)) for number in sorted(throughout)}
        last = last_uses(steps)
        dying_at: dict[int, list[int]] = {}
        for number, index in last.items():
            if number not in lasting:
                dying_at.setdefault(index, []).append(number)
        for index, step in enumerate(steps):
            for number in step.makes:
                if number not in lives:
                    lives[number] = index, len(steps) if number in lasting else last[number] + 1
            if step.over and index in dying_at:
                for number in written_over(step, dying_at[index], self._sizes):
                    lives[number] = lives[number][0], index
        del lives[_NOTHING]
        return lives

    def _described(self, numbers: Iterable[int]) -> list[Held]:
        """What buffers hold."""
        saved = self.saved - self._permanent
        origins = {
            number: (self.type_of(var), step.eqn, var)
            for step in self._ordered()
            if step.eqn is not None
            for number, var in zip(step.makes, step.eqn.outvars, strict=True)
        }
        contents = {number: self._contents.get(number) or Held(0, *origins.get(number, ())) for number in numbers}
        return [
            replace(
                content,
                aval=self._narrowed.get(number, content.aval),
                bytes=self._sizes[number],
                residual=number in saved,
                gradient=number in self.gradients,
                output=number in self.kept,
            )
            for number, content in contents.items()
        ]

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
