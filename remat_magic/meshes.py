"""Meshes by the names and sizes of their axes, for programs whose specs name axes and no devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING

from remat_magic import _jax
from remat_magic.errors import RematError

if TYPE_CHECKING:
    from jax.sharding import Mesh


def mesh(axes: str | Mapping[str, int]) -> Mesh:
    """A mesh to trace on, which may be larger than this machine: ``with jax.set_mesh(rm.mesh("data=4,model=2")): ...``.

    It is of this machine's devices where there are enough, else of simulated ones that need no setting. The axes are
    automatic, so that ``in_shardings`` of a jitted step, ``with_sharding_constraint`` and ``shard_map`` say how values
    are spread, and XLA decides about the rest. (An explicit mesh is known by the types of the arguments, and needs no
    devices: ``jax.sharding.AbstractMesh``.)

    Args:
        axes: the size of each axis by its name, as a text such as ``"data=4,model=2"`` or a mapping.

    Raises:
        RematError: it is no such text, or there are too many devices to be simulated.
    """
    sizes = _axes(axes) if isinstance(axes, str) else dict(axes) if isinstance(axes, Mapping) else {}
    numbers = all(isinstance(size, Integral) and not isinstance(size, bool) and size > 0 for size in sizes.values())
    if not sizes or not numbers or not all(isinstance(name, str) for name in sizes):
        raise RematError(f'a mesh is written by axes and sizes, such as "data=4,model=2", not {axes!r}.')
    return _jax.automatic_mesh({name: int(size) for name, size in sizes.items()})


def _axes(text: str) -> dict[str, int]:
    parts = [re.fullmatch(r"\s*([^\W\d]\w*)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
    sizes = {part[1]: int(part[2]) for part in parts if part}
    return sizes if len(sizes) == len(parts) else {}  # one is no axis, or comes twice
