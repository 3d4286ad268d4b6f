"""Measuring one policy after another while the kernel stays usable, and asking a compiler which choices fit."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.measuring.elsewhere import Stopped
from remat_magic.measuring.measure import How, MeasureRequest, measure, without_effect
from remat_magic.records import Fit, FitChoice, Measurement, Progress, Report

# Compilers for devices that are not here use more than one core each.
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
"""How many programs are compiled at once."""


class Measuring:
    """Measures policies on a thread of its own, one after another, from the moment that it is made.

    The settings of JAX that the making thread has in force (precision, mesh, default device, ...) hold there too. The
    trace's lock is held while a program is lowered, not while XLA compiles it, which also lets other Python run.

    Args:
        traced: what ``remat_magic.trace`` gave.
        choices: as for ``Trace.measuring``, and so are ``namespace`` and ``on_update``.
        how: ``inputs``, ``runs``, ``device``, ``effort`` and ``seconds``, as for ``Trace.measure``.

    Raises:
        RematError: ``inputs`` is of no known form, or ``runs`` is not positive; no such device, or none to compile for.
    """

    def __init__(
        self,
        traced: Any,
        choices: Sequence[tuple[Any, Any]],
        *,
        namespace: Mapping[str, Any] | None = None,
        on_update: Callable[[Measuring], None] | None = None,
        **how: Unpack[How],
    ) -> None:
        self._request: MeasureRequest | None = MeasureRequest(**how)
        self._facts: Facts = traced.facts
        self._choices, self._namespace = tuple(choices), namespace
        self._on_update = on_update
        self._lock = threading.Lock()  # over what follows; never held while measuring or calling back
        self._done: tuple[tuple[Report | None, Measurement], ...] = ()  # no report of what failed
        self._progress = Progress(0, len(self._choices))
        self._settings = _jax.thread_settings()
        # A daemon: a compilation cannot be interrupted, and leaving Python should not wait for one.
        self._thread = threading.Thread(target=self._run, name="remat_magic measuring", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """How far it is."""
        with self._lock:
            return self._progress

    @property
    def results(self) -> tuple[Measurement, ...]:
        """The measurements so far, in the order of the choices, each with what it shows beside the others."""
        with self._lock:
            done = self._done
        notes = without_effect(done)
        return tuple(
            replace(result, findings=(*result.findings, notes[number])) if number in notes else result
            for number, (_, result) in enumerate(done)
        )

    def cancel(self) -> None:
        """Measure nothing more. Returns at once; what XLA is compiling is finished, and its result thrown away."""
        with self._lock:
            if not self._progress.finished:
                self._progress = replace(self._progress, current="", cancelled=True)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing more will come; whether that is so.

        Args:
            timeout: how long at most, in seconds. Default: for ever.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _cancelled(self) -> bool:
        with self._lock:
            return self._progress.cancelled

    def _run(self) -> None:
        try:
            with self._settings():
                self._measure_all()
        except Stopped:
            self._tell()
        finally:
            self._request = None  # which holds the inputs

    def _measure_all(self) -> None:
        """One choice after another; of compilers for elsewhere several run at once."""
        request, total = self._request, len(self._choices)
        assert request is not None
        variants = [self._facts.choose(policy, at, self._namespace) for policy, at in self._choices]

        def measured(variant: Variant | Unknown) -> Measurement:
            with self._settings():
                return measure(variant, request, self._cancelled)

        with ExitStack() as pools:
            results = map(measured, variants)
            if request.elsewhere is not None:
                pool = pools.enter_context(ThreadPoolExecutor(AT_ONCE, "remat_magic compiling"))
                results = pool.map(measured, variants)
            for done, variant in enumerate(variants):
                self._step(Progress(done, total, self._label(done, variant)))
                result = next(results)
                report = None if result.error or isinstance(variant, Unknown) else variant.preview
                self._step(Progress(done + 1, total), (report, result), tell=done + 1 == total)

    def _label(self, number: int, variant: Variant | Unknown) -> str:
        """What a choice is called while it is measured, with its place where one was given."""
        name = variant.policy if isinstance(variant, Unknown) else variant.selection.label or variant.selection.policy
        at = self._choices[number][1]
        return name if not isinstance(at, str) or name.endswith(f" at {at}") else f"{name} at {at}"

    def _step(self, progress: Progress, *done: tuple[Report | None, Measurement], tell: bool = True) -> None:
        """Publish, unless it was cancelled meanwhile; the beginning of the next one tells of the end of the last."""
        with self._lock:
            if self._progress.cancelled:
                raise Stopped
            self._progress = progress
            self._done += done
        if tell:
            self._tell()

    def _tell(self) -> None:
        if self._on_update is not None:
            try:
                self._on_update(self)
            except Exception:
                logging.getLogger("remat_magic").exception("an on_update callback failed")


# --------------------------------------------------------------------------------------------------- which choices fit


_COMPILED = 12  # programs at most
_SURE = 3  # of them the last: the surest, where nothing has fitted by then
_NEAREST = 4  # programs, where none may fit: what is said to come nearest is to have XLA's word
_HOPE = 0.9  # of the lower end of its range: what needs more than there is by that much is not compiled
_TICK = 0.2  # seconds between two looks at a compiler, at each of which one may be done with it all


def fit_by_compiler(
    traced: Any,
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
            if len(answers) == 1:
                yield replace(found, largest_batch=None, progress=replace(progress, current="the largest batch"))
                known = replace(known, largest_batch=with_batch(found).largest_batch)
        left = [choice.what for choice in _hopeful(known, answers)]
        sentences = [f"Not compiled, since {_COMPILED} were: {', '.join(left)}."] if left else []
        found = known.by_compiler(answers, Progress(len(answers), len(answers)), all_asked=True)
        yield replace(found, not_tried=(*known.not_tried, *sentences))


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
