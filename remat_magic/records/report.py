"""What one policy does at one place: residuals, recomputation, programs, sites."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed, Labelled, display, write
from remat_magic.records.source import Site, SourceSpan, SourceText


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the policy table.

    ``key`` is what ``policy=`` takes, ``code`` the one line to paste into a program (with ``{function}``-free text:
    an expression for ``jax.checkpoint``'s ``policy`` argument or a whole decorator line).
    """

    key: str
    label: str
    meaning: str
    code: str = ""
    parameters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


NoteKind = Literal[
    "stale-trace",
    "gradient-inside",
    "gradient-of-step",
    "gradient-called",
    "number-not-differentiated",
    "names-out-of-reach",
    "names-unknown",
    "complex-values",
    "gradient-per-example",
    "gradient-per-device",
    "devices-together",
    "devices-unknown",
    "argument-unplaced",
    "mesh-unused",
    "replicated",
    "names-ignored",
    "policy-asked-little",
    "saved-in-vain",
    "rule-repeats",
    "peak-in-update",
    "offload-kept",
    "checks-left-out",
]


class Note(str):
    """A sentence that a reader of a report must see, and what it is about.

    ``kind`` says what is noted and ``about`` of what: names, functions, or of a value saved in vain its name and the
    primitive that makes it.
    """

    kind: NoteKind
    about: tuple[str, ...]

    def __new__(cls, kind: NoteKind, sentence: str, about: Iterable[str] = ()) -> Note:
        """A sentence of a kind."""
        note = super().__new__(cls, sentence)
        note.kind, note.about = kind, tuple(about)
        return note

    @property
    def text(self) -> str:
        """The sentence, as an ordinary string."""
        return str(self)

    def __reduce__(self) -> tuple[type[Note], tuple[NoteKind, str, tuple[str, ...]]]:
        """As ``pickle`` and ``copy`` ask."""
        return Note, (self.kind, str(self), self.about)


RecomputationKind = Literal["", "repeated", "deferred"]


