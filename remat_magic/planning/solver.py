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
operations as well; here JAX has settled it, and the integer program is small. A name that another can always stand in
for is none to choose. Of GPT-2 small's size, with 12 and with 48 blocks (520 and 2,032 names), choices within a
hundredth of the bound are then found in 0.1 to 3 s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.planning.graph import Graph

GAP = 0.01
"""How far from its bound a choice may be for the search to end, as a part of its cost."""

NODES = 500
"""Of the solver's tree, after which the search ends with what it has: few choices are found beyond its root."""

_SECONDS = 60.0  # the last resort: one node has no limit of its own
_INFEASIBLE = 2  # a status of scipy's
_PRECISION = 1e-6
_TIE = 1e-6  # bytes count a very little beside the cost (both add up to a thousand), or what spares nothing is saved

# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


@dataclass(frozen=True, slots=True)
class Costs:
    """What is to be least: a cost for each node of a graph, and one for each byte that is offloaded.

    ``transfer`` is None where nothing may be offloaded. ``whole``: all costs are whole numbers, as FLOPs are.
    """

    nodes: Sequence[float]
    transfer: float | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """The names to save, what saving them comes to by the graph, and a bound that no choice of names undercuts.

    ``cost`` and ``bound`` are in the unit of the problem's costs. Of the ``names``, those ``offloaded`` go to the host.
    """

    names: frozenset[str]
    saved_bytes: int
    cost: float
    bound: float = 0.0
    offloaded: frozenset[str] = frozenset()


