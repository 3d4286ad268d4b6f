"""Plans with which the program fits a device, as the device's own compiler says.

The estimate only guides: each choice is judged by what XLA needs for it. As few as possible are compiled: the one
without a checkpoint, those of the lowest estimated peaks until one fits (more of them where they need little more than
there is), plans for peaks at which the compiled bytes so far, put on a line, say that it just fits, and what adds less
than the best of these and is not known to be hopeless: of some programs the estimate is several times what XLA needs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import devices, units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.planning.places import POLICIES, searched
from remat_magic.planning.plan import plan
from remat_magic.planning.planner import Objective, objective
from remat_magic.planning.search import Choice, built_in, known_choices, order, plan_of
from remat_magic.policies import MIXED
from remat_magic.records import Measurement, Plan, RematError, Report

__all__ = ["plan_that_fits"]

_LOWEST = 3  # choices of the lowest estimated peaks that are compiled before nothing is said to be near
_NEAR = 1.25  # of the device's memory: what estimates are off by does not make up for more
_STEPS = 4  # plans between what fits and what does not
_CLOSE = 0.97  # of the device's memory: what needs as much uses it
_BUILT_IN = 10  # policies of JAX's at places that are looked at besides those of the search
_HOPELESS = 1.5  # of the device's memory: what is expected to need more at least is not compiled


def plan_that_fits(
    facts: Facts,
    device: Device,
    compiled: Callable[[Any, str], Measurement],
    at: str | None = None,
    *,
    cost: str = "flops",
    most: int = 12,
) -> Plan:
    """The plan that adds least among those tried with which the program fits a device, by its compiler.

    Args:
        facts: of the traced function.
        device: the device.
        compiled: what its compiler says of a policy, or a plan, at a place.
        at: the only place to try. Default: all that ``Trace.places`` tries.
        cost: as for ``Trace.plan``.
        most: how many choices are compiled at most.

    Raises:
        RematError: none fits, or the program cannot be compiled for the device.
    """
    there = facts.on(device)
    least = objective(cost, device, None)
    best = _CompiledChoices(there, device, compiled, at, least, most).result()
    return best if there is facts else replace(best, peak_device=device.name)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A choice, and the bytes that it needs on the device."""

    plan: Plan
    needed: int
    fits: bool
    mend: str = ""

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


def _effect(choice: Plan | Report) -> tuple[int | None, ...]:
    """What is the same for choices that do the same."""
    return choice.peak_bytes, choice.saved_bytes, choice.recomputed_flops


