"""What one run of each primitive costs: tables from its name to a formula of its equation.

FLOPs count arithmetic on elements, of any type: a comparison or an integer addition is one as much as a float
multiplication, and so is a transcendental function, whose real price depends on the device. Moving or converting data
is none. The formulas are of the operation, not of one lowering of it.

Bytes are those of the operands read and of the results written by the equation alone, as if nothing were fused. Views,
which XLA makes without moving anything, cost none; an indexed read or update only what it touches.

What devices tell each other is that of the collectives that a program names itself, in the bodies of ``shard_map``
(``pmap`` is one on every line of JAX). Outside of one XLA alone decides what is told, whatever the mesh: those
collectives are in the compiled program only, of which ``hlo`` tells the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from remat_magic._jax.primitives import (
    CUMULATIVE,
    ELEMENTWISE,
    MOVES,
    REDUCING_COLLECTIVES,
    REDUCTIONS,
    SCATTERS,
    SLICES,
    VIEWS,
    high,
    names,
    primitive_name,
)
from remat_magic._jax.private import JAX_VERSION
from remat_magic._jax.settings import partitionable_threefry
from remat_magic._jax.shardings import is_complex, memory_space, nbytes


def _dot_general(eqn: Any) -> int:
    """``2 b m n k``: each of the b m n outputs sums k products."""
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted)


def product(eqn: Any) -> tuple[int, int]:
    """The FLOPs of a product of matrices, and its rows or columns, whichever are fewer; zeros for what is none."""
    if primitive_name(eqn) != "dot_general":
        return 0, 0
    flops, (left, right) = _dot_general(eqn), (var.aval.size for var in eqn.invars)
    return flops, 2 * eqn.outvars[0].aval.size * min(left, right) // max(flops, 1)


def _ragged_dot_general(eqn: Any) -> int:
    """``2 m k n`` whatever the groups: every row of the ragged operand meets the matrix of its own group alone.

    That is what the grouped-matmul kernels of GPUs and TPUs do. JAX's own fallback (that of the CPU) masks one dense
    product per group and does as many times more.
    """
    left, right = eqn.invars[0].aval, eqn.invars[1].aval
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    bound = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for axis, size in enumerate(right.shape) if axis not in bound)
    return 2 * math.prod(left.shape) * free


def _scaled_matmul(eqn: Any) -> int:
    """``2 b m n k`` of a (b, m, k) by a (b, n, k) matrix; applying the block scales is not counted."""
    left, right = eqn.invars[0].aval, eqn.invars[1].aval
    return 2 * math.prod(left.shape) * right.shape[1]


@functools.lru_cache(maxsize=4096)
def _real_taps(
    out: int, size: int, kernel: int, stride: int, low: int, size_dilation: int, kernel_dilation: int
) -> int:
    """Pairs of an output and a kernel position along one dimension that meet an element, not padding or a hole."""
    positions = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilation - low
    inside = (positions >= 0) & (positions <= (size - 1) * size_dilation)
    return int(np.count_nonzero(inside & (positions % size_dilation == 0)))


def _convolution(eqn: Any) -> int:
    """Two FLOPs for each kernel tap that meets an element of the input.

    That is ``2 outputs * kernel size * input channels / feature groups`` less what falls on padding or on the holes of
    a dilated input, neither of which is worth a multiplication (nor counted by XLA). The kernel's own channels are
    those of one feature group; batch groups divide the outputs, not the taps of one.
    """
    params = eqn.params
    image, kernel, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    numbers = params["dimension_numbers"]
    taps = 1
    for axis, (of_image, of_kernel, of_out) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        taps *= _real_taps(
            out.shape[of_out],
            image.shape[of_image],
            kernel.shape[of_kernel],
            params["window_strides"][axis],
            params["padding"][axis][0],
            params["lhs_dilation"][axis],
            params["rhs_dilation"][axis],
        )
    batch, features = (out.shape[axis] for axis in numbers.out_spec[:2])
    channels = kernel.shape[numbers.rhs_spec[1]]
    return (6 if image.dtype.kind == "c" else 2) * batch * features * channels * taps


def _attention(eqn: Any, products: int) -> int | None:
    """``2 products b n t s h`` for queries (b, t, n, h) and s keys; masks save nothing, the softmax is not counted.

    Forward there are two products (scores and values), backward five, one of them the scores again: Dao,
    "FlashAttention-2" (2023), section 4.1, which puts the backward pass at 2.5 times the forward one. Unknown with
    paged keys, whose number no shape tells.
    """
    query, key = eqn.invars[0].aval, eqn.invars[1].aval
    if any(math.prod(operand.aval.shape) for operand in eqn.invars[8:10] if operand.aval.dtype == np.int32):
        return None
    keys = key.shape[2 if eqn.params["layout"] else 1]
    return 2 * products * math.prod(query.shape) * keys


CONTRACTIONS = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "scaled_dot": _dot_general,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "conv_general_dilated": _convolution,
    **{
        f"dot_product_attention_{kind}{half}{wrapper}": functools.partial(_attention, products=products)
        for kind in ("", "fp8_")
        for half, products in (("fwd", 2), ("bwd", 5))
        for wrapper in ("", "_wrapper")
    },
}
"""FLOPs of one run of an equation, by primitive; None where the shapes do not tell."""


def _per_matrix(count: Callable[[Any, int, int], float]) -> Callable[[Any], int]:
    """A formula of (params, rows, columns) of the first operand, for a whole batch."""

    def flops(eqn: Any) -> int:
        *batch, rows, columns = eqn.invars[0].aval.shape
        return math.prod(batch) * round(count(eqn.params, rows, columns))

    return flops


def _elimination(m: int, n: int, k: int) -> float:
    """The sum over k steps of (m - j)(n - j): the rank-one updates of a factorisation of an m by n matrix."""
    return m * n * k - (m + n) * k * k / 2 + k**3 / 3


def _qr(params: Any, m: int, n: int) -> float:
    """4 FLOPs per element and step, and as many to multiply the reflectors out [GVL 5.2.2, LAWN41 xGEQRF + xORGQR]."""
    k = min(m, n)
    return 4 * _elimination(m, n, k) + 4 * _elimination(m, m if params["full_matrices"] else k, k)


def _svd(params: Any, m: int, n: int) -> float:
    """Golub-Reinsch with m >= n [GVL 8.6.3]: singular values alone, with the thin factors, or with the full ones."""
    m, n = max(m, n), min(m, n)
    if not params["compute_uv"]:
        return 4 * m * n**2 - 4 * n**3 / 3
    if params["full_matrices"] and m > n:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _fft(eqn: Any) -> int:
    """As XLA counts: 8 for each element of the operand, times log2 of each length."""
    operand = eqn.invars[0].aval
    logarithms = (max(length, 1).bit_length() - 1 for length in eqn.params["fft_lengths"])
    return 8 * math.prod(operand.shape) * math.prod(logarithms)


FACTORISATIONS: dict[str, Callable[[Any], int]] = {
    "cholesky": _per_matrix(lambda _params, _m, n: n**3 / 3),  # [GVL 4.2.5, LAWN41 xPOTRF]
    "eigh": _per_matrix(lambda _params, _m, n: 9 * n**3),  # symmetric QR with vectors [GVL 8.3.3]
    "fft": _fft,
    "lu": _per_matrix(lambda _params, m, n: 2 * _elimination(m, n, min(m, n))),  # [GVL 3.2, LAWN41 xGETRF]
    "qr": _per_matrix(_qr),
    "svd": _per_matrix(_svd),
    # n^2 for each right-hand side of a triangle of order n [GVL 3.1, LAWN41 xTRTRS].
    "triangular_solve": lambda eqn: _size(eqn.invars[1]) * eqn.invars[0].aval.shape[-1],
}
"""FLOPs of one run of an equation, by primitive."""


Flops = Callable[[Any], int | None]


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


# What XLA's CPU compiler writes out for one of a complex number, of real operations. All else is one, as XLA counts it.
_COMPLEX = {
    "abs": 25 if JAX_VERSION >= (0, 11) else 1,  # without overflow, since then
    **{"acos": 197, "acosh": 233, "asin": 197, "asinh": 205, "atan": 47, "atanh": 45, "conj": 4, "cos": 15, "cosh": 33},
    **{"exp": 15, "exp2": 16, "log": 62, "log1p": 79, "logistic": 18, "max": 9, "min": 9, "sin": 14, "sinh": 33},
    **{"sqrt": 99, "square": 14},
}


def _one_each(eqn: Any) -> int:
    return _size(eqn.outvars[0])


def _elementwise(eqn: Any) -> int:
    is_complex_number = is_complex(eqn.invars[0].aval)
    return _one_each(eqn) * (_COMPLEX.get(eqn.primitive.name, 1) if is_complex_number else 1)


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
    """N - 1 operations along the axis, of complex numbers too: a serial scan's. XLA's do 17 times as much and more."""
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["axis"]]
    return _size(eqn.invars[0]) // max(length, 1) * max(length - 1, 0)


def _window(eqn: Any) -> int:
    """W - 1 operations for each window of w elements, padding included, as XLA counts."""
    return _size(eqn.outvars[0]) * max(_taps(eqn) - 1, 0)


def _taps(eqn: Any) -> int:
    return math.prod(eqn.params["window_dimensions"])


def _sort(eqn: Any) -> int:
    """N log2 n comparisons along the dimension (Knuth, TAOCP 3, 5.3.1: the bound within lower-order terms), per key."""
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["dimension"]]
    return round(math.prod(aval.shape) * math.log2(length)) * eqn.params["num_keys"] if length > 1 else 0


# Integer operations of the published cipher as JAX writes it out (Salmon et al., "Parallel random numbers: as easy
# as 1, 2, 3", 2011): additions, xors, and rotations of three operations.

_THREEFRY2X32 = 20 * 5 + 2 + 2 + 5 * 3  # rounds, first key addition, key schedule, key injections


def _is_threefry(atom: Any) -> bool:
    return str(atom.aval.dtype) == "key<fry>"


def _random_bits(eqn: Any) -> int | None:
    """One threefry block per element and its halves xored; other generators' lowering is the backend's."""
    if not _is_threefry(eqn.invars[0]):
        return None
    elements = _size(eqn.outvars[0])
    if partitionable_threefry():
        return elements * (_THREEFRY2X32 + 1)
    words = math.ceil(eqn.params["bit_width"] * elements / 32)
    return math.ceil(words / 2) * _THREEFRY2X32


def _keys(each: int) -> Flops:
    """So many for each new threefry key; unknown for other generators."""
    return lambda eqn: each * _size(eqn.outvars[0]) if _is_threefry(eqn.outvars[0]) else None


FLOPS: dict[str, Flops] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(VIEWS | MOVES, lambda _eqn: 0),
    **dict.fromkeys(["real", "imag"], _one_each),
    **dict.fromkeys(REDUCING_COLLECTIVES, lambda eqn: sum(map(_size, eqn.invars))),
    **CONTRACTIONS,
    **FACTORISATIONS,
    "clamp": lambda eqn: 2 * _one_each(eqn),
    "one_minus_square": lambda eqn: 2 * _one_each(eqn),
    "integer_pow": _integer_pow,
    "polynomial": lambda eqn: 2 * (len(eqn.invars) - 2) * _one_each(eqn),  # Horner's rule
    **dict.fromkeys(REDUCTIONS - {"reduce"}, _reduction),
    **dict.fromkeys(CUMULATIVE, _cumulative),
    "cumlogsumexp": lambda eqn: 5 * _cumulative(eqn),  # maximum, difference, exp, log1p, sum
    **dict.fromkeys(["reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add"], _window),
    "select_and_scatter_add": lambda eqn: _size(eqn.invars[0]) * _taps(eqn),  # each window: comparisons, one addition
    **dict.fromkeys(SCATTERS - {"scatter"}, lambda eqn: _size(eqn.invars[2])),  # one for each element of the updates
    "sort": _sort,
    # N log2 k comparisons, a heap of k while n elements pass (at least one for each).
    "top_k": lambda eqn: round(_size(eqn.invars[0]) * max(math.log2(max(eqn.params["k"], 1)), 1)),
    "approx_top_k": lambda eqn: _size(eqn.invars[0]),  # one pass: Chern et al., "TPU-KNN", 2022
    **dict.fromkeys(["addupdate", "accum_grad_in_ref"], lambda eqn: _size(eqn.invars[1])),
    "threefry2x32": lambda eqn: _THREEFRY2X32 * _one_each(eqn),
    "random_bits": _random_bits,
    **dict.fromkeys(["random_split", "random_fold_in"], _keys(_THREEFRY2X32)),  # a block for each
    "random_seed": _keys(2),  # the seed's two halves
}
"""FLOPs of one run of an equation, by primitive; a formula says None where neither shapes nor parameters tell."""


def _bytes(atom: Any) -> int:
    return nbytes(atom.aval)


def moved_bytes(eqn: Any) -> int:
    """Bytes of every operand and result."""
    return sum(map(_bytes, eqn.invars)) + sum(map(_bytes, eqn.outvars))


def _transferred(eqn: Any) -> int:
    """Nothing, unless the value goes to another memory."""
    here = [memory_space(atom.aval) for atom in eqn.invars]
    there = [memory_space(atom.aval) for atom in eqn.outvars]
    return 0 if here == there else moved_bytes(eqn)


BYTES: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(VIEWS, lambda _eqn: 0),
    # As much read as written, and the indices; an update in place; updates, and the elements that they meet.
    **dict.fromkeys(
        SLICES | {"gather"}, lambda eqn: 2 * sum(map(_bytes, eqn.outvars)) + sum(map(_bytes, eqn.invars[1:]))
    ),
    "dynamic_update_slice": lambda eqn: 2 * _bytes(eqn.invars[1]) + sum(map(_bytes, eqn.invars[2:])),
    **dict.fromkeys(SCATTERS, lambda eqn: _bytes(eqn.invars[1]) + 3 * _bytes(eqn.invars[2])),
    "device_put": _transferred,
    "get": lambda eqn: 2 * _bytes(eqn.outvars[0]),
    **dict.fromkeys(["swap", "addupdate", "accum_grad_in_ref"], lambda eqn: 2 * _bytes(eqn.invars[1])),
}
"""Bytes of one run of an equation, by primitive; ``moved_bytes`` of the others."""


# By the parameter that has the jaxpr how often it runs: for each element that is reduced away, w - 1 times for each
# window of w elements, once for each window, for each element of the updates. A plain scatter has none.
_ELEMENT_BODIES: dict[str, dict[str, Callable[[Any], int]]] = {
    "reduce": {"jaxpr": _reduction},
    "reduce_window": {"jaxpr": lambda eqn: _size(eqn.outvars[0]) * (_taps(eqn) - 1)},
    "select_and_scatter": {
        "select_jaxpr": lambda eqn: _size(eqn.invars[1]) * (_taps(eqn) - 1),
        "scatter_jaxpr": lambda eqn: _size(eqn.invars[1]),
    },
    "scatter": {"update_jaxpr": lambda eqn: _size(eqn.invars[2])},
}


def element_bodies(eqn: Any) -> tuple[tuple[Any, int], ...] | None:
    """The scalar jaxprs of a reduction or scatter, each with the number of its runs; None for any other equation."""
    runs = _ELEMENT_BODIES.get(eqn.primitive.name)
    bodies = None if runs is None else [(eqn.params[name], count(eqn)) for name, count in runs.items()]
    return None if bodies is None else tuple((jaxpr, count) for jaxpr, count in bodies if jaxpr is not None)


def is_operation(eqn: Any) -> bool:
    """Whether an equation is one operation of the device: the jaxprs in it, if any, say what is done to an element."""
    return primitive_name(eqn) in FLOPS or eqn.primitive.name in _ELEMENT_BODIES


def kernel_estimate(eqn: Any) -> tuple[int, int] | None:
    """FLOPs and bytes of a Pallas kernel that has a ``cost_estimate`` of its author's; None for any other equation."""
    estimate = eqn.params.get("cost_estimate") if eqn.primitive.name == "pallas_call" else None
    return None if estimate is None else (estimate.flops + estimate.transcendentals, estimate.bytes_accessed)


