"""What XLA's compiler for a device does with values, as far as the estimated peak goes by it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax
from remat_magic.devices import Device

__all__ = ["PLAIN", "DeviceMemory", "memory_of"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How values are held in the memory of a device. Nothing here is fitted: each is what its compiler does.

    Attributes:
        merges: what is written twice is computed once: common subexpressions are eliminated.
        reserves: what the program gives back has its memory from the beginning to the end, that of donated arguments
            of the same size where there are any.
        shares: until a result is written, what is gone by then lies in its memory.
        fuses: what only the kernel reads that makes it stays in registers; what kernels can make again of what is held
            anyway, or of less, is not held: see ``registers.unheld`` and ``remade.made_again``.
        matmuls: so does what only matmuls read: their kernels run the operations that make what they multiply. What
            puts one element into each row is a comparison there, which kernels run too: see ``registers.fuses``.
        delays: what a checkpoint recomputes runs when a gradient that needs it is due: see ``step_order.put_off``. Else
            all of it runs before the first gradient, as JAX writes it.
        puts_off: what only results need runs when nothing that takes less can: see ``step_order.results_put_off``.
        views: a kernel reads a transpose, and a loop's slice of a stack, where its operand is, and writes what a loop
            stacks in place. Else these are copies.
        normalizes: a softmax or a norm is one kernel, and what it makes is not made again in others: see
            ``registers.normalized``. A kernel's result is written over what its last operation reads, and over nothing
            that the kernel reads for the others.
        tiled: arrays are padded to whole tiles, those of the shapes that convolutions take and make along the batch or
            the channels, but for arguments and results. What takes every so many elements, or puts them apart, is a
            kernel of its own.
        narrows: matrix units take bfloat16: a float32 value that only matmuls of the default precision read is
            converted where it is made, and held so; weights that a loop takes a slice of are converted before it, all
            of them.
    """

    merges: bool = False
    reserves: bool = False
    shares: bool = False
    fuses: bool = False
    matmuls: bool = False
    delays: bool = True
    puts_off: bool = False
    views: bool = False
    normalizes: bool = False
    tiled: bool = False
    narrows: bool = False

    def nbytes(self, aval: Any, lanes: Collection[int] = ()) -> int:
        """The bytes that a value takes; none where it is in another memory. ``lanes``: as for ``tiled_nbytes``."""
        if _jax.memory_space(aval):
            return 0
        return _jax.tiled_nbytes(aval, lanes) if self.tiled else _jax.nbytes(aval)

    @property
    def inside(self) -> DeviceMemory:
        """In the body of a loop, which has no results of its own."""
        return replace(self, reserves=False)


PLAIN = DeviceMemory()
"""Of this machine, and of what nothing is known of: each value takes its bytes."""


def memory_of(device: Device | None) -> DeviceMemory:
    """How the compiler for a device holds values."""
    if device is None or not device.holds_otherwise:
        return PLAIN
    if not device.is_tpu:
        return DeviceMemory(merges=True, reserves=True, shares=True, fuses=True, normalizes=True)
    return DeviceMemory(
        merges=True, reserves=True, fuses=True, matmuls=True, puts_off=True, views=True, tiled=True, narrows=True
    )
