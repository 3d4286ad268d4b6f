"""What a trace offers of the layers that build on it, where its users look for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from remat_magic import _compat
from remat_magic.model import GradientDifference, Measurement

if TYPE_CHECKING:
    from remat_magic.analysis.primal import Primal
    from remat_magic.analysis.signature import Leaf
    from remat_magic.analysis.trace import Trace
    from remat_magic.model import Advice, Edit, FrontierPoint, Listed, Loop, Plan, WhatIf
    from remat_magic.tuning.compare import Comparison
    from remat_magic.tuning.job import Measuring

__all__ = ["Shortcuts"]


class Shortcuts:
    """Methods of ``Trace`` that import what they need when they are called."""

    if TYPE_CHECKING:
        lock: Any
        _fun: Any
        _primal: Primal

        @property
        def wrt(self) -> tuple[str, ...]:
            """What is differentiated."""
            ...

    def variant(self, change: Callable[[Any], Any]) -> Trace:
        """A trace of a changed program; ``change`` gives for the primal jaxpr one of the same arguments and outputs."""
        from remat_magic.analysis.trace import Trace

        primal = self._primal
        with self.lock, primal.tracing():
            evaluate, outputs = _compat.as_function(change(primal.closed)), primal.outputs

            def program(*arrays: Any) -> Any:
                results = evaluate(*arrays)
                return (results[:outputs], results[outputs:]) if primal.auxiliary else results

            types = tuple(leaf.value for leaf in primal.signature.arrays)
            return Trace(program, types, {}, tuple(primal.signature.differentiated), bool(primal.auxiliary))

    def loops(self, **options: Any) -> Listed[Loop]:
        """For each scan what nesting it under ``jax.checkpoint`` would save and recompute, with the code that does it.

        See :func:`remat_magic.tuning.loops.loops`.
        """
        from remat_magic.tuning.loops import loops

        return loops(cast("Any", self), **options)

    def measuring(self, choices: Sequence[tuple[Any, Any]], **options: Any) -> Measuring:
        """Measure several policies, each with its place, in the background.

        See :class:`remat_magic.tuning.job.Measuring` for the options.
        """
        from remat_magic.tuning.job import Measuring

        return Measuring(cast("Any", self), choices, **options)

    def check_gradients(self, policies: Iterable[Any], **options: Any) -> tuple[GradientDifference, ...]:
        """How far the values and gradients under each policy are from those without the checkpoint.

        See :func:`remat_magic.tuning.gradients.check_gradients` for the options.
        """
        from remat_magic.tuning.gradients import check_gradients

        return check_gradients(cast("Any", self), policies, **options)

    def measure(self, policy: Any = "as_written", at: Any = None, **options: Any) -> Measurement:
        """Compile the value and the gradients under a policy and ask XLA what they need.

        See :func:`remat_magic.tuning.measure.measure` for the options.
        """
        from remat_magic.tuning.measure import measure

        return measure(cast("Any", self), policy, at, **options)

    def compare(
        self,
        policies: Iterable[Any] | None = None,
        at: Any = None,
        device: Any = None,
        measurements: Iterable[Any] = (),
        namespace: Mapping[str, Any] | None = None,
        besides: Iterable[Any] = (),
    ) -> Comparison:
        """What each policy costs, side by side; see :func:`remat_magic.tuning.compare.compare`."""
        from remat_magic.tuning.compare import compare

        return compare(cast("Any", self), policies, at, device, measurements, namespace, besides)

    def plan(self, budget: Any, at: Any = None, **options: Any) -> Plan:
        """What to save within a budget so that as little as possible is recomputed.

        Every method that takes a policy takes a plan: ``trace.report(plan)``, ``trace.function(plan)``. See
        :func:`remat_magic.tuning.plan.plan` for the options.
        """
        from remat_magic.tuning.plan import plan

        return plan(cast("Any", self), budget, at, **options)

    def what_if(self, policy: Any = "as_written", at: Any = None, **options: Any) -> Listed[WhatIf]:
        """For each residual, and each recomputed value, what it alone would change to recompute it, or to save it.

        See :func:`remat_magic.tuning.what_if.what_if` for the options.
        """
        from remat_magic.tuning.what_if import what_if

        return what_if(cast("Any", self), policy, at, **options)

    def advice(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None, **options: Any
    ) -> Listed[Advice]:
        """What about a policy, or the program, costs without need, and the mend.

        See :func:`remat_magic.tuning.advice.advise` for the options.
        """
        from remat_magic.tuning.advice import advise

        return advise(cast("Any", self), policy, at, namespace, **options)

    def plan_bound(self, budget: Any, at: Any = None, **options: Any) -> FrontierPoint:
        """A bound on what plans within a budget recompute, quick enough for a slider.

        See :func:`remat_magic.tuning.bound.plan_bound` for the options.
        """
        from remat_magic.tuning.bound import plan_bound

        return plan_bound(cast("Any", self), budget, at, **options)

    def frontier(self, points: int = 20, at: Any = None, **options: Any) -> Listed[FrontierPoint]:
        """The least recomputation for budgets from nothing to all; see :func:`remat_magic.tuning.plan.frontier`."""
        from remat_magic.tuning.plan import frontier

        return frontier(cast("Any", self), points, at, **options)

    def edit(self, choice: Any, at: Any = None) -> Edit:
        """A plan, or a choice of residuals to keep, as an edit of the user's own source, verified by tracing that.

        See :func:`remat_magic.tuning.editing.edit`.
        """
        from remat_magic.tuning.editing import edit

        return edit(cast("Any", self), choice, at)

    @property
    def traced(self) -> Any:
        """The function that was traced, as it was given."""
        return self._fun

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves of the arguments, static ones included."""
        return self._primal.signature.leaves

    def retraced(self, fun: Any) -> Trace:
        """A trace of another function with arguments of the same types, under the same settings.

        Raises:
            Exception: whatever ``fun`` itself raises.
        """
        from remat_magic.analysis.trace import Trace

        primal = self._primal
        arrays = [_of_type(leaf.value, leaf.sharding) for leaf in primal.signature.arrays]
        args, kwargs = primal.signature.call(lambda *args, **kwargs: (args, kwargs), arrays)
        with primal.tracing():
            return Trace(fun, args, kwargs, self.wrt, primal.has_aux)


def _of_type(aval: Any, sharding: Any) -> Any:
    """A stand-in for an argument of a type."""
    import jax

    if isinstance(aval, jax.ShapeDtypeStruct):
        return aval
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)
