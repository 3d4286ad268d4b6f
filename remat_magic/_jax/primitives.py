"""The vocabulary of primitives: what they are called and which parameters they have, on every line of JAX.

The rest of the package asks here what an equation is, so that it needs neither the name of a primitive nor that of a
parameter. Sets of names are for what is looked up by name; what is asked of one equation is a function of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Hashable
from typing import Any


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


ELEMENTWISE = names(
    """
    abs add add_any and ceil clz conj div eq eq_to floor ge gt is_finite le le_to lt lt_to max min mul mulhi ne neg
    nextafter not or population_count reciprocal rem round shift_left shift_right_arithmetic shift_right_logical
    sign square sub xor acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 lgamma log log1p log2 logistic polygamma pow rsqrt sin sinh sqrt tan tanh zeta
    """
)
"""One operation for each element of the result, transcendental and special functions of a fixed number of terms too."""

VIEWS = names(
    """
    name optimization_barrier reduce_precision stop_gradient PrimalLeftTangentRight dce_sink stage tie
    add_dependency reshape squeeze bitcast_convert_type random_wrap random_unwrap random_clone to_edtype from_edtype
    pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p preduced
    sharding_constraint layout_constraint with_memory_space_constraint xla_metadata_value shard_alike pin unpin
    """
)
"""Their results are their operands, seen otherwise. The reduce_precision that marks residuals keeps their precision."""

MOVES = names(
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

REDUCING_COLLECTIVES = names(
    """
    psum psum_invariant pmax pmin reduce_scatter unreduced_psum unreduced_pmax unreduced_pmin
    unreduced_reduce_scatter psum_start psum_invariant_start reduce_scatter_start unreduced_psum_start
    unreduced_reduce_scatter_start
    """
)
"""One operation for each operand element of each device, which a ring all-reduce of many devices comes close to."""

REDUCTIONS = names("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor argmax argmin reduce")
"""Many elements become one."""

CUMULATIVE = names("cummax cummin cumprod cumsum cumlogsumexp")
"""One result for each element, of all that stand before it."""

FEW_TERMS = names("clamp integer_pow polynomial one_minus_square select_n convert_element_type")
"""Elementwise as well, of more than one FLOP or of none."""

ADDITIONS = names("add add_any")
"""The sum of two, as written and as autodiff puts it where a value is read twice."""

BROADCASTS = names("broadcast_in_dim broadcast_to")
"""Their result is their operand again and again."""

MADE_ANEW = BROADCASTS | {"iota"}
"""What takes no memory of its own: it is written again wherever it is read."""


SLICES = names("slice dynamic_slice")
"""These read no more of an operand than they give."""

TRANSPOSE = "transpose"
"""To XLA for accelerators another layout of its operand, if that is in memory."""

_REARRANGES = SLICES | names("copy transpose rev split concatenate pad")
"""Their results are made of elements of their operands, none of which is changed."""

FUSIBLE = ELEMENTWISE | FEW_TERMS | BROADCASTS | _REARRANGES | names("real imag complex iota")
"""What XLA makes one kernel of with what it reads."""

_PLAIN = FUSIBLE | REDUCTIONS | {"dot_general"}

SCATTERS = names("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
"""An operand in which some elements are replaced by, or combined with, those of another."""

INDEXED = SCATTERS | {"gather"}
"""What takes elements by their indices, or puts them there."""

WRITES_OVER_ANY = ELEMENTWISE | FEW_TERMS | CUMULATIVE
"""These may write their result over any operand that nobody reads afterwards."""

WRITES_OVER_FIRST = SCATTERS | names("dynamic_update_slice")
"""These may write their result over their first operand."""

MATMULS = names("dot_general conv_general_dilated")
"""What XLA neither splits nor runs twice of its own accord, and what saving is mostly about."""

TRANSPARENT = names("reduce_precision optimization_barrier name device_put PrimalLeftTangentRight")
"""These compute nothing: the value that comes out is the value that went in."""


# ---------------------------------------------------------------------------------------------- what an equation is


def high(eqn: Any) -> Any:
    """The high-level primitive that an equation applies, held in the params of one call primitive (0.12); else None."""
    return eqn.params.get("_prim") if eqn.primitive.name == HIGH_LEVEL else None


HIGH_LEVEL = "call_hi_primitive"
_OTHERWISE_CALLED = {"RematTraced": "checkpoint", "CheckpointName": "name", "CheckpointNameFwd": "name"}


def primitive_name(eqn: Any) -> str:
    """The primitive's name, seen through JAX 0.12's one call primitive for all high-level ones."""
    name: str = eqn.primitive.name
    if name != HIGH_LEVEL:
        return name
    name = type(eqn.params.get("_prim")).__name__
    return _OTHERWISE_CALLED.get(name, name)


def kernel_name(eqn: Any) -> str:
    """The name of what XLA runs for an equation: to it ``x[:, None] @ y[None]`` is no matmul, but multiplies."""
    name = primitive_name(eqn)
    if name == "dot_general":
        (left, _), _ = eqn.params["dimension_numbers"]
        if all(eqn.invars[0].aval.shape[axis] == 1 for axis in left):
            return "mul"
    return name


def high_params(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, a high-level primitive's own included."""
    prim = high(eqn)
    return eqn.params if prim is None else dict(getattr(prim, "params", {}))


