"""Measuring one policy after another while the kernel stays usable."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Unpack

from remat_magic import _jax
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.measuring.departures import without_effect
from remat_magic.measuring.measure import How, MeasureRequest, Stopped, arrays_for, measure, measure_on
from remat_magic.records import Measurement, Progress, RematError, Report

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
        variants = [self._facts.choose(policy, at, self._namespace) for policy, at in self._choices]
        for done, (variant, result) in enumerate(zip(variants, self._measurements(variants), strict=True)):
            report = None if result.error or isinstance(variant, Unknown) else variant.preview
            last = done + 1 == len(self._choices)
            self._step(Progress(done + 1, len(self._choices)), (report, result), tell=last)

    def _measurements(self, variants: Sequence[Variant | Unknown]) -> Iterator[Measurement]:
        """One for each choice, in their order; each begins when the one before is taken."""
        request = self._request
        assert request is not None
        if request.elsewhere is not None:
            yield from self._compiled_elsewhere(variants, request)
            return
        arrays, error = None, ""
        try:
            arrays = arrays_for(self._facts.engine, request.inputs)
        except Exception as raised:  # noqa: BLE001 - said in each result, since nobody can catch it here
            text = str(raised)
            error = text if isinstance(raised, RematError) else f"the inputs cannot be made: {text}"
        for done, variant in enumerate(variants):
            self._step(Progress(done, len(variants), self._label(done, variant)))
            if isinstance(variant, Unknown):
                yield Measurement(variant.policy, variant.at, error=error or variant.error)
            elif error:
                yield Measurement(variant.selection.policy, variant.selection.at, error=error)
            else:
                yield measure_on(variant, arrays, request, self._cancelled)

    def _compiled_elsewhere(
        self, variants: Sequence[Variant | Unknown], request: MeasureRequest
    ) -> Iterator[Measurement]:
        """Several compilers run at once; what is told is the first that is not done."""

        def compiled(variant: Variant | Unknown) -> Measurement:
            with self._settings():
                return measure(variant, request, self._cancelled)

        with ThreadPoolExecutor(AT_ONCE, "remat_magic compiling") as pool:
            results = [pool.submit(compiled, variant) for variant in variants]
            for done, (variant, result) in enumerate(zip(variants, results, strict=True)):
                self._step(Progress(done, len(variants), self._label(done, variant)))
                yield result.result()

    def _label(self, number: int, variant: Variant | Unknown) -> str:
        """What a choice is called while it is measured, with its place where one was asked for."""
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
