"""The best choice of what to save, as an integer programme.

For each operation ``r = 1`` if it runs in the backward pass, for each name ``s = 1`` if its value is saved and
``o = 1`` if it is offloaded, for each residual that no policy has a say about ``a = 1`` if it is kept:

    minimise    sum cost r + sum transfer o
    subject to  r(reader) <= r(operand)                   an operation that runs has its operands run,
                r(reader) <= s(gate) + o(gate) + r(gate)  unless the operand is saved by name,
                r(reader) <= a(residual),
                sum bytes s + sum bytes a <= budget.

Only ``s`` and ``o`` have to be whole: the least ``r`` and ``a`` are then whole by themselves. Without that demand it is
a linear programme, whose optimum no choice can undercut. Checkmate (Jain et al., MLSys 2020) plans the order of
operations as well; here JAX has settled it, and the programme is small. It gets smaller still, since what a single
operation reads runs if and only if that one does, and so do equal layers that are decided together: such operations
are one variable. And most names are none to choose, since another is never worse (``contract.dominated``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from remat_magic.planning.columns import Columns
from remat_magic.planning.contract import contracted
from remat_magic.planning.graph import Graph
from remat_magic.planning.programme import INFEASIBLE, Programme, Summed, summed

__all__ = ["Costs", "Problem", "Solution"]


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
    """A graph as an integer programme, to be solved for several budgets.

    A name that several gates have (equal layers, decided together) costs the bytes of all of them.

    Args:
        graph: the graph.
        costs: what is to be least; by default FLOPs, with nothing offloaded.
        alike: names of values that one expression makes in equal layers, a group each.
    """

    def __init__(self, graph: Graph, costs: Costs | None = None, alike: Iterable[Collection[str]] = ()) -> None:
        self.costs = costs or Costs(graph.flops)
        self._whole = graph
        self.graph = small = contracted(graph, self.costs.nodes)
        self.sizes = {name: size for name, (size, _) in small.sizes(small.gates).items()}
        self.names = list(self.sizes)
        self._known = frozenset(self.names)
        columns = Columns(small, self.names, self.costs.transfer is not None)
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
        self._programme = Programme(
            cost / self._unit,
            amounts / self._byte_unit,
            low,
            np.ones(columns.size),
            integral,
            csr_array((factors, (where, at)), shape=(len(rows), columns.size)),
            np.array([limit for _, limit in rows]),
        )
        self._counted: Summed | None = None
        kind = {name: number for number, group in enumerate(alike, 1) for name in group if name in self._known}
        if len(kind) > len(set(kind.values())):
            kinds = [0] * columns.size
            for part in (columns.saved, columns.moved):
                for name, column in part.items():
                    kinds[column] = kind.get(name, 0)
            self._counted = summed(self._programme, kinds)

    @property
    def size(self) -> tuple[int, int]:
        """How many variables tell of operations that may run again, and how many values may be saved."""
        return self._first, len(self.names)

    def measure(self, names: Collection[str], offloaded: Collection[str] = ()) -> tuple[int, float]:
        """``(saved bytes, cost)`` of a choice, of any names of the whole graph."""
        graph = self.graph if self._known.issuperset(names) else self._whole
        found = graph.figures(names, offloaded)
        cost: float = found.recomputed_flops
        if self.costs.nodes is not self._whole.flops:
            nodes = self.costs.nodes if graph is self._whole else self.graph.costs
            cost = sum(nodes[node] for node in graph.running(names))
        return found.saved_bytes, cost + found.offloaded_bytes * (self.costs.transfer or 0)

    def _bound(self, found: Any, budget: int) -> float:
        """What the solver has proven that no choice undercuts, up to its own precision."""
        # With nothing to choose there is no tree to search, and no bound of it; with no time there is neither.
        value = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
        if value is None:
            return self._always
        least = max(0.0, value - self._programme.tie(budget / self._byte_unit) - _PRECISION) * self._unit
        return (math.ceil(least) if self.costs.whole else least) + self._always

    def relax(self, budget: int) -> tuple[float | None, Sequence[float]]:
        """The linear programme: a bound on the cost (None: the budget is too small), and how much to save of each."""
        if not self._size:
            return self._always, ()
        found = self._programme.run(budget / self._byte_unit, 60.0, 0.0, whole=False)
        if found.x is None:
            return None, ()
        return self._bound(found, budget), found.x[self._first : self._first + len(self.names)]

    def priced(self, price: float) -> tuple[float, frozenset[str]]:
        """The linear programme without a budget, where each byte costs ``price``: its least cost, and what it saves.

        For each budget this cost less ``price * budget`` is a bound (Lagrange's): no choice within it costs less.
        """
        if not self._size:
            return self._always, frozenset()
        each, member_of = self._programme, slice(None)
        if self._counted is not None:
            each, member_of = self._counted.programme, self._counted.member_of
        found = each.priced(price * self._byte_unit / self._unit)
        names, _ = self._chosen((found.x / each.high)[member_of])
        return (found.fun - _PRECISION) * self._unit + self._always, self.graph.used(names)

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
            found = self._programme.run(budget / self._byte_unit, left, gap)
            bound, ended = max(bound, self._bound(found, budget)), found.status == 0
            other = self._solution(found, budget)
            if found.x is None and found.status != INFEASIBLE:  # its time was up before it had looked at all
                other = self._choice(budget, frozenset(), frozenset())
            best = min(filter(None, (best, other)), key=lambda each: each.cost, default=None)
        if best is None:
            return None
        proven = ended or best.cost - bound <= gap * best.cost
        return replace(best, bound=bound, proven=proven, seconds=time.perf_counter() - began)

    def count(self, budget: int, seconds: float, gap: float) -> tuple[float, Solution | None]:
        """A bound from how many of equal layers save a value, whichever these are, and a choice with such numbers.

        Where no layers are equal, what is known without looking and no choice. The choice has no bound of its own.
        """
        if self._counted is None:
            return self._always, None
        began = time.perf_counter()
        small, member_of = self._counted.programme, self._counted.member_of
        found = small.run(budget / self._byte_unit, seconds, gap / 4)
        bound = self._bound(found, budget)
        if found.x is None:
            return bound, None
        # What all or none of the equal layers save is decided; which of them save the rest is left to choose.
        low, high = self._programme.low.copy(), self._programme.high.copy()
        names = slice(self._first, self._first + self._choices)
        low[names] = np.maximum(low, (found.x > small.high - 0.5)[member_of])[names]
        high[names] = np.minimum(high, (found.x > small.low + 0.5)[member_of])[names]
        left = seconds - (time.perf_counter() - began)
        exact = self._programme.run(budget / self._byte_unit, left, gap / 4, low=low, high=high)
        return bound, self._solution(exact, budget)

    def between(
        self, budget: int, always: Collection[str], never: Collection[str], seconds: float
    ) -> tuple[Solution | None, bool]:
        """The best choice that saves some names whatever happens, and others never, and whether the search has ended.

        A small programme, since little is open in it; None where nothing fits, or was found in time. The bound holds
        for such choices only.
        """
        began = time.perf_counter()
        low, high = self._programme.low.copy(), self._programme.high.copy()
        for column, name in enumerate(self.names, self._first):
            if name in always:
                low[column] = 1
            elif name in never:
                high[column] = 0
        found = self._programme.run(budget / self._byte_unit, seconds, 0.001, low=low, high=high)
        ended = found.status in (0, INFEASIBLE)
        made = self._solution(found, budget)
        if made is None:
            return None, ended
        return replace(made, bound=self._bound(found, budget), seconds=time.perf_counter() - began), ended

    @property
    def _size(self) -> int:
        return len(self._programme.cost)

    @property
    def _choices(self) -> int:
        return len(self.names) * (1 if self.costs.transfer is None else 2)

    def _chosen(self, x: Any) -> tuple[set[str], set[str]]:
        """The names that are saved, and those that are offloaded, by the variables of the programme."""
        chosen = x[self._first : self._first + self._choices] > 0.5
        names = {name for name, yes in zip(self.names, chosen, strict=False) if yes}
        moved = {name for name, yes in zip(self.names, chosen[len(self.names) :], strict=False) if yes}
        return names | moved, moved - names

    def _solution(self, found: Any, budget: int) -> Solution | None:
        """The choice that the solver found, if any."""
        if found.x is None:
            return None
        names, moved = self._chosen(found.x)
        return self._choice(budget, names, frozenset(moved))

    def _choice(self, budget: int, names: Collection[str], moved: frozenset[str]) -> Solution | None:
        """A choice without what exceeds the budget, and nothing said of a bound; None where it is too small."""
        names = self._within(budget, names, moved)
        saved, cost = self.measure(names, moved & names)
        return None if saved > budget else Solution(names, saved, cost, 0.0, False, 0.0, moved & names)

    def _within(self, budget: int, names: Collection[str], moved: Collection[str] = ()) -> frozenset[str]:
        """Names that are used of some, without the smallest where the budget is exceeded by the solver's tolerance.

        That is a millionth of what the numbers of a programme are near to, which can be more than a small value takes.
        """
        used = self.graph.used(names)
        for name in sorted(used - frozenset(moved), key=self.sizes.__getitem__):
            if self.measure(used, moved)[0] <= budget:
                break
            used = self.graph.used(used - {name})
        return used


_PRECISION = 1e-6

# Where layers are equal, the part of the time of a search that counts them; one that tells them apart has the rest.
_COUNTING = 0.7
