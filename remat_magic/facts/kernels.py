"""The kernels that a jaxpr comes to once XLA has fused it, and what each does: the ground of estimated times.

Run one by one, as JAX writes them, the equations of a transformer would move several times the bytes that the compiled
program moves. What is assumed here is the fusion that XLA's backends have in common:

* Elementwise operations, conversions, selections, slices, transposes and the like form one kernel with those that they
  read, and a reduction ends one: what it reduces needs no memory, and its result is written.
* A kernel reads each of its operands once. A value is written where another kernel reads it, or where it leaves the
  program. A matmul, a sort, a gather, a scatter, a random generator is a kernel of its own.
* What a reduction or a matmul makes is there only when all of it is: kernels run in stages, and a value goes through
  memory from one stage to the next, unless it can be made anew from nothing (an iota, a mask) or is a broadcast of
  something smaller, which is read instead.
* Views (``reshape``, names, barriers) are their operand. Calls are part of the program around them; a loop's body is a
  program of its own that runs as often as the loop, and of a conditional there is the branch of most FLOPs.

An estimate: backends differ in what they fuse beyond this. ``tests/test_kernels.py`` holds it against XLA's own count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.formulas import BYTES, CONTRACTIONS, FLOPS, moved_bytes
from remat_magic._jax.primitives import (
    ADDITIONS,
    BROADCASTS,
    FUSIBLE,
    INDEXED,
    MADE_ANEW,
    MATMULS,
    REDUCTIONS,
    SCATTERS,
    SLICES,
)
from remat_magic.facts.cost import equation_cost, jaxpr_cost
from remat_magic.jaxprs.one_device import Propagated
from remat_magic.jaxprs.straight_line import LITERAL, Line, Operation, StraightLines
from remat_magic.jaxprs.walk import LiveEquations, TypeOf, own_type
from remat_magic.records import Kernel, Unit


@dataclass(eq=False, slots=True)
class _Value:
    """A value of the flattened program: where it is made, and what is read instead of it by another kernel."""

    size: int
    stage: int = 0
    maker: _Node | None = None
    instead: tuple[_Value, ...] | None = None  # of a broadcast its operand, of what is made from nothing nothing
    written: bool = False


class _Step(NamedTuple):
    """What one equation does on one device wherever its body is called; ``key``: the equation's identity."""

    eqn: Any
    key: int
    name: str
    fusible: bool
    reduction: bool
    again: bool
    flops: int | None
    sizes: tuple[int, ...]
    sent: int


@dataclass(eq=False, slots=True)
class _Node:
    """A step where it stands in the flattened program, in a kernel with others: union by ``parent``."""

    step: _Step
    reads: tuple[_Value, ...]
    stage: int
    fusible: bool
    makes: list[_Value] = field(default_factory=list)
    parent: _Node | None = None

    def kernel(self) -> _Node:
        """The node that stands for the kernel."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node


def kernels_of(
    jaxpr: Any, lines: StraightLines | None = None, recomputing: Callable[[Any], bool] | None = None
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels of one run of a jaxpr, equal ones merged, and what recomputation has in them.

    ``lines`` are the straight lines of its live code; all of it is live if None. ``recomputing`` tells whether an
    equation, at any depth, computes a forward value again; none does if None. Of these operations the second has the
    kernels with the bytes that are read for them and that they write.
    """
    fusion = _Fusion(lines or StraightLines(), recomputing)
    fusion.run(jaxpr)
    kernels, recomputed = fusion.kernels()
    fusion.close()
    return _merged(kernels), _merged(recomputed)


