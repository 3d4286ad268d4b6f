"""The head of a report as HTML: what is inspected, its numbers, and the sentences that the reader must see."""

from __future__ import annotations

from collections.abc import Iterable

from remat_magic.records import Note, Report
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS
from remat_magic.views.totals import totals, uncounted


def title_html(title: str) -> str:
    """How the report came about."""
    return f'<div class="remat-title">{escape(title)}</div>' if title else ""


def signature_html(signature: str, wrt: Iterable[str]) -> str:
    """What is inspected, and with respect to what."""
    names = ", ".join(wrt)
    differentiated = f' <small class="remat-wrt">differentiated: {escape(names)}</small>' if names else ""
    text = escape(signature)
    return f'<div class="remat-signature"><code title="{text}">{text}</code>{differentiated}</div>'


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
    return "".join(_note(sentence, live) for sentence in sentences)


def _note(sentence: str, live: bool) -> str:
    marked = f'<b aria-hidden="true">!</b> {escape(sentence)}'
    if not live:
        return f'<p class="remat-note">{marked}</p>'
    button = whole(sentence.kind if isinstance(sentence, Note) else "note", "The whole note")
    return f'<p class="remat-note remat-briefly"><span class="remat-brief">{marked}</span>{button}</p>'


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
