"""The head of a report as HTML: what is inspected, its numbers, and the sentences that the reader must see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from remat_magic.records import Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.totals import totals, uncounted


def title_html(title: str) -> str:
    """How the report came about."""
    return f'<div class="remat-title">{escape(title)}</div>' if title else ""


def head_html(signature: str, function: str, step: str, wrt: Iterable[str], title: str = "") -> str:
    """What is inspected.

    Args:
        signature: of what is differentiated.
        function: its name.
        step: the training step that takes its gradient; empty for none.
        wrt: with respect to what it is differentiated.
        title: how the inspection came about.
    """
    text, name = escape(signature or function), escape(function)
    told = f"<b>{name}</b><code>{text.removeprefix(name)}</code>"
    if step:
        told = f"<b>{escape(step)}</b> gradient of <code>{text}</code>"
    names = ", ".join(wrt)
    differentiated = f' <small class="remat-wrt">differentiated: {escape(names)}</small>' if names else ""
    came = f' <small class="remat-title">{escape(title)}</small>' if title else ""
    hover = escape(" ".join(filter(None, [signature, f"differentiated: {names}." if names else "", title])))
    return f'<span class="remat-signature" title="{hover}">{told}{came}{differentiated}</span>'


# What the line of a choice tells, by its total, and how it says it; the others are rarer.
_SAID = {"saved": "saves", "offloaded": "offloads", "repeated": "repeats"}


def line_html(report: Report, saved_bytes: int | None = None) -> tuple[str, str]:
    """What a choice saves and repeats, as one sentence, and what else it does.

    Args:
        report: of the choice.
        saved_bytes: what a device keeps for the backward pass, where that is another number than the report's.
    """
    said, rarer = list[str](), list[str]()
    for total in totals(report):
        if total.key == "peak":
            continue
        if total.key == "saved" and saved_bytes is not None:
            total = replace(
                total, value=fmt.nbytes(saved_bytes), exact=fmt.exact(saved_bytes, "bytes"), number=saved_bytes
            )
        value = "" if total.number is None else f' data-value="{total.number}"'
        hover = escape("; ".join(filter(None, [total.exact, total.detail])))
        attributes = f'data-total="{total.key}" data-unit="{total.unit}"{value} title="{hover}"'
        number = f"<b>{escape(total.value)}</b>"
        if total.key in _SAID:
            said.append(f'<span class="remat-total" {attributes}>{_SAID[total.key]} {number}</span>')
        else:
            detail = f" <small>{escape(total.detail)}</small>" if total.detail else ""
            rarer.append(f'<span class="remat-total" {attributes}>{escape(total.label)} {number}{detail}</span>')
    whose = f'<small class="remat-label">{report.of_devices}</small> ' if report.of_devices else ""
    return f"{whose}{', '.join(said)}", "; ".join(rarer)


def notes_of(report: Report) -> list[str]:
    """The sentences that a reader should know of."""
    return [*filter(None, [report.backward_error]), *report.notes, *uncounted(report)]


def notes_html(sentences: Iterable[str]) -> str:
    """Sentences, a paragraph each."""
    return "".join(f'<p class="remat-note">{escape(sentence)}</p>' for sentence in sentences)
