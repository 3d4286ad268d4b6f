"""What one run of each primitive costs: tables from its name to a formula of its equation.

FLOPs count arithmetic on elements, of any type: a comparison or an integer addition is one as much as a float
multiplication, and so is a transcendental function, whose real price depends on the device. Moving or converting data
is none. The formulas are of the operation, not of one lowering of it.

Bytes are those of the operands read and of the results written by the equation alone, as if nothing were fused. Views,
which XLA makes without moving anything, cost none; an indexed read or update only what it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.facts.cost_contractions import CONTRACTIONS
from remat_magic.facts.cost_linalg import FACTORISATIONS
from remat_magic.jaxprs.bodies import nbytes

__all__ = ["BYTES", "ELEMENTWISE", "FLOPS", "VIEWS", "moved_bytes", "names"]

Flops = Callable[[Any], int | None]


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# ------------------------------------------------------------------------------------------------- one FLOP per element

ELEMENTWISE = names(
    """
    abs add add_any and ceil clz conj div eq eq_to floor ge gt is_finite le le_to lt lt_to max min mul mulhi ne neg
    nextafter not or population_count reciprocal rem round shift_left shift_right_arithmetic shift_right_logical
    sign square sub xor acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 lgamma log log1p log2 logistic polygamma pow rsqrt sin sinh sqrt tan tanh zeta
    """
)
"""One FLOP for each element of the result, transcendental and special functions of a fixed number of terms included."""


def _one_each(eqn: Any) -> int:
    return _size(eqn.outvars[0])


def _integer_pow(eqn: Any) -> int:
    """Multiplications of repeated squaring, and a division for a negative power."""
    power = abs(eqn.params["y"])
    steps = power.bit_length() + power.bit_count() - 2 if power else 0
    return _size(eqn.outvars[0]) * (steps + (eqn.params["y"] < 0))


# -------------------------------------------------------------------------------------------- reductions and selections


def _reduction(eqn: Any) -> int:
    """N - 1 operations to bring n elements down to one, none where there are none."""
    return max(_size(eqn.invars[0]) - _size(eqn.outvars[0]), 0)


def _cumulative(eqn: Any) -> int:
    """N - 1 operations along the axis; the work of a serial scan, of which parallel ones do up to twice as much."""
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["axis"]]
    return _size(eqn.invars[0]) // max(length, 1) * max(length - 1, 0)


def _window(eqn: Any) -> int:
    """W - 1 operations for each window of w elements, padding included, as XLA counts."""
    return _size(eqn.outvars[0]) * max(math.prod(eqn.params["window_dimensions"]) - 1, 0)


def _scatter_selected(eqn: Any) -> int:
    """For each window w - 1 comparisons and one addition."""
    return _size(eqn.invars[0]) * math.prod(eqn.params["window_dimensions"])


def _sort(eqn: Any) -> int:
    """N log2 n comparisons along the dimension (Knuth, TAOCP 3, 5.3.1: the bound within lower-order terms), per key."""
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["dimension"]]
    return round(math.prod(aval.shape) * math.log2(length)) * eqn.params["num_keys"] if length > 1 else 0


def _top_k(eqn: Any) -> int:
    """N log2 k comparisons, a heap of k kept while n elements pass (at least one for each)."""
    return round(_size(eqn.invars[0]) * max(math.log2(max(eqn.params["k"], 1)), 1))


# ------------------------------------------------------------------------------------------------------- random numbers
# Integer operations of the published ciphers as JAX writes them out (Salmon et al., "Parallel random numbers: as easy
# as 1, 2, 3", 2011): additions, xors, and rotations of three operations.

_THREEFRY2X32 = 20 * 5 + 2 + 2 + 5 * 3  # rounds, first key addition, key schedule, key injections
_THREEFRY4X32 = 20 * 10 + 4 + 4 + 5 * 5
_PHILOX2X32 = 10 * 4 + 9
_PHILOX4X32 = 10 * 8 + 9 * 2


def _blocks(operations: int) -> Flops:
    return lambda eqn: operations * _size(eqn.outvars[0])


def _is_threefry(atom: Any) -> bool:
    return str(atom.aval.dtype) == "key<fry>"


def _random_bits(eqn: Any) -> int | None:
    """One threefry block per element and its halves xored; other generators' lowering is the backend's."""
    if not _is_threefry(eqn.invars[0]):
        return None
    elements = _size(eqn.outvars[0])
    settings: Any = jax.config  # its attributes are made at run time
    if settings.jax_threefry_partitionable:
        return elements * (_THREEFRY2X32 + 1)
    words = math.ceil(eqn.params["bit_width"] * elements / 32)
    return math.ceil(words / 2) * _THREEFRY2X32


def _derive_keys(eqn: Any) -> int | None:
    """One threefry block for each new key; unknown for other generators."""
    return _size(eqn.outvars[0]) * _THREEFRY2X32 if _is_threefry(eqn.outvars[0]) else None


def _seed(eqn: Any) -> int | None:
    """A threefry key is the seed's two halves."""
    return 2 * _size(eqn.outvars[0]) if _is_threefry(eqn.outvars[0]) else None


# ------------------------------------------------------------------------------------------------------- data movement

VIEWS = names(
    """
    name optimization_barrier reduce_precision stop_gradient PrimalLeftTangentRight dce_sink stage tie
    add_dependency reshape squeeze bitcast_convert_type random_wrap random_unwrap random_clone to_edtype from_edtype
    pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p preduced
    sharding_constraint layout_constraint with_memory_space_constraint xla_metadata_value shard_alike pin unpin
    """
)
"""Their results are their operands, seen otherwise. The reduce_precision that marks residuals keeps their precision."""

