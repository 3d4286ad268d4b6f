"""How much is tried: which values of a parameter the usual run tries, and until when CI tries more."""

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["in_turn", "skip_when_late", "usually"]

_BROWSER = Path(__file__).parent / "browser"


def skip_when_late() -> None:
    """Skip a test after the time until which CI has time for this run: REMAT_UNTIL, in seconds as of ``time.time``."""
    if time.time() > float(os.environ.get("REMAT_UNTIL", "inf")):
        pytest.skip("CI had no more time for it")


def in_turn(items: list[Any], turn: int) -> list[Any]:
    """The browser's tests, some of which are tried however late it is; then the files, with another first in each turn.

    Where CI has no time for all tests, it would else leave out the same ones each time.
    """
    files = [list(of_file) for _, of_file in itertools.groupby(items, lambda item: item.path)]
    browser = [of_file for of_file in files if of_file[0].path.is_relative_to(_BROWSER)]
    others = [of_file for of_file in files if not of_file[0].path.is_relative_to(_BROWSER)]
    first = turn % max(1, len(others))
    return [*itertools.chain(*browser, *others[first:], *others[:first])]


def usually(values: Iterable[Any], *usual: Any) -> list[Any]:
    """All ``values`` for a parameter; those that are not ``usual`` are volume."""
    values = list(values)
    assert {*usual} < {*values}, "a value that is not there, or all of them"
    return [value if value in usual else pytest.param(value, marks=pytest.mark.volume) for value in values]
