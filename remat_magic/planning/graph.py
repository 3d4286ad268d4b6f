"""What the backward pass needs, and what computing each of it again needs: the ground on which plans are made.

It is read off JAX's own jaxprs. The program, with every value named, is differentiated under a policy that saves none.
In the backward jaxpr each operation stands with its operands, and each name is a *gate*: save that value, and what lies
behind it need not run for those who read it there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from remat_magic import _jax
from remat_magic.engine.engine import Dissection
from remat_magic.facts.cost import equation_cost
from remat_magic.facts.residuals import Recomputation, residuals, saved_values
from remat_magic.jaxprs.rewriting import NamedProgram, is_given
from remat_magic.jaxprs.walk import Scope, TypeOf, leaves, own_type
from remat_magic.records import dearest


class Figures(NamedTuple):
    """What a choice comes to: bytes kept on the device, recomputed FLOPs, bytes moved to the host."""

    saved_bytes: int
    recomputed_flops: int
    offloaded_bytes: int


@dataclass(eq=False)
class Graph:
    """Operations of a backward pass and what they read.

    Attributes:
        flops: of each node, all its runs together; 0 for a gate.
        needed: whether a node runs whatever is saved.
        gates: for the nodes that are gates the name that saves the value, its bytes, and how often it is passed.
        reads: for each node the nodes that it reads, gates among them.
        leaves: for each node the intermediates that it reads which the policy has no say about (a checkpoint's inputs).
        leaf_bytes: the bytes of these, by number.
        copies: how many copies of its value saving a name keeps.
        operations: the equations that a node recomputes, each with how often it runs.
        deferred: whether some of these ran in no forward pass, so that their values have no names.
        type_of: gives the types of variables, with how they are sharded over a mesh.
    """

    flops: list[int] = field(default_factory=list)
    needed: list[bool] = field(default_factory=list)
    gates: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    leaves: list[tuple[int, ...]] = field(default_factory=list)
    leaf_bytes: dict[int, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    operations: list[tuple[tuple[Any, int], ...]] = field(default_factory=list)
    deferred: bool = False
    type_of: TypeOf = own_type

    def predict(self, chosen: Collection[str]) -> tuple[int, int]:
        """``(saved bytes, recomputed FLOPs)`` if just these names are saved."""
        return self.figures(chosen)[:2]

    def figures(self, chosen: Collection[str], offloaded: Collection[str] = ()) -> Figures:
        """What it comes to if just these names are saved, those ``offloaded`` among them in the host's memory."""
        run = self.run(chosen)
        moved = sum(size for name, (size, _) in self.sizes(run.gates).items() if name in offloaded) if offloaded else 0
        return Figures(run.saved_bytes - moved, run.recomputed_flops, moved)

    def run(self, chosen: Collection[str] = ()) -> Run:
        """The backward pass if just these names are saved."""
        return Run(self._arrays, chosen)

    @functools.cached_property
    def _arrays(self) -> _Arrays:
        return _Arrays(self)

    def used(self, chosen: Collection[str]) -> frozenset[str]:
        """Those of some names whose values are read if just these names are saved."""
        return self.run(chosen).used

    def sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """For each name among gates the bytes that saving it takes for these, and how many values that is.

        Where checkpoints are nested, a value is read in several rounds of recomputation, and saved once; and so is what
        stays the same in a loop.
        """
        times: dict[str, int] = {}
        bytes_of_one: dict[str, int] = {}
        for gate in gates:
            name, bytes_of_one[name], passed = self.gates[gate]
            times[name] = min(times.get(name, 0) + passed, self.copies.get(name, passed))
        return {name: (bytes_of_one[name] * times[name], times[name]) for name in times}


class _Arrays:
    """A graph as arrays, by which thousands of choices are soon weighed: its nodes, its residuals, and a start."""

    def __init__(self, graph: Graph) -> None:
        count, self.nodes = len(graph.flops), len(graph.flops)
        leaf = {leaf: count + i for i, leaf in enumerate(graph.leaf_bytes)}
        reads: list[Sequence[int]] = [
            (*graph.reads[node], *(leaf[of] for of in graph.leaves[node])) for node in range(count)
        ]
        reads += [()] * len(leaf)
        reads.append([node for node in range(count) if graph.needed[node]])  # from here all that runs is reached
        self.starts = np.cumsum([0, *map(len, reads)])
        self.columns = np.fromiter(itertools.chain.from_iterable(reads), np.int32, int(self.starts[-1]))
        self.rows = np.repeat(np.arange(len(reads), dtype=np.int32), np.diff(self.starts))
        self.flops = np.array([*graph.flops, *[0] * (len(leaf) + 1)], np.int64)
        self.leaf_bytes = np.array([*[0] * count, *graph.leaf_bytes.values(), 0], np.int64)
        self.names = list(dict.fromkeys(name for name, _, _ in graph.gates.values()))
        self.number = {name: i for i, name in enumerate(self.names)}
        self.name_of = np.full(len(reads), len(self.names))
        self.passed = np.zeros(len(reads))
        self.bytes, self.copies = np.zeros((2, len(self.names) + 1), np.int64)
        for gate, (name, size, passed) in graph.gates.items():
            number = self.name_of[gate] = self.number[name]
            self.passed[gate], self.bytes[number] = passed, size
            self.copies[number] = graph.copies.get(name, passed)


class Run:
    """The backward pass under a choice of names: what it holds and computes.

    ``nodes`` are those that run, and ``gates`` those whose saved values they read.
    """

    def __init__(self, arrays: _Arrays, chosen: Collection[str]) -> None:
        self._arrays, size = arrays, len(arrays.flops)
        saved = np.zeros(len(arrays.names) + 1, bool)
        saved[[arrays.number[name] for name in chosen if name in arrays.number]] = True
        closed = saved[arrays.name_of]
        # Nothing lies behind a gate that is closed: it leads to itself.
        columns = np.where(closed[arrays.rows], arrays.rows, arrays.columns)
        matrix = csr_array((np.ones(len(columns)), columns, arrays.starts), shape=(size, size))
        reached: Any = breadth_first_order(matrix, size - 1, return_predecessors=False)
        again = reached[~closed[reached]]
        self.gates, self.nodes = reached[closed[reached]], again[again < arrays.nodes]
        times = np.bincount(arrays.name_of[self.gates], arrays.passed[self.gates], len(arrays.bytes)).astype(np.int64)
        nbytes = (np.minimum(times, arrays.copies) * arrays.bytes).sum() + arrays.leaf_bytes[again].sum()
        self.saved_bytes, self.recomputed_flops = int(nbytes), int(arrays.flops[again].sum())

    @property
    def used(self) -> frozenset[str]:
        """The names whose saved values are read."""
        return self._names(self.gates)

    @property
    def recomputed(self) -> frozenset[str]:
        """The names whose values are computed again, and could be saved."""
        return self._names(self.nodes)

    def _names(self, nodes: Any) -> frozenset[str]:
        numbers = np.unique(self._arrays.name_of[nodes])
        return frozenset(self._arrays.names[i] for i in numbers if i < len(self._arrays.names))


# -------------------------------------------------------------------------------------------------- from JAX's halves


def build(parts: Dissection, runs: int = 1) -> Graph:
    """The graph of a function whose values are all named, and which runs so many times."""
    return _Builder(parts, runs).graph


class _Leaf(NamedTuple):
    """A recomputed equation of a node; ``turns``: how often a device runs it at least."""

    eqn: Any
    flops: int
    branches: tuple[tuple[int, int, int], ...]
    turns: int


class _Builder:
    def __init__(self, parts: Dissection, runs: int) -> None:
        self.graph, self._runs = Graph(type_of=parts.half.type_of), runs
        self._residuals = len(parts.half.residual_types)
        self._recomputation = Recomputation(parts.half.closed, parts.backward, parts.provenances, self._residuals)
        self._paid = _paid(parts)
        self._nodes: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.graph.copies = saved_copies(parts.naming)
        top = self._recomputation.top
        operations = list(self._operations(top))
        for scope, eqn in operations:
            self._nodes[id(scope), id(eqn)] = len(self._nodes)
            self._add(scope, eqn)
        for scope, eqn in operations:
            self._connect(scope, eqn.invars)
        # What leaves is needed: one more node, which reads it and costs nothing.
        self.graph.flops.append(0)
        self.graph.operations.append(())
        self.graph.needed.append(True)
        self._connect(top, top.jaxpr.outvars)

    # ------------------------------------------------------------------------------------------------------------ nodes

    def _operations(self, scope: Scope) -> Iterator[tuple[Scope, Any]]:
        for eqn in scope.jaxpr.eqns:
            if not self._recomputation.live(eqn):
                continue
            if _gate(eqn) is not None:
                yield scope, eqn
            elif _jax.is_transparent(eqn):
                continue
            elif _entered(scope, eqn):
                for inner in scope.inner(eqn):
                    yield from self._operations(inner)
            else:
                yield scope, eqn

    def _add(self, scope: Scope, eqn: Any) -> None:
        name = _gate(eqn)
        times = scope.nesting[1]
        if name is not None:
            size = _jax.nbytes(self.graph.type_of(eqn.outvars[0]))
            self.graph.gates[len(self.graph.flops)] = (name, size, times or 1)
            self.graph.flops.append(0)
            self.graph.operations.append(())
            self.graph.needed.append(False)
            return
        again = True
        operations: list[_Leaf] = []
        for inner, leaf in leaves(scope, eqn):
            if not self._recomputation.live(leaf):
                continue
            if self._recomputation(leaf):
                price, around = equation_cost(leaf, type_of=self.graph.type_of), self._recomputation.surroundings(inner)
                # What is not known counts as none, as in the report.
                flops = 0 if price.uncosted else price.flops * around.runs * self._runs
                operations.append(_Leaf(leaf, flops, around.branches, inner.turns * self._runs))
                self.graph.deferred |= flops > 0 and not self._recomputation.repeated(leaf)
            elif not _jax.is_transparent(leaf):
                again = False
        operations = dearest(operations)
        self.graph.flops.append(sum(leaf.flops for leaf in operations))
        self.graph.operations.append(tuple((leaf.eqn, leaf.turns) for leaf in operations))
        self.graph.needed.append(not again)

    # ------------------------------------------------------------------------------------------------------------ edges

    def _connect(self, scope: Scope, atoms: Sequence[Any]) -> None:
        nodes: dict[int, None] = {}
        leaves: dict[int, None] = {}
        for atom in atoms:
            if not _jax.is_literal(atom):
                read, given = self._sources(scope, atom)
                nodes.update(dict.fromkeys(read))
                leaves.update(dict.fromkeys(given))
        paid = dict(self._paid[leaf] for leaf in leaves if leaf in self._paid)
        self.graph.leaf_bytes.update(paid)
        self.graph.reads.append(tuple(nodes))
        self.graph.leaves.append(tuple(paid))

    def _sources(self, scope: Scope, atom: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The nodes and the residuals that a value comes from; several where a loop carries it."""
        key = (id(scope), id(atom))
        if key not in self._ends:
            nodes: dict[int, None] = {}
            leaves: dict[int, None] = {}
            seen: set[tuple[int, int]] = set()
            todo: list[tuple[Scope, Any]] = [(scope, atom)]
            while todo:
                here, value = todo.pop()
                if _jax.is_literal(value) or (id(here), id(value)) in seen:
                    continue
                seen.add((id(here), id(value)))
                maker = here.makers.get(value)
                if maker is None:
                    number = here.inputs.get(value)
                    if here.parent is None and number is not None and number < self._residuals:
                        leaves[number] = None
                    todo += here.before.get(value, ())  # nothing for a constant
                    continue
                eqn, output = maker
                node = self._nodes.get((id(here), id(eqn)))
                if node is not None:
                    nodes[node] = None
                elif _jax.is_transparent(eqn):
                    todo.append((here, eqn.invars[output if len(eqn.outvars) == len(eqn.invars) else 0]))
                else:
                    for inner in here.inner(eqn):
                        result = inner.body.results[output] if inner.body else None
                        if result is not None:
                            todo.append((inner, inner.jaxpr.outvars[result]))
            self._ends[key] = tuple(nodes), tuple(leaves)
        return self._ends[key]


def _entered(scope: Scope, eqn: Any) -> bool:
    """Whether the operations inside an equation are nodes of their own: calls, checkpoints and scans."""
    inside = scope.inner(eqn)
    body = inside[0].body if len(inside) == 1 else None
    return body is not None and body.kind != "branch" and None not in body.operands and None not in body.results


def _gate(eqn: Any) -> str | None:
    """The name that saves what an equation gives, if it is a gate."""
    name = _jax.checkpoint_name_of(eqn)
    return name if is_given(name) else None


def _paid(parts: Dissection) -> dict[int, tuple[int, int]]:
    """For each residual leaf that is an intermediate the first leaf of the same value, and the value's bytes."""
    saved = saved_values(parts.half.closed, parts.half.outputs)
    rows = residuals(parts.half, saved, parts.provenances, parts.arguments)
    return {
        leaf: (value.leaves[0], row.nbytes)
        for value, row in zip(saved, rows, strict=True)
        if row.kind == "intermediate"
        for leaf in value.leaves
    }


# -------------------------------------------------------------------------------------------------------- kept copies


def saved_copies(naming: NamedProgram) -> dict[str, int]:
    """For each name that was given in a program the copies of its value that are saved, in all calls together.

    JAX moves residuals out of a scan whose value is the same in every iteration (an attention mask made inside a
    block): these are saved once, whatever the scan's length.
    """
    copies: dict[str, int] = {}

    def visit(jaxpr: Any, inputs: Sequence[frozenset[tuple[int, int]]], depth: int) -> list[frozenset[tuple[int, int]]]:
        """The loops that the outputs change in, from those that the inputs do; a loop is its depth and its length."""
        changing = dict(zip(jaxpr.invars, inputs, strict=True))

        def loops_of(atom: Any) -> frozenset[tuple[int, int]]:
            return frozenset() if _jax.is_literal(atom) else changing.get(atom, frozenset())

        for eqn in jaxpr.eqns:
            read = [*map(loops_of, eqn.invars)]
            everything = frozenset[tuple[int, int]]().union(*read)
            results = [everything] * len(eqn.outvars)
            name, rule, inside = _jax.checkpoint_name_of(eqn), naming.rules.get(id(eqn)), _jax.bodies(eqn)
            if name is not None and is_given(name):
                copies[name] = copies.get(name, 0) + math.prod(length for _, length in everything)
            if rule is not None:  # after its own operands it has tangents, which are no values of the program
                own = read[len(read) - len(_jax.rule_inputs(eqn)) :]
                visit(rule, [*own, *[everything] * (len(rule.invars) - len(own))], depth)
            if len(inside) == 1 and len(inside[0].operands) == len(read) and not _jax.is_custom_rule(eqn):
                body = inside[0].jaxpr
                if _jax.is_scan(eqn):
                    consts, carries, _ = _jax.scan_split(eqn)
                    loop = (depth, _jax.scan_length(eqn))
                    # What a carry is fed with may change with all that the scan is given.
                    into = [*read[:consts], *[everything] * carries, *read[consts + carries :]]
                    into[consts:] = [loops | {loop} for loops in into[consts:]]
                    results = [loops - {loop} for loops in visit(body, into, depth + 1)]
                elif len(body.outvars) == len(eqn.outvars):
                    results = visit(body, read, depth)
            changing.update(zip(eqn.outvars, results, strict=True))
        return [*map(loops_of, jaxpr.outvars)]

    jaxpr = _jax.open_jaxpr(naming.closed)
    visit(jaxpr, [frozenset() for _ in jaxpr.invars], 0)
    return copies
