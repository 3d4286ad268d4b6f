"""Policies side by side: what each saves, recomputes and takes, and which are worth having."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from remat_magic.errors import RematError
from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.measurement import Effort, Progress, Times
from remat_magic.records.plan import Plan
from remat_magic.records.report import Equation, Report, Residual
from remat_magic.units import nbytes, parse_bytes

__all__ = ["Comparison", "ComparisonRow", "Difference", "Offloading", "Places", "no_gain"]

_T = TypeVar("_T")

# Of the larger peak: on scanned models the estimate was within this of what XLA's compiler for CPUs needs.
_TOO_CLOSE = 0.05


Offloading = Literal["", "moved", "kept", "unknown"]
Ranking = Literal["estimate", "compiled"]


@dataclass(frozen=True, slots=True)
class ComparisonRow(Labelled):
    """What one policy costs. Of a policy that fails there is nothing but the ``error``, a sentence.

    ``same_as`` are the keys of policies that do just the same and have no row of their own, ``same_labels`` what
    people call them. ``peak_bytes`` and ``times`` are
    estimates; the ``measured_*`` fields are XLA's and the clock's, None where nothing was measured, and ``findings``
    are sentences on where the compiled program departs from the report. ``measured_fits`` tells of a device that is not
    here whether the compiled program fits in it, ``needed_bytes`` and ``available_bytes`` by what,
    ``measured_rematerialized`` how many instructions XLA computes again by itself.

    ``ranked_by`` tells what the row is ranked by, ``"estimate"`` or ``"compiled"`` (``Comparison.ranked_by``), and
    ``pareto`` that no other row is better in one of memory (``ranked_bytes``) and cost (``adds``) without being worse
    in the other, and that it fits, where that is known. ``offloading`` tells whether XLA moves to the host what the
    policy offloads: "moved", "kept" on the device, or "unknown"; it is empty where nothing is offloaded. By the
    estimate only what is moved is ranked. ``no_gain`` is a sentence where less is saved than without a checkpoint and
    the estimated peak is hardly lower, else empty. ``of_devices`` tells whose the figures are that are not measured,
    where several devices share the work (``Report.of_devices``); what XLA counts is always of one.
    ``repeated_communicated_bytes`` are as in ``Report``.
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
    times: Times | None = None
    measured_bytes: int | None = None
    measured_temp_bytes: int | None = None
    measured_seconds: float | None = None
    measured_compile_seconds: float | None = None
    measured_flops: float | None = None
    repeated_communicated_bytes: int | None = None
    measured_communicated_bytes: int | None = None
    measured_collectives: str = ""
    measured_device: str = ""
    measured_effort: Effort = "full"
    measured_rematerialized: int | None = None
    measured_fits: bool | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    findings: tuple[str, ...] = ()
    pareto: bool = False
    same_as: tuple[str, ...] = ()
    complete: bool = True
    code: str = ""
    error: str = ""
    label: str = ""
    same_labels: tuple[str, ...] = ()
    offloading: Offloading = ""
    no_gain: str = ""
    of_devices: str = ""
    ranked_by: Ranking = "estimate"

    def __post_init__(self) -> None:
        """Use keys for what is called by no other name."""
        Labelled.__post_init__(self)
        if not self.same_labels:
            object.__setattr__(self, "same_labels", self.same_as)

    @property
    def ranked_bytes(self) -> int | None:
        """The memory that the row is ranked by: what XLA's compiler says that it needs, or the estimated peak."""
        return self.needed_bytes if self.ranked_by == "compiled" else self.peak_bytes

    @property
    def adds(self) -> float | None:
        """What the policy adds: seconds by estimate, or where no device is known recomputed FLOPs; None if unknown.

        What the compiler is known to keep on the device takes no time to offload; what the estimate is of then has
        another peak, so that it is not ranked.
        """
        compiled = self.ranked_by == "compiled"
        if self.offloading == "unknown" or (self.offloading == "kept" and not compiled):
            return None
        if self.times is None:
            return self.recomputed_flops
        if self.offloading == "kept":
            return self.times.recomputed
        return None if self.times.offload is None else self.times.extra