def kernels_of_halves(
    forward: Any,
    backward: Any,
    live: LiveEquations,
    recomputed: Collection[int],
    type_of: TypeOf,
    named_bytes: tuple[int, int],
    parts: int,
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels of the forward half, of the backward half, and what is recomputed of these.

    ``recomputed`` has the identities of the backward equations that recompute, ``named_bytes`` is what the collectives
    that either half names give a device, and ``parts`` in how many the gradient is taken.
    """
    kernels = [
        kernels_of(forward, StraightLines(type_of=type_of))[0],
        *kernels_of(backward, StraightLines(live, type_of=type_of), lambda eqn: id(eqn) in recomputed),
    ]
    if isinstance(type_of, Propagated):
        for number, of_half in enumerate(named_bytes):
            kernels[number] = _with_xla_collectives(kernels[number], type_of.communicated[number], of_half)
    first, second, again = (tuple(kernel.often(parts) for kernel in of_half) for of_half in kernels)
    return first, second, again


def nbytes_of(collectives: Counter[_jax.CompiledCollective] | None) -> int | None:
    """The bytes that a device has of the results of all collectives; None where they are not known."""
    return None if collectives is None else sum(runs * collective.nbytes for collective, runs in collectives.items())


def _with_xla_collectives(
    kernels: tuple[Kernel, ...], collectives: Counter[_jax.CompiledCollective] | None, named_bytes: int
) -> tuple[Kernel, ...]:
    """The kernels of a half that XLA has compiled, and one for what it inserts beyond the program's own collectives.

    ``collectives`` are all those of the compiled half; those that the program names among them give a device
    ``named_bytes``.
    """
    nbytes, unknown = nbytes_of(collectives), Kernel(None, 0, "f32", "vector", inserted=True)
    if collectives is None or nbytes is None or any(collective.sent is None for collective in collectives):
        return (*kernels, unknown)
    all_sent = sum(runs * (collective.sent or 0) for collective, runs in collectives.items())
    sent = all_sent - sum(kernel.runs * kernel.sent for kernel in kernels)
    if sent <= 0:
        return kernels
    moved = max(nbytes - named_bytes, 0)
    return (*kernels, Kernel(0, moved, "f32", "vector", sent=sent, inserted=True))


def shares(jaxpr: Any, live: Callable[[Any], bool] | None = None, type_of: TypeOf = own_type) -> dict[int, Kernel]:
    """For every operation of a jaxpr, at any depth, its share of its kernel in one run; by ``id`` of equation.

    What several operations of a kernel read is shared between them; what is written is the share of what makes it.
    ``type_of`` tells the types of variables, with how they are spread over a mesh.
    """
    fused: list[list[_Node]] = []
    fusion = _Fusion(StraightLines(live, type_of=type_of), None, fused=fused)
    fusion.run(jaxpr)
    fusion.kernels()  # tells of what is fused on the way
    share_of: dict[int, Kernel] = {}
    for nodes in fused:
        reads = [[*_reads([node])] for node in nodes]
        readers = Counter(id(value) for of_node in reads for value, _, _ in of_node)
        for node, of_node in zip(nodes, reads, strict=True):
            part = [(value, size // readers[id(value)], False) for value, size, _ in of_node]
            share_of[node.step.key] = _kernel([node], part)
    _release(node for nodes in fused for node in nodes)
    return share_of


def in_registers(jaxpr: Any, lines: StraightLines) -> set[int]:
    """The values of a jaxpr's straight line that only the kernel reads that makes them, by their numbers.

    A matmul reads what it is given from memory, but for a transpose of it.
    """
    fusion = _Fusion(lines, None, inside=False)
    values = fusion.run(jaxpr)
    fusion.fuse()
    never = {
        number
        for line in lines(jaxpr).lines
        for number in line.makes
        if (value := values[number]) is not None and not value.written
    }
    fusion.close()
    return never


# FLOPs, bytes, dtype, unit, bytes sent, and whether its times are known.
_Alike = tuple[int | None, int, str, Unit, int, bool]


def _merged(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    counts: Counter[_Alike] = Counter()
    for kernel in kernels:
        if kernel.flops or kernel.bytes or not kernel.known:
            alike = (kernel.flops, kernel.bytes, kernel.dtype, kernel.unit, kernel.sent, kernel.times is not None)
            counts[alike] += kernel.runs
    return tuple(
        Kernel(flops, moved, dtype, unit, runs if times_known else None, 1 if times_known else runs, sent)
        for (flops, moved, dtype, unit, sent, times_known), runs in counts.items()
    )


_Kernels = tuple[list[Kernel], list[Kernel]]
"""All kernels, and the parts of them that recomputation is."""


class _Known(NamedTuple):
    """What is found out once, by identity: the kernels of bodies that loops share, and what equations do."""

    bodies: dict[int, _Kernels]
    steps: dict[int, _Step]


class _Fusion:
    """The nodes of a straight line, joined to kernels, and the kernels of the loops and branches in it."""

    def __init__(
        self,
        lines: StraightLines,
        recomputing: Callable[[Any], bool] | None,
        shared: _Known | None = None,
        fused: list[list[_Node]] | None = None,
        *,
        inside: bool = True,
    ) -> None:
        # Without what is inside of loops costs are not needed.
        self._lines, self._recomputing, self._with_bodies = lines, recomputing, inside
        self._nodes: list[_Node] = []
        self._inside: _Kernels = ([], [])
        self._known = _Known({}, {}) if shared is None else shared
        self._fused = fused

    def run(self, jaxpr: Any) -> Sequence[_Value | None]:
        """Take in a program, whose inputs are in memory and whose outputs are written: its values, by their numbers."""
        flat = self._lines(jaxpr)
        values: list[Any] = [None] * len(flat.types)
        for number in (*flat.inputs, *flat.constants.values()):
            values[number] = _Value(_jax.nbytes(flat.types[number]), written=True)
        for number in flat.free:
            values[number] = _Value(_jax.nbytes(flat.types[number]), instead=())
        for line in flat.lines:
            operands = tuple([values[number] for number in line.reads if number != LITERAL])
            if line.operation.bodies:
                self._around(line, operands, values)
            else:
                self._node(line, operands, values)
        for number in flat.outputs:
            values[number].written = True
        return values

    def _around(self, line: Line, operands: Sequence[_Value], values: list[Any]) -> None:
        stage = 1 + max((value.stage for value in operands), default=0)
        for value in operands:
            value.written = True
        for number, var in zip(line.makes, line.operation.eqn.outvars, strict=True):
            values[number] = _Value(_jax.nbytes(self._lines.type_of(var)), stage, written=True)
        if not self._with_bodies:
            return
        runs = whole = again = [(body, self._body(body.jaxpr)) for body in line.operation.bodies]
        if _jax.is_cond(line.operation.eqn):  # what runs at most, and what is recomputed at most
            whole = [max(runs, key=lambda run: jaxpr_cost(run[0].jaxpr, self._lines.live, self._lines.type_of).flops)]
            again = [max(runs, key=lambda run: sum((part.flops or 0) * part.runs for part in run[1][1]))]
        for body, (kernels, _) in whole:
            self._inside[0].extend(kernel.often(body.times) for kernel in kernels)
        for body, (_, recomputed) in again:
            self._inside[1].extend(part.often(body.times) for part in recomputed)

    def _body(self, jaxpr: Any) -> _Kernels:
        kernels = self._known.bodies.get(id(jaxpr))
        if kernels is None:
            fusion = _Fusion(self._lines, self._recomputing, self._known, self._fused)
            fusion.run(jaxpr)
            kernels = self._known.bodies[id(jaxpr)] = fusion.kernels()
            if self._fused is None:
                fusion.close()
        return kernels

    def _step(self, operation: Operation) -> _Step:
        eqn, name = operation.eqn, operation.name
        step = self._known.steps.get(id(operation.eqn))
        if step is None:
            again, whole = self._recomputing is not None and self._recomputing(eqn), eqn
            if self._lines.type_of is not own_type:  # on a mesh
                eqn = _jax.equation_of_one(eqn, self._lines.type_of)
            sizes = tuple(_jax.nbytes(var.aval) for var in eqn.outvars)
            flops, sent = None, 0
            if self._with_bodies:
                talk = _jax.communication(whole, eqn)
                flops, sent = _flops(eqn, _jax.primitive_name(eqn)), 0 if talk is None else talk.sent
            step = _Step(eqn, id(whole), name, name in FUSIBLE, name in REDUCTIONS, again, flops, sizes, sent)
            self._known.steps[id(operation.eqn)] = step
        return step

    def _node(self, line: Line, operands: tuple[_Value, ...], values: list[Any]) -> None:
        step = self._step(line.operation)
        fusible = step.fusible
        stage = max([value.stage for value in operands], default=0)
        node = _Node(step, operands, stage, fusible or step.reduction)
        instead: tuple[_Value, ...] | None = None
        if step.name in BROADCASTS or (fusible and all(value.instead == () for value in operands)):
            instead = tuple({id(read): read for value in operands for read in _read_for(value)}.values())
        for number, size in zip(line.makes, step.sizes, strict=True):
            value = _Value(size, stage if fusible else stage + 1, node, instead, not fusible)
            node.makes.append(value)
            values[number] = value
        if node.fusible:
            for value in operands:
                maker = value.maker
                if maker is not None and maker.fusible and maker.stage == stage:
                    kernel, other = node.kernel(), maker.kernel()
                    if kernel is not other:
                        kernel.parent = other
        self._nodes.append(node)

    def fuse(self) -> tuple[dict[int, list[_Node]], dict[int, list[tuple[_Value, int, bool]]]]:
        """The nodes of each kernel, and what it reads from memory, which is written from now on."""
        fused: dict[int, list[_Node]] = {}
        for node in self._nodes:
            kernel = node.kernel()
            node.parent = None if kernel is node else kernel  # from here on one step away
            fused.setdefault(id(kernel), []).append(node)
        reads = {key: [*_reads(nodes)] for key, nodes in fused.items()}
        for of_kernel in reads.values():
            for value, _, _ in of_kernel:
                value.written = True
        return fused, reads

    def kernels(self) -> _Kernels:
        """All kernels, those of loops and branches included."""
        fused, reads = self.fuse()
        if self._fused is not None:
            self._fused += fused.values()
        kernels, recomputed = list[Kernel](), list[Kernel]()
        for key, nodes in fused.items():
            kernels.append(_kernel(nodes, reads[key]))
            again = [node for node in nodes if node.step.again]
            if again:
                recomputed.append(_kernel(again, [read for read in reads[key] if read[2]]))
        return kernels + self._inside[0], recomputed + self._inside[1]

    def close(self) -> None:
        """Let go of the nodes, once their kernels are made."""
        _release(self._nodes)
        self._nodes.clear()


def _release(nodes: Iterable[_Node]) -> None:
    """Nodes and their values hold each other, which only the garbage collector would free."""
    for node in nodes:
        node.makes.clear()


def _flops(eqn: Any, name: str) -> int | None:
    formula = FLOPS.get(name)
    if formula is not None:
        return formula(eqn)
    price = equation_cost(eqn)
    return None if price.uncosted else price.flops


def _read_for(value: _Value) -> tuple[_Value, ...]:
    return (value,) if value.instead is None else value.instead


def _reads(nodes: Sequence[_Node]) -> Iterator[tuple[_Value, int, bool]]:
    """The values that a kernel reads from memory, how many bytes of each, and whether recomputation asks for them."""
    kernel = nodes[0].parent or nodes[0]
    whole: dict[int, tuple[_Value, bool]] = {}
    for node in nodes:
        outside = [
            read
            for value in node.reads
            if (maker := value.maker) is None or (maker.parent or maker) is not kernel or not maker.fusible
            for read in (_read_for(value) if node.fusible else (value,))
        ]
        again = node.step.again
        if node.step.name in SLICES and outside:
            yield outside[0], min(node.makes[0].size, outside[0].size), again
            continue
        for value in outside:
            before = whole.get(id(value))
            whole[id(value)] = (value, again if before is None else before[1] and again)
    for value, again in whole.values():
        yield value, value.size, again


def _kernel(nodes: Sequence[_Node], reads: Sequence[tuple[_Value, int, bool]]) -> Kernel:
    flops: int | None = 0
    widest = nodes[0].step  # whose dtype stands for all
    for node in nodes:
        step = node.step
        flops = None if flops is None or step.flops is None else flops + step.flops
        if (step.flops or 0) > (widest.flops or 0):
            widest = step
    first = nodes[0].step
    if nodes[0].fusible:
        moved = sum([size for _, size, _ in reads])
        moved += sum([value.size for node in nodes for value in node.makes if value.written])
    else:
        moved = BYTES.get(first.name, moved_bytes)(first.eqn)
    # What is computed with: of a matmul its operands, the wider where they differ, else the result.
    atoms = widest.eqn.invars[:2] if widest.name in CONTRACTIONS else widest.eqn.outvars[:1]
    wide = max(atoms, key=lambda atom: getattr(getattr(atom.aval, "dtype", None), "itemsize", 0), default=None)
    dtype = "" if wide is None else _jax.short_dtype(wide.aval)
    unit: Unit = "matmul" if first.name in CONTRACTIONS else "vector"
    return Kernel(flops, moved, dtype, unit, sent=first.sent)  # a collective is a kernel of its own


# ---------------------------------------------------------------------------------------------- what takes no memory


_NOT_MADE_AGAIN = BROADCASTS | REDUCTIONS | MATMULS


def fused_away(jaxpr: Any, lines: StraightLines, *, matmuls: bool) -> tuple[set[int], set[int]]:
    """The values that are never in memory, and those that are only for as long as what does not fuse needs them.

    A kernel that reads what an elementwise operation makes may run that operation itself: XLA fuses a producer into
    each of its consumers. It has the operands if something reads them as late anyway, or if they take less than what is
    made of them. A sum of sums is one kernel, and all terms are held until it runs. ``matmuls``: as for ``fuses``.
    """
    flat = lines(jaxpr)
    never = in_registers(jaxpr, lines)
    if matmuls:
        never -= {n for line in flat.lines if _jax.is_strided(line.operation.eqn) for n in line.makes}
    last, last_fused, last_other = dict[int, int](), dict[int, int](), dict[int, int]()
    uses = Counter(number for line in flat.lines for number in line.reads)
    for index, line in enumerate(flat.lines):
        for number in line.reads:
            last[number] = index
            (last_fused if fuses(line, matmuls=matmuls) else last_other)[number] = index
    for number in flat.outputs:
        last[number] = last_other[number] = len(flat.lines)
    for line in reversed(flat.lines):
        for number in line.makes:
            if number in never:
                for read in line.reads:
                    last[read] = max(last.get(read, 0), last.get(number, 0))
    again = set[int]()
    read_for: dict[int, Sequence[int]] = {}  # for what takes no memory for its kernel
    for line in flat.lines:
        reads = [number for number in line.reads if number != LITERAL]
        for number in line.makes:
            end = last_fused.get(number, -1)
            if number in never or line.operation.name in MADE_ANEW:
                read_for[number] = reads
                if number not in never:
                    last[number] = 0  # what it is made of may be gone before it
            elif (
                fuses(line, matmuls=matmuls)
                and line.operation.name not in (_NOT_MADE_AGAIN if matmuls else _NOT_MADE_AGAIN | SCATTERS)
                and end > last_other.get(number, -1)
            ):
                earlier = _gone_before(end, reads, last, read_for)
                kept_for_it = earlier.difference(read_for)
                ends_sum = line.operation.name in ADDITIONS and flat.lines[end].operation.name in ADDITIONS
                taken = sum([_jax.nbytes(flat.types[read]) for read in kept_for_it])
                if (ends_sum and uses[number] == 1) or taken <= _jax.nbytes(flat.types[number]):
                    last.update(dict.fromkeys(earlier, end))
                    read_for[number] = reads
                    (again if number in last_other else never).add(number)
    return never, again


def _gone_before(
    end: int, reads: Iterable[int], last: Mapping[int, int], read_for: Mapping[int, Sequence[int]]
) -> set[int]:
    """What of certain values, and of all that is read for these, is read last before an end.

    What is read for a value is read as late as the value.
    """
    gone, todo = set[int](), [*reads]
    while todo:
        read = todo.pop()
        if last[read] < end and read not in gone:
            gone.add(read)
            todo += read_for.get(read, ())
    return gone


def fused_operands(jaxpr: Any, lines: StraightLines) -> set[int]:
    """The positions of the inputs that nothing but kernels of fused operations read: a slice of a stack is such."""
    flat = lines(jaxpr)
    whole = {number for line in flat.lines if not fuses(line) for number in line.reads}.union(flat.outputs)
    return {position for position, number in enumerate(flat.inputs) if number not in whole}


def fuses(line: Line, *, matmuls: bool = False) -> bool:
    """Whether an operation runs in one kernel with what makes its operands; ``matmuls``: these do so as well.

    So then does what puts one element into each row, as the gradient of a loss that takes one of each row's
    probabilities: XLA for TPUs makes a comparison and a selection of it. Every second row, of which an associative scan
    is made, is a kernel of its own there. XLA for GPUs, where matmuls do not, takes
    elements by index in the kernel that needs them, and puts them by index in the kernel that makes them.
    """
    name, eqn = line.operation.name, line.operation.eqn
    if line.operation.bodies:
        return False
    if matmuls and _jax.is_strided(eqn):
        return False
    more = name in MATMULS or _jax.is_one_hot(eqn) if matmuls else name in INDEXED
    return name in FUSIBLE or name in REDUCTIONS or more
