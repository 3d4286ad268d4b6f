"""Sentences on where XLA departs from the report: each said where a second compilation shows it, and else not."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxlib import _hlo

import remat_magic as rm
from remat_magic import _jax
from remat_magic.measuring.measure import without_effect
from remat_magic.records import Measurement, Report, Residual


def layers(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None), x, ws)[0].sum()


LAYERS = (layers, jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32"))


@pytest.mark.parametrize(("layout", "there"), [("{0}", False), ("{0:S(5)}", True)])
def test_the_host_is_a_memory_of_its_own(layout, there):
    text = "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    (module,) = _jax.modules_of([_hlo.hlo_module_from_text(text.replace("{0}", layout))])
    assert [instruction.on_host for instruction in module.instructions] == [there]


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
