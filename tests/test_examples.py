"""The examples that the product explains, with what JAX does in each (the counts are JAX's own on all versions)."""

from __future__ import annotations

import functools
import types
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from tests.programs import binary_chain, f32

LAYERS = (f32(5, 4), f32(6, 5), f32(7, 6), f32(4))


def layer(w, x):
    return jnp.sin(w @ x)


def three(w1, w2, w3, x):
    return layer(w3, layer(w2, layer(w1, x))).sum()


def kinds(report):
    return Counter(residual.kind for residual in report.residuals)


def saved(report, kind="intermediate"):
    return sorted((r.type, r.primitive) for r in report.residuals if r.kind == kind)


def operations(equations):
    return Counter(equation.primitive for equation in equations)


def test_1_no_checkpoint(remat3):
    report = rm.trace(three, *LAYERS).report()
    assert [r.argument for r in report.residuals if r.kind == "argument"] == ["w1", "w2", "w3", "x"]
    assert saved(report) == [  # each sin saves its cos; the first two sins feed a matmul whose derivative reads them
        ("f32[5]", "cos"),
        ("f32[5]", "sin"),
        ("f32[6]", "cos"),
        ("f32[6]", "sin"),
        ("f32[7]", "cos"),
    ]
    assert not report.recomputed  # nothing is checkpointed


def test_2_checkpoint_on_each_layer(remat3):
    inner = jax.checkpoint(layer)

    def net(w1, w2, w3, x):
        return inner(w3, inner(w2, inner(w1, x))).sum()

    trace = rm.trace(net, *LAYERS)
    assert [(site.key, site.times, site.policy) for site in trace.engine.sites] == [("layer", 3, "nothing_saveable")]
    report = trace.report()
    assert len(report.residuals) == 6
    assert saved(report) == [("f32[5]", "sin"), ("f32[6]", "sin")]  # they are the next layer's inputs
    # Each layer's matmul runs again for the cos of its sin; the sins themselves are not needed again.
    assert operations(report.repeated) == {"dot_general": 3}
    assert operations(report.deferred) == {"cos": 3}


@pytest.mark.parametrize("policy", ["dots_with_no_batch_dims_saveable", "dots_saveable", "checkpoint_dots"])
def test_3_dots(policy, remat3):
    report = rm.trace(three, *LAYERS).report(policy)
    assert saved(report) == [(f"f32[{n}]", "dot_general") for n in (5, 6, 7)]
    assert operations(report.repeated) == {"sin": 2}  # the third sin's value is not needed again
    assert operations(report.deferred) == {"cos": 3}


def test_4_save_by_name(remat3):
    def net(w1, w2, w3, x):
        x = checkpoint_name(layer(w1, x), "a")
        x = checkpoint_name(layer(w2, x), "b")
        return checkpoint_name(layer(w3, x), "c").sum()

    trace = rm.trace(net, *LAYERS)
    assert trace.names == ("a", "b", "c")
    report = trace.report("save_only_these_names('a')")
    assert len(report.residuals) == 5
    assert [(r.type, r.name, r.primitive) for r in report.residuals if r.kind == "intermediate"] == [
        ("f32[5]", "a", "sin")
    ]


def test_5_forward_and_backward_side_by_side(remat3):
    trace = rm.trace(three, *LAYERS)
    report = trace.report("dots_with_no_batch_dims_saveable")
    marked = {line.recomputation for line in report.backward.lines}
    assert marked == {"", "repeated", "deferred"}
    assert [line.text.split("= ")[1].split()[0] for line in report.backward.lines if line.recomputation] == (
        ["sin", "cos", "sin", "cos", "cos"]
    )
    assert {row for line in report.backward.lines for _, row in line.residuals} == set(range(7))
    assert {row for line in report.forward.lines for _, row in line.residuals} == set(range(7))


def test_6_the_two_derivatives_of_sin(remat3):
    trace = rm.trace(lambda x: jnp.sin(x), f32(4))
    now, later = trace.report("everything_saveable"), trace.report("nothing_saveable")
    assert [(r.kind, r.primitive) for r in now.residuals] == [("intermediate", "cos")]
    assert [(r.kind, r.argument) for r in later.residuals] == [("argument", "x")]
    assert sum(r.nbytes for r in now.residuals) == sum(r.nbytes for r in later.residuals)
    assert operations(later.deferred) == {"cos": 1}
    assert not later.repeated


