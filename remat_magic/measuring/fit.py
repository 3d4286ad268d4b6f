"""Which choices fit a device, by the word of its own compiler."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.measuring.measure import MeasureRequest, measure
from remat_magic.records import Fit, FitChoice, Measurement, Progress

# Compilers for devices that are not here use more than one core each.
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
"""How many programs are compiled at once."""

_COMPILED = 12  # programs at most
_SURE = 3  # of them the last: the surest, where nothing has fitted by then
_NEAREST = 4  # programs, where none may fit: what is said to come nearest is to have XLA's word
_HOPE = 0.9  # of the lower end of its range: what needs more than there is by that much is not compiled
_TICK = 0.2  # seconds between two looks at a compiler, at each of which one may be done with it all


def fit_by_compiler(
    facts: Facts,
    stages: Iterator[Fit],
    device: Device,
    settled: Callable[[Fit, Sequence[FitChoice]], Fit],
    with_batch: Callable[[Fit], Fit],
) -> Generator[Fit, None, None]:
    """What is known by estimates, and then by XLA for the device: as written, and the cheapest choices until one fits.

    Whoever closes it ends the compiler. ``settled`` gives the same estimates where edits write some choices, else
    others with what can be written instead; ``with_batch`` a fit with the largest batch, by XLA's word.
    """
    for known in stages:
        last, total = known.progress.finished, known.progress.total
        yield replace(known, progress=replace(known.progress, total=total + _COMPILED)) if last else known
        if not last:
            continue
        found, answers = known, dict[tuple[str, str], FitChoice]()
        while wanted := _next(known, answers):
            of_all = min(_COMPILED, len(answers) + len(wanted)) if found.best else _COMPILED
            progress = Progress(len(answers), of_all, f"compiling {wanted[0].what} for {device.name}")
            found = known.by_compiler(answers, progress)
            yield found
            known, before = settled(known, [it for it in wanted if it.which != known.as_written.which]), known
            if known is not before:
                found = known.by_compiler(answers, progress)
                continue
            results = yield from _compiled(facts, wanted, device, found)
            pairs = zip(wanted, results, strict=True)
            answers |= {choice.which: _answer(choice, result, known, device) for choice, result in pairs}
            found = known.by_compiler(answers, progress)
            if found.as_written.unusable:
                sentence = f"{device.name}'s compiler says nothing: {found.as_written.unusable}"
                yield replace(known, not_tried=(*known.not_tried, sentence))
                return
            if len(answers) == 1:
                yield replace(found, largest_batch=None, progress=replace(progress, current="the largest batch"))
                known = replace(known, largest_batch=with_batch(found).largest_batch)
        left = [choice.what for choice in _hopeful(known, answers)]
        sentences = [f"Not compiled, since {_COMPILED} were: {', '.join(left)}."] if left else []
        found = known.by_compiler(answers, Progress(len(answers), len(answers)), all_asked=True)
        yield replace(found, not_tried=(*known.not_tried, *sentences))


def _compiled(
    facts: Facts, wanted: Sequence[FitChoice], device: Device, found: Fit
) -> Generator[Fit, None, list[Measurement]]:
    """What the compiler says of some choices, all at once: ``found`` comes until it has, and to close this ends it."""
    request, ended, settings = MeasureRequest(device=device), threading.Event(), _jax.thread_settings()

    def compiled(variant: Variant | Unknown) -> Measurement:
        with settings():
            return measure(variant, request, ended.is_set)

    with ThreadPoolExecutor(AT_ONCE, "remat_magic compiling") as pool:
        jobs = [pool.submit(compiled, facts.choose(choice, None)) for choice in wanted]
        try:
            while wait(jobs, _TICK).not_done:
                yield found
        finally:
            ended.set()
    return [job.result() for job in jobs]


def _next(known: Fit, answers: Mapping[tuple[str, str], FitChoice]) -> Sequence[FitChoice]:
    """What to compile next, as much as there are cores for at once."""
    if not answers:
        return [known.as_written]
    left, choices, fits = _COMPILED - len(answers), _hopeful(known, answers), any(it.fits for it in answers.values())
    if left <= _SURE and not fits:
        choices = sorted(choices, key=lambda choice: (not choice.fits, choice.needed_high))
    if not choices and not fits and len(answers) < _NEAREST:
        others = [it for it in known.tried if it.needed_bytes and not it.unusable and it.which not in answers]
        nearest = min(others, key=lambda choice: (choice.needed_bytes, choice.cost), default=None)
        least = min(choice.needed_bytes or 0 for choice in answers.values() if not choice.unusable)
        choices = [nearest] if nearest is not None and _as_far(known, answers, nearest) < least else []
    return choices[: min(AT_ONCE, left)]


def _hopeful(known: Fit, answers: Mapping[tuple[str, str], FitChoice]) -> list[FitChoice]:
    """What was not compiled, costs less than what fits by its word, and may fit; the cheapest first.

    Where only what is written by hand has fitted, what an edit writes is compiled all the same. A choice that hardly
    differs from a simpler one is compiled only where that does not fit.
    """
    refused = {it.what for it in answers.values() if it.fits is False}

    def enough(by_hand: bool) -> tuple[float, ...]:
        fitting = (it.cost for it in answers.values() if it.fits and it.by_hand <= by_hand)
        return min(fitting, default=(math.inf, math.inf))

    usable = (choice for choice in known.tried if choice.which not in answers and not choice.unusable)
    choices = (choice for choice in usable if not choice.alike or choice.alike in refused)
    known_choices = ((choice, choice.needed_low) for choice in choices if choice.cost < enough(choice.by_hand))
    may_fit = (
        choice
        for choice, low in known_choices
        if low is not None and min(_HOPE * low, _as_far(known, answers, choice)) <= known.capacity_bytes
    )
    return sorted(may_fit, key=lambda it: (it.cost, it.needed_bytes))


def _as_far(known: Fit, answers: Mapping[tuple[str, str], FitChoice], choice: FitChoice) -> float:
    """What a choice needs if its estimate is as much too high as that of the program as written."""
    written, estimate = answers[known.as_written.which].needed_bytes or 0, known.needed_bytes or 1
    return (choice.needed_bytes or 0) * min(1.0, written / estimate)


def _answer(choice: FitChoice, measured: Measurement, fit: Fit, device: Device) -> FitChoice:
    """A choice by what was measured of it."""
    fits, needed = measured.fits, measured.needed_bytes
    if needed is not None and not (device.name in devices.names() and devices.get(device.name) == device):
        fits = needed <= fit.capacity_bytes  # of a memory that no compiler knows
    return choice.as_compiled(needed, fits, measured.error)
