"""A plan as an edit of the user's own source, and what JAX does with the edited text.

An edit does three things: it gives a checkpoint that is there another policy, it puts a checkpoint on a definition or
at the calls of a function, and it gives expressions and variables names for the policy to save. What it says of itself
was traced from the edited text, executed in copies of the user's namespaces: nothing of the session changes, and
nothing is written. Of a plan that needs something else it says so, and is of the nearest plan that can be written.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.devices import Device
from remat_magic.editing.checkpoints import EditedTexts, Insertion, insertions_at, insertions_of_function
from remat_magic.editing.names import (
    PROBE,
    NameOption,
    Skeleton,
    choose,
    grouped,
    is_probe,
    name_options,
    probe,
    probed,
)
from remat_magic.editing.source import ParsedText, parsed_text
from remat_magic.editing.user_code import PARTIAL, Application, UserCode, applications_of, differences, traced
from remat_magic.engine.donation import Donation, is_jit, jits
from remat_magic.engine.engine import Engine
from remat_magic.engine.retrace import option_of, policy_of_each
from remat_magic.engine.signature import function_name
from remat_magic.engine.sites import own_checkpoint
from remat_magic.engine.vmaps import parts_in
from remat_magic.facts.buffers import memory_of
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.provenance import cell_number
from remat_magic.jaxprs.rewriting import is_given
from remat_magic.parsing import parse_expression, parse_source
from remat_magic.planning.places import whole_function
from remat_magic.planning.plan import plan as plan_for
from remat_magic.planning.search import Request, as_plan, best_of_groups, planner
from remat_magic.policies import MIXED
from remat_magic.records import (
    Edit,
    FitChoice,
    Plan,
    PlannedValue,
    RematError,
    Site,
)
from remat_magic.records.fit import by_hand, microbatches_in
from remat_magic.user_files import is_user_file


def edit(facts: Facts, choice: Any, at: Any = None) -> Edit:
    """``Trace.edit``."""
    editor = _Editor(facts)
    return editor.edit(editor.plan_of(choice, at))


def attempt(facts: Facts, choice: FitChoice) -> Edit | str:
    """The edit of a choice, or a sentence on why none writes it; empty where the source is not at hand.

    Of a choice that cannot be written as a whole nothing is written.
    """
    try:
        editor = _Editor(facts, partly=False)
    except RematError:
        return ""
    try:
        return editor.edit(editor.plan_of(choice, None))
    except RematError as error:
        return str(error)


def _peak_device(plan: Plan) -> Device | None:
    """The device as on which the peaks are that the plan's budget is of."""
    return devices.get(plan.peak_device) if plan.peak_device else None


def _within_budget_of(plan: Plan, other: Plan) -> Plan:
    """A plan within another one's budget, which is of that one's kind and on its device."""
    return replace(
        plan, budget_bytes=other.budget_bytes, of=other.of, peak_device=other.peak_device, status=other.status
    )


# ------------------------------------------------------------------------------------------------------ the edit of it


