"""Asking a device's compiler whether a function fits, and which of the choices for it does: ``Trace.fit``."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.devices import Device
from remat_magic.measuring.job import AT_ONCE, Measuring
from remat_magic.records import Fit, FitChoice, Measurement, Progress

_COMPILED = 12  # programs at most
_SURE = 3  # of them the last: the surest, where nothing has fitted by then
_HOPE = 0.9  # of the lower end of its range: what needs more than there is by that much is not asked about
_TICK = 0.2  # seconds between two looks at a compiler, at each of which one may be done with it all


def asked(
    traced: Any, stages: Iterator[Fit], device: Device, why_unwritten: Callable[[FitChoice], str]
) -> Generator[Fit, None, None]:
    """What is known by estimates, and then by XLA for the device: as written, and the cheapest choices until one fits.

    Whoever closes it ends the compiler.

    Args:
        traced: what ``remat_magic.trace`` gave.
        stages: its estimates.
        device: of which the compiler is here.
        why_unwritten: a sentence on why no edit writes a choice, which is not compiled then; empty where one does.
    """
    for known in stages:
        last, total = known.progress.finished, known.progress.total
        yield replace(known, progress=replace(known.progress, total=total + _COMPILED)) if last else known
        if not last:
            continue
        found, answers = known, dict[tuple[str, str], FitChoice]()
        while wanted := _next(found, answers):
            of_all = min(_COMPILED, len(answers) + len(wanted)) if found.best else _COMPILED
            progress = Progress(len(answers), of_all, f"compiling {wanted[0].what} for {device.name}")
            found = known.by_compiler(answers, progress)
            yield found
            others = (choice for choice in wanted if choice.which != known.as_written.which)
            unwritten = {it.which: replace(it, unusable=why) for it in others if (why := why_unwritten(it))}
            if unwritten:
                answers |= unwritten
                continue
            job = Measuring(traced, [(choice, None) for choice in wanted], device=device)
            try:
                while not job.wait(_TICK):
                    yield found
            finally:
                job.cancel()
            pairs = zip(wanted, job.results, strict=True)
            answers |= {choice.which: _answer(choice, result, known, device) for choice, result in pairs}
            found = known.by_compiler(answers, progress)
            if found.as_written.unusable:
                sentence = f"{device.name}'s compiler says nothing: {found.as_written.unusable}"
                yield replace(known, not_tried=(*known.not_tried, sentence))
                return
        left = [choice.what for choice in _hopeful(found, answers)]
        sentences = [f"Not compiled, since {_COMPILED} were: {', '.join(left)}."] if left else []
        found = known.by_compiler(answers, Progress(len(answers), len(answers)), all_asked=True)
        yield replace(found, not_tried=(*known.not_tried, *sentences))


def _next(fit: Fit, answers: Mapping[tuple[str, str], FitChoice]) -> Sequence[FitChoice]:
    """What to compile next, as much as there are cores for at once."""
    if not answers:
        return [fit.as_written]
    left, choices = _COMPILED - len(answers), _hopeful(fit, answers)
    if left <= _SURE and not any(choice.fits for choice in answers.values()):
        choices = sorted(choices, key=lambda choice: (not choice.fits, choice.needed_high))
    return choices[: min(AT_ONCE, left)]


def _hopeful(fit: Fit, answers: Mapping[tuple[str, str], FitChoice]) -> list[FitChoice]:
    """What XLA was not asked about, costs less than what fits by its word, and may fit; the cheapest first."""
    enough = min((choice.cost for choice in answers.values() if choice.fits), default=(math.inf, math.inf))
    choices = (choice for choice in fit.tried if choice.which not in answers and not choice.unusable)
    may_fit = (it for it in choices if it.needed_low is not None and _HOPE * it.needed_low <= fit.capacity_bytes)
    return sorted((it for it in may_fit if it.cost < enough), key=lambda it: (it.cost, it.needed_bytes))


def _answer(choice: FitChoice, measured: Measurement, fit: Fit, device: Device) -> FitChoice:
    """A choice by what was measured of it."""
    fits, needed = measured.fits, measured.needed_bytes
    if needed is not None and not (device.name in devices.names() and devices.get(device.name) == device):
        fits = needed <= fit.capacity_bytes  # of a memory that no compiler knows
    return choice.as_compiled(needed, fits, measured.error)
