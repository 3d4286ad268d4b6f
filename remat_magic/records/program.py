"""Jaxprs as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat_magic.errors import RematError
from remat_magic.records.source import SourceSpan

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
