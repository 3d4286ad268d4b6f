"""The Advice tab: what is to be said against the shown policy."""

from __future__ import annotations

from remat_magic.views.advice import advice_html
from remat_magic.widget.panel import OnDemand, Request


class Advice(OnDemand):
    """Findings, each with its mend."""

    key, title = "advice", "Advice"

    def html(self, request: Request) -> str:
        """The findings."""
        device = request.device
        return advice_html(self._live.trace.advice(*self._arguments(request), device=device))
