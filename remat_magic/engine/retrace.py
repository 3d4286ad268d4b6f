"""What JAX makes of the primal program under one selection: its halves, and a function like it for any arguments."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

import jax
import numpy as np
from jax.ad_checkpoint import Offloadable, Recompute, Saveable
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.gradients import half_of, under_policy
from remat_magic.engine.halves import (
    Forward,
    Gradient,
    backward_half,
    failures,
    input_type,
    lower,
    value_and_gradients,
    without_gc,
)
from remat_magic.engine.parts import PartedCall
from remat_magic.engine.primal import Primal
from remat_magic.engine.signature import Returned, abstract
from remat_magic.engine.sites import Identity, PolicyWriter, own_checkpoint
from remat_magic.engine.steps import Halves, InnerGradient, lowered_step
from remat_magic.engine.vmaps import Vmap, parts_in
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.provenance import Provenances, Spans
from remat_magic.jaxprs.rewriting import NamedProgram, name_everything
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import lifted
from remat_magic.policies import AS_WRITTEN, MIXED, NO_CHECKPOINT, Resolved, resolve
from remat_magic.policies.keys import MEMORIES
from remat_magic.records import Note, Plan, RematError
from remat_magic.records.fit import by_hand

_PLACES = 12  # named at most where a place is not known


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice made precise.

    ``whole`` is the policy of a checkpoint to put around the whole function (None: none is put there), ``at_sites``
    the sites whose policy changes. ``policy``, ``at`` and ``code`` are for the reader. ``label`` is what people
    call the policy where that is not its key. ``identity`` is equal for selections that make the same program,
    ``report_key`` for those that also read alike. ``naming`` is the program with every value named, where the policy is
    of those names and not of the program's own: those of the values of ``plan``. ``resolved`` is the policy, None where
    several places have one each. ``donate`` are the arguments that a training step may write over besides those that it
    donates as written, which changes what is held and nothing else.
    """

    policy: str
    at: str
    whole: Any
    at_sites: tuple[tuple[str, Any], ...]
    code: str
    notes: tuple[Note, ...] = ()
    naming: NamedProgram | None = None
    label: str = ""
    resolved: Resolved | None = None
    plan: Plan | None = None
    donate: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key of the program: the objects chosen, by identity."""
        named = () if self.naming is None else (("", id(self.naming)),)
        sites = ((key, id(p)) for key, p in self.at_sites)
        return (id(self.whole) if self.whole is not None else None, *sites, *named)

    @property
    def report_key(self) -> tuple[Any, ...]:
        """Key of the report."""
        return (self.policy, self.at, self.identity, self.donate)


class Selector:
    """Makes selections for one program, with one policy object per key so that JAX's caches hit."""

    def __init__(
        self,
        primal: Primal,
        vmaps: Mapping[str, Vmap],
        parts: Mapping[str, int],
        code_of_cut: Callable[[str | None], str],
        parted: Callable[[str], list[PartedCall]],
        differentiate: Callable[[Selection], object],
    ) -> None:
        self._primal, self._differentiate = primal, differentiate
        self._named: dict[tuple[str, bool], NamedProgram] = {}
        self._of_plans: dict[tuple[str | None, ...], Any] = {}  # a policy for each choice, whatever a plan is called
        self._sites = {site.key: site for site in primal.table.sites}
        self._possible, self._vmaps = primal.possible, vmaps
        self._code_of_cut, self._parted = code_of_cut, parted
        self._parts = {f"{key} in {count}": vmaps.get(key) for key, count in parts.items()}
        self._function = primal.name
        self._interned: dict[tuple[str | int, ...], Resolved] = {}
        self._lock = threading.Lock()
        own = own_checkpoint(primal.closed)
        self._own = primal.site_of(own) if own is not None else None
        self.default = "function" if self._own or not self._sites else "sites"

    def intern(self, resolved: Resolved) -> Resolved:
        """The one object for a policy: factories make unequal closures for equal arguments (jax 0.12)."""
        # Policies of the user's own are told apart by what they are; `own` keeps them alive.
        identity = (resolved.key, *map(id, resolved.own))
        with self._lock:
            if identity not in self._interned:
                if resolved.own:
                    namesakes = sum(key == resolved.key for key, *_ in self._interned)
                    key = f"{resolved.key} #{namesakes + 1}" if namesakes else resolved.key
                    alone = resolved.policy is resolved.own[0]
                    policy = _guard(resolved.policy, resolved.key) if alone else resolved.policy
                    resolved = replace(resolved, key=key, policy=policy)
                self._interned[identity] = resolved
            return self._interned[identity]

    def used(self) -> list[Resolved]:
        """The policies seen so far."""
        with self._lock:
            return list(self._interned.values())

    def clear(self) -> None:
        """Drop the programs with their values named."""
        self._named.clear()
        self._of_plans.clear()

    def named(self, at: str, remat3: bool) -> NamedProgram:
        """The program with the values named that a policy at a place decides about; ``remat3``: under jax_remat3."""
        if (at, remat3) not in self._named:
            selection = self.select(resolve("nothing_saveable"), at)
            closed = with_checkpoints(self._primal, selection.at_sites)
            spans, rules = self._primal.provenances.spans, lambda: self._differentiate(selection)
            self._named[at, remat3] = _named(self._primal, selection, closed, spans, rules=rules)
        return self._named[at, remat3]

    def of_plan(self, plan: Plan) -> Selection:
        """A plan's choice, made precise."""
        naming, names = self.named(plan.at, self._primal.remat3), {value.key for value in plan.names}
        if naming.fingerprint != plan.fingerprint or not names <= naming.values.keys():
            raise RematError(
                f"this plan was made for other operations than {self._primal.name} does now: make it anew with "
                "trace.plan()."
            )
        moved = sorted(value.key for value in plan.names if value.offloaded)
        saved = sorted(names - {*moved})
        policy = self._of_plans.setdefault((*saved, None, *moved), _saving(saved, moved))
        unnamed = self.select(Resolved(plan.policy, "", policy), plan.at)
        return replace(unnamed, naming=naming, code=plan.code, label=plan.label, plan=plan)

    def select(self, resolved: Resolved, at: str | None) -> Selection:
        """One policy at one place, or at all sites."""
        return replace(self._select(resolved, at), resolved=resolved)

    def _select(self, resolved: Resolved, at: str | None) -> Selection:
        at = self.default if at is None else at
        if at == "function":
            if self._own is not None:
                return self._at_sites(resolved, at, (self._own,))
            written = resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT
            whole = None if written else resolved.policy
            code = f"{self._function} = jax.checkpoint({self._function}{option_of(resolved)})" if whole else ""
            return Selection(resolved.key, at, whole, (), code, resolved.notes)
        if at in self._parts and self._parts[at] is None:  # microbatches, each under that policy
            whole = None if resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT else resolved.policy
            code = self._code_of_cut(None if whole is None else option_of(resolved))
            return Selection(resolved.key, at, whole, (), code, resolved.notes)
        if at == "sites":
            if not self._sites:
                raise RematError(f"{self._function} has no checkpoint site: use at='function'.")
            return self._at_sites(resolved, at, tuple(self._sites))
        as_written = resolved.policy is AS_WRITTEN and parts_in([at])  # which is in no parts
        where = None if at in self._sites else self._possible.where(at)
        if where is not None and where.parts and resolved.policy is not AS_WRITTEN:
            option = None if resolved.policy is NO_CHECKPOINT else option_of(resolved)
            codes = dict.fromkeys(call.code(option) for call in self._parted(at))
            code = "\n".join(codes) if all(codes) else ""
            return Selection(resolved.key, at, None, ((at, resolved.policy),), code, resolved.notes)
        if where is not None or (at not in self._sites and as_written):
            return self._at_calls(resolved, at)
        self._check(at)
        return self._at_sites(resolved, at, (at,))

    def select_each(self, chosen: Mapping[str, Resolved]) -> Selection:
        """A policy for each of some sites; the others stay as written."""
        whole, pairs, codes, notes, unknown = None, [], [], [], False
        for key, resolved in chosen.items():
            selection = self.select(resolved, key)
            whole = selection.whole if selection.whole is not None else whole
            pairs += selection.at_sites
            codes += [selection.code] if selection.code else []
            unknown |= by_hand(key) and not selection.code and resolved.policy is not AS_WRITTEN
            notes += selection.notes
        text = ", ".join(f"{key}={resolved.key}" for key, resolved in chosen.items())
        lines = any("\n" in code or ".map(" in code for code in codes)
        together = "" if unknown else ("\n" if lines else "; ").join(codes)
        return Selection(MIXED, text, whole, tuple(sorted(pairs, key=lambda p: p[0])), together, tuple(notes))

    def _at_sites(self, resolved: Resolved, at: str, keys: tuple[str, ...]) -> Selection:
        if resolved.policy is AS_WRITTEN:
            return Selection(resolved.key, at, None, (), "", resolved.notes)
        pairs = tuple((key, resolved.policy) for key in keys)
        functions = dict.fromkeys(self._sites[key].function for key in keys)
        bare = resolved.policy is NO_CHECKPOINT
        if vmap := self._parts.get(at):
            code = vmap.code(parts_in([at])[vmap.key], None if bare else option_of(resolved))
        elif bare:
            code = f"# take jax.checkpoint off {', '.join(functions)}"
        else:
            texts = [source.text if (source := self._sites[key].source) else "" for key in keys]
            if all(text.lstrip().startswith("@") for text in texts):
                own = re.search(r"[\w.]*(checkpoint|remat)\b", texts[0])  # a library's, as eqx.filter_checkpoint
                wrapper = own[0] if own else "jax.checkpoint"
                option = option_of(resolved)
                decorator = f"@functools.partial({wrapper}{option})" if option else f"@{wrapper}"
                code = f"{decorator}  # on {', '.join(functions)}"
            else:
                code = "; ".join(f"jax.checkpoint({name}{option_of(resolved)})" for name in functions)
        return Selection(resolved.key, at, None, pairs, code, resolved.notes)

    def _at_calls(self, resolved: Resolved, at: str) -> Selection:
        if resolved.policy is AS_WRITTEN or resolved.policy is NO_CHECKPOINT:
            return Selection(resolved.key, at, None, (), "", resolved.notes)
        code = self._possible.code(at, _code(resolved))
        return Selection(resolved.key, at, None, ((at, resolved.policy),), code, resolved.notes)

    def _check(self, key: str) -> None:
        if key in self._sites:
            return
        places = [*self._sites, *self._possible.callees]
        if key in self._vmaps:
            raise RematError(f"{key} is a place in parts: write at='{key} in {self._vmaps[key].divisors[0]}'.")
        name, parts = re.fullmatch(r"(.*?)( in \d+)?", key).groups("")  # pyright: ignore[reportOptionalMemberAccess]
        close = [f"{place}{parts}" for place in difflib.get_close_matches(name, places, 1)]
        if not places:
            raise RematError(f"{self._function} has no checkpoint site {key!r}: use at='function'.")
        listed = ", ".join(map(repr, ["function", *places[:_PLACES]])) + (", ..." if len(places) > _PLACES else "")
        has = f"did you mean {close[0]!r}?" if close else f"its places are {listed}."
        raise RematError(f"{self._function} has no checkpoint site {key!r}: {has}")


