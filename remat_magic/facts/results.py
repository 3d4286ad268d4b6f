"""Where the results of a program lie: memory that is reserved for them before they are written."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

__all__ = ["over_donated", "within_results"]


def over_donated(results: Collection[int], donated: Collection[int], sizes: Sequence[int]) -> list[int]:
    """The results that lie where a donated argument of the same size does."""
    free = Counter(sizes[number] for number in donated)
    placed: list[int] = []
    for number in sorted(results):
        if free[sizes[number]]:
            free[sizes[number]] -= 1
            placed.append(number)
    return placed


def within_results(
    lives: Mapping[int, tuple[int, int]], results: Collection[int], others: Collection[int], sizes: Sequence[int]
) -> list[int]:
    """The buffers that lie in the memory of a result, which is written when they are gone.

    That is how XLA's buffer assignment shares memory: the largest buffer first, each where it fits best.

    Args:
        lives: for each buffer the first step that holds it, and the one that holds it no more.
        results: the buffers that have memory from the beginning.
        others: those that may lie there.
        sizes: the bytes of each.
    """
    by_size = sorted((number for number in results if number in lives), key=sizes.__getitem__)
    occupied = [[lives[number]] for number in by_size]
    written = max((lives[number][0] for number in by_size), default=0)
    fits = [sizes[number] for number in by_size]
    placed: list[int] = []
    for number in sorted(others, key=lambda number: (-sizes[number], number)):
        first, end = lives[number]
        if end > written or not sizes[number]:
            continue
        for place in range(bisect_left(fits, sizes[number]), len(fits)):
            if all(end <= begin or stop <= first for begin, stop in occupied[place]):
                occupied[place].append((first, end))
                placed.append(number)
                break
    return placed
