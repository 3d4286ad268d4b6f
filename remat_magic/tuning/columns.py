"""The variables of the integer programme of a graph, and what restrains them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from remat_magic.tuning.contract import groups
from remat_magic.tuning.graph import Graph

__all__ = ["Columns", "Row"]

Row = tuple[tuple[tuple[int, float], ...], float]  # sum of factor * column <= limit


class Columns:
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

    def rows(self) -> tuple[list[Row], Any]:
        """What restrains the variables, and the least value of each."""
        graph, nodes = self._graph, self.nodes
        low = np.zeros(self.size)
        rows: dict[Row, None] = {}
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
