"""How numbers and places are written, the same in every view, and what the script finds a place by."""

from __future__ import annotations

import html
import math
import zlib

from remat_magic.errors import printable
from remat_magic.records import SourceSpan
from remat_magic.units import flops as flops
from remat_magic.units import nbytes as nbytes
from remat_magic.units import percent as percent
from remat_magic.units import seconds as seconds

_STEPS = 5  # on an axis at most


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


def truncate(content: str, length: int) -> str:
    """At most so many characters, the rest as an ellipsis."""
    return content if len(content) <= length else f"{content[: length - 1]}…"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first at or beyond ``most``: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not (most > 0 and math.isfinite(most)):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / _STEPS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if most / (factor * power) <= _STEPS)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


def line_key(span: SourceSpan) -> str:
    """Stands for a line: the same text in every view and under every policy. No markup can be in it."""
    # A checksum, since file names are long and repeated on every line; two that are equal only mark too much.
    file = zlib.crc32(f"{span.cell} {span.file}".encode("utf-8", "surrogatepass"))
    return f"{file:x}.{span.line}"


def expression_key(span: SourceSpan) -> str:
    """Stands for an expression: its line's key, a point, and the rest of where it is."""
    return f"{line_key(span)}.{span.column}.{span.end_line}.{span.end_column}"


def linked(*spans: SourceSpan | None, library: SourceSpan | None = None) -> str:
    """The attribute that the script finds an element by; nothing for what has no line of the user's or a library's.

    The last key, that of a library's expression, begins with ``~``: many lines of the user's call the same one.
    """
    keys = dict.fromkeys(expression_key(span) for span in spans if span is not None)
    if library is not None:
        keys[f"~{expression_key(library)}"] = None
    return f' data-e="{" ".join(keys)}"' if keys else ""
