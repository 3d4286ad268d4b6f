"""Advice: what about a policy, or a program, costs memory or has no effect, with the line, the figure, the mend.

Each rule is a function of what is known; it gives advice only where JAX's own jaxprs show the fault, and is silent
otherwise. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.advice.rules import ANYWHERE, OF_GRADIENT, Case
from remat_magic.facts.facts import Facts
from remat_magic.records import Advice, Listed, RematError, Report

__all__ = ["advise"]


def advise(
    facts: Facts,
    policy: Any,
    at: Any,
    namespace: Mapping[str, Any] | None,
    *,
    device: str | devices.Device | None,
) -> Listed[Advice]:
    """Advice on one policy at one place, what has most at stake first.

    Args:
        facts: of the traced function.
        policy: as for ``trace.report``, and so are ``at`` and ``namespace``.
        at: where.
        namespace: of the policy's identifiers.
        device: as on which the peaks are; None is JAX's CPU.

    Raises:
        RematError: as ``trace.report``; no such device.
    """
    try:
        case = Case(facts.on(None if device is None else devices.get(device)), at, policy, namespace)
    except RematError as error:
        if policy != "as_written" or str(error) not in facts.engine.notes:
            raise
        mend = "Choose 'nothing_saveable' at 'sites'."
        return Listed([Advice("complex-values", str(error), mend, policy="nothing_saveable", at="sites", share=1.0)])
    # What frees memory of the gradient alone lowers no peak that is elsewhere.
    rules = ANYWHERE if case.report.in_update else (*OF_GRADIENT, *ANYWHERE)
    findings = dict[tuple[str, str], Advice]()
    # Of calls that are alike it is said once.
    for advice in (advice for rule in rules for advice in rule(case)):
        findings.setdefault((advice.kind, advice.sentence), replace(advice, share=_share(case.report, advice)))
    return Listed(sorted(findings.values(), key=lambda advice: -advice.share))


def _share(report: Report, advice: Advice) -> float:
    """What part of the memory, or of the work, a finding speaks of."""
    flops = (report.forward_flops or 0) + (report.backward_flops or 0)
    work = (advice.figure or 0) / flops if advice.unit == "FLOPs" and flops else 0.0
    return min(max(work, (advice.stake or 0) / (report.peak_bytes or report.saved_bytes or 1)), 1.0)
