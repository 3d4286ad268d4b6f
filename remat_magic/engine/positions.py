"""Where the values of a program stand, told so that another trace, and a changed program, has them again."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic import _jax
from remat_magic.jaxprs.bodies import type_text
from remat_magic.jaxprs.naming import Naming
from remat_magic.jaxprs.provenance import PrimalIndex
from remat_magic.records import Plan, PlannedValue, SourceSpan

__all__ = ["Found", "find_again", "positions"]

_Line = tuple[str, str, str, int | None]  # function, text of the line, primitive, output


@dataclass(frozen=True, slots=True)
class Found:
    """A value's position: it is number ``occurrence`` of the ``occurrences`` that stand alike, in program order."""

    line: _Line
    occurrence: int
    occurrences: int


def positions(naming: Naming, index: PrimalIndex) -> dict[str, Found]:
    """The position of every named value, by its key."""
    lines: dict[str, _Line] = {}
    for key, value in naming.values.items():
        place = index.place(value.eqn)
        source = place.source if place else None
        primitive = _jax.primitive_name(value.eqn) if value.output is not None else ""
        lines[key] = (*_place(source), primitive, value.output)
    counts: dict[_Line, int] = {}
    numbers: dict[str, int] = {}
    for key, line in lines.items():
        numbers[key] = counts.get(line, 0)
        counts[line] = numbers[key] + 1
    return {key: Found(line, numbers[key], counts[line]) for key, line in lines.items()}


def find_again(plan: Plan, naming: Naming, index: PrimalIndex) -> tuple[dict[str, str], list[str]]:
    """For the keys of a plan those of the same values in another program, and sentences on what differs.

    A value is the same if the same operation on a line of the same text, in a function of the same name, makes it, if
    as many values stand alike as then did, and if it has the dtype and the number of dimensions that it then had.
    """
    places = positions(naming, index)
    keys = {(found.line, found.occurrence): key for key, found in places.items()}
    counts = {found.line: found.occurrences for found in places.values()}
    again: dict[str, str] = {}
    differ: dict[str, None] = {}
    for value in plan.names:
        line = _line(value)
        count, key = counts.get(line, 0), keys.get((line, value.occurrence))
        if count != value.occurrences or key is None:
            now = f"is made {_times(count)} now, where the plan knows it {_times(value.occurrences)}"
            differ[f"{_shown(value)} {now if count else 'is not made any more'}"] = None
            continue
        now = type_text(naming.values[key].aval)
        if value.type and _kind(now) != _kind(value.type):
            differ[f"{_shown(value)} is {now} now, where the plan knows {value.type}"] = None
            continue
        again[value.key] = key
    return again, list(differ)


def _line(value: PlannedValue) -> _Line:
    return (*_place(value.source), value.primitive, value.output)


def _place(source: SourceSpan | None) -> tuple[str, str]:
    return (source.function, source.text.strip()) if source else ("", "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _kind(text: str) -> tuple[str, int]:
    """The dtype and the number of dimensions of a type as JAX writes it."""
    dtype, _, sizes = text.partition("[")
    return dtype, len([size for size in sizes.rstrip("]").split(",") if size])


def _shown(value: PlannedValue) -> str:
    what = f"the {value.primitive}" if value.primitive else "the loop's carry"
    if value.source is None:
        return what
    return f"{what} of `{value.source.text.strip()[:80]}` in {value.source.function}"
