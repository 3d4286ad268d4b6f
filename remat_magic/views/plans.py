"""What a plan saves, and what could be done otherwise: single values saved or recomputed instead."""

from __future__ import annotations

import html
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from remat_magic.records import Edit, FileEdit, Plan, PlannedValue, WhatIf
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS, Part, Row, Table, cell, planned, size, table_html

NO_NAMES = "A policy of JAX's own does it: no value needs a name."
UNPASTED = "a plan needs an edit of your source"


def plan_meaning(plan: Plan) -> str:
    """What a plan does, one line."""
    peak = f"an estimated peak{_there(plan)}" if plan.of == "peak" else "saved bytes"
    whose = f", {plan.of_devices}" if plan.of_devices else ""
    return f"Recompute as little as possible within {fmt.nbytes(plan.budget_bytes)} of {peak}{whose}."


def _there(plan: Plan) -> str:
    """The device that a peak is as on, after the word."""
    return f" on {plan.peak_device}" if plan.peak_device else ""


def plan_sentences(plan: Plan) -> list[str]:
    """What a plan saves and recomputes, and how good it is."""
    again = fmt.flops(plan.recomputed_flops)
    share = plan.forward_flops and f" ({fmt.percent(plan.recomputed_flops, plan.forward_flops)} of the forward pass)"
    # Of what is proven best the status says so.
    least = f" (any choice of names: at least {fmt.flops(plan.bound)})" if plan.gap and plan.bound else ""
    saves, budget = f"Saves {fmt.nbytes(plan.saved_bytes)}", fmt.nbytes(plan.budget_bytes)
    if plan.of == "saved":
        saves += f" of {budget}"
    elif plan.peak_bytes is not None:
        about = fmt.about(plan.peak_bytes, plan.peak_low, plan.peak_high)
        peak = f"Estimated peak{_there(plan)} {about} of {budget}"
        saves = f"{peak}; saves {fmt.nbytes(plan.saved_bytes)}"
    facts = [
        f"{saves}, {plan.of_devices}" if plan.of_devices else saves,
        f"offloads {fmt.nbytes(plan.offloaded_bytes)}" if plan.offloaded_bytes else "",
        f"recomputes {again}{share or ''}{least}",
    ]
    return [f"{'; '.join(filter(None, facts))}.", *filter(None, [plan.status])]


def plan_html(plan: Plan) -> str:
    """What a plan saves, how good it is, and what to do with it."""
    facts, *status = plan_sentences(plan)
    values = f'<p class="remat-empty">{NO_NAMES}</p>' if not plan.names else table_html(plan_table(plan))
    status_html = "".join(f'<p class="remat-empty">{escape(sentence)}</p>' for sentence in status)
    return f"<p>{escape(facts)}</p>{status_html}{values}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Values of a plan that one operation of one expression makes: ``value`` is the first, ``nbytes`` are of all.

    ``times`` tells how many, and of how many that it makes; ``numbers`` which of these, in the order of the program.
    """

    value: PlannedValue
    nbytes: int
    times: str
    numbers: str


def plan_rows(values: Sequence[PlannedValue]) -> list[PlanRow]:
    """The values of a plan by the operation and expression that make them, those of most bytes first."""
    groups: dict[Hashable, list[PlannedValue]] = {}
    for value in values:
        groups.setdefault((value.origin, value.name, value.offloaded), []).append(value)
    rows = list[PlanRow]()
    for group in groups.values():
        first, times, numbers = group[0], sum(value.times for value in group), ""
        shown_times = f"x{times:,}" if times > 1 else ""
        if len(group) < first.alike:
            shown_times = f"{len(group):,} of {first.alike:,}"
            numbers = f"number {_ranges([value.number + 1 for value in group])} in the order of the program"
        rows.append(PlanRow(first, sum(value.nbytes for value in group), shown_times, numbers))
    return sorted(rows, key=lambda row: -row.nbytes)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: ``1-7, 9``."""
    stretches = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in stretch] for _, stretch in stretches]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def plan_table(plan: Plan) -> Table:
    """The values that a plan keeps."""
    rows = list[Row]()
    for row in plan_rows(plan.names):
        kind = cell("offload" if row.value.offloaded else "save")
        rows.append(Row((size(row.nbytes), kind, *planned(row.value, row.times, row.numbers))))
    heads = (("Size", "num"), ("Kind", "kind"), ("Value", "type"), ("Made by", "made"))
    return Table("Values that the plan keeps", heads, rows)