def test_7_what_to_checkpoint_in_a_composition(remat3):
    def g(w1, w2, x):
        return jnp.sin(w2 @ jnp.sin(w1 @ x))

    def h(y):
        return jnp.sin(jnp.sin(jnp.sin(y))).sum()

    def f(w1, w2, x, inner=lambda f: f, outer=lambda f: f):
        return outer(h)(inner(g)(w1, w2, x))

    arguments = (f32(512, 64), f32(512, 512), f32(64))
    plain = rm.trace(f, *arguments).report()
    on_g = rm.trace(functools.partial(f, inner=jax.checkpoint), *arguments).report()
    on_all = rm.trace(f, *arguments).report("nothing_saveable")
    assert on_g.saved_bytes < plain.saved_bytes
    assert on_all.saved_bytes < on_g.saved_bytes  # the shortest list ...
    assert on_all.recomputed_flops > on_g.recomputed_flops  # ... for the most work


PARAMS = [f32(4, 4)] * 3


def predict(params, x, name=lambda x, i: x):
    for i, w in enumerate(params[:-1]):
        x = name(layer(w, x), i)
    return params[-1] @ x


def loss(params, x, y, name=lambda x, i: x):
    return jnp.sum((predict(params, x, name) - y) ** 2)


def test_8_arguments_are_named(remat3):
    report = rm.trace(loss, PARAMS, f32(4), f32(4)).report()
    names = {r.argument for r in report.residuals if r.argument}
    assert {"params[0]", "params[1]", "params[2]", "x"} <= names
    assert len(report.residuals) == 9


def test_9_dots_of_layer_and_predictor(remat3):
    report = rm.trace(loss, PARAMS, f32(4), f32(4)).report("dots_with_no_batch_dims_saveable")
    assert kinds(report) == {"argument": 5, "intermediate": 3}
    assert [r.source.function for r in report.residuals if r.kind == "intermediate"] == ["layer", "layer", "predict"]


def test_10_names_on_saved_values(remat3):
    named = functools.partial(loss, name=lambda x, i: checkpoint_name(x, f"layer{i}_output"))
    report = rm.trace(named, PARAMS, f32(4), f32(4)).report()
    assert [(r.name, r.primitive) for r in report.residuals if r.name] == [
        ("layer0_output", "sin"),
        ("layer1_output", "sin"),
    ]


def test_11_a_redefined_helper_is_not_taken_from_the_cache(remat3):
    module = types.ModuleType("cell")
    module.__dict__.update(jnp=jnp, checkpoint_name=checkpoint_name)
    helper = (
        "def predict(params, x):\n    for i, w in enumerate(params[:-1]):\n        x = {0}\n    return params[-1] @ x\n"
    )
    exec(helper.format("jnp.sin(w @ x)"), module.__dict__)
    exec("def loss(params, x, y):\n    return jnp.sum((predict(params, x) - y) ** 2)", module.__dict__)
    checkpointed = jax.checkpoint(module.loss, policy=jax.checkpoint_policies.save_any_names_but_these("layer1_output"))
    fresh = rm.trace(checkpointed, PARAMS, f32(4), f32(4))
    jax.make_jaxpr(checkpointed)(PARAMS, f32(4), f32(4))  # JAX caches the trace of loss
    assert fresh.stale == ()
    exec(helper.format("checkpoint_name(jnp.sin(w @ x), f'layer{i}_output')"), module.__dict__)
    trace = rm.trace(checkpointed, PARAMS, f32(4), f32(4))
    report = trace.report()
    assert len(report.residuals) == 6  # JAX itself lists 5 here, from its old trace
    assert [r.name for r in report.residuals if r.kind == "intermediate"] == ["layer0_output"]
    assert trace.stale == ("loss",)
    assert any("older trace of loss" in note for note in report.notes)


@pytest.mark.parametrize(("n", "expected"), [(8, 8), (16, 16)])
def test_12_a_chain_is_linear(n, expected, remat3):
    def chain(x):
        for _ in range(n):
            x = jnp.sin(x)
        return x

    assert saved(rm.trace(chain, f32()).report()) == [("f32[]", "cos")] * expected


