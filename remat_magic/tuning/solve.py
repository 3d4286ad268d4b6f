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
are one variable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.tuning.columns import Columns
from remat_magic.tuning.contract import reached
from remat_magic.tuning.graph import Graph

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
        self.graph = graph
        self.costs = costs or Costs(graph.flops)
        run = reached(graph)
        gates = {n: graph.gates[n] for n in run if n in graph.gates}
        self.sizes = {name: size for name, (size, _) in graph.sizes(gates).items()}
        self.names = list(self.sizes)
        number = {name: i for i, name in enumerate(self.names)}
        groups = ([number[name] for name in group if name in number] for group in alike)
        self._alike = [group for group in groups if len(group) > 1]
        columns = Columns(graph, run, self.names, self.costs.transfer is not None)
        self._first = len(set(columns.nodes.values()))
        self._always = sum(self.costs.nodes[n] for n in run if graph.needed[n])

        cost, amounts = np.zeros(columns.size), np.zeros(columns.size)
        for n, column in columns.nodes.items():
            cost[column] += self.costs.nodes[n]
        for name in self.names:
            amounts[columns.saved[name]] = self.sizes[name]
        for name, column in columns.moved.items():
            cost[column] = self.sizes[name] * (self.costs.transfer or 0.0)
        for leaf, column in columns.kept.items():
            amounts[column] += graph.leaf_bytes[leaf]
        self._amounts = amounts
        # Solvers want numbers near one.
        self._unit = max(float(cost[: self._first].sum()) / 1e3, 1.0 if self.costs.whole else 1e-30)
        self._byte_unit = max(float(amounts.sum()), 1.0) / 1e3
        self._cost = cost / self._unit

        rows, self._low = columns.rows()
        # scipy 1.18 knows no bounds of nothing.
        self._bounds = _bounds(self._low, np.ones(columns.size)) if columns.size else None
        entries = [(i, column, factor) for i, (terms, _) in enumerate(rows) for column, factor in terms]
        entries += [(len(rows), column, amounts[column] / self._byte_unit) for column in np.flatnonzero(amounts)]
        where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
        self._matrix = csr_array((factors, (where, at)), shape=(len(rows) + 1, columns.size))
        self._limits = np.array([limit for _, limit in rows] + [0.0])

    @property
    def size(self) -> tuple[int, int]:
        """How many variables tell of operations that may run again, and how many values may be saved."""
        return self._first, len(self.names)

    def measure(self, names: Collection[str], offloaded: Collection[str] = ()) -> tuple[int, float]:
        """``(saved bytes, cost)`` of a choice."""
        found = self.graph.figures(names, offloaded)
        cost: float = found.recomputed_flops
        if self.costs.nodes is not self.graph.flops:
            cost = sum(self.costs.nodes[node] for node in self.graph.running(names))
        return found.saved_bytes, cost + found.offloaded_bytes * (self.costs.transfer or 0)

    def _run(self, budget: int, whole: bool, seconds: float, gap: float, bounds: Any = None) -> Any:
        limits = self._limits.copy()
        limits[-1] = budget / self._byte_unit
        integral = np.zeros(len(self._cost))
        if whole:
            integral[self._first : self._first + self._choices] = 1
        return milp(
            self._cost + _TIE * self._amounts / self._byte_unit,
            integrality=integral,
            bounds=bounds or self._bounds,
            constraints=_constraint(self._matrix, -np.inf, limits),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )

    @property
    def _choices(self) -> int:
        return len(self.names) * (1 if self.costs.transfer is None else 2)

    def _least(self, value: float, budget: int) -> float:
        """The least cost that a value of the objective stands for, up to the solver's own precision."""
        tie = _TIE * min(budget / self._byte_unit, float(self._amounts.sum()) / self._byte_unit)
        least = max(0.0, value - tie - _PRECISION) * self._unit
        return (math.ceil(least) if self.costs.whole else least) + self._always

    def _bound(self, found: Any, budget: int) -> float:
        """What the solver has proven that no choice undercuts."""
        # With nothing to choose there is no tree to search, and no bound of it; with no time there is neither.
        value = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
        return self._always if value is None else self._least(value, budget)

    def relax(self, budget: int) -> tuple[float | None, Sequence[float]]:
        """The linear programme: a bound on the cost (None: the budget is too small), and how much to save of each."""
        if not len(self._cost):
            return self._always, ()
        found = self._run(budget, False, 60.0, 0.0)
        if found.x is None:
            return None, ()
        return self._least(found.fun, budget), found.x[self._first : self._first + len(self.names)]

    def priced(self, price: float) -> tuple[float, frozenset[str]]:
        """The linear programme without a budget, where each byte costs ``price``: its least cost, and what it saves.

        For each budget this cost less ``price * budget`` is a bound (Lagrange's): no choice within it costs less.
        """
        if not len(self._cost):
            return self._always, frozenset()
        found = milp(
            self._cost + price * self._amounts / self._unit,
            bounds=self._bounds,
            constraints=_constraint(self._matrix[:-1], -np.inf, self._limits[:-1]),
        )
        chosen = found.x[self._first : self._first + len(self.names)] > 0.5
        names = self.graph.used({name for name, yes in zip(self.names, chosen, strict=True) if yes})
        return (found.fun - _PRECISION) * self._unit + self._always, names

    def solve(self, budget: int, seconds: float, gap: float, *, prove: bool = False) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small.

        With ``prove`` much of the time goes into a bound by itself, where the search has none that is near.
        """
        began = time.perf_counter()
        if not len(self._cost):
            return Solution(frozenset(), *self.measure(()), self._always, True, 0.0)
        found = self._run(budget, True, _SEARCH * seconds if prove and self._alike else seconds, gap)
        if found.x is None:
            nothing = self.measure(())
            if found.status == _INFEASIBLE or nothing[0] > budget:
                return None
            # Its time was up before it had looked at all.
            return Solution(frozenset(), *nothing, self._always, False, time.perf_counter() - began)
        chosen = found.x[self._first : self._first + self._choices] > 0.5
        on_device = {name for name, yes in zip(self.names, chosen, strict=False) if yes}
        moved = {name for name, yes in zip(self.names, chosen[len(self.names) :], strict=False) if yes} - on_device
        names = self._within(budget, on_device | moved, moved)
        moved &= names
        saved, cost = self.measure(names, moved)
        bound = self._bound(found, budget)
        proven = found.status == 0
        if prove and not proven and self._alike:
            left = seconds - (time.perf_counter() - began)
            least, whole = self.bound_by_counts(budget, left, gap)
            bound = max(bound, least)
            again = self.measure(whole)
            if not moved and again[0] <= budget and again[1] < cost:
                names, saved, cost = whole, *again
            proven = cost - bound <= gap * cost
        return Solution(names, saved, cost, bound, proven, time.perf_counter() - began, frozenset(moved))

    def bound_by_counts(self, budget: int, seconds: float, gap: float) -> tuple[float, frozenset[str]]:
        """A bound from how many values of equal layers are saved, whichever these are: a whole number of each kind.

        Equal layers can be exchanged, so that a search which decides on each by itself goes through all their orders.
        With the bound come the names that are saved whole in what was found, which may be a good choice.
        """
        size, first = len(self._cost), self._first
        kinds = [*self._alike]
        counted = {i for group in kinds for i in group}
        kinds += [[i] for i in range(len(self.names)) if i not in counted]
        if self.costs.transfer is not None:
            kinds += [[i + len(self.names) for i in group] for group in kinds]
        entries = [(row, first + i, 1.0) for row, group in enumerate(kinds) for i in group]
        entries += [(row, size + row, -1.0) for row in range(len(kinds))]
        where, at, factors = zip(*entries, strict=True)
        counts: Any = csr_array((factors, (where, at)), shape=(len(kinds), size + len(kinds)))
        wider: Any = csr_array(self._matrix, copy=True)
        wider.resize((len(self._limits), size + len(kinds)))
        limits = self._limits.copy()
        limits[-1] = budget / self._byte_unit
        found = milp(
            np.append(self._cost + _TIE * self._amounts / self._byte_unit, np.zeros(len(kinds))),
            integrality=np.append(np.zeros(size), np.ones(len(kinds))),
            bounds=_bounds(
                np.append(self._low, np.zeros(len(kinds))), np.append(np.ones(size), [len(group) for group in kinds])
            ),
            constraints=[_constraint(wider, -np.inf, limits), _constraint(counts, 0, 0)],
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": gap / 2},
        )
        bound = self._bound(found, budget)
        if found.x is None:
            return bound, frozenset()
        chosen = found.x[first : first + len(self.names)] > 1 - 1e-6
        return bound, self._within(budget, {name for name, yes in zip(self.names, chosen, strict=True) if yes})

    def between(
        self, budget: int, always: Collection[str], never: Collection[str], seconds: float
    ) -> tuple[Solution | None, bool]:
        """The best choice that saves some names whatever happens, and others never, and whether the search has ended.

        A small programme, since little is open in it; None where nothing fits, or was found in time. The bound holds
        for such choices only.
        """
        began = time.perf_counter()
        low, high = np.array(self._low), np.ones(len(self._cost))
        for column, name in enumerate(self.names, self._first):
            if name in always:
                low[column] = 1
            elif name in never:
                high[column] = 0
        found = self._run(budget, True, seconds, 0.001, _bounds(low, high))
        ended = found.status in (0, _INFEASIBLE)
        if found.x is None:
            return None, ended
        chosen = found.x[self._first : self._first + len(self.names)] > 0.5
        names = self._within(budget, {name for name, yes in zip(self.names, chosen, strict=True) if yes})
        saved, cost = self.measure(names)
        if saved > budget:
            return None, ended
        return Solution(names, saved, cost, self._bound(found, budget), False, time.perf_counter() - began), ended

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


# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


_PRECISION = 1e-6
_INFEASIBLE = 2  # a status of scipy's

# Where layers are equal, the part of the time of a search that tells them apart; one that counts them has the rest.
_SEARCH = 0.1

# Bytes count a very little beside FLOPs (both add up to a thousand), or the solver saves what spares no work.
_TIE = 1e-6