@dataclass(frozen=True, slots=True)
class ProgramLine:
    """One line of a jaxpr's text.

    ``residuals`` pairs each variable on the line that is a residual with its index in ``Report.residuals``.
    ``primitive`` is that of the equation which starts on this line, else empty; ``equation`` numbers that equation
    within the program, so that lines of one equation belong together. ``operation`` numbers the operation of the
    function itself that the equation computes or differentiates: what has the same number in the forward and the
    backward program, or under another policy, belongs together. None where JAX keeps no trace of it.
    """

    text: str
    source: SourceSpan | None = None
    primitive: str = ""
    residuals: tuple[tuple[str, int], ...] = ()
    recomputation: RecomputationKind = ""
    path: tuple[str, ...] = ()
    equation: int | None = None
    operation: int | None = None
    library: SourceSpan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A jaxpr as text. ``"\\n".join(line.text for line in lines)`` is JAX's own pretty print to the byte.

    Most programs are never read: that of a live trace is laid out when its lines are first looked into. One that was
    pickled before has no lines, and is equal to any of as many equations; those of bodies that several calls share
    count once.
    """

    lines: tuple[ProgramLine, ...] = ()
    equations: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        textless = self.textless or other.textless
        return self.equations == other.equations and (textless or self.lines == other.lines)

    def __hash__(self) -> int:
        return hash(self.equations)

    @property
    def laid_out(self) -> bool:
        """Whether the lines are there already."""
        return not self.textless

    @property
    def textless(self) -> bool:
        """Whether nobody had looked into the lines when this was copied or pickled, so that they cannot be had."""
        return not self.lines and self.equations > 0

    @property
    def text(self) -> str:
        """The whole text.

        Raises:
            RematError: it is ``textless``.
        """
        if self.textless:
            raise RematError(TEXTLESS)
        return "\n".join(line.text for line in self.lines)


TEXTLESS = (
    "nobody had looked at this text when the report was pickled: ask for report.forward.text and report.backward.text "
    "before."
)


Kind = Literal["argument", "constant", "literal", "intermediate", "offloaded"]


@dataclass(frozen=True, slots=True)
class Origin:
    """One place where a residual's value is made.

    ``path`` names the enclosing loops and calls, outermost first, e.g. ``("scan x12", "block")``; ``times`` is how
    often the equation runs (the product of the enclosing trip counts), or None in a ``while`` loop, whose count is
    not known before it runs. ``argument`` is set where the value is (also) an argument of the function. ``library`` is
    the innermost frame in an installed package (JAX itself aside) where ``source`` called one, else None.
    """

    primitive: str
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    times: int | None = 1
    name: str | None = None
    argument: str | None = None
    library: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """One operation of the backward pass that reads a residual.

    ``primitive`` is the reading operation itself ("mul"); ``derivative_of`` the forward operation that is being
    differentiated there ("sin"), empty where JAX keeps no trace of it. ``recomputation`` tells a reader that computes
    a forward value again from one that does the gradient's own work; ``gradient_of`` names the arguments whose
    gradient what it makes is, or is summed up to.
    """

    primitive: str
    derivative_of: str = ""
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    recomputation: bool = False
    gradient_of: str = ""

    def __str__(self) -> str:
        """One sentence fragment: "backward of sin, line 6"."""
        return self.text(f"line {self.source.line}" if self.source else "")

    def text(self, place: str) -> str:
        """The same with ``place`` for the line, such as "In[3]:6"; empty names none."""
        at = f", {place}" if place else ""
        if self.gradient_of:
            return f"gradient of `{self.gradient_of}`{at}"
        called = self.source.called if self.source else ""  # by the user, who may not know the operation
        what = called or self.derivative_of or self.primitive
        if self.recomputation and self.derivative_of in ("", self.primitive):
            return f"computing {what} again{at}"
        return f"backward of {what}{at}"


@dataclass(frozen=True, slots=True)
class Residual:
    """A value saved for the backward pass.

    ``dtype`` is JAX's short form ("f32", "bf16", "key<fry>"), ``shape`` the residual's own shape, so that a value
    stacked by a scan has its leading length; ``nbytes`` is what one device holds of it. On a mesh ``sharding`` is the
    type as JAX writes it, ``f32[1024@data,64]`` (empty where it is not known), ``shard_shape`` the shape of what one
    device holds, and ``replicated`` tells that every device holds all of it. ``primitive``, ``source``, ``library``,
    ``path`` and ``times`` are those of the first origin.
    ``memory_space`` is "" for the device's own memory, else JAX's name for it ("host"). ``unread``: JAX lists it, and
    no gradient depends on it (the zeros of a relu), so that a compiled program drops it.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: Kind
    primitive: str = ""
    name: str | None = None
    argument: str | None = None
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    times: int | None = 1
    needed_by: tuple[Reader, ...] = ()
    origins: tuple[Origin, ...] = ()
    memory_space: str = ""
    library: SourceSpan | None = None
    unread: bool = False
    sharding: str = ""
    shard_shape: tuple[int, ...] | None = None
    replicated: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of what one device holds: ``shard_shape`` where there is one, else ``shape``."""
        return self.shape if self.shard_shape is None else self.shard_shape

    @property
    def kept(self) -> bool:
        """Whether it is an intermediate that takes memory for the backward pass, the device's or another."""
        return self.kind in ("intermediate", "offloaded") and not self.unread

    @property
    def dropped(self) -> bool:
        """Whether it is an intermediate that nothing reads."""
        return self.kind in ("intermediate", "offloaded") and self.unread

    @property
    def type(self) -> str:
        """The type as JAX writes it, ``f32[5,4]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Unit = Literal["matmul", "vector"]


@dataclass(frozen=True, slots=True)
class Equation:
    """One operation that the backward pass recomputes.

    ``repeated`` operations also ran in the forward pass; the others were deferred: they run only now. ``flops`` and
    ``bytes`` are for all ``times`` runs together, None where no formula covers the operation. Where ``times`` is None,
    in a ``while`` loop whose trip count is not known, they are what it takes at least: of one turn. ``outputs`` are
    types as JAX writes them. ``branches`` has an entry for each conditional around it, outermost first: the number of
    the conditional in the function, which of those that were made of it this is, and the branch. One branch of each
    runs: ``dearest`` tells what to add up.

    Of a collective in a ``shard_map`` or ``pmap``, ``communicated_bytes`` are those of the results that one device has,
    all ``times`` runs together, as ``Measurement.collectives`` counts them in the compiled program; ``sent_bytes`` what
    it sends for them at least, if parts go around in a ring. ``collective`` is what XLA calls it (``all-gather``), and
    ``over`` names the axes of the mesh that it is along.
    """

    primitive: str
    outputs: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None
    times: int | None = 1
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    repeated: bool = True
    name: str | None = None
    library: SourceSpan | None = None
    branches: tuple[tuple[int, int, int], ...] = ()
    communicated_bytes: int = 0
    sent_bytes: int = 0
    collective: str = ""
    over: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether its cost is known, and not just what it is at least."""
        return self.flops is not None and self.times is not None


