"""Jaxprs as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from remat_magic.records.later import Later
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


@dataclass(frozen=True, slots=True)
class Program(Later):
    """A jaxpr as text. ``"\\n".join(line.text for line in lines)`` is JAX's own pretty print to the byte.

    Most programs are never read, so that one made with ``later`` is laid out when its lines are first looked into. How
    many equations it has, of bodies that several calls share once, is known before.
    """

    lines: tuple[ProgramLine, ...] = ()
    equations: int = 0

    @classmethod
    def later(cls, lay_out: Callable[[], Program], equations: int) -> Program:
        """The program of so many equations that ``lay_out`` gives, which is called at most once to the end."""
        program = cls.__new__(cls)
        object.__setattr__(program, "_work_out", lay_out)
        object.__setattr__(program, "equations", equations)
        return program

    @property
    def laid_out(self) -> bool:
        """Whether the lines are there already."""
        return not hasattr(self, "_work_out")

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(line.text for line in self.lines)
