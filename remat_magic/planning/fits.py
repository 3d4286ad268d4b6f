"""A place and a policy with which the program fits a device, as the device's own compiler says.

The estimate only guides: each choice is judged by what XLA needs for it. As few as possible are compiled: the one
without a checkpoint, those of the lowest estimated peaks, and plans for peaks at which the compiled bytes so far, put
on a line, say that it just fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.planning.costs import Objective, objective
from remat_magic.planning.placed import plan
from remat_magic.planning.places import POLICIES, searched
from remat_magic.planning.plan import order, plan_of
from remat_magic.policies import MIXED
from remat_magic.records import Measurement, Plan, RematError, Report

__all__ = ["plan_that_fits"]

_LOWEST = 3  # choices of the lowest estimated peaks that are compiled before nothing is said to fit
_STEPS = 4  # plans between what fits and what does not
_CLOSE = 0.97  # of the device's memory: what needs as much uses it
_HOPELESS = 1.15  # of the device's memory: what is expected to need more is not compiled


def plan_that_fits(
    facts: Facts,
    device: Device,
    compiled: Callable[[Any, str], Measurement],
    at: str | None = None,
    *,
    cost: str = "flops",
    separately: bool = False,
    together: bool = False,
    seconds: float = 10.0,
    most: int = 12,
) -> Plan:
    """The plan that adds least among those tried with which the program fits a device, by its compiler.

    Args:
        facts: of the traced function.
        device: the device.
        compiled: what its compiler says of a policy, or a plan, at a place.
        at: the only place to try. Default: all that ``Trace.places`` tries.
        cost: as for ``Trace.plan``, and so are ``separately`` and ``together``.
        separately: each of equal layers that share a body by itself.
        together: equal layers of a Python loop alike.
        seconds: for each search of a plan, besides compiling.
        most: how many choices are compiled at most.

    Raises:
        RematError: none fits, or the program cannot be compiled for the device.
    """
    options = {"separately": separately, "together": together, "seconds": seconds}
    there = facts.on(device)
    best = _Fitting(there, device, compiled, at, objective(cost, device, None), options, most).result()
    return best if there is facts else replace(best, peak_device=device.name)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A choice, and the bytes that it needs on the device."""

    plan: Plan
    needed: int
    fits: bool

    @property
    def name(self) -> str:
        """What people call it: with its place, which of several policies says which is where."""
        label, place = self.plan.label, f" at {self.plan.at}"
        if self.plan.policy == MIXED:
            return self.plan.at
        return label if self.plan.policy == "none" or label.endswith(place) else f"{label}{place}"

    @property
    def text(self) -> str:
        """As a row of a list."""
        return f"{self.name} {units.nbytes(self.needed)}"


