"""The Memory tab: what is held from operation to operation, and at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat_magic.views.timeline import timeline_html
from remat_magic.widget.panel import ON_DEMAND, Panel, Request

__all__ = ["Memory"]


class Memory(Panel):
    """The estimated memory over time."""

    key, title = "memory", "Memory"
    asks = (("memory",),)

    @classmethod
    def script(cls) -> Path | None:
        """The one of all that is asked for when it is opened."""
        return ON_DEMAND

    def answer(self, request: Request) -> Mapping[str, Any]:
        """The picture and the table of what is held at the peak."""
        timeline = self._live.trace.timeline(*self._live.arguments(request.policy, request.at))
        return {"html": timeline_html(timeline)}
