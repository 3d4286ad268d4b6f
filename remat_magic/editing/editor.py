"""A plan as an edit of the user's own source, and what JAX does with the edited text.

The edit gives the planned values names where the source makes them, and a policy that saves these names to the
checkpoint that the plan is for. What it says of itself was traced from the edited text, executed in copies of the
user's namespaces: nothing of the session changes, and nothing is written.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.devices import Device
from remat_magic.editing.applications import Application, applied_for_others
from remat_magic.editing.asked import Asked
from remat_magic.editing.edited_texts import EditedTexts
from remat_magic.editing.names import (
    ChosenNames,
    NameOption,
    Skeleton,
    choose,
    grouped,
    name_options,
)
from remat_magic.editing.policies import Policies
from remat_magic.editing.probes import PROBE, is_probe, nameables, probe, probed
from remat_magic.editing.user_code import Executed, UserCode, executed_codes
from remat_magic.editing.verifying import Retraces, differences
from remat_magic.editing.ways import Way, crossed, library_caller, ungrouped, ways_at, ways_of_function
from remat_magic.engine.selection import policy_of_each
from remat_magic.facts.facts import Facts
from remat_magic.planning.plan import best_of_groups
from remat_magic.policies import MIXED
from remat_magic.records import ComparisonRow, Edit, EditedName, Plan, PlannedValue, RematError

__all__ = ["edit"]


def edit(facts: Facts, choice: Any, at: Any = None) -> Edit:
    """A choice of what to keep as an edit of the source of the traced function.

    Args:
        facts: of the traced function.
        choice: a plan, the key of a policy, or residuals of a report of this trace.
        at: one place, all sites, or a mapping of places to policies; a plan has its own.

    Raises:
        RematError: as ``trace.edit``.
    """
    editor = _Editor(facts)
    plan, sentences = Asked(facts).plan_of(choice, at)
    edited = editor.edit(plan, sentences)
    best = edited.best
    row = ComparisonRow(plan.policy, plan.at, best.saved_bytes, peak_bytes=best.peak_bytes)
    there = facts.on(_peak_device(plan))
    return replace(edited, no_gain=there.remark_on(row)) if best.files and best.saved_bytes is not None else edited


def _peak_device(plan: Plan) -> Device | None:
    """The device as on which the peaks are that the plan's budget is of."""
    try:
        return devices.get(plan.peak_device) if plan.peak_device else None
    except RematError:  # one that is not registered here: then the peak is as on none
        return None