# ------------------------------------------------------------------------------------------ single values the other way


_EACH = "the figures are for one of these alone; the button changes the first"

# Beyond these the exchange is a bad one, and the list a burden.
ROWS = 40


def what_if_html(rows: Sequence[WhatIf], *, live: bool = True) -> str:
    """For each value what it would change to keep it, or to recompute it; each row's button does it, if ``live``."""
    if not rows:
        return '<p class="remat-empty">No single value can be saved or recomputed instead.</p>'
    left = f'<p class="remat-empty">{left_out(rows)}</p>' if left_out(rows) else ""
    device = f", times on {rows[0].device}" if rows[0].device else ""
    against = rows[0].against if isinstance(rows[0].against, str) else rows[0].against.label
    than = f", compared with {against}{device}"
    introduction = f'<p class="remat-empty">One value saved or recomputed instead, best first{escape(than)}.</p>'
    return introduction + table_html(what_if_table(rows, live=live)) + left


def what_if_table(rows: Sequence[WhatIf], *, live: bool = False) -> Table:
    """The same as a table, equal trades in one row."""
    body = list[Row]()
    for number, count in alike_rows(rows)[:ROWS]:
        row = rows[number]
        bytes_, flops = row.saved_bytes, row.recomputed_flops
        key = html.escape(flip_key(row))
        button = f'<button type="button" class="remat-link" data-flip="{key}" {KEYS}>{escape(row.change)}</button>'
        cells = (
            cell(Part(row.change, html=button if live else "")),
            size(bytes_, fmt.signed(fmt.nbytes(bytes_), bytes_)),
            cell(fmt.signed(fmt.flops(flops), flops), hover=fmt.exact(flops, "FLOPs")),
            cell("" if row.seconds is None else fmt.signed(fmt.seconds(row.seconds), row.seconds)),
            *planned(row.value, alike_text(row, count), _EACH if count > 1 else ""),
        )
        body.append(Row(cells))
    heads = (("Instead", "kind"), ("Saved", "num"), ("Recomputed", "num"), ("Time", "num"), ("Value", "type"),
             ("Made by", "made"))  # fmt: skip
    return Table("Single values saved or recomputed instead", heads, body, "stacks flips")


def flip_key(row: WhatIf) -> str:
    """Names a row, whatever else is listed with it: which value goes which way, and against what."""
    against = row.against if isinstance(row.against, str) else row.against.policy
    return f"{row.change} {row.value.key} {row.plan.at} {against}"


def left_out(rows: Sequence[WhatIf]) -> str:
    """A sentence on the values that are not listed; empty where all are."""
    left = len(rows) - sum(count for _, count in alike_rows(rows)[:ROWS])
    return f"{fmt.count(left, 'more value')} with little effect or none." if left else ""


def alike_rows(rows: Sequence[WhatIf]) -> list[tuple[int, int]]:
    """The rows that change something, equal trades as one: the first one's number among all rows, and how many."""
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        if row.saved_bytes or row.recomputed_flops or row.seconds:
            seconds = None if row.seconds is None else fmt.seconds(row.seconds)
            # What one line makes step by step (a product, its bias, its shape) is one trade where it changes as much.
            where = (row.value.source, row.value.library, row.value.path) if row.value.source else row.value.origin
            trade = (row.change, row.saved_bytes, row.recomputed_flops, seconds, where)
            groups.setdefault(trade, []).append(number)
    return [(numbers[0], len(numbers)) for numbers in groups.values()]


def alike_text(row: WhatIf, count: int) -> str:
    """How many values a row is of."""
    times = f"x{row.value.times:,}" if row.value.times > 1 else ""
    many = f"{count:,} alike" if count > 1 else ""
    return f"{many}, {times} each" if many and times else many or times


# ------------------------------------------------------------------------------------ the edit of the user's own source


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
