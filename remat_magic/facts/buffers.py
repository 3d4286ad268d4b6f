"""Buffers: what of the steps of a program is live when, and in what order a device's compiler runs and places them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.primitives import FUSIBLE, INDEXED, MATMULS, REDUCTIONS, TRANSPOSE
from remat_magic.devices import Device
from remat_magic.jaxprs.straight_line import Operation, StraightLine, StraightLines
from remat_magic.jaxprs.walk import TypeOf, own_type
from remat_magic.records import ArgumentRole, Phase


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How values lie in the memory of a device. Nothing here is fitted: each is what its compiler does.

    Attributes:
        merges: what is written twice is computed once: common subexpressions are eliminated.
        reserves: what the program gives back has its memory from the beginning to the end, that of donated arguments
            of the same size where there are any.
        fuses: what only the kernel reads that makes it takes no memory; what kernels can compute anew from what is live
            anyway, or from less, takes none either: see ``kernels.fused_away`` and ``rematerialized_in_kernels``.
        matmuls: so does what only matmuls read: their kernels run the operations that make what they multiply. What
            puts one element into each row is a comparison there, which kernels run too: see ``kernels.fuses``.
        views: a kernel reads a transpose, and a loop's slice of a stack, where its operand is, and writes what a loop
            stacks in place. Else these are copies.
        tiled: arrays are padded to whole tiles, those of the shapes that convolutions take and make along the batch or
            the channels, but for arguments and results.
        uses_bfloat16: matrix units take bfloat16: a float32 value that only matmuls of the default precision read is
            converted where it is made, and stays so.
    """

    merges: bool = False
    reserves: bool = False
    fuses: bool = False
    matmuls: bool = False
    views: bool = False
    tiled: bool = False
    uses_bfloat16: bool = False

    def nbytes(self, aval: Any, lanes: Collection[int] = ()) -> int:
        """The bytes that a value takes; none where it is in another memory. ``lanes``: as for ``tiled_nbytes``."""
        if _jax.memory_space(aval):
            return 0
        return _jax.tiled_nbytes(aval, lanes) if self.tiled else _jax.nbytes(aval)

    def by_rows(self, aval: Any) -> int:
        """The bytes of a copy whose last dimension is the last of its tiles; none where it lies so anyway.

        A TPU takes what it puts by index row by row, and a row of 32 numbers is padded to 128.
        """
        rows = self.nbytes(aval, (len(_jax.local_shape(aval)) - 1,)) if len(_jax.local_shape(aval)) > 1 else 0
        return rows if rows > self.nbytes(aval) else 0

    @property
    def inside(self) -> DeviceMemory:
        """In the body of a loop, which has no results of its own."""
        return replace(self, reserves=False)


PLAIN = DeviceMemory()
"""Of this machine, and of what nothing is known of: each value takes its bytes."""


def memory_of(device: Device | DeviceMemory | None) -> DeviceMemory:
    """How the compiler for a device holds values; what tells that already stays as it is."""
    if isinstance(device, DeviceMemory):
        return device
    if device is None or not device.holds_otherwise:
        return PLAIN
    if not device.is_tpu:
        return DeviceMemory(merges=True, reserves=True, fuses=True)
    return DeviceMemory(merges=True, fuses=True, matmuls=True, views=True, tiled=True, uses_bfloat16=True)


class LiveBuffer(NamedTuple):  # hundreds are alive at a peak
    """A buffer that is live: its type and what makes it.

    ``argument`` is the position of an argument, ``constant`` tells a captured value, and ``role`` what either is in a
    training step; otherwise it is ``var``, which ``eqn`` makes or hands to a body of its own (no ``eqn``: a cotangent),
    or what is given back, ``copy_of`` another buffer. Without an ``aval`` it is what a branch of ``eqn`` needs inside.
    """

    bytes: int
    aval: Any = None
    eqn: Any = None
    var: Any = None
    argument: int | None = None
    constant: bool = False
    role: ArgumentRole | None = None
    residual: bool = False
    gradient: bool = False
    output: bool = False
    copy_of: LiveBuffer | None = None


# ----------------------------------------------------------------------------------------------- steps, and their order


