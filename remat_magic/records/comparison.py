"""Policies side by side: what each saves, recomputes and takes, and which are worth having."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed
from remat_magic.records.comparison_row import ComparisonRow, Ranking
from remat_magic.records.measurement import Measurement
from remat_magic.records.report import Report
from remat_magic.units import nbytes, parse_bytes

# Of the larger peak: on scanned models the estimate was within this of what XLA's compiler for CPUs needs.
_TOO_CLOSE = 0.05


class DataSheet(Protocol):
    """The device that times are estimated for."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def source(self) -> str:
        """Where its figures are published."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayed):
    """What several policies cost, a row for each; see ``trace.compare``.

    In a notebook it shows itself as a table, in a terminal through rich. ``device`` is what the times are estimated
    for, None where it is not known; ``reports`` are those of the rows' policies, by key and place. The rows are told
    whether they are on the front (``pareto``).
    """

    function: str
    rows: tuple[ComparisonRow, ...]
    device: DataSheet | None = None
    reports: Mapping[tuple[str, str], Report] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Mark the rows of the front."""
        ranked = self._ranked("compiled" if self._compiled and not self.to_compile else "estimate")
        object.__setattr__(self, "rows", tuple(ranked))

    @property
    def to_compile(self) -> tuple[ComparisonRow, ...]:
        """What is still to be compiled for the device before the rows are ranked by what XLA needs for them."""
        compiled = self._compiled
        return tuple(row for row in self.rows if row.peak_bytes is not None and row not in compiled)

    @property
    def _compiled(self) -> list[ComparisonRow]:
        """The rows of which XLA told what they need on the device of the comparison, or why they do not compile."""
        device = self.device and self.device.name
        return [
            row
            for row in self.rows
            if row.peak_bytes is not None
            and row.measured_device == device
            and row.measured_effort == "full"
            and (row.needed_bytes is not None or row.error)
        ]

    def _ranked(self, by: Ranking) -> list[ComparisonRow]:
        rows = [replace(row, ranked_by=by) for row in self.rows]
        front = _front([_point(row) if _may_fit(row) else None for row in rows])
        return [replace(row, pareto=best) for row, best in zip(rows, front, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> ComparisonRow:
        return self.rows[number]

    @property
    def ranked_by(self) -> Ranking:
        """By whose word the memory is that the front is drawn over.

        ``"compiled"``, by what XLA's compiler needs for the device, once every row was compiled for it (see
        ``measurements`` of ``Trace.compare``); what does not fit is then never on the front. Until then it is
        ``"estimate"``, by the estimated peaks of all rows, so that the two are not mixed.
        """
        return self.rows[0].ranked_by if self.rows else "estimate"

    @property
    def pareto_by(self) -> str:
        """What the front is drawn over besides memory.

        ``"seconds"``, what recomputation and offloading add by estimate, or ``"recomputed_flops"`` where no device is
        known. Saved bytes rank nothing: a checkpoint around a whole function saves fewest, and its peak is no lower.
        """
        return "seconds" if self.device is not None else "recomputed_flops"

    @property
    def _worth_it(self) -> str:
        """Which of the rows are to be compiled, where that is not all of them; after a space."""
        return ""

    @property
    def _left_out(self) -> tuple[str, ...]:
        """Sentences on rows that are not compiled, where others are ranked by what they need."""
        return ()

    # -------------------------------------------------------------------------------------------------------- questions

    def with_measurements(self, measurements: Iterable[Measurement]) -> Self:
        """The same rows with what was measured of them, ranked anew.

        Args:
            measurements: what ``Trace.measure`` gave, those of other choices too. Of several of one choice the one for
                the device of the comparison counts, and the full compilation before a quick one.
        """
        name = self.device and self.device.name
        results = sorted(measurements, key=lambda result: (result.device == name, result.effort == "full"))

        def measured(row: ComparisonRow) -> ComparisonRow:
            of_row = [result for result in results if row.stands_for(result.policy, result.at)]
            own = [result for result in of_row if (result.policy, result.at) == (row.policy, row.at)]
            return row.measured((own or of_row)[-1]) if of_row else row

        return replace(self, rows=tuple(map(measured, self.rows)))

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
        """Sentences on what the estimates cannot tell.

        On scanned models the estimated peaks were within 5% of XLA's count, and so was the order of policies further
        apart than that; of closer ones it need not be. Where all were compiled, they tell instead how the estimate
        would have ranked them.
        """
        if self.ranked_by == "compiled":
            return self._notes_of_compiled
        peaks = sorted(
            ((row.peak_bytes, row.label) for row in self.rows if row.peak_bytes is not None), key=lambda pair: pair[0]
        )
        close = [
            f"{lower} and {higher}"
            for (lower_bytes, lower), (higher_bytes, higher) in itertools.pairwise(peaks)
            if lower_bytes < higher_bytes and higher_bytes - lower_bytes < _TOO_CLOSE * higher_bytes
        ]
        sentences = list[str]()
        if close:
            sentences.append(
                f"Too close for the estimate of peak memory to tell apart: {'; '.join(close)}. Measure them, or choose "
                "by what they recompute."
            )
        if compiled := len(self._compiled):
            sentences.append(
                f"{compiled} of {compiled + len(self.to_compile)}{self._worth_it} are compiled for "
                f"{self.device and self.device.name}: all are ranked by the estimate until these are compiled."
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

    @property
    def _notes_of_compiled(self) -> tuple[str, ...]:
        """What fits, how the estimate would have ranked what was compiled, and what it does not know."""
        name = self.device.name if self.device else ""
        sentences = [
            f"Ranked by the memory that XLA needs, compiled for {name}; the time that is added is an estimate."
        ]
        compiled = [row for row in self._compiled if row.needed_bytes is not None]
        if compiled and not any(row.measured_fits for row in compiled):
            nearest = min(compiled, key=lambda row: row.needed_bytes or 0)
            needs = nbytes(nearest.needed_bytes or 0)
            sentences.append(f"None fits {name}: {nearest.label} comes nearest with {needs}.")
        pairs = list(zip(self._ranked("estimate"), self.rows, strict=True))
        gone = [row.label for estimated, row in pairs if estimated.pareto and not row.pareto]
        joining = [row.label for estimated, row in pairs if row.pareto and not estimated.pareto]
        if gone or joining:
            otherwise = [f"with {', '.join(gone)}"] * bool(gone) + [f"without {', '.join(joining)}"] * bool(joining)
            sentences.append(f"By the estimated peaks the front would be another: {' and '.join(otherwise)}.")
        by_itself = [row.label for row in compiled if row.measured_rematerialized]
        if by_itself:
            sentences.append(
                f"XLA computes some values again by itself under {', '.join(by_itself)}: the time of that is not in "
                "what is added."
            )
        if failed := [row.label for row in self._compiled if row.needed_bytes is None]:
            sentences.append(f"Not ranked: {', '.join(failed)}; not compiled.")
        if unknown := [row.label for row in compiled if row.adds is None]:
            sentences.append(f"Not ranked: {', '.join(unknown)}; the time to move what they offload is not known.")
        return (*sentences, *self._left_out)

    def best(self, peak_bytes: int | str) -> ComparisonRow:
        """The policy that adds least (seconds by estimate, else FLOPs) with a peak of at most so many bytes.

        The peak is the compiled program's where ``ranked_by`` is ``"compiled"``, else the estimated one. What was
        compiled and does not fit its device is none.

        Args:
            peak_bytes: in bytes, or a text like ``"16 GiB"``.

        Raises:
            RematError: no policy stays below; says which comes nearest.
        """
        limit = parse_bytes(peak_bytes, "peak_bytes")
        points = [(point, row) for row in self.rows if (point := _point(row)) is not None]
        if not points:
            raise RematError(f"No compared policy of {self.function} has a known peak and cost.")
        within = [
            (point[1], point[0], index)
            for index, (point, row) in enumerate(points)
            if point[0] <= limit and _may_fit(row)
        ]
        if not within:
            peak, row = min(((point[0], row) for point, row in points), key=lambda pair: pair[0])
            fits = "" if _may_fit(row) else f" and fits {row.measured_device}"
            raise RematError(
                f"No compared policy of {self.function} has a peak of at most {limit:,} bytes{fits}: "
                f"{row.label} comes nearest with {peak:,.0f}."
            )
        return points[min(within)[2]][1]

    # ---------------------------------------------------------------------------------------------------------- exports

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict a policy, as ``pandas.DataFrame`` takes them; estimated times are ``estimated_*_seconds``."""
        flat = []
        for row in self.rows:
            fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
            estimate = fields.pop("times")
            for name in ("forward", "backward", "recomputed", "offload", "total"):
                fields[f"estimated_{name}_seconds"] = None if estimate is None else getattr(estimate, name)
            fields |= {name: ", ".join(fields[name]) for name in ("same_as", "same_labels")}
            flat.append({**fields, "findings": " ".join(row.findings)})
        return flat


def _point(row: ComparisonRow) -> tuple[float, float] | None:
    """Where a row stands: its memory, and what its policy adds; None where either is unknown."""
    memory, adds = row.ranked_bytes, row.adds
    return None if memory is None or adds is None else (memory, adds)


def _may_fit(row: ComparisonRow) -> bool:
    """Whether it fits its device, as far as it was compiled for one and is ranked by that."""
    return row.ranked_by != "compiled" or row.measured_fits is not False


def _front(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which points no other beats: as good in both, and better in one."""
    complete = [point for point in points if point is not None]
    return [
        point is not None
        and not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in complete)
        for point in points
    ]
