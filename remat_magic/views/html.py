"""A report as HTML fragments for the widget, and as one static page part that needs no script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

from remat_magic.records import Note, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.jaxpr_text import chunks, live_chunks, pane
from remat_magic.views.listing import listing_html
from remat_magic.views.peak_bar import peak_bar_html
from remat_magic.views.rows import RecomputedRow, ResidualRow, recomputed_rows, residual_rows, unread
from remat_magic.views.tables import KEYS, code_html, row_html, table, td, what_html, where_html
from remat_magic.views.totals import totals, uncounted

__all__ = ["jaxprs", "page_html", "report_html", "style", "whole"]

STATIC = Path(__file__).parent / "static"
_SHEETS = ("report.css", "source.css", "glance.css")  # in the order of the cascade

# What only the widget's script reads. Text cannot look like it: quotes are escaped there.
_LINKS = re.compile(r' data-(?:e|k|n|o|value|total|unit|line)="[^"]*"')

# A kept notebook holds each of these lines for every cell: beyond this, the text is one call away in Python.
_STATIC_LINES = 1000


@cache
def style(live: bool = False) -> str:
    """The style sheet, without what only its authors read: every kept output repeats it.

    Args:
        live: with what only the widget needs.
    """
    names = (*_SHEETS, "widget.css", "calm.css", "choosing.css") if live else _SHEETS
    text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)
    text = re.sub(r"/\*.*?\*/|\s+", " ", text, flags=re.DOTALL)
    return re.sub(r" ?([{};]) ?", r"\1", text).strip()


@cache
def _script() -> str:
    """What makes a dropdown of the folded policies, where scripts run; without what only its authors read."""
    lines = (STATIC / "kept.js").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if not line.lstrip().startswith("//"))


def totals_html(report: Report) -> str:
    """The headline's numbers, readable as a sentence where no style sheet is applied."""
    whose = f'<small class="remat-label">{report.of_devices}: </small>' if report.of_devices else ""
    items = list[str]()
    for number, total in enumerate(totals(report)):
        separator = '<span class="remat-hidden">; </span>' if number else ""
        value = "" if total.number is None else f' data-value="{total.number}"'
        items.append(
            f'<span class="remat-total" data-total="{total.key}" data-unit="{total.unit}"{value} '
            f'title="{escape(total.exact)}">{separator}'
            f'<small class="remat-label">{escape(total.label)}</small> <b>{escape(total.value)}</b> '
            f'<small class="remat-detail">{escape(total.detail)}</small></span>'
        )
    return f'{whose}<div class="remat-totals">{"".join(items)}</div>'


def notes_html(report: Report, live: bool = False) -> str:
    """The sentences that the reader must see.

    Args:
        report: of which policy.
        live: whether a script is at hand, which shows a long one in one line until it is unfolded.
    """
    sentences: list[str] = [*report.notes]
    if report.backward_error:
        sentences.insert(0, report.backward_error)
    sentences += uncounted(report)
    return "".join(map(_live_note if live else _note, sentences))


def _note(sentence: str) -> str:
    return f'<p class="remat-note">{_marked(sentence)}</p>'


def _live_note(sentence: str) -> str:
    button = whole(sentence.kind if isinstance(sentence, Note) else "note", "The whole note")
    return f'<p class="remat-note remat-briefly"><span class="remat-brief">{_marked(sentence)}</span>{button}</p>'


def _marked(sentence: str) -> str:
    return f'<b aria-hidden="true">!</b> {escape(sentence)}'


def whole(kind: str, label: str) -> str:
    """The button after what is one line (``remat-brief``), cut off if it is longer, until the reader unfolds it.

    Args:
        kind: what it is: all that is of one kind stays unfolded, or folded, as the reader left it.
        label: for screen readers.
    """
    return (
        f'<button type="button" class="remat-link remat-whole" data-action="whole" data-whole="{kind}" hidden '
        f'aria-expanded="false" aria-label="{label}" title="Show all of it; what is unfolded stays so" {KEYS}></button>'
    )


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


# So many rows, the biggest, are seen at first: more is not read at a glance.
_FIRST = 5


def residuals_html(report: Report, folded: bool = False) -> str:
    """The residual table.

    Args:
        report: of which policy.
        folded: for where no script is: but for the biggest rows all are folded, in tables of their own. Else all are
            in one, and the script folds them.
    """
    if not report.residuals:
        return '<p class="remat-empty">Nothing is saved for the backward pass.</p>'
    kept, alive = list[ResidualRow](), list[ResidualRow]()
    for row in residual_rows(report):
        (kept if row.kept else alive).append(row)
    nothing_saved = "" if kept else '<p class="remat-empty">Nothing is saved but what is alive anyway.</p>'
    if not folded:
        return nothing_saved + _residuals(report, kept, alive)
    folds = [
        (f"the other {fmt.count(sum(row.count for row in kept[_FIRST:]), 'value')}", kept[_FIRST:]),
        *((fmt.count(sum(row.count for row in rows), noun), rows) for noun, rows in _by_noun(alive)),
    ]
    return (
        nothing_saved
        + (_residuals(report, kept[:_FIRST], kept=kept, plain=True) if kept else "")
        + "".join(
            f"<details><summary>{what}, {fmt.nbytes(sum(row.nbytes for row in rows))}</summary>"
            f"{_residuals(report, rows, kept=kept, plain=True)}</details>"
            for what, rows in folds
            if rows
        )
    )


