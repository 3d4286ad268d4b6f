"""CPU devices that XLA pretends to have, as many as a mesh wants: to compile for, in this process.

JAX has one set of devices for a process, made when it is first asked for. These are another client's, so that neither
the user's devices nor the number of them matter. They are to compile for: what is run there runs on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from remat_magic._jax.private import cannot, courtesy
from remat_magic._jax.shardings import is_abstract
from remat_magic.errors import RematError

_MOST = 2048  # more are another process's, XLA's client for CPUs believes; so many take 0.9 GB
_THREADS = 4  # of a device at most, which sleep
_EFFECT = "nothing is known of how XLA spreads values over a mesh that is not here"
_LIMITS = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))  # of a container
_lock = threading.Lock()
_make_client = courtesy("jaxlib.xla_client.make_cpu_client", _EFFECT)


def automatic_mesh(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of automatic axes with these sizes, of this machine's devices where they are enough.

    Raises:
        RematError: they are not, and there are too many to be simulated.
    """
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

    Args:
        sharding: the sharding.
        meshes: those that have devices. One of the same axes is taken: devices of two meshes make no program. Default:
            devices are simulated.

    Raises:
        RematError: there are too many to be simulated, or this JAX simulates none.
    """
    if not is_abstract(sharding):
        return sharding
    sizes = dict(sharding.mesh.shape)
    there = next((mesh for mesh in meshes if dict(mesh.shape) == sizes), None)
    return NamedSharding(_simulated(sharding.mesh) if there is None else there, sharding.spec)


def on_devices_here(sharding: Any) -> Any:
    """A sharding to put arrays by: over JAX's own devices where its mesh has none; any other as it is.

    Raises:
        RematError: there are fewer devices here than the mesh has.
    """
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
        raise cannot(_EFFECT)
    most = _most_threads()
    if most < _THREADS * number:  # XLA ends the process where it gets none
        raise RematError(f"{number} devices that are not here need {_THREADS * number} threads, of {most}: use fewer.")
    return _make_client(num_devices=number).devices()
