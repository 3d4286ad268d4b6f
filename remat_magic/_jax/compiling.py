"""Programs that XLA compiles and does not run: for devices that are not here, and to see how it spreads values."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from remat_magic._jax.hlo import CompiledCollective, Module, modules_of, xla_communicated
from remat_magic._jax.jaxprs import consts_of, is_closed, is_literal, map_jaxprs, open_jaxpr
from remat_magic._jax.primitives import is_custom_rule, is_jit, is_shard_map
from remat_magic._jax.private import cannot, courtesy
from remat_magic._jax.shardings import is_abstract, is_even, of_one_device, type_in_mesh
from remat_magic.errors import RematError

# For devices that are not here programs go in as text. Meant for a process of its own: libtpu installs signal handlers,
# aborts where another process has it, and reads its settings from the environment before JAX is imported.

_NOT_COMPILED = "nothing is compiled for devices that are not here"
_get_options = courtesy("jax._src.compiler.get_compile_options", _NOT_COMPILED)
_make_context = courtesy("jax._src.interpreters.mlir.make_ir_context", _NOT_COMPILED)
_device_list = courtesy("jaxlib.xla_client.DeviceList", _NOT_COMPILED)
_module = courtesy("jaxlib.mlir.ir.Module", _NOT_COMPILED)

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
        raise cannot(_NOT_COMPILED)
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


# ---------------------------------------------------------------------- how XLA spreads values over an automatic mesh


# Types tell nothing of it. XLA is asked by compiling for CPU devices that it pretends to have, as many as a mesh wants,
# in this process.

_SHARDINGS = ("sharding", "in_shardings", "out_shardings")  # that a constraint or a call asks for

# What JAX's compilation cache has on disk asks nothing, and would be found again: its key has the addresses of the
# callbacks, which recur. So such a program is not put there: it compiles in less than what is worth it.
_worth_keeping = courtesy(
    "jax._src.config.persistent_cache_min_compile_time_secs", "with a compilation cache XLA may not tell shardings"
)


def propagated(
    closed: Any, shardings: Sequence[Any], results: Sequence[Any] | None = None
) -> tuple[dict[Any, NamedSharding], Counter[CompiledCollective] | None]:
    """XLA's own sharding of each value, by its variable, at any depth outside of ``shard_map``; what devices tell.

    The program is compiled, and not run, for the devices that the shardings of its inputs name (None where nothing is
    asked for), simulated ones where their mesh has none, with ``jax.debug.inspect_array_sharding`` at each value.
    ``results`` are the shardings of its results, likewise; only where there is one for each.

    Where a body is called several times, it is the sharding that makes a device hold most. Scalars are left out, and
    what XLA does not tell in terms of the mesh. The second is how often a device takes part in each collective, None
    where that is not known. What JAX or XLA raises where it cannot be compiled is raised.
    """
    meshes = meshes_of(shardings)
    shardings = [with_devices(sharding, meshes) for sharding in shardings]
    results = None if results is None else [with_devices(result, meshes) for result in results]
    watch = _Watch(meshes)
    inputs = list(zip((var.aval for var in open_jaxpr(closed).invars), shardings, strict=True))
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if _divides(sharding, aval) else None)
        for aval, sharding in inputs
    ]

    def whole(*values: Any) -> list[Any]:
        # What does not divide cannot be asked of an input, but of a value.
        values = tuple(
            value if _divides(sharding, aval) else _constrained(value, sharding)
            for value, (aval, sharding) in zip(values, inputs, strict=True)
        )
        outputs = watch.evaluate(closed, values)
        if results is None or len(results) != len(outputs):
            return outputs
        return list(map(_constrained, outputs, results))

    with contextlib.nullcontext() if _worth_keeping is None else _worth_keeping(math.inf):
        compiled = jax.jit(whole).lower(*types).compile(compiler_options=_options(shardings))
    communicated = None
    with contextlib.suppress(Exception):  # whatever another JAX or XLA may not have
        executable: Any = compiled.runtime_executable()
        communicated = xla_communicated(modules_of(executable.hlo_modules()))
    return watch.shardings, communicated


class _Watch:
    """Evaluates jaxprs, and takes down how each value on the way is spread."""

    def __init__(self, meshes: Sequence[Any]) -> None:
        self.shardings: dict[Any, NamedSharding] = {}
        self._meshes = meshes

    def evaluate(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, open or closed."""
        body = open_jaxpr(jaxpr)
        value_of = dict(zip((*body.constvars, *body.invars), (*consts_of(jaxpr), *values), strict=True))
        for var in body.invars:
            self._inspect(var, value_of[var])

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else value_of[atom]

        for eqn in body.eqns:
            with eqn.ctx.manager:
                results = self._apply(eqn, [read(atom) for atom in eqn.invars])
            for var, value in zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True):
                value_of[var] = value
                self._inspect(var, value)
        return [read(atom) for atom in body.outvars]

    def _apply(self, eqn: Any, operands: Sequence[Any]) -> Any:
        called = eqn.params.get("call_jaxpr") if is_custom_rule(eqn) else None
        if called is not None and len(open_jaxpr(called).invars) == len(operands):
            return self.evaluate(called, operands)  # a custom rule has no say in what is not differentiated any more
        inside = eqn if is_custom_rule(eqn) or is_shard_map(eqn) else map_jaxprs(eqn, self._watched)
        params = inside.params
        if is_jit(eqn) or eqn.primitive.name == "sharding_constraint":
            params = {name: self._placed(value) if name in _SHARDINGS else value for name, value in params.items()}
        return inside.primitive.bind(*operands, **inside.primitive.get_bind_params(params))

    def _placed(self, asked: Any) -> Any:
        """What an equation asks of shardings, over devices."""
        if isinstance(asked, tuple):
            return tuple(map(self._placed, asked))
        return with_devices(asked, self._meshes)

    def _watched(self, jaxpr: Any) -> Any:
        types = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in open_jaxpr(jaxpr).invars]
        new = jax.make_jaxpr(lambda *values: self.evaluate(jaxpr, values))(*types)
        return new if is_closed(jaxpr) else open_jaxpr(new)

    def _inspect(self, var: Any, value: Any) -> None:
        if getattr(var.aval, "ndim", 0):
            jax.debug.inspect_array_sharding(value, callback=lambda sharding: self._take(var, sharding))

    def _take(self, var: Any, sharding: Any) -> None:
        if isinstance(sharding, NamedSharding):
            before = self.shardings.get(var)
            if before is None or _held(sharding, var) > _held(before, var):
                self.shardings[var] = sharding


