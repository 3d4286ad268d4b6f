"""Numbers as people read them, the same in every sentence and every view."""

from __future__ import annotations

__all__ = ["flops", "nbytes"]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def nbytes(number: int) -> str:
    """Bytes in three digits: ``48 B``, ``12.6 MB`` (decimal, as accelerators' memory is sold)."""
    return _scaled(number, "B", "B")


def flops(number: int | None) -> str:
    """Floating-point operations in three digits: ``51 FLOPs``, ``1.17 TFLOPs``; ``unknown`` for None."""
    return "unknown" if number is None else _scaled(number, "FLOPs", "FLOPs")


def _scaled(number: int, unit: str, whole: str) -> str:
    magnitude = abs(number)
    if magnitude < 1000:
        return f"{number} {whole}"
    value, prefixes = float(number), iter(_PREFIXES)
    prefix = next(prefixes)
    # 999.5 would be written "1e+03" by the three digits below.
    while abs(value) >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    # 9.996 has one digit before the point until it is rounded.
    candidates = (f"{value:.{digits}f}" for digits in (2, 1, 0))
    text = next(candidate for candidate in candidates if sum(map(str.isdigit, candidate)) <= 3)
    return f"{text} {prefix}{unit}"
