"""The source text, each line with what it saves and what the backward pass computes again.

What a library makes that the user's lines call is among the figures of those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from pygments.lexers.python import PythonLexer  # pyright: ignore[reportMissingTypeStubs] - it has none
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from remat_magic.records import Equation, Report, Residual, SourceSpan, SourceText, dearest
from remat_magic.views import format as fmt
from remat_magic.views.format import escape, expression_key, line_key, linked
from remat_magic.views.tables import KEYS

_Key = TypeVar("_Key")

# Longer lists say how many more there are.
_KINDS_SHOWN = 8


@dataclass(slots=True)
class Attribution:
    """The residuals, offloaded ones included, and recomputed operations of one place; ``source`` is the first one's."""

    source: SourceSpan | None
    residuals: list[Residual] = field(default_factory=list[Residual])
    equations: list[Equation] = field(default_factory=list[Equation])

    @property
    def saved(self) -> int:
        """Bytes of all residuals."""
        return sum(residual.nbytes for residual in self.residuals)

    @property
    def flops(self) -> int | None:
        """FLOPs of the operations whose cost is known; None where there are some, and none is known."""
        costs = [equation.flops for equation in dearest(self.equations) if equation.flops is not None]
        return sum(costs) if costs or not self.equations else None

    @property
    def saves(self) -> str:
        """What is saved, for hovers: ``24,000 bytes: f32[6,1000] sin "a", f32[5] cos x2``."""
        kinds = (
            " ".join(filter(None, [residual.type, residual.primitive, residual.name and f'"{residual.name}"',
                                   "offloaded" if residual.kind == "offloaded" else ""]))
            for residual in self.residuals
        )  # fmt: skip
        return f"{fmt.exact(self.saved, 'bytes')}: {_counted(kinds)}" if self.residuals else ""

    @property
    def repeats(self) -> str:
        """What is computed again, for hovers: ``80 FLOPs: dot_general repeated x2, cos deferred (cost unknown)``."""
        kinds = (
            " ".join(filter(None, [equation.primitive, "repeated" if equation.repeated else "deferred",
                                   f"({fmt.nbytes(equation.communicated_bytes)} over {' and '.join(equation.over)})"
                                   if equation.communicated_bytes else "",
                                   "(cost unknown)" if equation.flops is None else "",
                                   "(at least)" if equation.flops and equation.times is None else ""]))
            for equation in self.equations
        )  # fmt: skip
        flops = fmt.flops(None) if self.flops is None else fmt.exact(self.flops, "FLOPs")
        return f"{flops}: {_counted(kinds)}" if self.equations else ""


def _counted(kinds: Iterable[str]) -> str:
    counts = Counter(kinds)
    shown = [f"{kind} x{count}" if count > 1 else kind for kind, count in list(counts.items())[:_KINDS_SHOWN]]
    not_shown = len(counts) - len(shown)
    return ", ".join([*shown, f"and {not_shown} more"] if not_shown else shown)


def line_rows(report: Report) -> list[Attribution]:
    """The lines that save or recompute anything, in the order of the source.

    A value that several expressions can have made counts once, for the first of them.
    """
    by_line = _attributed(report, _key)
    return [by_line[key] for key in sorted(by_line)]


def _attributed(report: Report, key: Callable[[SourceSpan | None], _Key]) -> dict[_Key, Attribution]:
    """What is saved and recomputed by its place, as ``key`` tells places apart."""
    by_key: dict[_Key, Attribution] = {}
    for residual in report.residuals:
        if residual.kept:
            by_key.setdefault(key(residual.source), Attribution(residual.source)).residuals.append(residual)
    for equation in report.recomputed:
        by_key.setdefault(key(equation.source), Attribution(equation.source)).equations.append(equation)
    return by_key


def _key(span: SourceSpan | None) -> tuple[int, str, int, int]:
    """Cells in their order, then files, then what has no line."""
    if span is None:
        return (2, "", 0, 0)
    return (0, "", span.cell, span.line) if span.cell is not None else (1, span.file, 0, span.line)


def expressions(report: Report) -> list[Attribution]:
    """The expressions that save or recompute anything, each once, in the order of the report."""
    by_key = _attributed(report, lambda span: "" if span is None else expression_key(span))
    return [attribution for attribution in by_key.values() if attribution.source is not None]