class _Fitting:
    """The choices compiled so far."""

    def __init__(
        self,
        facts: Facts,
        device: Device,
        compiled: Callable[[Any, str], Measurement],
        at: str | None,
        least: Objective,
        options: Mapping[str, Any],
        most: int,
    ) -> None:
        self._facts, self._device, self._compile, self._at = facts, device, compiled, at
        self._least = least
        self._options, self._most = options, most
        self._limit = device.memory_bytes or 0
        self._tried: dict[tuple[Any, ...], _Compiled | None] = {}
        self._error = ""

    def result(self) -> Plan:
        name = self._facts.engine.function_name
        bare = self._try(self._of_report(self._facts.report("none", self._at or self._facts.engine.default_at)))
        if bare is None:
            raise RematError(self._error)
        if bare.fits:
            return self._said(bare, "Without any checkpoint it fits.")
        reports = self._reports()
        for report in reports[:_LOWEST]:
            self._try(self._of_report(report))
        if not any(found.fits for found in self._all()):
            nearest = min(self._all(), key=lambda found: found.needed)
            raise RematError(
                f"Nothing that was compiled of {name} fits {self._device.name}, which has {units.nbytes(self._limit)}: "
                f"{self._texts()}. {nearest.name} comes nearest: use smaller batches, a device with more memory, or "
                "several."
            )
        self._between(bare)
        self._cheaper(reports, bare)
        best = min((found for found in self._all() if found.fits), key=lambda found: order(found.plan))
        return self._said(best, f"Of those compiled none that fits {self._adds}.")

    def _between(self, bare: _Compiled) -> None:
        """Compile plans for the peak at which it should just fit, between what fits and what does not.

        What has no checkpoint is no end of that line: XLA then recomputes by itself what a checkpoint forbids it to.
        """
        for _ in range(_STEPS):
            low = max((found for found in self._all() if found.fits), key=lambda found: found.needed)
            above = [found for found in self._all() if found.needed > low.needed and found is not bare]
            high = min((found for found in above if not found.fits), key=lambda found: found.needed, default=None)
            if low.needed >= _CLOSE * self._limit:
                return
            peak = low.plan.peak_bytes or 0
            if high is None:
                peak *= self._limit / low.needed
            else:
                share = (self._limit - low.needed) / (high.needed - low.needed)
                peak += share * ((high.plan.peak_bytes or 0) - peak)
            try:
                between = plan(
                    self._facts,
                    at=self._at,
                    peak=round(peak),
                    cost=self._least.cost,
                    device=self._device,
                    **self._options,
                )
            except RematError:  # no plan has so low a peak
                return
            if self._key(between) in self._tried or self._try(between) is None:
                return

    def _cheaper(self, reports: list[Report], bare: _Compiled) -> None:
        """Compile those of the search over places that add less than the best so far and may fit as well."""
        for report in sorted(reports, key=self._least.of):
            fitting = [found for found in self._all() if found.fits]
            if self._least.of(report) >= min(order(found.plan)[0] for found in fitting):
                return
            if (report.saved_bytes, report.peak_bytes) == (bare.plan.saved_bytes, bare.plan.peak_bytes):
                continue  # no checkpoint by another name
            ratio = max(found.needed / (found.plan.peak_bytes or 1) for found in fitting)
            if ratio * (report.peak_bytes or 0) <= _HOPELESS * self._limit:
                self._try(self._of_report(report))

    def _reports(self) -> list[Report]:
        """Those of the search over places, the lowest estimated peak first."""
        if self._at is None:
            reports = [*searched(self._facts, self._options["seconds"]).reports.values()]
        else:
            reports = [self._facts.report(policy, self._at) for policy in POLICIES]
        known = [report for report in reports if report.peak_bytes is not None and not report.backward_error]
        # Those that do the same go by one name.
        distinct = {(report.peak_bytes, report.saved_bytes, report.recomputed_flops): report for report in known[::-1]}
        return sorted(distinct.values(), key=lambda report: report.peak_bytes or 0)

    def _try(self, choice: Plan) -> _Compiled | None:
        """Compile a choice; None where that fails or enough was compiled."""
        key = self._key(choice)
        if key in self._tried:
            return self._tried[key]
        if len(self._tried) >= self._most:
            return None
        policy = choice if choice.names else choice.policy
        measured = self._compile(policy, choice.at)
        self._error = self._error or measured.error
        found = None
        if measured.fits is not None and measured.needed_bytes is not None:
            self._limit = measured.available_bytes or self._limit
            found = _Compiled(choice, measured.needed_bytes, measured.fits)
        self._tried[key] = found
        return found

    @property
    def _adds(self) -> str:
        return "recomputes less" if self._least.device is None else "takes less time, by estimate"

    def _said(self, best: _Compiled, sentence: str) -> Plan:
        needs = f"Compiled for {self._device.name} it needs {units.nbytes(best.needed)} of {units.nbytes(self._limit)}."
        return replace(best.plan, status=f"{needs} {sentence} Compiled were: {self._texts()}.")

    def _texts(self) -> str:
        return ", ".join(found.text for found in self._all())

    def _all(self) -> list[_Compiled]:
        return [found for found in self._tried.values() if found is not None]

    def _of_report(self, report: Report) -> Plan:
        return plan_of(self._facts, report, self._limit, self._least, "peak")

    @staticmethod
    def _key(choice: Plan) -> tuple[Any, ...]:
        return choice.at, choice.separately, choice.names or choice.policy
