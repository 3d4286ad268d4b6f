"""The rows of the table of policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a policy factory: its name, what it takes ("names", "memory", "policy") and its default."""

    name: str
    takes: Literal["names", "memory", "policy"]
    default: str | None = None


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
    parameters: tuple[Parameter, ...] = ()
    aliases: tuple[str, ...] = ()
