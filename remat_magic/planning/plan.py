"""Plans that choose their place too: which place, and which values there, is one question."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from remat_magic import devices, units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.planning.places import CLEARLY_LOWER, gainless, known, lower_elsewhere, promising, searched
from remat_magic.planning.planner import INSIDE, Objective, objective
from remat_magic.planning.search import Choice, built_in, known_choices, limit_of, order, plan_at, plan_of
from remat_magic.planning.solver import GAP
from remat_magic.policies import MIXED
from remat_magic.records import Plan, RematError, Report

__all__ = ["plan"]

_PLACES = 2  # that are planned for, the usual one for a peak among them
_CLEARLY = 0.01  # of the forward pass: another place is chosen where it spares more
_BUILT_IN = 10  # policies of JAX's at places that are tried besides those of the search

_KNOWN = "The cheapest of the choices that are known whose estimated peak fits; no other is ruled out."

_PlanAt = Callable[..., Plan]


def plan(
    facts: Facts,
    budget: float | str | None = None,
    at: str | None = None,
    *,
    saved: float | str | None = None,
    peak: float | str | None = None,
    of: str = "saved",
    cost: str = "flops",
    device: str | Device | None = None,
    offload: float | str | bool | None = None,
    gap: float = GAP,
) -> Plan:
    """``Trace.plan``."""
    if of not in ("saved", "peak"):
        raise RematError(f"of={of!r} is nothing that a budget can be of: choose 'saved' or 'peak'.")
    budgets = [(of, budget), ("saved", saved), ("peak", peak)]
    given = [(kind, limit) for kind, limit in budgets if limit is not None]
    if len(given) != 1:
        raise RematError("a plan has one budget: give saved=, peak= or budget, as in trace.plan(peak='2 GiB').")
    ((of, limit),) = given
    if not gap >= 0:
        raise RematError(f"gap={gap!r} is no share of the cost: give 0 or more.")
    least = objective(cost, device, offload)
    plain, facts = facts, facts if device is None else facts.on(devices.get(device))
    there = functools.partial(plan_at, facts, cost=cost, device=device, offload=offload, gap=gap)
    if at is not None:
        best = there(at, limit, of)
    elif of == "peak":
        best = _within_peak(facts, limit, least, there)
    else:
        best = _within_saved(facts, limit, least, there)
    sentences = [best.status]
    if best.at != facts.engine.default_at and at is None:
        sentences.append(f"Its place, {best.at}, was chosen with it.")
    if no_lower := gainless(facts, best):
        sentences.append(f"{no_lower}{lower_elsewhere(facts, best.peak_bytes)}")
    if inside := [unreached.removeprefix(INSIDE) for unreached in best.unreached if unreached.startswith(INSIDE)]:
        sentences.append(f"Values inside {' or '.join(inside)} are not among the choices.")
    peak_device = "" if facts is plain or device is None else devices.get(device).name
    label = f"{best.label} on {peak_device}" if best.names and of == "peak" and peak_device else best.label
    return replace(best, label=label, status=" ".join(filter(None, sentences)), peak_device=peak_device)


def _within_saved(facts: Facts, budget: float | str, least: Objective, there: _PlanAt) -> Plan:
    """The plan at the usual place, or at another, where that one is worth more.

    Another place is tried only where there is a reason to: no plan fits at the usual one, or it gains nothing at the
    peak, or another is known to recompute clearly less.

    Raises:
        RematError: none fits at the usual place, nor elsewhere.
    """
    usual = facts.engine.default_at
    limit = limit_of(facts, usual, budget, "saved")
    best: Plan | None = None
    why: RematError | None = None
    try:
        best = there(usual, limit)
    except RematError as error:
        why = error
    for at in _elsewhere(facts, best, limit, least):
        try:
            other = there(at, limit)
        except RematError:
            continue
        best = other if best is None or _is_worth_more(facts, other, best) else best
    if best is None:
        raise why or RematError(f"no place of {facts.engine.function_name} can be planned for.")
    return best


def _elsewhere(facts: Facts, best: Plan | None, limit: int, least: Objective) -> Iterator[str]:
    """Other places than the usual one to plan for, what promises most first."""
    usual = facts.engine.default_at
    in_vain = best is None or bool(gainless(facts, best))
    search = known(facts)
    if search is None:
        places = promising(facts) if in_vain else []
    else:
        fitting = _fitting(search.reports.values(), lambda report: report.saved_bytes, limit, least)
        fitting = [report for report in fitting if report.policy not in (MIXED, "none", "as_written")]
        places = [report.at for report in fitting if in_vain or _spares(report, best)]
    yield from [at for at in dict.fromkeys(places) if at != usual][:_PLACES]


def _spares(other: Plan | Report, best: Plan | None) -> bool:
    """Whether another choice recomputes clearly less than a plan."""
    return best is not None and best.recomputed_flops - other.recomputed_flops > _CLEARLY * (best.forward_flops or 0)


def _is_worth_more(facts: Facts, other: Plan, best: Plan) -> bool:
    """Whether a plan elsewhere is better: it lowers the peak clearly where this one does not, or spares recomputing."""
    peak, usual_peak = other.peak_bytes or 0, best.peak_bytes or 0
    if gainless(facts, best) and not gainless(facts, other):
        return peak < CLEARLY_LOWER * usual_peak
    return _spares(other, best) and peak <= usual_peak


def _within_peak(facts: Facts, budget: float | str, least: Objective, there: _PlanAt) -> Plan:
    """The cheapest of plans for a peak at several places: the usual one, and those where least is added within it.

    No choice whose figures are known by then, as it was tried or asked for before, fits and costs less; and where none
    fits, none has a lower peak than what is said to be the least.

    Args:
        facts: of the traced function.
        budget: of the peak.
        least: what is to be least.
        there: makes a plan at a place.

    Raises:
        RematError: none fits at the usual place, nor elsewhere.
    """
    usual = facts.engine.default_at
    limit = limit_of(facts, usual, budget, "peak")
    places = searched(facts)
    at_one_place = [report for report in places.reports.values() if report.policy not in (MIXED, "as_written")]

    def fitting() -> list[Choice]:
        return [choice for choice in known_choices(facts, least) if choice.peak <= limit]

    cheapest = fitting()[:1]
    others = built_in(facts, dict.fromkeys(report.at for report in at_one_place), least)
    for choice in itertools.islice(others, _BUILT_IN):
        if choice.peak <= limit:
            cheapest = [min((*cheapest, choice), key=lambda choice: choice.order(least))]
        if cheapest and not least.of(cheapest[0].report):
            break
    plans: list[Plan] = []
    tried = (report.at for report in _fitting(at_one_place, lambda report: report.peak_bytes, limit, least))
    for at in [*dict.fromkeys((usual, *tried))][:_PLACES]:
        try:
            beat = min((order(plan)[0] for plan in plans), default=None)
            beat = least.of(cheapest[0].report) if beat is None and cheapest else beat
            plans.append(there(at, limit, "peak", beat=beat))
        except RematError:
            continue
    if best := fitting()[:1]:
        bound = next((plan.bound for plan in plans if plan.at == best[0].report.at), 0)
        plan = plan_of(facts, best[0], limit, least, "peak")
        plans.append(replace(plan, bound=min(bound, plan.recomputed_flops), status=_KNOWN))
    if plans:
        return min(plans, key=order)
    lowest = min(known_choices(facts, least), key=lambda choice: choice.peak, default=None)
    if lowest is None:
        return there(usual, limit, "peak")
    few, least_peak = units.apart(limit, lowest.peak)
    raise RematError(
        f"No plan keeps the estimated peak of {facts.engine.function_name} within {few}, wherever it is: the least "
        f"found is {least_peak} ({lowest.text}); raise the budget, or use smaller batches."
    )


def _fitting(
    reports: Iterable[Report], figure: Callable[[Report], int | None], limit: int, least: Objective
) -> list[Report]:
    """The reports of which a figure stays within a limit, those that cost least first."""
    fitting = [r for r in reports if (size := figure(r)) is not None and size <= limit and not r.backward_error]
    return sorted(fitting, key=least.of)
