"""What can be done: an edit of the user's own source that applies a plan, other budgets, single values, advice."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.plan import Plan, PlannedValue
from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class FileEdit:
    """The text of one file or notebook cell, as it is (``old``) and as it is to be (``new``).

    ``cell`` is the ``n`` of the notebook's ``In[n]``, or None for a file.
    """

    file: str
    cell: int | None
    old: str
    new: str

    @property
    def label(self) -> str:
        """What to call it: ``In[3]``, or the file's path, from the working directory where it lies in there."""
        if self.cell is not None:
            return f"In[{self.cell}]"
        short = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        return self.file if short.startswith("..") else short

    def diff(self) -> str:
        """A unified diff, as ``patch -p0`` takes it; empty where nothing changes."""
        lines = difflib.unified_diff(_lines(self.old), _lines(self.new), self.label, self.label)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True, slots=True)
class EditedName:
    """A checkpoint name that the edit saves.

    ``expression`` is the user's text that it stands at, ``values`` how many values of the program it then names.
    ``existing`` names were in the source already.
    """

    name: str
    expression: str = ""
    source: SourceSpan | None = None
    values: int = 1
    existing: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Edit(Displayed, Labelled):
    """An edit of the user's source, with what JAX does with the edited text.

    ``files`` are all the texts that change, ``names`` what the policy at ``at`` saves by name. ``unnamed`` says in a
    sentence each which values have no name, or why nothing is edited. ``verified`` is True where the edited text,
    executed apart from the user's session and traced with the same arguments, has the residuals of the plan (as a
    multiset of types) and saves as many bytes; where it is not, ``differences`` says what differs.
    ``saved_bytes`` and ``recomputed_flops`` are of the edited text, None where it could not be traced; the ``planned``
    ones of the plan. ``closest`` is another edit, which is verified for the plan that it is made for: the nearest that
    an edit can write, within the same budget; None where this one is verified, or where there is none. ``budget_bytes``
    is the plan's budget, of bytes "saved" or of the estimated "peak" as ``of`` says, which is as on ``peak_device``;
    None where none was given. ``excess_bytes`` tells by how much the edited text exceeds it. ``plan`` is the plan
    that it is verified for, None where that is a policy.
    """

    function: str
    at: str
    policy: str
    files: tuple[FileEdit, ...] = ()
    names: tuple[EditedName, ...] = ()
    unnamed: tuple[str, ...] = ()
    verified: bool = False
    differences: tuple[str, ...] = ()
    saved_bytes: int | None = None
    recomputed_flops: int | None = None
    planned_bytes: int = 0
    planned_flops: int = 0
    closest: Edit | None = None
    label: str = ""
    budget_bytes: int | None = None
    of: str = "saved"
    peak_bytes: int | None = None
    peak_device: str = ""
    plan: Plan | None = field(default=None, compare=False)

    @property
    def excess_bytes(self) -> int | None:
        """How many bytes more than the plan's budget the edited text takes; None where one of the two is not known."""
        edit_bytes = self.peak_bytes if self.of == "peak" else self.saved_bytes
        return None if self.budget_bytes is None or edit_bytes is None else max(0, edit_bytes - self.budget_bytes)

    @property
    def best(self) -> Edit:
        """The edit itself, or the closest one where it does not do what is chosen."""
        return self.closest or self

    @property
    def budget_text(self) -> str:
        """What ``budget_bytes`` are of."""
        there = f" on {self.peak_device}" if self.peak_device else ""
        return f"estimated peak{there}" if self.of == "peak" else "saved bytes"

    def diff(self) -> str:
        """The unified diffs of all files and cells of the ``best`` edit, one after another.

        Where that is another than this one, or is not verified, a comment above it says so; where it does not keep to
        its budget, in its place.
        """
        best = self.best
        if best is not self:
            nearest = best.label
            if f" at {best.at}" not in nearest:
                nearest += f" at {best.at}"
            return f"# No edit does exactly this. The nearest one: {nearest}.\n{best.diff()}"
        why = " ".join(best.differences[:1] or best.unnamed[:1])
        if best.excess_bytes or (best.budget_bytes is not None and best.excess_bytes is None and not best.verified):
            budget = f"{best.budget_bytes:,} bytes of {best.budget_text}".replace("bytes of saved", "saved")
            return f"# There is no edit of the source that was verified to keep to {budget}: {why}\n"
        text = "".join(file.diff() for file in best.files)
        return f"# This edit was not verified: {why}\n{text}" if text and why and not best.verified else text

    def apply_text(self, place: int | str | None = None) -> str:
        """The full new text of a file or cell in the ``best`` edit.

        Args:
            place: the number of a cell, or a file's path as in ``files``; None for the only one.

        Raises:
            RematError: the edit changes no such file, or several and none was chosen.
        """
        files = self.best.files
        if place is None and len(files) == 1:
            return files[0].new
        for file in files:
            if place is not None and place in (file.cell, file.file, file.label):
                return file.new
        has = ", ".join(file.label for file in files) or "nothing"
        which = "choose one of them" if place is None and files else f"it has no text for {place!r}"
        raise RematError(f"the edit changes {has}: {which}.")


