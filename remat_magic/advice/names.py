"""Advice on checkpoint names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line
from remat_magic.facts.names import makers_of_operands
from remat_magic.jaxprs.flow import Maker
from remat_magic.policies import Key
from remat_magic.records import Advice, dearest

__all__ = ["RULES"]


def unknown_name(case: Case) -> Iterator[Advice]:
    """A name that the function does not have."""
    names = case.facts.engine.names
    for policy in dict.fromkeys(case.asked.values()):
        for name in policy.names:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                mend = (
                    f"Write {close[0]!r}."
                    if close
                    else f"Use one of {', '.join(map(repr, names))}."
                    if names
                    else f"Name a value: checkpoint_name(x, {name!r})."
                )
                function = case.facts.engine.function_name
                yield Advice(
                    "unknown-name",
                    f"The policy asks for {name!r}, which {function} does not have.",
                    mend,
                    stake=_changed(case, policy, name, close[0]) if close else None,
                )


def _changed(case: Case, policy: Key, wrong: str, right: str) -> int | None:
    """How many bytes more are saved if a policy asks for another name; None where that is not known."""
    mended = case.other(str(policy.without(wrong).saving(right))) if policy == case.policy_in_force else None
    return None if mended is None else abs(mended.saved_bytes - case.report.saved_bytes)


def out_of_sight(case: Case) -> Iterator[Advice]:
    """A name given where the policy's checkpoint does not reach."""
    for site, policy in case.asked.items():
        for name in policy.names:
            places = [place for place in case.names if place.name == name]
            if not places or not site or any(site in place.sites for place in places):
                continue
            yield Advice(
                "name-out-of-sight",
                f"The policy of {site} asks for {name!r}, which is named outside {site}"
                f"{at_line(places[0].source)}: a policy sees only what is computed under its checkpoint.",
                f"Compute and name it inside {site}, or put the checkpoint with this policy around both.",
                source=places[0].source,
                stake=sum(_bytes(maker) for place in places for maker in place.makers),
            )


def _bytes(maker: Maker) -> int:
    """What a value takes, in all turns of the loops around it."""
    return 0 if maker.eqn is None else _jax.nbytes(maker.eqn.outvars[maker.output].aval) * maker.scope.turns


def named_twice(case: Case) -> Iterator[Advice]:
    """One name for values made on different lines."""
    names_in_policies = {name for policy in case.asked.values() for name in policy.names}
    for name in case.facts.engine.names:
        lines = {(g.source.file, g.source.line): g.source for g in case.names if g.name == name and g.source}
        if name not in names_in_policies or len(lines) < 2:
            continue
        places = [*lines.values()]
        lines_of = " and ".join(span.place for span in places)
        saved = [row for row in case.report.residuals if row.name == name and row.kind in ("intermediate", "offloaded")]
        yield Advice(
            "named-twice",
            f"{name!r} names different values, at {lines_of}: a policy takes all or none.",
            "Give each a name of its own.",
            sum(row.nbytes for row in saved) or None,
            "bytes" if saved else "",
            places[1],
        )


def saved_in_vain(case: Case) -> Iterator[Advice]:
    """A value saved by name whose operation runs again all the same."""
    in_vain = {note.about for note in case.report.notes if note.kind == "saved-in-vain"}
    told: set[tuple[str, str]] = set()
    for row in case.report.residuals:
        if not row.name or (row.name, row.primitive) in told or (row.name, row.primitive) not in in_vain:
            continue
        told.add((row.name, row.primitive))
        given = next((place for place in case.names if place.name == row.name), None)
        makers = [before for maker in given.makers for before in makers_of_operands(maker)] if given else []
        inputs = []
        for maker in makers:
            place = case.facts.engine.provenances.of(maker.eqn, maker.scope.chain)
            inputs.append(f"the {_jax.primitive_name(maker.eqn)}{at_line(place.source if place else None)}")
        line = (row.source.file, row.source.line) if row.source else None
        repeated = [e for e in case.report.recomputed if e.repeated and e.source]
        again = [e for e in repeated if e.source and (e.source.file, e.source.line) == line]
        what = " and ".join(dict.fromkeys(inputs)) or f"what goes into {row.primitive}"
        yield Advice(
            "saved-in-vain",
            f"{row.name!r} takes {units.nbytes(row.nbytes)}, and {row.primitive}{at_line(row.source)} runs again "
            "all the same: its derivative reads the value from before it was named.",
            f"Name {what} instead, or too: recomputing {row.primitive} from it costs little.",
            sum(e.flops or 0 for e in dearest(again)) or row.nbytes,
            "FLOPs" if any(e.flops for e in again) else "bytes",
            row.source,
            stake=row.nbytes,
        )


def saves_everything(case: Case) -> Iterator[Advice]:
    """A factory of JAX's that ignores its names."""
    for policy in dict.fromkeys(case.asked.values()):
        if policy.has("save_anything_except_these_names"):
            yield Advice(
                "saves-everything",
                "save_anything_except_these_names ignores the names it is given: it saves "
                f"{units.nbytes(case.report.saved_bytes)}, all there is.",
                "Use save_any_names_but_these with names on what to keep, or save_only_these_names.",
                case.report.saved_bytes,
                "bytes",
            )


RULES = (unknown_name, out_of_sight, saved_in_vain, named_twice, saves_everything)
