"""A plan as an edit of the user's own source, and what JAX does with the edited text.

The edit gives the planned values names where the source makes them, and a policy that saves these names to the
checkpoint that the plan is for. What it says of itself was traced from the edited text, executed in copies of the
user's namespaces: nothing of the session changes, and nothing is written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import _jax, units
from remat_magic.editing.choice import Naming, Place, choose, places
from remat_magic.editing.closest import closest, grouped
from remat_magic.editing.probe import PROBE, Candidate, candidates, is_probe, probe, probed
from remat_magic.editing.sandbox import again
from remat_magic.editing.setting import EditedCall, Setting
from remat_magic.editing.values import Skeleton, skeleton
from remat_magic.editing.written import Written
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.naming import is_given, name_everything
from remat_magic.records import Edit, EditedName, Plan, PlannedValue, RematError, Report, Residual, Site

__all__ = ["edit"]


def edit(facts: Facts, choice: Any, at: str | None = None) -> Edit:
    """A choice of what to keep as an edit of the source of the traced function.

    Args:
        facts: of the traced function.
        choice: a plan, the key of a policy, or residuals of a report of this trace to keep by name, all others being
            recomputed.
        at: one place or all sites, as for ``trace.plan``; a plan has its own.

    Raises:
        RematError: the source of what ran is not available or has changed, or cannot be executed apart from the
            session; no such place.
    """
    editor = _Editor(facts)
    plan, sentences = editor.plan_of(choice, at)
    return editor.edit(plan, sentences)


class _Editor:
    """Makes edits for one trace; probes its source once."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._setting = Setting.of(facts.engine.traced, facts.engine.index.closed)
        self._probed: tuple[Any, dict[int, Candidate]] | None = None

    # --------------------------------------------------------------------------------------------------- what is asked

    def plan_of(self, choice: Any, at: str | None) -> tuple[Plan, list[str]]:
        """What is asked for as a plan, with sentences about what no plan can keep."""
        facts = self._facts
        if isinstance(choice, Plan):
            if at is not None and at != choice.at:
                raise RematError(f"the plan is for at={choice.at!r}: leave `at` out, or make a plan for {at!r}.")
            return choice, []
        place = facts.engine.default_at if at is None else at
        if isinstance(choice, str):
            report = facts.report(choice, place)
            return _plan_of(report, report.policy, ()), []
        if isinstance(choice, Iterable):
            rows = list(choice)
            if all(isinstance(row, Residual) for row in rows):
                return self._of_residuals(rows, place)
        raise RematError(f"an edit is made of a plan, a policy's key or residuals, not of {type(choice).__name__}.")

    def _of_residuals(self, rows: Sequence[Residual], at: str) -> tuple[Plan, list[str]]:
        naming = self._named(at, False)
        index = self._facts.engine.index
        keys: dict[str, PlannedValue] = {}
        sentences: list[str] = []
        for row in rows:
            if row.kind not in ("intermediate", "offloaded"):
                continue
            found = False
            for key, value in naming.values.items():
                place = index.place(value.eqn)
                made = "" if value.output is None else _jax.primitive_name(value.eqn)
                source = place.source if place else None
                shape = tuple(value.aval.shape)
                alike = row.dtype == _jax.short_dtype(value.aval) and row.shape[len(row.shape) - len(shape) :] == shape
                if alike and any((made, source) == (origin.primitive, origin.source) for origin in row.origins):
                    keys[key] = PlannedValue(key, 0, name=value.name, source=source)
                    found = True
            if not found:
                where = f", {row.source.place}" if row.source else ""
                sentences.append(
                    f"{row.type}, {row.primitive or 'a value'}{where}, is made only by the derivative, so no "
                    "expression of the source computes it."
                )
        if not keys:
            report = self._facts.report("nothing_saveable", at)
            return _plan_of(report, report.policy, ()), sentences
        names = tuple(keys[key] for key in naming.values if key in keys)
        report = self._facts.report("nothing_saveable", at)
        draft = replace(_plan_of(report, f"chosen({len(names)})", names), fingerprint=naming.fingerprint)
        report = self._facts.report(draft)
        return replace(draft, saved_bytes=report.saved_bytes, recomputed_flops=report.recomputed_flops), sentences

    # ------------------------------------------------------------------------------------------------------ the program

    def _sites(self, at: str) -> tuple[Site, ...]:
        """The checkpoint sites that a place is; none where a new checkpoint is put around the function."""
        facts = self._facts
        if at == "sites":
            return facts.engine.sites
        if at == "function":
            own = own_checkpoint(facts.engine.index.closed)
            key = None if own is None else facts.engine.site_of(own)
            return tuple(site for site in facts.engine.sites if site.key == key)
        return tuple(site for site in facts.engine.sites if site.key == at)

    def _within(self, facts: Facts, at: str) -> Any:
        keys = {site.key for site in self._sites(at)}
        return (lambda eqn: facts.engine.site_of(eqn) in keys) if keys else None

    def _named(self, at: str, separately: bool) -> Any:
        facts = self._facts
        with _jax.tracing(_jax.Generation(), facts.engine.remat3, _jax.x64()):
            return name_everything(facts.engine.index.closed, self._within(facts, at), separately)

    def _probe(self) -> tuple[Any, dict[int, Candidate]]:
        """The program with every expression named, and what the names' numbers mean."""
        if self._probed is None:
            found: list[Candidate] = []
            trees: dict[str, ast.Module] = {}
            for file, source in self._setting.sources.items():
                here = candidates(source, self._setting.numbers(file), len(found))
                trees[file] = probed(source, here)
                found += here
            facts = self._retraced(trees, {PROBE: probe})
            self._probed = facts, {each.number: each for each in found}
        return self._probed

    def _retraced(
        self, trees: Mapping[str, ast.Module], given: Mapping[str, Any], calls: Sequence[EditedCall] = ()
    ) -> Any:
        return Facts(self._facts.engine.retraced(again(self._setting, trees, given, calls)))

    # --------------------------------------------------------------------------------------------------------- an edit

    def edit(self, plan: Plan, sentences: Sequence[str]) -> Edit:
        """The edit of a plan."""
        if not plan.names:
            return self._written(plan, Naming(), sentences)
        named, program, offered = self._programs(plan)
        wanted = [value for each in plan.names for value in program.names.get(each.key, {})]
        naming = choose(wanted, offered)
        missing = set(naming.missing)
        unnamed = [self._why(each, program) for each in plan.names if missing & program.names.get(each.key, {}).keys()]
        made = self._written(plan, naming, [*sentences, *unnamed])
        return made if made.verified else replace(made, closest=self._closest(plan, named, program, offered))

    def _closest(self, plan: Plan, named: Any, program: Skeleton, offered: Sequence[Place]) -> Edit | None:
        if plan.separately:
            named = self._named(plan.at, False)
            program = skeleton(named.closed, self._within(self._facts, plan.at), is_given)
        found = closest(self._facts, plan, grouped(program, named.values, offered))
        if found is None:
            return None
        made = self._written(found[0], Naming([offered[number] for number in found[1]]), ())
        return made if made.verified else None

    def _programs(self, plan: Plan) -> tuple[Any, Skeleton, list[Place]]:
        """The program with all its values named, and the places of the source that name some."""
        named = self._named(plan.at, plan.separately)
        if named.fingerprint != plan.fingerprint or not {value.key for value in plan.names} <= named.values.keys():
            raise RematError(
                f"this plan was made for another program than {self._facts.engine.function_name} as it was traced: "
                "make it anew with trace.plan()."
            )
        program = skeleton(named.closed, self._within(self._facts, plan.at), is_given)
        facts, found = self._probe()
        tried = skeleton(facts.engine.index.closed, self._within(facts, plan.at), is_probe)
        if program.operations != tried.operations:
            raise RematError(
                f"{self._facts.engine.function_name} does not make the same program each time that it is traced, so no "
                "edit of it can be verified: take out what depends on chance or on earlier calls."
            )
        return named, program, places(tried, found)

    def _written(self, plan: Plan, naming: Naming, unnamed: Sequence[str]) -> Edit:
        text = Written(self._facts, self._setting)
        names = tuple(text.name(place) for place in naming.places)
        if plan.names or plan.policy != "as_written":
            text.policy(plan, tuple(dict.fromkeys(each.name for each in names)), self._sites(plan.at))
        made = Edit(
            self._facts.engine.function_name,
            plan.at,
            plan.policy,
            text.files(),
            names,
            tuple(unnamed),
            planned_bytes=plan.saved_bytes,
            planned_flops=plan.recomputed_flops,
        )
        return self._verified(made, plan, text, naming)

    def _why(self, value: PlannedValue, program: Skeleton) -> str:
        """Why a value cannot be named."""
        types = dict.fromkeys(program.types[each] for each in program.names.get(value.key, {}))
        what = f"{value.primitive or 'carried value'} {', '.join(types)}"
        where = value.source
        if where is None:
            return f"{what} is made by no line of your source."
        if not value.primitive:
            return f"{what} is carried into the loop at {where.place}, where no variable of its own holds it."
        source = self._setting.sources.get(where.file)
        if source is not None and source.is_formatted(where.line, where.column):
            return f"{what} is made inside a formatted string, {where.place}: assign it to a variable before."
        return (
            f"{what} is made inside `{where.expression}`, {where.place}, which gives another value: no expression of "
            "the source has it."
        )

    def _verified(self, made: Edit, plan: Plan, text: Written, naming: Naming) -> Edit:
        expected: Report = self._facts.report(plan if plan.names else plan.policy, plan.at)
        try:
            traced: Report = self._retraced(text.trees(), {}, text.calls).report("as_written")
        except Exception as error:  # noqa: BLE001 - whatever the user's own definitions raise when they are edited
            what = str(error).partition("\n")[0].rstrip(".")
            return replace(made, differences=(f"the edited text cannot be traced: {type(error).__name__}: {what}.",))
        differences = _differences(expected, traced)
        return replace(
            made,
            verified=not differences,
            differences=tuple(differences + (_besides(naming, made.names) if differences else [])),
            saved_bytes=traced.saved_bytes,
            recomputed_flops=None if traced.backward_error else traced.recomputed_flops,
        )


