"""The inspected function, as the widget and its panels share it, and what a terminal prints of it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console, RenderableType

from remat_magic import devices, units
from remat_magic.api import Policy, Trace
from remat_magic.errors import printable
from remat_magic.records import Fit, FitChoice, LiveValue, Measurement, Plan, RematError, Report, Timeline
from remat_magic.views.answer import offered
from remat_magic.views.fit import compilers_remarks
from remat_magic.views.memory import live_in_xla
from remat_magic.views.tables import printed
from remat_magic.views.text import IN_CELL, Answer, is_large

LIKE = "H100 SXM"
"""As on which peaks are where only bytes are given."""

_CLOSED = "this widget was closed, because its cell was run again or close() was called; take the newer one"


class LiveTrace:
    """A trace, until it is closed (or None), and what the keys of its shown policies stand for. From any thread.

    Attributes:
        device: the name of the accelerator that is to be fitted, or a text of so many bytes, empty for none: what was
            given, later what the reader chose; by default the accelerator that is here, if it is known.
        is_given: whether anything was said of it.
        was_chosen: whether the reader has chosen it.
        fit: whether the function fits it, as far as that is known; None before anything is.
        added: plans for budgets that the reader has typed, of that device.
    """

    def __init__(
        self, trace: Trace | None, namespace: Mapping[str, Any] | None = None, device: str | None = None
    ) -> None:
        self._trace = trace
        self.namespace: Mapping[str, Any] = {} if namespace is None else namespace
        here = devices.accelerator() if device is None and trace is not None else None
        self.is_given, self.was_chosen = device is not None, False
        self.device = devices.named(device) if device else here.name if here else ""
        self.fit: Fit | None = None
        self.added: list[FitChoice] = []
        self._policies: dict[str, Policy] = {}
        self._offered: dict[tuple[str, str], Plan | FitChoice] = {}  # by key and place
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str, str], Measurement] = {}

    @property
    def devices(self) -> dict[str, int | None]:
        """What can be chosen, with its bytes: one of each accelerator, as many as the mesh has, and what is chosen."""
        single_devices = (name for name in devices.names() if name != devices.THIS_CPU)
        offered = dict.fromkeys((*single_devices, *devices.meshes(self.trace.mesh_devices), self.device))
        return {name: _bytes_of(name) for name in offered if name}

    def choose_device(self, device: str) -> bool:
        """Fit another device, or so many bytes, from here on; whether it is another one."""
        if device not in ("", *self.devices):
            units.parse_bytes(device, "size")
        if device == self.device:
            return False
        self.device, self.fit, self.added, self.was_chosen = device, None, [], True
        return True

    @property
    def is_device(self) -> bool:
        """Whether a device is to be fitted, and not bytes or nothing."""
        return bool(self.device) and not units.is_bytes(self.device)

    @property
    def like(self) -> str | None:
        """The device as on which peaks are; None for those on this machine's CPU."""
        return self.device if self.is_device else LIKE if self.device else None

    @property
    def memory(self) -> tuple[str, int]:
        """What is to be fitted: what that is called, and its bytes."""
        return (self.device if self.is_device else ""), self.capacity

    @property
    def capacity(self) -> int:
        """The bytes that are to be enough; 0 where that is not known."""
        return (_bytes_of(self.device) if self.device else None) or 0

    def show_fit(self, fit: Fit) -> None:
        """Keep what was found out of the chosen device."""
        as_written, *tried = map(self.as_compiled, (fit.as_written, *fit.tried))
        self.fit = fit = replace(fit, as_written=as_written, tried=tuple(tried))
        self.offer(fit.tried)

    def as_compiled(self, choice: FitChoice) -> FitChoice:
        """A choice with what the compiler for the chosen device said of it, if it was compiled."""
        measured = self.measured(choice.key, choice.at)
        if measured is None or measured.needed_bytes is None or measured.effort != "full":
            return choice
        return choice.as_compiled(measured.needed_bytes, measured.fits, "")

    def choice_of(self, report: Report) -> FitChoice:
        """A choice by its report on the chosen device, as it is known by now."""
        for choice in (self.fit.as_written, *self.fit.tried) if self.fit else ():
            if choice.key == report.policy and (choice.at == report.at or choice.key == "as_written"):
                return choice
        if not self.device:
            return FitChoice(report.label, report.policy, report.at, None, None, None, None)
        policy, at, namespace = self.arguments(report.policy, report.at)
        return self.as_compiled(self.trace.fit_choice(policy, at, self.device, namespace))

    def answer(self, report: Report) -> Fit | None:
        """Whether the choice of a report fits, and what to change, as known by now; None where nothing is chosen."""
        if self.closed or not self.capacity or report.peak_bytes is None:
            return None
        arguments = self.arguments(report.policy, report.at)
        on_device = self.trace.report(*arguments, device=self.like)
        timeline = self.trace.timeline(*arguments, device=self.like)
        choice = self.choice_of(on_device)
        fit = self.fit or Fit(report.function, *self.memory, choice)
        return replace(fit, as_written=choice, report=on_device, timeline=timeline)

    def live_in_xla(self, choice: FitChoice, timeline: Timeline | None) -> list[LiveValue]:
        """What XLA's program holds at its peak under a choice that was compiled; empty where it did not tell."""
        if not choice.compiled or timeline is None or not self.is_device:
            return []
        measured = self.measured(choice.key, choice.at)
        if measured is None:  # by the search: its answer is cached
            policy, at, namespace = self.arguments(choice.key, choice.at)
            measured = self.trace.measure(policy, at, namespace=namespace, device=self.device, seconds=0)
            self.add_measured(self.device, [measured] if not measured.error else [])
        return live_in_xla(measured.timeline, timeline) if measured.timeline else []

    def find_out(self, report: Report, tell: Callable[[str], None]) -> list[str]:
        """Search for what fits now, and compile the choice that a report is of; ``tell`` is called with what is done.

        Returns:
            Sentences on what the compiler says besides, or why it was not called.
        """
        try:
            for fit in self.trace.fitting(self.device):
                self.show_fit(fit)
                tell(fit.progress.current)
        except KeyboardInterrupt:  # what is known by then is an answer
            if self.fit is None:
                raise
            self.show_fit(replace(self.fit, progress=replace(self.fit.progress, cancelled=True)))
            return []
        device = devices.get(self.device) if self.is_device else None
        if device is None or not device.compiles_here:
            return [device.why_not] if device else []
        if self.fit and not self.fit.compiled:  # it says why the compiler says nothing
            return list(self.fit.not_tried[-1:])
        policy, at, namespace = self.arguments(report.policy, report.at)
        measured = self.trace.measure(policy, at, namespace=namespace, device=device)
        self.add_measured(self.device, [measured])
        return list(filter(None, [measured.error or compilers_remarks(measured)]))

    @property
    def closed(self) -> bool:
        """Whether the trace is let go of."""
        return self._trace is None

    @property
    def trace(self) -> Trace:
        """The trace; RematError where it is closed."""
        if self._trace is None:
            raise RematError(_CLOSED)
        return self._trace

    def close(self) -> None:
        """Let go of the trace and the user's names."""
        self._trace = None
        self.namespace = {}
        self.added, self.fit = [], None

    def preview(self, policy: Policy, at: str | None) -> Report:
        """The report of the forward half; its key stands for the policy from here on."""
        if isinstance(policy, FitChoice):
            self.offer([policy])
        policy = self.policy(policy, at or "") if isinstance(policy, str) else policy
        if isinstance(policy, Plan) and policy.names:
            policy = policy.apart_from(self.plans())
        report = self.trace.preview(policy, at, self.namespace)
        # The key that is shown need not be a text that the trace reads ("my_policy #2").
        if report.policy != policy and not isinstance(policy, FitChoice):
            with self._lock:
                self._policies[report.policy] = policy
        return report

    def donating(self, key: str, at: str) -> FitChoice | None:
        """What donates besides, if a shown key stands for such a choice."""
        choice = self.policy(key, at)
        return choice if isinstance(choice, FitChoice) else None

    def offer(self, choices: Iterable[FitChoice]) -> None:
        """Let the keys of plans, and of what donates, stand for them at their places."""
        special = {(one.key, one.at): one if one.donate or not one.plan else one.plan for one in choices}
        with self._lock:
            self._offered |= {of: one for of, one in special.items() if isinstance(one, Plan) or one.donate}

    def measured(self, policy: str, at: str, device: str | None = None) -> Measurement | None:
        """What was compiled of a choice for a device; by default the chosen one."""
        with self._lock:
            return self._measured.get((policy, at, self.device if device is None else device))

    def add_measured(self, device: str, results: Iterable[Measurement]) -> None:
        """Keep what was measured on a device, or compiled for it."""
        with self._lock:
            self._measured |= {(result.policy, result.at, device): result for result in results}

    def policy(self, key: str, at: str = "") -> Policy:
        """What a shown key stands for, at a place where that matters."""
        with self._lock:
            return self._offered.get((key, at), self._policies.get(key, key))

    def arguments(self, policy: str, at: str) -> tuple[Policy, str, Mapping[str, Any]]:
        """What the trace takes for a shown policy."""
        return self.policy(policy, at), at, self.namespace

    def plans(self) -> dict[str, Plan]:
        """The plans that were shown, by their keys, oldest first."""
        with self._lock:
            return {key: policy for key, policy in self._policies.items() if isinstance(policy, Plan)}


