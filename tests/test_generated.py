"""What must hold for any function, checked on programs by chance (tests/generated.py).

By default some thirty programs, the same ones each time; ``REMAT_EXAMPLES=5000`` tries that many new ones in
each test, ``--hypothesis-profile=thorough`` ten times the usual number.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from jax._src.ad_checkpoint import saved_residuals

import remat_magic as rm
from remat_magic.analysis.bodies import nbytes
from tests import generated
from tests.generated import NAMES, ON_DEVICE, POLICIES, Program, programs, steps_in
from tests.test_parity import types_of_ours

_MANY = int(os.environ.get("REMAT_EXAMPLES", "0"))


def examples(count: int):
    """How many programs a test tries; these are expensive, so fewer than Hypothesis would."""
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(
        max_examples=_MANY or (10 * count if thorough else count),
        # The fixture only sets a flag of JAX, which every example may share.
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
        deadline=None,
        derandomize=not (_MANY or thorough),
        database=None,
    )


def output_of(program: Program, fun=None):
    """The program without its auxiliary results, which JAX's own list knows nothing of."""
    fun = fun or program.function()
    if not program.has_aux:
        return fun

    @functools.wraps(fun)
    def first(*args, **kwargs):
        return fun(*args, **kwargs)[0]

    return first


def types_of_jax(fun, args, kwargs) -> Counter[str]:
    listed = saved_residuals(fun, *args, **kwargs)
    return Counter(aval.str_short(short_dtypes=True) for aval, source in listed if source != "from a literal")


def traced(program: Program) -> rm.Trace:
    args, kwargs = program.shapes()
    return rm.trace(program.function(), *args, has_aux=program.has_aux, **kwargs)


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


@examples(10)
@given(program=programs(), policy=_POLICY)
def test_residuals_are_what_jax_lists(remat3, program, policy):
    args, kwargs = program.shapes()
    fun = output_of(program)
    assume(not isinstance(outcome(lambda: jax.eval_shape(fun, *args, **kwargs)), Exception))
    trace = traced(program)

    def compare(mine, theirs):
        expected, found = outcome(theirs), outcome(mine)
        if isinstance(found, Exception):
            note(str(found))
            assert isinstance(found, rm.RematError)
            assert is_sentence(found)
            assert isinstance(expected, Exception), f"JAX lists {expected}"
        elif not isinstance(expected, AssertionError):  # JAX's list asserts that no value is saved twice
            assert not isinstance(expected, Exception), expected
            assert types_of_ours(found) == expected

    compare(lambda: trace.report("as_written", at="function"), lambda: types_of_jax(fun, args, kwargs))
    if program.decorator not in POLICIES:
        under = jax.checkpoint(fun, policy=POLICIES[policy])
        compare(lambda: trace.report(POLICIES[policy], at="function"), lambda: types_of_jax(under, args, kwargs))


