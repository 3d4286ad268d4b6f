"""What accelerators can do at most, by their makers' data sheets, for estimated times.

``get`` gives a device by name, ``register`` adds one, ``default`` finds the one that JAX would run on. ``"this CPU"``
is the machine itself, measured when it is first asked for.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from remat_magic.errors import RematError

__all__ = ["THIS_CPU", "Device", "default", "get", "names", "of_kind", "register"]

THIS_CPU = "this CPU"
_T = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do at most.

    Attributes:
        name: what ``get`` knows it by.
        matmul_flops: FLOP/s of the matrix units, dense, by what JAX calls the dtype ("bf16", "f32"). A float32 matmul
            is at JAX's default precision: TF32 on these GPUs, bfloat16 on TPUs.
        vector_flops: FLOP/s in float32 of everything else; None where the maker does not say, and then such
            operations are limited by memory alone.
        memory_bandwidth: bytes/s to and from the device's memory.
        memory_bytes: its size in bytes; None where the system does not say.
        host_bandwidth: bytes/s to the host's memory in one direction; None where it is not known.
        source: where the figures are published.
        measured: whether they were measured here instead.
    """

    name: str
    matmul_flops: Mapping[str, float]
    vector_flops: float | None
    memory_bandwidth: float
    memory_bytes: int | None
    host_bandwidth: float | None
    source: str
    measured: bool = False
    kinds: tuple[str, ...] = field(default=())

    def peak_flops(self, dtype: str, unit: str) -> float | None:
        """FLOP/s for a dtype on one of its units; what has no matrix units is left to the vector units."""
        return self.matmul_flops.get(dtype, self.vector_flops) if unit == "matmul" else self.vector_flops


def _a100(gigabytes: int, bandwidth: float) -> Device:
    return Device(
        f"A100 {gigabytes}GB SXM",
        {"bf16": 312 * _T, "f16": 312 * _T, "f32": 156 * _T, "f64": 19.5 * _T, "i8": 624 * _T},
        19.5 * _T,
        bandwidth,
        gigabytes * 10**9,
        32e9,
        "NVIDIA A100 Tensor Core GPU Datasheet (SXM), without sparsity; PCIe Gen4: 32 GB/s each way",
        kinds=(f"NVIDIA A100-SXM4-{gigabytes}GB", f"NVIDIA A100-SXM-{gigabytes}GB"),
    )


def _hopper(name: str, bandwidth: float, gigabytes: int, kinds: tuple[str, ...]) -> Device:
    eight = 1979 * _T
    return Device(
        name,
        {"bf16": 989.4 * _T, "f16": 989.4 * _T, "f32": 494.7 * _T, "f64": 66.9 * _T, "i8": eight}
        | dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), eight),
        66.9 * _T,
        bandwidth,
        gigabytes * 10**9,
        64e9,
        f"NVIDIA {name.split()[0]} Tensor Core GPU Datasheet (SXM) and NVIDIA H100 Tensor Core GPU Architecture, "
        "without sparsity; PCIe Gen5: 64 GB/s each way",
        kinds=kinds,
    )


def _tpu(
    version: str, bf16: float, int8: float, bandwidth: float, memory: int, host: float, kinds: tuple[str, ...]
) -> Device:
    return Device(
        f"TPU {version}",
        {"bf16": bf16 * _T, "f32": bf16 * _T, "i8": int8 * _T},
        None,
        bandwidth,
        memory,
        host,
        f"Google Cloud TPU documentation, TPU {version} (per chip); PCIe: How to Scale Your Model, chapter 2, 2025",
        kinds=kinds,
    )


_KNOWN: dict[str, Device] = {
    device.name: device
    for device in (
        _a100(40, 1.555e12),
        _a100(80, 2.039e12),
        _hopper("H100 SXM", 3.35e12, 80, ("NVIDIA H100 80GB HBM3",)),
        _hopper("H200", 4.8e12, 141, ("NVIDIA H200",)),
        _tpu("v4", 275, 275, 1.2e12, 32 * 2**30, 16e9, ("TPU v4",)),
        _tpu("v5e", 197, 393, 0.819e12, 16 * 10**9, 15e9, ("TPU v5 lite", "TPU v5e")),
        _tpu("v5p", 459, 918, 2.765e12, 95 * 10**9, 15e9, ("TPU v5", "TPU v5p")),
        _tpu("v6e", 918, 1836, 1.638e12, 32 * 10**9, 32e9, ("TPU v6 lite", "TPU v6e")),
    )
}


def names() -> tuple[str, ...]:
    """The devices that ``get`` knows; nothing is measured for this."""
    return (*_KNOWN, THIS_CPU)


def register(device: Device) -> None:
    """Make a device known by its name, in place of one of the same name.

    Raises:
        RematError: it is no ``Device``, or has the name of the machine itself.
    """
    if not isinstance(device, Device):
        raise RematError(f"register needs a remat_magic.devices.Device, not {type(device).__name__}.")
    if device.name == THIS_CPU:
        raise RematError(f"{THIS_CPU!r} is the name of the machine itself, which is measured: choose another name.")
    _KNOWN[device.name] = device


def get(name: str | Device) -> Device:
    """A device by name, in any case; a ``Device`` is itself.

    Raises:
        RematError: no such device; says which comes nearest.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise RematError(f"A device is named by a text or given as a Device, not {type(name).__name__}: {name!r}.")
    known = {each.casefold(): each for each in names()}
    found = known.get(name.strip().casefold())
    if found is None:
        inside = [each for lower, each in known.items() if name.strip() and name.strip().casefold() in lower]
        near = inside[:1] or [known[each] for each in difflib.get_close_matches(name.casefold(), known, 1, 0.4)]
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}."
        raise RematError(f"No device is called {name!r}: {hint}")
    return this_cpu() if found == THIS_CPU else _KNOWN[found]


def of_kind(kind: str) -> Device | None:
    """The device that JAX calls ``kind`` (``jax.devices()[0].device_kind``), None where none of ours is it."""
    if kind.casefold() == "cpu":
        return this_cpu()
    return next((device for device in _KNOWN.values() if kind in (device.name, *device.kinds)), None)


def default() -> Device | None:
    """The device of JAX's default backend: where a training step would run. None for one that is not known here."""
    import jax

    return of_kind(jax.devices()[0].device_kind)


# ------------------------------------------------------------------------------------------------------- this machine


def _seconds(run: Callable[[], Any]) -> float:
    """The shortest of several runs: what the machine can do when nothing else wants it."""
    run()
    times = list[float]()
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@cache
def this_cpu() -> Device:
    """This machine's processor: a matmul, a copy and a polynomial, timed once (well under a second)."""
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
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    # Other dtypes are left to the vector units: how well a CPU multiplies matrices of them differs widely.
    source = (
        f"measured on this machine: a {size}x{size} float32 matmul, a copy of {long.nbytes >> 20} MiB, a polynomial"
    )
    return Device(THIS_CPU, {"f32": product}, vector, moved, memory, moved, source, measured=True, kinds=("cpu",))
