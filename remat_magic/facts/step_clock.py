"""When the steps of a schedule run, as XLA for a TPU reckons with it to place values: a roofline, and loops run alike.

The unit of time is a byte that could have been moved to or from the device's memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from remat_magic import _jax
from remat_magic._jax.contractions import CONTRACTIONS
from remat_magic._jax.formulas import BYTES
from remat_magic.facts.buffers import NOTHING, Buffers
from remat_magic.facts.step_order import ScheduledStep
from remat_magic.jaxprs.one_device import own_type

__all__ = ["BodyTime", "Clock"]

_RUNS = 5
"""How often XLA takes a loop to run, whatever its length: ``xla_tpu_memory_space_assignment_while_execution_count``."""


@dataclass(frozen=True, slots=True)
class BodyTime:
    """What a loop or a branch does, seen from outside.

    Attributes:
        elapsed: how long all its runs take.
        vector_bytes: what is in use of the vector memory meanwhile.
        waits: for each operand, how long one run waits until it takes a slice of it, or then goes on without it.
        made: the same for each result that is stacked.
    """

    elapsed: int = 0
    vector_bytes: int = 0
    waits: Sequence[int] = ()
    made: Sequence[int] = ()

    def beside(self, other: BodyTime) -> BodyTime:
        """What takes longer of two branches, or of the body and the condition of a loop."""
        longer = max(self, other, key=lambda body: body.elapsed)
        return replace(longer, vector_bytes=max(self.vector_bytes, other.vector_bytes))


class Clock:
    """When each step begins (``times``), and the last one ends; and how the time of each is spent.

    Args:
        steps: in their order.
        buffers: what they read and make.
        bodies: what loops and branches take, by the identity of their equation.
    """

    def __init__(self, steps: Sequence[ScheduledStep], buffers: Buffers, bodies: Mapping[int, BodyTime]) -> None:
        self._steps, self._buffers, self._bodies = steps, buffers, bodies
        self._spent = [self._time(step) for step in steps]
        self.times = [0]
        for moved, computed in self._spent:
            self.times.append(self.times[-1] + max(moved, computed))

    def _time(self, step: ScheduledStep) -> tuple[int, int]:
        """How long a step moves, and how long it computes at once."""
        if id(step.eqn) in self._bodies:
            return self._bodies[id(step.eqn)].elapsed, 0
        sizes = self._buffers.sizes
        if not any(sizes[number] for number in step.makes):  # what stays in registers is reckoned where it is read
            return 0, 0
        moved = sum([sizes[number] for number in {*step.reads, *step.makes}])
        if step.eqn is None:
            return moved, 0
        name, eqn, type_of = _jax.primitive_name(step.eqn), step.eqn, self._buffers.type_of
        one = eqn if type_of is own_type else _jax.equation_of_one(eqn, type_of)
        if name in BYTES:
            moved = min(moved, BYTES[name](one))
        flops = CONTRACTIONS[name](one) if name in CONTRACTIONS else None
        return moved, round((flops or 0) / self._buffers.on.flops_per_byte)

    def waits(self) -> dict[int, int]:
        """For each buffer the longest time from one step that makes or reads it to the next, or to the end for it."""
        since: dict[int, int] = {}
        longest: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            begin, end = self.times[index], self.times[index + 1]
            body = self._bodies.get(id(step.eqn), BodyTime())
            for numbers, in_loop in ((step.reads, body.waits), (step.makes, body.made)):
                for position, number in enumerate(numbers):
                    wait = max(begin - since.get(number, begin), in_loop[position] if position < len(in_loop) else 0)
                    longest[number] = max(longest.get(number, 0), wait)
            since.update(dict.fromkeys((*step.reads, *step.makes), end))
            if id(step.eqn) in self._bodies:  # what a loop carries it takes at its beginning
                carried = _jax.carried_operands(step.eqn)
                since.update(dict.fromkeys(step.reads[carried.start : carried.stop], begin))
        for number in since.keys() & self._buffers.lasting:
            longest[number] = max(longest[number], self.times[-1] - since[number])
        return longest

    def gains(self) -> dict[int, int]:
        """For each buffer the time that is won where it need not be moved.

        Nothing is won where a step computes for longer than it moves: it counts by how much longer, negative.
        """
        gains: dict[int, int] = {}
        for step, (moved, computed) in zip(self._steps, self._spent, strict=True):
            for number in {*step.reads, *step.makes}:
                size = self._buffers.sizes[number]
                if id(step.eqn) in self._bodies:
                    size *= _RUNS
                    if number in _stacks(step):
                        size //= max(1, _jax.scan_length(step.eqn))
                gains[number] = gains.get(number, 0) + (size if moved >= computed else moved - computed)
        return gains

    def of_body(self, slices: Sequence[int], stacked: Sequence[int], vector_bytes: int, *, loop: bool) -> BodyTime:
        """What these, the steps of a body, take.

        Args:
            slices: for each operand the buffer of its slice; ``NOTHING`` of what is read whole.
            stacked: for each result the buffer of what is stacked to it; ``NOTHING`` of what is carried.
            vector_bytes: in use of the vector memory.
            loop: whether it runs several times.
        """
        used: dict[int, list[int]] = {}
        made: dict[int, list[int]] = {}
        for index, step in enumerate(self._steps):
            made.update((number, [index]) for number in step.makes)
            for number in step.reads:
                used.setdefault(number, []).append(index)
        end = self.times[-1]

        def wait(steps: Sequence[int]) -> int:
            return max(self.times[steps[0]], end - self.times[steps[-1] + 1]) if steps else 0

        return BodyTime(
            end * (_RUNS if loop else 1),
            vector_bytes,
            [wait(used.get(number, ())) if number != NOTHING else 0 for number in slices],
            [wait(made.get(number, ())) if number != NOTHING else 0 for number in stacked],
        )


def _stacks(step: ScheduledStep) -> set[int]:
    """The buffers of which a scan reads or makes a slice in each run."""
    if not _jax.is_scan(step.eqn):
        return set()
    carried = _jax.carried_operands(step.eqn)
    return {*step.reads[carried.stop : len(step.eqn.invars)], *step.makes[len(carried) :]}
