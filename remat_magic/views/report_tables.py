"""The tables of a report as HTML: the values that are saved, and the operations that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.rows import ResidualRow, recomputed_rows, residual_rows, unread
from remat_magic.views.tables import KEYS, code_html, row_html, table, td, what_html, where_html

# So many rows, the biggest, are seen at first: more is not read at a glance.
_FIRST = 5


def residuals_html(report: Report, folded: bool = False, most: int | None = None) -> str:
    """The residual table.

    Args:
        report: of which policy.
        folded: for where no script is: but for the biggest rows all are folded, in tables of their own. Else all are
            in one, and the script folds them.
        most: how many rows are shown at most under each fold, the biggest; the others are counted. Default: all.
    """
    if not report.residuals:
        return '<p class="remat-empty">Nothing is saved for the backward pass.</p>'
    kept, alive = list[ResidualRow](), list[ResidualRow]()
    for row in residual_rows(report):
        (kept if row.kept else alive).append(row)
    nothing_saved = "" if kept else '<p class="remat-empty">Nothing is saved but what is alive anyway.</p>'
    if not folded:
        return nothing_saved + _residuals(report, kept, alive)
    arguments = [row for row in alive if row.kind == "argument"]
    constants = [row for row in alive if row.kind != "argument"]
    folds = [
        (f"the other {fmt.count(sum(row.count for row in kept[_FIRST:]), 'value')}", kept[_FIRST:]),
        *(
            (fmt.count(sum(row.count for row in rows), noun), rows)
            for noun, rows in (("argument", arguments), ("constant", constants))
        ),
    ]
    return (
        nothing_saved
        + (_residuals(report, kept[:_FIRST], kept=kept, plain=True) if kept else "")
        + "".join(
            f"<details><summary>{what}, {fmt.nbytes(sum(row.nbytes for row in rows))}</summary>"
            f"{_residuals(report, rows[:most], kept=kept, plain=True)}{_more(rows, most)}</details>"
            for what, rows in folds
            if rows
        )
    )


def _more(rows: Sequence[ResidualRow], most: int | None) -> str:
    more = rows[len(rows) if most is None else most :]
    if not more:
        return ""
    what = fmt.count(sum(row.count for row in more), "more value")
    size = fmt.nbytes(sum(row.nbytes for row in more))
    return f'<p class="remat-empty">{what}, {size}; run the cell for all.</p>'


def _residuals(
    report: Report, *groups: Sequence[ResidualRow], kept: Sequence[ResidualRow] = (), plain: bool = False
) -> str:
    """A table of groups of rows; a bar of full length is the biggest row of its kind, which ``kept`` may have too.

    Where ``plain`` the kinds are left out if they are all the same: what the table is of says it.
    """
    sums = {"intermediate": report.saved_bytes, "offloaded": report.offloaded_bytes, "argument": report.argument_bytes}
    one_kind = len({row.kind for rows in groups for row in rows}) == 1
    html_rows = list[str]()
    for rows in groups:
        most = max((row.nbytes for row in (*rows, *(kept if rows and rows[0].kept else ()))), default=0)
        for row in rows:
            times = f' <span class="remat-times">x{row.count}</span>' if row.count > 1 else ""
            whole = f' <small class="remat-whole">{row.whole}</small>' if row.whole else ""
            kind = row.first.kind
            hidden = kind == "intermediate"  # it says nothing to those who see that it is no argument
            kind_cell = td(
                "kind", f'<span class="remat-hidden">{escape(row.kind)}</span>' if hidden else escape(row.kind)
            )
            cells = [
                td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes")),
                _share(row, sums.get(kind, report.constant_bytes), most),
                td("type", f"<code>{escape(row.type)}</code>{times}{whole}"),
                "" if plain and one_kind else kind_cell,
                td("what", what_html(row.label, row.name, row.also)),
                td("source", where_html(row.first)),
                td("needed", _needed(row, report.complete)),
            ]
            html_rows.append(row_html(f"remat-{kind}", row, row.nbytes, cells))
    heads = [("Size", "num"), ("Share", "share"), ("Type", "type"), ("Kind", "kind"), ("What", "what"),
             ("Source", "source"), ("Needed by", "needed")]  # fmt: skip
    if plain and one_kind:
        heads.remove(("Kind", "kind"))
    return table("Values saved for the backward pass", heads, html_rows, ("stacks", "shares", *["one-kind"] * one_kind))


def _share(row: ResidualRow, whole: int, most: int) -> str:
    """How much of all that is of its kind a row is, as a number; by ``--s`` the style sheet draws the bar."""
    if row.first.dropped or not whole:
        return "<td></td>"
    return f'<td class="remat-share" style="--s:{row.nbytes / most:.2g}">{fmt.percent(row.nbytes, whole)}</td>'


def _needed(row: ResidualRow, complete: bool) -> str:
    if not row.needed_by:
        return unread(row, complete) or "…"
    readers = [escape(reader) for reader in row.needed_by]
    shown = "".join(f'<div class="remat-reader">{reader}</div>' for reader in readers[:2])
    if len(readers) <= 2:
        return shown
    items = "".join(f"<li>{reader}</li>" for reader in readers[2:])
    summary = f"<summary {KEYS}>and {len(readers) - 2} more</summary>"
    return f"{shown}<details>{summary}<ul>{items}</ul></details>"


def recomputed_html(report: Report) -> str:
    """The recomputed operations."""
    if not report.complete:
        return '<p class="remat-empty">The backward half is being traced.</p>'
    if report.backward_error:
        return f'<p class="remat-empty">{escape(report.backward_error)}</p>'
    if not report.recomputed:
        return '<p class="remat-empty">The backward pass recomputes nothing.</p>'
    rows = list[str]()
    for row in recomputed_rows(report):
        cells = [
            td("num", row.cost, "" if row.flops is None else fmt.exact(row.flops, "FLOPs")),
            td("num", "unknown" if row.runs is None else f"{row.runs:,}"),
            td("kind", f'<i class="remat-letter">{row.kind[0].upper()}</i> {row.kind}'),
            td("what", what_html(row.primitive, row.name)),
            td("type", code_html(", ".join(row.outputs))),
            td("source", where_html(row.first)),
        ]
        rows.append(row_html(f"remat-{row.kind}-row", row, row.flops, cells))
    heads = [
        ("Cost", "num"),
        ("Runs", "num"),
        ("Kind", "kind"),
        ("What", "what"),
        ("Type", "type"),
        ("Source", "source"),
    ]
    return table("Operations that the backward pass recomputes", heads, rows)
