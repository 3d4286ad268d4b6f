"""The Memory tab: what is held from operation to operation, and at the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remat_magic.records import Measurement
from remat_magic.units import is_bytes
from remat_magic.views.memory import timeline_html
from remat_magic.widget.panel import Panel, Request


class Memory(Panel):
    """The estimated memory over time, and over it XLA's own where it was compiled for a device."""

    key, title = "memory", "Memory"
    asks = (("memory",),)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: dict[tuple[str, str, str], Request] = {}  # by policy, place and device
        self._live.on_compiled.append(self._compiled)

    def answer(self, request: Request) -> dict[str, Any]:
        """The picture and the tables of what is held."""
        device = request.text("device")
        key = request.policy, request.at, device
        self._asked[key] = request
        arguments = self._live.arguments(request.policy, request.at)
        timeline = self._live.trace.timeline(*arguments, device=request.device)
        if is_bytes(device):  # as on some device, but of none is it told how fast it is
            timeline = replace(timeline, seconds=())
        size, compiled = self._live.devices.get(device), self._live.measurements().get(key)
        return {"html": timeline_html(timeline, compiled, (device, size) if size else None, live=True)}

    def _compiled(self, measured: Measurement) -> None:
        """Tell anew what the reader has opened before it was compiled; on the compiling thread."""
        request = self._asked.get((measured.policy, measured.at, measured.device))
        if request is not None:
            self.tell_again(request)
