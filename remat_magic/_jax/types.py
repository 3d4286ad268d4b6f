"""Types of values: their dtypes in short, PRNG keys, and the memory they live in."""

from __future__ import annotations

import math
from typing import Any

import jax

from remat_magic._jax.private import courtesy
from remat_magic._jax.shardings import of_one_device

_short_dtype_name = courtesy("jax._src.dtypes.short_dtype_name", "types are written with the long names of dtypes")


def short_dtype(aval: Any) -> str:
    """JAX's short form of a dtype ("f32", "key<fry>")."""
    dtype = getattr(aval, "dtype", None)
    return (
        type(aval).__name__ if dtype is None else str(dtype) if _short_dtype_name is None else _short_dtype_name(dtype)
    )


def is_key(aval: Any) -> bool:
    """Whether values of a type are PRNG keys."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key))


def zero_keys(aval: Any) -> Any:
    """An array of PRNG keys of a type, made of zeros."""
    impl = aval.dtype._impl
    data = jax.numpy.zeros((*aval.shape, *impl.key_shape), jax.numpy.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


def memory_space(aval: Any) -> str:
    """The memory that values of a type live in; empty for the device's own."""
    space = str(getattr(aval, "memory_space", "") or "").rsplit(".", 1)[-1].lower()
    return "" if space in ("", "device", "any") else space


def nbytes(aval: Any) -> int:
    """Bytes that one device holds of a value (packed: 4-bit types count half), from its type.

    A type without a sharding is held whole. PRNG keys count the bytes of their seed arrays, as ``key.size * itemsize``
    does in JAX.
    """
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(map(int, of_one_device(aval).shape)) * int(dtype.itemsize)


def type_text(aval: Any) -> str:
    """A type in JAX's short form, ``f32[5,4]``."""
    shape = getattr(aval, "shape", ())
    return f"{short_dtype(aval)}[{','.join(map(str, shape))}]"
