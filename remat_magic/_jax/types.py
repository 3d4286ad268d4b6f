"""Types of values: their dtypes in short, PRNG keys, and the memory they live in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
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


def is_complex(aval: Any) -> bool:
    """Whether values of a type are complex numbers."""
    return getattr(getattr(aval, "dtype", None), "kind", "") == "c"


def is_key(aval: Any) -> bool:
    """Whether values of a type are PRNG keys."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key))


def zero_keys(aval: Any) -> Any:
    """An array of PRNG keys of a type, made of zeros."""
    impl = aval.dtype._impl
    data = jax.numpy.zeros((*aval.shape, *impl.key_shape), jax.numpy.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


def local_shape(aval: Any) -> tuple[int, ...]:
    """The shape that one device holds of a value."""
    return tuple(map(int, of_one_device(aval).shape)) if hasattr(aval, "shape") else ()


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


_LANES, _SUBLANES, _SMALLEST = 128, 8, 512


def tiled_nbytes(aval: Any, lanes: Collection[int] = ()) -> int:
    """Bytes that a TPU holds of a value: in tiles of 8 by 128 elements, of the two dimensions that pad least.

    That is how XLA for a v5e lays values out, of 4, 2 and 1 bytes alike (``T(8,128)``, ``T(8,128)(2,1)``,
    ``T(8,128)(4,1)``), with smaller tiles for fewer than 8 rows; it chooses which dimensions are the last two, those of
    arguments too. ``tests/test_estimate.py`` has sizes from its buffer assignments.

    Args:
        aval: the value's type.
        lanes: the dimensions of which one has to be the last; any by default.
    """
    plain = nbytes(aval)
    if not plain:
        return 0
    shape = local_shape(aval)
    padded = [-(-size // _LANES) * _LANES / size for size in shape]
    if len(shape) < 2:
        most = padded[0] if padded else 1.0
    else:
        rows = [
            (-(-size // _SUBLANES) * _SUBLANES if size >= _SUBLANES else 1 << (size - 1).bit_length()) / size
            for size in shape
        ]
        pairs = itertools.product(lanes or range(len(shape)), range(len(shape)))
        most = min(padded[lane] * rows[row] for lane, row in pairs if lane != row)
    return -(-round(plain * most) // _SMALLEST) * _SMALLEST


def narrowed(aval: Any) -> Any:
    """The type of a float32 value once a TPU's matrix units take it, in bfloat16; None for values of other types."""
    return aval.update(dtype=jax.numpy.bfloat16) if getattr(aval, "dtype", None) == jax.numpy.float32 else None


def type_text(aval: Any) -> str:
    """A type in JAX's short form, ``f32[5,4]``."""
    shape = getattr(aval, "shape", ())
    return f"{short_dtype(aval)}[{','.join(map(str, shape))}]"
