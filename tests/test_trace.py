"""The public surface of a trace: arguments, wrt, sites, names, functions, and that Python runs exactly once."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import remat_magic as rm
from tests.benchmarks.models import transformer
from tests.programs import CHECKPOINTED, PROGRAMS, f32, in_turn

POLICIES = ("as_written", "none", "nothing_saveable", "everything_saveable", "dots_saveable")


def arguments(report):
    return [r.argument for r in report.residuals if r.kind == "argument"]


def test_python_runs_exactly_once(remat3):
    runs = []

    def inner(x):
        runs.append("inner")
        return jnp.sin(x)

    def fun(x):
        runs.append("fun")
        return jax.jit(inner)(x).sum()

    trace = rm.trace(fun, f32(3))
    for policy in POLICIES:
        trace.report(policy)
        trace.forward(policy)
        trace.backward(policy)
    assert runs == ["fun", "inner"]
    rm.trace(fun, f32(3)).report()
    assert runs == ["fun", "inner"] * 2  # afresh, at every depth


def test_nothing_is_executed_or_allocated():
    """70 billion parameters, as shapes: any allocation would end the process."""

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) @ w.T)

    w, x = jax.ShapeDtypeStruct((200_000, 350_000), jnp.bfloat16), jax.ShapeDtypeStruct((64, 200_000), jnp.bfloat16)
    report = rm.trace(loss, w, x).report("nothing_saveable")
    assert report.argument_bytes >= 2 * 200_000 * 350_000
    ran = []

    def impure(x):
        jax.debug.callback(lambda: ran.append(1))
        return jnp.sin(x).sum()

    rm.trace(impure, jnp.ones(3)).report("none")
    assert not ran


def test_static_values_stay_python_values(remat3):
    def fun(x, n, flag, mode, f, module, nothing, *, scale):
        assert isinstance(n, int)
        assert isinstance(flag, bool)
        for _ in range(n):
            x = f(x)
        if flag and mode == "sum" and nothing is None and module is math:
            x = x * module.pi * scale
        return x.sum()

    report = rm.trace(fun, f32(3), 2, True, "sum", jnp.sin, math, None, scale=2.0).report()
    # cos twice; the scale is a float, so it is differentiated, and then sin's value is read by its derivative.
    assert [r.primitive for r in report.residuals if r.kind == "intermediate"].count("cos") == 2
    assert report.wrt == ("x", "scale")


def test_arguments_of_every_kind_are_named_and_floats_are_differentiated(remat3):
    def fun(params, key, count, x):
        noise = jax.random.normal(key, x.shape)
        return jnp.sum(jnp.sin(params["dense"]["w"] * x + noise) * count)

    report = rm.trace(
        fun, {"dense": {"w": np.ones((3, 4), np.float32)}}, jax.random.key(0), jnp.int32(3), x=f32(3, 4)
    ).report()
    assert report.wrt == ("params", "x")
    names = arguments(report)
    assert "params['dense']['w']" in names
    assert "x" in names
    whole = rm.trace(fun, {"dense": {"w": f32(3, 4)}}, jax.random.key(0), jnp.int32(3), f32(3, 4))
    kept = whole.report("nothing_saveable")
    assert ("key<fry>", "key") in [(r.dtype, r.argument) for r in kept.residuals]  # needed to draw the noise again


@pytest.mark.parametrize(("wrt", "expected"), [(0, ("a",)), (-1, ("b",)), ("b", ("b",)), ((0, "b"), ("a", "b"))])
def test_wrt_chooses_what_is_differentiated(wrt, expected, remat3):
    trace = rm.trace(lambda a, b: jnp.sum(a * b), f32(3), f32(3), wrt=wrt)
    assert trace.wrt == expected
    gradients = trace.backward().out_avals
    assert len(gradients) == len(expected)


def test_wrt_picks_leaves():
    trace = rm.trace(lambda p: jnp.sum(p["a"] * p["b"]), {"a": f32(3), "b": f32(3)}, wrt="p['a']")
    assert trace.wrt == ("p['a']",)
    assert arguments(trace.report()) == ["p['b']"]  # d/da of a*b reads b alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Settings:
    """As configs are: a class of the user's that is a pytree of Python numbers."""

    rate: float
    layers: int
    scale: object = 1.0


