"""A graph made smaller before it is solved: what cannot run is left out, and what runs together is one."""

from __future__ import annotations

from collections.abc import Iterable

from remat_magic.tuning.graph import Graph

__all__ = ["groups", "reached"]


def reached(graph: Graph) -> list[int]:
    """The nodes that can run: those that always do, and all that these read, however far."""
    found = [i for i, needed in enumerate(graph.needed) if needed]
    seen = set(found)
    for node in found:
        for read in graph.reads[node]:
            if read not in seen:
                seen.add(read)
                found.append(read)
    return found


def groups(graph: Graph, nodes: Iterable[int]) -> dict[int, int]:
    """For each node the one that stands for it: what a single other reads, unless by name, runs when that one does."""
    readers: dict[int, list[int]] = {}
    for node in nodes:
        for read in graph.reads[node]:
            readers.setdefault(read, []).append(node)
    group: dict[int, int] = {}

    def single(node: int) -> int | None:
        by = readers.get(node, [])
        alone = len(by) == 1 and by[0] != node and node not in graph.gates and not graph.needed[node]
        return by[0] if alone and not graph.needed[by[0]] else None

    for node in nodes:
        chain, top = [node], node
        while top not in group:
            above = single(top)
            if above is None or above in chain:  # a loop's values can go round
                break
            chain.append(above)
            top = above
        group.update(dict.fromkeys(chain, group.get(top, top)))
    return group
