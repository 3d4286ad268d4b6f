"""XLA's own memory over time, from the texts that it writes with ``compiler_options={"xla_dump_to": FOLDER}``.

What these texts look like is known here alone (jaxlib of jax 0.10.2 and 0.12.0.1: CPU, GPU, TPU; they are also written
where a compilation runs out of memory). Three are read: the live range of each value over the flattened schedule, in
which the bodies of loops stand once; where in which allocation a value lies, and its padded size; and the scheduled
module, for the instructions and the lines of Python that they come from.

Where a value lies says what is shared: values at the same bytes of one allocation (what a loop carries, an operand
that is overwritten, a donated argument) count once. So the peak is at most what XLA allocates from the first step to
the last: it is less by results that are not written yet, and by gaps between temporaries.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from remat_magic.jaxprs.spans import cell_number, characters
from remat_magic.records import MemorySpace, SourceSpan, XlaBuffer, XlaMemory
from remat_magic.records.measurement import XlaRole
from remat_magic.user_files import is_library_file, is_user_file

__all__ = ["read_dump", "with_texts"]

_RANGES, _BUFFERS = "after_optimizations-live-range.txt", "after_optimizations-buffer-assignment.txt"
_STEP = re.compile(r"^    \d+:(\S+)$", re.M)
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.M)
_PEAK = re.compile(r"Live ranges at (\d+) \(peak\)")
_NOTED = re.compile(r"\(cumulative: (\d+) bytes\)")
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z\d-]*)\(")
_OPERAND = re.compile(r"%([\w.-]+)(?:#(\d+))?")
_INDEX = re.compile(r", index=(\d+)")
_BODY, _CONDITION = (re.compile(rf", {part}=%?([\w.-]+)") for part in ("body", "condition"))
_OP_NAME = re.compile(r'[{ ]op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.M)

_HOST = "5"  # XLA's number of the host's memory, on each platform
# Of the GPU's memory a part has a number of its own, 1, for collective operations; on a TPU that is VMEM.
_DEVICE = {"gpu": {"0", "1"}, "cpu": {"0"}, "tpu": {"0"}}
_BESIDE = {"1": "VMEM", "2": "SMEM"}  # on a TPU: openxla.org/xla/shapes
_FORWARDED = {"bitcast", "copy", "copy-start", "copy-done", "opt-barrier", "convert"}


class _Value(NamedTuple):
    """Where a value lies, from its first step to its last."""

    name: str
    part: str  # of a tuple
    first: int
    last: int
    allocation: int
    offset: int
    size: int
    space: str
    type: str


@dataclass(slots=True)
class _Allocation:
    size: int
    header: str
    space: str
    argument: bool


@dataclass(slots=True)
class _Instruction:
    opcode: str
    operands: list[tuple[str, str]]  # with the part of a tuple that is meant
    op_name: str
    frame: int
    element: str
    body: str
    condition: str


@dataclass(slots=True)
class _Module:
    """The scheduled module, as far as it is needed."""

    instructions: dict[str, _Instruction] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)  # of each computation
    parameters: dict[str, str] = field(default_factory=dict)  # of each computation, the first
    users: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    loops: dict[str, str] = field(default_factory=dict)  # by the root of its body, and by what body and condition take
    locations: dict[int, SourceSpan] = field(default_factory=dict)  # of stack frames
    parents: dict[int, int] = field(default_factory=dict)


def read_dump(folder: str | Path) -> XlaMemory | None:
    """The memory over time of the program whose dump is in a folder, of the longest one of several.

    Lines of source have neither their text nor the number of their cell, which this process may not know: see
    ``with_texts``.

    Returns:
        None where XLA wrote no schedule or no buffers.
    """
    ranges_file = max(Path(folder).glob(f"*{_RANGES}"), key=lambda path: path.stat().st_size, default=None)
    if ranges_file is None:
        return None
    stem = ranges_file.name.removesuffix(_RANGES)
    buffers_file, module_file = (ranges_file.with_name(stem + end) for end in (_BUFFERS, "after_optimizations.txt"))
    if not buffers_file.is_file() or not module_file.is_file():
        return None
    platform = next((name for name in ("cpu", "gpu") if stem.endswith(f"{name}_")), "tpu")
    ranges, buffers, module = (path.read_text("utf-8", "replace") for path in (ranges_file, buffers_file, module_file))
    return _joined(ranges, buffers, module, platform)


def with_texts(memory: XlaMemory) -> XlaMemory:
    """With the texts of the lines of source and the numbers of cells, as this process knows them now."""

    def completed(span: SourceSpan | None) -> SourceSpan | None:
        if span is None:
            return None
        text, last = (linecache.getline(span.file, line).rstrip("\n") for line in (span.line, span.end_line))
        columns = {"column": characters(text, span.column), "end_column": characters(last, span.end_column)}
        return replace(span, text=text, cell=cell_number(span.file), **columns)

    alive = (
        replace(buffer, source=completed(buffer.source), library=completed(buffer.library)) for buffer in memory.alive
    )
    return replace(memory, alive=tuple(alive))


def _joined(ranges: str, buffers: str, module_text: str, platform: str) -> XlaMemory | None:
    steps = tuple(_STEP.findall(ranges))
    allocations, places = _read_buffers(buffers, platform)
    values, unknown = list[_Value](), 0
    for name, index, first, last in _RANGE.findall(ranges):
        place = places.get((name, index))
        if place is None:
            unknown += 1
        else:
            values.append(_Value(name, index, int(first), min(int(last), len(steps) - 1), *place))
    if not steps or not values:
        return None
    module = _read_module(module_text)
    held = _held(values, allocations, len(steps))
    peak = max(range(len(held)), key=held.__getitem__)
    alive = (
        _buffer(value, nbytes, allocations[value.allocation], module)
        for value, nbytes in _alive(values, allocations, peak)
    )
    noted, sums = _PEAK.search(ranges), _NOTED.findall(ranges)
    return XlaMemory(
        steps=steps,
        held=tuple(held),
        peak=peak,
        alive=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)),
        backward=_first_backward(steps, module),
        noted_peak=int(noted[1]) if noted else None,
        noted_bytes=int(sums[-1]) if noted and sums else None,
        unknown=unknown,
        spaces=_spaces(allocations.values()),
    )


# ---------------------------------------------------------------------------------------------------- what is in use


def _read_buffers(
    text: str, platform: str
) -> tuple[dict[int, _Allocation], dict[tuple[str, str], tuple[int, int, int, str, str]]]:
    """The allocations, and for each value its allocation, offset, size, memory and type."""
    allocations: dict[int, _Allocation] = {}
    places: dict[tuple[str, str], tuple[int, int, int, str, str]] = {}
    number = -1
    for line in text.splitlines():
        if header := _ALLOCATION.match(line):
            number = int(header[1])
            words = f", {header[3]}"
            color = _COLOR.search(words)
            space = _space(color[1] if color else "0", platform)
            allocations[number] = _Allocation(int(header[2]), words, space, argument=", parameter " in words)
        elif (value := _VALUE.match(line)) and "thread-local" not in allocations[number].header:
            space = allocations[number].space
            places[value[1], value[2] or ""] = (number, int(value[4]), int(value[3]), space, value[5])
    return allocations, places


def _space(number: str, platform: str) -> str:
    if number in _DEVICE[platform]:
        return "device"
    if number == _HOST:
        return "host"
    return _BESIDE.get(number, f"S({number})") if platform == "tpu" else f"S({number})"


def _spaces(allocations: Iterable[_Allocation]) -> tuple[MemorySpace, ...]:
    """What is allocated, by memory. What a reduction holds while it runs is left out, as XLA's own sizes do."""
    sizes: dict[str, Counter[str]] = {"device": Counter()}
    for allocation in allocations:
        header = allocation.header
        if ", thread-local" not in header:
            constant, output = ", constant" in header, ", maybe-live-out" in header
            kind = "argument" if allocation.argument else "constant" if constant else "output" if output else "temp"
            sizes.setdefault(allocation.space, Counter())[f"{kind}_bytes"] += allocation.size
    return tuple(MemorySpace(name, **size) for name, size in sizes.items())


