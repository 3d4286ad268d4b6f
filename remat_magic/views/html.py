"""A report as one static fragment that needs no script, and as a whole page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from remat_magic.records import Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.headline import notes_html, signature_html, title_html, totals_html
from remat_magic.views.jaxpr_text import jaxprs
from remat_magic.views.listing import listing_html
from remat_magic.views.peak_bar import peak_bar_html
from remat_magic.views.report_tables import recomputed_html, residuals_html
from remat_magic.views.style import STATIC, style
from remat_magic.views.tables import code_html

__all__ = ["Folded", "folded", "page_html", "report_html", "static", "unfolded"]

# What only the widget's script reads. Text cannot look like it: quotes are escaped there.
_LINKS = re.compile(r' data-(?:e|k|n|o|value|total|unit|line)="[^"]*"')

# A kept notebook holds each of these lines for every cell: beyond this, the text is one call away in Python.
_STATIC_LINES = 1000


def report_html(report: Report, others: Iterable[Report] = ()) -> str:
    """One static fragment that serves without scripts, and is still readable where its style sheet is removed too.

    Args:
        report: the chosen policy, shown in full.
        others: every other report at hand, each folded up below its totals, those that are the same together.
    """
    return _whole(report, others, _STATIC_LINES)


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


def _whole(report: Report, others: Iterable[Report], most_lines: float) -> str:
    rest = list(map(folded, others))
    return static(unfolded(report, most_lines), rest, own=folded(report) if rest else None)


def unfolded(report: Report, most_lines: float = _STATIC_LINES, of_memory: tuple[str, int] | None = None) -> str:
    """A report in full, with its jaxprs if they have no more than ``most_lines`` lines."""
    return _LINKS.sub(
        "",
        f"{signature_html(report.signature or report.function, report.wrt)}"
        f'<div class="remat-report"><div class="remat-chosen">Policy {_choice(report)}</div>'
        f"{totals_html(report)}{peak_bar_html(report, of_memory=of_memory)}{_code(report)}"
        f"{_tables(report, _lines(report) + _static_jaxprs(report, most_lines))}</div>",
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


@cache
def _script() -> str:
    """What makes a dropdown of the folded policies, where scripts run; without what only its authors read."""
    lines = (STATIC / "kept.js").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if not line.lstrip().startswith("//"))


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


def _choice(report: Report) -> str:
    places = {"": "", "function": "", "sites": " at its checkpoint sites"}
    at = places.get(report.at, f" at <code>{escape(report.at)}</code>")
    return f'<span class="remat-choice"><code>{escape(report.label)}</code>{at}</span>'


def _code(report: Report) -> str:
    return f'<div class="remat-code">{code_html(report.code)}</div>' if report.code else ""


def _tables(report: Report, jaxprs_html: str = "") -> str:
    recomputed = fmt.count(len(report.recomputed), "operation")
    title = f"Recomputed, {recomputed}" if report.complete and report.recomputed else "Recomputed"
    return (
        f"{notes_html(report)}{residuals_html(report, folded=True)}"
        f"<details><summary>{title}</summary>{recomputed_html(report)}</details>{jaxprs_html}"
    )


def _lines(report: Report) -> str:
    return (
        f"<details><summary>Your source, line by line</summary>{listing_html(report)}</details>"
        if report.complete
        else ""
    )


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
