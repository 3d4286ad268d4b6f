"""Advice: each rule speaks where its fault is, with the line, the figure and the mend, and is silent elsewhere."""

import dataclasses
import functools
import inspect
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax, devices, units
from remat_magic.facts.times import times
from remat_magic.records import RematError
from remat_magic.views.advice import advice_html
from tests.benchmarks import named_models
from tests.programs import KINDS, PROGRAMS, f32
from tests.volume import usually

POLICIES = jax.checkpoint_policies


def advice(kind, fun, args, policy="as_written", at=None, **options):
    return [finding for finding in rm.trace(fun, *args, **options).advice(policy, at) if finding.kind == kind]


@functools.cache
def blocks():
    """A transformer whose blocks are sites, the same trace for all tests that only read."""
    fun, args = named_models.transformer(2, 32, 16, 2, scanned=False)
    return rm.trace(fun, *args)


def kinds(policy, at=None):
    """What is said of it."""
    return {finding.kind for finding in blocks().advice(policy, at)}


def line_of(fun, text):
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


# --------------------------------------------------------------------------------------------------------------- names


def tanh_net(w, x):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    return jnp.sum(jnp.sin(h @ w))


def sin_net(w, x):
    h = checkpoint_name(x @ w, "h")
    return jnp.sum(jnp.sin(jnp.tanh(h) @ w))


NET = (f32(64, 64), f32(64))


def test_a_name_that_there_is_not():
    (finding,) = advice("unknown-name", tanh_net, NET, POLICIES.save_only_these_names("hh"))
    assert "'hh'" in finding.sentence
    assert finding.mend == "Write 'h'."
    assert not advice("unknown-name", tanh_net, NET, POLICIES.save_only_these_names("h"))
    # The memories of an offloading policy are quoted too, and are no names.
    offload = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["h"], names_which_can_be_offloaded=[], offload_src="device", offload_dst="pinned_host"
    )
    assert not advice("unknown-name", tanh_net, NET, offload)


def outside(w, x):
    @functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("h"))
    def layer(x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    return layer(checkpoint_name(x @ w, "h")).sum()


def inside(w, x):
    @functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("h"))
    def layer(x):
        return jnp.sin(jnp.tanh(checkpoint_name(x @ w, "h")) @ w)

    return layer(x @ w).sum()


def test_a_name_outside_its_checkpoint():
    (finding,) = advice("name-out-of-sight", outside, NET)
    assert finding.source.line == line_of(outside, "return layer(")
    assert "outside layer" in finding.sentence
    assert not advice("name-out-of-sight", inside, NET)
    # Around the function the policy sees it; the checkpoint inside is overruled, unless jax_remat3 keeps it in force.
    findings = advice("name-out-of-sight", outside, NET, "save_only_these_names('h')", "function")
    assert bool(findings) == _jax.remat3()


def test_what_is_saved_and_recomputed_all_the_same_is_told():
    (finding,) = advice("saved-in-vain", tanh_net, NET, "save_only_these_names('h')")
    assert finding.source.line == line_of(tanh_net, "jnp.tanh")
    assert f"Name the dot_general at test_advice.py:{finding.source.line}" in finding.mend
    # The matmul, 2 * 64 * 64, and the tanh run again.
    assert finding.unit == "FLOPs"
    assert finding.figure == 2 * 64 * 64 + 64
    assert not advice("saved-in-vain", sin_net, NET, "save_only_these_names('h')")


def twice(w, x):
    a = checkpoint_name(x @ w, "h")
    b = checkpoint_name(jnp.sin(a) @ w, "h")
    return jnp.sum(jnp.sin(b))


def layers(w, x):
    for _ in range(3):
        x = jnp.sin(checkpoint_name(x @ w, "h"))
    return x.sum()


def test_one_name_for_two_values():
    (finding,) = advice("named-twice", twice, NET, "save_only_these_names('h')")
    assert finding.source.line == line_of(twice, "b = ")
    assert str(line_of(twice, "a = ")) in finding.sentence
    assert (finding.figure, finding.unit) == (2 * 64 * 4, "bytes")
    # The same line for each layer is how names are meant; and no policy asks in the second case.
    assert not advice("named-twice", layers, NET, "save_only_these_names('h')")
    assert not advice("named-twice", twice, NET, "dots_saveable")


def test_a_factory_that_ignores_its_names_is_told():
    (finding,) = advice("saves-everything", tanh_net, NET, "save_anything_except_these_names('h')", "function")
    assert finding.figure == rm.trace(tanh_net, *NET).report("everything_saveable", "function").saved_bytes
    assert not advice("saves-everything", tanh_net, NET, "save_any_names_but_these('h')", "function")


