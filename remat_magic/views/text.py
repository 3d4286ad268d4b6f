"""A report as rich text, for terminals and for the plain half of an output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import rich.text
from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.table import Table

from remat_magic.records import TEXTLESS, Equation, Program, Report, Residual
from remat_magic.views import format as fmt
from remat_magic.views.answer import notes, place_words
from remat_magic.views.jaxpr_text import folded_lines
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
_NUMBERS = ("Size", "Cost", "Runs", "Saved", "Recomputed", "Needed", "Extra time", "Extra FLOPs")

_MARKS = {"repeated": ("R", "yellow"), "deferred": ("D", "cyan"), "": (" ", "")}


class Text(rich.text.Text):
    """rich's text, which passes escape sequences on to the terminal, without them."""

    def __init__(
        self, text: str = "", style: str = "", *, overflow: OverflowMethod | None = None, no_wrap: bool | None = None
    ) -> None:
        super().__init__(printable(text), style, overflow=overflow, no_wrap=no_wrap)

    def append(self, text: Any, style: Any = None) -> rich.text.Text:
        """Add text."""
        return super().append(printable(text) if isinstance(text, str) else text, style)


def line(*parts: str | tuple[str, str], wrap: bool = False) -> Text:
    """Text of parts, each with its style or without.

    Args:
        *parts: the parts.
        wrap: whether it goes on in the next line where one is too short; else it is cut off there.
    """
    text = Text() if wrap else Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        text.append(*((part,) if isinstance(part, str) else part))
    return text


def render(report: Report, title: str = "", folded: bool = False) -> Group:
    """The whole report as a rich renderable.

    Args:
        report: what to show.
        title: a line to put before everything, of how the report came about.
        folded: whether the parameters of operations are left out of the jaxprs where they take lines of their own.
    """
    return Group(*map(Text, filter(None, [title])), *_parts(report, folded))


def plain(report: Report, width: int = 100, title: str = "") -> str:
    """The whole report as text without colours, no line longer than ``width`` columns; arguments as for ``render``."""
    return printed(render(report, title), width)


def printed(shown: RenderableType, width: int) -> str:
    """What rich prints without colours, no line longer than ``width`` columns."""
    file = StringIO()
    # Inside Jupyter a rich console displays what it prints, whatever file it is given.
    console = Console(file=file, force_jupyter=False, force_terminal=False, color_system=None, width=width)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def _parts(report: Report, folded: bool) -> Iterator[RenderableType]:
    yield Text(report.signature or report.function, style="bold")
    if report.wrt:
        yield Text(f"differentiated: {', '.join(report.wrt)}", style="dim")
    yield line("policy ", (report.label, "bold"), place_words(report.at), wrap=True)
    yield Text()
    yield totals_table(report)
    if sentences := [*notes(report), *uncounted(report)]:
        table = grid()
        for sentence in sentences:
            table.add_row(Text("!", style="yellow"), Text(sentence))
        yield table
    if report.code:
        yield Text()
        yield Text(report.code, style="bold")
    saved = _residuals(report) if report.residuals else Text("Nothing is saved for the backward pass.")
    yield from _section(f"Residuals ({len(report.residuals)})", saved)
    if report.complete and not report.backward_error:
        again = _recomputed(report) if report.recomputed else Text("The backward pass recomputes nothing.")
        yield from _section(f"Recomputed ({len(report.recomputed)})", again)
    if report.sites:
        yield from _section(f"Checkpoint sites ({len(report.sites)})", _sites(report))
    for title, jaxpr in (("Forward", report.forward), ("Backward", report.backward)):
        if jaxpr.textless or jaxpr.lines:
            lines = [Text(f"Not here: {TEXTLESS}", "dim")] if jaxpr.textless else _jaxpr(jaxpr, folded)
            yield from _section(f"{title} jaxpr, {fmt.count(jaxpr.equations, 'equation')}", *lines)


def _section(heading: str, *below: RenderableType) -> list[RenderableType]:
    return [Text(), Text(heading, style="bold underline"), *below]


def grid(*columns: str) -> Table:
    """A table without lines; numbers go to the right."""
    table = Table(box=None, show_header=bool(columns), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        right = column in _NUMBERS
        table.add_column(column, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def totals_table(report: Report) -> Table:
    """The headline's numbers, and whose they are."""
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


def what_text(label: str, name: str) -> str:
    """What made a value, with its checkpoint name."""
    return f"{label} named {name!r}" if name else label


def source_words(of: Residual | Equation) -> Sequence[str]:
    """The line of the source, that of a library that it called, and the loops around; empty where there is none."""
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
        what = what_text(row.label, row.name)
        what = f"{row.kind} {what}" if what != row.kind else what
        others = (f"or {other}" for other in row.also)
        readers = _readers(row, report.complete)
        table.add_row(size, _cell(type_, row.whole), _cell(what, *others, *source_words(row.first), readers))
    return table


def _recomputed(report: Report) -> Table:
    table = grid("Cost", "Runs", "What")
    for row in recomputed_rows(report):
        runs = Text("unknown" if row.runs is None else f"{row.runs:,}")
        what = f"{row.kind[0].upper()} {row.kind} {what_text(row.primitive, row.name)}"
        table.add_row(Text(row.cost), runs, _cell(what, ", ".join(row.outputs), *source_words(row.first)))
    return table


def _sites(report: Report) -> Table:
    table = grid("Site", "Calls", "As written", "Source")
    for site in report.sites:
        table.add_row(
            _cell(site.function), _cell(f"x{site.times}"), _cell(site.policy), _cell(fmt.location(site.source))
        )
    return table


def _jaxpr(jaxpr: Program, folded: bool) -> Iterator[Text | Table]:
    table = grid()
    parts = folded_lines(jaxpr.lines) if folded else ((first,) for first in jaxpr.lines)
    shown = list(itertools.islice(parts, _JAXPR_LINES))
    for first, *inside in shown:
        letter, style = _MARKS[first.recomputation]
        # Indentation is structure here; a wrapped table cell would drop it.
        text = Text(first.text, style=style, overflow="fold")
        if inside:
            text.append(f"…{inside[-1].text.lstrip()}")
            first = replace(first, residuals=(*first.residuals, *inside[-1].residuals))
        if first.residuals:
            text.highlight_regex(residual_words(first), "bold underline")
        table.add_row(Text(letter, style=f"bold {style}"), text)
    yield table
    hidden = len(jaxpr.lines) - sum(map(len, shown))
    if hidden > 0:
        yield Text(f"… {hidden:,} more lines; all of them are in report.forward.text and report.backward.text", "dim")
