"""What ``trace.fit`` asks the device's compiler: what is called fitting has its word, and nothing cheaper fits."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import _jax, units
from remat_magic.devices import device as device_module
from remat_magic.editing import editor
from remat_magic.measuring import fit as compiled_fit
from remat_magic.measuring import measure
from remat_magic.records import Measurement
from remat_magic.records.fit import Fit, ordered
from tests.programs import f32
from tests.test_donation import trained
from tests.test_elsewhere import compiler, eventually
from tests.test_fit import blocks
from tests.test_fit import choice as made

pytestmark = pytest.mark.usefixtures("cache")
V5E = rm.devices.get("TPU v5e")


@pytest.fixture
def xla(monkeypatch):
    """A compiler whose word is the estimate times a factor for each program: those asked about, in order."""
    asked, factors = [], {}

    def measure(variant, request, stop):
        choice = variant.selection
        key = (choice.policy, choice.at)
        asked.append(key)
        factor = factors.get(key, factors.get("others", 1.0))
        if isinstance(factor, str):
            return Measurement(choice.policy, choice.at, error=factor)
        needed = round(variant.report(request.elsewhere).peak_bytes * factor)
        return Measurement(choice.policy, choice.at, needed_bytes=needed, fits=True, device=request.elsewhere.name)

    monkeypatch.setattr(compiled_fit, "measure", measure)
    monkeypatch.setattr(device_module, "_is_installed", lambda module: True)
    monkeypatch.setattr(compiled_fit, "AT_ONCE", 1)
    return asked, factors


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scanned", [False, True])
def test_no_cheaper_choice_compiles_to_fit(xla, seed, scanned):
    asked, factors = xla
    chance = random.Random(seed)
    trace = trained() if seed % 2 else rm.trace(*blocks(scanned=scanned)[:1], *blocks(scanned=scanned)[1])
    estimates = trace.fit(V5E, compile=False)
    for choice in estimates.tried:
        low, high = (part / choice.needed_bytes for part in (choice.needed_low, choice.needed_high))
        factors[choice.which] = chance.uniform(low, high)
    need = {choice.which: round(choice.needed_bytes * factors[choice.which]) for choice in estimates.tried}
    capacity = chance.choice(sorted(need.values())[: len(need) // 2 + 1])  # just so that it fits
    fit = trace.fit(replace(V5E, memory_bytes=capacity))
    assert fit.compiled
    assert fit.needed_bytes == fit.needed_low == fit.needed_high == need[fit.as_written.which]
    assert fit.fits == (fit.needed_bytes <= capacity)
    assert len(asked) == len(set(asked)) <= 12
    assert asked[0] == fit.as_written.which
    for choice in fit.tried:
        assert choice.compiled == (choice.which in asked)
        assert choice.fits is not True or choice.compiled
        if choice.compiled:
            assert choice.needed_bytes == choice.needed_low == choice.needed_high
    usable = [choice for choice in fit.tried if not choice.unusable]
    cheaper = [choice for choice in usable if fit.best is None or choice.cost < fit.best.cost]
    fitting = [choice.what for choice in cheaper if need.get(choice.which, capacity + 1) <= capacity]
    assert not fitting or len(asked) == 12


def _layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def _error(ws, x, y):
    for w in ws:
        x = _layer(w, x)
    return ((x - y) ** 2).mean()


def _step(ws, x, y):
    grads = jax.grad(_error)(ws, x, y)
    return [w - 0.1 * grad for w, grad in zip(ws, grads, strict=True)]


def test_what_an_edit_writes_is_compiled_although_microbatches_fit(xla):
    trace = rm.trace(_step, [f32(64, 64)] * 8, f32(4096, 64), f32(4096, 64))
    peak = trace.report(device=V5E).peak_bytes
    fit = trace.fit(replace(V5E, memory_bytes=3 * peak // 4))
    fitting = [choice for choice in fit.choices if choice.fits]
    assert fitting[0].by_hand
    assert not fit.best.by_hand
    assert trace.edit(fit.best).verified
    assert fitting[0].compiled
    assert fit.best.compiled


def test_of_two_that_hardly_differ_the_simpler_is_compiled():
    """The other only where the simpler one does not fit."""
    written = made("as written", 300, 0.0, fits=False)
    simple, plan = made("a", 100, 0.2), made("plan", 99, 0.19, names=3)
    fit = Fit("f", "", 120_000_000, written, ordered([written, simple, plan]))
    answers = {written.which: written.as_compiled(300_000_000, False, "")}
    assert [it.what for it in compiled_fit._hopeful(fit, answers)] == ["a"]
    answers[simple.which] = simple.as_compiled(130_000_000, False, "")
    assert [it.what for it in compiled_fit._hopeful(fit, answers)] == ["plan"]


def test_estimates_come_first_and_compilations_have_an_end(xla):
    asked, factors = xla
    loss, args = blocks(scanned=True)
    trace = rm.trace(loss, *args)
    factors["others"] = 1000.0  # nothing fits, which the estimates do not know
    estimate = trace.fit(V5E, compile=False)
    device = replace(V5E, memory_bytes=estimate.nearest.needed_high)
    stages = [*trace.fitting(device)]
    first = next(number for number, stage in enumerate(stages) if stage.compiled)
    assert not any(choice.compiled for stage in stages[:first] for choice in stage.tried)
    assert [stage.progress.finished for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert any("compiling as written" in stage.progress.current for stage in stages)
    fit = stages[-1]
    assert (fit.best, fit.fits, not any(choice.fits for choice in fit.tried)) == (None, False, True)
    assert len(asked) <= 12
    assert any(sentence.startswith("Not compiled") for sentence in fit.not_tried) == (len(asked) == 12)


def test_what_cannot_be_compiled_is_no_answer_and_estimates_stay(xla):
    _, factors = xla
    loss, args = blocks()
    trace = rm.trace(loss, *args)
    estimate = trace.fit(V5E, compile=False)
    device = replace(V5E, memory_bytes=estimate.nearest.needed_high)
    best = trace.fit(device, compile=False).best
    factors |= {best.which: "XLA has a bug.", "others": 100.0}
    fit = trace.fit(device)
    assert next(choice for choice in fit.tried if choice.which == best.which).unusable == "XLA has a bug."
    assert fit.best is None or fit.best.which != best.which
    factors[estimate.as_written.which] = "it calls back."
    fit = trace.fit(device)
    assert (fit.compiled, fit.best.which) == (False, best.which)
    assert fit.not_tried[-1] == "TPU v5e's compiler says nothing: it calls back."


def test_whoever_stops_looking_ends_the_compiler(pretend):
    started = pretend("time.sleep(600)")
    loss, args = blocks()
    stages = rm.trace(loss, *args).fitting(V5E)
    for stage in stages:
        if started.read_text():
            break
        assert not stage.compiled
    stages.close()
    pids = [int(line) for line in started.read_text().split()]
    assert len(pids) == 1
    eventually(lambda: not os.path.exists(f"/proc/{pids[0]}"))


# ------------------------------------------------------------------------------------------- asked before it is claimed


def words(factors, tell):
    """What `measuring.compiler_of` gives: the estimate times a factor, of a program or of what is said of it."""

    def compiler_of(facts, device):
        def ask(policy, at):
            figures = facts.under(policy, at).report(rm.devices.get(device))
            tell(figures.peak_bytes)
            factor = factors(policy, at)
            if isinstance(factor, str):
                return Measurement(str(policy), at, error=factor)
            return Measurement(str(policy), at, needed_bytes=round(figures.peak_bytes * factor))

        return ask

    return compiler_of


def test_a_plan_is_compiled_before_it_is_offered(monkeypatch):
    loss, args = blocks()
    trace = rm.trace(loss, *args)
    none = trace.report("none", "function", device=V5E).peak_bytes
    alone = trace.plan(peak="85%", device=V5E, compile=False)
    assert "Compiled" not in alone.status

    asked = []
    more = lambda policy, at: 1.0 if policy == "none" else 1.2  # noqa: E731
    monkeypatch.setattr(measure, "compiler_of", words(more, asked.append))
    plan = trace.plan(peak="85%", device=V5E)  # the first needs more than that, and the next is for less
    assert asked[0] == none
    assert 1 < len(asked) - 1 <= 4
    assert 1.2 * plan.peak_bytes <= 0.85 * none < 1.2 * alone.peak_bytes
    assert plan.status.startswith(f"Compiled it needs {units.nbytes(round(1.2 * plan.peak_bytes))}, ")
    assert asked[-1] == plan.peak_bytes == trace.report(plan, device=V5E).peak_bytes

    monkeypatch.setattr(
        measure, "compiler_of", words(lambda policy, at: 1.0 if policy == "none" else 9.0, asked.append)
    )
    with pytest.raises(rm.RematError, match="No compiled plan keeps loss within") as error:
        trace.plan(peak="85%", device=V5E)
    assert 2 <= str(error.value).count(" at ") <= 4  # what was tried

    monkeypatch.setattr(measure, "compiler_of", words(lambda policy, at: 0.5, asked.append))
    assert trace.plan(peak=none - 1, device=V5E).policy == "none"  # which nobody needs to change
    monkeypatch.setattr(measure, "compiler_of", words(lambda policy, at: "it calls back.", asked.append))
    plan = trace.plan(peak="85%", device=V5E)
    assert (plan.names, plan.status[:43]) == (
        alone.names,
        "Its peak is an estimate: it calls back. " + alone.status[:3],
    )


def wide(params, x):
    def mix(p, x):
        def step(state, chunk):
            q, k, v = chunk
            a = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), jnp.einsum("bhck,bhdk->bhcd", q, k), 0) @ v
            return state + jnp.einsum("bhck,bhcv->bhkv", k, v), jnp.einsum("bhck,bhkv->bhcv", q, state) + a

        q, k, v = ((x @ p[n]).reshape(2, 8, 64, 4, 32).transpose(1, 0, 3, 2, 4) for n in "qkv")
        out = jax.lax.scan(step, jnp.zeros((2, 4, 32, 32)), (q, k, v))[1]
        return out.transpose(1, 0, 3, 2, 4).reshape(2, 512, 128) @ p["o"]

    for p in params:
        x = x + mix(p, x)
        x = x + (jax.nn.relu(x @ p["u"]) ** 2) @ p["d"]
    return (x**2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("share", ["80%", "60%"])
def test_a_plan_is_called_lower_only_where_xla_for_cpus_says_so(share):
    """Chunked linear attention: the search for the lowest estimate finds what is underestimated most."""
    layer = {n: f32(128, 128) for n in "qkvo"} | {"u": f32(128, 512), "d": f32(512, 128)}
    args = [layer] * 2, f32(2, 512, 128)
    trace = rm.trace(wide, *args)

    def needed(function):
        options = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
        memory = jax.jit(jax.value_and_grad(function, (0, 1))).lower(*args).compile(options).memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes

    try:
        plan = trace.plan(peak=share)
    except rm.RematError as error:
        assert "No compiled plan keeps wide lower than without a checkpoint" in str(error)
        return
    if plan.status.startswith("Compiled"):
        assert needed(plan.apply(wide)) < needed(wide)
    else:
        assert not _jax.FOLLOWS_POLICIES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TPU v5e", "H100 SXM"])
@pytest.mark.parametrize("make", [trained, lambda: rm.trace(*_scanned())], ids=["step", "scan"])
def test_xla_finds_no_cheaper_choice_that_fits(name, make):
    """By brute force, on a program that just does not fit."""
    device, trace = rm.devices.get(compiler(name)), make()
    needed = trace.measure(device=device).needed_bytes
    for share in (0.97, 0.85):
        there = replace(device, memory_bytes=round(needed * share / (0.75 if "H100" in name else 1.0)))
        fit = trace.fit(there)
        assert (fit.compiled, fit.needed_bytes, fit.fits) == (True, needed, False)
        cheaper = [choice for choice in fit.tried if not choice.compiled and not choice.unusable]
        cheaper = [choice for choice in cheaper if fit.best is None or choice.cost < fit.best.cost]
        assert fit.best is not None
        assert trace.measure(fit.best, device=device).needed_bytes == fit.best.needed_bytes <= fit.capacity_bytes
        by_force = {choice.what: trace.measure(choice, device=device).needed_bytes for choice in cheaper}
        assert not [what for what, bytes_ in by_force.items() if bytes_ and bytes_ <= fit.capacity_bytes]


def _scanned():
    loss, args = blocks(count=12, scanned=True)
    return loss, *args


def test_what_no_edit_writes_is_not_compiled(xla, monkeypatch):
    """The choice that is the best by the estimates is written before, whatever XLA is asked about after it."""
    asked, factors = xla
    factors["others"] = 0.5
    factors["as_written", "function"] = 1.0
    trace = rm.trace(*blocks()[:1], *blocks()[1])
    capacity = round(0.55 * trace.report(device=V5E).peak_bytes)
    device = replace(V5E, memory_bytes=capacity)
    first = trace.fit(device).best
    assert first.compiled
    asked.clear()
    own = editor.attempt
    monkeypatch.setattr(
        editor, "attempt", lambda facts, it: "None does." if it.which == first.which else own(facts, it)
    )
    fit = trace.fit(device)
    assert first.which not in asked
    assert next(choice.unusable for choice in fit.tried if choice.which == first.which) == "None does."
    assert fit.best.compiled
    assert fit.best.cost > first.cost


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("factor", [0.4, 1.0, 2.0])
def test_the_largest_batch_is_by_xlas_word(xla, factor, share):
    _, factors = xla
    factors["others"] = factor
    loss, args = blocks(batch=2048)
    trace = rm.trace(loss, *args)
    needed, fixed = round(trace.report(device=V5E).peak_bytes * factor), _jax.nbytes(trace.arguments[-1].value)
    capacity = round(needed * share)
    fit = trace.fit(replace(V5E, memory_bytes=capacity))
    assert fit.compiled
    if fit.largest_batch is None:
        assert capacity < 1.5 * sum(_jax.nbytes(leaf.value) for leaf in trace.arguments) - fixed
        return
    assert (fit.largest_batch >= 2048) == (needed <= capacity) == fit.fits
    loss, args = blocks(batch=fit.largest_batch)
    by_xla = rm.trace(loss, *args).report(device=V5E).peak_bytes * factor
    assert 0.6 * capacity < by_xla < 1.4 * capacity  # what does not grow with the batch is as it is


def test_what_xla_says_less_of_than_the_estimate_does_not_hide_what_helps(xla):
    """XLA needs less for the program as written than estimates of all else, and more than there is."""
    _, factors = xla
    factors["others"] = 0.05
    loss, args = blocks(8, scanned=True)
    trace = rm.trace(loss, *args)
    nearest = trace.fit(1000).nearest.needed_bytes
    for there in (1.01 * nearest, 0.5 * nearest):
        fit = trace.fit(replace(V5E, memory_bytes=round(0.05 * there)))
        assert fit.needed_bytes < min(choice.needed_low for choice in fit.tried if not choice.compiled)
        assert fit.fits is False
        assert [choice for choice in fit.choices if choice.policy != "as_written" and choice.compiled]
        assert (fit.best is not None) == (there > nearest)
