"""The cells and tables that the views in HTML are made of."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_magic.records import Equation, PlannedValue, Residual, SourceSpan
from remat_magic.views.format import count, escape, exact, location, nbytes
from remat_magic.views.linking import linked
from remat_magic.views.rows import RecomputedRow, ResidualRow, made_by, place

# On the focused element itself, or JupyterLab takes keys like "dd" as its own and deletes the cell.
KEYS = 'data-lm-suppress-shortcuts="true"'


# The style sheet shows at least so many characters of an expression.
_CUT_OFF = 20


def code_html(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"<code>{escape(text)}</code>" if text else ""


def where_html(of: Residual | Equation | PlannedValue, inside: bool = True) -> str:
    """The place in the user's source, its expression, the line of a library that it called, and the loops around.

    Args:
        of: what stands there.
        inside: whether the function around it is told on hover.
    """
    parts = list[str]()
    if of.source is not None:
        hover = f' title="in {escape(of.source.function)}"' if inside and of.source.function else ""
        parts += [
            f'<span class="remat-place"{hover}>{escape(of.source.place)}</span>',
            _expression(of.source.expression),
        ]
    if of.library is not None:
        hover = escape(f"{of.library.expression} in {of.library.function}")
        parts.append(f'<small class="remat-path" title="{hover}">{escape(made_by(of.library))}</small>')
    if of.path:
        parts.append(f'<small class="remat-path">in {escape(place(of.path))}</small>')
    return " ".join(filter(None, parts))


def _expression(text: str) -> str:
    """An expression; one that may be cut off is whole on hover."""
    hover = f' title="{escape(text)}"' if len(text) > _CUT_OFF else ""
    return f"<code{hover}>{escape(text)}</code>" if text else ""


def what_html(label: str, name: str, also: Iterable[str] = ()) -> str:
    """What made a value, its checkpoint name, and what else can have made it."""
    named = f' <span class="remat-name-of">named <code>{escape(name)}</code></span>' if name else ""
    others = "".join(f"<br><small>or {escape(other)}</small>" for other in also)
    return f"{code_html(label)}{named}{others}"


def planned_cells(value: PlannedValue, times: str | None, numbers: str) -> tuple[str, str, str]:
    """What makes a value, its type, and where: three cells.

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
        td("what", what_html(value.primitive, value.name or "")),
        td("type", f"{code_html(value.type)}{times}"),
        td("source", where_html(value, inside=False)),
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
        expression = escape(row.source.expression) if row.source else ""
        place_html = f'<span class="remat-place">{escape(location(row.source))}</span>' if row.source else ""
        library = f" <small>{escape(location(row.library))}</small>" if row.library else ""
        body.append(
            f'<tr class="remat-row">{_size(row.nbytes)}'
            f'<td class="remat-type"><code>{escape(row.type)}</code>{times}</td>'
            f'<td class="remat-kind">{escape(row.kind)}</td>'
            f'<td class="remat-what"><code>{escape(row.what)}</code></td>'
            f'<td class="remat-source">{place_html} <code title="{expression}">{expression}</code>{library}</td></tr>'
        )
    if rest := rows[top:]:
        number = count(sum(row.count for row in rest), f"more {noun}")
        size = _size(sum(row.nbytes for row in rest))
        body.append(f'<tr class="remat-row">{size}<td colspan="4">in {number}</td></tr>')
    heads = "".join(
        f'<th scope="col" class="remat-{column}">{head}</th>'
        for head, column in (("Size", "num"), ("Type", "type"), (kind, "kind"), ("What", "what"), ("Source", "source"))
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
