"""Plans within a budget of peak memory: of the plans for several budgets of saved bytes the cheapest that fits."""

from __future__ import annotations

import time
from dataclasses import replace

from remat_magic import units
from remat_magic.planning.planner import BUILT_IN, Asked, Planner, of_report
from remat_magic.records import Plan, RematError

__all__ = ["within_peak"]

_GRID = 4  # budgets tried at first, evenly spaced, since a peak need not rise with what is saved
_STEPS = 6  # halvings of the interval in which the last plan lies that fits


def within_peak(planner: Planner, asked: Asked, seconds: float, gap: float) -> Plan:
    """The cheapest plan found whose report has an estimated peak of at most ``asked.budget`` bytes.

    Where peaks rise with the bytes saved, halving finds the largest budget that fits. They need not: JAX's own policies
    and a few evenly spaced budgets are tried first. Each candidate is judged by the report that JAX gives for it.

    Raises:
        RematError: none fits; says what the least peak is that was found.
    """
    search = _Search(planner, asked, seconds, gap)
    least, most = planner.graph.predict(())[0], planner.most
    for key in BUILT_IN:
        search.policy(key)
    everything, _ = planner.graph.predict(planner.problem().names)  # more than autodiff saves by itself, as a rule
    budgets = sorted({everything, *(least + max(0, most - least) * i // _GRID for i in range(_GRID + 1))})
    fits = [search.budget(budget) for budget in budgets]
    last = max((i for i, fit in enumerate(fits) if fit), default=None)
    if last is not None and last + 1 < len(budgets):
        low, high = budgets[last], budgets[last + 1]
        for _ in range(_STEPS):
            middle = (low + high) // 2
            if high - low <= max(1, (everything - least) // 1000):
                break
            low, high = (middle, high) if search.budget(middle) else (low, middle)
    return search.result()


class _Search:
    """The plans tried so far."""

    def __init__(self, planner: Planner, asked: Asked, seconds: float, gap: float) -> None:
        self._planner, self._asked = planner, asked
        self._end = time.perf_counter() + seconds
        self._each, self._gap = seconds / 4, gap
        self._best: Plan | None = None
        self._lowest: Plan | None = None
        self._tried = 0

    def policy(self, key: str) -> None:
        """Try a policy of JAX's."""
        try:
            report = self._planner.facts.report(key, self._planner.at)
        except RematError:  # complex values, which this JAX cannot save
            return
        if not report.backward_error:
            self._take(of_report(report, self._asked))

    def budget(self, saved: int) -> bool:
        """Try the best plan for a budget of saved bytes; whether its peak fits."""
        left = max(0.1, min(self._each, self._end - time.perf_counter()))
        made = self._planner.within(self._asked, saved, left, self._gap, names_only=True)
        return made is not None and self._take(made)

    def _take(self, made: Plan) -> bool:
        if made.peak_bytes is None:
            return False
        self._tried += 1
        if self._lowest is None or made.peak_bytes < (self._lowest.peak_bytes or 0):
            self._lowest = made
        fits = made.peak_bytes <= self._asked.budget
        if fits and (self._best is None or _order(made) < _order(self._best)):
            self._best = made
        return fits

    def result(self) -> Plan:
        """The cheapest that fits."""
        limit, name = self._asked.budget, self._planner.facts.engine.function_name
        if self._best is None:
            if self._lowest is None:
                raise RematError(f"the peak of {name} is not known: give a budget of saved bytes.")
            budget, least = units.apart(limit, self._lowest.peak_bytes or 0)
            raise RematError(
                f"No plan at {self._planner.at!r} keeps the estimated peak of {name} within {budget}: the least "
                f"found is {least} ({self._lowest.label}); raise the budget, use smaller batches, "
                "or checkpoint inside the function."
            )
        # What is saved is held at the peak at least once, with the arguments: no choice that fits saves more.
        bound, _ = self._planner.problem(self._asked.objective).relax(limit)
        text = f"The cheapest of {self._tried} plans tried whose estimated peak fits; no other is ruled out."
        if self._best.cost == "seconds":
            least = min(bound or 0.0, self._best.predicted_seconds or 0.0)
            return replace(self._best, bound_seconds=least, status=text)
        return replace(self._best, bound=min(int(bound or 0), self._best.recomputed_flops), status=text)


def _order(plan: Plan) -> tuple[float, int]:
    cost = plan.recomputed_flops if plan.seconds is None else plan.seconds
    return cost, plan.peak_bytes or 0
