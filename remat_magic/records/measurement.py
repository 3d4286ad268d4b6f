"""What a policy costs: estimated times and memory over time, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.note import Note
from remat_magic.records.source import SourceSpan

__all__ = [
    "ArgumentRole",
    "Collective",
    "Effort",
    "GradientDifference",
    "Half",
    "Life",
    "LiveKind",
    "LiveValue",
    "Measurement",
    "MemorySpace",
    "Moment",
    "Phase",
    "Progress",
    "StepMemory",
    "Timeline",
    "Times",
    "XlaBuffer",
    "XlaMemory",
    "XlaRole",
]

Half = Literal["forward", "backward"]
Phase = Literal["forward", "backward", "update"]
"""A half of the gradient, or what a training step does after it."""

ArgumentRole = Literal["parameter", "state", "batch"]
"""What an argument of a training step is to the gradient that it takes: what it differentiates, what it does not read
(an optimizer's state), or what it reads besides."""

Effort = Literal["full", "quick"]
"""How much a compiler optimizes: as in production, or less, which takes less time and has other bytes."""

LiveKind = Literal["argument", "constant", "residual", "temporary", "gradient", "output"] | ArgumentRole


# -------------------------------------------------------------------------------------------------- time and the peak


@dataclass(frozen=True, slots=True)
class Times:
    """Estimated seconds on one device: a roofline over the kernels of a report, nothing measured.

    ``recomputed`` is part of ``backward``. ``offload`` is the way to the host and back, as if nothing ran meanwhile;
    None where it is not known how fast that is. Where not ``complete``, some work has no known cost or trip count, and
    the estimate is a lower bound ("at least"). ``communicated`` is the part of ``recomputed`` that collectives take
    which run again, None where it is not known how fast the device's links to others are, and it counts as none.
    ``forward_communicated`` and ``backward_communicated`` are likewise the parts of both halves. With automatic
    sharding XLA inserts the collectives, which are in the halves and in no recomputation.
    """

    device: str
    forward: float
    backward: float
    recomputed: float
    offload: float | None = 0.0
    complete: bool = True
    communicated: float | None = 0.0
    forward_communicated: float | None = 0.0
    backward_communicated: float | None = 0.0

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
    """What is held while one equation runs, in bytes.

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
    ``argument`` is the name of an argument, also where the value is a slice of it that a loop takes; ``source`` is the
    line that makes the value, in a loop's body too. In a training step the
    arguments are told apart by their role, and the gradients from other temporaries. As on a TPU ``nbytes`` is with
    padding, and without what of it is in another memory (VMEM).
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

    ``peak`` is the index of the moment that holds most; ``lives`` is all that is held at any, and adds up to the bytes
    of each. ``step`` is the name of the training step that it is of, from its first equation to its last; empty where
    it is of a gradient alone.
    """

    policy: str
    at: str
    function: str
    moments: tuple[Moment, ...]
    peak: int
    lives: tuple[Life, ...]
    label: str = ""
    step: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return self.moments[self.peak].bytes

    def alive_at(self, moment: int) -> tuple[LiveValue, ...]:
        """What is held at a moment, the biggest first."""
        values = (life.value for life in self.lives if life.first <= moment < life.end)
        return tuple(sorted(values, key=lambda value: -value.nbytes))

    @property
    def alive(self) -> tuple[LiveValue, ...]:
        """What is held at the peak, the biggest first."""
        return self.alive_at(self.peak)

    def alive_bytes(self, kind: str) -> int:
        """What is held at the peak of one kind."""
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
        """The most that is held at once."""
        return self.timeline.peak_bytes

    @property
    def parameter_bytes(self) -> int:
        """Of what is differentiated, as it came in."""
        return self.timeline.alive_bytes("parameter")

    @property
    def optimizer_bytes(self) -> int:
        """Of arguments that the gradient does not read, such as an optimizer's state."""
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


# --------------------------------------------------------------------------------------------- XLA's memory over time

XlaRole = Literal["argument", "output", "constant", "saved", "carried", "temporary"]
"""What a buffer is to the compiled program: ``saved`` was made by the forward pass and is read by the backward one,
``carried`` is the state of a loop while that runs, ``output`` also what is written over a donated argument."""


@dataclass(frozen=True, slots=True)
class XlaBuffer:
    """A buffer that the compiled program holds at the peak of its memory.

    ``name`` is XLA's, with its place in a tuple; ``first`` and ``last`` are the steps in which it holds this value.
    ``nbytes`` is with padding, and without what it shares with another buffer that is told. ``space`` is "device" for
    the memory that a program has to fit into, "host", "VMEM", or XLA's number of another one. ``op_name`` is the path
    of JAX's names to the operation, or an argument's name. ``source`` is the innermost line of the user's own code,
    ``library`` that of a library called from there.
    """

    name: str
    nbytes: int
    first: int
    last: int
    opcode: str
    type: str
    role: XlaRole
    space: str = "device"
    op_name: str = ""
    source: SourceSpan | None = None
    library: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class MemorySpace:
    """What XLA allocates for a program in one memory, in bytes.

    ``name`` is as that of ``XlaBuffer.space``: "device", "host", on a TPU "VMEM" and "SMEM" beside the compute units,
    else XLA's number. ``output_bytes`` are without outputs that lie where donated arguments did.
    """

    name: str
    argument_bytes: int = 0
    output_bytes: int = 0
    constant_bytes: int = 0
    temp_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.argument_bytes + self.output_bytes + self.constant_bytes + self.temp_bytes


@dataclass(frozen=True, slots=True)
class XlaMemory:
    """The memory of a compiled program over time, by XLA's own schedule and buffers.

    ``steps`` are the instructions in the order in which they run, those of a loop's body once; ``held`` is how many
    bytes of the device's memory are in use in each: arguments from the first to the last, what shares its bytes with
    another once. ``peak`` is the step of the most, ``alive`` what is held then, in other memories too, the biggest
    first. ``backward`` is the first step of the backward pass, as far as the two passes can be told apart.

    A program is allocated more than the peak where results are not written yet, or buffers leave gaps between them.
    XLA's own notes have another step and sum, ``noted_peak`` and ``noted_bytes``: all memory spaces
    together, without padding, and with both values where one is written over the other. ``unknown`` counts the values
    of which no size is known: they are not in ``held``. ``spaces`` is what is allocated, by memory, the device's first.
    """

    steps: tuple[str, ...]
    held: tuple[int, ...]
    peak: int
    alive: tuple[XlaBuffer, ...]
    backward: int | None = None
    noted_peak: int | None = None
    noted_bytes: int | None = None
    unknown: int = 0
    spaces: tuple[MemorySpace, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most of the device's memory that is in use at once."""
        return self.held[self.peak]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON; ``from_dict`` has the same again."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> XlaMemory:
        """What ``to_dict`` wrote, also after a way through JSON."""

        def buffer(plain: Mapping[str, Any]) -> XlaBuffer:
            lines: dict[str, Any] = {key: SourceSpan(**plain[key]) for key in ("source", "library") if plain[key]}
            return XlaBuffer(**{**plain, **lines})

        parts: dict[str, Any] = {name: tuple(data[name]) for name in ("steps", "held")}
        parts["alive"] = tuple(map(buffer, data["alive"]))
        parts["spaces"] = tuple(MemorySpace(**space) for space in data["spaces"])
        return XlaMemory(**{**data, **parts})


# -------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True, slots=True)
class Collective:
    """What the devices of a mesh tell each other in one run of a program, by the kind of operation that XLA uses.

    One device takes part in ``runs`` of the ``kind`` (``"all-gather"``), and has ``bytes`` of their results together.
    """

    kind: str
    runs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What XLA says of the compiled value and gradients, or training step, under one policy.

    ``temp_bytes``, ``argument_bytes``, ``output_bytes`` and ``alias_bytes`` (outputs that lie where donated
    arguments did) are bytes on each device, from XLA's own ``memory_analysis()``; None where the backend does not
    say. ``device`` is platform and kind, ``devices`` how many run the program; where these are ``simulated``, all on
    this machine, a run takes what the machine takes for all of them, which says nothing of a device.
    ``compile_seconds`` is None where it did not come to compiling, ``run_seconds`` the median of ``runs`` timed runs,
    None where it was not run.
    ``flops`` and ``bytes_accessed`` (what its instructions read and write) are XLA's own counts over the compiled
    program, with the bodies of loops as often as they run; None where XLA does not say, or nothing tells how often.
    ``peak_bytes`` is XLA's own peak: over all memories of a TPU together, those on the chip too, so that it can be more
    than what has to fit; on a CPU it says little. ``collectives`` are what its devices tell each other, by the compiled
    program; None where nothing tells how often.
    ``error`` is one sentence where a step failed; what was measured before stays. ``findings`` are sentences on where
    the compiled program departs from the report.

    ``devices_there`` is how many devices the name was of that was asked for (8 for "TPU v5e:2x4", of which a program on
    no mesh uses one).

    Where it was compiled for a device that is not here, ``device`` is that device's name, and: ``fits`` whether the
    program needs no more than the device has, as its compiler says for a TPU, and by the sizes for a GPU (of whose
    memory JAX takes three quarters unless it is told otherwise); ``memory_bytes`` is what a program can have of
    its memory; ``needed_bytes`` and ``available_bytes`` are both
    sizes, as XLA rounds them where it is too big for a TPU; for a GPU what is needed is ``total_bytes``, for a TPU the
    lower of these and ``peak_bytes``, by which its compiler decides. ``host_bytes`` are those in the host's memory,
    ``rematerialized`` counts the instructions that XLA computes again by itself. ``effort`` is "quick"
    where it was compiled with less optimization: the bytes, and whether it fits, are then not those of production.
    ``compiled_before`` says that the answer, its seconds too, was kept from an earlier time. ``timeline`` is its memory
    over time by XLA's own schedule, None where that is not known.
    """

    policy: str
    at: str
    device: str = ""
    devices: int = 1
    devices_there: int = 1
    temp_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    compile_seconds: float | None = None
    run_seconds: float | None = None
    runs: int = 0
    flops: int | None = None
    bytes_accessed: int | None = None
    collectives: tuple[Collective, ...] | None = None
    error: str = ""
    findings: tuple[Note, ...] = ()
    fits: bool | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    host_bytes: int | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    rematerialized: int | None = None
    effort: Effort = "full"
    compiled_before: bool = False
    timeline: XlaMemory | None = None
    simulated: bool = False

    @property
    def total_bytes(self) -> int | None:
        """Arguments, outputs and temporaries together: what the program needs on each device. Donated memory once."""
        if self.temp_bytes is None or self.argument_bytes is None or self.output_bytes is None:
            return None
        return self.argument_bytes + self.output_bytes + self.temp_bytes - (self.alias_bytes or 0)

    @property
    def spaces(self) -> tuple[MemorySpace, ...] | None:
        """What is allocated, by memory; None where XLA does not tell: it does for devices that are not here."""
        return self.timeline.spaces if self.timeline else None

    @property
    def unplaced_bytes(self) -> int | None:
        """What of ``temp_bytes`` lies in no temporary that is allocated on the device; None where unknown.

        Zero for a GPU. A TPU's compiler counts the gaps around small buffers once more and some buffers of loops twice.
        Of some programs with few temporaries it says that they have none, so that it can be less than zero.
        """
        if self.temp_bytes is None or self.spaces is None:
            return None
        return self.temp_bytes - sum(space.temp_bytes for space in self.spaces if space.name == "device")

    @property
    def communicated_bytes(self) -> int | None:
        """What a device has of the results of all ``collectives``, in bytes; None where they are not known."""
        return None if self.collectives is None else sum(each.bytes for each in self.collectives)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a series of measurements is: ``current`` names the policy that is being measured, empty at the end."""

    done: int
    total: int
    current: str = ""
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.cancelled or self.done == self.total


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """How far the values and gradients under a policy are from those without the checkpoint.

    ``absolute`` is the largest difference of two elements, ``where`` names the array that has it ("the gradient of
    params['w']", "output 0") and ``index`` the element. ``relative`` is the largest difference in units of the largest
    element of the same array, which ``relative_where`` names. A NaN or infinity on one side only counts as infinite.
    None where ``error``, one sentence, says why there is nothing to compare.
    """

    policy: str
    at: str
    absolute: float | None = None
    where: str = ""
    index: tuple[int, ...] = ()
    relative: float | None = None
    relative_where: str = ""
    error: str = ""
