"""Whether a step fits a device's memory, and what would make it fit: plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from remat_magic.records.base import Displayed, display
from remat_magic.records.measurement import Progress
from remat_magic.records.plan import Plan
from remat_magic.records.report import Report
from remat_magic.records.timeline import Timeline

_HARDLY = 0.02  # of a peak, and of the step's time: estimates tell no finer difference, and a reader asks for none

_ALIKE = ", from which it hardly differs"


def microbatches_in(at: str) -> int:
    """In how many microbatches a gradient is taken, by the key of a place or of several."""
    found = re.search(r"(?:^|, )(?:batch|microbatches) in (\d+)(?:=|$)", at)
    return int(found[1]) if found else 1


def by_hand(at: str) -> bool:
    """Whether no edit writes a place, or one of several: what is in parts but a vmap, some calls, several together."""
    return re.search(r"(?:^|, )(?!vmap\()[^=]*?(?:\[[-\d:]*:[-\d:]*\]|/\d+| in \d+)(?:=|$)", at) is not None


@dataclass(frozen=True, slots=True, repr=False)
class FitChoice(Displayed):
    """One change of what is in memory, and what that takes; it stands wherever a policy can.

    ``what`` is one line, such as "@jax.checkpoint on block". ``policy`` at ``at`` is what it is to ``trace.report``;
    ``plan`` is its plan, None where it is none. ``donate`` are the names of the arguments that are donated besides:
    the caller may not use them after the call.

    ``needed_bytes`` is the peak of device memory: XLA's own figure where ``compiled``, else the estimate, which then
    lies between ``needed_low`` and ``needed_high`` for most programs. ``fits`` is None where that range holds the
    capacity. ``saved_bytes`` are those of the report.

    ``extra_seconds`` is the estimated time that it adds to the step as written, negative where less is repeated, None
    where no device is known. ``extra_time`` is that as a share of the step's time, ``extra_flops`` the FLOPs that it
    adds as a share of the step's FLOPs as written.

    ``code`` is what to write, empty where nothing is to be written. ``beaten_by`` begins with the ``what`` of another
    that needs no more and takes less time, or hardly differs in both and is simpler; ``unusable`` is one sentence on
    why it can be no answer (its edit cannot be written, JAX cannot trace it); both are empty on the front. ``idle``
    says of parts that their largest product has fewer rows than a tile of the device; else it is empty.
    """

    what: str
    policy: str
    at: str
    needed_bytes: int | None
    needed_low: int | None
    needed_high: int | None
    fits: bool | None
    compiled: bool = False
    extra_seconds: float | None = None
    extra_time: float | None = None
    extra_flops: float | None = None
    saved_bytes: int | None = None
    code: str = ""
    donate: tuple[str, ...] = ()
    plan: Plan | None = field(default=None, compare=False)
    beaten_by: str = ""
    unusable: str = ""
    idle: str = ""

    def as_compiled(self, needed_bytes: int | None, fits: bool | None, error: str) -> FitChoice:
        """The same choice by XLA's word; it is no answer where XLA could not compile it."""
        if needed_bytes is None or fits is None:
            return replace(self, unusable=error)
        needed: dict[str, Any] = dict.fromkeys(("needed_bytes", "needed_low", "needed_high"), needed_bytes)
        return replace(self, **needed, fits=fits, compiled=True)

    def within(self, capacity_bytes: int) -> FitChoice:
        """The same choice, for other ``capacity_bytes``."""
        if self.needed_bytes is None or self.needed_low is None or self.needed_high is None:
            return replace(self, fits=None)
        low, high = (self.needed_bytes,) * 2 if self.compiled else (self.needed_low, self.needed_high)
        return replace(self, fits=high <= capacity_bytes or (None if low <= capacity_bytes else False))

    @property
    def alike(self) -> str:
        """The ``what`` of a simpler choice from which this one hardly differs; empty where there is none."""
        return self.beaten_by.removesuffix(_ALIKE) if self.beaten_by.endswith(_ALIKE) else ""

    @property
    def chosen(self) -> tuple[Plan | str, str]:
        """The plan, or the key of the policy, and its place."""
        return self.plan or self.policy, self.at

    @property
    def key(self) -> str:
        """What tells it from the other choices at its place: its policy, with what is donated besides."""
        return f"{self.policy} donate({', '.join(self.donate)})" if self.donate else self.policy

    @property
    def which(self) -> tuple[str, str]:
        """What tells it from all other choices."""
        return self.key, self.at

    @property
    def by_hand(self) -> bool:
        """Whether no edit writes it, and ``code`` is to be written by hand: of what is in parts, and of some calls."""
        return by_hand(self.at)

    @property
    def caution(self) -> str:
        """What the caller must heed; empty where there is nothing."""
        lost = f"The caller may not use {', '.join(self.donate)} after the call." if self.donate else ""
        return " ".join(filter(None, (lost, self.idle)))

    @property
    def cost(self) -> tuple[float, float, int]:
        """What choices are ordered by: the time that they add (FLOPs where no device is known), then microbatches."""
        flops = float("inf") if self.extra_flops is None else self.extra_flops
        return (flops if self.extra_seconds is None else self.extra_seconds, flops, microbatches_in(self.at))


