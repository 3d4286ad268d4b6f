"""The Advice tab: what is to be said against the shown policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat_magic.views.advice import advice_html
from remat_magic.widget.panel import ON_DEMAND, Panel, Request

__all__ = ["Advice"]


class Advice(Panel):
    """Findings, each with its mend."""

    key, title = "advice", "Advice"
    asks = (("advice",),)

    @classmethod
    def script(cls) -> Path | None:
        """The one of all that is asked for when it is opened."""
        return ON_DEMAND

    def answer(self, request: Request) -> Mapping[str, Any]:
        """The findings."""
        return {"html": advice_html(self._live.trace.advice(*self._live.arguments(request.policy, request.at)))}
