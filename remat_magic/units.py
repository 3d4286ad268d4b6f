"""Numbers as people read and write them: ``12.6 MB`` in every sentence and view, ``"2 GiB"`` as what they ask for."""

from __future__ import annotations

import re

from remat_magic.errors import RematError

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


# ------------------------------------------------------------------------------------------------------------ parsing

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15, "e": 10**18}
_FACTORS = _DECIMAL | {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def is_bytes(text: str) -> bool:
    """Whether a text is of so many bytes, and not the name of a device: such as begin with a letter."""
    return text.strip().startswith((*"0123456789.",))


def parse_bytes(size: int | float | str, what: str = "size") -> int:
    """Bytes of a number or of a text with a decimal (``GB``) or binary (``GiB``) unit; errors say ``what`` it is."""
    if isinstance(size, (int, float)) and not isinstance(size, bool) and 0 <= size < float("inf"):
        return int(size)
    number = _NUMBER.fullmatch(size) if isinstance(size, str) else None
    if number is not None:
        letters = number[2].lower()
        word = next((word for word in ("bytes", "byte", "b") if letters.endswith(word)), "")
        prefix = letters.removesuffix(word)
        if prefix in _FACTORS and (word or not prefix):
            return round(float(number[1].replace(",", "").replace("_", "")) * _FACTORS[prefix])
    raise RematError(f"{what}={size!r} is no number of bytes: write one like '2 GiB' or '1.5 GB'.")