def test_numbers_in_objects_are_settings_unless_asked_for():
    def loss(w, settings):
        return jnp.sum(w * settings.rate * (0.5 if settings.scale == 1.0 else settings.scale))

    w = f32(3)
    trace = rm.trace(loss, w, Settings(0.1, 2))
    assert trace.wrt == ("w",)
    assert [leaf.value for leaf in trace.engine.primal.signature.leaves if not leaf.is_array] == [0.1, 2, 1.0]
    assert rm.trace(loss, w, Settings(0.1, 2), wrt="settings.rate").wrt == ("settings.rate",)
    both = rm.trace(lambda w, s: jnp.sum(w * s.rate * s.scale), w, Settings(0.1, 2), wrt=(0, 1))  # as jax.grad would
    assert both.wrt == ("w", "s")
    assert rm.trace(lambda s: jnp.sin(s.rate) * s.scale, Settings(0.1, 2)).wrt == ("s",)  # there is nothing else
    arrays = rm.trace(lambda w, s: jnp.sum(w * s.rate * s.scale), w, Settings(0.1, 2, scale=f32(3)))
    assert arrays.wrt == ("w", "s")
    again = arrays.engine.retraced(arrays.engine.given.fun)
    assert again.primal.signature.wrt == arrays.wrt
    assert len(again.primal.signature.arrays) == 2


def test_a_number_that_is_needed_as_a_number_stays_one_and_it_is_said():
    def loss(w, rates, depth=2.0):
        for _ in range(int(depth)):
            w = jnp.sin(w) * rates["rate"] if rates["rate"] > 0.2 else w
        return jnp.sum(w)

    trace = rm.trace(loss, f32(3), {"rate": 0.5}, depth=3.0)
    assert trace.wrt == ("w",)
    (note,) = trace.report().notes
    assert note.startswith(
        "rates['rate'], depth are Python numbers that the function needs as such, and not differentiated:"
    )
    assert jnp.isfinite(trace.function("nothing_saveable")(jnp.ones(3), {"rate": 0.5}, depth=3.0))
    jitted = jax.jit(lambda x, rate: x * rate, static_argnames="rate")
    assert rm.trace(jitted, f32(3), rate=0.5).report().notes[0].startswith("rate is a Python number that")
    for wrt in (("rates",), ("w", "rates['rate']")):  # as jax.grad would raise
        with pytest.raises(jax.errors.TracerBoolConversionError):
            rm.trace(loss, f32(3), {"rate": 0.5}, depth=3.0, wrt=wrt)
    of_numpy = rm.trace(
        lambda w, n, rate: w.reshape(n, -1) * (rate if rate > 0.2 else 1), f32(6), np.int64(3), np.float64(0.5)
    )
    assert of_numpy.wrt == ("w",)
    assert of_numpy.report().notes[0].startswith("n, rate are Python numbers that")
    assert of_numpy.function("nothing_saveable")(jnp.ones(6), np.int64(3), np.float64(0.5)).shape == (3, 2)
    ran = []
    with pytest.raises(KeyError, match="own"):
        rm.trace(lambda w, rate: ran.append(rate) or {}["own"], f32(3), 0.5)
    assert ran[1] == 0.5


def test_floats_are_differentiated_unless_wrt_says_otherwise():
    def fun(x, y):
        return x * (y if isinstance(y, float) and y > 1 else jnp.sin(y))

    assert rm.trace(fun, f32(), 2.0, wrt=0).wrt == ("x",)  # y is a Python value: control flow on it works
    assert rm.trace(lambda x, y: x * y, f32(), 2.0).wrt == ("x", "y")


def test_has_aux(remat3):
    def fun(x):
        y = jnp.sin(x)
        return y.sum(), {"y": y, "steps": 3}

    trace = rm.trace(fun, f32(4), has_aux=True)
    assert len(trace.report("nothing_saveable").residuals) == 1
    assert [str(aval) for aval in trace.backward().in_avals][-1] == "float32[]"  # no cotangent for auxiliary data
    with pytest.raises(rm.RematError, match=r"has_aux=True needs <lambda> to return a pair"):
        rm.trace(lambda x: x.sum(), f32(3), has_aux=True)


