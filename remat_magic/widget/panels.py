"""What the panels of the widget have in common: messages of the browser answered on threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from remat_magic.widget.worker import Worker, sentence_of

__all__ = ["Panels"]

_Request = TypeVar("_Request")


class Panels(Generic[_Request]):
    """Does what requests ask, and sends the answers, until it is closed.

    A class of it says in ``_do`` what a request asks for, and in ``_about`` what its answers repeat of it.

    Args:
        trace: the inspected function.
        send: sends a message to the browser, from any thread.
        arguments: what the trace takes for a shown policy: the policy, where, and the namespace.
        threads: how many requests may be worked on at once.
    """

    def __init__(
        self,
        trace: Any,
        send: Callable[[dict[str, Any]], None],
        arguments: Callable[[str, str], tuple[Any, Any, Mapping[str, Any]]],
        threads: int,
    ) -> None:
        self._trace = trace
        self._send = send
        self._arguments = arguments
        self._workers = tuple(Worker[_Request](self._work) for _ in range(threads))

    def close(self) -> None:
        """Let go of the trace."""
        self._trace = None
        for worker in self._workers:
            worker.post(None)

    def _work(self, request: _Request) -> None:
        trace = self._trace
        if trace is None:
            return
        try:
            self._do(trace, request)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._answer(request, error=sentence_of(error))

    def _do(self, trace: Any, request: _Request) -> None:
        raise NotImplementedError

    def _about(self, request: _Request) -> dict[str, Any]:
        raise NotImplementedError

    def _answer(self, request: _Request, **content: Any) -> None:
        if self._trace is not None:
            self._send({**self._about(request), **content})
