"""The edit of the user's own source as HTML, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat_magic.records import Edit
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

__all__ = ["edit_html", "edit_sentences", "unnamed_sentences"]


def edit_sentences(edit: Edit) -> list[str]:
    """Whether an edit of the user's own source, the best that there is, does what is chosen, and what it costs."""
    best = edit.best
    sentences = list[str]()
    if best is not edit:
        sentences.append(
            "The source cannot name just these values; this edit is the best within the same budget whose every value "
            "has an expression."
        )
    if best.verified:
        sentences.append("Verified: the edited source, traced, saves just what it is to save.")
    saved = "" if best.saved_bytes is None else f"It saves {fmt.nbytes(best.saved_bytes)}"
    if saved and best.recomputed_flops is not None:
        saved += f" and recomputes {fmt.flops(best.recomputed_flops)}"
    if saved:
        sentences.append(
            f"{saved}; asked for were {fmt.nbytes(edit.planned_bytes)} and {fmt.flops(edit.planned_flops)}."
        )
    if best.budget_bytes is not None:
        what = "estimated peak" if best.of == "peak" else "saved bytes"
        excess = "whether it keeps to it is not known" if best.excess_bytes is None else "it keeps to it"
        if best.excess_bytes:
            excess = f"it exceeds that by {fmt.nbytes(best.excess_bytes)}"
        sentences.append(f"The budget was {fmt.nbytes(best.budget_bytes)} of {what}: {excess}.")
    return sentences + list(best.differences)


def unnamed_sentences(edit: Edit) -> list[str]:
    """Why an edit does not name all values: each reason once, with the number of values that it holds for."""
    reasons = Counter(edit.unnamed).items()
    return [f"{reason.rstrip('.')} ({count} times)." if count > 1 else reason for reason, count in reasons]


def edit_html(edit: Edit, *, live: bool = True) -> str:
    """The edit of the user's own source that does what is chosen, with a button that copies it if ``live``."""
    best = edit.best
    result, reasons = _findings(edit_sentences(edit)), _findings(unnamed_sentences(edit))
    diff = best.diff()
    if not diff:
        return f'{result}{reasons}<p class="remat-empty">Nothing is to be edited.</p>'
    copy = f'<button type="button" data-action="copy-diff" {KEYS}>Copy the diff</button>'
    return (
        f"{result}{copy if live else ''}"
        f'<pre class="remat-program remat-diff" tabindex="0" role="region" aria-label="Edit of the source" {KEYS}>'
        f"{escape(diff)}</pre>{reasons}"
    )


def _findings(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="remat-findings">{items}</ul>' if items else ""
