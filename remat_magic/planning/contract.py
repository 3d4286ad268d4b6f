"""A graph made smaller before it is solved: what cannot run is left out, what runs together is one.

And a name that another can always stand in for is none to choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from remat_magic.planning.graph import Graph

__all__ = ["Contracted", "contracted", "dominated", "groups", "reached"]


@dataclass(eq=False, slots=True)
class Contracted(Graph):
    """A graph of fewer nodes, of which the first is all that runs whatever is saved.

    Attributes:
        whole: the graph that it was made of.
        costs: of each node.
        opened: for each gate those of the whole graph that it stands for.
    """

    whole: Graph = field(default_factory=Graph)
    costs: list[float] = field(default_factory=list)
    opened: dict[int, list[int]] = field(default_factory=dict)

    def sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """As of the whole graph."""
        return self.whole.sizes(each for gate in gates for each in self.opened[gate])


def contracted(graph: Graph, costs: Sequence[float]) -> Contracted:
    """A graph whose best choices, whatever the budget, cost what those of a graph cost.

    Args:
        graph: the graph.
        costs: of each of its nodes, none below 0.
    """
    run = reached(graph)
    needless = dominated(graph, run, costs)
    gates = {node: graph.gates[node] for node in run if node in graph.gates and graph.gates[node][0] not in needless}
    group = groups(graph, run, gates)
    number: dict[int, int] = {}
    for node in run:
        if not graph.needed[node]:
            number.setdefault(group[node], len(number) + 1)
    members: list[list[int]] = [[] for _ in range(len(number) + 1)]
    for node in run:
        members[0 if graph.needed[node] else number[group[node]]].append(node)
    place = {node: i for i, nodes in enumerate(members) for node in nodes}
    opened: dict[int, list[int]] = {}
    for gate in gates:
        opened.setdefault(place[gate], []).append(gate)

    def together(edges: Sequence[tuple[int, ...]], nodes: Iterable[int]) -> dict[int, None]:
        return dict.fromkeys(end for node in nodes for end in edges[node])

    return Contracted(
        flops=[sum(graph.flops[node] for node in nodes) for nodes in members],
        needed=[not i for i in range(len(members))],
        gates={node: gates[nodes[0]] for node, nodes in opened.items()},
        reads=[
            tuple(dict.fromkeys(place[read] for read in together(graph.reads, nodes) if place[read] not in (0, i)))
            for i, nodes in enumerate(members)
        ],
        leaves=[tuple(together(graph.leaves, nodes)) for nodes in members],
        leaf_bytes=graph.leaf_bytes,
        whole=graph,
        costs=[sum(costs[node] for node in nodes) for nodes in members],
        opened=opened,
    )


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


def groups(graph: Graph, nodes: Iterable[int], gates: Mapping[int, tuple[str, int, int]]) -> dict[int, int]:
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
        group[node] = node
        if known:
            group[node] = _stands_for(graph, node, gates.get(node), {group[by] for by in readers[node]}, alike)
        for read in graph.reads[node]:
            if read != node:
                waits[read] -= 1
                if not waits[read]:
                    ready.append(read)
    return group


def _stands_for(
    graph: Graph, node: int, gate: tuple[str, int, int] | None, readers: set[int], alike: dict[object, int]
) -> int:
    """The node that stands for one with readers that these stand for; ``alike`` has those that stand for others."""
    if graph.needed[node]:
        return node
    if any(graph.needed[by] for by in readers):
        readers = {-1}  # which runs whatever is saved
    elif gate is None and len(readers) == 1:
        return next(iter(readers))
    return alike.setdefault((None if gate is None else gate[0], frozenset(readers)), node)


def dominated(graph: Graph, nodes: Collection[int], costs: Sequence[float]) -> frozenset[str]:
    """Names that some best choice does without, whatever the budget.

    Saving a value can be left to saving another, of as many bytes at most, from which it comes without cost (before a
    reshape), or which all that read it work towards (after a bias is added). And what comes without cost from what is
    there need not be saved at all. One name at a time is left out, so that of two that could stand in for each other
    one stays.

    Args:
        graph: the graph.
        nodes: those that can run.
        costs: of each node of the graph; of that on which it depends whether a value comes without cost.
    """
    return _Dominance(graph, nodes, costs).found()


class _Dominance:
    def __init__(self, graph: Graph, nodes: Collection[int], costs: Sequence[float]) -> None:
        self._graph, self._costs = graph, costs
        self._readers: dict[int, set[int]] = {node: set() for node in nodes}
        for node in self._readers:
            for read in graph.reads[node]:
                self._readers[read].add(node)
        self._kept = {node: graph.gates[node][0] for node in self._readers if node in graph.gates}
        self._bytes = {name: size for name, (size, _) in graph.sizes(self._kept).items()}

    def found(self) -> frozenset[str]:
        gates: dict[str, list[int]] = {}
        for gate, name in self._kept.items():
            gates.setdefault(name, []).append(gate)
        before = 0
        while before != len(gates):
            before = len(gates)
            for name in [*gates]:
                if any(self._can_replace(name, map(way, gates[name])) for way in (self._sink, self._sources)):
                    for gate in gates.pop(name):
                        del self._kept[gate]
        return frozenset(self._bytes.keys() - gates.keys())

    def _can_replace(self, name: str, ways: Iterable[frozenset[str] | None]) -> bool:
        """Whether one other name, or none, can stand in for a name at each of its gates."""
        others: set[str] = set()
        for found in ways:
            if found is None:
                return False
            others |= found
        return (
            len(others) <= 1 and name not in others and all(self._bytes[each] <= self._bytes[name] for each in others)
        )

    def _sources(self, gate: int) -> frozenset[str] | None:
        """The names from which a gate's value comes without cost, None where it has a cost."""
        found: set[str] = set()
        seen: set[int] = set()
        todo = [*self._graph.reads[gate]]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._kept:
                found.add(self._kept[node])
            elif not self._graph.needed[node]:  # what always runs is there
                if self._costs[node] or self._graph.leaves[node] or node in self._graph.uncosted:
                    return None
                todo += self._graph.reads[node]
        return frozenset(found)

    def _sink(self, gate: int) -> frozenset[str] | None:
        """The name that all readers of a gate's value work towards, one operation after another."""
        seen: set[int] = set()
        node = gate
        while len(self._readers[node]) == 1 and node not in seen:
            seen.add(node)
            (node,) = self._readers[node]
            if self._graph.needed[node]:
                return None
            if node in self._kept:
                return frozenset({self._kept[node]})
        return None
