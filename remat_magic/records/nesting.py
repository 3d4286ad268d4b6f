"""What a scan saves as it stands, and what it would save with its steps nested under checkpoints: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remat_magic.records.source import SourceSpan

__all__ = ["Loop", "Nesting"]


@dataclass(frozen=True, slots=True)
class Nesting:
    """What the whole function saves and recomputes if one scan of it is run in one way.

    ``saved_bytes``, ``recomputed_flops`` and ``peak_bytes`` are those of the report of the function so changed.
    ``view_bytes`` of the saved bytes are scanned inputs, saved in the shape that the nesting gives them, which takes no
    memory of its own where XLA reshapes in place. ``working_bytes`` are what the levels below save besides while one
    innermost segment is differentiated. ``segment`` is the number of steps of an innermost segment, ``levels`` how many
    scans are nested. ``code`` is Python to paste, empty for the scan as it stands.
    """

    kind: Literal["as_written", "segments", "halves"]
    segment: int
    levels: int
    saved_bytes: int
    view_bytes: int
    working_bytes: int
    recomputed_flops: int
    peak_bytes: int | None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan of ``length`` steps, as it stands and nested; ``times`` is how often it runs, None where not known.

    ``function`` is the body's name, ``carry_bytes`` what one carry has. ``error`` says in a sentence why there is no
    ``nested``.
    """

    function: str
    length: int
    carry_bytes: int
    source: SourceSpan | None
    path: tuple[str, ...]
    times: int | None
    as_written: Nesting
    nested: tuple[Nesting, ...] = ()
    error: str = ""
