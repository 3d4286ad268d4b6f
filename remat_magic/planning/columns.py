"""The variables of the integer programme of a graph, and what restrains them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from remat_magic.planning.contract import Contracted

__all__ = ["Columns", "Row"]

Row = tuple[tuple[tuple[int, float], ...], float]  # sum of factor * column <= limit


class Columns:
    """The variables of a graph's programme by number: operations, names saved, names offloaded, residuals kept.

    Args:
        graph: the graph, made smaller.
        names: those that it may save.
        offloading: whether they may be offloaded.
    """

    def __init__(self, graph: Contracted, names: Sequence[str], offloading: bool) -> None:
        self._graph = graph
        first = len(graph.flops) - 1  # without what always runs, which is no variable
        count = itertools.count(first)
        self.saved = dict(zip(names, count, strict=False))
        count = itertools.count(first + len(names))
        self.moved = dict(zip(names, count, strict=False)) if offloading else {}
        by: dict[int, set[int]] = {}
        for node, leaves in enumerate(graph.leaves):
            for leaf in leaves:
                by.setdefault(leaf, set()).add(node)
        # Residuals that the same operations read are kept together.
        together = {leaf: frozenset(readers) for leaf, readers in by.items() if graph.leaf_bytes[leaf]}
        count = itertools.count(first + len(self.saved) + len(self.moved))
        column = dict(zip(dict.fromkeys(together.values()), count, strict=False))
        self.kept = {leaf: column[readers] for leaf, readers in together.items()}
        self.operations = first
        self.size = first + len(self.saved) + len(self.moved) + len(column)

    def rows(self) -> tuple[list[Row], Any]:
        """What restrains the variables, and the least value of each."""
        graph = self._graph
        low = np.zeros(self.size)
        rows: dict[Row, None] = {}
        for node, (reads, leaves) in enumerate(zip(graph.reads, graph.leaves, strict=True)):
            # What always runs asks for its operands outright.
            mine = ((node - 1, 1.0),) if node else ()
            limit = 0.0 if mine else -1.0
            for read in reads:
                if read in graph.gates:
                    name = graph.gates[read][0]
                    held = tuple((columns[name], -1.0) for columns in (self.saved, self.moved) if columns)
                    rows[((*mine, (read - 1, -1.0), *held), limit)] = None
                elif mine:
                    rows[((*mine, (read - 1, -1.0)), limit)] = None
                else:
                    low[read - 1] = 1.0
            for leaf in leaves:
                if leaf in self.kept and mine:
                    rows[((*mine, (self.kept[leaf], -1.0)), limit)] = None
                elif leaf in self.kept:
                    low[self.kept[leaf]] = 1.0
        return list(rows), low
