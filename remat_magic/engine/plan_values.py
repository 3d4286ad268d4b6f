"""The values that a plan saves: the programs in which they have names, and finding them in another program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.engine.calls import Calls
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.possible import PossibleSites
from remat_magic.engine.selection import Selection, Selector
from remat_magic.engine.sites import SiteTable
from remat_magic.jaxprs.naming import NamedProgram, name_everything
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.spans import Spans
from remat_magic.policies import Resolved, resolve
from remat_magic.policies.table import DESTINATION, SOURCE
from remat_magic.records import Note, Plan, PlannedValue, RematError, SourceSpan

__all__ = ["Occurrence", "PlanValues", "find_again", "occurrences"]


class PlanValues:
    """One program with its values named, for each place that a plan can be for. To be used within its trace's settings.

    Args:
        closed: the primal jaxpr.
        calls: those that were recorded when it was traced.
        table: its sites.
        possible: the places in it that have no checkpoint.
        selector: makes selections for it.
        spans: reads its tracebacks.
        function: its name.
        rules: whether policies reach into the rules of custom derivatives; under jax_remat3 they do not.
        differentiate: has JAX differentiate the program under a selection.
    """

    def __init__(
        self,
        closed: Any,
        calls: Calls,
        table: SiteTable,
        possible: PossibleSites,
        selector: Selector,
        spans: Spans,
        function: str,
        *,
        rules: bool,
        differentiate: Callable[[Selection], object],
    ) -> None:
        self._closed, self._calls, self._table, self._possible = closed, calls, table, possible
        self._selector = selector
        self._spans, self._function, self._rules = spans, function, rules
        self._differentiate = differentiate
        self._programs: dict[tuple[str, bool, bool], NamedProgram] = {}
        self._selections: dict[tuple[Any, ...], Selection] = {}

    def clear(self) -> None:
        """Drop the programs."""
        self._programs.clear()
        self._selections.clear()

    def program(self, at: str, separately: bool, remat3: bool) -> NamedProgram:
        """The program with the values named that a policy there is asked about.

        Args:
            at: one place, or all sites.
            separately: whether the calls of a shared body have names of their own.
            remat3: whether jax_remat3 is in force.
        """
        program = self._programs.get((at, separately, remat3))
        if program is None:
            selection = self._selector.select(resolve("nothing_saveable"), at)
            closed = with_checkpoints(self._closed, self._calls, self._possible, selection.at_sites)
            program = self._name(
                selection, closed, separately, self._spans, differentiate=lambda: self._differentiate(selection)
            )
            self._programs[at, separately, remat3] = program
        return program

    def select(self, plan: Plan, remat3: bool) -> Selection:
        """A plan's choice, made precise.

        Where the program does other operations than the one that the plan was made for, the values are looked for by
        the lines that they are made on.

        Raises:
            RematError: the program does not make the plan's values; says what differs.
        """
        keys = tuple(sorted((value.key, value.offloaded) for value in plan.names))
        selection = self._selections.get((plan.policy, plan.at, plan.separately, keys))
        if selection is None:
            naming = self.program(plan.at, plan.separately, remat3)
            names, notes = self._names(plan, naming)
            moved = sorted(name for name, value in zip(names, plan.names, strict=True) if value.offloaded)
            kept = sorted({*names} - {*moved})
            policy = jax.checkpoint_policies.save_only_these_names(*kept)
            if moved:
                policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=kept,
                    names_which_can_be_offloaded=moved,
                    offload_src=SOURCE,
                    offload_dst=DESTINATION,
                )
            unnamed = self._selector.select(Resolved(plan.policy, "", policy), plan.at)
            selection = replace(
                unnamed, naming=naming, code=plan.code, notes=(*unnamed.notes, *notes), label=plan.label
            )
            self._selections[plan.policy, plan.at, plan.separately, keys] = selection
        return selection

    def _names(self, plan: Plan, naming: NamedProgram) -> tuple[list[str], tuple[Note, ...]]:
        """The names of a plan's values in a program, and what is to be said of them."""
        keys = [value.key for value in plan.names]
        if naming.fingerprint == plan.fingerprint and naming.values.keys() >= set(keys):
            return keys, ()
        keys_now, differ = find_again(plan, naming, Provenances(self._closed, self._function))
        if differ:
            not_listed = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
            raise RematError(
                f"this plan was made for another program than {self._function} is now: {differ[0]}{not_listed}; make "
                "it anew with trace.plan()."
            )
        note = Note(
            "plan-of-other-operations",
            f"The plan was made for other operations than {self._function} now does; its values were found again by "
            "their lines, and its own figures need not hold.",
        )
        return [keys_now[key] for key in keys], (note,)

    def again(self, selection: Selection, closed: Any) -> Any:
        """A jaxpr of the same function for other arguments, with the names that a selection's policy is of, if any.

        Raises:
            RematError: it does other operations than the program that the plan was made for.
        """
        if selection.naming is None:
            return closed
        naming = self._name(selection, closed, selection.naming.separately, Spans(), like=selection.naming)
        if naming.fingerprint != selection.naming.fingerprint:
            raise RematError(
                f"{self._function} does other operations for these arguments than for those that the plan was made "
                "for: trace it with these, and make a plan for them."
            )
        return naming.closed

    def _name(
        self,
        selection: Selection,
        closed: Any,
        separately: bool,
        spans: Spans,
        *,
        differentiate: Callable[[], object] | None = None,
        like: NamedProgram | None = None,
    ) -> NamedProgram:
        chosen = dict(selection.at_sites)

        def within(eqn: Any) -> bool:
            return self._table.key_of(eqn, spans) in chosen

        checkpoints = within if selection.whole is None else None
        return name_everything(
            closed, checkpoints, separately, rules=self._rules, differentiate=differentiate, like=like
        )


