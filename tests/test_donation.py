"""Arguments of a step that could be donated: which, what it spares, how it is written; XLA's aliases are the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.records import FitChoice
from tests.programs import f32
from tests.test_fit import blocks

WEIGHTS = [f32(32, 32)] * 3
BATCH = (f32(4, 32), f32(4, 32))
STATE = (WEIGHTS, WEIGHTS)
WEIGHT_BYTES = 3 * 32 * 32 * 4


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def loss(params: Any, x: Any, y: Any) -> Any:
    for w in params:
        x = layer(x, w)
    return ((x - y) ** 2).mean()


def update(state: Any, batch: Any) -> Any:
    params, momentum = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - m, params, momentum), momentum), value


# ---------------------------------------------------------------------------------------------------------- the finding


def apart(params: Any, momentum: Any, x: Any, y: Any, *, rate: float = 0.1) -> Any:
    """Its labels are of the type of one result."""
    (params, momentum), value = update((params, momentum), (x, y))
    return params, momentum, value, y * rate


def lora(base: Any, adapters: Any, batch: Any) -> Any:
    """The base comes back as it was, and is like the adapters."""
    value, grads = jax.value_and_grad(lambda own: loss(jax.tree.map(jnp.add, base, own), *batch))(adapters)
    return base, jax.tree.map(jnp.subtract, adapters, grads), value


def frozen(base: Any, adapters: Any, batch: Any) -> Any:
    """The base does not come back, and is like the adapters."""
    return lora(base, adapters, batch)[1:]


def counting(state: Any, count: Any, batch: Any) -> Any:
    """A number that comes back is not worth that the caller loses it."""
    return *update(state, batch), count + 1


@partial(jax.jit, donate_argnums=(0, 1))
def donating(params: Any, momentum: Any, x: Any, y: Any) -> Any:
    (params, momentum), value = update((params, momentum), (x, y))
    return params, momentum, value


def with_settings(params: Any, momentum: Any, x: Any, y: Any) -> Any:
    """Numbers stand between the arrays, as the settings of equinox's modules do."""
    (params, momentum), value = update((params, momentum), (x, y))
    return [leaf for w in params for leaf in (w, 0.5, True)], momentum, value


def narrower(state: Any, batch: Any) -> Any:
    (params, momentum), value = update(state, batch)
    return (jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), momentum), value


@pytest.mark.parametrize(
    ("step", "args", "kwargs", "names", "weights"),
    [
        (update, (STATE, BATCH), {}, ("state",), 2),
        (jax.jit(update), (STATE, BATCH), {}, ("state",), 2),
        (jax.jit(counting), (STATE, jax.ShapeDtypeStruct((), "int32"), BATCH), {}, ("state",), 2),
        (jax.jit(apart), (WEIGHTS, WEIGHTS, *BATCH), {}, ("params", "momentum"), 2),
        (jax.jit(apart), (WEIGHTS,), {"momentum": WEIGHTS, "x": BATCH[0], "y": BATCH[1]}, ("params", "momentum"), 2),
        (jax.jit(apart, donate_argnums=0), (WEIGHTS, WEIGHTS, *BATCH), {}, ("momentum",), 2),
        (jax.jit(apart, donate_argnums=(0, 1)), (WEIGHTS, WEIGHTS, *BATCH), {}, (), 2),
        (jax.jit(lora), (WEIGHTS, WEIGHTS, BATCH), {}, ("adapters",), 1),
        (jax.jit(frozen), (WEIGHTS, WEIGHTS, BATCH), {}, ("adapters",), 1),
        (jax.jit(partial(apart, rate=1.0)), (WEIGHTS, WEIGHTS, *BATCH), {}, ("params", "momentum"), 2),
        (donating.__wrapped__, (WEIGHTS, WEIGHTS, *BATCH), {}, (), 0),
        (with_settings, (WEIGHTS, WEIGHTS, *BATCH), {}, ("params", "momentum"), 2),
        (jax.jit(narrower), (STATE, BATCH), {}, (), 0),
        (jax.jit(loss), (WEIGHTS, *BATCH), {}, (), 0),
    ],
)
def test_what_comes_back_can_be_donated(step, args, kwargs, names, weights):
    trace = rm.trace(step, *args, **kwargs)
    donation = trace.engine.donation
    assert (donation.names if donation else ()) == names
    choice = donated(trace) if donation else "as_written"
    assert (
        trace.measure(choice).alias_bytes == weights * WEIGHT_BYTES
    )  # all of it lies where a result does, and no more
    if donation:
        arrays, others = (jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), (args, kwargs)) for _ in "12")
        expected = trace.function()(*others[0], **others[1])
        given = trace.function(choice)(*arrays[0], **arrays[1])
        jax.tree.map(lambda own, right: jax.numpy.allclose(own, right) or pytest.fail("another value"), given, expected)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(arrays) if leaf.is_deleted()) == weights * WEIGHT_BYTES


def donated(trace: rm.Trace, policy: str = "as_written", at: str | None = None) -> FitChoice:
    names = trace.engine.donation.names
    return FitChoice("donate", policy, at or trace.default_at, None, None, None, None, donate=names)


