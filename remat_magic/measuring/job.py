"""Measuring one policy after another while the kernel stays usable."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from remat_magic import _jax, devices
from remat_magic.devices import Device
from remat_magic.facts.facts import Traced
from remat_magic.measuring.departures import without_effect
from remat_magic.measuring.measure import (
    Stopped,
    arrays_for,
    check_effort,
    check_inputs,
    compile_elsewhere,
    elsewhere,
    measure_on,
    place_of,
    text_of,
)
from remat_magic.records import Effort, Measurement, Plan, Progress, RematError, Report

# Compilers for devices that are not here use more than one core each.
_AT_ONCE = max(1, (os.cpu_count() or 1) // 2)


class Measuring:
    """Measures policies on a thread of its own, one after another, from the moment that it is made.

    The settings of JAX that the making thread has in force (precision, mesh, default device, ...) hold there too. The
    trace's lock is held while a program is lowered, not while XLA compiles it, which also lets other Python run.

    Args:
        traced: what ``remat_magic.trace`` gave.
        choices: the policies with their places, as for ``Trace.report``.
        inputs: as for :func:`remat_magic.measuring.measure.measure`. The arrays are held until the last measurement.
        runs: how many runs to time of each.
        namespace: where identifiers in a key that are no policies of JAX are looked up.
        on_update: called with this object, on its thread, whenever ``progress`` or ``results`` have changed. What it
            raises is logged.
        device: what to compile for, as for ``Trace.measure``, and so are ``effort`` and ``seconds`` (of each). For one
            that is not here several policies are compiled at once, where there are the cores.

    Raises:
        RematError: ``inputs`` is of no known form, or ``runs`` is not positive; no such device, or none to compile for.
    """

    def __init__(
        self,
        traced: Traced,
        choices: Sequence[tuple[Any, Any]],
        *,
        inputs: Any = None,
        runs: int = 5,
        namespace: Mapping[str, Any] | None = None,
        on_update: Callable[[Measuring], None] | None = None,
        device: str | Device | None = None,
        effort: Effort = "full",
        seconds: float = 600.0,
    ) -> None:
        check_inputs(inputs)
        check_effort(effort)
        if runs < 1:
            raise RematError(f"runs={runs} times nothing: ask for one run at least, or for inputs=None.")
        self._device, self._seconds = elsewhere(device, inputs), seconds
        self._named = None if device is None else devices.get(device)
        self._effort: Effort = effort
        self._facts, self._choices, self._runs, self._namespace = traced.facts, tuple(choices), runs, namespace
        self._inputs: Any = inputs
        self._on_update = on_update
        self._lock = threading.Lock()  # over what follows; never held while measuring or calling back
        self._results: tuple[Measurement, ...] = ()
        self._reports: tuple[Report | None, ...] = ()
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
            results, reports = self._results, self._reports
        pairs = zip(reports, results, strict=True)
        reported = [(i, report, result) for i, (report, result) in enumerate(pairs) if report is not None]
        notes = without_effect([(report, result) for _, report, result in reported])
        added = {reported[number][0]: note for number, note in notes.items()}
        return tuple(
            replace(result, findings=(*result.findings, added[number])) if number in added else result
            for number, result in enumerate(results)
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
            self._inputs = None

    def _measure_all(self) -> None:
        for done, ((policy, at), result) in enumerate(zip(self._choices, self._measurements(), strict=True)):
            report = None if result.error else self._facts.preview(policy, at, self._namespace)
            last = done + 1 == len(self._choices)
            self._step(Progress(done + 1, len(self._choices)), (result, report), tell=last)

    def _measurements(self) -> Iterator[Measurement]:
        """One for each choice, in their order; each begins when the one before is taken."""
        if self._device is not None:
            yield from self._compiled_elsewhere(self._device)
            return
        arrays, error = None, ""
        try:
            arrays = arrays_for(self._facts, self._inputs)
        except Exception as raised:  # noqa: BLE001 - said in each result, since nobody can catch it here
            text = str(raised)
            error = text if isinstance(raised, RematError) else f"the inputs cannot be made: {text}"
        self._inputs = None
        for done, (policy, at) in enumerate(self._choices):
            self._step(Progress(done, len(self._choices), _label(policy, at)))
            if error:
                yield Measurement(text_of(policy), place_of(self._facts, at), error=error)
                continue
            yield measure_on(
                self._facts,
                policy,
                at,
                arrays=arrays,
                runs=self._runs,
                namespace=self._namespace,
                named=self._named,
                stop=self._cancelled,
            )

    def _compiled_elsewhere(self, device: Device) -> Iterator[Measurement]:
        """Several compilers run at once; what is told is the first that is not done."""

        def compiled(choice: tuple[Any, Any]) -> Measurement:
            with self._settings():
                return compile_elsewhere(
                    self._facts,
                    *choice,
                    device,
                    namespace=self._namespace,
                    effort=self._effort,
                    seconds=self._seconds,
                    stop=self._cancelled,
                )

        with ThreadPoolExecutor(_AT_ONCE, "remat_magic compiling") as pool:
            results = [pool.submit(compiled, choice) for choice in self._choices]
            for done, (choice, result) in enumerate(zip(self._choices, results, strict=True)):
                self._step(Progress(done, len(self._choices), _label(*choice)))
                yield result.result()

    def _step(
        self, progress: Progress, done: tuple[Measurement, Report | None] | None = None, tell: bool = True
    ) -> None:
        """Publish, unless it was cancelled meanwhile; the beginning of the next one tells of the end of the last."""
        with self._lock:
            if self._progress.cancelled:
                raise Stopped
            self._progress = progress
            if done is not None:
                self._results, self._reports = (*self._results, done[0]), (*self._reports, done[1])
        if tell:
            self._tell()

    def _tell(self) -> None:
        if self._on_update is not None:
            try:
                self._on_update(self)
            except Exception:
                logging.getLogger("remat_magic").exception("an on_update callback failed")


def _label(policy: Any, at: Any) -> str:
    name = policy.label if isinstance(policy, Plan) else text_of(policy)
    return name if not isinstance(at, str) or name.endswith(f" at {at}") else f"{name} at {at}"