def expansion(eqn: Any) -> Any | None:
    """What a high-level primitive of JAX 0.12 (``jnp.searchsorted``) is written out to, or None where it cannot be."""
    prim = high(eqn)
    expand = getattr(prim, "expand", None)
    if prim is None or expand is None:
        return None

    def written_out(*leaves: Any) -> Any:
        return expand(*jax.tree.unflatten(prim.in_tree, leaves))

    try:
        return jax.make_jaxpr(written_out)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in prim.in_avals_flat))
    except Exception:  # noqa: BLE001 - anyone's code may run here; the caller then says that it is uncosted
        return None


# ---------------------------------------------------------------------------------------- what devices tell each other


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

    ``of_one`` is the same equation on the types that one device holds, where it is spread over other axes as well.
    """
    kind_and_sent = _COLLECTIVES.get(eqn.primitive.name)
    if kind_and_sent is None:
        return None
    (kind, sent), over = kind_and_sent, _mapped_axes(eqn.params)
    devices = _devices(eqn, over)
    if devices == 1:
        return None
    size = sum(nbytes(_result(var.aval)) for var in (of_one or eqn).outvars)
    return Communication(kind, tuple(map(str, over)), size, sent(size, devices))


def _mapped_axes(params: dict[str, Any]) -> tuple[Hashable, ...]:
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