def _bytes_of(name: str) -> int | None:
    """The bytes that a program can have of a device, of several those of one; or those that are named."""
    return units.parse_bytes(name) if units.is_bytes(name) else devices.usable_bytes(devices.get(name))


# ---------------------------------------------------------------------------- the answer where no browser is: as text


def text_answer(live: LiveTrace, report: Report, title: str) -> Answer:
    """Whether a choice fits and what to change, looked for now; or what it saves.

    That is so where no device is chosen, and of a small function where nothing was said of one.
    """
    if not live.capacity or not (live.is_given or is_large(report)):
        return Answer(report, title, IN_CELL)
    console = Console(force_jupyter=False)
    with console.status("…") if sys.stdout.isatty() else contextlib.nullcontext() as status:
        remarks = live.find_out(report, lambda what: status.update(printable(what)) if status and what else None)
    fit = live.answer(report)
    return Answer(fit or report, title, IN_CELL, remarks, change(live.trace, fit) if fit else "")


def change(trace: Trace, fit: Fit) -> str:
    """What the plan that is offered first does to the user's source; empty where it is no plan."""
    best = next((row.choice for row in offered(fit)), None)
    if best is None or best.plan is None:
        return ""
    try:
        edit = trace.edit(best.plan).best
    except RematError:
        return ""
    return edit.diff() if edit.verified else ""


def shown(part: RenderableType) -> None:
    """Print something as wide as the terminal is, without colours where none is."""
    if sys.stdout.isatty():
        Console(file=sys.stdout, force_jupyter=False).print(part)
    else:  # a notebook or a pipe, which tells no width
        sys.stdout.write(printed(part, 100))