def _held(values: Iterable[_Value], allocations: dict[int, _Allocation], steps: int) -> list[int]:
    """The bytes of the device's memory in use at each step."""
    starts, ends = defaultdict[int, list[_Value]](list), defaultdict[int, list[_Value]](list)
    for value in values:
        if value.space == "device" and not allocations[value.allocation].argument:
            starts[value.first].append(value)
            ends[value.last + 1].append(value)
    live = defaultdict[int, set[_Value]](set)
    in_use: dict[int, int] = {}
    arguments = sum(place.size for place in allocations.values() if place.argument and place.space == "device")
    held = list[int]()
    for step in range(steps):
        changed = set[int]()
        for value in ends[step]:
            live[value.allocation].discard(value)
            changed.add(value.allocation)
        for value in starts[step]:
            live[value.allocation].add(value)
            changed.add(value.allocation)
        for allocation in changed:
            in_use[allocation] = _covered(live[allocation])
        held.append(arguments + sum(in_use.values()))
    return held


def _covered(values: Iterable[_Value]) -> int:
    """The bytes of an allocation that these values lie in."""
    end = total = 0
    for offset, stop in sorted((value.offset, value.offset + value.size) for value in values):
        total += max(0, stop - max(offset, end))
        end = max(end, stop)
    return total


