"""Plans at one place: the least recomputation within a budget of saved bytes, or of the estimated peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import communicating, offloading
from remat_magic.planning.choices import BUILT_IN, remember
from remat_magic.planning.peak_plans import within_peak
from remat_magic.planning.plan_records import Request, key_and_label
from remat_magic.planning.planner import Objective, budget_bytes, objective, planner
from remat_magic.planning.saved_plans import within_saved
from remat_magic.records import Kernel, Plan, RematError, Report

__all__ = ["best_of_groups", "limit_of", "plan_at"]

_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."


def plan_at(
    facts: Facts,
    at: str | None,
    budget: float | str,
    of: str = "saved",
    *,
    cost: str = "flops",
    device: str | Device | None = None,
    offload: float | str | bool | None = None,
    separately: bool = False,
    together: bool = False,
    seconds: float = 10.0,
    gap: float = 0.01,
    beat: float | None = None,
    policies: Sequence[str] = BUILT_IN,
) -> Plan:
    """The plan at one place; all else is as for ``Trace.plan``.

    With ``beat``, what another choice costs within a peak, plans that cost more are not looked for. The ``policies`` of
    JAX's are tried too within saved bytes.
    """
    least = objective(cost, device, offload)
    choices = planner(facts, at, separately, together)
    limit = limit_of(facts, choices.at, budget, of)
    request = Request(*key_and_label(facts, choices, limit, least, of), limit, least, of)
    if of == "peak":
        best = within_peak(choices, request, seconds, gap, beat)
    else:
        best = within_saved(choices, request, limit, seconds, gap, policies=policies)
    if best is None:
        few, keeps = units.apart(limit, facts.saved_bytes("nothing_saveable", choices.at))
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {keeps} of {facts.engine.function_name} "
            "already; raise the budget, or plan for at='function'."
        )
    if best.names:
        remember(facts, best)
    if best.offloaded_bytes and offloading(facts.report(best), least.device) != "moved":
        best = replace(best, status=f"{best.status} {_OFFLOADED}")
    if least.device is not None and (unweighed := _unweighed(facts, best, least.device)):
        best = replace(best, status=f"{best.status} {unweighed}")
    if choices.parts.naming.unreached:
        best = replace(best, status=best.status.replace("No choice of names", "No choice of the values considered"))
    return replace(best, unreached=choices.unreached)


def _unweighed(facts: Facts, plan: Plan, device: Device) -> str:
    """A sentence about communication that a plan does not weigh; empty where it does, or where there is none.

    What XLA inserts follows from the whole program, and belongs to no value: it is told of the finished plan.
    """
    report = facts.report(plan)
    now, before = (_inserted(weighed) for weighed in (report, facts.report("none", plan.at)))
    if not now and not before:
        sends = report.communicated_bytes and device.interconnect is None
        if not sends:
            return ""
        return f"How fast {device.name} reaches others is not known: what they tell each other counts as no time."
    sentence = "What XLA has devices tell each other, with automatic sharding, belongs to no value and is not weighed"
    if not all(kernel.known for kernel in (*now, *before)):
        return f"{sentence}."
    added_bytes = sum(kernel.bytes for kernel in now) - sum(kernel.bytes for kernel in before)
    took = communicating(now, device), communicating(before, device)
    if not added_bytes:
        return f"{sentence}: with this plan it is as much as without a checkpoint."
    than = "more" if added_bytes > 0 else "less"
    sentence += f": with this plan XLA gives {units.nbytes(abs(added_bytes))} {than} than without one"
    if took[0] is None or took[1] is None:
        return f"{sentence}, which takes an unknown time."
    longer = took[0] - took[1]
    # Each time is the least that the links allow, and more bytes need not be more that is sent.
    return f"{sentence}, by the links' speed {units.seconds(abs(longer))} {'longer' if longer >= 0 else 'shorter'}."


def _inserted(report: Report) -> list[Kernel]:
    """What XLA has devices tell each other in both halves."""
    return [kernel for kernel in (*report.forward_kernels, *report.backward_kernels) if kernel.inserted]


def limit_of(facts: Facts, at: str, budget: float | str, of: str) -> int:
    """A budget in bytes, of which a share is of what there is without a checkpoint at a place.

    Raises:
        RematError: it is no budget, or a share of what is not known: of a peak, or of what JAX cannot trace there.
    """

    def most() -> int:
        try:
            whole = facts.saved_bytes("none", at) if of == "saved" else facts.report("none", at).peak_bytes
        except RematError as error:
            raise RematError(f"{error} Give the budget in bytes, since it is no share of that.") from error
        if whole is None:
            raise RematError(
                f"the peak of {facts.engine.function_name} without a checkpoint is not known: give the budget in "
                "bytes, or of saved bytes."
            )
        return whole

    return budget_bytes(budget, most)


def best_of_groups(facts: Facts, plan: Plan, group: Mapping[str, str]) -> Plan | None:
    """The best plan within another's budget that saves each group of values as a whole or not at all.

    Args:
        facts: of the traced function.
        plan: the other plan.
        group: the group of each value that may be saved, by the value's name.

    Returns:
        The plan, or None where none saves anything.
    """
    choices = planner(facts, plan.at, False).grouped(group)
    request = Request(f"{plan.policy} in the source", f"{plan.label} in the source", plan.budget_bytes, Objective())
    best = within_saved(choices, request, plan.budget_bytes or plan.saved_bytes, 10.0, 0.01, names_only=True)
    return best if best is not None and best.names else None
