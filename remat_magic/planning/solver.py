"""The best choice of what to save, as an integer program that scipy's solver takes.

For each operation ``r = 1`` if it runs in the backward pass, for each name ``s = 1`` if its value is saved and
``o = 1`` if it is offloaded, for each residual that no policy has a say about ``a = 1`` if it is kept:

    minimise    sum cost r + sum transfer o
    subject to  r(reader) <= r(operand)                   an operation that runs has its operands run,
                r(reader) <= s(gate) + o(gate) + r(gate)  unless the operand is saved by name,
                r(reader) <= a(residual),
                sum bytes s + sum bytes a <= budget.

Only ``s`` and ``o`` have to be whole: the least ``r`` and ``a`` are then whole by themselves. Without that demand it is
a linear program, whose optimum no choice can undercut. Checkmate (Jain et al., MLSys 2020) plans the order of
operations as well; here JAX has settled it, and the integer program is small. What runs together is one variable, and a
name that another can always stand in for is none to choose. Of GPT-2 small's size, with 12 and with 48 blocks (520 and
2,032 names), choices within a hundredth of the bound are then found at the root of the search, in 0.04 to 3 s, for 13
of 14 budgets; for one it takes 413 nodes to prove it. To save equal layers in pairs, so that there are fewer names,
takes longer, and costs up to 13% more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.planning.graph import Graph

__all__ = ["GAP", "NODES", "Costs", "Problem", "Solution"]

GAP = 0.01
"""How far from its bound a choice may be for the search to end, as a part of its cost."""

NODES = 500
"""Of the solver's tree, after which the search ends with what it has: few choices are found beyond its root."""

_SECONDS = 60.0  # the last resort: one node has no limit of its own
_TIME_LIMIT, _INFEASIBLE = 1, 2  # statuses of scipy's
_PRECISION = 1e-6
_TIE = 1e-6  # bytes count a very little beside the cost (both add up to a thousand), or what spares nothing is saved

# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


@dataclass(frozen=True, slots=True)
class Costs:
    """What is to be least: a cost for each node of a graph, and one for each byte that is offloaded.

    ``transfer`` is None where nothing may be offloaded. ``whole`` tells that all costs are whole numbers, as FLOPs are.
    """

    nodes: Sequence[float]
    transfer: float | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """The names to save, what saving them comes to by the graph, and a bound that no choice of names undercuts.

    ``cost`` and ``bound`` are in the unit of the problem's costs. Of the ``names``, those ``offloaded`` go to the host.
    ``timed_out`` tells that the solver met its time limit, so that a faster machine may find a better choice.
    """

    names: frozenset[str]
    saved_bytes: int
    cost: float
    bound: float = 0.0
    timed_out: bool = False
    seconds: float = 0.0
    offloaded: frozenset[str] = frozenset()


