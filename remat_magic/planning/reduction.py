"""What makes a search small: of the graph what runs together is one node, of its integer program what is alike a sum.

And a name that another can always stand in for is none to choose. Each of the three earns its place. Of 7 budgets for
12, for 19 and for 48 blocks of GPT-2 small's size, the bytes of ``dots_saveable`` among them, all plans are proven to
be within a hundredth of the best in 0.3 to 0.8 s together. With all names to choose from that takes 1.2 to 11 s; and
without the groups, or without the sums, the plan for those bytes is up to 29% from its bound when the solver's ten
seconds are up.

Equal layers make a search go through all orders of them: which of twelve layers keep a value is many choices, how many
do is one of thirteen. So variables that look alike are summed, and rows that look alike too; what is left is as large
as one layer, however many there are. No choice is lost by it: whatever the variables of the large program are, their
sums keep to the rows of the small one and cost the same, so that the optimum of the small one is a bound. Where the
variables of a sum are truly alike in all the program (a partition that colour refinement leaves as it is) the linear
programs even have the same optimum (Grohe, Kersting, Mladenov and Selman, ESA 2014); layers in a row are not, since
each reads the one before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.planning.graph import Graph

__all__ = ["INFEASIBLE", "IntegerProgram", "ReducedGraph", "Summed", "reduced", "summed"]

INFEASIBLE = 2  # a status of scipy's

# Bytes count a very little beside FLOPs (both add up to a thousand), or the solver saves what spares no work.
_TIE = 1e-6

# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


@dataclass(eq=False, slots=True)
class ReducedGraph(Graph):
    """A graph of fewer nodes, of which the first is all that runs whatever is saved.

    Attributes:
        whole: the graph that it was made of.
        costs: of each node.
        opened: for each gate those of the whole graph that it stands for.
    """

    whole: Graph = field(default_factory=Graph)
    costs: list[float] = field(default_factory=list)
    opened: dict[int, list[int]] = field(default_factory=dict)

    def sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """As of the whole graph."""
        return self.whole.sizes(original for gate in gates for original in self.opened[gate])


def reduced(graph: Graph, costs: Sequence[float]) -> ReducedGraph:
    """A graph whose best choices, whatever the budget, cost what those of a graph cost.

    Args:
        graph: the graph.
        costs: of each of its nodes, none below 0.
    """
    run = graph.running(())
    needless = replaceable(graph, run)
    gates = {node: graph.gates[node] for node in run if node in graph.gates and graph.gates[node][0] not in needless}
    group = groups(graph, run, gates)
    number: dict[int, int] = {}
    for node in run:
        if not graph.needed[node]:
            number.setdefault(group[node], len(number) + 1)
    members: list[list[int]] = [[] for _ in range(len(number) + 1)]
    for node in run:
        members[0 if graph.needed[node] else number[group[node]]].append(node)
    member_of = {node: i for i, nodes in enumerate(members) for node in nodes}
    opened: dict[int, list[int]] = {}
    for gate in gates:
        opened.setdefault(member_of[gate], []).append(gate)

    def together(edges: Sequence[tuple[int, ...]], nodes: Iterable[int]) -> dict[int, None]:
        return dict.fromkeys(end for node in nodes for end in edges[node])

    return ReducedGraph(
        flops=[sum(graph.flops[node] for node in nodes) for nodes in members],
        needed=[not i for i in range(len(members))],
        gates={node: gates[nodes[0]] for node, nodes in opened.items()},
        reads=[
            tuple(dict.fromkeys(member_of[n] for n in together(graph.reads, nodes) if member_of[n] not in (0, i)))
            for i, nodes in enumerate(members)
        ],
        leaves=[tuple(together(graph.leaves, nodes)) for nodes in members],
        leaf_bytes=graph.leaf_bytes,
        whole=graph,
        costs=[sum(costs[node] for node in nodes) for nodes in members],
        opened=opened,
    )


def groups(graph: Graph, nodes: Iterable[int], gates: Mapping[int, tuple[str, int, int]]) -> dict[int, int]:
    """For each node the one that stands for it: whatever is saved, both run or neither does.

    An operation runs if one of its readers does, and what a name can save if a reader runs and the name is not saved.
    So what single operations, or the same ones, read runs together; and equal layers, whose values have one name, run
    alike. In a loop some nodes read each other, and each of these stands for itself.
    """
    nodes = list(nodes)
    readers = _readers(graph, nodes)
    waiting = {node: len(by) for node, by in readers.items()}
    ready = [node for node in nodes if not waiting[node]]
    remaining = iter(nodes)
    group: dict[int, int] = {}
    first_of: dict[object, int] = {}
    while len(group) < len(nodes):
        # None is ready where nodes read each other: one of them is taken, which frees the others.
        node = ready.pop() if ready else next(n for n in remaining if n not in group)
        if node in group:
            continue
        grouped = all(by in group for by in readers[node])
        group[node] = node
        if grouped:
            group[node] = _stands_for(graph, node, gates.get(node), {group[by] for by in readers[node]}, first_of)
        for read in graph.reads[node]:
            if read != node:
                waiting[read] -= 1
                if not waiting[read]:
                    ready.append(read)
    return group


def _readers(graph: Graph, nodes: Iterable[int]) -> dict[int, list[int]]:
    """For each node those that read it, itself left out."""
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for node in readers:
        for read in graph.reads[node]:
            if read != node:
                readers[read].append(node)
    return readers


def _stands_for(
    graph: Graph, node: int, gate: tuple[str, int, int] | None, readers: set[int], first_of: dict[object, int]
) -> int:
    """The node that stands for one whose readers these stand for; ``first_of`` has the first of each kind."""
    if graph.needed[node]:
        return node
    if any(graph.needed[by] for by in readers):
        readers = {-1}  # which runs whatever is saved
    elif gate is None and len(readers) == 1:
        return next(iter(readers))
    return first_of.setdefault((None if gate is None else gate[0], frozenset(readers)), node)


def replaceable(graph: Graph, nodes: Collection[int]) -> frozenset[str]:
    """Names that some best choice does without, whatever the budget.

    Saving a value can be left to saving another, of as many bytes at most, which all that read it work towards (after a
    bias is added, after a reshape). One name at a time is left out, so that of two that could stand in for each other
    one stays.

    Args:
        graph: the graph.
        nodes: those that can run.
    """
    readers = _readers(graph, nodes)
    name_of = {node: graph.gates[node][0] for node in nodes if node in graph.gates}
    sizes = {name: size for name, (size, _) in graph.sizes(name_of).items()}
    gates: dict[str, list[int]] = {}
    for gate, name in name_of.items():
        gates.setdefault(name, []).append(gate)
    before = 0
    while before != len(gates):
        before = len(gates)
        for name in [*gates]:
            ends = {_end(graph, gate, readers, name_of) for gate in gates[name]}
            end = ends.pop() if len(ends) == 1 else None
            if end is not None and end != name and sizes[end] <= sizes[name]:
                for gate in gates.pop(name):
                    del name_of[gate]
    return frozenset(sizes.keys() - gates.keys())


def _end(graph: Graph, gate: int, readers: Mapping[int, list[int]], name_of: Mapping[int, str]) -> str | None:
    """The name that all readers of a gate's value work towards, one operation after another."""
    seen: set[int] = set()
    node = gate
    while len(readers[node]) == 1 and node not in graph.reads[node] and node not in seen:
        seen.add(node)
        (node,) = readers[node]
        if graph.needed[node]:
            return None
        if node in name_of:
            return name_of[node]
    return None


