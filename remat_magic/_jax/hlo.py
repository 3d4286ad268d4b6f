"""XLA's optimized modules: their computations, how often their loops run, and what devices tell each other.

A module is read as the ``HloModuleProto`` of ``xla/service/hlo.proto``, in protobuf's wire format; few of its fields
are needed.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from remat_magic._jax.collectives import sent_bytes
from remat_magic._jax.protobuf import fields, numbers

__all__ = ["Computation", "Instruction", "Module", "Told", "collectives", "estimated_cycles", "read_module", "told"]

_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')

# Fields of HloModuleProto, HloComputationProto, HloInstructionProto and LiteralProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY = 3, 6
_NAME, _INSTRUCTIONS, _SHAPE, _ID, _ROOT = 1, 2, 4, 5, 6
_RESULT = 3  # the shape of an instruction's result
_OPCODE, _LITERAL, _PARAMETER, _INDEX, _CONFIG = 2, 8, 9, 13, 43
_INSTRUCTION_ID, _OPERANDS, _CALLED, _DIRECTION = 35, 36, 38, 63
# Which devices tell each other: as lists, as the parts of a range, or as axes of a mesh.
_GROUPS, _RANGES, _AXES = 87, 92, 93
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
_AGAIN = (b"async-update", b"async-done")  # name once more the computation that was begun
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
    devices: int | None = None  # of a collective: how many tell each other, where that is known


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation with its instructions by their numbers; ``shape`` is that of the program, as it is written."""

    name: bytes
    shape: bytes
    root: int
    instructions: Mapping[int, Instruction]

    def calling(self, opcode: bytes) -> list[Instruction]:
        """The instructions of an opcode that calls other computations."""
        return [instruction for instruction in self.instructions.values() if instruction.opcode == opcode]