@dataclass(frozen=True, slots=True)
class Difference:
    """What only one of two policies saves or recomputes; equal ones are set off against each other one by one."""

    a: str
    b: str
    residuals_only_in_a: tuple[Residual, ...] = ()
    residuals_only_in_b: tuple[Residual, ...] = ()
    recomputed_only_in_a: tuple[Equation, ...] = ()
    recomputed_only_in_b: tuple[Equation, ...] = ()


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
        """Mark the rows of the front, and those that save less for nothing."""
        ranked = self._ranked("compiled" if self._compiled() == len(self._comparable) > 0 else "estimate")
        plain = (row for row in self.rows if "none" in (row.policy, *row.same_as) and row.saved_bytes is not None)
        most = max(plain, key=lambda row: row.saved_bytes or 0, default=None)
        rows = (replace(row, no_gain=row.no_gain or ("" if most is None else no_gain(row, most))) for row in ranked)
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def _comparable(self) -> list[ComparisonRow]:
        """The rows that are worth compiling."""
        return [row for row in self.rows if row.peak_bytes is not None]

    def _compiled(self) -> int:
        """For how many of them XLA told what they need on the device of the comparison, or why they do not compile."""
        device = self.device and self.device.name
        return sum(
            row.measured_device == device
            and row.measured_effort == "full"
            and (row.needed_bytes is not None or row.error != "")
            for row in self._comparable
        )

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

    # -------------------------------------------------------------------------------------------------------- questions

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
            for (less, lower), (more, higher) in itertools.pairwise(peaks)
            if less < more and more - less < _TOO_CLOSE * more
        ]
        sentences = list[str]()
        if close:
            sentences.append(
                f"Too close for the estimate of peak memory to tell apart: {'; '.join(close)}. Measure them, or choose "
                "by what they recompute."
            )
        if compiled := self._compiled():
            sentences.append(
                f"{compiled} of {len(self._comparable)} are compiled for {self.device and self.device.name}: all are "
                "ranked by the estimate until all are compiled."
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
        compiled = [row for row in self._comparable if row.needed_bytes is not None]
        if compiled and not any(row.measured_fits for row in compiled):
            nearest = min(compiled, key=lambda row: row.needed_bytes or 0)
            needs = nbytes(nearest.needed_bytes or 0)
            sentences.append(f"None fits {name}: {nearest.label} comes nearest with {needs}.")
        pairs = list(zip(self._ranked("estimate"), self.rows, strict=True))
        gone = [row.label for estimated, row in pairs if estimated.pareto and not row.pareto]
        new = [row.label for estimated, row in pairs if row.pareto and not estimated.pareto]
        if gone or new:
            otherwise = [f"with {', '.join(gone)}"] * bool(gone) + [f"without {', '.join(new)}"] * bool(new)
            sentences.append(f"By the estimated peaks the front would be another: {' and '.join(otherwise)}.")
        by_itself = [row.label for row in compiled if row.measured_rematerialized]
        if by_itself:
            sentences.append(
                f"XLA computes some values again by itself under {', '.join(by_itself)}: the time of that is not in "
                "what is added."
            )
        if failed := [row.label for row in self._comparable if row.needed_bytes is None]:
            sentences.append(f"Not ranked: {', '.join(failed)}; not compiled.")
        if unknown := [row.label for row in compiled if row.adds is None]:
            sentences.append(f"Not ranked: {', '.join(unknown)}; the time to move what they offload is not known.")
        return tuple(sentences)

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
                f"{row.label} comes nearest with {peak:,.0f}; use smaller batches, or checkpoint inside "
                "the function."
            )
        return points[min(within)[2]][1]

    def difference(self, a: str, b: str, at: str | None = None) -> Difference:
        """Which residuals and recomputed operations only one of two compared policies has.

        Args:
            a: the key of one.
            b: the key of the other.
            at: the place of both. Default: any.

        Raises:
            RematError: one of them was not compared, or failed.
        """
        first, second = (self._report(policy, at) for policy in (a, b))

        def residuals(report: Report) -> list[Residual]:
            return [replace(residual, needed_by=(), unread=False) for residual in report.residuals]

        only_a, only_b = _set_off(residuals(first), residuals(second))
        again, later = _set_off(first.recomputed, second.recomputed)
        return Difference(a, b, only_a, only_b, again, later)

    def _report(self, policy: str, at: str | None) -> Report:
        row = self.row(policy, at)
        report = self.reports.get((policy, row.at))
        if report is None:
            raise RematError(f"{policy} has no report: {row.error}")
        return report

    # ---------------------------------------------------------------------------------------------------------- exports

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON: bytes, FLOPs and seconds as numbers, None where unknown."""
        rows = []
        for row in self.rows:
            fields = dataclasses.asdict(row)
            if row.times is not None:
                fields["times"] |= {"total": row.times.total, "extra": row.times.extra}
            rows.append({**fields, **{name: list(fields[name]) for name in ("same_as", "same_labels", "findings")}})
        return {
            "function": self.function,
            "device": self.device.name if self.device else None,
            "device_source": self.device.source if self.device else "",
            "pareto_by": self.pareto_by,
            "ranked_by": self.ranked_by,
            "notes": list(self.notes),
            "rows": rows,
        }

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


@dataclass(frozen=True, slots=True, repr=False)
class Places(Comparison):
    """What policies cost at several places; see ``trace.places``. Those of the front come first, by their peak.

    The ``at`` of each row is what methods of the trace take for it, together with its ``policy``; its ``label`` is
    ``"policy at place"``. Choices that do just the same share a row, and ``same_as`` has the labels of the others.
    ``not_tried`` are sentences on what was left out, ``progress`` tells how far the search is. ``plans`` are those that
    have a row, by its ``policy``.
    """

    not_tried: tuple[str, ...] = ()
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    plans: Mapping[str, Plan] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Bring the rows in order."""
        Comparison.__post_init__(self)
        rows = sorted(self.rows, key=lambda row: (not row.pareto, row.ranked_bytes is None, row.ranked_bytes or 0))
        object.__setattr__(self, "rows", tuple(rows))


