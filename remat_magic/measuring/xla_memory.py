"""XLA's own memory over time, from what it writes with ``compiler_options=dump_options(FOLDER)``.

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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.jaxprs.provenance import cell_number, characters
from remat_magic.records import SourceSpan, XlaBuffer, XlaMemory
from remat_magic.records.measurement import XlaRole
from remat_magic.user_files import is_library_file, is_user_file

_RANGES, _BUFFERS, _MODULE = (
    f"after_optimizations{end}" for end in ("-live-range.txt", "-buffer-assignment.txt", ".hlo.pb")
)
_STEP = re.compile(r"^    \d+:(\S+)$", re.M)
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.M)
_PEAK = re.compile(r"Live ranges at (\d+) \(peak\)")
_NOTED = re.compile(r"\(cumulative: (\d+) bytes\)")


def sizes_of(memory: Any) -> dict[str, int]:
    """The bytes of ``Compiled.memory_analysis()``, by their names without ``_size`` and ``_in_bytes``."""
    names = [name for name in dir(memory) if name.endswith("_in_bytes")]
    return {name.removesuffix("_in_bytes").removesuffix("_size"): getattr(memory, name) for name in names}


def dump_options(folder: Path) -> dict[str, Any]:
    """XLA's options by which it writes to a folder what ``read_dump`` reads."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}


def read_dump(folder: str | Path) -> XlaMemory | None:
    """The memory over time of the program whose dump is in a folder, of the longest one of several.

    Lines of source have neither their text nor the number of their cell, which this process may not know: see
    ``with_texts``. None where XLA wrote no schedule or no buffers.
    """
    ranges_file = max(Path(folder).glob(f"*{_RANGES}"), key=lambda path: path.stat().st_size, default=None)
    if ranges_file is None:
        return None
    stem = ranges_file.name.removesuffix(_RANGES)
    buffers_file, module_file = (ranges_file.with_name(stem + end) for end in (_BUFFERS, _MODULE))
    if not buffers_file.is_file() or not module_file.is_file():
        return None
    platform = next((name for name in ("cpu", "gpu") if stem.endswith(f"{name}_")), "tpu")
    ranges, buffers = (path.read_text("utf-8", "replace") for path in (ranges_file, buffers_file))
    return _joined(ranges, buffers, _Program(_jax.read_dump(module_file.read_bytes())), platform)


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


def _joined(ranges: str, buffers: str, program: _Program, platform: str) -> XlaMemory | None:
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
    live = _live_bytes(values, allocations, len(steps))
    peak = max(range(len(live)), key=live.__getitem__)
    alive = (
        _buffer(value, nbytes, allocations[value.allocation], program)
        for value, nbytes in _alive_at(values, allocations, peak)
    )
    noted, sums = _PEAK.search(ranges), _NOTED.findall(ranges)
    return XlaMemory(
        steps=steps,
        held=tuple(live),
        peak=peak,
        alive=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)),
        backward=_first_backward(steps, program),
        noted_peak=int(noted[1]) if noted else None,
        noted_bytes=int(sums[-1]) if noted and sums else None,
        unknown=unknown,
    )


def _role(value: _Value, allocation: _Allocation, program: _Program, maker: str) -> XlaRole:
    own = program.instructions.get(value.name)
    if allocation.argument:
        return "argument" if own is not None and own.opcode == "parameter" else "output"
    if ", constant" in allocation.header:
        return "constant"
    if "maybe-live-out" in allocation.header:
        return "output"
    if own is not None and own.opcode == "parameter" and value.name in program.loops:
        return "carried"
    producer = program.instructions.get(maker)
    if producer and _is_forward(producer.op_name) and _is_read_by_backward(value.name, value.part, program, set()):
        return "saved"
    return "temporary"