class _CompiledChoices:
    """The choices compiled so far, in search of the cheapest that fits."""

    def __init__(
        self,
        facts: Facts,
        device: Device,
        compiled: Callable[[Any, str], Measurement],
        at: str | None,
        least: Objective,
        most: int,
    ) -> None:
        self._facts, self._device, self._compile, self._at = facts, device, compiled, at
        self._least, self._most = least, most
        self._limit = devices.usable_bytes(device) or 0
        self._tried: dict[tuple[Any, ...], _Compiled | None] = {}
        self._error = ""

    def result(self) -> Plan:
        name = self._facts.engine.function_name
        bare = self._try(self._of_report(self._facts.report("none", self._at or self._facts.engine.default_at)))
        if bare is None:
            raise RematError(self._error)
        if bare.fits:
            return self._with_status(bare, "Without any checkpoint it fits.")
        reports = self._reports()
        self._first_that_fits(reports, bare)
        if not any(compiled.fits for compiled in self._all()):
            nearest = min(self._all(), key=lambda compiled: compiled.needed)
            usual = ": use smaller batches, a device with more memory, or several."
            mend = f". {nearest.mend}" if nearest.mend else usual
            raise RematError(
                f"Nothing that was compiled of {name} fits {self._device.name}, where a program can have "
                f"{units.nbytes(self._limit)}: {self._texts()}. {nearest.name} comes nearest{mend}"
            )
        self._between(bare)
        self._cheaper(reports, bare)
        best = min((compiled for compiled in self._all() if compiled.fits), key=lambda compiled: order(compiled.plan))
        return self._with_status(best, f"Of those compiled none that fits {self._adds}.")

    def _first_that_fits(self, reports: list[Report], bare: _Compiled) -> None:
        """Compile choices, those of the lowest estimated peak first, until one fits.

        Where some need little more than there is, which of them needs least is not told by estimates that are as close:
        then JAX's own policies at all places are compiled too, as many as may be.
        """
        if self._one_fits(map(self._of_report, reports[:_LOWEST])):
            return
        if min(compiled.needed for compiled in self._all()) <= _NEAR * self._limit:
            rest = [*map(self._of_report, reports[_LOWEST:]), *self._choices(reports, bare)]
            self._one_fits(sorted(rest, key=lambda choice: choice.peak_bytes or 0))

    def _one_fits(self, choices: Iterable[Plan]) -> bool:
        """Compile choices until one fits; whether one does."""
        compiled = map(self._try, choices)
        return any(each is not None and each.fits for each in compiled)

    def _between(self, bare: _Compiled) -> None:
        """Compile plans for the peak at which it should just fit, between what fits and what does not.

        What has no checkpoint is no end of that line: XLA then recomputes by itself what a checkpoint forbids it to.
        """
        for _ in range(_STEPS):
            low = max((compiled for compiled in self._all() if compiled.fits), key=lambda compiled: compiled.needed)
            above = [compiled for compiled in self._all() if compiled.needed > low.needed and compiled is not bare]
            high = min(
                (compiled for compiled in above if not compiled.fits),
                key=lambda compiled: compiled.needed,
                default=None,
            )
            if low.needed >= _CLOSE * self._limit:
                return
            peak = low.plan.peak_bytes or 0
            if high is None:
                peak *= self._limit / low.needed
            else:
                share = (self._limit - low.needed) / (high.needed - low.needed)
                peak += share * ((high.plan.peak_bytes or 0) - peak)
            try:
                between = plan(self._facts, at=self._at, peak=round(peak), cost=self._least.cost, device=self._device)
            except RematError:  # no plan has so low a peak
                return
            if self._key(between) in self._tried or self._try(between) is None:
                return

    def _cheaper(self, reports: list[Report], bare: _Compiled) -> None:
        """Compile choices that add less than the best so far and may fit as well, until none is left.

        What each needs is expected from its estimated peak and from what was compiled at its place.
        """
        choices = self._choices(reports, bare)
        while len(self._tried) < self._most:
            best = min(order(compiled.plan)[0] for compiled in self._all() if compiled.fits)
            left = [choice for choice in choices if order(choice)[0] < best and self._key(choice) not in self._tried]
            expected = {self._key(choice): self._expected(choice, bare) for choice in left}
            left = [choice for choice in left if expected[self._key(choice)][0] <= _HOPELESS * self._limit]
            if not left:
                return
            fitting = [choice for choice in left if expected[self._key(choice)][1] <= self._limit]
            self._try(fitting[0] if fitting else min(left, key=lambda choice: expected[self._key(choice)][1]))

    def _expected(self, choice: Plan, bare: _Compiled) -> tuple[float, float]:
        """The bytes that a choice needs at least, by the estimates of those compiled, and by those at its place.

        That without a checkpoint tells nothing of others, as above.
        """
        compiled = [compiled for compiled in self._all() if compiled is not bare]
        ratios = [(other.plan.at == choice.at, other.needed / (other.plan.peak_bytes or 1)) for other in compiled]
        there = [ratio for same, ratio in ratios if same] or [ratio for _, ratio in ratios]
        peak = choice.peak_bytes or 0
        return min(ratio for _, ratio in ratios) * peak, statistics.median(there) * peak

    def _choices(self, reports: list[Report], bare: _Compiled) -> list[Plan]:
        """Those of the search over places, and JAX's own and known policies at all of these, the cheapest first."""
        places = dict.fromkeys(report.at for report in reports if report.policy not in (MIXED, "as_written"))
        others = built_in(self._facts, places if self._at else {**places, "function": None}, self._least)
        for _ in itertools.islice(others, _BUILT_IN):
            pass  # known from now on
        policies = [choice.report for choice in known_choices(self._facts, self._least, at=self._at) if not choice.plan]
        plans = map(self._of_report, (*policies, *reports))
        # What does the same by estimate XLA can compile otherwise: a checkpoint that saves everything has barriers.
        distinct: dict[tuple[Any, ...], Plan] = {}
        for choice in sorted(plans, key=order):
            if choice.policy not in ("none", "as_written") or _effect(choice) != _effect(bare.plan):
                distinct.setdefault((choice.at, *_effect(choice)), choice)
        return [*distinct.values()]

    def _reports(self) -> list[Report]:
        """Those of the search over places, the lowest estimated peak first."""
        if self._at is None:
            reports = [*searched(self._facts).reports.values()]
        else:
            reports = [self._facts.report(policy, self._at) for policy in POLICIES]
        estimated = [report for report in reports if report.peak_bytes is not None and not report.backward_error]
        # Those that do the same go by one name.
        distinct = {_effect(report): report for report in estimated[::-1]}
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
        compiled = None
        if measured.fits is not None and measured.needed_bytes is not None:
            self._limit = measured.available_bytes or self._limit
            compiled = _Compiled(choice, measured.needed_bytes, measured.fits, measured.mend)
        self._tried[key] = compiled
        return compiled

    @property
    def _adds(self) -> str:
        return "recomputes less" if self._least.device is None else "takes less time, by estimate"

    def _with_status(self, best: _Compiled, sentence: str) -> Plan:
        needs = f"Compiled for {self._device.name} it needs {units.nbytes(best.needed)} of {units.nbytes(self._limit)}."
        return replace(best.plan, status=f"{needs} {sentence} Compiled were: {self._texts()}.")

    def _texts(self) -> str:
        return ", ".join(compiled.text for compiled in self._all())

    def _all(self) -> list[_Compiled]:
        return [compiled for compiled in self._tried.values() if compiled is not None]

    def _of_report(self, report: Report) -> Plan:
        choice = Choice(report, self._facts.engine.plans.get(report.policy))
        return plan_of(self._facts, choice, self._limit, self._least, "peak")

    @staticmethod
    def _key(choice: Plan) -> tuple[Any, ...]:
        return choice.at, choice.names or choice.policy