# ------------------------------------------------------------------------- the words of Python's source, to be coloured


Word = tuple[int, int, str]  # columns from 0, and a letter of the style sheet's: remat-hk, remat-hs, ...

COMMENT = "c"
_LETTERS: tuple[tuple[Any, str], ...] = (
    (Comment, COMMENT),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (String, "s"),
    (Number, "n"),
    (Name.Function, "d"),
    (Name.Class, "d"),
    (Name.Builtin.Pseudo, ""),
    (Name.Builtin, "b"),
    (Name.Decorator, "m"),
)
# IPython's own: a magic or a shell command, which Python's rules would take apart.
_MAGIC = re.compile(r"\s*(%%?[A-Za-z_]|!)")


def split_lines(text: str) -> list[str]:
    """The lines without their ends. Other than ``str.splitlines``, only where Python ends one."""
    return re.split(r"\r\n|\r|\n", text)


@lru_cache(maxsize=1024)
def words(text: str) -> tuple[tuple[Word, ...], ...]:
    """For each line of ``split_lines(text)`` what is to be coloured, in order and disjoint; nothing of magics."""
    lines = split_lines(text)
    coloured: list[list[Word]] = [[] for _ in lines]
    source = "\n".join("" if _MAGIC.match(line) else line for line in lines)
    try:
        for number, start, end, letter in _pieces(source):
            row = coloured[number]
            if row and row[-1][1:] == (start, letter):
                row[-1] = (row[-1][0], end, letter)
            else:
                row.append((start, end, letter))
    except Exception:  # noqa: BLE001 - colours are a comfort: whatever the lexer makes of the text, it is shown
        return tuple(() for _ in lines)
    return tuple(map(tuple, coloured))


def _pieces(source: str) -> Iterator[tuple[int, int, int, str]]:
    """Line, columns and letter of every coloured token, cut at line ends."""
    number = column = 0
    for _, kind, value in PythonLexer().get_tokens_unprocessed(source):
        letter = next((letter for parent, letter in _LETTERS if kind in parent), "")
        for index, piece in enumerate(value.split("\n")):
            if index:
                number, column = number + 1, 0
            if piece and letter:
                yield number, column, column + len(piece), letter
            column += len(piece)


# ----------------------------------------------------------------------------------------- expressions marked in a line


Listed = tuple[int, str, tuple[Word, ...]]
"""A line: its number, its text, and the words to be coloured."""


class Mark(NamedTuple):
    """An expression on one line: its columns, and the tag that opens it."""

    start: int
    end: int
    tag: str


