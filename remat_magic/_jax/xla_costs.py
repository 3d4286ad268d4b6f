"""What XLA counts of a compiled program, with the bodies of loops as often as they run.

XLA's ``HloCostAnalysis`` counts the body of a loop once. So it is asked of each body alone, too: as the entry of a
module that is otherwise the same. Of a slice that is copied while others run it counts all that the slice is taken
from, which in a loop over a stack is many times what is read. So it is asked of a module that waits for such copies.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from remat_magic._jax.hlo import Module, read_module
from remat_magic._jax.hlo_collectives import Told, add, collectives, told
from remat_magic._jax.hlo_trips import trips
from remat_magic._jax.private import courtesy
from remat_magic._jax.protobuf import fields, number, text

__all__ = ["XlaCounts", "xla_communicated", "xla_counts"]

_cost_analysis = courtesy("jaxlib._jax.hlo_module_cost_analysis", "what XLA counts of a program is not told")

# Fields of HloModuleProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY_NAME, _MODULE_SHAPE, _MODULE_ENTRY = 3, 2, 4, 6
_INSTRUCTIONS, _OPCODE, _SHAPE, _CALLED, _PARTS = 2, 2, 3, 38, 4  # of computations, instructions, and a tuple's shape
_UNCOUNTED = (b"__cudnn$", b"__cublas$")  # how calls of NVIDIA's libraries begin, of which XLA counts nothing
_MODULE_KEPT = (1, _MODULE_COMPUTATIONS, 5, 17)  # and its table of stack frames; the rest speaks of the entry

_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')


class XlaCounts(NamedTuple):
    """Of one run, each None where it is not known.

    Floating point operations, the bytes that its instructions read and write, what devices tell each other, as
    ``hlo_collectives.collectives`` has it, and the cycles that a TPU takes, by XLA's own estimate.
    """

    flops: int | None
    bytes_accessed: int | None
    collectives: Mapping[str, tuple[int, int]] | None
    cycles: int | None = None


def xla_counts(modules: Iterable[Any]) -> XlaCounts:
    """What XLA counts of a program.

    Args:
        modules: optimized ones, as ``Compiled.runtime_executable().hlo_modules()`` has them, for whatever device.

    Returns:
        The counts of one run; None where XLA does not say, or does not know how often a loop runs.
    """
    counts = [_of_module(module) for module in modules]
    if not counts:
        return XlaCounts(None, None, {})
    talked = dict[str, tuple[int, int]]()
    for of_module in counts:
        add(talked, of_module.collectives or {})
    return XlaCounts(
        _sum(of_module.flops for of_module in counts),
        _sum(of_module.bytes_accessed for of_module in counts),
        None if any(of_module.collectives is None for of_module in counts) else talked,
        _sum(of_module.cycles for of_module in counts),
    )


def xla_communicated(modules: Iterable[Any]) -> Counter[Told] | None:
    """How often one device takes part in each collective of a program, ``modules`` as for ``xla_counts``.

    None where XLA does not say, or how often a loop runs is not known.
    """
    total = Counter[Told]()
    with contextlib.suppress(Exception):  # as in _of_module
        for module in modules:
            of_module = told(read_module(module.as_serialized_hlo_module_proto()))
            if of_module is None:
                return None
            total += of_module
        return total
    return None


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum, None where one is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _of_module(module: Any) -> XlaCounts:
    talked, counted, cycles = None, None, None
    # Another XLA writes its modules otherwise, or raises what it likes: unknown.
    with contextlib.suppress(Exception):
        proto = module.as_serialized_hlo_module_proto()
        read = read_module(proto)
        if b"async-start" in proto and b"async-update" not in proto:
            proto = _waiting(proto)
            module = type(module).from_serialized_hlo_module_proto(proto)
        talked = collectives(read)
        cycles = _estimated_cycles(read)
        counted = None if any(library in proto for library in _UNCOUNTED) else _counts(module, proto, read)
    flops, bytes_accessed = counted or (None, None)
    return XlaCounts(flops, bytes_accessed, talked, cycles)


def _estimated_cycles(module: Module) -> int | None:
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
            times = trips(module, instruction, number) if instruction.opcode == b"while" else 1
            for called in instruction.called:
                inside = of(called)
                if inside is None or (inside and (times is None or instruction.opcode == b"conditional")):
                    return None
                total += (times or 0) * inside
        return total

    return of(module.entry) or None


def _waiting(proto: bytes) -> bytes:
    """A module in which what is begun beside other instructions is a call, and done at once."""

    def instruction(of: bytes) -> bytes:
        opcode = next(value for name, value, _ in fields(of) if name == _OPCODE)
        if opcode not in (b"async-start", b"async-done"):
            return of
        kept = b""
        for name, value, raw in fields(of):
            if name == _OPCODE:
                raw = text(name, b"call" if opcode == b"async-start" else b"bitcast")
            elif name == _SHAPE and opcode == b"async-start":  # of what it reads, what it makes, and more
                raw = text(name, [part for inner, part, _ in fields(value) if inner == _PARTS][1])
            kept += b"" if name == _CALLED and opcode == b"async-done" else raw
        return kept

    def computation(of: bytes) -> bytes:
        return b"".join(
            text(name, instruction(value)) if name == _INSTRUCTIONS else raw for name, value, raw in fields(of)
        )

    return b"".join(
        text(name, computation(value)) if name == _MODULE_COMPUTATIONS else raw for name, value, raw in fields(proto)
    )


def _counts(module: Any, proto: bytes, read: Module) -> tuple[int, int] | None:
    if _cost_analysis is None:
        return None
    kept = b"".join(raw for name, _, raw in fields(proto) if name in _MODULE_KEPT)

    @functools.cache
    def once(name: int) -> tuple[int, int] | None:
        """Of a computation, with the bodies of its loops once."""
        alone, computation = module, read.computations[name]
        if name != read.entry:
            head = text(_MODULE_ENTRY_NAME, computation.name) + text(_MODULE_SHAPE, computation.shape)
            alone = type(module).from_serialized_hlo_module_proto(kept + head + number(_MODULE_ENTRY, name))
        counted = _cost_analysis(_client(), alone)
        flops, bytes_accessed = counted.get("flops", -1), counted.get("bytes accessed", -1)
        return None if min(flops, bytes_accessed) < 0 else (round(flops), round(bytes_accessed))  # -1 is unknown

    @functools.cache
    def has_loops(name: int) -> bool:
        computation = read.computations[name]
        calls = [*computation.calling(b"call"), *computation.calling(b"conditional")]
        return bool(computation.calling(b"while")) or any(has_loops(part) for call in calls for part in call.called)

    @functools.cache
    def whole(name: int) -> tuple[int, int] | None:
        """Of a computation, with the bodies of its loops as often as they run."""
        total, computation = once(name), read.computations[name]
        conditionals = computation.calling(b"conditional")
        if any(has_loops(branch) for conditional in conditionals for branch in conditional.called):
            return None  # XLA counts the dearest branch, with the bodies in it once
        parts = [(loop.called[0], trips(read, loop, name)) for loop in computation.calling(b"while")]
        parts += [(part, 1) for call in computation.calling(b"call") for part in call.called]
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
