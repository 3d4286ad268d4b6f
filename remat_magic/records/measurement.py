"""What was measured of a policy: XLA's bytes and seconds, its buffers at the peak, and how far gradients are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remat_magic import units
from remat_magic.records.base import Displayed
from remat_magic.records.report import Note
from remat_magic.records.source import SourceSpan

XlaRole = Literal["argument", "output", "constant", "saved", "carried", "temporary"]
"""What a buffer is to the compiled program: ``saved`` was made by the forward pass and is read by the backward one,
``carried`` is the state of a loop while that runs, ``output`` also what is written over a donated argument."""


@dataclass(frozen=True, slots=True)
class XlaBuffer:
    """A buffer that the compiled program holds at the peak of its memory.

    ``name`` is XLA's, with its place in a tuple; ``first`` and ``last`` are the steps in which it holds this value.
    ``nbytes`` is with padding, and without what it shares with another buffer in the list. ``space`` is "device" for
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
class XlaMemory:
    """The memory of a compiled program over time, by XLA's own schedule and buffers.

    ``steps`` are the instructions in the order in which they run, those of a loop's body once; ``held`` is how many
    bytes of the device's memory are in use in each: arguments from the first to the last, what shares its bytes with
    another once. ``peak`` is the step of the most, ``alive`` what is live then, in other memories too, the biggest
    first. ``backward`` is the first step of the backward pass, as far as the two passes can be distinguished.

    A program is allocated more than the peak where results are not written yet, or buffers leave gaps between them.
    XLA's own notes have another step and sum, ``noted_peak`` and ``noted_bytes``: all memory spaces
    together, without padding, and with both values where one is written over the other. ``unknown`` counts the values
    of which no size is known: they are not in ``held``.
    """

    steps: tuple[str, ...]
    held: tuple[int, ...]
    peak: int
    alive: tuple[XlaBuffer, ...]
    backward: int | None = None
    noted_peak: int | None = None
    noted_bytes: int | None = None
    unknown: int = 0

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
        return XlaMemory(**{**data, **parts})


@dataclass(frozen=True, slots=True)
class ExhaustedBuffer:
    """One of the largest buffers that XLA lists.

    ``nbytes`` is with padding, ``type`` as XLA writes it without the layout: ``f32[32,4096,4096]``. ``op_name`` is the
    path of JAX's names to the operation that makes it, ``source`` its line of Python, ``label`` XLA's name for it.
    ``kind`` is "argument", "temporary" or "output" where XLA says so.
    """

    nbytes: int
    type: str
    op_name: str = ""
    source: SourceSpan | None = None
    label: str = ""
    kind: str = ""

    @property
    def line(self) -> int | None:
        """The number of the line of Python in the file of ``source``."""
        return None if self.source is None else self.source.line

    @property
    def what(self) -> str:
        """The operation, or XLA's name for it."""
        return self.op_name.partition("[")[0].rpartition("/")[2] or self.label


@dataclass(frozen=True, slots=True, repr=False)
class Exhausted(Displayed):
    """A message of XLA's that memory is exhausted, read by ``remat_magic.explain``.

    ``message`` is its first line. ``wanted_bytes`` could not be had: all that a program needs where it was compiled,
    else what it wanted at once. ``available_bytes`` is what there was: all of the memory where it was compiled,
    else what was free. ``memory`` is "device", "host", or "vmem" (the fast memory that a TPU's kernels compute in),
    ``when`` is "compiling", "loading" or "running". ``parts`` are what the program needs, by XLA's names, in bytes;
    ``buffers`` are the largest, the biggest first. None, or empty, is what the message does not say.
    """

    message: str
    wanted_bytes: int | None = None
    available_bytes: int | None = None
    memory: str = "device"
    when: str = "running"
    parts: tuple[tuple[str, int], ...] = ()
    buffers: tuple[ExhaustedBuffer, ...] = ()


Effort = Literal["full", "quick"]
"""How much a compiler optimizes: as in production, or less, which takes less time and has other bytes."""


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
    None where it was not run. ``allocated_bytes`` is the most that JAX's allocator had in use in these runs, all else
    that was alive included; None where it does not say, or has had more before.
    ``flops`` and ``bytes_accessed`` (what its instructions read and write) are XLA's own counts over the compiled
    program, with the bodies of loops as often as they run; None where XLA does not say, as of convolutions by cuDNN, or
    nothing tells how often.
    ``peak_bytes`` is XLA's own peak: over all memories of a TPU together, those on the chip too, so that it can be more
    than what has to fit; on a CPU it says little. ``collectives`` are what its devices tell each other, by the compiled
    program; None where nothing tells how often.
    ``error`` is one sentence where a step failed; what was measured before stays. ``findings`` are sentences on where
    the compiled program departs from the report.

    ``devices_there`` is how many devices the given name stands for (8 for "TPU v5e:2x4", of which a program on
    no mesh uses one).

    Where it was compiled for a device that is not here, ``device`` is that device's name, and: ``fits`` whether the
    program needs no more than it can have of the device, as its compiler says for a TPU, and by the sizes for a GPU.
    ``needed_bytes`` and ``available_bytes`` are both sizes, as XLA rounds them where it is too big for a TPU; for a GPU
    what is needed is ``total_bytes``, for a TPU the lower of these and ``peak_bytes``, by which its compiler decides.
    What it can have of a GPU is the share of ``memory_bytes``, all of the device's memory, that JAX lets a process
    have; ``fits_with_share`` is a larger share with which it would fit, None where it fits or none would do. Compiled
    where JAX runs, ``fits`` and the sizes tell of a GPU by what JAX's allocator gives out. ``host_bytes`` are those in
    the host's memory, ``rematerialized`` counts the instructions that XLA computes again by itself. ``effort`` is
    "quick" where it was compiled with less optimization: the bytes, and whether it fits, are then not those of
    production. ``compiled_before`` says that the answer, its seconds too, is from an earlier time. ``timeline``
    is its memory over time by XLA's own schedule, None where that is not known.
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
    allocated_bytes: int | None = None
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
    fits_with_share: float | None = None
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
    def mend(self) -> str:
        """How the program would fit without another choice, as a sentence; empty where it fits, and where unknown."""
        if self.fits_with_share is None:
            return ""
        return (
            f"With XLA_CLIENT_MEM_FRACTION={self.fits_with_share:g}, set before JAX starts, it would fit: JAX then "
            f"gives a program more of the GPU's {units.nbytes(self.memory_bytes or 0)}."
        )

    @property
    def communicated_bytes(self) -> int | None:
        """What a device has of the results of all ``collectives``, in bytes; None where they are not known."""
        return None if self.collectives is None else sum(collective.bytes for collective in self.collectives)


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
