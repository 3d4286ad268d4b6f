"""The least recomputation within a budget of the estimated peak, by plans for several budgets of saved bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from remat_magic import units
from remat_magic.planning.choices import BUILT_IN, known_choices, remember
from remat_magic.planning.plan_records import Request, of_report, order, plan_of
from remat_magic.planning.planner import Planner
from remat_magic.planning.problem import Solution
from remat_magic.planning.saved_plans import BEYOND_NAMES, within_saved
from remat_magic.records import Plan, RematError

__all__ = ["within_peak"]

_GRID = 4  # budgets of saved bytes tried at first, evenly spaced, since a peak need not rise with what is saved
_STEPS = 6  # halvings of the interval in which the last plan lies that fits


def within_peak(choices: Planner, request: Request, seconds: float, gap: float, beat: float | None) -> Plan:
    """The cheapest plan found whose report has an estimated peak of at most ``request.budget`` bytes.

    Where peaks rise with the bytes saved, the largest budget that fits is between one that does and the next that does
    not. They need not: what is known already, JAX's own policies and a few evenly spaced budgets are tried first, those
    that cost least before the others. Each candidate is judged by the report that JAX gives for it; those that cannot
    win are not traced.

    Raises:
        RematError: none fits; says what the least peak is that was found.
    """
    search = _PeakSearch(choices, request, seconds, gap, beat)
    search.known()
    least, most = choices.graph.predict(())[0], choices.most
    everything, _ = choices.graph.predict(choices.problem().names)  # more than autodiff saves by itself, as a rule
    budgets = sorted({everything, *(least + max(0, most - least) * i // _GRID for i in range(_GRID + 1))})
    high = search.first_pass(budgets)
    if high is None and not search.has_best and beat is None:
        search.prunes = False  # for the least peak, which is to be told
        search.first_pass(budgets)
    if high is not None:
        search.between(budgets[budgets.index(high) - 1], high, max(1, (everything - least) // 1000))
    return search.result()


class _PeakSearch:
    """The plans tried so far.

    Attributes:
        prunes: whether what cannot win is left out: what saves more than the peak may be, or costs more than the best.
    """

    def __init__(
        self, choices: Planner, request: Request, seconds: float, gap: float, beat: float | None = None
    ) -> None:
        self._choices, self._request = choices, request
        self._end = time.perf_counter() + seconds
        self._longest, self._gap = seconds / 4, gap
        self._beat = math.inf if beat is None else beat
        self._best: Plan | None = None
        self._lowest: Plan | None = None
        self._tried = 0
        self._verdict: bool | None = None  # of a solution that was not traced, whether its peak is taken to fit
        self._costs: dict[int, float] = {}  # of what was found for a budget
        self._beyond = 0  # what the peak of the last plan that was traced holds beside what is saved
        self.prunes = True

    @property
    def has_best(self) -> bool:
        """Whether a plan was found that fits."""
        return self._best is not None

    def known(self) -> None:
        """Try what JAX has given figures of at this place before, for whatever budget."""
        facts, least = self._choices.facts, self._request.objective
        for choice in known_choices(facts, least, at=self._choices.at, together=self._choices.together):
            self._take(plan_of(facts, choice, self._request.budget, least, "peak"))

    def first_pass(self, budgets: Sequence[int]) -> int | None:
        """Try JAX's policies and budgets of saved bytes, in rising order; the least one above the last that fits."""
        for key in BUILT_IN:
            self.policy(key)
        for number in reversed(range(len(budgets))):
            if self.budget(budgets[number]):
                return budgets[number + 1] if number + 1 < len(budgets) else None
        return None

    def between(self, low: int, high: int, least: int) -> None:
        """Try budgets between one that fits and one that does not, as long as they differ by more than ``least``."""
        if self._has_floor:
            high = max(low, min(high, self._request.budget + 1))
        for number in range(_STEPS):
            cheapest = self._costs.get(high, -math.inf)
            done = self._best is not None and order(self._best)[0] <= cheapest * (1 + self._gap)
            if high - low <= least or done:
                break
            middle = self._request.budget - self._beyond  # if the peak holds as much beside what is saved
            if number % 2 or not low + least < middle < high - least:
                middle = (low + high) // 2
            low, high = (middle, high) if self.budget(middle) else (low, middle)

    @property
    def _has_floor(self) -> bool:
        """Whether a peak holds at least what is saved: a device may keep values elsewhere, or narrower."""
        return self.prunes and self._choices.facts.is_plain

    def _cannot_win(self, cost: float) -> bool:
        """Whether what costs so many FLOPs is no better than what is known; seconds are the report's only."""
        if not self.prunes or self._request.objective.device is not None:
            return False
        return cost > self._beat or (self._best is not None and cost >= order(self._best)[0])

    def policy(self, key: str) -> None:
        """Try a policy of JAX's."""
        facts, at = self._choices.facts, self._choices.at
        try:
            if self._has_floor and facts.saved_bytes(key, at) > self._request.budget:
                return
            names = self._choices.saved_by(key) if self._best is not None and key not in BEYOND_NAMES else None
            if names is not None:
                saved, cost = self._choices.graph.predict(names)
                if saved == facts.saved_bytes(key, at) and self._cannot_win(cost):
                    return
            report = facts.report(key, at)
        except RematError:  # complex values, which this JAX cannot save
            return
        if not report.backward_error:
            self._take(of_report(report, self._request))

    def budget(self, saved: int) -> bool:
        """Try the best plan for a budget of saved bytes; whether its peak fits.

        One that would cost too much is taken to fit, so that what costs less is tried next.
        """
        left = max(0.1, min(self._longest, self._end - time.perf_counter()))
        self._verdict = None

        def worth(solution: Solution) -> bool:
            self._costs.setdefault(saved, solution.cost)
            if self._has_floor and solution.saved_bytes > self._request.budget:
                self._verdict = False
            elif self._cannot_win(solution.cost):
                self._verdict = True
            return self._verdict is None

        candidate = within_saved(self._choices, self._request, saved, left, self._gap, names_only=True, worth=worth)
        if self._verdict is not None:
            return self._verdict
        if candidate is not None and candidate.peak_bytes is not None:
            self._beyond = candidate.peak_bytes - candidate.saved_bytes
        return candidate is not None and self._take(candidate)

    def _take(self, candidate: Plan) -> bool:
        if candidate.peak_bytes is None:
            return False
        self._tried += 1
        if candidate.names:
            remember(self._choices.facts, candidate)
        if self._lowest is None or candidate.peak_bytes < (self._lowest.peak_bytes or 0):
            self._lowest = candidate
        fits = candidate.peak_bytes <= self._request.budget
        if fits and (self._best is None or order(candidate) < order(self._best)):
            self._best = candidate
        return fits

    def result(self) -> Plan:
        """The cheapest that fits."""
        limit, name = self._request.budget, self._choices.facts.engine.function_name
        if self._best is None:
            if self._lowest is None:
                raise RematError(f"the peak of {name} is not known: give a budget of saved bytes.")
            budget, least = units.apart(limit, self._lowest.peak_bytes or 0)
            plan_text = "values that were chosen" if self._lowest.names else self._lowest.label
            raise RematError(
                f"No plan at {self._choices.at!r} keeps the estimated peak of {name} within {budget}: the least "
                f"found is {least} ({plan_text}); raise the budget, use smaller batches, "
                "or checkpoint inside the function."
            )
        # What is saved is held at the peak at least once, with the arguments: no choice that fits saves more. But for a
        # device, where values may be narrower or elsewhere.
        plain = self._choices.facts.is_plain
        bound = (self._choices.problem(self._request.objective).relax(limit) if plain else None) or 0.0
        text = f"The cheapest of {self._tried} plans tried whose estimated peak fits; no other is ruled out."
        if self._best.cost == "seconds":
            return replace(self._best, bound_seconds=min(bound, self._best.predicted_seconds or 0.0), status=text)
        return replace(self._best, bound=min(int(bound), self._best.recomputed_flops), status=text)
