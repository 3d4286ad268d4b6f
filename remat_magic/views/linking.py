"""What stands for one expression of the user's source, wherever it is shown: the script marks all of them together."""

from __future__ import annotations

import zlib

from remat_magic.records import SourceSpan


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
