"""The accelerators by their makers' data sheets."""

from __future__ import annotations

from remat_magic.devices.device import Device, Target

_T = 1e12


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
    topology: str = "",
) -> Device:
    """``memory`` in MiB: libtpu 0.0.50 compiles a program with that much, and none with 1 MiB more.

    That is up to 3% less than the data sheet says, and differs by up to 16 MiB between versions of libtpu.
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
    )


ACCELERATORS = (
    _a100(40, 1.555e12, 42331013120),
    _a100(80, 2.039e12, 85100068864),
    _hopper("H100 SXM", 3.35e12, ("NVIDIA H100 80GB HBM3",), 84942979072),
    _hopper("H200", 4.8e12, ("NVIDIA H200",), 151397597184),
    _b200(),
    # libtpu takes each core of a v4 chip for a device; JAX on such a machine takes both together for one.
    _tpu("v4", 275, 275, 1.2e12, 32 * 1024, 16e9, 300e9, ("TPU v4",)),
    _tpu("v5e", 197, 393, 0.819e12, 16125, 15e9, 200e9, ("TPU v5 lite", "TPU v5e"), "v5e:1x1"),
    _tpu("v5p", 459, 918, 2.765e12, 98024, 15e9, 600e9, ("TPU v5", "TPU v5p"), "v5p:1x1x1"),
    _tpu("v6e", 918, 1836, 1.638e12, 31991, 32e9, 400e9, ("TPU v6 lite", "TPU v6e"), "v6e:1x1"),
    _tpu_7x(),
)