# --------------------------------------------------------------------------------------------------- policies to no end


def test_a_policy_that_changes_nothing():
    (finding,) = advice("changes-nothing", sin_net, NET, "everything_saveable", "function")
    assert finding.figure == rm.trace(sin_net, *NET).report("none", "function").saved_bytes
    assert "no checkpoint at all" in finding.sentence
    assert not advice("changes-nothing", sin_net, NET, "nothing_saveable", "function")
    assert not advice("changes-nothing", sin_net, NET)  # as written: nobody chose it


def test_a_checkpoint_around_everything_is_told_to_cost_only():
    def deep(w, x):
        for _ in range(6):
            x = jnp.sin(x @ w)
        return x.sum()

    shapes = (f32(16, 16), f32(512, 16))
    (finding,) = advice("only-costs", deep, shapes, "nothing_saveable", "function")
    # Five of the six matmuls at least run again, and all is held when the backward pass proper begins.
    assert finding.unit == "FLOPs"
    assert finding.figure >= 5 * 2 * 512 * 16 * 16
    assert not advice("only-costs", deep, shapes, "dots_saveable", "function")

    def shallow(w, x):  # a third less: the sine's argument is freed before its derivative is made
        return jnp.sum(jnp.sin(x @ w))

    assert not advice("only-costs", shallow, (f32(8, 512), f32(64, 8)), "nothing_saveable", "function")
    # Layer by layer it does lower the peak.
    assert "only-costs" not in kinds("nothing_saveable", "sites")


def test_batched_matmuls_are_not_saved():
    fun, args = PROGRAMS["attention"]
    (finding,) = advice("batched-matmuls", fun, args, "dots_with_no_batch_dims_saveable", "function")
    # q k^T and the weights times v have a batch dimension.
    assert finding.figure == 2 * (2 * 2 * 8 * 8 * 16)
    assert "dots_saveable" in finding.mend
    assert not advice("batched-matmuls", fun, args, "dots_saveable", "function")
    # vmap makes batch dimensions of its own.
    shapes = (f32(4, 8, 8), f32(4, 16, 8))
    product = jax.vmap(lambda w, x: jnp.sin(x @ w))
    (finding,) = advice(
        "batched-matmuls", lambda w, x: product(w, product(w, x)).sum(), shapes, "dots_with_no_batch_dims_saveable"
    )
    assert finding.figure == 2 * (4 * 2 * 16 * 8 * 8)
    fun, args = PROGRAMS["three_layers"]
    assert not advice("batched-matmuls", fun, args, "dots_with_no_batch_dims_saveable", "function")


