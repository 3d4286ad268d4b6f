"""Counts in the text of a compiled program.

The text is XLA's HLO, as ``jax.stages.Compiled.as_text`` gives it (the grammar: openxla.org/xla/operation_semantics):
computations of one instruction a line, ``%name = type opcode(%operand, ...), attribute=value, ...``, that name the
computations which they call.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counts", "contractions"]

Size = tuple[int, int]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPERAND = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARY = re.compile(r"gemm|matmul|conv", re.IGNORECASE)  # cuBLAS, cuDNN, oneDNN
_MARK = "rematted_computation"  # the name that JAX puts on what a checkpoint makes run again


@dataclass(slots=True)
class Counts:
    """How often each size of matrix multiplication and convolution runs, and how often as marked recomputation."""

    all: Counter[Size] = field(default_factory=Counter[Size])
    recomputed: Counter[Size] = field(default_factory=Counter[Size])

    def add(self, other: Counts, times: int) -> None:
        """Add that many runs of another computation."""
        for mine, theirs in ((self.all, other.all), (self.recomputed, other.recomputed)):
            for size, count in theirs.items():
                mine[size] += count * times


@dataclass(slots=True)
class _Computation:
    own: Counts = field(default_factory=Counts)
    calls: list[tuple[str, int | None]] = field(default_factory=list[tuple[str, int | None]])


def contractions(text: str) -> Counts | None:
    """Count the matrix multiplications and convolutions that a compiled program runs.

    Loops count as often as XLA says that they run, each branch of a conditional counts.

    Returns:
        None where the text has no entry computation, or a loop of unknown length holds one of them.
    """
    computations: dict[str, _Computation] = {}
    elements: dict[str, int] = {}
    here, entry = _Computation(), ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            here = computations.setdefault(header[2], _Computation())
            elements = {}
            entry = header[2] if header[1] else entry
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction:
            name, result, opcode, rest = instruction.groups()
            elements[name] = _elements(result)
            _read(here, opcode, elements[name], rest, elements)
    return _total(entry, computations, {}) if entry else None


def _elements(text: str) -> int:
    """Of an array, or of the first part of a tuple."""
    shape = _SHAPE.search(text)
    return math.prod(int(size) for size in shape[1].split(",") if size) if shape else 0


def _read(here: _Computation, opcode: str, size: int, rest: str, elements: dict[str, int]) -> None:
    target = _TARGET.search(rest) if opcode == "custom-call" else None
    if opcode in ("dot", "convolution") or (target and _LIBRARY.search(target[1])):
        operands = [elements.get(name, 0) for name in _OPERAND.findall(rest.split("), ")[0])]
        key = (size, math.prod(operands[:2]))
        here.own.all[key] += 1
        here.own.recomputed[key] += _MARK in rest
    trips = _TRIPS.search(rest)
    times = (int(trips[1]) if trips else None) if opcode == "while" else 1
    here.calls += [(name, times) for name in _CALLED.findall(rest)]
    for names in _BRANCHES.findall(rest):
        here.calls += [(name.strip().lstrip("%"), 1) for name in names.split(",")]


def _total(name: str, computations: dict[str, _Computation], known: dict[str, Counts | None]) -> Counts | None:
    if name not in known:
        here = computations.get(name, _Computation())
        total = Counts()
        total.add(here.own, 1)
        for called, times in here.calls:
            inner = _total(called, computations, known)
            if inner is None or (times is None and inner.all):
                known[name] = None
                return None
            total.add(inner, times or 1)
        known[name] = total
    return known[name]
