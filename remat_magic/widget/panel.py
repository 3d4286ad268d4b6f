"""What a tab of the widget is: its tools, what it adds to every view, and what it answers when it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from remat_magic.api import Policy
from remat_magic.records import Plan, Report
from remat_magic.units import is_bytes
from remat_magic.widget.live_trace import LIKE, LiveTrace
from remat_magic.widget.worker import Worker, sentence_of

SCRIPTS = Path(__file__).parent / "scripts"
"""The folder of the scripts that are no panel's own."""


@dataclass(frozen=True, slots=True)
class Request:
    """A message of the browser, which may hold anything."""

    content: Mapping[str, Any]

    def text(self, name: str, default: str = "") -> str:
        """What is said under a name, as text."""
        value = self.content.get(name)
        return default if value is None else str(value)

    @property
    def kind(self) -> str:
        """What is asked for."""
        return self.text("type")

    @property
    def policy(self) -> str:
        """The key of a shown policy, or a text that is to be one."""
        return self.text("policy")

    @property
    def at(self) -> str:
        """A place."""
        return self.text("at")

    @property
    def device(self) -> str | None:
        """As on which device figures are; None for those on this machine's CPU."""
        name = self.text("device")
        return LIKE if is_bytes(name) else name or None

    @property
    def serial(self) -> int:
        """Of the reader's wish."""
        return int(self.content.get("serial", 0))


class Panel:
    """One tab of the widget. A class of it says what the tab shows, and stands in ``panels.PANELS``.

    Beside the class's file stands its script, of the same name, which exports ``panel(widget, key)``: see
    ``scripts/types.js`` for what that returns.

    Args:
        live: the inspected function.
        send: sends a message to the browser, from any thread.
        choose: shows a plan like any other policy: the plan, and the serial of the wish.

    Attributes:
        key: names the tab in HTML and scripts.
        title: the tab's own text.
        parts: names of the parts of its content, where there are several.
        early: those of them whose content is known before the backward half is.
        asks: the messages that it answers; each group has a thread, where the newest request replaces the one waiting.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()
    early: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init__(
        self,
        live: LiveTrace,
        send: Callable[[dict[str, Any]], None],
        choose: Callable[[Plan, int], None],
    ) -> None:
        self._live = live
        self._send = send
        self._choose = choose
        self._workers: dict[str, Worker[Request]] = {}
        for group in self.asks:
            self._workers |= dict.fromkeys(group, Worker[Request](self._work))
        self._again = Worker[Request](self._work)

    @classmethod
    def script(cls) -> Path:
        """The file of its script."""
        return Path(inspect.getfile(cls)).with_suffix(".js")

    def tools(self) -> str:
        """The HTML of what stays in place while the content changes."""
        return ""

    def add(self, view: dict[str, Any], report: Report) -> None:
        """Put into a report's view what is to be there when the tab is opened.

        ``view["parts"][key]`` is HTML, ``view["counts"][key]`` a number beside the tab's title, None while unknown.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """Do what a message asks for, on a thread of its own; what is returned is sent together with the message."""
        raise NotImplementedError

    def handle(self, request: Request) -> None:
        """Take a message of the browser; nothing is traced on the calling thread."""
        self._workers[request.kind].post(request)

    def tell_again(self, request: Request) -> None:
        """Answer an old request anew, since more is known by now: in the place of no other that waits."""
        self._again.post(request)

    def close(self) -> None:
        """Begin nothing more; the trace is let go of already."""
        for worker in (*self._workers.values(), self._again):
            worker.post(None)

    def _arguments(self, request: Request) -> tuple[Policy, str, Mapping[str, Any]]:
        """What the trace takes for the policy that a message is about."""
        return self._live.arguments(request.policy, request.at)

    def _work(self, request: Request) -> None:
        if self._live.closed:
            return
        try:
            answer = self.answer(request)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            answer = {"error": sentence_of(error)}
        if answer is not None and not self._live.closed:
            self._send({**request.content, **answer})
