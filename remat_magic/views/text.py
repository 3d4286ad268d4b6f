"""Text, for terminals and the plain half of an output: a report as a whole, and the answer in 40 lines.

The answer is whether it fits, what takes the memory and what to change; or what is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import rich.table
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding

from remat_magic.records import TEXTLESS, Fit, Program, Report
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.fit import changes_table, taken_table
from remat_magic.views.headline import notes_of, totals
from remat_magic.views.jaxpr_text import folded_lines
from remat_magic.views.memory import peak_parts
from remat_magic.views.tables import Row, Table, Text, cell, grid, line, table_text
from remat_magic.views.values import recomputed_rows, recomputed_table, residual_rows, residual_table, residual_words

# A terminal's scrollback is no place for twelve thousand lines.
_JAXPR_LINES = 200

_MARKS = {"repeated": ("R", "yellow"), "deferred": ("D", "cyan"), "": (" ", "")}


def render(report: Report, title: str = "", folded: bool = False) -> Group:
    """The whole report as a rich renderable, under a title of how it came about.

    If ``folded``, jaxprs are without the parameters of operations where these take lines of their own.
    """
    return Group(*map(Text, filter(None, [title])), *_parts(report, folded))


def _parts(report: Report, folded: bool) -> Iterator[RenderableType]:
    yield Text(report.signature or report.function, style="bold")
    if report.wrt:
        yield Text(f"differentiated: {', '.join(report.wrt)}", style="dim")
    yield line("policy ", (report.label, "bold"), answer.place_words(report.at), wrap=True)
    yield Text()
    yield totals_table(report)
    table = grid("", "")
    for sentence in notes_of(report):
        table.add_row(Text("!", style="yellow"), Text(sentence))
    yield from [table] if table.row_count else []
    if report.code:
        yield Text()
        yield Text(report.code, style="bold")
    saved: RenderableType = Text("Nothing is saved for the backward pass.")
    if report.residuals:
        saved = table_text(residual_table(report, residual_rows(report)))
    yield from _section(f"Residuals ({len(report.residuals)})", saved)
    if report.complete and not report.backward_error:
        again: RenderableType = Text("The backward pass recomputes nothing.")
        if report.recomputed:
            again = table_text(recomputed_table(recomputed_rows(report)))
        yield from _section(f"Recomputed ({len(report.recomputed)})", again)
    if report.sites:
        yield from _section(f"Checkpoint sites ({len(report.sites)})", _sites(report))
    for title, jaxpr in (("Forward", report.forward), ("Backward", report.backward)):
        if jaxpr.textless or jaxpr.lines:
            lines = [Text(f"Not here: {TEXTLESS}", "dim")] if jaxpr.textless else _jaxpr(jaxpr, folded)
            yield from _section(f"{title} jaxpr, {fmt.count(jaxpr.equations, 'equation')}", *lines)


def _section(heading: str, *below: RenderableType) -> list[RenderableType]:
    return [Text(), Text(heading, style="bold underline"), *below]


def totals_table(report: Report) -> rich.table.Table:
    """The headline's numbers, and whose they are."""
    table = grid("", "", "")
    table.columns[1].justify, table.columns[1].no_wrap = "right", True
    if report.of_devices:
        table.add_row(Text("figures"), Text(), Text(report.of_devices))
    for total in totals(report):
        table.add_row(Text(total.label), Text(total.value, style="bold"), Text(total.detail, style="dim"))
    return table


def _sites(report: Report) -> rich.table.Table:
    texts = ((it.function, f"x{it.times}", it.policy, fmt.location(it.source)) for it in report.sites)
    rows = [Row(tuple(map(cell, row))) for row in texts]
    heads = (("Site", ""), ("Calls", ""), ("As written", ""), ("Source", ""))
    return table_text(Table("Checkpoint sites", heads, rows))


def _jaxpr(jaxpr: Program, folded: bool) -> Iterator[Text | rich.table.Table]:
    table = grid("", "")
    parts = folded_lines(jaxpr.lines) if folded else ((first,) for first in jaxpr.lines)
    shown = list(itertools.islice(parts, _JAXPR_LINES))
    for first, *inside in shown:
        letter, style = _MARKS[first.recomputation]
        # Indentation is structure here; a wrapped table cell would drop it.
        text = Text(first.text, style=style, overflow="fold")
        if inside:
            text.append(f"…{inside[-1].text.lstrip()}")
            first = replace(first, residuals=(*first.residuals, *inside[-1].residuals))
        if first.residuals:
            text.highlight_regex(residual_words(first), "bold underline")
        table.add_row(Text(letter, style=f"bold {style}"), text)
    yield table
    hidden = len(jaxpr.lines) - sum(map(len, shown))
    if hidden > 0:
        yield Text(f"… {hidden:,} more lines; all of them are in report.forward.text and report.backward.text", "dim")


