"""FLOPs of the matrix factorisations and of the Fourier transform: the textbooks' leading terms.

[GVL] Golub and Van Loan, *Matrix Computations*, 4th edition. [LAWN41] Anderson, Dongarra and Ostrouchov, *Installation
Guide for LAPACK*, LAPACK Working Note 41, the operation counts in its appendix. Iterative algorithms count the usual
number of sweeps that these sources assume. Counts are per matrix of a batch; complex ones take four times as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["FACTORISATIONS"]


def _per_matrix(count: Callable[[Any, int, int], float]) -> Callable[[Any], int]:
    """A formula of (params, rows, columns) of the first operand, for a whole batch."""

    def flops(eqn: Any) -> int:
        aval = eqn.invars[0].aval
        *batch, rows, columns = aval.shape
        scale = 4 if aval.dtype.kind == "c" else 1
        return scale * math.prod(batch) * round(count(eqn.params, rows, columns))

    return flops


def _elimination(m: int, n: int, k: int) -> float:
    """The sum over k steps of (m - j)(n - j): the rank-one updates of a factorisation of an m by n matrix."""
    return m * n * k - (m + n) * k * k / 2 + k**3 / 3


def _lu(_params: Any, m: int, n: int) -> float:
    """2 FLOPs per element and step, 2n^3/3 for a square matrix [GVL 3.2, LAWN41 xGETRF]."""
    return 2 * _elimination(m, n, min(m, n))


def _householder(_params: Any, m: int, n: int) -> float:
    """4 FLOPs per element and step, 2mn^2 - 2n^3/3 for m >= n [GVL 5.2.2, LAWN41 xGEQRF]."""
    return 4 * _elimination(m, n, min(m, n))


def _qr(params: Any, m: int, n: int) -> float:
    """The factorisation, and the reflectors multiplied out to the columns of Q [LAWN41 xGEQRF + xORGQR]."""
    k = min(m, n)
    return _householder(params, m, n) + 4 * _elimination(m, m if params["full_matrices"] else k, k)


def _householder_product(eqn: Any) -> int:
    """4mnk - 2(m + n)k^2 + 4k^3/3 for k reflectors [LAWN41 xORGQR]."""
    aval = eqn.invars[0].aval
    *batch, m, n = aval.shape
    k = eqn.invars[1].aval.shape[-1]
    return (4 if aval.dtype.kind == "c" else 1) * math.prod(batch) * round(4 * _elimination(m, n, k))


def _apply_householder(eqn: Any) -> int:
    """2nk(2m - k) for k reflectors of length m applied to n vectors [LAWN41 xORMQR]."""
    m, k = eqn.invars[0].aval.shape[-2], eqn.invars[1].aval.shape[-1]
    c = eqn.invars[2].aval
    vectors = math.prod(c.shape) // max(m, 1)
    return (4 if c.dtype.kind == "c" else 1) * 2 * vectors * k * (2 * m - k)


def _triangular_solve(eqn: Any) -> int:
    """n^2 for each right-hand side of a triangle of order n [GVL 3.1, LAWN41 xTRTRS]."""
    triangle, right = eqn.invars[0].aval, eqn.invars[1].aval
    return (4 if right.dtype.kind == "c" else 1) * math.prod(right.shape) * triangle.shape[-1]


def _svd(params: Any, m: int, n: int) -> float:
    """Golub-Reinsch with m >= n [GVL 8.6.3]: singular values alone, with the thin factors, or with the full ones."""
    m, n = max(m, n), min(m, n)
    if not params["compute_uv"]:
        return 4 * m * n**2 - 4 * n**3 / 3
    if params["full_matrices"] and m > n:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def _eig(params: Any, _m: int, n: int) -> float:
    """The Hessenberg QR iteration [GVL 7.5.6]: 10n^3 for the eigenvalues, 25n^3 with the Schur vectors."""
    vectors = params["compute_left_eigenvectors"] or params["compute_right_eigenvectors"]
    return (25 if vectors else 10) * n**3


def _schur(params: Any, _m: int, n: int) -> float:
    """As for the eigenvalues of a general matrix [GVL 7.5.6]."""
    return (25 if params["compute_schur_vectors"] else 10) * n**3


def _tridiagonal_solve(eqn: Any) -> int:
    """3 FLOPs a row to eliminate, 5 a row and right-hand side: 8n for one [GVL 4.3.6]."""
    diagonal, right = eqn.invars[1].aval, eqn.invars[3].aval
    scale = 4 if right.dtype.kind == "c" else 1
    return scale * (3 * math.prod(diagonal.shape) + 5 * math.prod(right.shape))


def _fft(eqn: Any) -> int:
    """5 n log2 n of a complex transform of n points, half of it for a real one.

    The convention of FFTW's benchmarks (Frigo and Johnson, "The Design and Implementation of FFTW3", 2005): the
    asymptotic count of the radix-2 Cooley-Tukey algorithm, whatever the plan and the length.
    """
    lengths = eqn.params["fft_lengths"]
    points = math.prod(lengths)
    inside, outside = eqn.invars[0].aval, eqn.outvars[0].aval
    batch = math.prod(inside.shape[: len(inside.shape) - len(lengths)])
    real = inside.dtype.kind != "c" or outside.dtype.kind != "c"
    return round(batch * (2.5 if real else 5) * points * math.log2(points)) if points > 1 else 0


FACTORISATIONS: dict[str, Callable[[Any], int]] = {
    "cholesky": _per_matrix(lambda _params, _m, n: n**3 / 3),  # [GVL 4.2.5, LAWN41 xPOTRF]
    "cholesky_update": _per_matrix(lambda _params, _m, n: 3 * n**2),  # n^2/2 rotated pairs of 6 FLOPs [GVL 6.5.4]
    "eig": _per_matrix(_eig),
    "eigh": _per_matrix(lambda _params, _m, n: 9 * n**3),  # symmetric QR with vectors [GVL 8.3.3]
    "fft": _fft,
    "geqp3": _per_matrix(_householder),  # the norms that pivoting looks at are of lower order
    "geqrf": _per_matrix(_householder),
    "hessenberg": _per_matrix(lambda _params, _m, n: 10 * n**3 / 3),  # [GVL 7.4.3]
    "householder_product": _householder_product,
    "lu": _per_matrix(_lu),
    "ormqr": _apply_householder,
    "qr": _per_matrix(_qr),
    "schur": _per_matrix(_schur),
    "svd": _per_matrix(_svd),
    "symmetric_product": _per_matrix(lambda _params, n, k: n * (n + 1) * k),  # one triangle [LAWN41 xSYRK]
    "triangular_solve": _triangular_solve,
    "tridiagonal": _per_matrix(lambda _params, _m, n: 4 * n**3 / 3),  # [GVL 8.3.1]
    "tridiagonal_solve": _tridiagonal_solve,
}
"""FLOPs of one run of an equation, by primitive."""