def head(checkpointed):
    """A stack of layers and then a loss, which is checkpointed by itself."""

    def last(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

    last = jax.checkpoint(last) if checkpointed == "last" else last

    def layer(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    layer = jax.checkpoint(layer) if checkpointed == "first" else layer

    def fun(w, x):
        return last(w, layer(w, layer(w, x)) if checkpointed != "first" else layer(w, x))

    return fun


def test_a_checkpoint_on_the_last_stage_is_told_to_gain_nothing():
    shapes = (f32(32, 32), f32(512, 32))
    trace = rm.trace(head("last"), *shapes)
    (finding,) = (finding for finding in trace.advice() if finding.kind == "last-stage")
    assert finding.mend == "Take jax.checkpoint off last."
    # All that is recomputed is recomputed for it.
    assert (finding.figure, finding.unit) == (trace.report().recomputed_flops, "FLOPs")
    assert trace.report("none").peak_bytes * 0.9 <= trace.report().peak_bytes
    assert not advice("last-stage", head("first"), shapes)  # what comes after runs backward first
    assert not advice("last-stage", head(""), shapes)
    assert "last-stage" not in kinds("as_written")  # one of many layers


def only_sines(prim, *_, **__):
    return prim.name == "sin"


def only_dots(prim, *_, **__):
    return prim.name == "dot_general"


def sines(w, x):
    y = jnp.sin(x @ w)
    return jnp.sum(jnp.exp(y @ w))


def test_what_jax_remat3_does_otherwise():
    (finding,) = advice("remat3", sines, NET, only_sines, "function")
    assert (finding.figure, finding.unit) == (64 * 4, "bytes")
    assert finding.source.line == line_of(sines, "y = ")
    named = "`checkpoint_name(jnp.sin(x @ w), 'y')`"
    assert finding.mend == (
        f"By name it works with both: {named}, and policy=jax.checkpoint_policies.save_only_these_names('y')."
    )
    assert ("would not save" in finding.sentence) != _jax.remat3()
    saved = rm.trace(sines, *NET).report(only_sines, "function").saved_bytes
    assert saved == (0 if _jax.remat3() else finding.figure)

    def mended(w, x):
        y = checkpoint_name(jnp.sin(x @ w), "y")
        return jnp.sum(jnp.exp(y @ w))

    # The equivalent saves what the policy means to save, with jax_remat3 and without.
    assert rm.trace(mended, *NET).report("save_only_these_names('y')", "function").saved_bytes == finding.figure
    assert not advice("remat3", sines, NET, only_dots, "function")
    assert not advice("remat3", sines, NET, "everything_saveable", "function")


def test_checkpoints_inside_one_another_are_told():
    (finding,) = (finding for finding in blocks().advice("nothing_saveable", "function") if finding.kind == "remat3")
    assert ("would stay" in finding.sentence) != _jax.remat3()
    assert "remat3" not in kinds("nothing_saveable", "sites")


# ------------------------------------------------------------------------------------------------------- single values


def wide(w, v, x):
    h = jnp.sin(x @ w)
    y = h @ v
    return jnp.sum(jnp.exp(y) * jnp.tanh(y))


def wide_named(w, v, x):
    h = jnp.sin(x @ w)
    y = checkpoint_name(h @ v, "y")
    return jnp.sum(jnp.exp(y) * jnp.tanh(y))


# Few elements come of a long contraction: x @ w takes 2 * 64 FLOPs for each, h @ v 2 * 4096.
WIDE = (f32(64, 4096), f32(4096, 16), f32(32, 64))


def test_cheap_to_keep_and_dear_to_recompute():
    (finding,) = advice("cheap-to-keep", wide, WIDE, "nothing_saveable", "function")
    assert finding.source.line == line_of(wide, "y = ")
    # Kept under the very code of the mend, with the name where it says, that is what JAX spares.
    assert finding.code == "policy=jax.checkpoint_policies.save_only_these_names('y')"
    assert finding.mend == f"`checkpoint_name(h @ v, 'y')`, and {finding.code}."
    before = rm.trace(wide, *WIDE).report("nothing_saveable", "function")
    after = rm.trace(wide_named, *WIDE).report("save_only_these_names('y')", "function")
    assert (finding.figure, finding.unit) == (before.recomputed_flops - after.recomputed_flops, "FLOPs")
    assert finding.figure >= 2 * 32 * 4096 * 16
    assert units.nbytes(after.saved_bytes - before.saved_bytes) in finding.sentence
    assert not advice("cheap-to-keep", wide, WIDE, "dots_saveable", "function")  # it is kept
    # A name that is there needs only the policy.
    (finding,) = advice("cheap-to-keep", wide_named, WIDE, "nothing_saveable", "function")
    assert finding.mend == f"{finding.code}." == "policy=jax.checkpoint_policies.save_only_these_names('y')."


def test_what_is_as_dear_to_keep_is_no_advice():
    # Square layers: each byte spares the same as any other, 2 * 64 / 4 FLOPs.
    assert not advice("cheap-to-keep", deep, (f32(64, 64), f32(16, 64)), "nothing_saveable", "function")


def deep(w, x):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return x.sum()


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ("dots_with_no_batch_dims_saveable", "save_from_both_policies(jax.checkpoint_policies.dots_with_no_batch"),
        (POLICIES.save_only_these_names("q"), "save_only_these_names('q', 'context')"),
        (POLICIES.save_any_names_but_these("context"), "save_any_names_but_these()"),
    ],
)
def test_the_policy_of_the_mend_keeps_what_it_kept(policy, code):
    def attend(w, x):
        q = checkpoint_name(x @ w, "q")
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, x))
        return jnp.sum(jnp.sin(checkpoint_name(jnp.einsum("bts,bsd->btd", weights, q), "context")))

    shapes = (f32(8, 8), f32(2, 512, 8))
    (finding,) = advice("cheap-to-keep", attend, shapes, policy, "function")
    assert code in finding.mend
    trace = rm.trace(attend, *shapes)
    before = trace.report(policy, "function")
    after = trace.report(eval(finding.mend.removeprefix("policy=").removesuffix(".")), "function")
    assert before.recomputed_flops - after.recomputed_flops == finding.figure


