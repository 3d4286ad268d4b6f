"""What the backward pass needs, and what computing each of it again needs: the ground on which plans are made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from remat_magic.jaxprs.one_device import TypeOf, own_type

__all__ = ["Figures", "Graph", "GroupedGraph"]


class Figures(NamedTuple):
    """What a choice comes to: bytes kept on the device, recomputed FLOPs, bytes moved to the host."""

    saved_bytes: int
    recomputed_flops: int
    offloaded_bytes: int


@dataclass(eq=False, slots=True)
class Graph:
    """Operations of a backward pass and what they read.

    Attributes:
        flops: of each node, all its runs together; 0 for a gate.
        needed: whether a node runs whatever is saved.
        gates: for the nodes that are gates the name that saves the value, its bytes, and how often it is passed.
        reads: for each node the nodes that it reads, gates among them.
        leaves: for each node the intermediates that it reads which the policy has no say about (a checkpoint's inputs).
        leaf_bytes: the bytes of these, by number.
        copies: how many copies of its value saving a name keeps.
        operations: the equations that a node recomputes, each with how often it runs.
        deferred: whether some of these ran in no forward pass, so that their values have no names.
        type_of: tells the types of variables, with how they are spread over a mesh.
    """

    flops: list[int] = field(default_factory=list)
    needed: list[bool] = field(default_factory=list)
    gates: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    leaves: list[tuple[int, ...]] = field(default_factory=list)
    leaf_bytes: dict[int, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    operations: list[tuple[tuple[Any, int], ...]] = field(default_factory=list)
    deferred: bool = False
    type_of: TypeOf = own_type

    def predict(self, chosen: Collection[str]) -> tuple[int, int]:
        """``(saved bytes, recomputed FLOPs)`` if just these names are saved."""
        return self.figures(chosen)[:2]

    def figures(self, chosen: Collection[str], offloaded: Collection[str] = ()) -> Figures:
        """What it comes to if just these names are saved, those ``offloaded`` among them in the host's memory."""
        nodes, gates = self._run(chosen)
        leaves = {leaf for node in nodes for leaf in self.leaves[node]}
        sizes = self.sizes(gates)
        moved = sum(size for name, (size, _) in sizes.items() if name in offloaded)
        saved = sum(size for size, _ in sizes.values()) - moved + sum(self.leaf_bytes[leaf] for leaf in leaves)
        return Figures(saved, sum(self.flops[node] for node in nodes), moved)

    def running(self, chosen: Collection[str]) -> list[int]:
        """The nodes that run in the backward pass if just these names are saved."""
        return self._run(chosen)[0]

    def sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """For each name among gates the bytes that saving it takes for these, and how many values that is.

        Where checkpoints are nested, a value is read in several rounds of recomputation, and saved once; and so is what
        stays the same in a loop.
        """
        times: dict[str, int] = {}
        bytes_of_one: dict[str, int] = {}
        for gate in gates:
            name, bytes_of_one[name], passed = self.gates[gate]
            times[name] = min(times.get(name, 0) + passed, self.copies.get(name, passed))
        return {name: (bytes_of_one[name] * times[name], times[name]) for name in times}

    def own_sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """The same for each value, where the gates of several have one name."""
        return self.sizes(gates)

    def used_gates(self, chosen: Collection[str]) -> list[int]:
        """The gates whose saved values are read if just these names are saved."""
        return self._run(chosen)[1]

    def used(self, chosen: Collection[str]) -> frozenset[str]:
        """Those of some names whose values are read if just these names are saved."""
        return frozenset(self.gates[gate][0] for gate in self._run(chosen)[1])

    def _run(self, chosen: Collection[str]) -> tuple[list[int], list[int]]:
        """The nodes that run, and the gates whose saved values they read."""
        nodes = [i for i, needed in enumerate(self.needed) if needed]
        seen, gates = set(nodes), list[int]()
        for node in nodes:
            for read in self.reads[node]:
                if read in seen:
                    continue
                seen.add(read)
                gate = self.gates.get(read)
                (nodes if gate is None or gate[0] not in chosen else gates).append(read)
        return nodes, gates


@dataclass(eq=False, slots=True)
class GroupedGraph(Graph):
    """A graph whose gates have the names of groups: what is saved of a group is saved in all of it.

    ``own`` are the names that the gates had, by which values are told apart, and counted.
    """

    own: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, group: Mapping[str, str]) -> GroupedGraph:
        """A graph with its values in groups, by their names; one that is in none has no gate."""
        gates = {node: gate for node, gate in graph.gates.items() if gate[0] in group}
        return cls(
            **{field.name: getattr(graph, field.name) for field in fields(graph) if field.name != "gates"},
            gates={node: (group[name], size, passed) for node, (name, size, passed) in gates.items()},
            own={node: name for node, (name, _, _) in gates.items()},
        )

    def sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """As of a graph, the sizes of a group's values added."""
        gates = list(gates)
        group = {self.own[gate]: self.gates[gate][0] for gate in gates}
        sizes: dict[str, tuple[int, int]] = {}
        for name, (size, times) in self.own_sizes(gates).items():
            bytes_before, times_before = sizes.get(group[name], (0, 0))
            sizes[group[name]] = bytes_before + size, times_before + times
        return sizes

    def own_sizes(self, gates: Iterable[int]) -> dict[str, tuple[int, int]]:
        """As of the graph that it was made of."""
        plain = Graph(gates={gate: (self.own[gate], *self.gates[gate][1:]) for gate in gates}, copies=self.copies)
        return plain.sizes(plain.gates)
