"""A trace: the user's function, run once as Python, and every policy after that as a retrace of its jaxpr."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self, TypeVar

import jax

from remat_magic import _jax, policies
from remat_magic.engine import notes
from remat_magic.engine.calls import Calls
from remat_magic.engine.checkpoint_writer import parted_calls, with_checkpoints
from remat_magic.engine.donation import Donation, donation
from remat_magic.engine.gradients import Differentiated
from remat_magic.engine.halves import is_passing, without_gc
from remat_magic.engine.microbatches import Cut, batches, code_of, traced_with, with_microbatches
from remat_magic.engine.namespaces import restore_lines, source_texts
from remat_magic.engine.parts import PartedCall
from remat_magic.engine.possible import Where
from remat_magic.engine.primal import Primal
from remat_magic.engine.retrace import Dissection, Retrace, Selection, Selector, cached, policy_of_each
from remat_magic.engine.signature import Bound, Signature, unbound
from remat_magic.engine.sites import Identity
from remat_magic.engine.steps import ITSELF, InnerGradient, Step, choose, inner_gradients
from remat_magic.engine.vmaps import BATCH, Vmap, divisors, middle, parts_in, refuse_other_bits, with_parts
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.rewriting import checkpoint_names
from remat_magic.libraries import is_gradient
from remat_magic.records import Choice, FitChoice, GradientCall, Note, Plan, RematError, Site

ONE_PLACE = "a plan is for one place: choose 'function', 'sites' or one site's key."


T = TypeVar("T")


class Engine:
    """A function traced once, and retraced from its jaxpr for every policy. May be used from any thread.

    Attributes:
        given: the function as it was given; calls stand in its jaxpr for the gradients that it takes.
        primal: the program that the trace is of: one of these gradients' functions, or the function itself.
        inside: the one of these gradients that the trace is of; None where it is of the function's own derivative.
        sources: the source text of what ran.
        plans: those that a key stands for, where a search has made them.
        parts: in how many parts each ``vmap`` is, by its key.
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
        self._original = fun
        restore_lines()
        self.given, self._settings, self._bound = _traced(fun, args, kwargs, wrt, has_aux)
        self._fun, self.parts = self.given.fun, dict[str, int]()
        self._cuts: Mapping[int, Cut] = MappingProxyType({})
        self._gradients = inner_gradients(self.given)
        self._begin(gradient, wrt is not None or has_aux)

    def _begin(self, gradient: str | None, differentiate: bool) -> None:
        """Choose what the trace is of, and make ready for it; arguments are those of ``choose``."""
        self.plans: dict[str, Plan] = {}
        self._in_parts = dict[tuple[tuple[str, int], ...], Self]()
        given, fun = self.given, self.given.fun
        self.inside = choose(given, self._gradients, gradient, differentiate)
        if self.inside is not None:
            self.primal = self.inside.primal
        elif not given.gradients:
            self.primal = given
        else:  # its own derivative is that of the program without the calls that stand for its gradients
            how_long, names = given.however_long, given.names
            self.primal = Primal(fun, given.signature, given.has_aux, False, however_long=how_long, names=names)
        self.primal.require_differentiable()
        # Now, since the text is read from where the user will edit it.
        self.sources = source_texts(self.primal.provenances, fun)
        self._selector = Selector(
            self.primal,
            self.vmaps,
            self.parts,
            self._code_of_cut,
            self.parted,
            lambda selection: self.retrace(selection).forward,
        )
        self._retraces: dict[Any, Retrace] = {}  # by what makes the same program
        self._smaller = dict[Any, tuple[Any, Calls]]()
        self._parted = dict[str, list[PartedCall] | RematError]()  # by key

    def inputs(self, *, alone: bool = False) -> Signature | Differentiated:
        """The arguments of what ``gradient`` gives: of the step if known and not ``alone``, else of the function."""
        return self.primal.signature if alone or self.step is None else self.given.signature

    @property
    def gradients(self) -> tuple[GradientCall, ...]:
        """The gradients that the function takes inside, the dearest first."""
        return tuple(gradient.call for gradient in self._gradients)

    @property
    def differentiated_inside(self) -> Identity | None:
        """Name, file and line of what a training step differentiates; None where the function itself is."""
        return None if self.inside is None else self.inside.function.who

    @property
    def step(self) -> Step | None:
        """The training step that the gradient is taken in; None where there is none, or where it is not known."""
        return None if self.inside is None else self.inside.step

    @cached
    def donation(self) -> Donation | None:
        """What the step could donate, and does not as it is written; None where there is nothing, or no step."""
        return None if self.step is None else donation(self.step, self._bound)

    @property
    def gradient_key(self) -> str:
        """The key of the gradient that the trace is of."""
        return ITSELF if self.inside is None else self.inside.call.key

    def of_gradient(self, key: str) -> Self:
        """``Trace.of_gradient``, which can raise what the function raises: it is traced anew to be differentiated."""
        with self.lock:
            return self._other(key, self.given, self._gradients)

    def _other(
        self,
        key: str,
        given: Primal,
        gradients: Sequence[InnerGradient],
        parts: dict[str, int] | None = None,
        cuts: Mapping[int, Cut] | None = None,
    ) -> Self:
        """One with another gradient or program, or in other parts."""
        other: Self = copy.copy(self)
        for name in ("_names", "donation"):
            other.__dict__.pop(name, None)
        parts, cuts = self.parts if parts is None else parts, self._cuts if cuts is None else cuts
        vars(other).update(lock=threading.RLock(), given=given, _gradients=gradients, parts=parts, _cuts=cuts)
        with self.given.tracing():  # whichever thread asks
            other._begin(key, False)
        return other

    @property
    def postponed(self) -> bool:
        """``Trace.postponed``."""
        return not self.per_device and (self.given.answer.takes_long or self.primal.answer.takes_long)

    def of_one_device(self) -> Self:
        """``Trace.of_one_device``, which can raise what the function raises."""
        if self.per_device:
            return self
        with self.lock:
            given = self.given.of_any_size()
        gradients = tuple(InnerGradient(inner.call, inner.function, given) for inner in self._gradients)
        other = self._other(self.gradient_key, given, gradients)
        other.plans = dict(self.plans)
        with other.lock, given.tracing():
            if not other.per_device:
                why = given.answer.why_not or other.primal.answer.why_not
                raise RematError(f"XLA cannot be asked how {self.primal.name} is spread over the devices: {why}.")
        return other

    @property
    def vmaps(self) -> dict[str, Vmap]:
        """The ``vmap`` calls that the program makes where it is differentiated, by key."""
        inside, vmaps = self.differentiated_inside, self.given.vmaps
        return {key: vmap for key, vmap in vmaps.items() if inside is None or inside[1:] in vmap.around}

    @property
    def microbatches(self) -> int:
        """In how many parts of the batch the gradient is taken."""
        return math.prod(count for key, count in self.parts.items() if key in BATCH)

    @property
    def cut_batch(self) -> tuple[Site, ...]:
        """The place that is the batch in about the square root of the most microbatches, if there can be some."""
        _, count, _ = self.in_microbatches()
        if not count:
            return ()
        at = f"{self.batch_key} in {count}"
        code = self.in_parts("none", at).select("none", at).code
        return (Site(at, self.primal.name, count, "", None, possible=True, code=code),)

    @without_gc()
    def in_parts(self, policy: Any, at: Any) -> Self:
        """The program with those ``vmap`` calls in parts that a choice asks for, as ``select`` takes it."""
        policy, at = self._chosen(policy, at)
        chosen = at.items() if isinstance(at, Mapping) else [(at, policy)]
        if not any(isinstance(key, str) and " in " in key for key, _ in chosen):
            return self
        written = [key for key, policy in chosen if isinstance(policy, str) and policy == "as_written"]
        parts = parts_in(key for key, _ in chosen if key not in written or parts_in([key]).keys() & BATCH)
        if parts.items() <= self.parts.items():
            return self
        order = tuple(sorted(parts.items()))
        with self.lock:
            if order not in self._in_parts:
                self._in_parts[order] = self._traced_in(parts)
            return self._in_parts[order]

    def _traced_in(self, parts: dict[str, int]) -> Self:
        places = dict[Identity, tuple[str, int]]()
        batch = [key for key in parts if key in BATCH]
        for key, count in parts.items():
            if key in batch:
                continue
            if key not in self.vmaps:
                has = f"it has {', '.join(self.vmaps) or 'none'}."
                raise RematError(f"{self.primal.name} has no {key} to be in parts: {_jax.why_no_vmaps() or has}")
            self.vmaps[key].check(count)
            places[self.vmaps[key].who] = f"{key} in {count}", count
        if self.given.mesh_devices > 1:
            raise RematError("Nothing is done in parts where several devices share the work.")
        fun = with_parts(self._fun, places) if places else self._fun
        other = self._in_microbatches(fun, batch[0], parts) if batch else self._again(fun, parts)
        found = {site.key for site in other.primal.table.sites}
        for place, _ in places.values():
            if place not in found:
                raise RematError(f"{place}: {self.primal.name} does not call it where it is differentiated.")
            refuse_other_bits(other.primal.closed, place, other.primal.site_of)
        return other

    def _again(self, fun: Any, parts: dict[str, int], cuts: Mapping[int, Cut] = MappingProxyType({})) -> Self:
        with self.given.tracing():  # whichever thread asks
            given = Primal(fun, self.given.signature, self.given.has_aux, names=self.given.names)
            given.vmaps, given.stale = self.given.vmaps, self.given.stale
            other = self._other(self.gradient_key, given, inner_gradients(given), parts, cuts)
        # What jits the step is not to be seen from the one in parts.
        vars(other).update(plans=self.plans, donation=self.donation)
        return other

    def _code_of_cut(self, option: str | None) -> str:
        codes = {code_of(cut, option) for cut in self._cuts.values()}
        return codes.pop() if len(codes) == 1 else ""

    @property
    def batch_key(self) -> str:
        """What the microbatches are called in places: ``batch``, where no function of the program is."""
        places = {site.key for site in self.primal.table.sites} | self.primal.possible.callees.keys()
        return "microbatches" if "batch" in places else "batch"

    def _batches(self, axis: int = 0) -> list[tuple[int, list[str]]]:
        """What may be the batch, first the likeliest: how many examples, and the leaves with them along an axis."""
        return sorted(batches(self.given, self.step, axis), key=lambda batch: -len(batch[1]) if self.step else 0)

    @property
    def divisors(self) -> list[int]:
        """The numbers of parts that the likeliest batch can be in; none where several devices share the work."""
        return divisors(self._batches()[0][0]) if self.given.mesh_devices == 1 and self._batches() else []

    def in_microbatches(self, choose: Callable[[Sequence[int]], int] = middle) -> tuple[tuple[int, ...], int, str]:
        """The numbers of microbatches that there can be, the one that was traced, and why there are none.

        Traced is what ``choose`` gives, or the middle one: with one example each the program may be another.
        """
        why = ""
        for size, _ in self._batches() if self.step else ():
            numbers = tuple(divisors(size))
            for count in dict.fromkeys((choose(numbers), middle(numbers))) if numbers else ():
                try:
                    self.in_parts("none", f"{self.batch_key} in {count}")
                except RematError as error:
                    why = why or str(error)
                else:
                    return numbers, count, ""
        return (), 0, why

    def _in_microbatches(self, fun: Any, key: str, parts: dict[str, int]) -> Self:
        count = parts[key]
        if self.inside is None or self.step is None:
            raise RematError("Only a training step that is known takes its gradient in microbatches.")
        if self.batch_key not in (key, "batch"):
            raise RematError(
                f"{self.primal.name} calls a function batch: for microbatches write at='{self.batch_key} in {count}', "
                "for a checkpoint on the function at='batch'."
            )
        who = self.inside.function.who

        def cut(_: int, leaves: list[str], _of_part: int) -> Self:
            cuts = dict[int, Cut]()  # one for each call of the function
            return self._again(with_microbatches(fun, who, leaves, count, cuts), parts, cuts)

        return self._first(f"{key} in {count}", count, [0], cut)

    def parted(self, key: str) -> list[PartedCall]:
        """The calls that a place in parts is of: each is known to be what its parts make, else that is an error."""
        where = self.primal.possible.where(key)
        assert where is not None
        if self.given.mesh_devices > 1:
            raise RematError("Nothing is done in parts where several devices share the work.")

        def of_a_part(axis: int, leaves: list[str], size: int) -> list[PartedCall]:
            self.primal.smaller[key] = self._of_a_part(axis, tuple(leaves), size)
            return parted_calls(self.primal, key)

        with self.lock, self.primal.tracing():
            if key not in self._parted:
                try:
                    self._parted[key] = self._first(key, where.parts, [0, 1], of_a_part)
                except RematError as error:
                    self._parted[key] = error
            found = self._parted[key]
        if isinstance(found, RematError):
            raise found
        return found

    def _first(self, at: str, count: int, axes: Sequence[int], cut: Callable[[int, list[str], int], T]) -> T:
        """What ``cut`` gives of the likeliest batch that it can cut, by its axis, its leaves and a part's examples."""
        errors = list[RematError]()
        for axis in axes:
            for size, leaves in self._batches(axis):
                try:
                    if size % count or count == 1:
                        raise RematError(f"{size} examples are not {at}: choose one of {divisors(size)[:12]}.")
                    return cut(axis, leaves, size // count)
                except Exception as error:  # whatever the user's function raises when it is given a part
                    if is_passing(error):
                        raise
                    if not isinstance(error, RematError):
                        text = f"{type(error).__name__}: {one_line(text_of(error), 200)}"
                        error = RematError(f"{self.given.name} cannot be called with a part of the batch: {text}")
                    errors.append(error)
        raise errors[0] if errors else RematError(f"No argument of {self.given.name} is known to be the batch.")

    def _of_a_part(self, axis: int, leaves: tuple[str, ...], size: int) -> tuple[Any, Calls]:
        """The program with so many examples, and its calls."""
        if (axis, leaves, size) not in self._smaller:
            inner = self.inside and self.inside.function
            with self.given.tracing(), self.given.names.as_it_was():  # whichever thread asks
                arguments = self.inputs_again(dict.fromkeys(leaves, size), axis)
                found, gradients_of_part = traced_with(self.given.fun, arguments, inner and inner.who)
            if inner is not None:
                number = [it for it in self.given.gradients if it.who == inner.who].index(inner)
                found = gradients_of_part[number].inner.closed, found[1]
            self._smaller[axis, leaves, size] = found
        return self._smaller[axis, leaves, size]

    def retraced(self, fun: Any, leading: Mapping[str, int] | None = None) -> Self:
        """One of another function, which may raise, with arguments of the same types, under the same settings.

        ``leading`` are other sizes of the first dimension, by the names of leaves.
        """
        given, signature = self.given, self.given.signature
        args, kwargs = self.inputs_again(leading)
        differentiated = tuple(leaf.name for leaf in signature.arrays if leaf.differentiated)
        wrt = differentiated if self.inside is None else None
        with given.tracing(), given.names.as_it_was():
            other = type(self)(fun, args, kwargs, wrt, given.has_aux, self.gradient_key)
            other.given.names = given.names
        return other.of_one_device() if given.however_long else other

    def inputs_again(
        self, sizes: Mapping[str, int] | None = None, axis: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``Signature.resized`` of those that the function was traced with."""
        signature = self.given.signature
        assert isinstance(signature, Signature)  # not that of a function inside
        return signature.resized(sizes or {}, axis)

    @property
    def stale(self) -> tuple[str, ...]:
        """The functions of which JAX still holds an older trace than this one."""
        return tuple(dict.fromkeys((*self.given.stale, *self.primal.stale)))

    @property
    def devices(self) -> int:
        """How many devices share the work; 1 without a mesh."""
        return self.primal.devices if self.per_device else self.given.automatic_devices

    @property
    def per_device(self) -> bool:
        """Whether figures are of one device; not where sharding is automatic, which no type has."""
        return self.primal.devices > 1 or self.given.automatic_devices == 1

    # ----------------------------------------------------------------------------------------------------- the places

    def place(self, at: str) -> Where | None:
        """Which calls of which function a place is that has no checkpoint; None where it is another place."""
        return None if at in {site.key for site in self.primal.table.sites} else self.primal.possible.where(at)

    def placed(self, at: str) -> Any:
        """The closed jaxpr with checkpoints at a place that has none."""
        with self.lock, self.primal.tracing():
            selection = self._selector.select(self._resolve("nothing_saveable", None), at)
            primal = self.primal
            return with_checkpoints(primal, selection.at_sites)

    @property
    def default_at(self) -> str:
        """What ``at=None`` means: the function's own decorator, else its sites, else the whole function."""
        return self._selector.default

    @property
    def names(self) -> tuple[str, ...]:
        """``Trace.names``."""
        written, hidden = self._names
        return (*written, *hidden)

    @cached
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that stand in the program, and those that its custom rules hide."""
        names = checkpoint_names(self.primal.closed)
        if not self.primal.has_custom_rules:
            return names, ()
        bare = self._selector.select(policies.resolve("none"), "sites" if self.primal.table.sites else "function")
        try:
            revealed = checkpoint_names(self.retrace(bare).forward.closed)
        except Exception as error:
            if is_passing(error):
                raise
            revealed = ()
        return names, tuple(name for name in revealed if name not in names)

    @property
    def notes(self) -> tuple[Note, ...]:
        """What a reader of any report of the function must know."""
        _, hidden = self._names
        function, unknown = (self.inside.function, self.inside.why_no_step) if self.inside else (None, "")
        return (
            *notes.of_program(self.stale, hidden, complex_values=self._complex_values()),
            *notes.of_gradients(
                self.given.name, self.inside and self.inside.call, self.gradients, is_gradient(self._fun), unknown
            ),
            *(notes.of_copies(function) if function else ()),
            *notes.of_devices(self.given, self.primal, self.devices, per_device=self.per_device),
            *notes.of_mesh(self.given, self.devices),
            *notes.of_settings(self._settings),
        )

    def _complex_values(self) -> str:
        """The sentence on complex values: JAX's error where the program saves some as it is written; empty for none."""
        if not self.primal.has_complex_values:
            return ""
        try:
            _ = self.retrace(self.select("as_written")).forward
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
        usable = [row for row in table if names or not row.parameters]
        keys = {row.key for row in usable}
        extra = [
            Choice(resolved.key, resolved.key, resolved.meaning, resolved.code)
            for resolved in self._selector.used()
            if resolved.key not in keys
        ]
        return (*usable, *extra)

    # ------------------------------------------------------------------------------------------------------ the halves

    def select(self, policy: Any, at: Any = None, namespace: Mapping[str, Any] | None = None) -> Selection:
        """A policy and a place, made precise."""
        if isinstance(policy, FitChoice) and policy.donate:
            if self.donation is None or self.donation.names != policy.donate:
                raise RematError(f"{', '.join(policy.donate)} cannot be donated here: ask this trace's fit() anew.")
            selection = self.select(*self._chosen(policy, at), namespace)
            return replace(selection, policy=policy.key, donate=policy.donate, label=policy.what, code=policy.code)
        policy, at = self._chosen(policy, at)
        if isinstance(policy, Plan):
            with self.primal.tracing():
                return self._selector.of_plan(policy)
        if isinstance(at, Mapping):
            chosen = {key: self._resolve(value, namespace) for key, value in at.items()}
            return self._selector.select_each(chosen)
        return self._selector.select(self._resolve(policy, namespace), at)

    def _chosen(self, policy: Any, at: Any) -> tuple[Any, Any]:
        """What a choice of ``fit``, the key of a plan, a plan of a policy and several places as text stand for."""
        if isinstance(policy, FitChoice):
            if at is not None and at != policy.at:
                raise RematError(f"the choice is for at={policy.at!r}: leave `at` out.")
            policy, at = policy.chosen
        policy = self.plans.get(policy, policy) if isinstance(policy, str) else policy
        if isinstance(policy, Plan):
            if at is not None and at != policy.at:
                raise RematError(f"the plan is for at={policy.at!r}: leave `at` out, or make a plan for {at!r}.")
            policy, at = policy if policy.names else policy.policy, policy.at
        if isinstance(at, str) and "=" in at and isinstance(policy, str) and policy == policies.MIXED:
            at = policy_of_each(at)
        return policy, at

    def dissect(self, at: Any = None) -> Dissection:
        """Both halves with every value named and none of them saved, at one place or all sites."""
        with self.lock:
            if not (at is None or isinstance(at, str)):
                raise RematError(ONE_PLACE)
            return self.retrace(self._selector.select(self._resolve("nothing_saveable", None), at)).dissection

    def _resolve(self, policy: Any, namespace: Mapping[str, Any] | None) -> policies.Resolved:
        plain = isinstance(policy, str) and policy.isidentifier() and not (namespace and policy in namespace)
        names = () if plain else self.names
        resolved = self._selector.intern(policies.resolve(policy, names, namespace, self.primal.name))
        if self.primal.remat3 and resolved.own:
            resolved = replace(resolved, notes=(*resolved.notes, notes.policy_of_matmuls(resolved.key)))
        return resolved

    def retrace(self, selection: Selection) -> Retrace:
        """What JAX makes of the program under a selection: one object for all that make the same program."""
        with self.lock:
            retrace = self._retraces.get(selection.identity)
            if retrace is None:
                retrace = Retrace(self.primal, self.inside, self._selector, self.lock, selection)
                self._retraces[selection.identity] = retrace
            retrace.selection = selection
            return retrace

    # ----------------------------------------------------------------------------------------------------- the function

    def function(self, selection: Selection, of: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """``Trace.function``."""
        retrace = self.retrace(selection)
        if of is not None:
            return retrace.applied(of, alone=True)
        applied = retrace.applied(self.given.fun)
        if selection.donate and self.donation is not None:
            applied = self.donation.around(applied, self._fun)
        return self._bound.around(applied, self._original)

    def close(self) -> None:
        """Drop every retrace."""
        with self.lock:
            self.plans.clear()
            self._retraces.clear()
            self._selector.clear()


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
            if engine.gradients and engine.primal.name != plan.function:
                inside = (gradient.key for gradient in engine.gradients if gradient.function == plan.function)
                engine = engine.of_gradient(next(inside, ITSELF))
            planned = engine.function(engine.select(plan))
        return planned(*args, **kwargs)

    return applied


def with_cast(engine: Engine, arguments: Collection[str], kind: str) -> Engine | None:
    """A trace with all f32 in some arguments cast to ``kind``; None where the function closes over one of them.

    Its Python runs again, and may raise what it likes.
    """
    leaves, types, given = engine.primal.signature.leaves, list[Any](), engine.given.fun
    if engine.inside is not None:
        inner = engine.inside.function
        leaves, types = inner.primals, [*inner.closed.in_avals]
        if any(leaf.argument in arguments for leaf in inner.constants.values()):
            return None
    wide = [leaf.argument in arguments and leaf.is_array and _jax.short_dtype(leaf.value) == "f32" for leaf in leaves]

    def casting(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def cast(*args: Any, **kwargs: Any) -> Any:
            values, tree = jax.tree.flatten((args, kwargs))
            values = [value.astype(kind) if yes else value for value, yes in zip(values, wide, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, values)
            return fun(*args, **kwargs)

        return cast

    def instead(fun: Callable[..., Any], args: tuple[Any, ...], _: bool) -> Callable[..., Any]:
        return casting(fun) if [*map(jax.typeof, jax.tree.leaves(args))] == types else fun

    @functools.wraps(given)
    def holding(*args: Any, **kwargs: Any) -> Any:
        with _jax.holding(instead):
            return given(*args, **kwargs)

    return engine.retraced(casting(given) if engine.inside is None else holding)
