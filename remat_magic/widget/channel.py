"""The widget's connection to the browser."""

from __future__ import annotations

from typing import Any

import anywidget

__all__ = ["Channel"]


class Channel(anywidget.AnyWidget):
    """An anywidget whose messages are delivered while a cell runs.

    ipykernel 7.4 routes what the browser sends to the thread that published last on the channel: after a publish from a
    cell, the next toggle would wait for the running cell. Without a note of that thread, messages come on the subshell
    that the browser asks for.
    """

    def _send(self, msg: Any, buffers: Any = None) -> None:
        super()._send(msg, buffers=buffers)
        self._answer_anywhere()

    def open(self) -> None:
        """Open the channel to the browser."""
        super().open()
        self._answer_anywhere()

    def _answer_anywhere(self) -> None:
        getattr(self.comm, "__dict__", {}).pop("_reply_subshell_id", None)
