"""What is held: buffers with what they are of, and which bytes of them are in the device's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat_magic.records import Phase

__all__ = ["Held", "Peak"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that is held at once, in bytes, and the (first) equation that holds it: its half and its index there."""

    bytes: int
    where: tuple[Phase, int]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A buffer that is held: its type and what makes it.

    ``argument`` is the position of an argument, ``constant`` tells a captured value; otherwise it is ``var``, which
    ``eqn`` makes or hands to a body of its own (no ``eqn``: a cotangent). Without an ``aval`` it is what a branch of
    ``eqn`` needs inside.
    """

    bytes: int
    aval: Any = None
    eqn: Any = None
    var: Any = None
    argument: int | None = None
    constant: bool = False
    residual: bool = False
    gradient: bool = False
    output: bool = False
