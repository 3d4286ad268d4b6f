"""The public ``Trace``: an engine, and all that can be asked about its function, each question answered by its layer.

It holds no logic. A layer that only some questions need is imported when one is asked, since each takes a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from remat_magic.engine.engine import Engine
from remat_magic.facts.facts import Facts
from remat_magic.records import (
    Advice,
    Choice,
    Edit,
    FrontierPoint,
    GradientDifference,
    Listed,
    Loop,
    Measurement,
    Note,
    Plan,
    Report,
    Residual,
    Site,
    SourceText,
    Timeline,
    WhatIf,
)
from remat_magic.wording import printable

if TYPE_CHECKING:
    from remat_magic.comparing.compare import Comparison
    from remat_magic.devices import Device
    from remat_magic.engine.signature import Leaf
    from remat_magic.measuring.job import Measuring

__all__ = ["Trace", "trace"]

Policy = str | Plan | Callable[..., Any]
"""A key (see :mod:`remat_magic.policies`), a plan, or a policy object of JAX's or one's own."""

At = str | Mapping[str, Policy] | None
"""``"function"``, ``"sites"`` (all of them), a site's key, or a mapping of site key to policy; None: ``default_at``."""

Inputs = Literal["random"] | tuple[tuple[Any, ...], Mapping[str, Any]]
"""What to run on: ``"random"`` (normal numbers, zeros in place of integers), or a call's pair ``(args, kwargs)``."""