def _one_of(primitives: Collection[str]) -> Callable[[Any], bool]:
    """Whether an equation is of one of some primitives."""
    return lambda eqn: eqn.primitive.name in primitives


is_scan = _one_of({"scan"})  # also a loop that JAX writes as one
is_while = _one_of({"while"})
is_cond = _one_of({"cond"})  # also a `switch`
is_jit = _one_of({"jit", "pjit"})
is_call = _one_of({"jit", "pjit", "closed_call", "core_call"})  # does nothing but call its one jaxpr
is_shard_map = _one_of({"shard_map"})  # the shapes inside are those of one device
is_matmul = _one_of(MATMULS)  # or a convolution
is_exponential = _one_of({"exp", "exp2"})
is_logarithm = _one_of({"log", "log2", "log1p"})
is_sum = _one_of({"reduce_sum"})
is_barrier = _one_of({"optimization_barrier"})  # each output is the operand of the same number
is_rounding = _one_of({"reduce_precision"})  # JAX puts it on every residual
is_broadcast = _one_of(BROADCASTS)
is_placeholder = _one_of(names("empty empty2"))  # a branch has it for another one's residual, and nobody reads it


def _high_one_of(primitives: Collection[str]) -> Callable[[Any], bool]:
    """The same, seen through the one call primitive for all high-level ones."""
    return lambda eqn: (eqn.primitive.name if eqn.primitive.name != HIGH_LEVEL else primitive_name(eqn)) in primitives


is_transparent = _high_one_of(TRANSPARENT)
is_plain = _high_one_of(_PLAIN)  # reads and writes its operands in order, as a matmul does: not a gather, nor a sort
only_moves = _high_one_of(_REARRANGES | VIEWS | BROADCASTS)
moves_or_adds = _high_one_of(_REARRANGES | VIEWS | BROADCASTS | names("convert_element_type add add_any reduce_sum"))


def is_check(eqn: Any) -> bool:
    """Whether an equation is a callback of equinox's ``error_if``, which raises where a check fails."""
    callback = eqn.params.get("callback") if eqn.primitive.name == "pure_callback" else None
    return getattr(getattr(callback, "callback_func", None), "__module__", "") == "equinox._errors"


def donated(eqn: Any) -> list[Any]:
    """The operands of a jitted call that the caller gives away."""
    flags = eqn.params.get("donated_invars", ()) if is_jit(eqn) else ()
    return [atom for atom, yes in zip(eqn.invars, flags, strict=False) if yes]


def exported_by(eqn: Any) -> Any:
    """What ``jax.export`` made of a function, that an equation calls; else None."""
    return eqn.params.get("exported") if eqn.primitive.name == "call_exported" else None


def is_custom_rule(eqn: Any) -> bool:
    """Whether the derivative of an equation is a rule of the user's, which is Python and out of reach."""
    return eqn.primitive.name.startswith("custom_")


def has_backward_rule(eqn: Any) -> bool:
    """Whether an equation is a call of a ``jax.custom_vjp``."""
    return eqn.primitive.name.startswith("custom_vjp")


def lanes_of_convolution(eqn: Any) -> tuple[tuple[Any, tuple[int, int]], ...]:
    """Of a convolution each operand and result with its dimensions for the batch and the channels; else nothing."""
    if eqn.primitive.name != "conv_general_dilated":
        return ()
    specs = eqn.params["dimension_numbers"]
    values = zip((*eqn.invars, *eqn.outvars), (specs.lhs_spec, specs.rhs_spec, specs.out_spec), strict=True)
    return tuple((atom, (spec[0], spec[1])) for atom, spec in values)


def is_strided(eqn: Any) -> bool:
    """Whether an equation takes every so many elements of its operand, or puts its operand's elements so far apart."""
    if eqn.primitive.name == "slice":
        return any(stride > 1 for stride in eqn.params["strides"] or ())
    return eqn.primitive.name == "pad" and any(between for _, _, between in eqn.params["padding_config"])


