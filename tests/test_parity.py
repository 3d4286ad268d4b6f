"""The residuals are JAX's own: the same multiset of types as its list, for every program, policy and place."""

from __future__ import annotations

import jax
import pytest

import remat_magic as rm
from tests import programs
from tests.programs import PROGRAMS, in_turn
from tests.report_checks import check_report, types_of_jax, types_of_ours

P = jax.checkpoint_policies
POLICIES = {
    "nothing_saveable": P.nothing_saveable,
    "everything_saveable": P.everything_saveable,
    "dots_saveable": P.dots_saveable,
    "dots_with_no_batch_dims_saveable": P.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": P.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_anything_except_these_names()": P.save_anything_except_these_names(),
    "save_any_names_but_these()": P.save_any_names_but_these(),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_written_is_what_jax_lists(program, remat3):
    fun, args = PROGRAMS[program]
    assert types_of_ours(rm.trace(fun, *args).report()) == types_of_jax(fun, args)


@pytest.mark.parametrize(("program", "policy"), in_turn(POLICIES))
def test_whole_function_under_a_policy(program, policy, remat3):
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    try:
        expected = types_of_jax(jax.checkpoint(fun, policy=POLICIES[policy]), args)
    except TypeError as error:  # JAX puts reduce_precision, which takes no complex numbers, on what it saves
        assert "reduce_precision" in str(error)
        with pytest.raises(rm.RematError, match="a complex value .* as complex_numbers would"):
            trace.report(policy, at="function")
        return
    report = trace.report(policy, at="function")
    assert types_of_ours(report) == expected
    # The policy object says the same as its key.
    assert types_of_ours(trace.report(POLICIES[policy], at="function")) == expected


@pytest.mark.parametrize(
    ("program", "policy"), in_turn(["as_written", "none", "nothing_saveable", "everything_saveable", *POLICIES])
)
def test_the_parts_of_a_report_agree(program, policy, remat3):
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    try:
        report = trace.report(policy, at="function")
    except rm.RematError as error:  # reduce_precision of complex numbers, as above
        assert program == "complex_numbers", error
        return
    check_report(report, trace, policy, "function", programs.__file__)


def test_residuals_are_marked_where_they_enter_a_body(remat3):
    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: (jax.numpy.sin(w @ x), None))
        return jax.lax.scan(layer, x, ws)[0].sum()

    shapes = jax.ShapeDtypeStruct((8, 4, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")
    report = rm.trace(loss, *shapes).report()
    again = [line for line in report.backward.lines if line.primitive == "dot_general" and line.recomputation]
    # The matmul that the body of the scan repeats reads its slice of ws and the saved x: both are residuals.
    number = again[0].equation
    marked = {row for line in report.backward.lines if line.equation == number for _, row in line.residuals}
    assert marked == {0, 1}
    ahead = [line for line in report.forward.lines if line.primitive == "sin"]
    assert not ahead[0].residuals  # the new carry: kept by the next iteration, not by this one
