"""Which equations of a jaxpr its outputs depend on, and which of them reads a value last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_magic import _jax


class LiveEquations:
    """The equations of a jaxpr, at any depth, that its outputs, or those ``wanted`` of them, depend on.

    Needed because jax_remat3 leaves dead code in backward jaxprs: its ``PrimalLeftTangentRight`` takes the recomputed
    value as a second operand that nothing reads.
    """

    def __init__(self, jaxpr: Any, wanted: Sequence[bool] | None = None) -> None:
        self.everything = True  # whether no equation was found to be dead
        self._live: set[int] = set()
        self._marked: dict[tuple[int, tuple[bool, ...]], list[bool]] = {}  # bodies that several calls share
        self.inputs = self._mark(jaxpr, wanted or [True] * len(jaxpr.outvars))  # those that the outputs depend on

    def __call__(self, eqn: Any) -> bool:
        """Whether the outputs depend on an equation."""
        return id(eqn) in self._live

    def _mark(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        """Mark what the wanted outputs need; says which of the invars they need."""
        needed = {out for out, want in zip(jaxpr.outvars, wanted, strict=True) if want and not _jax.is_literal(out)}
        for eqn in reversed(jaxpr.eqns):
            outputs = [var in needed for var in eqn.outvars]
            if not any(outputs) and not eqn.effects:
                self.everything = False
                continue
            self._live.add(id(eqn))
            for operand, read in zip(eqn.invars, self._operands(eqn, outputs), strict=True):
                if read and not _jax.is_literal(operand):
                    needed.add(operand)
        return [var in needed for var in jaxpr.invars]

    def _mark_body(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        key = (id(jaxpr), tuple(wanted))
        needed = self._marked.get(key)
        if needed is None:
            needed = self._marked[key] = self._mark(jaxpr, wanted)
        return needed

    def _operands(self, eqn: Any, outputs: Sequence[bool]) -> list[bool]:
        if _jax.is_primal_left(eqn):
            return [True] + [False] * (len(eqn.invars) - 1)
        if _jax.is_barrier(eqn):  # each output is its own operand
            return list(outputs)
        inside = _jax.bodies(eqn)
        if not inside or any(None in body.operands for body in inside):
            for body in inside:
                self._mark_body(body.jaxpr, [True] * len(body.jaxpr.outvars))
            return [True] * len(eqn.invars)
        read = [False] * len(eqn.invars)
        entering = {operand for body in inside for operand in body.operands}
        for index in range(len(eqn.invars)):
            read[index] = index not in entering  # the predicate of a cond
        # A loop's condition, of which no output is the loop's, comes first.
        for body in sorted(inside, key=lambda body: any(result is not None for result in body.results)):
            self._mark_call(body, outputs, read)
        return read

    def _mark_call(self, body: _jax.Body, outputs: Sequence[bool], read: list[bool]) -> None:
        """Mark what the wanted outputs of an equation need in a body of it, and add the operands that it reads."""
        wanted = [all(result is None for result in body.results)] * len(body.jaxpr.outvars)
        for output, result in enumerate(body.results):
            if result is not None and outputs[output]:
                wanted[result] = True
        for out, carried in body.carries:  # the next iteration's condition reads it
            operand = body.operands[carried]
            wanted[out] = wanted[out] or (operand is not None and read[operand])
        while True:
            used = self._mark_body(body.jaxpr, wanted)
            more = [out for out, carried in body.carries if used[carried] and not wanted[out]]
            if not more:
                break
            for out in more:
                wanted[out] = True
        # A loop that may not run at all gives back what it began with.
        kept = {carried for out, carried in body.carries if wanted[out] and not body.times}
        for index, operand in enumerate(body.operands):
            if operand is not None and (used[index] or index in kept):
                read[operand] = True


def last_reads(eqns: Sequence[Any], outputs: Sequence[Any]) -> dict[Any, int]:
    """For each variable the number of the last equation that reads it; of what is given back, that after the last."""
    last = {atom: n for n, eqn in enumerate(eqns) for atom in eqn.invars if not _jax.is_literal(atom)}
    return last | {atom: len(eqns) for atom in outputs if not _jax.is_literal(atom)}
