"""What XLA has devices tell each other in a half with automatic sharding: bytes, and kernels that take their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat_magic import _jax
from remat_magic.records import Kernel

__all__ = ["nbytes_of", "with_inserted"]


def nbytes_of(collectives: Counter[_jax.Told] | None) -> int | None:
    """The bytes that a device has of the results of all collectives; None where they are not known."""
    return None if collectives is None else sum(runs * collective.nbytes for collective, runs in collectives.items())


def with_inserted(
    kernels: Sequence[Kernel], collectives: Counter[_jax.Told] | None, named_bytes: int
) -> tuple[Kernel, ...]:
    """The kernels of a half that XLA has compiled, and one for what it inserts beyond the program's own collectives.

    Args:
        kernels: those of the program.
        collectives: all those of the compiled half, those that the program names among them.
        named_bytes: what these give a device.
    """
    nbytes, unknown = nbytes_of(collectives), Kernel(None, 0, "f32", "vector", inserted=True)
    if collectives is None or nbytes is None or any(collective.sent is None for collective in collectives):
        return (*kernels, unknown)
    all_sent = sum(runs * (collective.sent or 0) for collective, runs in collectives.items())
    sent = all_sent - sum(kernel.runs * kernel.sent for kernel in kernels)
    if sent <= 0:
        return tuple(kernels)
    moved = max(nbytes - named_bytes, 0)
    return (*kernels, Kernel(0, moved, "f32", "vector", sent=sent, inserted=True))
