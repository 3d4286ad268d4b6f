"""Sentences on where XLA departs from the report: each said where a second compilation shows it, and else not."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxlib import _hlo

import remat_magic as rm
from remat_magic import _jax
from remat_magic.measuring.departures import (
    contractions,
    forward_is_dead,
    in_program,
    kept_less,
    recomputation_of,
    undone,
    without_effect,
)
from remat_magic.measuring.measure import compile_for_memory
from remat_magic.records import Measurement, Report, Residual
from tests.benchmarks.named_models import transformer

policies = jax.checkpoint_policies
SQUARE = jax.ShapeDtypeStruct((64, 64), "float32")
ROWS = jax.ShapeDtypeStruct((32, 64), "float32")
SMALL = {"blocks": 3, "width": 32, "length": 16, "batch": 2}


def looped(ws, x):
    layer = jax.checkpoint(lambda x, w: (jnp.sin(jnp.sin(x @ w) @ w), None))
    return jax.lax.scan(layer, x, ws)[0].sum()


# The first is the second's loop without all that a transformer has besides.
MODELS = {
    "loop": (looped, (jax.ShapeDtypeStruct((4, 64, 64), "float32"), ROWS)),
    "unrolled": transformer(**SMALL, scanned=False),
}


def net(prevent_cse):
    """Four layers under checkpoint; without a barrier XLA sees that the backward pass repeats their matmuls."""
    layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), prevent_cse=prevent_cse)

    def net(ws, x):
        for w in ws:
            x = layer(x, w)
        return x.sum()

    return net, ([SQUARE] * 4, ROWS)


def seen(trace, policy="as_written", at=None):
    """The finding about matmuls, and how many of them the compiled program has by a plain count of its text."""
    gradient = trace.engine.gradient(policy, at)
    executable = compile_for_memory(gradient.lowered, "cpu")
    written = len(re.findall(r" (?:dot|convolution)\(", executable.as_text()))
    return undone(gradient, recomputation_of(gradient), read(executable)), written


def read(executable):
    """The one module of an executable."""
    (module,) = _jax.modules_of(executable.runtime_executable().hlo_modules())
    return module


def repeated(trace, policy="as_written", at=None):
    names = ("dot_general", "conv_general_dilated")
    return sum(e.times for e in trace.report(policy, at).repeated if e.primitive in names)


# ------------------------------------------------------------------------------------------------ counting contractions


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_program_runs_the_contractions_of_its_jaxpr(name, remat3):
    """XLA splits none and merges none: the two counts share no code and agree to the size."""
    fun, args = MODELS[name]
    gradient = rm.trace(fun, *args).engine.gradient("none")
    found = contractions(read(compile_for_memory(gradient.lowered, "cpu")))
    assert found.all == in_program(gradient.jaxpr)
    assert found.all.total() >= 24
    assert found.recomputed.total() == 0


HLO = """\
HloModule jit_f, is_scheduled=true

%fused (p0: f32[2,3], p1: f32[3,5]) -> f32[2,5] {
  %p0 = f32[2,3]{1,0} parameter(0)
  %p1 = f32[3,5]{1,0} parameter(1)
  ROOT %dot.1 = f32[2,5]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, MARK
}

%branch (q: f32[2,3]) -> f32[2,5] {
  %q = f32[2,3]{1,0} parameter(0)
  %v = f32[3,5]{1,0} constant({...})
  ROOT %called = f32[2,5]{1,0} fusion(%q, %v), kind=kLoop, calls=%fused
}

