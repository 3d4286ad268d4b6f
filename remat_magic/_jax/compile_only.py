"""XLA's compilers for devices that are not here: programs go in as text, and what XLA says of them comes out.

Meant for a process of its own: libtpu installs signal handlers, aborts where another process has it, and reads its
settings from the environment before JAX is imported. ``ENVIRONMENT`` is that.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from jax.experimental import topologies

from remat_magic._jax.hlo import Module, modules_of
from remat_magic._jax.private import cannot, courtesy

_EFFECT = "nothing is compiled for devices that are not here"
_get_options = courtesy("jax._src.compiler.get_compile_options", _EFFECT)
_make_context = courtesy("jax._src.interpreters.mlir.make_ir_context", _EFFECT)
_device_list = courtesy("jaxlib.xla_client.DeviceList", _EFFECT)
_module = courtesy("jaxlib.mlir.ir.Module", _EFFECT)

ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",  # else a plugin for GPUs without one offers no topologies
    "TPU_SKIP_MDS_QUERY": "1",  # there is no cloud to ask what this machine is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # of the machine itself; which chip is compiled for does not follow from it
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compile at once
    "TPU_MIN_LOG_LEVEL": "4",
    "TPU_STDERR_LOG_LEVEL": "4",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

QUICK: Mapping[str, str] = {"JAX_OPTIMIZATION_LEVEL": "O1"}
"""Besides ``ENVIRONMENT``, for a compilation that takes less time and finds less: its bytes are not the final ones."""


def bytecode(lowered: Any) -> bytes:
    """A lowered program as MLIR's bytecode, with the source positions in it."""
    stream = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(stream)
    return stream.getvalue()


def calls_back(error: BaseException) -> bool:
    """Whether lowering for another platform failed because the program calls back into Python, in JAX's words."""
    return "is different from the lowering platform" in str(error)


def compile_program(
    program: bytes, platform: str, topology: str, facts: Mapping[str, Any], devices: int, options: Mapping[str, Any]
) -> tuple[Any, tuple[Module, ...] | None]:
    """Compile a program for one device, or for several that share the work: their bytes, and the optimized modules.

    The ``program`` is ``bytecode`` of one that was lowered for the platform, ``topology`` how the devices are connected
    (for libtpu with the name of the chip before it), ``facts`` are of a GPU. The bytes are those of one device, as
    ``Compiled.memory_analysis()`` has them; the modules are None where they cannot be read. What XLA says it raises as
    RuntimeError, also where the program needs more memory than the device has.
    """
    if None in (_get_options, _make_context, _device_list, _module):
        raise cannot(_EFFECT)
    if platform == "cuda":
        settings: dict[str, Any] = {"topology": topology, "target_config": _target_config(facts)}
        described = topologies.get_topology_desc(platform="cuda", topology_name="gpus", **settings)
    else:
        settings = {"chips_per_host_bounds": (1, 1, 1)} if devices == 1 else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **settings)
    there = described.devices[:devices]
    if len(there) < devices:
        raise RuntimeError(f"{topology} has {len(there)} devices, and the program is for {devices}.")
    client = there[0].client
    wanted = _get_options(
        num_replicas=1,
        num_partitions=devices,
        device_assignment=[[device.id for device in there]],
        env_options_overrides=dict(options),
        backend=client,
    )
    with _make_context() as context:
        module = _module.parse(program, context)
        executable = client.compile(module, _device_list(tuple(there)), wanted)
    return executable.get_compiled_memory_stats(), modules_of(executable.hlo_modules())


def _target_config(facts: Mapping[str, Any]) -> str:
    """XLA's ``GpuTargetConfigProto`` of a GPU, as text.

    The versions are of CUDA and cuDNN, for which XLA asks what they can do; nothing of both is needed to compile.
    """
    own = {"capability", "name"}
    fields = [f"{name}: {value}" for name, value in facts.items() if name not in own]
    features = "NONE" if facts["capability"] < 9 else "ACCELERATED_FEATURES"
    capability = f"cuda_compute_capability {{ major: {facts['capability']} feature_extension: {features} }}"
    versions = [
        'driver_version: "13.0.0"',
        'runtime_version: "12.9.0"',
        'compile_time_toolkit_version: "12.9.0"',
        'dnn_version: "9.10.0"',
    ]
    name = f'"{facts["name"]}"'
    info = "\n".join([*fields, capability, f"name: {name}", *versions])
    rest = f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 patch: 0 }}\ndevice_description_str: {name}'
    return f"gpu_device_info {{\n{info}\n}}\n{rest}\n"
