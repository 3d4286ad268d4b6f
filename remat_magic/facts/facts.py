"""Everything that is worked out about an engine's function: a variant for each choice, made once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.devices import Device
from remat_magic.engine.engine import Engine
from remat_magic.engine.halves import is_passing, without_gc
from remat_magic.engine.retrace import Retrace, Selection, cached
from remat_magic.facts import reports
from remat_magic.facts.buffers import DeviceMemory, memory_of
from remat_magic.facts.memory import Schedule, both_halves, step_schedule
from remat_magic.facts.residuals import saved_values
from remat_magic.jaxprs.walk import LiveEquations
from remat_magic.records import (
    FitChoice,
    Plan,
    RematError,
    Report,
    StepMemory,
    Timeline,
)


class Unknown(NamedTuple):
    """A choice that cannot be looked up: what to call it, which place, and a sentence on why."""

    policy: str
    at: str
    error: str


class Facts:
    """The facts of a traced function: a variant of it for each choice. May be used from any thread.

    ``memo`` holds what the layers above have worked out about the function, under keys of theirs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.lock = engine, engine.lock
        self.memo: dict[Any, Any] = {}
        self.last: tuple[Any, ...] = ()  # the schedule that was made last: of a variant, and in what memory
        self._in_parts: dict[int, Facts] = {}  # by the identity of an engine, which the other one keeps
        self._variants: dict[tuple[Any, ...], Variant] = {}  # one for each choice as a reader sees it
        self.first: dict[tuple[Any, ...], Variant] = {}  # of those that make the same program, that of the first report

    def under(self, policy: Any = "as_written", at: Any = None, namespace: Mapping[str, Any] | None = None) -> Variant:
        """The function under one choice, as ``Trace.report`` takes it, which is looked up here and nowhere else."""
        with self.lock:
            engine = self.engine.in_parts(policy, at)
            if engine is not self.engine:
                return self._in_parts.setdefault(id(engine), Facts(engine)).under(policy, at, namespace)
            selection = self.engine.select(policy, at, namespace)
            variant = self._variants.get(selection.report_key)
            if variant is None:
                variant = self._variants[selection.report_key] = Variant(self, selection, (policy, at, namespace))
            return variant

    def choose(self, policy: Any, at: Any, namespace: Mapping[str, Any] | None = None) -> Variant | Unknown:
        """The function under one choice, or why there is none: for those who go on with others then."""
        try:
            return self.under(policy, at, namespace)
        except RematError as error:
            text = policy.policy if isinstance(policy, (Plan, FitChoice)) else policy
            text = text if isinstance(text, str) else getattr(text, "__name__", type(text).__name__)
            place = at if isinstance(at, str) else self.engine.default_at if at is None else ""
            return Unknown(text, place, str(error))

    def choose_each(
        self, policies: Iterable[Any], at: Any, namespace: Mapping[str, Any] | None = None
    ) -> list[Variant | Unknown]:
        """The function under each of some policies, with plans of one key under names of their own."""
        plans, chosen = dict[str, Plan](), list[Variant | Unknown]()
        for policy in policies:
            place = at
            if isinstance(policy, FitChoice):
                policy, place = (policy, policy.at) if policy.donate else policy.chosen
            if isinstance(policy, Plan) and policy.names:
                policy = policy.apart_from(plans)
            chosen.append(self.choose(policy, place, namespace))
        return chosen

    def known(self) -> list[Variant]:
        """Those that have a report; without what no key leads to.

        That is a plan that no key stands for, a policy of the user's own, and what donates more than is written.
        """
        with self.lock:
            variants = [it for it in self._variants.values() if it.is_known and not it.selection.donate]
            return [it for it in variants if self._identity(it) == it.selection.identity]

    def _identity(self, variant: Variant) -> Any:
        try:
            return self.engine.select(variant.selection.policy, variant.selection.at).identity
        except RematError:
            return None

    @cached
    def blank(self) -> Report:
        """What every report of the function says."""
        engine = self.engine
        return Report(
            "",
            "",
            sites=engine.primal.table.sites,
            names=engine.names,
            function=engine.primal.name,
            signature=engine.primal.text,
            wrt=engine.primal.signature.wrt,
            notes=engine.notes,
            complete=False,
            sources=engine.sources,
            devices=engine.devices,
            per_device=engine.per_device,
        )

    def close(self) -> None:
        """Drop every variant, and what the engine holds."""
        with self.lock:
            for store in (self._variants, self.first, self.memo, self._in_parts):
                store.clear()
            self.last = ()
            self.engine.close()