class Problem:
    """A graph as an integer program, to be solved for several budgets.

    Args:
        graph: the graph.
        costs: what is to be least; by default FLOPs, with nothing offloaded.
        group: the group of each name that may be saved: a group is saved as a whole. Default: each by itself.
    """

    def __init__(self, graph: Graph, costs: Costs | None = None, *, group: Mapping[str, str] | None = None) -> None:
        self.graph, self.costs = graph, costs or Costs(graph.flops)
        run = graph.running(())
        gates = {node: graph.gates[node][0] for node in run if node in graph.gates}
        dropped = _replaceable(graph, run) if group is None else frozenset(gates.values()) - group.keys()
        gates = {node: name for node, name in gates.items() if name not in dropped}
        size_of = {name: size for name, (size, _) in graph.sizes(gates).items()}
        small = _Reduced(graph, run, gates, self.costs.nodes)
        self.names = [*size_of]
        units: dict[str, list[str]] = {}
        for name in self.names:
            units.setdefault(name if group is None else group[name], []).append(name)
        self._units = [*units.values()]
        self._sizes = [sum(size_of[name] for name in names) for names in self._units]
        self._set_up(small, {name: i for i, names in enumerate(self._units) for name in names})

    def _set_up(self, small: _Reduced, unit_of: Mapping[str, int]) -> None:
        """The variables by number: operations, what is saved, what is offloaded, residuals that are kept together."""
        self._always, self._first = small.costs[0], len(small.costs) - 1
        transfer = self.costs.transfer
        choices = self._choices = len(self._units) * (1 if transfer is None else 2)
        kept = small.kept_together(self._first + choices)
        size = self._first + choices + len(set(kept.values()))
        cost, amounts, low = np.zeros(size), np.zeros(size), np.zeros(size)
        cost[: self._first] = small.costs[1:]
        amounts[self._first : self._first + len(self._units)] = self._sizes
        if transfer is not None:
            cost[self._first + len(self._units) : self._first + choices] = np.array(self._sizes) * transfer
        for leaf, column in kept.items():
            amounts[column] += self.graph.leaf_bytes[leaf]
        rows: dict[tuple[tuple[tuple[int, float], ...], float], None] = {}  # sum of factor * column <= limit
        for node, (reads, leaves) in enumerate(zip(small.reads, small.leaves, strict=True)):
            # What always runs is no variable, and asks for its operands outright.
            running, limit = (((node - 1, 1.0),), 0.0) if node else ((), -1.0)
            needs = [(*self._columns_of(unit_of.get(small.gates.get(read, ""))), read - 1) for read in reads]
            needs += [(kept[leaf],) for leaf in leaves if leaf in kept]
            for columns in needs:
                if not node and len(columns) == 1:
                    low[columns[0]] = 1.0
                else:
                    rows[(*running, *((column, -1.0) for column in columns)), limit] = None
        # Solvers want numbers near one.
        self._unit = max(float(cost[: self._first].sum()) / 1e3, 1.0 if self.costs.whole else 1e-30)
        self._byte_unit = max(float(amounts.sum()), 1.0) / 1e3
        self._cost, self._amounts, self._low = cost / self._unit, amounts / self._byte_unit, low
        self._integral = np.zeros(size)
        self._integral[self._first : self._first + choices] = 1
        entries = [(i, column, factor) for i, (terms, _) in enumerate(rows) for column, factor in terms]
        where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
        self._matrix = csr_array((factors, (where, at)), shape=(len(rows), size))
        self._limits = np.array([limit for _, limit in rows])

    def _columns_of(self, unit: int | None) -> tuple[int, ...]:
        """The variables that tell whether a gate's value is saved, or offloaded."""
        if unit is None:
            return ()
        saved = self._first + unit
        return (saved,) if self.costs.transfer is None else (saved, saved + len(self._units))

    def measure(self, names: Collection[str], offloaded: Collection[str] = ()) -> tuple[int, float]:
        """``(saved bytes, cost)`` of a choice, of any names of the graph."""
        figures = self.graph.figures(names, offloaded)
        cost: float = figures.recomputed_flops
        if self.costs.nodes is not self.graph.flops:
            cost = sum(self.costs.nodes[node] for node in self.graph.running(names))
        return figures.saved_bytes, cost + figures.offloaded_bytes * (self.costs.transfer or 0)

    def relax(self, budget: int) -> float | None:
        """The bound of the linear program on the cost; None where the budget is too small."""
        if not len(self._cost):
            return self._always
        result = self._run(budget, 0.0, 1, whole=False)
        return None if result.x is None else self._bound(result, budget)

    def solve(self, budget: int, gap: float = GAP, nodes: int = NODES) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small.

        Args:
            budget: in bytes.
            gap: how far from its bound a choice may be, as a part of its cost, for the search to end.
            nodes: after so many of the search's tree it ends with what it has.
        """
        began = time.perf_counter()
        if not len(self._cost):
            return self._choice(budget, set(), set(), self._always)
        result = self._run(budget, gap, nodes)
        if result.status == _INFEASIBLE:
            return None
        chosen = set[int]() if result.x is None else {*np.flatnonzero(result.x[self._first :] > 0.5).tolist()}
        count = len(self._units)
        saved = {unit for unit in chosen if unit < count}
        moved = {unit - count for unit in chosen if count <= unit < self._choices} - saved
        timed_out, seconds = result.status == _TIME_LIMIT, time.perf_counter() - began
        return self._choice(budget, saved, moved, self._bound(result, budget), timed_out, seconds)

    def _run(self, budget: int, gap: float, nodes: int, *, whole: bool = True) -> Any:
        return milp(
            self._cost + _TIE * self._amounts,
            integrality=self._integral if whole else np.zeros(len(self._cost)),
            bounds=_bounds(self._low, np.ones(len(self._cost))),
            constraints=[
                _constraint(self._matrix, -np.inf, self._limits),
                _constraint(self._amounts[None, :], -np.inf, budget / self._byte_unit),
            ],
            options={"time_limit": _SECONDS, "mip_rel_gap": gap, "node_limit": nodes},
        )

    def _bound(self, result: Any, budget: int) -> float:
        """What the solver has proven that no choice undercuts, up to its own precision."""
        # With nothing to choose there is no tree to search, and no bound of it; with no time there is neither.
        value = result.fun if result.mip_dual_bound is None else result.mip_dual_bound
        if value is None:
            return self._always
        tie = _TIE * min(budget / self._byte_unit, float(self._amounts.sum()))
        least = max(0.0, value - tie - _PRECISION) * self._unit
        return (math.ceil(least) if self.costs.whole else least) + self._always

    def _choice(
        self,
        budget: int,
        saved: set[int],
        moved: set[int],
        bound: float,
        timed_out: bool = False,
        seconds: float = 0.0,
    ) -> Solution | None:
        """What is used of a choice, without the smallest where the budget is exceeded by the solver's tolerance.

        That is a millionth of what a solver's numbers are near to, which can be more than a small value takes.
        """
        offloaded = frozenset(name for unit in moved for name in self._units[unit])
        for left_out in (-1, *sorted(saved, key=self._sizes.__getitem__)):
            saved = saved - {left_out}
            names = self.graph.used({*offloaded, *(name for unit in saved for name in self._units[unit])})
            size, cost = self.measure(names, offloaded & names)
            if size <= budget:
                return Solution(names, size, cost, bound, timed_out, seconds, offloaded & names)
        return None


class _Reduced:
    """A graph of fewer nodes, whose best choices, whatever the budget, cost what those of the graph cost.

    Of its nodes the first is all that runs whatever is saved; ``costs``, ``reads`` and ``leaves`` are those of each.
    ``gates`` has the name that saves what a node gives.
    """

    def __init__(self, graph: Graph, run: Sequence[int], gates: Mapping[int, str], costs: Sequence[float]) -> None:
        group = _groups(graph, run, gates)
        number: dict[int, int] = {}
        for node in run:
            if not graph.needed[node]:
                number.setdefault(group[node], len(number) + 1)
        members: list[list[int]] = [[] for _ in range(len(number) + 1)]
        for node in run:
            members[0 if graph.needed[node] else number[group[node]]].append(node)
        member_of = {node: i for i, nodes in enumerate(members) for node in nodes}

        def together(edges: Sequence[tuple[int, ...]], nodes: Iterable[int]) -> dict[int, None]:
            return dict.fromkeys(end for node in nodes for end in edges[node])

        self._leaf_bytes = graph.leaf_bytes
        self.gates = {member_of[node]: name for node, name in gates.items()}
        self.costs = [sum(costs[node] for node in nodes) for nodes in members]
        self.leaves = [tuple(together(graph.leaves, nodes)) for nodes in members]
        self.reads = [
            tuple(dict.fromkeys(member_of[n] for n in together(graph.reads, nodes) if member_of[n] not in (0, i)))
            for i, nodes in enumerate(members)
        ]

    def kept_together(self, first: int) -> dict[int, int]:
        """A variable, from number ``first`` on, for each residual; those that the same operations read share one."""
        readers: dict[int, set[int]] = {}
        for node, leaves in enumerate(self.leaves):
            for leaf in leaves:
                if self._leaf_bytes[leaf]:
                    readers.setdefault(leaf, set()).add(node)
        column: dict[frozenset[int], int] = {}
        return {leaf: column.setdefault(frozenset(nodes), first + len(column)) for leaf, nodes in readers.items()}


def _groups(graph: Graph, nodes: Sequence[int], gates: Mapping[int, str]) -> dict[int, int]:
    """For each node the one that stands for it: whatever is saved, both run or neither does.

    An operation runs if one of its readers does, and what a name can save if a reader runs and the name is not saved.
    So what single operations, or the same ones, read runs together; and equal layers, whose values have one name, run
    alike. In a loop some nodes read each other, and each of these stands for itself.
    """
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


def _stands_for(graph: Graph, node: int, name: str | None, readers: set[int], first_of: dict[object, int]) -> int:
    """The node that stands for one whose readers these stand for; ``first_of`` has the first of each kind."""
    if graph.needed[node]:
        return node
    if any(graph.needed[by] for by in readers):
        readers = {-1}  # which runs whatever is saved
    elif name is None and len(readers) == 1:
        return next(iter(readers))
    return first_of.setdefault((name, frozenset(readers)), node)


def _replaceable(graph: Graph, nodes: Collection[int]) -> frozenset[str]:
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