def _count(jaxpr, wanted) -> int:
    """How many equations of these primitives a jaxpr has at any depth, without the package's own walk."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += eqn.primitive.name in wanted
        total += sum(_count(inner, wanted) for inner in jax.core.jaxprs_in_params(eqn.params))
    return total


@examples(10)
@given(program=programs(without=("grad",)), policy=_POLICY, which=st.integers(0, 2))
def test_reports_hold_together(remat3, program, policy, which):
    args, kwargs = program.shapes()
    output = outcome(lambda: jax.eval_shape(output_of(program), *args, **kwargs))
    assume(not isinstance(output, Exception))
    trace = traced(program)
    steps = [*steps_in(program.body)]
    outputs = jax.tree.leaves(output)

    # Names and sites are those that are written.
    named = {NAMES[step.n % 3] for step, _ in steps if step.op.startswith("name")}
    revealed = {
        NAMES[step.n % 3] for step, _ in steps if step.op == "custom_vjp" or (step.op == "custom_jvp" and step.n % 2)
    }
    assert named <= set(trace.names) <= named | revealed
    written = sum(runs for step, runs in steps if step.op == "checkpoint") + (program.decorator in POLICIES)
    if not any(step.op in ("while", "scope") or step.op.startswith("custom") for step, _ in steps):
        assert sum(site.times for site in trace.sites) == written

    other = ((POLICIES[policy], "function"), (POLICIES[policy], None), ("none", None))[which]
    for chosen, at in (("as_written", None), other):
        report = outcome(lambda: trace.report(chosen, at))  # noqa: B023 - called at once
        if isinstance(report, Exception):
            assert isinstance(report, rm.RematError), report
            assert is_sentence(report)
            continue
        check_report(report, trace, chosen, at, outputs)


def check_report(report: rm.Report, trace: rm.Trace, policy, at, outputs, *files: str) -> None:
    forward = trace.forward(policy, at)
    assert report.forward.text == forward.pretty_print(use_color=False)
    total = len(outputs)
    residuals = list(forward.out_avals)
    aux = trace._primal.auxiliary
    residuals = residuals[total + aux :]
    # Every byte is of one kind.
    assert report.saved_bytes + report.argument_bytes + report.constant_bytes + report.offloaded_bytes == sum(
        row.nbytes for row in report.residuals
    )
    files = {generated.__file__, __file__, *files}
    for row in report.residuals:
        assert row.nbytes >= 0
        assert (row.kind == "argument") <= (row.argument is not None)
        if row.kind == "argument":
            assert row.argument in {leaf.name for leaf in trace.arguments}
        if row.kind in ("intermediate", "offloaded"):
            assert row.origins, row
            assert row.primitive == row.origins[0].primitive
            # What a program computes, it computes on some line of it, unless it only passes an argument or number on.
            assert all(
                (origin.source is not None and origin.source.file in files) or not origin.primitive
                for origin in row.origins
            ), row
    if report.backward_error:
        assert report.backward_error.endswith(".")
        return
    backward = trace.backward(policy, at)
    assert report.backward.text == backward.pretty_print(use_color=False)
    inexact = [leaf for leaf in outputs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    assert [(aval.shape, aval.dtype) for aval in backward.in_avals] == [
        (aval.shape, aval.dtype) for aval in (*residuals, *inexact)
    ]
    differentiated = [leaf.value for leaf in trace.arguments if leaf.differentiated]
    assert [(aval.shape, aval.dtype) for aval in backward.out_avals] == [
        (aval.shape, aval.dtype) for aval in differentiated
    ]
    # Marked lines are lines of recomputation, and every residual is marked in both programs.
    values = {number for number, row in enumerate(report.residuals) if row.kind != "literal"}
    # A literal is a variable in the backward program alone.
    ahead, back = (
        {row for line in half.lines for _, row in line.residuals} for half in (report.forward, report.backward)
    )
    assert ahead == values
    assert values <= back <= set(range(len(report.residuals)))
    assert bool(report.recomputed) == any(line.recomputation for line in report.backward.lines)
    assert report.peak_bytes >= sum(nbytes(leaf.value) for leaf in trace.arguments)
    assert max(moment.bytes for moment in trace.timeline(policy, at).moments) == report.peak_bytes
    # The kernels do what the equations do, and recomputation is part of the backward pass.
    if not report.uncosted:
        for work, flops in ((report.forward_work, report.forward_flops), (report.backward_work, report.backward_flops)):
            if all(each.known for each in work):
                assert sum(each.flops * each.times for each in work) == flops
    # Of a conditional the halves count the worst branch, and the operations that are recomputed are those of all.
    if not report.uncosted and "branches=" not in report.backward.text:
        assert report.recomputed_flops <= report.backward_flops
    for equation in report.recomputed:
        assert equation.times is None or equation.times >= 0


@examples(6)
@given(program=programs(without=("custom_vjp", "grad", "while", "random", "algebra")), policy=_POLICY)
def test_what_a_linear_program_cannot_hold_is_recomputed(remat2, program, policy):
    """A backward pass is linear in the cotangents: the exp, tanh and the like in it can only be recomputation.

    Not under jax_remat3, which leaves dead code in its backward jaxprs that is no recomputation.
    """
    args, kwargs = program.shapes()
    assume(not isinstance(outcome(lambda: jax.eval_shape(output_of(program), *args, **kwargs)), Exception))
    trace = traced(program)
    report = outcome(lambda: trace.report(POLICIES[policy], at="function"))
    if isinstance(report, Exception) or report.backward_error:
        return
    for line in report.backward.lines:
        if line.primitive in NONLINEAR:
            assert line.recomputation, line.text
    # As many as there are, each with its operations.
    told = Counter(equation.primitive for equation in report.recomputed if equation.primitive in NONLINEAR)
    shown = Counter(line.primitive for line in report.backward.lines if line.primitive in NONLINEAR)
    assert set(told) == set(shown)


NONLINEAR = ("exp", "log", "tanh", "sin", "cos", "logistic", "rsqrt", "erf", "abs", "max", "gt", "sort")


@examples(4)
@given(program=programs(depth=2, dtypes=("float32", "float32", "int32"), without=("type", "algebra")), data=st.data())
def test_a_policy_changes_no_value_and_no_gradient(remat3, program, data):
    args, kwargs = program.values()
    fun = output_of(program)
    assume(not any("offload" in step.policy for step, _ in steps_in(program.body)))  # one memory on this machine
    assume(not isinstance(outcome(lambda: jax.eval_shape(fun, *args, **kwargs)), Exception))
    trace = traced(program)
    policy = data.draw(st.sampled_from(["none", "as_written", *ON_DEVICE]))
    at = data.draw(st.sampled_from(["function", *(("sites",) if trace.sites else ())]))
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
        assert type(found) in (type(expected), rm.RematError), found
        return
    found = total(applied)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        scale = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(scale))


_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