@pytest.mark.parametrize("device", ["TPU v5e", "H100 SXM"])
@pytest.mark.parametrize("policy", ["as_written", "nothing_saveable"])
def test_figures_are_those_of_a_step_that_donates(device, policy):
    trace, by_hand = (rm.trace(jax.jit(update, **options), STATE, BATCH) for options in ({}, {"donate_argnums": 0}))
    choice, at = donated(trace, policy, "layer"), None if policy == "as_written" else "layer"
    own, right = trace.report(choice, device=device), by_hand.report(policy, at, device=device)
    assert (own.peak_low, own.peak_bytes, own.peak_high) == (right.peak_low, right.peak_bytes, right.peak_high)
    assert own.peak_bytes == trace.timeline(choice, device=device).peak_bytes
    assert own.peak_bytes <= trace.report(policy, at, device=device).peak_bytes - 2 * WEIGHT_BYTES * (
        device != "H100 SXM"
    )
    assert trace.report(policy, at, device=device).residuals == own.residuals
    with pytest.raises(rm.RematError, match="batch cannot be donated"):
        trace.report(replace(choice, donate=("batch",)))


# ---------------------------------------------------------------------------------------------------------- as a choice


def trained(batch: int = 384) -> rm.Trace:
    blocks_loss, (params, x) = blocks(batch=batch)

    def step(state: Any, x: Any) -> Any:
        params, *moments = state
        value, grads = jax.value_and_grad(blocks_loss)(params, x)
        moments = [jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads) for moment in moments]
        return (jax.tree.map(lambda p, *moments: p - sum(moments), params, *moments), *moments), value

    return rm.trace(jax.jit(step), (params, params, params), x)


def test_donation_is_a_choice_and_goes_with_a_checkpoint():
    trace = trained()
    device = rm.devices.get("TPU v5e")
    written, alone, both = (
        trace.report(choice, device=device).peak_high
        for choice in ("as_written", donated(trace), donated(trace, "nothing_saveable", "block"))
    )
    assert both < alone < written
    whole, enough, least = (
        trace.fit(replace(device, memory_bytes=limit), compile=False) for limit in (written, alone, both)
    )
    assert whole.best == whole.as_written  # which fits, and asks nothing of the caller
    assert "donate state" in [choice.what for choice in whole.choices]
    assert (enough.best.what, enough.best.extra_seconds, enough.best.donate) == ("donate state", 0.0, ("state",))
    assert "jax.jit(step, donate_argnums=(0,))" in enough.best.code
    assert enough.best.caution == "The caller may not use state after the call."
    assert least.best.donate == ("state",)
    assert least.best.what == "donate state and @jax.checkpoint on block"
    assert least.best.extra_seconds > 0
    assert least.best.needed_bytes == trace.report(least.best, device=device).peak_bytes
    assert len(least.best.code.split("\n")) == 2


def test_the_range_of_a_peak_in_the_update_has_that_of_the_gradient():
    """All that the update holds is sure, and the gradient, which donation leaves as it is, may need more than that."""
    trace = trained(batch=512)
    written, alone = (trace.report(choice, device="TPU v5e") for choice in ("as_written", donated(trace)))
    assert alone.peak_bytes < written.peak_bytes < alone.peak_high == written.peak_high


def test_nothing_is_promised_on_a_cpu():
    cpu = replace(rm.devices.get("this CPU"), memory_bytes=10**6)
    assert not any(choice.donate for choice in trained().fit(cpu, compile=False).tried)


# ---------------------------------------------------------------------------------------------------- how it is written

SOURCE = """
import functools
from functools import partial
import jax
from jax import jit
from tests.test_donation import loss

def layer(w, g):
    return w - g

def update(state, batch):
    params, momentum = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return (jax.tree.map(layer, params, grads), momentum), value

"""


@pytest.mark.parametrize(
    ("before", "after", "args"),
    [
        ("step = jax.jit(update)", "step = jax.jit(update, donate_argnums=(0,))", ()),
        ("step = jit(update, inline=False)", "step = jit(update, donate_argnums=(0,), inline=False)", ()),
        (
            "@jax.jit\ndef step(state, batch):\n    return update(state, batch)",
            "@jax.jit(donate_argnums=(0,))\ndef step(state, batch):\n    return update(state, batch)",
            (),
        ),
        (
            "@jax.jit(static_argnums=2)\ndef step(state, batch, n):\n    return update(state, batch)",
            "@jax.jit(donate_argnums=(0,), static_argnums=2)\n"
            "def step(state, batch, n):\n    return update(state, batch)",
            (3,),
        ),
        (
            "@partial(jit, static_argnames='n')\ndef step(state, batch, n):\n    return update(state, batch)",
            "@partial(jit, donate_argnames=(\"state\",), static_argnames='n')\n"
            "def step(state, batch, n):\n    return update(state, batch)",
            (3,),
        ),
        (
            "step = partial(jit, static_argnums=2)(lambda state, batch, n: update(state, batch))",
            "step = partial(jit, donate_argnums=(0,), static_argnums=2)(lambda state, batch, n: update(state, batch))",
            (3,),
        ),
        (
            "def make(n):\n    def step(state, batch):\n        return update(state, batch)\n    return step\n"
            "step = jax.jit(make(3))",
            "def make(n):\n    def step(state, batch):\n        return update(state, batch)\n    return step\n"
            "step = jax.jit(make(3), donate_argnums=(0,))",
            (),
        ),
        (
            "def main():\n    return jax.jit(step)\ndef step(state, batch):\n    return update(state, batch)",
            "def main():\n    return jax.jit(step, donate_argnums=(0,))\n"
            "def step(state, batch):\n    return update(state, batch)",
            (),
        ),
    ],
)
def test_the_jit_of_the_source_is_edited(module, before, after, args):
    trace = rm.trace(module(SOURCE + before).step, STATE, BATCH, *args)
    edit = trace.edit(donated(trace))
    assert (edit.verified, edit.differences) == (True, ())
    assert edit.apply_text() == SOURCE + after + "\n"
    both = trace.edit(donated(trace, "nothing_saveable", "layer"))
    code = trace.engine.donation.code.partition("  # ")[0]
    assert code.replace("'", '"') in after.replace("'", '"')
    assert both.verified
