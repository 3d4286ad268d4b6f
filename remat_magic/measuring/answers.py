"""What measuring says where it names a choice, is given up, or fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_magic import wording
from remat_magic.facts.facts import Facts
from remat_magic.records import Collective, RematError

__all__ = ["Stopped", "collectives_of", "failure", "place_of", "text_of"]


class Stopped(Exception):  # noqa: N818 - nothing is wrong: somebody asked for it
    """A measurement was given up between two of its steps."""


def text_of(policy: Any) -> str:
    """What to call a policy before it is resolved."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def place_of(facts: Facts, at: Any) -> str:
    """What to call a place before it is resolved; a mapping has no name."""
    return at if isinstance(at, str) else facts.engine.default_at if at is None else ""


def failure(doing: str, error: BaseException) -> str:
    """One sentence on what failed."""
    if isinstance(error, RematError):
        return str(error)
    text = wording.one_line(wording.text_of(error), 4000)
    if "RESOURCE_EXHAUSTED" in text or "ut of memory" in text or isinstance(error, MemoryError):
        return f"out of memory: the device could not {doing}; choose a policy that saves less, or smaller inputs."
    first = text.split(". ")[0].rstrip(".")
    return f"JAX could not {doing}: {type(error).__name__}: {first[:400]}."


def collectives_of(by_kind: Mapping[str, tuple[int, int]] | None) -> tuple[Collective, ...] | None:
    """What a compiled program communicates, from how often and how much of each kind; None where that is unknown."""
    return None if by_kind is None else tuple(Collective(kind, *counts) for kind, counts in sorted(by_kind.items()))