class _Figures(Protocol):
    @property
    def saved_bytes(self) -> int | None: ...
    @property
    def peak_bytes(self) -> int | None: ...


_HARDLY = 0.25  # of the bytes that are no longer saved: where the peak falls by less, they come back at the peak


def no_gain(choice: _Figures, without: _Figures) -> str:
    """One sentence where a choice saves less than there is without a checkpoint, and the peak is hardly lower.

    Args:
        choice: a report, a plan or a row.
        without: the same without a checkpoint.
    """
    if without.peak_bytes is None or choice.peak_bytes is None:
        return ""
    less, lower = (without.saved_bytes or 0) - (choice.saved_bytes or 0), without.peak_bytes - choice.peak_bytes
    smallest = without.peak_bytes / 100
    if less < smallest or lower >= _HARDLY * less:
        return ""
    what = "no lower" if abs(lower) < smallest else f"only {nbytes(lower)} lower"
    what = f"{nbytes(-lower)} higher" if lower <= -smallest else what
    return f"{nbytes(less)} less is saved than without a checkpoint, but the estimated peak is {what}."


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


def _set_off(a: Iterable[_T], b: Iterable[_T]) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """What is left of both when equal ones are set off against each other, as often as both have them."""
    first, second = Counter(a), Counter(b)
    return tuple((first - second).elements()), tuple((second - first).elements())
