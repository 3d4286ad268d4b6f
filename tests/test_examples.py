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
from tests.benchmarks.models import transformer
from tests.programs import binary_chain, f32


def layer(w, x):
    return jnp.sin(w @ x)


def three(w1, w2, w3, x, layer=layer, name=lambda x, name: x):
    for w, letter in ((w1, "a"), (w2, "b"), (w3, "c")):
        x = name(layer(w, x), letter)
    return x.sum()


PARAMS = [f32(4, 4)] * 3


def predict(params, x, name=lambda x, i: x):
    for i, w in enumerate(params[:-1]):
        x = name(layer(w, x), i)
    return params[-1] @ x


def loss(params, x, y, name=lambda x, i: x):
    return jnp.sum((predict(params, x, name) - y) ** 2)


def chain(n):
    return lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(n), x)


def relu_layer(x, wb):
    w, b = wb
    return jax.nn.relu(w @ x + b), None


def scanned(ws, bs, x, step=relu_layer):
    return jax.lax.scan(step, x, (ws, bs))[0].sum()


SCANNED = (f32(8, 4, 4), f32(8, 4), f32(4))


def offloaded(w, x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w))


def gated(w, x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h") @ w))


DOTS = "dots_with_no_batch_dims_saveable"
with_policy = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
LAYERS = (f32(5, 4), f32(6, 5), f32(7, 6), f32(4))
LOSS = (PARAMS, f32(4), f32(4))
MATRICES = (f32(4, 4), f32(3, 4))


def of(fun, args, policy="as_written", at=None, **options):
    return (functools.partial(fun, **options) if options else fun), args, policy, at


# What is inspected; how many residuals it has; which are no arguments; what is repeated; what is done only then.
TABLE = {
    # Each sin saves its cos; the first two sins feed a matmul whose derivative reads them.
    "1: no checkpoint": (of(three, LAYERS), 9, "f32[5] cos, f32[5] sin, f32[6] cos, f32[6] sin, f32[7] cos", {}, {}),
    # What is saved are the next layer's inputs. Each matmul runs again for the cos of its sin; the sins are not needed.
    "2: on each layer": (
        of(three, LAYERS, layer=jax.checkpoint(layer)), 6, "f32[5] sin, f32[6] sin", {"dot_general": 3}, {"cos": 3}
    ),
    # The third sin's value is not needed again.
    **{
        f"3: {policy}": (
            of(three, LAYERS, policy), 7, "f32[5] dot_general, f32[6] dot_general, f32[7] dot_general",
            {"sin": 2}, {"cos": 3},
        )
        for policy in (DOTS, "dots_saveable", "checkpoint_dots")
    },
    "4: by name": (
        of(three, LAYERS, "save_only_these_names('a')", name=checkpoint_name), 5, "f32[5] sin a", None, None
    ),
    "6: the derivative now": (of(jnp.sin, (f32(4),), "everything_saveable"), 1, "f32[4] cos", {}, {}),
    "6: the derivative later": (of(jnp.sin, (f32(4),), "nothing_saveable"), 1, "", {}, {"cos": 1}),
    "8: arguments": (of(loss, LOSS), 9, None, {}, {}),
    "9: dots of layer and predictor": (of(loss, LOSS, DOTS), 8, ", ".join(3 * ["f32[4] dot_general"]), None, None),
    "10: names": (
        of(loss, LOSS, name=lambda x, i: checkpoint_name(x, f"layer{i}_output")), 9,
        "f32[4] cos, f32[4] cos, f32[4] mul, f32[4] sin layer0_output, f32[4] sin layer1_output", {}, {},
    ),
    **{f"12: a chain of {n}": (of(chain(n), (f32(),)), n, ", ".join(n * ["f32[] cos"]), {}, {}) for n in (8, 16)},
    # The last two are under no checkpoint.
    **{
        f"13: halves of {n}": (
            of(binary_chain(n), (f32(),)), residuals, None,
            {"sin": n // 2 * (n.bit_length() - 1) - n + 1}, {"cos": n - 2},
        )
        for n, residuals in ((8, 4), (16, 5), (32, 6))
    },
    "15: dots": (of(scanned, SCANNED, step=with_policy(relu_layer)), 4, None, None, None),
    "15: dots, none": (
        of(scanned, SCANNED, "nothing_saveable", "relu_layer", step=with_policy(relu_layer)), 3, None, None, None
    ),
    "15: none": (of(scanned, SCANNED, step=jax.checkpoint(relu_layer)), 3, None, None, None),
    "15: none, dots": (of(scanned, SCANNED, DOTS, "relu_layer", step=jax.checkpoint(relu_layer)), 4, None, None, None),
    "17: by name": (of(offloaded, MATRICES, "names(offload=['h'])"), 3, "host f32[3,4] sin h", None, None),
    "17: dots": (
        of(offloaded, MATRICES, "offload_dot_with_no_batch_dims"), 4, ", ".join(2 * ["host f32[3,4] dot_general"]),
        None, None,
    ),
    # The derivative of tanh reads its value from before it was named.
    "18: saved, and recomputed all the same": (
        of(gated, (f32(4, 4), f32(4)), "save_only_these_names('h')"), 3, "f32[4] tanh h",
        {"dot_general": 2, "tanh": 1}, None,
    ),
}  # fmt: skip


def told(residual):
    words = (residual.memory_space, residual.type, residual.primitive, residual.name)
    return " ".join(word for word in words if word)


def operations(equations):
    return Counter(equation.primitive for equation in equations)


@pytest.mark.parametrize("name", TABLE)
def test_an_example(name, remat3):
    (fun, args, policy, at), residuals, saved, repeated, deferred = TABLE[name]
    report = rm.trace(fun, *args).report(policy, at)
    assert len(report.residuals) == residuals
    made = ", ".join(sorted(told(residual) for residual in report.residuals if residual.kind != "argument"))
    assert saved in (made, None)
    assert repeated is None or operations(report.repeated) == repeated
    assert deferred is None or operations(report.deferred) == deferred


def test_2_and_15_sites_have_a_policy_as_written(remat3):
    trace = rm.trace(functools.partial(three, layer=jax.checkpoint(layer)), *LAYERS)
    assert [(site.key, site.times, site.policy) for site in trace.sites] == [("layer", 3, "nothing_saveable")]
    trace = rm.trace(functools.partial(scanned, step=with_policy(relu_layer)), *SCANNED)
    assert [(site.key, site.times, site.policy) for site in trace.sites] == [("relu_layer", 8, DOTS)]


def test_8_and_9_arguments_are_named_and_lines_known(remat3):
    trace = rm.trace(loss, *LOSS)
    assert trace.names == ()
    arguments = {r.argument for r in trace.report().residuals if r.argument}
    assert arguments == {"params[0]", "params[1]", "params[2]", "x"}
    dots = [r.source.function for r in trace.report(DOTS).residuals if r.kind == "intermediate"]
    assert dots == ["layer", "layer", "predict"]


def test_18_what_is_saved_in_vain_is_said_where_it_is_so(remat3):
    notes = rm.trace(gated, f32(4, 4), f32(4)).report("save_only_these_names('h')").notes
    assert any("'h' is saved, and its tanh is recomputed all the same" in note for note in notes)
    # The cos of the next one does not read sin's value.
    assert not rm.trace(offloaded, f32(4, 4), f32(4)).report("save_only_these_names('h')").notes


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


def test_14_a_scan_tells_what_made_its_residuals(remat3):
    report = rm.trace(scanned, *SCANNED).report()
    stacked = [r for r in report.residuals if r.kind == "intermediate" and r.shape[0] == 8 and len(r.shape) > 1]
    assert {r.primitive for r in stacked} == {"max", "gt"}  # the relu's value, and where it is positive
    for residual in stacked:
        assert residual.path[0] == "scan x8"
        assert residual.times == 8
        assert residual.source.function == "relu_layer"


@pytest.mark.parametrize("how", ["unrolled", "scanned"])
def test_19_a_transformer(how, remat3):
    fun, args = transformer(4, site=True, scanned=how == "scanned")
    trace = rm.trace(fun, *args)
    assert [(s.key, s.times) for s in trace.engine.primal.table.sites] == [("block", 4)]
    reports = {p: trace.report(p) for p in ("none", "dots_saveable", "nothing_saveable")}
    assert reports["none"].saved_bytes > reports["dots_saveable"].saved_bytes > reports["nothing_saveable"].saved_bytes
    for residual in reports["dots_saveable"].residuals:
        assert residual.kind != "intermediate" or residual.source is not None