class _InBranches(Protocol):
    @property
    def flops(self) -> int | None: ...
    @property
    def branches(self) -> tuple[tuple[int, int, int], ...]: ...


_E = TypeVar("_E", bound=_InBranches)


def dearest(equations: Iterable[_E], depth: int = 0) -> list[_E]:
    """Those of some operations that run if every conditional takes the branch in which they cost most FLOPs.

    All sums of recomputed operations are of these, since a conditional runs one of its branches.
    """
    running: list[_E] = []
    conditionals: dict[tuple[int, int], dict[int, list[_E]]] = {}
    for equation in equations:
        if len(equation.branches) == depth:
            running.append(equation)
        else:
            number, copy, branch = equation.branches[depth]
            conditionals.setdefault((number, copy), {}).setdefault(branch, []).append(equation)
    for branches in conditionals.values():
        running += max((dearest(branch, depth + 1) for branch in branches.values()), key=total_flops)
    return running


def total_flops(equations: Iterable[_InBranches]) -> int:
    """The FLOPs of those operations whose cost is known."""
    return sum(equation.flops or 0 for equation in equations)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel does: a matmul, or a chain of operations that XLA would fuse.

    ``flops`` (None where no formula covers an operation) and ``bytes``, to and from the device's memory, are of one
    run. It runs ``times`` times, equal kernels taken together; None in a loop whose trip count is not known, and
    ``turns`` is then how often it runs if each such loop runs once. ``dtype`` is JAX's short form of what is computed
    with, ``unit`` what computes it: ``matmul`` for matrix units, else ``vector``. ``sent`` are the bytes that a
    collective in a ``shard_map`` or ``pmap`` sends to other devices in one run, at least (a ring's). All that XLA
    inserts into a half with automatic sharding is one kernel, which is ``inserted``, with the bytes of all results.
    """

    flops: int | None
    bytes: int
    dtype: str
    unit: Unit
    times: int | None = 1
    turns: int = 1
    sent: int = 0
    inserted: bool = False

    @property
    def known(self) -> bool:
        """Whether nothing of it is unknown."""
        return self.flops is not None and self.times is not None

    @property
    def runs(self) -> int:
        """How often it runs, at least where ``times`` is not known."""
        return self.turns if self.times is None else self.times

    def often(self, times: int | None) -> Kernel:
        """The same in a loop that runs so many times."""
        runs = self.runs * (1 if times is None else times)
        unknown = times is None or self.times is None
        return dataclasses.replace(self, times=None if unknown else runs, turns=runs if unknown else 1)


@dataclass(frozen=True, slots=True, repr=False)
class Report(Displayed, Labelled):
    """What one policy does at one place.

    A report of the forward half alone (``complete`` is False) has the residuals without ``needed_by``, no backward
    program and nothing recomputed. ``backward_error`` is a sentence where the function has a forward half but no
    backward one (a dynamic ``while_loop``). ``notes`` are sentences the reader must see (stale traces, unknowns).
    ``sources`` is the user's own text that the program was traced from, the same in every report of one trace.
    ``peak_low`` and ``peak_high`` are the range in which what XLA needs is to be expected, on the report's
    device; of none both are ``peak_bytes``. ``peak_by_kind`` has the bytes that are live at the estimated peak by their
    kind (``LiveValue.kind``), which add up to ``peak_bytes``.
    ``devices`` tells how many share the work. All bytes and FLOPs are of one of them; of all together where not
    ``per_device``, since XLA alone decides how intermediates are spread (automatic sharding).
    ``forward_communicated_bytes`` and ``backward_communicated_bytes`` are those of the results of collectives that one
    device has: with automatic sharding of all that XLA has in each half, compiled by itself, None where that is not
    known; else of those that the program names in a ``shard_map`` or ``pmap``.
    """

    policy: str
    at: str
    residuals: tuple[Residual, ...] = ()
    recomputed: tuple[Equation, ...] = ()
    forward: Program = dataclasses.field(default=Program())
    backward: Program = dataclasses.field(default=Program())
    sites: tuple[Site, ...] = ()
    names: tuple[str, ...] = ()
    code: str = ""
    function: str = ""
    signature: str = ""
    wrt: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    forward_flops: int | None = None
    backward_flops: int | None = None
    peak_bytes: int | None = None
    peak_low: int | None = None
    peak_high: int | None = None
    uncosted: tuple[str, ...] = ()
    complete: bool = True
    backward_error: str = ""
    forward_kernels: tuple[Kernel, ...] = ()
    backward_kernels: tuple[Kernel, ...] = ()
    recomputed_kernels: tuple[Kernel, ...] = ()
    sources: tuple[SourceText, ...] = ()
    label: str = ""
    peak_by_kind: tuple[tuple[str, int], ...] = ()
    devices: int = 1
    per_device: bool = True
    forward_communicated_bytes: int | None = 0
    backward_communicated_bytes: int | None = 0

    @property
    def of_devices(self) -> str:
        """Whose the figures are where several devices share the work: "of one of 8 devices"; empty for one."""
        if self.devices == 1:
            return ""
        return f"of one of {self.devices} devices" if self.per_device else f"of all {self.devices} devices together"

    @property
    def together(self) -> int:
        """``saved_bytes`` of all devices together, with each copy of what several hold."""
        return self.saved_bytes * (self.devices if self.per_device else 1)

    @property
    def in_update(self) -> str:
        """The note that the peak is in what a training step does after its gradient; empty where it is not there."""
        return next((note for note in self.notes if note.kind == "peak-in-update"), "")

    def save_html(self, path: str | os.PathLike[str], others: Iterable[Report] = ()) -> None:
        """Write the report, both programs in full, as one HTML file that needs neither scripts nor a network.

        Args:
            path: the file, replaced if it is there.
            others: reports of the same function under other policies, whose figures stand beside it.

        Raises:
            RematError: the file cannot be written.
        """
        write(path, display().page_html(self, others))

    def _bytes_of(self, *kinds: Kind) -> int:
        return sum(residual.nbytes for residual in self.residuals if residual.kind in kinds and not residual.dropped)

    @property
    def saved_bytes(self) -> int:
        """Bytes of intermediates saved on the device: the memory that the policy costs.

        What nothing reads is dropped once the program is compiled. A report of the forward half alone cannot tell,
        and counts it.
        """
        return self._bytes_of("intermediate")

    @property
    def unread_bytes(self) -> int:
        """Bytes of intermediates that JAX lists and nothing reads: in no memory, nor in ``peak_bytes``."""
        return sum(residual.nbytes for residual in self.residuals if residual.dropped)

    @property
    def argument_bytes(self) -> int:
        """Bytes of residuals that are arguments, which are alive anyway."""
        return self._bytes_of("argument")

    @property
    def constant_bytes(self) -> int:
        """Bytes of residuals that the function captured from outside, literals included."""
        return self._bytes_of("constant", "literal")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of intermediates moved to another memory."""
        return self._bytes_of("offloaded")

    @property
    def repeated(self) -> tuple[Equation, ...]:
        """The operations that ran forward and run again."""
        return tuple(equation for equation in self.recomputed if equation.repeated)

    @property
    def deferred(self) -> tuple[Equation, ...]:
        """The operations that run only in the backward pass (the cos of a sin)."""
        return tuple(equation for equation in self.recomputed if not equation.repeated)

    @property
    def repeated_flops(self) -> int:
        """FLOPs of the repeated operations whose cost is known; the others are in ``uncosted``.

        Of a conditional, the branch counts that recomputes most.
        """
        return total_flops(equation for equation in dearest(self.recomputed) if equation.repeated)

    @property
    def deferred_flops(self) -> int:
        """FLOPs of the deferred operations whose cost is known."""
        return total_flops(equation for equation in dearest(self.recomputed) if not equation.repeated)

    @property
    def communicated_bytes(self) -> int | None:
        """``forward_communicated_bytes + backward_communicated_bytes``; None where one is not known."""
        forward, backward = self.forward_communicated_bytes, self.backward_communicated_bytes
        return None if forward is None or backward is None else forward + backward

    @property
    def repeated_communicated_bytes(self) -> int:
        """What one device has of the results of collectives that ran forward and run again, in bytes.

        Counted as in ``Measurement.communicated_bytes``, of the collectives that the program names in a ``shard_map``
        or ``pmap``: those that XLA inserts elsewhere are in the compiled program only.
        """
        return sum(equation.communicated_bytes for equation in dearest(self.recomputed) if equation.repeated)

    @property
    def recomputed_flops(self) -> int:
        """``repeated_flops + deferred_flops``."""
        return total_flops(dearest(self.recomputed))
