"""The kernels that a jaxpr comes to once XLA has fused it, and what each does: the ground of estimated times.

Run one by one, as JAX writes them, the equations of a transformer would move several times the bytes that the compiled
program moves. What is reckoned with here is the fusion that XLA's backends have in common:

* Elementwise operations, conversions, selections, slices, transposes and the like form one kernel with those that they
  read, and a reduction ends one: it takes what it reduces from registers and writes its result.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat_magic import _jax
from remat_magic._jax.contractions import CONTRACTIONS
from remat_magic._jax.formulas import BYTES, FLOPS, is_operation, moved_bytes
from remat_magic._jax.primitives import BROADCASTS, FUSIBLE, REDUCTIONS, SLICES, VIEWS
from remat_magic.facts.cost import equation_cost, jaxpr_cost
from remat_magic.jaxprs.walk import multiply
from remat_magic.records import Kernel

__all__ = ["kernels_of", "shares"]


@dataclass(eq=False, slots=True)
class _Value:
    """A value of the flattened program: where it is made, and what is read instead of it by another kernel."""

    size: int
    stage: int = 0
    maker: _Node | None = None
    instead: tuple[_Value, ...] | None = None  # of a broadcast its operand, of what is made from nothing nothing
    written: bool = False


@dataclass(eq=False, slots=True)
class _Node:
    """An equation of the flattened program, in a kernel with others: union by ``parent``."""

    eqn: Any
    name: str
    reads: tuple[_Value, ...]
    stage: int
    fusible: bool
    again: bool
    flops: int | None
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
    jaxpr: Any, live: Callable[[Any], bool] | None = None, recomputing: Callable[[Any], bool] | None = None
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels of one run of a jaxpr, equal ones merged, and what recomputation has in them.

    Args:
        jaxpr: open or closed.
        live: tells an equation that matters from dead code; all do if None.
        recomputing: tells whether an equation, at any depth, computes a forward value again; none does if None.

    Returns:
        All work, and the part of it that recomputation is: its operations, with the bytes that are read for them
        and that they write.
    """
    program = _Program(live, recomputing)
    program.run(_jax.open_jaxpr(jaxpr))
    everything: dict[Kernel, int | None] = {}
    again: dict[Kernel, int | None] = {}
    for each, is_again in program.records():
        _count(everything, each)
        if is_again is not None:
            _count(again, is_again)
    program.close()
    return _merged(everything), _merged(again)


