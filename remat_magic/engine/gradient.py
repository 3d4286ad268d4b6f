"""Value and gradients of a flat function as one program, lowered for XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from remat_magic import _jax
from remat_magic.engine.halves import Forward, no_cotangent, vjp_of
from remat_magic.jaxprs.provenance import PrimalIndex
from remat_magic.jaxprs.values import is_inexact


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """A program that takes a trace's array leaves and returns its outputs, auxiliary outputs and gradients, flat.

    ``policy`` and ``at`` are those of the report; ``jaxpr`` is what was lowered, ``lowered`` is ready to compile.
    ``forward`` and ``backward`` are the halves that the report is of. ``outputs`` counts the outputs and auxiliary
    outputs, which come before the gradients.
    """

    policy: str
    at: str
    jaxpr: Any
    lowered: jax.stages.Lowered
    forward: Forward
    backward: Any
    outputs: int
    index: PrimalIndex


def value_and_gradients(
    function: Callable[..., Sequence[Any]], differentiated: Sequence[int], outputs: int
) -> Callable[..., list[Any]]:
    """A flat function that returns all that ``function`` returns and then the gradients.

    The cotangent of each of the first ``outputs`` outputs is one everywhere, as for ``jax.grad`` of a scalar; the
    other outputs have none.
    """

    def gradient(*arrays: Any) -> list[Any]:
        results, vjp, aux = vjp_of(function, arrays, differentiated, outputs)
        cotangents = [jnp.ones_like(result) if is_inexact(result) else no_cotangent(result) for result in results]
        return [*results, *aux, *vjp(cotangents)]

    return gradient


def input_type(aval: Any, sharding: Any = None) -> Any:
    """What to lower for: the type of an argument, on the devices that its sharding names, if it has one."""
    if sharding is None:
        return aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def lower(function: Callable[..., Any], types: Sequence[Any]) -> tuple[Any, jax.stages.Lowered]:
    """The jaxpr of a flat function and the same lowered."""
    traced = jax.jit(function).trace(*types)
    return _jax.open_jaxpr(traced.jaxpr), traced.lower()