@dataclass(frozen=True, slots=True, repr=False)
class Fit(Displayed):
    """Whether a function fits a device as it is written, and what to change; see ``trace.fit``.

    ``device`` is the device's name, empty where only bytes were given. ``as_written`` is the program as it is.
    ``tried`` are all choices that were looked at, each program once: those that fit come first, the least extra time
    leading, then those that may fit, then the others by what they need. ``not_tried`` are sentences on what was left
    out. ``largest_batch`` is the batch that would fit as written, None where no batch is found. ``progress`` tells how
    far the search is. ``report`` and ``timeline`` are those of the program as written, on the device: what takes its
    memory, and what a reader must know besides.
    """

    function: str
    device: str
    capacity_bytes: int
    as_written: FitChoice
    tried: tuple[FitChoice, ...] = ()
    not_tried: tuple[str, ...] = ()
    largest_batch: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    report: Report | None = field(default=None, compare=False)
    timeline: Timeline | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """The answer in 40 lines."""
        return display().text(self).rstrip("\n")

    @property
    def needed_bytes(self) -> int | None:
        """What the program needs as written."""
        return self.as_written.needed_bytes

    @property
    def needed_low(self) -> int | None:
        """The lower end of the range of the estimate, or the same as ``needed_bytes`` where XLA has compiled it."""
        return self.as_written.needed_low

    @property
    def needed_high(self) -> int | None:
        """The upper end of that range."""
        return self.as_written.needed_high

    @property
    def compiled(self) -> bool:
        """Whether XLA's compiler for the device said what the program needs as written."""
        return self.as_written.compiled

    @property
    def fits(self) -> bool | None:
        """Whether it fits as written: None where the estimate's range holds the capacity, and nothing was compiled."""
        return self.as_written.fits

    @property
    def choices(self) -> tuple[FitChoice, ...]:
        """The front: those that can be used, and that no other choice beats."""
        return tuple(choice for choice in self.tried if not choice.beaten_by and not choice.unusable)

    @property
    def best(self) -> FitChoice | None:
        """The cheapest choice that fits, or None; what an edit writes comes before what is written by hand."""
        return min((choice for choice in self.choices if choice.fits), key=lambda choice: choice.by_hand, default=None)

    @property
    def nearest(self) -> FitChoice | None:
        """Of the choices on the front, the one that needs least."""
        known = (choice for choice in self.choices if choice.needed_bytes is not None)
        return min(known, key=lambda choice: choice.needed_bytes or 0, default=None)

    def by_compiler(
        self, answers: Mapping[tuple[str, str], FitChoice], progress: Progress, *, all_asked: bool = False
    ) -> Self:
        """The same with the choices that XLA has compiled, by ``which`` they are, in order again.

        Once ``all_asked`` are, what it was not asked about may fit at most.
        """
        choices = [answers.get(choice.which, choice) for choice in self.tried]
        if all_asked:
            choices = [replace(choice, fits=choice.fits and (choice.compiled or None)) for choice in choices]
        written = answers.get(self.as_written.which, self.as_written)
        return replace(self, as_written=written, tried=ordered(choices), progress=progress)