def shares(jaxpr: Any, live: Callable[[Any], bool] | None = None) -> dict[int, Kernel]:
    """For every operation of a jaxpr, at any depth, its share of its kernel's work in one run; by ``id`` of equation.

    What several operations of a kernel read is shared between them; what is written is the share of what makes it.
    """
    seen: list[list[_Node]] = []
    program = _Program(live, None, seen=seen)
    program.run(_jax.open_jaxpr(jaxpr))
    for _ in program.records():  # tells of the kernels on the way
        pass
    found: dict[int, Kernel] = {}
    for nodes in seen:
        reads = [[*_reads([node])] for node in nodes]
        readers = Counter(id(value) for mine in reads for value, _, _ in mine)
        for node, mine in zip(nodes, reads, strict=True):
            part = [(value, size // readers[id(value)], False) for value, size, _ in mine]
            found[id(node.eqn)] = _record([node], part)
    _release(node for nodes in seen for node in nodes)
    return found


def _count(found: dict[Kernel, int | None], each: Kernel) -> None:
    key = Kernel(each.flops, each.bytes, each.dtype, each.unit, None if each.times is None else 1)
    if each.flops or each.bytes or not each.known:
        found[key] = None if each.times is None else (found.get(key) or 0) + each.times


def _merged(found: dict[Kernel, int | None]) -> tuple[Kernel, ...]:
    return tuple(Kernel(key.flops, key.bytes, key.dtype, key.unit, times) for key, times in found.items())


class _Program:
    """A straight line of nodes which calls are flattened into, and lumps of work for the rest."""

    def __init__(
        self,
        live: Callable[[Any], bool] | None,
        recomputing: Callable[[Any], bool] | None,
        known: dict[int, list[tuple[Kernel, Kernel | None]]] | None = None,
        seen: list[list[_Node]] | None = None,
    ) -> None:
        self._live, self._recomputing = live, recomputing
        self._nodes: list[_Node] = []
        self._lumps: list[tuple[Kernel, Kernel | None]] = []
        self._known = {} if known is None else known  # bodies that several loops share
        self._seen = seen

    def run(self, jaxpr: Any) -> None:
        """Take in a whole program: what it is given is in memory, and what it gives back is written."""
        env: dict[Any, _Value] = {
            var: _Value(_jax.nbytes(var.aval), written=True) for var in (*jaxpr.constvars, *jaxpr.invars)
        }
        self._equations(jaxpr, env)
        for atom in jaxpr.outvars:
            value = None if _jax.is_literal(atom) else env.get(atom)
            if value is not None:
                value.written = True

    def _equations(self, jaxpr: Any, env: dict[Any, _Value]) -> None:
        for eqn in jaxpr.eqns:
            if self._live is None or self._live(eqn):
                self._equation(eqn, env)

    def _equation(self, eqn: Any, env: dict[Any, _Value]) -> None:
        name = _jax.primitive_name(eqn)
        if name in VIEWS:
            paired = len(eqn.invars) == len(eqn.outvars)
            for index, var in enumerate(eqn.outvars):
                env[var] = _at(env, eqn.invars[index if paired else 0]) if eqn.invars else _free(var)
            return
        inside = () if is_operation(eqn) else _jax.bodies(eqn)
        if inside:
            self._around(eqn, inside, env)
        else:
            self._node(eqn, name, env)

    # ------------------------------------------------------------------------------------------- equations with bodies

    def _around(self, eqn: Any, inside: Sequence[Any], env: dict[Any, _Value]) -> None:
        body = inside[0]
        if len(inside) == 1 and body.inlines:
            inner = {
                var: _at(env, atom)
                for var, atom in zip(body.jaxpr.invars, (eqn.invars[i] for i in body.operands), strict=True)
            }
            inner.update((var, _Value(_jax.nbytes(var.aval), written=True)) for var in body.jaxpr.constvars)
            self._equations(body.jaxpr, inner)
            for var, result in zip(eqn.outvars, body.results, strict=True):
                env[var] = _at(inner, body.jaxpr.outvars[result])
            return
        stage = 1 + max((value.stage for value in self._operands(eqn, env)), default=0)
        for value in self._operands(eqn, env):
            value.written = True
        for var in eqn.outvars:
            env[var] = _Value(_jax.nbytes(var.aval), stage, written=True)
        for jaxpr, times in self._runs(eqn):
            for each, again in self._body(jaxpr):
                total = multiply(each.times, times)
                part = again and replace(again, times=multiply(again.times, times))
                self._lumps.append((replace(each, times=total), part))

    def _runs(self, eqn: Any) -> list[tuple[Any, int | None]]:
        """The jaxprs that an equation runs, each with how often: of a conditional the branch of most FLOPs."""
        runs = _jax.runs_inside(eqn)
        return [max(runs, key=lambda run: jaxpr_cost(run[0], self._live).flops)] if _jax.is_cond(eqn) else runs

    def _body(self, jaxpr: Any) -> list[tuple[Kernel, Kernel | None]]:
        known = self._known.get(id(jaxpr))
        if known is None:
            program = _Program(self._live, self._recomputing, self._known, self._seen)
            program.run(jaxpr)
            known = self._known[id(jaxpr)] = list(program.records())
            if self._seen is None:
                program.close()
        return known

    # ------------------------------------------------------------------------------------------------ single equations

    def _operands(self, eqn: Any, env: dict[Any, _Value]) -> tuple[_Value, ...]:
        return tuple(_at(env, atom) for atom in eqn.invars if not _jax.is_literal(atom))

    def _node(self, eqn: Any, name: str, env: dict[Any, _Value]) -> None:
        operands = self._operands(eqn, env)
        fusible, reduction = name in FUSIBLE, name in REDUCTIONS
        stage = max((value.stage for value in operands), default=0)
        again = self._recomputing is not None and self._recomputing(eqn)
        node = _Node(eqn, name, operands, stage, fusible or reduction, again, _flops(eqn, name))
        instead: tuple[_Value, ...] | None = None
        if name in BROADCASTS or (fusible and all(value.instead == () for value in operands)):
            instead = tuple({id(each): each for value in operands for each in _read_for(value)}.values())
        for var in eqn.outvars:
            value = _Value(_jax.nbytes(var.aval), stage if fusible else stage + 1, node, instead)
            value.written = not fusible
            node.makes.append(value)
            env[var] = value
        for value in operands:
            made = value.maker
            if node.fusible and made is not None and made.fusible and made.stage == stage:
                mine, other = node.kernel(), made.kernel()
                if mine is not other:
                    mine.parent = other
        self._nodes.append(node)

    # ---------------------------------------------------------------------------------------------------------- records

    def records(self) -> Iterator[tuple[Kernel, Kernel | None]]:
        """Every kernel's work, with the part of it that is recomputation if any is."""
        kernels: dict[int, list[_Node]] = {}
        for node in self._nodes:
            kernels.setdefault(id(node.kernel()), []).append(node)
        reads = {key: [*_reads(nodes)] for key, nodes in kernels.items()}
        for found in reads.values():
            for value, _, _ in found:
                value.written = True
        if self._seen is not None:
            self._seen += kernels.values()
        for key, nodes in kernels.items():
            whole = _record(nodes, reads[key])
            again = [node for node in nodes if node.again]
            part = _record(again, [read for read in reads[key] if read[2]]) if again else None
            yield whole, part
        yield from self._lumps

    def close(self) -> None:
        """Let go of the nodes, once their records are made."""
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


def _free(atom: Any) -> _Value:
    return _Value(_jax.nbytes(atom.aval), instead=())


def _at(env: dict[Any, _Value], atom: Any) -> _Value:
    """The value of an operand; literals, and what dead code would have made, cost nothing."""
    return _free(atom) if _jax.is_literal(atom) else env.get(atom) or _free(atom)


def _read_for(value: _Value) -> tuple[_Value, ...]:
    return (value,) if value.instead is None else value.instead


def _reads(nodes: Sequence[_Node]) -> Iterator[tuple[_Value, int, bool]]:
    """The values that a kernel reads from memory, how many bytes of each, and whether recomputation asks for them."""
    kernel = nodes[0].kernel()
    whole: dict[int, tuple[_Value, bool]] = {}
    for node in nodes:
        outside = [
            each
            for value in node.reads
            if value.maker is None or value.maker.kernel() is not kernel or not value.maker.fusible
            for each in (_read_for(value) if node.fusible else (value,))
        ]
        if node.name in SLICES and outside:
            yield outside[0], min(node.makes[0].size, outside[0].size), node.again
            continue
        for value in outside:
            known = whole.get(id(value))
            whole[id(value)] = (value, node.again if known is None else known[1] and node.again)
    for value, again in whole.values():
        yield value, value.size, again


def _record(nodes: Sequence[_Node], reads: Sequence[tuple[_Value, int, bool]]) -> Kernel:
    flops: int | None = 0
    widest = nodes[0]  # whose dtype stands for all
    for node in nodes:
        flops = None if flops is None or node.flops is None else flops + node.flops
        if (node.flops or 0) > (widest.flops or 0):
            widest = node
    if nodes[0].fusible:
        moved = sum(size for _, size, _ in reads)
        moved += sum(value.size for node in nodes for value in node.makes if value.written)
    else:
        moved = BYTES.get(nodes[0].name, moved_bytes)(nodes[0].eqn)
    return Kernel(flops, moved, _dtype(widest), "matmul" if nodes[0].name in CONTRACTIONS else "vector")


def _dtype(node: _Node) -> str:
    """What is computed with: of a matmul its operands, the wider where they differ, else the result."""
    atoms = node.eqn.invars[:2] if node.name in CONTRACTIONS else node.eqn.outvars[:1]
    sizes = [getattr(getattr(atom.aval, "dtype", None), "itemsize", 0) for atom in atoms]
    return _jax.short_dtype(atoms[sizes.index(max(sizes))].aval) if atoms else ""
