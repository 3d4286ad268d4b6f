"""The retraces of a primal program: for each selection its function and both halves, made once by JAX and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.engine.applied import Rewrite, evaluation
from remat_magic.engine.calls import Calls
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.failures import failures
from remat_magic.engine.halves import (
    Forward,
    Gradient,
    backward_half,
    input_type,
    lower,
    value_and_gradients,
    without_gc,
)
from remat_magic.engine.plan_values import PlanValues
from remat_magic.engine.primal import Primal
from remat_magic.engine.selection import Selection, Selector
from remat_magic.engine.sites import PolicyWriter
from remat_magic.jaxprs.naming import NamedProgram
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.spans import Spans
from remat_magic.policies import AS_WRITTEN
from remat_magic.records import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Dissection:
    """Both halves of a program with every value named and none saved; ``at`` is where the policy is."""

    at: str
    naming: NamedProgram
    half: Forward
    backward: Any
    provenances: Provenances
    arguments: tuple[str, ...]


class Retraces:
    """What JAX makes of a program under each selection. To be used by one thread at a time.

    Args:
        primal: the program.
        selector: makes selections for it.
    """

    def __init__(self, primal: Primal, selector: Selector) -> None:
        self._primal = primal
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._forwards: dict[Any, Forward] = {}
        self._backwards: dict[Any, Any] = {}
        self._plan_values = PlanValues(primal, selector, self.forward)

    def clear(self) -> None:
        """Drop everything that was made."""
        for store in (self._functions, self._forwards, self._backwards):
            store.clear()
        self._plan_values.clear()

    def planned(self, plan: Plan) -> Selection:
        """A plan's choice of named values, made precise.

        Raises:
            RematError: the plan is of another program.
        """
        with self._primal.tracing():
            return self._plan_values.select(plan)

    def rewriting(self, selection: Selection) -> Rewrite:
        """Writes a selection into a jaxpr of the same function for other arguments.

        Raises:
            RematError: it does other operations than the program that the plan was made for.
        """

        def rewrite(closed: Any, calls: Calls) -> tuple[Any, Any]:
            closed = with_checkpoints(closed, calls, self._primal.possible, selection.at_sites)
            return self._at_sites(selection, self._plan_values.again(selection, closed), Spans()), selection.whole

        return rewrite

    def _at_sites(self, selection: Selection, closed: Any, spans: Spans) -> Any:
        """A jaxpr with a selection's policies at the sites in it, whose source positions ``spans`` reads."""
        chosen, table = dict(selection.at_sites), self._primal.table
        return PolicyWriter(lambda eqn: chosen.get(table.key_of(eqn, spans), AS_WRITTEN))(closed) if chosen else closed

    def program(self, selection: Selection) -> Callable[..., Any]:
        """The flat function with a selection's policies."""
        function = self._functions.get(selection.identity)
        if function is None:
            primal = self._primal
            closed = with_checkpoints(primal.closed, primal.calls, primal.possible, selection.at_sites)
            closed = closed if selection.naming is None else selection.naming.closed
            function = self._with_policies(selection, closed)
            self._functions[selection.identity] = function
        return function

    def _with_policies(self, selection: Selection, closed: Any) -> Callable[..., Any]:
        closed = self._at_sites(selection, closed, self._primal.provenances.spans)
        function = self._primal.function if closed is self._primal.closed else _jax.as_function(closed)
        return function if selection.whole is None else jax.checkpoint(function, policy=selection.whole)

    def _failures(self, selection: Selection) -> contextlib.AbstractContextManager[None]:
        """Tells JAX's errors under a selection, of the policies too that it leaves as they are."""
        chosen = {key for key, _ in selection.at_sites}
        sites = [site for site in self._primal.table.sites if site.policy != "nothing_saveable"]
        written = {site.key: site.policy for site in sites if site.key not in chosen}
        return failures(self._primal.name, selection.policy, written)

    def forward(self, selection: Selection) -> Forward:
        """The forward half."""
        forward = self._forwards.get(selection.identity)
        if forward is None:
            with self._primal.tracing(), without_gc(), self._failures(selection):
                forward = self._primal.half(self.program(selection))
            self._forwards[selection.identity] = forward
        return forward

    def halves_of(self, other: Primal, selection: Selection) -> tuple[Forward, Any]:
        """Both halves, the backward one closed, of the same function called with arguments of other types.

        Raises:
            RematError: the selection is a plan's, and the function does other operations for these.
        """
        with other.tracing(), without_gc(), failures(other.name, selection.policy):
            half = other.half(evaluation(*self.rewriting(selection)(other.closed, other.calls)))
            return half, backward_half(half)

    def backward(self, selection: Selection) -> Any:
        """The closed jaxpr of the backward half.

        Raises:
            RematError: the function has none.
        """
        backward = self._backwards.get(selection.identity)
        if backward is None:
            half = self.forward(selection)
            with self._primal.tracing(), without_gc(), self._failures(selection):
                backward = backward_half(half)
            self._backwards[selection.identity] = backward
        return backward

    def gradient(self, selection: Selection, shardings: Sequence[Any], platform: str | None = None) -> Gradient:
        """The value and the gradients as one program, lowered for XLA for arguments with these shardings.

        With a platform it is lowered for that, wherever the arguments are.

        Raises:
            RematError: the function has no backward half.
        """
        primal = self._primal
        half, backward = self.forward(selection), self.backward(selection)
        function = value_and_gradients(
            self.program(selection), primal.signature.differentiated, primal.outputs, primal.signature.vmaps
        )
        types = [input_type(aval, where) for aval, where in zip(primal.types, shardings, strict=True)]
        with primal.tracing(), without_gc(), self._failures(selection):
            jaxpr, lowered = lower(function, types, platform)
        counted = primal.outputs + primal.auxiliary
        return Gradient(selection.policy, selection.at, jaxpr, lowered, half, backward, counted, primal.provenances)

    def dissect(self, selection: Selection) -> Dissection:
        """Both halves with every value named, under a selection that saves none of them.

        Under jax_remat3 nothing is left in a backward jaxpr of names that are not saved, so this is always what JAX
        does without it; what is saved and recomputed in the end is the same but for nested checkpoints.

        Raises:
            RematError: the function has no backward half.
        """
        primal = self._primal
        with primal.tracing():
            naming = self._plan_values.program(selection.at, primal.remat3)
        with primal.tracing(remat3=False), without_gc(), self._failures(selection):
            closed = self._plan_values.program(selection.at, False).closed
            half = primal.half(self._with_policies(selection, closed))
            backward = backward_half(half)
        return Dissection(selection.at, naming, half, backward, primal.provenances, primal.arguments)
