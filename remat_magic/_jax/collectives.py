"""What devices tell each other by the collectives that a program names itself, in the bodies of ``shard_map``.

``pmap`` is a ``shard_map`` on every line of JAX. Outside of one XLA alone decides what is told, whatever the mesh:
those collectives are in the compiled program only, of which ``xla_costs`` tells the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from remat_magic._jax.primitives import names
from remat_magic._jax.shardings import nbytes


class Communication(NamedTuple):
    """What one run of a collective tells.

    ``kind`` is what XLA calls it, ``over`` are the axes of the mesh along which the devices tell each other.

    ``nbytes`` are those of the results that one device has, as they are counted in a compiled program: a gathered array
    counts whole. ``sent`` is what a device sends at least, if n devices pass parts around in a ring, which leaves every
    link as little to do as can be without a switch that computes: of a gathered, scattered or exchanged array
    (n - 1) / n, of one that is summed twice that.
    """

    kind: str
    over: tuple[str, ...]
    nbytes: int
    sent: int


def _rest(size: int, devices: int) -> int:
    return size * (devices - 1) // devices


_Sent = Callable[[int, int], int]  # the bytes of the results and the number of devices
_KINDS: dict[str, tuple[str, _Sent]] = {
    "all-gather": ("all_gather all_gather_invariant all_gather_reduced", _rest),
    "all-reduce": (
        "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin",
        lambda size, devices: 2 * _rest(size, devices),
    ),
    "reduce-scatter": ("reduce_scatter unreduced_reduce_scatter", lambda size, devices: size * (devices - 1)),
    "all-to-all": ("all_to_all", _rest),
    # How much goes where is known at run time only: at least nothing.
    "ragged-all-to-all": ("ragged_all_to_all", lambda _size, _devices: 0),
    "collective-permute": ("ppermute", lambda size, _devices: size),
    "collective-broadcast": ("pbroadcast pbroadcast_dynamic", lambda size, _devices: size),
}
# What is begun is counted, what ends it is not.
_COLLECTIVES = {
    name: (kind, sent) for kind, (text, sent) in _KINDS.items() for one in names(text) for name in (one, f"{one}_start")
}


def sent_bytes(kind: str, nbytes: int, devices: int) -> int:
    """What a device sends at least: ``Communication.sent``, of a kind that XLA knows among so many devices."""
    return next(sent for name, (_, sent) in _KINDS.items() if name == kind)(nbytes, devices)


def communication(eqn: Any, of_one: Any = None) -> Communication | None:
    """What one run of an equation tells other devices; None if nothing.

    Args:
        eqn: the equation, whose types have the mesh.
        of_one: the same on the types that one device holds, where it is spread over other axes as well.
    """
    kind_and_sent = _COLLECTIVES.get(eqn.primitive.name)
    if kind_and_sent is None:
        return None
    (kind, sent), over = kind_and_sent, _axes(eqn.params)
    devices = _devices(eqn, over)
    if devices == 1:
        return None
    size = sum(nbytes(_result(var.aval)) for var in (of_one or eqn).outvars)
    return Communication(kind, tuple(map(str, over)), size, sent(size, devices))


def _axes(params: dict[str, Any]) -> tuple[Hashable, ...]:
    """The mapped axes of a collective; the numbers among them are dimensions of the operand."""
    axes = params.get("axes", params.get("axis_name", ()))
    return tuple(axis for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)) if not isinstance(axis, int))


def _devices(eqn: Any, over: tuple[Hashable, ...]) -> int:
    """How many devices one of them exchanges with, itself included."""
    groups = eqn.params.get("axis_index_groups")
    if groups:
        return max(map(len, groups))
    if "axis_size" in eqn.params:
        return int(eqn.params["axis_size"])
    for atom in (*eqn.outvars, *eqn.invars):
        mesh = getattr(getattr(_result(atom.aval), "sharding", None), "mesh", None)
        if mesh is not None and set(over) <= set(mesh.axis_names):
            return math.prod(mesh.shape[axis] for axis in over)
    return 1


def _result(aval: Any) -> Any:
    """The type of what a collective gives, also of one that only begins."""
    return getattr(aval, "inner_aval", aval)
