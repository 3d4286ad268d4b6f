"""The Memory tab: what is held from operation to operation, and at the peak."""

from __future__ import annotations

from typing import Any

from remat_magic.views.timeline import timeline_html
from remat_magic.widget.panel import OnDemand, Request

__all__ = ["Memory"]


class Memory(OnDemand):
    """The estimated memory over time, and XLA's own where the choice was compiled for a device."""

    key, title = "memory", "Memory"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: dict[tuple[str, str], Request] = {}
        self._live.on_compiled.append(self._compiled)

    def html(self, request: Request) -> str:
        """The picture and the tables of what is held at the peak."""
        self._asked[request.policy, request.at] = request
        compiled = self._live.compiled(request.policy, request.at)
        return timeline_html(self._live.trace.timeline(*self._arguments(request)), compiled=compiled)

    def _compiled(self, policy: str, at: str) -> None:
        """Tell anew what the reader has opened before it was compiled; on the compiling thread."""
        request = self._asked.get((policy, at))
        if request is not None:
            self.handle(request)
