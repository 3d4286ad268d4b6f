"""The user's function with a policy applied, for any arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax, policies
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.checkpoint_writer import with_checkpoints
from remat_magic.engine.failures import failures
from remat_magic.engine.gradients import under_policy
from remat_magic.engine.halves import forward_half
from remat_magic.engine.plan_values import PlanValues
from remat_magic.engine.possible import possible_sites
from remat_magic.engine.primal import Primal
from remat_magic.engine.selection import Selection, Selector, policy_of_each
from remat_magic.engine.signature import Signature
from remat_magic.engine.sites import Identity, PolicyWriter, find_sites
from remat_magic.jaxprs.naming import checkpoint_names
from remat_magic.jaxprs.spans import Spans
from remat_magic.jaxprs.values import Returned, abstract, is_inexact
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import lifted
from remat_magic.policies import AS_WRITTEN
from remat_magic.records import Plan, RematError

_Rewrite = Callable[[Any, Calls], tuple[Any, Any]]  # a jaxpr and its calls -> another, and the policy of one around it


def with_policy(
    fun: Callable[..., Any],
    name: str,
    selection: Selection,
    chooser: Callable[[Selection, Spans], Callable[[Any], Any]],
    tracing: Callable[[], AbstractContextManager[None]],
    prepared: Callable[[Selection, Any, Calls], Any],
    calls: Calls,
) -> Callable[..., Any]:
    """A function like ``fun`` that traces it at every call, and rewrites what it traced.

    Args:
        fun: the function.
        name: what to call it in errors.
        selection: the policies.
        chooser: tells for a selection which policy a checkpoint equation gets; reads source positions with the spans.
        tracing: the settings to trace under.
        prepared: gives a jaxpr, with the calls that were recorded when it was traced, a selection's checkpoints and
            names.
        calls: those that were recorded when it was traced with these settings.
    """
    return _rewritten(fun, name, selection.policy, _rewriting(selection, chooser, prepared), tracing, calls)


def step_with_policy(
    step: Callable[..., Any],
    inside: Identity,
    selection: Selection,
    chooser: Callable[[Selection, Spans], Callable[[Any], Any]],
    remat3: bool,
    prepared: Callable[[Selection, Any, Calls], Any],
) -> Callable[..., Any]:
    """A training step like ``step``, with a policy applied to a function that it differentiates inside.

    The step itself is called, so that what it does besides, its ``jit`` with all options included, stays as it is.

    Args:
        step: the function.
        inside: the function that is differentiated, by its definition.
        selection: the policies.
        chooser: as for ``with_policy``, and so is ``prepared``.
        remat3: whether to trace with jax_remat3.
        prepared: gives the checkpoints and names.
    """
    rewrite, tracing, earlier = _rewriting(selection, chooser, prepared), _apart(lambda: remat3), Calls()

    @functools.wraps(step)
    def applied(*args: Any, **kwargs: Any) -> Any:
        return _differentiating(inside, rewrite, tracing, selection.policy, lambda: step(*args, **kwargs), earlier)

    return applied


def _rewriting(
    selection: Selection,
    chooser: Callable[[Selection, Spans], Callable[[Any], Any]],
    prepared: Callable[[Selection, Any, Calls], Any],
) -> _Rewrite:
    """Gives for a jaxpr another with a selection's policies in it, and the policy of one around it."""

    def rewrite(closed: Any, calls: Calls) -> tuple[Any, Any]:
        closed = prepared(selection, closed, calls)
        if selection.at_sites:
            closed = PolicyWriter(chooser(selection, Spans()))(closed)
        return closed, selection.whole

    return rewrite


def evaluation(closed: Any, policy: Any) -> Callable[..., Any]:
    """A flat function that evaluates a jaxpr, under a checkpoint with that policy if there is one."""
    evaluate = _jax.as_function(closed)
    return evaluate if policy is None else jax.checkpoint(evaluate, policy=policy)


def _apart(remat3: Callable[[], bool]) -> Callable[[], AbstractContextManager[None]]:
    """Traces of one policy's own: JAX keeps what it compiles for it apart from the user's, and from other policies'.

    A trace that looks for gradients gets new ones: what stands compiled takes none any more.
    """
    generation = _jax.Generation()
    return lambda: _jax.tracing(_jax.Generation() if _jax.is_holding() else generation, remat3(), _jax.x64())


def _differentiating(
    inside: Identity,
    rewrite: _Rewrite,
    tracing: Callable[[], AbstractContextManager[None]],
    policy: str,
    step: Callable[[], Any],
    earlier: Calls,
) -> Any:
    """What a step returns that differentiates what ``rewrite`` makes of a function inside.

    ``earlier`` are the calls that were recorded before with these settings.
    """

    def instead(closed: Any, calls: Calls) -> Callable[..., Any]:
        return evaluation(*rewrite(closed, calls))

    with tracing(), under_policy(inside, instead, earlier), failures(inside[0], policy):
        return step()


