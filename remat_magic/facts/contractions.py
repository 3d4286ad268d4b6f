"""How often a program runs its matrix multiplications and convolutions, told apart by their sizes.

These are the operations that XLA neither splits nor runs twice of its own accord, so that they can be counted in a
jaxpr and in a compiled program alike. The size of one is the number of elements of its result and the product of those
of its two operands: what stays the same when XLA reshapes or transposes them, or writes the one as the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.jaxprs.walk import Scope, walk

__all__ = ["Size", "in_program", "of_equations"]

Size = tuple[int, int]


def in_program(jaxpr: Any) -> Counter[Size] | None:
    """How often each size runs in the live code of a jaxpr, each branch of a conditional counted.

    Returns:
        None where a ``while`` loop of unknown length holds one of them.
    """
    body = _jax.open_jaxpr(jaxpr)
    live = LiveEquations(body)
    return of_equations((scope, eqn) for scope, eqn in walk(body, live) if live(eqn))


def of_equations(equations: Iterable[tuple[Scope, Any]]) -> Counter[Size] | None:
    """How often each size runs among these equations; None where the length of a loop around one is not known."""
    counts: Counter[Size] = Counter()
    for scope, eqn in equations:
        size = _size(eqn)
        if size is None:
            continue
        if scope.times is None:
            return None
        counts[size] += scope.times
    return counts


def _size(eqn: Any) -> Size | None:
    if not _jax.is_matmul(eqn):
        return None
    left, right = (math.prod(atom.aval.shape) for atom in eqn.invars[:2])
    return math.prod(eqn.outvars[0].aval.shape), left * right
