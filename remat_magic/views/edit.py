"""The edit of the user's own source as HTML, and what is said of it."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from remat_magic.records import Edit, FileEdit
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? ")

# Of a text between two changes, so many lines at each end can be unfolded: a cell keeps what is shown below it.
_UNFOLDED = 25


def edit_sentences(edit: Edit) -> list[str]:
    """Whether an edit of the user's own source, the best that there is, does what is chosen, and what it costs."""
    best = edit.best
    sentences = list[str]()
    if best is not edit:
        sentences.append("No edit of the source does exactly this. This is the nearest edit.")
    if best.verified:
        sentences.append("Verified: the edited source was traced, and saves what was planned.")
    if best.saved_bytes is not None:
        flops = best.recomputed_flops
        again = "" if flops is None else f" and recomputes {fmt.flops(flops)}"
        planned = f"{fmt.nbytes(edit.planned_bytes)} and {fmt.flops(edit.planned_flops)}"
        sentences.append(f"It saves {fmt.nbytes(best.saved_bytes)}{again}; planned were {planned}.")
    return [*sentences, *filter(None, [budget_sentence(best)]), *best.differences]


def budget_sentence(edit: Edit) -> str:
    """Whether an edit keeps to its budget; empty where it has none."""
    if edit.budget_bytes is None:
        return ""
    excess = f"it exceeds that by {fmt.nbytes(edit.excess_bytes)}" if edit.excess_bytes else "it keeps to it"
    excess = "it is not known whether it keeps to it" if edit.excess_bytes is None else excess
    return f"The budget was {fmt.nbytes(edit.budget_bytes)} of {edit.budget_text}: {excess}."


def unnamed_sentences(edit: Edit) -> list[str]:
    """Why an edit does not name all values: each reason once, with the number of values that it holds for."""
    reasons = Counter(edit.unnamed).items()
    return [f"{reason.rstrip('.')} ({count} times)." if count > 1 else reason for reason, count in reasons]


def edit_html(edit: Edit) -> str:
    """The edit of the user's own source that does what is chosen, where no script is."""
    shown = diffs_html(edit, live=False) or '<p class="remat-empty">There is nothing to edit.</p>'
    return f"{findings(edit_sentences(edit))}{shown}{findings(unnamed_sentences(edit))}"


def diffs_html(edit: Edit, live: bool = True) -> str:
    """The diffs of the best edit.

    Where a script is at hand each stands under the name of its cell or file, with a button that copies it: of a cell
    that is its whole text as edited, with the imports that it needs; of a file the diff.
    """
    best, parts = edit.best, list[str]()
    # The diff as a whole may say instead why there is none.
    files = [file for file in best.files if file.diff() and file.diff() in best.diff()]
    for file in files:
        text, hover = file.diff(), "Copies the diff, for patch -p0"
        if file.cell is not None:
            text, hover = file.new, "Copies the whole cell as edited: paste it over this one"
        if live:
            parts.append(
                f'<div class="remat-diff-file"><b>{escape(file.label)}</b> <button type="button" data-action="copy" '
                f'data-text="{html.escape(text)}" title="{hover}" {KEYS}>Copy</button></div>'
            )
        parts.append(_file(file, head=not live))
    if not files and (said := best.diff()):
        parts.append(f"<pre>{escape(said)}</pre>")
    scrolls = "" if live else f' tabindex="0" role="region" aria-label="Edit of the source" {KEYS}'
    return f'<div class="remat-diff"{scrolls}>{"".join(parts)}</div>' if parts else ""


def _file(file: FileEdit, head: bool) -> str:
    """A file's diff line by line, and between its parts what stays of the text, folded.

    Without the folds, and with its head, it is the diff to the byte.
    """
    old = file.old.removesuffix("\n").split("\n")
    shown, at = "<pre>", 0
    for number, line in enumerate(file.diff().split("\n")[:-1]):
        kind = {"+": "ins", "-": "del"}.get(line[0], "")
        hunk = _HUNK.match(line)
        if hunk:
            # What only inserts names the line before it.
            count = int(hunk[2] or 1)
            start = int(hunk[1]) - (count > 0)
            shown += _fold(old[at:start])
            at = start + count
        if hunk or number < 2:
            kind = "small"
            if not head:
                continue
        shown += f"<{kind}>{escape(line)}\n</{kind}>" if kind else f"{escape(line)}\n"
    return f"{shown}{_fold(old[at:])}</pre>".removesuffix("<pre></pre>")


def _fold(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    shown = [f" {escape(line)}\n" for line in lines]
    if len(lines) > 2 * _UNFOLDED:
        left_out = f" ({len(lines) - 2 * _UNFOLDED:,} lines are not kept here)\n"
        shown = [*shown[:_UNFOLDED], left_out, *shown[-_UNFOLDED:]]
    what = fmt.count(len(lines), "unchanged line")
    return f"</pre><details><summary {KEYS}>{what}</summary><pre>{''.join(shown)}</pre></details><pre>"


def findings(sentences: Iterable[str]) -> str:
    """Sentences as a list; nothing for none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences if sentence)
    return f'<ul class="remat-findings">{items}</ul>' if items else ""
