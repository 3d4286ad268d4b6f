"""The best choice of what to save, as an integer programme.

For each operation ``r = 1`` if it runs in the backward pass, for each name ``s = 1`` if its value is saved, for each
residual that no policy has a say about ``a = 1`` if it is kept:

    minimise    sum flops r
    subject to  r(reader) <= r(operand)             an operation that runs has its operands run,
                r(reader) <= s(gate) + r(gate)      unless the operand is saved by name,
                r(reader) <= a(residual),
                sum bytes s + sum bytes a <= budget.

Only ``s`` has to be whole: the least ``r`` and ``a`` are then whole by themselves. Without that demand it is a linear
programme, whose optimum no choice can undercut. Checkmate (Jain et al., MLSys 2020) plans the order of operations as
well; here JAX has settled it, and the programme is small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat_magic.tuning.graph import Graph

__all__ = ["Problem", "Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The names to save, what saving them comes to by the graph, and a bound that no choice of names undercuts.

    ``proven`` tells that the solver ended by itself, within the gap asked for, and not because its time was up.
    """

    names: frozenset[str]
    saved_bytes: int
    recomputed_flops: int
    bound: int
    proven: bool
    seconds: float


class Problem:
    """A graph as an integer programme, to be solved for several budgets.

    A name that several gates have (equal layers, decided together) costs the bytes of all of them.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        reached = _reached(graph)
        nodes = {node: i for i, node in enumerate(n for n in reached if not graph.needed[n])}
        gates = {n: graph.gates[n] for n in reached if n in graph.gates}
        names = {name: size for name, (size, _) in graph.sizes(gates).items()}
        leaves = {leaf: None for n in reached for leaf in graph.leaves[n] if graph.leaf_bytes[leaf]}
        self.names = list(names)
        self._first = len(nodes)
        saved = {name: len(nodes) + i for i, name in enumerate(names)}
        kept = {leaf: len(nodes) + len(names) + i for i, leaf in enumerate(leaves)}
        size = len(nodes) + len(names) + len(kept)
        self._always = sum(graph.flops[n] for n in reached if graph.needed[n])

        flops, amounts = np.zeros(size), np.zeros(size)
        for node, column in nodes.items():
            flops[column] = graph.flops[node]
        for name, column in saved.items():
            amounts[column] = names[name]
        for leaf, column in kept.items():
            amounts[column] = graph.leaf_bytes[leaf]
        self._amounts = amounts
        # Solvers want numbers near one.
        self._flop_unit = max(float(flops.sum()), 1.0) / 1e3
        self._byte_unit = max(float(amounts.sum()), 1.0) / 1e3
        self._cost = flops / self._flop_unit

        low = np.zeros(size)
        rows: list[tuple[tuple[tuple[int, float], ...], float]] = []  # sum of factor * column <= limit
        for node in reached:
            # What always runs is no variable: it asks for its operands outright.
            mine = ((nodes[node], 1.0),) if node in nodes else ()
            limit = 0.0 if mine else -1.0
            for read in graph.reads[node]:
                if read in gates:
                    rows.append(((*mine, (nodes[read], -1.0), (saved[gates[read][0]], -1.0)), limit))
                elif read in nodes and mine:
                    rows.append(((*mine, (nodes[read], -1.0)), limit))
                elif read in nodes:
                    low[nodes[read]] = 1.0
            for leaf in graph.leaves[node]:
                if leaf in kept and mine:
                    rows.append(((*mine, (kept[leaf], -1.0)), limit))
                elif leaf in kept:
                    low[kept[leaf]] = 1.0
        self._bounds = _bounds(low, np.ones(size)) if size else None  # scipy 1.18 knows no bounds of nothing
        entries = [(i, column, factor) for i, (terms, _) in enumerate(rows) for column, factor in terms]
        entries += [(len(rows), column, amounts[column] / self._byte_unit) for column in np.flatnonzero(amounts)]
        where, columns, factors = zip(*entries, strict=True) if entries else ((), (), ())
        self._matrix = csr_array((factors, (where, columns)), shape=(len(rows) + 1, size))
        self._limits = np.array([limit for _, limit in rows] + [0.0])

    @property
    def size(self) -> tuple[int, int]:
        """How many operations may run again, and how many values may be saved."""
        return self._first, len(self.names)

    def _run(self, budget: int, whole: bool, seconds: float, gap: float) -> Any:
        limits = self._limits.copy()
        limits[-1] = budget / self._byte_unit
        integral = np.zeros(len(self._cost))
        if whole:
            integral[self._first : self._first + len(self.names)] = 1
        return milp(
            self._cost + _TIE * self._amounts / self._byte_unit,
            integrality=integral,
            bounds=self._bounds,
            constraints=_constraint(self._matrix, -np.inf, limits),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )

    def _flops(self, value: float, budget: int) -> int:
        """The fewest whole FLOPs that a value of the objective stands for, up to the solver's own precision."""
        least = value - _TIE * min(budget / self._byte_unit, float(self._amounts.sum()) / self._byte_unit) - _PRECISION
        return max(0, math.ceil(least * self._flop_unit)) + self._always

    def relax(self, budget: int) -> tuple[int | None, Sequence[float]]:
        """The linear programme: a bound on the FLOPs (None: the budget is too small), and how much to save of each."""
        if not len(self._cost):
            return self._always, ()
        found = self._run(budget, False, 60.0, 0.0)
        if found.x is None:
            return None, ()
        return self._flops(found.fun, budget), found.x[self._first : self._first + len(self.names)]

    def solve(self, budget: int, seconds: float, gap: float) -> Solution | None:
        """The best choice that the solver finds, None where the budget is too small (or the time)."""
        began = time.perf_counter()
        if not len(self._cost):
            return Solution(frozenset(), *self.graph.predict(()), self._always, True, 0.0)
        found = self._run(budget, True, seconds, gap)
        if found.x is None:
            return None
        saved = found.x[self._first : self._first + len(self.names)]
        names = frozenset(name for name, much in zip(self.names, saved, strict=True) if much > 0.5)
        names = self.graph.used(names)
        return Solution(
            names,
            *self.graph.predict(names),
            # With nothing to choose there is no tree to search, and no bound of it.
            self._flops(found.fun if found.mip_dual_bound is None else found.mip_dual_bound, budget),
            found.status == 0,
            time.perf_counter() - began,
        )

    def round(self, budget: int) -> Solution | None:
        """A good choice by the linear programme alone: what it saves whole, and the best of what it saves in part."""
        began = time.perf_counter()
        bound, much = self.relax(budget)
        if bound is None:
            return None
        sure = [name for name, part in zip(self.names, much, strict=True) if part > 1 - 1e-6]
        parts = [name for name, part in zip(self.names, much, strict=True) if 1e-6 < part <= 1 - 1e-6]
        best: tuple[int, int, frozenset[str]] | None = None
        for number in range(2 ** min(len(parts), _TRIED)):
            names = frozenset([*sure, *(name for i, name in enumerate(parts[:_TRIED]) if number >> i & 1)])
            saved, flops = self.graph.predict(names)
            if saved <= budget and (best is None or (flops, saved) < best[:2]):
                best = (flops, saved, names)
        if best is None:
            saved, flops = self.graph.predict(())
            best = (flops, saved, frozenset())
        flops, saved, names = best
        return Solution(self.graph.used(names), saved, flops, bound, False, time.perf_counter() - began)

    def sweep(self, budgets: Sequence[int], seconds: float) -> list[Solution | None]:
        """A choice for each of ascending budgets; what time is left goes where the bound is farthest."""
        end = time.perf_counter() + seconds
        found = [self.round(budget) for budget in budgets]
        todo = list(range(len(budgets)))
        while True:
            for index in range(1, len(found)):  # what fits a smaller budget fits a larger one
                small, large = found[index - 1], found[index]
                if small is not None and large is not None and small.recomputed_flops < large.recomputed_flops:
                    found[index] = replace(small, bound=large.bound)
            widest, index = max(((_gap(found[index]), index) for index in todo), default=(0, 0))
            left = end - time.perf_counter()
            if not widest or left <= 0:
                return found
            todo.remove(index)
            better, known = self.solve(budgets[index], min(left, max(0.3, seconds / 5)), 0.01), found[index]
            if better is not None and known is not None:
                bound = max(better.bound, known.bound)
                found[index] = replace(min(better, known, key=lambda each: each.recomputed_flops), bound=bound)


# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


def _gap(solution: Solution | None) -> int:
    """The FLOPs between a solution and its bound, none if these are less than a hundredth of it."""
    if solution is None or 100 * (solution.recomputed_flops - solution.bound) < solution.recomputed_flops:
        return 0
    return solution.recomputed_flops - solution.bound


# Of the values that the linear programme saves in part, how many are tried in all combinations.
_TRIED = 3

_PRECISION = 1e-6

# Bytes count a very little beside FLOPs (both add up to a thousand), or the solver saves what spares no work.
_TIE = 1e-6


def _reached(graph: Graph) -> list[int]:
    """The nodes that can run: those that always do, and all that these read, however far."""
    found = [i for i, needed in enumerate(graph.needed) if needed]
    seen = set(found)
    for node in found:
        for read in graph.reads[node]:
            if read not in seen:
                seen.add(read)
                found.append(read)
    return found
