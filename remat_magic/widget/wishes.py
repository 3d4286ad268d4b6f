"""What is wished for: by the reader in the browser, and by who assigns to the widget's traits, in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """A policy at a place; ``serial`` orders the wishes of browser and kernel."""

    policy: str
    at: str
    serial: int = 0


class Wishes:
    """Which wish is the newest, whoever made it. From any thread."""

    def __init__(self, wish: Wish) -> None:
        self._wished = wish
        self._serial = wish.serial
        self._lock = threading.RLock()
        self._settling: int | None = None

    @property
    def wished(self) -> Wish:
        """What was asked for last, which may not be shown yet."""
        return self._wished

    @property
    def serial(self) -> int:
        """The serial of the newest wish."""
        return self._serial

    @property
    def settling(self) -> bool:
        """Whether this thread is in ``settle``."""
        return self._settling == threading.get_ident()

    def wish(self, policy: str, at: str, serial: int, post: Callable[[Wish], None]) -> None:
        """Wish for something else, by the browser's serial if it is newer than all before.

        ``post`` is called with each wish in the order of the wishes: a mailbox that holds one would else be left with
        the older of two.
        """
        with self._lock:
            self._serial = max(serial, self._serial + 1)
            self._wished = Wish(policy, at, self._serial)
            post(self._wished)

    def is_newest(self, wish: Wish) -> bool:
        """Whether nothing newer is wished for."""
        return wish.serial >= self._serial

    def settle(self, wish: Wish, policy: str, at: str, assign: Callable[[], None]) -> None:
        """Say what a wish has led to, and ``assign`` it, unless something newer is wished for."""
        with self._lock:
            if not self.is_newest(wish):
                return
            self._wished = Wish(policy, at, wish.serial)
            self._settling = threading.get_ident()
            try:
                assign()
            finally:
                self._settling = None
