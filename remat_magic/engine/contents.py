"""What is inside each place of a program: which operations, and how much they make. Read off its jaxpr."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax
from remat_magic.engine.possible import Intervals
from remat_magic.engine.primal import Primal
from remat_magic.jaxprs.values import is_inexact


@dataclass(slots=True)
class Contents:
    """What is inside a place.

    Attributes:
        operations: the identities of the tracebacks of its equations, at any depth.
        nbytes: of all floating-point values that these make, in all calls together. What autodiff saves is among them,
            or as large as one of them.
        calls: how many times the place stands in the program; what a loop repeats stands there once.
        runs: how often it runs; what a loop of unknown length repeats is taken to run once.
        depths: how deep the calls of each place inside it stand in each other, by key; 1 where they do not.
    """

    operations: set[int] = field(default_factory=set)
    nbytes: int = 0
    calls: int = 0
    runs: int = 0
    depths: dict[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """What goes away for good if the place saves nothing: all that it makes but for one run."""
        return self.nbytes * (1 - 1 / max(self.runs, 1))

    def add(self, other: Contents, runs: int) -> None:
        """Add what runs so many times."""
        self.operations |= other.operations
        self.nbytes += other.nbytes * runs
        for key, depth in other.depths.items():
            self.depths[key] = max(depth, self.depths.get(key, 0))


def contents(primal: Primal) -> dict[str, Contents]:
    """For each place of a program by its key, those that have a checkpoint and those that could have one.

    That of ``"function"`` is all there is.
    """
    intervals = Intervals(primal.closed, primal.calls)
    keys = {callee.who: key for key, callee in primal.possible.callees.items()}
    spans = primal.provenances.spans
    places: dict[str, Contents] = {"function": Contents(calls=1, runs=1)}
    whole: dict[int, Contents] = {}

    def inside(jaxpr: Any, around: Any, runs: int, again: bool) -> Contents:
        """What is inside a jaxpr; its places are added, as standing in the program only where it is not ``again``."""
        contents = [Contents() for _ in jaxpr.eqns]
        for eqn, content in zip(jaxpr.eqns, contents, strict=True):
            content.operations.add(id(_jax.traceback_of(eqn)))
            bodies = () if _jax.is_custom_rule(eqn) else _jax.bodies(eqn)
            if not bodies:
                content.nbytes = sum(_jax.nbytes(var.aval) for var in eqn.outvars if is_inexact(var.aval))
            for body in bodies:
                times = 1 if body.times is None else body.times
                counted = again or id(body.jaxpr) in whole
                content.add(inside(body.jaxpr, eqn, runs * times, counted), times)
            if _jax.is_checkpoint(eqn):
                place(primal.table.key_of(eqn, spans), [content], runs, again)
        for interval in reversed(intervals.of(jaxpr, around)):  # what is inside others first
            place(keys[interval.callee.who], contents[interval.first : interval.last], runs, again)
        total = whole[id(jaxpr)] = Contents()
        for content in contents:
            total.add(content, 1)
        return total

    def place(key: str, parts: list[Contents], runs: int, again: bool) -> None:
        content = places.setdefault(key, Contents())
        content.calls += not again
        content.runs += runs
        depth = 1 + max((part.depths.get(key, 0) for part in parts), default=0)
        for part in parts:
            content.add(part, runs)
            part.depths[key] = depth
        content.depths[key] = max(depth, content.depths.get(key, 0))

    places["function"].add(inside(_jax.open_jaxpr(primal.closed), None, 1, False), 1)
    return places
