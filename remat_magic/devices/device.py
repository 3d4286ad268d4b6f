"""A device: what it can do at most, and how XLA compiles for it."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from remat_magic.errors import RematError

_GPUS_OF_HOST = 8
_LARGEST = {2: 256, 3: 4096}  # chips of a slice, by the dimensions along which they are connected
_NAME = re.compile(r"(?P<one>.*\S)\s*(?::\s*(?P<shape>\d+(?:x\d+)+)|\sx(?P<number>\d+))", re.IGNORECASE)


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The device in the name of several: ``TPU v5e:2x4`` and ``H100 SXM x8``, with (2, 4) and (8,); () for one."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return name, ()
    return match["one"], tuple(map(int, (match["shape"] or match["number"]).casefold().split("x")))


@dataclass(frozen=True, slots=True)
class Target:
    """What XLA's compiler is told of a device that need not be here."""

    platform: str  # "tpu" or "cuda"
    topology: str = ""  # the name that libtpu knows one such chip by; empty for a GPU
    facts: Mapping[str, int | float | str] = field(default_factory=dict)  # of a GPU: XLA's ``GpuDeviceInfoProto``

    @property
    def _chip(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def _dimensions(self) -> int:
        return self.topology.count("x", len(self._chip)) + 1

    @property
    def _devices_of_chip(self) -> int:
        """JAX takes each of the two halves of such a chip for a device."""
        return 2 if self._chip == "tpu7x" else 1

    def connected(self, devices: int) -> str:
        """How so many of them are connected, as XLA's compilers have it.

        GPUs as slices x hosts x GPUs of a host, at most eight of these; TPUs as the slices that are offered: the chips
        along two or three dimensions, each as long as the one before or twice that.
        """
        if self.platform == "cuda":
            return f"1x1x{devices}" if devices <= _GPUS_OF_HOST else f"1x{-(-devices // _GPUS_OF_HOST)}x{_GPUS_OF_HOST}"
        if devices == 1:
            return self.topology
        doubled = (devices // self._devices_of_chip).bit_length() - 1
        if devices != self._devices_of_chip * 2**doubled:
            raise RematError(
                f"No {self._chip} are offered in slices of {devices} devices: use a mesh of a power of two."
            )
        return f"{self._chip}:{_text(_doubled(doubled, self._dimensions))}"

    def several(self, name: str, shape: tuple[int, ...]) -> tuple[str, str, int]:
        """Several of a name in a shape: of a TPU its chips along each dimension, of a GPU how many there are.

        What they are called together, how XLA's compilers name it, and how many devices they are. Where they are not
        offered so, RematError says how they are.
        """
        if self.platform == "cuda":
            if len(shape) == 1 and (1 <= shape[0] <= _GPUS_OF_HOST or shape[0] > 0 == shape[0] % _GPUS_OF_HOST):
                return f"{name} x{shape[0]}", self.connected(shape[0]), shape[0]
            raise RematError(
                f"{name} are offered by number, up to {_GPUS_OF_HOST} or in whole hosts of {_GPUS_OF_HOST}: "
                f"'{name} x{_GPUS_OF_HOST}' or '{name} x{2 * _GPUS_OF_HOST}', and not {_text(shape)}."
            )
        in_fours = self._dimensions == 3 and len(shape) == 3 and all(side and side % 4 == 0 for side in shape)
        if shape not in self._shapes and not (in_fours and list(shape) == sorted(shape)):
            offered = ", ".join(map(_text, self._shapes))
            raise RematError(f"{name} are offered in slices of {offered}, such as '{name}:{_text(self._shapes[2])}'.")
        return f"{name}:{_text(shape)}", f"{self._chip}:{_text(shape)}", math.prod(shape) * self._devices_of_chip

    def shape_of(self, devices: int) -> tuple[int, ...]:
        """The shape in which so many are offered; () for none."""
        if self.platform == "cuda":
            return (devices,) if devices <= _GPUS_OF_HOST or devices % _GPUS_OF_HOST == 0 else ()
        chips, rest = divmod(devices, self._devices_of_chip)
        if rest or not chips or chips & (chips - 1):
            return ()
        shape = _doubled(chips.bit_length() - 1, self._dimensions)
        return shape if shape in self._shapes else ()

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of the slices that are offered: one chip, four, and each twice the one before."""
        times = (0, *range(2, _LARGEST[self._dimensions].bit_length()))
        return tuple(_doubled(each, self._dimensions) for each in times)


def _doubled(times: int, dimensions: int) -> tuple[int, ...]:
    """The sides of 2**times chips, each as long as the one before or twice that."""
    sides = [2 ** ((times + place) // dimensions) for place in range(dimensions)]
    return tuple(sorted(sides, key=lambda side: side == 1))  # 2x2x1, and 2x2x4


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# Who has a platform's compiler: any of these modules; the extra that installs it.
_COMPILERS = {"tpu": (("libtpu",), "tpu"), "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "cuda")}


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do at most; of several that are connected, what each of them can.

    Attributes:
        name: what ``get`` knows it by.
        matmul_flops: FLOP/s of the matrix units, dense, by what JAX calls the dtype ("bf16", "f32"). A float32 matmul
            is at JAX's default precision: TF32 on these GPUs, bfloat16 on TPUs.
        vector_flops: FLOP/s in float32 of everything else; None where the maker does not say, and then such
            operations are limited by memory alone.
        memory_bandwidth: bytes/s to and from the device's memory.
        memory_bytes: its memory as a GPU's driver or a TPU's compiler has it, which is not the round number of its
            name; ``remat_magic.devices.usable_bytes`` is what a program can have of it. None where the system does not
            say.
        host_bandwidth: bytes/s to the host's memory in one direction; None where it is not known.
        interconnect: bytes/s that it sends to others of its kind, over all its links together, and receives as fast
            meanwhile: NVLink or ICI, not the network between hosts. None where it is not known.
        source: where the figures are published.
        measured: whether they were measured here instead.
        kinds: what JAX calls it (``jax.devices()[0].device_kind``).
        target: how to compile for it where it is not; None where that is not known.
        count: how many devices it is, as JAX counts them: 8 for "TPU v5e:2x4".
        topology: how several are connected, by the name that XLA's compilers have for it; empty for one by itself.
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
    target: Target | None = None
    count: int = 1
    topology: str = ""
    interconnect: float | None = None

    @property
    def one(self) -> str:
        """The name of one of them."""
        return split_name(self.name)[0]

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, also one that XLA cannot compile for here."""
        return self.target.platform == "tpu" if self.target else any(kind.startswith("TPU") for kind in self.kinds)

    @property
    def holds_otherwise(self) -> bool:
        """Whether values lie in its memory otherwise than in this machine's, so that estimated peaks are others there.

        What XLA's compiler does with them is known of TPUs and of what it compiles for.
        """
        return self.target is not None or self.is_tpu

    @property
    def compiles_here(self) -> bool:
        """Whether XLA can compile for it in this environment, also where there is none."""
        if self.target is None:
            return self.measured
        return any(map(_is_installed, _COMPILERS[self.target.platform][0]))

    @property
    def extra(self) -> str:
        """The extra of remat_magic that brings the compiler for it; empty where there is none."""
        return _COMPILERS[self.target.platform][1] if self.target else ""

    @property
    def install(self) -> str:
        """The command that installs the compiler for it; empty where it is there or where there is none."""
        return f"pip install 'remat_magic[{self.extra}]'" if self.extra and not self.compiles_here else ""

    @property
    def why_not(self) -> str:
        """Why it cannot be compiled for here, in one sentence that names the mend; empty where it can."""
        if self.compiles_here:
            return ""
        if self.target is None:
            return f"XLA has no way to compile for {self.name} where there is none: choose another device."
        if sys.platform != "linux" or (self.target.platform == "tpu" and platform.machine() != "x86_64"):
            return f"The compiler for {self.name} is made for Linux only, on x86-64 for a TPU: compile there."
        return f"The compiler for {self.name} is not installed: {self.install}"

    def connected(self, devices: int) -> str:
        """How the devices of a program are connected: as the name of several says, or as so many are offered.

        What is for one device runs on one, also where there are several.

        Raises:
            RematError: so many are not offered, or several others are named.
        """
        assert self.target is not None
        self.check_mesh(devices)
        return self.target.connected(devices) if 1 in (self.count, devices) else self.topology

    def check_mesh(self, devices: int) -> None:
        """See that several that are named are as many as a program is for, or that it is for one.

        Raises:
            RematError: they are others.
        """
        if devices not in (1, self.count) and self.count > 1:
            shape = self.target.shape_of(devices) if self.target else ()
            other = f", such as {self.target.several(self.one, shape)[0]!r}" if self.target and shape else ""
            raise RematError(
                f"the program is for a mesh of {devices} devices, and {self.name} has {self.count}: "
                f"name as many{other}."
            )

    def peak_flops(self, dtype: str, unit: str) -> float | None:
        """FLOP/s for a dtype on one of its units; what has no matrix units is left to the vector units."""
        return self.matmul_flops.get(dtype, self.vector_flops) if unit == "matmul" else self.vector_flops


def _is_installed(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


# --------------------------------------------------------------------------------- this machine's processor as a device


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
