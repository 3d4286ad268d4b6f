"""The widget's connection to the browser."""

from __future__ import annotations

import sys
from typing import Any

import anywidget


class Channel(anywidget.AnyWidget):
    """An anywidget whose messages are delivered while a cell runs.

    ipykernel 7.4 routes what the browser sends to the thread that published last on the channel: after a publish from a
    cell, the next toggle would wait for the running cell. Without a note of that thread, messages come on the subshell
    that the browser asks for. After a kernel was restarted from elsewhere JupyterLab 4.6 goes on asking for one of the
    kernel before, and ipykernel would drop the message: then it comes on the main thread.
    """

    def _send(self, msg: Any, buffers: Any = None) -> None:
        super()._send(msg, buffers=buffers)
        self._answer_anywhere()

    def open(self) -> None:
        """Open the channel to the browser."""
        super().open()
        self._answer_anywhere()
        if hasattr(self.comm, "_reply_subshell_for"):  # ipykernel 7.4
            vars(self.comm)["_reply_subshell_for"] = _subshell

    def _answer_anywhere(self) -> None:
        getattr(self.comm, "__dict__", {}).pop("_reply_subshell_id", None)


def _subshell(_data: Any, asked: str | None) -> str | None:
    """The subshell that a message is for: the one that the browser asks for, if this kernel has it."""
    try:
        kernel = sys.modules["ipykernel.kernelbase"].Kernel.instance()
        subshells = kernel.shell_channel_thread.manager.list_subshell()
    except Exception:  # noqa: BLE001 - private to ipykernel, which may arrange it otherwise at any time
        return asked
    return asked if asked in subshells else None
