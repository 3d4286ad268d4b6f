"""Policies side by side: what each saves, recomputes and takes, and which are worth having."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.measurement import Measurement
from remat_magic.records.report import Report
from remat_magic.records.timeline import Times
from remat_magic.units import parse_bytes

Offloading = Literal["", "moved", "kept", "unknown"]


@dataclass(frozen=True, slots=True)
class ComparisonRow(Labelled):
    """What one policy costs. Of a policy that fails there is nothing but the ``error``, a sentence.

    ``same_as`` are the keys of policies that do just the same and have no row of their own, ``same_labels`` what
    people call them. ``peak_bytes`` and ``times`` are estimates, and what XLA needs is to be expected between
    ``peak_low`` and ``peak_high``; ``measurement`` is XLA's word and the clock's, None where nothing was measured.

    ``pareto`` tells that no other row is better in one of the estimated peak and cost (``adds``) without being worse in
    the other. ``offloading`` tells whether XLA moves to the host what the policy offloads: "moved", "kept" on the
    device, or "unknown"; it is empty where nothing is offloaded. Only what is moved is ranked. ``of_devices`` tells
    whose the figures are that are not measured, where several devices share the work (``Report.of_devices``); what XLA
    counts is always of one. ``repeated_communicated_bytes`` are as in ``Report``.
    """

    policy: str
    at: str
    saved_bytes: int | None = None
    argument_bytes: int | None = None
    offloaded_bytes: int | None = None
    forward_flops: int | None = None
    repeated_flops: int | None = None
    deferred_flops: int | None = None
    recomputed_flops: int | None = None
    peak_bytes: int | None = None
    peak_low: int | None = None
    peak_high: int | None = None
    times: Times | None = None
    repeated_communicated_bytes: int | None = None
    measurement: Measurement | None = None
    pareto: bool = False
    same_as: tuple[str, ...] = ()
    complete: bool = True
    code: str = ""
    error: str = ""
    label: str = ""
    same_labels: tuple[str, ...] = ()
    offloading: Offloading = ""
    of_devices: str = ""

    def __post_init__(self) -> None:
        """Use keys for what is called by no other name."""
        Labelled.__post_init__(self)
        if not self.same_labels:
            object.__setattr__(self, "same_labels", self.same_as)

    @property
    def adds(self) -> float | None:
        """What the policy adds: seconds by estimate, or where no device is known recomputed FLOPs; None if unknown.

        What the compiler is known to keep on the device has another peak than the estimate, so that it is not ranked.
        """
        if self.offloading in ("unknown", "kept"):
            return None
        if self.times is None:
            return self.recomputed_flops
        return None if self.times.offload is None else self.times.extra


_MOST_PAIRS = 3  # that are named


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayed):
    """What several policies cost, a row for each; see ``trace.compare``.

    In a notebook it shows itself as a table, in a terminal through rich. ``device`` is the ``Device`` that times are
    estimated for, None where it is not known; ``reports`` are those of the rows' policies, by key and place. The rows
    say whether they are on the front (``pareto``).
    """

    function: str
    rows: tuple[ComparisonRow, ...]
    device: Any = None
    reports: Mapping[tuple[str, str], Report] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Mark the rows of the front."""
        front = _front([_point(row) for row in self.rows])
        rows = (replace(row, pareto=best) for row, best in zip(self.rows, front, strict=True))
        object.__setattr__(self, "rows", tuple(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> ComparisonRow:
        return self.rows[number]

    def row(self, policy: str, at: str | None = None) -> ComparisonRow:
        """The row of a policy, also where another that does the same stands for it.

        Args:
            policy: the key of a compared policy.
            at: its place. Default: any.

        Raises:
            RematError: it was not compared.
        """
        for row in self.rows:
            here = policy in (row.policy, *row.same_as) and at in (None, row.at)
            if here or f"{policy} at {at}" in row.same_as:
                return row
        compared = ", ".join(row.policy for row in self.rows)
        raise RematError(f"{policy!r} is not compared here; compared are {compared}.")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the estimates cannot tell: which of two needs less, where their ranges overlap."""
        peaks = sorted((row for row in self.rows if row.peak_bytes is not None), key=lambda row: row.peak_bytes or 0)
        close = [
            f"{one.label} and {other.label}"
            for one, other in itertools.pairwise(peaks)
            if one.peak_bytes != other.peak_bytes and (one.peak_high or 0) >= (other.peak_low or math.inf)
        ]
        sentences = list[str]()
        if close:
            more = f"; and {len(close) - _MOST_PAIRS} more pairs" if len(close) > _MOST_PAIRS else ""
            sentences.append(
                f"The ranges of these overlap, so either may need less: {'; '.join(close[:_MOST_PAIRS])}"
                f"{more}. Measure them, or choose by what they recompute."
            )
        for state, why in (
            ("kept", "XLA keeps on the device what they offload (a CPU has one memory; of code that is not in a scan "
             "most stays)"),
            ("unknown", "whether XLA moves what they offload is not known"),
        ):  # fmt: skip
            unranked = ", ".join(row.label for row in self.rows if row.offloading == state)
            if unranked:
                sentences.append(f"Not ranked: {unranked}; {why}.")
        return tuple(sentences)

    def best(self, peak_bytes: int | str) -> ComparisonRow:
        """The policy that adds least (seconds by estimate, else FLOPs) with an estimated peak of at most so many bytes.

        Args:
            peak_bytes: in bytes, or a text like ``"16 GiB"``.

        Raises:
            RematError: no policy stays below; says which comes nearest.
        """
        limit = parse_bytes(peak_bytes, "peak_bytes")
        points = [(*point, number) for number, row in enumerate(self.rows) if (point := _point(row)) is not None]
        if not points:
            raise RematError(f"No compared policy of {self.function} has a known peak and cost.")
        within = [(adds, peak, number) for peak, adds, number in points if peak <= limit]
        if within:
            return self.rows[min(within)[2]]
        peak, _, number = min(points)
        raise RematError(
            f"No compared policy of {self.function} has a peak of at most {limit:,} bytes: "
            f"{self.rows[number].label} comes nearest with {peak:,.0f}."
        )


@dataclass(frozen=True, slots=True, repr=False)
class Places(Comparison):
    """What policies cost at several places; see ``trace.places``. Those of the front come first, by their peak.

    The ``at`` of each row is what methods of the trace take for it, together with its ``policy``; its ``label`` is
    ``"policy at place"``. Choices that do just the same share a row, and ``same_as`` has the labels of the others.
    ``not_tried`` are sentences on what was left out.
    """

    not_tried: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Bring the rows in order."""
        Comparison.__post_init__(self)
        rows = sorted(self.rows, key=lambda row: (not row.pareto, row.peak_bytes is None, row.peak_bytes or 0))
        object.__setattr__(self, "rows", tuple(rows))


def _point(row: ComparisonRow) -> tuple[float, float] | None:
    """Where a row stands: its peak, and what its policy adds; None where either is unknown."""
    return None if row.peak_bytes is None or row.adds is None else (row.peak_bytes, row.adds)


def _front(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which points no other beats: as good in both, and better in one."""
    complete = [point for point in points if point is not None]
    return [
        point is not None
        and not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in complete)
        for point in points
    ]