# ------------------------------------------------------------------------------------------------ the answer in short

MOST_LINES = 40
_WHOLE_LINES = 80  # of what is shown whole
_OFFERED, _NOTES, _REPEATED = 5, 3, 3
_SMALLEST = 1000  # what takes less than one in so many of all that is saved is not listed
_STYLES = {True: "bold green", False: "bold red", None: "bold"}


# How a reader learns whether a report fits, and how to see more of it, or of the answer: a sentence each.
IN_CELL = (
    'Does it fit? Name a device: --device "TPU v5e".',
    "More: --text=full prints every value and both jaxprs.",
    "More: --text=full prints all of it, every value and both jaxprs.",
)
IN_SCRIPT = (
    'Does it fit? Name a device: --device "TPU v5e".',
    "More: --html report.html writes all of it, every value and both jaxprs.",
    "More: --html report.html writes what is saved as it is written, every value and both jaxprs.",
)
IN_PYTHON = (
    'Does it fit? trace.fit("TPU v5e") tells, and what to change if not.',
    'More: report.save_html("report.html") has all of it, report.forward.text and report.backward.text are the jaxprs.',
    "More: fit.tried has all choices; trace.edit(fit.best).diff() is the change to your source.",
)


@dataclass(frozen=True)
class Answer:
    """What rich prints of whether a step fits, or of a report where no device was named; whole if that is short.

    ``remarks`` are sentences on where the verdict of a fit is from, ``diff`` is what the plan that a fit offers first
    does to the user's source.
    """

    record: Fit | Report
    title: str = ""
    hints: tuple[str, str, str] = IN_PYTHON
    remarks: Sequence[str] = ()
    diff: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks."""

        def lines(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options, pad=False)) for part in parts)

        def code(text: str, most: int) -> list[RenderableType]:
            width = options.max_width - 2
            text = "\n".join(_with_comment_above(each) if len(each) > width else each for each in text.split("\n"))
            wrapped = [*Text(text).wrap(console, width, overflow="fold")]
            most = len(wrapped) if len(wrapped) <= most else most - 1
            return [*wrapped[:most], *_more(len(wrapped) - most, "more line")]

        title = [Text(self.title)] if self.title else []
        whether, more, more_of_fit = self.hints
        if isinstance(self.record, Fit):
            above, fill, below = _fit(self.record, more_of_fit, self.remarks, self.diff)
        else:
            report = self.record
            if not is_large(report):
                whole = Group(*title, render(report, folded=True), *_sentences([whether]))
                if lines(whole) <= _WHOLE_LINES:
                    yield whole
                    return
            above, fill, below = _saved(report, [whether, more], code)
        left = MOST_LINES - lines(*title, *above, *below)
        yield Group(*title, *above, *fill(left, code), *below)


def is_large(report: Report) -> bool:
    """Whether it is plain without its text, which need not be laid out then, that it is not shown whole."""
    return report.forward.equations + report.backward.equations > _WHOLE_LINES


_Code = Callable[[str, int], list[RenderableType]]  # so many lines of a text at most
# What stands above, what takes the lines that are left, and what stands below.
_Parts = tuple[list[RenderableType], Callable[[int, _Code], list[RenderableType]], list[RenderableType]]


def _fit(fit: Fit, more: str, remarks: Iterable[str], diff: str) -> _Parts:
    name, more_of = answer.heading(fit)
    verdict, rest = answer.verdict(fit.as_written, fit.capacity_bytes)
    said = f"{answer.needed(fit.as_written)} {rest}{' (compiled)' * fit.compiled}".strip()
    above: list[RenderableType] = [
        line((name, "bold"), f": {more_of}" if more_of else "", f"  ({answer.memory(fit)})"),
        line((verdict.upper(), _STYLES[fit.fits]), f"  {said}", wrap=True),
    ]
    if fit.report is not None and (parts := peak_parts(fit.report)):
        peak = sum(nbytes for *_, nbytes in parts)
        parts = [part for part in sorted(parts, key=lambda part: -part[-1]) if part[-1] > peak / 200]
        words = ", ".join(f"{word} {fmt.nbytes(nbytes)}" for word, _, nbytes in parts)
        of = f" of {fmt.nbytes(peak)}" if fit.compiled else ""
        above.append(Text(f"At the estimated peak{of}: {words}"))
    above += map(Text, remarks)
    if fit.timeline is not None and (lines := answer.taken(fit.timeline, fit.report)):
        above += _headed("Takes it", table_text(taken_table(lines), brief=True, heads=False))
    offered, heading = answer.offered(fit), answer.what_to_do(fit)
    if offered:
        short = answer.shortlist(offered)[:_OFFERED]
        table = table_text(changes_table(short, heading), brief=True)
        above += [Text(), table, *_more(len(offered) - len(short), "more choice")]
    else:
        above += _sentences([heading])
    below = _sentences([answer.batch(fit), answer.unfinished(fit)])
    below += [*_notes(answer.notes_of_fit(fit)), *_sentences([more])]

    def fill(left: int, code: _Code) -> list[RenderableType]:
        best = offered[0].choice if offered else None
        text = "\n".join(filter(None, [_changed(diff), best.code])) if best else ""
        if best is None or not text or left <= 4:
            return []
        caution = [Text(best.caution)] if best.caution else []
        how = "the change to your source" if diff else "as code"
        return _headed(f"{best.what}: {how}", *code(text, left - 2 - 2 * len(caution)), *caution)

    return above, fill, below


def _with_comment_above(code: str) -> str:
    """A line of code whose comment is a line of its own: a comment that is wrapped would go on as code."""
    before, mark, comment = code.partition("  # ")
    return f"# {comment}\n{before}" if mark and not code.startswith(("+", "-")) else code


def _changed(diff: str) -> str:
    """The lines that a diff takes away and adds."""
    lines = (line for line in diff.splitlines() if not line.startswith(("---", "+++")))
    return "\n".join(line for line in lines if line.startswith(("-", "+")))


def _saved(report: Report, last: Sequence[str], code: _Code) -> _Parts:
    """What is saved, the largest first, in the lines that all else leaves."""
    above: list[RenderableType] = [line((report.signature or report.function, "bold"))]
    if report.policy != "as_written":
        above.append(line("policy ", (report.label, "bold"), answer.place_words(report.at)))
    above += [Text(), totals_table(report)]
    below = list[RenderableType]()
    if again := [row for row in recomputed_rows(report) if row.first.repeated]:
        shown = table_text(recomputed_table(again[:_REPEATED]), brief=True, heads=False)
        below += _headed("Runs again in the backward pass", shown, *_more(len(again) - _REPEATED, "more line"))
    if report.code:
        below += _headed("As code", *code(report.code, 6))
    below += [*_notes(notes_of(report, counting=False)), *_sentences(last)]

    def fill(left: int, _: _Code) -> list[RenderableType]:
        saved = [row for row in residual_rows(report) if row.saved and not row.first.dropped]
        shown = [row for row in saved[: max(3, left - 3)] if row.nbytes * _SMALLEST >= report.saved_bytes]
        rest = saved[len(shown) :]
        size = f", {fmt.nbytes(sum(row.nbytes for row in rest))}"
        more = _more(sum(row.count for row in rest), "more value", size)
        table = table_text(residual_table(report, shown), brief=True, heads=False)
        return _headed("Saved for the backward pass", table, *more) if shown else []

    return above, fill, below


def _headed(heading: str, *below: RenderableType) -> list[RenderableType]:
    return [Text(), line((heading, "bold")), *(Padding(part, (0, 0, 0, 2)) for part in below)]


def _more(number: int, noun: str, size: str = "") -> list[RenderableType]:
    return [Text(f"and {fmt.count(number, noun)}{size}", "dim")] if number > 0 else []


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    """A line of each note, as many as there are lines for."""
    lines = [line(f"Note: {' '.join(note.split())}") for note in notes[:_NOTES]]
    return [Text(), *lines, *_more(len(notes) - _NOTES, "more note")] if lines else []


def _sentences(sentences: Iterable[str]) -> list[RenderableType]:
    shown = [Text(sentence) for sentence in sentences if sentence]
    return [Text(), *shown] if shown else []
