"""Which values of a parameter the usual run tries."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["usually"]


def usually(values: Iterable[Any], *usual: Any) -> list[Any]:
    """All ``values`` for a parameter; those that are not ``usual`` are slow."""
    values = list(values)
    assert {*usual} < {*values}, "a value that is not there, or all of them"
    return [value if value in usual else pytest.param(value, marks=pytest.mark.slow) for value in values]
