"""The newest request, for which there is a thread, and the newest wish, whoever made it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from remat_magic.errors import one_line, text_of
from remat_magic.records import RematError

_T = TypeVar("_T")


class Worker(Generic[_T]):
    """Runs ``work(request)`` on a thread of its own; of the requests posted meanwhile, only the newest waits.

    The thread ends when the mailbox is empty, so that an idle widget costs nothing.
    """

    def __init__(self, work: Callable[[_T], None], name: str = "remat_magic") -> None:
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._letter: _T | None = None
        self._thread: threading.Thread | None = None

    def post(self, request: _T | None) -> None:
        """Leave a request, replacing one that has not been begun. ``None`` clears the mailbox."""
        with self._lock:
            self._letter = request
            if request is None or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except BaseException:  # no thread to be had, or an interrupt: the next request tries again
                self._thread = None
                raise

    @property
    def waits(self) -> bool:
        """Whether a request waits for the one that is worked on."""
        return self._letter is not None

    def join(self, timeout: float = 600) -> None:
        """Wait until nothing is left to do, at most ``timeout`` seconds."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                request, self._letter = self._letter, None
                if request is None:
                    self._thread = None
                    return
            try:
                self._work(request)
            except Exception:  # what a reader can see ``work`` tells itself; the next request must find a thread
                logging.getLogger("remat_magic").exception("a request of the browser failed")


def sentence_of(error: Exception) -> str:
    """What an error says to the reader: its own sentence where it is ours."""
    return str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {one_line(text_of(error))}"


@dataclass(frozen=True, slots=True)
class Wish:
    """A policy at a place; ``serial`` orders the wishes of browser and kernel."""

    policy: str
    at: str
    serial: int = 0


class Wishes:
    """Which wish is the newest, whoever made it. From any thread."""

    def __init__(self, wish: Wish) -> None:
        self.wished = wish  # the newest, which may not be shown yet
        self._lock = threading.RLock()
        self._settling: int | None = None

    @property
    def settling(self) -> bool:
        """Whether this thread is in ``settle``."""
        return self._settling == threading.get_ident()

    def wish(self, policy: str, at: str, serial: int, post: Callable[[Wish], None]) -> None:
        """Wish for something else, by the browser's serial if it is newer than all before.

        ``post`` is called in the order of the wishes: a mailbox of one would else be left with the older of two.
        """
        with self._lock:
            self.wished = Wish(policy, at, max(serial, self.wished.serial + 1))
            post(self.wished)

    def is_newest(self, wish: Wish) -> bool:
        """Whether nothing newer is wished for."""
        return wish.serial >= self.wished.serial

    @contextlib.contextmanager
    def settle(self, wish: Wish, policy: str, at: str) -> Iterator[bool]:
        """Say what a wish has led to, unless something newer is wished for; whether that is so."""
        with self._lock:
            if newest := self.is_newest(wish):
                self.wished, self._settling = Wish(policy, at, wish.serial), threading.get_ident()
            try:
                yield newest
            finally:
                self._settling = None
