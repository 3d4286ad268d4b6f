"""The arrays that a measured program runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_magic import _jax
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.values import sharding_of
from remat_magic.records import RematError

__all__ = ["arrays_for", "check_inputs", "shardings_for"]


def check_inputs(inputs: Any) -> None:
    """See that inputs are of one of the forms that :func:`arrays_for` takes.

    Raises:
        RematError: they are not.
    """
    if inputs is None or (isinstance(inputs, str) and inputs == "random"):
        return
    pair = isinstance(inputs, tuple) and len(inputs) == 2
    if not (pair and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict)):
        raise RematError(
            "inputs is None (compile only), 'random', or the pair (args, kwargs) of a call like the traced one, "
            "such as ((params, batch), {})."
        )


def arrays_for(facts: Facts, inputs: Any, *, alone: bool = False) -> list[Any] | None:
    """One array for each array leaf of the traced arguments; None where ``inputs`` is None.

    Args:
        facts: of the traced function.
        inputs: ``"random"`` for made-up arrays, or a pair of positional and keyword arguments, of which the array
            leaves are taken as they are.
        alone: for the gradient without the training step around it.

    Raises:
        RematError: the inputs differ in structure or type from the traced arguments.
    """
    if inputs is None:
        return None
    if isinstance(inputs, str):
        generator = np.random.default_rng(0)
        leaves = facts.engine.inputs(alone=alone).arrays
        return [_random(leaf.value, leaf.sharding, generator) for leaf in leaves]
    wanted = facts.engine.inputs(alone=alone)
    given = wanted.arrays_of(*inputs)
    for leaf, value in zip(wanted.arrays, given, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise RematError(f"the input {leaf.name} is a ShapeDtypeStruct, which has no values: pass inputs='random'.")
    return given


def shardings_for(arrays: Sequence[Any] | None) -> list[Any] | None:
    """Where each array is to stay; None for as it was when traced."""
    if arrays is None:
        return None
    return [sharding_of(array) for array in arrays]


def _random(aval: Any, sharding: Any, generator: np.random.Generator) -> Any:
    """Normal numbers; for integers zeros, which are safe as indices; False; keys made of zeros.

    The numbers are scaled down by the root of the largest dimension, so that a chain of matrix products neither
    overflows nor dies away.
    """
    if _jax.is_key(aval):
        array = _jax.zero_keys(aval)
    elif jnp.issubdtype(aval.dtype, jnp.inexact):
        values = generator.standard_normal(aval.shape, np.float32)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            values = values + 1j * generator.standard_normal(aval.shape, np.float32)
        array = (np.asarray(values) / max(1, *aval.shape, 1) ** 0.5).astype(aval.dtype)
    else:
        array = np.zeros(aval.shape, aval.dtype)
    return jax.device_put(array, _jax.on_devices_here(sharding))
