"""Sizes and costs as people write them: ``"2 GiB"``, ``"1.5 GB"``, ``"3 TFLOPs"``."""

from __future__ import annotations

import re

from remat_magic.errors import RematError

__all__ = ["parse_bytes", "parse_flops"]

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15, "e": 10**18}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | float | str, what: str = "size") -> int:
    """Bytes of a number of bytes or of a text with a decimal (``GB``) or binary (``GiB``) unit.

    Args:
        size: what was given.
        what: what it is called in an error.

    Raises:
        RematError: it is no size.
    """
    return _parse(size, what, "bytes", _DECIMAL | _BINARY, ("b", "byte", "bytes"), "2 GiB' or '1.5 GB")


def parse_flops(cost: int | float | str, what: str = "cost") -> int:
    """FLOPs of a number of them or of a text (``"3 TFLOPs"``); errors as ``parse_bytes``."""
    return _parse(cost, what, "FLOPs", _DECIMAL, ("flop", "flops"), "3 TFLOPs' or '2e12")


def _parse(
    given: int | float | str, what: str, unit: str, factors: dict[str, int], words: tuple[str, ...], example: str
) -> int:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < float("inf"):
        return int(given)
    found = _NUMBER.fullmatch(given) if isinstance(given, str) else None
    if found is not None:
        letters = found[2].lower()
        word = next((word for word in sorted(words, key=len, reverse=True) if letters.endswith(word)), "")
        prefix = letters.removesuffix(word)
        if prefix in factors and (word or not prefix):
            return round(float(found[1].replace(",", "").replace("_", "")) * factors[prefix])
    raise RematError(f"{what}={given!r} is no number of {unit}: write one like '{example}'.")