class _Editor:
    """Makes edits for one trace."""

    def __init__(self, facts: Facts, *, partly: bool = True) -> None:
        self._facts, self._engine, self._partly = facts, facts.engine, partly
        self._code = UserCode.of(self._engine)
        self._donation: Donation | None = None  # what is donated besides

    def plan_of(self, choice: Any, at: Any) -> Plan:
        """A choice, such as a policy's key, as a plan."""
        if isinstance(choice, FitChoice):
            self._donation = self._engine.donation if choice.donate else None
            choice, at = choice.chosen
        choice = self._engine.plans.get(choice, choice) if isinstance(choice, str) else choice
        if isinstance(choice, Plan):
            if at is not None and at != choice.at:
                raise RematError(f"the plan is for at={choice.at!r}: leave `at` out, or make a plan for {at!r}.")
            return choice
        if not isinstance(choice, str) and not callable(choice):
            raise RematError(f"an edit is made of a plan or a policy, not of {type(choice).__name__}.")
        return self._plan_under(choice, at)

    def _plan_under(self, policy: Any, at: Any) -> Plan:
        """What a policy comes to at a place, as a plan."""
        return as_plan(self._facts, Request(0), self._facts.under(policy, at).known_report)

    def _sites(self, at: str) -> tuple[Site, ...]:
        """The checkpoint sites that a place is; none where a new checkpoint is written."""
        sites = self._engine.primal.table.sites
        if at == "function":
            own = own_checkpoint(self._engine.primal.provenances.closed)
            at = "" if own is None else self._engine.primal.site_of(own)
        return tuple(site for site in sites if at in ("sites", site.key))

    def _within(self, facts: Facts, at: str) -> Callable[[Any], bool] | None:
        """Which equations of a trace are the checkpoints of a place; None: all that is traced is in it."""
        keys = {at} if facts.engine.place(at) is not None else {site.key for site in self._sites(at)}
        return (lambda eqn: facts.engine.primal.site_of(eqn) in keys) if keys else None

    def edit(self, plan: Plan) -> Edit:
        """The edit of a plan."""
        if by_hand(plan.at):
            code = plan.code or self._facts.under(plan if plan.names else plan.policy, plan.at).selection.code
            what = (
                f"by hand it is `{code}`"
                if code and "\n" not in code
                else "`code` of the choice or report is all of it"
            )
            why = f"No edit can write {plan.at!r}: {what}."
            closest = None if microbatches_in(plan.at) > 1 else self._at_whole_functions(plan)
            return replace(self._empty(plan), unnamed=(why,), closest=closest)
        if plan.names and parts_in([plan.at]):
            why = f"no edit gives names to what is in a part of {plan.at}: choose a policy of JAX's."
            return replace(self._empty(plan), unnamed=(why,), closest=self._at_whole_functions(plan))
        if not plan.names:
            return self._of_policy(plan)
        naming = planner(self._facts, plan.at).parts.naming
        if naming.fingerprint != plan.fingerprint or not {value.key for value in plan.names} <= naming.values.keys():
            raise RematError(
                f"this plan was made for another program than {self._engine.primal.name} as it was traced: make it "
                "anew with trace.plan()."
            )
        trees, places = probed(self._code)
        facts = traced(self._code, trees, {PROBE: probe}, read=lambda facts: facts)
        with_places = facts.engine.placed(plan.at)
        program = Skeleton.of(naming.closed, self._within(self._facts, plan.at), is_given)
        with_probes = Skeleton.of(with_places, self._within(facts, plan.at), is_probe)
        if program.operations != with_probes.operations:
            raise RematError(
                f"{self._engine.primal.name} does not make the same program each time that it is traced, so no edit "
                "of it can be verified: take out what depends on chance or on earlier calls."
            )
        options = name_options(with_probes, places)
        chosen, missing = choose(
            [value for planned in plan.names for value in program.names.get(planned.key, {})], options
        )
        why = [
            _why_unnamed(value, program) for value in plan.names if missing & program.names.get(value.key, {}).keys()
        ]
        why += [
            f"{value.primitive} {value.type}{f', {value.source.place},' if value.source else ''} is made in the rule "
            "of a custom derivative, where no edit reaches."
            for value in plan.names
            if naming.values[value.key].in_rule
        ]
        if why and not self._partly:
            return replace(self._empty(plan), unnamed=tuple(why))
        edited = self._written(plan, chosen, why)
        return (
            edited
            if _if_verified(edited) or not self._partly
            else replace(edited, closest=self._closest(plan, program, options))
        )

    def _of_policy(self, plan: Plan) -> Edit:
        """The edit of a plan without names; in place of a checkpoint that cannot be taken off, one that saves all."""
        try:
            return self._written(plan, [], self._why_no_edit(plan))
        except RematError as error:
            if plan.policy != "none":
                raise
            saving = _within_budget_of(self._plan_under("everything_saveable", plan.at), plan)
            closest = _if_verified(self._written(saving, [], ()))
            return replace(self._empty(plan), unnamed=(str(error),), closest=closest)

    def _closest(self, plan: Plan, program: Skeleton, options: Sequence[NameOption]) -> Edit | None:
        """The edit whose plan is the best within the same budget that the source can name."""
        groups = grouped(program, planner(self._facts, plan.at).parts.naming.values, options)
        numbers = {option: str(number) for number, option in enumerate(options)}
        best = best_of_groups(self._facts, plan, {key: numbers[option] for key, option in groups.items()})
        if best is None:  # nothing that has an expression fits
            best = self._plan_under("nothing_saveable", plan.at)
        used = {groups[value.key] for value in best.names}
        names = [option for option in options if option in used]
        return _if_verified(self._written(_within_budget_of(best, plan), names, ()))

    def _at_whole_functions(self, plan: Plan) -> Edit | None:
        """The edit of the nearest plan where one is for places at which no edit writes a checkpoint."""
        parts, policies = _parts(plan), dict[str, set[str]]()
        for part in parts:
            policies.setdefault(whole_function(part.at), set()).add(part.policy)
        if any(len(kinds - {"none"}) > 1 for kinds in policies.values()):  # a function has two policies
            return None
        at = {whole: max(kinds, key=lambda policy: policy != "none") for whole, kinds in policies.items()}
        try:
            if plan.names or (plan.status and len(parts) == 1):  # within its budget, on the same device
                memory = memory_of(_peak_device(plan))
                request = Request(plan.budget_bytes or plan.saved_bytes, plan.of, memory=memory)
                nearest = _within_budget_of(plan_for(self._facts, request, next(iter(at))), plan)
            elif plan.policy == MIXED:
                nearest = _within_budget_of(self._plan_under("as_written", at), plan)
            else:
                nearest = _within_budget_of(self._plan_under(plan.policy, next(iter(at))), plan)
            return _if_verified(self.edit(nearest).best)
        except RematError:
            return None

    def _written(self, plan: Plan, chosen: Sequence[NameOption], unnamed: Sequence[str]) -> Edit:
        """The edit in the first way that is verified, else one that is traced.

        With JAX's own checkpoint, or with that of a library which the source needs for it; of policies at several
        places all but the last are written in the most usual way.
        """
        *parts, last = _parts(plan)
        places = applications_of(self._code, [site for part in (*parts, last) for site in self._sites(part.at)])
        before = [(part, self._insertions(part)[0]) for part in parts]
        edits, errors = list[Edit](), list[RematError]()
        for insertion in self._insertions(last):
            try:
                edits.append(self._written_in([*before, (last, insertion)], plan, chosen, unnamed, places))
            except RematError as error:
                errors.append(error)
            if edits and edits[-1].verified:
                return edits[-1]
        if not edits:
            raise errors[0]
        return next((edit for edit in edits if edit.saved_bytes is not None), edits[0])

    def _insertions(self, plan: Plan) -> list[Insertion]:
        """The ways to write what a plan has at one place."""
        if self._sites(plan.at) or plan.policy in ("as_written", "none") or parts_in([plan.at]):
            return [Insertion()]
        if plan.at == "function":
            return insertions_of_function(self._code, self._engine)
        insertions = insertions_at(self._code, self._engine, plan.at)
        if not insertions:
            by_hand = f", as in `{plan.code}`" if plan.code else ""
            raise RematError(
                f"no edit writes a checkpoint at {plan.at!r}, which a library defines or calls, or is haiku's: choose "
                f"a function or a class of your own, or write it by hand{by_hand}."
            )
        return insertions

    def _empty(self, plan: Plan) -> Edit:
        return Edit(
            self._engine.primal.name,
            plan.at,
            plan.policy,
            planned_bytes=plan.saved_bytes,
            planned_flops=plan.recomputed_flops,
            label=plan.label,
            budget_bytes=plan.budget_bytes if plan.status else None,
            of=plan.of,
            peak_device=plan.peak_device,
            plan=plan if plan.names else None,
        )

    def _written_in(
        self,
        parts: Sequence[tuple[Plan, Insertion]],
        plan: Plan,
        chosen: Sequence[NameOption],
        unnamed: Sequence[str],
        places: Mapping[str, Sequence[Application]],
    ) -> Edit:
        texts = EditedTexts(self._facts, self._code)
        names = tuple(texts.name(option) for option in chosen)
        for part, insertion in parts:
            if parts_in([part.at]):
                self._write_in_parts(texts, part)
            elif part.names or part.policy != "as_written":
                saved_names = tuple(dict.fromkeys(name.name for name in names))
                texts.write_policy(part, saved_names, self._sites(part.at), places, insertion)
        donation = self._donation
        jitted = None if donation is None else write_donation(texts, self._code, self._engine, donation)
        edited = replace(self._empty(plan), files=texts.files(), names=names, unnamed=tuple(unnamed))
        expected = self._facts.under(plan if plan.names else plan.policy, plan.at).known_report
        try:
            device = _peak_device(plan)
            report, donates = traced(
                self._code,
                texts.trees(),
                {},
                texts.wrappers,
                jitted,
                read=lambda facts: (facts.under().report(device), facts.engine.donation is None),
            )
        except (RematError, SyntaxError) as error:
            return replace(edited, differences=(str(error),))
        differing = differences(expected, report)
        # Which may call other functions, too.
        is_at_calls = any(insertion.calls or parts_in([part.at]) for part, insertion in parts)
        if is_at_calls and not differing and expected.recomputed_flops != report.recomputed_flops:
            differing = ["the edited text saves what was planned, but recomputes something else."]
        if donation is not None and not donates:
            differing.append("the edited text does not donate all that is to be donated.")
        if differing and (names or any(self._sites(part.at) for part, _ in parts)):
            differing.append(
                "a name or a checkpoint in the source covers all values of its line, not only the planned ones."
            )
        return replace(
            edited,
            verified=not differing,
            differences=tuple(differing),
            saved_bytes=report.saved_bytes,
            peak_bytes=report.peak_bytes,
            recomputed_flops=None if report.backward_error else report.recomputed_flops,
        )

    def _write_in_parts(self, texts: EditedTexts, part: Plan) -> None:
        """Write what a plan has at a place in parts."""
        ((key, count),) = parts_in([part.at]).items()
        vmap, selection = self._engine.vmaps[key], self._facts.under(part.policy, part.at).selection
        option = None if part.policy == "none" or selection.resolved is None else option_of(selection.resolved)
        codes = vmap.codes(count, option)
        for span, _ in vmap.calls:
            text, written = self._code.texts.get(span.file), codes.get(span)
            if text is None or written is None:
                by_hand = f"by hand it is `{selection.code}`" if selection.code else "write jax.lax.map by hand"
                raise RematError(f"no edit writes {part.at}, as {span.place} is not like jax.vmap(f)(xs): {by_hand}.")
            changes, imports = texts.of(text)
            for name in ("jax.lax.map", "jax.checkpoint"):
                written = written.replace(name, imports.jax() + name.removeprefix("jax"))
            changes.put((span.line, span.column), (span.end_line, span.end_column), written)

    def _why_no_edit(self, plan: Plan) -> list[str]:
        if plan.policy == "as_written" and self._donation is None:
            return ["the source already has this policy: there is nothing to edit."]
        if plan.policy == "none" and not self._sites(plan.at):
            return [f"{self._engine.primal.name} has no jax.checkpoint of its own to be taken off."]
        return []


