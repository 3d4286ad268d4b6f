"""How many copies of a value saving it keeps.

JAX moves residuals out of a scan whose value is the same in every iteration (an attention mask made inside a block):
these are saved once, whatever the scan's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.naming import NamedProgram, is_given

__all__ = ["kept_copies"]

_Loops = frozenset[tuple[int, int]]  # each with its depth and its length


def kept_copies(naming: NamedProgram) -> dict[str, int]:
    """For each name that was given in a program the copies that are kept of its value, in all calls together."""
    copies = _Copies(naming.rules)
    jaxpr = _jax.open_jaxpr(naming.closed)
    copies.visit(jaxpr, [frozenset() for _ in jaxpr.invars], 0, counting=True)
    return copies.counts


class _Copies:
    """``counts`` has the copies of each name met so far; ``rules`` has the jaxpr of each custom derivative's rule."""

    def __init__(self, rules: Mapping[int, Any]) -> None:
        self.counts: dict[str, int] = {}
        self._rules = rules
        # What a scan's carry changes in is looked for until nothing is new, and in the scans inside it each time.
        self._visited: dict[tuple[int, int, tuple[_Loops, ...]], list[_Loops]] = {}

    def visit(self, jaxpr: Any, inputs: Sequence[_Loops], depth: int, *, counting: bool) -> list[_Loops]:
        """The loops that a jaxpr's outputs change in, from those that its inputs do."""
        key = (id(jaxpr), depth, tuple(inputs))
        if counting or key not in self._visited:
            changing: dict[Any, _Loops] = dict(zip(jaxpr.invars, inputs, strict=True))
            for eqn in jaxpr.eqns:
                read = [_of(changing, atom) for atom in eqn.invars]
                name = _jax.checkpoint_name_of(eqn)
                if counting and name is not None and is_given(name):
                    self.counts[name] = self.counts.get(name, 0) + math.prod(length for _, length in read[0])
                changing.update(zip(eqn.outvars, self._through(eqn, read, depth, counting), strict=True))
            self._visited[key] = [_of(changing, atom) for atom in jaxpr.outvars]
        return self._visited[key]

    def _through(self, eqn: Any, read: list[_Loops], depth: int, counting: bool) -> list[_Loops]:
        everything = frozenset[tuple[int, int]]().union(*read)
        inside = _jax.bodies(eqn)
        rule = self._rules.get(id(eqn)) if counting else None
        if rule is not None:  # after its own operands it has tangents, which are no values of the program
            own = read[len(read) - len(_jax.rule_inputs(eqn)) :]
            tangents = [everything] * (len(rule.invars) - len(own))
            self.visit(rule, [*own, *tangents], depth, counting=True)
        if len(inside) != 1 or len(inside[0].operands) != len(read) or _jax.is_custom_rule(eqn):
            return [everything] * len(eqn.outvars)
        body = inside[0].jaxpr
        if not _jax.is_scan(eqn):
            same = len(body.outvars) == len(eqn.outvars)
            return self.visit(body, read, depth, counting=counting) if same else [everything]
        consts, carries, _ = _jax.scan_split(eqn)
        loop = (depth, _jax.scan_length(eqn))
        into = read[:consts] + [loops | {loop} for loops in read[consts:]]
        while True:  # what a carry is fed with, it changes with
            out = self.visit(body, into, depth + 1, counting=False)
            fed = [before | after for before, after in zip(into[consts : consts + carries], out, strict=False)]
            if fed == into[consts : consts + carries]:
                break
            into[consts : consts + carries] = fed
        if counting:
            self.visit(body, into, depth + 1, counting=True)
        return [loops - {loop} for loops in out]


def _of(changing: Mapping[Any, _Loops], atom: Any) -> _Loops:
    return frozenset() if _jax.is_literal(atom) else changing.get(atom, frozenset())
