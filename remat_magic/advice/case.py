"""What the rules of advice look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat_magic.advice.logits import Logits, logits_of
from remat_magic.facts.facts import Facts
from remat_magic.facts.names import GivenName, given_names
from remat_magic.policies import Key
from remat_magic.records import Plan, RematError, Report, SourceSpan

__all__ = ["Case", "at_line"]

_PART = 0.1  # of what is saved, or of the peak: logits that take less are not worth a sentence


@dataclass(eq=False)
class Case:
    """What the rules look at. ``asked`` has for each site, and for the whole function (""), the policy in force."""

    facts: Facts
    at: Any
    policy: Any
    namespace: Mapping[str, Any] | None = None
    report: Report = field(init=False)
    names: list[GivenName] = field(init=False)
    asked: dict[str, Key] = field(init=False)

    def __post_init__(self) -> None:
        self.report = self.facts.report(*self.asked_for)
        self.names = given_names(self.facts.engine)
        self.asked = {site.key: key_of(site.policy) for site in self.facts.engine.sites}
        if self.report.policy in ("as_written", "mixed"):
            return
        policy, at = key_of(self.report.policy), self.report.at
        if at == "function" and self.facts.engine.default_at == "function" and len(self.facts.engine.sites) == 1:
            at = "sites"  # the function's own decorator
        if at == "function":
            # A checkpoint around others overrules them, but for jax_remat3.
            self.asked = {"": policy, **(self.asked if self.facts.engine.remat3 else {})}
        for key in self.asked:
            if key and at in ("sites", key):
                self.asked[key] = policy

    def other(self, policy: str, at: str | None = None) -> Report | None:
        """The report of another policy, at the same place or another one; None where there is none."""
        if isinstance(self.at, Mapping):
            return None
        try:
            report = self.facts.report(policy, at or self.report.at)
        except RematError:
            return None
        return None if report.backward_error else report

    @property
    def policy_in_force(self) -> Key | None:
        """The key of the policy; of the program as written that of its checkpoints, None where these have several."""
        if self.report.policy != "as_written":
            return key_of(self.report.policy)
        written = {key for site, key in self.asked.items() if self.at in (None, "sites", site)}
        return written.pop() if len(written) == 1 else None

    @property
    def built(self) -> bool:
        """Whether the policy is one that was chosen, not the program as written or without the checkpoint."""
        return self.report.policy not in ("as_written", "none", "mixed")

    @cached_property
    def logits(self) -> list[tuple[Logits, int, int]]:
        """The logits of losses that take much, with the bytes of them that are saved, and that the peak holds."""
        report, large = self.report, list[tuple[Logits, int, int]]()
        for logits in logits_of(self.facts):
            saved, alive = logits.saved(report.residuals), 0
            if not report.backward_error:
                alive = logits.alive(self.facts.timeline(*self.asked_for).alive)
            if saved > _PART * report.saved_bytes or alive > _PART * (report.peak_bytes or 0):
                large.append((logits, saved, alive))
        return large

    @property
    def asked_for(self) -> tuple[Any, Any, Mapping[str, Any] | None]:
        """The policy, the place and the namespace, as methods of the facts take them."""
        return self.policy, None if isinstance(self.policy, Plan) else self.at, self.namespace


def key_of(policy: str) -> Key:
    """The key of a report's or a site's policy, which need be no expression where it is one of the user's own."""
    try:
        return Key.parse(policy)
    except RematError:
        return Key.own(policy)


def at_line(span: SourceSpan | None) -> str:
    """A line of the user's after "at", empty where it is not known."""
    return "" if span is None else f" at {span.place}"