class _Editor:
    """Makes edits for one trace; probes its source once."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self._engine = facts, facts.engine
        self._code = UserCode.of(self._engine.traced, self._engine.whole, self._engine.provenances.closed)
        self._asked, self._retraces = Asked(facts), Retraces(facts, self._code)

    def edit(self, plan: Plan, sentences: Sequence[str]) -> Edit:
        """The edit of a plan."""
        if not plan.names:
            return self._written(plan, ChosenNames(), sentences or self._why_no_edit(plan))
        naming = self._asked.naming(plan.at, plan.separately)
        if naming.fingerprint != plan.fingerprint or not {value.key for value in plan.names} <= naming.values.keys():
            raise RematError(
                f"this plan was made for another program than {self._engine.function_name} as it was traced: make it "
                "anew with trace.plan()."
            )
        places = nameables(self._code)
        facts, _ = self._retraces.of(probed(self._code, places), {PROBE: probe})
        closed = facts.engine.provenances.closed
        with_places = facts.engine.placed(plan.at)
        program, with_probes = (
            self._asked.named(naming, plan.at),
            Skeleton.of(with_places, self._asked.within(facts, plan.at), is_probe),
        )
        if program.operations != with_probes.operations:
            raise RematError(
                f"{self._engine.function_name} does not make the same program each time that it is traced, so no edit "
                "of it can be verified: take out what depends on chance or on earlier calls."
            )
        options = name_options(with_probes, places)
        chosen = choose([value for planned in plan.names for value in program.names.get(planned.key, {})], options)
        missing, as_before = set(chosen.missing), executed_codes(closed) & self._code.codes.keys()
        why = [
            self._why_unnamed(self._asked.planned(value.key, naming), program, options, as_before)
            for value in plan.names
            if missing & program.names.get(value.key, {}).keys()
        ]
        why += [
            f"{value.primitive} {value.type}{f', {value.source.place},' if value.source else ''} is made in the rule "
            "of a custom derivative, where no edit reaches."
            for value in plan.names
            if naming.values[value.key].in_rule
        ]
        edited = self._written(plan, chosen, [*sentences, *why])
        return edited if edited.verified else replace(edited, closest=self._closest(plan, options))

    def _closest(self, plan: Plan, options: Sequence[NameOption]) -> Edit | None:
        """The edit whose plan is the best within the same budget that the source can name."""
        naming = self._asked.naming(plan.at)
        groups = grouped(self._asked.named(naming, plan.at), naming.values, options)
        numbers = {option: str(number) for number, option in enumerate(options)}
        best = best_of_groups(self._facts, plan, {key: numbers[option] for key, option in groups.items()})
        if best is None:
            return None
        used = {groups[value.key] for value in best.names}
        edited = self._written(best, ChosenNames([option for option in options if option in used]), ())
        return edited if edited.verified else None

    def _written(self, plan: Plan, chosen: ChosenNames, unnamed: Sequence[str]) -> Edit:
        """The edit with JAX's own checkpoint, or with that of a library which the source needs for it.

        Of policies at several places one after another is added, in the way that was verified with those before it.
        """
        parts = _parts(plan)
        places = self._retraces.applied([site for part in parts for site in self._asked.sites(part.at)])
        ways = list[tuple[Plan, Way]]()
        for number, part in enumerate(parts[:-1], 1):
            so_far = replace(plan, at=", ".join(f"{placed.at}={placed.policy}" for placed in parts[:number]))
            ways.append((part, self._first_verified(part, ways, so_far, chosen, unnamed, places)[1]))
        return self._first_verified(parts[-1], ways, plan, chosen, unnamed, places)[0]

    def _first_verified(
        self,
        part: Plan,
        before: Sequence[tuple[Plan, Way]],
        plan: Plan,
        chosen: ChosenNames,
        unnamed: Sequence[str],
        places: Mapping[str, Sequence[Application]],
    ) -> tuple[Edit, Way]:
        """The edit of a plan with the last of its parts in the first way that is verified, else one that is traced."""
        edits, errors = list[tuple[Edit, Way]](), list[RematError]()
        for way in self._ways(part):
            try:
                edits.append((self._written_in([*before, (part, way)], plan, chosen, unnamed, places), way))
            except RematError as error:
                errors.append(error)
            if edits and edits[-1][0].verified:
                return edits[-1]
        edits = [edit for edit in edits if not isinstance(edit[1].counter, ast.FunctionDef)]  # a last resort
        if not edits:
            raise (errors or [self._no_way(part)])[0]
        return next((edit for edit in edits if edit[0].saved_bytes is not None), edits[0])

    def _ways(self, plan: Plan) -> list[Way]:
        if plan.policy == "none" and self._asked.sites(plan.at):
            return [Way(), Way(names_kept=True)]
        if self._asked.sites(plan.at) or plan.policy in ("as_written", "none"):
            return [Way()]
        if plan.at == "function":
            return ways_of_function(self._code, self._engine.differentiated_inside)
        ways = ways_at(self._code, self._engine, plan.at)
        caller = library_caller(self._engine, plan.at)
        if caller:
            raise RematError(
                f"{plan.at!r} is called in the code of a library, which no edit reaches, by {caller}: choose "
                f"at={caller!r}, or put a checkpoint around what your source calls."
            )
        if not ways:
            raise self._no_way(plan)
        return ways

    def _no_way(self, plan: Plan) -> RematError:
        by_hand = f"write the checkpoint there by hand{f', as in `{plan.code}`' if plan.code else ''}."
        return RematError(
            ungrouped(self._code, self._engine, plan.at, by_hand)
            or f"where {plan.at!r} is called cannot be told in source text of yours, or not for all of these calls "
            f"alone: {by_hand}"
        )

    def _written_in(
        self,
        parts: Sequence[tuple[Plan, Way]],
        plan: Plan,
        chosen: ChosenNames,
        unnamed: Sequence[str],
        places: Mapping[str, Sequence[Application]],
    ) -> Edit:
        texts = EditedTexts(self._facts, self._code)
        policies = Policies(self._facts, self._code, texts)
        names = tuple(texts.name(option) for option in chosen.options)
        for part, way in parts:
            if part.names or part.policy != "as_written":
                kept = tuple(dict.fromkeys(name.name for name in names))
                policies.write(part, kept, self._asked.sites(part.at), places, way)
        edited = Edit(
            self._engine.function_name,
            plan.at,
            plan.policy,
            texts.files(),
            names,
            tuple(unnamed),
            planned_bytes=plan.saved_bytes,
            planned_flops=plan.recomputed_flops,
            label=plan.label,
            budget_bytes=plan.budget_bytes if plan.status else None,
            of=plan.of,
        )
        expected, trees = self._facts.report(plan if plan.names else plan.policy, plan.at), texts.trees()
        try:
            there, traced = self._retraces.of(trees, {}, texts.wrappers)
            peak_bytes = there.on(_peak_device(plan)).report("as_written").peak_bytes
        except RematError as error:
            return replace(edited, differences=(str(error),))
        differing = differences(expected, traced)
        if any(way.calls or way.loops for _, way in parts) and not differing:
            differing = self._retraces.differences_besides(parts, there) or (
                ["the edited text saves what is asked for, and recomputes something else."]
                if expected.recomputed_flops != traced.recomputed_flops
                else []
            )
        if differing:
            keys = [site.key for part, _ in parts for site in self._asked.sites(part.at)]
            crossing = itertools.chain.from_iterable(crossed(way) for _, way in parts)
            differing = [*applied_for_others(keys, places), *crossing, *differing]
        return replace(
            edited,
            verified=not differing,
            differences=tuple(differing + (_besides(chosen, names) if differing else [])),
            saved_bytes=traced.saved_bytes,
            peak_bytes=peak_bytes,
            recomputed_flops=None if traced.backward_error else traced.recomputed_flops,
        )

    def _why_no_edit(self, plan: Plan) -> list[str]:
        if plan.policy == "as_written":
            return ["the policy is the one that is written, so nothing is to be edited."]
        if plan.policy == "none" and not self._asked.sites(plan.at):
            return [f"{self._engine.function_name} has no jax.checkpoint of its own to be taken off."]
        return []

    def _why_unnamed(
        self,
        value: PlannedValue,
        program: Skeleton,
        options: Sequence[NameOption],
        as_before: set[Executed],
    ) -> str:
        """Why a value of a plan cannot be named."""
        types = dict.fromkeys(program.types[named] for named in program.names.get(value.key, {}))
        value_text = f"{value.primitive or 'carried value'} {', '.join(types)}"
        where = value.source
        if where is None:
            return f"{value_text} is made by no line of your source."
        if self._code.around(where, as_before) is not None:
            return (
                f"{value_text} is made in {where.function}, {where.place}, which no edit reaches: what holds it cannot "
                "be made again, such as an object of a library or a rule for derivatives."
            )
        text = self._code.texts[where.file]
        if not value.primitive:
            if isinstance(self._code.around(where, self._code.codes), ast.Lambda):
                return (
                    f"{value_text} is carried into the loop at {where.place} by a lambda, whose parameters can only be "
                    "named where they are used just once: make it a function with def."
                )
            return f"{value_text} is carried into the loop at {where.place}, where no variable of its own holds it."
        if text.is_formatted(where):
            return f"{value_text} is made inside a formatted string, {where.place}: assign it to a variable before."
        start, end = (where.line, where.column), (where.end_line, where.end_column)
        there = any(
            place.text is text and (text.start(place.node), text.end(place.node)) == (start, end) and not place.variable
            for place in (option.nameable for option in options)
            if place is not None
        )
        another = "which gives another value, and " if there else ""
        place = f"{value_text} is made inside `{where.expression}`, {where.place}"
        return f"{place}, {another}no expression that can be named has it."


def _parts(plan: Plan) -> list[Plan]:
    """A plan for each place that has a policy of its own."""
    if plan.policy != MIXED:
        return [plan]
    chosen = policy_of_each(plan.at)
    return [replace(plan, policy=policy, at=at, code="") for at, policy in chosen.items()]


def _besides(chosen: ChosenNames, names: Sequence[EditedName]) -> list[str]:
    sentences: list[str] = []
    for option, name in zip(chosen.options, names, strict=True):
        if others := len(chosen.besides.get(option, ())):
            expression = f"`{name.expression}`" if name.expression else "a name of your own"
            where = f", {name.source.place}" if name.source else ""
            sentences.append(
                f"{name.name!r} stands at {expression}{where}, which is executed for {others} other "
                f"{'value' if others == 1 else 'values'} besides: they have the same name."
            )
    return sentences
