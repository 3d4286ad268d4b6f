"""The scheduled module of a compiled program, as XLA dumps it: its instructions, and the lines that they come from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from remat_magic.records import SourceSpan
from remat_magic.user_files import is_library_file, is_user_file

__all__ = [
    "ScheduledModule",
    "first_backward",
    "frames_of",
    "is_forward",
    "is_read_by_backward",
    "maker_of",
    "read_module",
]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][a-z\d-]*)\(")
_OPERAND = re.compile(r"%([\w.-]+)(?:#(\d+))?")
_INDEX = re.compile(r", index=(\d+)")
_BODY, _CONDITION = (re.compile(rf", {part}=%?([\w.-]+)") for part in ("body", "condition"))
_OP_NAME = re.compile(r'[{ ]op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.M)
_FORWARDED = {"bitcast", "copy", "copy-start", "copy-done", "opt-barrier", "convert"}


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
class ScheduledModule:
    """The scheduled module, as far as it is needed."""

    instructions: dict[str, _Instruction] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)  # of each computation
    parameters: dict[str, str] = field(default_factory=dict)  # of each computation, the first
    users: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    loops: dict[str, str] = field(default_factory=dict)  # by the root of its body, and by what body and condition take
    locations: dict[int, SourceSpan] = field(default_factory=dict)  # of stack frames
    parents: dict[int, int] = field(default_factory=dict)


def read_module(text: str) -> ScheduledModule:
    """The instructions of all computations, and which loop is whose."""
    module = ScheduledModule()
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


def _read_frames(text: str, module: ScheduledModule) -> None:
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


def frames_of(frame: int, module: ScheduledModule) -> tuple[SourceSpan | None, SourceSpan | None]:
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


def maker_of(name: str, index: str, module: ScheduledModule, seen: frozenset[tuple[str, str]] = frozenset()) -> str:
    """The instruction that computes a value, where the one that has it only passes it on; else that one."""
    here = module.instructions.get(name)
    if here is None or (name, index) in seen:
        return name
    seen |= {(name, index)}
    first = index.partition(",")[0]
    loop = name if here.body else module.loops.get(name) if here.opcode == "parameter" else None
    if loop is not None and first:
        root = module.roots.get(module.instructions[loop].body, "")
        maker = maker_of(root, first, module, seen)
        if maker != root and maker not in module.loops:
            return maker
        return maker_of(module.instructions[loop].operands[0][0], first, module, seen)  # not changed: as it came in
    if here.opcode == "tuple" and first and int(first) < len(here.operands):
        return maker_of(*here.operands[int(first)], module, seen)
    if here.operands and here.opcode == "get-tuple-element":
        return maker_of(here.operands[0][0], here.element, module, seen)
    if here.operands and here.opcode in _FORWARDED and not here.op_name:
        return maker_of(*here.operands[0], module, seen)
    return name


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


def is_forward(op_name: str) -> bool:
    """Whether an instruction is of the forward pass, by JAX's names for it."""
    return "jvp(" in op_name and not _is_backward(op_name)


def is_read_by_backward(name: str, index: str, module: ScheduledModule, seen: set[tuple[str, str]]) -> bool:
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
            if any(is_read_by_backward(*part_of, module, seen) for part_of in further):
                return True
    loop = module.loops.get(name)
    return bool(loop and module.instructions[name].opcode == "tuple" and is_read_by_backward(loop, index, module, seen))


def first_backward(steps: Iterable[str], module: ScheduledModule) -> int | None:
    """The step that best parts those of the forward pass from those of the backward one, since XLA mixes them."""
    balance = best = 0
    first, forward = None, False
    for number, name in enumerate(steps):
        op_name = module.instructions[name].op_name if name in module.instructions else ""
        if is_forward(op_name):
            forward = True
            balance += 1
            if balance >= best:
                best, first = balance, number + 1
        elif _is_backward(op_name):
            balance -= 1
    return first if forward and first is not None else None
