"""What devices tell each other in XLA's optimized modules, whoever asked for it: the program, or XLA by itself."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from remat_magic._jax.collectives import sent_bytes
from remat_magic._jax.hlo import Computation, Module
from remat_magic._jax.hlo_trips import trips
from remat_magic._jax.protobuf import fields, numbers

__all__ = ["Told", "add", "collectives", "told"]

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

_AGAIN = (b"async-update", b"async-done")  # name once more the computation that was begun
_PASSED_ON = (b"copy", b"bitcast", b"get-tuple-element", b"all-reduce-done")


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
            if instruction.collective:
                total[_told(module, within, place)] += 1
                continue
            times = trips(module, instruction, number) if opcode == b"while" else 1
            for called in () if opcode in _AGAIN else instruction.called:
                inside = of(called)
                # Which branch runs is not known, and of some loops not how often.
                if inside is None or (inside and (times is None or opcode == b"conditional")):
                    return None
                for collective, runs in inside.items():
                    total[collective] += (times or 0) * runs
        return total

    return of(module.entry)


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


def add(total: dict[str, tuple[int, int]], more: Mapping[str, tuple[int, int]], times: int = 1) -> None:
    """Add to some collectives what comes so often."""
    for kind, (runs, size) in more.items():
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + times * runs, before[1] + times * size


def _told(module: Module, within: Computation, number: int) -> Told:
    instruction = within.instructions[number]
    # What begins a gather or permutation has the operand beside the result.
    both = instruction.opcode in (b"all-gather-start", b"collective-permute-start")
    kind, size = instruction.collective, _size(instruction.result, 1 if both else None)
    devices = instruction.devices
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        devices = devices or 1  # of which it does not matter
    if devices is None:
        return Told(kind, size, None)
    sent = sent_bytes(kind, size, devices)
    if kind == "all-reduce" and _is_cut(module, within, number):
        sent = sent_bytes("reduce-scatter", size // devices, devices)
    return Told(kind, size, sent)


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
