"""Plans as records: what was asked for, the figures that JAX's report gives, and how sure it is that none is better."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat_magic import units
from remat_magic.facts.facts import Facts
from remat_magic.planning.choices import Choice
from remat_magic.planning.planner import Objective, Planner
from remat_magic.planning.problem import Solution
from remat_magic.records import Plan, Report

__all__ = ["Request", "key_and_label", "of_report", "order", "plan_of", "with_bound"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for: its key, what people call it, its budget, and what is to be least."""

    key: str
    label: str
    budget: int
    objective: Objective
    of: str = "saved"


def plan_of(facts: Facts, choice: Choice, limit: int, least: Objective, of: str) -> Plan:
    """A choice as a plan within so many bytes, by which it is called unless it stands in a table by its own key."""
    report, plan = choice.report, choice.plan
    plain = of_report(report, Request(report.policy, report.label, limit, least, of))
    if plan is None:
        return plain
    if report.policy not in facts.engine.plans:
        policy, label = key_and_label(facts, plan, limit, least, of)
        plain = replace(plain, policy=policy, label=label)
    same = ("names", "fingerprint", "separately", "together", "unreached", "predicted_bytes", "predicted_flops")
    return replace(plain, **{name: getattr(plan, name) for name in same})


def key_and_label(facts: Facts, choices: Planner | Plan, limit: int, least: Objective, of: str) -> tuple[str, str]:
    """The key of a plan, and its label: its budget, and what else was asked for where that is not usual."""
    place = "" if choices.at == facts.engine.default_at else f" at {choices.at}"
    apart = ", one by one" if choices.separately else ", equal layers together" if choices.together else ""
    suffix = f"{place}{apart}{least.text}"
    if of == "peak":
        return f"plan(peak {limit}{suffix})", f"plan within {units.nbytes(limit)} of peak{suffix}"
    return f"plan({limit}{suffix})", f"plan within {units.nbytes(limit)}{suffix}"


def of_report(report: Report, request: Request) -> Plan:
    """A report as a plan, without its values and with nothing said of a bound."""
    least = request.objective
    seconds = None if least.device is None else least.of(report)
    return Plan(
        report.function,
        report.at,
        report.policy,
        request.budget,
        report.saved_bytes,
        report.recomputed_flops,
        0,
        code=report.code,
        forward_flops=report.forward_flops,
        peak_bytes=report.peak_bytes,
        uncosted=report.uncosted,
        of=request.of,
        cost=least.cost,
        device="" if least.device is None else least.device.name,
        host_bandwidth=least.link,
        offloaded_bytes=report.offloaded_bytes,
        seconds=seconds,
        predicted_seconds=seconds,
        label=report.label,
        of_devices=report.of_devices,
    )


def with_bound(applied: Plan, solution: Solution | None, bound: float, spent: float) -> Plan:
    """A plan with its bound, and a sentence on how sure it is."""
    in_seconds = applied.cost == "seconds"
    if in_seconds:
        best = replace(applied, bound_seconds=min(bound, applied.predicted_seconds or 0.0), solve_seconds=spent)
    else:
        best = replace(applied, bound=min(int(bound), applied.recomputed_flops), solve_seconds=spent)
    exact = (best.saved_bytes, best.offloaded_bytes, best.recomputed_flops) == (
        best.predicted_bytes,
        best.predicted_offloaded_bytes,
        best.predicted_flops,
    )
    departs = "" if exact else " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    if best.gap == 0:
        gain = "takes less time, as reckoned" if in_seconds else "recomputes less"
        same = " that is the same in equal layers" if best.together else ""
        return replace(best, status=f"No choice of names{same} within the budget {gain}.{departs}")
    why = ", where the solver's time was up" if solution is not None and not solution.proven else ""
    expense = "the time that is added, as reckoned," if in_seconds else "what is recomputed"
    same = " by a choice that is the same in equal layers" if best.together else ""
    least = f"At most {max(best.gap, 0.0001):.2%} of {expense} could be spared{same}"
    return replace(best, status=f"{least}{why}.{departs}")


def order(candidate: Plan) -> tuple[float, int]:
    """What a plan costs, and its peak: of two plans the lower is preferred."""
    cost = candidate.recomputed_flops if candidate.seconds is None else candidate.seconds
    return cost, candidate.peak_bytes or 0
