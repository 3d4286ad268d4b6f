"""The best choice of what to save, as an integer program.

For each operation ``r = 1`` if it runs in the backward pass, for each name ``s = 1`` if its value is saved and
``o = 1`` if it is offloaded, for each residual that no policy has a say about ``a = 1`` if it is kept:

    minimise    sum cost r + sum transfer o
    subject to  r(reader) <= r(operand)                   an operation that runs has its operands run,
                r(reader) <= s(gate) + o(gate) + r(gate)  unless the operand is saved by name,
                r(reader) <= a(residual),
                sum bytes s + sum bytes a <= budget.

Only ``s`` and ``o`` have to be whole: the least ``r`` and ``a`` are then whole by themselves. Without that demand it is
a linear program, whose optimum no choice can undercut. Checkmate (Jain et al., MLSys 2020) plans the order of
operations as well; here JAX has settled it, and the integer program is small. The graph is reduced before
(``reduction.reduced``), and the variables of equal layers are summed (``reduction.summed``).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from remat_magic.planning.graph import Graph
from remat_magic.planning.reduction import INFEASIBLE, IntegerProgram, ReducedGraph, Summed, reduced, summed

__all__ = ["Costs", "Problem", "Solution"]

_PRECISION = 1e-6
# Where layers are equal, the part of the time of a search that counts them; one that tells them apart has the rest.
_COUNTING = 0.7


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
    ``proven`` tells that the solver ended by itself, within the gap asked for, and not because its time was up.
    """

    names: frozenset[str]
    saved_bytes: int
    cost: float
    bound: float
    proven: bool
    seconds: float
    offloaded: frozenset[str] = frozenset()


