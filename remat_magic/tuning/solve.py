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

import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.tuning.contract import groups, reached
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


_Row = tuple[tuple[tuple[int, float], ...], float]  # sum of factor * column <= limit


class _Columns:
    """The variables of a graph's programme by number: operations, names saved, names offloaded, residuals kept."""

    def __init__(self, graph: Graph, run: Sequence[int], names: Sequence[str], offloading: bool) -> None:
        self._graph, self._run = graph, run
        group = groups(graph, run)
        numbers: dict[int, int] = {}
        for n in run:
            if not graph.needed[n]:
                numbers.setdefault(group[n], len(numbers))
        self.nodes = {n: numbers[group[n]] for n in run if not graph.needed[n]}
        by: dict[int, set[int]] = {}
        for n in run:
            for leaf in graph.leaves[n]:
                by.setdefault(leaf, set()).add(-1 if graph.needed[n] else self.nodes[n])
        # Residuals that the same operations read are kept together.
        together = {leaf: frozenset(readers) for leaf, readers in by.items() if graph.leaf_bytes[leaf]}
        count = itertools.count(len(numbers))
        self.saved = dict(zip(names, count, strict=False))
        count = itertools.count(len(numbers) + len(self.saved))
        self.moved = dict(zip(names, count, strict=False)) if offloading else {}
        count = itertools.count(len(numbers) + len(self.saved) + len(self.moved))
        column = dict(zip(dict.fromkeys(together.values()), count, strict=False))
        self.kept = {leaf: column[readers] for leaf, readers in together.items()}
        self.size = len(numbers) + len(self.saved) + len(self.moved) + len(column)

    def rows(self) -> tuple[list[_Row], Any]:
        """What restrains the variables, and the least value of each."""
        graph, nodes = self._graph, self.nodes
        low = np.zeros(self.size)
        rows: dict[_Row, None] = {}
        for node in self._run:
            # What always runs is no variable: it asks for its operands outright.
            mine = () if graph.needed[node] else ((nodes[node], 1.0),)
            limit = 0.0 if mine else -1.0
            for read in graph.reads[node]:
                if graph.needed[read] or (mine and nodes[read] == nodes[node]):
                    continue
                if read in graph.gates:
                    name = graph.gates[read][0]
                    held = tuple((columns[name], -1.0) for columns in (self.saved, self.moved) if columns)
                    rows[((*mine, (nodes[read], -1.0), *held), limit)] = None
                elif mine:
                    rows[((*mine, (nodes[read], -1.0)), limit)] = None
                else:
                    low[nodes[read]] = 1.0
            for leaf in graph.leaves[node]:
                if leaf in self.kept and mine:
                    rows[((*mine, (self.kept[leaf], -1.0)), limit)] = None
                elif leaf in self.kept:
                    low[self.kept[leaf]] = 1.0
        return list(rows), low