class Variant:
    """A function under one choice: what it is, and what JAX makes of it, each worked out when it is first needed.

    May be used from any thread.

    Attributes:
        facts: of the function, of which there are other variants.
        selection: the choice.
    """

    def __init__(self, facts: Facts, selection: Selection, chosen: tuple[Any, Any, Mapping[str, Any] | None]) -> None:
        self.facts, self.selection, self._chosen = facts, selection, chosen
        self.engine, self.lock = facts.engine, facts.lock
        self._reports: dict[DeviceMemory, Report] = {}  # all alike, but for the peak

    def of(self, engine: Engine) -> Variant:
        """Another function, much like this one, under the same choice."""
        return Facts(engine).under(*self._chosen)

    @property
    def retrace(self) -> Retrace:
        """What JAX makes of it."""
        return self.engine.retrace(self.selection)

    @property
    def is_known(self) -> bool:
        """Whether there is a report of it, as on any device."""
        return bool(self._reports)

    @property
    @without_gc()
    def preview(self) -> Report:
        """The report of the forward half alone (``complete`` is False), or a full one where there is one."""
        with self.lock:
            return next(iter(self._reports.values()), None) or self._preview

    @cached
    def _preview(self) -> Report:
        primal = self.engine.primal
        return reports.preview(self._blank, self.retrace.forward, primal.provenances, primal.arguments)

    @without_gc()
    def report(self, device: Device | DeviceMemory | None = None) -> Report:
        """What the choice does: residuals, recomputation, both halves; the peak is as on a device, if one is given."""
        memory = memory_of(device)
        with self.lock:
            if memory not in self._reports:
                self._reports[memory] = self._report(memory)
                self.__dict__.pop("_preview", None)
            return self._reports[memory]

    @property
    def known_report(self) -> Report:
        """A report, of which the peak is as on whatever device it is known; on none by default."""
        with self.lock:
            return next(iter(self._reports.values()), None) or self.report()

    def _report(self, memory: DeviceMemory) -> Report:
        if self.selection.donate:
            other = self.facts.under(replace(self._chosen[0], donate=()), *self._chosen[1:])
            own = self.selection
            report = replace(other.report(memory), policy=own.policy, label=own.label, code=own.code)
            return report if report.peak_bytes is None else reports.with_peak(report, self.schedule(memory))
        first = self.facts.first.get(self.selection.identity, self)
        if first is not self:
            return self._as_selected(first, first.report(memory))
        report = next(iter(self._reports.values()), None)
        if report is not None:
            return report if report.peak_bytes is None else reports.with_peak(report, self.schedule(memory))
        primal = self.engine.primal
        half, provenances = self.retrace.forward, primal.provenances
        try:
            backward = self.retrace.backward
        except RematError as error:
            if is_passing(error):
                raise
            return reports.without_backward(self.preview, half, provenances, str(error))
        schedule = None if self.engine.step is None else self.schedule(memory)
        gradients = [primal.arguments[position] for position in primal.signature.differentiated]
        parts = self.engine.microbatches
        report = reports.full(self.preview, half, backward, provenances, gradients, memory, schedule, parts)
        self.facts.first.setdefault(self.selection.identity, self)
        return report

    def _as_selected(self, other: Variant, report: Report) -> Report:
        """Its report, given that of another one which makes the same program."""
        own, written = self._blank, len(other._blank.notes)
        same = {name: getattr(own, name) for name in ("policy", "at", "code", "label")}
        return replace(report, **same, notes=(*own.notes, *report.notes[written:]))

    @cached
    def saved_bytes(self) -> int:
        """What the choice saves, as in its report, without the rest of one; all of it if there is no backward half."""
        first, half = self.preview, self.retrace.forward
        if first.complete:
            return first.saved_bytes
        try:
            live = LiveEquations(_jax.open_jaxpr(self.retrace.backward))
        except RematError as error:
            if is_passing(error):
                raise
            return first.saved_bytes
        return replace(first, residuals=reports.read(first, saved_values(half.closed, half.outputs), live)).saved_bytes

    def timeline(self, device: Device | DeviceMemory | None = None) -> Timeline:
        """The estimated device memory from equation to equation, where its peak is, and what is live there.

        Its highest moment is the report's ``peak_bytes``. Ordinary reports need not know. An
        error where the function has no backward half.
        """
        sheet = device if isinstance(device, Device) else None
        with self.lock:
            retrace, primal, step = self.retrace, self.engine.primal, self.engine.step
            programs = reports.Programs()
            programs.add_halves(retrace.forward, retrace.backward, primal.provenances, primal.arguments)
            if step is None:
                schedule = self.schedule(memory_of(device))
                return reports.over_time(self._blank, schedule, programs, primal.arguments, device=sheet)
            for both in retrace.halves_in_step.values():
                programs.add_halves(*both)
            given = step.given
            programs.add(step.closed, given.provenances, given.arguments)
            schedule = self.schedule(memory_of(device))
            return reports.over_time(self._blank, schedule, programs, given.arguments, given.name, sheet)

    def step(self, device: Device | None = None) -> StepMemory | None:
        """What the training step holds that the gradient is taken in; None where there is none, or it is not known."""
        step = self.engine.step
        return None if step is None else StepMemory(step.given.name, self.timeline(device))

    def schedule(self, memory: DeviceMemory) -> Schedule:
        """What is live when, where values lie in memory so; the last one that was asked for is kept."""
        facts, retrace, step, half = self.facts, self.retrace, self.engine.step, self.retrace.forward
        if facts.last[:2] != (self, memory):
            if step is not None:
                step = step.donating(self.selection.donate)
                made = step_schedule(step, retrace.halves_in_step, memory, facts.memo.setdefault(Schedule, {}))
            else:
                made = both_halves(half.closed, retrace.backward, half.outputs, type_of=half.type_of, on=memory)
            facts.last = self, memory, made
        return facts.last[2]

    @cached
    def _blank(self) -> Report:
        own, blank = self.selection, self.facts.blank
        notes = (*blank.notes, *own.notes)
        return replace(blank, policy=own.policy, at=own.at, code=own.code, label=own.label or own.policy, notes=notes)
