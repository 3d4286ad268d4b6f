"""Whether what a program makes of a batch is what it makes of equal parts of it, put together: proven, not tried.

Two traces of the program are walked together, one of the batch and one of a part. A dimension that differs between them
is the batch's. Each value is followed as a ``Share``: what it has to do with the values of the parts. None is what no
example changes: it is the same in each part. What cannot be followed is refused. Derivatives follow, since equal
functions have equal ones: but for rules of one's own, of which those of a ``custom_jvp`` are walked as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from remat_magic._jax.jaxprs import Body, bodies, is_checkpoint, is_literal, open_jaxpr
from remat_magic._jax.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    FEW_TERMS,
    REDUCTIONS,
    has_backward_rule,
    high_params,
    is_call,
    is_cond,
    is_jit,
    is_scan,
    names,
    primitive_name,
    scan_split,
)
from remat_magic._jax.transforms import has_other_bits

Kind = Literal["axis", "sum", "size", "zero", "number", "false", "row", "unread"]


class Share(NamedTuple):
    """What a value of the whole batch is to those of its parts.

    ``axis``: ``weight`` times the parts' one after another along ``axis``. ``sum``: ``weight`` times their sum.
    ``size``: a number that is ``weight`` times that of a part, as the batch's size is. ``zero``: no example changes it,
    and it is 0. ``number``: the number of each example along ``axis``; then ``false`` is whether that is below 0,
    ``unread`` what would be taken for it then, and ``row`` indices with it as their component ``weight``.
    """

    kind: Kind
    axis: int = 0
    weight: float = 1.0


class Refused(Exception):  # noqa: N818 - no fault of anybody's
    """Why a program is not followed, as the end of a sentence, and the equation that it is about in those around it."""

    def __init__(self, why: str, *eqns: Any) -> None:
        super().__init__(why)
        self.eqns = [*eqns]


Shares = Sequence[Share | None]
_DIFFERS = "the program is another one for a part of the batch"
_SIZE = "it computes with the batch's size"
_OVER = "it goes across the examples"
_PAIRS = "it pairs the examples with one another"
_PICKS = "it picks examples"
_NUMBERS = "it computes with the numbers of the examples"
_NO_SUM = "what is made of a sum over the batch is not what the parts add up to"
_LINEAR = names("neg conj copy real imag stop_gradient name reduce_precision convert_element_type")
_ELEMENTWISE = ELEMENTWISE | FEW_TERMS | _LINEAR | names("complex clamp random_fold_in bitcast_convert_type")
_KEYS = names("random_wrap random_unwrap random_bits random_split random_seed random_clone")
_RESHAPES = names("broadcast_in_dim reshape squeeze transpose")
_LINEAR_MOVES = _RESHAPES | names("reduce_sum slice dynamic_slice split rev cumsum concatenate pad gather")
_MAY_DIFFER = {  # the parameters that have the batch's size
    **dict.fromkeys(["broadcast_in_dim", "iota", "empty"], names("shape")),
    "reshape": names("new_sizes"),
    "slice": names("limit_indices"),
    **dict.fromkeys(["dynamic_slice", "gather"], names("slice_sizes")),
}


def followed(whole: Any, part: Any, shares: Shares, parts: int) -> list[Share | None]:
    """What the outputs of a closed jaxpr are to those of the same program for a part of the batch, else ``Refused``.

    ``whole`` is the jaxpr for the batch, ``part`` that for one of its equal ``parts``; ``shares`` are of the constants
    and then of the inputs.
    """
    return _Proof(parts).run(open_jaxpr(whole), open_jaxpr(part), shares)


def differing(one: Any, other: Any) -> int | None:
    """The dimension that differs between two types, None where they are equal; ``Refused`` where more differs."""
    if one.shape == other.shape and one.dtype == other.dtype:
        return None
    different = [n for n, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if len({*sizes}) > 1]
    if len(one.shape) != len(other.shape) or one.dtype != other.dtype:
        raise Refused(_DIFFERS)
    if len(different) > 1:
        raise Refused(_PAIRS)
    return different[0]


def same_value(one: Any, other: Any) -> bool:
    """Whether two constants are equal to the bit."""
    if one is other:
        return True
    try:
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    except Exception:  # noqa: BLE001 - what is no array, or a tracer
        return False


class _Proof:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._in_rule = False  # which is not differentiated itself: the functions that it calls are for their values
        self._known: dict[Any, tuple[Any, list[Share | None]]] = {}  # of jaxprs that are called again

    def run(self, whole: Any, part: Any, shares: Shares, consts: tuple[Sequence[Any], Sequence[Any]] = ((), ())) -> Any:
        """The shares of the outputs of open jaxprs, by those of their constants, if not given, and inputs."""
        key = id(whole), id(part), tuple(shares), self._in_rule
        if key not in self._known:
            self._known[key] = (whole, part), self._run(whole, part, shares, consts)
        return self._known[key][1]

    def _run(self, whole: Any, part: Any, shares: Shares, consts: tuple[Sequence[Any], Sequence[Any]]) -> Any:
        if len(whole.eqns) != len(part.eqns) or len(whole.outvars) != len(part.outvars):
            raise Refused(_DIFFERS, *whole.eqns[:1])
        if any(not same_value(*pair) for pair in zip(*consts, strict=True)):
            raise Refused("it reads a constant that is another one for a part of the batch")
        given = [*whole.constvars, *whole.invars]
        known: dict[Any, Share | None] = dict(zip(given[len(given) - len(shares) :], shares, strict=True))

        def read(atom: Any, other: Any) -> Share | None:
            if not is_literal(atom):
                return known.get(atom)
            if same_value(atom.val, other.val):
                return Share("zero") if not np.any(np.asarray(atom.val)) else None
            value, of_part = float(atom.val), float(other.val)
            if not of_part or not value or not math.isfinite(value / of_part):
                raise Refused(_SIZE)
            return Share("size", 0, value / of_part)

        for eqn, other in zip(whole.eqns, part.eqns, strict=True):
            try:
                if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
                    raise Refused(_DIFFERS)
                ins = [read(*pair) for pair in zip(eqn.invars, other.invars, strict=True)]
                outs = self._equation(eqn, other, ins)
                for var, pair, share in zip(eqn.outvars, _results(eqn, other), outs, strict=True):
                    known[var] = self._checked(*pair, share)
            except Refused as refused:
                refused.eqns.append(eqn)
                raise
        return [read(*pair) for pair in zip(whole.outvars, part.outvars, strict=True)]

    def _checked(self, aval: Any, of_part: Any, share: Share | None) -> Share | None:
        """A share, if the types tell of no other one."""
        axis = differing(aval, of_part)
        lies = share is not None and share.kind not in ("sum", "size", "zero")
        if lies != (axis is not None) or (share is not None and lies and share.axis != axis):
            raise Refused(_OVER)
        if axis is not None and aval.shape[axis] != self._parts * of_part.shape[axis]:
            raise Refused(_DIFFERS)
        return share

    # ---------------------------------------------------------------------------------------------------- calls, loops

    def _equation(self, eqn: Any, other: Any, ins: list[Share | None]) -> Shares:
        if has_backward_rule(eqn):
            raise Refused("it has a derivative rule of its own (jax.custom_vjp), which may do anything")
        inside = [*zip(bodies(eqn), bodies(other), strict=True)]
        custom = eqn.primitive.name == "custom_jvp_call"
        if is_scan(eqn):
            return self._scan(eqn, other, ins, *inside[0])
        if is_cond(eqn):
            if ins[0] is not None and ins[0].kind != "zero":
                raise Refused("which branch it takes depends on the batch")
            results = [self._body(*pair, ins) for pair in inside]
            return [self._joined(shares) for shares in zip(*results, strict=True)]
        if is_call(eqn) or is_jit(eqn) or is_checkpoint(eqn) or custom:
            outs = self._body(*inside[0], ins)
            if custom and not self._in_rule:
                self._in_rule = True
                self._rule(eqn, other, ins, outs)
                self._in_rule = False
            return outs
        if inside:
            if any(ins) or len(inside) != len(bodies(other)):
                raise Refused(f"{primitive_name(eqn)} is not followed")
            for pair in inside:  # of what no example changes: but for rules of one's own, of which none may be there
                self._body(*pair, ins)
            return [None] * len(eqn.outvars)
        if eqn.effects:
            raise Refused("it does more than to compute, such as to print or to draw random numbers from a state")
        return self._operation(eqn, other, ins)

    def _body(self, body: Body, of_part: Body, ins: list[Share | None]) -> Shares:
        shares = [None if n is None else ins[n] for n in body.operands]
        outs = self.run(body.jaxpr, of_part.jaxpr, shares, (body.consts, of_part.consts))
        return [None if n is None else outs[n] for n in body.results]

    def _rule(self, eqn: Any, other: Any, ins: Shares, outs: Shares) -> None:
        """Make sure that the rule of a ``custom_jvp`` gives tangents that are to the parts' what the values are."""
        count = eqn.params["num_consts"]
        given = ins[count:]
        zeros = [not jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in eqn.invars[count:]]
        if eqn.params["symbolic_zeros"]:
            raise Refused("its derivative rule is asked with symbolic zeros, of which it may make anything")
        try:
            (whole, consts, no_tangent), (part, of_part, _) = (
                it.params["jvp_jaxpr_fun"].call_wrapped(*zeros) for it in (eqn, other)
            )
        except Exception as error:
            raise Refused(f"its derivative rule raises {type(error).__name__}") from error
        tangents = [share for share, zero in zip(given, zeros, strict=True) if not zero]
        results = self.run(open_jaxpr(whole), open_jaxpr(part), [*given, *tangents], (consts, of_part))
        wanted = [share for share, none in zip(outs, no_tangent, strict=True) if not none]
        if [*map(_plain, results)] != [*map(_plain, [*outs, *wanted])]:
            raise Refused("its derivative rule mixes the examples")

    def _scan(self, eqn: Any, other: Any, ins: list[Share | None], body: Body, of_part: Body) -> Shares:
        if eqn.params["length"] != other.params["length"] or eqn.params["reverse"] != other.params["reverse"]:
            raise Refused("it is a loop over the examples")
        consts, carries, _ = scan_split(eqn)

        def moved(share: Share | None, by: int) -> Share | None:
            return (
                share if share is None else share._replace(axis=share.axis + by * (share.kind not in ("sum", "size")))
            )

        given, carried = ins[: consts + carries], ins[consts : consts + carries]
        stacked = [moved(_plain(share), -1) for share in ins[consts + carries :]]
        if any(share is not None and share.axis < 0 for share in stacked):
            raise Refused("it is a loop over the examples")
        while True:
            outs = self._body(body, of_part, [*given[:consts], *carried, *stacked])
            after = [self._joined(pair) for pair in zip(carried, outs[:carries], strict=True)]
            if after == carried:
                return [*carried, *(moved(_plain(share), 1) for share in outs[carries:])]
            carried = after

    def _joined(self, shares: Shares) -> Share | None:
        """What can be any of some values, as the results of branches and what a loop carries."""
        others = {*shares} - {Share("zero")}
        sums = [share for share in others if share is not None and share.kind == "sum"]
        if len(others) == 1 and (len({*shares}) == 1 or None in others or sums):
            return others.pop()
        if others == {None, *sums} and len(sums) == 1 and self._is_mean(sums[0]):
            return sums[0]
        if others:
            raise Refused("what it gives depends on the batch in one case, and in another does not")
        return Share("zero")

    # ------------------------------------------------------------------------------------------------------ operations

    def _operation(self, eqn: Any, other: Any, ins: list[Share | None]) -> Shares:
        name, count = primitive_name(eqn), len(eqn.outvars)
        out = differing(eqn.outvars[0].aval, other.outvars[0].aval) if count else None
        _check_same_work(eqn, other, name, drawn=out is not None and not any(ins))
        if name == "optimization_barrier":
            return ins
        kinds = {share and share.kind for share in ins}
        if name in ("add", "add_any", "sub") and kinds == {"zero", "sum"}:
            return [share for share in ins if share is not None and share.kind == "sum"]
        if name in ("convert_element_type", "copy") and kinds == {"zero"}:
            return ins
        ins = [_plain(share) for share in ins]
        live = [share for share in ins if share is not None]
        return [self._made(eqn, name, ins, live, out)] * count

    def _made(self, eqn: Any, name: str, ins: Shares, live: list[Share], out: int | None) -> Share | None:
        kinds = {share.kind for share in live}
        if not live:
            return _of_none(eqn, name, out)
        if kinds & {"number", "false", "row", "unread"}:
            return _numbered(eqn, name, ins, out)
        if "size" in kinds:
            return _sized(eqn, name, ins)
        if kinds == {"sum", "axis"}:
            raise Refused("an example meets a sum over the batch")
        if kinds == {"sum"}:
            return self._summed(eqn, name, ins, live)
        if has_other_bits(eqn):
            raise Refused("keys of kind rbg give other bits for other numbers of examples")
        if name in _ELEMENTWISE:
            return _elementwise(eqn, name, ins, live)
        rule = _RULES.get(name)
        if rule is None:
            raise Refused(f"{name} is not followed")
        if live[0].weight != 1.0 and name not in _LINEAR_MOVES | {"dot_general", "conv_general_dilated"}:
            raise Refused(_NO_SUM)
        return rule(eqn, ins, out)

    def _is_mean(self, share: Share) -> bool:
        """Whether a sum over the parts is their mean: then what no example changes is one such, too."""
        return math.isclose(share.weight * self._parts, 1.0, rel_tol=1e-6)

    def _summed(self, eqn: Any, name: str, ins: Shares, live: list[Share]) -> Share:
        """What is made of sums over the batch: what is linear in them."""
        share, alone = live[0], len(live) == 1
        to, of = eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype
        inexact = jnp.issubdtype(to, jnp.inexact)
        if name == "convert_element_type":
            linear = inexact or all(jnp.issubdtype(dtype, jnp.integer) for dtype in (to, of))
        elif name in ("add", "add_any", "sub", "select_n", "concatenate", "pad"):
            summed = ins[1:] if name == "select_n" else ins
            linear = (None not in summed or self._is_mean(share)) and (name != "select_n" or ins[0] is None)
        elif name in ("mul", "dot_general", "conv_general_dilated"):
            linear = alone
        elif name in ("div", "gather"):
            linear = alone and ins[0] is not None and inexact
        else:
            linear = alone and ins[0] is not None and name in _LINEAR | _LINEAR_MOVES
        if not linear or len({*live}) > 1:
            raise Refused(_NO_SUM)
        return share


