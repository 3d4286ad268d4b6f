"""JAX set up otherwise than by default: what is inspected stays right, or one sentence says what to change."""

from __future__ import annotations

import concurrent.futures
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from tests.programs import PROGRAMS, f32
from tests.report_checks import types_of_jax, types_of_ours


def loss(w, x):
    layer = jax.checkpoint(lambda x: checkpoint_name(jnp.tanh(w @ x), "h"))
    return jnp.sin(layer(layer(x))).sum()


def residual_types(trace):
    return [row.type for row in trace.report("dots_saveable").residuals]


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


SETTINGS = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_traceback_filtering": "off",
    "jax_transfer_guard": "disallow",
    "jax_log_compiles": False,
    "jax_threefry_partitionable": False,
    "jax_debug_key_reuse": True,
    "jax_softmax_custom_jvp": False,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_changes_nothing_that_is_shown(name, remat3):
    if name == "jax_check_tracer_leaks" and remat3:
        pytest.skip("jax_remat3 itself leaks a tracer in a checkpoint with a policy (jax 0.12.0.1)")
    usual = residual_types(rm.trace(loss, f32(4, 4), f32(4)))
    try:
        context = setting(name, SETTINGS[name])
        context.__enter__()
    except AttributeError:
        pytest.skip(f"this JAX has no {name}")
    try:
        trace = rm.trace(loss, f32(4, 4), f32(4))
        assert residual_types(trace) == usual
        for policy in ("as_written", "none", "nothing_saveable", "save_only_these_names('h')"):
            report = trace.report(policy)
            assert report.complete
            assert not report.backward_error
        assert trace.report("none", "function").peak_bytes
    finally:
        context.__exit__(None, None, None)
    # Traced under one setting, reported under another.
    assert trace.report("everything_saveable").complete


def test_a_tracer_leak_of_ones_own_is_still_found(remat3):
    leaked = []

    def leaks(x):
        leaked.append(x)
        return jnp.sin(x).sum()

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        rm.trace(leaks, f32(4))
    leaked.clear()


@pytest.mark.parametrize("program", ["custom_vjp", pytest.param("nested_checkpoint", marks=pytest.mark.slow)])
def test_nothing_of_ours_leaks(program, remat3):
    """JAX's own check for tracers that outlive their trace, which ours must not hold on to."""
    fun, args = PROGRAMS[program]
    with jax.checking_leaks():
        trace = rm.trace(fun, *args)
        for policy in ("as_written", "nothing_saveable"):
            assert trace.report(policy, "function").complete
        values = jax.tree.map(lambda shape: jnp.ones(shape.shape, shape.dtype), args)
        applied = trace.function("nothing_saveable", "function")
        jax.grad(lambda *args: jnp.sum(applied(*args)))(*values)


def test_a_trace_keeps_the_64_bits_that_it_was_made_under(remat3):
    with jax.enable_x64(True):
        shapes = jax.ShapeDtypeStruct((4, 4), jnp.float64), jax.ShapeDtypeStruct((4,), jnp.float64)
        trace = rm.trace(loss, *shapes)
        assert types_of_ours(trace.report(at="function")) == types_of_jax(loss, shapes)
    # The trace keeps what it was made under.
    assert {row.dtype for row in trace.report("nothing_saveable", "function").residuals} == {"f64"}
    with jax.enable_x64(True):
        w, x = jnp.eye(4), jnp.ones(4)
        assert trace.function("nothing_saveable")(w, x).dtype == jnp.float64
    assert trace.function("nothing_saveable")(jnp.eye(4, dtype="f"), jnp.ones(4, "f")).dtype == jnp.float32


def test_python_floats_under_64_bits_are_differentiated(remat3):
    with jax.enable_x64(True):
        report = rm.trace(lambda x, y: jnp.sin(x) * y, 1.5, np.float32(2)).report()
    assert report.wrt == ("x", "y")


@pytest.mark.slow
def test_without_jit_the_report_is_of_the_unrolled_program(remat3):
    """``jax.disable_jit`` unrolls what it can: the report is of that program, as JAX's own list is."""

    def scanned(ws, x):
        return jax.lax.scan(lambda c, w: (jnp.sin(w @ c), None), x, ws)[0].sum()

    for fun, shapes in ((loss, (f32(4, 4), f32(4))), (scanned, (f32(3, 4, 4), f32(4)))):
        with jax.disable_jit():
            trace = rm.trace(fun, *shapes)
            assert types_of_ours(trace.report(at="function")) == types_of_jax(fun, shapes)
            assert trace.report("nothing_saveable", "function").complete
            values = [jnp.ones(shape.shape) for shape in shapes]
            found = jax.grad(trace.function("nothing_saveable", "function"))(*values)
        np.testing.assert_allclose(found, jax.grad(fun)(*values), rtol=1e-5)


def test_the_mesh_of_the_context_holds_for_the_trace_afterwards(remat3):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def constrained(w, x):
        return loss(w, jax.lax.with_sharding_constraint(x, spec))

    with jax.set_mesh(mesh):
        trace = rm.trace(constrained, f32(4, 4), f32(4))
    # Outside the block, and in another thread, the trace's own mesh still holds.
    assert trace.report("nothing_saveable", "function").complete
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(trace.report, "everything_saveable", "function").result().complete


def test_a_trace_can_be_made_while_jax_traces(remat3):
    """A trace made while JAX is tracing: of types, and of a function that closes over tracers."""
    seen = []

    @jax.jit
    def outer(w, x):
        inner = rm.trace(lambda x: jnp.sin(w @ x).sum(), f32(4))
        seen.append(inner.report("nothing_saveable", "function"))
        return jax.grad(inner.function("nothing_saveable"))(x)

    w, x = jnp.eye(4), jnp.arange(4.0)
    np.testing.assert_allclose(outer(w, x), jax.grad(lambda x: jnp.sin(w @ x).sum())(x), rtol=1e-6)
    assert seen[0].complete
    assert seen[0].residuals


def test_tracers_can_be_the_arguments(remat3):
    @jax.grad
    def outer(x):
        report = rm.trace(lambda x: jnp.sin(x).sum(), x).report()
        assert report.residuals
        return jnp.sin(x).sum()

    assert outer(jnp.ones(3)).shape == (3,)

    def scanned(c, x):
        assert rm.trace(lambda x: jnp.sin(x).sum(), x).report().complete
        return c, None

    jax.lax.scan(scanned, 0.0, jnp.ones((3, 2)))


def test_arguments_may_be_deleted_or_donated(remat3):
    """Only the types of arrays matter: their buffers may be gone."""
    x = jnp.ones(4)
    trace = rm.trace(lambda x: jnp.sin(x).sum(), x)
    x.delete()
    assert trace.report("nothing_saveable", "function").complete
    gone = jnp.ones(4)
    gone.delete()
    assert rm.trace(lambda x: jnp.sin(x).sum(), gone).report().complete
    donating = jax.jit(lambda w, x: jnp.sin(w @ x).sum(), donate_argnums=1)
    assert rm.trace(donating, f32(4, 4), f32(4)).report().residuals


def test_a_trace_outlives_jaxs_caches(remat3):
    trace = rm.trace(loss, f32(4, 4), f32(4))
    before = residual_types(trace)
    jax.clear_caches()
    assert residual_types(trace) == before
    assert trace.report("nothing_saveable", "function").complete


def test_a_function_that_changes_jax_settings(remat3):
    def fun(x):
        with jax.default_matmul_precision("highest"), jax.named_scope("in"):
            return (x @ x).sum()

    assert rm.trace(fun, f32(3, 3)).report("dots_saveable").residuals
