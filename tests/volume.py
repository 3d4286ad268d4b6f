"""How much is tried: which values of a parameter the usual run tries, and until when CI tries more."""

import os
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

__all__ = ["in_turn", "skip_when_late", "usually"]

T = TypeVar("T")


def skip_when_late() -> None:
    """Skip a test after the time until which CI has time for this run: REMAT_UNTIL, in seconds as of ``time.time``."""
    if time.time() > float(os.environ.get("REMAT_UNTIL", "inf")):
        pytest.skip("CI had no more time for it")


def in_turn(groups: list[T], turn: int) -> list[T]:
    """``groups`` of tests with another one first in each turn, so that what comes last has its turn to be tried."""
    first = turn % max(1, len(groups))
    return groups[first:] + groups[:first]


def usually(values: Iterable[Any], *usual: Any) -> list[Any]:
    """All ``values`` for a parameter; those that are not ``usual`` are volume."""
    values = list(values)
    assert {*usual} < {*values}, "a value that is not there, or all of them"
    return [value if value in usual else pytest.param(value, marks=pytest.mark.volume) for value in values]