def _plan_of(report: Report, policy: str, names: tuple[PlannedValue, ...]) -> Plan:
    return Plan(
        report.function, report.at, policy, 0, report.saved_bytes, report.recomputed_flops, 0, names, code=report.code
    )


def _differences(expected: Report, traced: Report) -> list[str]:
    """What differs in what is saved, a sentence each; empty where nothing does."""
    found: list[str] = []
    of_plan = Counter(_kind_and_type(row) for row in expected.residuals)
    of_text = Counter(_kind_and_type(row) for row in traced.residuals)
    for key in dict.fromkeys([*of_plan, *of_text]):
        planned, saved = of_plan[key], of_text[key]
        if planned != saved:
            found.append(f"{key} is saved {_times(saved)} by the edited text, and {_times(planned)} by the plan.")
    if expected.saved_bytes != traced.saved_bytes:
        text, plan = units.apart(traced.saved_bytes, expected.saved_bytes)
        found.append(f"the edited text saves {text}, and the plan {plan}.")
    return found


def _kind_and_type(row: Residual) -> str:
    return row.type + (f" in {row.memory_space}" if row.memory_space else "")


def _times(number: int) -> str:
    return {0: "not", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _besides(naming: Naming, names: Sequence[EditedName]) -> list[str]:
    found: list[str] = []
    for place, more in naming.besides:
        name = names[naming.places.index(place)]
        where = f", {name.source.place}" if name.source else ""
        found.append(
            f"{name.name!r} stands at {f'`{name.expression}`' if name.expression else 'a name of your own'}{where}, "
            f"which is executed for {len(more)} other {'value' if len(more) == 1 else 'values'} besides: they have the "
            "same name."
        )
    return found