def _alive(values: Iterable[_Value], allocations: dict[int, _Allocation], step: int) -> list[tuple[_Value, int]]:
    """What is held at a step, each with the bytes that none before it has: of two that lie together the bigger one.

    Of two of one size it is the later. The memory of an argument is held throughout, whatever lies there.
    """
    there = defaultdict[int, list[_Value]](list)
    for value in values:
        if value.first <= step <= value.last or allocations[value.allocation].argument:
            there[value.allocation].append(value)
    alive = list[tuple[_Value, int]]()
    for number, lying in there.items():
        now = [value for value in lying if value.first <= step <= value.last] or lying[:1]
        counted = list[_Value]()
        for value in sorted(now, key=lambda value: (-value.size, -value.first)):
            nbytes = _covered([*counted, value]) - _covered(counted)
            counted.append(value)
            if nbytes:
                alive.append((value, nbytes))
        if allocations[number].argument and (rest := allocations[number].size - _covered(counted)):
            alive[-1] = (alive[-1][0], alive[-1][1] + rest)
    return alive


# ----------------------------------------------------------------------------------------------------- what they are


def _read_module(text: str) -> _Module:
    module = _Module()
    _read_frames(text, module)
    computation = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := _COMPUTATION.match(line):
                computation = header[1]
            continue
        instruction = _INSTRUCTION.match(line)
        opcode = _OPCODE.search(f" {instruction[3]}") if instruction else None
        if instruction is None or opcode is None:
            continue
        name, rest = instruction[2], instruction[3][opcode.end() - 1 :]
        inside = rest.partition(")")[0]
        patterns = (_OP_NAME, _FRAME, _INDEX, _BODY, _CONDITION)
        op_name, frame, index, body, condition = (pattern.search(rest) for pattern in patterns)
        module.instructions[name] = _Instruction(
            opcode=opcode[1],
            operands=_OPERAND.findall(inside),
            op_name=re.sub(r"\\(.)", r"\1", op_name[1]) if op_name else "",
            frame=int(frame[1]) if frame else 0,
            element=index[1] if index else "",
            body=body[1] if body else "",
            condition=condition[1] if condition else "",
        )
        for operand, _ in module.instructions[name].operands:
            module.users[operand].append(name)
        if instruction[1]:
            module.roots[computation] = name
        if opcode[1] == "parameter":
            module.parameters.setdefault(computation, name)
    for name, read in module.instructions.items():
        if read.body:
            module.loops[module.roots.get(read.body, "")] = name
            for part in (read.body, read.condition):
                module.loops[module.parameters.get(part, "")] = name
    return module


def _read_frames(text: str, module: _Module) -> None:
    tables = {title: rows.splitlines() for title, rows in _TABLE.findall(text)}
    names = {
        title: {number: name[1:-1] for number, _, name in (row.partition(" ") for row in tables.get(title, ()))}
        for title in ("FileNames", "FunctionNames")
    }
    places: dict[str, SourceSpan] = {}
    for row in tables.get("FileLocations", ()):
        number, _, rest = row.partition(" ")
        at = dict(re.findall(r"(\w+)=(\d+)", rest))
        places[number] = SourceSpan(
            file=names["FileNames"].get(at.get("file_name_id", ""), ""),
            function=names["FunctionNames"].get(at.get("function_name_id", ""), ""),
            line=int(at.get("line", 0)),
            column=int(at.get("column", 0)),
            end_line=int(at.get("end_line", 0)) or int(at.get("line", 0)),
            end_column=int(at.get("end_column", 0)),
        )
    for row in tables.get("StackFrames", ()):
        number, location, parent = re.findall(r"\d+", row)[:3]
        if location in places:
            module.locations[int(number)] = places[location]
            module.parents[int(number)] = int(parent) - 1  # printed one higher than it is; 0 is none


