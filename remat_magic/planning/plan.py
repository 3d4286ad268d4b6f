"""Plans that choose their place too: which place, and which values there, is one question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from remat_magic import units
from remat_magic.facts.buffers import PLAIN
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.rewriting import COMPLEX
from remat_magic.planning.places import CLEARLY_LOWER, FEW, Search, searched
from remat_magic.planning.search import (
    INSIDE,
    Request,
    as_plan,
    budget_bytes,
    called,
    no_plan,
    order,
    planner,
    with_bound,
    with_status,
    within_saved,
)
from remat_magic.policies import MIXED
from remat_magic.records import Measurement, Plan, RematError, Report

_PLACES = 2  # besides the usual one that are planned for
_SMALL = 10**7  # bytes of a peak: below that nothing is compiled for CPUs, as nobody needs to know
_COMPILED = 4  # plans for a peak, and besides what has no checkpoint
_HARDLY = 0.25  # of the bytes that are no longer saved: where the peak falls by less, they come back at the peak


Measure = Callable[[Any, str], Measurement]
"""Gives what a compiler says of a policy, or a plan, at a place."""


def plan(facts: Facts, request: Request, at: str | None = None, measure: Measure | None = None) -> Plan:
    """``Trace.plan``, at one place or wherever; a plan for a peak is compiled where ``measure`` can."""
    of, budget = request.of, request.budget
    best, compiled = _confirmed(facts, request, at, measure) if measure else (_found(facts, request, at), "")
    sentences = [compiled, best.status]
    if best.at != facts.engine.default_at and at is None:
        elsewhere = "" if of == "peak" else "; at another place less may be recomputed"  # a bound is of one place
        sentences.append(f"The place, {best.at}, was chosen with the plan{elsewhere}.")
    if of == "peak" and (best.peak_high or 0) > budget and not compiled:
        sentences.append(f"Its peak may be up to {units.nbytes(best.peak_high or 0)}, which is more: measure it.")
    if _in_vain(facts, best, request) and not compiled:
        sentences.append(
            "Its estimated peak is hardly lower than without a checkpoint there: trace.fit() finds what lowers it."
        )
    if inside := [unreached.removeprefix(INSIDE) for unreached in best.unreached if unreached.startswith(INSIDE)]:
        sentences.append(f"Plans cannot choose values inside {' or '.join(inside)}.")
    if COMPLEX in best.unreached:
        sentences.append("Plans cannot choose complex values: JAX cannot save them under a policy.")
    on_device = best.names and of == "peak" and request.peak_device
    label = f"{best.label} on {request.peak_device}" if on_device else best.label
    return replace(best, label=label, status=" ".join(filter(None, sentences)))


def _found(facts: Facts, request: Request, at: str | None) -> Plan:
    """The plan by what is estimated."""
    if request.of == "saved":
        return _within_saved(facts, request) if at is None else within_saved(facts, at, request)
    tried = _tried(facts, request, at)
    best = min((it for it in tried if (it.peak_bytes or 0) <= request.budget), key=order, default=None)
    if best is None:
        where = "" if at is None else f" at {at!r}"
        raise no_plan(facts, where, request, min(tried, key=lambda it: it.peak_bytes or 0, default=None))
    bound = 0.0
    if request.memory == PLAIN and best.policy not in (MIXED, "as_written"):  # what is saved is held at the peak
        bound = planner(facts, best.at).problem(request.objective).relax(request.budget) or 0.0
    best = with_bound(replace(best, status=""), bound)
    if best.gap:
        text = f"Of {len(tried)} choices tried, the cheapest whose estimated peak fits. There may be a cheaper one."
        best = replace(best, status=text)
    return with_status(facts, best, request)


def _tried(facts: Facts, request: Request, at: str | None) -> list[Plan]:
    """What a search for a peak comes to, and the reports that were there before."""
    tried = Search(facts, request.memory, request=request, at=at).finish(FEW)
    reports = (it for it in tried if it.peak_bytes is not None and at in (None, it.at))
    link = request.objective.link
    return [as_plan(facts, request, it) for it in reports if link is not None or not it.offloaded_bytes]


def _confirmed(facts: Facts, request: Request, at: str | None, measure: Measure) -> tuple[Plan, str]:
    """The plan for a peak that the compiler says keeps to it, and a sentence on what was compiled.

    A share is of what is needed without a checkpoint by the same word. On no device a peak is an estimate of nothing
    that is compiled for: then what is needed is to be less than without a checkpoint. The estimate is searched for as
    much less as the one before was off, and at last for what is known to be the lowest.
    """
    place, on_device = at or facts.engine.default_at, request.memory != PLAIN
    if not on_device and request.budget < _SMALL:
        return _found(facts, request, at), ""
    whole = measure("none", place)
    without, peak = _needed(whole), facts.under("none", place).report(request.memory).peak_bytes or 0
    if without is None:
        found = _found(facts, request, at)
        return replace(found, status=f"Its peak is an estimate: {whole.error} {found.status}"), ""
    allowed = budget_bytes(request.share, lambda: without) if on_device else without - 1
    budget = peak * allowed // without if on_device else request.budget
    best, tried = None, dict[tuple[object, str], str]()
    for _ in range(_COMPILED):
        try:
            best = _found(facts, replace(request, budget=budget), at)
        except RematError:
            if not on_device and not tried:
                raise
            known = (it for it in _tried(facts, request, at) if _program(it) not in tried)
            best = min(known, key=lambda it: it.peak_bytes or 0, default=None)
        if best is None or (best.policy in ("none", "as_written") and (tried or not on_device)):
            break
        needed = _needed(measure(best if best.names else best.policy, best.at))
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
    limit = f"within {units.nbytes(allowed)}" if on_device else "lower than without a checkpoint"
    raise RematError(
        f"No compiled plan keeps {name} {limit} (without a checkpoint it needs {units.nbytes(without)}): "
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
    """
    best: Plan | None = None
    why: RematError | None = None
    try:
        best = within_saved(facts, facts.engine.default_at, request)
    except RematError as error:
        why = error
    if best is not None and not _in_vain(facts, best, request):
        return best
    for at in _elsewhere(facts, best, request):
        try:
            other = within_saved(facts, at, request)
        except RematError:
            continue
        if best is None or (not _in_vain(facts, other, request) and _is_lower(other, best)):
            best = other
    if best is None:
        raise why or RematError(f"no place of {facts.engine.primal.name} can be planned for.")
    return best


