"""Policies at several places side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remat_magic.records.comparison import Comparison
from remat_magic.records.comparison_row import ComparisonRow
from remat_magic.records.measurement import Progress
from remat_magic.records.plan import Plan
from remat_magic.units import percent

# Of the estimate: with a checkpoint a program is taken to need no less, unless it was seen of others of the same trace.
_LEAST = 0.75


@dataclass(frozen=True, slots=True, repr=False)
class Places(Comparison):
    """What policies cost at several places; see ``trace.places``. Those of the front come first, by their peak.

    The ``at`` of each row is what methods of the trace take for it, together with its ``policy``; its ``label`` is
    ``"policy at place"``. Choices that do just the same share a row, and ``same_as`` has the labels of the others.
    ``not_tried`` are sentences on what was left out, ``progress`` tells how far the search is. ``plans`` are those that
    have a row, by its ``policy``.

    To compile all rows would take long. They are ranked by what XLA needs (``ranked_by``) once those are compiled that
    could be on the front then: ``to_compile`` is what is left of them. The others are not ranked, and ``notes`` say so.
    """

    not_tried: tuple[str, ...] = ()
    progress: Progress = field(default_factory=lambda: Progress(0, 0))
    plans: Mapping[str, Plan] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Bring the rows in order."""
        Comparison.__post_init__(self)
        rows = sorted(self.rows, key=lambda row: (not row.pareto, row.ranked_bytes is None, row.ranked_bytes or 0))
        object.__setattr__(self, "rows", tuple(rows))

    @property
    def to_compile(self) -> tuple[ComparisonRow, ...]:
        """What is to be compiled next for the device, empty where the rows are ranked by what XLA needs for them.

        First the front by estimate, and what has no checkpoint, for which XLA often needs far less than the estimate.
        Once these are known, the rows that could still be on the front: which fit, and which nothing that adds no more
        undercuts, if they need as little of their estimate as the lowest of those compiled, or three quarters.
        """
        compiled = {(row.policy, row.at) for row in self._compiled}
        uncompiled = [
            row
            for row in self._ranked("estimate")
            if row.peak_bytes is not None and (row.policy, row.at) not in compiled
        ]
        first = [row for row in uncompiled if row.pareto or _is_without(row)]
        return tuple(first or filter(self._could_be_best, uncompiled))

    @property
    def _least(self) -> float:
        """Of its estimate, what a program with a checkpoint may need at least."""
        needed = [
            (row.needed_bytes or 0) / row.peak_bytes
            for row in self._compiled
            if row.needed_bytes is not None and row.peak_bytes and not _is_without(row)
        ]
        return min([_LEAST, *needed])

    def _could_be_best(self, row: ComparisonRow) -> bool:
        """Whether a row that is not compiled could be on the front, by those that are."""
        adds, least = replace(row, ranked_by="compiled").adds, self._least * (row.peak_bytes or 0)
        if adds is None:
            return False
        for other in self._compiled:
            other_adds = replace(other, ranked_by="compiled").adds
            if other.needed_bytes is None:
                continue
            if other.available_bytes is not None and other.available_bytes < least:
                return False
            if other.needed_bytes <= least and other_adds is not None and other_adds <= adds:
                return False
        return True

    @property
    def _worth_it(self) -> str:
        return " that could be on the front"

    @property
    def _left_out(self) -> tuple[str, ...]:
        compiled = {(row.policy, row.at) for row in self._compiled}
        uncompiled = [
            row.label for row in self.rows if row.peak_bytes is not None and (row.policy, row.at) not in compiled
        ]
        if not uncompiled:
            return ()
        share = percent(round(100 * self._least), 100)
        return (
            f"Not compiled, and not ranked: {', '.join(uncompiled)}. They do not fit, or others add no more and need "
            f"less, unless they need less than {share} of the estimated peak.",
        )


def _is_without(row: ComparisonRow) -> bool:
    """Whether it has no checkpoint at all, of which XLA may need a small part of the estimate."""
    return row.policy == "none" and row.at in ("function", "sites")