def _selected(selector: Selector, plan: Plan, closed: Any, function: str) -> Selection:
    """The policy of a plan without values at its place, or those at its places."""
    names, has_rules = checkpoint_names(closed), any(_jax.is_custom_rule(eqn) for _, eqn in walk(closed, once=True))

    def resolved(policy: str) -> policies.Resolved:
        # A custom rule may hold the names that the plan was made with, and shows them when it is differentiated only.
        hidden = policies.Key.parse(policy).names if has_rules else ()
        return policies.resolve(policy, (*names, *hidden), None, function)

    if plan.policy != policies.MIXED:
        return selector.select(resolved(plan.policy), plan.at)
    return selector.select_each({key: resolved(policy) for key, policy in policy_of_each(plan.at).items()})


def _differentiate(closed: Any) -> None:
    """Have JAX differentiate a program in all inputs that it can be differentiated in, if it can."""
    differentiated = [position for position, aval in enumerate(closed.in_avals) if is_inexact(aval)]
    with _jax.not_holding(), contextlib.suppress(Exception):
        forward_half(_jax.as_function(closed), closed.in_avals, differentiated, len(closed.out_avals), 0, None)


def with_plan(plan: Plan, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function like ``fun``, under a plan: what ``trace.function(plan)`` is, without a trace.

    The place and the values are looked up at every call, in what the function then does. Where a training step
    differentiates the function that the plan was made for, it is put in there, and the step is like the one given.
    """
    if not callable(fun):
        raise RematError(f"a plan is applied to a function, not to {type(fun).__name__}: {fun!r}.")
    name = getattr(fun, "__name__", "") or type(fun).__name__
    tracing = _apart(_jax.remat3)

    def rewrite(closed: Any, calls: Calls) -> tuple[Any, Any]:
        spans = Spans()
        table = find_sites(closed, spans, policies.describe)
        possible = possible_sites(closed, calls, table)
        selector = Selector(closed, table, possible, spans, name)
        if plan.names:
            plan_values = PlanValues(
                closed,
                calls,
                table,
                possible,
                selector,
                spans,
                name,
                rules=not _jax.remat3(),
                differentiate=lambda _: _differentiate(closed),
            )
            selection = plan_values.select(plan, _jax.remat3())
        else:
            selection = _selected(selector, plan, closed, name)
        closed = with_checkpoints(closed, calls, possible, selection.at_sites)
        if selection.naming is not None:
            closed = selection.naming.closed
        if selection.at_sites:
            chosen = dict(selection.at_sites)
            closed = PolicyWriter(lambda eqn: chosen.get(table.key_of(eqn, spans), AS_WRITTEN))(closed)
        return closed, selection.whole

    whole = _rewritten(fun, name, plan.policy, rewrite, tracing)
    if plan.function in ("", name):
        return whole

    earlier = Calls()
    inside_of_fun: list[Identity | None] = []  # what the plan is for, of the functions that `fun` differentiates

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        if not inside_of_fun:
            with _jax.not_holding():  # a trace of the step looks for its gradients with the plan in them
                gradients = Primal(fun, Signature(fun, args, kwargs, None), False).gradients
            inside_of_fun.append(next((inner.who for inner in gradients if inner.who[0] == plan.function), None))
        (inside,) = inside_of_fun
        if inside is None:
            return whole(*args, **kwargs)
        return _differentiating(inside, rewrite, tracing, plan.policy, lambda: fun(*args, **kwargs), earlier)

    return applied


def _rewritten(
    fun: Callable[..., Any],
    name: str,
    policy: str,
    rewrite: _Rewrite,
    tracing: Callable[[], AbstractContextManager[None]],
    calls: Calls | None = None,
) -> Callable[..., Any]:
    """``fun``, traced at every call; ``rewrite`` gives for its jaxpr another, and the policy of one around it.

    ``calls`` are those of the trace that was made before, with the same caches of JAX.
    """
    earlier = Calls(calls)

    def of_pytrees(fun: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            dynamic = [
                not isinstance(leaf, (float, complex, np.generic)) and abstract(leaf) is not None for leaf in leaves
            ]
            arrays = [leaf for leaf, yes in zip(leaves, dynamic, strict=True) if yes]
            returned = Returned()

            def flat(*values: Any) -> list[Any]:
                given = iter(values)
                filled = [next(given) if yes else leaf for leaf, yes in zip(leaves, dynamic, strict=True)]
                inner_args, inner_kwargs = tree_unflatten(tree, filled)
                return returned.arrays(fun(*inner_args, **inner_kwargs))

            with tracing():
                with recording(earlier) as calls:
                    closed = jax.make_jaxpr(flat)(*arrays)
                evaluate = evaluation(*rewrite(closed, calls))
                earlier.keep(calls, closed)
                with failures(name, policy):
                    return returned.with_arrays(evaluate(*arrays))

        return traced

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        function = lifted(of_pytrees, fun, args, kwargs) or of_pytrees(fun)
        return function(*args, **kwargs)

    return applied