def _check_same_work(eqn: Any, other: Any, name: str, *, drawn: bool) -> None:
    """Make sure that an equation does the same for a part; ``drawn``: makes values for each example of none of it."""
    if drawn and any(word in name for word in ("random", "threefry", "rng")):
        raise Refused("each part would draw other random numbers")
    params, of_part = high_params(eqn), high_params(other)
    for key in {*params, *of_part} - _MAY_DIFFER.get(name, frozenset()):
        if not _equal(params.get(key), of_part.get(key)):
            raise Refused(_DIFFERS)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 - parameters that hold arrays do not compare
        return False


def _results(eqn: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    return ((var.aval, of_part.aval) for var, of_part in zip(eqn.outvars, other.outvars, strict=True))


def _plain(share: Share | None) -> Share | None:
    return None if share is not None and share.kind == "zero" else share


def _first(shares: Shares) -> Share:
    return next(share for share in shares if share is not None)


def _of_none(eqn: Any, name: str, out: int | None) -> Share | None:
    """What is made of values that no example changes."""
    if out is None:
        return None
    if name == "iota" and eqn.params["dimension"] == out:
        return Share("number", out)
    if name in ("iota", "broadcast_in_dim", "empty"):
        return Share("axis", out)
    raise Refused("it makes values of the batch's size")


def _numbered(eqn: Any, name: str, ins: Shares, out: int | None) -> Share:
    """What is made of the numbers of the examples: indices, by which each example is looked up in its own row."""
    first, second, axis = ins[0], [*ins, None][1], 0 if out is None else out
    if name == "select_n" and first is not None and first.kind == "false" and second is not None:
        return second
    if first is None or any(share is not None and share.kind in ("false", "unread") for share in ins):
        raise Refused(_NUMBERS)
    number = first.kind == "number"
    if name == "lt" and number and is_literal(eqn.invars[1]) and not eqn.invars[1].val:
        return Share("false", axis)
    if name == "add" and number and (second is None or second.kind == "size"):
        return Share("unread", axis)
    of, to = eqn.invars[0].aval, eqn.outvars[0].aval
    if name in ("convert_element_type", "copy") and all(jnp.issubdtype(it.dtype, jnp.integer) for it in (of, to)):
        return first
    if name in _RESHAPES and number and of.shape[first.axis] == to.shape[axis]:
        return _moved(eqn, ins, axis)
    if name == "concatenate" and eqn.params["dimension"] == len(to.shape) - 1 != axis:
        numbers = [n for n, share in enumerate(ins) if share is not None and share.kind == "number"]
        others = [share for n, share in enumerate(ins) if n not in numbers]
        sizes = [atom.aval.shape[-1] for atom in eqn.invars]
        if len(numbers) == 1 and sizes[numbers[0]] == 1 and all(share == Share("axis", axis) for share in others):
            return Share("row", axis, sum(sizes[: numbers[0]]))
    if name == "gather" and first.kind == "axis" and second is not None:
        dims, component = eqn.params["dimension_numbers"], int(second.weight) if second.kind == "row" else 0
        if (
            second.kind in ("row", "number")
            and second.axis < len(eqn.invars[1].aval.shape) - 1
            and dims.start_index_map[component] == first.axis
            and first.axis in dims.collapsed_slice_dims
            and of.shape[first.axis] == eqn.invars[1].aval.shape[second.axis]
            and _batch_dims(eqn)[second.axis] == axis
        ):
            return Share("axis", axis, first.weight)
    raise Refused(_NUMBERS)


def _sized(eqn: Any, name: str, ins: Shares) -> Share:
    """What is made of numbers that grow with the batch: they are factors."""
    shares = [share for share in ins if share is not None]
    inexact, last = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact), ins[-1]
    if name == "convert_element_type" and inexact:
        return shares[0]
    if name not in ("mul", "div") or not inexact or (name == "div" and (last is None or last.kind != "size")):
        raise Refused(_SIZE)
    weight = math.prod(share.weight for share in shares)
    if name == "div":
        weight /= shares[-1].weight ** 2
    return next((share for share in shares if share.kind != "size"), shares[0])._replace(weight=weight)


