"""How often the loops of XLA's optimized modules run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from remat_magic._jax.hlo import Computation, Instruction, Module

__all__ = ["trips"]

_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')


def trips(module: Module, loop: Instruction, within: int) -> int | None:
    """How often a loop runs: as XLA notes it (for CPU and GPU), or as the loop itself says; None if neither does.

    A loop says so where it counts: it goes on while a value that begins as one constant, and to which each run
    adds another, is less than a third.

    Args:
        module: what the loop is in.
        loop: a ``while``.
        within: the number of the computation that it stands in.
    """
    if noted := _TRIPS.search(loop.config):
        return int(noted[1])
    body, condition = (module.computations[called] for called in loop.called)
    before = _Value(module, module.computations[within], loop.operands[0], _call_of(module, within)).seen
    after = _Value(module, body, body.root).seen
    test = _Value(module, condition, condition.root).seen

    def constant(value: _Value) -> int | None:
        """Of a constant, or of what the loop carries and leaves as it is."""
        carried = value.carried
        if carried is None:
            return value.instruction.value
        return before.part(carried).instruction.value if after.part(carried).carried == carried else None

    if test.opcode != b"compare" or test.instruction.direction not in (b"LT", b"GT"):
        return None
    less, more = (0, 1) if test.instruction.direction == b"LT" else (1, 0)
    number = test.operand(less).carried
    if number is None:
        return None
    added = after.part(number)
    if added.opcode != b"add":
        return None
    both = [added.operand(0), added.operand(1)]
    steps = [operand for operand in both if operand.carried != number]
    if len(steps) != 1:
        return None
    start, step = before.part(number).instruction.value, constant(steps[0])
    end = constant(test.operand(more))
    if start is None or step is None or end is None or step <= 0:
        return None
    return max(0, -((start - end) // step))


def _call_of(module: Module, called: int) -> _Value | None:
    """The only call of a computation, where there is one: XLA for CPU puts small loops apart."""
    calls = module.calls.get(called, [])
    if len(calls) != 1:
        return None
    caller, number = calls[0]
    return _Value(module, module.computations[caller], number)


@dataclass(frozen=True, slots=True)
class _Value:
    """What an instruction gives. The parameter of a loop's own computations is what the loop carries."""

    module: Module
    within: Computation
    number: int
    call: _Value | None = None  # the fusion or call that it stands in

    @property
    def instruction(self) -> Instruction:
        return self.within.instructions[self.number]

    @property
    def opcode(self) -> bytes:
        return self.instruction.opcode

    @property
    def carried(self) -> int | None:
        """Which part it is of what the loop carries, unchanged since this run began; None for all else."""
        if self.opcode != b"get-tuple-element" or self.operand(0).opcode != b"parameter":
            return None
        return self.instruction.index

    def operand(self, number: int) -> _Value:
        """One of what the instruction reads."""
        return replace(self, number=self.instruction.operands[number]).seen

    def part(self, number: int) -> _Value:
        """A part of a tuple that is put together here; of another tuple the tuple itself, which is no constant."""
        return self.operand(number) if self.opcode == b"tuple" else self

    @property
    def seen(self) -> _Value:
        """The same value where it is made: behind copies, and inside of fusions. Follows one way, not every operand."""
        opcode, instruction = self.opcode, self.instruction
        if opcode in (b"copy", b"bitcast"):
            return self.operand(0)
        if opcode == b"parameter" and self.call is not None:
            return self.call.operand(instruction.index)
        if opcode in (b"fusion", b"call"):
            called = self.module.computations[instruction.called[0]]
            return _Value(self.module, called, called.root, self).seen
        if opcode == b"get-tuple-element" and (whole := self.operand(0)).opcode == b"tuple":
            return whole.part(instruction.index)
        return self