def takes_bfloat16(eqn: Any) -> bool:
    """Whether a TPU multiplies in bfloat16 what an equation is given in float32, as it does by default.

    That is what ``jax.lax.Precision.DEFAULT`` says of TPUs.
    """
    precision = eqn.params.get("precision")
    return is_matmul(eqn) and (precision is None or str(precision).count("DEFAULT") == 2)


def is_refused(eqn: Any, error: str) -> bool:
    """Whether an equation is of the kind that JAX cannot differentiate, as its error says: a loop or a callback."""
    kind = "while" if "while_loop" in error else "io_callback" if error.startswith("IO") else "pure_callback"
    return bool(eqn.primitive.name == kind)


def is_one_hot(eqn: Any) -> bool:
    """Whether an equation puts one element into each row of an array, where an index says."""
    if eqn.primitive.name not in ("scatter", "scatter-add"):
        return False
    dims, (operand, _, updates) = eqn.params["dimension_numbers"], (var.aval for var in eqn.invars)
    rows = [operand.shape[dim] for dim in dims.operand_batching_dims]
    indexed = len(dims.scatter_dims_to_operand_dims)
    one_each = not dims.update_window_dims and math.prod(rows) == updates.size
    return bool(rows) and one_each and len(rows) + indexed == operand.ndim


def rows_put(eqn: Any) -> Any:
    """The operand whose rows, one after another, an equation puts where indices say; None for what does not."""
    if eqn.primitive.name not in SCATTERS:
        return None
    updates = eqn.invars[2]
    windows, ndim = eqn.params["dimension_numbers"].update_window_dims, updates.aval.ndim
    return updates if windows and windows == (*range(max(1, ndim - len(windows)), ndim),) else None


def same_params(eqn: Any, other: Any) -> bool:
    """Whether two equations of one primitive have equal parameters."""
    params, other_params = eqn.params, other.params
    if params is other_params or params.keys() != other_params.keys():
        return params is other_params
    try:
        return all(bool(value is other_params[key] or value == other_params[key]) for key, value in params.items())
    except Exception:  # noqa: BLE001 - parameters that hold arrays do not compare; their text does
        return str(params) == str(other_params)


def params_key(eqn: Any) -> Hashable:
    """The parameters of an equation as a key that is equal for equal ones: by their text where they have no hash."""
    try:
        key = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        hash(key)
    except TypeError:
        return str(eqn.params)
    return key


def printing(prim: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a high-level primitive (0.12) that prints each of its parameters changed."""
    shown, params = copy.copy(prim), {key: change(value) for key, value in prim.pp_params().items()}
    vars(shown)["pp_params"] = lambda: params
    return shown


def map_params(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """The equation with each of its parameters changed."""
    return eqn.replace(params={key: change(value) for key, value in eqn.params.items()})


def policy_says(policy: Callable[..., Any], eqn: Any) -> Any:
    """What a policy answers when JAX asks it about an equation."""
    return policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)


# ------------------------------------------------------------------------------------------------------------ loops


def scan_length(eqn: Any) -> int:
    """How many steps a scan has."""
    return int(eqn.params["length"])


def scan_body(eqn: Any) -> Any:
    """The closed jaxpr of one step of a scan."""
    return eqn.params["jaxpr"]


def is_reversed(eqn: Any) -> bool:
    """Whether a scan goes from its last step to its first."""
    return bool(eqn.params["reverse"])


def scan_split(eqn: Any) -> tuple[int, int, int]:
    """``(consts, carries, stacked outputs)`` of a scan equation.

    0.10 writes two numbers; 0.12 writes the tree of its operands, of which the numbers are the sizes.
    """
    params = eqn.params
    if "num_carry" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        consts, carries = (len(list(part)) for part in params["ft_in"].unpack()[:2])
    return consts, carries, len(eqn.outvars) - carries


def replace_scan(eqn: Any, operands: list[Any], outvars: list[Any], length: int, body: Any = None) -> Any:
    """A scan equation with other operands, results and number of steps, and of the same carry and constants.

    ``body`` is the closed jaxpr of one step; by default the same, unrolled as before.
    """
    unroll = 1 if body is not None else min(eqn.params["unroll"], length)
    params = {**eqn.params, "length": length, "unroll": unroll, "jaxpr": eqn.params["jaxpr"] if body is None else body}
    return eqn.replace(invars=operands, outvars=outvars, params=params)


def carried_operands(eqn: Any) -> range:
    """The indices of the operands that a loop carries from one step to the next; empty for what is no loop."""
    if is_scan(eqn):
        consts, carries, _ = scan_split(eqn)
        return range(consts, consts + carries)
    if is_while(eqn):
        return range(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.invars))
    return range(0)
