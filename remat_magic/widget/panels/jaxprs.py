"""The Jaxprs tab: the forward and the backward jaxpr side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_magic.records import Report
from remat_magic.views.jaxpr_text import jaxprs, lazy_chunks
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import taught
from remat_magic.widget.panel import Panel, Request

# Below this many lines the jaxprs travel with the rest, so that a policy at hand toggles without the kernel.
_SEND_LINES = 400


class Jaxprs(Panel):
    """Both jaxprs, in pieces that the script places bit by bit."""

    key, title = "jaxprs", "Jaxprs"
    asks = (("jaxprs",),)

    def tools(self) -> str:
        """What the two jaxprs are moved through by."""
        return (
            f'<div class="remat-tools"><label class="remat-check"{taught("together")}>'
            f'<input type="checkbox" data-control="together" checked {KEYS}> Scroll together</label></div>'
        )

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The jaxprs, if they are small."""
        halves = (report.forward, report.backward)
        # A large one is not laid out for it: it has as many lines as equations, and more.
        small = report.complete and sum(half.equations for half in halves) <= _SEND_LINES
        small = small and sum(len(half.lines) for half in halves) <= _SEND_LINES
        view["jaxprs"] = jaxprs(report, bodies=False) if small else ""
        view["bodies"] = lazy_chunks(report) if small else None

    def answer(self, request: Request) -> Mapping[str, Any]:
        """The jaxprs, however long."""
        report = self._live.trace.report(*self._arguments(request))
        return {"frame": jaxprs(report, bodies=False), "bodies": lazy_chunks(report)}
