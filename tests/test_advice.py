"""Advice: each rule speaks where its fault is, with the line, the figure and the mend, and is silent elsewhere."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax, devices, units
from remat_magic.facts.times import times
from remat_magic.records import RematError
from tests.benchmarks import named_models
from tests.programs import PROGRAMS, f32

POLICIES = jax.checkpoint_policies


def advice(kind, fun, args, policy="as_written", at=None, **options):
    return [each for each in rm.trace(fun, *args, **options).advice(policy, at) if each.kind == kind]


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
    (found,) = advice("unknown-name", tanh_net, NET, POLICIES.save_only_these_names("hh"))
    assert "'hh'" in found.sentence
    assert found.mend == "Write 'h'."
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
    (found,) = advice("name-out-of-sight", outside, NET)
    assert found.source.line == line_of(outside, "return layer(")
    assert "outside layer" in found.sentence
    assert not advice("name-out-of-sight", inside, NET)
    # Around the function the policy sees it; the checkpoint inside is overruled, unless jax_remat3 keeps it in force.
    found = advice("name-out-of-sight", outside, NET, "save_only_these_names('h')", "function")
    assert bool(found) == _jax.remat3()


def test_saved_and_recomputed_all_the_same():
    (found,) = advice("saved-in-vain", tanh_net, NET, "save_only_these_names('h')")
    assert found.source.line == line_of(tanh_net, "jnp.tanh")
    assert f"Name the dot_general at test_advice.py:{found.source.line}" in found.mend
    # The matmul, 2 * 64 * 64, and the tanh run again.
    assert found.unit == "FLOPs"
    assert found.figure == 2 * 64 * 64 + 64
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
    (found,) = advice("named-twice", twice, NET, "save_only_these_names('h')")
    assert found.source.line == line_of(twice, "b = ")
    assert str(line_of(twice, "a = ")) in found.sentence
    assert (found.figure, found.unit) == (2 * 64 * 4, "bytes")
    # The same line for each layer is how names are meant; and no policy asks in the second case.
    assert not advice("named-twice", layers, NET, "save_only_these_names('h')")
    assert not advice("named-twice", twice, NET, "dots_saveable")


def test_a_factory_that_ignores_its_names():
    (found,) = advice("saves-everything", tanh_net, NET, "save_anything_except_these_names('h')", "function")
    assert found.figure == rm.trace(tanh_net, *NET).report("everything_saveable", "function").saved_bytes
    assert not advice("saves-everything", tanh_net, NET, "save_any_names_but_these('h')", "function")


# --------------------------------------------------------------------------------------------------- policies to no end


def test_a_policy_that_changes_nothing():
    (found,) = advice("changes-nothing", sin_net, NET, "everything_saveable", "function")
    assert found.figure == rm.trace(sin_net, *NET).report("none", "function").saved_bytes
    assert "no checkpoint at all" in found.sentence
    assert not advice("changes-nothing", sin_net, NET, "nothing_saveable", "function")
    assert not advice("changes-nothing", sin_net, NET)  # as written: nobody chose it


def test_a_checkpoint_around_everything():
    def deep(w, x):
        for _ in range(6):
            x = jnp.sin(x @ w)
        return x.sum()

    shapes = (f32(16, 16), f32(512, 16))
    (found,) = advice("only-costs", deep, shapes, "nothing_saveable", "function")
    # Five of the six matmuls at least run again, and all is held when the backward pass proper begins.
    assert found.unit == "FLOPs"
    assert found.figure >= 5 * 2 * 512 * 16 * 16
    assert not advice("only-costs", deep, shapes, "dots_saveable", "function")

    def shallow(w, x):  # a third less: the sine's argument is freed before its derivative is made
        return jnp.sum(jnp.sin(x @ w))

    assert not advice("only-costs", shallow, (f32(8, 512), f32(64, 8)), "nothing_saveable", "function")
    # Layer by layer it does lower the peak.
    fun, args = named_models.transformer(3, 32, 16, 2, scanned=False)
    assert not advice("only-costs", fun, args, "nothing_saveable", "sites")


def test_batched_matmuls_are_not_saved():
    fun, args = PROGRAMS["attention"]
    (found,) = advice("batched-matmuls", fun, args, "dots_with_no_batch_dims_saveable", "function")
    # q k^T and the weights times v have a batch dimension.
    assert found.figure == 2 * (2 * 2 * 8 * 8 * 16)
    assert "dots_saveable" in found.mend
    assert not advice("batched-matmuls", fun, args, "dots_saveable", "function")
    # vmap makes batch dimensions of its own.
    shapes = (f32(4, 8, 8), f32(4, 16, 8))
    product = jax.vmap(lambda w, x: jnp.sin(x @ w))
    (found,) = advice(
        "batched-matmuls", lambda w, x: product(w, product(w, x)).sum(), shapes, "dots_with_no_batch_dims_saveable"
    )
    assert found.figure == 2 * (4 * 2 * 16 * 8 * 8)
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


def test_a_checkpoint_on_the_last_stage():
    shapes = (f32(32, 32), f32(512, 32))
    trace = rm.trace(head("last"), *shapes)
    (found,) = (each for each in trace.advice() if each.kind == "last-stage")
    assert found.mend == "Take jax.checkpoint off last."
    # All that is recomputed is recomputed for it.
    assert (found.figure, found.unit) == (trace.report().recomputed_flops, "FLOPs")
    assert trace.report("none").peak_bytes * 0.9 <= trace.report().peak_bytes
    assert not advice("last-stage", head("first"), shapes)  # what comes after runs backward first
    assert not advice("last-stage", head(""), shapes)
    fun, args = named_models.transformer(3, 32, 16, 2, scanned=False)
    assert not advice("last-stage", fun, args)  # one of many layers


def only_sines(prim, *_, **__):
    return prim.name == "sin"


def only_dots(prim, *_, **__):
    return prim.name == "dot_general"


def sines(w, x):
    y = jnp.sin(x @ w)
    return jnp.sum(jnp.exp(y @ w))


def test_what_jax_remat3_does_otherwise():
    (found,) = advice("remat3", sines, NET, only_sines, "function")
    assert (found.figure, found.unit) == (64 * 4, "bytes")
    assert found.source.line == line_of(sines, "y = ")
    named = "checkpoint_name(jnp.sin(x @ w), 'y')"
    assert found.mend == (
        f"By name it works with both: {named}, and policy=jax.checkpoint_policies.save_only_these_names('y')."
    )
    assert ("would not save" in found.sentence) != _jax.remat3()
    saved = rm.trace(sines, *NET).report(only_sines, "function").saved_bytes
    assert saved == (0 if _jax.remat3() else found.figure)

    def mended(w, x):
        y = checkpoint_name(jnp.sin(x @ w), "y")
        return jnp.sum(jnp.exp(y @ w))

    # The equivalent saves what the policy means to save, with jax_remat3 and without.
    assert rm.trace(mended, *NET).report("save_only_these_names('y')", "function").saved_bytes == found.figure
    assert not advice("remat3", sines, NET, only_dots, "function")
    assert not advice("remat3", sines, NET, "everything_saveable", "function")


def test_checkpoints_inside_one_another():
    fun, args = named_models.transformer(2, 32, 16, 2, scanned=False)
    (found,) = advice("remat3", fun, args, "nothing_saveable", "function")
    assert ("would stay" in found.sentence) != _jax.remat3()
    assert not advice("remat3", fun, args, "nothing_saveable", "sites")


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
    (found,) = advice("cheap-to-keep", wide, WIDE, "nothing_saveable", "function")
    assert found.source.line == line_of(wide, "y = ")
    # Kept under the very code of the mend, with the name where it says, that is what JAX spares.
    assert found.mend == "checkpoint_name(h @ v, 'y'), and policy=jax.checkpoint_policies.save_only_these_names('y')."
    before = rm.trace(wide, *WIDE).report("nothing_saveable", "function")
    after = rm.trace(wide_named, *WIDE).report("save_only_these_names('y')", "function")
    assert (found.figure, found.unit) == (before.recomputed_flops - after.recomputed_flops, "FLOPs")
    assert found.figure >= 2 * 32 * 4096 * 16
    assert units.nbytes(after.saved_bytes - before.saved_bytes) in found.sentence
    assert not advice("cheap-to-keep", wide, WIDE, "dots_saveable", "function")  # it is kept
    # A name that is there needs only the policy.
    (found,) = advice("cheap-to-keep", wide_named, WIDE, "nothing_saveable", "function")
    assert found.mend == "policy=jax.checkpoint_policies.save_only_these_names('y')."


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
    (found,) = advice("cheap-to-keep", attend, shapes, policy, "function")
    assert code in found.mend
    trace = rm.trace(attend, *shapes)
    before = trace.report(policy, "function")
    after = trace.report(eval(found.mend.removeprefix("policy=").removesuffix(".")), "function")
    assert before.recomputed_flops - after.recomputed_flops == found.figure


@pytest.mark.parametrize("name", ["f(x)", "w[0]", "it's", "a | b"])
def test_the_mend_keeps_a_name_with_any_characters(name):
    def attend(w, x):
        q = checkpoint_name(x @ w, name)
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, x))
        return jnp.sum(jnp.sin(checkpoint_name(jnp.einsum("bts,bsd->btd", weights, q), "context")))

    shapes = (f32(8, 8), f32(2, 512, 8))
    (found,) = advice("cheap-to-keep", attend, shapes, POLICIES.save_only_these_names(name), "function")
    assert found.mend == f"policy=jax.checkpoint_policies.save_only_these_names({name!r}, 'context')."
    (found,) = advice("unknown-name", tanh_net, NET, POLICIES.save_only_these_names(name))
    assert repr(name) in found.sentence


def elementwise(w, x):
    y = checkpoint_name(x @ w, "y")
    z = checkpoint_name(jnp.exp(y) + y, "z")
    return jnp.sum(jnp.sin(z) * y)


def test_dear_to_keep_and_cheap_to_recompute():
    shapes = (f32(512, 64), f32(256, 512))
    (found,) = advice("cheap-to-recompute", elementwise, shapes, POLICIES.save_only_these_names("y", "z"))
    assert found.source.line == line_of(elementwise, "z = ")
    assert found.mend == "policy=jax.checkpoint_policies.save_only_these_names('y')."
    trace = rm.trace(elementwise, *shapes)
    both, one = (trace.report(f"save_only_these_names({names})") for names in ("'y', 'z'", "'y'"))
    assert (found.figure, found.unit) == (both.saved_bytes - one.saved_bytes, "bytes")
    assert found.figure == 256 * 64 * 4
    assert units.flops(one.recomputed_flops - both.recomputed_flops) in found.sentence
    # y alone: to have it again takes a matmul.
    assert not advice("cheap-to-recompute", elementwise, shapes, "save_only_these_names('y')")


def test_cheap_to_recompute_without_a_checkpoint():
    def fun(w, x):
        y = x @ w
        return jnp.sum(jnp.exp(jnp.sin(y) * y))

    def mended(w, x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.exp(jnp.sin(y) * y))(x @ w))

    shapes = (f32(512, 64), f32(256, 512))
    found = advice("cheap-to-recompute", fun, shapes)
    assert found
    assert all("jax.checkpoint(part)" in each.mend for each in found)
    # The mend frees what is said at least.
    freed = rm.trace(fun, *shapes).report().saved_bytes - rm.trace(mended, *shapes).report().saved_bytes
    assert freed >= max(each.figure for each in found) > 0
    assert not advice("cheap-to-recompute", mended, shapes)


def test_single_values_on_a_device():
    trace = rm.trace(wide, *WIDE)
    (found,) = (a for a in trace.advice("nothing_saveable", "function", device="H100 SXM") if a.kind == "cheap-to-keep")
    row = next(
        row
        for row in trace.what_if("nothing_saveable", "function", device="H100 SXM")
        if row.value.source == found.source and row.value.primitive == "dot_general"
    )
    assert f"{units.seconds(-row.seconds)} on H100 SXM" in found.sentence
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
    (found,) = offloads(offloading(), slow)
    assert found.source.line == line_of(wide_named, "y = ")
    assert (found.figure, found.unit) == (32 * 16 * 4, "bytes")
    trace = rm.trace(wide_named, *WIDE)
    moved, again = (times(trace.report(policy, "function"), slow) for policy in (offloading(), "nothing_saveable"))
    assert units.seconds(moved.offload) in found.sentence
    assert moved.extra > again.extra  # as the comparison has it too
    assert found.mend == "Recompute it: policy=jax.checkpoint_policies.nothing_saveable."
    assert not offloads(offloading(), linked(1e15))  # sooner fetched
    assert not offloads(offloading(), linked(None))  # who knows
    assert not offloads("save_only_these_names('y')", slow)


def test_of_several_only_what_loses():
    def both(w, x):
        a = checkpoint_name(jnp.sin(x), "a")  # little work for as many bytes
        y = checkpoint_name(a @ w, "y")
        return jnp.sum(jnp.exp(y) * jnp.tanh(y))

    shapes = (f32(4096, 4096), f32(512, 4096))
    (found,) = offloads(offloading(("y",), ("a",)), linked(1e12), both, shapes)
    assert "'a'" in found.sentence
    assert found.mend == "Recompute it: policy=jax.checkpoint_policies.save_only_these_names('y')."
    (found,) = offloads(offloading((), ("a", "y")), linked(1e12), both, shapes)
    assert "'a'" in found.sentence
    assert "names_which_can_be_offloaded=['y']" in found.mend


def test_offloaded_matmuls():
    shapes = (f32(64, 64), f32(16, 64))
    found = offloads("offload_dot_with_no_batch_dims", linked(1e9), deep, shapes)
    assert found
    assert {each.mend for each in found} == {"Recompute it: policy=jax.checkpoint_policies.nothing_saveable."}
    assert found[0].figure == rm.trace(deep, *shapes).report("offload_dot_with_no_batch_dims").offloaded_bytes
    assert not offloads("offload_dot_with_no_batch_dims", linked(1e15), deep, shapes)


# ---------------------------------------------------------------------------------------------------------- the program


def captures(n):
    table = jnp.ones((n, 256))

    def fun(x):
        return jnp.sum(jnp.sin(table @ x))

    return fun


def test_a_large_constant():
    (found,) = advice("large-constant", captures(1024), (f32(256),))
    assert (found.figure, found.unit) == (1024 * 256 * 4, "bytes")
    assert "f32[1024,256]" in found.sentence
    assert not advice("large-constant", captures(8), (f32(256),))


def mixed(w, x):
    y = (x @ w).astype(jnp.float32)
    return jnp.sum(jnp.sin(y * jax.nn.softmax(y)))


def half(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w).astype(jnp.float32))


def test_residuals_wider_than_the_weights():
    bf16 = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
    (found,) = advice("wide-residuals", mixed, bf16)
    report = rm.trace(mixed, *bf16).report()
    assert found.figure == sum(r.nbytes for r in report.residuals if r.kind == "intermediate" and r.dtype == "f32")
    assert "bf16" in found.sentence
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


def test_barriers_inside_a_scan():
    (found,) = advice("prevent-cse", scanned(True), LAYERS)
    assert "body" in found.sentence
    assert "prevent_cse=False" in found.mend
    assert not advice("prevent-cse", scanned(False), LAYERS)
    assert not advice("prevent-cse", inside, NET)  # no scan


def test_a_scan_without_a_checkpoint():
    (found,) = advice("bare-scan", scanned(None), LAYERS)
    report = rm.trace(scanned(None), *LAYERS).report()
    assert found.figure <= report.saved_bytes
    assert found.figure > 0.5 * report.saved_bytes
    assert "scan x8" in found.sentence
    # With the mend, the bytes are those of the carry, once an iteration.
    assert rm.trace(scanned(False), *LAYERS).report().saved_bytes == 8 * 16 * 64 * 4
    assert not advice("bare-scan", scanned(False), LAYERS)
    assert not advice("bare-scan", sin_net, NET)


def test_a_stale_trace():
    assert not advice("stale-trace", sin_net, NET)
    source = "def inner(x): return jnp.sin(x)\ndef outer(x): return inner(x)\n"
    names = {"jnp": jnp}
    exec(source, names)
    jitted = jax.jit(names["outer"])
    jax.make_jaxpr(lambda x: jitted(x).sum())(jnp.ones(4))
    exec("def inner(x): return jnp.cos(x)", names)
    (found,) = advice("stale-trace", lambda x: jitted(x).sum(), (f32(4),))
    assert "outer" in found.sentence
    assert "jax.clear_caches()" in found.mend


# ---------------------------------------------------------------------------------------------------------- in general


@pytest.mark.each_once
@pytest.mark.parametrize("name", sorted(PROGRAMS))
@pytest.mark.parametrize("policy", ["as_written", "dots_saveable"])
def test_every_program_can_be_advised_on(name, policy):
    fun, args = PROGRAMS[name]
    try:
        found = rm.trace(fun, *args).advice(policy)
    except RematError as error:
        assert "complex" in str(error)
        return
    for each in found:
        assert each.kind
        assert each.sentence.endswith((".", "otherwise has no effect."))
        assert each.mend.endswith(".")
        assert (each.figure is None) == (each.unit == "")


def test_a_plan_needs_no_advice():
    fun, args = named_models.transformer(2, 32, 16, 2, scanned=False)
    trace = rm.trace(fun, *args)
    kinds = {each.kind for each in trace.advice(trace.plan(0.5))}
    assert kinds <= {"prevent-cse"}
