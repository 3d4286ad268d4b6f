"""A trace: the user's function, run once as Python, and every policy after that as a retrace of its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import _jax, policies
from remat_magic.engine import notes
from remat_magic.engine.applied import step_with_policy, with_policy
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.failures import failures, is_passing
from remat_magic.engine.halves import Forward, Gradient
from remat_magic.engine.possible import Where
from remat_magic.engine.retraces import Dissection, Retraces
from remat_magic.engine.selection import Selection, Selector, policy_of_each
from remat_magic.engine.steps import Halves, InnerGradient, lowered_step, why_no_step
from remat_magic.engine.subject import Subject
from remat_magic.jaxprs.naming import checkpoint_names
from remat_magic.libraries import is_gradient
from remat_magic.records import Choice, Note, Plan, RematError

__all__ = ["Dissection", "Engine"]


class Engine(Subject):
    """A function traced once, and retraced from its jaxpr for every policy. May be used from any thread."""

    def _begin(self, gradient: str | None, differentiate: bool) -> None:
        super()._begin(gradient, differentiate)
        self._selector = Selector(
            self._primal.closed,
            self._primal.table,
            self._primal.possible,
            self._primal.provenances.spans,
            self._primal.name,
        )
        self._retraces = Retraces(self._primal, self._selector)
        self._resolved: dict[int, tuple[Any, policies.Resolved]] = {}  # policy objects by identity
        self._calls: dict[int, InnerGradient] = {}  # those of a step that the trace is not of
        self._known_names: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def place(self, at: str) -> Where | None:
        """Which calls of which function a place is that has no checkpoint; None where it is another place."""
        return None if at in {site.key for site in self.sites} else self._primal.possible.where(at)

    def placed(self, at: str) -> Any:
        """The closed jaxpr with checkpoints at a place that has none."""
        with self.lock, self._primal.tracing():
            selection = self._selector.select(self._resolve("nothing_saveable", None), at)
            primal = self._primal
            return with_checkpoints(primal.closed, primal.calls, primal.possible, selection.at_sites)

    def halves_in_step(self, selection: Selection) -> dict[int, Halves]:
        """For each call of ``step`` that stands for a gradient both its halves, by its number.

        Other gradients than the one that the trace is of are as they are written.

        Raises:
            RematError: one of them has no backward half.
        """
        assert self._gradient is not None
        chosen, halves = self._gradient.function, dict[int, Halves]()
        with self.lock, self._given.tracing():  # whichever thread asks
            for number, function in enumerate(self._given.gradients):
                if function is chosen:
                    both, primal = (self.half(selection), self.backward_of(selection)), self._primal
                elif function.depth:
                    continue
                else:
                    inner = InnerGradient(self._gradient.call, function, self._given)
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
        names = checkpoint_names(self._primal.closed)
        if not self._primal.has_custom_rules:
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
        unknown = why_no_step(self._given, function) if function and self.step is None else ""
        return (
            *notes.of_program(self.stale, hidden),
            *notes.of_gradients(
                self._given.name, self.gradient_inside, self.gradients, is_gradient(self._fun), unknown
            ),
            *(notes.of_copies(function.who[0], function.vmaps.sizes, function.devices) if function else ()),
            *notes.of_devices(
                self.function_name,
                self.devices,
                self.per_device,
                self._primal.unknown_values,
                self._primal.untold_axes,
                self._given.why_not_asked or self._primal.why_not_asked,
                asked=self._primal.asked is not None,
            ),
            *notes.of_mesh(self._given.name, self._given.mesh, self.devices, self.unplaced),
            *notes.of_settings(self._settings),
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
            return self._retraces.dissect(selection, separately)

    def _resolve(self, policy: Any, namespace: Mapping[str, Any] | None) -> policies.Resolved:
        cached = self._resolved.get(id(policy))
        if cached is not None and cached[0] is policy and namespace is None:
            return cached[1]
        plain = isinstance(policy, str) and policy.isidentifier() and not (namespace and policy in namespace)
        names = () if plain else self.names
        resolved = self._selector.intern(policies.resolve(policy, names, namespace, self.function_name))
        if self.remat3 and resolved.own:
            resolved = replace(resolved, notes=(*resolved.notes, notes.asked_little(resolved.key)))
        if namespace is None and resolved.policy is policy:  # which is held anyway, so that its identity stays its own
            self._resolved[id(policy)] = policy, resolved
        return resolved

    def half(self, selection: Selection) -> Forward:
        """The forward half under a selection."""
        with self.lock:
            return self._retraces.forward(selection)

    def backward_of(self, selection: Selection) -> Any:
        """The closed jaxpr of the backward half under a selection.

        Raises:
            RematError: the function has none.
        """
        with self.lock:
            return self._retraces.backward(selection)

    def forward(self, policy: Any = "as_written", at: Any = None) -> Any:
        """The closed jaxpr of the forward half: the arrays in, the function's outputs and then the residuals out."""
        with self.lock:
            return self._retraces.forward(self.select(policy, at)).closed

    def backward(self, policy: Any = "as_written", at: Any = None) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out.

        Raises:
            RematError: the function has no backward half (a ``while_loop`` of unknown length).
        """
        with self.lock:
            return self._retraces.backward(self.select(policy, at))

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
                        f"{self._primal.name} is differentiated on each device by itself, and not to be run alone: "
                        f"pass inputs=(args, kwargs) of a call of {self._given.name}."
                    )
                return self._retraces.gradient(selection, shardings, platform)
            half, backward, primal = self._retraces.forward(selection), self._retraces.backward(selection), self._primal
            with self._given.tracing(), failures(primal.name, selection.policy):  # whichever thread asks
                jaxpr, lowered, donated = lowered_step(
                    self._given, self.step, self._applied(selection), shardings, platform
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
            return self._applied(self.select(policy, at, namespace), of)

    def _applied(self, selection: Selection, of: Callable[..., Any] | None = None) -> Callable[..., Any]:
        fun = self._fun if of is None else of
        if selection.whole is None and not selection.at_sites:
            return fun
        retraces, tracing = self._retraces, self._primal.tracing_again
        if self._gradient is not None and of is None:
            return step_with_policy(
                self._fun, self._gradient.function.who, selection, retraces.chooser, self.remat3, retraces.prepared
            )
        return with_policy(
            fun, self.function_name, selection, retraces.chooser, tracing, retraces.prepared, self._primal.calls
        )

    def close(self) -> None:
        """Drop every retrace."""
        with self.lock:
            self.plans.clear()
            self._retraces.clear()
