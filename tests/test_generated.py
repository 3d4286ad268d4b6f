"""What must hold for any function, checked on programs by chance (tests/generated.py).

The usual run tries a dozen programs, always the same ones. ``--programs 5000`` tries that many new ones in each test
(``--hypothesis-seed=1``, or ``CI=1`` in the environment, makes them the same again); ``-m ""`` with jax_remat3 too.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from jax._src.core import jaxprs_in_params

import remat_magic as rm
from tests import generated
from tests.generated import NAMES, NO_CHECKPOINT, ON_DEVICE, POLICIES, Program, programs, steps_in
from tests.report_checks import check_report, types_of_jax, types_of_ours

# JAX 0.12 says so of 64-bit types that it truncates, in its own list as in eval_shape.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype")

_MANY = int(os.environ.get("REMAT_EXAMPLES", "0"))  # --programs


def examples(usual: int):
    """How many programs a test tries; these are expensive, so fewer than Hypothesis would."""
    return settings(
        max_examples=_MANY or usual,
        suppress_health_check=list(HealthCheck),  # the fixture only sets a flag of JAX, which every example may share
        deadline=None,
        derandomize=not _MANY or "CI" in os.environ,
        # To make a failing program small takes minutes: it is done for a few new ones, that somebody asks for.
        phases=list(Phase) if 0 < _MANY <= 100 else [Phase.generate],
        database=None,
    )


def output_of(program: Program, fun=None):
    """The program without its auxiliary results, which JAX's own list knows nothing of."""
    fun = fun or program.function()
    return functools.wraps(fun)(lambda *args, **kwargs: fun(*args, **kwargs)[0]) if program.has_aux else fun


def traced(program: Program, gradient: str | None = "none") -> rm.Trace:
    """Its trace, of the program itself unless told otherwise; no program for a test where JAX cannot trace it."""
    args, kwargs = program.shapes()
    with program.settings():
        trace = outcome(
            lambda: rm.trace(
                program.function(), *args, has_aux=program.has_aux, gradient=gradient, **kwargs, **program.statics()
            )
        )
        if isinstance(trace, Exception):
            assume(not isinstance(outcome(lambda: jax.eval_shape(output_of(program), *args, **kwargs)), Exception))
            raise trace
    return trace


def is_sentence(error: Exception) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text


_POLICY = st.sampled_from(sorted(POLICIES))