def test_sites_with_policies_of_their_own(remat3):
    policy = jax.checkpoint_policies.save_only_these_names("h")

    @functools.partial(jax.checkpoint, policy=policy)
    def block(w, x):
        return jnp.sin(checkpoint_name(w @ x, "h"))

    @jax.checkpoint
    def head(w, x):
        return jnp.cos(w @ x)

    def net(w, x):
        for _ in range(3):
            x = block(w, x)
        return head(w, x).sum()

    trace = rm.trace(net, f32(4, 4), f32(4))
    assert [(s.key, s.times, s.policy) for s in trace.engine.primal.table.sites] == [
        ("block", 3, "save_only_these_names('h')"),
        ("head", 1, "nothing_saveable"),
    ]
    assert all(s.source.line > 0 and s.source.file == __file__ for s in trace.engine.primal.table.sites)
    assert trace.default_at == "sites"
    as_written = trace.report()
    assert [r.name for r in as_written.residuals].count("h") == 3
    one = trace.report("everything_saveable", at="head")
    assert [r.name for r in one.residuals].count("h") == 3  # block keeps its own
    assert one.saved_bytes > as_written.saved_bytes
    mapped = trace.report(at={"block": "nothing_saveable", "head": "everything_saveable"})
    assert mapped.at == "block=nothing_saveable, head=everything_saveable"
    assert not [r for r in mapped.residuals if r.name == "h"]
    none = trace.report("none")
    assert none.at == "sites"
    assert not none.recomputed
    # "none" at one site leaves the other as written.
    assert trace.report("none", at="head").recomputed


def test_own_decorator_is_replaced_not_wrapped(remat3):
    fun = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(w @ x)).sum(), policy=jax.checkpoint_policies.dots_saveable)
    trace = rm.trace(fun, f32(4, 4), f32(4))
    assert trace.default_at == "function"
    plain = rm.trace(lambda w, x: jnp.sin(jnp.sin(w @ x)).sum(), f32(4, 4), f32(4))
    for policy in POLICIES[1:]:
        assert [r.type for r in trace.report(policy).residuals] == [
            r.type for r in plain.report(policy, "function").residuals
        ]


