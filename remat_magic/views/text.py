"""A report as rich text, for terminals and for the plain half of an output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import rich.text
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType, RenderResult
from rich.table import Table

from remat_magic.records import TEXTLESS, Equation, Program, Report, Residual
from remat_magic.views import format as fmt
from remat_magic.views.rows import (
    ResidualRow,
    made_by,
    place,
    recomputed_rows,
    residual_rows,
    residual_words,
    unread,
)
from remat_magic.views.totals import totals, uncounted
from remat_magic.wording import printable

# A terminal's scrollback is no place for twelve thousand lines.
_JAXPR_LINES = 200
_LAID_OUT = 500  # equations: some 20 ms
_NUMBERS = ("Size", "Cost", "Runs", "Budget", "Saved", "Recomputed", "Bound")

_MARKS = {"repeated": ("R", "yellow"), "deferred": ("D", "cyan"), "": (" ", "")}


class Text(rich.text.Text):
    """rich's text, which passes escape sequences on to the terminal, without them."""

    def __init__(
        self,
        text: str = "",
        style: str = "",
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        no_wrap: bool | None = None,
        end: str = "\n",
        tab_size: int | None = None,
    ) -> None:
        super().__init__(
            printable(text), style, justify=justify, overflow=overflow, no_wrap=no_wrap, end=end, tab_size=tab_size
        )

    def append(self, text: Any, style: Any = None) -> rich.text.Text:
        """Add text; ``Text.assemble`` does so too."""
        return super().append(printable(text) if isinstance(text, str) else text, style)


class _View:
    """What ``render`` returns: it fits itself to the console that prints it."""

    def __init__(self, report: Report, title: str, lay_out: bool = True) -> None:
        self.report, self.title, self.lay_out = report, title, lay_out

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title)
        yield from _parts(self.report, self.lay_out)


def render(report: Report, title: str = "") -> _View:
    """The report as a rich renderable.

    Args:
        report: what to show.
        title: a line to put before everything, of how the report came about.
    """
    return _View(report, title)


def plain(
    report: Report, width: int = 100, title: str = "", lay_out: bool = True, most_lines: int | None = None
) -> str:
    """The report as text without colours, no line longer than ``width`` columns.

    Args:
        report: what to show.
        width: columns.
        title: a line to put before everything.
        lay_out: whether large jaxprs whose text nobody has asked for yet are printed too, and not counted only.
        most_lines: how many lines it may have; the others are counted. Default: any number.
    """
    lines = printed(_View(report, title, lay_out), width).splitlines(keepends=True)
    if most_lines is None or len(lines) <= most_lines:
        return "".join(lines)
    return f"{''.join(lines[:most_lines])}\n… {len(lines) - most_lines:,} more lines; run the cell for all\n"


def printed(shown: RenderableType, width: int) -> str:
    """What rich prints without colours, no line longer than ``width`` columns."""
    file = StringIO()
    # Inside Jupyter a rich console displays what it prints, whatever file it is given.
    console = Console(file=file, force_jupyter=False, force_terminal=False, color_system=None, width=width)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _parts(report: Report, lay_out: bool) -> Iterator[rich.text.Text | Table]:
    yield Text(report.signature or report.function, style="bold")
    if report.wrt:
        yield Text(f"differentiated: {', '.join(report.wrt)}", style="dim")
    at = f" at {report.at}" if report.at and report.at != "function" else ""
    yield Text.assemble("policy ", (report.label, "bold"), at)
    yield Text()
    yield _totals(report)
    sentences = [*filter(None, [report.backward_error]), *report.notes]
    sentences += uncounted(report)
    if sentences:
        notes = grid()
        for sentence in sentences:
            notes.add_row(Text("!", style="yellow"), Text(sentence))
        yield notes
    if report.code:
        yield Text()
        yield Text(report.code, style="bold")
    yield Text()
    yield _heading(f"Residuals ({len(report.residuals)})")
    yield _residuals(report) if report.residuals else Text("Nothing is saved for the backward pass.")
    if report.complete and not report.backward_error:
        yield Text()
        yield _heading(f"Recomputed ({len(report.recomputed)})")
        empty = Text("The backward pass recomputes nothing.")
        yield _recomputed(report) if report.recomputed else empty
    if report.sites:
        yield Text()
        yield _heading(f"Checkpoint sites ({len(report.sites)})")
        yield _sites(report)
    for title, jaxpr in (("Forward", report.forward), ("Backward", report.backward)):
        left_out = jaxpr.textless or (not (lay_out or jaxpr.laid_out) and jaxpr.equations > _LAID_OUT)
        if left_out or jaxpr.lines:
            yield Text()
            yield _heading(f"{title} jaxpr, {fmt.count(jaxpr.equations, 'equation')}")
            if left_out:
                where = f"In Python it is report.{title.lower()}.text."
                yield Text(f"Not here: {TEXTLESS}" if jaxpr.textless else where, "dim")
            else:
                yield from _jaxpr(jaxpr)


