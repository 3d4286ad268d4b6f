"""A trace: the user's function, run once as Python, and every policy after that as a retrace of its jaxpr."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import jax

from remat_magic import _jax, policies
from remat_magic.engine import notes
from remat_magic.engine.applied import step_with_policy, with_policy
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.contents import Contents, contents
from remat_magic.engine.differentiated import InnerInputs, half_of
from remat_magic.engine.failures import failures, is_passing
from remat_magic.engine.halves import Forward, Gradient
from remat_magic.engine.possible import Where
from remat_magic.engine.primal import Primal
from remat_magic.engine.reloaded import restore_lines
from remat_magic.engine.retraces import Dissection, Retraces
from remat_magic.engine.selection import Selection, Selector, policy_of_each
from remat_magic.engine.signature import Bound, Signature, unbound
from remat_magic.engine.sites import Identity
from remat_magic.engine.source_texts import source_texts
from remat_magic.engine.steps import (
    ITSELF,
    Halves,
    InnerGradient,
    Step,
    choose,
    inner_gradients,
    lowered_step,
    step_of,
    why_no_step,
)
from remat_magic.jaxprs.naming import checkpoint_names
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import is_gradient
from remat_magic.records import Choice, GradientCall, Note, Plan, RematError, Site


class Engine:
    """A function traced once, and retraced from its jaxpr for every policy. May be used from any thread.

    Attributes:
        given: the function as it was given; calls stand in its jaxpr for the gradients that it takes.
        primal: the program that the trace is of: one of these gradients' functions, or the function itself.
        sources: the source text of what ran.
        plans: those that a key stands for, where a search has made them.
        lock: is held by whoever retraces.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wrt: Any,
        has_aux: bool,
        gradient: str | None = None,
    ) -> None:
        if not callable(fun):
            raise RematError(f"trace needs a function, not {type(fun).__name__}: {fun!r}.")
        self.lock = threading.RLock()
        self._asked = fun
        restore_lines()
        self.given, self._settings, self._bound = _traced(fun, args, kwargs, wrt, has_aux)
        self._fun = self._bound.fun
        self._gradients = inner_gradients(self.given)
        self._begin(gradient, wrt is not None or has_aux)

    def _begin(self, gradient: str | None, differentiate: bool) -> None:
        """Choose what the trace is of, and make ready for it; arguments are those of ``choose``."""
        self.plans: dict[str, Plan] = {}
        fun, given = self._fun, self.given
        self._gradient = choose(given, self._gradients, gradient, differentiate)
        if self._gradient is not None:
            self.primal = self._gradient.primal
        elif not given.gradients:
            self.primal = given
        else:  # its own derivative is that of the program without the calls that stand for its gradients
            self.primal = Primal(fun, given.signature, given.has_aux, False, however_long=given.however_long)
        self.primal.require_differentiable()
        # Now, since the text is read from where the user will edit it.
        self.sources = source_texts(self.primal.provenances, fun)
        self._selector = Selector(self.primal)
        self._retraces = Retraces(self.primal, self._selector)
        self._resolved: dict[int, tuple[Any, policies.Resolved]] = {}  # policy objects by identity
        self._calls: dict[int, InnerGradient] = {}  # those of a step that the trace is not of
        self._known_names: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    @property
    def function_name(self) -> str:
        """The function's own name."""
        return self.primal.name

    @property
    def signature(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        types = [_jax.type_text(aval) for aval in self.primal.output_types]
        return self.primal.signature.text(types[0] if len(types) == 1 else f"({', '.join(types)})")

    def inputs(self, *, alone: bool = False) -> Signature | InnerInputs:
        """The arguments of what ``gradient`` gives: of the training step where it is known, else of the function.

        Args:
            alone: of the gradient without the step.
        """
        return self.primal.signature if alone or self.step is None else self.given.signature

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places where ``jax.checkpoint`` is applied, in the order of their first call."""
        return self.primal.table.sites

    def contents(self) -> Mapping[str, Contents]:
        """What is inside each place, those that have a checkpoint and those that could, by key; see ``Contents``."""
        with self.lock, _jax.reading():
            return contents(self.primal)

    @property
    def gradients(self) -> tuple[GradientCall, ...]:
        """The gradients that the function takes inside, the dearest first."""
        return tuple(gradient.call for gradient in self._gradients)

    @property
    def gradient_inside(self) -> GradientCall | None:
        """The one of them that the trace is of; None where it is of the function's own derivative."""
        return None if self._gradient is None else self._gradient.call

    @property
    def differentiated_inside(self) -> Identity | None:
        """Name, file and line of what a training step differentiates; None where the function itself is."""
        return None if self._gradient is None else self._gradient.function.who

    @functools.cached_property
    def step(self) -> Step | None:
        """The training step that the gradient is taken in; None where there is none, or where it is not known.

        It is not known where the gradient writes to references, is differentiated itself, or is part of another one.
        """
        return None if self._gradient is None else step_of(self.given, self._gradient)

    def of_gradient(self, key: str) -> Self:
        """One of another gradient that the function takes inside, or of the function itself.

        Raises:
            RematError: there is no such gradient, or the function itself cannot be differentiated.
            Exception: whatever the function raises, which is traced once more where it is itself differentiated.
        """
        with self.lock, self.given.tracing():  # whichever thread asks
            other: Self = self._copy()
            other._begin(key, False)
            return other

    def _copy(self) -> Self:
        """One that is to begin anew."""
        other: Self = copy.copy(self)
        other.__dict__.pop("step", None)
        other.lock = threading.RLock()
        return other

    @property
    def postponed(self) -> bool:
        """Whether XLA was not asked how values are spread only since that takes long: ``of_one_device`` asks."""
        return not self.per_device and (self.given.answer.takes_long or self.primal.answer.takes_long)

    def of_one_device(self) -> Self:
        """One of the same, for which XLA is asked how values are spread, however long that takes.

        Raises:
            RematError: XLA cannot be asked.
            Exception: as ``of_gradient``.
        """
        if self.per_device:
            return self
        with self.lock:
            other: Self = self._copy()
            given = self.given.asked_however_long()
        other.given = given
        other._gradients = tuple(InnerGradient(inner.call, inner.function, given) for inner in self._gradients)
        with other.lock, given.tracing():
            other._begin(ITSELF if self._gradient is None else self._gradient.call.key, False)
            other.plans = dict(self.plans)
            if not other.per_device:
                why = given.answer.why_not or other.primal.answer.why_not
                raise RematError(f"XLA cannot be asked how {self.function_name} is spread over the devices: {why}.")
        return other

    def retraced(self, fun: Any) -> Self:
        """One of another function with arguments of the same types, under the same settings.

        Raises:
            Exception: whatever ``fun`` itself raises.
        """
        given, signature = self.given, self.given.signature
        args, kwargs = self.inputs_again()
        differentiated = tuple(leaf.name for leaf in signature.arrays if leaf.differentiated)
        wrt = differentiated if self._gradient is None else None
        gradient = ITSELF if self._gradient is None else self._gradient.call.key
        with given.tracing():
            other = type(self)(fun, args, kwargs, wrt, given.has_aux, gradient)
        return other.of_one_device() if given.however_long else other

    def inputs_again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same types as those that the function was traced with, and the static ones themselves."""
        signature = self.given.signature
        assert isinstance(signature, Signature)  # not that of a function inside
        arrays = [_of_type(leaf.value, leaf.sharding) for leaf in signature.arrays]
        return signature.call(lambda *args, **kwargs: (args, kwargs), arrays)

    @property
    def stale(self) -> tuple[str, ...]:
        """The functions of which JAX still holds an older trace than this one."""
        return tuple(dict.fromkeys((*self.given.stale, *self.primal.stale)))

    @property
    def provenances(self) -> Provenances:
        """The primal program and where its operations stand."""
        return self.primal.provenances

    @property
    def devices(self) -> int:
        """How many devices share the work; 1 without a mesh."""
        return self.primal.devices if self.per_device else self.given.automatic_devices

    @property
    def per_device(self) -> bool:
        """Whether figures are of one device; not where sharding is automatic, of which no type tells."""
        return self.primal.devices > 1 or self.given.automatic_devices == 1

    @property
    def traced(self) -> Any:
        """The function that was traced: as it was given, but for what a method or a partial holds."""
        return self._fun

    # ----------------------------------------------------------------------------------------------------- the places

    def place(self, at: str) -> Where | None:
        """Which calls of which function a place is that has no checkpoint; None where it is another place."""
        return None if at in {site.key for site in self.sites} else self.primal.possible.where(at)

    def placed(self, at: str) -> Any:
        """The closed jaxpr with checkpoints at a place that has none."""
        with self.lock, self.primal.tracing():
            selection = self._selector.select(self._resolve("nothing_saveable", None), at)
            primal = self.primal
            return with_checkpoints(primal.closed, primal.calls, primal.possible, selection.at_sites)

    def halves_in_step(self, selection: Selection) -> dict[int, Halves]:
        """For each call of ``step`` that stands for a gradient both its halves, by its number.

        Other gradients than the one that the trace is of are as they are written.

        Raises:
            RematError: one of them has no backward half.
        """
        assert self._gradient is not None
        assert self.step is not None
        chosen, halves = self._gradient.function, dict[int, Halves]()
        standing = {half[1] for _, eqn in walk(self.step.closed, once=True) if (half := half_of(eqn))}
        with self.lock, self.given.tracing():  # whichever thread asks
            for number, function in enumerate(self.given.gradients):
                if function is chosen:
                    both, primal = (self.half(selection), self.backward_of(selection)), self.primal
                elif number not in standing:  # it stands within another one, or its shapes alone were asked
                    continue
                else:
                    inner = InnerGradient(self._gradient.call, function, self.given)
                    inner = self._calls.setdefault(number, inner)
                    primal = inner.primal
                    own = function.who == chosen.who
                    both = self._retraces.halves_of(primal, selection) if own else (inner.half, inner.backward)
                halves[number] = Halves(*both, primal.provenances, primal.arguments)
        return halves

    @property
    def default_at(self) -> str:
        """What ``at=None`` means: the function's own decorator, else its sites, else the whole function."""
        return self._selector.default

    @property
    def names(self) -> tuple[str, ...]:
        """Every checkpoint name of the function, in the order of the program.

        Nested jaxprs are included, and names that only the rules of custom derivatives hold, which are Python and show
        when they are differentiated.
        """
        written, hidden = self._names()
        return (*written, *hidden)

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that stand in the program, and those that its custom rules hide."""
        with self.lock:  # a cached_property of Python 3.11 has one lock for all traces, to be taken before this one
            if self._known_names is None:
                self._known_names = self._find_names()
            return self._known_names

    def _find_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        names = checkpoint_names(self.primal.closed)
        if not self.primal.has_custom_rules:
            return names, ()
        bare = self._selector.select(policies.resolve("none"), "sites" if self.sites else "function")
        try:
            revealed = checkpoint_names(self._retraces.forward(bare).closed)
        except Exception as error:
            if is_passing(error):
                raise
            revealed = ()
        return names, tuple(name for name in revealed if name not in names)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What a reader of any report of the function must know."""
        _, hidden = self._names()
        function = self._gradient.function if self._gradient else None
        unknown = why_no_step(self.given, function) if function and self.step is None else ""
        return (
            *notes.of_program(self.stale, hidden, complex_values=self._complex_values()),
            *notes.of_gradients(self.given.name, self.gradient_inside, self.gradients, is_gradient(self._fun), unknown),
            *(notes.of_copies(function) if function else ()),
            *notes.of_devices(self.given, self.primal, self.devices, per_device=self.per_device),
            *notes.of_mesh(self.given, self.devices),
            *notes.of_settings(self._settings),
        )

    def _complex_values(self) -> str:
        """What is to be said of complex values: that the program saves them as it is written, which JAX refuses."""
        if not self.primal.has_complex_values:
            return ""
        try:
            self.half(self.select("as_written", None))
        except RematError as error:
            if is_passing(error):
                raise
            return str(error)
        return (
            "JAX cannot save a complex value under a policy: those that would save one cannot be used here, and plans "
            "recompute them."
        )

    def choices(self) -> tuple[Choice, ...]:
        """The policies to choose from for this function, factories filled with its checkpoint names."""
        names = self.names
        table = policies.choices(names) if names else policies.choices()
        usable = [row for row in table if names or not row.parameters or row.key.startswith("offload_dot")]
        keys = {row.key for row in usable}
        extra = [
            Choice(resolved.key, resolved.key, resolved.meaning, resolved.code)
            for resolved in self._selector.used()
            if resolved.key not in keys
        ]
        return (*usable, *extra)

    # ------------------------------------------------------------------------------------------------------ the halves

    def select(self, policy: Any, at: Any, namespace: Mapping[str, Any] | None = None) -> Selection:
        """A policy and a place, made precise.

        Raises:
            RematError: no such policy, name or site.
        """
        if isinstance(policy, str):
            policy = self.plans.get(policy, policy)
        if isinstance(policy, Plan):
            if at is not None and at != policy.at:
                raise RematError(f"the plan is for at={policy.at!r}: leave `at` out, or make a plan for {at!r}.")
            if not policy.names:
                return self.select(policy.policy, policy.at)
            return self._retraces.planned(policy)
        if isinstance(at, str) and "=" in at and policy == policies.MIXED:
            at = policy_of_each(at)
        if isinstance(at, Mapping):
            chosen = {key: self._resolve(value, namespace) for key, value in at.items()}
            return self._selector.select_each(chosen)
        return self._selector.select(self._resolve(policy, namespace), at)

    def dissect(self, at: Any = None) -> Dissection:
        """Both halves with every value named and none of them saved, at one place or all sites.

        Raises:
            RematError: no such site, or no backward half.
        """
        with self.lock:
            if not (at is None or isinstance(at, str)):
                raise RematError("a plan is for one place: choose 'function', 'sites' or one site's key.")
            return self._retraces.dissect(self._selector.select(self._resolve("nothing_saveable", None), at))

    def _resolve(self, policy: Any, namespace: Mapping[str, Any] | None) -> policies.Resolved:
        cached = self._resolved.get(id(policy))
        if cached is not None and cached[0] is policy and namespace is None:
            return cached[1]
        plain = isinstance(policy, str) and policy.isidentifier() and not (namespace and policy in namespace)
        names = () if plain else self.names
        resolved = self._selector.intern(policies.resolve(policy, names, namespace, self.function_name))
        if self.primal.remat3 and resolved.own:
            resolved = replace(resolved, notes=(*resolved.notes, notes.asked_little(resolved.key)))
        if namespace is None and resolved.policy is policy:  # which is held anyway, so that its identity stays its own
            self._resolved[id(policy)] = policy, resolved
        return resolved

    def half(self, selection: Selection) -> Forward:
        """The forward half under a selection: the arrays in, the function's outputs and then the residuals out."""
        with self.lock:
            return self._retraces.forward(selection)

    def backward_of(self, selection: Selection) -> Any:
        """The closed jaxpr of the backward half under a selection: residuals and cotangents in, gradients out.

        Raises:
            RematError: the function has none (a ``while_loop`` of unknown length).
        """
        with self.lock:
            return self._retraces.backward(selection)

    def gradient(
        self,
        policy: Any = "as_written",
        at: Any = None,
        namespace: Mapping[str, Any] | None = None,
        shardings: Sequence[Any] | None = None,
        *,
        alone: bool = False,
        platform: str | None = None,
    ) -> Gradient:
        """The value and the gradients as one program, lowered for XLA from the jaxpr that the report is of.

        Where they are taken in a training step that is known, the step as one program: its Python runs once more.

        Args:
            policy: as for ``report``, and so are ``at`` and ``namespace``.
            at: where.
            namespace: of the policy's identifiers.
            shardings: one for each array leaf of ``inputs``, None where it is on no particular device; by default those
                that the arguments had when traced.
            alone: leave the step out.
            platform: what to lower for ("tpu", "cuda"), for devices that need not be here: as many as the arguments
                are shared over. Default: for where the arguments are.

        Raises:
            RematError: as ``report``, or the function has no backward half, or is that of one device of several.
        """
        if shardings is None:
            shardings = [leaf.sharding for leaf in self.inputs(alone=alone).arrays]
        if platform is None and any(map(_jax.is_abstract, shardings)):
            raise RematError(
                "the mesh of the arguments is abstract, a name without devices: compile for a device by name "
                "(device=), or for arguments on a mesh of devices (simulated ones will do)."
            )
        if platform is not None and max(map(_jax.devices_of, shardings), default=1) == 1:
            shardings = [None] * len(shardings)
        with self.lock:
            selection = self.select(policy, at, namespace)
            if alone or self.step is None:
                if self._gradient is not None and self._gradient.function.devices:
                    raise RematError(
                        f"{self.primal.name} is differentiated on each device by itself, and not to be run alone: "
                        f"pass inputs=(args, kwargs) of a call of {self.given.name}."
                    )
                return self._retraces.gradient(selection, shardings, platform)
            half, backward, primal = self._retraces.forward(selection), self._retraces.backward(selection), self.primal
            with self.given.tracing(), failures(primal.name, selection.policy):  # whichever thread asks
                jaxpr, lowered, donated = lowered_step(
                    self.given, self.step, self._applied(selection), shardings, platform
                )
        counted = primal.outputs + primal.auxiliary
        return Gradient(
            selection.policy, selection.at, jaxpr, lowered, half, backward, counted, primal.provenances, donated
        )

    # ----------------------------------------------------------------------------------------------------- the function

    def function(
        self,
        policy: Any = "as_written",
        at: Any = None,
        namespace: Mapping[str, Any] | None = None,
        of: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """A callable like the traced function, or like ``of``, with a policy applied.

        It traces at every call, for whatever shapes it is given, so wrap it in ``jax.jit``; it works under ``jit``,
        ``grad``, ``vmap`` and ``jvp``, and computes the same values and gradients.
        """
        with self.lock:
            applied = self._applied(self.select(policy, at, namespace), of)
            return applied if of is not None else self._bound.around(applied, self._asked)

    def _applied(self, selection: Selection, of: Callable[..., Any] | None = None) -> Callable[..., Any]:
        fun = self._fun if of is None else of
        if selection.whole is None and not selection.at_sites:
            return fun
        rewrite = self._retraces.rewriting(selection)
        if self._gradient is not None and of is None:
            inside = self._gradient.function.who
            return step_with_policy(fun, inside, selection.policy, rewrite, self.primal.remat3)
        primal = self.primal
        return with_policy(fun, primal.name, selection.policy, rewrite, primal.tracing_again, primal.calls)

    def close(self) -> None:
        """Drop every retrace."""
        with self.lock:
            self.plans.clear()
            self._retraces.clear()


def _traced(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrt: Any, has_aux: bool
) -> tuple[Primal, tuple[str, ...], Bound]:
    """The primal program, the Python numbers that had to stay numbers, and what the function held of its arguments.

    What it needs as numbers, or as arrays of its own, stays so.
    """
    bound = unbound(fun)
    signature = Signature(bound.fun, args, kwargs, wrt, bound)
    try:
        return Primal(bound.fun, signature, has_aux), (), bound
    except (RematError, MemoryError, RecursionError):
        raise
    except Exception:
        if signature.numbers:
            with contextlib.suppress(Exception):  # else it is another matter, which the first error tells
                other = Signature(bound.fun, args, kwargs, wrt, bound, numbers=False)
                return Primal(bound.fun, other, has_aux), signature.numbers, bound
        if bound.fun is not fun:
            with contextlib.suppress(Exception):
                return Primal(fun, Signature(fun, args, kwargs, wrt), has_aux), (), Bound(fun)
        raise


def _of_type(aval: Any, sharding: Any) -> Any:
    """A stand-in for an argument of a type."""
    if isinstance(aval, jax.ShapeDtypeStruct):
        return aval
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


def with_plan(plan: Plan, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function like ``fun``, under a plan: what ``trace.function(plan)`` is, without a trace.

    The place and the values are looked up at every call, in what the function then does. Where a training step
    differentiates the function that the plan was made for, it is put in there, and the step is like the one given.
    """
    if not callable(fun):
        raise RematError(f"a plan is applied to a function, not to {type(fun).__name__}: {fun!r}.")

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        with _jax.not_holding():  # a trace of the step looks for its gradients with the plan in them
            engine = Engine(fun, args, kwargs, None, False)
            if engine.gradients and engine.function_name != plan.function:
                inside = (gradient.key for gradient in engine.gradients if gradient.function == plan.function)
                engine = engine.of_gradient(next(inside, ITSELF))
            planned = engine.function(plan)
        return planned(*args, **kwargs)

    return applied