class Problem:
    """A graph as an integer program, to be solved for several budgets.

    A name that several gates have (equal layers, decided together) costs the bytes of all of them.

    Args:
        graph: the graph.
        costs: what is to be least; by default FLOPs, with nothing offloaded.
        layers: names of values that one expression makes in equal layers, a group each.
    """

    def __init__(self, graph: Graph, costs: Costs | None = None, layers: Iterable[Collection[str]] = ()) -> None:
        self.costs = costs or Costs(graph.flops)
        self._whole = graph
        self.graph = small = reduced(graph, self.costs.nodes)
        self.sizes = {name: size for name, (size, _) in small.sizes(small.gates).items()}
        self.names = list(self.sizes)
        self._offered = frozenset(self.names)
        columns = _Columns(small, self.names, self.costs.transfer is not None)
        self._first = columns.operations
        self._always = small.costs[0]

        cost, amounts = np.zeros(columns.size), np.zeros(columns.size)
        cost[: self._first] = small.costs[1:]
        for name in self.names:
            amounts[columns.saved[name]] = self.sizes[name]
        for name, column in columns.moved.items():
            cost[column] = self.sizes[name] * (self.costs.transfer or 0.0)
        for leaf, column in columns.kept.items():
            amounts[column] += small.leaf_bytes[leaf]
        # Solvers want numbers near one.
        self._unit = max(float(cost[: self._first].sum()) / 1e3, 1.0 if self.costs.whole else 1e-30)
        self._byte_unit = max(float(amounts.sum()), 1.0) / 1e3
        rows, low = columns.rows()
        entries = [(i, column, factor) for i, (terms, _) in enumerate(rows) for column, factor in terms]
        where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
        integral = np.zeros(columns.size)
        integral[self._first : self._first + len(columns.saved) + len(columns.moved)] = 1
        self._program = IntegerProgram(
            cost / self._unit,
            amounts / self._byte_unit,
            low,
            np.ones(columns.size),
            integral,
            csr_array((factors, (where, at)), shape=(len(rows), columns.size)),
            np.array([limit for _, limit in rows]),
        )
        self._summed: Summed | None = None
        kind = {name: number for number, group in enumerate(layers, 1) for name in group if name in self._offered}
        if len(kind) > len(set(kind.values())):
            kinds = [0] * columns.size
            for part in (columns.saved, columns.moved):
                for name, column in part.items():
                    kinds[column] = kind.get(name, 0)
            self._summed = summed(self._program, kinds)

    def measure(self, names: Collection[str], offloaded: Collection[str] = ()) -> tuple[int, float]:
        """``(saved bytes, cost)`` of a choice, of any names of the whole graph."""
        graph = self.graph if self._offered.issuperset(names) else self._whole
        figures = graph.figures(names, offloaded)
        cost: float = figures.recomputed_flops
        if self.costs.nodes is not self._whole.flops:
            nodes = self.costs.nodes if graph is self._whole else self.graph.costs
            cost = sum(nodes[node] for node in graph.running(names))
        return figures.saved_bytes, cost + figures.offloaded_bytes * (self.costs.transfer or 0)

    def _bound(self, result: Any, budget: int) -> float:
        """What the solver has proven that no choice undercuts, up to its own precision."""
        # With nothing to choose there is no tree to search, and no bound of it; with no time there is neither.
        value = result.fun if result.mip_dual_bound is None else result.mip_dual_bound
        if value is None:
            return self._always
        least = max(0.0, value - self._program.tie(budget / self._byte_unit) - _PRECISION) * self._unit
        return (math.ceil(least) if self.costs.whole else least) + self._always

    def relax(self, budget: int) -> float | None:
        """The bound of the linear program on the cost; None where the budget is too small."""
        if not self._size:
            return self._always
        result = self._program.run(budget / self._byte_unit, 60.0, 0.0, whole=False)
        return None if result.x is None else self._bound(result, budget)

    def priced(self, price: float) -> tuple[float, frozenset[str]]:
        """The linear program without a budget, where each byte costs ``price``: its least cost, and what it saves.

        For each budget this cost less ``price * budget`` is a bound (Lagrange's): no choice within it costs less.
        """
        if not self._size:
            return self._always, frozenset()
        program, member_of = self._program, slice(None)
        if self._summed is not None:
            program, member_of = self._summed.program, self._summed.member_of
        result = program.priced(price * self._byte_unit / self._unit)
        names, _ = self._chosen((result.x / program.high)[member_of])
        return (result.fun - _PRECISION) * self._unit + self._always, self.graph.used(names)

    def solve(self, budget: int, seconds: float, gap: float) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small.

        Where layers are equal they are counted first; if what comes of it is not proven to be within the gap, each is
        decided by itself in the time that is left.
        """
        began = time.perf_counter()
        if not self._size:
            return Solution(frozenset(), *self.measure(()), self._always, True, 0.0)
        ended = False
        bound, best = self.count(budget, _COUNTING * seconds, gap)
        if best is None or best.cost - bound > gap * best.cost:
            left = seconds - (time.perf_counter() - began)
            result = self._program.run(budget / self._byte_unit, left, gap)
            bound, ended = max(bound, self._bound(result, budget)), result.status == 0
            other = self._solution(result, budget)
            if result.x is None and result.status != INFEASIBLE:  # its time was up before it had looked at all
                other = self._choice(budget, frozenset(), frozenset())
            best = min(filter(None, (best, other)), key=lambda solution: solution.cost, default=None)
        if best is None:
            return None
        proven = ended or best.cost - bound <= gap * best.cost
        return replace(best, bound=bound, proven=proven, seconds=time.perf_counter() - began)

    def count(self, budget: int, seconds: float, gap: float) -> tuple[float, Solution | None]:
        """A bound from how many of equal layers save a value, whichever these are, and a choice with such numbers.

        Where no layers are equal, what is known without looking and no choice. The choice has no bound of its own.
        """
        if self._summed is None:
            return self._always, None
        began = time.perf_counter()
        small, member_of = self._summed.program, self._summed.member_of
        result = small.run(budget / self._byte_unit, seconds, gap / 4)
        bound = self._bound(result, budget)
        if result.x is None:
            return bound, None
        # What all or none of the equal layers save is decided; which of them save the rest is left to choose.
        low, high = self._program.low.copy(), self._program.high.copy()
        names = slice(self._first, self._first + self._choices)
        low[names] = np.maximum(low, (result.x > small.high - 0.5)[member_of])[names]
        high[names] = np.minimum(high, (result.x > small.low + 0.5)[member_of])[names]
        left = seconds - (time.perf_counter() - began)
        exact = self._program.run(budget / self._byte_unit, left, gap / 4, low=low, high=high)
        return bound, self._solution(exact, budget)

    @property
    def _size(self) -> int:
        return len(self._program.cost)

    @property
    def _choices(self) -> int:
        return len(self.names) * (1 if self.costs.transfer is None else 2)

    def _chosen(self, x: Any) -> tuple[set[str], set[str]]:
        """The names that are saved, and those that are offloaded, by the variables of the integer program."""
        chosen = x[self._first : self._first + self._choices] > 0.5
        names = {name for name, yes in zip(self.names, chosen, strict=False) if yes}
        moved = {name for name, yes in zip(self.names, chosen[len(self.names) :], strict=False) if yes}
        return names | moved, moved - names

    def _solution(self, result: Any, budget: int) -> Solution | None:
        """The choice that the solver found, if any."""
        if result.x is None:
            return None
        names, moved = self._chosen(result.x)
        return self._choice(budget, names, frozenset(moved))

    def _choice(self, budget: int, names: Collection[str], moved: frozenset[str]) -> Solution | None:
        """A choice without what exceeds the budget, and nothing said of a bound; None where it is too small."""
        names = self._within(budget, names, moved)
        saved, cost = self.measure(names, moved & names)
        return None if saved > budget else Solution(names, saved, cost, 0.0, False, 0.0, moved & names)

    def _within(self, budget: int, names: Collection[str], moved: Collection[str] = ()) -> frozenset[str]:
        """Names that are used of some, without the smallest where the budget is exceeded by the solver's tolerance.

        That is a millionth of what a solver's numbers are near to, which can be more than a small value takes.
        """
        used = self.graph.used(names)
        for name in sorted(used - frozenset(moved), key=self.sizes.__getitem__):
            if self.measure(used, moved)[0] <= budget:
                break
            used = self.graph.used(used - {name})
        return used


_Row = tuple[tuple[tuple[int, float], ...], float]  # sum of factor * column <= limit


class _Columns:
    """The variables of a graph's integer program by number: operations, names saved, names offloaded, residuals kept.

    Args:
        graph: the graph, made smaller.
        names: those that it may save.
        offloading: whether they may be offloaded.
    """

    def __init__(self, graph: ReducedGraph, names: Sequence[str], offloading: bool) -> None:
        self._graph = graph
        first = len(graph.flops) - 1  # without what always runs, which is no variable
        count = itertools.count(first)
        self.saved = dict(zip(names, count, strict=False))
        count = itertools.count(first + len(names))
        self.moved = dict(zip(names, count, strict=False)) if offloading else {}
        readers: dict[int, set[int]] = {}
        for node, leaves in enumerate(graph.leaves):
            for leaf in leaves:
                readers.setdefault(leaf, set()).add(node)
        # Residuals that the same operations read are kept together.
        together = {leaf: frozenset(nodes) for leaf, nodes in readers.items() if graph.leaf_bytes[leaf]}
        count = itertools.count(first + len(self.saved) + len(self.moved))
        column = dict(zip(dict.fromkeys(together.values()), count, strict=False))
        self.kept = {leaf: column[nodes] for leaf, nodes in together.items()}
        self.operations = first
        self.size = first + len(self.saved) + len(self.moved) + len(column)

    def rows(self) -> tuple[list[_Row], Any]:
        """What restrains the variables, and the least value of each."""
        graph = self._graph
        low = np.zeros(self.size)
        rows: dict[_Row, None] = {}
        for node, (reads, leaves) in enumerate(zip(graph.reads, graph.leaves, strict=True)):
            # What always runs asks for its operands outright.
            running = ((node - 1, 1.0),) if node else ()
            limit = 0.0 if running else -1.0
            for read in reads:
                if read in graph.gates:
                    name = graph.gates[read][0]
                    kept_terms = tuple((columns[name], -1.0) for columns in (self.saved, self.moved) if columns)
                    rows[((*running, (read - 1, -1.0), *kept_terms), limit)] = None
                elif running:
                    rows[((*running, (read - 1, -1.0)), limit)] = None
                else:
                    low[read - 1] = 1.0
            for leaf in leaves:
                if leaf in self.kept and running:
                    rows[((*running, (self.kept[leaf], -1.0)), limit)] = None
                elif leaf in self.kept:
                    low[self.kept[leaf]] = 1.0
        return list(rows), low