def _frames(frame: int, module: _Module) -> tuple[SourceSpan | None, SourceSpan | None]:
    """The innermost line of the user's own code, and that of a library called from there."""
    library: SourceSpan | None = None
    while frame in module.locations:
        span = module.locations[frame]
        if is_user_file(span.file):
            return span, library
        if library is None and is_library_file(span.file):
            library = span
        frame = module.parents[frame] if module.parents[frame] < frame else 0
    return None, library


def _maker(name: str, index: str, module: _Module, seen: frozenset[tuple[str, str]] = frozenset()) -> str:
    """The instruction that computes a value, where the one that has it only passes it on; else that one."""
    here = module.instructions.get(name)
    if here is None or (name, index) in seen:
        return name
    seen |= {(name, index)}
    first = index.partition(",")[0]
    loop = name if here.body else module.loops.get(name) if here.opcode == "parameter" else None
    if loop is not None and first:
        root = module.roots.get(module.instructions[loop].body, "")
        maker = _maker(root, first, module, seen)
        if maker != root and maker not in module.loops:
            return maker
        return _maker(module.instructions[loop].operands[0][0], first, module, seen)  # not changed: as it came in
    if here.opcode == "tuple" and first and int(first) < len(here.operands):
        return _maker(*here.operands[int(first)], module, seen)
    if here.operands and here.opcode == "get-tuple-element":
        return _maker(here.operands[0][0], here.element, module, seen)
    if here.operands and here.opcode in _FORWARDED and not here.op_name:
        return _maker(*here.operands[0], module, seen)
    return name


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


def _is_forward(op_name: str) -> bool:
    return "jvp(" in op_name and not _is_backward(op_name)


def _read_by_backward(name: str, index: str, module: _Module, seen: set[tuple[str, str]]) -> bool:
    """Whether an instruction of the backward pass reads a value, also after it was put into a tuple or copied."""
    if (name, index) in seen:
        return False
    seen.add((name, index))
    for user in module.users.get(name, ()):
        reader = module.instructions[user]
        for number, (operand, part) in enumerate(reader.operands):
            if operand != name or (part and index and part != index):
                continue
            if reader.opcode == "tuple":
                further = [(user, str(number))]
            elif reader.opcode == "get-tuple-element":
                further = [(user, "")] if not index or reader.element == index else []
            elif reader.opcode in _FORWARDED:
                further = [(user, "")]
            elif _is_backward(reader.op_name):
                return True
            else:
                further = []
            if any(_read_by_backward(*part_of, module, seen) for part_of in further):
                return True
    loop = module.loops.get(name)
    return bool(loop and module.instructions[name].opcode == "tuple" and _read_by_backward(loop, index, module, seen))


def _role(value: _Value, allocation: _Allocation, module: _Module, maker: str) -> XlaRole:
    own = module.instructions.get(value.name)
    if allocation.argument:
        return "argument" if own is not None and own.opcode == "parameter" else "output"
    if ", constant" in allocation.header:
        return "constant"
    if "maybe-live-out" in allocation.header:
        return "output"
    if own is not None and own.opcode == "parameter" and value.name in module.loops:
        return "carried"
    made = module.instructions.get(maker)
    if made and _is_forward(made.op_name) and _read_by_backward(value.name, value.part, module, set()):
        return "saved"
    return "temporary"


def _buffer(value: _Value, nbytes: int, allocation: _Allocation, module: _Module) -> XlaBuffer:
    maker = _maker(value.name, value.part, module)
    own, made = module.instructions.get(value.name), module.instructions.get(maker)
    source, library = _frames(made.frame, module) if made else (None, None)
    return XlaBuffer(
        name=f"{value.name}{{{value.part}}}" if value.part else value.name,
        nbytes=nbytes,
        first=value.first,
        last=value.last,
        opcode=own.opcode if own else "",
        type=re.sub(r"\{[^{}]*\}", "", value.type),
        role=_role(value, allocation, module, maker),
        space=value.space,
        op_name=made.op_name if made else "",
        source=source,
        library=library,
    )


def _first_backward(steps: Iterable[str], module: _Module) -> int | None:
    """The step that best parts those of the forward pass from those of the backward one, since XLA mixes them."""
    balance = best = 0
    first, forward = None, False
    for number, name in enumerate(steps):
        op_name = module.instructions[name].op_name if name in module.instructions else ""
        if _is_forward(op_name):
            forward = True
            balance += 1
            if balance >= best:
                best, first = balance, number + 1
        elif _is_backward(op_name):
            balance -= 1
    return first if forward and first is not None else None
