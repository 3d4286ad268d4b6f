"""The Memory tab: what is held from operation to operation, and at the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remat_magic.records import Measurement, Timeline
from remat_magic.views.timeline import timeline_html
from remat_magic.widget.controls import button
from remat_magic.widget.panel import OnDemand, Request

__all__ = ["Memory"]


class Memory(OnDemand):
    """The estimated memory over time, over it another choice's, and XLA's own where it was compiled for a device."""

    key, title = "memory", "Memory"

    @classmethod
    def script(cls) -> Path:
        """Its own, beside this file."""
        return Path(__file__).with_suffix(".js")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: dict[tuple[str, str, str], Request] = {}  # by policy, place and device
        self._live.on_compiled.append(self._compiled)

    def tools(self) -> str:
        """What zooms the picture."""
        keys = "also Ctrl and the wheel, or the keys + - 0 on the picture"
        zoom = "".join(
            button(f"zoom-{way}", sign, title=f"{what} ({keys})", aria_label=what)
            for way, sign, what in (("out", "\N{MINUS SIGN}", "Show more time"), ("in", "+", "Show less time, larger"))
        )
        whole = button("zoom-whole", "Whole", title=f"Show all moments ({keys})")
        hint = "Point at a moment, or use the arrow keys, for what is held then; a click keeps it, dragging moves."
        return (
            f'<div class="remat-tools"><span class="remat-field">Zoom</span><span>{zoom} {whole}</span>'
            f'<span class="remat-summary">{hint}</span></div>'
        )

    def html(self, request: Request) -> str:
        """The picture and the tables of what is held."""
        against, at, device = (request.text(name) for name in ("against", "against_at", "device"))
        self._asked[request.policy, request.at, device] = request
        compiled = self._live.compiled(request.policy, request.at, device)
        other = None
        if against and (against, at) != (request.policy, request.at):
            other = self._timeline(against, at, device)
        shown = self._timeline(request.policy, request.at, device)
        return timeline_html(shown, compiled=compiled, against=other, live=True)

    def _timeline(self, policy: str, at: str, device: str) -> Timeline:
        return self._live.trace.timeline(*self._live.arguments(policy, at), device=device or None)

    def _compiled(self, measured: Measurement) -> None:
        """Tell anew what the reader has opened before it was compiled; on the compiling thread."""
        request = self._asked.get((measured.policy, measured.at, measured.device))
        if request is not None:
            self.tell_again(request)
