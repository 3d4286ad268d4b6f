"""XLA's optimized modules: their computations, how often their loops run, and what devices tell each other.

A module is read as the ``HloModuleProto`` of ``xla/service/hlo.proto``, in protobuf's wire format; few of its fields
are needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from remat_magic._jax.protobuf import fields, numbers

__all__ = ["Computation", "Instruction", "Module", "collectives", "read_module"]

_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')

# Fields of HloModuleProto, HloComputationProto, HloInstructionProto and LiteralProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY = 3, 6
_NAME, _INSTRUCTIONS, _SHAPE, _ID, _ROOT = 1, 2, 4, 5, 6
_RESULT = 3  # the shape of an instruction's result
_OPCODE, _LITERAL, _PARAMETER, _INDEX, _CONFIG = 2, 8, 9, 13, 43
_INSTRUCTION_ID, _OPERANDS, _CALLED, _DIRECTION = 35, 36, 38, 63
_SIGNED, _UNSIGNED = (4, 5), (6, 7)  # integers of a literal, of 32 and 64 bits

# Fields of ShapeProto, and the bits of its element types, of ``xla/xla_data.proto``.
_ELEMENT, _DIMENSIONS, _PARTS = 2, 3, 4
_BITS = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 8),  # pred, integers, and floats of 8 bits
    **dict.fromkeys((3, 7, 10, 16), 16),
    **dict.fromkeys((4, 8, 11), 32),
    **dict.fromkeys((5, 9, 12, 15), 64),
    **dict.fromkeys((21, 22, 32), 4),
    18: 128,
    17: 0,  # a token
}

_START = b"-start"  # of what runs while others do
_COLLECTIVES = (
    b"all-gather",
    b"all-reduce",
    b"reduce-scatter",
    b"all-to-all",
    b"ragged-all-to-all",
    b"collective-permute",
    b"collective-broadcast",
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction; ``value`` is a constant integer's, ``index`` the part of a tuple or a parameter's number."""

    opcode: bytes
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    index: int = 0
    value: int | None = None
    direction: bytes = b""
    config: bytes = b""
    result: bytes = b""  # of a collective: its shape, as it is written


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation with its instructions by their numbers; ``shape`` is that of the program, as it is written."""

    name: bytes
    shape: bytes
    root: int
    instructions: Mapping[int, Instruction]

    def calling(self, opcode: bytes) -> list[Instruction]:
        """The instructions of an opcode that calls other computations."""
        return [each for each in self.instructions.values() if each.opcode == opcode]


@dataclass(frozen=True, slots=True)
class Module:
    """The computations by their numbers, and which one is the whole program."""

    computations: Mapping[int, Computation]
    entry: int

    def trips(self, loop: Instruction, within: Computation) -> int | None:
        """How often a loop runs: as XLA notes it (for CPU and GPU), or as the loop itself says; None if neither does.

        A loop says so where it counts: it goes on while a value that begins as one constant, and to which each run
        adds another, is less than a third.

        Args:
            loop: a ``while``.
            within: the computation that it stands in.
        """
        if noted := _TRIPS.search(loop.config):
            return int(noted[1])
        body, condition = (self.computations[each] for each in loop.called)
        before = _Value(self, within, loop.operands[0], self._given(within)).seen
        after = _Value(self, body, body.root).seen
        test = _Value(self, condition, condition.root).seen

        def constant(value: _Value) -> int | None:
            """Of a constant, or of what the loop carries and leaves as it is."""
            carried = value.carried
            if carried is None:
                return value.constant
            return before.part(carried).constant if after.part(carried).carried == carried else None

        if test.opcode != b"compare" or test.instruction.direction not in (b"LT", b"GT"):
            return None
        counter, limit = test.operands if test.instruction.direction == b"LT" else reversed(test.operands)
        number = counter.carried
        if number is None:
            return None
        added = after.part(number)
        steps = [each for each in added.operands if each.carried != number] if added.opcode == b"add" else []
        if len(steps) != 1 or len(added.operands) != 2:
            return None
        start, step, end = before.part(number).constant, constant(steps[0]), constant(limit)
        if start is None or step is None or end is None or step <= 0:
            return None
        return max(0, -((start - end) // step))

    def _given(self, called: Computation) -> tuple[_Value, ...] | None:
        """The operands of the only call of a computation, where there is one: XLA for CPU puts small loops apart."""
        calls = [
            tuple(_Value(self, within, operand).seen for operand in call.operands)
            for within in self.computations.values()
            for call in within.calling(b"call")
            if self.computations[call.called[0]] is called
        ]
        return calls[0] if len(calls) == 1 else None


@dataclass(frozen=True, slots=True)
class _Value:
    """What an instruction gives. The parameter of a loop's own computations is what the loop carries."""

    module: Module
    within: Computation
    number: int
    given: tuple[_Value, ...] | None = None  # the operands of the fusion or call that it stands in

    @property
    def instruction(self) -> Instruction:
        return self.within.instructions[self.number]

    @property
    def opcode(self) -> bytes:
        return self.instruction.opcode

    @property
    def constant(self) -> int | None:
        return self.instruction.value

    @property
    def carried(self) -> int | None:
        """Which part it is of what the loop carries, unchanged since this run began; None for all else."""
        if self.opcode != b"get-tuple-element" or self.operands[0].opcode != b"parameter":
            return None
        return self.instruction.index

    @property
    def operands(self) -> list[_Value]:
        return [replace(self, number=each).seen for each in self.instruction.operands]

    def part(self, number: int) -> _Value:
        """A part of a tuple that is put together here; of another tuple the tuple itself, which is no constant."""
        return self.operands[number] if self.opcode == b"tuple" else self

    @property
    def seen(self) -> _Value:
        """The same value where it is made: behind copies, and inside of fusions."""
        instruction = self.instruction
        if instruction.opcode in (b"copy", b"bitcast"):
            return replace(self, number=instruction.operands[0]).seen
        if instruction.opcode == b"parameter" and self.given is not None:
            return self.given[instruction.index]
        if instruction.opcode in (b"fusion", b"call"):
            called = self.module.computations[instruction.called[0]]
            return _Value(self.module, called, called.root, tuple(self.operands)).seen
        if instruction.opcode == b"get-tuple-element" and (whole := self.operands[0]).opcode == b"tuple":
            return whole.part(instruction.index)
        return self