def _elementwise(eqn: Any, name: str, ins: Shares, live: list[Share]) -> Share:
    axis, weights = live[0].axis, {share.weight for share in live}
    if any(share.axis != axis for share in live):
        raise Refused(_PAIRS)
    if weights == {1.0}:
        return live[0]
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        if name == "mul":
            return Share("axis", axis, math.prod(share.weight for share in live))
        if name == "div":
            over, under = (1.0 if share is None else share.weight for share in ins)
            return Share("axis", axis, over / under)
        alike = len(weights) == 1 and None not in ins
        if name in _LINEAR or (alike and name in ("add", "add_any", "sub")):
            return live[0]
    raise Refused(_NO_SUM)


# ----------------------------------------------------------------- what is made of examples along an axis, by primitive


def _moved(eqn: Any, ins: Shares, out: int | None) -> Share:
    share, shape, after = _first(ins), eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        return share._replace(axis=params["broadcast_dimensions"][share.axis])
    if name == "transpose":
        return share._replace(axis=tuple(params["permutation"]).index(share.axis))
    # That of the batch has to stay the slowest of those that are put together.
    same = out is not None and math.prod(shape[: share.axis]) == math.prod(after[:out])
    if out is None or not same or params.get("dimensions" if name == "reshape" else "") is not None:
        raise Refused("it mixes the examples with another axis")
    return share._replace(axis=out)


