"""``trace.fit``: whether a step fits a device, and what would make it fit, held against every choice traced by JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.facts.times import times
from remat_magic.planning.fit import Fitting, Target
from remat_magic.records import Fit, FitChoice, Plan, PlannedValue
from remat_magic.records.fit import ordered
from tests.benchmarks import networks

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
        assert (rm.trace(fun, *args).report(device="H100 SXM").peak_bytes <= fit.capacity_bytes) is fits


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda w: jnp.tanh(w @ w).sum(), (jax.ShapeDtypeStruct((8, 8), "float32"),)),
        (lambda x: jnp.sin(x), (jax.ShapeDtypeStruct((), "float32"),)),
    ],
)
def test_no_batch_is_no_answer(fun: Any, args: Any) -> None:
    assert rm.trace(fun, *args).fit("1 MB").largest_batch is None


# ----------------------------------------------------------------------------------------------------- what is answered


def gpt(*, unrolled: bool = False) -> Any:
    """A step of a GPT that needs 35 to 50 GB as it is written."""
    block = networks._block(16)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens]
        if unrolled:
            for layer in range(12):
                x = block(x, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"]))
        else:
            x = networks.scanned(block, x, params["layers"])
        return networks.cross_entropy(networks.norm(x) @ params["words"].T, tokens)

    params = {"layers": networks._weights(1024, 12, of=jnp.bfloat16), "words": networks.S(32000, 1024, of=jnp.bfloat16)}
    return networks._adam(loss), (params, params, params, networks.S(14 if unrolled else 6, 2048, of=networks.I32))


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
def test_a_gpt_that_needs_twice_and_more_of_what_there_is_gets_an_answer_that_can_be_written(unrolled: bool) -> None:
    step, args = gpt(unrolled=unrolled)
    trace = rm.trace(step, *args)
    fits = [*trace.fitting("TPU v5e")]
    fit = fits[-1]
    assert 30e9 < fit.needed_bytes < 60e9
    assert fit.fits is False
    assert fit.capacity_bytes == 16908288000
    answer = next(choice for choice in fit.choices if not choice.by_hand)  # of what is unrolled the range is wide
    assert answer == fit.best or unrolled
    assert answer.needed_low < answer.needed_bytes < fit.capacity_bytes
    assert trace.edit(answer).verified
    assert [it.progress.finished for it in fits] == [False] * (len(fits) - 1) + [True]
    # Each program once, in order: those that fit by their time, then those that may, then the others by their need.
    ranks = [{True: 0, None: 1, False: 2}[choice.fits] for choice in fit.tried if not choice.unusable]
    assert ranks == sorted(ranks)
    times_added = [choice.extra_seconds for choice in fit.tried if choice.fits and not choice.unusable]
    assert times_added == sorted(times_added)
    assert len({(choice.key, choice.at) for choice in fit.tried}) == len(fit.tried)
    assert [choice.what for choice in trace.fit("TPU v5e").tried] == [choice.what for choice in fit.tried]


def test_a_choice_stands_wherever_a_policy_can() -> None:
    loss, args = blocks()
    trace = rm.trace(loss, *args)
    choice = next(it for it in trace.fit("40 MB").choices if it.policy != "as_written")
    report = trace.report(choice, device="H100 SXM")
    assert (report.peak_bytes, report.peak_high) == (choice.needed_bytes, choice.needed_high)
    assert trace.timeline(choice, device="H100 SXM").peak_bytes == choice.needed_bytes
    assert trace.forward(choice).out_avals
    assert trace.backward(choice).out_avals
    values = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), args)
    assert jnp.allclose(jax.jit(trace.function(choice))(*values), loss(*values))
    assert trace.measure(choice).temp_bytes
    assert trace.edit(choice).best.verified
    assert trace.compare([choice]).rows[0].peak_bytes
    with pytest.raises(rm.RematError, match="leave `at` out"):
        trace.report(choice, "function")


def test_what_fits_is_told_what_could_be_recomputed_less() -> None:
    loss, (params, x) = blocks(scanned=True)
    trace = rm.trace(lambda params, x: jax.checkpoint(loss)(params, x), params, x)
    fit = trace.fit("TPU v5e", compile=False)
    assert fit.fits
    assert fit.best.extra_seconds < 0
    assert fit.best.extra_flops < 0
    assert fit.best.what == "no checkpoint on loss"


def test_a_function_of_three_lines_is_the_answer_itself() -> None:
    trace = rm.trace(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), jax.ShapeDtypeStruct((), "float32"))
    fit = trace.fit("TPU v5e", compile=False)
    assert fit.fits
    assert fit.best == fit.as_written
    assert fit.largest_batch is None


def test_what_no_edit_writes_is_not_the_best() -> None:
    loss, args = blocks(8)
    trace = rm.trace(loss, *args)
    limit = trace.report("nothing_saveable", "block", device="H100 SXM").peak_high
    *_, as_is = Fitting(trace.facts, Target.of(limit), lambda facts, choice: "").stages()
    refused = as_is.best
    why = "no edit writes it."
    write = lambda facts, choice: why if choice.what == refused.what else ""  # noqa: E731
    *_, fit = Fitting(trace.facts, Target.of(limit), write).stages()
    assert fit.best != refused
    assert [it.unusable for it in fit.tried if it.what == refused.what] == [why]


def test_values_go_to_the_host_where_that_takes_less_time() -> None:
    loss, args = blocks(16, scanned=True)
    trace = rm.trace(loss, *args)
    device = rm.devices.get("TPU v5e")
    limit = trace.report("nothing_saveable", "block", device=device).peak_high * 5 // 4
    linked = [replace(device, memory_bytes=limit, host_bandwidth=link) for link in (1e6, 1e15)]
    slow, fast = ([*Fitting(trace.facts, Target.of(it), lambda facts, choice: "").stages()][-1] for it in linked)
    assert fast.best.what.startswith("offload")
    assert fast.best.extra_seconds < slow.best.extra_seconds
    assert trace.report(fast.best).offloaded_bytes
    assert not trace.report(slow.best).offloaded_bytes


def test_a_batch_that_is_far_away_says_nothing() -> None:
    loss, args = blocks(batch=1)
    trace = rm.trace(loss, *args)
    assert trace.fit("100 GB").largest_batch is None
    assert trace.fit("20 MB").largest_batch is not None


def choice(
    what: str, needed: float, time: float, *, fits: bool | None = True, names: int = 0, **more: Any
) -> FitChoice:
    values = tuple(PlannedValue(f"v{number}", 1) for number in range(names))
    plan = Plan("f", "block", what, 0, 0, 0, 0, values) if names else None
    size = round(needed * 1e6)
    return FitChoice(
        what, what, "block", size, size // 2, 2 * size, fits, extra_seconds=time, extra_time=time, plan=plan, **more
    )


@pytest.mark.parametrize(
    ("choices", "front"),
    [
        ([choice("a", 100, 0.2), choice("plan", 99.5, 0.195, names=3)], "a"),  # the simpler of two that hardly differ
        ([choice("a", 100, 0.2), choice("plan", 98.5, 0.185, names=3)], "a"),
        ([choice("a", 100, 0.2), choice("plan", 98, 0.195, names=3)], "plan"),
        ([choice("a", 100, 0.2), choice("plan", 99.5, 0.18, names=3)], "plan"),
        ([choice("few", 100, 0.2, names=1), choice("many", 99.5, 0.195, names=3)], "few"),
        ([choice("a", 100, 0.2), choice("b", 99.5, 0.205)], "a"),  # of equally simple ones the cheaper
        ([choice("a", 100, 0.2), choice("b", 90, 0.205)], "a b"),
        ([choice("a", 100, 0.2, fits=None), choice("plan", 99.5, 0.195, names=3)], "plan"),
        ([choice("a", 100, 0.2), choice("gone", 99.5, 0.2, donate=("x",))], "a"),
        ([choice("a", 100, 0.2, compiled=True), choice("b", 60, 0.3)], "a b"),
        ([choice("a", 40, 0.2, compiled=True), choice("b", 90, 0.3)], "a"),
        ([choice("a", 60, 0.2, compiled=True), choice("b", 90, 0.3)], "a b"),  # which may need 45
    ],
)
def test_no_two_that_hardly_differ_are_on_the_front(choices: list[FitChoice], front: str) -> None:
    for given in (choices, choices[::-1]):
        found = ordered(given)
        assert [it.what for it in found if not it.beaten_by] == front.split()
        assert all(it.beaten_by.startswith(tuple(front.split())) for it in found if it.what not in front.split())


def test_what_is_written_by_hand_comes_first_and_beats_nothing_that_an_edit_writes() -> None:
    parts = replace(choice("parts", 50, 0.01), at="batch in 8", policy="none")
    more = replace(choice("more parts", 60, 0.02), at="batch in 16", policy="none")
    found = ordered([choice("a", 100, 0.2), more, parts])
    assert [it.what for it in found if not it.beaten_by] == ["parts", "a"]
    fit = Fit("f", "", 200_000_000, choice("as written", 300, 0.0, fits=False), found)
    assert fit.best is not None
    assert fit.best.what == "a"
    alone = replace(fit, tried=ordered([parts])).best
    assert alone is not None
    assert alone.by_hand


@pytest.mark.parametrize("unrolled", [False, True])
def test_what_no_edit_writes_is_offered_with_its_code_and_is_not_the_best(unrolled: bool) -> None:
    """A checkpoint around several calls is written by hand, as microbatches are."""

    def turn(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w)

    def loss(w: Any, x: Any) -> Any:
        if unrolled:
            for _ in range(36):
                x = turn(w, x)
            return x.sum()
        return jax.lax.scan(lambda x, _: (turn(w, x), None), x, None, length=36)[0].sum()

    w, x = (jax.ShapeDtypeStruct((size, 64), "float32") for size in (64, 1 << 14))
    trace, at = rm.trace(loss, w, x), "turn/6"
    fit = trace.fit(trace.report("nothing_saveable", at, device="H100 SXM").peak_high)
    (group,) = (it for it in fit.choices if it.at == at)
    assert group.by_hand
    assert group.code
    assert fit.best is group
    edit = trace.edit(group)
    assert not edit.verified
    assert group.code.split("; ")[0] in edit.unnamed[0]
    assert all(trace.edit(it).verified for it in fit.choices if not it.by_hand and it.policy != "as_written")
