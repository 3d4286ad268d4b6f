"""Plans that choose their place too: which place, and which values there, is one question."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import devices, units
from remat_magic.devices import Device
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.rewriting import COMPLEX
from remat_magic.planning.places import CLEARLY_LOWER, FEW, known, searched, searching
from remat_magic.planning.planner import INSIDE, budget_bytes, objective
from remat_magic.planning.search import FILLED, Request, called, known_plans, limit_of, no_plan, order, plan_at
from remat_magic.planning.solver import GAP
from remat_magic.policies import MIXED
from remat_magic.records import Measurement, Plan, RematError, Report

_PLACES = 2  # that are planned for, the usual one for a peak among them
_SMALL = 10**7  # bytes of a peak: below that XLA for CPUs is not asked, as nobody needs to know
_COMPILED = 4  # plans for a peak, and besides what has no checkpoint
_HARDLY = 0.25  # of the bytes that are no longer saved: where the peak falls by less, they come back at the peak


Ask = Callable[[Any, str], Measurement]
"""Gives what a compiler says of a policy, or a plan, at a place."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is to be, as for ``Trace.plan``."""

    budget: float | str | None = None
    at: str | None = None
    saved: float | str | None = None
    peak: float | str | None = None
    of: str = "saved"
    cost: str = "flops"
    device: str | Device | None = None
    offload: float | str | bool | None = None
    gap: float = GAP

    def limit(self) -> tuple[str, float | str]:
        """The one budget that is given, and what it is of.

        Raises:
            RematError: there is none or several, or it is of nothing known.
        """
        if self.of not in ("saved", "peak"):
            raise RematError(f"of={self.of!r} is nothing that a budget can be of: choose 'saved' or 'peak'.")
        budgets = [(self.of, self.budget), ("saved", self.saved), ("peak", self.peak)]
        given = [(kind, limit) for kind, limit in budgets if limit is not None]
        if len(given) != 1:
            raise RematError("a plan has one budget: give saved=, peak= or budget, as in trace.plan(peak='2 GiB').")
        return given[0]


def plan(facts: Facts, asked: PlanRequest, ask: Ask | None = None) -> Plan:
    """``Trace.plan``; a peak is asked about first, where there is somebody to ``ask``."""
    (of, limit), at, device, gap = asked.limit(), asked.at, asked.device, asked.gap
    if not gap >= 0:
        raise RematError(f"gap={gap!r} is no share of the cost: give 0 or more.")
    least = objective(asked.cost, device, asked.offload)
    there = None if device is None else devices.get(device)
    memory = memory_of(there)
    budget = limit_of(facts, at or facts.engine.default_at, limit, of, memory)
    request = Request(budget, of, least, gap, memory=memory)
    best, compiled = _confirmed(facts, request, at, limit, ask) if ask else (_found(facts, request, at), "")
    sentences = [compiled, best.status]
    if best.at != facts.engine.default_at and at is None:
        elsewhere = "" if of == "peak" else "; elsewhere less may be recomputed"  # a bound is of one place
        sentences.append(f"Its place, {best.at}, was chosen with it{elsewhere}.")
    if of == "peak" and (best.peak_high or 0) > budget and not compiled:
        sentences.append(f"Its peak may be up to {units.nbytes(best.peak_high or 0)}, which is more: Measure tells.")
    if _in_vain(facts, best, memory) and not compiled:
        sentences.append(
            "Its estimated peak is hardly lower than without a checkpoint there: trace.fit tells what lowers it."
        )
    if inside := [unreached.removeprefix(INSIDE) for unreached in best.unreached if unreached.startswith(INSIDE)]:
        sentences.append(f"Values inside {' or '.join(inside)} are no choices.")
    if COMPLEX in best.unreached:
        sentences.append("Complex values are no choices: JAX cannot save them under a policy.")
    peak_device = there.name if there is not None and memory != PLAIN else ""
    label = f"{best.label} on {peak_device}" if best.names and of == "peak" and peak_device else best.label
    return replace(best, label=label, status=" ".join(filter(None, sentences)), peak_device=peak_device)