def _reduced(eqn: Any, ins: Shares, _out: int | None) -> Share:
    axes, share = eqn.params["axes"], _first(ins)
    if share.axis not in axes:
        return share._replace(axis=share.axis - sum(axis < share.axis for axis in axes))
    if eqn.primitive.name != "reduce_sum":
        raise Refused(_OVER)
    return Share("sum", 0, share.weight)


def _product(eqn: Any, ins: Shares, out: int | None) -> Share:
    weight = math.prod(share.weight for share in ins if share is not None)
    for dims in zip(*eqn.params["dimension_numbers"][0], strict=True):
        summed = [share is not None and share.axis == axis for share, axis in zip(ins, dims, strict=True)]
        if all(summed):
            return Share("sum", 0, weight)
        if any(summed):
            raise Refused(_OVER)
    if out is None:
        raise Refused(_OVER)
    return Share("axis", out, weight)


def _convolution(eqn: Any, ins: Shares, out: int | None) -> Share:
    dims, share = eqn.params["dimension_numbers"], ins[0]
    own = share is not None and ins[1] is None and share.axis == dims.lhs_spec[0]
    if share is None or not own or eqn.params["batch_group_count"] != 1 or out != dims.out_spec[0]:
        raise Refused(_OVER)
    return share._replace(axis=out)


