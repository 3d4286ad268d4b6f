"""FLOPs of the usual matrix factorisations, by the textbooks' leading terms, and of Fourier transforms as XLA counts.

[GVL] Golub and Van Loan, *Matrix Computations*, 4th edition. [LAWN41] Anderson, Dongarra and Ostrouchov, *Installation
Guide for LAPACK*, LAPACK Working Note 41, the operation counts in its appendix. Iterative algorithms count the usual
number of sweeps that these sources assume. A complex operation counts as a real one, as it does for XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def _per_matrix(count: Callable[[Any, int, int], float]) -> Callable[[Any], int]:
    """A formula of (params, rows, columns) of the first operand, for a whole batch."""

    def flops(eqn: Any) -> int:
        *batch, rows, columns = eqn.invars[0].aval.shape
        return math.prod(batch) * round(count(eqn.params, rows, columns))

    return flops


def _elimination(m: int, n: int, k: int) -> float:
    """The sum over k steps of (m - j)(n - j): the rank-one updates of a factorisation of an m by n matrix."""
    return m * n * k - (m + n) * k * k / 2 + k**3 / 3


def _lu(_params: Any, m: int, n: int) -> float:
    """2 FLOPs per element and step, 2n^3/3 for a square matrix [GVL 3.2, LAWN41 xGETRF]."""
    return 2 * _elimination(m, n, min(m, n))


def _qr(params: Any, m: int, n: int) -> float:
    """4 FLOPs per element and step, and as many to multiply the reflectors out [GVL 5.2.2, LAWN41 xGEQRF + xORGQR]."""
    k = min(m, n)
    return 4 * _elimination(m, n, k) + 4 * _elimination(m, m if params["full_matrices"] else k, k)


def _triangular_solve(eqn: Any) -> int:
    """n^2 for each right-hand side of a triangle of order n [GVL 3.1, LAWN41 xTRTRS]."""
    triangle, right = eqn.invars[0].aval, eqn.invars[1].aval
    return math.prod(right.shape) * triangle.shape[-1]


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
    "lu": _per_matrix(_lu),
    "qr": _per_matrix(_qr),
    "svd": _per_matrix(_svd),
    "triangular_solve": _triangular_solve,
}
"""FLOPs of one run of an equation, by primitive."""