def _by_noun(alive: Sequence[ResidualRow]) -> list[tuple[str, list[ResidualRow]]]:
    arguments = [row for row in alive if row.kind == "argument"]
    return [("argument", arguments), ("constant", [row for row in alive if row.kind != "argument"])]


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
            kind = row.kind.split()[0]
            hidden = kind == "intermediate"  # it says nothing to those who see that it is no argument
            kind_cell = td(
                "kind", f'<span class="remat-hidden">{escape(row.kind)}</span>' if hidden else escape(row.kind)
            )
            cells = [
                td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes")),
                _share(row, sums.get(kind, report.constant_bytes), most),
                td("type", f"<code>{escape(row.type)}</code>{times}{_replicated(row)}"),
                "" if plain and one_kind else kind_cell,
                td("what", what_html(row.label, row.name, row.also)),
                td("source", where_html(row)),
                td("needed", _needed(row, report.complete)),
            ]
            html_rows.append(row_html(f"remat-{kind}", row, row.nbytes, cells))
    heads = [("Size", "num"), ("Share", "share"), ("Type", "type"), ("Kind", "kind"), ("What", "what"),
             ("Source", "source"), ("Needed by", "needed")]  # fmt: skip
    if plain and one_kind:
        heads.remove(("Kind", "kind"))
    return table("Values saved for the backward pass", heads, html_rows, ("stacks", "shares", *["one-kind"] * one_kind))


def _replicated(row: ResidualRow) -> str:
    """That no device is spared a value."""
    return f' <small class="remat-whole">{row.whole}</small>' if row.whole else ""


def _share(row: ResidualRow, whole: int, most: int) -> str:
    """How much of all that is of its kind a row is, as a number; by ``--s`` the style sheet draws the bar."""
    if row.dropped or not whole:
        return "<td></td>"
    return f'<td class="remat-share" style="--s:{row.nbytes / most:.2g}">{fmt.percent(row.nbytes, whole)}</td>'


def _runs(row: RecomputedRow) -> str:
    return "unknown" if row.runs is None else f"{row.runs:,}"


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
            td("num", _runs(row)),
            td("kind", f'<i class="remat-letter">{row.kind[0].upper()}</i> {row.kind}'),
            td("what", what_html(row.primitive, row.name)),
            td("type", code_html(", ".join(row.outputs))),
            td("source", where_html(row)),
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


_LEGEND = (
    '<p class="remat-legend"><b class="remat-v">variable</b> is a residual; '
    '<i class="remat-letter">R</i> repeated: also ran in the forward pass; '
    '<i class="remat-letter">D</i> deferred: runs only in the backward pass</p>'
)


def jaxprs(report: Report, bodies: bool = True) -> str:
    """Both jaxprs side by side; without ``bodies`` only their frames, for a script to fill chunk by chunk."""
    forward = _chunked(chunks(report.forward)) if bodies else ""
    backward = _chunked(chunks(report.backward)) if bodies else ""
    panes = pane("Forward", report.forward, forward) + pane("Backward", report.backward, backward)
    return f'{_LEGEND}<div class="remat-panes">{panes}</div>'


def _chunked(pieces: Iterable[str]) -> str:
    return "".join(f'<div class="remat-chunk">{piece}</div>' for piece in pieces)


def _static_jaxprs(report: Report, most: float) -> str:
    halves = (report.forward, report.backward)
    number, noun = sum(half.equations for half in halves), "equation"
    if number <= most or all(half.laid_out for half in halves):  # a large one is not laid out for being left out
        number, noun = sum(len(half.lines) for half in halves), "line"
    if not number:
        return ""
    size = fmt.count(number, noun)
    if number > most:
        body = (
            f'<p class="remat-empty">{size} are not kept in the notebook; in Python they are '
            "<code>report.forward.text</code> and <code>report.backward.text</code>.</p>"
        )
    else:
        body = jaxprs(report)
    return f"<details><summary>Forward and backward jaxprs, {size}</summary>{body}</details>"


def _lines(report: Report) -> str:
    return (
        f"<details><summary>Your source, line by line</summary>{listing_html(report)}</details>"
        if report.complete
        else ""
    )


def _choice(report: Report) -> str:
    places = {"": "", "function": "", "sites": " at its checkpoint sites"}
    at = places.get(report.at, f" at <code>{escape(report.at)}</code>")
    return f'<span class="remat-choice"><code>{escape(report.label)}</code>{at}</span>'


def _tables(report: Report, jaxprs_html: str = "") -> str:
    recomputed = fmt.count(len(report.recomputed), "operation")
    title = f"Recomputed, {recomputed}" if report.complete and report.recomputed else "Recomputed"
    return (
        f"{notes_html(report)}{residuals_html(report, folded=True)}"
        f"<details><summary>{title}</summary>{recomputed_html(report)}</details>{jaxprs_html}"
    )


