"""The Memory tab: what is held from operation to operation, and at the peak."""

from __future__ import annotations

from remat_magic.views.timeline import timeline_html
from remat_magic.widget.panel import OnDemand, Request

__all__ = ["Memory"]


class Memory(OnDemand):
    """The estimated memory over time."""

    key, title = "memory", "Memory"

    def html(self, request: Request) -> str:
        """The picture and the table of what is held at the peak."""
        return timeline_html(self._live.trace.timeline(*self._arguments(request)))
