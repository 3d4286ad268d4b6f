"""How many copies of a named value are kept when it is saved: one for each iteration of the loops that it changes in.

JAX moves residuals out of a scan whose value is the same in every iteration (an attention mask made inside a block):
these are saved once, whatever the scan's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.naming import is_given

__all__ = ["copies"]

_Loops = frozenset[tuple[int, int]]  # each with its depth and its length


def copies(closed: Any) -> dict[str, int]:
    """For each name that was given in a program the copies that are kept of its value, in all calls together."""
    found: dict[str, int] = {}
    jaxpr = _jax.open_jaxpr(closed)
    _visit(jaxpr, [frozenset() for _ in jaxpr.invars], 0, found)
    return found


def _visit(jaxpr: Any, inputs: Sequence[_Loops], depth: int, found: dict[str, int] | None) -> list[_Loops]:
    """The loops that a jaxpr's outputs change in; counts the names in it unless ``found`` is None."""
    changing: dict[Any, _Loops] = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        read = [_of(changing, atom) for atom in eqn.invars]
        name = _jax.checkpoint_name_of(eqn)
        if found is not None and name is not None and is_given(name):
            found[name] = found.get(name, 0) + math.prod(length for _, length in read[0])
        changing.update(zip(eqn.outvars, _through(eqn, read, depth, found), strict=True))
    return [_of(changing, atom) for atom in jaxpr.outvars]


def _through(eqn: Any, read: list[_Loops], depth: int, found: dict[str, int] | None) -> list[_Loops]:
    everything = frozenset[tuple[int, int]]().union(*read)
    inside = _jax.bodies(eqn)
    if len(inside) != 1 or len(inside[0].operands) != len(read) or _jax.is_custom_rule(eqn):
        return [everything] * len(eqn.outvars)
    body = inside[0].jaxpr
    if not _jax.is_scan(eqn):
        return _visit(body, read, depth, found) if len(body.outvars) == len(eqn.outvars) else [everything]
    consts, carries, _ = _jax.scan_split(eqn)
    loop = (depth, _jax.scan_length(eqn))
    into = read[:consts] + [loops | {loop} for loops in read[consts:]]
    while True:  # what a carry is fed with, it changes with
        out = _visit(body, into, depth + 1, None)
        fed = [before | after for before, after in zip(into[consts : consts + carries], out, strict=False)]
        if fed == into[consts : consts + carries]:
            break
        into[consts : consts + carries] = fed
    out = _visit(body, into, depth + 1, found)
    return [loops - {loop} for loops in out]


def _of(changing: Mapping[Any, _Loops], atom: Any) -> _Loops:
    return frozenset() if _jax.is_literal(atom) else changing.get(atom, frozenset())
