"""A report as one static fragment that needs no script, as a whole page, and as the copy that a notebook keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import inf
from pathlib import Path

from remat_magic.records import TEXTLESS, Report
from remat_magic.views import format as fmt
from remat_magic.views.fit import saves_html
from remat_magic.views.format import escape
from remat_magic.views.headline import head_html, line_html, notes_html, notes_of, totals
from remat_magic.views.jaxpr_text import jaxprs
from remat_magic.views.memory import peak_bar_html
from remat_magic.views.source import listing_html
from remat_magic.views.tables import Part, Row, Table, cell, table_html
from remat_magic.views.values import recomputed_html, residuals_html

# What only the widget's script reads. Text cannot look like it: quotes are escaped there.
_LINKS = re.compile(r' data-(?:e|k|n|o|value|total|unit|line)="[^"]*"')

# So many lines of jaxprs a cell's output has, and so many a kept copy: more are one call away in Python.
_STATIC_LINES = 1000
_COPY_LINES = 100

# So many characters a policy is called by, which can list hundreds of names, and so many bytes its code has, and the
# notes together.
_LABEL, _LONGEST = 300, 4000

# So many values, lines and other choices are tried in a kept copy, the biggest first; None: all.
_MOST_ROWS = (None, 200, 100, 60, 40, 30, 20, 15, 10, 5)


def report_html(report: Report) -> str:
    """One static fragment that serves without scripts, and is still readable where its style sheet is removed too."""
    return static(_unfolded(report, _STATIC_LINES))


def page_html(report: Report, others: Iterable[Report] = ()) -> str:
    """A whole page that stands alone: the report with its jaxprs in full, and the figures of the others."""
    title = escape(f"{report.function or 'remat_magic'}: {report.label}")
    rest = _others(list(map(others_row, others)))
    # Without JupyterLab's colours those of a light page are used, whatever the browser prefers.
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light}'
        "body{background:#fff;margin:1em auto;max-width:1400px;padding:0 1em}</style></head>"
        f"<body><main>{static(_unfolded(report, inf) + rest)}</main></body></html>\n"
    )


def static(shown: str, copy_id: str = "") -> str:
    """HTML with the style sheet that it needs; ``copy_id`` is what the live widget knows it by."""
    of = f' data-copy="{escape(copy_id)}"' if copy_id else ""
    return f'<div class="remat remat-static"{of}><style>{_rules_for(shown)}</style>{shown}</div>'


def copy_html(
    report: Report,
    others: Sequence[Row] = (),
    *,
    title: str = "",
    remark: str = "",
    copy_id: str = "",
    answer: str = "",
    step: str = "",
    most: int,
) -> str:
    """What a notebook keeps of a widget: the values and the source of a report, and the figures of other choices.

    ``others`` are rows by ``others_row``, ``answer`` is the HTML of whether it fits the chosen device and what to
    change, and ``copy_id`` what the live widget finds it by. What is too long for ``most`` bytes is left out, with a
    sentence.
    """
    copy = f'<p class="remat-empty">{escape(remark)}</p>' if remark else ""
    head = f'<div class="remat-title">{escape(title)}</div>' if title else ""
    head += f"{copy}{_head(report, answer, step, _LONGEST)}"
    programs, page = _jaxprs(report, _COPY_LINES), ""
    for rows in _MOST_ROWS:
        values, rest = residuals_html(report, folded=True, most=rows), _others(others, rows)
        page = static(_LINKS.sub("", f"{head}{values}{_source(report, rows)}{rest}{programs}"), copy_id)
        if len(page.encode()) <= most:
            break
    return page


def _unfolded(report: Report, most_lines: float) -> str:
    """A report in full, with its jaxprs if they have no more than ``most_lines`` lines."""
    recomputed = fmt.count(len(report.recomputed), "operation")
    title = f"Recomputed, {recomputed}" if report.complete and report.recomputed else "Recomputed"
    return _LINKS.sub(
        "",
        f"{_head(report)}{residuals_html(report, folded=True)}"
        f"<details><summary>{title}</summary>{recomputed_html(report)}</details>"
        f"{_source(report)}{_jaxprs(report, most_lines)}",
    )


def _head(report: Report, answer: str = "", step: str = "", longest: float = inf) -> str:
    """What is inspected, whether it fits or what is saved, and the choice; no longer code or notes than ``longest``."""
    shown = sum(size <= longest for size in accumulate(len(escape(note).encode()) for note in report.notes))
    label = report.label if longest == inf else fmt.truncate(report.label, _LABEL)
    short = replace(report, label=label, notes=report.notes[:shown])
    code = f'<div class="remat-code"><code>{escape(report.code)}</code></div>' if report.code else ""
    if len(escape(report.code).encode()) > longest:
        code = '<p class="remat-empty">The code is not kept in the notebook: it is <code>report.code</code>.</p>'
    answer = answer or f'<div class="remat-verdict">{saves_html(report)}</div>{peak_bar_html(report)}'
    line = "; ".join(filter(None, line_html(report)))
    return (
        f"{head_html(report.signature, report.function, step, report.wrt)}{answer}"
        f'<div class="remat-chosen">Policy {_choice(short)}: {line}</div>{code}{notes_html(notes_of(short))}'
        f"{_more(len(report.notes) - shown, 'more note')}"
    )


def _choice(report: Report) -> str:
    places = {"": "", "function": "", "sites": " at its checkpoint sites"}
    at = places.get(report.at, f" at <code>{escape(report.at)}</code>")
    return f"<code>{escape(report.label)}</code>{at}"


def others_row(report: Report) -> Row:
    """A choice and its figures: a row of the table of those that are not shown."""
    values = {total.key: total.value for total in totals(report)}
    name = cell(Part("", html=_choice(replace(report, label=fmt.truncate(report.label, _LABEL)))))
    return Row((name, *(cell(values.get(key, "")) for key in _FIGURES)))


_FIGURES = ("saved", "repeated", "deferred", "peak")


def _others(rows: Sequence[Row], most: int | None = None) -> str:
    """Other choices by their figures."""
    if not rows:
        return ""
    heads = [("Policy", "policy"), *((figure.capitalize(), "num") for figure in _FIGURES)]
    shown = table_html(Table("Other choices", heads, rows[:most], ""))
    more = _more(0 if most is None else max(0, len(rows) - most), "more choice")
    return f"<details open><summary>Other choices, {len(rows)}</summary>{shown}{more}</details>"


def _source(report: Report, most: int | None = None) -> str:
    """The source with its costs, or so many of the lines that have most."""
    if not report.complete:
        return ""
    what = "Your source, line by line" if most is None else "The lines that cost most"
    return f"<details><summary>{what}</summary>{listing_html(report, most=most)}</details>"


def _more(number: int, noun: str) -> str:
    return f'<p class="remat-empty">{fmt.count(number, noun)}; run the cell for all.</p>' if number else ""


def _jaxprs(report: Report, most: float) -> str:
    halves = (report.forward, report.backward)
    number, noun = sum(half.equations for half in halves), "equation"
    textless = any(half.textless for half in halves)
    # A large one is not laid out for being left out.
    if not textless and (number <= most or all(half.laid_out for half in halves)):
        number, noun = sum(len(half.lines) for half in halves), "line"
    if not number:
        return ""
    size = fmt.count(number, noun)
    if textless:
        body = f'<p class="remat-empty">Not here: {TEXTLESS}</p>'
    elif number <= most:
        body = jaxprs(report)
    else:
        body = (
            f'<p class="remat-empty">{size} are not kept in the notebook; in Python they are '
            "<code>report.forward.text</code> and <code>report.backward.text</code>.</p>"
        )
    return f"<details><summary>Forward and backward jaxprs, {size}</summary>{body}</details>"


# ----------------------------------------------------------------------------------------------------- the style sheets


_STATIC = Path(__file__).parent / "static"

_SHEETS = ("report.css", "source.css", "glance.css")  # in the order of the cascade


@cache
def style(live: bool = False) -> str:
    """The style sheet, without what only its authors read.

    Args:
        live: with what only the widget needs.
    """
    names = (*_SHEETS, "widget.css", "choosing.css") if live else _SHEETS
    text = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)
    text = re.sub(r"/\*.*?\*/|\s+", " ", text, flags=re.DOTALL)
    return re.sub(r" ?([{};]) ?", r"\1", text).strip()


def _rules_for(shown: str) -> str:
    """The rules of the style sheet that this HTML has classes for.

    Each output of a notebook has rules of its own, since JupyterLab takes outputs off the page that are scrolled away.
    """
    there = {"remat", "remat-static", *re.findall(r"remat-[\w-]+", shown)}

    def applies(selector: str) -> bool:
        return there.issuperset(re.findall(r"\.(remat[\w-]*)", re.sub(r":(?:is|not|has)\([^()]*\)", "", selector)))

    def rule(found: re.Match[str]) -> str:
        selectors = ",".join(filter(applies, re.split(r",(?![^(]*\))", found[1])))  # not at commas within :is(...)
        return f"{selectors}{{{found[2]}}}" if selectors else ""

    return re.sub(r"@[^{}]*{}", "", re.sub(r"([^{}]+){([^{}]*)}", rule, style()))
