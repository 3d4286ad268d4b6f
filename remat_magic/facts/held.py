"""What is held: buffers with what they are of, and which bytes of them are in the device's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic.records import Phase

__all__ = ["Held", "Peak", "outside", "parted"]


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


def outside(values: Sequence[Held], held: int) -> list[int]:
    """What of the bytes of values is not in the vector memory, of all that is held at a moment.

    That takes what lives shortly, and then what was saved last; an argument it never takes.
    """
    left = [value.bytes for value in values]
    elsewhere = sum(left) - held
    for place in sorted(range(len(values)), key=lambda place: (values[place].residual, -place)):
        if values[place].argument is None and not values[place].constant:
            taken = min(elsewhere, left[place])
            elsewhere -= taken
            left[place] -= taken
    return left


def parted(lives: Sequence[tuple[int, int, Held]], held: Sequence[int]) -> list[tuple[int, int, Held]]:
    """Values with their first moment and the one that holds them no more, parted where the bytes ``outside`` change.

    Args:
        lives: all values.
        held: the bytes of each moment.
    """
    parts: list[tuple[int, int, Held]] = []
    newest: dict[int, int] = {}  # for the place of a value that of its last part
    beginning: dict[int, list[int]] = {}
    for place, (first, _, _) in enumerate(lives):
        beginning.setdefault(first, []).append(place)
    alive = list[int]()
    for at, size in enumerate(held):
        alive = [place for place in (*alive, *beginning.get(at, ())) if lives[place][1] > at]
        for place, left in zip(alive, outside([lives[place][2] for place in alive], size), strict=True):
            if place in newest and parts[newest[place]][2].bytes == left:
                first, _, value = parts[newest[place]]
                parts[newest[place]] = first, at + 1, value
            else:
                newest[place] = len(parts)
                parts.append((at, at + 1, replace(lives[place][2], bytes=left)))
    return parts
