"""This machine's processor as a device: how fast it is, by the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from remat_magic.devices.device import Device

THIS_CPU = "this CPU"


@cache
def this_cpu() -> Device:
    """This machine's processor, timed once."""
    speed = _time_this_machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    # Other dtypes are left to the vector units: how well a CPU multiplies matrices of them differs widely.
    return Device(
        THIS_CPU,
        {"f32": speed.matmul_flops},
        speed.vector_flops,
        speed.memory_bandwidth,
        memory,
        speed.memory_bandwidth,
        f"measured on this machine: {speed.how}",
        measured=True,
        kinds=("cpu",),
    )


class _Speed(NamedTuple):
    """FLOP/s of float32 matmuls and of everything else, bytes/s to and from memory, and how that was found."""

    matmul_flops: float
    vector_flops: float
    memory_bandwidth: float
    how: str


def _time_this_machine() -> _Speed:
    """Time a matmul, a copy and a polynomial: well under a second."""
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    size, length, terms = 768, 2**24, 64

    def horner(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(terms):
            y = y * x + x
        return y

    with jax.default_device(cpu), jax.enable_x64(False):
        square, long, short = (jnp.ones(shape, "float32") for shape in ((size, size), length, 2**16))
        matmul, copy, polynomial = jax.jit(jnp.matmul), jax.jit(jnp.negative), jax.jit(horner)
        product = 2 * size**3 / _seconds(lambda: matmul(square, square).block_until_ready())
        moved = 2 * long.nbytes / _seconds(lambda: copy(long).block_until_ready())
        vector = 2 * terms * short.size / _seconds(lambda: polynomial(short).block_until_ready())
    return _Speed(
        product, vector, moved, f"a {size}x{size} float32 matmul, a copy of {long.nbytes >> 20} MiB, a polynomial"
    )


def _seconds(run: Callable[[], Any]) -> float:
    """The shortest of several runs: what the machine can do when nothing else wants it."""
    run()
    times = list[float]()
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
