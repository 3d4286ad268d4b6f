"""Every choice of a policy, or of values, and a place whose figures JAX has given already, whoever asked for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from remat_magic.facts.facts import Facts
from remat_magic.planning.planner import Objective
from remat_magic.policies import MIXED
from remat_magic.records import Plan, RematError, Report
from remat_magic.records.plan_file import is_policy

__all__ = ["BUILT_IN", "Choice", "built_in", "known_choices", "remember"]

BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A report, and the plan whose values are saved, None where a policy decides."""

    report: Report
    plan: Plan | None = None

    @property
    def peak(self) -> int:
        """The estimated peak, in bytes."""
        return self.report.peak_bytes or 0

    @property
    def text(self) -> str:
        """What people call it, with its place."""
        if self.report.policy == MIXED:
            return self.report.at
        return f"{'values that were chosen' if self.plan else self.report.policy} at {self.report.at}"

    def order(self, least: Objective) -> tuple[float, int, bool]:
        """What it costs, and its peak: of two the lower is preferred, and of equals what has no policy as written."""
        return least.of(self.report), self.peak, self.report.policy == "as_written"


def remember(facts: Facts, plan: Plan) -> None:
    """Let a plan be a choice from now on, whatever is asked for next."""
    with facts.lock:
        remembered = facts.on(None).memo.setdefault(__name__, {})
        remembered.setdefault((plan.names, plan.at, plan.separately), plan)  # by its first key, which has a report


def known_choices(facts: Facts, least: Objective, *, at: str | None = None, together: bool = False) -> list[Choice]:
    """All choices that a plan can be and whose peak is known, the cheapest first.

    Args:
        facts: of the traced function; peaks are as on their device.
        least: what is to be least. Without a link to the host nothing that is offloaded is a choice.
        at: the only place. Default: all.
        together: leave out plans that do not decide equal layers together.
    """
    with facts.lock:
        plans = [*facts.on(None).memo.get(__name__, {}).values(), *facts.engine.plans.values()]
        plans = [plan for plan in plans if plan.names and at in (None, plan.at) and (plan.together or not together)]
        policies = [
            (policy, place)
            for policy, place in facts.known()
            if is_policy(policy) and policy not in facts.engine.plans and at in (None, place)
        ]
        choices = [Choice(facts.report(plan), plan) for plan in plans]
        choices += [Choice(facts.report(policy, place)) for policy, place in policies]
    eligible = (choice for choice in choices if _is_eligible(choice.report, least))
    return sorted(eligible, key=lambda choice: choice.order(least))


def built_in(facts: Facts, places: Iterable[str], least: Objective) -> Iterator[Choice]:
    """JAX's own policies at places, those whose report is not known yet."""
    sites = {site.key for site in facts.engine.sites}
    for at in places:
        for policy in BUILT_IN:
            if policy == "none" and at not in (*sites, "sites", "function"):
                continue  # there is no checkpoint to take off
            try:
                if facts.cached(policy, at) is None and _is_eligible(report := facts.report(policy, at), least):
                    yield Choice(report)
            except RematError:  # complex values, which this JAX cannot save
                continue


def _is_eligible(report: Report, least: Objective) -> bool:
    """Whether it is complete, and nothing goes to the host that must not."""
    offloads = report.offloaded_bytes and least.link is None
    return report.peak_bytes is not None and not report.backward_error and not offloads
