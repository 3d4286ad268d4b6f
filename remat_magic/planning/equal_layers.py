"""Which values one expression makes in equal layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from remat_magic import _jax
from remat_magic.engine.engine import Dissection
from remat_magic.jaxprs.walk import walk
from remat_magic.records import PlannedValue

__all__ = ["equal_layers"]

_DEEP = 3  # operations; what is further apart in one expression is rarely told apart by more


def equal_layers(values: Iterable[PlannedValue], parts: Dissection) -> list[list[str]]:
    """The names of values in groups of those that one step of one expression makes, in the order of the values.

    One expression can be many operations, such as the four multiplications of ``jax.nn.gelu``: they are told apart by
    what they are given within it. A value of which no line is known is alone, since nothing tells that it is equal.

    Args:
        values: some of the values that are named in ``parts``.
        parts: both halves of their program.
    """
    steps = _Steps(parts)
    groups: dict[Hashable, list[str]] = {}
    for value in values:
        kind = (value.origin, steps.of(value)) if value.source or value.library else value.key
        groups.setdefault(kind, []).append(value.key)
    return list(groups.values())


class _Steps:
    def __init__(self, parts: Dissection) -> None:
        self._parts = parts
        # A body that several calls share has the same equations for each of them.
        self._made_by = {var: eqn for _, eqn in walk(parts.naming.closed, once=True) for var in eqn.outvars}

    def of(self, value: PlannedValue) -> Hashable:
        """Which operations of its own expression give an operation what it is given."""
        return self._given(self._parts.naming.values[value.key].eqn, value, _DEEP)

    def _given(self, eqn: Any, value: PlannedValue, depth: int) -> Hashable:
        return tuple(self._step(atom, value, depth - 1) for atom in eqn.invars) if depth else ()

    def _step(self, atom: Any, value: PlannedValue, depth: int) -> Hashable:
        if _jax.is_literal(atom):
            return "literal"
        eqn = self._made_by.get(atom)
        while eqn is not None and _jax.is_transparent(eqn):
            eqn = None if _jax.is_literal(eqn.invars[0]) else self._made_by.get(eqn.invars[0])
        place = None if eqn is None else self._parts.provenances.of(eqn)
        if place is None or (place.source, place.library, place.path) != (value.source, value.library, value.path):
            return ""
        primitive = _jax.primitive_name(eqn)
        # In a loop of a library one step can be given its own last value; the first one is not, and is equal.
        return "" if primitive == value.primitive else (primitive, self._given(eqn, value, depth))