def ordered(choices: Iterable[FitChoice]) -> tuple[FitChoice, ...]:
    """Choices in their order, each with what makes it needless.

    Those that fit come first and then those that may, the least extra time leading; then the others by what they need;
    what cannot be used comes last. A choice is beaten by one that fits as surely, needs no more and takes less time.
    Of several that hardly differ in both the simplest beats the others: what a policy of JAX's does needs no plan.
    Donation asks something of the caller: what fits without it comes before it, and is not beaten by it. Neither does
    what is written by hand beat what an edit writes.
    """

    def key(choice: FitChoice) -> tuple[Any, ...]:
        rank, needed = _rank(choice), choice.needed_bytes or math.inf
        asks = bool(choice.fits and choice.donate)
        first = (needed, *choice.cost) if choice.fits is False else (*choice.cost, asks, needed)
        return (bool(choice.unusable), rank, *first)

    in_order = sorted((replace(choice, beaten_by="") for choice in choices), key=key)
    usable = [choice for choice in in_order if not choice.unusable and choice.needed_bytes is not None]
    apart, beaten = list[FitChoice](), dict[tuple[str, str], str]()
    for choice in sorted(usable, key=_effort):
        alike = next((other for other in apart if _hardly_differ(choice, other)), None)
        if alike is None:
            apart.append(choice)
        else:
            beaten[choice.which] = f"{alike.what}{_ALIKE}"
    for choice in usable:
        by = next((other.what for other in apart if _beats(other, choice)), "")
        beaten.setdefault(choice.which, by)
    return tuple(replace(choice, beaten_by=beaten.get(choice.which, "")) for choice in in_order)


def _rank(choice: FitChoice) -> int:
    return {True: 0, None: 1, False: 2}[choice.fits]


def _effort(choice: FitChoice) -> tuple[bool, bool, int, int, float]:
    """What a choice asks of whoever writes it: arguments that are lost, names, places; of equals the cheapest leads."""
    names = len(choice.plan.names) if choice.plan else 0
    return choice.by_hand, bool(choice.donate), names, choice.at.count("="), choice.cost[0]


def _hardly_differ(one: FitChoice, other: FitChoice) -> bool:
    """Whether the peaks and the times of two choices differ by less than two hundredths, by the same word."""
    if (one.compiled, one.fits) != (other.compiled, other.fits):
        return False
    needed, its = one.needed_bytes or 0, other.needed_bytes or 0
    extra, more = ((it.extra_flops if it.extra_time is None else it.extra_time) for it in (one, other))
    same_time = extra is not None and more is not None and abs(extra - more) < _HARDLY
    return same_time and abs(needed - its) < _HARDLY * max(needed, its)


def asks_more(one: FitChoice, other: FitChoice) -> bool:
    """Whether one choice asks more of the user than another: to write it by hand, or to give up arguments."""
    return one.by_hand > other.by_hand or bool(one.donate and other.fits and not other.donate)


def _beats(one: FitChoice, other: FitChoice) -> bool:
    """Whether one choice makes another needless; by XLA's word alone not what may need less."""
    if one is other or other.needed_bytes is None or asks_more(one, other):
        return False
    low = other.needed_low if one.compiled and not other.compiled else other.needed_bytes
    own, its = (_rank(one), one.needed_bytes or 0, one.cost), (_rank(other), low or 0, other.cost)
    return own[0] <= its[0] and own[1] <= its[1] and own[2] <= its[2] and own != its
