"""XLA's optimized modules: computations and instructions, trip counts, lines of Python, and what XLA counts of them.

This alone reads compiled programs: as the ``HloModuleProto`` of ``xla/service/hlo.proto``, in protobuf's wire format
(https://protobuf.dev/programming-guides/encoding/). Few of its fields are needed.

``HloCostAnalysis``, which counts a program, counts the body of a loop once. So it is asked of each body alone, too: as
the entry of a module that is otherwise the same. Of a slice that is copied while others run, as on a TPU, it counts all
that the slice is taken from, which in a loop over a stack is many times what is read: the bytes are then unknown.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from remat_magic._jax.formulas import sent_bytes
from remat_magic._jax.private import courtesy

# Fields of HloModuleProto, HloComputationProto, HloInstructionProto, OpMetadata, and StackFrameIndexProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY, _MODULE_FRAMES = 3, 6, 17
_NAME, _INSTRUCTIONS, _SHAPE, _ID, _ROOT = 1, 2, 4, 5, 6
_RESULT = 3  # the shape of an instruction's result
_OPCODE, _METADATA, _PARAMETER, _INDEX, _CONFIG = 2, 7, 9, 13, 43
_INSTRUCTION_ID, _OPERANDS, _CALLED = 35, 36, 38
_OP_NAME, _FRAME = 2, 15
_FILES, _FUNCTIONS, _LOCATIONS, _FRAMES = 1, 2, 3, 4
# Which devices tell each other: as lists, as the parts of a range, or as axes of a mesh.
_GROUPS, _RANGES, _AXES = 87, 92, 93
# Fields of ShapeProto and LayoutProto, and the bits of its element types, of ``xla/xla_data.proto``.
_ELEMENT, _DIMENSIONS, _PARTS, _LAYOUT, _SPACE = 2, 3, 4, 5, 8
_BITS = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 8),  # pred, integers, and floats of 8 bits
    **dict.fromkeys((3, 7, 10, 16), 16),
    **dict.fromkeys((4, 8, 11), 32),
    **dict.fromkeys((5, 9, 12, 15), 64),
    **dict.fromkeys((21, 22, 32), 4),
    18: 128,
    17: 0,  # a token
}
_HOST = 5  # XLA's number of the host's memory, on each platform

_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction; ``index`` is the part of a tuple that it gets, or the number of a parameter."""

    opcode: str
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    index: int = 0
    config: bytes = b""
    result: bytes = b""  # its shape, as it is written
    devices: int | None = None  # of a collective: how many tell each other, where that is known
    name: str = ""
    op_name: str = ""  # JAX's path of the operation
    frame: int = 0  # the number of the innermost line of Python

    @property
    def collective(self) -> str:
        """The kind of collective that it is or begins, as ``"all-gather"``; empty for all else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in _COLLECTIVES else ""

    @property
    def on_host(self) -> bool:
        """Whether its result, or a part of it, is in the host's memory."""
        return _HOST in _spaces(self.result)


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation with its instructions by their numbers; ``shape`` is that of the program, as it is written."""

    name: bytes
    shape: bytes
    root: int
    instructions: Mapping[int, Instruction]

    def calling(self, opcode: str) -> list[Instruction]:
        """The instructions of an opcode that calls other computations."""
        return [instruction for instruction in self.instructions.values() if instruction.opcode == opcode]


class Frame(NamedTuple):
    """A line of Python with its columns in bytes, and the number of the frame that called it; 0 for none."""

    file: str
    function: str
    line: int
    column: int
    end_line: int
    end_column: int
    caller: int


@dataclass(frozen=True, slots=True)
class Module:
    """The computations by their numbers, and which one is the whole program; lines of Python by their numbers.

    ``proto`` is what was read.
    """

    computations: Mapping[int, Computation]
    entry: int
    frames: Mapping[int, Frame] = field(default_factory=dict[int, Frame])
    proto: bytes = b""

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Those of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions.values()


# -------------------------------------------------------------------------------------------------------------- reading


def modules_of(optimized: Iterable[Any]) -> tuple[Module, ...] | None:
    """Read optimized modules, as ``Compiled.runtime_executable().hlo_modules()`` has them, for whatever device.

    None where another XLA writes them otherwise.
    """
    try:
        return tuple(read_module(module.as_serialized_hlo_module_proto()) for module in optimized)
    except Exception:  # noqa: BLE001 - whatever it may be that another XLA writes otherwise, or raises
        return None


def read_dump(proto: bytes) -> Module:
    """Read an ``HloProto``, as XLA dumps it; errors are those of ``read_module``."""
    return read_module(next((value for name, value, _ in _fields(proto) if name == 1), b""))


def read_module(proto: bytes) -> Module:
    """Read a serialized ``HloModuleProto``; what another XLA writes otherwise may raise anything."""
    computations, frames, entry = dict[int, Computation](), dict[int, Frame](), 0
    for name, value, _ in _fields(proto):
        if name == _MODULE_COMPUTATIONS:
            place, computation = _computation(value)
            computations[place] = computation
        elif name == _MODULE_ENTRY:
            entry = value
        elif name == _MODULE_FRAMES:
            frames = _frames(value)
    return Module(computations, entry, frames, proto)


def _computation(proto: bytes) -> tuple[int, Computation]:
    parts = {name: value for name, value, _ in _fields(proto)}
    instructions = dict(_instruction(value) for name, value, _ in _fields(proto) if name == _INSTRUCTIONS)
    computation = Computation(parts[_NAME], parts[_SHAPE], parts.get(_ROOT, 0), instructions)
    return parts.get(_ID, 0), computation


def _instruction(proto: bytes) -> tuple[int, Instruction]:
    operands, called = list[int](), list[int]()
    parts = dict[int, Any]()
    for name, value, _ in _fields(proto):
        if name in (_OPERANDS, _CALLED):
            (operands if name == _OPERANDS else called).extend(_numbers(value))
        else:
            parts[name] = value
    metadata = {name: value for name, value, _ in _fields(parts.get(_METADATA, b""))}
    opcode = parts[_OPCODE].decode()
    instruction = Instruction(
        opcode,
        tuple(operands),
        tuple(called),
        parts.get(_PARAMETER if opcode == "parameter" else _INDEX, 0),
        parts.get(_CONFIG, b""),
        parts.get(_RESULT, b""),
        name=parts.get(_NAME, b"").decode(),
        op_name=metadata.get(_OP_NAME, b"").decode("utf-8", "replace"),
        frame=metadata.get(_FRAME, 0),
    )
    if instruction.collective:
        instruction = replace(instruction, devices=_devices(parts))
    return parts.get(_INSTRUCTION_ID, 0), instruction


def _frames(proto: bytes) -> dict[int, Frame]:
    """Its tables are numbered from 1."""
    rows: dict[int, list[Any]] = {_FILES: [b""], _FUNCTIONS: [b""], _LOCATIONS: [b""], _FRAMES: [b""]}
    for name, value, _ in _fields(proto):
        rows[name].append(value)
    frames = dict[int, Frame]()
    for place, frame in enumerate(rows[_FRAMES]):
        location = _number(frame, 1)
        if 0 < location < len(rows[_LOCATIONS]):
            at = {name: value for name, value, _ in _fields(rows[_LOCATIONS][location])}
            file, function = (
                rows[table][at.get(table, 0)].decode("utf-8", "replace") for table in (_FILES, _FUNCTIONS)
            )
            line = at.get(3, 0)
            end = at.get(5, 0) or line
            frames[place] = Frame(file, function, line, at.get(4, 0), end, at.get(6, 0), _number(frame, 2))
    return frames


def _devices(parts: Mapping[int, Any]) -> int | None:
    """How many devices of a group tell each other; None where it does not say."""
    if groups := parts.get(_GROUPS):
        return max(_count(group) for name, group, _ in _fields(groups) if name == 1)
    if ranges := parts.get(_RANGES):
        return next((value for name, value, _ in _fields(ranges) if name == 2), None)
    if not (axes := parts.get(_AXES)):
        return None
    sizes, devices = list[int](), 1
    for name, value, _ in _fields(axes):
        if name == 1:  # the mesh, and its axes
            sizes = [_number(axis, 2) for inner, axis, _ in _fields(value) if inner == 1]
        elif name == 2:  # an axis, or a part of one
            part = next((inner for key, inner, _ in _fields(value) if key == 2), None)
            devices *= sizes[_number(value, 1)] if part is None else _number(part, 2)
    return devices


def _count(group: bytes) -> int:
    return sum(len(_numbers(value)) for name, value, _ in _fields(group) if name == 1)


def _number(proto: bytes, name: int) -> int:
    """A field that is a number; 0 is not written."""
    return next((value for key, value, _ in _fields(proto) if key == name), 0)


def _array(shape: bytes) -> tuple[int, int, list[bytes]]:
    """How many elements a shape has, of how many bits; of a tuple its parts."""
    parts, dimensions, bits = list[bytes](), list[int](), 0
    for name, value, _ in _fields(shape):
        if name == _ELEMENT:
            bits = _BITS.get(value, 0)
        elif name == _DIMENSIONS:
            dimensions += _numbers(value)
        elif name == _PARTS:
            parts.append(value)
    return math.prod(dimensions), bits, parts


def _nbytes(shape: bytes, part: int | None = None) -> int:
    """The bytes of a shape, or of one part of a tuple."""
    count, bits, parts = _array(shape)
    if parts:
        return sum(map(_nbytes, parts if part is None else parts[part : part + 1]))
    return -(-count * bits // 8)


def _spaces(shape: bytes) -> set[int]:
    """The numbers of the memories that a shape is in."""
    spaces = set[int]()
    for name, value, _ in _fields(shape):
        if name == _PARTS:
            spaces |= _spaces(value)
        elif name == _LAYOUT:
            spaces.add(_number(value, _SPACE))
    return spaces


# ---------------------------------------------------------------------------------------------------------- wire format

_TEXT = 2  # the wire type of everything that has a length


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
    several, at = list[int](), 0
    while at < len(value):
        one, at = _varint(value, at)
        several.append(one)
    return several


def _written(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _number_field(key: int, value: int) -> bytes:
    """A field that is a number, as it is written."""
    return _written(key << 3) + _written(value)


def _text_field(key: int, value: bytes) -> bytes:
    """A field that is a text or another message, as it is written."""
    return _written(key << 3 | _TEXT) + _written(len(value)) + value


_TRIPS = re.compile(rb'"known_trip_count":\{"n":"(\d+)"')


def trips(loop: Instruction) -> int | None:
    """How often a ``while`` runs, as XLA for CPUs and GPUs notes it where it knows; None where it does not."""
    noted = _TRIPS.search(loop.config)
    return int(noted[1]) if noted else None


# --------------------------------------------------------------------------------------------------- what XLA counts

_EFFECT = "what XLA counts of a program is not known"
_cost_analysis = courtesy("jaxlib._jax.hlo_module_cost_analysis", _EFFECT)
_hlo_module = courtesy("jaxlib._hlo.HloModule", _EFFECT)

# Further fields of HloModuleProto.
_MODULE_ENTRY_NAME, _MODULE_SHAPE = 2, 4
_UNCOUNTED = (b"__cudnn$", b"__cublas$")  # how calls of NVIDIA's libraries begin, of which XLA counts nothing
_MODULE_KEPT = (1, _MODULE_COMPUTATIONS, 5, 17)  # and its table of stack frames; the rest speaks of the entry


class CompiledCollective(NamedTuple):
    """A collective: its kind ("all-gather"), the bytes that one device has of the result, and those that it sends.

    It sends as much as in ``formulas.Communication``, and None is unknown. Of a sum of which each device goes on
    with its own part alone it sends as much as of a reduce-scatter, which XLA for a CPU makes none of.
    """

    kind: str
    nbytes: int
    sent: int | None


class XlaCounts(NamedTuple):
    """Of one run, each None where it is not known.

    Floating point operations, the bytes that its instructions read and write, and what devices tell each other: by kind
    of collective operation, as ``"all-gather"``, how often one device takes part in one, and how many bytes it has of
    the results, all runs together.
    """

    flops: int | None
    bytes_accessed: int | None
    collectives: Mapping[str, tuple[int, int]] | None


def xla_counts(modules: Sequence[Module] | None) -> XlaCounts:
    """What XLA counts of one run of a program, given its optimized modules; None where they cannot be read.

    Each is None where XLA does not say, or does not know how often a loop runs.
    """
    if not modules:
        return XlaCounts(None, None, None if modules is None else {})
    counts, communicated = [_counted(module) for module in modules], xla_communicated(modules)
    by_kind = dict[str, tuple[int, int]]()
    for collective, times in (communicated or {}).items():
        runs, nbytes_so_far = by_kind.get(collective.kind, (0, 0))
        by_kind[collective.kind] = runs + times, nbytes_so_far + times * collective.nbytes
    flops, bytes_accessed = (_sum(of_module[which] for of_module in counts) for which in (0, 1))
    return XlaCounts(flops, bytes_accessed, None if communicated is None else by_kind)


def xla_communicated(modules: Sequence[Module] | None) -> Counter[CompiledCollective] | None:
    """How often one device takes part in each collective of a program, ``modules`` as for ``xla_counts``.

    None where XLA does not say, or how often a loop runs is not known.
    """
    if modules is None:
        return None
    total = Counter[CompiledCollective]()
    with contextlib.suppress(Exception):  # as in _counted
        for module in modules:
            of_module = _collectives_in(module)
            if of_module is None:
                return None
            total += of_module
        return total
    return None


_REMATERIALIZED = re.compile(r"[\w-]+(?:\.\d+)*\.remat\S*")


def rematerialized(modules: Sequence[Module] | None) -> int | None:
    """How many instructions XLA computes again by itself, for want of memory: it writes so in their names."""
    if modules is None:
        return None
    return sum(bool(_REMATERIALIZED.fullmatch(row.name)) for module in modules for row in module.instructions)


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum, None where one is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _counted(module: Module) -> tuple[int | None, int | None]:
    """FLOPs and bytes of a module."""
    proto = module.proto
    # Another XLA writes its modules otherwise, or raises what it likes: unknown.
    with contextlib.suppress(Exception):
        if not any(library in proto for library in _UNCOUNTED):
            flops, moved = _counts(proto, module) or (None, None)
            return flops, None if b"async-start" in proto else moved
    return None, None


def _counts(proto: bytes, read: Module) -> tuple[int, int] | None:
    if _cost_analysis is None or _hlo_module is None:
        return None
    parse = _hlo_module.from_serialized_hlo_module_proto
    kept = b"".join(raw for name, _, raw in _fields(proto) if name in _MODULE_KEPT)

    @functools.cache
    def once(name: int) -> tuple[int, int] | None:
        """Of a computation, with the bodies of its loops once."""
        alone, computation = proto, read.computations[name]
        if name != read.entry:
            head = _text_field(_MODULE_ENTRY_NAME, computation.name) + _text_field(_MODULE_SHAPE, computation.shape)
            alone = kept + head + _number_field(_MODULE_ENTRY, name)
        counted = _cost_analysis(_client(), parse(alone))
        flops, bytes_accessed = counted.get("flops", -1), counted.get("bytes accessed", -1)
        return None if min(flops, bytes_accessed) < 0 else (round(flops), round(bytes_accessed))  # -1 is unknown

    @functools.cache
    def has_loops(name: int) -> bool:
        computation = read.computations[name]
        calls = [*computation.calling("call"), *computation.calling("conditional")]
        return bool(computation.calling("while")) or any(has_loops(part) for call in calls for part in call.called)

    @functools.cache
    def whole(name: int) -> tuple[int, int] | None:
        """Of a computation, with the bodies of its loops as often as they run."""
        total, computation = once(name), read.computations[name]
        conditionals = computation.calling("conditional")
        if any(has_loops(branch) for conditional in conditionals for branch in conditional.called):
            return None  # XLA counts the dearest branch, with the bodies in it once
        parts = [(loop.called[0], trips(loop)) for loop in computation.calling("while")]
        parts += [(part, 1) for call in computation.calling("call") for part in call.called]
        for part, times in parts:
            if times == 1 and not has_loops(part):
                continue
            of_part, seen = whole(part), once(part)
            if total is None or of_part is None or seen is None or times is None:
                return None
            total = (total[0] + times * of_part[0] - seen[0], total[1] + times * of_part[1] - seen[1])
        return total

    return whole(read.entry)


def _client() -> Any:
    """A client of this process; counting asks nothing of the device."""
    try:
        return jax.devices("cpu")[0].client
    except RuntimeError:
        return jax.devices()[0].client


_AGAIN = ("async-update", "async-done")  # name once more the computation that was begun
_PASSED_ON = ("copy", "bitcast", "get-tuple-element", "all-reduce-done")


def _collectives_in(module: Module) -> Counter[CompiledCollective] | None:
    """What devices tell each other in one run of a module: how often one takes part in each collective.

    None where nothing tells how often a loop runs that has one.
    """

    @functools.cache
    def of(number: int) -> Counter[CompiledCollective] | None:
        """Of one run of a computation."""
        total, within = Counter[CompiledCollective](), module.computations[number]
        for place, instruction in within.instructions.items():
            opcode = instruction.opcode
            if instruction.collective:
                total[_compiled_collective(module, within, place)] += 1
                continue
            times = trips(instruction) if opcode == "while" else 1
            for called in () if opcode in _AGAIN else instruction.called:
                inside = of(called)
                # Which branch runs is not known, and of some loops not how often.
                if inside is None or (inside and (times is None or opcode == "conditional")):
                    return None
                for collective, runs in inside.items():
                    total[collective] += (times or 0) * runs
        return total

    return of(module.entry)


def _compiled_collective(module: Module, within: Computation, number: int) -> CompiledCollective:
    instruction = within.instructions[number]
    # What begins a gather or permutation has the operand beside the result.
    both = instruction.opcode in ("all-gather-start", "collective-permute-start")
    kind, size = instruction.collective, _nbytes(instruction.result, 1 if both else None)
    devices = instruction.devices
    if kind in ("collective-permute", "collective-broadcast", "ragged-all-to-all"):
        devices = devices or 1  # of which it does not matter
    if devices is None:
        return CompiledCollective(kind, size, None)
    sent = sent_bytes(kind, size, devices)
    if kind == "all-reduce" and _is_cut(module, within, number):
        sent = sent_bytes("reduce-scatter", size // devices, devices)
    return CompiledCollective(kind, size, sent)


def _is_cut(module: Module, within: Computation, number: int) -> bool:
    """Whether all that is done with a value is to cut a part out whose place is computed, as each device its own."""
    if number == within.root:
        return False
    users = [(place, user) for place, user in within.instructions.items() if number in user.operands]
    for place, user in users:
        if user.opcode in _PASSED_ON:
            cut = _is_cut(module, within, place)
        elif user.opcode in ("fusion", "call"):
            called = module.computations[user.called[0]]
            passed = [index for index, operand in enumerate(user.operands) if operand == number]
            cut = all(
                _is_cut(module, called, inner)
                for inner, parameter in called.instructions.items()
                if parameter.opcode == "parameter" and parameter.index in passed
            )
        else:
            cut = user.opcode == "dynamic-slice" and user.operands[0] == number
        if not cut:
            return False
    return bool(users)