def _found(facts: Facts, request: Request, at: str | None) -> Plan:
    """The plan by what is estimated.

    Raises:
        RematError: none fits.
    """
    if at is not None:
        return plan_at(facts, at, request)
    return (_within_peak if request.of == "peak" else _within_saved)(facts, request)


def _confirmed(facts: Facts, request: Request, at: str | None, limit: float | str, ask: Ask) -> tuple[Plan, str]:
    """The plan for a peak that the compiler says keeps to it, and a sentence on what was compiled.

    A share is of what is needed without a checkpoint by the same word. On no device a peak is an estimate of nothing
    that is compiled for: then what is needed is to be less than without a checkpoint. The estimate is searched for as
    much less as the one before was off, and at last for what is known to be the lowest.

    Raises:
        RematError: none does, with what each needs; or as ``_found``.
    """
    place, on_device = at or facts.engine.default_at, request.memory != PLAIN
    if not on_device and request.budget < _SMALL:
        return _found(facts, request, at), ""
    whole = ask("none", place)
    without, peak = _needed(whole), facts.under("none", place).report(request.memory).peak_bytes or 0
    if without is None:
        found = _found(facts, request, at)
        return replace(found, status=f"Its peak is an estimate: {whole.error} {found.status}"), ""
    allowed = budget_bytes(limit, lambda: without) if on_device else without - 1
    budget = peak * allowed // without if on_device else request.budget
    best, tried = None, dict[tuple[object, str], str]()
    for _ in range(_COMPILED):
        try:
            best = _found(facts, replace(request, budget=budget), at)
        except RematError:
            if not on_device and not tried:
                raise
            known = (plan for plan in known_plans(facts, request, at) if _program(plan) not in tried)
            best = min(known, key=lambda plan: plan.peak_bytes or 0, default=None)
        if best is None or (best.policy in ("none", "as_written") and (tried or not on_device)):
            break
        needed = _needed(ask(best if best.names else best.policy, best.at))
        if needed is not None and needed <= allowed:
            others = f" Not confirmed: {', '.join(tried.values())}." if tried else ""
            compiled = f"Compiled it needs {units.nbytes(needed)}, {units.nbytes(without)} without a checkpoint."
            label = request.key_and_label(facts, best.at)[1] if best.names else best.label
            return replace(best, label=label, budget_bytes=request.budget), compiled + others
        tried[_program(best)] = f"{called(best)} {units.nbytes(needed) if needed else 'is not compiled'}"
        budget = min((best.peak_bytes or 1) - 1, (best.peak_bytes or 0) * allowed // (needed or without))
    if best is not None and not tried:
        return best, ""
    name = facts.engine.primal.name
    keeps = f"within {units.nbytes(allowed)}" if on_device else "lower than without a checkpoint"
    raise RematError(
        f"No plan that was compiled keeps {name} {keeps}, where it needs {units.nbytes(without)}: "
        f"{', '.join(tried.values())}. Raise the budget, or see trace.fit()."
    )


def _needed(measured: Measurement) -> int | None:
    return measured.needed_bytes or measured.total_bytes


def _program(plan: Plan) -> tuple[object, str]:
    """What makes the program of a plan, whatever it is called."""
    return plan.names or plan.policy, plan.at


def _within_saved(facts: Facts, request: Request) -> Plan:
    """The plan at the usual place, or at another, where that one is worth more.

    Another place is tried only where there is a reason to: no plan fits at the usual one, or it gains nothing at the
    peak and elsewhere one does.

    Raises:
        RematError: none fits at the usual place, nor elsewhere.
    """
    best: Plan | None = None
    why: RematError | None = None
    try:
        best = plan_at(facts, facts.engine.default_at, request)
    except RematError as error:
        why = error
    if best is not None and not _in_vain(facts, best, request.memory):
        return best
    for at in _elsewhere(facts, best, request):
        try:
            other = plan_at(facts, at, request)
        except RematError:
            continue
        if best is None or (not _in_vain(facts, other, request.memory) and _is_lower(other, best)):
            best = other
    if best is None:
        raise why or RematError(f"no place of {facts.engine.primal.name} can be planned for.")
    return best


def _elsewhere(facts: Facts, best: Plan | None, request: Request) -> Iterator[str]:
    """Other places than the usual one to plan for, what costs least there leading."""
    usual = facts.engine.default_at
    fitting = [
        report
        for report in searched(facts, request.memory).values()
        if report.policy not in (MIXED, "none", "as_written")
        and report.saved_bytes <= request.budget
        and not report.backward_error
        and (best is None or _is_lower(report, best))
    ]
    fitting = [facts.under(report.policy, report.at).report(request.memory) for report in fitting]
    fitting.sort(key=lambda report: (request.objective.of(report), report.peak_bytes or 0))
    places = dict.fromkeys(report.at for report in fitting)
    yield from [at for at in places if at != usual][:_PLACES]
    if best is None and usual != "function":  # where nothing is saved if nothing needs to be
        yield "function"


def _in_vain(facts: Facts, plan: Plan, memory: DeviceMemory) -> bool:
    """Whether a plan saves less than there is without a checkpoint, and most of that comes back at the peak."""
    try:
        without = facts.under("none", plan.at).report(memory)
    except RematError:
        return False
    peak, less = without.peak_bytes or 0, without.saved_bytes - plan.saved_bytes
    return less >= peak / 100 and peak - (plan.peak_bytes or 0) < _HARDLY * less


def _is_lower(other: Plan | Report, best: Plan) -> bool:
    """Whether the peak of another choice is clearly lower than that of a plan."""
    return other.peak_bytes is not None and other.peak_bytes < CLEARLY_LOWER * (best.peak_bytes or 0)


def _within_peak(facts: Facts, request: Request) -> Plan:
    """The cheapest of plans for a peak at several places: the usual one, and that where least is added within it.

    No choice whose figures are known by then, as it was tried or asked for before, fits and costs less; and where none
    fits, none has a lower peak than what is said to be the least.

    Raises:
        RematError: none fits at the usual place, nor elsewhere.
    """
    if known(facts, request.memory) is None:
        deque(itertools.islice(searching(facts, request.memory), FEW), maxlen=0)
        best = _best_of_known(facts, request)
        if best is not None and (best.peak_bytes or 0) >= FILLED * request.budget:
            return best
        searched(facts, request.memory)  # known from now on
    if best := _best_of_known(facts, request):
        return best
    lowest = min(known_plans(facts, request), key=lambda plan: plan.peak_bytes or 0, default=None)
    if lowest is None:
        return plan_at(facts, facts.engine.default_at, request)
    raise no_plan(facts, "", request, lowest)


def _best_of_known(facts: Facts, request: Request) -> Plan | None:
    """The cheapest within a peak of what is known, and of plans at the places of the cheapest; None where none fits."""

    def fitting() -> list[Plan]:
        return [plan for plan in known_plans(facts, request) if (plan.peak_bytes or 0) <= request.budget]

    places = [plan.at for plan in fitting() if plan.policy not in (MIXED, "as_written")]
    plans: list[Plan] = []
    for at in [*dict.fromkeys((facts.engine.default_at, *places))][:_PLACES]:
        beat = min((order(plan)[0] for plan in (*fitting(), *plans)), default=float("inf"))
        try:
            plans.append(plan_at(facts, at, request, beat=beat))
        except RematError:
            continue
    best = min((*plans, *fitting()), key=order, default=None)
    status = "Of the choices that are known it is the cheapest whose estimated peak fits."
    return None if best is None else replace(best, status=best.status or status)
