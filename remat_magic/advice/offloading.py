"""Advice on offloading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat_magic import units
from remat_magic.advice.case import Case, at_line
from remat_magic.advice.ground import Ground, Group
from remat_magic.advice.mends import without_names
from remat_magic.records import Advice

__all__ = ["dearer_than_recomputing"]

# Both times are estimates, and what goes over the link may do so while something else runs: the difference must be
# clear.
_LONGER = 1.5
_MOST = 3
_TRIED = 30


def dearer_than_recomputing(case: Case) -> Iterator[Advice]:
    """Values that are sooner computed again than fetched from the host."""
    ground = case.ground
    if not case.report.offloaded_bytes or ground is None or not ground.exact:
        return
    device = case.device
    if device is None or not device.host_bandwidth:
        return
    groups = sorted(ground.by_name_or_line(ground.moved), key=lambda group: -group.nbytes)[:_TRIED]
    lost: list[tuple[Group, int, float, float]] = []
    so_far = 0.0
    for group in groups:
        before = [each for each, *_ in lost]
        moved = _offloaded(ground, before) - _offloaded(ground, [*before, group])
        # There and back, as Times.offload has it.
        transfer, then = 2 * moved / device.host_bandwidth, ground.seconds([*before, group], device)
        if transfer > _LONGER * (then - so_far):
            lost.append((group, moved, transfer, then - so_far))
            so_far = then
    mend = _mend(case, ground, [group for group, *_ in lost], device.name)
    for group, moved, transfer, again in sorted(lost, key=lambda each: each[3] - each[2])[:_MOST]:
        yield Advice(
            "dear-offload",
            f"{group.text}{at_line(group.first.source)} is offloaded: {units.nbytes(moved)} to the host and back take "
            f"{units.seconds(transfer)} on {device.name}, and recomputing them {units.seconds(again)}, both by "
            "estimate.",
            mend,
            moved,
            "bytes",
            group.first.source,
        )


def _offloaded(ground: Ground, without: Sequence[Group]) -> int:
    keys = frozenset(key for group in without for key in group.keys)
    moved = ground.moved - keys
    return ground.found.graph.figures(ground.kept | moved, moved).offloaded_bytes


def _mend(case: Case, ground: Ground, groups: Sequence[Group], device: str) -> str:
    names = [group.name for group in groups if group.name]
    code = without_names(case.policy_in_force, names) if len(names) == len(groups) else ""
    if not code and not _offloaded(ground, groups) and not ground.kept:
        code = "policy=jax.checkpoint_policies.nothing_saveable"
    if code:
        return f"Recompute {'it' if len(groups) == 1 else 'them'}: {code}."
    saved = case.report.saved_bytes
    return (
        f"Let a plan choose what is worth it: trace.plan({saved}, {case.report.at!r}, device={device!r}, offload=True)."
    )