def _divides(sharding: Any, aval: Any) -> bool:
    return not isinstance(sharding, NamedSharding) or is_even(aval.shape, sharding.mesh, sharding.spec)


def _constrained(value: Any, sharding: Any) -> Any:
    return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def _options(shardings: Sequence[Any]) -> dict[str, Any]:
    """Nothing runs: XLA need not make the machine code fast, nor try out kernels for a GPU."""
    devices = {device.platform for sharding in shardings for device in getattr(sharding, "device_set", ())}
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    return {**options, "xla_gpu_autotune_level": 0} if devices == {"gpu"} else options


def _held(sharding: NamedSharding, var: Any) -> int:
    return math.prod(of_one_device(type_in_mesh(var.aval, sharding.mesh, sharding.spec)).shape)


# --------------------------------------------------------------------------------------------------- simulated devices


_MOST = 2048  # more are another process's, XLA's client for CPUs believes; so many take 0.9 GB
_THREADS = 4  # of a device at most, which sleep
_NOT_SPREAD = "nothing is known of how XLA spreads values over a mesh that is not here"
_LIMITS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))  # of a container
_lock = threading.Lock()
_make_client = courtesy("jaxlib.xla_client.make_cpu_client", _NOT_SPREAD)


def automatic_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of automatic axes with these sizes, of this machine's devices where they are enough, else simulated."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    here = jax.devices()
    if math.prod(sizes.values()) > len(here):
        return _simulated(mesh)
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _simulated(mesh: Any) -> Mesh:
    """A mesh of simulated devices, of the sizes, names and axis types of another one."""
    if mesh.size > _MOST:
        raise RematError(f"more than {_MOST} devices that are not here are not simulated: use a smaller mesh.")
    devices = _devices(1 << (mesh.size - 1).bit_length())[: mesh.size]
    sizes = tuple(mesh.shape.values())
    return Mesh(np.array(devices).reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)


def with_devices(sharding: Any, meshes: Iterable[Any]) -> Any:
    """A sharding over devices, where its mesh has none; any other as it is.

    Those are of one of the ``meshes`` that has the same axes, since devices of two meshes make no program; else they
    are simulated.
    """
    if not is_abstract(sharding):
        return sharding
    sizes = dict(sharding.mesh.shape)
    there = next((mesh for mesh in meshes if dict(mesh.shape) == sizes), None)
    return NamedSharding(_simulated(sharding.mesh) if there is None else there, sharding.spec)


def on_devices_here(sharding: Any) -> Any:
    """A sharding to put arrays by: over JAX's own devices where its mesh has none; any other as it is."""
    if not is_abstract(sharding):
        return sharding
    mesh, here = sharding.mesh, len(jax.devices())
    if mesh.size > here:
        raise RematError(
            f"the mesh of the arguments has {mesh.size} devices, and there {'is' if here == 1 else 'are'} {here} here "
            "to run on: leave out inputs=, and compile for a device by name (device=)."
        )
    there = jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(there, sharding.spec, memory_kind=sharding.memory_kind)


def meshes_of(shardings: Iterable[Any]) -> list[Any]:
    """The meshes with devices that shardings name, and the one that is set around."""
    named = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return [mesh for mesh in (*named, jax.sharding.get_mesh()) if isinstance(mesh, Mesh) and not mesh.empty]


def _devices(number: int) -> list[Any]:
    """The same ones for all threads: those of two clients are no mesh."""
    with _lock:
        return _made(number)


def _most_threads() -> float:
    """How many threads this process may have, as far as the system tells."""
    limits = [math.inf]
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits += [] if soft == resource.RLIM_INFINITY else [soft]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            limits.append(int(path.read_text()))
    return min(limits)


@functools.cache  # of powers of two: there are few
def _made(number: int) -> list[Any]:
    if _make_client is None:
        raise cannot(_NOT_SPREAD)
    most = _most_threads()
    if most < _THREADS * number:  # XLA ends the process where it gets none
        raise RematError(f"{number} devices that are not here need {_THREADS * number} threads, of {most}: use fewer.")
    return _make_client(num_devices=number).devices()