def collectives(module: Module) -> dict[str, tuple[int, int]] | None:
    """What devices tell each other in one run of a module.

    Returns:
        For each kind of collective operation, as ``"all-gather"``, how often one device takes part in one, and how many
        bytes it has of the results, all runs together; None where nothing tells how often a loop runs that has one.
    """
    total = dict[str, tuple[int, int]]()
    if not _collect(module, module.computations[module.entry], 1, total):
        return None
    return total


def _collect(module: Module, within: Computation, times: int | None, total: dict[str, tuple[int, int]]) -> bool:
    """Add those of a computation that runs so often; False where that is not known of one that has any."""
    for instruction in within.instructions.values():
        kind = instruction.opcode.removesuffix(_START)
        if kind in _COLLECTIVES:
            if times is None:
                return False
            # What begins a gather or permutation has the operand beside the result.
            both = instruction.opcode in (b"all-gather-start", b"collective-permute-start")
            runs, size = total.get(kind.decode(), (0, 0))
            total[kind.decode()] = runs + times, size + times * _size(instruction.result, 1 if both else None)
            continue
        known = times
        if instruction.opcode == b"while":
            trips = module.trips(instruction, within)
            known = None if trips is None or times is None else times * trips
        elif instruction.opcode == b"conditional":
            known = None  # which branch runs is not known
        for called in instruction.called:
            if not _collect(module, module.computations[called], known, total):
                return False
    return True


def _size(shape: bytes, part: int | None = None) -> int:
    """The bytes of a shape, or of one part of a tuple."""
    parts, dimensions, bits = list[bytes](), list[int](), 0
    for name, value, _ in fields(shape):
        if name == _ELEMENT:
            bits = _BITS.get(value, 0)
        elif name == _DIMENSIONS:
            dimensions += numbers(value)
        elif name == _PARTS:
            parts.append(value)
    if parts:
        return sum(map(_size, parts if part is None else parts[part : part + 1]))
    return -(-math.prod(dimensions) * bits // 8)


def read_module(proto: bytes) -> Module:
    """Read a serialized ``HloModuleProto``.

    Raises:
        Exception: whatever it may be that another XLA writes otherwise.
    """
    computations, entry = {}, 0
    for name, value, _ in fields(proto):
        if name == _MODULE_COMPUTATIONS:
            number, computation = _computation(value)
            computations[number] = computation
        elif name == _MODULE_ENTRY:
            entry = value
    return Module(computations, entry)


def _computation(proto: bytes) -> tuple[int, Computation]:
    parts = {name: value for name, value, _ in fields(proto)}
    instructions = dict(_instruction(value) for name, value, _ in fields(proto) if name == _INSTRUCTIONS)
    computation = Computation(parts[_NAME], parts[_SHAPE], parts[_ROOT], instructions)
    return parts[_ID], computation


def _instruction(proto: bytes) -> tuple[int, Instruction]:
    operands, called = list[int](), list[int]()
    parts = dict[int, Any]()
    for name, value, _ in fields(proto):
        if name in (_OPERANDS, _CALLED):
            (operands if name == _OPERANDS else called).extend(numbers(value))
        else:
            parts[name] = value
    opcode = parts[_OPCODE]
    return parts[_INSTRUCTION_ID], Instruction(
        opcode,
        tuple(operands),
        tuple(called),
        parts.get(_PARAMETER if opcode == b"parameter" else _INDEX, 0),
        _integer(parts.get(_LITERAL, b"")) if opcode == b"constant" else None,
        parts.get(_DIRECTION, b""),
        parts.get(_CONFIG, b"") if opcode == b"while" else b"",
        parts.get(_RESULT, b"") if opcode.removesuffix(_START) in _COLLECTIVES else b"",
    )


def _integer(literal: bytes) -> int | None:
    """The value of a single integer."""
    for name, value, _ in fields(literal):
        if name in (*_SIGNED, *_UNSIGNED) and len(found := numbers(value)) == 1:
            return found[0] - 2**64 if name in _SIGNED and found[0] >= 2**63 else found[0]
    return None