@pytest.mark.parametrize("name", ["f(x)", "w[0]", "it's", "a | b"])
def test_the_mend_keeps_a_name_with_any_characters(name):
    def attend(w, x):
        q = checkpoint_name(x @ w, name)
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, x))
        return jnp.sum(jnp.sin(checkpoint_name(jnp.einsum("bts,bsd->btd", weights, q), "context")))

    shapes = (f32(8, 8), f32(2, 512, 8))
    (finding,) = advice("cheap-to-keep", attend, shapes, POLICIES.save_only_these_names(name), "function")
    assert finding.mend == f"policy=jax.checkpoint_policies.save_only_these_names({name!r}, 'context')."
    (finding,) = advice("unknown-name", tanh_net, NET, POLICIES.save_only_these_names(name))
    assert repr(name) in finding.sentence


def elementwise(w, x):
    y = checkpoint_name(x @ w, "y")
    z = checkpoint_name(jnp.exp(y) + y, "z")
    return jnp.sum(jnp.sin(z) * y)


def test_dear_to_keep_and_cheap_to_recompute():
    shapes = (f32(512, 64), f32(256, 512))
    (finding,) = advice("cheap-to-recompute", elementwise, shapes, POLICIES.save_only_these_names("y", "z"))
    assert finding.source.line == line_of(elementwise, "z = ")
    assert finding.mend == f"{finding.code}." == "policy=jax.checkpoint_policies.save_only_these_names('y')."
    trace = rm.trace(elementwise, *shapes)
    both, one = (trace.report(f"save_only_these_names({names})") for names in ("'y', 'z'", "'y'"))
    assert (finding.figure, finding.unit) == (both.saved_bytes - one.saved_bytes, "bytes")
    assert finding.figure == 256 * 64 * 4
    assert units.flops(one.recomputed_flops - both.recomputed_flops) in finding.sentence
    # y alone: to have it again takes a matmul.
    assert not advice("cheap-to-recompute", elementwise, shapes, "save_only_these_names('y')")


def test_what_is_cheap_to_recompute_gets_a_checkpoint_of_its_part():
    def fun(w, x):
        y = x @ w
        return jnp.sum(jnp.exp(jnp.sin(y) * y))

    def mended(w, x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.exp(jnp.sin(y) * y))(x @ w))

    shapes = (f32(512, 64), f32(256, 512))
    findings = advice("cheap-to-recompute", fun, shapes)
    assert findings
    assert all("jax.checkpoint(part)" in finding.mend for finding in findings)
    # The mend frees what is said at least.
    freed = rm.trace(fun, *shapes).report().saved_bytes - rm.trace(mended, *shapes).report().saved_bytes
    assert freed >= max(finding.figure for finding in findings) > 0
    assert not advice("cheap-to-recompute", mended, shapes)


def test_single_values_are_advised_by_the_time_of_a_device():
    trace = rm.trace(wide, *WIDE)
    (finding,) = (
        a for a in trace.advice("nothing_saveable", "function", device="H100 SXM") if a.kind == "cheap-to-keep"
    )
    row = next(
        row
        for row in trace.what_if("nothing_saveable", "function", device="H100 SXM")
        if row.value.source == finding.source and row.value.primitive == "dot_general"
    )
    assert f"{units.seconds(-row.seconds)} on H100 SXM" in finding.sentence
    with pytest.raises(RematError, match="H1000"):
        trace.advice(device="H1000")


# ---------------------------------------------------------------------------------------------------------- offloading


def linked(bandwidth):
    """A device of whose figures only the way to the host differs."""
    return dataclasses.replace(devices.get("H100 SXM"), name="a device", host_bandwidth=bandwidth)


def offloading(saved=(), moved=("y",)):
    return POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(moved),
        offload_src="device",
        offload_dst="pinned_host",
    )


def offloads(policy, device, fun=wide_named, shapes=WIDE):
    return [a for a in rm.trace(fun, *shapes).advice(policy, "function", device=device) if a.kind == "dear-offload"]


def test_offloading_that_takes_longer_than_recomputing():
    slow = linked(1e6)
    (finding,) = offloads(offloading(), slow)
    assert finding.source.line == line_of(wide_named, "y = ")
    assert (finding.figure, finding.unit) == (32 * 16 * 4, "bytes")
    trace = rm.trace(wide_named, *WIDE)
    moved, again = (times(trace.report(policy, "function"), slow) for policy in (offloading(), "nothing_saveable"))
    assert units.seconds(moved.offload) in finding.sentence
    assert moved.extra > again.extra  # as the comparison has it too
    assert finding.mend == "Recompute it: policy=jax.checkpoint_policies.nothing_saveable."
    assert not offloads(offloading(), linked(1e15))  # sooner fetched
    assert not offloads(offloading(), linked(None))  # who knows
    assert not offloads("save_only_these_names('y')", slow)