def _named(
    primal: Primal, selection: Selection, closed: Any, spans: Spans, *, rules: Any = None, like: Any = None
) -> NamedProgram:
    """A jaxpr of a program with the values named that a selection's policy decides about.

    ``rules`` differentiates it, for the values in rules of custom derivatives; names are as in ``like``.
    """
    chosen = dict(selection.at_sites)

    def within(eqn: Any) -> bool:
        return primal.table.key_of(eqn, spans) in chosen

    checkpoints = within if selection.whole is None else None
    return name_everything(closed, checkpoints, rules=not primal.remat3, differentiate=rules, like=like)


def named_again(primal: Primal, selection: Selection, closed: Any) -> Any:
    """A jaxpr of the same function for other arguments, with the names that a selection's policy is of, if any."""
    if selection.naming is None:
        return closed
    naming = _named(primal, selection, closed, Spans(), like=selection.naming)
    if naming.fingerprint != selection.naming.fingerprint:
        raise RematError(
            f"{primal.name} does other operations for these arguments than for those that the plan was made "
            "for: trace it with these, and make a plan for them."
        )
    return naming.closed


def _saving(saved: Sequence[str], moved: Sequence[str]) -> Any:
    """JAX's policy that saves some names, and offloads others."""
    if not moved:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved, names_which_can_be_offloaded=moved, **MEMORIES
    )