def _gathered(eqn: Any, ins: Shares, out: int | None) -> Share:
    dims, (operand, indices) = eqn.params["dimension_numbers"], ins
    last = len(eqn.invars[1].aval.shape) - 1
    if out is None or (indices is not None and (indices.weight != 1.0 or indices.axis == last)):
        raise Refused(_OVER)
    weight = 1.0 if operand is None else operand.weight
    if indices is None and operand is not None:  # the same part of each
        shape = eqn.invars[0].aval.shape
        left_out = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
        kept = [n for n in range(len(shape)) if n not in left_out]
        whole = eqn.params["slice_sizes"][operand.axis] == shape[operand.axis]
        if not whole or operand.axis in dims.start_index_map or operand.axis not in kept:
            raise Refused(_PICKS)
        found = dims.offset_dims[kept.index(operand.axis)]
    else:  # rows of what no example changes, or of each example its own
        pairs = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
        if indices is None or (operand is not None and pairs.get(operand.axis) != indices.axis):
            raise Refused(_PICKS)
        found = _batch_dims(eqn)[indices.axis]
    if found != out:
        raise Refused(_OVER)
    return Share("axis", out, weight)


def _batch_dims(eqn: Any) -> list[int]:
    """For each dimension of a gather's indices, but the last, that of the result which it is."""
    return [n for n in range(eqn.outvars[0].aval.ndim) if n not in eqn.params["dimension_numbers"].offset_dims]


