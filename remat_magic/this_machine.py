"""How fast this machine's processor is, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Speed", "time_this_machine"]


class Speed(NamedTuple):
    """FLOP/s of float32 matmuls and of everything else, bytes/s to and from memory, and how that was found."""

    matmul_flops: float
    vector_flops: float
    memory_bandwidth: float
    how: str


def time_this_machine() -> Speed:
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
    return Speed(
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
