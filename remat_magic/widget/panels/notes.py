"""The Notes tab: what a reader should know of the shown choice, and what would help that is no choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_magic.records import Advice, RematError, Report
from remat_magic.views.headline import advice_html, cards, notes_html, notes_of
from remat_magic.widget.panel import Panel, Request


class Notes(Panel):
    """A badge with a count, and cards. What is a choice stands among the choices."""

    key, title, parts = "notes", "Notes", ("noted", "advice")
    asks = (("advice",),)

    def add(self, view: dict[str, Any], report: Report) -> None:
        """What is known of every choice, and what is found out of it without a retrace."""
        findings: list[Advice] = []
        if report.complete and not report.backward_error:
            policy, at, namespace = self._live.arguments(report.policy, report.at)
            try:
                findings = cards(self._live.trace.advice(policy, at, namespace, quick=True))
            except RematError:  # what cannot be advised on says so itself
                findings = []
        told = {finding.kind for finding in findings}  # with its mend
        notes = [note for note in notes_of(report) if getattr(note, "kind", "") not in told]
        noted = f"{notes_html(notes)}{advice_html(findings)}"
        view["parts"]["noted"] = noted or '<p class="remat-empty">There is no note on this choice.</p>'
        view["counts"][self.key] = len(notes) + len(findings) or ""

    def answer(self, request: Request) -> Mapping[str, Any]:
        """What takes other choices to be traced."""
        arguments, trace = self._arguments(request), self._live.trace
        quick = {finding.sentence for finding in trace.advice(*arguments, quick=True)}
        findings = cards(trace.advice(*arguments, device=request.device))
        return {"html": advice_html([finding for finding in findings if finding.sentence not in quick])}
