"""What a record is where it is the value of a cell: as HTML, as tables of text, and in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding

from remat_magic.errors import one_line, printable
from remat_magic.records import (
    Advice,
    Comparison,
    Edit,
    Exhausted,
    Fit,
    FitChoice,
    Places,
    Plan,
    Report,
    Timeline,
    WhatIf,
)
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.choices import comparison_html, comparison_notes, comparison_table
from remat_magic.views.fit import fit_html
from remat_magic.views.format import escape
from remat_magic.views.headline import advice_html, stake
from remat_magic.views.html import page_html as page_html
from remat_magic.views.html import report_html, static
from remat_magic.views.memory import TOP_ROWS, exhausted_sentences, exhausted_table, layers_table, timeline_html
from remat_magic.views.plans import (
    NO_NAMES,
    edit_html,
    edit_sentences,
    left_out,
    plan_html,
    plan_sentences,
    plan_table,
    unnamed_sentences,
    what_if_html,
    what_if_table,
)
from remat_magic.views.tables import Text, printed, table_html, table_text
from remat_magic.views.text import Answer


def html(record: Any) -> str:
    """A fragment that serves without scripts."""
    match record:
        case Report():
            return report_html(record)
        case Plan():
            return static(plan_html(record))
        case Edit():
            return static(edit_html(record))
        case Timeline():
            return static(timeline_html(record))
        case Fit():
            return static(fit_html(record))
        case Exhausted():
            sentences = f"<p>{escape(' '.join(exhausted_sentences(record)))}</p>"
            return static(table_html(exhausted_table(record)) if record.buffers else sentences)
        case FitChoice():
            return static(f'<pre style="font-family:monospace">{escape(text(record))}</pre>')
        case Comparison():
            return static(comparison_html(record))
        case [WhatIf(), *_]:
            return static(what_if_html(record, live=False))
        case [Advice(), *_]:
            return static(advice_html(record, live=False))
        case _:
            return static(f'<p class="remat-empty">{_NOTHING}</p>')


def text(record: Any, width: int = 100) -> str:
    """Tables without colours, no line longer than ``width`` columns; the diff of an edit is as it is to be applied."""
    if isinstance(record, Edit):
        sentences, reasons = edit_sentences(record), unnamed_sentences(record)
        return printed(Group(*map(Text, [*sentences, *reasons])), width) + printable(record.diff())
    return printed(renderable(record), width)


def renderable(record: Any) -> RenderableType:
    """The same for rich."""
    match record:
        case Report() | Fit():
            return Answer(record)
        case FitChoice():
            return Group(Text(_choice(record)), Padding(Text(record.code), (0, 0, 0, 4)))
        case Plan():
            values = table_text(plan_table(record)) if record.names else Text(NO_NAMES)
            return Group(*map(Text, plan_sentences(record)), values)
        case Edit():
            sentences = [*edit_sentences(record), *unnamed_sentences(record)]
            diff = Text(record.diff(), no_wrap=True, overflow="ignore")
            return Group(*map(Text, sentences), diff)
        case Timeline():
            table = layers_table(record)
            at_peak = [row for row in table.rows if row.cells[0].parts][:TOP_ROWS]
            return Group(Text(line(record)), table_text(replace(table, rows=at_peak)))
        case Exhausted():
            tables = [table_text(exhausted_table(record))] if record.buffers else []
            return Group(*map(Text, exhausted_sentences(record)), *tables)
        case Comparison():
            notes = (Text(sentence, style="dim") for sentence in comparison_notes(record))
            return Group(table_text(comparison_table(record)), *notes)
        case [WhatIf(), *_]:
            return Group(table_text(what_if_table(record)), Text(left_out(record)))
        case [Advice(), *_]:
            return Group(*map(_advice, record))
        case _:
            return Text(_NOTHING)


def line(record: Any) -> str:
    """One line, for ``repr`` of a report, a plan, an edit or a timeline."""
    if isinstance(record, FitChoice):
        return f"<FitChoice {_choice(record)}>"
    if isinstance(record, Fit):
        verdict, rest = answer.verdict(record.as_written, record.capacity_bytes)
        of = one_line(f"{record.function or 'a function'} on {answer.memory(record)}", 100)
        return f"<Fit of {of}: {verdict.lower()}, {answer.needed(record.as_written)} {rest}>"
    if isinstance(record, Exhausted):
        return f"<Exhausted: {exhausted_sentences(record)[0].removesuffix('.')}>"
    of = record.function or "a function"
    if isinstance(record, Comparison):
        kind, what = ("Places", "choices") if isinstance(record, Places) else ("Comparison", "policies")
        return f"<{kind} of {len(record.rows)} {what} for {one_line(of)}>"
    under = one_line(f"{of} under {record.label}" + (f" at {record.at}" if record.at else ""), 100)
    match record:
        case Report():
            again = f"{fmt.flops(record.recomputed_flops)} recomputed" if record.complete else "the forward half"
            again = "no backward half" if record.backward_error else again
            return f"<Report of {under}: {fmt.nbytes(record.saved_bytes)} saved, {again}>"
        case Plan():
            figures = f"{fmt.nbytes(record.saved_bytes)} saved, {fmt.flops(record.recomputed_flops)} recomputed"
            return f"<Plan for {under}: {figures}, {fmt.count(len(record.names), 'value')} named>"
        case Edit():
            names = fmt.count(len(record.names), "name")
            return f"<Edit of {under}: {names}, {'verified' if record.verified else 'not verified'}>"
        case Timeline():
            return f"<Timeline of {under}: {fmt.nbytes(record.peak_bytes)} at the estimated peak>"
        case _:
            raise TypeError(record)


def _choice(choice: FitChoice) -> str:
    row = answer.words(choice)
    fits = choice.unusable or row.fits
    return one_line(f"{choice.what}: {row.needed} needed, {row.cost} {answer.cost_head([row])}, {fits}")


_NOTHING = "There is nothing to show."


def _advice(finding: Advice) -> RenderableType:
    at_stake = f" {stake(finding)} at stake." if stake(finding) else ""
    return Group(Text(f"{finding.sentence}{at_stake}"), Padding(Text(finding.mend), (0, 0, 0, 4)))
