"""The values that a plan saves: the programs in which they have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.primal import Primal
from remat_magic.engine.selection import Selection, Selector
from remat_magic.jaxprs.naming import NamedProgram, name_everything
from remat_magic.jaxprs.spans import Spans
from remat_magic.policies import Resolved, resolve
from remat_magic.policies.table import DESTINATION, SOURCE
from remat_magic.records import Plan, RematError


class PlanValues:
    """One program with its values named, for each place that a plan can be for. To be used within its trace's settings.

    Args:
        primal: the program.
        selector: makes selections for it.
        differentiate: has JAX differentiate it under a selection.
    """

    def __init__(self, primal: Primal, selector: Selector, differentiate: Callable[[Selection], object]) -> None:
        self._primal, self._selector, self._differentiate = primal, selector, differentiate
        self._programs: dict[tuple[str, bool], NamedProgram] = {}
        self._policies: dict[tuple[str | None, ...], Any] = {}  # one for each choice, whatever a plan of it is called

    def clear(self) -> None:
        """Drop the programs."""
        self._programs.clear()
        self._policies.clear()

    def program(self, at: str, remat3: bool) -> NamedProgram:
        """The program with the values named that a policy there is asked about.

        Args:
            at: one place, or all sites.
            remat3: whether jax_remat3 is in force.
        """
        program = self._programs.get((at, remat3))
        if program is None:
            selection = self._selector.select(resolve("nothing_saveable"), at)
            primal = self._primal
            closed = with_checkpoints(primal.closed, primal.calls, primal.possible, selection.at_sites)
            spans = primal.provenances.spans
            program = self._name(selection, closed, spans, differentiate=lambda: self._differentiate(selection))
            self._programs[at, remat3] = program
        return program

    def select(self, plan: Plan) -> Selection:
        """A plan's choice, made precise.

        Raises:
            RematError: the program does other operations than the one that the plan was made for.
        """
        naming = self.program(plan.at, self._primal.remat3)
        names = self._names(plan, naming)
        moved = sorted(name for name, value in zip(names, plan.names, strict=True) if value.offloaded)
        kept = sorted({*names} - {*moved})
        policy = self._policies.setdefault((*kept, None, *moved), _policy(kept, moved))
        unnamed = self._selector.select(Resolved(plan.policy, "", policy), plan.at)
        return replace(unnamed, naming=naming, code=plan.code, label=plan.label, plan=plan)

    def _names(self, plan: Plan, naming: NamedProgram) -> list[str]:
        """The names of a plan's values in a program, which are told by its operations alone."""
        keys = [value.key for value in plan.names]
        if naming.fingerprint != plan.fingerprint or not naming.values.keys() >= {*keys}:
            raise RematError(
                f"this plan was made for other operations than {self._primal.name} does now: make it anew with "
                "trace.plan()."
            )
        return keys

    def again(self, selection: Selection, closed: Any) -> Any:
        """A jaxpr of the same function for other arguments, with the names that a selection's policy is of, if any.

        Raises:
            RematError: it does other operations than the program that the plan was made for.
        """
        if selection.naming is None:
            return closed
        naming = self._name(selection, closed, Spans(), like=selection.naming)
        if naming.fingerprint != selection.naming.fingerprint:
            raise RematError(
                f"{self._primal.name} does other operations for these arguments than for those that the plan was made "
                "for: trace it with these, and make a plan for them."
            )
        return naming.closed

    def _name(
        self,
        selection: Selection,
        closed: Any,
        spans: Spans,
        *,
        differentiate: Callable[[], object] | None = None,
        like: NamedProgram | None = None,
    ) -> NamedProgram:
        chosen = dict(selection.at_sites)

        def within(eqn: Any) -> bool:
            return self._primal.table.key_of(eqn, spans) in chosen

        checkpoints = within if selection.whole is None else None
        return name_everything(
            closed, checkpoints, rules=not self._primal.remat3, differentiate=differentiate, like=like
        )


def _policy(kept: Sequence[str], moved: Sequence[str]) -> Any:
    """JAX's policy that saves some names, and offloads others."""
    if not moved:
        return jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept, names_which_can_be_offloaded=moved, offload_src=SOURCE, offload_dst=DESTINATION
    )
