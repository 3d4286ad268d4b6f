"""The gradients that a function takes inside, as a training step does."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class GradientCall:
    """One function that a step differentiates inside, by ``jax.grad``, ``value_and_grad``, ``vjp`` or their like.

    ``key`` tells it from the others (``gradient=`` takes it); ``function`` is its own name, ``source`` the line of its
    definition. ``path`` holds the loops and calls around the first call, outermost first; ``times`` is how often it
    runs in one step (None: in a loop of unknown length). ``wrt`` says what is differentiated, in its own argument
    names.
    """

    key: str
    function: str
    source: SourceSpan | None
    path: tuple[str, ...]
    times: int | None
    wrt: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it is defined and how often it runs: ``line 12, x5``; empty where neither is worth saying."""
        parts = [self.source.place] if self.source else []
        if self.times != 1:
            parts.append("a loop of unknown length" if self.times is None else f"x{self.times}")
        return ", ".join(parts)
