"""An estimate of the device memory that a forward and a backward pass need at most.

The live equations are gone through in the order of the jaxprs, and every value is held from the equation that makes it
to the last one that reads it:

* Arguments and constants are held throughout; residuals from where they are made to their last reader in the backward
  pass; the function's outputs and the gradients to the end. What is an argument already is not counted again.
* Views (``reshape``, names, barriers) and broadcasts need no memory of their own, but hold what they show.
* An elementwise operation, an indexed update and a loop's carry write over an operand of the same size that dies there,
  as XLA's buffer assignment has it. This also stands for fusion, which keeps the steps of a chain in registers.
* Calls are part of the program around them. Loops and branches need, on top of what is held outside, what one iteration
  or the most demanding branch needs inside; a loop holds its stacked inputs and outputs outside and a slice inside.
* Values in another memory ("host") take none of the device's.

XLA orders and fuses as it likes, so this is an estimate; it tells policies apart, and says where the peak is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.formulas import is_operation
from remat_magic._jax.primitives import MADE_ANEW, VIEWS, WRITES_OVER_ANY, WRITES_OVER_FIRST
from remat_magic.facts.dead_code import LiveEquations
from remat_magic.records import Half, Moment

__all__ = ["Held", "Moment", "Peak", "held_at_peak", "peak", "timeline"]

_NOTHING = 0  # the buffer of what takes no memory: literals


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that is held at once, in bytes, and the (first) equation that holds it: its half and its index there."""

    bytes: int
    where: tuple[Half, int]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A buffer that is held at the peak: its type and what makes it.

    ``argument`` is the position of an argument, ``constant`` tells a captured value; otherwise ``eqn`` makes the value
    (None: a cotangent). Without an ``aval`` it is what the bodies of ``eqn`` need inside.
    """

    bytes: int
    aval: Any = None
    eqn: Any = None
    argument: int | None = None
    constant: bool = False
    residual: bool = False


def peak(forward: Any, backward: Any, outputs: int, live: LiveEquations | None = None) -> Peak:
    """The estimated peak of a function and its gradient.

    Args:
        forward: a closed jaxpr whose outputs are the function's own and then the residuals.
        backward: a closed jaxpr whose inputs are the residuals, in that order, and then the cotangents.
        outputs: how many outputs the function itself has.
        live: which equations of ``backward`` matter, where that is known.

    Raises:
        ValueError: ``backward`` takes fewer inputs than there are residuals.
    """
    highest = max(timeline(forward, backward, outputs, live), key=lambda moment: moment.bytes)
    return Peak(highest.bytes, (highest.half, highest.index))


def timeline(forward: Any, backward: Any, outputs: int, live: LiveEquations | None = None) -> tuple[Moment, ...]:
    """What is held while each equation runs, in order; arguments and errors are those of ``peak``."""
    program, kept, saved = _both_halves(forward, backward, outputs, live)
    return tuple(moment for moment, _ in program.sweep(kept, saved))


def held_at_peak(forward: Any, backward: Any, outputs: int) -> tuple[tuple[Moment, ...], tuple[Any, ...], list[Held]]:
    """The timeline, the equation of each moment (None where values merely arrive), and what is held at the peak.

    What a result is written over is left out, so that the bytes of what is held add up to the moment's.
    """
    program, kept, saved = _both_halves(forward, backward, outputs, None)
    swept = list(program.sweep(kept, saved))
    at = max(range(len(swept)), key=lambda index: swept[index][0].bytes)
    return tuple(moment for moment, _ in swept), tuple(step.eqn for _, step in swept), program.held(at, kept, saved)


def _both_halves(
    forward: Any, backward: Any, outputs: int, live: LiveEquations | None
) -> tuple[_Program, set[int], set[int]]:
    """The program of both halves, the buffers kept to the end, and those of the residuals."""
    first, second = _jax.open_jaxpr(forward), _jax.open_jaxpr(backward)
    residuals = len(first.outvars) - outputs
    if residuals < 0 or len(second.invars) < residuals:
        raise ValueError(f"{len(second.invars)} backward inputs are not {residuals} residuals and the cotangents")
    program = _Program()

    arguments = [program.permanent(var.aval, Held(0, var.aval, argument=i)) for i, var in enumerate(first.invars)]
    env = program.enter(forward, arguments)
    program.run_all(first, env, "forward", LiveEquations(first))
    results = [program.at(env, atom) for atom in first.outvars]
    saved = results[outputs:]

    cotangents = [program.buffer(var.aval, Held(0, var.aval)) for var in second.invars[residuals:]]
    program.steps.append(_Step(("backward", 0), (), tuple(cotangents)))
    env = program.enter(backward, [*saved, *cotangents])
    program.run_all(second, env, "backward", live or LiveEquations(second))
    gradients = [program.at(env, atom) for atom in second.outvars]
    return program, {*results[:outputs], *gradients}, set(saved)


class _Step(NamedTuple):  # thousands are made for each report, and a frozen dataclass takes thrice as long
    """Something that happens at once: what it reads and makes, what may be written over, and what it needs inside."""

    where: tuple[Half, int]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    over: tuple[int, ...] = ()
    inside: int = 0
    eqn: Any = None


class _Program:
    """A straight line of steps on numbered buffers, which calls are flattened into."""

    def __init__(self, inner_peaks: dict[tuple[int, int], int] | None = None) -> None:
        self.steps: list[_Step] = []
        self._sizes: list[int] = [0]
        self._what: dict[int, Held] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # the type of what an equation makes, and the equation
        self._permanent = {_NOTHING}
        self._constants: dict[int, int] = {}
        self._inner_peaks = {} if inner_peaks is None else inner_peaks
        self._live: LiveEquations | None = None

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

    def at(self, env: dict[Any, int], atom: Any) -> int:
        """The buffer of an operand."""
        return _NOTHING if _jax.is_literal(atom) else env.get(atom, _NOTHING)

    def enter(self, jaxpr: Any, inputs: Sequence[int]) -> dict[Any, int]:
        """What the variables of a jaxpr stand for at its beginning; a constant is held once, wherever it is met."""
        body = _jax.open_jaxpr(jaxpr)
        env: dict[Any, int] = dict(zip(body.invars, inputs, strict=True))
        for var, value in itertools.zip_longest(body.constvars, _jax.consts_of(jaxpr)):
            key = id(var if value is None else value)
            if key not in self._constants:
                self._constants[key] = self.permanent(var.aval, Held(0, var.aval, constant=True))
            env[var] = self._constants[key]
        return env

    # --------------------------------------------------------------------------------------------------------- steps

    def run_all(self, jaxpr: Any, env: dict[Any, int], half: Half, live: LiveEquations) -> None:
        """Append the steps of a whole jaxpr."""
        self._live = live
        for index, eqn in enumerate(jaxpr.eqns):
            self._run(eqn, env, (half, index), jaxpr.outvars)

    def _run(self, eqn: Any, env: dict[Any, int], where: tuple[Half, int], leaving: Sequence[Any]) -> None:
        """Append the steps of an equation; ``leaving`` are the outputs of the jaxpr that it stands in."""
        if self._live is not None and not self._live(eqn):
            return
        name = _jax.primitive_name(eqn)
        if name in VIEWS or (name in MADE_ANEW and not any(out is eqn.outvars[0] for out in leaving)):
            self._view(eqn, env)
            return
        inside = () if is_operation(eqn) else _jax.bodies(eqn)
        if len(inside) == 1 and inside[0].inlines:
            self._inline(eqn, inside[0], env, where)
            return
        operands = [self.at(env, atom) for atom in eqn.invars]
        makes = [self.buffer(var.aval) for var in eqn.outvars]
        self._made.update((number, (var.aval, eqn)) for number, var in zip(makes, eqn.outvars, strict=True))
        env.update(zip(eqn.outvars, makes, strict=True))
        need = max((self._inner_peak(eqn, body) for body in inside), default=0)
        if inside and inside[0].kind != "loop":  # what leaves a branch is the equation's result already
            need = max(0, need - sum(self._sizes[number] for number in makes))
        self.steps.append(
            _Step(where, tuple({*operands}), tuple(makes), tuple(_overwritable(eqn, operands)), need, eqn)
        )

    def _view(self, eqn: Any, env: dict[Any, int]) -> None:
        shown = [self.at(env, atom) for atom in eqn.invars] or [_NOTHING]
        paired = len(shown) == len(eqn.outvars)
        env.update((var, shown[index if paired else 0]) for index, var in enumerate(eqn.outvars))

    def _inline(self, eqn: Any, body: _jax.Body, env: dict[Any, int], where: tuple[Half, int]) -> None:
        inner = self.enter(
            body.jaxpr, [_NOTHING if index is None else self.at(env, eqn.invars[index]) for index in body.operands]
        )
        for each in body.jaxpr.eqns:
            self._run(each, inner, where, body.jaxpr.outvars)
        for var, result in zip(eqn.outvars, body.results, strict=True):
            env[var] = _NOTHING if result is None else self.at(inner, body.jaxpr.outvars[result])

    def _inner_peak(self, eqn: Any, body: _jax.Body) -> int:
        """The most that one run of a body needs on top of its operands, which are held outside.

        The slices that a scan hands to an iteration are copies; carries live in the loop's own buffers.
        """
        slices = _first_slice(eqn, body)
        key = (id(body.jaxpr), slices)
        if key not in self._inner_peaks:
            program = _Program(self._inner_peaks)
            sliced = [program.buffer(var.aval) for var in body.jaxpr.invars[slices:]]
            program.steps.append(_Step(("backward", 0), (), tuple(sliced)))
            env = program.enter(body.jaxpr, [_NOTHING] * slices + sliced)
            program._live = self._live
            for each in body.jaxpr.eqns:
                program._run(each, env, ("backward", 0), body.jaxpr.outvars)
            leaving = {program.at(env, atom) for atom in body.jaxpr.outvars}
            self._inner_peaks[key] = max(moment.bytes for moment, _ in program.sweep(leaving, set()))
        return self._inner_peaks[key]

    # --------------------------------------------------------------------------------------------------------- sweep

    def sweep(self, kept: set[int], residuals: set[int]) -> Iterator[tuple[Moment, _Step]]:
        """Go through the steps and yield what is held during each; ``kept`` are not freed after their last reader."""
        sizes, lasting = self._sizes, kept | self._permanent
        steps = _put_off(self.steps, kept)
        last = {number: index for index, step in enumerate(steps) for number in (*step.reads, *step.makes)}
        arguments = sum(sizes[number] for number in self._permanent)
        saved = residuals - self._permanent
        held = held_residuals = 0
        for index, step in enumerate(steps):
            held += sum(sizes[number] for number in step.makes)
            held_residuals += sum(sizes[number] for number in step.makes if number in saved)
            dying = {number for number in step.reads if last[number] == index} - lasting
            reused = sum(sizes[number] for number in _reused(step, dying, sizes))
            yield Moment(*step.where, arguments, held_residuals, held - held_residuals - reused + step.inside), step
            dying |= {number for number in step.makes if last[number] == index} - lasting
            held -= sum(sizes[number] for number in dying)
            held_residuals -= sum(sizes[number] for number in dying if number in saved)

    def held(self, at: int, kept: set[int], residuals: set[int]) -> list[Held]:
        """What is held during the step at a position of the sweep."""
        lasting = kept | self._permanent
        steps = _put_off(self.steps, kept)
        last = {number: index for index, step in enumerate(steps) for number in (*step.reads, *step.makes)}
        alive = {
            number
            for step in steps[: at + 1]
            for number in step.makes
            if number in lasting or last[number] >= at or number in steps[at].makes
        }
        dying = {number for number in steps[at].reads if last[number] == at} - lasting
        alive = (alive | self._permanent) - {*_reused(steps[at], dying, self._sizes), _NOTHING}
        saved = residuals - self._permanent
        found = [
            replace(
                self._what.get(number) or Held(0, *self._made.get(number, ())),
                bytes=self._sizes[number],
                residual=number in saved,
            )
            for number in sorted(alive)
        ]
        inside = steps[at].inside
        return [*found, Held(inside, eqn=steps[at].eqn)] if inside else found


def _put_off(steps: Sequence[_Step], wanted: set[int]) -> list[_Step]:
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
        for number in step.reads:
            due[number] = min(due.get(number, keys[index]), keys[index])
    return [steps[index] for index in sorted(range(len(steps)), key=lambda index: (keys[index], index))]


def _device_bytes(aval: Any) -> int:
    return 0 if _jax.memory_space(aval) else _jax.nbytes(aval)


def _overwritable(eqn: Any, operands: Sequence[int]) -> Sequence[int]:
    """The operands that a result may be written over."""
    name = _jax.primitive_name(eqn)
    if name in WRITES_OVER_ANY:
        return operands
    if name in WRITES_OVER_FIRST:
        return operands[:1]
    carried = _jax.carried_operands(eqn)
    return operands[carried.start : carried.stop]


def _reused(step: _Step, dying: set[int], sizes: Sequence[int]) -> list[int]:
    """The operands that die with the step and that a result of the same size is written over."""
    free = sorted(dying.intersection(step.over))
    reused: list[int] = []
    for made in step.makes:
        over = next((number for number in free if sizes[number] == sizes[made]), None)
        if over is not None:
            free.remove(over)
            reused.append(over)
    return reused


def _first_slice(eqn: Any, body: _jax.Body) -> int:
    """The index of the first of a body's inputs that is a slice of a stacked operand; their number without any."""
    return _jax.carried_operands(eqn).stop if _jax.is_scan(eqn) else len(body.jaxpr.invars)
