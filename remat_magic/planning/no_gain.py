"""Whether a choice saves less than no checkpoint for nothing, and what does not: as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_magic import units
from remat_magic.facts.facts import Facts
from remat_magic.planning.places import known, label_of, promising
from remat_magic.policies import MIXED
from remat_magic.records import ComparisonRow, Plan, RematError, Report, no_gain

__all__ = ["CLEARLY_LOWER", "gainless", "lower_elsewhere", "no_gain_at", "no_gain_of"]

CLEARLY_LOWER = 0.8  # of a peak: what is below that is clearly lower


def no_gain_of(facts: Facts, policy: Any, at: Any, namespace: Mapping[str, Any] | None) -> str:
    """``Trace.no_gain``."""
    return no_gain_at(facts, facts.report(policy, at, namespace))


def no_gain_at(facts: Facts, choice: ComparisonRow | Report) -> str:
    """A sentence where a choice saves less than no checkpoint there for nothing, and on what does not; else empty."""
    if choice.policy in ("none", "as_written") or not (sentence := gainless(facts, choice)):
        return ""
    return f"{sentence}{lower_elsewhere(facts, choice.peak_bytes)}"


def gainless(facts: Facts, choice: ComparisonRow | Plan | Report) -> str:
    """A sentence where a choice saves less than no checkpoint there for nothing; empty where JAX cannot trace that."""
    if choice.peak_bytes is None:
        return ""
    everywhere = "sites" if facts.engine.sites else "function"
    try:
        without = facts.report("none", everywhere if choice.policy == MIXED else choice.at)
    except RematError:
        return ""
    return no_gain(choice, without)


def lower_elsewhere(facts: Facts, peak: int | None) -> str:
    """A sentence on what lowers a peak clearly and adds least, after a space; empty where nothing is known to.

    Before anything was searched that is what saves nothing at the place that promises most.
    """
    places = known(facts)
    if places is not None:
        reports = [places.reports[row.policy, row.at] for row in places if row.pareto]
    else:
        reports = [facts.report("nothing_saveable", at) for at in promising(facts)[:1]]
    lower = [report for report in reports if 0 < (report.peak_bytes or 0) < CLEARLY_LOWER * (peak or 0)]
    if not lower:
        return ""
    report = max(lower, key=lambda report: report.peak_bytes or 0)
    return f" {label_of(report)} lowers it to {units.nbytes(report.peak_bytes or 0)}."