_MOVES = names(
    """
    broadcast_in_dim broadcast_to concatenate convert_element_type copy device_put iota iota_2x32_shape pad rev
    select_n split stack tile transpose unstack complex real imag zeros_like empty empty2 pack_dtype unpack_dtype
    lu_pivots_to_permutation relayout reshard gather slice dynamic_slice dynamic_update_slice get swap new_ref
    empty_ref free_ref freeze get_global axis_index platform_index create_token after_all all_gather
    all_gather_invariant all_gather_reduced all_to_all pbroadcast pbroadcast_dynamic ppermute ragged_all_to_all
    all_gather_start all_gather_reduced_start all_gather_done all_to_all_start all_to_all_done ppermute_start
    ppermute_done pbroadcast_start pbroadcast_done psum_done reduce_scatter_done psend precv debug_callback
    debug_print inspect_sharding dimension_size dim_as_value multiple_of shape_assertion check
    """
)
"""Only data moves; what crosses between devices is not told from what stays."""

_REDUCING_COLLECTIVES = names(
    """
    psum psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_pmax unreduced_pmin
    unreduced_reduce_scatter psum_start psum_invariant_start reduce_scatter_start unreduced_psum_start
    unreduced_reduce_scatter_start
    """
)
"""One operation for each operand element of each device, which a ring all-reduce of many devices comes close to."""


def _all_operands(eqn: Any) -> int:
    return sum(_size(atom) for atom in eqn.invars)


def _accumulated(eqn: Any) -> int:
    return _size(eqn.invars[1])


FLOPS: dict[str, Flops] = {
    **dict.fromkeys(ELEMENTWISE, _one_each),
    **dict.fromkeys(VIEWS | _MOVES, lambda _eqn: 0),
    **dict.fromkeys(_REDUCING_COLLECTIVES, _all_operands),
    **CONTRACTIONS,
    **FACTORISATIONS,
    "clamp": lambda eqn: 2 * _one_each(eqn),
    "one_minus_square": lambda eqn: 2 * _one_each(eqn),
    "integer_pow": _integer_pow,
    "polynomial": lambda eqn: 2 * (len(eqn.invars) - 2) * _one_each(eqn),  # Horner's rule
    **dict.fromkeys(
        ["reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor"], _reduction
    ),
    **dict.fromkeys(["argmax", "argmin"], _reduction),
    **dict.fromkeys(["cummax", "cummin", "cumprod", "cumsum"], _cumulative),
    "cumlogsumexp": lambda eqn: 5 * _cumulative(eqn),  # maximum, difference, exp, log1p, sum
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add"], _window),
    "select_and_scatter_add": _scatter_selected,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": lambda eqn: _size(eqn.invars[0]),  # one pass: Chern et al., "TPU-KNN", 2022
    "addupdate": _accumulated,
    "accum_grad_in_ref": _accumulated,
    "threefry2x32": _blocks(_THREEFRY2X32),
    "threefry4x32": _blocks(_THREEFRY4X32),
    "philox2x32": _blocks(_PHILOX2X32),
    "philox4x32": _blocks(_PHILOX4X32),
    "random_bits": _random_bits,
    "random_split": _derive_keys,
    "random_fold_in": _derive_keys,
    "random_seed": _seed,
}
"""FLOPs of one run of an equation, by primitive; a formula says None where neither shapes nor parameters tell."""


# --------------------------------------------------------------------------------------------------------------- bytes


def _bytes(atom: Any) -> int:
    return nbytes(atom.aval)


def moved_bytes(eqn: Any) -> int:
    """Bytes of every operand and result."""
    return sum(map(_bytes, eqn.invars)) + sum(map(_bytes, eqn.outvars))


def _sliced(eqn: Any) -> int:
    """What is read is as much as what is written, and the indices."""
    return 2 * sum(map(_bytes, eqn.outvars)) + sum(map(_bytes, eqn.invars[1:]))


def _updated(eqn: Any) -> int:
    """The update in place: read, and written with its indices."""
    return 2 * _bytes(eqn.invars[1]) + sum(map(_bytes, eqn.invars[2:]))


def _scattered(eqn: Any) -> int:
    """Indices and updates read, and the elements they meet read and written."""
    return _bytes(eqn.invars[1]) + 3 * _bytes(eqn.invars[2])


def _transferred(eqn: Any) -> int:
    """Nothing, unless the value goes to another memory."""
    here = [_jax.memory_space(atom.aval) for atom in eqn.invars]
    there = [_jax.memory_space(atom.aval) for atom in eqn.outvars]
    return 0 if here == there else moved_bytes(eqn)


BYTES: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(VIEWS, lambda _eqn: 0),
    **dict.fromkeys(["slice", "dynamic_slice", "gather"], _sliced),
    "dynamic_update_slice": _updated,
    **dict.fromkeys(["scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"], _scattered),
    "device_put": _transferred,
    "get": lambda eqn: 2 * _bytes(eqn.outvars[0]),
    **dict.fromkeys(["swap", "addupdate", "accum_grad_in_ref"], lambda eqn: 2 * _bytes(eqn.invars[1])),
}
"""Bytes of one run of an equation, by primitive; ``moved_bytes`` of the others."""