def test_of_several_offloaded_values_only_what_loses_is_told():
    def both(w, x):
        a = checkpoint_name(jnp.sin(x), "a")  # little work for as many bytes
        y = checkpoint_name(a @ w, "y")
        return jnp.sum(jnp.exp(y) * jnp.tanh(y))

    shapes = (f32(4096, 4096), f32(512, 4096))
    (finding,) = offloads(offloading(("y",), ("a",)), linked(1e12), both, shapes)
    assert "'a'" in finding.sentence
    assert finding.mend == "Recompute it: policy=jax.checkpoint_policies.save_only_these_names('y')."
    (finding,) = offloads(offloading((), ("a", "y")), linked(1e12), both, shapes)
    assert "'a'" in finding.sentence
    assert "names_which_can_be_offloaded=['y']" in finding.mend


def test_offloaded_matmuls_are_told_where_the_link_is_slow():
    shapes = (f32(64, 64), f32(16, 64))
    findings = offloads("offload_dot_with_no_batch_dims", linked(1e9), deep, shapes)
    assert findings
    assert {finding.mend for finding in findings} == {"Recompute it: policy=jax.checkpoint_policies.nothing_saveable."}
    assert findings[0].figure == rm.trace(deep, *shapes).report("offload_dot_with_no_batch_dims").offloaded_bytes
    assert not offloads("offload_dot_with_no_batch_dims", linked(1e15), deep, shapes)


# ---------------------------------------------------------------------------------------------------------- the program


def captures(n):
    table = jnp.ones((n, 256))

    def fun(x):
        return jnp.sum(jnp.sin(table @ x))

    return fun


def test_a_large_constant_is_told():
    (finding,) = advice("large-constant", captures(1024), (f32(256),))
    assert (finding.figure, finding.unit) == (1024 * 256 * 4, "bytes")
    assert "f32[1024,256]" in finding.sentence
    assert not advice("large-constant", captures(8), (f32(256),))


def mixed(w, x):
    y = (x @ w).astype(jnp.float32)
    return jnp.sum(jnp.sin(y * jax.nn.softmax(y)))


def half(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w).astype(jnp.float32))


def test_residuals_wider_than_the_weights_are_told():
    bf16 = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
    (finding,) = advice("wide-residuals", mixed, bf16)
    report = rm.trace(mixed, *bf16).report()
    assert finding.figure == sum(r.nbytes for r in report.residuals if r.kind == "intermediate" and r.dtype == "f32")
    assert "bf16" in finding.sentence
    assert not advice("wide-residuals", half, bf16)
    assert not advice("wide-residuals", mixed, (f32(64, 64), f32(32, 64)))


def scanned(checkpointed):
    def body(c, w):
        return jnp.sin(jnp.tanh(c @ w) @ w), None

    if checkpointed is not None:
        body = jax.checkpoint(body, prevent_cse=checkpointed)

    def fun(ws, x):
        return jax.lax.scan(body, x, ws)[0].sum()

    return fun


LAYERS = (f32(8, 64, 64), f32(16, 64))


def test_barriers_inside_a_scan_are_told():
    (finding,) = advice("prevent-cse", scanned(True), LAYERS)
    assert "body" in finding.sentence
    assert "prevent_cse=False" in finding.mend
    assert not advice("prevent-cse", scanned(False), LAYERS)
    assert not advice("prevent-cse", inside, NET)  # no scan


def test_a_scan_without_a_checkpoint_is_told():
    (finding,) = advice("bare-scan", scanned(None), LAYERS)
    report = rm.trace(scanned(None), *LAYERS).report()
    assert finding.figure <= report.saved_bytes
    assert finding.figure > 0.5 * report.saved_bytes
    assert "scan x8" in finding.sentence
    # With the mend, the bytes are those of the carry, once an iteration.
    assert rm.trace(scanned(False), *LAYERS).report().saved_bytes == 8 * 16 * 64 * 4
    assert not advice("bare-scan", scanned(False), LAYERS)
    assert not advice("bare-scan", sin_net, NET)


