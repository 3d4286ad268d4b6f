"""What XLA has devices tell each other in a half with automatic sharding: bytes, and kernels that take their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat_magic import _jax
from remat_magic.records import Kernel

__all__ = ["nbytes_of", "with_inserted"]


def nbytes_of(told: Counter[_jax.Told] | None) -> int | None:
    """The bytes that a device has of the results of all collectives; None where they are not known."""
    return None if told is None else sum(runs * each.nbytes for each, runs in told.items())


def with_inserted(kernels: Sequence[Kernel], told: Counter[_jax.Told] | None, named_bytes: int) -> tuple[Kernel, ...]:
    """The kernels of a half that XLA has compiled, and one for what it inserts beyond the program's own collectives.

    Args:
        kernels: those of the program.
        told: all collectives of the compiled half, those that the program names among them.
        named_bytes: what these give a device.
    """
    nbytes, unknown = nbytes_of(told), Kernel(None, 0, "f32", "vector", inserted=True)
    if told is None or nbytes is None or any(each.sent is None for each in told):
        return (*kernels, unknown)
    sent = sum(runs * (each.sent or 0) for each, runs in told.items()) - sum(each.runs * each.sent for each in kernels)
    if sent <= 0:
        return tuple(kernels)
    moved = max(nbytes - named_bytes, 0)
    return (*kernels, Kernel(0, moved, "f32", "vector", sent=sent, inserted=True))
