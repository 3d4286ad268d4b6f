"""Programs that were shown wrongly once: found by chance (tests/test_generated.py), cut down by hand."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.core import jaxprs_in_params
from jax.extend.core import Primitive
from jax.interpreters import ad

import remat_magic as rm
from remat_magic.jaxprs.walk import LiveEquations, walk
from tests.programs import f32
from tests.report_checks import check_report


def checkpointed_solver(a, b):
    solver = jax.checkpoint(lambda b: 2.0 * b)
    x = jax.lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: solver(b), lambda _, b: solver(b))
    return jnp.sin(x).sum()


def line_of_a_library_function(w, x):
    inner = jax.grad(lambda x: jnp.sin(jax.checkpoint(jnp.sin)(x * w)).sum())
    return jnp.sum(inner(x) ** 2)


def branches_closed_at_each_call(x):
    @jax.jit
    @jax.checkpoint
    def block(x):
        # Nothing reads its result: what is left of it are its effects.
        jax.lax.cond(jnp.sum(x) > 0.7, lambda x: (jax.debug.callback(lambda *_: None, x), x)[1], jnp.sin, x)
        return jnp.sin(x)

    block(x)  # and here nothing else of the block is left either
    return jnp.sum(block(x))


CASES = {
    # Its four jaxprs are a named tuple, which JAX prints as such and reads by name; a plain tuple lost both.
    "a linear solve": (lambda a, b: jnp.sin(jnp.linalg.solve(a, b)).sum(), f32(3, 3), f32(3)),
    "an inverse": (lambda a, b: jnp.sin(jnp.linalg.inv(a) @ b).sum(), f32(3, 3), f32(3)),
    # Rewriting a jaxpr inside keeps that named tuple.
    "a checkpoint in a solve": (checkpointed_solver, f32(3, 3), f32(3)),
    # Such literals have no hash.
    "a literal array is kept": (lambda x: jnp.sin(jax.lax.associative_scan(jnp.multiply, x)).sum(), f32(8)),
    # checkpoint(jnp.sin) ends its traceback in JAX; the equation around it knows the line.
    "a checkpointed library function": (line_of_a_library_function, f32(4), f32(4)),
    # N - 1 operations of n elements, which are not -1 of none.
    "a sum of nothing": (lambda w, x: jnp.sum(w) + jnp.sin(x), f32(0, 3), f32()),
    "a maximum of nothing": (lambda w, x: jnp.max(w, initial=0.0) + jnp.sin(x), f32(0, 3), f32()),
    "a product of nothing": (lambda w, x: jnp.prod(w, axis=0).sum() + jnp.sin(x), f32(0, 3), f32()),
    # JAX 0.10 closes what is left of a branch anew at each call, and still counts and names its jaxpr once.
    "branches closed at each call": (branches_closed_at_each_call, f32(2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_its_report_agrees_with_itself(name, remat3):
    fun, *args = CASES[name]
    trace = rm.trace(fun, *args)
    for at in ("function", "sites") if trace.sites else ("function",):
        for policy in ("as_written", "none", "nothing_saveable"):
            report = trace.report(policy, at)
            assert report.complete
            assert not report.backward_error
            check_report(report, trace, policy, at, __file__)
    plan = trace.plan(1.0, "function")
    assert plan.bound <= plan.recomputed_flops


def test_a_plan_where_there_is_nothing_to_choose(remat3):
    """A solver without variables, whose empty bounds scipy 1.18 refuses."""
    plan = rm.trace(lambda x: (x * 2.0).sum(), f32(3)).plan(1.0, "function")
    assert (plan.saved_bytes, plan.recomputed_flops, plan.gap) == (0, 0, 0.0)


def test_a_linear_solve_is_made_by_its_solver(remat3):
    """The matrix product beside it serves derivatives: it makes no result."""

    def loss(a, b):
        x = jax.lax.custom_linear_solve(
            lambda v: a @ v, b, lambda matvec, b: jnp.sqrt(jnp.abs(b)), lambda vecmat, b: jnp.cbrt(b)
        )
        return (x * x).sum()

    report = rm.trace(loss, f32(3, 3), f32(3)).report()
    made = {origin.primitive for row in report.residuals for origin in row.origins if row.kind == "intermediate"}
    assert "sqrt" in made
    assert not made & {"dot_general", "cbrt"}


class _Table:
    def __repr__(self):
        return "a table\n  a b\n  1 2"


def test_a_parameter_of_several_lines_belongs_to_its_equation(remat3):
    """JAX's source map counts the lines that it breaks itself, not those in a parameter's own text."""
    table = Primitive("table")
    table.def_abstract_eval(lambda x, of: x)
    ad.deflinear2(table, lambda g, x, of: [g])
    trace = rm.trace(lambda x: jnp.sin(table.bind(jnp.sin(x), of=_Table())).sum(), f32(3))
    program = trace.report().forward
    assert program.text == trace.forward().pretty_print(use_color=False)
    lines = [line for line in program.lines if "1 2" in line.text]
    (owner,) = [line for line in program.lines if line.primitive == "table"]
    assert [line.equation for line in lines] == [owner.equation]
    assert not any(line.residuals for line in lines)  # "a b" are no variables


def test_a_branch_that_does_not_make_a_residual_is_no_origin(remat3):
    """JAX fills the slot of a residual in the other branches with what nobody reads."""

    def loss(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x), lambda x: x * 2, x).sum()

    rows = [row for row in rm.trace(loss, f32(4)).report().residuals if row.type == "f32[4]"]
    assert [[origin.primitive for origin in row.origins] for row in rows] == [["cos"]]


def test_a_64_bit_type_without_64_bits():
    """JAX traces such a ``ShapeDtypeStruct`` with 32 bits, and so it is shown and counted."""
    wide = jax.ShapeDtypeStruct((4,), np.float64)
    trace = rm.trace(lambda x: jnp.sin(x).sum(), wide)
    assert trace.signature.split("(", 1)[1].startswith("x f32[4]")
    assert [(leaf.value.dtype, leaf.value.shape) for leaf in trace.arguments] == [(jnp.float32, (4,))]
    # What is held at the peak: x and its cosine forward; the cosine, the cotangent and the gradient backward.
    narrow = rm.trace(lambda x: jnp.sin(x).sum(), f32(4))
    assert trace.report().peak_bytes == narrow.report().peak_bytes
    assert not trace.measure(inputs="random", runs=1).error


def live_of(fun, *args):
    """The primitives that the outputs of a function depend on."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    live, found, todo = LiveEquations(jaxpr), set(), [jaxpr]
    for each in todo:
        for eqn in getattr(each, "jaxpr", each).eqns:
            found |= {eqn.primitive.name} if live(eqn) else set()
            todo += jaxprs_in_params(eqn.params)
    return found