class Problem:
    """A graph as an integer program, to be solved for several budgets.

    ``costs`` are what is to be least; by default FLOPs, with nothing offloaded. ``group`` has the group of each name
    that may be saved, since a group is saved as a whole; by default each is by itself.
    """

    def __init__(self, graph: Graph, costs: Costs | None = None, *, group: Mapping[str, str] | None = None) -> None:
        self.graph, self.costs = graph, costs or Costs(graph.flops)
        self._run_always = {node for node, needed in enumerate(graph.needed) if needed}
        run: list[int] = graph.run().nodes.tolist()
        gates = {node: graph.gates[node][0] for node in run if node in graph.gates}
        dropped = _replaceable(graph, run) if group is None else frozenset(gates.values()) - group.keys()
        self._gates = {node: name for node, name in gates.items() if name not in dropped}
        size_of = {name: size for name, (size, _) in graph.sizes(self._gates).items()}
        self.names = [*size_of]
        units: dict[str, list[str]] = {}
        for name in self.names:
            units.setdefault(name if group is None else group[name], []).append(name)
        self._units = [*units.values()]
        self._sizes = [sum(size_of[name] for name in names) for names in self._units]
        self._set_up([node for node in run if node not in self._run_always])

    def _set_up(self, nodes: Sequence[int]) -> None:
        """The variables by number: what is saved, what is offloaded, the nodes that may run, and residuals."""
        graph, transfer, count = self.graph, self.costs.transfer, len(self._units)
        self._always = sum(self.costs.nodes[node] for node in self._run_always)
        self._choices = count * (1 if transfer is None else 2)
        column = {node: self._choices + i for i, node in enumerate(nodes)}
        leaves = dict.fromkeys(leaf for node in (*nodes, *self._run_always) for leaf in graph.leaves[node])
        residuals = {leaf: self._choices + len(column) + i for i, leaf in enumerate(leaves)}
        size = self._choices + len(column) + len(residuals)
        cost, amounts, low = np.zeros(size), np.zeros(size), np.zeros(size)
        cost[self._choices : self._choices + len(column)] = [self.costs.nodes[node] for node in nodes]
        amounts[:count] = self._sizes
        if transfer is not None:
            cost[count : self._choices] = np.array(self._sizes) * transfer
        amounts[self._choices + len(column) :] = [graph.leaf_bytes[leaf] for leaf in leaves]
        unit_of = {name: i for i, names in enumerate(self._units) for name in names}
        rows: dict[tuple[tuple[tuple[int, float], ...], float], None] = {}  # sum of factor * column <= limit
        for node in (*self._run_always, *nodes):
            # What always runs is no variable, and asks for its operands outright.
            running, limit = (((column[node], 1.0),), 0.0) if node in column else ((), -1.0)
            reads = (read for read in graph.reads[node] if read in column and read != node)
            needs = [(*self._columns_of(unit_of.get(self._gates.get(read, ""))), column[read]) for read in reads]
            needs += [(residuals[leaf],) for leaf in graph.leaves[node]]
            for columns in needs:
                if not running and len(columns) == 1:
                    low[columns[0]] = 1.0
                else:
                    rows[(*running, *((other, -1.0) for other in columns)), limit] = None
        # Solvers want numbers near one.
        self._unit = max(float(cost[self._choices :].sum()) / 1e3, 1.0 if self.costs.whole else 1e-30)
        self._byte_unit = max(float(amounts.sum()), 1.0) / 1e3
        self._cost, self._amounts, self._low = cost / self._unit, amounts / self._byte_unit, low
        self._integral = np.zeros(size)
        self._integral[: self._choices] = 1
        entries = [(i, at, factor) for i, (terms, _) in enumerate(rows) for at, factor in terms]
        where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
        self._matrix = csr_array((factors, (where, at)), shape=(len(rows), size))
        self._limits = np.array([limit for _, limit in rows])

    def _columns_of(self, unit: int | None) -> tuple[int, ...]:
        """The variables that tell whether a gate's value is saved, or offloaded."""
        if unit is None:
            return ()
        return (unit,) if self.costs.transfer is None else (unit, unit + len(self._units))

    def measure(self, names: Collection[str], offloaded: Collection[str] = ()) -> tuple[int, float]:
        """``(saved bytes, cost)`` of a choice, of any names of the graph."""
        figures = self.graph.figures(names, offloaded)
        cost: float = figures.recomputed_flops
        if self.costs.nodes is not self.graph.flops:
            cost = sum(self.costs.nodes[node] for node in self.graph.run(names).nodes)
        return figures.saved_bytes, cost + figures.offloaded_bytes * (self.costs.transfer or 0)

    def relax(self, budget: int) -> float | None:
        """The bound of the linear program on the cost; None where the budget is too small."""
        if not len(self._cost):
            return self._always
        result = self._run(budget, 0.0, 1, whole=False)
        return None if result.x is None else self._bound(result, budget)

    def solve(self, budget: int, gap: float = GAP, nodes: int = NODES) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small.

        The search ends at a choice that is within ``gap`` of its bound, as a part of its cost, or after so many
        ``nodes`` of its tree.
        """
        if not len(self._cost):
            return self._choice(budget, set(), set(), self._always)
        result = self._run(budget, gap, nodes)
        if result.status == _INFEASIBLE:
            return None
        chosen = set[int]() if result.x is None else {*np.flatnonzero(result.x[: self._choices] > 0.5).tolist()}
        count = len(self._units)
        saved = {unit for unit in chosen if unit < count}
        moved = {unit - count for unit in chosen if unit >= count} - saved
        return self._choice(budget, saved, moved, self._bound(result, budget))

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

    def _choice(self, budget: int, saved: set[int], moved: set[int], bound: float) -> Solution | None:
        """What is used of a choice, without the smallest where the budget is exceeded by the solver's tolerance.

        That is a millionth of what a solver's numbers are near to, which can be more than a small value takes.
        """
        offloaded = frozenset(name for unit in moved for name in self._units[unit])
        for left_out in (-1, *sorted(saved, key=self._sizes.__getitem__)):
            saved = saved - {left_out}
            names = self.graph.used({*offloaded, *(name for unit in saved for name in self._units[unit])})
            size, cost = self.measure(names, offloaded & names)
            if size <= budget:
                return Solution(names, size, cost, bound, offloaded & names)
        return None


def _readers(graph: Graph, nodes: Iterable[int]) -> dict[int, list[int]]:
    """For each node those that read it, itself left out."""
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for node in readers:
        for read in graph.reads[node]:
            if read != node:
                readers[read].append(node)
    return readers


def _replaceable(graph: Graph, nodes: Collection[int]) -> frozenset[str]:
    """Names that some best choice does without, whatever the budget.

    Saving a value can be left to saving another, of as many bytes at most, which all that read it work towards (after a
    bias is added, after a reshape). One name at a time is left out, so that of two that could stand in for each other
    one stays.

    ``nodes`` are those that can run.
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
