"""Advice: what about a policy, or a program, costs memory or has no effect, with the line, the figure, the mend.

Each rule is a function of what is known; it gives advice only where JAX's own jaxprs show the fault, and is silent
otherwise. Nothing is compiled.
"""

from __future__ import annotations

from dataclasses import replace

from remat_magic.advice.rules import ANYWHERE, OF_GRADIENT, QUICK, Case
from remat_magic.devices import Device
from remat_magic.facts.buffers import memory_of
from remat_magic.facts.facts import Variant
from remat_magic.records import Advice, Listed, RematError, Report

__all__ = ["advise"]


def advise(variant: Variant, device: Device | None, *, quick: bool = False) -> Listed[Advice]:
    """Advice on one choice, what has most at stake first; the peaks are as on the device.

    Where ``quick``, only what takes no other choices to be traced.
    """
    try:
        case = Case(variant, memory_of(device))
    except RematError as error:
        if variant.selection.policy != "as_written" or str(error) not in variant.engine.notes:
            raise
        mend = "Choose 'nothing_saveable' at 'sites'."
        return Listed([Advice("complex-values", str(error), mend, policy="nothing_saveable", at="sites", share=1.0)])
    # What frees memory of the gradient alone lowers no peak that is elsewhere.
    rules = ANYWHERE if case.report.in_update else (*OF_GRADIENT, *ANYWHERE)
    findings = dict[tuple[str, str], Advice]()
    # Of calls that are alike it is said once.
    for advice in (advice for rule in rules if rule in QUICK or not quick for advice in rule(case)):
        findings.setdefault((advice.kind, advice.sentence), replace(advice, share=_share(case.report, advice)))
    return Listed(sorted(findings.values(), key=lambda advice: -advice.share))


def _share(report: Report, advice: Advice) -> float:
    """What part of the memory, or of the work, a finding speaks of."""
    flops = (report.forward_flops or 0) + (report.backward_flops or 0)
    work = (advice.figure or 0) / flops if advice.unit == "FLOPs" and flops else 0.0
    return min(max(work, (advice.stake or 0) / (report.peak_bytes or report.saved_bytes or 1)), 1.0)
