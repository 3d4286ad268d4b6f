"""What XLA counts of a compiled program, with the bodies of loops as often as they run.

XLA's ``HloCostAnalysis`` counts the body of a loop once. So it is asked of each body alone, too: as the entry of a
module that is otherwise the same. A module is read and written as the ``HloModuleProto`` of ``xla/service/hlo.proto``
in protobuf's wire format; few of its fields are needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from remat_magic._jax.private import courtesy

__all__ = ["xla_flops"]

_cost_analysis = courtesy("jaxlib._jax.hlo_module_cost_analysis", "what XLA counts of a program is not told")
_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')

# Fields of HloModuleProto, HloComputationProto and HloInstructionProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY_NAME, _MODULE_SHAPE, _MODULE_ENTRY = 3, 2, 4, 6
_MODULE_KEPT = (1, _MODULE_COMPUTATIONS, 5, 17)  # and its table of stack frames; the rest speaks of the entry
_NAME, _INSTRUCTIONS, _SHAPE, _ID = 1, 2, 4, 5
_OPCODE, _CALLED, _CONFIG = 2, 38, 43
_TEXT = 2  # the wire type of everything that has a length


@dataclass(frozen=True, slots=True)
class _Computation:
    """A computation, the loops in it (body and trip count), and the other computations that it calls."""

    name: bytes
    shape: bytes
    loops: tuple[tuple[int, int | None], ...]
    calls: tuple[int, ...]
    branches: tuple[int, ...]


def xla_flops(modules: Iterable[Any]) -> int | None:
    """Floating point operations, as XLA counts them, with the bodies of loops as often as they run.

    Args:
        modules: optimized ones, as ``Compiled.runtime_executable().hlo_modules()`` has them, for whatever device.

    Returns:
        Those of one run; None where XLA does not say, or does not know how often a loop runs.
    """
    total = 0
    for module in modules:
        try:
            flops = _flops(module)
        except Exception:  # noqa: BLE001 - another XLA writes its modules otherwise, or raises what it likes: unknown
            return None
        if flops is None:
            return None
        total += flops
    return total


def _flops(module: Any) -> int | None:
    if _cost_analysis is None:
        return None
    proto = module.as_serialized_hlo_module_proto()
    fields = [*_fields(proto)]
    kept = b"".join(raw for number, _, raw in fields if number in _MODULE_KEPT)
    computations = dict(_computation(value) for number, value, _ in fields if number == _MODULE_COMPUTATIONS)
    entry = next(value for number, value, _ in fields if number == _MODULE_ENTRY)

    @functools.cache
    def once(number: int) -> int | None:
        """Of a computation, with the bodies of its loops once."""
        alone, computation = module, computations[number]
        if number != entry:
            head = _text(_MODULE_ENTRY_NAME, computation.name) + _text(_MODULE_SHAPE, computation.shape)
            alone = type(module).from_serialized_hlo_module_proto(kept + head + _number(_MODULE_ENTRY, number))
        flops = _cost_analysis(_client(), alone).get("flops")
        return None if flops is None or flops < 0 else round(flops)  # XLA writes -1 for unknown

    @functools.cache
    def has_loops(number: int) -> bool:
        computation = computations[number]
        return bool(computation.loops) or any(map(has_loops, (*computation.calls, *computation.branches)))

    @functools.cache
    def whole(number: int) -> int | None:
        """Of a computation, with the bodies of its loops as often as they run."""
        total, computation = once(number), computations[number]
        if any(map(has_loops, computation.branches)):  # XLA counts the dearest branch, with the bodies in it once
            return None
        parts = (*computation.loops, *((called, 1) for called in computation.calls))
        for part, times in (each for each in parts if each[1] != 1 or has_loops(each[0])):
            of_part = whole(part)
            if total is None or of_part is None or times is None:
                return None
            total += times * of_part - (once(part) or 0)
        return total

    return whole(entry)


def _client() -> Any:
    """A client of this process; counting asks nothing of the device."""
    try:
        return jax.devices("cpu")[0].client
    except RuntimeError:
        return jax.devices()[0].client


def _computation(proto: bytes) -> tuple[int, _Computation]:
    name = shape = b""
    number, loops, calls, branches = 0, list[tuple[int, int | None]](), list[int](), list[int]()
    for field, value, _ in _fields(proto):
        if field == _NAME:
            name = value
        elif field == _SHAPE:
            shape = value
        elif field == _ID:
            number = value
        elif field == _INSTRUCTIONS:
            parts = [(part, content) for part, content, _ in _fields(value) if part in (_OPCODE, _CALLED, _CONFIG)]
            opcode = next(content for part, content in parts if part == _OPCODE)
            called = [each for part, content in parts if part == _CALLED for each in _numbers(content)]
            if opcode == b"while":  # its body, then its condition
                config = next((content for part, content in parts if part == _CONFIG), b"")
                times = _TRIPS.search(config)
                loops.append((called[0], int(times[1]) if times else None))
            elif opcode == b"call":
                calls += called
            elif opcode == b"conditional":
                branches += called
    return number, _Computation(name, shape, tuple(loops), tuple(calls), tuple(branches))


# ----------------------------------------------------------------------------------------------- protobuf's wire format


def _fields(proto: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: number, value (an int, or bytes), and all of its bytes."""
    at = 0
    while at < len(proto):
        start = at
        key, at = _varint(proto, at)
        kind, value = key & 7, None
        if kind == 0:
            value, at = _varint(proto, at)
        elif kind == _TEXT:
            size, at = _varint(proto, at)
            value, at = proto[at : at + size], at + size
        else:  # a fixed number of 8 or 4 bytes
            at += 8 if kind == 1 else 4
        yield key >> 3, value, proto[start:at]


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = proto[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _numbers(value: int | bytes) -> list[int]:
    """A repeated number, packed or not."""
    if isinstance(value, int):
        return [value]
    numbers, at = list[int](), 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(number)
    return numbers


def _written(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _written(field << 3) + _written(value)


def _text(field: int, value: bytes) -> bytes:
    return _written(field << 3 | _TEXT) + _written(len(value)) + value