def _buffer(value: _Value, nbytes: int, allocation: _Allocation, program: _Program) -> XlaBuffer:
    maker = _maker_of(value.name, value.part, program)
    own, producer = program.instructions.get(value.name), program.instructions.get(maker)
    source, library = _frames_of(producer.frame, program) if producer else (None, None)
    return XlaBuffer(
        name=f"{value.name}{{{value.part}}}" if value.part else value.name,
        nbytes=nbytes,
        first=value.first,
        last=value.last,
        opcode=own.opcode if own else "",
        type=re.sub(r"\{[^{}]*\}", "", value.type),
        role=_role(value, allocation, program, maker),
        space=value.space,
        op_name=producer.op_name if producer else "",
        source=source,
        library=library,
    )


# ----------------------------------------------------------------------------------------------------- where values lie

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")

_HOST = "5"  # XLA's number of the host's memory, on each platform
# Of the GPU's memory a part has a number of its own, 1, for collective operations; on a TPU that is VMEM.
_DEVICE = {"gpu": {"0", "1"}, "cpu": {"0"}, "tpu": {"0"}}
_BESIDE = {"1": "VMEM", "2": "SMEM"}  # on a TPU: openxla.org/xla/shapes


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
    """Memory that XLA asks for as one piece: its bytes, what else its line says, and which memory it is."""

    size: int
    header: str
    space: str
    argument: bool


_Places = dict[tuple[str, str], tuple[int, int, int, str, str]]  # of each value: allocation, offset, size, memory, type


def _read_buffers(text: str, platform: str) -> tuple[dict[int, _Allocation], _Places]:
    allocations, places, number = dict[int, _Allocation](), _Places(), -1
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


def _live_bytes(values: Iterable[_Value], allocations: dict[int, _Allocation], steps: int) -> list[int]:
    """The bytes of the device's memory in use at each step."""
    starts, ends = defaultdict[int, list[_Value]](list), defaultdict[int, list[_Value]](list)
    for value in values:
        if value.space == "device" and not allocations[value.allocation].argument:
            starts[value.first].append(value)
            ends[value.last + 1].append(value)
    live = defaultdict[int, set[_Value]](set)
    in_use: dict[int, int] = {}
    arguments = sum(place.size for place in allocations.values() if place.argument and place.space == "device")
    nbytes = list[int]()
    for step in range(steps):
        for value in ends[step]:
            live[value.allocation].discard(value)
        for value in starts[step]:
            live[value.allocation].add(value)
        for allocation in {value.allocation for value in (*ends[step], *starts[step])}:
            in_use[allocation] = _covered(live[allocation])
        nbytes.append(arguments + sum(in_use.values()))
    return nbytes


def _covered(values: Iterable[_Value]) -> int:
    """The bytes of an allocation that these values lie in."""
    end = total = 0
    for offset, stop in sorted((value.offset, value.offset + value.size) for value in values):
        total += max(0, stop - max(offset, end))
        end = max(end, stop)
    return total


def _alive_at(values: Iterable[_Value], allocations: dict[int, _Allocation], step: int) -> list[tuple[_Value, int]]:
    """What is live at a step, each with the bytes that none before it has: of two that lie together the bigger one.

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


# -------------------------------------------------------------------------------------------- what makes and reads them

_FORWARDED = {"bitcast", "copy", "copy-start", "copy-done", "opt-barrier", "convert"}


class _Program:
    """The instructions of a compiled program by their names, and who reads what."""

    def __init__(self, module: _jax.Module) -> None:
        self.instructions: dict[str, _jax.Instruction] = {}
        self.operands: dict[str, list[str]] = {}
        self.users: dict[str, list[str]] = defaultdict(list)
        self.loops: dict[str, str] = {}  # by the root of its body, and by what body and condition take
        self.roots: dict[str, str] = {}  # of the body of each loop
        self.frames = module.frames  # the lines of Python by their numbers
        for within in module.computations.values():
            for instruction in within.instructions.values():
                name = instruction.name
                self.instructions[name] = instruction
                self.operands[name] = [within.instructions[number].name for number in instruction.operands]
                for operand in self.operands[name]:
                    self.users[operand].append(name)
                if instruction.opcode == "while":
                    body = module.computations[instruction.called[0]]
                    self.roots[name] = body.instructions[body.root].name
                    self.loops[self.roots[name]] = name
                    for part in instruction.called:
                        parameters = module.computations[part].calling("parameter")
                        self.loops.update((parameter.name, name) for parameter in parameters)


def _frames_of(frame: int, program: _Program) -> tuple[SourceSpan | None, SourceSpan | None]:
    """The innermost line of the user's own code, and that of a library called from there."""
    library: SourceSpan | None = None
    while frame in program.frames:
        there = program.frames[frame]
        span = SourceSpan(there.file, there.function, there.line, there.column, there.end_line, there.end_column)
        if is_user_file(span.file):
            return span, library
        if library is None and is_library_file(span.file):
            library = span
        frame = there.caller if there.caller < frame else 0
    return None, library


