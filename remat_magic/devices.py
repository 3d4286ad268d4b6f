"""The accelerators: what they can do at most, by their makers' data sheets, and how XLA compiles for them.

``get`` gives a device by name, ``register`` adds one, ``default`` finds the one that JAX would run on. ``"this CPU"``
is the machine itself, measured when it is first asked for. A device need not be here to be compiled for:
``Device.compiles_here`` says whether the compiler is installed, ``Device.install`` how to install it. Several that are
connected are a device too: ``get("TPU v5e:2x4")``, ``get("H100 SXM x8")``.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from remat_magic.errors import RematError
from remat_magic.targets import Target, split_name
from remat_magic.this_machine import time_this_machine

__all__ = [
    "KERNELS_OWN",
    "THIS_CPU",
    "Device",
    "Target",
    "accelerator",
    "default",
    "get",
    "how_many_here",
    "meshes",
    "names",
    "of_kind",
    "register",
]

THIS_CPU = "this CPU"
_T = 1e12
KERNELS_OWN = 16 * 2**20
"""Of a TPU's VMEM the bytes that no value is in: XLA's default limit for what a kernel allocates there."""


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
        memory_bytes: what a program can have of its memory, as a GPU's driver or a TPU's compiler has it, which is not
            the round number of its name. None where the system does not say.
        host_bandwidth: bytes/s to the host's memory in one direction; None where it is not known.
        interconnect: bytes/s that it sends to others of its kind, over all its links together, and receives as fast
            meanwhile: NVLink or ICI, not the network between hosts. None where it is not known.
        source: where the figures are published.
        measured: whether they were measured here instead.
        kinds: what JAX calls it (``jax.devices()[0].device_kind``).
        target: how to compile for it where it is not; None where that is not known.
        count: how many devices it is, as JAX counts them: 8 for "TPU v5e:2x4".
        topology: how several are connected, by the name that XLA's compilers have for it; empty for one by itself.
        vector_memory: of a TPU, the bytes beside its compute units (VMEM) that XLA puts values into; None of others.
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
    vector_memory: int | None = None

    @property
    def one(self) -> str:
        """The name of one of them."""
        return split_name(self.name)[0]

    @property
    def holds_otherwise(self) -> bool:
        """Whether values lie in its memory otherwise than in this machine's, so that estimated peaks are others there.

        What XLA's compiler does with them is known of TPUs and of what it compiles for.
        """
        return self.target is not None or self.vector_memory is not None

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
            other = next((f", such as {name!r}" for name in meshes(devices) if split_name(name)[0] == self.one), "")
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


def _gpu(
    description: str,
    capability: int,
    cores: int,
    clock_ghz: float,
    memory: int,
    bandwidth: int,
    l2_cache: int,
) -> Target:
    """How to compile for an NVIDIA GPU.

    The facts are NVIDIA's, as XLA's own target specifications have them (openxla/xla, the folder
    xla/backends/gpu/target_config/specs); ``capability`` is the major number of its compute capability.
    """
    ampere = capability == 8
    facts: dict[str, int | float | str] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": (164 if ampere else 228) * 2**10,
        "shared_memory_per_block_optin": (163 if ampere else 227) * 2**10,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": 64 if ampere else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "memory_bandwidth": bandwidth,
        "l2_cache_size": l2_cache,
        "clock_rate_ghz": clock_ghz,
        "device_memory_size": memory,
        "capability": capability,
        "name": description,
    }
    return Target("cuda", facts=facts)


def _a100(gigabytes: int, bandwidth: float, memory: int) -> Device:
    return Device(
        f"A100 {gigabytes}GB SXM",
        {"bf16": 312 * _T, "f16": 312 * _T, "f32": 156 * _T, "f64": 19.5 * _T, "i8": 624 * _T},
        19.5 * _T,
        bandwidth,
        memory,
        32e9,
        "NVIDIA A100 Tensor Core GPU Datasheet (SXM), without sparsity; PCIe Gen4: 32 GB/s each way, NVLink: 300 GB/s",
        kinds=(f"NVIDIA A100-SXM4-{gigabytes}GB", f"NVIDIA A100-SXM-{gigabytes}GB"),
        interconnect=300e9,
        target=_gpu(f"NVIDIA A100-SXM4-{gigabytes}GB", 8, 108, 1.41, memory, round(bandwidth), 40 * 2**20),
    )


def _hopper(name: str, bandwidth: float, kinds: tuple[str, ...], memory: int) -> Device:
    eight = 1979 * _T
    return Device(
        name,
        {"bf16": 989.4 * _T, "f16": 989.4 * _T, "f32": 494.7 * _T, "f64": 66.9 * _T, "i8": eight}
        | dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), eight),
        66.9 * _T,
        bandwidth,
        memory,
        64e9,
        f"NVIDIA {name.split()[0]} Tensor Core GPU Datasheet (SXM) and NVIDIA H100 Tensor Core GPU Architecture, "
        "without sparsity; PCIe Gen5: 64 GB/s each way, NVLink: 450 GB/s",
        kinds=kinds,
        interconnect=450e9,
        target=_gpu(kinds[0], 9, 132, 1.98, memory, round(bandwidth), 50 * 2**20),
    )


def _b200() -> Device:
    eight, memory = 4500 * _T, 191514411008
    return Device(
        "B200",
        {"bf16": 2250 * _T, "f16": 2250 * _T, "f32": 1125 * _T, "f64": 37 * _T, "i8": eight}
        | dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), eight),
        75 * _T,
        8e12,
        memory,
        64e9,
        "NVIDIA DGX B200 Datasheet, an eighth of the system, without sparsity; PCIe Gen5: 64 GB/s each way, NVLink: "
        "900 GB/s",
        interconnect=900e9,
        kinds=("NVIDIA B200",),
        target=_gpu("NVIDIA B200", 10, 148, 1.965, memory, 7672320000000, 132644864),
    )


def _tpu(
    version: str,
    bf16: float,
    int8: float,
    bandwidth: float,
    memory: int,
    host: float | None,
    links: float,
    kinds: tuple[str, ...],
    vmem: int,
    topology: str = "",
) -> Device:
    """``memory`` in MiB: libtpu 0.0.50 compiles a program with that much, and none with 1 MiB more.

    That is up to 3% less than the data sheet says, and differs by up to 16 MiB between versions of libtpu. ``vmem``:
    of a core in MiB, by JAX's own table (``jax/_src/tpu_info.py``). Of it XLA leaves 16 MiB to the kernels themselves:
    compiled for a v5e, no program puts more than 112 MiB there.
    """
    return Device(
        f"TPU {version}",
        {"bf16": bf16 * _T, "f32": bf16 * _T, "i8": int8 * _T},
        None,
        bandwidth,
        memory * 2**20,
        host,
        f"Google Cloud TPU documentation, TPU {version} (per chip; ICI each way); PCIe: How to Scale Your Model, "
        f"chapter 2, 2025{'; ICI: Jouppi et al., TPU v4, 2023: six links of 50 GB/s' if version == 'v4' else ''}",
        kinds=kinds,
        interconnect=links,
        target=Target("tpu", topology) if topology else None,
        vector_memory=max(0, vmem * 2**20 - KERNELS_OWN),
    )


def _tpu_7x() -> Device:
    """JAX takes each of the two halves of a chip for a device."""
    return Device(
        "TPU 7x",
        {"bf16": 2307 / 2 * _T, "f32": 2307 / 2 * _T} | dict.fromkeys(("f8_e4m3fn", "f8_e5m2"), 4614 / 2 * _T),
        None,
        7.38e12 / 2,
        97011 * 2**20,
        None,
        "Google Cloud TPU documentation, TPU7x (Ironwood): half a chip, which is what JAX takes for a device",
        kinds=("TPU7x", "TPU 7x"),
        interconnect=600e9 / 2,
        target=Target("tpu", "tpu7x:1x1x1"),
        vector_memory=64 * 2**20 - KERNELS_OWN,
    )


_KNOWN: dict[str, Device] = {
    device.name: device
    for device in (
        _a100(40, 1.555e12, 42331013120),
        _a100(80, 2.039e12, 85100068864),
        _hopper("H100 SXM", 3.35e12, ("NVIDIA H100 80GB HBM3",), 84942979072),
        _hopper("H200", 4.8e12, ("NVIDIA H200",), 151397597184),
        _b200(),
        # libtpu takes each core of a v4 chip for a device; JAX on such a machine takes both together for one.
        _tpu("v4", 275, 275, 1.2e12, 32 * 1024, 16e9, 300e9, ("TPU v4",), 16),
        _tpu("v5e", 197, 393, 0.819e12, 16125, 15e9, 200e9, ("TPU v5 lite", "TPU v5e"), 128, "v5e:1x1"),
        _tpu("v5p", 459, 918, 2.765e12, 98024, 15e9, 600e9, ("TPU v5", "TPU v5p"), 64, "v5p:1x1x1"),
        _tpu("v6e", 918, 1836, 1.638e12, 31991, 32e9, 400e9, ("TPU v6 lite", "TPU v6e"), 128, "v6e:1x1"),
        _tpu_7x(),
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

    Several that are connected are named by their shape, which of a TPU are the chips along each dimension of its slice
    and of a GPU how many there are: ``"TPU v5e:2x4"``, ``"H100 SXM x8"``. All figures are those of one of them.

    Raises:
        RematError: no such device, or it is not offered so; says which comes nearest, or what is offered.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise RematError(f"A device is named by a text or given as a Device, not {type(name).__name__}: {name!r}.")
    by_lower_case = {offered.casefold(): offered for offered in names()}
    single, shape = name.strip(), ()
    offered = by_lower_case.get(single.casefold())
    if offered is None:
        single, shape = split_name(single)
        offered = by_lower_case.get(single.casefold())
    if offered is None:
        lower = single.casefold()
        inside = [by_lower_case[other] for other in by_lower_case if lower and lower in other]
        near = inside[:1] or [by_lower_case[other] for other in difflib.get_close_matches(lower, by_lower_case, 1, 0.4)]
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}."
        raise RematError(f"No device is called {single!r}: {hint}")
    device = this_cpu() if offered == THIS_CPU else _KNOWN[offered]
    return _several(device, shape) if shape else device


def _several(device: Device, shape: tuple[int, ...]) -> Device:
    """So many of a device, connected."""
    if device.target is None:
        raise RematError(f"XLA has no way to compile for several {device.name} where there are none: name one of it.")
    name, topology, count = device.target.several(device.name, shape)
    return device if count == 1 else replace(device, name=name, topology=topology, count=count)


def meshes(count: int) -> tuple[str, ...]:
    """The names of all that ``get`` knows as so many devices, connected; empty for one."""
    mesh_names = list[str]()
    for device in _KNOWN.values():
        shape = device.target.shape_of(count) if device.target and count > 1 else ()
        if device.target and shape:
            mesh_names.append(device.target.several(device.name, shape)[0])
    return tuple(mesh_names)


def of_kind(kind: str) -> Device | None:
    """The device that JAX calls ``kind`` (``jax.devices()[0].device_kind``), None where none of ours is it."""
    if kind.casefold() == "cpu":
        return this_cpu()
    return next((device for device in _KNOWN.values() if kind in (device.name, *device.kinds)), None)


def accelerator() -> Device | None:
    """The accelerator of JAX's default backend. None for a CPU, one not known here, and where JAX finds no device.

    None too before JAX has looked for devices: of a GPU it takes most of the memory then, and tracing needs none.
    """
    import jax

    from remat_magic import _jax

    if not _jax.has_begun():
        return None
    try:
        kind = jax.devices()[0].device_kind
    except RuntimeError:  # none of the platform that JAX was told to use: tracing needs none
        return None
    return None if kind.casefold() == "cpu" else of_kind(kind)


def how_many_here(device: Device) -> int:
    """How many of a device, by itself or of several that are named, JAX's default backend has; JAX looks for them."""
    import jax

    try:
        return sum(here.device_kind in (device.one, *device.kinds) for here in jax.devices())
    except RuntimeError:  # none of the platform that JAX was told to use
        return 0


def default() -> Device | None:
    """The device of JAX's default backend: where a training step would run. None for one that is not known here."""
    import jax

    return of_kind(jax.devices()[0].device_kind)


@cache
def this_cpu() -> Device:
    """This machine's processor, timed once."""
    speed = time_this_machine()
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
