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
    """For each node the one that stands for it: whatever is saved, both run or neither does.

    An operation runs if one of its readers does, and what a name can save if a reader runs and the name is not saved.
    So what single operations, or the same ones, read runs together; and equal layers, whose values have one name, run
    alike. In a loop some nodes read each other, and each of these stands for itself.
    """
    nodes = list(nodes)
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for read in graph.reads[node]:
            if read != node:
                readers[read].append(node)
    waits = {node: len(by) for node, by in readers.items()}
    ready = [node for node in nodes if not waits[node]]
    around = iter(nodes)
    group: dict[int, int] = {}
    alike: dict[object, int] = {}
    while len(group) < len(nodes):
        # None is ready where nodes read each other: one of them is taken, which frees the others.
        node = ready.pop() if ready else next(n for n in around if n not in group)
        if node in group:
            continue
        known = all(by in group for by in readers[node])
        group[node] = _stands_for(graph, node, {group[by] for by in readers[node]}, alike) if known else node
        for read in graph.reads[node]:
            if read != node:
                waits[read] -= 1
                if not waits[read]:
                    ready.append(read)
    return group


def _stands_for(graph: Graph, node: int, readers: set[int], alike: dict[object, int]) -> int:
    """The node that stands for one with readers that these stand for; ``alike`` has those that stand for others."""
    if graph.needed[node]:
        return node
    gate = graph.gates.get(node)
    if any(graph.needed[by] for by in readers):
        readers = {-1}  # which runs whatever is saved
    elif gate is None and len(readers) == 1:
        return next(iter(readers))
    return alike.setdefault((None if gate is None else gate[0], frozenset(readers)), node)