def _code(resolved: Resolved) -> str:
    """A policy as code for ``policy=``; empty for the one that a checkpoint has by itself."""
    return "" if resolved.key == "nothing_saveable" else resolved.code


def option_of(resolved: Resolved) -> str:
    """The argument of a checkpoint for a policy, after others."""
    code = _code(resolved)
    return f", policy={code}" if code else ""


def policy_of_each(text: str) -> dict[str, str]:
    """The places and policies of a text such as ``"block=none, head=dots_saveable"``, as ``select_each`` writes it."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        quote = "" if character == quote else quote or (character if character in "'\"" else "")
        depth += 0 if quote else (character in "([{") - (character in ")]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    pairs = [part.strip().partition("=") for part in parts]
    if not all(key and policy for key, _, policy in pairs):
        raise RematError(f"at={text!r} with the policy {MIXED!r} is to name a policy for each place: 'a=none, b=...'.")
    return {key: policy for key, _, policy in pairs}


_ANSWERS = (
    bool,
    type(Saveable),
    type(Recompute),
    Offloadable,
)


def _guard(policy: Any, key: str) -> Any:
    """The user's policy, with sentences for its mistakes: JAX asserts, or takes any answer for a yes."""

    @functools.wraps(policy)
    def guarded(prim: Any, *args: Any, **params: Any) -> Any:
        try:
            answer = policy(prim, *args, **params)
        except Exception as error:
            reason = f" ({text})" if (text := one_line(text_of(error))) else ""
            raise RematError(
                f"the policy {key} raised {type(error).__name__} when asked about {prim}{reason}; a policy is called "
                "as policy(primitive, *types, **parameters) and returns True to save."
            ) from error
        if isinstance(answer, _ANSWERS):
            return answer
        if callable(answer):
            raise RematError(f"the policy {key} returned a function: it is a factory, so call it and pass its result.")
        returned = one_line(text_of(answer, repr), 100)
        raise RematError(
            f"the policy {key} returned {returned} for {prim}: it must return True or False (or Saveable, Recompute or "
            "Offloadable of jax.ad_checkpoint)."
        )

    return guarded


