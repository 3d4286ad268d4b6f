"""The lines of the tables: what every view shows, before any of them says how it looks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from remat_magic.records import Equation, Origin, ProgramLine, Report, Residual, SourceSpan, dearest
from remat_magic.views import format as fmt

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
    def kept(self) -> bool:
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


def place(path: tuple[str, ...]) -> str:
    """A path for reading, outermost first: ``scan x12 / block``."""
    return " / ".join(path)


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


def made_by(library: SourceSpan | None) -> str:
    """The line of a library that makes a value: ``by flax/linen/linear.py:287``; nothing for none."""
    return f"by {library.place}" if library is not None else ""


def _label(residual: Residual) -> str:
    """What made the value: the argument's name or the operation's."""
    if residual.kind == "argument":
        return residual.argument or "argument"
    return residual.primitive or residual.argument or residual.kind


Home = tuple[str, int | None]
"""The file, and the cell, whose lines are told by their numbers alone."""


def home_of(spans: Iterable[SourceSpan | None]) -> Home | None:
    """Where most of them are."""
    places = Counter((span.file, span.cell) for span in spans if span is not None)
    return max(places, key=lambda place: places[place], default=None)


def home_of_report(report: Report) -> Home | None:
    """Where most of what a report lists is made."""
    return home_of(one.source for one in (*report.residuals, *report.recomputed))


def near(span: SourceSpan | None, home: Home | None) -> str:
    """Where a span starts: its line alone at home."""
    if span is not None and (span.file, span.cell) == home:
        return f"line {span.line}"
    return fmt.location(span)


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
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


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


def unread(row: ResidualRow, complete: bool) -> str:
    """What becomes of a residual that no operation reads; nothing where that is not known yet."""
    return f"nothing reads it{': dropped when compiled' if row.first.dropped else ''}" if complete else ""


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
