"""The steps of the user's own loops: which equations of a jaxpr belong to a step besides a call that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.engine.calls import Interval
from remat_magic.engine.source_loops import Position, SourceLoop
from remat_magic.engine.spellings import callers, frames, loop_around, of_user, passes_on, position_of

__all__ = ["RepeatedCall", "Steps", "WholeSteps", "repeated_call"]


_ELSEWHERE: Position = (None, None, None, None)


class RepeatedCall(NamedTuple):
    """Where a loop repeats a call.

    Attributes:
        code: what the loop is in.
        loop: the loop.
        way: the instructions there, in what it calls, and so on to what makes the call.
    """

    code: CodeType
    loop: SourceLoop
    way: tuple[int, ...]


class WholeSteps(NamedTuple):
    """The equations ``first`` to ``last`` (excluded), which are whole steps of a loop but for some among them.

    These come ``before`` them, as what the loop goes through, or ``after`` them, as what takes from a generator.
    """

    first: int
    last: int
    before: frozenset[int]
    after: frozenset[int]


def repeated_call(eqn: Any, who: tuple[str, str, int], around: Any) -> RepeatedCall | None:
    """Where a loop repeats the call of a function, if that is by the user's code alone.

    Args:
        eqn: an equation of the call.
        who: the function.
        around: the equation in whose body that is, or None; what is around that repeats another call.
    """
    outside = callers(eqn, who)
    beyond = set[tuple[CodeType, int]]() if around is None else {*of_user(frames(around))}
    for number, caller in enumerate(outside):
        if number and caller in beyond:
            return None
        code, inner = caller[0], outside[number - 1] if number else None
        is_own = inner is not None and inner[0].co_filename == code.co_filename
        called = position_of(*inner) if inner is not None and is_own else _ELSEWHERE
        loop = loop_around(*caller, called, inner[0].co_name if inner is not None else "")
        if loop is not None and loop.is_call:
            if not loop.repeats(position_of(*caller), called):
                return None
        elif inner is not None and passes_on(*caller, inner[0]):
            return None
        if loop is not None:
            return RepeatedCall(code, loop, tuple(instruction for _, instruction in reversed(outside[: number + 1])))
    return None


class Steps:
    """The calls of one function in a jaxpr, as steps of the Python loop that makes them.

    Args:
        jaxpr: the jaxpr.
        intervals: the calls, in its order.
        around: the equation that it is the body of, or None.
    """

    def __init__(self, jaxpr: Any, intervals: Sequence[Interval], around: Any) -> None:
        self._eqns = jaxpr.eqns
        self._calls = {
            id(interval): repeated_call(jaxpr.eqns[interval.first], interval.callee.who, around)
            for interval in intervals
        }
        self._ways: dict[tuple[CodeType, SourceLoop], set[tuple[int, ...]]] = {}  # of the calls, by the loop
        for call in filter(None, self._calls.values()):
            self._ways.setdefault(call[:2], set()).add(call.way)

    def go_on(self, before: Interval, after: Interval) -> bool:
        """Whether one loop makes two calls after one another, or none makes either."""
        first, second = self._calls[id(before)], self._calls[id(after)]
        if first is None or second is None:
            return first is second
        between = range(before.last, after.first)
        return first[:2] == second[:2] and all(self._place(number, first) is not None for number in between)

    def whole(self, first: Interval, last: Interval) -> WholeSteps | None:
        """All that a loop's steps do from one call to another; None where these are not whole steps."""
        begin, end = self._calls[id(first)], self._calls[id(last)]
        if begin is None or end is None:
            return None
        ways = self._ways[begin[:2]]
        if begin.way != min(ways) or end.way != max(ways):
            return None
        start, stop = first.first, last.last
        while start and (self._in_step(start - 1, begin) or begin.way) < begin.way:
            start -= 1
        while stop < len(self._eqns) and (self._in_step(stop, end) or ()) > end.way:
            stop += 1
        before, after, made, made_after = set[int](), set[int](), set[Any](), set[Any]()
        for number in range(start, stop):
            eqn = self._eqns[number]
            read = {atom for atom in eqn.invars if not _jax.is_literal(atom)}
            if (self._place(number, begin) or (True,))[0]:
                if not read.isdisjoint(made_after):
                    return None
                made.update(eqn.outvars)
            elif read.isdisjoint(made | made_after):
                before.add(number)
            else:
                after.add(number)
                made_after.update(eqn.outvars)
        return WholeSteps(start, stop, frozenset(before), frozenset(after))

    def _in_step(self, number: int, call: RepeatedCall) -> tuple[int, ...] | None:
        """The way, as far as that to a call, to what a loop's steps do in an equation; None where none did it."""
        place = self._place(number, call)
        return place[1][: len(call.way)] if place is not None and place[0] else None

    def _place(self, number: int, call: RepeatedCall) -> tuple[bool, tuple[int, ...]] | None:
        """Whether a loop made an equation in its steps, or in what it goes through, and the way; None: it did not."""
        own = of_user(frames(self._eqns[number]))
        is_inside, called = False, None
        for index, (code, instruction) in enumerate(own):
            is_same = code.co_filename == call.code.co_filename
            position = position_of(code, instruction) if is_same else _ELSEWHERE
            repeated = call.loop.repeats(position, called)
            if code == call.code and repeated is not None:
                return repeated, tuple(instruction for _, instruction in reversed(own[: index + 1]))
            is_inside, called = is_inside or repeated is not None, position
        return (False, ()) if is_inside else None