def _why_unnamed(value: PlannedValue, program: Skeleton) -> str:
    """Why a value of a plan cannot be named."""
    types = dict.fromkeys(program.types[named] for named in program.names.get(value.key, {}))
    text = f"{value.primitive or 'carried value'} {', '.join(types)}"
    if value.source is None:
        return f"{text} is made by no line of your source."
    return (
        f"{text} is made inside `{value.source.expression}`, {value.source.place}, and no expression or variable that "
        "an edit reaches has it alone."
    )


def _parts(plan: Plan) -> list[Plan]:
    """A plan for each place that has a policy of its own."""
    if plan.policy != MIXED:
        return [plan]
    chosen = policy_of_each(plan.at)
    return [replace(plan, policy=policy, at=at, code="") for at, policy in chosen.items()]


def _if_verified(edit: Edit) -> Edit | None:
    """An edit that is verified, and within its budget."""
    return edit if edit.verified and not edit.excess_bytes else None


# ------------------------------------------------------------------------------------------------------------ donation


def write_donation(texts: EditedTexts, code: UserCode, engine: Engine, donation: Donation) -> Callable[[Any], Any]:
    """Write it; what is given back jits a step as the edited text does."""
    name = function_name(engine.given.fun)
    own, line = donation.where
    texts_of_step = sorted(code.texts.values(), key=lambda text: text.file != own)
    in_each = ([(text, jit) for jit in jits(text.tree, name, line * (text.file == own))] for text in texts_of_step)
    found = next(filter(None, in_each), None) or _elsewhere(code, name)
    if len(found) != 1:
        lines = ", ".join(f"line {jit.lineno} of {text.place}" for text, jit in found)
        several = f"applied more than once ({lines})" if found else "in no source text of yours"
        raise RematError(f"the jit of {name} is {several}: write `{donation.code}` by hand.")
    ((text, jit),) = found
    option, value = donation.written(jit)
    changes, _ = texts.of(text)
    jitted, options = jit, [ast.keyword(option, parse_expression(value))]
    if isinstance(jit, ast.Call):
        changes.set_keyword(jit, option, value)
        options += [keyword for keyword in jit.keywords if keyword.arg != option]
        jitted = jit.args[0] if jit.args and is_jit(jit.args[0]) else jit.func  # of functools.partial
    else:
        changes.wrap(jit, "", f"({option}={value})")
    maker = ast.Call(ast.Name(PARTIAL, ast.Load()), [jitted], options)

    def as_edited(step: Any) -> Any:
        expression = ast.fix_missing_locations(ast.Expression(ast.copy_location(maker, jit)))
        compiled = compile(expression, text.file, "eval", dont_inherit=True)
        return eval(compiled, {**code.scope(text.file), PARTIAL: functools.partial})(step)  # noqa: S307 - the user's jit

    return as_edited


def _elsewhere(code: UserCode, name: str) -> list[tuple[ParsedText, ast.expr]]:
    """Where other modules and cells than those that ran jit a function; the latest such cell."""
    modules = {file: vars(it) for it in [*sys.modules.values()] if (file := getattr(it, "__file__", None) or "")}
    cells = {file: number for file in [*linecache.cache] if (number := cell_number(file)) is not None}
    around = next(iter(code.namespaces.values()), {})
    for file in (*sorted(cells, key=lambda file: -cells[file]), *filter(is_user_file, modules)):
        tree = parse_source("".join(linecache.getlines(file)))
        if file not in code.texts and tree is not None and jits(tree, name):
            text = code.texts[file] = parsed_text(file, set())
            code.namespaces[file] = modules.get(file, around)
            return [(text, jit) for jit in jits(text.tree, name)]
    return []