def _kept(_eqn: Any, ins: Shares, _out: int | None) -> Share:
    """Of random keys: each example has its own."""
    return _first(ins)


def _along(eqn: Any, ins: Shares, _out: int | None) -> Share:
    """Of what goes along an axis, or leaves out parts of it: that may be any but that of the batch."""
    share, params, sizes, name = ins[0], eqn.params, eqn.invars[0].aval.shape, eqn.primitive.name
    every = name in ("sort", "concatenate", "dynamic_update_slice")
    others = ins[1:2] if name == "dynamic_update_slice" else ins[1:] if every else ()
    if share is None or any(it != share for it in others) or any(ins[1 + len(others) :]):
        raise Refused(_OVER)
    axis = share.axis
    match name:
        case "slice":
            across = params["limit_indices"][axis] - params["start_indices"][axis] != sizes[axis]
            across = across or (params["strides"] is not None and params["strides"][axis] != 1)
        case "dynamic_slice":
            across = params["slice_sizes"][axis] != sizes[axis]
        case "dynamic_update_slice":
            across = eqn.invars[1].aval.shape[axis] != sizes[axis]
        case "rev":
            across = axis in params["dimensions"]
        case "pad":
            across = any(params["padding_config"][axis]) or share.weight != 1.0
        case "sort" | "concatenate":
            across = params["dimension"] == axis
        case "tile":
            across = params["reps"][axis] != 1
        case name if name.startswith("reduce_window"):
            ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
            across = any(params[key][axis] != 1 for key in ones) or any(params["padding"][axis])
        case _:
            across = params.get("axis", len(sizes) - 1) == axis
    if across:
        raise Refused(_OVER)
    return share


_ALONG = CUMULATIVE | names(
    """
    slice dynamic_slice dynamic_update_slice split rev sort top_k tile pad concatenate
    reduce_window_sum reduce_window_max reduce_window_min
    """
)
_RULES: dict[str, Callable[[Any, Shares, int | None], Share]] = {
    **dict.fromkeys(_RESHAPES, _moved),
    **dict.fromkeys(REDUCTIONS - {"reduce"}, _reduced),
    **dict.fromkeys(_KEYS, _kept),
    **dict.fromkeys(_ALONG, _along),
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gathered,
}
