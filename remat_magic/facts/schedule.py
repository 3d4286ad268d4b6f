"""A schedule: steps on numbered buffers, and what is held while each runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.primitives import MADE_ANEW, WRITES_OVER_ANY, WRITES_OVER_FIRST
from remat_magic.facts.residuals import saved_values
from remat_magic.facts.step_order import ScheduledStep, brought_forward, last_uses, put_off, written_over
from remat_magic.facts.straight_line import Operation, StraightLines
from remat_magic.jaxprs.one_device import TypeOf, own_type
from remat_magic.records import Half, Moment, Phase

__all__ = ["Held", "Peak", "Schedule"]

_NOTHING = 0  # the buffer of what takes no memory: literals


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that is held at once, in bytes, and the (first) equation that holds it: its half and its index there."""

    bytes: int
    where: tuple[Phase, int]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A buffer that is held: its type and what makes it.

    ``argument`` is the position of an argument, ``constant`` tells a captured value; otherwise it is ``var``, which
    ``eqn`` makes or hands to a body of its own (no ``eqn``: a cotangent). Without an ``aval`` it is what a branch of
    ``eqn`` needs inside.
    """

    bytes: int
    aval: Any = None
    eqn: Any = None
    var: Any = None
    argument: int | None = None
    constant: bool = False
    residual: bool = False
    gradient: bool = False
    output: bool = False


class _Held(NamedTuple):
    """The bytes that are held during a step."""

    step: ScheduledStep
    arguments: int
    residuals: int
    temporaries: int


def _moment(held: _Held) -> Moment:
    return Moment(*held.step.where, held.arguments, held.residuals, held.temporaries)


class Schedule:
    """Steps on numbered buffers.

    Attributes:
        kept: the buffers that are not freed after their last reader.
        saved: those of residuals.
        gradients: those of gradients that something reads later on.
        donated: those of arguments that may be written over.
        type_of: tells the type of a variable, with how it is spread over a mesh.
    """

    def __init__(self, inner_peaks: dict[tuple[int, int], int] | None = None, type_of: TypeOf = own_type) -> None:
        self.type_of = type_of
        self.steps: list[ScheduledStep] = []
        self.kept: set[int] = set()
        self.saved: set[int] = set()
        self.gradients: set[int] = set()
        self.donated: set[int] = set()
        self._sizes: list[int] = [0]
        self._what: dict[int, Held] = {}
        self._needs_of: dict[int, tuple[list[int], slice, int]] = {}  # by the identity of the equation
        self._permanent = {_NOTHING}
        self._constants: dict[int, int] = {}
        self._inner_peaks = {} if inner_peaks is None else inner_peaks
        self._around: dict[int, tuple[StraightLines, Operation]] = {}  # by the identity of the equation
        self._order: list[ScheduledStep] | None = None

    # ------------------------------------------------------------------------------------------------------- buffers

    def buffer(self, aval: Any, what: Held | None = None) -> int:
        """A new one for a value of that type; ``what`` it is, if it may be asked for."""
        self._sizes.append(_device_bytes(aval))
        number = len(self._sizes) - 1
        if what is not None:
            self._what[number] = what
        return number

    def permanent(self, aval: Any, what: Held) -> int:
        """A new one which is there from the beginning to the end."""
        number = self.buffer(aval, what)
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

    def own_buffers(self, forward: Any, outputs: int, results: Sequence[int], read: Sequence[bool]) -> list[int]:
        """The buffers of the residuals, given those of all results of the forward half, and which residuals are read.

        What is saved as several values is held as several: a view of another residual, or what a broadcast shows.
        """
        jaxpr = _jax.open_jaxpr(forward)
        buffers = [*results[outputs:]]
        taken: set[int] = set()
        makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        for value in saved_values(forward, outputs):
            shown = buffers[value.leaves[0]]
            if _jax.is_literal(value.atom) or value.atom not in makers or not any(read[leaf] for leaf in value.leaves):
                continue
            if shown in taken or self._sizes[shown] < _device_bytes(self.type_of(value.atom)):
                own = self.buffer(
                    self.type_of(value.atom), Held(0, self.type_of(value.atom), makers[value.atom], value.atom)
                )
                self.steps.append(ScheduledStep(("forward", len(jaxpr.eqns) - 1), (shown,), (own,)))
                for leaf in value.leaves:
                    buffers[leaf] = own
            taken.add(shown)
        return buffers

    # --------------------------------------------------------------------------------------------------------- steps

    def run(self, lines: StraightLines, jaxpr: Any, inputs: Sequence[int], half: Half) -> list[int]:
        """Append the steps of a whole jaxpr; the buffers of its outputs."""
        flat = lines(jaxpr)
        buffers = [_NOTHING] * len(flat.types)  # by the number of the value
        for number, buffer in zip(flat.inputs, inputs, strict=True):
            buffers[number] = buffer
        for key, number in flat.constants.items():
            buffers[number] = self._constant(key, flat.types[number])
        begin = 0
        for index, end in enumerate(flat.ends):
            for operation, reads, makes in flat.lines[begin:end]:
                operands = [buffers[number] for number in reads]
                if operation.name in MADE_ANEW and not operation.leaves:
                    buffers[makes[0]] = operands[0] if operands else _NOTHING
                    continue
                for number, result in zip(makes, self.add(lines, (half, index), operation, operands), strict=True):
                    buffers[number] = result
            begin = end
        return [buffers[number] for number in flat.outputs]

    def add(
        self, lines: StraightLines, where: tuple[Phase, int], operation: Operation, operands: Sequence[int]
    ) -> Sequence[int]:
        """Append an operation; the buffers of its results."""
        sizes, over, need = self._needs(lines, operation)
        results = range(len(self._sizes), len(self._sizes) + len(sizes))
        self._sizes += sizes
        self.steps.append(ScheduledStep(where, operands, results, operands[over], need, operation.eqn))
        return results

    def _needs(self, lines: StraightLines, operation: Operation) -> tuple[list[int], slice, int]:
        """The bytes of each result, the operands that may be written over, and the bytes needed inside."""
        eqn = operation.eqn
        needs = self._needs_of.get(id(eqn))
        if needs is None:
            sizes = [_device_bytes(self.type_of(var)) for var in eqn.outvars]
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

        The slices that a scan hands to an iteration are copies; carries live in the loop's own buffers.
        """
        slices = _first_slice(eqn, body)
        schedule = self.new()
        sliced = [
            schedule.buffer(self.type_of(var), Held(0, self.type_of(var), eqn, var))
            for var in body.jaxpr.invars[slices:]
        ]
        schedule.arrive("backward", sliced)
        schedule.kept = {*schedule.run(lines, body.jaxpr, [_NOTHING] * slices + sliced, "backward")}
        return schedule

    def new(self) -> Schedule:
        """An empty one for a body, which knows the peaks inside that this one knows."""
        return Schedule(self._inner_peaks, self.type_of)

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
        return tuple(map(_moment, swept)), tuple(held.step.eqn for held in swept), held

    def sweep(self) -> Iterator[_Held]:
        """Go through the steps and yield what is held during each."""
        sizes, lasting = self._sizes, self.kept | self._permanent
        steps = self._ordered()
        dying_at: dict[int, list[int]] = {}
        for number, index in last_uses(steps).items():
            if number not in lasting:
                dying_at.setdefault(index, []).append(number)
        arguments = sum(sizes[number] for number in self._permanent)
        saved = self.saved - self._permanent
        held = held_residuals = 0
        for index, step in enumerate(steps):
            for number in step.makes:
                if number in self.donated:
                    arguments += sizes[number]
                    continue
                held += sizes[number]
                if number in saved:
                    held_residuals += sizes[number]
            dying = dying_at.get(index, ())
            reused = sum(sizes[number] for number in written_over(step, dying, sizes)) if dying and step.over else 0
            inside = self.saved_inside(step.eqn) if step.inside else 0
            temporaries = held - held_residuals - reused + step.inside - inside
            yield _Held(step, arguments, held_residuals + inside, temporaries)
            for number in dying:
                if number in self.donated:
                    arguments -= sizes[number]
                    continue
                held -= sizes[number]
                if number in saved:
                    held_residuals -= sizes[number]

    def highest(self) -> tuple[int, int]:
        """The most bytes that are held at once, and the position of the first step that holds them."""
        totals = [held.arguments + held.residuals + held.temporaries for held in self.sweep()]
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
            delayed = put_off(self.steps, self.kept | self.gradients)
            self._order = brought_forward(delayed, self.kept | self._permanent, self._sizes)
        return self._order

    def held(self, at: int, besides: Collection[int] = ()) -> list[Held]:
        """What is held during the step at a position of the sweep, some buffers left out."""
        lives = self._lives().items()
        alive = [number for number, (first, end) in lives if first <= at < end and number not in besides]
        step = self._ordered()[at]
        return self._described(alive) + (self.held_inside(step.eqn) if step.inside else [])

    def _lives(self) -> dict[int, tuple[int, int]]:
        """For each buffer the first step that holds it, and the one that holds it no more.

        What a result is written over is held no more by the step that reads it last.
        """
        steps, lasting = self._ordered(), self.kept | self._permanent
        lives: dict[int, tuple[int, int]] = {number: (0, len(steps)) for number in sorted(self._permanent)}
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
        return [
            replace(
                self._what.get(number) or Held(0, *origins.get(number, ())),
                bytes=self._sizes[number],
                residual=number in saved,
                gradient=number in self.gradients,
                output=number in self.kept,
            )
            for number in numbers
        ]

    def held_inside(self, eqn: Any) -> list[Held]:
        """What the body of an equation that needs most holds at most; one sum where it is not all known."""
        lines, operation = self._around[id(eqn)]
        body = max(operation.bodies, key=lambda body: self._inner_peak(lines, eqn, body))
        schedule = self._inside(lines, eqn, body)
        held = schedule.held(schedule.highest()[1], () if body.kind == "loop" else schedule.kept)
        _, _, needed = self._needs(lines, operation)
        return held if sum(value.bytes for value in held) == needed else [Held(needed, eqn=eqn)]


def _device_bytes(aval: Any) -> int:
    return 0 if _jax.memory_space(aval) else _jax.nbytes(aval)


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