def signature_html(signature: str, wrt: Iterable[str]) -> str:
    """What is inspected, and with respect to what."""
    names = ", ".join(wrt)
    differentiated = f' <small class="remat-wrt">differentiated: {escape(names)}</small>' if names else ""
    text = escape(signature)
    return f'<div class="remat-signature"><code title="{text}">{text}</code>{differentiated}</div>'


def report_html(report: Report, others: Iterable[Report] = ()) -> str:
    """One static fragment that serves without scripts, and is still readable where its style sheet is removed too.

    Args:
        report: the chosen policy, shown in full.
        others: every other report at hand, each folded up below its totals, those that are the same together.
    """
    return _whole(report, others, _STATIC_LINES)


def _whole(report: Report, others: Iterable[Report], most_lines: float) -> str:
    rest = list(map(folded, others))
    return static(unfolded(report, most_lines), rest, own=folded(report) if rest else None)


def page_html(report: Report, others: Iterable[Report] = ()) -> str:
    """A whole page that stands alone; arguments as for ``report_html``, the jaxprs in full however long they are."""
    title = escape(f"{report.function or 'remat_magic'}: {report.label}")
    # Without JupyterLab's colours those of a light page are used, whatever the browser prefers.
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light}'
        "body{background:#fff;margin:1em auto;max-width:1400px;padding:0 1em}</style></head>"
        f"<body><main>{_whole(report, others, inf)}</main></body></html>\n"
    )


@dataclass(frozen=True, slots=True)
class Folded:
    """A report to be unfolded, as HTML: its choice, what to paste for it, and what others may share with it."""

    choice: str
    code: str
    totals: str
    body: str


def folded(report: Report, of_memory: tuple[str, int] | None = None) -> Folded:
    """A report under its totals, without its jaxprs, which would make every notebook big."""
    body = f"{peak_bar_html(report, hover=False, of_memory=of_memory)}{_tables(report)}"
    return Folded(_choice(report), _code(report), _LINKS.sub("", totals_html(report)), _LINKS.sub("", body))


def _code(report: Report) -> str:
    return f'<div class="remat-code">{code_html(report.code)}</div>' if report.code else ""


def _others(others: Iterable[Folded], own: Folded | None) -> str:
    """Those of which all is the same under one fold, and those that are as the chosen one in a sentence."""
    same: dict[tuple[str, str], list[Folded]] = {}
    for other in others:
        same.setdefault((other.totals, other.body), []).append(other)
    alike = same.pop((own.totals, own.body), []) if own else []
    as_chosen = (
        f'<div class="remat-alike">The same as the above: {_named(alike)} {_codes(alike)}</div>' if alike else ""
    )
    return as_chosen + "".join(
        f'<details class="remat-other"><summary>{_named(equal)} {totals}</summary>{_codes(equal)}{body}</details>'
        for (totals, body), equal in same.items()
    )


def _named(alike: Sequence[Folded]) -> str:
    kind = "equal" if len(alike) > 1 else "chosen"
    return f'<span class="remat-{kind}">{" = ".join(report.choice for report in alike)}</span>'


def _codes(alike: Iterable[Folded]) -> str:
    return "".join(report.code for report in alike)


def unfolded(report: Report, most_lines: float = _STATIC_LINES, of_memory: tuple[str, int] | None = None) -> str:
    """A report in full, with its jaxprs if they have no more than ``most_lines`` lines."""
    return _LINKS.sub(
        "",
        f"{signature_html(report.signature or report.function, report.wrt)}"
        f'<div class="remat-report"><div class="remat-chosen">Policy {_choice(report)}</div>'
        f"{totals_html(report)}{peak_bar_html(report, of_memory=of_memory)}{_code(report)}"
        f"{_tables(report, _lines(report) + _static_jaxprs(report, most_lines))}</div>",
    )


def title_html(title: str) -> str:
    """How the report came about."""
    return f'<div class="remat-title">{escape(title)}</div>' if title else ""


def static(
    chosen: str,
    others: Iterable[Folded] = (),
    title: str = "",
    own: Folded | None = None,
    kept: str = "",
    twin: str = "",
) -> str:
    """``report_html`` of what ``unfolded`` and ``folded`` have rendered already, the chosen one's in ``own``.

    ``kept`` is a sentence that tells the reader that this is a copy, ``twin`` what the live widget knows it by.
    """
    rest = _others(others, own)
    rest = f"<h4>Other policies</h4>{rest}<script>{_script()}</script>" if rest else ""
    remark = f'<p class="remat-empty">{escape(kept)}</p>' if kept else ""
    of = f' data-twin="{escape(twin)}"' if twin else ""
    return (
        f'<div class="remat remat-static"{of}><style>{style()}</style>{title_html(title)}{remark}{chosen}{rest}</div>'
    )


def lazy_chunks(report: Report) -> dict[str, list[str]]:
    """The jaxprs for the script that fills the panes: lists of HTML, 100 lines each."""
    return {"forward": live_chunks(report.forward), "backward": live_chunks(report.backward)}