def _elsewhere(facts: Facts, best: Plan | None, request: Request) -> Iterator[str]:
    """Other places than the usual one to plan for, what costs least there leading."""
    usual = facts.engine.default_at
    fitting = [
        facts.under(report.policy, report.at).report(request.memory)
        for report in searched(facts, request.memory)
        if report.policy not in (MIXED, "none", "as_written")
        and report.saved_bytes <= request.budget
        and not report.backward_error
        and (best is None or _is_lower(report, best))
    ]
    fitting.sort(key=lambda report: (request.objective.of(report), report.peak_bytes or 0))
    places = dict.fromkeys(report.at for report in fitting)
    yield from [at for at in places if at != usual][:_PLACES]
    if best is None and usual != "function":  # where nothing is saved if nothing needs to be
        yield "function"


def _in_vain(facts: Facts, plan: Plan, request: Request) -> bool:
    """Whether a plan saves less than there is without a checkpoint, and most of that comes back at the peak."""
    try:
        without = facts.under("none", plan.at).report(request.memory)
    except RematError:
        return False
    peak, less = without.peak_bytes or 0, without.saved_bytes - plan.saved_bytes
    return less >= peak / 100 and peak - (plan.peak_bytes or 0) < _HARDLY * less


def _is_lower(other: Plan | Report, best: Plan) -> bool:
    """Whether the peak of another choice is clearly lower than that of a plan."""
    return other.peak_bytes is not None and other.peak_bytes < CLEARLY_LOWER * (best.peak_bytes or 0)
