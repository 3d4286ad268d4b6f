"""XLA's optimized modules: their computations and instructions.

A module is read as the ``HloModuleProto`` of ``xla/service/hlo.proto``, in protobuf's wire format; few of its fields
are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remat_magic._jax.protobuf import fields, numbers

__all__ = ["Computation", "Instruction", "Module", "read_module"]

# Fields of HloModuleProto, HloComputationProto, HloInstructionProto and LiteralProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY = 3, 6
_NAME, _INSTRUCTIONS, _SHAPE, _ID, _ROOT = 1, 2, 4, 5, 6
_RESULT = 3  # the shape of an instruction's result
_OPCODE, _LITERAL, _PARAMETER, _INDEX, _CONFIG = 2, 8, 9, 13, 43
_INSTRUCTION_ID, _OPERANDS, _CALLED, _DIRECTION = 35, 36, 38, 63
# Which devices tell each other: as lists, as the parts of a range, or as axes of a mesh.
_GROUPS, _RANGES, _AXES = 87, 92, 93
_SIGNED, _UNSIGNED = (4, 5), (6, 7)  # integers of a literal, of 32 and 64 bits

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
    devices: int | None = None  # of a collective: how many tell each other, where that is known

    @property
    def collective(self) -> str:
        """The kind of collective that it is or begins, as ``"all-gather"``; empty for all else."""
        return _collective(self.opcode)


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


def _collective(opcode: bytes) -> str:
    kind = opcode.removesuffix(_START)
    return kind.decode() if kind in _COLLECTIVES else ""


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
    collective = _collective(opcode)
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
