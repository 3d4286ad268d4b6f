"""How numbers and places are written, the same in every view."""

from __future__ import annotations

import html

from remat_magic.records import SourceSpan
from remat_magic.units import flops, nbytes, percent, seconds
from remat_magic.wording import printable

__all__ = [
    "about",
    "between",
    "count",
    "escape",
    "exact",
    "flops",
    "location",
    "nbytes",
    "percent",
    "seconds",
    "signed",
]


def escape(text: str) -> str:
    """Text for HTML and SVG, to be read: what would not be seen there is written out, as in a terminal.

    For values that a script sends back, ``html.escape`` alone leaves them as they are.
    """
    return html.escape(printable(text))


def exact(number: int, unit: str) -> str:
    """The whole number with its unit, for hovers: ``12,582,912 bytes``."""
    return f"{number:,} {unit}"


def about(peak: int, low: int | None, high: int | None) -> str:
    """An estimate with its range: ``about 21 GB (18 to 25)``; without the one where it has none."""
    if low is None or high is None or low == high:
        return nbytes(peak)
    unit = nbytes(peak).split()[1]
    return f"about {nbytes(peak)} ({between(low, high).removesuffix(f' {unit}')})"


def between(low: int, high: int) -> str:
    """A range: ``18 to 25 GB``."""
    least, most = nbytes(low), nbytes(high)
    unit = most.split()[1]
    return f"{least.removesuffix(f' {unit}')} to {most}"


def signed(text: str, number: float) -> str:
    """``text`` of a difference, with a plus where ``number`` is positive; ``±0`` for none."""
    return f"+{text}" if number > 0 else text if number < 0 else "±0"


def count(number: int, noun: str) -> str:
    """``1 value``, ``3 values``, ``1,200 values``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def location(span: SourceSpan | None) -> str:
    """Where a span starts, as short as it is unambiguous: ``In[3]:6``, ``model.py:6``; "" for None."""
    return span.place if span is not None else ""
