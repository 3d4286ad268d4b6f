"""Places in a program where a checkpoint is, or could be."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class Site:
    """A place where ``jax.checkpoint`` is applied, or could be; calls of one function at one place are one site.

    ``policy`` is the policy as written: a choice's key where it is one of JAX's, else the callable's own name.
    ``possible`` tells that there is no checkpoint; ``code`` is then what to write for one that saves nothing.
    """

    key: str
    function: str
    times: int
    policy: str
    source: SourceSpan | None = None
    possible: bool = False
    code: str = ""
