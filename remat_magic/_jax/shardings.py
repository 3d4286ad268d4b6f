"""Types of values: what one device of a mesh holds of one, and computes of an equation; dtypes, keys, memory spaces.

On explicit meshes the type says how a value is spread (``aval.sharding``); in the body of a ``shard_map`` the shape is
one device's already. Outside of it, on an automatic mesh, types say nothing: there the specs of the ``shard_map`` do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from remat_magic._jax.jaxprs import is_literal, open_jaxpr
from remat_magic._jax.primitives import ELEMENTWISE, FEW_TERMS, VIEWS, is_jit, is_shard_map, primitive_name
from remat_magic._jax.private import courtesy

_Axes = tuple[str, ...]
_SHAPE_KEPT = ELEMENTWISE | FEW_TERMS | VIEWS


def _named(entry: Any) -> _Axes:
    """The axes that an entry of a spec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


@functools.lru_cache(maxsize=4096)
def _spread(sharding: Any, automatic: bool = False) -> tuple[_Axes, ...]:
    """For each dimension the axes that it is spread over, without those that no type can tell of; empty for none.

    Axes are explicit, and with ``automatic`` also those that XLA decides about.
    """
    mesh = sharding.mesh
    explicit = {AxisType.Explicit, AxisType.Auto} if automatic else {AxisType.Explicit}
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = tuple(tuple(name for name in _named(entry) if types[name] in explicit) for entry in sharding.spec)
    return axes if any(axes) else ()


def _axes(aval: Any) -> tuple[_Axes, ...]:
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return () if mesh is None or mesh.empty else _spread(sharding)


def _along_axes(mesh: Any, axes: _Axes) -> int:
    """How many devices there are along some axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def is_even(shape: Sequence[int], mesh: Any, spec: Any) -> bool:
    """Whether every dimension divides by the number of devices that a spec spreads it over."""
    entries = zip(shape, spec, strict=False)
    return all(size % _along_axes(mesh, _named(entry)) == 0 for size, entry in entries)


def of_one_device(aval: Any, kept: Mapping[int, Collection[str]] | None = None) -> Any:
    """The type of what one device holds of a value; the type itself where it holds it whole.

    ``kept`` are for each dimension the axes of the mesh that it stays spread over, where others are gathered.
    """
    axes = _axes(aval)
    if not axes:
        return aval
    if kept is not None:
        axes = tuple(tuple(axis for axis in of if axis in kept[dim]) for dim, of in enumerate(axes))
    sizes = zip(aval.shape, (*axes, *[()] * (len(aval.shape) - len(axes))), strict=True)
    mesh = aval.sharding.mesh  # of a dimension that does not divide a device has the largest share
    return _typed(aval, [-(-int(size) // _along_axes(mesh, of)) for size, of in sizes])


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and, on an explicit mesh, the sharding of a type, to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding if _axes(aval) else None)


def _typed(aval: Any, shape: Sequence[int], sharding: Any = None) -> Any:
    """A type of the same dtype and memory, which says nothing of axes that are mapped around it."""
    space = getattr(aval, "memory_space", None) or jax.memory.Space.Device
    return ShapedArray(tuple(shape), aval.dtype, sharding=sharding, memory_space=space)


def sharding_text(aval: Any, text: str) -> str:
    """A type's ``text`` with the sharding as JAX writes it, ``f32[1024@data,64]``; empty where no type tells of it."""
    if AxisType.Explicit not in _axis_types(aval):
        return ""
    sizes = []
    for size, axes in zip(aval.shape, (*_axes(aval), *[()] * len(aval.shape)), strict=False):
        sizes.append(f"{size}@{axes[0] if len(axes) == 1 else '(' + ','.join(axes) + ')'}" if axes else str(size))
    return f"{text[: text.index('[')]}[{','.join(sizes)}]"


def _axis_types(aval: Any) -> set[Any]:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return set() if mesh is None or mesh.empty else {*mesh.axis_types}


def is_replicated(aval: Any) -> bool:
    """Whether a type tells that every device of a mesh holds all of a value."""
    return _axis_types(aval) == {AxisType.Explicit} and mesh_devices(aval) > 1 and not _axes(aval)


def devices_of(sharding: Any) -> int:
    """Over how many devices a sharding is, or a mesh that has none; 1 for no sharding."""
    return sharding.mesh.size if is_abstract(sharding) else max(1, len(getattr(sharding, "device_set", ())))


