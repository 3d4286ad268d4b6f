"""The cells and tables that the views in HTML are made of."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_magic.records import Equation, PlannedValue, Residual, SourceSpan
from remat_magic.views.format import count, escape, exact, location, nbytes
from remat_magic.views.linking import linked
from remat_magic.views.rows import Home, RecomputedRow, ResidualRow, made_by, near, place

# On the focused element itself, or JupyterLab takes keys like "dd" as its own and deletes the cell.
KEYS = 'data-lm-suppress-shortcuts="true"'


# The style sheet shows at least so many characters of an expression.
_CUT_OFF = 20


def code_html(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"<code>{escape(text)}</code>" if text else ""


def with_code(sentence: str) -> str:
    """A sentence in which what stands between backticks looks like code."""
    return _QUOTED.sub(r"<code>\1</code>", escape(sentence))


_QUOTED = re.compile("`([^`]+)`")


def made_by_html(
    what: str,
    of: Residual | Equation | PlannedValue,
    name: str = "",
    also: Iterable[str] = (),
    home: Home | None = None,
) -> str:
    """What made a value and where: the operation, its checkpoint name, the user's expression, and the loops around.

    Args:
        what: the operation, or the name of an argument.
        of: what is made.
        name: a checkpoint name.
        also: what else can have made it.
        home: the file or cell whose lines are told by their numbers alone.
    """
    named = f' <span class="remat-name-of">named {code_html(name)}</span>' if name else ""
    made = f'<span class="remat-what">{code_html(what)}</span>{named}'
    if of.source is not None:
        hover = f' title="in {escape(of.source.function)}"' if of.source.function else ""
        expression = expression_html(of.source.expression)
        made += f"{f' in {expression}' if expression else ''}"
        made += f', <span class="remat-place"{hover}>{escape(near(of.source, home))}</span>'
    if of.library is not None:
        hover = escape(f"{of.library.expression} in {of.library.function}")
        made += f' <small class="remat-library" title="{hover}">{escape(made_by(of.library))}</small>'
    if of.path:
        made += f', <small class="remat-path">{escape(place(of.path))}</small>'
    return made + "".join(f"<br><small>or {escape(other)}</small>" for other in also)


def expression_html(text: str) -> str:
    """An expression, which the style sheet cuts off, and which is whole on hover."""
    hover = f' title="{escape(text)}"' if len(text) > _CUT_OFF else ""
    return f'<code class="remat-expression"{hover}>{escape(text)}</code>' if text else ""


def planned_cells(value: PlannedValue, times: str | None, numbers: str) -> tuple[str, str]:
    """The type of a value, and what makes it: two cells.

    Args:
        value: one value, or the first of several.
        times: how many of them there are, where that is not told by the value.
        numbers: which of them, for the hover.
    """
    if times is None:
        times = f"x{value.times:,}" if value.times > 1 else ""
    hover = f' title="{escape(numbers)}"' if numbers else ""
    times = f' <span class="remat-times"{hover}>{escape(times)}</span>' if times else ""
    return (
        td("type", f"{code_html(value.type)}{times}"),
        td("made", made_by_html(value.primitive, value, value.name or "")),
    )


def table(
    caption: str, heads: Sequence[tuple[str, str]], rows: Sequence[str], kinds: Iterable[str] = ("stacks",)
) -> str:
    """A table with its caption for screen readers; heads are pairs of text and kind, rows are HTML.

    Of the ``kinds``, "stacks" has the cells of each row stacked where there is little room.
    """
    cells = "".join(
        f'<th scope="col" class="remat-{kind}"{_left(kind)}{_HOVERS.get(kind, "")}>{escape(head)}</th>'
        for head, kind in heads
    )
    classes = " ".join(["remat-table", *(f"remat-{kind}" for kind in kinds)])
    return (
        f'<table class="{classes}"><caption class="remat-hidden">{escape(caption)}</caption>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


TOP_ROWS = 10  # of a table of what is held


@dataclass(frozen=True, slots=True)
class HeldRow:
    """``count`` values that are alike and held at a peak; ``nbytes`` are those of all together."""

    count: int
    nbytes: int
    type: str
    kind: str
    what: str
    source: SourceSpan | None
    library: SourceSpan | None = None


def held_table(caption: str, kind: str, rows: Sequence[HeldRow], top: int, noun: str) -> str:
    """What is held at a peak, the biggest first.

    Args:
        caption: stands above.
        kind: the head of the column of kinds.
        rows: all of it.
        top: how many rows are shown; the others are one together.
        noun: what it is.
    """
    body = list[str]()
    for row in rows[:top]:
        times = f' <span class="remat-times">x{row.count}</span>' if row.count > 1 else ""
        what = code_html(row.what)
        if row.source:
            where = f'<span class="remat-place">{escape(row.source.place)}</span>'
            what += f" in {expression_html(row.source.expression)}, {where}"
        what += f" <small>{escape(location(row.library))}</small>" if row.library else ""
        body.append(
            f'<tr class="remat-row">{_size(row.nbytes)}'
            f'<td class="remat-type"><code>{escape(row.type)}</code>{times}</td>'
            f'<td class="remat-kind">{escape(row.kind)}</td>'
            f'<td class="remat-made">{what}</td></tr>'
        )
    if rest := rows[top:]:
        number = count(sum(row.count for row in rest), f"more {noun}")
        size = _size(sum(row.nbytes for row in rest))
        body.append(f'<tr class="remat-row">{size}<td colspan="3">in {number}</td></tr>')
    heads = "".join(
        f'<th scope="col" class="remat-{column}">{head}</th>'
        for head, column in (("Size", "num"), ("Value", "type"), (kind, "kind"), ("Made by", "made"))
    )
    return (
        f'<table class="remat-table remat-stacks"><caption style="text-align:left">{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _size(number: int) -> str:
    return f'<td class="remat-num" title="{exact(number, "bytes")}">{nbytes(number)}</td>'


_HOVERS = {"share": ' title="of all that is of its kind"'}


def _left(kind: str) -> str:
    """Said in the cell itself, since JupyterLab drops the style sheet of an untrusted notebook and aligns right."""
    return "" if kind in ("num", "share") else ' style="text-align:left"'


def row_html(classes: str, row: ResidualRow | RecomputedRow, number: int | None, cells: Sequence[str]) -> str:
    """A row of a table of values or operations, with what a script filters, adds up and compares it by.

    ``data-k`` tells rows of two policies that are of the same values, ``data-n`` counts these, and ``data-value`` is
    the bytes or FLOPs of all together, left out where unknown.
    """
    first = row.first
    what = (
        (row.type, row.kind, row.label, row.also)
        if isinstance(row, ResidualRow)
        else (row.kind, row.primitive, row.outputs)
    )
    expression = first.source.expression if first.source else ""
    where = (location(first.source), expression, made_by(first.library), place(first.path))
    identity = zlib.crc32(repr((what, row.name, where)).encode("utf-8", "replace"))
    origins = first.origins if isinstance(first, Residual) else ()
    links = linked(*(origin.source for origin in (first, *origins)), library=first.library)
    value = "" if number is None else f' data-value="{number}"'
    return (
        f'<tr class="remat-row {classes}" data-k="{identity:x}" data-n="{row.count}"{value}{links}>'
        f"{''.join(cells)}</tr>"
    )


def td(kind: str, content: str, title: str = "") -> str:
    """A cell of a column of some kind; ``content`` is HTML, ``title`` text for the hover."""
    hover = f' title="{escape(title)}"' if title else ""
    return f'<td class="remat-{kind}"{_left(kind)}{hover}>{content}</td>'
