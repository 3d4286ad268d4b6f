"""What JAX does with an edited text: the user's function traced with it, and what differs from what was asked for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from remat_magic import _jax, units
from remat_magic.editing.applications import Application, applications, with_policies
from remat_magic.editing.live_code import NewWrapper, as_edited
from remat_magic.editing.same_program import Values
from remat_magic.editing.user_code import UserCode
from remat_magic.editing.ways import Way
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.walk import walk
from remat_magic.records import Plan, RematError, Report, Residual, Site

__all__ = ["Retraces", "differences"]

_MARK = "__remat_magic_mark__"


class _Mark:
    """A policy that tells where it was given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


class Retraces:
    """Traces the function of one trace with other texts."""

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._engine, self._code = facts.engine, code

    def of(
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

    def applied(self, sites: Sequence[Site]) -> dict[str, list[Application]]:
        """Where the source applies the checkpoints of sites: each place is given a policy that is known again."""
        if not sites:
            return {}
        places = applications(self._code)
        policies = [ast.parse(f"{_MARK}[{number}]", mode="eval").body for number, _ in enumerate(places)]
        marked = list(zip(places, policies, strict=True))
        wrappers = [NewWrapper(place.text, place.maker(policy), place) for place, policy in marked]
        marks = [_Mark(number) for number, _ in enumerate(places)]
        facts, _ = self.of(with_policies(self._code, marked), {_MARK: marks}, wrappers)
        by_site: dict[str, list[Application]] = {}
        for _, eqn in walk(facts.engine.provenances.closed):
            mark = _jax.checkpoint_policy(eqn) if _jax.is_checkpoint(eqn) else None
            if isinstance(mark, _Mark):
                of_site = by_site.setdefault(facts.engine.site_of(eqn), [])
                if places[mark.number] not in of_site:
                    of_site.append(places[mark.number])
        return by_site

    def differences_besides(self, parts: Sequence[tuple[Plan, Way]], edited: Facts) -> list[str]:
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


def differences(expected: Report, traced: Report) -> list[str]:
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
