"""What a value means to a trace: its type, whether it can be differentiated, and where it is to stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_leaves, tree_unflatten

from remat_magic.records import RematError


def abstract(leaf: Any) -> Any:
    """The abstract value of an array-like leaf, or None for a value that is no array.

    Nothing is put on a device and the array is not kept: only its type matters to a trace.
    """
    if isinstance(leaf, (bool, int, str, bytes)) or leaf is None:
        return None
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "biufcV":
        return None
    if isinstance(leaf, (float, complex)):
        return jax.typeof(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return jax.typeof(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type):
        return _as_traced(leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _by_shape(leaf))
    return None


def _as_traced(aval: Any) -> Any:
    """The type that JAX traces with: of 32 bits where 64 are not enabled."""
    if not isinstance(aval, jax.ShapeDtypeStruct):
        return aval
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    return aval if dtype == aval.dtype else aval.update(dtype=dtype)


def sharding_of(leaf: Any) -> Any:
    """Where a value is to stay: the sharding of a committed array or of a ``ShapeDtypeStruct``, else None."""
    if isinstance(leaf, Tracer):  # traced within another trace: on no device yet
        return None
    if isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and getattr(leaf, "committed", False)):
        return leaf.sharding
    return None


def _by_shape(leaf: Any) -> Any:
    try:
        return jax.typeof(leaf)
    except TypeError:
        pass
    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    except Exception:  # noqa: BLE001 - has such attributes, and is no array all the same: a static value
        return None


def is_inexact(aval: Any) -> bool:
    """Whether values of a type can be differentiated: real or complex floating point."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def can_be_output(leaf: Any) -> bool:
    """Whether a jaxpr can have a value among its outputs; other leaves of what a function returns stay Python's."""
    return abstract(leaf) is not None or isinstance(leaf, (bool, int))


class Returned:
    """What a function returned when it was traced, so that arrays can be put in the places of those in it."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._leaves: list[Any] = []  # None for an array
        self._is_array: list[bool] = []

    def arrays(self, returned: Any) -> list[Any]:
        """The arrays in what a function returned, which is remembered without them."""
        leaves, self._tree = tree_flatten(returned)
        self._is_array = [can_be_output(leaf) for leaf in leaves]
        self._leaves = [None if yes else leaf for leaf, yes in zip(leaves, self._is_array, strict=True)]
        return [leaf for leaf, yes in zip(leaves, self._is_array, strict=True) if yes]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """The same with other arrays."""
        given = iter(arrays)
        places = zip(self._leaves, self._is_array, strict=True)
        return tree_unflatten(self._tree, [next(given) if yes else leaf for leaf, yes in places])


def flatten_outputs(out: Any, has_aux: bool, function: str) -> tuple[list[Any], list[Any]]:
    """The leaves of the outputs and of the auxiliary ones."""
    aux: Any = ()
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise RematError(f"has_aux=True needs {function} to return a pair (output, auxiliary data).")
        out, aux = out
    return tree_leaves(out), tree_leaves(aux)
