"""What JAX makes of the primal program under one selection: its halves, and a function like it for any arguments."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.failures import failures
from remat_magic.engine.gradients import half_of, under_policy
from remat_magic.engine.halves import (
    Forward,
    Gradient,
    backward_half,
    input_type,
    lower,
    value_and_gradients,
    without_gc,
)
from remat_magic.engine.primal import Primal
from remat_magic.engine.selection import Selection, Selector
from remat_magic.engine.signature import Returned, abstract
from remat_magic.engine.sites import Identity, PolicyWriter
from remat_magic.engine.steps import Halves, InnerGradient, lowered_step
from remat_magic.jaxprs.provenance import Provenances, Spans
from remat_magic.jaxprs.rewriting import NamedProgram, name_everything
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import lifted
from remat_magic.policies import AS_WRITTEN, Resolved, resolve
from remat_magic.policies.keys import MEMORIES
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
            closed = with_checkpoints(primal, selection.at_sites)
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
        names_which_can_be_saved=kept, names_which_can_be_offloaded=moved, **MEMORIES
    )


T = TypeVar("T")


class cached(Generic[T]):  # noqa: N801 - used like a property
    """What an object makes when it is first asked for it, and keeps. The object's ``lock`` is held meanwhile.

    A ``cached_property`` of Python 3.11 has one lock for all objects, under which traces would wait for each other.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> cached[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        with owner.lock:
            if self._name not in owner.__dict__:
                owner.__dict__[self._name] = self._make(owner)
            return owner.__dict__[self._name]


@dataclass(frozen=True, slots=True, eq=False)
class Dissection:
    """Both halves of a program with every value named and none saved; ``at`` is where the policy is."""

    at: str
    naming: NamedProgram
    half: Forward
    backward: Any
    provenances: Provenances
    arguments: tuple[str, ...]


class Retrace:
    """What JAX makes of a program under one selection, each part when it is first asked for. From any thread.

    Args:
        primal: the program.
        inside: the gradient of a training step that it is, if it is one.
        values: the values that plans save.
        lock: is held while anything is made.
        selection: the selection.

    Attributes:
        selection: that one, or another that makes the same program and asked last: errors speak of it.
    """

    def __init__(
        self,
        primal: Primal,
        inside: InnerGradient | None,
        values: PlanValues,
        lock: threading.RLock,
        selection: Selection,
    ) -> None:
        self._primal, self._inside, self._values, self.lock, self.selection = primal, inside, values, lock, selection

    @cached
    def program(self) -> Callable[..., Any]:
        """The flat function with the selection's policies."""
        primal, selection = self._primal, self.selection
        closed = with_checkpoints(primal, selection.at_sites)
        return self._with_policies(closed if selection.naming is None else selection.naming.closed)

    @cached
    def forward(self) -> Forward:
        """The forward half: the arrays in, the function's outputs and then the residuals out."""
        with self._primal.tracing(), without_gc(), self._failures():
            return self._primal.half(self.program)

    @cached
    def backward(self) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out.

        Raises:
            RematError: the function has none (a ``while_loop`` of unknown length).
        """
        half = self.forward
        with self._primal.tracing(), without_gc(), self._failures():
            return backward_half(half)

    @cached
    def halves_in_step(self) -> dict[int, Halves]:
        """For each call of the step that stands for a gradient both its halves, by its number.

        Other gradients than the one that the trace is of are as they are written.

        Raises:
            RematError: one of them has no backward half.
        """
        inside, halves = self._inside, dict[int, Halves]()
        assert inside is not None
        assert inside.step is not None
        standing = {half[1] for _, eqn in walk(inside.step.closed, once=True) if (half := half_of(eqn))}
        with inside.given.tracing():  # whichever thread asks
            for number, function in enumerate(inside.given.gradients):
                if function is inside.function:
                    both, primal = (self.forward, self.backward), self._primal
                elif number not in standing:  # it stands within another one, or its shapes alone were asked
                    continue
                else:
                    other = inside.others[number]
                    primal = other.primal
                    own = function.who == inside.function.who
                    both = self._halves_of(primal) if own else (other.half, other.backward)
                halves[number] = Halves(*both, primal.provenances, primal.arguments)
        return halves

    @cached
    def dissection(self) -> Dissection:
        """Both halves with every value named, of a selection that saves none of them.

        Under jax_remat3 nothing is left in a backward jaxpr of names that are not saved, so this is always what JAX
        does without it; what is saved and recomputed in the end is the same but for nested checkpoints.

        Raises:
            RematError: the function has no backward half.
        """
        primal, at = self._primal, self.selection.at
        with primal.tracing():
            naming = self._values.program(at, primal.remat3)
        with primal.tracing(remat3=False), without_gc(), self._failures():
            half = primal.half(self._with_policies(self._values.program(at, False).closed))
            backward = backward_half(half)
        return Dissection(at, naming, half, backward, primal.provenances, primal.arguments)

    def gradient(
        self,
        shardings: Sequence[Any] | None = None,
        *,
        alone: bool = False,
        platform: str | None = None,
        donate: Collection[str] = (),
    ) -> Gradient:
        """The value and the gradients as one program, lowered for XLA from the jaxpr that the report is of.

        Where they are taken in a training step that is known, the step as one program: its Python runs once more.

        Args:
            shardings: one for each array leaf of ``Engine.inputs``, None where it is on no particular device; by
                default those that the arguments had when traced.
            alone: leave the step out.
            platform: what to lower for ("tpu", "cuda"), for devices that need not be here: as many as the arguments
                are shared over. Default: for where the arguments are.
            donate: the arguments that the step may write over besides those that it donates as written.

        Raises:
            RematError: as ``forward`` and ``backward``, or it is that of one device of several.
        """
        primal, inside = self._primal, self._inside
        step = None if alone or inside is None else inside.step
        if shardings is None:
            shardings = [leaf.sharding for leaf in (primal if step is None else step.given).signature.arrays]
        if platform is None and any(map(_jax.is_abstract, shardings)):
            raise RematError(
                "the mesh of the arguments is abstract, a name without devices: compile for a device by name "
                "(device=), or for arguments on a mesh of devices (simulated ones will do)."
            )
        if platform is not None and max(map(_jax.devices_of, shardings), default=1) == 1:
            shardings = [None] * len(shardings)
        if step is None and inside is not None and inside.function.devices:
            raise RematError(
                f"{primal.name} is differentiated on each device by itself, and not to be run alone: "
                f"pass inputs=(args, kwargs) of a call of {inside.given.name}."
            )
        with self.lock:
            half, backward, donated = self.forward, self.backward, ()
            if step is None:
                signature = primal.signature
                function = value_and_gradients(self.program, signature.differentiated, primal.outputs, signature.vmaps)
                types = [input_type(aval, where) for aval, where in zip(primal.types, shardings, strict=True)]
                with primal.tracing(), without_gc(), self._failures():
                    jaxpr, lowered = lower(function, types, platform)
            else:
                with step.given.tracing(), failures(primal.name, self.selection.policy):  # whichever thread asks
                    jaxpr, lowered, donated = lowered_step(
                        step.given, step.donating(donate), self.applied(step.given.fun), shardings, platform
                    )
        counted = primal.outputs + primal.auxiliary
        return Gradient(jaxpr, lowered, half, backward, counted, primal.provenances, donated)

    def applied(self, fun: Callable[..., Any], *, alone: bool = False) -> Callable[..., Any]:
        """A callable like ``fun`` with the selection's policies, which traces at every call.

        Args:
            fun: the function that was traced, or one like what the trace is of.
            alone: whether it is the latter where the trace is of a step's gradient.
        """
        if self.selection.whole is None and not self.selection.at_sites:
            return fun
        if self._inside is not None and not alone:
            return self._step_like(fun, self._inside.function.who)
        return self._function_like(fun)

    def _step_like(self, step: Callable[..., Any], inside: Identity) -> Callable[..., Any]:
        """A training step like another one, with the function rewritten that it differentiates, given by definition.

        The step itself is called, so that what it does besides, its ``jit`` with all options included, stays as it is.
        JAX keeps what it compiles for one policy apart from the user's, and from other policies'.
        """
        policy, remat3, rewritten = self.selection.policy, self._primal.remat3, self._rewriting()
        generation, earlier = _jax.Generation(), Calls()

        @functools.wraps(step)
        def applied(*args: Any, **kwargs: Any) -> Any:
            # A trace that looks for gradients gets new ones: what stands compiled takes none any more.
            own = _jax.Generation() if _jax.is_holding() else generation
            tracing = _jax.tracing(own, remat3, _jax.x64())
            with tracing, under_policy(inside, rewritten, earlier), failures(inside[0], policy):
                return step(*args, **kwargs)

        return applied

    def _function_like(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """A function like another one, traced at every call, with the same caches of JAX as the program."""
        primal, policy, rewritten = self._primal, self.selection.policy, self._rewriting()
        earlier = Calls(primal.calls)

        def run(flat: Callable[..., list[Any]], arrays: list[Any]) -> list[Any]:
            with primal.tracing_again():
                with recording(earlier) as calls:
                    closed = jax.make_jaxpr(flat)(*arrays)
                evaluate = rewritten(closed, calls)
                earlier.keep(calls, closed)
                with failures(primal.name, policy):
                    return list(evaluate(*arrays))

        return on_arrays(fun, run)

    def _rewriting(self) -> Callable[[Any, Calls], Callable[..., Any]]:
        """Makes of a jaxpr of the same function for other arguments, and its calls, a function with the selection.

        Raises:
            RematError: it does other operations than the program that the plan was made for.
        """
        selection = self.selection

        def rewritten(closed: Any, calls: Calls) -> Callable[..., Any]:
            closed = with_checkpoints(self._primal, selection.at_sites, (closed, calls))
            evaluate = _jax.as_function(self._at_sites(self._values.again(selection, closed), Spans()))
            return evaluate if selection.whole is None else jax.checkpoint(evaluate, policy=selection.whole)

        return rewritten

    def _halves_of(self, other: Primal) -> tuple[Forward, Any]:
        """Both halves, the backward one closed, of the same function called with arguments of other types.

        Raises:
            RematError: the selection is a plan's, and the function does other operations for these.
        """
        with other.tracing(), without_gc(), failures(other.name, self.selection.policy):
            half = other.half(self._rewriting()(other.closed, other.calls))
            return half, backward_half(half)

    def _at_sites(self, closed: Any, spans: Spans) -> Any:
        """A jaxpr with the selection's policies at the sites in it, whose source positions ``spans`` reads."""
        chosen, table = dict(self.selection.at_sites), self._primal.table
        return PolicyWriter(lambda eqn: chosen.get(table.key_of(eqn, spans), AS_WRITTEN))(closed) if chosen else closed

    def _with_policies(self, closed: Any) -> Callable[..., Any]:
        closed = self._at_sites(closed, self._primal.provenances.spans)
        function = self._primal.function if closed is self._primal.closed else _jax.as_function(closed)
        whole = self.selection.whole
        return function if whole is None else jax.checkpoint(function, policy=whole)

    def _failures(self) -> contextlib.AbstractContextManager[None]:
        """Tells JAX's errors, of the policies too that the selection leaves as they are."""
        chosen = {key for key, _ in self.selection.at_sites}
        sites = [site for site in self._primal.table.sites if site.policy != "nothing_saveable"]
        written = {site.key: site.policy for site in sites if site.key not in chosen}
        return failures(self._primal.name, self.selection.policy, written, self._primal.closed)


def on_arrays(fun: Callable[..., Any], run: Callable[[Callable[..., list[Any]], list[Any]], list[Any]]) -> Any:
    """A function like ``fun``: ``run`` is given it as a flat function of arrays, and those, and gives its results."""

    def of_pytrees(fun: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            dynamic = [
                not isinstance(leaf, (float, complex, np.generic)) and abstract(leaf) is not None for leaf in leaves
            ]
            returned = Returned()

            def flat(*values: Any) -> list[Any]:
                given = iter(values)
                filled = [next(given) if yes else leaf for leaf, yes in zip(leaves, dynamic, strict=True)]
                inner_args, inner_kwargs = tree_unflatten(tree, filled)
                return returned.arrays(fun(*inner_args, **inner_kwargs))

            return returned.with_arrays(run(flat, [leaf for leaf, yes in zip(leaves, dynamic, strict=True) if yes]))

        return traced

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        function = lifted(of_pytrees, fun, args, kwargs) or of_pytrees(fun)
        return function(*args, **kwargs)

    return applied