def test_a_stale_trace_is_told_with_its_cure():
    assert not advice("stale-trace", sin_net, NET)
    source = "def inner(x): return jnp.sin(x)\ndef outer(x): return inner(x)\n"
    names = {"jnp": jnp}
    exec(source, names)
    jitted = jax.jit(names["outer"])
    jax.make_jaxpr(lambda x: jitted(x).sum())(jnp.ones(4))
    exec("def inner(x): return jnp.cos(x)", names)
    (finding,) = advice("stale-trace", lambda x: jitted(x).sum(), (f32(4),))
    assert "outer" in finding.sentence
    assert "jax.clear_caches()" in finding.mend


# ---------------------------------------------------------------------------------------------------------- the logits

ROWS, WIDTH, CLASSES = 256, 32, 1024
LOGITS = ROWS * CLASSES


def _head(dtype="float32"):
    return (
        jax.ShapeDtypeStruct((WIDTH, CLASSES), dtype),
        jax.ShapeDtypeStruct((ROWS, WIDTH), dtype),
        jax.ShapeDtypeStruct((ROWS,), "int32"),
    )


def _of_rows(logits, y):
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]


def _by_hand(w, x, y):
    z = (x @ w).astype(jnp.float32)
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(z).sum(-1)) - z[jnp.arange(ROWS), y]).mean()


SPELLINGS = {
    "log_softmax": lambda w, x, y: -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], -1).mean(),
    "logsumexp": lambda w, x, y: _of_rows(x @ w, y).mean(),
    "one_hot": lambda w, x, y: -(jax.nn.one_hot(y, CLASSES) * jax.nn.log_softmax(x @ w)).sum(-1).mean(),
    "one_hot in a product": lambda w, x, y: -jnp.vdot(jax.nn.one_hot(y, CLASSES), jax.nn.log_softmax(x @ w)),
    "log of a softmax": lambda w, x, y: -jnp.log(jax.nn.softmax(x @ w)[jnp.arange(ROWS), y]).mean(),
    "by hand": _by_hand,
    "with a bias, a cap and a mask": lambda w, x, y: _of_rows(
        jnp.where(jnp.arange(CLASSES) < CLASSES - 7, 30 * jnp.tanh((x @ w + w[0]) / 30), -1e9), y
    ).mean(),
    "vmap": lambda w, x, y: jax.vmap(lambda x, y: _of_rows((x @ w)[None], y[None])[0])(x, y).mean(),
    "jit and checkpoint": lambda w, x, y: jax.jit(jax.checkpoint(lambda w, x: _of_rows(x @ w, y).mean()))(w, x),
    "a training step": lambda w, x, y: jax.value_and_grad(SPELLINGS["logsumexp"])(w, x, y),
}


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_softmax_of_the_logits(spelling, dtype):
    trace = rm.trace(SPELLINGS[spelling], *_head(dtype))
    first = trace.advice()[0]
    assert first.kind == "softmax-of-logits"
    # What it says is saved, and held at the peak, are the values of the logits' size.
    rows = _large(row for row in trace.report().residuals if row.kept)
    saved, alive = (sum(one.nbytes for one in values) for values in (rows, _large(trace.timeline().alive)))
    assert first.stake == max(saved, alive) >= 0.6 * trace.report().peak_bytes
    assert first.share == first.stake / trace.report().peak_bytes
    report = trace.report()
    assert f"{units.nbytes(alive)} of the {units.nbytes(report.peak_bytes)} at the estimated peak" in first.sentence
    assert (f"{units.nbytes(saved)} of the {units.nbytes(report.saved_bytes)} saved" in first.sentence) == (saved > 0)


def _large(values):
    return [
        value for value in values if math.prod(map(int, re.findall(r"\d+", value.type.partition("[")[2]))) == LOGITS
    ]


def test_the_softmax_of_all_but_the_last_of_the_logits():
    def loss(w, x, y):
        logits = jnp.sin(x).reshape(8, -1, WIDTH) @ w
        return _of_rows(logits[:, :-1].reshape(-1, CLASSES), y[:-8]).mean()

    trace = rm.trace(loss, *_head())
    first = trace.advice()[0]
    assert first.kind == "softmax-of-logits"
    assert first.stake > 0.8 * trace.report().peak_bytes


@jax.custom_vjp
def _keeps_softmax(logits, y):
    return _of_rows(logits, y).mean()


_keeps_softmax.defvjp(
    lambda logits, y: (_keeps_softmax(logits, y), (jax.nn.softmax(logits), y)),
    lambda kept, g: ((kept[0] - jax.nn.one_hot(kept[1], CLASSES)) * g / ROWS, None),
)