def mesh_in_force() -> dict[str, int]:
    """The axes and sizes of the mesh that ``jax.set_mesh`` has set around; empty for none."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {axis: mesh.shape[axis] for axis in mesh.axis_names}


def placed(jaxpr: Any) -> set[Any]:
    """The inputs of a jaxpr of which a jitted function's specs, a constraint or a ``shard_map`` say how they are."""
    body, explicit = open_jaxpr(jaxpr), set[Any]()
    for eqn in body.eqns:
        if eqn.primitive.name == "sharding_constraint":
            explicit.update(atom for atom in eqn.invars if not is_literal(atom))
        elif is_jit(eqn):
            inner = eqn.params["jaxpr"]
            inside = placed(inner)
            rows = zip(eqn.invars, eqn.params["in_shardings"], open_jaxpr(inner).invars, strict=True)
            explicit.update(
                atom
                for atom, asked, var in rows
                if not is_literal(atom) and (isinstance(asked, NamedSharding) or var in inside)
            )
        elif is_shard_map(eqn):
            explicit.update(atom for atom in eqn.invars if not is_literal(atom))
    return explicit.intersection(body.invars)


def called_whole(closed: Any) -> tuple[Any, list[Any], list[Any]] | None:
    """The program of a jitted function, and the shardings that it asks for its inputs and results, None for none.

    Of a jaxpr that does nothing but call it; None for any other.
    """
    body = open_jaxpr(closed)
    if len(body.eqns) != 1 or not is_jit(body.eqns[0]) or body.constvars:
        return None
    (eqn,) = body.eqns
    if [*eqn.invars] != [*body.invars] or [*eqn.outvars] != [*body.outvars]:
        return None
    asked = (eqn.params.get(name, ()) for name in ("in_shardings", "out_shardings"))
    ins, outs = ([spec if isinstance(spec, NamedSharding) else None for spec in shardings] for shardings in asked)
    return eqn.params["jaxpr"], ins, outs


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding is over a mesh that has names and sizes, and no devices."""
    return isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def mesh_devices(aval: Any) -> int:
    """How many devices have a part, or a copy, of a value, as far as its type tells; 1 without a mesh."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return 1
    return _explicit_devices(sharding.mesh)


def untold_axes(eqn: Any) -> set[str]:
    """The axes that XLA may spread values over beside those that the types or a ``shard_map`` tell of."""
    if is_shard_map(eqn):
        mesh, manual = eqn.params["mesh"], mapped_axes(eqn)
        return _automatic_axes(mesh) - {*manual}
    sharding = next((aval.sharding for aval in (var.aval for var in eqn.outvars) if mesh_devices(aval) > 1), None)
    return set() if sharding is None else _automatic_axes(sharding.mesh)


def _automatic_axes(mesh: Any) -> set[str]:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in axes if kind == AxisType.Auto and mesh.shape[axis] > 1}


def automatic_devices_in(eqn: Any) -> int:
    """Over how many devices an equation asks XLA to spread a value in a way of which types say nothing."""
    asked = [eqn.params["sharding"]] if eqn.primitive.name == "sharding_constraint" else []
    if is_jit(eqn):
        asked = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return max(map(automatic_devices, asked), default=1)


def mapped_axes(eqn: Any) -> Any:
    """The axes over which a ``shard_map`` maps its body."""
    # 0.10 and 0.12 call it otherwise.
    return eqn.params.get("manual_axes") or eqn.params.get("newly_manual_axes") or eqn.params["mesh"].axis_names


def mapped_devices(eqn: Any) -> int:
    """How many devices run the body of a ``shard_map`` each, 1 for any other equation."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in mapped_axes(eqn)) if is_shard_map(eqn) else 1


@functools.lru_cache(maxsize=256)
def _explicit_devices(mesh: Any) -> int:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return math.prod(mesh.shape[axis] for axis, kind in axes if kind != AxisType.Auto)


def automatic_devices(sharding: Any) -> int:
    """Over how many devices a value is spread in a way of which types say nothing; 1 where each has it whole."""
    if sharding is None:
        return 1
    if isinstance(sharding, NamedSharding):
        if sharding.mesh.empty:
            return 1
        axes = {axis for of in _spread(sharding, automatic=True) for axis in of}
        types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        return sharding.mesh.size if any(types[axis] == AxisType.Auto for axis in axes) else 1
    try:
        return 1 if sharding.is_fully_replicated else len(sharding.device_set)
    except (AttributeError, ValueError, TypeError):
        return 1


# --------------------------------------------------------------------------------------------- shard_map's own specs


class _UnevenType(NamedTuple):
    """A type spread over devices that do not divide its sizes: XLA fills up what the last one holds, JAX refuses it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    memory_space: Any


