"""What a policy does, for the list that it is chosen from."""

from __future__ import annotations

from typing import Any

from remat_magic.records import ComparisonRow
from remat_magic.views import format as fmt


def figures(row: ComparisonRow) -> dict[str, Any]:
    """A row of a comparison as text: what is saved, the work that is done twice, the estimated peak.

    ``keys`` are those of all the policies that do just this, ``front`` tells whether none is better in both peak and
    time.
    """
    keys = [row.policy, *row.same_as]
    if row.error:
        return {"keys": keys, "error": row.error}
    return {
        "keys": keys,
        "saved": fmt.nbytes(row.saved_bytes or 0),
        "repeated": _repeated(row),
        "peak": _peak(row),
        "front": row.pareto,
    }


def _peak(row: ComparisonRow) -> str:
    return "unknown" if row.peak_bytes is None else fmt.about(row.peak_bytes, row.peak_low, row.peak_high)


def _repeated(row: ComparisonRow) -> str:
    if row.repeated_flops is None:
        return "unknown"
    least = "" if row.complete else "≥ "
    communicated = (
        f"{fmt.nbytes(row.repeated_communicated_bytes)} communicated again" if row.repeated_communicated_bytes else ""
    )
    if not row.repeated_flops:
        return f"{least}{communicated or 'nothing'}" if row.complete else communicated or "unknown"
    return f"{least}{fmt.flops(row.repeated_flops)}{communicated and f', {communicated}'}"