def test_the_softmax_that_a_rule_of_the_users_keeps():
    trace = rm.trace(lambda w, x, y: _keeps_softmax(x @ w, y), *_head())
    (finding,) = advice("softmax-of-logits", lambda w, x, y: _keeps_softmax(x @ w, y), _head())
    assert (
        f"takes {units.nbytes(4 * LOGITS)} of the {units.nbytes(trace.report().saved_bytes)} saved" in finding.sentence
    )


def test_other_softmaxes_are_no_losses():
    def attention(w, x, _):
        scores = (x @ w) @ (x @ w).T
        return (jax.nn.softmax(scores) @ x).sum() + (jnp.exp(scores - jax.nn.logsumexp(scores)) @ x).sum()

    def softplus(w, x, _):
        return jax.nn.softplus(x @ w).sum()

    for fun in (attention, softplus):
        assert not advice("softmax-of-logits", fun, _head())

    def small(w, x, y):  # beside what else is saved
        return sum(jnp.sin(jnp.sin(x @ w)).sum() for _ in range(9)) + _of_rows(x @ w[:, :64], y).mean()

    assert not advice("softmax-of-logits", small, _head())


@jax.custom_vjp
def _ruled(w, x, y):
    return _of_rows((x @ w).astype(jnp.float32), y)


def _ruled_bwd(inputs, g):
    w, x, y = inputs
    change = (jax.nn.softmax((x @ w).astype(jnp.float32)) - jax.nn.one_hot(y, CLASSES)) * g[:, None]
    return (x.T @ change).astype(w.dtype), (change @ w.T).astype(x.dtype), None


_ruled.defvjp(lambda w, x, y: (_ruled(w, x, y), (w, x, y)), _ruled_bwd)


@pytest.mark.parametrize("dtype", usually(["float32", "bfloat16"], "bfloat16"))
def test_what_helps_against_the_softmax_of_the_logits(dtype):
    """Every mend does what it says, by JAX's own answer."""

    def loss(w, x, y):
        return _of_rows((x @ w).astype(jnp.float32), y).mean()

    def in_parts(w, x, y, parts=8):
        part = jax.checkpoint(lambda xy: _of_rows((xy[0] @ w).astype(jnp.float32), xy[1]))
        return jax.lax.map(part, (x.reshape(parts, -1, WIDTH), y.reshape(parts, -1))).mean()

    def by_a_rule(w, x, y):
        return _ruled(w, x, y).mean()

    def in_half(w, x, y):
        rest = jax.checkpoint(lambda logits: _of_rows(logits.astype(jnp.float32), y))
        return rest((x @ w).astype(jnp.bfloat16)).mean()

    def report(fun):
        return rm.trace(fun, *_head(dtype)).report()

    (finding,) = advice("softmax-of-logits", loss, _head(dtype))
    for words in ("over 8 parts", "jax.custom_vjp", "bf16"):
        assert words in finding.mend
    before, parts = report(loss), report(in_parts)
    assert parts.saved_bytes < before.saved_bytes / 8
    assert before.peak_bytes - parts.peak_bytes > 0.7 * finding.stake
    product = 2 * ROWS * WIDTH * CLASSES
    assert product <= parts.repeated_flops < 1.5 * product
    assert report(by_a_rule).saved_bytes == 0
    assert report(in_half).saved_bytes == 2 * LOGITS < before.saved_bytes
    for other in (report(by_a_rule), report(in_half)):
        assert other.peak_bytes > 0.95 * before.peak_bytes
    # Even the logits of an eighth can be most of a small peak.
    (again,) = advice("softmax-of-logits", in_parts, _head(dtype))
    assert "smaller parts" in again.mend
    smaller = functools.partial(in_parts, parts=32)
    assert report(smaller).peak_bytes < parts.peak_bytes
    assert sum(finding.stake for finding in advice("softmax-of-logits", smaller, _head(dtype))) <= again.stake / 4
    # What is narrow need not be made so.
    assert ("bf16" in advice("softmax-of-logits", SPELLINGS["logsumexp"], _head(dtype))[0].mend) == (dtype == "float32")