def _heading(text: str) -> Text:
    return Text(text, style="bold underline")


def grid(*columns: str) -> Table:
    """A table without lines; numbers go to the right."""
    table = Table(box=None, show_header=bool(columns), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        right = column in _NUMBERS
        table.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _totals(report: Report) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    if report.of_devices:
        table.add_row(Text("figures"), Text(), Text(report.of_devices))
    for total in totals(report):
        table.add_row(Text(total.label), Text(total.value, style="bold"), Text(total.detail, style="dim"))
    return table


def _cell(*lines: str) -> Text:
    return Text("\n".join(filter(None, lines)), overflow="fold")


def _what(label: str, name: str) -> str:
    return f"{label} named {name!r}" if name else label


def _source(of: Residual | Equation) -> Sequence[str]:
    source = f"{fmt.location(of.source)} {of.source.expression}".rstrip() if of.source else ""
    return (source, made_by(of.library), f"in {place(of.path)}" if of.path else "")


def _readers(row: ResidualRow, complete: bool) -> str:
    readers = row.needed_by
    if not readers:
        return unread(row, complete)
    other_readers = f", and {len(readers) - 2} more" if len(readers) > 2 else ""
    return "; ".join(readers[:2]) + other_readers


def _residuals(report: Report) -> Table:
    table = grid("Size", "Type", "What")
    for row in residual_rows(report):
        size = Text(fmt.nbytes(row.nbytes), style="bold" if row.kind == "intermediate" else "")
        type_ = f"{row.type} x{row.count}" if row.count > 1 else row.type
        what = _what(row.label, row.name)
        what = f"{row.kind} {what}" if what != row.kind else what
        others = (f"or {other}" for other in row.also)
        readers = _readers(row, report.complete)
        table.add_row(size, _cell(type_, row.whole), _cell(what, *others, *_source(row.first), readers))
    return table


def _recomputed(report: Report) -> Table:
    table = grid("Cost", "Runs", "What")
    for row in recomputed_rows(report):
        runs = Text("unknown" if row.runs is None else f"{row.runs:,}")
        what = f"{row.kind[0].upper()} {row.kind} {_what(row.primitive, row.name)}"
        table.add_row(Text(row.cost), runs, _cell(what, ", ".join(row.outputs), *_source(row.first)))
    return table


def _sites(report: Report) -> Table:
    table = grid("Site", "Calls", "As written", "Source")
    for site in report.sites:
        table.add_row(
            _cell(site.function), _cell(f"x{site.times}"), _cell(site.policy), _cell(fmt.location(site.source))
        )
    return table


def _jaxpr(jaxpr: Program) -> Iterator[Text | Table]:
    table = grid()
    for line in jaxpr.lines[:_JAXPR_LINES]:
        letter, style = _MARKS[line.recomputation]
        # Indentation is structure here; a wrapped table cell would drop it.
        text = Text(line.text, style=style, overflow="fold")
        if line.residuals:
            text.highlight_regex(residual_words(line), "bold underline")
        table.add_row(Text(letter, style=f"bold {style}"), text)
    yield table
    hidden = len(jaxpr.lines) - _JAXPR_LINES
    if hidden > 0:
        yield Text(f"… {hidden:,} more lines; all of them are in report.forward.text and report.backward.text", "dim")