@pytest.mark.parametrize(("n", "residuals"), [(8, 4), (16, 5), (32, 6)])
def test_13_binary_checkpointing_is_logarithmic(n, residuals, remat3):
    report = rm.trace(binary_chain(n), f32()).report()
    assert len(report.residuals) == residuals
    depth = n.bit_length() - 1
    assert operations(report.repeated) == {"sin": n // 2 * depth - n + 1}
    assert operations(report.deferred) == {"cos": n - 2}  # the last two are under no checkpoint


def relu_layer(x, wb):
    w, b = wb
    return jax.nn.relu(w @ x + b), None


def scanned(ws, bs, x, step=relu_layer):
    return jax.lax.scan(step, x, (ws, bs))[0].sum()


SCANNED = (f32(8, 4, 4), f32(8, 4), f32(4))


def test_14_a_scan_tells_what_made_its_residuals(remat3):
    report = rm.trace(scanned, *SCANNED).report()
    stacked = [r for r in report.residuals if r.kind == "intermediate" and r.shape[0] == 8 and len(r.shape) > 1]
    assert {r.primitive for r in stacked} == {"max", "gt"}  # the relu's value, and where it is positive
    for residual in stacked:
        assert residual.path[0] == "scan x8"
        assert residual.times == 8
        assert residual.source.function == "relu_layer"


def test_15_the_policy_of_a_scanned_layer(remat3):
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    step = jax.checkpoint(relu_layer, policy=dots)
    trace = rm.trace(functools.partial(scanned, step=step), *SCANNED)
    (site,) = trace.engine.sites
    assert (site.key, site.times, site.policy) == ("relu_layer", 8, "dots_with_no_batch_dims_saveable")
    assert len(trace.report().residuals) == 4
    assert len(trace.report("nothing_saveable", at="relu_layer").residuals) == 3  # without editing anything
    other = rm.trace(functools.partial(scanned, step=jax.checkpoint(relu_layer)), *SCANNED)
    assert len(other.report().residuals) == 3
    assert len(other.report(dots, at="relu_layer").residuals) == 4


def test_17_offloading(remat3):
    def f(w, x):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w))

    trace = rm.trace(f, f32(4, 4), f32(3, 4))
    by_name = trace.report("names(offload=['h'])")
    assert [(r.kind, r.name, r.memory_space) for r in by_name.residuals if r.kind == "offloaded"] == [
        ("offloaded", "h", "host")
    ]
    assert by_name.offloaded_bytes == 3 * 4 * 4
    assert by_name.saved_bytes == 0
    dots = trace.report("offload_dot_with_no_batch_dims")
    assert [r.primitive for r in dots.residuals if r.kind == "offloaded"] == ["dot_general"] * 2
    assert all(r.source.function == "f" for r in dots.residuals if r.kind == "offloaded")


def test_18_saved_by_name_and_recomputed_all_the_same(remat3):
    def f(w, x):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h") @ w))

    report = rm.trace(f, f32(4, 4), f32(4)).report("save_only_these_names('h')")
    assert [r.name for r in report.residuals if r.kind == "intermediate"] == ["h"]
    assert operations(report.repeated)["tanh"] == 1
    assert any("'h' is saved, and its tanh is recomputed all the same" in note for note in report.notes)
    # It is not said where it is not so: cos does not read sin's value.
    other = rm.trace(lambda w, x: jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w).sum(), f32(4, 4), f32(4))
    assert not other.report("save_only_these_names('h')").notes


@pytest.mark.parametrize("how", ["unrolled", "scanned"])
def test_19_a_transformer(how, remat3):
    from tests.benchmarks.models import transformer

    fun, args = transformer(4, site=True, scanned=how == "scanned")
    trace = rm.trace(fun, *args)
    assert [(s.key, s.times) for s in trace.engine.sites] == [("block", 4)]
    reports = {p: trace.report(p) for p in ("none", "dots_saveable", "nothing_saveable")}
    assert reports["none"].saved_bytes > reports["dots_saveable"].saved_bytes > reports["nothing_saveable"].saved_bytes
    for residual in reports["dots_saveable"].residuals:
        assert residual.kind != "intermediate" or residual.source is not None
