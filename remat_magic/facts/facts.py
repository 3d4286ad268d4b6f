"""Everything that is worked out about an engine's function: a report for each policy, made once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from remat_magic import _jax, units
from remat_magic.devices import Device
from remat_magic.engine.engine import Engine
from remat_magic.engine.failures import is_passing
from remat_magic.engine.halves import without_gc
from remat_magic.engine.selection import Selection
from remat_magic.facts import reports
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.memory import Schedule, both_halves, step_schedule
from remat_magic.facts.residuals import saved_values
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.records import (
    Program,
    RematError,
    Report,
    StepMemory,
    Timeline,
)

_FAR = 0.3  # of a peak: more than estimates are off as a rule (README.md, "Limits")


class Traced(Protocol):
    """What has facts: a public trace."""

    @property
    def facts(self) -> Facts:
        """All that is worked out about the traced function."""
        ...


class Facts:
    """The facts of a traced function under each policy. May be used from any thread.

    ``memo`` holds what the layers above have worked out about the function, under keys of theirs. The peaks are of no
    device, each value with the bytes that it has, unless these are the facts ``on`` one.
    """

    def __init__(
        self, engine: Engine, memory: DeviceMemory = PLAIN, by_memory: dict[DeviceMemory, Facts] | None = None
    ) -> None:
        self.engine = engine
        self._memory = memory
        self._by_memory = {} if by_memory is None else by_memory
        self._by_memory[memory] = self
        self._plain = self._by_memory[PLAIN]
        self.lock = engine.lock
        self.memo: dict[Any, Any] = {}
        self._reports: dict[tuple[Any, ...], Report] = {}
        self._previews: dict[tuple[Any, ...], Report] = {}
        self._saved: dict[tuple[Any, ...], int] = {}
        self._by_program: dict[tuple[Any, ...], tuple[Selection, Report]] = {}  # one for each that was retraced

    @property
    def is_plain(self) -> bool:
        """Whether estimated peaks are as on no device: they then hold all that is saved, and as it is."""
        return self._memory is PLAIN

    def on(self, device: Device | None) -> Facts:
        """The facts as on a device: all is the same but the estimated peaks. Of no device by None."""
        memory = memory_of(device)
        with self.lock:
            return self._by_memory.get(memory) or Facts(self.engine, memory, self._by_memory)

    def of(self, engine: Engine) -> Facts:
        """The facts of another engine, as on the same device."""
        plain = Facts(engine)
        return plain._by_memory.get(self._memory) or Facts(engine, self._memory, plain._by_memory)

    @without_gc()
    def preview(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> Report:
        """The report of the forward half alone (``complete`` is False), or the full one where it is known."""
        with self.lock:
            engine = self.engine
            selection = engine.select(policy, at, namespace)
            report = self._reports.get(selection.report_key) or self._previews.get(selection.report_key)
            if report is None:
                report = self._previews[selection.report_key] = reports.preview(
                    self._blank(selection),
                    engine.retrace(selection).forward,
                    engine.primal.provenances,
                    engine.primal.arguments,
                )
            return report

    @without_gc()
    def report(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> Report:
        """What a policy does: residuals, recomputation, both halves.

        Args:
            policy: a key (see :mod:`remat_magic.policies`), a JAX policy or any policy callable.
            at: ``"function"``, a site's key, ``"sites"`` for all of them, or a mapping of site key to policy; by
                default ``default_at``.
            namespace: where identifiers in a key that are no policies of JAX are looked up.

        Raises:
            RematError: no such policy, site or name; or JAX cannot trace the function under it.
        """
        with self.lock:
            engine = self.engine
            selection = engine.select(policy, at, namespace)
            key = selection.report_key
            if key in self._reports:
                return self._reports[key]
            stores = (facts.reports_by_key for facts in self._by_memory.values())
            report = next((store[key] for store in stores if key in store), None)  # on all alike, but for the peak
            if report is not None and report.peak_bytes is not None:
                report = reports.with_peak(report, self._schedule(selection))
            elif report is None and selection.identity in self._by_program:
                report = self._as_selected(selection, *self._by_program[selection.identity])
            elif report is None:
                first = self.preview(policy, at, namespace)
                half = engine.retrace(selection).forward
                try:
                    backward = engine.retrace(selection).backward
                except RematError as error:
                    if is_passing(error):
                        raise
                    report = reports.without_backward(first, half, engine.primal.provenances, str(error))
                else:
                    schedule = None if engine.step is None else self._schedule(selection)
                    report = reports.full(first, half, backward, engine.primal.provenances, self._memory, schedule)
                self._previews.pop(key, None)
            self._reports[key] = report
            if not report.backward_error:  # which speaks of the policy
                self._by_program.setdefault(selection.identity, (selection, report))
            return report

    def _as_selected(self, selection: Selection, other: Selection, report: Report) -> Report:
        """The report of a selection, given that of another one which makes the same program."""
        own, told = self._blank(selection), len(self._blank(other).notes)
        same = {name: getattr(own, name) for name in ("policy", "at", "code", "label")}
        return replace(report, **same, notes=(*own.notes, *report.notes[told:]))

    def by_order(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> str:
        """What the peak comes to where the device's compiler recomputes everything first, if that is far more."""
        with self.lock:
            peak = self.report(policy, at, namespace).peak_bytes
            if peak is None or not self._memory.fuses:
                return ""
            selection = self.engine.select(policy, at, namespace)
            key = "by_order", selection.report_key
            if key not in self.memo:
                first = replace(self._memory, delays=False)
                self.memo[key] = self._schedule(selection, first).highest()[0]
            at_once = self.memo[key]
        if at_once <= (1 + _FAR) * peak:
            return ""
        return (
            f"The peak may be {units.nbytes(at_once)} instead of {units.nbytes(peak)}: the estimate takes it that XLA "
            "recomputes each value when its gradient is due, and XLA may recompute all of them before the first "
            "gradient. Measure tells."
        )

    def saved_bytes(self, policy: Any = "as_written", at: Any = None) -> int:
        """What a policy saves, as in its report, without the rest of one; all of it where there is no backward half.

        Raises:
            RematError: as ``report``.
        """
        with self.lock:
            engine = self.engine
            selection = engine.select(policy, at)
            if selection.report_key in self._reports:
                return self._reports[selection.report_key].saved_bytes
            if selection.report_key in self._saved:
                return self._saved[selection.report_key]
            first, half = self.preview(policy, at), engine.retrace(selection).forward
            try:
                live = LiveEquations(_jax.open_jaxpr(engine.retrace(selection).backward))
            except RematError as error:
                if is_passing(error):
                    raise
            else:
                saved = saved_values(half.closed, half.outputs)
                first = replace(first, residuals=reports.read(first, saved, live))
            self._saved[selection.report_key] = first.saved_bytes
            return first.saved_bytes

    @property
    def reports_by_key(self) -> Mapping[tuple[Any, ...], Report]:
        """The full reports so far, by their selections' keys."""
        return self._reports

    def known(self) -> list[tuple[str, str]]:
        """Of which policies, at which places, there are full reports, as on any device; what no key tells is left out.

        That is a plan that no key stands for, and a policy of the user's own.
        """
        with self.lock:
            keys = dict.fromkeys(key for facts in self._by_memory.values() for key in facts.reports_by_key)
            return [(policy, at) for policy, at, identity in keys if self._identity(policy, at) == identity]

    def _identity(self, policy: str, at: str) -> Any:
        try:
            return self.engine.select(policy, at).identity
        except RematError:
            return None

    def timeline(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None
    ) -> Timeline:
        """The estimated device memory held from equation to equation, where its peak is, and what is held there.

        Its highest moment is the report's ``peak_bytes``. Made when asked for, since ordinary reports need not know.

        Raises:
            RematError: as ``report``, or the function has no backward half.
        """
        with self.lock:
            engine = self.engine
            selection = engine.select(policy, at, namespace)
            programs, half = reports.Programs(), engine.retrace(selection).forward
            programs.add_halves(
                half, engine.retrace(selection).backward, engine.primal.provenances, engine.primal.arguments
            )
            blank, step = self._blank(selection), engine.step
            if step is None:
                return reports.over_time(blank, self._schedule(selection), programs, engine.primal.arguments)
            halves = engine.retrace(selection).halves_in_step
            schedule = step_schedule(step, halves, self._memory)
            for both in halves.values():
                programs.add_halves(*both)
            programs.add(step.closed, step.given.provenances, step.given.arguments)
            return reports.over_time(blank, schedule, programs, step.given.arguments, step.given.name)

    def step(
        self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None
    ) -> StepMemory | None:
        """What the training step holds that the gradient is taken in; None where there is none, or it is not known.

        Raises:
            RematError: as ``timeline``.
        """
        if self.engine.step is None:
            return None
        return StepMemory(self.engine.step.given.name, self.timeline(policy, at, namespace))

    def _schedule(self, selection: Selection, on: DeviceMemory | None = None) -> Schedule:
        """That of a selection, on the device of these facts or as told."""
        engine, on = self.engine, on or self._memory
        if engine.step is not None:
            return step_schedule(engine.step, engine.retrace(selection).halves_in_step, on)
        half, backward = engine.retrace(selection).forward, engine.retrace(selection).backward
        return both_halves(half.closed, backward, half.outputs, type_of=half.type_of, on=on)

    def _blank(self, selection: Selection) -> Report:
        engine = self.engine
        return Report(
            selection.policy,
            selection.at,
            sites=engine.primal.table.sites,
            names=engine.names,
            code=selection.code,
            function=engine.primal.name,
            signature=engine.primal.text,
            wrt=engine.primal.signature.wrt,
            notes=(*engine.notes, *selection.notes),
            forward=Program(),
            complete=False,
            sources=engine.sources,
            label=selection.label,
            devices=engine.devices,
            per_device=engine.per_device,
        )

    def close(self) -> None:
        """Drop every report, and what the engine holds."""
        with self.lock:
            for facts in self._by_memory.values():
                facts.clear()
            self.engine.close()

    def clear(self) -> None:
        """Drop every report of these facts."""
        for store in (self._reports, self._previews, self._saved, self._by_program, self.memo):
            store.clear()
