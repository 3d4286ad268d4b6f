"""Walking the equations of a program, those inside other equations included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remat_magic import _jax


def multiply(times: int | None, more: int | None) -> int | None:
    """The product of two counts; unknown if either is."""
    return None if times is None or more is None else times * more


def walk(jaxpr: Any) -> Iterator[tuple[Any, int | None]]:
    """Every equation at any depth with the number of times that it runs, in program order."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn, 1
        for body in _jax.bodies(eqn):
            for inner, times in walk(body.jaxpr):
                yield inner, multiply(body.times, times)
