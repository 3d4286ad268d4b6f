"""Sentences that a reader must see, and what they are about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

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
    "no-gain",
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