def _maker_of(name: str, index: str, program: _Program, seen: frozenset[tuple[str, str]] = frozenset()) -> str:
    """The instruction that computes a value, where the one that has it only passes it on; else that one."""
    here = program.instructions.get(name)
    if here is None or (name, index) in seen:
        return name
    seen |= {(name, index)}
    first = index.partition(",")[0]
    operands = program.operands[name]
    loop = name if here.opcode == "while" else program.loops.get(name) if here.opcode == "parameter" else None
    if loop is not None and first:
        root = program.roots[loop]
        maker = _maker_of(root, first, program, seen)
        if maker != root and maker not in program.loops:
            return maker
        return _maker_of(program.operands[loop][0], first, program, seen)  # not changed: as it came in
    if here.opcode == "tuple" and first and int(first) < len(operands):
        return _maker_of(operands[int(first)], "", program, seen)
    if operands and here.opcode == "get-tuple-element":
        return _maker_of(operands[0], str(here.index), program, seen)
    if operands and here.opcode in _FORWARDED and not here.op_name:
        return _maker_of(operands[0], "", program, seen)
    return name


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


def _is_forward(op_name: str) -> bool:
    """Whether an instruction is of the forward pass, by JAX's names for it."""
    return "jvp(" in op_name and not _is_backward(op_name)


def _is_read_by_backward(name: str, index: str, program: _Program, seen: set[tuple[str, str]]) -> bool:
    """Whether an instruction of the backward pass reads a value, also after it was put into a tuple or copied."""
    if (name, index) in seen:
        return False
    seen.add((name, index))
    for user in program.users.get(name, ()):
        reader = program.instructions[user]
        for number, operand in enumerate(program.operands[user]):
            if operand != name:
                continue
            if reader.opcode == "tuple":
                further = [(user, str(number))]
            elif reader.opcode == "get-tuple-element":
                further = [(user, "")] if not index or str(reader.index) == index else []
            elif reader.opcode in _FORWARDED:
                further = [(user, "")]
            elif _is_backward(reader.op_name):
                return True
            else:
                further = []
            if any(_is_read_by_backward(*part_of, program, seen) for part_of in further):
                return True
    loop = program.loops.get(name) if program.instructions[name].opcode == "tuple" else None
    return loop is not None and _is_read_by_backward(loop, index, program, seen)


def _first_backward(steps: Iterable[str], program: _Program) -> int | None:
    """The step that best parts those of the forward pass from those of the backward one, since XLA mixes them."""
    balance = best = 0
    first, forward = None, False
    for number, name in enumerate(steps):
        op_name = program.instructions[name].op_name if name in program.instructions else ""
        if _is_forward(op_name):
            forward = True
            balance += 1
            if balance >= best:
                best, first = balance, number + 1
        elif _is_backward(op_name):
            balance -= 1
    return first if forward and first is not None else None
