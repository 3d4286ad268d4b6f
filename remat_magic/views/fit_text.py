"""The answer as text of 40 lines: does it fit, what takes the memory, what to change; or what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table

from remat_magic.records import Equation, Fit, Report, Residual
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.peak_bar import peak_parts
from remat_magic.views.rows import recomputed_rows, residual_rows
from remat_magic.views.text import Text, grid, line, render, source_words, totals_table, what_text

MOST_LINES = 40
_WHOLE_LINES = 80  # of what is shown whole
_TAKEN, _OFFERED, _NOTES, _REPEATED = 5, 5, 3, 3
_SMALLEST = 1000  # what takes less than one in so many of all that is saved is not listed
_STYLES = {True: "bold green", False: "bold red", None: "bold"}


@dataclass(frozen=True, slots=True)
class Asking:
    """How a reader asks ``whether`` a report fits, and how to see ``more`` of it, or of the answer: a sentence each."""

    whether: str
    more: str
    more_of_fit: str


IN_CELL = Asking(
    'Does it fit? Name a device: --device "TPU v5e".',
    "More: --text=full prints every value and both jaxprs.",
    "More: --text=full prints all of it, every value and both jaxprs.",
)
IN_PYTHON = Asking(
    'Does it fit? trace.fit("TPU v5e") tells, and what to change if not.',
    'More: report.save_html("report.html") has all of it, report.forward.text and report.backward.text are the jaxprs.',
    "More: fit.tried has all choices; trace.edit(fit.best).diff() is the change to your source.",
)


@dataclass(frozen=True)
class Answer:
    """What rich prints of whether a step fits, or of a report where no device was named.

    A report is shown whole where that takes few lines.

    Args:
        record: what is shown.
        title: a sentence to put before everything.
        asking: how to ask for more.
        remarks: sentences on where the verdict of a fit is from.
        diff: what the plan that a fit offers first does to the user's source.
    """

    record: Fit | Report
    title: str = ""
    asking: Asking = IN_PYTHON
    remarks: Sequence[str] = ()
    diff: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich asks."""

        def lines(*parts: RenderableType) -> int:
            return sum(len(console.render_lines(part, options, pad=False)) for part in parts)

        def code(text: str, most: int) -> list[RenderableType]:
            wrapped = [*Text(text).wrap(console, options.max_width - 2, overflow="fold")]
            most = len(wrapped) if len(wrapped) <= most else most - 1
            return [*wrapped[:most], *_more(len(wrapped) - most, "more line")]

        title = [Text(self.title)] if self.title else []
        if isinstance(self.record, Fit):
            above, fill, below = _fit(self.record, self.asking.more_of_fit, self.remarks, self.diff)
        else:
            report = self.record
            if not is_large(report):
                whole = Group(*title, render(report, folded=True), *_sentences([self.asking.whether]))
                if lines(whole) <= _WHOLE_LINES:
                    yield whole
                    return
            above, fill, below = _saved(report, [self.asking.whether, self.asking.more], code)
        room = MOST_LINES - lines(*title, *above, *below)
        yield Group(*title, *above, *fill(room, code), *below)


def is_large(report: Report) -> bool:
    """Whether it is plain without its text, which need not be laid out then, that it is not shown whole."""
    return report.forward.equations + report.backward.equations > _WHOLE_LINES


_Code = Callable[[str, int], list[RenderableType]]
"""Code, and so many lines of it at most."""

_Parts = tuple[list[RenderableType], Callable[[int, _Code], list[RenderableType]], list[RenderableType]]
"""What stands above, what takes the lines that are left, and what stands below."""


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
    if fit.timeline is not None and (lines := answer.taken(fit.timeline, fit.report)[:_TAKEN]):
        rows = [(fmt.nbytes(taken.nbytes), taken.source.expression, taken.where) for taken in lines]
        above += _headed("Takes it", _table(rows))
    offered, heading = answer.offered(fit), answer.what_to_do(fit)
    if offered:
        table = grid(heading, "Needed", f"Extra {answer.cost_head(offered)}", "")
        for row in offered[:_OFFERED]:
            table.add_row(line(row.choice.what), row.needed, row.cost, Text(row.fits, _STYLES[row.choice.fits]))
        above += [Text(), table, *_more(len(offered) - _OFFERED, "more choice")]
    else:
        above += _sentences([heading])
    below = _sentences([answer.batch(fit), answer.unfinished(fit)])
    below += [*_notes(answer.notes_of_fit(fit)), *_sentences([more])]

    def fill(room: int, code: _Code) -> list[RenderableType]:
        best = offered[0].choice if offered else None
        text = "\n".join(filter(None, [_changed(diff), best.code])) if best else ""
        if best is None or not text or room <= 4:
            return []
        caution = [Text(best.caution)] if best.caution else []
        how = "the change to your source" if diff else "as code"
        return _headed(f"{best.what}: {how}", *code(text, room - 2 - 2 * len(caution)), *caution)

    return above, fill, below


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
        rows = [(row.cost, what_text(row.primitive, row.name), _source(row.first)) for row in again[:_REPEATED]]
        below += _headed("Runs again in the backward pass", _table(rows), *_more(len(again) - _REPEATED, "more line"))
    if report.code:
        below += _headed("As code", *code(report.code, 6))
    below += [*_notes(answer.notes(report)), *_sentences(last)]

    def fill(room: int, _: _Code) -> list[RenderableType]:
        kept = [row for row in residual_rows(report) if row.kept and not row.first.dropped]
        shown = [row for row in kept[: max(3, room - 3)] if row.nbytes * _SMALLEST >= report.saved_bytes]
        rest = kept[len(shown) :]
        rows = [
            (fmt.nbytes(row.nbytes), f"{row.type} x{row.count}" if row.count > 1 else row.type,
             what_text(row.label, row.name), _source(row.first))
            for row in shown
        ]  # fmt: skip
        size = f", {fmt.nbytes(sum(row.nbytes for row in rest))}"
        more = _more(sum(row.count for row in rest), "more value", size)
        return _headed("Saved for the backward pass", _table(rows), *more) if rows else []

    return above, fill, below


def _source(of: Residual | Equation) -> str:
    return " ".join(filter(None, source_words(of)))


def _table(rows: Iterable[Sequence[str]]) -> Table:
    """Rows of one line each, whose first cell is a number."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *map(line, row[1:]))
    return table


def _headed(heading: str, *below: RenderableType) -> list[RenderableType]:
    return [Text(), line((heading, "bold")), *(Padding(part, (0, 0, 0, 2)) for part in below)]


def _more(number: int, noun: str, size: str = "") -> list[RenderableType]:
    return [Text(f"and {fmt.count(number, noun)}{size}", "dim")] if number > 0 else []


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    """A line of each note, as far as there is room."""
    lines = [line(f"Note: {' '.join(note.split())}") for note in notes[:_NOTES]]
    return [Text(), *lines, *_more(len(notes) - _NOTES, "more note")] if lines else []


def _sentences(sentences: Iterable[str]) -> list[RenderableType]:
    shown = [Text(sentence) for sentence in sentences if sentence]
    return [Text(), *shown] if shown else []
