"""What the backward pass needs, and what computing each of it again needs: the ground on which plans are made.

JAX itself says so. The program, with every value named, is differentiated under a policy that saves nothing (under
jax_remat3, which leaves no trace of what it does not save, one that saves everything named, where the backward jaxpr
holds both the saved value and what would compute it again). In the backward jaxpr each operation stands with its
operands, and each name is a *gate*: save that value, and what lies behind it need not run for those who read it there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _compat
from remat_magic.analysis.bodies import TRANSPARENT, nbytes
from remat_magic.analysis.cost import equation_cost
from remat_magic.analysis.flow import Scope, makers
from remat_magic.analysis.halves import Forward
from remat_magic.analysis.index import PrimalIndex
from remat_magic.analysis.naming import is_given
from remat_magic.analysis.recompute import Recomputation
from remat_magic.analysis.residuals import saved_values

__all__ = ["Graph", "build"]


@dataclass(eq=False, slots=True)
class Graph:
    """Operations of a backward pass and what they read.

    Attributes:
        flops: of each node, all its runs together; 0 for a gate.
        needed: whether a node runs whatever is saved.
        gates: for the nodes that are gates the name that saves the value and its bytes.
        reads: for each node the nodes that it reads, gates among them.
        leaves: for each node the residuals that it reads which a policy has no say about (a checkpoint's inputs).
        leaf_bytes: the bytes of these residuals, by number; of arguments and constants 0.
        uncosted: primitives of operations whose FLOPs are not known, and which count nothing.
    """

    flops: list[int] = field(default_factory=list)
    needed: list[bool] = field(default_factory=list)
    gates: dict[int, tuple[str, int]] = field(default_factory=dict)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    leaves: list[tuple[int, ...]] = field(default_factory=list)
    leaf_bytes: dict[int, int] = field(default_factory=dict)
    uncosted: set[str] = field(default_factory=set)

    def predict(self, chosen: Collection[str]) -> tuple[int, int]:
        """``(saved bytes, recomputed FLOPs)`` if just these names are saved."""
        nodes, gates = self._run(chosen)
        leaves = {leaf for node in nodes for leaf in self.leaves[node]}
        saved = sum(self.gates[gate][1] for gate in gates) + sum(self.leaf_bytes[leaf] for leaf in leaves)
        return saved, sum(self.flops[node] for node in nodes)

    def used(self, chosen: Collection[str]) -> frozenset[str]:
        """Those of some names whose values are read if just these names are saved."""
        return frozenset(self.gates[gate][0] for gate in self._run(chosen)[1])

    def _run(self, chosen: Collection[str]) -> tuple[list[int], list[int]]:
        """The nodes that run, and the gates whose saved values they read."""
        nodes = [i for i, needed in enumerate(self.needed) if needed]
        seen, gates = set(nodes), list[int]()
        for node in nodes:
            for read in self.reads[node]:
                if read in seen:
                    continue
                seen.add(read)
                gate = self.gates.get(read)
                (nodes if gate is None or gate[0] not in chosen else gates).append(read)
        return nodes, gates


def build(half: Forward, backward: Any, index: PrimalIndex, kinds: Mapping[int, bool]) -> Graph:
    """The graph of a function whose values are all named.

    Args:
        half: its forward half.
        backward: its backward jaxpr.
        index: the primal program.
        kinds: for each residual leaf of the forward half that a policy pays for (an intermediate) True.
    """
    return _Builder(half, backward, index, kinds).graph


class _Builder:
    def __init__(self, half: Forward, backward: Any, index: PrimalIndex, kinds: Mapping[int, bool]) -> None:
        self.graph = Graph()
        self._residuals = len(half.residual_types)
        self._found = Recomputation(half.closed, backward, index, self._residuals, unsaved=True)
        self._half, self._kinds = half, kinds
        self._nodes: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._names = self._named_leaves()
        top = self._found.top
        operations = list(self._operations(top))
        for scope, eqn in operations:
            self._nodes[id(scope), id(eqn)] = len(self._nodes)
            self._add(scope, eqn)
        for scope, eqn in operations:
            self._connect(scope, self._read_by(scope, eqn))
        # What leaves is needed: one more node, which reads it and costs nothing.
        self.graph.flops.append(0)
        self.graph.needed.append(True)
        self._connect(top, list(top.jaxpr.outvars))

    # ------------------------------------------------------------------------------------------------------------ gates

    def _named_leaves(self) -> dict[int, str]:
        """For residuals that are values named by us their names."""
        top = Scope(_compat.open_jaxpr(self._half.closed))
        names: dict[int, str] = {}
        for value in saved_values(self._half.closed, self._half.outputs):
            if _compat.is_literal(value.atom):
                continue
            given = [name for maker in makers(top, value.atom) for name in maker.names if is_given(name)]
            if given:
                names.update(dict.fromkeys(value.leaves, given[0]))
        return names

    def _gate(self, scope: Scope, eqn: Any) -> str | None:
        """The name that saves what an equation gives, if it is a gate."""
        name = _compat.checkpoint_name_of(eqn)
        if is_given(name):
            return name
        if _compat.is_primal_left(eqn):
            leaf = _leaf_of(scope, eqn.invars[0])
            return None if leaf is None else self._names.get(leaf)
        return None

    # ------------------------------------------------------------------------------------------------------------ nodes

    def _operations(self, scope: Scope) -> Iterator[tuple[Scope, Any]]:
        for eqn in scope.jaxpr.eqns:
            if not self._found.live(eqn):
                continue
            if self._gate(scope, eqn) is not None:
                yield scope, eqn
            elif _compat.primitive_name(eqn) in TRANSPARENT:
                continue
            elif _entered(scope, eqn):
                for inner in scope.inner(eqn):
                    yield from self._operations(inner)
            else:
                yield scope, eqn

    def _add(self, scope: Scope, eqn: Any) -> None:
        name = self._gate(scope, eqn)
        times = scope.nesting[1]
        if name is not None:
            self.graph.gates[len(self.graph.flops)] = (name, nbytes(eqn.outvars[0].aval) * (times or 1))
            self.graph.flops.append(0)
            self.graph.needed.append(False)
            return
        flops, again = 0, True
        for inner, leaf in _leaves(scope, eqn):
            if not self._found.live(leaf):
                continue
            if self._found(leaf):
                price = equation_cost(leaf)
                self.graph.uncosted.update(price.uncosted)
                runs = inner.nesting[1]
                flops += 0 if price.uncosted or runs is None else price.flops * runs
            elif _compat.primitive_name(leaf) not in TRANSPARENT:
                again = False
        self.graph.flops.append(flops)
        self.graph.needed.append(not again)

    # ------------------------------------------------------------------------------------------------------------ edges

    def _read_by(self, scope: Scope, eqn: Any) -> list[Any]:
        if self._gate(scope, eqn) is not None:
            return [eqn.invars[1 if _compat.is_primal_left(eqn) else 0]]
        return list(eqn.invars)

    def _connect(self, scope: Scope, atoms: Sequence[Any]) -> None:
        nodes: dict[int, None] = {}
        leaves: dict[int, None] = {}
        for atom in atoms:
            if not _compat.is_literal(atom):
                read, given = self._sources(scope, atom)
                nodes.update(dict.fromkeys(read))
                leaves.update(dict.fromkeys(given))
        for leaf in leaves:
            aval = self._half.residual_types[leaf]
            self.graph.leaf_bytes[leaf] = nbytes(aval) if self._kinds.get(leaf) else 0
        self.graph.reads.append(tuple(nodes))
        self.graph.leaves.append(tuple(leaves))

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
                if _compat.is_literal(value) or (id(here), id(value)) in seen:
                    continue
                seen.add((id(here), id(value)))
                made = here.makers.get(value)
                if made is None:
                    todo += self._outward(here, value, leaves)
                    continue
                eqn, output = made
                node = self._nodes.get((id(here), id(eqn)))
                if node is not None:
                    nodes[node] = None
                elif _compat.primitive_name(eqn) in TRANSPARENT:
                    todo.append((here, eqn.invars[output if len(eqn.outvars) == len(eqn.invars) else 0]))
                else:
                    for inner in here.inner(eqn):
                        result = inner.body.results[output] if inner.body else None
                        if result is not None:
                            todo.append((inner, inner.jaxpr.outvars[result]))
            self._ends[key] = tuple(nodes), tuple(leaves)
        return self._ends[key]

    def _outward(self, here: Scope, value: Any, leaves: dict[int, None]) -> Iterator[tuple[Scope, Any]]:
        index = here.inputs.get(value)
        if index is None:  # a constant
            return
        if here.parent is None or here.body is None:
            if index < self._residuals:
                leaves[index] = None
            return
        operand = here.body.operands[index]
        if operand is not None:
            yield here.parent, here.eqn.invars[operand]
        for output, carried in here.body.carries:
            if carried == index:
                yield here, here.jaxpr.outvars[output]


def _entered(scope: Scope, eqn: Any) -> bool:
    """Whether the operations inside an equation are nodes of their own: calls, checkpoints and scans."""
    inside = scope.inner(eqn)
    if len(inside) != 1 or eqn.primitive.name in ("while", "cond"):
        return False
    body = inside[0].body
    return body is not None and None not in body.operands and None not in body.results


def _leaves(scope: Scope, eqn: Any) -> Iterator[tuple[Scope, Any]]:
    deeper = scope.inner(eqn)
    for inner in deeper:
        for each in inner.jaxpr.eqns:
            yield from _leaves(inner, each)
    if not deeper:
        yield scope, eqn


def _leaf_of(scope: Scope, atom: Any) -> int | None:
    """The residual that a value is, looked for through calls, loops and barriers."""
    here: Scope | None = scope
    while here is not None and not _compat.is_literal(atom):
        made = here.makers.get(atom)
        if made is not None:
            eqn, output = made
            if _compat.primitive_name(eqn) not in TRANSPARENT or _compat.is_primal_left(eqn):
                return None
            atom = eqn.invars[output if len(eqn.outvars) == len(eqn.invars) else 0]
            continue
        index = here.inputs.get(atom)
        if index is None or here.parent is None or here.body is None:
            return index if here.parent is None else None
        operand = here.body.operands[index]
        if operand is None:
            return None
        atom, here = here.eqn.invars[operand], here.parent
    return None
