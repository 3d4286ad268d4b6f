"""A plan as an edit of the user's own source, and what JAX does with the edited text.

The edit gives the planned values names where the source makes them, and a policy that saves these names to the
checkpoint that the plan is for. What it says of itself was traced from the edited text, executed in copies of the
user's namespaces: nothing of the session changes, and nothing is written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import _jax, devices, units
from remat_magic.devices import Device
from remat_magic.editing.applications import Application, applications, applied_for_others, with_policies
from remat_magic.editing.live_code import NewWrapper, as_edited
from remat_magic.editing.names import (
    ChosenNames,
    NameOption,
    Skeleton,
    choose,
    grouped,
    name_options,
)
from remat_magic.editing.probes import PROBE, is_probe, nameables, probe, probed
from remat_magic.editing.same_program import Values
from remat_magic.editing.user_code import Executed, UserCode, executed_codes
from remat_magic.editing.ways import Way, library_caller, ungrouped, ways_at, ways_of_function
from remat_magic.editing.writing import EditedTexts
from remat_magic.engine.selection import policy_of_each
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.naming import NamedProgram, is_given, name_everything
from remat_magic.jaxprs.walk import walk
from remat_magic.planning.places import no_gain_at
from remat_magic.planning.plan import best_of_groups
from remat_magic.policies import MIXED
from remat_magic.records import ComparisonRow, Edit, EditedName, Plan, PlannedValue, RematError, Report, Residual, Site

__all__ = ["edit"]

_MARK = "__remat_magic_mark__"


class _Mark:
    """A policy that tells where it was given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


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
    plan, sentences = editor.plan_of(choice, at)
    edited = editor.edit(plan, sentences)
    best = edited.best
    row = ComparisonRow(plan.policy, plan.at, best.saved_bytes, peak_bytes=best.peak_bytes)
    there = facts.on(_peak_device(plan))
    return replace(edited, no_gain=no_gain_at(there, row) if best.files and best.saved_bytes is not None else "")


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

    # --------------------------------------------------------------------------------------------------- what is asked

    def plan_of(self, choice: Any, at: Any) -> tuple[Plan, list[str]]:
        """What is asked for as a plan, with sentences about what no plan can keep."""
        choice = self._engine.plans.get(choice, choice) if isinstance(choice, str) else choice
        if isinstance(choice, Plan):
            if at is not None and at != choice.at:
                raise RematError(f"the plan is for at={choice.at!r}: leave `at` out, or make a plan for {at!r}.")
            return choice, []
        place = self._engine.default_at if at is None else at
        if isinstance(choice, str) or callable(choice):
            report = self._facts.report(choice, place)
            return _plan_of(report, report.policy, ()), []
        if isinstance(choice, Iterable):
            rows = list(choice)
            if all(isinstance(row, Residual) for row in rows):
                return self._of_residuals(rows, place)
        raise RematError(f"an edit is made of a plan, a policy's key or residuals, not of {type(choice).__name__}.")

    def _of_residuals(self, rows: Sequence[Residual], at: str) -> tuple[Plan, list[str]]:
        naming = self._naming(at)
        keys: set[str] = set()
        sentences: list[str] = []
        for row in rows:
            of_row = self._keys_of(row, naming)
            keys |= of_row
            if not of_row:
                sentences.append(self._why_no_name(row, at))
        report = self._facts.report("nothing_saveable", at)
        if not keys:
            sentences = sentences or ["no residual was chosen, so none is given a name."]
            return _plan_of(report, report.policy, ()), sentences
        values = tuple(self._planned(key, naming) for key in naming.values if key in keys)
        draft = replace(_plan_of(report, f"chosen({len(values)})", values), fingerprint=naming.fingerprint)
        report = self._facts.report(draft)
        return replace(draft, saved_bytes=report.saved_bytes, recomputed_flops=report.recomputed_flops), sentences

    def _planned(self, key: str, naming: NamedProgram) -> PlannedValue:
        value = naming.values[key]
        place = self._engine.provenances.of(value.eqn)
        made_by = "" if value.output is None else _jax.primitive_name(value.eqn)
        return PlannedValue(key, 0, primitive=made_by, name=value.name, source=place.source if place else None)

    def _keys_of(self, row: Residual, naming: NamedProgram) -> set[str]:
        """The names, in a program whose values are all named, of what a residual can be."""
        if row.kind not in ("intermediate", "offloaded"):
            return set()
        origins = {(origin.primitive, origin.source) for origin in row.origins}
        keys: set[str] = set()
        for key, value in naming.values.items():
            shape = tuple(value.aval.shape)
            if value.in_rule:
                continue  # what no expression of the function itself has
            if row.dtype == _jax.short_dtype(value.aval) and row.shape[len(row.shape) - len(shape) :] == shape:
                planned = self._planned(key, naming)
                if (planned.primitive, planned.source) in origins:
                    keys.add(key)
        return keys

    def _why_no_name(self, row: Residual, at: str) -> str:
        """Why a residual cannot be kept by a name, whatever the source is."""
        if row.kind not in ("intermediate", "offloaded"):
            value_text = f"{row.type}, {row.argument}," if row.argument else row.type
            return f"{value_text} is kept without a name: it is {'an' if row.kind == 'argument' else 'a'} {row.kind}."
        value_text = f"{row.type}, {row.primitive or 'a value'}{f', {row.source.place}' if row.source else ''},"
        if self._keys_of(row, self._naming("function")):
            return f"{value_text} is made outside of what the policy at {at!r} is for."
        provenances = self._engine.provenances
        places = ((_jax.primitive_name(eqn), provenances.of(eqn)) for _, eqn in walk(provenances.closed))
        operations = {(primitive, place.source) for primitive, place in places if place is not None}
        if not any((origin.primitive, origin.source) in operations for origin in row.origins):
            return f"{value_text} is made only by the derivative: no expression that the function itself runs has it."
        if row.dtype.startswith("c"):
            return f"{value_text} is complex, and JAX cannot save complex values by name."
        return (
            f"{value_text} is made in a branch of lax.cond, a loop of unknown length or a function with a derivative "
            "rule of its own, where no plan chooses among values."
        )

    # ------------------------------------------------------------------------------------------------------ the program

    def _sites(self, at: str) -> tuple[Site, ...]:
        """The checkpoint sites that a place is; none where a new checkpoint is written."""
        sites = self._engine.sites
        if at == "function":
            own = own_checkpoint(self._engine.provenances.closed)
            at = "" if own is None else self._engine.site_of(own)
        return tuple(site for site in sites if at in ("sites", site.key))

    def _within(self, facts: Facts, at: str) -> Callable[[Any], bool] | None:
        keys = {at} if facts.engine.place(at) is not None else {site.key for site in self._sites(at)}
        return (lambda eqn: facts.engine.site_of(eqn) in keys) if keys else None

    def _naming(self, at: str, separately: bool = False) -> NamedProgram:
        with _jax.tracing(_jax.Generation(), self._engine.remat3, _jax.x64()):
            closed, within = self._engine.placed(at), self._within(self._facts, at)
            return name_everything(closed, within, separately, rules=not self._engine.remat3)

    def _named(self, naming: NamedProgram, at: str) -> Skeleton:
        return Skeleton.of(naming.closed, self._within(self._facts, at), is_given)

    def _retraced(
        self, trees: Mapping[str, ast.Module], given: Mapping[str, Any], wrappers: Sequence[NewWrapper] = ()
    ) -> tuple[Facts, Report]:
        """The function of other trees, traced, and the report of it.

        Raises:
            RematError: it cannot be executed apart from the session, or raises there.
        """
        with as_edited(self._code, trees, given, wrappers):
            try:
                facts = Facts(self._engine.retraced(self._engine.traced))
                return facts, facts.report("as_written")
            except Exception as error:
                message = str(error).partition("\n")[0].rstrip(".")
                raise RematError(
                    f"{self._engine.function_name} raises when it is executed apart from your session, to see what an "
                    f"edit does: {type(error).__name__}: {message}."
                ) from error

    def _applied(self, sites: Sequence[Site]) -> dict[str, list[Application]]:
        """Where the source applies the checkpoints of sites: each place is given a policy that is known again."""
        if not sites:
            return {}
        places = applications(self._code)
        policies = [ast.parse(f"{_MARK}[{number}]", mode="eval").body for number, _ in enumerate(places)]
        marked = list(zip(places, policies, strict=True))
        wrappers = [NewWrapper(place.text, place.maker(policy), place) for place, policy in marked]
        marks = [_Mark(number) for number, _ in enumerate(places)]
        facts, _ = self._retraced(with_policies(self._code, marked), {_MARK: marks}, wrappers)
        by_site: dict[str, list[Application]] = {}
        for _, eqn in walk(facts.engine.provenances.closed):
            mark = _jax.checkpoint_policy(eqn) if _jax.is_checkpoint(eqn) else None
            if isinstance(mark, _Mark):
                of_site = by_site.setdefault(facts.engine.site_of(eqn), [])
                if places[mark.number] not in of_site:
                    of_site.append(places[mark.number])
        return by_site

    # --------------------------------------------------------------------------------------------------------- an edit

    def edit(self, plan: Plan, sentences: Sequence[str]) -> Edit:
        """The edit of a plan."""
        if not plan.names:
            return self._written(plan, ChosenNames(), sentences or self._why_no_edit(plan))
        naming = self._naming(plan.at, plan.separately)
        if naming.fingerprint != plan.fingerprint or not {value.key for value in plan.names} <= naming.values.keys():
            raise RematError(
                f"this plan was made for another program than {self._engine.function_name} as it was traced: make it "
                "anew with trace.plan()."
            )
        places = nameables(self._code)
        facts, _ = self._retraced(probed(self._code, places), {PROBE: probe})
        closed = facts.engine.provenances.closed
        with_places = facts.engine.placed(plan.at)
        program, with_probes = (
            self._named(naming, plan.at),
            Skeleton.of(with_places, self._within(facts, plan.at), is_probe),
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
            self._why_unnamed(self._planned(value.key, naming), program, options, as_before)
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
        naming = self._naming(plan.at)
        groups = grouped(self._named(naming, plan.at), naming.values, options)
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
        places = self._applied([site for part in parts for site in self._sites(part.at)])
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
        if plan.policy == "none" and self._sites(plan.at):
            return [Way(), Way(names_kept=True)]
        if self._sites(plan.at) or plan.policy in ("as_written", "none"):
            return [Way()]
        if plan.at == "function":
            return ways_of_function(self._code)
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
        names = tuple(texts.name(option) for option in chosen.options)
        for part, way in parts:
            if part.names or part.policy != "as_written":
                kept = tuple(dict.fromkeys(name.name for name in names))
                texts.policy(part, kept, self._sites(part.at), places, way)
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
        expected = self._facts.report(plan if plan.names else plan.policy, plan.at)
        try:
            there, traced = self._retraced(texts.trees(), {}, texts.wrappers)
            peak_bytes = there.on(_peak_device(plan)).report("as_written").peak_bytes
        except RematError as error:
            return replace(edited, differences=(str(error),))
        differences = _differences(expected, traced)
        if any(way.calls or way.loops for _, way in parts) and not differences:
            differences = self._differences_besides(parts, there) or (
                ["the edited text saves what is asked for, and recomputes something else."]
                if expected.recomputed_flops != traced.recomputed_flops
                else []
            )
        if differences:
            keys = [site.key for part, _ in parts for site in self._sites(part.at)]
            differences = [*applied_for_others(keys, places), *differences]
        return replace(
            edited,
            verified=not differences,
            differences=tuple(differences + (_besides(chosen, names) if differences else [])),
            saved_bytes=traced.saved_bytes,
            peak_bytes=peak_bytes,
            recomputed_flops=None if traced.backward_error else traced.recomputed_flops,
        )

    def _differences_besides(self, parts: Sequence[tuple[Plan, Way]], edited: Facts) -> list[str]:
        """What differs besides what is saved, where checkpoints were put at calls or around steps of a Python loop."""
        values = Values()
        _, own = values.of(self._engine.provenances.closed)
        outputs, checkpoints = values.of(edited.engine.provenances.closed)
        for part, way in parts:
            if not way.calls and not any(isinstance(loop, tuple) for loop in way.loops):
                continue
            of_plan, asked = values.of(self._engine.placed(part.at))
            if of_plan != outputs:
                return ["the edited text computes something else."]
            if asked - own - checkpoints:
                return [f"the edited text has checkpoints around other operations than those of {part.at!r}."]
        return []

    # ------------------------------------------------------------------------------------------------------------- why

    def _why_no_edit(self, plan: Plan) -> list[str]:
        if plan.policy == "as_written":
            return ["the policy is the one that is written, so nothing is to be edited."]
        if plan.policy == "none" and not self._sites(plan.at):
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


def _plan_of(report: Report, policy: str, names: tuple[PlannedValue, ...]) -> Plan:
    return Plan(
        report.function, report.at, policy, 0, report.saved_bytes, report.recomputed_flops, 0, names, code=report.code
    )


def _parts(plan: Plan) -> list[Plan]:
    """A plan for each place that has a policy of its own."""
    if plan.policy != MIXED:
        return [plan]
    chosen = policy_of_each(plan.at)
    return [replace(plan, policy=policy, at=at, code="") for at, policy in chosen.items()]


def _differences(expected: Report, traced: Report) -> list[str]:
    """What differs in what is saved, a sentence each; empty where nothing does."""
    sentences: list[str] = []
    of_plan = Counter(_kind_and_type(row) for row in expected.residuals)
    of_text = Counter(_kind_and_type(row) for row in traced.residuals)
    for key in dict.fromkeys([*of_plan, *of_text]):
        planned, saved = of_plan[key], of_text[key]
        if planned != saved:
            sentences.append(f"{key} is saved {_times(saved)} by the edited text, and {_times(planned)} by the plan.")
    if expected.saved_bytes != traced.saved_bytes:
        text, plan = units.apart(traced.saved_bytes, expected.saved_bytes)
        sentences.append(f"the edited text saves {text}, and the plan {plan}.")
    return sentences


def _kind_and_type(row: Residual) -> str:
    return row.type + (f" in {row.memory_space}" if row.memory_space else "")


def _times(number: int) -> str:
    return {0: "not", 1: "once", 2: "twice"}.get(number, f"{number} times")


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