def test_what_a_loop_that_may_not_run_began_with_is_needed():
    """Its body forgets what it carries; only the loop that surely runs forgets it with that."""

    def scanned(x, length):
        return jax.lax.scan(lambda c, _: (jnp.zeros(3), None), jnp.sin(x), None, length)[0]

    def whiled(x, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.zeros(3)), (0, jnp.sin(x)))[1]

    assert "sin" not in live_of(lambda x: scanned(x, 2), f32(3))
    assert "sin" in live_of(lambda x: scanned(x, 0), f32(3))
    assert "sin" in live_of(whiled, f32(3), jax.ShapeDtypeStruct((), "int32"))


def test_what_only_a_loops_condition_reads_is_needed():
    def whiled(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (jnp.tanh(c[0]) + 1, jnp.cos(c[1])), (0.0, x))[1]

    assert {"tanh", "cos", "lt"} <= live_of(whiled, f32(3))


@pytest.mark.parametrize("fun", [lambda x: jnp.power(x, jnp.sin(x)), jax.nn.softplus])
def test_the_derivative_of_an_operation_is_no_repetition_of_it(fun, remat2):
    """It stands on the same line with the same name; what runs again is no more than what the function does."""
    report = rm.trace(lambda x: jnp.sum(2 * jax.checkpoint(fun)(x)), f32(4)).report()
    repeated = Counter(equation.primitive for equation in report.recomputed if equation.repeated)
    assert repeated
    assert repeated <= Counter(eqn.primitive.name for _, eqn in walk(jax.make_jaxpr(fun)(f32(4))))


def test_what_a_scatter_makes_is_called_so():
    """Its jaxpr says how two elements become one, and makes no array."""

    def fun(x, at, w):
        return jnp.sin(jnp.zeros((8, 4)).at[at].add(x) * w).sum()

    trace = rm.trace(fun, f32(3, 4), jax.ShapeDtypeStruct((3,), "int32"), f32(8, 4))
    primitives = {row.primitive for row in trace.report("none").residuals}
    assert "scatter-add" in primitives
    assert "add" not in primitives