_Line = tuple[str, str, str, int | None]  # function, text of the line, primitive, output


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Which value it is: number ``number`` of the ``count`` that are made alike on a line, in program order."""

    line: _Line
    number: int
    count: int


def occurrences(naming: NamedProgram, provenances: Provenances) -> dict[str, Occurrence]:
    """For the key of every named value which one of its line it is."""
    lines: dict[str, _Line] = {}
    for key, value in naming.values.items():
        place = provenances.of(value.eqn)
        source = place.source if place else None
        primitive = _jax.primitive_name(value.eqn) if value.output is not None else ""
        lines[key] = (*_place(source), primitive, value.output)
    counts: dict[_Line, int] = {}
    numbers: dict[str, int] = {}
    for key, line in lines.items():
        numbers[key] = counts.get(line, 0)
        counts[line] = numbers[key] + 1
    return {key: Occurrence(line, numbers[key], counts[line]) for key, line in lines.items()}


def find_again(plan: Plan, naming: NamedProgram, provenances: Provenances) -> tuple[dict[str, str], list[str]]:
    """For each key of a plan that of the same value in another program, and sentences on what differs.

    A value is the same if the same operation makes it, on a line of the same text in a function of the same name; if
    as many such values are made there as when the plan was made; and if dtype and number of dimensions are the same.
    """
    standing = occurrences(naming, provenances)
    keys = {(occurrence.line, occurrence.number): key for key, occurrence in standing.items()}
    counts = {occurrence.line: occurrence.count for occurrence in standing.values()}
    again: dict[str, str] = {}
    differ: dict[str, None] = {}
    for value in plan.names:
        line = _line(value)
        count, key = counts.get(line, 0), keys.get((line, value.occurrence))
        if count != value.occurrences or key is None:
            now = f"is made {_times(count)} now, where the plan knows it {_times(value.occurrences)}"
            differ[f"{_shown(value)} {now if count else 'is not made any more'}"] = None
            continue
        now = _jax.type_text(naming.values[key].aval)
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
    value_text = f"the {value.primitive}" if value.primitive else "the loop's carry"
    if value.source is None:
        return value_text
    return f"{value_text} of `{value.source.text.strip()[:80]}` in {value.source.function}"
