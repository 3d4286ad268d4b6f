"""The accelerators: what they can do at most, by their makers' data sheets, and how XLA compiles for them.

``get`` gives a device by name, ``register`` adds one, ``default`` finds the one that JAX would run on. ``"this CPU"``
is the machine itself, measured when it is first asked for. A device need not be here to be compiled for:
``Device.compiles_here`` says whether the compiler is installed, ``Device.install`` how to install it. Several that are
connected are a device too: ``get("TPU v5e:2x4")``, ``get("H100 SXM x8")``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace

from remat_magic.devices.data_sheets import ACCELERATORS
from remat_magic.devices.device import THIS_CPU, Device, Target, split_name, this_cpu
from remat_magic.errors import RematError
from remat_magic.units import is_bytes, parse_bytes

__all__ = [
    "THIS_CPU",
    "Device",
    "Target",
    "accelerator",
    "default",
    "get",
    "how_many_here",
    "meshes",
    "named",
    "names",
    "of_kind",
    "register",
    "usable_bytes",
]

_NUMBERS = re.compile(r"\d+")
_KNOWN = {device.name: device for device in ACCELERATORS}


def names() -> tuple[str, ...]:
    """The devices that ``get`` knows; nothing is measured for this."""
    return (*_KNOWN, THIS_CPU)


def named(text: str) -> str:
    """What a device goes by, or so many bytes in the place of one.

    Raises:
        RematError: it is neither.
    """
    if not is_bytes(text):
        return get(text).name
    parse_bytes(text, "device")
    return text.strip()


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
        begun = re.compile(rf"\b{re.escape(lower)}(?!\d)") if lower else None
        alike = [other for other in by_lower_case if _NUMBERS.findall(other) == _NUMBERS.findall(lower)]
        near = [other for other in by_lower_case if begun and begun.search(other)]
        near = near or difflib.get_close_matches(lower, alike, 1)  # an A10 is no misspelt A100
        known = f"known are {', '.join(names())}, and remat_magic.devices.register adds one."
        hint = f"did you mean {by_lower_case[near[0]]!r}?" if near else known
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


def accelerator(*, look: bool = False) -> Device | None:
    """The accelerator of JAX's default backend. None for a CPU, one not known here, and where JAX finds no device.

    None too before JAX has looked for devices, unless it is to ``look`` now: of a GPU it takes most of the memory then,
    and tracing needs none.
    """
    import jax

    from remat_magic import _jax

    if not (look or _jax.has_begun()):
        return None
    try:
        kind = jax.devices()[0].device_kind
    except RuntimeError:  # none of the platform that JAX was told to use: tracing needs none
        return None
    return None if kind.casefold() == "cpu" else of_kind(kind)


def usable_bytes(device: Device) -> int | None:
    """What a program can have of a device's memory, in bytes; of several that are connected, of each. None if unknown.

    Of one that is here it is what JAX's allocator says, once JAX has looked for devices. Of another, ``memory_bytes``,
    but of a GPU the share of it that JAX lets a process have: three quarters, or ``XLA_CLIENT_MEM_FRACTION``.
    """
    import jax

    from remat_magic import _jax

    if _jax.has_begun() and how_many_here(device) and (limit := _jax.memory_limit(jax.devices()[0])):
        return limit
    if device.memory_bytes is None or device.target is None or device.target.platform != "cuda":
        return device.memory_bytes
    return int(device.memory_bytes * _jax.share_of_gpu())


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
