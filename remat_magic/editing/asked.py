"""What an edit is asked for: plans, policies or residuals as a plan, and the values of the program that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import _jax
from remat_magic.editing.names import Skeleton
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.naming import NamedProgram, is_given, name_everything
from remat_magic.jaxprs.walk import walk
from remat_magic.records import Plan, PlannedValue, RematError, Report, Residual, Site

__all__ = ["Asked"]


class Asked:
    """Reads what is asked for of one trace."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self._engine = facts, facts.engine

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
        naming = self.naming(at)
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
        values = tuple(self.planned(key, naming) for key in naming.values if key in keys)
        draft = replace(_plan_of(report, f"chosen({len(values)})", values), fingerprint=naming.fingerprint)
        report = self._facts.report(draft)
        return replace(draft, saved_bytes=report.saved_bytes, recomputed_flops=report.recomputed_flops), sentences

    def planned(self, key: str, naming: NamedProgram) -> PlannedValue:
        """A value of a program whose values are named, as a plan has it."""
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
                planned = self.planned(key, naming)
                if (planned.primitive, planned.source) in origins:
                    keys.add(key)
        return keys

    def _why_no_name(self, row: Residual, at: str) -> str:
        """Why a residual cannot be kept by a name, whatever the source is."""
        if row.kind not in ("intermediate", "offloaded"):
            value_text = f"{row.type}, {row.argument}," if row.argument else row.type
            return f"{value_text} is kept without a name: it is {'an' if row.kind == 'argument' else 'a'} {row.kind}."
        value_text = f"{row.type}, {row.primitive or 'a value'}{f', {row.source.place}' if row.source else ''},"
        if self._keys_of(row, self.naming("function")):
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

    def sites(self, at: str) -> tuple[Site, ...]:
        """The checkpoint sites that a place is; none where a new checkpoint is written."""
        sites = self._engine.sites
        if at == "function":
            own = own_checkpoint(self._engine.provenances.closed)
            at = "" if own is None else self._engine.site_of(own)
        return tuple(site for site in sites if at in ("sites", site.key))

    def within(self, facts: Facts, at: str) -> Callable[[Any], bool] | None:
        """Which equations of a trace are the checkpoints of a place; None: all that is traced is in it."""
        keys = {at} if facts.engine.place(at) is not None else {site.key for site in self.sites(at)}
        return (lambda eqn: facts.engine.site_of(eqn) in keys) if keys else None

    def naming(self, at: str, separately: bool = False) -> NamedProgram:
        """The program with a name for each value that a policy at a place can save."""
        with _jax.tracing(_jax.Generation(), self._engine.remat3, _jax.x64()):
            closed, within = self._engine.placed(at), self.within(self._facts, at)
            return name_everything(
                closed,
                within,
                separately,
                rules=not self._engine.remat3,
                differentiate=lambda: self._engine.forward("nothing_saveable", at),
            )

    def named(self, naming: NamedProgram, at: str) -> Skeleton:
        """What such a program does, by which another trace of it is compared."""
        return Skeleton.of(naming.closed, self.within(self._facts, at), is_given)


def _plan_of(report: Report, policy: str, names: tuple[PlannedValue, ...]) -> Plan:
    return Plan(
        report.function, report.at, policy, 0, report.saved_bytes, report.recomputed_flops, 0, names, code=report.code
    )
