"""Numbers as people read them, the same in every sentence and every view."""

from __future__ import annotations

import re

__all__ = ["apart", "flops", "nbytes", "percent", "policy", "seconds"]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def nbytes(number: int) -> str:
    """Bytes in three digits: ``48 B``, ``12.6 MB`` (decimal, as accelerators' memory is sold)."""
    return _scaled(number, "B", "B")


def apart(one: int, other: int) -> tuple[str, str]:
    """Two different numbers of bytes so that they read differently: in all their digits where three are too few."""
    short = nbytes(one), nbytes(other)
    return short if short[0] != short[1] or one == other else (f"{one:,} bytes", f"{other:,} bytes")


def flops(number: int | None) -> str:
    """Floating-point operations in three digits: ``51 FLOPs``, ``1.17 TFLOPs``; ``unknown`` for None."""
    return "unknown" if number is None else _scaled(number, "FLOPs", "FLOPs")


def seconds(number: float | None) -> str:
    """Seconds in three digits: ``18.3 ms``, ``1.20 s``, ``0 s``; ``unknown`` for None."""
    if number is None:
        return "unknown"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        value = abs(number) * factor
        # 0.9996 of a unit would be written "1000" of the next.
        if value >= 0.9995:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{number * factor:,.{digits}f} {unit}"
    return "0 s" if number == 0 else f"{number * 1e9:.2g} ns"


def percent(part: int, whole: int) -> str:
    """A share in two digits: ``4.0%``, ``77%``, ``120%``."""
    share = 100 * part / whole
    return f"{share:.1f}%" if share < 9.95 else f"{share:.0f}%"


_PLAN = re.compile(r"plan\((peak )?(\d+)(.*)\)", re.DOTALL)


def policy(key: str) -> str:
    """The key of a policy as people read it: ``plan within 121 MB`` for ``plan(120795955)``, others as they are."""
    plan = _PLAN.fullmatch(key)
    if plan is None:
        return key
    return f"plan within {nbytes(int(plan[2]))}{' of peak' if plan[1] else ''}{plan[3]}"


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