@dataclass(frozen=True, slots=True)
class Module:
    """The computations by their numbers, and which one is the whole program.

    ``calls`` has for each computation where it is called, as the number of the caller and of the instruction there.
    """

    computations: Mapping[int, Computation]
    entry: int
    calls: Mapping[int, list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        """Look for the calls once: a long program has many loops."""
        calls: dict[int, list[tuple[int, int]]] = {}
        for caller, within in self.computations.items():
            for number, instruction in within.instructions.items():
                if instruction.opcode == b"call":
                    calls.setdefault(instruction.called[0], []).append((caller, number))
        object.__setattr__(self, "calls", calls)

    def trips(self, loop: Instruction, within: int) -> int | None:
        """How often a loop runs: as XLA notes it (for CPU and GPU), or as the loop itself says; None if neither does.

        A loop says so where it counts: it goes on while a value that begins as one constant, and to which each run
        adds another, is less than a third.

        Args:
            loop: a ``while``.
            within: the number of the computation that it stands in.
        """
        if noted := _TRIPS.search(loop.config):
            return int(noted[1])
        body, condition = (self.computations[called] for called in loop.called)
        before = _Value(self, self.computations[within], loop.operands[0], self._call_of(within)).seen
        after = _Value(self, body, body.root).seen
        test = _Value(self, condition, condition.root).seen

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

    def _call_of(self, called: int) -> _Value | None:
        """The only call of a computation, where there is one: XLA for CPU puts small loops apart."""
        calls = self.calls.get(called, [])
        if len(calls) != 1:
            return None
        caller, number = calls[0]
        return _Value(self, self.computations[caller], number)


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


class Told(NamedTuple):
    """A collective: its kind ("all-gather"), the bytes that one device has of the result, and those that it sends.

    It sends as much as in ``collectives.Communication``, and None is unknown. Of a sum of which each device goes on
    with its own part alone it sends as much as of a reduce-scatter, which XLA for a CPU makes none of.
    """

    kind: str
    nbytes: int
    sent: int | None


def told(module: Module) -> Counter[Told] | None:
    """What devices tell each other in one run of a module: how often one takes part in each collective.

    None where nothing tells how often a loop runs that has one.
    """

    @functools.cache
    def of(number: int) -> Counter[Told] | None:
        """Of one run of a computation."""
        total, within = Counter[Told](), module.computations[number]
        for place, instruction in within.instructions.items():
            opcode = instruction.opcode
            if opcode.removesuffix(_START) in _COLLECTIVES:
                total[_told(module, within, place)] += 1
                continue
            times = module.trips(instruction, number) if opcode == b"while" else 1
            for called in () if opcode in _AGAIN else instruction.called:
                inside = of(called)
                # Which branch runs is not known, and of some loops not how often.
                if inside is None or (inside and (times is None or opcode == b"conditional")):
                    return None
                for collective, runs in inside.items():
                    total[collective] += (times or 0) * runs
        return total

    return of(module.entry)


def estimated_cycles(module: Module) -> int | None:
    """What the kernels of one run take, in cycles, as XLA for a TPU notes its own estimate at each of them.

    What is copied meanwhile between the memories of a TPU is in none. None where nothing is noted (a kernel's note is
    never zero), where nothing tells how often a loop runs that has kernels, or which branch of a conditional.
    """

    @functools.cache
    def of(number: int) -> int | None:
        """Of one run of a computation."""
        total = 0
        for instruction in module.computations[number].instructions.values():
            if noted := _CYCLES.search(instruction.config):
                total += int(noted[1])  # of a fusion; what it calls runs in it
                continue
            if instruction.opcode not in (b"while", b"call", b"conditional"):
                continue
            times = module.trips(instruction, number) if instruction.opcode == b"while" else 1
            for called in instruction.called:
                inside = of(called)
                if inside is None or (inside and (times is None or instruction.opcode == b"conditional")):
                    return None
                total += (times or 0) * inside
        return total

    return of(module.entry) or None


def collectives(module: Module) -> dict[str, tuple[int, int]] | None:
    """What devices tell each other in one run of a module.

    Returns:
        For each kind of collective operation, as ``"all-gather"``, how often one device takes part in one, and how many
        bytes it has of the results, all runs together; None where nothing tells how often a loop runs that has one.
    """
    counts = told(module)
    if counts is None:
        return None
    total = dict[str, tuple[int, int]]()
    for collective, runs in counts.items():
        add(total, {collective.kind: (1, collective.nbytes)}, runs)
    return total


def _told(module: Module, within: Computation, number: int) -> Told:
    instruction = within.instructions[number]
    # What begins a gather or permutation has the operand beside the result.
    both = instruction.opcode in (b"all-gather-start", b"collective-permute-start")
    kind, size = instruction.opcode.removesuffix(_START).decode(), _size(instruction.result, 1 if both else None)
    devices = instruction.devices
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        devices = devices or 1  # of which it does not matter
    if devices is None:
        return Told(kind, size, None)
    sent = sent_bytes(kind, size, devices)
    if kind == "all-reduce" and _is_cut(module, within, number):
        sent = sent_bytes("reduce-scatter", size // devices, devices)
    return Told(kind, size, sent)


_PASSED_ON = (b"copy", b"bitcast", b"get-tuple-element", b"all-reduce-done")


def _is_cut(module: Module, within: Computation, number: int) -> bool:
    """Whether all that is done with a value is to cut a part out whose place is computed, as each device its own."""
    if number == within.root:
        return False
    users = [(place, user) for place, user in within.instructions.items() if number in user.operands]
    for place, user in users:
        if user.opcode in _PASSED_ON:
            cut = _is_cut(module, within, place)
        elif user.opcode in (b"fusion", b"call"):
            called = module.computations[user.called[0]]
            passed = [index for index, operand in enumerate(user.operands) if operand == number]
            cut = all(
                _is_cut(module, called, inner)
                for inner, parameter in called.instructions.items()
                if parameter.opcode == b"parameter" and parameter.index in passed
            )
        else:
            cut = user.opcode == b"dynamic-slice" and user.operands[0] == number
        if not cut:
            return False
    return bool(users)


def add(total: dict[str, tuple[int, int]], more: Mapping[str, tuple[int, int]], times: int = 1) -> None:
    """Add to some collectives what comes so often."""
    for kind, (runs, size) in more.items():
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + times * runs, before[1] + times * size


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
    computation = Computation(parts[_NAME], parts[_SHAPE], parts.get(_ROOT, 0), instructions)
    return parts.get(_ID, 0), computation


def _instruction(proto: bytes) -> tuple[int, Instruction]:
    operands, called = list[int](), list[int]()
    parts = dict[int, Any]()
    for name, value, _ in fields(proto):
        if name in (_OPERANDS, _CALLED):
            (operands if name == _OPERANDS else called).extend(numbers(value))
        else:
            parts[name] = value
    opcode = parts[_OPCODE]
    collective = opcode.removesuffix(_START) in _COLLECTIVES
    return parts.get(_INSTRUCTION_ID, 0), Instruction(
        opcode,
        tuple(operands),
        tuple(called),
        parts.get(_PARAMETER if opcode == b"parameter" else _INDEX, 0),
        _integer(parts.get(_LITERAL, b"")) if opcode == b"constant" else None,
        parts.get(_DIRECTION, b""),
        parts.get(_CONFIG, b""),
        parts.get(_RESULT, b"") if collective else b"",
        _devices(parts) if collective else None,
    )


def _devices(parts: Mapping[int, Any]) -> int | None:
    """How many devices of a group tell each other; None where it does not say."""
    if groups := parts.get(_GROUPS):
        return max(_count(group) for name, group, _ in fields(groups) if name == 1)
    if ranges := parts.get(_RANGES):
        return next((value for name, value, _ in fields(ranges) if name == 2), None)
    if not (axes := parts.get(_AXES)):
        return None
    sizes, devices = list[int](), 1
    for name, value, _ in fields(axes):
        if name == 1:  # the mesh, and its axes
            sizes = [_number(axis, 2) for inner, axis, _ in fields(value) if inner == 1]
        elif name == 2:  # an axis, or a part of one
            part = next((inner for key, inner, _ in fields(value) if key == 2), None)
            devices *= sizes[_number(value, 1)] if part is None else _number(part, 2)
    return devices


def _count(group: bytes) -> int:
    return sum(len(numbers(value)) for name, value, _ in fields(group) if name == 1)


def _number(proto: bytes, name: int) -> int:
    """A field that is a number; 0 is not written."""
    return next((value for key, value, _ in fields(proto) if key == name), 0)


def _integer(literal: bytes) -> int | None:
    """The value of a single integer."""
    for name, value, _ in fields(literal):
        if name in (*_SIGNED, *_UNSIGNED) and len(integers := numbers(value)) == 1:
            (integer,) = integers
            return integer - 2**64 if name in _SIGNED and integer >= 2**63 else integer
    return None
