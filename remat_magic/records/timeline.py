"""What a policy costs by estimate: times, and memory over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.source import SourceSpan

Half = Literal["forward", "backward"]
Phase = Literal["forward", "backward", "update"]
"""A half of the gradient, or what a training step does after it."""

ArgumentRole = Literal["parameter", "state", "batch"]
"""What an argument of a training step is to the gradient that it takes: what it differentiates, what it does not read
(an optimizer's state), or what it reads besides. So are arrays that the step closes over, as a trainer's own, but for
what the gradient reads besides: these are constants."""

LiveKind = Literal["argument", "constant", "residual", "temporary", "gradient", "output"] | ArgumentRole


@dataclass(frozen=True, slots=True)
class Times:
    """Estimated seconds on one device: a roofline over the kernels of a report, nothing measured.

    ``recomputed`` is part of ``backward``. ``offload`` is the way to the host and back, as if nothing ran meanwhile;
    None where it is not known how fast that is. Where not ``complete``, some work has no known cost or trip count, and
    the estimate is a lower bound ("at least"), as where it is not known how fast the device's links to others are. With
    automatic sharding XLA inserts the collectives, which are in the halves and in no recomputation.
    """

    device: str
    forward: float
    backward: float
    recomputed: float
    offload: float | None = 0.0
    complete: bool = True

    @property
    def total(self) -> float:
        """Forward, backward and offloading together, in seconds."""
        return self.forward + self.backward + (self.offload or 0.0)

    @property
    def extra(self) -> float:
        """What the policy costs: recomputation and offloading, in seconds."""
        return self.recomputed + (self.offload or 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is live while one equation runs, in bytes.

    ``index`` counts the equations of the half's jaxpr, calls and loops as one; a call has several moments.
    ``arguments`` includes constants, ``residuals`` only those that are no arguments. ``primitive`` and ``source`` are
    the equation's, empty where values merely arrive. In a training step ``half`` is "update" after the gradient, and
    ``index`` counts the step's own equations where they are not the gradient's.
    """

    half: Phase
    index: int
    arguments: int
    residuals: int
    temporaries: int
    primitive: str = ""
    source: SourceSpan | None = None

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.arguments + self.residuals + self.temporaries


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A value that takes memory for a while.

    ``type`` is as JAX writes it, empty for what a branch needs inside, whose ``primitive`` then tells which.
    ``argument`` is the name of an argument, also where the value is a slice of it that a loop takes, or with the
    primitive "copy" what is given back of it; ``source`` is the line that makes the value, in a loop's body too. In a
    training step arguments differ by their role. As on a TPU
    ``nbytes`` is with padding.
    """

    type: str
    nbytes: int
    kind: LiveKind
    primitive: str = ""
    argument: str | None = None
    source: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """A value with the index of the first moment that holds it, and of the one that holds it no more."""

    first: int
    end: int
    value: LiveValue


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Displayed, Labelled):
    """The estimated device memory from the first equation of the forward half to the last of the backward one.

    ``peak`` is the index of the moment that needs most; ``lives`` is all that is live at any, and adds up to the bytes
    of each. What XLA needs is to be expected between ``peak_low`` and ``peak_high``. ``step`` is the name of the
    training step that it is of, from its first equation to its last; empty where it is of a gradient alone. ``seconds``
    is what each moment takes by estimate, empty where no device is given whose data sheet is known.
    """

    policy: str
    at: str
    function: str
    moments: tuple[Moment, ...]
    peak: int
    lives: tuple[Life, ...]
    label: str = ""
    step: str = ""
    peak_low: int = 0
    peak_high: int = 0
    seconds: tuple[float, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that is live at once."""
        return self.moments[self.peak].bytes

    @property
    def saved_bytes(self) -> int:
        """What is saved for the backward pass, at the most."""
        return max(moment.residuals for moment in self.moments)

    def alive_at(self, moment: int) -> tuple[LiveValue, ...]:
        """What is live at a moment, the biggest first."""
        values = (life.value for life in self.lives if life.first <= moment < life.end)
        return tuple(sorted(values, key=lambda value: -value.nbytes))

    @property
    def alive(self) -> tuple[LiveValue, ...]:
        """What is live at the peak, the biggest first."""
        return self.alive_at(self.peak)

    def alive_bytes(self, kind: str) -> int:
        """What is live at the peak of one kind."""
        return sum(value.nbytes for value in self.alive if value.kind == kind)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a training step holds at the peak of its memory, by estimate, in bytes.

    The gradient's own report tells what of it is saved for the backward pass, and why.

    Attributes:
        function: the step's name.
        timeline: from its first equation to its last.
    """

    function: str
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        """The most that is live at once."""
        return self.timeline.peak_bytes

    @property
    def peak_low(self) -> int:
        """What XLA needs for it at the least, by what was measured of other programs."""
        return self.timeline.peak_low

    @property
    def peak_high(self) -> int:
        """What XLA needs for it at most, by what was measured of other programs."""
        return self.timeline.peak_high

    @property
    def parameter_bytes(self) -> int:
        """Of what is differentiated, as it came in."""
        return self.timeline.alive_bytes("parameter")

    @property
    def optimizer_bytes(self) -> int:
        """Of what else comes in and the gradient does not read, such as an optimizer's state."""
        return self.timeline.alive_bytes("state")

    @property
    def batch_bytes(self) -> int:
        """Of arguments that the gradient reads and does not differentiate."""
        return self.timeline.alive_bytes("batch")

    @property
    def saved_bytes(self) -> int:
        """Saved for the backward pass, and still needed at the peak."""
        return self.timeline.alive_bytes("residual")

    @property
    def gradient_bytes(self) -> int:
        """Of gradients."""
        return self.timeline.alive_bytes("gradient")

    @property
    def output_bytes(self) -> int:
        """Of what the step returns: new parameters and the like, also where they are written over donated ones."""
        return self.timeline.alive_bytes("output")

    @property
    def temporary_bytes(self) -> int:
        """Of everything else: what is computed on the way, and captured constants."""
        return self.timeline.alive_bytes("temporary") + self.timeline.alive_bytes("constant")