class ScheduledStep(NamedTuple):  # thousands are made for each report, and a frozen dataclass takes thrice as long
    """Something that happens at once: what it reads and makes, what may be written over, and what it needs inside."""

    where: tuple[Phase, int]
    reads: Sequence[int]
    makes: Sequence[int]
    over: Sequence[int] = ()
    inside: int = 0
    eqn: Any = None


def last_uses(steps: Sequence[ScheduledStep], instead: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """For each buffer the last step that reads or makes it; ``instead``: as in ``Buffers``."""
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.reads:
            last[number] = index
        for number in step.makes:
            last[number] = index
    for number in sorted(instead.keys() & last.keys(), reverse=True):  # what is read instead is older
        for read in instead[number]:
            last[read] = max(last.get(read, 0), last[number])
    return last


def put_off(steps: Sequence[ScheduledStep], wanted: set[int]) -> list[ScheduledStep]:
    """The steps, those of the backward half put off until the first gradient that needs them is due.

    JAX writes all that a checkpoint recomputes before the first operation that uses any of it; XLA's scheduler keeps
    memory low and has no reason to run it in that order.
    """
    due: dict[int, int] = {}  # for each buffer the step at which it is first needed
    keys = list(range(len(steps)))
    for index in reversed(range(len(steps))):
        step = steps[index]
        if step.where[0] == "backward" and wanted.isdisjoint(step.makes):
            keys[index] = min((due[number] for number in step.makes if number in due), default=index)
        key = keys[index]
        for number in step.reads:
            if due.get(number, key) >= key:
                due[number] = key
    return [steps[index] for index in sorted(range(len(steps)), key=keys.__getitem__)]


def brought_forward(steps: list[ScheduledStep], buffers: Buffers) -> list[ScheduledStep]:
    """The steps, those of the backward half that free more than they make run as soon as they can.

    Such is the product that is a weight's gradient: JAX writes it, or the sum that it is part of, where the gradient is
    done with, and its operands would be live until then.
    """
    first = next((index for index, step in enumerate(steps) if step.where[0] == "backward"), len(steps))
    order, steps = steps[:first], steps[first:]
    sizes, freed = buffers.sizes, _freed_by(steps, buffers)
    left = Counter(number for found in freed for number in found)
    made = {number for step in steps for number in step.makes}
    takes, waiting = [step.inside + sum([sizes[number] for number in step.makes]) for step in steps], dict[int, int]()
    readers: defaultdict[int, list[int]] = defaultdict(list)
    last: defaultdict[int, list[int]] = defaultdict(list)  # of those that may free it
    for index, found in enumerate(freed):
        if sum([sizes[number] for number in found]) > takes[index]:  # others never free more than they make
            reads = made.intersection(steps[index].reads)
            waiting[index] = len(reads)
            for number in reads:
                readers[number].append(index)
            for number in found:
                last[number].append(index)
    done = [False] * len(steps)

    def frees_more(index: int) -> bool:
        return sum([sizes[number] for number in freed[index] if left[number] == 1]) > takes[index]

    for index in range(len(steps)):
        todo = [] if done[index] else [index]
        while todo:
            here = todo.pop()
            if done[here]:
                continue
            done[here] = True
            step = steps[here]
            order.append(step)
            able = list[int]()
            for number in freed[here]:
                left[number] -= 1
                if left[number] == 1:
                    able += last.get(number, ())
            for number in step.makes:
                for reader in readers.get(number, ()):
                    waiting[reader] -= 1
                    able.append(reader)
            todo += [other for other in able if not waiting[other] and not done[other] and frees_more(other)]
    return order


_MANY = 96  # of what a kernel reads: such a one frees nothing by itself


def _freed_by(steps: Sequence[ScheduledStep], buffers: Buffers) -> list[set[int]]:
    """For each step what takes memory, for a while, of what it reads and of what is read instead of that."""
    sizes, lasting = buffers.sizes, buffers.lasting
    freed = [{number for number in step.reads if sizes[number] and number not in lasting} for step in steps]
    if buffers.instead:
        instead: dict[int, set[int]] = {}
        for number in sorted(buffers.instead):  # what is read instead is older
            reads = buffers.instead[number]
            own = {read for read in reads if sizes[read] and read not in lasting}
            found = own.union(*(instead[read] for read in reads if read in instead))
            instead[number] = found if len(found) <= _MANY else set()
        for found, step in zip(freed, steps, strict=True):
            found.update(*(instead[read] for read in step.reads if read in instead))
    return [found if len(found) <= _MANY else set() for found in freed]


NOTHING = 0
"""The buffer of what takes no memory: literals."""


class Buffers:
    """Numbered buffers.

    Attributes:
        outputs: those that are not freed after their last reader.
        saved: those of residuals.
        gradients: those of gradients that something reads later on.
        donated: those of arguments that may be written over; where results are reserved, these lie in them.
        throughout: those that are there from the beginning to the end.
        copies: those of arguments that are given back.
        instead: for what takes no memory, what is read for it by the kernels that compute it for themselves.
        again: those of these that kernels compute anew.
        sizes: the bytes of each.
        of_step: whether they are those of a training step.
        in_bfloat16: the types of those that are in bfloat16 instead of float32.
        type_of: tells the type of a variable, with how it is spread over a mesh.
        on: how the device holds values.
    """

    of_step = False

    def __init__(self, type_of: TypeOf = own_type, on: DeviceMemory = PLAIN) -> None:
        self.type_of = type_of
        self.on = on
        self.outputs: set[int] = set()
        self.saved: set[int] = set()
        self.gradients: set[int] = set()
        self.donated: set[int] = set()
        self.throughout = {NOTHING}
        self.copies: set[int] = set()
        self.instead: dict[int, tuple[int, ...]] = {}
        self.again: set[int] = set()
        self.sizes: list[int] = [0]
        self.in_bfloat16: dict[int, Any] = {}
        self._contents: dict[int, LiveBuffer] = {}
        self._constants: dict[int, int] = {}
        self._lanes: dict[tuple[int, ...], tuple[int, int]] = {}  # of the shapes that convolutions take and make

    def buffer(self, aval: Any, content: LiveBuffer | None = None) -> int:
        """A new one for a value of that type; its ``content``, if it may be shown."""
        self.sizes.append(self.nbytes(aval))
        number = len(self.sizes) - 1
        if content is not None:
            self._contents[number] = content
        return number

    def permanent(self, aval: Any, content: LiveBuffer) -> int:
        """A new one which is there from the beginning to the end."""
        number = self.buffer(aval, content)
        self.throughout.add(number)
        return number

    def constant(self, key: int, aval: Any) -> int:
        """The one buffer of a constant, wherever it is met."""
        if key not in self._constants:
            self._constants[key] = self.permanent(aval, LiveBuffer(0, aval, constant=True, role=self.role_of(key)))
        return self._constants[key]

    def role_of(self, key: int) -> ArgumentRole | None:
        """What a constant is in a training step; None for nothing else, and outside of one."""
        del key
        return None

    def discard(self, buffer: int) -> None:
        """Let a buffer take no memory."""
        self.sizes[buffer] = 0

    def nbytes(self, aval: Any) -> int:
        """The bytes that a value of that type takes on the device."""
        return self.on.nbytes(aval, self._lanes.get(_jax.local_shape(aval), ()) if self._lanes else ())

    def lay_out(self, flat: StraightLine) -> None:
        """Lay out what is of the shapes that the convolutions of a straight line take and make as they do."""
        for operation, _, _ in flat.lines:
            for atom, lanes in _jax.lanes_of_convolution(operation.eqn):
                self._lanes[_jax.local_shape(self.type_of(atom))] = lanes

    def lay_out_results(self, steps: Sequence[ScheduledStep]) -> None:
        """Lay out what is given back as arguments are, whatever a convolution makes."""
        if self._lanes:
            types = self.types(steps)
            for number in self.results & types.keys():
                self.sizes[number] = self.on.nbytes(types[number])

    @property
    def lasting(self) -> set[int]:
        """Those that are live to the end."""
        return self.outputs | self.throughout

    @property
    def results(self) -> set[int]:
        """Those of what is given back, with memory of their own."""
        return self.outputs - self.throughout - {NOTHING}

    @property
    def reserved(self) -> set[int]:
        """Those that are there from the beginning, though something makes them."""
        return self.results if self.on.reserves else self.copies

    def written_over(self, step: ScheduledStep, dying: Collection[int]) -> list[int]:
        """The operands that die with the step and that a result of the same size is written over.

        What has no bytes is in no memory that could be written over; what is read instead of it may be.
        """
        sizes, makes, found = self.sizes, step.makes, {*step.over}.intersection(dying)
        todo = [*found] if self.instead else []
        while todo:
            number = todo.pop()
            reads = {*self.instead.get(number, ())}.intersection(dying).difference(found)
            found |= reads
            todo += reads
        if len(makes) == 1:
            size = sizes[makes[0]]
            return [min(same)] if size and (same := [number for number in found if sizes[number] == size]) else []
        free = sorted([number for number in found if sizes[number]])
        reused: list[int] = []
        for result in makes:
            over = next((number for number in free if sizes[number] == sizes[result]), None)
            if over is not None:
                free.remove(over)
                reused.append(over)
        return reused

    def content(self, number: int) -> LiveBuffer | None:
        """What a buffer holds, as far as it was said when it was made."""
        return self._contents.get(number)

    def types(self, steps: Sequence[ScheduledStep]) -> dict[int, Any]:
        """The types of buffers, as far as they are known, given the steps that make them."""
        types = {number: content.aval for number, content in self._contents.items() if content.aval is not None}
        for step in steps:
            if step.eqn is not None:
                types.update(zip(step.makes, map(self.type_of, step.eqn.outvars), strict=True))
        return types


# ---------------------------------------------------------------------------------------------------- what is live when


class Liveness(NamedTuple):
    """The bytes that are alive during each step (arguments, residuals, temporaries), and when each buffer is.

    ``ranges`` has for each buffer the first step with it and the first without it, ``made_at`` the step that makes it.
    """

    bytes: list[tuple[int, int, int]]
    ranges: dict[int, tuple[int, int]]
    made_at: dict[int, int]


def liveness(steps: Sequence[ScheduledStep], buffers: Buffers, saved_inside: Callable[[Any], int]) -> Liveness:
    """Go through the steps once.

    What a result is written over is gone in the step that reads it last; a donated argument that a loop carries is
    there until the loop is done. ``saved_inside`` tells the bytes of residuals among what an equation needs inside.
    """
    sizes, lasting, reserved, donated = buffers.sizes, buffers.lasting, buffers.reserved, buffers.donated
    saved = buffers.saved - buffers.throughout
    last = last_uses(steps, buffers.instead)
    dying_at = _dying_at(last, lasting)
    if buffers.instead:
        direct = last_uses(steps, {})
        last.update((number, direct[number]) for number in direct.keys() & buffers.instead.keys() - buffers.again)
    ranges: dict[int, tuple[int, int]] = dict.fromkeys(sorted(buffers.throughout | reserved), (0, len(steps)))
    arguments, total, residuals = sum(sizes[number] for number in buffers.throughout), 0, 0
    total = sum(sizes[number] for number in reserved)
    alive, made_at = list[tuple[int, int, int]](), dict[int, int]()
    for index, step in enumerate(steps):
        _, _, makes, over, inside, eqn = step
        for number in makes:
            made_at[number] = index
            if number not in ranges:
                ranges[number] = index, len(steps) if number in lasting else last[number] + 1
            if number in reserved:
                continue
            if number in donated:
                arguments += sizes[number]
                continue
            total += sizes[number]
            if number in saved:
                residuals += sizes[number]
        dying, reused = dying_at.get(index, ()), 0
        for number in buffers.written_over(step, dying) if dying and over else ():
            reused += sizes[number]
            if number in donated and _jax.carried_operands(eqn):
                result = next(new for new in makes if sizes[new] == sizes[number] and ranges[new][0] == index)
                ranges[result] = index + 1, ranges[result][1]
            else:
                ranges[number] = ranges[number][0], index
        saved_there = saved_inside(eqn) if inside else 0
        alive.append((arguments, residuals + saved_there, total - residuals - reused + inside - saved_there))
        for number in dying:
            if number in donated:
                arguments -= sizes[number]
                continue
            total -= sizes[number]
            if number in saved:
                residuals -= sizes[number]
    del ranges[NOTHING]
    return Liveness(alive, ranges, made_at)


def described(
    steps: Sequence[ScheduledStep], buffers: Buffers, made_at: Mapping[int, int], numbers: Iterable[int]
) -> list[LiveBuffer]:
    """What buffers are, given the steps that make them."""
    saved, rows = buffers.saved - buffers.throughout, list[LiveBuffer]()
    for number in numbers:
        content = buffers.content(number)
        if content is None:
            step, aval, var = steps[made_at[number]], None, None
            if step.eqn is not None:
                var = step.eqn.outvars[step.makes.index(number)]
                aval = buffers.type_of(var)
            content = LiveBuffer(0, aval, step.eqn, var)
        _, aval, eqn, var, argument, constant, role, _, _, _, copy_of = content
        of_kinds = number in saved, number in buffers.gradients, number in buffers.outputs
        aval = buffers.in_bfloat16.get(number, aval)
        rows.append(LiveBuffer(buffers.sizes[number], aval, eqn, var, argument, constant, role, *of_kinds, copy_of))
    return rows


def _dying_at(last: dict[int, int], lasting: set[int]) -> dict[int, list[int]]:
    """For each step the buffers that are dead after it."""
    dying_at: dict[int, list[int]] = {}
    for number, index in last.items():
        if number not in lasting:
            dying_at.setdefault(index, []).append(number)
    return dying_at


def aliased(results: Collection[int], donated: Collection[int], sizes: Sequence[int]) -> list[int]:
    """The results that lie where a donated argument of the same size does."""
    free = Counter(sizes[number] for number in donated)
    placed: list[int] = []
    for number in sorted(results):
        if free[sizes[number]]:
            free[sizes[number]] -= 1
            placed.append(number)
    return placed


# -------------------------------------------------------------------------------------------- what kernels compute anew


_MOST = 96  # XLA for GPUs fuses no further where a kernel would read more


def rematerialized_in_kernels(steps: Sequence[ScheduledStep], buffers: Buffers) -> dict[int, tuple[int, ...]]:
    """The residuals that are computed anew where they are read, and what is read there instead.

    XLA fuses an elementwise operation into every kernel that reads it, those of the backward half too, whose
    operands then stay live. What something else reads is in memory. Residuals that are live to the end are left out.
    """
    sizes, lasting = buffers.sizes, buffers.lasting
    saved = buffers.saved - lasting
    whole = [step.reads for step in steps if not _fuses(step, matmuls=buffers.on.matmuls)]
    in_memory = lasting.union(*whole)
    reads_of: dict[int, Sequence[int]] = {}  # of what can be computed anew, or takes no memory
    made_of: dict[int, frozenset[int]] = {}  # the last of these that cannot
    alike: dict[frozenset[int], list[int]] = {}  # residuals that are made of the same
    for step in steps:
        fusible = _name(step) in FUSIBLE or (not buffers.on.matmuls and _name(step) == "gather")
        for number in step.makes:
            in_register = number in buffers.instead
            if not in_register and (number in in_memory or not fusible or len(step.makes) > 1):
                continue
            reads = [read for read in step.reads if sizes[read] or read in made_of]  # no literals, so that equals meet
            operands = frozenset[int]().union(*(made_of.get(read, {read}) for read in reads))
            if in_register or len(operands) <= _MOST:
                reads_of[number], made_of[number] = reads, frozenset(islice(operands, _MOST + 1))
                if number in saved and sizes[number]:
                    alike.setdefault(operands, []).append(number)
    live = lasting | saved.difference(*alike.values())
    again: dict[int, tuple[int, ...]] = {}
    known: dict[int, frozenset[int]] = {}
    for numbers in alike.values():
        operands_of = {number: _nearest(number, reads_of, live, known) for number in numbers}
        operands = set[int]().union(*operands_of.values())
        if sum([sizes[operand] for operand in operands - live]) < sum([sizes[number] for number in numbers]):
            again.update((number, tuple(sorted(nearest))) for number, nearest in operands_of.items())
            live |= operands
        else:
            live.update(numbers)
            known.clear()  # what is live besides is nobody's nearest operand
    return again


def _nearest(
    number: int, reads_of: Mapping[int, Sequence[int]], live: set[int], known: dict[int, frozenset[int]]
) -> frozenset[int]:
    """What a buffer is computed anew from: on the way to each of its makers, the first that is live.

    ``known`` has it of others that take no memory, and is added to.
    """
    todo = [number]
    while todo:
        here = todo[-1]
        fused_away = [read for read in reads_of[here] if read in reads_of and read not in live]
        missing = [read for read in fused_away if read not in known]
        if not missing:
            todo.pop()
            known[here] = frozenset(reads_of[here]).difference(fused_away).union(*(known[read] for read in fused_away))
        todo += missing
    return known[number]


def _fuses(step: ScheduledStep, *, matmuls: bool) -> bool:
    name = _name(step)
    return name in FUSIBLE or name in REDUCTIONS or name in (MATMULS if matmuls else INDEXED)


def _name(step: ScheduledStep) -> str:
    return "" if step.eqn is None else _jax.kernel_name(step.eqn)


def read_by_matmuls(steps: Sequence[ScheduledStep], around: Mapping[int, tuple[StraightLines, Operation]]) -> set[int]:
    """The buffers that nothing but matmuls read, also in loops; ``around``: as for ``scheduled``."""
    matmuls, others = set[int](), set[int]()
    for step in steps:
        if step.eqn is not None and _jax.takes_bfloat16(step.eqn):
            matmuls.update(step.reads)
            continue
        inside = _inside(*around[id(step.eqn)]) if id(step.eqn) in around else []
        for number, only in zip(step.reads, [*inside, *[False] * (len(step.reads) - len(inside))], strict=True):
            if only is not None:
                (matmuls if only else others).add(number)
    return matmuls - others


def _inside(lines: StraightLines, operation: Operation) -> list[bool | None]:
    """For each operand of a scan whether its body reads it with nothing but matmuls; None where it does not at all."""
    if not _jax.is_scan(operation.eqn):
        return []
    carried = _jax.carried_operands(operation.eqn)
    only = _inputs(lines, operation.bodies[0].jaxpr)
    return [False if index in carried else yes for index, yes in enumerate(only)]


def _inputs(lines: StraightLines, jaxpr: Any) -> list[bool | None]:
    flat = lines(jaxpr)
    shown: dict[int, int] = {}  # of transposes, what they show
    matmuls, others = set[int](), {*flat.outputs}
    for operation, reads, makes in flat.lines:
        read = [shown.get(number, number) for number in reads]
        if operation.name == TRANSPOSE:
            shown[makes[0]] = read[0]
            continue
        inside = _inside(lines, operation) if operation.bodies else [_jax.takes_bfloat16(operation.eqn)] * len(read)
        for number, only in zip(read, inside or [False] * len(read), strict=True):
            if only is not None:
                (matmuls if only else others).add(number)
    others.update(shown[number] for number in flat.outputs if number in shown)
    return [None if number not in matmuls and number not in others else number not in others for number in flat.inputs]


def scheduled(
    steps: list[ScheduledStep], buffers: Buffers, around: Mapping[int, tuple[StraightLines, Operation]]
) -> list[ScheduledStep]:
    """The steps, given in the order of the jaxprs, as taken to run; what is never in memory takes no bytes then.

    ``around`` has for the identity of an equation with bodies the lines that it is from, and its operation.
    """
    on = buffers.on
    read = {number for step in steps for number in step.reads} | buffers.outputs
    for step in steps:
        if step.eqn is not None and _jax.is_scan(step.eqn):  # its dead stacks are not made
            for number in step.makes:
                buffers.sizes[number] *= number in read
    if on.fuses:
        for number, reads in rematerialized_in_kernels(steps, buffers).items():
            buffers.discard(number)
            buffers.instead[number] = reads
            buffers.again.add(number)
    if on.uses_bfloat16:
        _convert_to_bfloat16(steps, buffers, around)
    buffers.lay_out_results(steps)
    order = brought_forward(put_off(steps, buffers.outputs | buffers.gradients), buffers)
    if on.reserves:
        for number in aliased(buffers.results, buffers.donated - buffers.outputs, buffers.sizes):
            buffers.discard(number)
    return order


def _convert_to_bfloat16(
    steps: list[ScheduledStep], buffers: Buffers, around: Mapping[int, tuple[StraightLines, Operation]]
) -> None:
    """Let what only matmuls read take its bytes in bfloat16."""
    types = buffers.types(steps)
    for number in read_by_matmuls(steps, around) - buffers.lasting - buffers.donated:
        half = _jax.as_bfloat16(types.get(number))
        if half is not None and buffers.sizes[number]:
            buffers.sizes[number], buffers.in_bfloat16[number] = buffers.nbytes(half), half