def marks_by_line(lines: Sequence[Listed], attributions: Sequence[Attribution], live: bool) -> dict[int, list[Mark]]:
    """For each line the expressions on it, the outer before the inner.

    Spans nest or are disjoint, as the expressions of a program are; one that crosses another is left out. If ``live``,
    a script links them.
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
    kinds = f"{'remat-saved ' * bool(attribution.residuals)}{'remat-again' * bool(attribution.equations)}".rstrip()
    if not live:  # the line's own cells tell the figures
        return f'<u class="{kinds}">'
    saves = f"saved {attribution.saves}" if attribution.residuals else ""
    again = f"recomputed {attribution.repeats}" if attribution.equations else ""
    title = escape("\n".join(filter(None, [saves, again])))
    return f'<u class="{kinds}"{linked(attribution.source)} title="{title}">'


def marked_code(text: str, coloured: Sequence[Word], marks: Sequence[Mark]) -> str:
    """The text with its words coloured within the expressions marked."""
    edges = (edge for start, end, _ in (*coloured, *marks) for edge in (start, end))
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


# ---------------------------------------------------------------------------------------------------------- the listing


_Line = tuple[str, int | None, int]  # file, cell, number
_Attributions = dict[_Line, list[Attribution]]  # by the lines that they begin on

_PICK = "Show only this line in tables and jaxprs; click again to show all"


@dataclass(frozen=True, slots=True)
class _Section:
    """Lines of one cell or file under one fold."""

    text: SourceText
    unfolded: bool
    lines: tuple[Listed, ...]
    gaps: bool = False  # whether it is shown where lines are left out


@dataclass(frozen=True, slots=True)
class _Scale:
    """What a full bar stands for, and whether there are scripts."""

    saved: int
    flops: int
    complete: bool
    live: bool


def listing_html(report: Report, live: bool = False, most: int | None = None) -> str:
    """The source that a function was traced from, with the costs of each line and marks on the expressions.

    If ``live``, the numbers of lines are buttons for the script. With ``most`` only so many lines are shown, those that
    save and recompute most.
    """
    rows = line_rows(report)
    if not rows and not report.sources:
        return '<p class="remat-empty">No line saves or recomputes anything.</p>'
    saved, flops = [row.saved for row in rows], [row.flops or 0 for row in rows]
    scale = _Scale(max(saved, default=0), max(flops, default=0), report.complete, live)
    rows_by_line = {_line_of(row.source): row for row in rows if row.source is not None}
    by_cost = sorted(rows_by_line.items(), key=lambda item: (item[1].saved, item[1].flops or 0), reverse=True)
    dearest = {line for line, _ in by_cost[:most]}
    attributions: _Attributions = {}
    for attribution in expressions(report):
        if attribution.source is not None:
            attributions.setdefault(_line_of(attribution.source), []).append(attribution)
    folds = list[str]()
    for section in _sections(report, rows):
        # A line counts once, should it stand in two texts.
        own = {
            number: rows_by_line.pop((section.text.file, section.text.cell, number), None)
            for number, _, _ in section.lines
        }
        if most is not None:
            lines = tuple(line for line in section.lines if (section.text.file, section.text.cell, line[0]) in dearest)
            section = replace(section, lines=lines, gaps=True)
        if section.lines or most is None:
            folds.append(_fold(section, own, attributions, scale))
    nowhere = next((row for row in rows if row.source is None), None)
    rest = ""
    if nowhere is not None:
        cells = f'<td class="remat-no"></td><td class="remat-ln"{_left(scale)}><i>no line of yours</i></td>'
        rest = _table("What no line of yours makes", [f"<tr>{cells}{_costs(nowhere, scale)}</tr>"], head=False)
    return f'<div class="remat-listings">{_LEGEND}{"".join(folds)}{rest}</div>'


_LEGEND = (
    '<p class="remat-legend"><u class="remat-saved">saved</u> for the backward pass; '
    '<u class="remat-again">recomputed</u> in it; <u class="remat-saved remat-again">both</u></p>'
)


def _line_of(span: SourceSpan) -> _Line:
    return (span.file, span.cell, span.line)


def _sections(report: Report, rows: Sequence[Attribution]) -> Iterator[_Section]:
    """The texts of the report, then the lines that are in none of them, by cell and file."""
    texts = report.sources
    home = next((text.file for text in texts if text.function.rpartition(".")[2] == report.function.rpartition(".")[2]),
                texts[0].file if texts else "")  # fmt: skip
    listed = set[_Line]()
    for text in texts:
        lines = _listed(text)
        listed.update((text.file, text.cell, number) for number, _, _ in lines)
        yield _Section(text, text.cell is not None or text.file == home, lines)
    others: dict[tuple[str, int | None], list[SourceSpan]] = {}
    for row in rows:
        span = row.source
        if span is not None and _line_of(span) not in listed:
            others.setdefault((span.file, span.cell), []).append(span)
    for (file, cell), spans in others.items():
        lines = tuple((span.line, line := split_lines(span.text)[0], words(line)[0]) for span in spans)
        unfolded = cell is not None or not texts
        yield _Section(SourceText(file, cell, "", 0, ""), unfolded, lines)


def _listed(text: SourceText) -> tuple[Listed, ...]:
    tokenized = zip(split_lines(text.text), words(text.text), strict=True)
    return tuple((number, line, words_of_line) for number, (line, words_of_line) in enumerate(tokenized, text.line))


def _fold(section: _Section, rows: dict[int, Attribution | None], attributions: _Attributions, scale: _Scale) -> str:
    places = ((section.text.file, section.text.cell, number) for number, _, _ in section.lines)
    inside = [attribution for place in places for attribution in attributions.get(place, ())]
    marks = marks_by_line(section.lines, inside, scale.live)
    body = list[str]()
    before = section.lines[0][0] - 1 if section.lines else 0
    for number, line, coloured in section.lines:
        if section.gaps and number != before + 1:
            body.append(f'<tr class="remat-gap"><td class="remat-no">⋮</td><td></td>{_costs(None, scale)}</tr>')
        before = number
        row = rows[number]
        key = line_key(SourceSpan(section.text.file, "", number, 0, number, 0, section.text.cell))
        shown = (
            f'<button type="button" class="remat-link" data-pick="{key}" aria-pressed="false" '
            f'data-place="{escape(fmt.location(row.source))}" aria-label="line {number}" title="{_PICK}" {KEYS}>'
            f"{number}</button>"
            if scale.live and row is not None
            else str(number)
        )
        style = "" if scale.live else ' style="white-space:pre"'
        code = f"<code{style}>{marked_code(line.rstrip(), coloured, marks.get(number, ()))}</code>"
        cells = f'<td class="remat-no">{shown}</td><td class="remat-ln"{_left(scale)}>{code}</td>{_costs(row, scale)}'
        body.append(f'<tr data-line="{key}">{cells}</tr>')
    name = " ".join(filter(None, [section.text.place, section.text.function])) or "source"
    return (
        f"<details{' open' if section.unfolded else ''}><summary {KEYS}>{_summary(section, rows, scale)}</summary>"
        f"{_table(f'Lines of {name}', body)}</details>"
    )


def _summary(section: _Section, rows: dict[int, Attribution | None], scale: _Scale) -> str:
    costing = [row for row in rows.values() if row is not None]
    saved = sum(row.saved for row in costing)
    again = Attribution(None, equations=[equation for row in costing for equation in row.equations])
    title = list[str]()
    if section.text.place:
        # The path of a saved notebook's file, or of a cell, tells its readers nothing.
        hover = f' title="{escape(section.text.file)}"' if scale.live and section.text.cell is None else ""
        title.append(f'<span class="remat-place"{hover}>{escape(section.text.place)}</span>')
    if section.text.function:
        title.append(f"<code>{escape(section.text.function)}</code>")
    first, last = section.lines[0][0], section.lines[-1][0]
    parts = [f"line {first}" if first == last else f"lines {first} to {last}"]
    if saved:
        parts.append(f"saved {fmt.nbytes(saved)}")
    if again.equations:
        parts.append(f"recomputed {fmt.flops(again.flops)}")
    if not saved and not again.equations and scale.complete:
        parts.append("nothing saved or recomputed")
    return " ".join([*title, f"<small>{', '.join(parts)}</small>"])


def _table(caption: str, rows: Iterable[str], head: bool = True) -> str:
    heads = "".join(
        f'<th scope="col" class="remat-{kind}">{text}</th>'
        for text, kind in (("Line", "no"), ("Source", "ln"), ("Saved", "cost"), ("Recomputed", "cost"))
    )
    return (
        f'<table class="remat-table remat-listing"><caption class="remat-hidden">{escape(caption)}</caption>'
        f"{f'<thead><tr>{heads}</tr></thead>' if head else ''}<tbody>{''.join(rows)}</tbody></table>"
    )


def _left(scale: _Scale) -> str:
    # A static output may have lost its style sheet, and JupyterLab aligns cells right.
    return "" if scale.live else ' style="text-align:left"'


def _costs(row: Attribution | None, scale: _Scale) -> str:
    """The two last cells of a row."""
    if row is None:
        # A saved output does without, since it is repeated for every cell; the widget's have a background.
        return '<td class="remat-cost"></td><td class="remat-cost"></td>' if scale.live else ""
    saved = fmt.nbytes(row.saved) if row.residuals else ""
    flops = fmt.flops(row.flops) if row.equations else ""
    again = _cost(flops, row.repeats, row.flops or 0, scale.flops, "again")
    return _cost(saved, row.saves, row.saved, scale.saved, "saved") + again


def _cost(text: str, title: str, number: int, most: int, kind: str) -> str:
    if not text:
        return '<td class="remat-cost"></td>'
    width = f"{max(1.0, 100 * number / most):.1f}" if number and most else ""
    bar = f'<span class="remat-fill remat-fill-{kind}" style="width:{width}%"></span>' if width else ""
    shown = f'<span>{escape(text)} <span class="remat-track">{bar}</span></span>'
    return f'<td class="remat-cost" title="{escape(title)}">{shown}</td>'