@functools.lru_cache(maxsize=256)
def _explicit(mesh: Any) -> AbstractMesh:
    """The same mesh, in which types tell of every axis."""
    sizes, names = tuple(mesh.shape.values()), tuple(mesh.axis_names)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


def type_in_mesh(aval: Any, mesh: Any, spec: Any) -> Any:
    """The type of a value of which a spec says how it is spread over a mesh, on top of what its own type says."""
    entries = [*spec, *[None] * (len(aval.shape) - len(spec))]
    merged = [(*(axis for axis in _along(aval, dim)), *_named(entry)) for dim, entry in enumerate(entries)]
    explicit = PartitionSpec(*(tuple(dict.fromkeys(axes)) or None for axes in merged))
    sharding = NamedSharding(_explicit(mesh), explicit)
    if is_even(aval.shape, mesh, explicit):
        return _typed(aval, aval.shape, sharding)
    return _UnevenType(aval.shape, aval.dtype, sharding, getattr(aval, "memory_space", None))


def spec_types(eqn: Any, type_of: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """What a ``shard_map`` takes and gives, each variable with its type as the specs have it; else nothing.

    ``type_of`` tells the types of variables inside, where another ``shard_map`` spreads them over more axes.
    """
    if not is_shard_map(eqn):
        return []
    params, body = eqn.params, open_jaxpr(eqn.params["jaxpr"])
    outer, inner = (*eqn.invars, *eqn.outvars), (*body.invars, *body.outvars)
    pairs = list[tuple[Any, Any]]()
    for atom, inside, spec in zip(outer, inner, (*params["in_specs"], *params["out_specs"]), strict=True):
        if not is_literal(atom):
            aval = type_in_mesh(atom.aval, params["mesh"], spec)
            more = type_of(inside)
            pairs.append((atom, type_in_mesh(aval, params["mesh"], more.sharding.spec) if _axes(more) else aval))
    return pairs


def keeps_shape(eqn: Any) -> bool:
    """Whether what an equation gives is spread as its operands of the same shape are."""
    return primitive_name(eqn) in _SHAPE_KEPT


def spread_like(aval: Any, other: Any, skip: int = 0, lead: int = 0) -> Any:
    """A type spread as another of the same sizes is; without its first ``skip`` dimensions, or ``lead`` more."""
    spec = other.sharding.spec
    return type_in_mesh(aval, other.sharding.mesh, PartitionSpec(*[None] * lead, *spec[skip:]))


def equation_of_one(eqn: Any, type_of: Callable[[Any], Any]) -> Any:
    """What one device computes of an equation: the same, on the types that it holds; itself where these are whole.

    A contraction along a dimension of which both operands are spread alike is done in parts, whose sum is taken after;
    any other contracted dimension is gathered first, and so is what an operand has spread along an axis that the
    result is not.
    """
    inside, outside = [[type_of(atom) for atom in atoms] for atoms in (eqn.invars, eqn.outvars)]
    if not any(_axes(aval) for aval in (*inside, *outside)):
        return eqn
    local = [of_one_device(aval) for aval in inside]
    if eqn.primitive.name == "dot_general" and len(inside) == 2:
        local = _of_dot(eqn, inside, outside[0])
    return SimpleNamespace(
        primitive=eqn.primitive,
        params=eqn.params,
        invars=[
            atom if aval is atom.aval else SimpleNamespace(aval=aval)
            for atom, aval in zip(eqn.invars, local, strict=True)
        ],
        outvars=[SimpleNamespace(aval=of_one_device(aval)) for aval in outside],
        source_info=eqn.source_info,
        effects=eqn.effects,
    )


def _of_dot(eqn: Any, inside: Sequence[Any], out: Any) -> list[Any]:
    """The operands of a matmul as one device multiplies them."""
    contracted, batch = eqn.params["dimension_numbers"]
    spread = [
        {axis for dim in dims for axis in _along(aval, dim)} for aval, dims in zip(inside, contracted, strict=True)
    ]
    in_parts = (spread[0] & spread[1]).difference(*_axes(out))
    operands, start = [], len(batch[0])
    for aval, summed, own in zip(inside, contracted, batch, strict=True):
        free = [dim for dim in range(len(aval.shape)) if dim not in summed and dim not in own]
        kept: dict[int, Collection[str]] = dict.fromkeys(summed, in_parts)
        kept.update((dim, _along(out, place)) for place, dim in enumerate(own))
        kept.update((dim, _along(out, start + place)) for place, dim in enumerate(free))
        start += len(free)
        operands.append(of_one_device(aval, kept))
    return operands


def _along(aval: Any, dim: int) -> _Axes:
    axes = _axes(aval)
    return axes[dim] if dim < len(axes) else ()


# ------------------------------------------------------------------------------------ dtypes, keys, memories and bytes


_short_dtype_name = courtesy("jax._src.dtypes.short_dtype_name", "types are written with the long names of dtypes")


def short_dtype(aval: Any) -> str:
    """JAX's short form of a dtype ("f32", "key<fry>")."""
    dtype = getattr(aval, "dtype", None)
    return (
        type(aval).__name__ if dtype is None else str(dtype) if _short_dtype_name is None else _short_dtype_name(dtype)
    )


def is_complex(aval: Any) -> bool:
    """Whether values of a type are complex numbers."""
    return getattr(getattr(aval, "dtype", None), "kind", "") == "c"


def is_inexact(aval: Any) -> bool:
    """Whether values of a type can be differentiated: real or complex floating point."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def is_key(aval: Any) -> bool:
    """Whether values of a type are PRNG keys."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key))


def zero_keys(aval: Any) -> Any:
    """An array of PRNG keys of a type, made of zeros."""
    impl = aval.dtype._impl
    data = jax.numpy.zeros((*aval.shape, *impl.key_shape), jax.numpy.uint32)
    return jax.random.wrap_key_data(data, impl=impl)


def local_shape(aval: Any) -> tuple[int, ...]:
    """The shape that one device holds of a value."""
    return tuple(map(int, of_one_device(aval).shape)) if hasattr(aval, "shape") else ()


def memory_space(aval: Any) -> str:
    """The memory that values of a type live in; empty for the device's own."""
    space = str(getattr(aval, "memory_space", "") or "").rsplit(".", 1)[-1].lower()
    return "" if space in ("", "device", "any") else space


def nbytes(aval: Any) -> int:
    """Bytes that one device holds of a value (packed: 4-bit types count half), from its type.

    A type without a sharding is held whole. PRNG keys count the bytes of their seed arrays, as ``key.size * itemsize``
    does in JAX.
    """
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    shape = shape if mesh is None or mesh.empty else of_one_device(aval).shape
    return int(math.prod(shape) * dtype.itemsize)


_LANES, _SUBLANES, _SMALLEST = 128, 8, 512


def tiled_nbytes(aval: Any, lanes: Collection[int] = ()) -> int:
    """Bytes that a TPU holds of a value: in tiles of 8 by 128 elements, of the two dimensions that pad least.

    That is how XLA for a v5e lays values out, of 4, 2 and 1 bytes alike (``T(8,128)``, ``T(8,128)(2,1)``,
    ``T(8,128)(4,1)``), with smaller tiles for fewer than 8 rows; it chooses which dimensions are the last two, those of
    arguments too. ``tests/test_estimate.py`` has sizes from its buffer assignments.

    Args:
        aval: the value's type.
        lanes: the dimensions of which one has to be the last; any by default.
    """
    plain = nbytes(aval)
    if not plain:
        return 0
    shape = local_shape(aval)
    padded = [-(-size // _LANES) * _LANES / size for size in shape]
    if len(shape) < 2:
        most = padded[0] if padded else 1.0
    else:
        rows = [
            (-(-size // _SUBLANES) * _SUBLANES if size >= _SUBLANES else 1 << (size - 1).bit_length()) / size
            for size in shape
        ]
        pairs = itertools.product(lanes or range(len(shape)), range(len(shape)))
        most = min(padded[lane] * rows[row] for lane, row in pairs if lane != row)
    return -(-round(plain * most) // _SMALLEST) * _SMALLEST


def as_bfloat16(aval: Any) -> Any:
    """The type of a float32 value once a TPU's matrix units take it, in bfloat16; None for values of other types."""
    return aval.update(dtype=jax.numpy.bfloat16) if getattr(aval, "dtype", None) == jax.numpy.float32 else None


def type_text(aval: Any) -> str:
    """A type in JAX's short form, ``f32[5,4]``."""
    shape = getattr(aval, "shape", ())
    return f"{short_dtype(aval)}[{','.join(map(str, shape))}]"
