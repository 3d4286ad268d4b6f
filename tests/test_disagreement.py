"""Sentences on where XLA departs from the report: each said where a second compilation shows it, and else not."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxlib import _hlo

import remat_magic as rm
from remat_magic import _jax


@pytest.mark.parametrize(("layout", "there"), [("{0}", False), ("{0:S(5)}", True)])
def test_the_host_is_a_memory_of_its_own(layout, there):
    text = "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
    (module,) = _jax.modules_of([_hlo.hlo_module_from_text(text.replace("{0}", layout))])
    assert [instruction.on_host for instruction in module.instructions] == [there]


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