@pytest.mark.parametrize(("program", "policy"), in_turn(POLICIES))
def test_function_computes_the_same(program, policy, remat3):
    """Value and gradient of the function with a policy, under jit, equal those of the original."""
    fun, shapes = PROGRAMS[program]
    key = jax.random.key(1)

    def value(shape):
        if jnp.issubdtype(shape.dtype, jnp.inexact):
            return jax.random.uniform(key, shape.shape, minval=0.5).astype(shape.dtype)
        return jnp.zeros(shape.shape, shape.dtype)

    values = jax.tree.map(value, shapes)
    trace = rm.trace(fun, *shapes)

    def total(fun):
        def scalar(first):
            leaves = jax.tree.leaves(fun(first, *values[1:]))
            return sum(jnp.sum(jnp.abs(leaf)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))

        return jax.jit(jax.value_and_grad(scalar))(values[0])

    try:
        found = total(trace.function(policy, "function"))
    except TypeError as error:
        assert "reduce_precision" in str(error)  # JAX's own: what it saves must not be complex
        return
    except rm.RematError as error:
        assert "a complex value" in str(error)
        return
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(total(fun)), strict=True):
        loose = mine.dtype == jnp.bfloat16 or program == "mixed_precision"  # rounded where it is saved
        np.testing.assert_allclose(
            np.asarray(mine, np.complex64), np.asarray(theirs, np.complex64), rtol=2e-2 if loose else 1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_the_function_with_a_policy_can_be_transformed(remat3):
    def fun(w, x):
        return jnp.sin(w @ x).sum() * 2

    trace = rm.trace(fun, f32(4, 4), f32(4))
    applied = trace.function("dots_saveable")
    w, xs = jnp.eye(3), jnp.arange(6.0).reshape(2, 3)  # other shapes than the traced ones
    assert jax.vmap(applied, (None, 0))(w, xs).shape == (2,)
    np.testing.assert_allclose(jax.jit(applied)(w, xs[0]), fun(w, xs[0]), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jvp(applied, (w, xs[0]), (w, xs[0]))[1], jax.jvp(fun, (w, xs[0]), (w, xs[0]))[1], rtol=1e-5
    )
    np.testing.assert_allclose(jax.hessian(applied, 1)(w, xs[0]), jax.hessian(fun, 1)(w, xs[0]), atol=1e-5)

    # Closed over a tracer, in a scan.
    def step(c, x):
        return c + jax.grad(lambda w: applied(w, x * c))(w).sum(), None

    assert jnp.isfinite(jax.lax.scan(step, jnp.float32(1), xs)[0])
    assert applied.__name__ == "fun"
    jaxpr = str(jax.make_jaxpr(applied)(w, xs[0]))
    assert "checkpoint" in jaxpr or "remat" in jaxpr.lower()


def _call(name):
    fun, args = PROGRAMS[name]
    return fun, *args


def test_a_forward_half_without_a_backward_one(remat3):
    def fun(x):
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()

    report = rm.trace(fun, f32(3)).report()
    assert "cannot differentiate a while_loop" in report.backward_error
    assert report.forward.lines
    assert not report.backward.lines


def test_a_preview_has_the_rows_of_the_report_without_their_readers(remat3):
    trace = rm.trace(*_call("attention"))
    first = trace.preview("dots_saveable")
    assert not first.complete
    full = trace.report("dots_saveable")
    strip = [dataclasses.replace(r, needed_by=()) for r in full.residuals]
    assert list(first.residuals) == strip  # the same rows, before their readers are known
    assert trace.preview("dots_saveable") is full


def test_seen_policies_are_not_traced_again(remat3):
    trace = rm.trace(*_call("attention"))
    once = trace.report(jax.checkpoint_policies.save_only_these_names("context"))
    assert trace.report("save_only_these_names('context')") is once  # JAX's factory makes another closure each time
    assert trace.report("names(save=['con*'])") is once


ERRORS = {
    "no inexact output": (lambda: rm.trace(lambda x: x.astype(int), f32(3)), "it returns i32[3], and only floating"),
    "no arrays": (lambda: rm.trace(lambda n: n, 3), "no argument of <lambda> can be differentiated (n is int)"),
    "no arguments": (lambda: rm.trace(lambda: 1.0), "called without arguments"),
    "an int": (lambda: rm.trace(lambda x, n: x * n, f32(3), 2, wrt="n"), "'n' cannot be differentiated: it is int"),
    "no such number": (lambda: rm.trace(lambda x: x, f32(3), wrt=3), "was given 1 positional argument."),
    "no such name": (lambda: rm.trace(lambda x: x, f32(3), wrt="y"), "'y' is not an argument of this call"),
    "not an array": (lambda: rm.trace(lambda x: "a", f32(3)), "returns a str, which is not an array"),
    "not a function": (lambda: rm.trace(3, f32(3)), "trace needs a function, not int"),
    "effects": (
        lambda: rm.trace(_impure, f32(3)).report("nothing_saveable"),
        "side effects that jax.checkpoint forbids",
    ),
    "unknown policy": (lambda: _sin().report("dot_saveable"), "did you mean 'dots_saveable'?"),
    "uncalled factory": (
        lambda: _sin().report(jax.checkpoint_policies.save_only_these_names),
        "save_only_these_names is a factory: call it, as in save_only_these_names('h').",
    ),
    "uncalled factory by name": (lambda: _sin().report("save_only_these_names"), "is a factory: call it"),
    "unknown name": (
        lambda: rm.trace(*_call("named_layers")).report("save_only_these_names('c')"),
        "'c' is not a checkpoint name of named_layers; it has 'a', 'b'.",
    ),
    "no site": (lambda: _sin().report("none", at="block"), "has no checkpoint site 'block'"),
    "other site": (
        lambda: rm.trace(*_call("scanned_checkpoint")).report("none", at="layr"),
        "did you mean 'layer'?",
    ),
    "no site like it": (
        lambda: rm.trace(*_call("scanned_checkpoint")).report("none", at="decoder"),
        "has no checkpoint site 'decoder': its places are 'function', 'layer'.",
    ),
    "raising policy": (lambda: _dots().report(lambda *a, **k: 1 / 0), "raised ZeroDivisionError when asked about"),
    "nonsense policy": (lambda: _dots().report(lambda *a, **k: "yes"), "returned 'yes' for dot_general"),
    "own factory": (lambda: _dots().report(lambda *a, **k: print), "it is a factory, so call it and pass its result"),
    "no hash": (lambda: rm.trace(jax.jit(_Layer(jnp.ones((3, 3)))), f32(3)), "holds arrays and has no hash ('_Layer')"),
    "no hash, static": (
        lambda: rm.trace(jax.jit(_Layer.__call__, static_argnums=0), _Layer(jnp.ones((3, 3))), f32(3)),
        "pass it as an argument that is not static",
    ),
    "no hash, inside": (lambda: rm.trace(lambda x: jax.checkpoint(_Layer(x))(x), f32(3)), "or the like called from "),
    "not a policy": (lambda: _sin().report(3), "not int: 3"),
    "a name that is no string": (
        lambda: rm.trace(lambda x: checkpoint_name(jnp.sin(x), 7).sum(), f32(3)).report(),
        "checkpoint_name takes a string, not int: 7.",
    ),
    "a loss that is no scalar": (lambda: rm.trace(jax.grad(jnp.sin), f32(3)), "only defined for scalar-output"),
    "an integer loss": (lambda: rm.trace(jax.grad(lambda x: (x > 0).sum()), f32(3)), "grad requires real"),
    "a rule that is not given": (
        lambda: rm.trace(lambda x: jax.custom_vjp(jnp.sin)(x).sum(), f32(3)).report(),
        "No VJP defined for custom_vjp",
    ),
    "how a callback is mapped": (
        lambda: rm.trace(jax.vmap(lambda x: jax.pure_callback(np.sin, x, x)), f32(3)),
        "vmap_method is one of",
    ),
    "a kernel of a grid": (
        lambda: rm.trace(lambda x: pl.pallas_call(_of_a_grid, out_shape=x, grid=3, interpret=True)(x), f32(3)).report(),
        "JAX cannot differentiate the operation at test_trace.py:",
    ),
}


@dataclasses.dataclass
class _Layer:
    w: jax.Array

    def __call__(self, x):
        return jnp.sin(self.w @ x).sum()


def _of_a_grid(read, written):
    written[...] = read[...] * pl.program_id(0)


def _impure(x):
    io_callback(lambda: None, None, ordered=True)
    return jnp.sin(x).sum()


def _sin():
    return rm.trace(lambda x: jnp.sin(x).sum(), f32(3))


def _dots():
    return rm.trace(lambda w, x: jnp.sin(w @ x).sum(), f32(3, 3), f32(3))


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_sentence(case, remat3):
    work, expected = ERRORS[case]
    with pytest.raises(rm.RematError) as raised:
        work()
    text = str(raised.value)
    assert expected in text
    assert "\n" not in text
    assert re.search(r"[.?]$", text)


def _looping(x):
    return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x))