T = TypeVar("T")


class cached(Generic[T]):  # noqa: N801 - used like a property
    """A property that is computed once, under the object's ``lock``.

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
    """What JAX makes of a program under one selection, each part when it is first needed. From any thread.

    Args:
        primal: the program.
        inside: the gradient of a training step that it is, if it is one.
        selector: knows the values that plans save.
        lock: is held while anything is made.
        selection: the selection.

    Attributes:
        selection: that one, or the last of others that make the same program, of which errors speak.
    """

    def __init__(
        self,
        primal: Primal,
        inside: InnerGradient | None,
        selector: Selector,
        lock: threading.RLock,
        selection: Selection,
    ) -> None:
        self._primal, self._inside, self._selector, self.lock, self.selection = (
            primal,
            inside,
            selector,
            lock,
            selection,
        )

    @cached
    def program(self) -> Callable[..., Any]:
        """The flat function with the selection's policies."""
        primal, selection = self._primal, self.selection
        sites = {site.key for site in primal.table.sites}
        others = any(key not in sites for key, _ in selection.at_sites)
        closed = with_checkpoints(primal, selection.at_sites) if others else primal.closed
        return self._with_policies(closed if selection.naming is None else selection.naming.closed)

    @cached
    def forward(self) -> Forward:
        """The forward half: the arrays in, the function's outputs and then the residuals out."""
        with self._primal.tracing(), without_gc(), self._failures():
            return self._primal.half(self.program)

    @cached
    def backward(self) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out."""
        half = self.forward
        with self._primal.tracing(), without_gc(), self._failures():
            return backward_half(half)

    @cached
    def halves_in_step(self) -> dict[int, Halves]:
        """For each call of the step that stands for a gradient both its halves, by its number.

        Other gradients than the one that the trace is of are as they are written.
        """
        inside, halves = self._inside, dict[int, Halves]()
        assert inside is not None
        assert inside.step is not None
        standing = {half[1] for _, eqn in walk(inside.step.closed, once=True) if (half := half_of(eqn))}
        with inside.given.tracing():  # whichever thread asks
            for number, function in enumerate(inside.given.gradients):
                if function is inside.function:
                    both, primal = (self.forward, self.backward), self._primal
                elif number not in standing:  # it stands within another one, or is in a jax.eval_shape
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
        """
        primal, at = self._primal, self.selection.at
        with primal.tracing():
            naming = self._selector.named(at, primal.remat3)
        with primal.tracing(remat3=False), without_gc(), self._failures():
            half = primal.half(self._with_policies(self._selector.named(at, False).closed))
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

        ``shardings`` has one for each array leaf of ``Engine.inputs``, None where it is on no particular device; by
        default those that the arguments had when traced. ``alone`` leaves the step out. ``platform`` ("tpu", "cuda") is
        of devices that need not be here, by default where the arguments are. ``donate`` are arguments that the step may
        write over besides those that it donates as written.
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

        ``fun`` is like the function that was traced or, ``alone``, like what a step differentiates.
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
                earlier.adopt(calls, closed)
                with failures(primal.name, policy):
                    return list(evaluate(*arrays))

        return on_arrays(fun, run)

    def _rewriting(self) -> Callable[[Any, Calls], Callable[..., Any]]:
        """Makes of a jaxpr of the same function for other arguments, and its calls, a function with the selection."""
        selection = self.selection

        def rewritten(closed: Any, calls: Calls) -> Callable[..., Any]:
            closed = with_checkpoints(self._primal, selection.at_sites, (closed, calls))
            evaluate = _jax.as_function(self._at_sites(named_again(self._primal, selection, closed), Spans()))
            return evaluate if selection.whole is None else jax.checkpoint(evaluate, policy=selection.whole)

        return rewritten

    def _halves_of(self, other: Primal) -> tuple[Forward, Any]:
        """Both halves, the backward one closed, of the same function called with arguments of other types."""
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