def test_the_softmax_of_logits_in_a_loop():
    def body(total, xy, w):
        return total + _of_rows(xy[0] @ w, xy[1]).sum(), None

    def loss(w, x, y, body=body):
        turns = x.reshape(4, -1, WIDTH), y.reshape(4, -1)
        return jax.lax.scan(functools.partial(body, w=w), 0.0, turns)[0]

    findings = rm.trace(loss, *_head()).advice()
    # The place says what the scan without a checkpoint would say once more.
    assert {finding.kind for finding in findings} == {"softmax-of-logits", "no-checkpoint-there"}
    assert "the body of the loop" in findings[0].mend
    mended = functools.partial(loss, body=jax.checkpoint(body))
    assert rm.trace(mended, *_head()).report().peak_bytes < 0.6 * rm.trace(loss, *_head()).report().peak_bytes


# ---------------------------------------------------------------------------------------------------------- in general


@pytest.mark.parametrize(
    "policy", ["as_written", POLICIES.save_only_these_names("contex"), "dots_with_no_batch_dims_saveable"]
)
def test_what_has_most_at_stake_is_said_first(policy):
    trace = blocks()
    findings, report = trace.advice(policy), trace.report(policy)
    assert [finding.share for finding in findings] == sorted((finding.share for finding in findings), reverse=True)
    for finding in findings:
        flops = finding.figure / (report.forward_flops + report.backward_flops) if finding.unit == "FLOPs" else 0
        assert finding.share == min(max(flops, (finding.stake or 0) / report.peak_bytes), 1)
        assert finding.stake == finding.figure or finding.unit != "bytes"
        assert json.loads(json.dumps(finding.to_dict()))["stake"] == finding.stake
        if finding.share:
            assert f"({units.percent(finding.share, 1)})</b> at stake" in advice_html([finding])


@pytest.mark.each_once
@pytest.mark.parametrize("name", usually(PROGRAMS, *KINDS))
@pytest.mark.parametrize("policy", ["as_written", "dots_saveable"])
def test_every_program_can_be_advised_on(name, policy):
    fun, args = PROGRAMS[name]
    try:
        findings = rm.trace(fun, *args).advice(policy)
    except RematError as error:
        assert "complex" in str(error)
        return
    for finding in findings:
        assert finding.kind
        assert finding.sentence.endswith((".", "otherwise has no effect."))
        assert finding.mend.endswith(".")
        assert (finding.figure is None) == (finding.unit == "")


def test_a_plan_needs_no_advice():
    assert kinds(blocks().plan(0.5)) <= {"prevent-cse"}


# ---------------------------------------------------------------------------------------------------------- places


def _layers(x, w):
    def layer(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w.T)

    for _ in range(6):
        x = layer(x, w)
    return (x**2).sum()


_OF_LAYERS = (jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64, 256), "float32"))


def test_where_a_checkpoint_is_missing():
    trace = rm.trace(_layers, *_OF_LAYERS)
    first = trace.advice()[0]
    assert (first.kind, first.at, first.source.function) == ("no-checkpoint-there", "layer", "layer")
    now, then = trace.report(), trace.report(first.policy, at=first.at)  # what it says is what JAX says of trying it
    assert first.figure == now.peak_bytes - then.peak_bytes > 0.2 * now.peak_bytes
    assert units.nbytes(then.peak_bytes) in first.sentence
    assert "layer at test_advice.py" in first.sentence
    assert "runs 6 times" in first.sentence
    assert f"{then.repeated_flops / now.forward_flops:.0%} of the forward pass is repeated (now 0%)" in first.sentence
    assert first.mend.endswith("nothing_saveable) on layer.")
    # Once it is there, nothing is missing.
    assert "no-checkpoint-there" not in {finding.kind for finding in trace.advice(first.policy, first.at)}


def test_no_checkpoint_is_missing_where_none_would_help():
    def loss(x, w):
        def layer(x, w):
            return jnp.sin(x) + w[:1, :1]  # saves one value either way

        for _ in range(6):
            x = layer(x, w)
        return x.sum()

    assert [f for f in rm.trace(loss, *_OF_LAYERS).advice() if f.kind == "no-checkpoint-there"] == []


def test_advice_that_can_be_tried_has_a_button():
    advice = rm.trace(_layers, *_OF_LAYERS).advice()
    html = advice_html(advice)
    assert html.count('data-at="layer"') == 1
    assert html.count("Try it") == 1
    # What is code looks like code, and is copied without the words around it: a decorator that Python takes.
    (code,) = re.findall(r'data-action="copy" data-text="([^"]*)"', html)
    assert code == advice[0].code == advice[0].mend.removeprefix("Write ").removesuffix(" on layer.")
    assert f"<code>{code}</code>" in html
    assert "<button" not in advice._repr_html_()  # where there is no widget to hear of it
    compile(f"{code}\ndef layer(): pass", "pasted", "exec")