def _calling_back(x):
    return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")


def _without_rule(x):
    return jax.lax.igamma_grad_a(x, x)


@pytest.mark.parametrize("around", ["itself", "jit", "checkpoint", "scan", "vmap", "step"])
@pytest.mark.parametrize(
    ("inner", "kind"),
    [(_looping, "a while_loop"), (_calling_back, "a pure_callback"), (_without_rule, "'igamma_grad_a'")],
)
def test_what_jax_cannot_differentiate_is_named_with_its_line(inner, kind, around, remat3):
    """Wherever it stands, and also where the gradient is taken by the function itself."""
    outer = {
        "jit": lambda x: jax.jit(inner)(x).sum(),
        "checkpoint": lambda x: jax.checkpoint(inner)(x).sum(),
        "scan": lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0].sum(),
        "vmap": lambda x: jax.vmap(lambda row: inner(row[None])[0])(x).sum(),
        "step": lambda x: x - jax.jit(jax.value_and_grad(lambda x: inner(x).sum()))(x)[1],
    }.get(around, lambda x: inner(x).sum())
    with pytest.raises(rm.RematError) as raised:
        rm.trace(outer, f32(3)).backward("none", "function")
    assert f" at test_trace.py:{inner.__code__.co_firstlineno + 1}" in str(raised.value)
    assert kind in str(raised.value)


