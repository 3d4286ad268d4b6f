"""What each line of the user's source saves and has computed again, and each of its expressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from remat_magic.records import Equation, Report, Residual, SourceSpan, dearest
from remat_magic.views import format as fmt
from remat_magic.views.linking import expression_key

_Key = TypeVar("_Key")

# Longer lists say how many more there are.
_KINDS_SHOWN = 8


@dataclass(slots=True)
class Attribution:
    """The residuals, offloaded ones included, and recomputed operations of one place; ``source`` is the first one's."""

    source: SourceSpan | None
    residuals: list[Residual] = field(default_factory=list[Residual])
    equations: list[Equation] = field(default_factory=list[Equation])

    @property
    def saved(self) -> int:
        """Bytes of all residuals."""
        return sum(residual.nbytes for residual in self.residuals)

    @property
    def flops(self) -> int | None:
        """FLOPs of the operations whose cost is known; None where there are some, and none is known."""
        costs = [equation.flops for equation in dearest(self.equations) if equation.flops is not None]
        return sum(costs) if costs or not self.equations else None

    @property
    def saves(self) -> str:
        """What is saved, for hovers: ``24,000 bytes: f32[6,1000] sin "a", f32[5] cos x2``."""
        kinds = (
            " ".join(filter(None, [residual.type, residual.primitive, residual.name and f'"{residual.name}"',
                                   "offloaded" if residual.kind == "offloaded" else ""]))
            for residual in self.residuals
        )  # fmt: skip
        return f"{fmt.exact(self.saved, 'bytes')}: {_counted(kinds)}" if self.residuals else ""

    @property
    def repeats(self) -> str:
        """What is computed again, for hovers: ``80 FLOPs: dot_general repeated x2, cos deferred (cost unknown)``."""
        kinds = (
            " ".join(filter(None, [equation.primitive, "repeated" if equation.repeated else "deferred",
                                   f"({fmt.nbytes(equation.communicated_bytes)} over {' and '.join(equation.over)})"
                                   if equation.communicated_bytes else "",
                                   "(cost unknown)" if equation.flops is None else "",
                                   "(at least)" if equation.flops and equation.times is None else ""]))
            for equation in self.equations
        )  # fmt: skip
        flops = fmt.flops(None) if self.flops is None else fmt.exact(self.flops, "FLOPs")
        return f"{flops}: {_counted(kinds)}" if self.equations else ""


def _counted(kinds: Iterable[str]) -> str:
    counts = Counter(kinds)
    shown = [f"{kind} x{count}" if count > 1 else kind for kind, count in list(counts.items())[:_KINDS_SHOWN]]
    not_shown = len(counts) - len(shown)
    return ", ".join([*shown, f"and {not_shown} more"] if not_shown else shown)


def line_rows(report: Report) -> list[Attribution]:
    """The lines that save or recompute anything, in the order of the source.

    A value that several expressions can have made counts once, for the first of them.
    """
    by_line = _attributed(report, _key)
    return [by_line[key] for key in sorted(by_line)]


def _attributed(report: Report, key: Callable[[SourceSpan | None], _Key]) -> dict[_Key, Attribution]:
    """What is saved and recomputed by its place, as ``key`` tells places apart."""
    by_key: dict[_Key, Attribution] = {}
    for residual in report.residuals:
        if residual.kept:
            by_key.setdefault(key(residual.source), Attribution(residual.source)).residuals.append(residual)
    for equation in report.recomputed:
        by_key.setdefault(key(equation.source), Attribution(equation.source)).equations.append(equation)
    return by_key


def _key(span: SourceSpan | None) -> tuple[int, str, int, int]:
    """Cells in their order, then files, then what has no line."""
    if span is None:
        return (2, "", 0, 0)
    return (0, "", span.cell, span.line) if span.cell is not None else (1, span.file, 0, span.line)


def expressions(report: Report) -> list[Attribution]:
    """The expressions that save or recompute anything, each once, in the order of the report."""
    by_key = _attributed(report, lambda span: "" if span is None else expression_key(span))
    return [attribution for attribution in by_key.values() if attribution.source is not None]
