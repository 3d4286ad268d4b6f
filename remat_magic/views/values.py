"""What is saved for the backward pass and what it computes again: the rows, and the tables of them."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from remat_magic.records import Equation, Origin, ProgramLine, Report, Residual, SourceSpan, dearest
from remat_magic.views import format as fmt
from remat_magic.views.format import escape, linked
from remat_magic.views.tables import (
    KEYS,
    Home,
    Part,
    Row,
    Table,
    cell,
    made,
    made_by,
    near,
    path_words,
    share_bar,
    size,
    table_html,
    typed,
    with_code,
)

# So many rows, the biggest, are seen at first: more is not read at a glance.
_FIRST = 5

# Above this many rows, values that differ by the numbers in their names alone ("layer3_out", "params[7]") are one row.
FOLD_ALIKE_ABOVE = 40

# Where a word of a jaxpr's text can be a variable: "[" and "=" would make it a primitive with parameters or a
# parameter, quotes part of a string.
VARIABLE = r"(?<![\w.'\"]){}(?![\w\[=.'\"])"

_T = TypeVar("_T")

_KINDS = {"intermediate": 0, "offloaded": 0, "argument": 1, "constant": 2, "literal": 3}


@dataclass(frozen=True, slots=True)
class ResidualRow:
    """``residuals`` that differ in nothing shown. ``nbytes`` is the bytes of all of them together.

    ``whole`` says so where every device of a mesh holds all of an intermediate.
    """

    residuals: tuple[Residual, ...]
    type: str
    nbytes: int
    kind: str
    label: str
    name: str
    also: tuple[str, ...]
    needed_by: tuple[str, ...]
    whole: str = ""

    @property
    def first(self) -> Residual:
        """One of them."""
        return self.residuals[0]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.residuals)

    @property
    def saved(self) -> bool:
        """Whether it takes memory for the backward pass alone, the device's or another, and is not alive anyway."""
        return self.first.kind in ("intermediate", "offloaded")


@dataclass(frozen=True, slots=True)
class RecomputedRow:
    """``count`` equations like ``first``, at one place; ``runs`` and ``flops`` are for all, None where unknown.

    Of conditionals, the branches count that cost most. Where ``runs`` is unknown, ``flops`` is the cost at least.
    ``communicated`` are the bytes that a collective gives a device.
    """

    first: Equation
    count: int
    kind: str
    primitive: str
    name: str
    outputs: tuple[str, ...]
    runs: int | None
    flops: int | None
    communicated: int

    @property
    def cost(self) -> str:
        """The FLOPs for reading, and what is communicated."""
        communication = f"{fmt.nbytes(self.communicated)} over {axes(self.first.over)}" if self.communicated else ""
        work = fmt.flops(self.flops) if self.flops or not communication else ""
        least = "at least " if (self.flops or communication) and self.runs is None else ""
        return f"{least}{', '.join(filter(None, [work, communication]))}"


def _alike(name: str | None) -> str | None:
    return name and re.sub(r"\d+", "#", name)


def _span(names: Iterable[str | None]) -> str:
    """One label for names that differ in their numbers: ``layer0_out … layer11_out``."""
    distinct = list(dict.fromkeys(name for name in names if name))
    return "" if not distinct else distinct[0] if len(distinct) == 1 else f"{distinct[0]} … {distinct[-1]}"