def trace(
    fun: Callable[..., Any],
    /,
    *args: Any,
    wrt: int | str | Sequence[int | str] | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Trace:
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
    return Trace(Engine(fun, args, kwargs, wrt, has_aux))


class Trace:
    """A function traced once, and every policy after that as a retrace of its jaxpr; made by :func:`trace`.

    It may be used from any thread. Every method that takes a policy takes a key, a plan, or a policy object; ``at`` is
    the place that the policy goes to (see ``report``).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.facts = Facts(engine)
        self.lock = engine.lock

    def __repr__(self) -> str:
        return f"<Trace of {printable(self.signature)}>"

    # -------------------------------------------------------------------------------------------------- what it is of

    @property
    def function_name(self) -> str:
        """The function's own name."""
        return self.engine.function_name

    @property
    def signature(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        return self.engine.signature

    @property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated: arguments by name, or leaves where only some of an argument's are."""
        return self.engine.wrt

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """The array leaves of the arguments, as types."""
        return self.engine.arguments

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places where ``jax.checkpoint`` is applied, in the order of their first call."""
        return self.engine.sites

    @property
    def names(self) -> tuple[str, ...]:
        """Every checkpoint name of the function, in the order of the program.

        Nested jaxprs are included, and names that only the rules of custom derivatives hold, which are Python and show
        when they are differentiated.
        """
        return self.engine.names

    @property
    def stale(self) -> tuple[str, ...]:
        """The functions of which JAX still holds an older trace than this one."""
        return self.engine.stale

    @property
    def notes(self) -> tuple[Note, ...]:
        """Sentences about the function that a reader of any report must know."""
        return self.engine.notes

    @property
    def sources(self) -> tuple[SourceText, ...]:
        """The source texts of what ran, as they were when it was traced."""
        return self.engine.sources

    @property
    def default_at(self) -> str:
        """What ``at=None`` means: the function's own decorator, else its sites, else the whole function."""
        return self.engine.default_at

    def choices(self) -> tuple[Choice, ...]:
        """The policies to choose from for this function, factories filled with its checkpoint names."""
        return self.engine.choices()

    # ----------------------------------------------------------------------------------------------- what a policy does

    def report(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Report:
        """What a policy does: residuals, recomputation, both jaxprs as text.

        Args:
            policy: a key (see :mod:`remat_magic.policies`), a plan, a JAX policy or any policy callable.
            at: ``"function"`` (around the whole function, or in place of the policy of its own decorator), a site's
                key, ``"sites"`` for all of them, or a mapping of site key to policy; by default ``default_at``.
            namespace: where identifiers in a key that are no policies of JAX are looked up.

        Raises:
            RematError: no such policy, site or name; or JAX cannot trace the function under it.
        """
        return self.facts.report(policy, at, namespace)

    def preview(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Report:
        """The report of the forward half alone (``complete`` is False), or the full one where it is known.

        The arguments and errors are those of ``report``.
        """
        return self.facts.preview(policy, at, namespace)

    def cached(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Report | None:
        """The full report if it is already computed; never traces. The arguments are those of ``report``."""
        return self.facts.cached(policy, at, namespace)

    def timeline(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Timeline:
        """The estimated device memory in bytes from equation to equation, its peak, and what is held there.

        Its highest moment is the report's ``peak_bytes``. The arguments are those of ``report``.

        Raises:
            RematError: as ``report``, or the function has no backward half.
        """
        return self.facts.timeline(policy, at, namespace)

    def forward(self, policy: Policy = "as_written", at: At = None) -> Any:
        """The closed jaxpr of the forward half: the arrays in, the function's outputs and then the residuals out."""
        return self.engine.forward(policy, at)

    def backward(self, policy: Policy = "as_written", at: At = None) -> Any:
        """The closed jaxpr of the backward half: residuals and cotangents in, gradients out.

        Raises:
            RematError: the function has no backward half (a ``while_loop`` of unknown length).
        """
        return self.engine.backward(policy, at)

    def function(
        self, policy: Policy = "as_written", at: At = None, namespace: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """A callable like the traced function, with a policy applied.

        It traces at every call, for whatever shapes it is given, so wrap it in ``jax.jit``; it works under ``jit``,
        ``grad``, ``vmap`` and ``jvp``, and computes the same values and gradients. The arguments and errors are those
        of ``report``.
        """
        return self.engine.function(policy, at, namespace)

    # ------------------------------------------------------------------------------------------------------- comparing

    def compare(
        self,
        policies: Iterable[Policy] | None = None,
        at: At = None,
        device: str | Device | None = None,
        measurements: Iterable[Measurement] = (),
        namespace: Mapping[str, Any] | None = None,
        besides: Iterable[Policy] = (),
    ) -> Comparison:
        """What each policy costs, side by side.

        Args:
            policies: keys or JAX policies; by default all that ``choices`` offers, where policies that do just the same
                share a row.
            at: where, as for ``report``.
            device: whose data sheet the times are estimated by: a name of ``remat_magic.devices.names()`` or a device;
                by default the one that JAX runs on, if it is known.
            measurements: measured policies, shown beside the estimates.
            namespace: where policies of one's own are looked up by name.
            besides: policies to compare with those that ``choices`` offers.

        Raises:
            RematError: no such device. A policy that fails is a row with its error.
        """
        from remat_magic.comparing.compare import compare

        return compare(self.facts, policies, at, device, measurements, namespace, besides)

    # -------------------------------------------------------------------------------------------------------- planning

    def plan(
        self,
        budget: float | str,
        at: str | None = None,
        *,
        of: Literal["saved", "peak"] = "saved",
        cost: Literal["flops", "seconds"] = "flops",
        device: str | Device | None = None,
        offload: float | str | bool | None = None,
        separately: bool = False,
        together: bool = False,
        seconds: float = 10.0,
        gap: float = 0.01,
    ) -> Plan:
        """What to save within a budget so that recomputation costs least.

        Every intermediate gets a checkpoint name, and an integer programme chooses among them. The choice is then
        applied and traced, so that what the plan says of it is what JAX does; where one of JAX's own policies fits the
        budget and costs less (it can keep what no name reaches, such as the cosine of a sine), the plan is that policy.
        Values inside the branches of a ``lax.cond`` are not chosen among, and ``Plan.status`` says so where there are
        any. Every method that takes a policy takes the plan: ``trace.report(plan)``, ``trace.function(plan)``.

        Args:
            budget: in bytes: a number, a text like ``"2 GiB"``, or as a float from 0 to 1 (or a text like ``"30%"``)
                the fraction of what there is without a checkpoint there.
            at: one place or all sites, as for ``report``.
            of: what the budget is of: ``"saved"`` bytes, or the estimated ``"peak"`` (``Report.peak_bytes``), for which
                plans of several saved bytes are tried.
            cost: what is to be least: recomputed ``"flops"``, or the estimated ``"seconds"`` of recomputing on
                ``device``.
            device: a device or its name; by default the one that JAX runs on.
            offload: values may also go to the host's pinned memory and come back: over a link of so many bytes/s (a
                number, or a text like ``"32 GB/s"``), or True for the device's own. What is least is then seconds.
            separately: decide equal layers that share one body (the calls of one checkpointed or jitted function) one
                by one, not together; slower.
            together: decide equal layers that a Python loop unrolls together too: what one expression of the source
                makes is saved in all of them or in none. More is recomputed, and there is less to name.
            seconds: the time limit of the solver, in seconds.
            gap: how far from the best the solver may stop, as a share of the cost.

        Raises:
            RematError: the budget is no size, or less is never needed at this place; no such site, device or option; no
                backward half.
        """
        from remat_magic.planning.plan import plan

        return plan(
            self.facts,
            budget,
            at,
            of=of,
            cost=cost,
            device=device,
            offload=offload,
            separately=separately,
            together=together,
            seconds=seconds,
            gap=gap,
        )

    def frontier(
        self,
        points: int = 20,
        at: str | None = None,
        *,
        separately: bool = False,
        together: bool = False,
        seconds: float = 1.0,
    ) -> Listed[FrontierPoint]:
        """The least recomputation for evenly spaced budgets, from the least to all that is saved without a checkpoint.

        The figures are reckoned, not traced: ``plan`` of the same budget has them confirmed by JAX.

        Args:
            points: how many budgets, two at least.
            at: as for ``plan``, and so are ``separately`` and ``together``.
            separately: equal layers one by one.
            together: equal layers of a Python loop together.
            seconds: how long to go on improving, in seconds of work: a busy machine takes longer.

        Raises:
            RematError: as ``plan``; fewer than two points.
        """
        from remat_magic.planning.plan import frontier

        return frontier(self.facts, points, at, separately=separately, together=together, seconds=seconds)

    def plan_bound(
        self,
        budget: float | str,
        at: str | None = None,
        *,
        separately: bool = False,
        together: bool = False,
        first: float = 2.0,
        seconds: float = 0.04,
    ) -> FrontierPoint:
        """A bound on what any plan within a budget of saved bytes recomputes, quick enough for a slider.

        The first call at a place takes JAX's tracing and up to ``first`` seconds; later ones read off what it found,
        and go on with it for up to ``seconds`` where it is not complete. The figures are reckoned, not traced.

        Args:
            budget: as for ``plan``, and so are ``at``, ``separately``, ``together`` and the errors.
            at: one place or all sites.
            separately: equal layers one by one.
            together: equal layers of a Python loop together.
            first: how long the first call may search, in seconds.
            seconds: how long each later call may, in seconds.

        Raises:
            RematError: as ``plan``.
        """
        from remat_magic.planning.plan import plan_bound

        return plan_bound(
            self.facts, budget, at, separately=separately, together=together, first=first, seconds=seconds
        )

    def what_if(
        self,
        policy: Policy = "as_written",
        at: str | None = None,
        *,
        device: str | Device | None = None,
        by: Literal["flops", "seconds"] = "flops",
        separately: bool = False,
        together: bool = False,
        namespace: Mapping[str, Any] | None = None,
    ) -> Listed[WhatIf]:
        """For each residual that could be recomputed, and each recomputed value that could be saved: what that changes.

        What could be saved comes first, that which spares most for each byte leading; then what could be recomputed,
        that whose bytes spare least leading. Each row has the plan that does what it says.

        Args:
            policy: as for ``report``.
            at: one place, or all sites.
            device: whose seconds are estimated: a device or its name; by default the one that JAX runs on, if known.
            by: what ranks: ``"flops"`` or ``"seconds"``.
            separately: for equal layers that share one body one by one, not together.
            together: for all values at once that one expression makes, in equal layers that a Python loop unrolls.
            namespace: where policies of one's own are looked up by name.

        Raises:
            RematError: no such policy, place or device; no backward half; or JAX does otherwise than is reckoned here
                (a checkpoint inside another under jax_remat3), so that nothing can be said.
        """
        from remat_magic.planning.what_if import what_if

        return what_if(
            self.facts,
            policy,
            at,
            device=device,
            by=by,
            separately=separately,
            together=together,
            namespace=namespace,
        )

    def loops(self, *, shortest: int = 4) -> Listed[Loop]:
        """For each scan what nesting it under ``jax.checkpoint`` would save and recompute, with the code that does it.

        The figures are those of the whole function, as written but for that scan: JAX's own, since it is rewritten and
        traced once for each way.

        Args:
            shortest: leave out scans of fewer steps (of fewer than four there is nothing to nest).

        Raises:
            RematError: the function has no backward half.
        """
        from remat_magic.planning.loops import loops

        return loops(self.facts, shortest=shortest)

    # ------------------------------------------------------------------------------------------------ advice and edits

    def advice(
        self,
        policy: Policy = "as_written",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
        *,
        device: str | Device | None = None,
    ) -> Listed[Advice]:
        """What about a policy, or the program, costs without need, and the mend.

        Args:
            policy: as for ``report``.
            at: where, as for ``report``.
            namespace: where policies of one's own are looked up by name.
            device: whose times are estimated: a device or its name; by default the one that JAX runs on, if known.

        Raises:
            RematError: as ``report``; no such device.
        """
        from remat_magic.advice.rules import advise

        return advise(self.facts, policy, at, namespace, device=device)

    def edit(self, choice: Policy | Iterable[Residual], at: str | None = None) -> Edit:
        """A plan, or a choice of residuals to keep, as an edit of the user's own source, verified by tracing that.

        Args:
            choice: a plan, the key of a policy, or residuals of a report of this trace to keep by name, all others
                being recomputed.
            at: one place or all sites, as for ``plan``; a plan has its own.

        Raises:
            RematError: the source of what ran is not available or has changed, or cannot be executed apart from the
                session; no such place.
        """
        from remat_magic.editing.editor import edit

        return edit(self.facts, choice, at)

    # ------------------------------------------------------------------------------------------------------- measuring

    def measure(
        self,
        policy: Policy = "as_written",
        at: At = None,
        *,
        inputs: Inputs | None = None,
        runs: int = 5,
        namespace: Mapping[str, Any] | None = None,
    ) -> Measurement:
        """Compile the value and the gradients under a policy, and run them if there are inputs.

        The program is lowered from the jaxpr that the report is of, so no Python of the user's runs again, with a
        cotangent of one for every output. Nothing of the user's is donated or kept. On CPU it is compiled with
        ``xla_cpu_enable_concurrency_optimized_scheduler=False``, so that temporary memory follows the policy as far as
        XLA lets it: on jax 0.10.2 only under ``lax.scan``.

        Args:
            policy: as for ``report``, and so are ``at`` and ``namespace``.
            at: where.
            inputs: None to compile only; ``"random"``, or the pair ``(args, kwargs)`` of a call like the traced one,
                since a trace keeps no arrays. Their shardings are lowered with, and without them those that the
                arguments had when traced.
            runs: how many runs to time, after one to warm up.
            namespace: where identifiers in a key that are no policies of JAX are looked up.

        Returns:
            What was measured. Where a step failed, ``error`` says so and what came before it stays.

        Raises:
            RematError: ``inputs`` is of no known form, or ``runs`` is not positive.
        """
        from remat_magic.measuring.measure import measure

        return measure(self.facts, policy, at, inputs=inputs, runs=runs, namespace=namespace)

    def measuring(
        self,
        choices: Sequence[tuple[Policy, At]],
        *,
        inputs: Inputs | None = None,
        runs: int = 5,
        namespace: Mapping[str, Any] | None = None,
        on_update: Callable[[Measuring], None] | None = None,
    ) -> Measuring:
        """Measure several policies on a thread of its own, one after another, from now on.

        Args:
            choices: the policies with their places, as for ``report``.
            inputs: as for ``measure``. The arrays are held until the last measurement.
            runs: how many runs to time of each.
            namespace: where identifiers in a key that are no policies of JAX are looked up.
            on_update: called with the job, on its thread, whenever its ``progress`` or ``results`` have changed. What
                it raises is logged.

        Raises:
            RematError: ``inputs`` is of no known form, or ``runs`` is not positive.
        """
        from remat_magic.measuring.job import Measuring

        return Measuring(self, choices, inputs=inputs, runs=runs, namespace=namespace, on_update=on_update)

    def check_gradients(
        self,
        policies: Iterable[Policy],
        *,
        inputs: Inputs = "random",
        at: At = None,
        namespace: Mapping[str, Any] | None = None,
    ) -> tuple[GradientDifference, ...]:
        """Run the value and the gradients under each policy on the same inputs, and compare them with policy "none".

        Both are compiled, so that differences in the last bits are usual: XLA fuses them differently. The cotangent of
        each output is one everywhere.

        Args:
            policies: the policies, as for ``report``, and so are ``at`` and ``namespace``.
            inputs: ``"random"``, or the pair ``(args, kwargs)`` of a call like the traced one.
            at: the place of the policies, and of "none".
            namespace: where identifiers in a key that are no policies of JAX are looked up.

        Returns:
            One difference for each policy, in their order. Failures are sentences in ``error``.

        Raises:
            RematError: ``inputs`` is of no known form, or None.
        """
        from remat_magic.measuring.gradients import check_gradients

        return check_gradients(self, policies, inputs=inputs, at=at, namespace=namespace)

    def close(self) -> None:
        """Drop everything held: jaxprs, reports and what was worked out from them."""
        self.facts.close()
