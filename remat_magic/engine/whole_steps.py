"""The steps of the user's own loops: which equations of a jaxpr belong to a step besides a call that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.engine.calls import Interval
from remat_magic.engine.spellings import SourceLoop, called_from, frames, loop_around, position_of

__all__ = ["Steps"]


class _Call(NamedTuple):
    """Where a call is made: the code, the instruction in it, and the loop that repeats it."""

    code: CodeType
    instruction: int
    loop: SourceLoop


class Steps:
    """The calls of one function in a jaxpr, as steps of the Python loop that makes them.

    Args:
        jaxpr: the jaxpr.
        intervals: the calls, in its order.
    """

    def __init__(self, jaxpr: Any, intervals: Sequence[Interval]) -> None:
        self._eqns = jaxpr.eqns
        self._calls = {id(interval): _call(jaxpr, interval) for interval in intervals}
        self._sites: dict[tuple[CodeType, SourceLoop], set[int]] = {}  # the instructions that make calls, by the loop
        for call in filter(None, self._calls.values()):
            self._sites.setdefault((call.code, call.loop), set()).add(call.instruction)

    def go_on(self, before: Interval, after: Interval) -> bool:
        """Whether one loop makes two calls after one another, or none makes either."""
        first, second = self._calls[id(before)], self._calls[id(after)]
        if first is None or second is None:
            return first is second
        between = range(before.last, after.first)
        return first[::2] == second[::2] and all(self._made_by(number, first) is not None for number in between)

    def whole(self, first: Interval, last: Interval) -> tuple[int, int, frozenset[int]] | None:
        """The equations, up to one that is excluded, of all that a loop's steps do from one call to another.

        The last are the numbers of those among them that come of what the loop goes through, and belong before them.
        None where these are not whole steps.
        """
        begin, end = self._calls[id(first)], self._calls[id(last)]
        if begin is None or end is None:
            return None
        instructions = self._sites[begin.code, begin.loop]
        if begin.instruction != min(instructions) or end.instruction != max(instructions):
            return None
        start, stop = first.first, last.last
        while start and (self._in_step(start - 1, begin) or begin.instruction) < begin.instruction:
            start -= 1
        while stop < len(self._eqns) and (self._in_step(stop, end) or 0) > end.instruction:
            stop += 1
        apart = frozenset(number for number in range(start, stop) if self._made_by(number, begin) is False)
        outputs = {var for number in {*range(start, stop)} - apart for var in self._eqns[number].outvars}
        read = (atom for number in apart for atom in self._eqns[number].invars if not _jax.is_literal(atom))
        return (start, stop, apart) if outputs.isdisjoint(read) else None

    def _in_step(self, number: int, call: _Call) -> int | None:
        """The instruction of a loop's steps that made an equation; None where none did."""
        return self._instruction(number, call) if self._made_by(number, call) else None

    def _made_by(self, number: int, call: _Call) -> bool | None:
        """Whether a loop made an equation in its steps, or in what it goes through; None where it did not."""
        instruction = self._instruction(number, call)
        return None if instruction is None else call.loop.repeats(position_of(call.code, instruction))

    def _instruction(self, number: int, call: _Call) -> int | None:
        return next((instruction for code, instruction in frames(self._eqns[number]) if code == call.code), None)


def _call(jaxpr: Any, interval: Interval) -> _Call | None:
    """Where a call is made, if a loop repeats it."""
    caller = called_from(jaxpr.eqns[interval.first], interval.callee.who)
    loop = None if caller is None else loop_around(*caller)
    return None if caller is None or loop is None else _Call(*caller, loop)