def _group(items: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _origin(origin: Origin) -> str:
    what = f"argument {origin.argument}" if origin.argument else origin.primitive
    return " ".join(filter(None, [what, fmt.location(origin.source), made_by(origin.library)]))


def _label(residual: Residual) -> str:
    """What made the value: the argument's name or the operation's."""
    if residual.kind == "argument":
        return residual.argument or "argument"
    return residual.primitive or residual.argument or residual.kind


def home_of(spans: Iterable[SourceSpan | None]) -> Home | None:
    """Where most of them are."""
    places = Counter((span.file, span.cell) for span in spans if span is not None)
    return max(places, key=lambda place: places[place], default=None)


def home_of_report(report: Report) -> Home | None:
    """Where most of what a report lists is made."""
    return home_of(one.source for one in (*report.residuals, *report.recomputed))


def _residual_row(residuals: list[Residual], home: Home | None) -> ResidualRow:
    first = residuals[0]
    here = near(first.source, home)
    readers = [
        reader.text("" if (there := near(reader.source, home)) == here else there)
        for residual in residuals
        for reader in residual.needed_by
    ]
    space = f" ({first.memory_space})" if first.memory_space else ""
    return ResidualRow(
        residuals=tuple(residuals),
        type=first.sharding or first.type,
        nbytes=sum(residual.nbytes for residual in residuals),
        kind=first.kind + space,
        label=_span(map(_label, residuals)),
        name=_span(residual.name for residual in residuals),
        also=tuple(dict.fromkeys(_origin(origin) for origin in first.origins[1:])),
        needed_by=tuple(dict.fromkeys(readers)),
        whole="whole on every device" if first.kept and first.replicated and first.shape else "",
    )


def residual_rows(report: Report) -> list[ResidualRow]:
    """The residual table: what the policy costs before what is alive anyway, the biggest first."""

    def key(residual: Residual, alike: Callable[[str | None], str | None] = lambda name: name) -> object:
        names = (alike(residual.name), alike(residual.argument))
        return (residual.type, residual.sharding, residual.kind, residual.memory_space, residual.primitive, *names,
                residual.source, residual.library, residual.path, residual.origins[1:], residual.dropped)  # fmt: skip

    ordered = sorted(report.residuals, key=lambda residual: _KINDS[residual.kind])
    groups = _group(ordered, key)
    if len(groups) > FOLD_ALIKE_ABOVE:
        groups = _group(ordered, lambda residual: key(residual, _alike))
    home = home_of_report(report)
    rows = [_residual_row(group, home) for group in groups]
    return sorted(rows, key=lambda row: (_KINDS[row.first.kind], row.first.dropped, -row.nbytes))


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(filter(None, known))


def recomputed_rows(report: Report) -> list[RecomputedRow]:
    """The recomputed operations, the dearest first, those of one primitive, source, library and path folded.

    Where no cost is known comes last; among equals, repeated before deferred, and then the order of the program.
    """

    def key(equation: Equation) -> object:
        return (equation.repeated, equation.primitive, equation.name, equation.source, equation.library, equation.path,
                equation.over)  # fmt: skip

    rows = list[RecomputedRow]()
    for group in _group((*report.repeated, *report.deferred), key):
        first, running = group[0], dearest(group)
        rows.append(
            RecomputedRow(
                first=first,
                count=len(group),
                kind="repeated" if first.repeated else "deferred",
                primitive=first.primitive,
                name=first.name or "",
                outputs=tuple(dict.fromkeys(output for equation in group for output in equation.outputs)),
                runs=_sum(equation.times for equation in running),
                flops=_sum(equation.flops for equation in running),
                communicated=sum(equation.communicated_bytes for equation in running),
            )
        )
    return sorted(rows, key=lambda row: (-1 if row.flops is None else row.flops, row.communicated), reverse=True)


def axes(over: Iterable[str]) -> str:
    """Axes of a mesh for reading, each once: ``data and model``."""
    return " and ".join(dict.fromkeys(over))


def residual_words(line: ProgramLine) -> re.Pattern[str]:
    """Matches, as its one group, the residual variables of a line wherever they are variables."""
    names = "|".join(sorted((re.escape(name) for name, _ in line.residuals), key=len, reverse=True))
    return re.compile(VARIABLE.format(f"({names})"))


def name_states(report: Report) -> dict[str, str]:
    """What becomes of each checkpoint name under the report's policy: "save", "offload" or "recompute".

    "" where a value is not saved and nothing is recomputed either: the backward pass does not need it.
    """
    kinds = {residual.name: residual.kind for residual in report.residuals if residual.name}
    states = {"offloaded": "offload", "intermediate": "save"}
    other = "recompute" if report.recomputed else ""
    return {name: states.get(kinds.get(name, ""), other) for name in report.names}


# ---------------------------------------------------------------------------------------------------------- the tables


def residuals_html(report: Report, folded: bool = False, most: int | None = None) -> str:
    """The residual table.

    If ``folded``, for where no script is, all but the biggest rows are folded, in tables of their own, with ``most``
    rows in each; else all are in one, and the script folds them.
    """
    if not report.residuals:
        return '<p class="remat-empty">Nothing is saved for the backward pass.</p>'
    home, rows = home_of_report(report), residual_rows(report)
    saved, alive = [row for row in rows if row.saved], [row for row in rows if not row.saved]
    nothing_saved = "" if saved else '<p class="remat-empty">Nothing is saved but what is alive anyway.</p>'

    def shown(rows: Sequence[ResidualRow]) -> str:
        return table_html(residual_table(report, rows, saved, home))

    if not folded:
        return nothing_saved + shown([*saved, *alive])
    folds = [
        ("more value", saved[_FIRST:]),
        ("argument", [row for row in alive if row.kind == "argument"]),
        ("constant", [row for row in alive if row.kind != "argument"]),
    ]
    details = (
        f"<details><summary>{_counted(rows, noun)}</summary>{shown(rows[:most])}{_more(rows, most)}</details>"
        for noun, rows in folds
        if rows
    )
    return "".join([nothing_saved, shown(saved[:_FIRST]) if saved else "", *details])


def _counted(rows: Sequence[ResidualRow], noun: str) -> str:
    return f"{fmt.count(sum(row.count for row in rows), noun)}, {fmt.nbytes(sum(row.nbytes for row in rows))}"


def _more(rows: Sequence[ResidualRow], most: int | None) -> str:
    more = rows[len(rows) if most is None else most :]
    return f'<p class="remat-empty">{_counted(more, "more value")}; run the cell for all.</p>' if more else ""


def residual_table(
    report: Report, rows: Sequence[ResidualRow], longest: Sequence[ResidualRow] = (), home: Home | None = None
) -> Table:
    """Values that are saved, of which each bar is a share of all that is of its kind.

    A bar of full length is that of the largest among the ``rows`` and the ``longest``; lines of ``home`` are shown by
    their numbers alone.
    """
    sums = {"intermediate": report.saved_bytes, "offloaded": report.offloaded_bytes, "argument": report.argument_bytes}
    most = dict.fromkeys((True, False), 0)
    for row in (*rows, *longest):
        most[row.saved] = max(most[row.saved], row.nbytes)
    body = list[Row]()
    for row in rows:
        # That an intermediate is none of the others is seen.
        kind = [" ", Part(row.kind, "kind")] if row.kind != "intermediate" else []
        whole_everywhere = [" ", Part(row.whole, "whole")] if row.whole else []
        number, whole = 0 if row.first.dropped else row.nbytes, sums.get(row.first.kind, report.constant_bytes)
        cells = (
            size(row.nbytes),
            share_bar(number, whole, most[row.saved]),
            typed(row.type, row.count, "", *kind, *whole_everywhere),
            made(row.label, row.first, row.name, row.also, home),
            cell(_needed(row, report.complete)),
        )
        kinds = f"remat-{row.first.kind}{' remat-dropped' * row.first.dropped}"
        body.append(Row(cells, _identity(row, row.nbytes), kinds))
    return Table("Values saved for the backward pass", (*_HEADS, ("Needed for", "needed")), body, _SHARED)


_HEADS = (("Size", "num"), ("Share", "share"), ("Value", "type"), ("Made by", "made"))
_SHARED = "stacks shares"


def _needed(row: ResidualRow, complete: bool) -> Part:
    """Who reads a value: the first two, and how many more, which a page unfolds."""
    readers = row.needed_by
    if not readers:
        nobody = f"nothing reads it{': dropped when compiled' if row.first.dropped else ''}"
        return Part(nobody) if complete else Part("", html="…")
    more = len(readers) - 2
    shown = "".join(f'<div class="remat-reader">{with_code(reader)}</div>' for reader in readers[:2])
    if more > 0:
        items = "".join(f"<li>{with_code(reader)}</li>" for reader in readers[2:])
        shown += f"<details><summary {KEYS}>and {more} more</summary><ul>{items}</ul></details>"
    return Part("; ".join(readers[:2]) + (f", and {more} more" if more > 0 else ""), html=shown)


def recomputed_html(report: Report) -> str:
    """The recomputed operations."""
    if not report.complete:
        return '<p class="remat-empty">The backward half is being traced.</p>'
    if report.backward_error:
        return f'<p class="remat-empty">{escape(report.backward_error)}</p>'
    if not report.recomputed:
        return '<p class="remat-empty">The backward pass recomputes nothing.</p>'
    return table_html(recomputed_table(recomputed_rows(report), home_of_report(report)))


def recomputed_table(rows: Sequence[RecomputedRow], home: Home | None = None) -> Table:
    """Operations that are recomputed, of which each bar is a share of all their FLOPs."""
    costs, body = [row.flops or 0 for row in rows], list[Row]()
    for row in rows:
        runs = "an unknown number of runs" if row.runs is None else fmt.count(row.runs, "run")
        letter = row.kind[0].upper()
        kind = f" {row.kind}, {runs}" if row.runs != 1 else f" {row.kind}"
        cells = (
            cell(row.cost, hover="" if row.flops is None else fmt.exact(row.flops, "FLOPs")),
            share_bar(row.flops or 0, sum(costs), max(costs)),
            typed(", ".join(row.outputs)),
            made(row.primitive, row.first, row.name, home=home),
            cell(Part(letter, html=f'<i class="remat-letter">{letter}</i>'), kind),
        )
        body.append(Row(cells, _identity(row, row.flops), f"remat-{row.kind}-row"))
    heads = (("Cost", "num"), *_HEADS[1:], ("Kind", "needed"))
    return Table("Operations that the backward pass recomputes", heads, body, _SHARED)


def _identity(row: ResidualRow | RecomputedRow, number: int | None) -> str:
    """What a script filters, adds up and compares a row by.

    ``data-k`` tells rows of two policies that are of the same values, ``data-n`` counts these, and ``data-value`` is
    the bytes or FLOPs of all together, left out where unknown.
    """
    first = row.first
    residual = isinstance(row, ResidualRow)
    what = (row.type, row.kind, row.label, row.also) if residual else (row.kind, row.primitive, row.outputs)
    expression = first.source.expression if first.source else ""
    where = (fmt.location(first.source), expression, made_by(first.library), path_words(first.path))
    key = zlib.crc32(repr((what, row.name, where)).encode("utf-8", "replace"))
    origins = first.origins if isinstance(first, Residual) else ()
    links = linked(*(origin.source for origin in (first, *origins)), library=first.library)
    value = "" if number is None else f' data-value="{number}"'
    return f' data-k="{key:x}" data-n="{row.count}"{value}{links}'
