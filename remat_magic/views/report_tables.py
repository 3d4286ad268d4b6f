"""The tables of a report as HTML: the values that are saved, and the operations that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.rows import ResidualRow, home_of_report, recomputed_rows, residual_rows, unread
from remat_magic.views.tables import KEYS, code_html, made_by_html, row_html, table, td, with_code

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
        (fmt.count(sum(row.count for row in rows), noun), rows)
        for noun, rows in (("more value", kept[_FIRST:]), ("argument", arguments), ("constant", constants))
    ]
    return (
        nothing_saved
        + (_residuals(report, kept[:_FIRST], kept=kept) if kept else "")
        + "".join(
            f"<details><summary>{what}, {fmt.nbytes(sum(row.nbytes for row in rows))}</summary>"
            f"{_residuals(report, rows[:most], kept=kept)}{_more(rows, most)}</details>"
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


def _residuals(report: Report, *groups: Sequence[ResidualRow], kept: Sequence[ResidualRow] = ()) -> str:
    """A table of groups of rows; a bar of full length is the biggest row of its kind, which ``kept`` may have too."""
    sums = {"intermediate": report.saved_bytes, "offloaded": report.offloaded_bytes, "argument": report.argument_bytes}
    home = home_of_report(report)
    html_rows = list[str]()
    for rows in groups:
        most = max((row.nbytes for row in (*rows, *(kept if rows and rows[0].kept else ()))), default=0)
        for row in rows:
            times = f' <span class="remat-times">x{row.count}</span>' if row.count > 1 else ""
            whole = f' <small class="remat-whole">{row.whole}</small>' if row.whole else ""
            # That an intermediate is none of the others is seen.
            kind = "" if row.kind == "intermediate" else f' <small class="remat-kind">{escape(row.kind)}</small>'
            cells = [
                td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes")),
                _share(0 if row.first.dropped else row.nbytes, sums.get(row.first.kind, report.constant_bytes), most),
                td("type", f"<code>{escape(row.type)}</code>{times}{kind}{whole}"),
                td("made", made_by_html(row.label, row.first, row.name, row.also, home)),
                td("needed", _needed(row, report.complete)),
            ]
            html_rows.append(row_html(f"remat-{row.first.kind}", row, row.nbytes, cells))
    return table("Values saved for the backward pass", (*_HEADS, ("Needed for", "needed")), html_rows, _KINDS)


_HEADS = (("Size", "num"), ("Share", "share"), ("Value", "type"), ("Made by", "made"))
_KINDS = ("stacks", "shares")


def _share(number: int, whole: int, most: int) -> str:
    """How much of all that is of its kind a row is, as a number; by ``--s`` the style sheet draws the bar."""
    if not number or not whole:
        return "<td></td>"
    return f'<td class="remat-share" style="--s:{number / most:.2g}">{fmt.percent(number, whole)}</td>'


def _needed(row: ResidualRow, complete: bool) -> str:
    if not row.needed_by:
        return unread(row, complete) or "…"
    readers = [with_code(reader) for reader in row.needed_by]
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
    found, home = recomputed_rows(report), home_of_report(report)
    costs = [row.flops or 0 for row in found]
    html_rows = list[str]()
    for row in found:
        runs = "an unknown number of runs" if row.runs is None else fmt.count(row.runs, "run")
        how = f"{row.kind}, {runs}" if row.runs != 1 else row.kind
        cells = [
            td("num", row.cost, "" if row.flops is None else fmt.exact(row.flops, "FLOPs")),
            _share(row.flops or 0, sum(costs), max(costs)),
            td("type", code_html(", ".join(row.outputs))),
            td("made", made_by_html(row.primitive, row.first, row.name, home=home)),
            td("needed", f'<i class="remat-letter">{row.kind[0].upper()}</i> {how}'),
        ]
        html_rows.append(row_html(f"remat-{row.kind}-row", row, row.flops, cells))
    heads = (("Cost", "num"), *_HEADS[1:], ("Kind", "needed"))
    return table("Operations that the backward pass recomputes", heads, html_rows, _KINDS)