def outcome(make):
    """What it gives, or the exception; JAX itself cannot do everything that can be written."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - it is looked at
        return error


def compare_with_jax(program: Program, mine, listed: Program, policy=None) -> None:
    """Hold a report against JAX's list of what a program saves, or against JAX's failure.

    Args:
        program: whose report it is.
        mine: makes the report.
        listed: the program that JAX is asked about.
        policy: of a checkpoint around it.
    """
    args, kwargs = program.shapes()
    fun = output_of(listed)
    if policy:
        fun = jax.checkpoint(fun, policy=POLICIES[policy])

    def theirs():
        with program.settings():
            return types_of_jax(fun, args, kwargs)

    expected, found = outcome(theirs), outcome(mine)
    if isinstance(found, Exception):
        note(str(found))
        assert isinstance(found, rm.RematError)
        assert is_sentence(found)
        assert isinstance(expected, Exception), f"JAX lists {expected}"
    elif not isinstance(expected, AssertionError):  # JAX's list asserts that no value is saved twice
        assert not isinstance(expected, Exception), expected
        assert types_of_ours(found) == expected


@examples(3)
@given(program=programs(), policy=_POLICY)
def test_residuals_are_what_jax_lists(remat3, program, policy):
    trace = traced(program)
    compare_with_jax(program, lambda: trace.report("as_written", at="function"), program)
    if program.decorator not in POLICIES:
        compare_with_jax(program, lambda: trace.report(POLICIES[policy], at="function"), program, policy)


@examples(2)
@given(
    program=programs(without=("grad", "custom_jvp", "custom_vjp")),
    policy=st.sampled_from([NO_CHECKPOINT, *sorted(POLICIES)]),
    which=st.integers(0, 11),
)
def test_a_policy_at_sites_is_that_policy_written_there(remat3, program, policy, which):
    """The oracle is JAX's list of another program: the one that has the policy in its text, at these sites."""
    # Before it is traced, which takes most of the time.
    assume(program.decorator in POLICIES or any(step.site for step, _ in steps_in(program.body)))
    trace = traced(program)
    assume(trace.engine.primal.table.sites)
    site = trace.engine.primal.table.sites[which // 4 % len(trace.engine.primal.table.sites)]
    chosen = POLICIES.get(policy, policy)
    written = program.under(policy) if which % 4 == 0 else program.under(policy, site.function)
    at = "sites" if which % 4 == 0 else site.key
    if which % 4 == 3:
        chosen, at = "as_written", {site.key: chosen}
    # Where all branches give back what they were given, JAX traces no cond at all. It sees that of a function without
    # a checkpoint, and no longer of one whose checkpoint is taken out of the traced program.
    halves = outcome(lambda: trace.forward(chosen, at))
    assume(isinstance(halves, Exception) or not _gives_back(halves.jaxpr))
    compare_with_jax(program, lambda: trace.report(chosen, at=at), written)


def _gives_back(jaxpr) -> bool:
    """Whether a conditional at any depth has an output that is the same operand in each branch."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            branches = [getattr(branch, "jaxpr", branch) for branch in eqn.params["branches"]]
            given = [{var: i for i, var in enumerate(branch.invars)} for branch in branches]
            for outs in zip(*(branch.outvars for branch in branches), strict=True):
                places = {None if hasattr(out, "val") else own.get(out) for out, own in zip(outs, given, strict=True)}
                if len(places) == 1 and None not in places:
                    return True
        if any(_gives_back(getattr(inner, "jaxpr", inner)) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False


@examples(3)
@given(program=programs(without=("grad",)), policy=_POLICY, which=st.integers(0, 2))
def test_reports_hold_together(remat3, program, policy, which):
    trace = traced(program)
    steps = [*steps_in(program.body)]

    # Names and sites are those that are written.
    named = {NAMES[step.n % 3] for step, _ in steps if step.op.startswith("name")}
    revealed = {
        NAMES[step.n % 3] for step, _ in steps if step.op == "custom_vjp" or (step.op == "custom_jvp" and step.n % 2)
    }
    assert named <= set(trace.names) <= named | revealed
    written = sum(runs * (1 + (step.op == "shared")) for step, runs in steps if step.site)
    written += program.decorator in POLICIES
    if not any(step.op in ("while", "scope") or step.op.startswith("custom") for step, _ in steps):
        assert sum(site.times for site in trace.engine.primal.table.sites) == written

    other = ((POLICIES[policy], "function"), (POLICIES[policy], None), ("none", None))[which]
    for chosen, at in (("as_written", None), other):
        report = outcome(lambda: trace.report(chosen, at))  # noqa: B023 - called at once
        if isinstance(report, Exception):
            assert isinstance(report, rm.RematError), report
            assert is_sentence(report)
            continue
        check_report(report, trace, chosen, at, generated.__file__)


@examples(2)
@given(program=programs(depth=2, dtypes=("float32", "float32", "int32"), without=("type", "algebra")), data=st.data())
def test_a_policy_changes_no_value_and_no_gradient(remat3, program, data):
    args, kwargs = program.values()
    fun = output_of(program)
    assume(not any("offload" in step.policy for step, _ in steps_in(program.body)))  # one memory on this machine
    trace = traced(program, gradient=None)  # of a gradient in it, where it is a step
    policy = data.draw(st.sampled_from(["none", "as_written", *ON_DEVICE]))
    places = [
        "function",
        *(("sites",) if trace.engine.primal.table.sites else ()),
        *(site.key for site in trace.engine.primal.possible.sites),
    ]
    places += [
        f"{key}/{size}" for key, place in trace.engine.primal.possible.places.items() if place.loop for size in (2, 3)
    ]
    at = data.draw(st.sampled_from(places))
    applied = output_of(program, trace.function(POLICIES.get(policy, policy), at))

    def total(fun):
        leaves, tree = jax.tree.flatten((args, kwargs))
        which = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def scalar(chosen):
            values = list(leaves)
            for i, value in zip(which, chosen, strict=True):
                values[i] = value
            again, named = jax.tree.unflatten(tree, values)
            out = fun(*again, **named)
            inexact = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
            return sum(jnp.sum(jnp.cos(leaf).astype(jnp.float32)) for leaf in inexact), out

        make = jax.jit(jax.value_and_grad(scalar, has_aux=True), compiler_options=_QUICK)
        return make([leaves[i] for i in which])

    expected = outcome(lambda: total(fun))
    if isinstance(expected, Exception):
        found = outcome(lambda: total(applied))
        # What JAX cannot save (complex numbers, on some versions) another policy need not save.
        assert not isinstance(found, Exception) or type(found) in (type(expected), rm.RematError), found
        return
    found = outcome(lambda: total(applied))
    if isinstance(found, rm.RematError):
        # Under jax_remat3 JAX saves no complex number that has a name, which as written was not to be saved.
        assert "complex" in str(found), found
        if at == "function" and policy in POLICIES:
            theirs = outcome(lambda: total(jax.checkpoint(fun, policy=POLICIES[policy])))
            assert isinstance(theirs, TypeError), theirs
        return
    if isinstance(found, Exception):
        raise found
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        scale = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(scale))


_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@examples(2)
@given(
    program=programs(depth=3, without=("grad", "callback")),
    fraction=st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]),
    place=st.sampled_from(["function", "sites", None]),
)
def test_a_plan_does_what_it_predicts(remat3, program, fraction, place):
    trace = traced(program)
    at = "function" if place == "sites" and not trace.engine.primal.table.sites else place
    plan = outcome(lambda: trace.plan(fraction, at))
    if isinstance(plan, Exception):
        assert isinstance(plan, rm.RematError), plan
        assert is_sentence(plan)
        return
    assert plan.saved_bytes <= plan.budget_bytes
    assert plan.bound <= plan.recomputed_flops
    report = trace.report(plan)
    assert (report.saved_bytes, report.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    # JAX saves just that when the plan is applied to the function itself.
    args, kwargs = program.shapes()
    applied = output_of(program, functools.partial(trace.function(plan), **program.statics()))

    def listed():
        with program.settings():
            return types_of_jax(applied, args, kwargs)

    expected = outcome(listed)
    if not isinstance(expected, AssertionError):
        assert not isinstance(expected, Exception), expected
        assert types_of_ours(report) == expected
