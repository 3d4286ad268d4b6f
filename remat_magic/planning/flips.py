"""Many choices that differ by one name from another, reckoned in bulk: the graph as arrays, searched by scipy."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from remat_magic.planning.graph import Graph

__all__ = ["Flip", "Flips"]


@dataclass(frozen=True, slots=True)
class Flip:
    """What a choice comes to, and the names in it whose saved values are read."""

    saved_bytes: int
    recomputed_flops: int
    seconds: float
    used: frozenset[str]


class Flips:
    """A choice of names, and what it is when one name is taken out of it or put into it.

    ``base`` is what the choice itself comes to, ``recomputed`` the names of the values that are computed again under it
    and could be saved.

    Args:
        graph: the graph.
        chosen: the names.
        seconds: of each node, or None.
    """

    def __init__(self, graph: Graph, chosen: Collection[str], seconds: Sequence[float] | None) -> None:
        count = len(graph.flops)
        leaves = {leaf: count + i for i, leaf in enumerate(graph.leaf_bytes)}
        self._source = count + len(leaves)
        rows: list[Sequence[int]] = [
            (*graph.reads[n], *(leaves[leaf] for leaf in graph.leaves[n])) for n in range(count)
        ]
        rows += [()] * len(leaves)
        rows.append([n for n in range(count) if graph.needed[n]])
        starts = np.cumsum([0, *map(len, rows)])
        columns = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(starts[-1]))
        self._rows, self._starts = columns.copy(), starts
        self._matrix = csr_array((np.ones(len(columns)), columns, starts), shape=(len(rows), len(rows)))
        self._flops = np.array([*graph.flops, *[0] * (len(leaves) + 1)], np.int64)
        # In whole picoseconds: what changes nothing is to differ by nothing, in whatever order it is summed.
        each = np.array([*(seconds or [0.0] * count), *[0.0] * (len(leaves) + 1)])
        self._picoseconds = np.rint(each * 1e12).astype(np.int64)
        self._leaf = np.array([*[0] * count, *graph.leaf_bytes.values(), 0], np.int64)
        self._names = list(dict.fromkeys(name for name, _, _ in graph.gates.values()))
        number = {name: i for i, name in enumerate(self._names)}
        self._name = np.full(len(rows), -1)
        self._passed = np.zeros(len(rows))
        self._each = np.zeros(len(self._names), np.int64)
        self._copies = np.zeros(len(self._names), np.int64)
        self._gates: dict[str, list[int]] = {}
        for gate, (name, size, passed) in graph.gates.items():
            self._gates.setdefault(name, []).append(gate)
            self._name[gate], self._passed[gate] = number[name], passed
            self._each[number[name]], self._copies[number[name]] = size, graph.copies.get(name, passed)
        self._shut = np.zeros(len(rows), bool)
        self.chosen = frozenset(chosen)
        for name in self.chosen & self._gates.keys():
            self._set(name, True)
        reached = self._reached()
        self.base = self._tell(reached)
        passing = self._name[reached[~self._shut[reached]]]
        self.recomputed = frozenset(self._names[i] for i in np.unique(passing[passing >= 0]))

    def _set(self, name: str, shut: bool) -> None:
        """Let nothing through the gates of a name, or all: a gate that is shut leads to itself alone."""
        indices: Any = self._matrix.indices
        for gate in self._gates[name]:
            row = slice(self._starts[gate], self._starts[gate + 1])
            indices[row] = gate if shut else self._rows[row]
            self._shut[gate] = shut

    def _reached(self) -> Any:
        """What runs, and the gates where it reads saved values."""
        return breadth_first_order(self._matrix, self._source, return_predecessors=False)

    def _tell(self, reached: Any) -> Flip:
        shut = self._shut[reached]
        held, again = reached[shut], reached[~shut]
        times = np.bincount(self._name[held], self._passed[held], len(self._names)).astype(np.int64)
        saved = int((np.minimum(times, self._copies) * self._each).sum() + self._leaf[reached].sum())
        flops, seconds = int(self._flops[again].sum()), int(self._picoseconds[again].sum()) * 1e-12
        return Flip(saved, flops, seconds, frozenset(self._names[i] for i in np.flatnonzero(times)))

    def flip(self, *names: str) -> Flip:
        """The choice without those of some names that are in it, and with those that are not."""
        for name in names:
            self._set(name, name not in self.chosen)
        try:
            return self._tell(self._reached())
        finally:
            for name in names:
                self._set(name, name in self.chosen)
