"""The residuals are JAX's own: the same multiset of types as its list, for every program, policy and place."""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from jax._src.ad_checkpoint import saved_residuals

import remat_magic as rm
from tests.programs import EACH_PROGRAM, PROGRAMS, in_turn

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


def types_of_jax(fun, args) -> Counter[str]:
    listed = saved_residuals(fun, *args)
    return Counter(aval.str_short(short_dtypes=True) for aval, source in listed if source != "from a literal")


def types_of_ours(report: rm.Report) -> Counter[str]:
    found: Counter[str] = Counter()
    for residual in report.residuals:
        if residual.kind != "literal":
            space = f"<{residual.memory_space}>" if residual.memory_space else ""
            found[f"{residual.dtype}{space}[{','.join(map(str, residual.shape))}]"] += 1
    return found


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
        with pytest.raises(rm.RematError, match="JAX cannot trace complex_numbers under .*reduce_precision"):
            trace.report(policy, at="function")
        return
    report = trace.report(policy, at="function")
    assert types_of_ours(report) == expected
    # The policy object says the same as its key.
    assert types_of_ours(trace.report(POLICIES[policy], at="function")) == expected


@pytest.mark.parametrize("program", EACH_PROGRAM)
def test_forward_residuals_are_the_backwards_inputs(program, remat3):
    """The halves fit: what the one returns last the other takes first, and then the cotangents of the outputs."""
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    outputs = jax.tree.leaves(jax.eval_shape(fun, *args))
    cotangents = [leaf for leaf in outputs if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)]
    for policy in ("as_written", "nothing_saveable", "save_any_names_but_these()"):
        forward, backward = trace.forward(policy, "function"), trace.backward(policy, "function")
        saved = [(aval.shape, aval.dtype) for aval in forward.out_avals[len(outputs) :]]
        taken = [(aval.shape, aval.dtype) for aval in backward.in_avals]
        assert taken == saved + [(leaf.shape, leaf.dtype) for leaf in cotangents]


@pytest.mark.parametrize("program", EACH_PROGRAM)
def test_program_text_is_jax_own(program, remat3):
    """The lines that we annotate are JAX's pretty print, byte for byte."""
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    report = trace.report("nothing_saveable", "function")
    for half, closed in (
        (report.forward, trace.forward("nothing_saveable", "function")),
        (report.backward, trace.backward("nothing_saveable", "function")),
    ):
        assert half.text == closed.pretty_print(use_color=False)


@pytest.mark.parametrize(("program", "policy"), in_turn(["none", "nothing_saveable", "everything_saveable"]))
def test_residuals_are_marked_in_both_programs(program, policy, remat3):
    """What leaves the one half and enters the other is marked there, as many variables as there are values."""
    fun, args = PROGRAMS[program]
    try:
        report = rm.trace(fun, *args).report(policy, at="function")
    except rm.RematError as error:  # reduce_precision of complex numbers, as above
        assert "reduce_precision" in str(error)
        return
    values = {row for row, residual in enumerate(report.residuals) if residual.kind != "literal"}
    for half in (report.forward, report.backward):
        assert {row for line in half.lines for _, row in line.residuals} == values


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
