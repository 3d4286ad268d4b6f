"""``trace.fit``: whether a step fits a device, and what would make it fit, held against every choice traced by JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.facts.times import times

POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")


def blocks(count: int = 4, width: int = 256, batch: int = 2048, *, scanned: bool = False) -> Any:
    """A loss of layers, whose calls are a place."""

    def block(x: Any, p: Any) -> Any:
        return x + jnp.tanh(jnp.sin(x @ p["up"]) * 2.0) @ p["down"]

    def loss(params: Any, x: Any) -> Any:
        if scanned:
            x = jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0]
        else:
            for p in params:
                x = block(x, p)
        return (x**2).sum()

    lead = (count,) if scanned else ()
    layer = {
        "up": jax.ShapeDtypeStruct((*lead, width, 4 * width), "float32"),
        "down": jax.ShapeDtypeStruct((*lead, 4 * width, width), "float32"),
    }
    return loss, (layer if scanned else [layer] * count, jax.ShapeDtypeStruct((batch, width), "float32"))


@pytest.mark.parametrize("scanned", [False, True])
def test_no_policy_at_any_place_fits_and_costs_less(scanned: bool) -> None:
    loss, args = blocks(scanned=scanned)
    trace = rm.trace(loss, *args)
    device = rm.devices.get("TPU v5e")
    reports = [trace.report(policy, at, device=device) for policy in POLICIES for at in ("function", "block")]
    costs = {id(it): times(it, device).extra for it in reports}
    for limit in {it.peak_high for it in reports}:
        fit = trace.fit(replace(device, memory_bytes=limit), compile=False)
        fitting = [it for it in reports if it.peak_high <= limit]
        assert fit.capacity_bytes == limit
        assert fit.best is not None
        assert fit.best.needed_high <= limit
        assert fit.best.extra_seconds <= min(costs[id(it)] for it in fitting) + 1e-12
        for choice in fit.choices:  # the front is right
            assert trace.report(choice, device=device).peak_bytes == choice.needed_bytes
            better = [
                it for it in reports if it.peak_high <= choice.needed_high and it.peak_bytes < choice.needed_bytes
            ]
            assert all(costs[id(it)] > choice.extra_seconds - 1e-12 for it in better)


def test_bytes_alone_are_of_no_device_and_no_size_is_too_small() -> None:
    loss, args = blocks()
    trace = rm.trace(loss, *args)
    fit = trace.fit("1 GiB")
    assert (fit.capacity_bytes, fit.device, fit.fits) == (2**30, "", True)
    assert {choice.extra_seconds for choice in fit.tried} == {None}
    assert fit.needed_bytes == trace.report(device="H100 SXM").peak_bytes
    none = trace.fit(1000)
    assert (none.fits, none.best) == (False, None)
    assert none.nearest is min(none.choices, key=lambda choice: choice.needed_bytes)
    assert none.nearest.needed_bytes < none.needed_bytes


def test_without_an_accelerator_a_device_must_be_named() -> None:
    loss, args = blocks()
    trace = rm.trace(loss, *args)
    with pytest.raises(rm.RematError, match="'TPU v5e'.*'24 GiB'"):
        trace.fit()
    with pytest.raises(rm.RematError, match="TPU v5"):
        trace.fit("TPU v55")


def other_order(x: Any, params: Any) -> Any:
    return blocks()[0](params, x)


def microbatches(params: Any, x: Any) -> Any:
    return jax.lax.map(lambda part: blocks()[0](params, part), x.reshape(4, -1, x.shape[-1])).sum()


def sgd(params: Any, key: Any, x: Any) -> Any:
    grads = jax.grad(blocks()[0])(params, x + jax.random.normal(key, x.shape[-1:]))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


KEY = jax.ShapeDtypeStruct((2,), "uint32")
BATCHES = {
    "unrolled": lambda size: (blocks()[0], (*blocks()[1][:1], blocks(batch=size)[1][1])),
    "scanned": lambda size: blocks(scanned=True, batch=size),
    "before the parameters": lambda size: (other_order, blocks(batch=size)[1][::-1]),
    "in parts": lambda size: (microbatches, blocks(batch=size)[1]),
    "a step": lambda size: (sgd, (blocks()[1][0], KEY, blocks(batch=size)[1][1])),
}


@pytest.mark.parametrize("limit", ["200 MB", "1 GB"])
@pytest.mark.parametrize("name", BATCHES)
def test_the_largest_batch_fits_and_one_more_does_not(name: str, limit: str) -> None:
    fun, args = BATCHES[name](512)
    fit = rm.trace(fun, *args).fit(limit)
    batch = fit.largest_batch
    assert batch is not None
    one_more = 4 if name == "in parts" else 1
    for size, fits in ((batch, True), (batch // one_more * one_more + one_more, False)):
        fun, args = BATCHES[name](size)
        assert (rm.trace(fun, *args).report(device="H100 SXM").peak_high <= fit.capacity_bytes) is fits


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda w: jnp.tanh(w @ w).sum(), (jax.ShapeDtypeStruct((8, 8), "float32"),)),
        (lambda x: jnp.sin(x), (jax.ShapeDtypeStruct((), "float32"),)),
    ],
)
def test_no_batch_is_no_answer(fun: Any, args: Any) -> None:
    assert rm.trace(fun, *args).fit("1 MB").largest_batch is None
