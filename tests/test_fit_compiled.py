"""What ``trace.fit`` asks the device's compiler: what is called fitting has its word, and nothing cheaper fits."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

import remat_magic as rm
from remat_magic.devices import device as device_module
from remat_magic.editing import editor
from remat_magic.measuring import fitting, job
from remat_magic.records import Measurement
from tests.test_donation import trained
from tests.test_elsewhere import compiler, eventually
from tests.test_fit import blocks

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
        needed = round(variant.figures(request.elsewhere).peak_bytes * factor)
        return Measurement(choice.policy, choice.at, needed_bytes=needed, fits=True, device=request.elsewhere.name)

    monkeypatch.setattr(job, "measure", measure)
    monkeypatch.setattr(device_module, "_is_installed", lambda module: True)
    monkeypatch.setattr(fitting, "AT_ONCE", 1)
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
    cheaper = [choice for choice in fit.tried if fit.best is None or choice.cost < fit.best.cost]
    fitting = [choice.what for choice in cheaper if need.get(choice.which, capacity + 1) <= capacity]
    assert not fitting or len(asked) == 12


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
