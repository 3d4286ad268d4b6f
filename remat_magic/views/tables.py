"""Tables: what stands in them, said once, and how they are written as HTML and as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import rich.table
import rich.text
from rich.console import Console, OverflowMethod, RenderableType

from remat_magic.errors import printable
from remat_magic.records import Equation, PlannedValue, Residual, SourceSpan
from remat_magic.views.format import escape, exact, nbytes, percent

# On the focused element itself, or JupyterLab takes keys like "dd" as its own and deletes the cell.
KEYS = 'data-lm-suppress-shortcuts="true"'

# The style sheet shows at least so many characters of an expression.
_CUT_OFF = 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a cell: its text, and what it is, which the style sheet has a class for.

    Of the kinds, "code" is code, "what" an operation or the name of an argument, "name" a checkpoint name,
    "expression" one of the user's, and "yes", "no" and "perhaps" whether something fits. ``html`` stands in a page in
    place of the text.
    """

    text: str
    kind: str = ""
    hover: str = ""
    html: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its parts, in which ``"\\n"`` ends a line; ``bar`` is the length of the bar beside, of 1 at most."""

    parts: tuple[Part | str, ...]
    hover: str = ""
    bar: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``html`` are attributes that a script reads it by, ``kinds`` its classes besides."""

    cells: tuple[Cell, ...]
    html: str = ""
    kinds: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: of each column the head and the kind.

    The ``caption`` is for screen readers, or for everybody where it is ``visible``. Of the ``kinds`` of the table,
    "stacks" has the cells of each row stacked where the page is narrow. Columns of the kinds "num" and "share" are
    numbers; the last ones, from one of the kind "made" on, stand below one another in a terminal.
    """

    caption: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    kinds: str = "stacks"
    visible: bool = False


def cell(*parts: Part | str, hover: str = "", bar: float | None = None) -> Cell:
    """A cell of its parts, without empty ones."""
    return Cell(tuple(filter(None, parts)), hover, bar)


def size(number: int, shown: str | None = None) -> Cell:
    """A cell of bytes, with the exact number on hover."""
    return cell(nbytes(number) if shown is None else shown, hover=exact(number, "bytes"))


def share_bar(number: int, whole: int, most: int) -> Cell:
    """A share of the whole, with a bar that is full for ``most``; empty for nothing."""
    return cell(percent(number, whole), bar=number / most) if number and whole else cell()


def typed(text: str, times: int | str = 1, hover: str = "", *more: Part | str) -> Cell:
    """A type, and how many values are of it."""
    shown = times if isinstance(times, str) else f"x{times:,}" if times > 1 else ""
    named = (Part(text, "code"),) if text else ()
    return cell(*named, *((" " * bool(text), Part(shown, "times", hover)) if shown else ()), *more)


Home = tuple[str, int | None]
"""The file, and the cell, whose lines are shown by their numbers alone."""


def near(span: SourceSpan | None, home: Home | None) -> str:
    """Where a span starts: its line alone at home; empty for None."""
    if span is None:
        return ""
    return f"line {span.line}" if (span.file, span.cell) == home else span.place


def path_words(path: Iterable[str]) -> str:
    """A path for reading, outermost first: ``scan x12 / block``."""
    return " / ".join(path)


def made_by(library: SourceSpan | None) -> str:
    """The line of a library that makes a value: ``by flax/linen/linear.py:287``; nothing for none."""
    return f"by {library.place}" if library is not None else ""


def made(
    what: str,
    of: Residual | Equation | PlannedValue,
    name: str = "",
    also: Iterable[str] = (),
    home: Home | None = None,
) -> Cell:
    """What made a value and where: the operation or argument, its checkpoint name, the user's line, the loops around.

    ``also`` is what else can have made it; lines of ``home`` are shown by their numbers alone.
    """
    parts: list[Part | str] = [Part(what, "what")]
    if name:
        parts += [" ", Part(name, "name")]
    parts += at_source(of.source, home)
    if of.library is not None:
        hover = f"{of.library.expression} in {of.library.function}"
        parts += [" ", Part(made_by(of.library), "library", hover)]
    if of.path:
        parts += [", ", Part(path_words(of.path), "path")]
    for other in also:
        parts += ["\n", Part(f"or {other}", "also")]
    return cell(*parts)


def at_source(source: SourceSpan | None, home: Home | None = None) -> list[Part | str]:
    """The expression and its line, to follow what it is."""
    if source is None:
        return []
    expression = [" in ", Part(source.expression, "expression")] if source.expression else []
    hover = f"in {source.function}" if source.function else ""
    return [*expression, ", ", Part(near(source, home), "place", hover)]


def planned(value: PlannedValue, times: str, numbers: str) -> tuple[Cell, Cell]:
    """The type of a value, or the first of so many ``times``, and what makes it: two cells; ``numbers`` is a hover."""
    return typed(value.type, times, numbers), made(value.primitive, value, value.name or "")


# ------------------------------------------------------------------------------------------------------------- as HTML


def with_code(sentence: str) -> str:
    """A sentence in which what stands between backticks looks like code."""
    return _QUOTED.sub(r"<code>\1</code>", escape(sentence))


_QUOTED = re.compile("`([^`]+)`")


def expression_html(text: str) -> str:
    """An expression, which the style sheet cuts off, and which is whole on hover."""
    hover = f' title="{escape(text)}"' if len(text) > _CUT_OFF else ""
    return f'<code class="remat-expression"{hover}>{escape(text)}</code>' if text else ""


def table_html(table: Table, heads: bool = True) -> str:
    """A table as HTML, whose rows a script can find; without ``heads`` there are none, nor a caption."""
    classes = " ".join(["remat-table", *(f"remat-{kind}" for kind in table.kinds.split())])
    head = ""
    if heads:
        where = ' style="text-align:left"' if table.visible else ' class="remat-hidden"'
        cells = "".join(
            f'<th scope="col" class="remat-{kind}"{_left(kind)}{_HOVERS.get(kind, "")}>{escape(text)}</th>'
            for text, kind in table.columns
        )
        head = f"<caption{where}>{escape(table.caption)}</caption><thead><tr>{cells}</tr></thead>"
    kinds = [kind for _, kind in table.columns]
    rows = list[str]()
    for row in table.rows:
        cells = "".join(_cell_html(one, kind) for one, kind in zip(row.cells, kinds, strict=True))
        rows.append(f'<tr class="{f"remat-row {row.kinds}".rstrip()}"{row.html}>{cells}</tr>')
    return f'<table class="{classes}">{head}<tbody>{"".join(rows)}</tbody></table>'


_HOVERS = {"share": ' title="of all that is of its kind"'}
_SMALL = ("also", "kind", "library", "path", "whole")


def _left(kind: str) -> str:
    """Said in the cell itself, since JupyterLab drops the style sheet of an untrusted notebook and aligns right."""
    return "" if kind in ("num", "share", "buttons") else ' style="text-align:left"'


def _cell_html(one: Cell, kind: str) -> str:
    hover = f' title="{escape(one.hover)}"' if one.hover else ""
    look = _left(kind) if one.bar is None else f' style="--s:{one.bar:.2g}"'
    if kind == "share" and one.bar is None:
        return "<td></td>"
    return f'<td class="remat-{kind}"{look}{hover}>{"".join(map(_part_html, one.parts))}</td>'


def _part_html(part: Part | str) -> str:
    if isinstance(part, str):
        return "<br>" if part == "\n" else escape(part)
    if part.html:
        return part.html
    text = escape(part.text)
    match part.kind:
        case "":
            return text
        case "code":
            return f"<code>{text}</code>" if text else ""
        case "expression":
            return expression_html(part.text)
        case "what":
            return f'<span class="remat-what"><code>{text}</code></span>'
        case "name":
            return f'<span class="remat-name-of">named <code>{text}</code></span>'
        case kind:
            tag = "small" if kind in _SMALL else "span"
            hover = f' title="{escape(part.hover)}"' if part.hover else ""
            return f'<{tag} class="remat-{kind}"{hover}>{text}</{tag}>'


# ------------------------------------------------------------------------------------------------------------- as text


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
    """Text of parts, each with its style or without; what is too long for a line is cut off there unless ``wrap``."""
    text = Text() if wrap else Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        text.append(*((part,) if isinstance(part, str) else part))
    return text


def printed(shown: RenderableType, width: int) -> str:
    """What rich prints without colours, no line longer than ``width`` columns."""
    file = StringIO()
    # Inside Jupyter a rich console displays what it prints, whatever file it is given.
    console = Console(file=file, force_jupyter=False, force_terminal=False, color_system=None, width=width)
    console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def grid(*columns: str) -> rich.table.Table:
    """A table of rich's without lines, with heads if there are any."""
    table = rich.table.Table(
        box=None, show_header=any(columns), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def table_text(table: Table, *, brief: bool = False, heads: bool = True) -> rich.table.Table:
    """A table as text, without what only a page can draw; if ``brief``, each row is one line, which is cut off."""
    kinds = [kind for _, kind in table.columns]
    below = kinds.index("made") + 1 if "made" in kinds else len(kinds)
    shown = [number for number, kind in enumerate(kinds[:below]) if kind not in _DRAWN]
    made = grid(*(table.columns[number][0] if heads else "" for number in shown))
    for column, number in zip(made.columns, shown, strict=True):
        if kinds[number] == "num":
            column.justify, column.no_wrap = "right", "policy" not in kinds  # or so many that they would not fit
    for row in table.rows:
        *cells, last = (_cell_text(row.cells[number], brief) for number in shown)
        more = () if brief else filter(None, (_cell_text(one) for one in row.cells[below:]))
        made.add_row(*cells, Text("\n").join([last, *more]) if not brief else last)
    return made


_DRAWN = ("share", "life", "mini", "buttons")
_STYLES = {"yes": "bold green", "no": "bold red", "perhaps": "bold", "also": "dim", "path": "dim", "library": "dim"}


def _cell_text(one: Cell, brief: bool = False) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis") if brief else Text(overflow="fold")
    for part in one.parts:
        if isinstance(part, str):
            text.append(" " if brief and part == "\n" else part)
        else:
            text.append(f"named {part.text!r}" if part.kind == "name" else part.text, _STYLES.get(part.kind))
    return text