class Problem:
    """A graph as an integer programme, to be solved for several budgets.

    A name that several gates have (equal layers, decided together) costs the bytes of all of them.

    Args:
        graph: the graph.
        costs: what is to be least; by default FLOPs, with nothing offloaded.
    """

    def __init__(self, graph: Graph, costs: Costs | None = None) -> None:
        self.graph = graph
        self.costs = costs or Costs(graph.flops)
        run = reached(graph)
        gates = {n: graph.gates[n] for n in run if n in graph.gates}
        self.sizes = {name: size for name, (size, _) in graph.sizes(gates).items()}
        self.names = list(self.sizes)
        columns = _Columns(graph, run, self.names, self.costs.transfer is not None)
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

    def solve(self, budget: int, seconds: float, gap: float) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small (or the time)."""
        began = time.perf_counter()
        if not len(self._cost):
            return Solution(frozenset(), *self.measure(()), self._always, True, 0.0)
        found = self._run(budget, True, seconds, gap)
        if found.x is None:
            return None
        chosen = found.x[self._first : self._first + self._choices] > 0.5
        on_device = {name for name, yes in zip(self.names, chosen, strict=False) if yes}
        moved = {name for name, yes in zip(self.names, chosen[len(self.names) :], strict=False) if yes} - on_device
        names = self.graph.used(on_device | moved)
        moved &= names
        return Solution(
            names,
            *self.measure(names, moved),
            # With nothing to choose there is no tree to search, and no bound of it.
            self._least(found.fun if found.mip_dual_bound is None else found.mip_dual_bound, budget),
            found.status == 0,
            time.perf_counter() - began,
            frozenset(moved),
        )

    def between(
        self, budget: int, always: Collection[str], never: Collection[str], seconds: float
    ) -> tuple[int, float, frozenset[str]] | None:
        """The best choice that saves some names whatever happens, and others never: its bytes, its cost and its names.

        A small programme, since little is open in it; None where nothing fits, or was found in time.
        """
        low, high = self._low.copy(), np.ones(len(self._low))
        for column, name in enumerate(self.names, self._first):
            if name in always:
                low[column] = 1
            elif name in never:
                high[column] = 0
        found = self._run(budget, True, seconds, 0.001, _bounds(low, high))
        if found.x is None:
            return None
        chosen = found.x[self._first : self._first + len(self.names)] > 0.5
        names = self.graph.used({name for name, yes in zip(self.names, chosen, strict=True) if yes})
        saved, cost = self.measure(names)
        return (saved, cost, names) if saved <= budget else None

    def round(self, budget: int) -> Solution | None:
        """A good choice by the linear programme alone: what it saves whole, and the best of what it saves in part."""
        began = time.perf_counter()
        bound, much = self.relax(budget)
        if bound is None:
            return None
        sure = [name for name, part in zip(self.names, much, strict=True) if part > 1 - 1e-6]
        parts = [name for name, part in zip(self.names, much, strict=True) if 1e-6 < part <= 1 - 1e-6]
        best: tuple[float, int, frozenset[str]] | None = None
        for number in range(2 ** min(len(parts), _TRIED)):
            names = frozenset([*sure, *(name for i, name in enumerate(parts[:_TRIED]) if number >> i & 1)])
            saved, cost = self.measure(names)
            if saved <= budget and (best is None or (cost, saved) < best[:2]):
                best = (cost, saved, names)
        if best is None:
            saved, cost = self.measure(())
            best = (cost, saved, frozenset())
        cost, saved, names = best
        return Solution(self.graph.used(names), saved, cost, bound, False, time.perf_counter() - began)

    def sweep(
        self, budgets: Sequence[int], seconds: float, start: Callable[[int], Solution | None] | None = None
    ) -> list[Solution | None]:
        """A choice for each of ascending budgets; what time is left goes where the bound is farthest.

        ``start`` gives a first choice for a budget, by default by the linear programme.
        """
        end = time.perf_counter() + seconds
        found = [(start or self.round)(budget) for budget in budgets]
        todo = list(range(len(budgets)))
        while True:
            for index in range(1, len(found)):  # what fits a smaller budget fits a larger one
                small, large = found[index - 1], found[index]
                if small is not None and large is not None and small.cost < large.cost:
                    found[index] = replace(small, bound=large.bound)
            widest, index = max(((_gap(found[index]), index) for index in todo), default=(0, 0))
            left = end - time.perf_counter()
            if not widest or left <= 0:
                return found
            todo.remove(index)
            better, known = self.solve(budgets[index], min(left, max(0.3, seconds / 5)), 0.01), found[index]
            if better is not None and known is not None:
                bound = max(better.bound, known.bound)
                found[index] = replace(min(better, known, key=lambda each: each.cost), bound=bound)


# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


def _gap(solution: Solution | None) -> float:
    """The cost between a solution and its bound, none if this is less than a hundredth of it."""
    if solution is None or 100 * (solution.cost - solution.bound) < solution.cost:
        return 0
    return solution.cost - solution.bound


# Of the values that the linear programme saves in part, how many are tried in all combinations.
_TRIED = 3

_PRECISION = 1e-6

# Bytes count a very little beside FLOPs (both add up to a thousand), or the solver saves what spares no work.
_TIE = 1e-6