# ----------------------------------------------------------------------------------------------------- integer programs


@dataclass(frozen=True, slots=True, eq=False)
class IntegerProgram:
    """Minimise ``cost @ x`` so that ``matrix @ x <= limits``, ``amounts @ x <= budget`` and ``low <= x <= high``.

    ``integral`` is 1 for the variables that have to be whole, and 0 for the others.
    """

    cost: Any
    amounts: Any
    low: Any
    high: Any
    integral: Any
    matrix: Any
    limits: Any

    def run(
        self, budget: float, seconds: float, gap: float, *, whole: bool = True, low: Any = None, high: Any = None
    ) -> Any:
        """What scipy's ``milp`` gives; with ``low`` and ``high`` in place of the program's own."""
        return milp(
            self.cost + _TIE * self.amounts,
            integrality=self.integral if whole else np.zeros(len(self.cost)),
            bounds=_bounds(self.low if low is None else low, self.high if high is None else high),
            constraints=[
                _constraint(self.matrix, -np.inf, self.limits),
                _constraint(self.amounts[None, :], -np.inf, budget),
            ],
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": gap},
        )

    def priced(self, price: float) -> Any:
        """The linear program without a budget, where a unit of ``amounts`` costs ``price``."""
        return milp(
            self.cost + price * self.amounts,
            bounds=_bounds(self.low, self.high),
            constraints=_constraint(self.matrix, -np.inf, self.limits),
        )

    def tie(self, budget: float) -> float:
        """What ``run`` at most adds to a cost, so that of choices that cost the same one of few bytes is found."""
        return _TIE * min(budget, float(self.amounts.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """An integer program of sums, and for each variable of the other one the number of its sum."""

    program: IntegerProgram
    member_of: Any


def summed(program: IntegerProgram, kinds: Sequence[Hashable]) -> Summed:
    """An integer program of the sums of variables that look alike.

    Alike are variables of one kind with the same cost, amount and limits, in rows that look alike. These rows are
    summed, and variables that add to these sums differently (the first and the last layer's, as a rule) stay apart, so
    that each sum of rows can be told by sums of variables.

    Args:
        program: the large one.
        kinds: of its variables; any will do for a bound, and the better they tell what is alike the nearer it is.
    """
    by_row: Any = csr_array(program.matrix)
    by_column: Any = by_row.T.tocsr()
    rows, columns = _entries(by_row), _entries(by_column)
    limits = program.limits.tolist()
    own = zip(kinds, program.cost, program.amounts, program.low, program.high, program.integral, strict=True)
    column = _numbered(own)
    row = _numbered((limit, _colours(terms, column)) for limit, terms in zip(limits, rows, strict=True))
    column = _numbered((before, _colours(terms, row)) for before, terms in zip(column, columns, strict=True))
    row = _numbered((limit, _colours(terms, column)) for limit, terms in zip(limits, rows, strict=True))
    shares: list[dict[int, float]] = []
    for terms in columns:
        share: dict[int, float] = {}
        for number, factor in terms:
            share[row[number]] = share.get(row[number], 0.0) + factor
        shares.append(share)
    member_of = _numbered((of, tuple(sorted(share.items()))) for of, share in zip(column, shares, strict=True))
    first: dict[int, int] = {}
    for number, of in enumerate(member_of):
        first.setdefault(of, number)
    representatives = list(first.values())
    size = np.bincount(member_of, minlength=len(representatives))
    entries = [(number, of, factor) for of, member in first.items() for number, factor in shares[member].items()]
    where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
    total = np.zeros(max(row, default=-1) + 1)
    np.add.at(total, row, program.limits)
    small = IntegerProgram(
        program.cost[representatives],
        program.amounts[representatives],
        program.low[representatives] * size,
        program.high[representatives] * size,
        program.integral[representatives],
        csr_array((factors, (where, at)), shape=(len(total), len(representatives))),
        total,
    )
    return Summed(small, np.array(member_of))


def _entries(matrix: Any) -> list[list[tuple[int, float]]]:
    """For each row of a sparse matrix the numbers of its columns, and the factors there."""
    ends, numbers, factors = matrix.indptr.tolist(), matrix.indices.tolist(), matrix.data.tolist()
    return [list(zip(numbers[start:end], factors[start:end], strict=True)) for start, end in itertools.pairwise(ends)]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """For each key its number among the different ones, in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _colours(terms: Iterable[tuple[int, float]], colours: Sequence[int]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((colours[number], factor) for number, factor in terms))