%body (s: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %s = (s32[], f32[2,3]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[2,3]{1,0} get-tuple-element(%s), index=1
  %w = f32[3,5]{1,0} constant({...})
  %fusion = f32[2,5]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused.1
  ROOT %t = (s32[], f32[2,3]{1,0}) tuple(%n, %x)
}

%condition (c: (s32[], f32[2,3])) -> pred[] {
  %c = (s32[], f32[2,3]{1,0}) parameter(0)
  ROOT %on = pred[] constant(true)
}

ENTRY %main (i: s32[], a: f32[2,3], b: f32[7]) -> f32[2,3] {
  %i = s32[] parameter(0)
  %a = f32[2,3]{1,0} parameter(1)
  %b = f32[7]{0} parameter(2)
  %t0 = (s32[], f32[2,3]{1,0}) tuple(%i, %a)
  %loop = (s32[], f32[2,3]{1,0}) while(%t0), condition=%condition, body=%bodyTRIPS
  %if = f32[2,5]{1,0} conditional(%i, %a, %a), branch_computations={%branch, %branch.1}
  %gemm = (f32[4]{0}, s8[9]{0}) custom-call(%b, %a), custom_call_target="__cublas$gemm"
  ROOT %other = f32[2,3]{1,0} custom-call(%a, %a), custom_call_target="TopK"
}
"""
MARK = 'metadata={op_name="jit(f)/checkpoint/rematted_computation/dot_general"}'
TRIPS = ', backend_config={"known_trip_count":{"n":"12"}}'
PLAIN = 'metadata={op_name="jit(f)/dot_general"}'


def written(mark, trips):
    """The module of that text, as XLA reads it; what is called twice is written twice, as XLA has it."""
    text = HLO.replace("TRIPS", trips)
    parts = text.split("\n\n")
    fused, branch = parts[1], parts[2]
    again = [re.sub(r"%(fused|branch|p0|p1|dot.1|q|v|called)\b", r"%\1.COPY", part) for part in (fused, branch)]
    copies = [again[0].replace("COPY", "1"), again[0].replace("COPY", "2"), again[1].replace("COPY", "1")]
    copies[2] = copies[2].replace("calls=%fused.1", "calls=%fused.2")
    text = "\n\n".join([parts[0], fused, *copies[:2], branch, copies[2], *parts[3:]])
    module = _hlo.hlo_module_from_text(text.replace("MARK", mark))
    return _jax.modules_of([module])[0]


def test_loops_branches_fusions_and_libraries_are_counted():
    found = contractions(written(MARK, TRIPS))
    size, library = (2 * 5, 2 * 3 * 3 * 5), (4, 7 * 2 * 3)
    assert found.all == Counter({size: 12 + 2, library: 1})
    assert found.recomputed == Counter({size: 12 + 2, library: 0})
    assert not contractions(written(PLAIN, TRIPS)).recomputed.total()


@pytest.mark.parametrize(("layout", "there"), [("{0}", False), ("{0:S(5)}", True)])
def test_the_host_is_a_memory_of_its_own(layout, there):
    text = "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    (module,) = _jax.modules_of([_hlo.hlo_module_from_text(text.replace("{0}", layout))])
    assert [instruction.on_host for instruction in module.instructions] == [there]


def test_a_loop_of_unknown_length_is_not_guessed():
    assert contractions(written(PLAIN, "")) is None


# ------------------------------------------------------------------------------------------------------ XLA undoes it


def test_matmuls_that_xla_merges_are_told(remat3):
    trace = rm.trace(*_flat(net(prevent_cse=False)))
    sentence, compiled = seen(trace)
    assert compiled == seen(trace, "none")[1]  # though the backward pass was to repeat them
    assert repeated(trace) == 8
    assert "of the 8 matrix multiplications and convolutions that the backward pass repeats" in sentence
    assert "the compiled program repeats 0 and keeps" in sentence
    assert sentence.endswith("leave prevent_cse at its default, True.")


# XLA merges through a loop, a barrier, or neither.
@pytest.mark.parametrize("name", ["loop", "barrier", "none"])
def test_told_exactly_where_matmuls_are_missing(name, remat3):
    """By the plain count beside that of the program without checkpoints (jax 0.10.2 merges some through barriers)."""
    fun, args = MODELS.get(name) or net(prevent_cse=name == "barrier")
    trace = rm.trace(fun, *args)
    bodies = 4 if name == "loop" else 1  # a loop's body is written once
    told, plain = seen(trace, "none")
    assert not told
    for policy in ("as_written", "dots_saveable"):
        sentence, compiled = seen(trace, policy)
        missing = repeated(trace, policy) // bodies - (compiled - plain)
        assert bool(sentence) == bool(missing)
        if sentence:
            assert f"the compiled program repeats {repeated(trace, policy) // bodies - missing} and" in sentence


def test_a_scan_keeps_them_apart(remat3):
    trace = rm.trace(*_flat(MODELS["loop"]))
    assert repeated(trace) == 8
    assert seen(trace)[0] == ""


def test_what_the_user_computes_twice_is_not_taken_for_it(remat3):
    """XLA merges these two as well, which no policy asked for."""
    layer = jax.checkpoint(lambda c, w: jnp.sin(c @ w) * jnp.cos(c @ w))

    def twice(ws, x):
        return jax.lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0].sum()

    trace = rm.trace(twice, jax.ShapeDtypeStruct((4, 64, 64), "float32"), ROWS)
    gradient = trace.engine.gradient()
    module = read(compile_for_memory(gradient.lowered, "cpu"))
    assert contractions(module).all.total() < in_program(gradient.jaxpr).total()
    assert undone(gradient, recomputation_of(gradient), module) == ""


def _flat(model):
    fun, args = model
    return fun, *args


# ---------------------------------------------------------------------------------------------------- dead forward pass


def layers(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None), x, ws)[0].sum()


LAYERS = (layers, jax.ShapeDtypeStruct((4, 64, 64), "float32"), ROWS)


def is_dead(trace, policy, at=None):
    gradient = trace.engine.gradient(policy, at)
    return forward_is_dead(gradient, recomputation_of(gradient))


@pytest.mark.slow
def test_a_forward_pass_that_only_the_value_needs_is_told(remat3):
    """Compiled without the value, the program has the matmuls and the memory of one without a checkpoint."""
    fun, *args = LAYERS
    assert "XLA drops the forward pass as dead code" in is_dead(rm.trace(*LAYERS), "nothing_saveable")

    def compiled(fun, make):
        return compile_for_memory(jax.jit(make(fun, (0, 1))).lower(*args), "cpu")

    plain, whole = compiled(fun, jax.grad), compiled(jax.checkpoint(fun), jax.grad)
    assert contractions(read(whole)).all == contractions(read(plain)).all
    bytes_without, bytes_with = (c.memory_analysis().temp_size_in_bytes for c in (plain, whole))
    assert bytes_with == pytest.approx(bytes_without, rel=0.1)
    with_value = compiled(jax.checkpoint(fun), jax.value_and_grad)
    assert contractions(read(with_value)).all.total() == contractions(read(plain)).all.total() + 8


@pytest.mark.parametrize("policy", ["none", "dots_saveable", "everything_saveable"])
def test_a_forward_pass_that_is_read_is_not_dead(policy, remat3):
    assert is_dead(rm.trace(*LAYERS), policy) == ""


def test_a_checkpoint_on_a_part_leaves_the_forward_pass_alive(remat3):
    def f(ws, x):
        return (jax.checkpoint(layers)(ws, jnp.exp(x)) ** 2).sum()

    assert is_dead(rm.trace(f, *LAYERS[1:]), "nothing_saveable", "sites") == ""


def test_a_checkpoint_within_the_checkpoint_repeats_work():
    trace = rm.trace(*_flat(MODELS["unrolled"]))
    assert repeated(trace, "nothing_saveable", "function") > 24  # more than the forward pass has
    assert is_dead(trace, "nothing_saveable", "function") == ""


# ------------------------------------------------------------------------------------------------------- kept in memory


def test_residuals_that_find_no_room_are_told(remat3):
    """Elementwise chains are computed again in one fusion, from the argument."""

    def chain(x):
        for _ in range(8):
            x = jnp.sin(x)
        return x.sum()

    measured = rm.trace(chain, jax.ShapeDtypeStruct((1000,), "float32")).measure("none")
    assert measured.temp_bytes + measured.output_bytes < 8 * 4000
    assert measured.findings[-1].kind == "kept-less"
    assert measured.findings[-1].startswith("XLA keeps less than autodiff saves: 32.0 kB of residuals do not fit into")


def test_residuals_that_find_room_are_not():
    fun, args = MODELS["loop"]
    trace = rm.trace(fun, *args)
    measured = trace.measure("none")
    assert trace.report("none").saved_bytes < measured.temp_bytes
    assert measured.findings == ()


def test_nothing_is_said_of_what_is_not_known():
    assert kept_less(Measurement("none", "function"), 10**9) == ""
    several = Measurement("none", "function", devices=4, temp_bytes=1, output_bytes=1)
    assert kept_less(several, 10**9) == ""  # the report's bytes are those of all devices together
    assert kept_less(Measurement("none", "function", temp_bytes=95, output_bytes=0), 100) == ""
    assert kept_less(Measurement("none", "function", temp_bytes=85, output_bytes=0), 100)


# --------------------------------------------------------------------------------------------- savings that do not show


def pair(policy, saved, temp, at="function", **more):
    residual = Residual("f32", (saved // 4,), saved, "intermediate")
    return Report(policy, at, residuals=(residual,)), Measurement(policy, at, "cpu", temp_bytes=temp, **more)


def test_savings_that_do_not_show_are_told():
    found = without_effect([pair("none", 1000, 2000), pair("nothing_saveable", 0, 1950)])
    assert found == {
        1: "nothing_saveable saves 1.00 kB less than no checkpoint, yet XLA's temporary memory is 1.95 kB against "
        "2.00 kB: it gains nothing here."
    }


@pytest.mark.parametrize(
    "measured",
    [
        [pair("none", 1000, 2000), pair("nothing_saveable", 0, 1500)],  # shows
        [pair("none", 1000, 20000), pair("nothing_saveable", 0, 20000)],  # too small to show
        [pair("none", 1000, 2000), pair("everything_saveable", 1000, 2000)],  # saves nothing
        [pair("nothing_saveable", 0, 2000)],  # nothing to compare with
        [pair("none", 1000, 2000), pair("nothing_saveable", 0, 2000, at="sites")],
        [pair("none", 1000, 2000), pair("nothing_saveable", 0, 2000, devices=4)],
        [pair("none", 1000, None), pair("nothing_saveable", 0, None)],
    ],
)
def test_savings_that_show_or_cannot_are_not(measured):
    assert without_effect(measured) == {}


@pytest.mark.slow
def test_a_whole_function_checkpoint_of_a_scan_gains_nothing(remat3):
    job = rm.Measuring(rm.trace(*LAYERS), [("none", None), ("nothing_saveable", None), ("dots_saveable", None)])
    assert job.wait(600)
    none, nothing, _ = job.results
    assert nothing.temp_bytes >= 0.9 * none.temp_bytes
    assert "it gains nothing here." in nothing.findings[-1]
    assert nothing.findings[-1].kind == "no-gain"
    assert "no-gain" not in [note.kind for note in none.findings]
    assert not any("gains nothing here" in sentence for sentence in none.findings)


def test_what_stays_on_the_device_though_it_is_offloaded_is_told():
    """A CPU has one memory: the compiled program has nothing of it on the host."""

    def fun(ws, x):
        for w in ws:
            x = jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))
        return x.sum()

    trace = rm.trace(fun, [jax.ShapeDtypeStruct((16, 16), "float32")] * 2, jax.ShapeDtypeStruct((8, 16), "float32"))
    for key, told in (("names(offload=['h'])", True), ("save_only_these_names('h')", False)):
        assert ("offload-kept" in [note.kind for note in trace.measure(key, "function").findings]) == told
    plan = trace.plan("40%", "function", device="A100 80GB SXM", offload=1e15)
    assert plan.offloaded_bytes
    assert "on the device" in plan.status
