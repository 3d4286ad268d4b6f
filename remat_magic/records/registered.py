"""What records do with the help of the layers above them: these register it, since records import none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["register", "registered"]

_LOADERS: dict[str, Callable[[], Any]] = {}


def register(what: str, load: Callable[[], Any]) -> None:
    """Say where help comes from; ``load`` is called each time that it is needed, and imports what gives it."""
    _LOADERS[what] = load


def registered(what: str) -> Any:
    """The help that was registered."""
    return _LOADERS[what]()
