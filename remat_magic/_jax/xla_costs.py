"""What XLA counts of a compiled program, with the bodies of loops as often as they run; what devices tell each other.

XLA's ``HloCostAnalysis`` counts the body of a loop once. So it is asked of each body alone, too: as the entry of a
module that is otherwise the same. Of a slice that is copied while others run, as on a TPU, it counts all that the slice
is taken from, which in a loop over a stack is many times what is read: the bytes are then unknown.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from remat_magic._jax.formulas import sent_bytes
from remat_magic._jax.hlo import Computation, Module, fields, nbytes, number, text, trips
from remat_magic._jax.private import courtesy

_EFFECT = "what XLA counts of a program is not told"
_cost_analysis = courtesy("jaxlib._jax.hlo_module_cost_analysis", _EFFECT)
_hlo_module = courtesy("jaxlib._hlo.HloModule", _EFFECT)

# Fields of HloModuleProto.
_MODULE_COMPUTATIONS, _MODULE_ENTRY_NAME, _MODULE_SHAPE, _MODULE_ENTRY = 3, 2, 4, 6
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
    for told, times in (communicated or {}).items():
        runs, nbytes_so_far = by_kind.get(told.kind, (0, 0))
        by_kind[told.kind] = runs + times, nbytes_so_far + times * told.nbytes
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
    kept = b"".join(raw for name, _, raw in fields(proto) if name in _MODULE_KEPT)

    @functools.cache
    def once(name: int) -> tuple[int, int] | None:
        """Of a computation, with the bodies of its loops once."""
        alone, computation = proto, read.computations[name]
        if name != read.entry:
            head = text(_MODULE_ENTRY_NAME, computation.name) + text(_MODULE_SHAPE, computation.shape)
            alone = kept + head + number(_MODULE_ENTRY, name)
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


# -------------------------------------------------------------------------------------- what devices tell each other

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
    kind, size = instruction.collective, nbytes(instruction.result, 1 if both else None)
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