def _lines(text: str) -> list[str]:
    # Not str.splitlines, which also splits at form feeds and the like.
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


@dataclass(frozen=True, slots=True)
class Advice:
    """Something about a policy, or about the program, that costs memory or has no effect, and how to mend it.

    ``kind`` names the rule, ``sentence`` says what is wrong and where, ``mend`` what to do. ``figure`` is what the mend
    changes in ``unit``, None where that is not known. ``source`` is the line that ``sentence`` speaks of. ``policy`` at
    ``at`` is what to try, where one policy mends it, ``code`` the part of ``mend`` that is code to paste; empty where
    it is in words.

    ``stake`` are the bytes, saved or held at the peak, that it speaks of, None where that is not known. ``share`` is
    what part of the estimated peak these are, or of all FLOPs the ``figure`` is, whichever is more: what has more at
    stake is said first.
    """

    kind: str
    sentence: str
    mend: str
    figure: int | None = None
    unit: Literal["", "bytes", "FLOPs"] = ""
    source: SourceSpan | None = None
    policy: str = ""
    at: str = ""
    stake: int | None = None
    share: float = 0.0
    code: str = ""

    def __post_init__(self) -> None:
        """What is at stake are the bytes of the figure, where it is in bytes and nothing else is said."""
        if self.stake is None and self.unit == "bytes":
            object.__setattr__(self, "stake", self.figure)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON: bytes and FLOPs as numbers, None where unknown."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What it would change to save one recomputed value, or to recompute one that is saved, and nothing else.

    ``saved_bytes`` and ``recomputed_flops`` are the report of ``plan`` less the one of ``against``, exact in
    bytes and FLOPs; ``seconds`` is the estimated difference on ``device``, None where no device is known. ``against``
    is the choice as it was: the policy's key, the plan, or for a policy object a plan that does the same. Where the
    policy keeps what no name does (the cosine of a sine), each row gives that up besides, and says what it comes to.
    """

    change: Literal["save", "recompute"]
    value: PlannedValue
    saved_bytes: int
    recomputed_flops: int
    seconds: float | None
    device: str
    plan: Plan
    against: str | Plan

    @property
    def loses(self) -> bool:
        """Whether it makes something worse and nothing better: bytes saved, FLOPs recomputed, or time."""
        changes = self.saved_bytes, self.recomputed_flops, self.seconds or 0.0
        return max(changes) > 0 and min(changes) >= 0

    @property
    def flops_per_byte(self) -> float:
        """The FLOPs that each byte of the value spares: infinite where it takes none."""
        return _ratio(-self.recomputed_flops, self.saved_bytes)


def _ratio(spared_flops: float, saved_bytes: int) -> float:
    """Spared for each byte taken, of a change or of its reverse."""
    if saved_bytes == 0:
        return math.copysign(math.inf, spared_flops) if spared_flops else 0.0
    # To save it spares something and takes bytes; to recompute it is the reverse of both. What is good, or bad, in both
    # ways at once is no exchange.
    if spared_flops and (spared_flops > 0) != (saved_bytes > 0):
        return math.inf if spared_flops > 0 else -math.inf
    return spared_flops / saved_bytes
