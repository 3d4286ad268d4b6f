"""What each line of the user's source saves and has computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat_magic.model import Report, SourceSpan

from . import format as fmt
from .cells import table, td
from .format import escape

__all__ = ["LineRow", "line_rows", "lines_html"]


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line, or all that no line of the user's makes (``place`` is empty then).

    ``saved`` is bytes of intermediates kept, offloaded ones included; ``flops`` what the backward pass computes again
    or only then, None where nothing of it has a known cost. ``ranges`` are the columns of the expressions that do.
    """

    place: str
    text: str
    saved: int
    flops: int | None
    operations: int
    ranges: tuple[tuple[int, int], ...] = ()


def line_rows(report: Report) -> list[LineRow]:
    """The lines that save or recompute anything, in the order of the source."""
    kept = [residual for residual in report.residuals if residual.kind in ("intermediate", "offloaded")]
    keys = {_key(item.source) for item in (*kept, *report.recomputed)}
    rows = list[LineRow]()
    for key in sorted(keys):
        residuals = [residual for residual in kept if _key(residual.source) == key]
        equations = [equation for equation in report.recomputed if _key(equation.source) == key]
        spans = [item.source for item in (*residuals, *equations) if item.source is not None]
        known = [equation.flops for equation in equations if equation.flops is not None]
        rows.append(
            LineRow(
                fmt.location(spans[0]) if spans else "",
                spans[0].text if spans else "",
                sum(residual.nbytes for residual in residuals),
                sum(known) if known or not equations else None,
                len(equations),
                _outermost(spans),
            )
        )
    return rows


def _key(span: SourceSpan | None) -> tuple[int, str, int, int]:
    """Cells in their order, then files, then what has no line."""
    if span is None:
        return (2, "", 0, 0)
    return (0, "", span.cell, span.line) if span.cell is not None else (1, span.file, 0, span.line)


def _outermost(spans: Iterable[SourceSpan]) -> tuple[tuple[int, int], ...]:
    """The ranges of one line's expressions, of nested ones the outermost."""
    ranges = sorted(
        {(span.column, span.end_column) for span in spans if span.end_line == span.line and span.column >= 0},
        key=lambda pair: (pair[0], -pair[1]),
    )
    found = list[tuple[int, int]]()
    for start, end in ranges:
        if start < end and (not found or start >= found[-1][1]):
            found.append((start, end))
    return tuple(found)


def lines_html(report: Report) -> str:
    """A table of the lines, with bars that share one scale each."""
    rows = line_rows(report)
    if not rows:
        return '<p class="remat-empty">No line saves or recomputes anything.</p>'
    most_saved = max(row.saved for row in rows)
    most_flops = max(row.flops or 0 for row in rows)
    body = list[str]()
    for row in rows:
        flops = fmt.flops(row.flops) if row.operations else ""
        exact = "" if row.flops is None else fmt.exact(row.flops, "FLOPs")
        cells = [
            td("place", escape(row.place)),
            td("line", _marked(row) if row.place else "<i>no line of yours</i>"),
            td("num", fmt.nbytes(row.saved) if row.saved else "", fmt.exact(row.saved, "bytes")),
            td("share", _bar(row.saved, most_saved, "saved")),
            td("num", flops, exact),
            td("share", _bar(row.flops or 0, most_flops, "again")),
        ]
        body.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    heads = [("Line", "place"), ("Source", "line"), ("Saved", "num"), ("Share", "share"), ("Recomputed", "num"),
             ("Share", "share")]  # fmt: skip
    return table("What each line saves and has recomputed", heads, body).replace("remat-stacks", "remat-lines", 1)


def _marked(row: LineRow) -> str:
    """The line's text without its indentation, the expressions underlined."""
    indent = len(row.text) - len(row.text.lstrip())
    pieces, at = list[str](), indent
    for start, end in row.ranges:
        if start < at or end > len(row.text):
            continue
        pieces += [escape(row.text[at:start]), f"<u>{escape(row.text[start:end])}</u>"]
        at = end
    pieces.append(escape(row.text[at:].rstrip()))
    return f"<code>{''.join(pieces)}</code>"


def _bar(number: int, most: int, kind: str) -> str:
    if not number or not most:
        return ""
    return f'<span class="remat-fill remat-fill-{kind}" style="width:{max(1.0, 100 * number / most):.1f}%"></span>'
