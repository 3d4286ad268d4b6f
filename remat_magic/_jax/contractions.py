"""FLOPs of what multiplies and sums: dots, convolutions, attention kernels.

A multiply-add counts two FLOPs, of complex numbers too: these are the counts of XLA's cost analysis, which the tests
hold them against. Only a complex convolution is three real ones, since JAX writes it so.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np


def _dot_general(eqn: Any) -> int:
    """``2 b m n k``: each of the b m n outputs sums k products."""
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted)


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
