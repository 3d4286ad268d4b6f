"""What XLA's compilers are told of accelerators, one or several that are connected.

TPUs come in slices, named by the chips along each of two or three dimensions (``2x4``); GPUs by number, in hosts of
eight (``x8``). What is offered is Google Cloud's (documentation of each TPU version) and NVIDIA's (eight GPUs to a host
are connected by NVLink).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from remat_magic.errors import RematError

_GPUS_OF_HOST = 8
_LARGEST_FLAT = 256  # chips of a pod whose chips are connected along two dimensions
_SMALL_CUBOIDS = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LARGEST_CUBOID = (16, 16, 24)
_NAME = re.compile(r"(?P<one>.*\S)\s*(?::\s*(?P<shape>\d+(?:x\d+)+)|\sx(?P<number>\d+))", re.IGNORECASE)


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """The device in the name of several: ``TPU v5e:2x4`` and ``H100 SXM x8``, with (2, 4) and (8,); () for one."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return name, ()
    return match["one"], tuple(map(int, (match["shape"] or match["number"]).casefold().split("x")))


@dataclass(frozen=True, slots=True)
class Target:
    """What XLA's compiler is told of a device that need not be here.

    Attributes:
        platform: "tpu" or "cuda".
        topology: the name that libtpu knows one such chip by; empty for a GPU.
        facts: of a GPU, by the names of the fields of XLA's ``GpuDeviceInfoProto``.
    """

    platform: str
    topology: str = ""
    facts: Mapping[str, int | float | str] = field(default_factory=dict)

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

        Raises:
            RematError: so many are not offered together.
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
        """Several that are connected in a shape.

        Args:
            name: of one.
            shape: of a TPU its chips along each dimension, of a GPU how many there are.

        Returns:
            What they are called together, how XLA's compilers name it, and how many devices they are.

        Raises:
            RematError: they are not offered so; says how they are.
        """
        if self.platform == "cuda":
            if len(shape) == 1 and (1 <= shape[0] <= _GPUS_OF_HOST or shape[0] > 0 == shape[0] % _GPUS_OF_HOST):
                return f"{name} x{shape[0]}", self.connected(shape[0]), shape[0]
            raise RematError(
                f"{name} are offered by number, up to {_GPUS_OF_HOST} or in whole hosts of {_GPUS_OF_HOST}: "
                f"'{name} x{_GPUS_OF_HOST}' or '{name} x{2 * _GPUS_OF_HOST}', and not {_text(shape)}."
            )
        if not self._is_offered(shape):
            raise RematError(f"{name} are offered in slices of {self._offered}, such as '{name}:{self._example}'.")
        return f"{name}:{_text(shape)}", f"{self._chip}:{_text(shape)}", math.prod(shape) * self._devices_of_chip

    def shape_of(self, devices: int) -> tuple[int, ...]:
        """The shape in which so many are offered; () for none."""
        if self.platform == "cuda":
            return (devices,) if devices <= _GPUS_OF_HOST or devices % _GPUS_OF_HOST == 0 else ()
        chips, rest = divmod(devices, self._devices_of_chip)
        if rest or not chips or chips & (chips - 1):
            return ()
        shape = _doubled(chips.bit_length() - 1, self._dimensions)
        return shape if self._is_offered(shape) else ()

    def _is_offered(self, shape: tuple[int, ...]) -> bool:
        if len(shape) != self._dimensions:
            return False
        if self._dimensions == 2:
            return shape in _flat_shapes()
        largest = math.prod(_LARGEST_CUBOID)
        in_fours = all(side and side % 4 == 0 for side in shape) and list(shape) == sorted(shape)
        return shape in _SMALL_CUBOIDS or (in_fours and math.prod(shape) <= largest)

    @property
    def _offered(self) -> str:
        if self._dimensions == 2:
            return ", ".join(map(_text, _flat_shapes()))
        small = ", ".join(map(_text, _SMALL_CUBOIDS))
        return f"{small}, or sides in fours, the shortest first, up to {_text(_LARGEST_CUBOID)}"

    @property
    def _example(self) -> str:
        return _text(_doubled(3, self._dimensions))


def _doubled(times: int, dimensions: int) -> tuple[int, ...]:
    """The sides of 2**times chips, each as long as the one before or twice that."""
    sides = [2 ** ((times + place) // dimensions) for place in range(dimensions)]
    return tuple(sorted(sides, key=lambda side: side == 1))  # 2x2x1, and 2x2x4


def _flat_shapes() -> tuple[tuple[int, ...], ...]:
    return ((1, 1), *(_doubled(times, 2) for times in range(2, _LARGEST_FLAT.bit_length())))


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
