"""The source text, each line with what it saves and what the backward pass computes again.

What a library makes that the user's lines call is among the figures of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from remat_magic.records import Report, SourceSpan, SourceText
from remat_magic.views import format as fmt
from remat_magic.views.attribution import Attribution, expressions, line_rows
from remat_magic.views.format import escape
from remat_magic.views.highlight import Word, split_lines, words
from remat_magic.views.linking import line_key
from remat_magic.views.marks import Listed, Mark, marked_code, marks_by_line
from remat_magic.views.tables import KEYS

_Line = tuple[str, int | None, int]  # file, cell, number
_Attributions = dict[_Line, list[Attribution]]  # by the lines that they begin on

_PICK = "Only this line, in tables and jaxprs; once more shows all again"


@dataclass(frozen=True, slots=True)
class _Section:
    """Lines of one cell or file under one fold."""

    text: SourceText
    unfolded: bool
    lines: tuple[Listed, ...]
    gaps: bool = False  # whether it is told where lines are left out


@dataclass(frozen=True, slots=True)
class _Scale:
    """What a full bar stands for, and whether there are scripts."""

    saved: int
    flops: int
    complete: bool
    live: bool


def listing_html(report: Report, live: bool = False, most: int | None = None) -> str:
    """The source that a function was traced from, with the costs of each line and marks on the expressions.

    Args:
        report: of which policy.
        live: whether a script is at hand, for which the numbers of lines become buttons.
        most: so many of the user's lines alone are shown, those that save and recompute most. Default: all of it.
    """
    rows = line_rows(report)
    if not rows and not report.sources:
        return '<p class="remat-empty">No line saves or recomputes anything.</p>'
    scale = _Scale(
        max((row.saved for row in rows), default=0),
        max((row.flops or 0 for row in rows), default=0),
        report.complete,
        live,
    )
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
    rest = "" if nowhere is None else _table("What no line of yours makes", _nowhere(nowhere, scale), head=False)
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
        code = _code_cell(line, coloured, marks.get(number, ()), scale)
        body.append(f'<tr data-line="{key}"><td class="remat-no">{shown}</td>{code}{_costs(row, scale)}</tr>')
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
        # The path of a kept notebook's file, or of a cell, tells its readers nothing.
        hover = f' title="{escape(section.text.file)}"' if scale.live and section.text.cell is None else ""
        title.append(f'<span class="remat-place"{hover}>{escape(section.text.place)}</span>')
    if section.text.function:
        title.append(f"<code>{escape(section.text.function)}</code>")
    parts = [_range(section)]
    if saved:
        parts.append(f"saved {fmt.nbytes(saved)}")
    if again.equations:
        parts.append(f"recomputed {fmt.flops(again.flops)}")
    if not saved and not again.equations and scale.complete:
        parts.append("nothing saved or recomputed")
    return " ".join([*title, f"<small>{', '.join(parts)}</small>"])


def _range(section: _Section) -> str:
    numbers = [number for number, _, _ in section.lines]
    if len(numbers) == 1:
        return f"line {numbers[0]}"
    return f"lines {numbers[0]} to {numbers[-1]}"


def _table(caption: str, rows: Iterable[str], head: bool = True) -> str:
    heads = "".join(
        f'<th scope="col" class="remat-{kind}">{text}</th>'
        for text, kind in (("Line", "no"), ("Source", "ln"), ("Saved", "cost"), ("Recomputed", "cost"))
    )
    return (
        f'<table class="remat-table remat-listing"><caption class="remat-hidden">{escape(caption)}</caption>'
        f"{f'<thead><tr>{heads}</tr></thead>' if head else ''}<tbody>{''.join(rows)}</tbody></table>"
    )


def _nowhere(row: Attribution, scale: _Scale) -> list[str]:
    return [
        f'<tr><td class="remat-no"></td><td class="remat-ln"{_left(scale)}><i>no line of yours</i></td>'
        f"{_costs(row, scale)}</tr>"
    ]


def _left(scale: _Scale) -> str:
    # A static output may have lost its style sheet, and JupyterLab aligns cells right.
    return "" if scale.live else ' style="text-align:left"'


def _code_cell(line: str, coloured: Sequence[Word], marks: Sequence[Mark], scale: _Scale) -> str:
    style = "" if scale.live else ' style="white-space:pre"'
    return f'<td class="remat-ln"{_left(scale)}><code{style}>{marked_code(line.rstrip(), coloured, marks)}</code></td>'


def _costs(row: Attribution | None, scale: _Scale) -> str:
    """The two last cells of a row."""
    if row is None:
        # A kept output does without, since it is repeated for every cell; the widget's have a background.
        return '<td class="remat-cost"></td><td class="remat-cost"></td>' if scale.live else ""
    saved = fmt.nbytes(row.saved) if row.residuals else ""
    flops = fmt.flops(row.flops) if row.equations else ""
    return _cost(saved, row.saves, row.saved, scale.saved, "saved") + _cost(
        flops, row.repeats, row.flops or 0, scale.flops, "again"
    )


def _cost(text: str, title: str, number: int, most: int, kind: str) -> str:
    if not text:
        return '<td class="remat-cost"></td>'
    width = f"{max(1.0, 100 * number / most):.1f}" if number and most else ""
    bar = f'<span class="remat-fill remat-fill-{kind}" style="width:{width}%"></span>' if width else ""
    shown = f'<span>{escape(text)} <span class="remat-track">{bar}</span></span>'
    return f'<td class="remat-cost" title="{escape(title)}">{shown}</td>'
