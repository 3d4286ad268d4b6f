"""The graph of a function, as JAX itself tells it.

The program, with every value named, is differentiated under a policy that saves nothing. In the backward jaxpr each
operation stands with its operands, and each name is a *gate*: save that value, and what lies behind it need not run for
those who read it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.engine.engine import Dissection
from remat_magic.facts.cost import equation_cost
from remat_magic.facts.recomputation import Recomputation
from remat_magic.facts.residuals import residuals, saved_values
from remat_magic.jaxprs.naming import is_given
from remat_magic.jaxprs.walk import Scope, leaves
from remat_magic.planning.graph import Graph
from remat_magic.planning.kept_copies import kept_copies
from remat_magic.records import dearest

__all__ = ["build"]


def build(parts: Dissection) -> Graph:
    """The graph of a function whose values are all named."""
    return _Builder(parts).graph


class _Leaf(NamedTuple):
    """A recomputed equation of a node; ``turns``: how often a device runs it at least."""

    eqn: Any
    flops: int
    branches: tuple[tuple[int, int, int], ...]
    turns: int


class _Builder:
    def __init__(self, parts: Dissection) -> None:
        self.graph = Graph(type_of=parts.half.type_of)
        self._residuals = len(parts.half.residual_types)
        self._recomputation = Recomputation(parts.half.closed, parts.backward, parts.provenances, self._residuals)
        self._paid = _paid(parts)
        self._nodes: dict[tuple[int, int], int] = {}
        self._ends: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.graph.copies = kept_copies(parts.naming)
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
                flops = 0 if price.uncosted else price.flops * around.runs
                operations.append(_Leaf(leaf, flops, around.branches, inner.turns))
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
