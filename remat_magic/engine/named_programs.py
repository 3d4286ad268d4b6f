"""Plans applied: the programs whose values all have names, and the selections that choose among these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from remat_magic.engine.positions import find_again
from remat_magic.engine.selection import Selection, Selector
from remat_magic.engine.sites import SiteTable, identity
from remat_magic.jaxprs.naming import Naming, name_everything
from remat_magic.jaxprs.provenance import PrimalIndex
from remat_magic.jaxprs.spans import Spans
from remat_magic.policies import Resolved, resolve
from remat_magic.policies.table import DESTINATION, SOURCE
from remat_magic.records import Plan, RematError


class NamedPrograms:
    """One program with its values named, for each place that a plan can be for. To be used within its trace's settings.

    Args:
        closed: the primal jaxpr.
        table: its sites.
        selector: makes selections for it.
        spans: reads its tracebacks.
        function: its name.
    """

    def __init__(self, closed: Any, table: SiteTable, selector: Selector, spans: Spans, function: str) -> None:
        self._closed, self._table, self._selector = closed, table, selector
        self._spans, self._function = spans, function
        self._programs: dict[tuple[str, bool, bool], Naming] = {}
        self._selections: dict[tuple[Any, ...], Selection] = {}

    def clear(self) -> None:
        """Drop the programs."""
        self._programs.clear()
        self._selections.clear()

    def program(self, at: str, separately: bool, remat3: bool) -> Naming:
        """The program with the values named that a policy there is asked about.

        Args:
            at: one place, or all sites.
            separately: whether the calls of a shared body have names of their own.
            remat3: whether jax_remat3 is in force.
        """
        known = self._programs.get((at, separately, remat3))
        if known is None:
            selection = self._selector.select(resolve("nothing_saveable"), at)
            known = self._name(selection, self._closed, separately, self._spans)
            self._programs[at, separately, remat3] = known
        return known

    def select(self, plan: Plan, remat3: bool) -> Selection:
        """A plan's choice, made precise.

        Where the program does other operations than the one that the plan was made for, the values are looked for by
        their positions (see :mod:`remat_magic.engine.positions`).

        Raises:
            RematError: the program does not make the plan's values; says what differs.
        """
        keys = tuple(sorted((value.key, value.offloaded) for value in plan.names))
        known = self._selections.get((plan.policy, plan.at, plan.separately, keys))
        if known is None:
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
            selection = self._selector.select(Resolved(plan.policy, "", policy), plan.at)
            known = replace(selection, naming=naming, code=plan.code, notes=(*selection.notes, *notes))
            self._selections[plan.policy, plan.at, plan.separately, keys] = known
        return known

    def _names(self, plan: Plan, naming: Naming) -> tuple[list[str], tuple[str, ...]]:
        """The names of a plan's values in a program, and what is to be said of them."""
        keys = [value.key for value in plan.names]
        if naming.fingerprint == plan.fingerprint and naming.values.keys() >= set(keys):
            return keys, ()
        found, differ = find_again(plan, naming, PrimalIndex(self._closed, self._function))
        if differ:
            more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
            raise RematError(
                f"this plan was made for another program than {self._function} is now: {differ[0]}{more}; make it anew "
                "with trace.plan()."
            )
        note = (
            f"The plan was made for other operations than {self._function} now does; its values were found again by "
            "their lines, and its own figures need not hold."
        )
        return [found[key] for key in keys], (note,)

    def again(self, selection: Selection, closed: Any) -> Any:
        """A jaxpr of the same function for other arguments, with the names that a selection's policy is of, if any.

        Raises:
            RematError: it does other operations than the program that the plan was made for.
        """
        if selection.naming is None:
            return closed
        naming = self._name(selection, closed, selection.naming.separately, Spans())
        if naming.fingerprint != selection.naming.fingerprint:
            raise RematError(
                f"{self._function} does other operations for these arguments than for those that the plan was made "
                "for: trace it with these, and make a plan for them."
            )
        return naming.closed

    def _name(self, selection: Selection, closed: Any, separately: bool, spans: Spans) -> Naming:
        if selection.whole is not None:
            return name_everything(closed, None, separately)
        chosen, keys = dict(selection.at_sites), self._table.keys
        return name_everything(closed, lambda eqn: keys.get(identity(eqn, spans), "") in chosen, separately)
