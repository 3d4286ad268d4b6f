"""What runs: one operation that the backward pass recomputes, and the kernels that operations are fused into."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from remat_magic.records.source import SourceSpan

Unit = Literal["matmul", "vector"]


@dataclass(frozen=True, slots=True)
class Equation:
    """One operation that the backward pass recomputes.

    ``repeated`` operations also ran in the forward pass; the others were deferred: they run only now. ``flops`` and
    ``bytes`` are for all ``times`` runs together, None where no formula covers the operation. Where ``times`` is None,
    in a ``while`` loop whose trip count is not known, they are what it takes at least: of one turn. ``outputs`` are
    types as JAX writes them. ``branches`` has an entry for each conditional around it, outermost first: the number of
    the conditional in the function, which of those that were made of it this is, and the branch. One branch of each
    runs: ``dearest`` tells what to add up.

    Of a collective in a ``shard_map`` or ``pmap``, ``communicated_bytes`` are those of the results that one device has,
    all ``times`` runs together, as ``Measurement.collectives`` counts them in the compiled program; ``sent_bytes`` what
    it sends for them at least, if parts go around in a ring. ``collective`` is what XLA calls it (``all-gather``), and
    ``over`` names the axes of the mesh that it is along.
    """

    primitive: str
    outputs: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None
    times: int | None = 1
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    repeated: bool = True
    name: str | None = None
    library: SourceSpan | None = None
    branches: tuple[tuple[int, int, int], ...] = ()
    communicated_bytes: int = 0
    sent_bytes: int = 0
    collective: str = ""
    over: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether its cost is known, and not just what it is at least."""
        return self.flops is not None and self.times is not None


class _InBranches(Protocol):
    @property
    def flops(self) -> int | None: ...
    @property
    def branches(self) -> tuple[tuple[int, int, int], ...]: ...


_E = TypeVar("_E", bound=_InBranches)


def dearest(equations: Iterable[_E], depth: int = 0) -> list[_E]:
    """Those of some operations that run if every conditional takes the branch in which they cost most FLOPs.

    All sums of recomputed operations are of these, since a conditional runs one of its branches.
    """
    running: list[_E] = []
    conditionals: dict[tuple[int, int], dict[int, list[_E]]] = {}
    for equation in equations:
        if len(equation.branches) == depth:
            running.append(equation)
        else:
            number, copy, branch = equation.branches[depth]
            conditionals.setdefault((number, copy), {}).setdefault(branch, []).append(equation)
    for branches in conditionals.values():
        running += max((dearest(branch, depth + 1) for branch in branches.values()), key=total_flops)
    return running


def total_flops(equations: Iterable[_InBranches]) -> int:
    """The FLOPs of those operations whose cost is known."""
    return sum(equation.flops or 0 for equation in equations)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel does: a matmul, or a chain of operations that XLA would fuse.

    ``flops`` (None where no formula covers an operation) and ``bytes``, to and from the device's memory, are of one
    run. It runs ``times`` times, equal kernels taken together; None in a loop whose trip count is not known, and
    ``turns`` is then how often it runs if each such loop runs once. ``dtype`` is JAX's short form of what is computed
    with, ``unit`` what computes it: ``matmul`` for matrix units, else ``vector``. ``sent`` are the bytes that a
    collective in a ``shard_map`` or ``pmap`` sends to other devices in one run, at least (a ring's). All that XLA
    inserts into a half with automatic sharding is one kernel, which is ``inserted``, with the bytes of all results.
    """

    flops: int | None
    bytes: int
    dtype: str
    unit: Unit
    times: int | None = 1
    turns: int = 1
    sent: int = 0
    inserted: bool = False

    @property
    def known(self) -> bool:
        """Whether nothing of it is unknown."""
        return self.flops is not None and self.times is not None

    @property
    def runs(self) -> int:
        """How often it runs, at least where ``times`` is not known."""
        return self.turns if self.times is None else self.times

    def often(self, times: int | None) -> Kernel:
        """The same in a loop that runs so many times."""
        runs = self.runs * (1 if times is None else times)
        unknown = times is None or self.times is None
        return dataclasses.replace(self, times=None if unknown else runs, turns=runs if unknown else 1)
