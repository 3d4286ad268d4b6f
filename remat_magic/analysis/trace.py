"""A trace: the user's function, run once as Python, and every policy after that as a retrace of its jaxpr."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_magic import _compat, policies
from remat_magic.analysis import explain
from remat_magic.analysis.applied import with_policy
from remat_magic.analysis.bodies import type_text, walk
from remat_magic.analysis.gradient import Gradient, input_type, lower, value_and_gradients
from remat_magic.analysis.halves import Forward, backward_half, forward_half, without_gc
from remat_magic.analysis.index import PrimalIndex
from remat_magic.analysis.naming import Naming
from remat_magic.analysis.planned import NamedPrograms
from remat_magic.analysis.selection import Selection, Selector
from remat_magic.analysis.shortcuts import Shortcuts
from remat_magic.analysis.signature import Leaf, Signature, abstract, flatten_outputs, is_inexact
from remat_magic.analysis.sites import Rewriter, SiteTable, find_sites, identity
from remat_magic.analysis.source import Spans
from remat_magic.analysis.sources import source_texts
from remat_magic.model import Choice, Plan, Program, RematError, Report, Site, Timeline
from remat_magic.policies import AS_WRITTEN

__all__ = ["Dissection", "Trace", "trace"]


@dataclass(frozen=True, slots=True, eq=False)
class Dissection:
    """Both halves of a program with every value named and none saved; ``at`` is where the policy is."""

    at: str
    naming: Naming
    half: Forward
    backward: Any
    index: PrimalIndex
    arguments: tuple[str, ...]


def trace(fun: Callable[..., Any], /, *args: Any, wrt: Any = None, has_aux: bool = False, **kwargs: Any) -> Trace:
    """Trace ``fun(*args, **kwargs)`` for inspection. Nothing is executed or put on a device.

    ``fun``'s Python runs exactly once. A function with parameters named ``wrt`` or ``has_aux``: pass a
    ``functools.partial``.

    Args:
        fun: the function to differentiate.
        *args: arrays, ``jax.ShapeDtypeStruct``s, pytrees of them, or static values (strings, callables, modules, None,
            bools and ints), which stay as they are.
        wrt: argument numbers or names to differentiate; every floating-point leaf if None.
        has_aux: whether ``fun`` returns a pair of output and auxiliary data, as for ``jax.grad``.
        **kwargs: keyword arguments, likewise.

    Raises:
        RematError: nothing can be differentiated, or ``wrt`` asks for what cannot be.
        Exception: whatever ``fun`` itself raises.
    """
    return Trace(fun, args, kwargs, wrt, has_aux)


class Trace(Shortcuts):
    """A function traced once; see :func:`trace`. May be used from any thread."""

    def __init__(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wrt: Any, has_aux: bool
    ) -> None:
        if not callable(fun):
            raise RematError(f"trace needs a function, not {type(fun).__name__}: {fun!r}.")
        self.lock = threading.RLock()
        self._fun = fun
        self._has_aux = has_aux
        self._remat3 = _compat.remat3()
        self._x64 = _compat.x64()
        # What `with` blocks set is a thread's own, and a widget retraces in another thread.
        self._settings = _compat.thread_settings()
        self._generation = _compat.new_generation()
        self._signature = Signature(fun, args, kwargs, wrt)
        self._types = tuple(leaf.value for leaf in self._signature.arrays)
        self._arguments = tuple(leaf.name for leaf in self._signature.arrays)
        self._outputs = self._auxiliary = 0
        with self._tracing():
            self._closed = self._signature.jaxpr(fun, self._flat)
        self._check_outputs()
        self.stale = tuple(dict.fromkeys(name for _, name in _compat.stale_traces(self._generation, fun, self._closed)))
        self._index = PrimalIndex(self._closed, self.function_name)
        self.sources = source_texts(self._index, fun)
        self._table: SiteTable = find_sites(self._closed, self._index.spans, policies.describe)
        # One function object for the life of the trace: JAX caches what it derives by identity.
        self._base = _compat.as_function(self._closed)
        self._selector = Selector(self._closed, self._table, self._index.spans, self.function_name)
        self._halves: dict[Any, Forward] = {}
        self._backwards: dict[Any, Any] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._reports: dict[tuple[Any, ...], Report] = {}
        self._previews: dict[tuple[Any, ...], Report] = {}
        self._named = NamedPrograms(self._closed, self._table, self._selector, self._index.spans, self.function_name)
        self.memo: dict[Any, Any] = {}  # what tuning has worked out about this trace
        self._names: tuple[str, ...] | None = None
        self._hidden: tuple[str, ...] = ()

    # -------------------------------------------------------------------------------------------------- what it is of

    def _flat(self, output: Any) -> list[Any]:
        leaves, aux, _ = flatten_outputs(output, self._has_aux, self.function_name)
        kept = [leaf for leaf in aux if abstract(leaf) is not None or isinstance(leaf, (bool, int))]
        self._outputs, self._auxiliary = len(leaves), len(kept)
        return [*leaves, *kept]

    def _check_outputs(self) -> None:
        types = self._closed.out_avals[: self._outputs]
        if not any(is_inexact(aval) for aval in types):
            found = ", ".join(map(type_text, types)) or "nothing"
            raise RematError(
                f"{self.function_name} cannot be differentiated: it returns {found}, and only floating-point outputs "
                "have a derivative."
            )

    @property
    def function_name(self) -> str:
        """The function's own name."""
        return self._signature.function

    @property
    def signature(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        types = [type_text(aval) for aval in self._closed.out_avals[: self._outputs]]
        return self._signature.text(types[0] if len(types) == 1 else f"({', '.join(types)})")

    @property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated: arguments by name, or leaves where only some of an argument's are."""
        return self._signature.wrt

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """The array leaves of the arguments, as types."""
        return self._signature.arrays

    def arrays_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The array leaves of arguments like those traced.

        Raises:
            RematError: they differ in structure or type.
        """
        return self._signature.arrays_of(args, kwargs)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places where ``jax.checkpoint`` is applied, in the order of their first call."""
        return self._table.sites

    @property
    def index(self) -> PrimalIndex:
        """The primal program and where its operations stand."""
        return self._index

    @property
    def remat3(self) -> bool:
        """Whether the trace was made, and is retraced, with jax_remat3."""
        return self._remat3

    def site_of(self, eqn: Any) -> str:
        """The key of the site that a checkpoint equation of the primal program belongs to."""
        return self._table.keys.get(identity(eqn, self._index.spans), "")

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
        with self.lock:
            if self._names is None:
                found = _names_in(self._closed)
                custom = any(eqn.primitive.name.startswith("custom_") for eqn, _ in walk(self._closed))
                if custom:
                    bare = self._selector.select(policies.resolve("none"), "sites" if self.sites else "function")
                    try:
                        revealed = _names_in(self._forward(bare).closed)
                    except Exception:  # noqa: BLE001 - not differentiable: the report will say so
                        revealed = {}
                    self._hidden = tuple(name for name in revealed if name not in found)
                    found = {**found, **revealed}
                self._names = tuple(found)
            return self._names

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the function that a reader of any report must know."""
        notes = []
        _ = self.names  # fills what custom rules hide
        if self.stale:
            which = ", ".join(self.stale)
            notes.append(
                f"JAX still holds an older trace of {which}, from before it or what it calls was redefined: this "
                "report shows the new definition, but your next jit or grad may run the old one until "
                "jax.clear_caches()."
            )
        if self._takes_gradient:
            notes.append(
                f"{self.function_name} takes a gradient inside, and this report is of differentiating it once more: to "
                "see what that gradient itself saves, inspect the function that it is the gradient of."
            )
        if self._hidden:
            which = ", ".join(map(repr, self._hidden))
            notes.append(
                f"{which} {'is' if len(self._hidden) == 1 else 'are'} named inside a custom derivative rule, which is "
                "Python: checkpoint sites in there are out of reach."
            )
        return tuple(notes)

    @functools.cached_property
    def _takes_gradient(self) -> bool:
        return any("transpose(" in _compat.name_stack(eqn) for eqn, _ in walk(self._closed))

    def choices(self) -> tuple[Choice, ...]:
        """The policies to choose from for this function, factories filled with its checkpoint names."""
        names = self.names
        table = policies.choices(names) if names else policies.choices()
        usable = [row for row in table if names or not row.parameters or row.key.startswith("offload_dot")]
        known = {row.key for row in usable}
        extra = [
            Choice(found.key, found.key, found.meaning, found.code)
            for found in self._selector.used()
            if found.key not in known
        ]
        return (*usable, *extra)

    # ------------------------------------------------------------------------------------------------------ the halves

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with self._settings(), _compat.tracing(self._generation, self._remat3, self._x64):
            yield

    def _tracing_again(self) -> Any:
        return _compat.tracing(self._generation, self._remat3, _compat.x64())

    def _select(self, policy: Any, at: Any, namespace: Mapping[str, Any] | None = None) -> Selection:
        if isinstance(policy, Plan):
            if at is not None and at != policy.at:
                raise RematError(f"the plan is for at={policy.at!r}: leave `at` out, or make a plan for {at!r}.")
            if not policy.names:
                return self._select(policy.policy, policy.at)
            with self._tracing():
                return self._named.select(policy, self._remat3)
        if isinstance(at, Mapping):
            chosen = {key: self._resolve(value, namespace) for key, value in at.items()}
            return self._selector.select_each(chosen)
        return self._selector.select(self._resolve(policy, namespace), at)

    def dissect(self, at: Any = None, separately: bool = False) -> Dissection:
        """Both halves with every value named and none of them saved, which tells what recomputing each would take.

        Under jax_remat3 nothing is left in a backward jaxpr of names that are not saved, so this is always what JAX
        does without it; what is saved and recomputed in the end is the same but for nested checkpoints.

        Args:
            at: as for ``report``, one place or all sites.
            separately: name equal layers that share a body one by one.

        Raises:
            RematError: no such site, or no backward half.
        """
        with self.lock:
            if isinstance(at, Mapping):
                raise RematError("a plan is for one place: choose 'function', 'sites' or one site's key.")
            selection = self._selector.select(self._resolve("nothing_saveable", None), at)
            with self._tracing():
                naming = self._named.program(selection.at, separately, self._remat3)
            failures = explain.failures(self.function_name, selection.policy)
            with self._tracing(), _compat.tracing(self._generation, False, self._x64), without_gc(), failures:
                closed = self._named.program(selection.at, separately, False).closed
                if selection.at_sites:
                    closed = Rewriter(self._chooser(selection))(closed)
                function = _compat.as_function(closed)
                if selection.whole is not None:
                    function = jax.checkpoint(function, policy=selection.whole)
                differentiated = self._signature.differentiated
                half = forward_half(function, self._types, differentiated, self._outputs, self._auxiliary)
                backward = backward_half(half)
            return Dissection(selection.at, naming, half, backward, self._index, self._arguments)

    def _resolve(self, policy: Any, namespace: Mapping[str, Any] | None) -> policies.Resolved:
        plain = isinstance(policy, str) and policy.isidentifier() and not (namespace and policy in namespace)
        names = () if plain else self.names
        found = self._selector.intern(policies.resolve(policy, names, namespace, self.function_name))
        if self._remat3 and found.meaning == policies.OWN:
            note = (
                f"jax_remat3 asks a policy about matmuls, convolutions and named values only: what {found.key} says of "
                "other operations has no effect."
            )
            return replace(found, notes=(*found.notes, note))
        return found

    def _program(self, selection: Selection) -> Callable[..., Any]:
        """The flat function with a selection's policies."""
        known = self._functions.get(selection.identity)
        if known is None:
            base, program = self._base, self._closed if selection.naming is None else selection.naming.closed
            if selection.at_sites or selection.naming is not None:
                closed = Rewriter(self._chooser(selection))(program) if selection.at_sites else program
                base = self._base if closed is self._closed else _compat.as_function(closed)
            known = base
            if selection.whole is not None:
                known = jax.checkpoint(base, policy=selection.whole)
            self._functions[selection.identity] = known
        return known

    def _chooser(self, selection: Selection, spans: Spans | None = None) -> Callable[[Any], Any]:
        chosen, keys, read = dict(selection.at_sites), self._table.keys, spans or self._index.spans
        return lambda eqn: chosen.get(keys.get(identity(eqn, read), ""), AS_WRITTEN)

    def _forward(self, selection: Selection) -> Forward:
        known = self._halves.get(selection.identity)
        if known is None:
            with self._tracing(), without_gc(), explain.failures(self.function_name, selection.policy):
                known = forward_half(
                    self._program(selection),
                    self._types,
                    self._signature.differentiated,
                    self._outputs,
                    self._auxiliary,
                )
            self._halves[selection.identity] = known
        return known

    def _backward(self, selection: Selection) -> Any:
        known = self._backwards.get(selection.identity)
        if known is None:
            half = self._forward(selection)
            with self._tracing(), without_gc(), explain.failures(self.function_name, selection.policy):
                known = backward_half(half)
            self._backwards[selection.identity] = known
        return known

    def forward(self, policy: Any = "as_written", at: Any = None) -> Any:
        """The closed jaxpr of the forward half: the arrays in, the function's outputs and then the residuals out."""
        with self.lock:
            return self._forward(self._select(policy, at)).closed

    def backward(self, policy: Any = "as_written", at: Any = None) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out.

        Raises:
            RematError: the function has no backward half (a ``while_loop`` of unknown length).
        """
        with self.lock:
            return self._backward(self._select(policy, at))

    def gradient(
        self,
        policy: Any = "as_written",
        at: Any = None,
        namespace: Mapping[str, Any] | None = None,
        shardings: Sequence[Any] | None = None,
    ) -> Gradient:
        """The value and the gradients as one program, lowered for XLA from the jaxpr that the report is of.

        Args:
            policy: as for ``report``, and so are ``at`` and ``namespace``.
            at: where.
            namespace: of the policy's identifiers.
            shardings: one for each array leaf, None where it is on no particular device; by default those that the
                arguments had when traced.

        Raises:
            RematError: as ``report``, or the function has no backward half.
        """
        if shardings is None:
            shardings = [leaf.sharding for leaf in self.arguments]
        with self.lock:
            selection = self._select(policy, at, namespace)
            half, backward = self._forward(selection), self._backward(selection)
            function = value_and_gradients(self._program(selection), self._signature.differentiated, self._outputs)
            types = [input_type(aval, where) for aval, where in zip(self._types, shardings, strict=True)]
            with self._tracing(), without_gc(), explain.failures(self.function_name, selection.policy):
                jaxpr, lowered = lower(function, types)
            return Gradient(
                selection.policy,
                selection.at,
                jaxpr,
                lowered,
                half,
                backward,
                self._outputs + self._auxiliary,
                self._index,
            )

    # ----------------------------------------------------------------------------------------------------- the reports

    def preview(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> Report:
        """The report of the forward half alone (``complete`` is False), or the full one where it is known."""
        with self.lock:
            selection = self._select(policy, at, namespace)
            known = self._reports.get(selection.label) or self._previews.get(selection.label)
            if known is None:
                known = self._previews[selection.label] = explain.preview(
                    self._blank(selection), self._forward(selection), self._index, self._arguments
                )
            return known

    def report(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> Report:
        """What a policy does: residuals, recomputation, both halves.

        Args:
            policy: a key (see :mod:`remat_magic.policies`), a JAX policy or any policy callable.
            at: ``"function"``, a site's key, ``"sites"`` for all of them, or a mapping of site key to policy; by
                default ``default_at``.
            namespace: where identifiers in a key that are no policies of JAX are looked up.

        Raises:
            RematError: no such policy, site or name; or JAX cannot trace the function under it.
        """
        with self.lock:
            selection = self._select(policy, at, namespace)
            known = self._reports.get(selection.label)
            if known is None:
                first = self.preview(policy, at, namespace)
                half = self._forward(selection)
                try:
                    backward = self._backward(selection)
                except RematError as error:
                    known = explain.without_backward(first, half, self._index, str(error))
                else:
                    known = explain.full(first, half, backward, self._index)
                self._reports[selection.label] = known
                self._previews.pop(selection.label, None)
            return known

    def cached(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None
    ) -> Report | None:
        """The full report if it is already computed; never traces."""
        with self.lock:
            return self._reports.get(self._select(policy, at, namespace).label)

    def timeline(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None
    ) -> Timeline:
        """The estimated device memory held from equation to equation, where its peak is, and what is held there.

        Its highest moment is the report's ``peak_bytes``. Made when asked for, since ordinary reports need not know.

        Raises:
            RematError: as ``report``, or the function has no backward half.
        """
        with self.lock:
            selection = self._select(policy, at, namespace)
            half, backward = self._forward(selection), self._backward(selection)
            return explain.over_time(self._blank(selection), half, backward, self._index, self._arguments)

    def _blank(self, selection: Selection) -> Report:
        return Report(
            selection.policy,
            selection.at,
            sites=self.sites,
            names=self.names,
            code=selection.code,
            function=self.function_name,
            signature=self.signature,
            wrt=self.wrt,
            notes=(*self.notes, *selection.notes),
            forward=Program(),
            complete=False,
            sources=self.sources,
        )

    # ----------------------------------------------------------------------------------------------------- the function

    def function(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """A callable like the traced function, with a policy applied.

        It traces at every call, for whatever shapes it is given, so wrap it in ``jax.jit``; it works under ``jit``,
        ``grad``, ``vmap`` and ``jvp``, and computes the same values and gradients.
        """
        with self.lock:
            selection = self._select(policy, at, namespace)
        if selection.whole is None and not selection.at_sites:
            return self._fun
        again = self._named.again
        return with_policy(self._fun, self.function_name, selection, self._chooser, self._tracing_again, again)

    def close(self) -> None:
        """Drop everything held: jaxprs, reports and the function."""
        with self.lock:
            for store in (self._halves, self._backwards, self._functions, self._reports, self._previews):
                store.clear()
            self._named.clear()
            self.memo.clear()

    def __repr__(self) -> str:
        return f"<Trace of {self.signature}>"


def _names_in(closed: Any) -> dict[str, None]:
    names = (_compat.checkpoint_name_of(eqn) for eqn, _ in walk(closed))
    return {name: None for name in names if name is not None}
