"""What XLA says of memory: a program by its own schedule and buffers, and the message that memory is exhausted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remat_magic.records.base import Displayed
from remat_magic.records.source import SourceSpan

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
class XlaMemory:
    """The memory of a compiled program over time, by XLA's own schedule and buffers.

    ``steps`` are the instructions in the order in which they run, those of a loop's body once; ``held`` is how many
    bytes of the device's memory are in use in each: arguments from the first to the last, what shares its bytes with
    another once. ``peak`` is the step of the most, ``alive`` what is held then, in other memories too, the biggest
    first. ``backward`` is the first step of the backward pass, as far as the two passes can be told apart.

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
    else what was asked for at once. ``available_bytes`` is what there was: all of the memory where it was compiled,
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
