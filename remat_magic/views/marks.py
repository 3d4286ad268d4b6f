"""Expressions marked in source text: which stand on a line, one within another, and the line's code with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from remat_magic.records import SourceSpan
from remat_magic.views.attribution import Attribution
from remat_magic.views.format import escape
from remat_magic.views.highlight import COMMENT, Word, split_lines
from remat_magic.views.linking import linked

Listed = tuple[int, str, tuple[Word, ...]]
"""A line: its number, its text, and the words to be coloured."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An expression on one line: its columns, and the tag that opens it."""

    start: int
    end: int
    tag: str


def marks_by_line(lines: Sequence[Listed], attributions: Sequence[Attribution], live: bool) -> dict[int, list[Mark]]:
    """For each line the expressions on it, the outer before the inner.

    Spans nest or are disjoint, as the expressions of a program are; one that crosses another is left out.

    Args:
        lines: of one text.
        attributions: of the expressions of that text.
        live: whether a script is at hand, which links them.
    """
    texts = {number: (line, _code_end(line, coloured)) for number, line, coloured in lines}
    inside = [
        (_fitted(attribution.source, texts[attribution.source.line][0]), attribution)
        for attribution in attributions
        if attribution.source is not None and attribution.source.line in texts
    ]
    inside.sort(key=lambda item: (_start(item[0]), tuple(-part for part in _end(item[0]))))
    marks: dict[int, list[Mark]] = {}
    around = list[SourceSpan]()
    for span, attribution in inside:
        while around and _end(around[-1]) <= _start(span):
            around.pop()
        if around and _end(span) > _end(around[-1]):
            continue
        around.append(span)
        tag = _tag(attribution, live)
        for number in range(span.line, span.end_line + 1):
            line, end = texts.get(number, ("", 0))
            start = span.column if number == span.line else len(line) - len(line.lstrip())
            end = span.end_column if number == span.end_line else end
            if start < min(end, len(line)):
                marks.setdefault(number, []).append(Mark(start, min(end, len(line)), tag))
    return marks


def _start(span: SourceSpan) -> tuple[int, int]:
    return (span.line, span.column)


def _end(span: SourceSpan) -> tuple[int, int]:
    return (span.end_line, span.end_column)


def _fitted(span: SourceSpan, line: str) -> SourceSpan:
    """The span; where its columns are not known, or not those of this text, the whole of its first line."""
    trusted = not span.text or split_lines(span.text)[0].rstrip() == line.rstrip()
    if trusted and 0 <= span.column < len(line) and _start(span) < _end(span):
        return span
    indent = len(line) - len(line.lstrip())
    return replace(span, column=indent, end_line=span.line, end_column=len(line.rstrip()))


def _code_end(line: str, coloured: Sequence[Word]) -> int:
    """Where a line's code ends, before its comment."""
    comment = next((start for start, _, letter in coloured if letter == COMMENT), len(line))
    return len(line[:comment].rstrip())


def _tag(attribution: Attribution, live: bool) -> str:
    kinds = " ".join(
        filter(None, ["remat-saved" if attribution.residuals else "", "remat-again" if attribution.equations else ""])
    )
    if not live:  # the line's own cells tell the figures
        return f'<u class="{kinds}">'
    saves = f"saved {attribution.saves}" if attribution.residuals else ""
    again = f"recomputed {attribution.repeats}" if attribution.equations else ""
    title = escape("\n".join(filter(None, [saves, again])))
    return f'<u class="{kinds}"{linked(attribution.source)} title="{title}">'


def marked_code(text: str, coloured: Sequence[Word], marks: Sequence[Mark]) -> str:
    """The text with its words coloured within the expressions marked."""
    edges = (
        edge for start, end, *_ in (*coloured, *((mark.start, mark.end) for mark in marks)) for edge in (start, end)
    )
    cuts = sorted({0, len(text), *(edge for edge in edges if edge < len(text))})
    opened: list[Mark] = []
    waiting = sorted(marks, key=lambda mark: (mark.start, -mark.end))  # stable: the outer of equal ones comes first
    pieces = list[str]()
    word = 0
    for start, end in pairwise(cuts):
        while opened and opened[-1].end <= start:
            pieces.append("</u>")
            opened.pop()
        while waiting and waiting[0].start <= start:
            opened.append(waiting.pop(0))
            pieces.append(opened[-1].tag)
        while word < len(coloured) and coloured[word][1] <= start:
            word += 1
        piece = escape(text[start:end])
        if word < len(coloured) and coloured[word][0] <= start:
            piece = f'<span class="remat-h{coloured[word][2]}">{piece}</span>'
        pieces.append(piece)
    return "".join(pieces) + "</u>" * len(opened)