def _one_by_one(x):
    return jax.vmap(lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"))(x)


@jax.custom_vjp
def _ruled(x):
    return jnp.sin(x)


_ruled.defvjp(lambda x: (_ruled(x), x), lambda x, g: (g * jnp.cos(x),))


def _forward_mode(x):
    return jax.jacfwd(_ruled)(x)


def _kernel(x):
    def body(read, written):
        written[...] = jnp.sin(read[...])

    return pl.pallas_call(body, out_shape=x, interpret=True)(x)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(
    ("inner", "said", "line"),
    [
        (_one_by_one, "a pure_callback called from", 1),
        (_forward_mode, "make it a jax.custom_jvp", 1),
        (_kernel, "cannot be differentiated: Linearization failed", 4),
    ],
)
def test_what_has_no_line_of_its_own_is_told_with_the_users_call(inner, said, line, in_step, remat3):
    """Of a library's loop, of a callback under vmap, and of what JAX knows no rule of in this mode."""
    step = lambda x: x - jax.grad(lambda x: inner(x).sum())(x)  # noqa: E731
    with pytest.raises(rm.RematError) as raised:
        rm.trace(step if in_step else lambda x: inner(x).sum(), f32(3)).backward("none", "function")
    assert said in str(raised.value)
    assert f"test_trace.py:{inner.__code__.co_firstlineno + line}" in str(raised.value)


def test_the_users_own_exception_passes_through():
    def fun(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rm.trace(fun, f32(3))

    def asserts(x):
        assert x.ndim == 2

    with pytest.raises(AssertionError):
        rm.trace(asserts, f32(3))


def test_stale_traces_are_named_at_any_depth():
    scope = {"jnp": jnp, "jax": jax}
    exec("def helper(x):\n    return jnp.sin(x)", scope)
    exec("@jax.jit\ndef middle(x):\n    return helper(x)", scope)
    exec("def outer(x):\n    return middle(x).sum()", scope)
    jax.make_jaxpr(scope["outer"])(jnp.ones(3))
    assert rm.trace(scope["outer"], f32(3)).stale == ()
    exec("def helper(x):\n    return jnp.cos(jnp.sin(x))", scope)
    trace = rm.trace(scope["outer"], f32(3))
    assert set(trace.stale) == {"middle", "outer"}
    assert len(trace.report().residuals) == 2  # the new definition: a cos and a -sin
    before = str(jax.make_jaxpr(scope["outer"])(jnp.ones(3)))
    assert before.count("= cos") == 0  # the user's caches are untouched: JAX still has the old one


def test_errors_of_tracing_name_the_function_and_argument_of_the_user():
    def branches(params, *, scale, x):
        return params["w"] * scale if x > 0 else x

    arguments = {"w": f32(), "b": f32()}
    with pytest.raises(jax.errors.TracerBoolConversionError) as ours:
        rm.trace(branches, arguments, scale=2, x=f32())
    with pytest.raises(jax.errors.TracerBoolConversionError) as jax_own:
        jax.eval_shape(functools.partial(branches, scale=2), arguments, x=f32())
    assert "depends on the value of the argument x." in str(ours.value)
    assert str(ours.value).split("argument")[-1] == str(jax_own.value).split("argument")[-1]
    assert f"the function branches at {__file__}" in str(ours.value)

    def of_a_leaf(params):
        return params["w"] if params["b"] > 0 else params["b"]

    with pytest.raises(jax.errors.TracerBoolConversionError, match=re.escape("the argument params['b'].")):
        rm.trace(of_a_leaf, arguments)


def test_a_model_goes_by_its_class():
    class Net:
        def __call__(self, x):
            return x * x

    assert rm.trace(Net(), f32()).signature == "Net(x f32[]) -> f32[]"
    assert rm.trace(Net.__call__, Net(), f32(), wrt="x").signature.startswith("Net(")


def test_settings_of_a_with_block_hold_in_every_thread():
    """A rule is Python: it reads the precision whenever it is differentiated, which another thread may do."""

    @jax.custom_jvp
    def product(w, x):
        return w @ x

    @product.defjvp
    def product_jvp(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return w @ x, dw @ x + w @ dx

    def loss(w, x):
        return jnp.sum(jnp.sin(product(w, x)))

    with jax.default_matmul_precision("highest"):
        trace = rm.trace(loss, f32(4, 4), f32(4))
        expected = rm.trace(loss, f32(4, 4), f32(4)).report("dots_saveable").backward.text
    found = []
    thread = threading.Thread(target=lambda: found.append(trace.report("dots_saveable").backward.text))
    thread.start()
    thread.join()
    assert "HIGHEST" in expected
    assert found == [expected]


@pytest.mark.parametrize("site", [False, True])
def test_an_operation_has_one_number_in_every_program(site):
    """What is repeated ran in the forward pass: its number stands there too, at the same expression."""
    fun, args = transformer(2, site=site)
    trace = rm.trace(fun, *args)
    expressions = {}
    for policy in ("nothing_saveable", "dots_saveable"):
        report = trace.report(policy)
        for line in (*report.forward.lines, *report.backward.lines):
            if line.operation is not None:
                expressions.setdefault(line.operation, set()).add(line.source)
        forward = {line.operation for line in report.forward.lines}
        repeated = [line.operation for line in report.backward.lines if line.recomputation == "repeated"]
        assert repeated
        assert set(repeated) <= forward
    assert all(len(found) == 1 for found in expressions.values())


def test_the_programs_that_are_checkpointed_are_known():
    """So that tests of places try these at their sites, and no others in vain."""
    assert {name for name, (fun, args) in PROGRAMS.items() if rm.trace(fun, *args).engine.primal.table.sites} == {
        *CHECKPOINTED
    }


LAYER = "import jax\nimport jax.numpy as jnp\n\n\n@jax.checkpoint\ndef layer(x):\n    return jnp.sin(x)  # {}\n"


def test_the_same_code_in_two_files_is_told_apart(module):
    one, two = (module(LAYER.format(name), name) for name in ("one", "two"))
    assert one.layer.__wrapped__.__code__ == two.layer.__wrapped__.__code__
    trace = rm.trace(lambda x: jnp.sum(one.layer(two.layer(x))), f32(3))
    assert [site.key for site in trace.engine.primal.table.sites] == ["layer:5:two.py", "layer:5:one.py"]
    assert [Path(site.source.file).stem for site in trace.engine.primal.table.sites if site.source] == ["two", "one"]
    report = trace.report("everything_saveable", "sites")
    cosines = [row.source for row in report.residuals if row.primitive == "cos"]
    assert [(Path(span.file).stem, span.text.partition("# ")[2]) for span in cosines if span] in (
        [("two", "two"), ("one", "one")],
        [("one", "one"), ("two", "two")],
    )
    texts = {Path(text.file).stem: text.text.rpartition("# ")[2] for text in report.sources}
    assert (texts["one"], texts["two"]) == ("one", "two")


def test_a_reloaded_module_quotes_its_new_text_and_a_changed_file_the_old_until_then(tmp_path, module, monkeypatch):
    # With autoreload, which another test may have loaded, code that does the same has the new lines at once.
    monkeypatch.delitem(sys.modules, "IPython.extensions.deduperreload.deduperreload", raising=False)

    def quoted():
        trace = rm.trace(lambda x: jnp.sum(changed.layer(x)), f32(3))
        report = trace.report("everything_saveable", "sites")
        (source,) = {row.source for row in report.residuals if row.primitive == "cos"}
        (text,) = [text for text in report.sources if Path(text.file).name == "changed.py"]
        assert source is not None
        assert source.text in text.text.splitlines()
        return source.line, source.text.partition("# ")[2]

    changed = module(LAYER.format("old"), "changed")
    assert quoted() == (7, "old")
    longer = "# a line more\n" + LAYER.format("another text")
    (tmp_path / "changed.py").write_text(longer)
    assert quoted() == (7, "old")  # it was not reloaded
    changed = module(longer, "changed")
    assert quoted() == (8, "another text")
    changed = module(longer.replace("another", "the same code and another"), "changed")
    assert quoted() == (8, "the same code and another text")
