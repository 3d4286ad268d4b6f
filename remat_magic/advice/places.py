"""Advice on where a checkpoint should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from remat_magic import units
from remat_magic.advice.case import Case, at_line
from remat_magic.planning.places import DEEPEST
from remat_magic.records import Advice, RematError, Report, Residual, Site

__all__ = ["RULES"]

_LOWER = 0.8  # of the peak: what is below that is worth a checkpoint
_POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
_NEARLY = 1.25  # of the lowest peak: what comes so near and recomputes less is the better


def no_checkpoint(case: Case) -> Iterator[Advice]:
    """Where a checkpoint is missing: the place that would gain most by one, and scans that it would not mend."""
    best = _best(case)
    if best is not None:
        yield _no_checkpoint_there(case, *best)
    yield from _bare_scans(case, None if best is None else best[1])


def _best(case: Case) -> tuple[Site, Report] | None:
    """The place that would gain most by a checkpoint, and what it comes to: traced with one, not reckoned."""
    engine, report = case.facts.engine, case.report
    if isinstance(case.at, Mapping) or report.backward_error or not report.peak_bytes:
        return None
    inside = engine.contents()
    places = [site for site in engine.possible_sites if site.key in inside and site.key != report.at]
    places = [site for site in places if inside[site.key].depths[site.key] <= DEEPEST]
    site = max(places, key=lambda site: inside[site.key].gain, default=None)
    if site is None or not inside[site.key].gain:
        return None
    tried = [other for policy in _POLICIES if (other := _report(case, policy, site.key)) is not None]
    lowest = min((other.peak_bytes or 0 for other in tried), default=0)
    if not tried or lowest > _LOWER * report.peak_bytes:
        return None
    better = [other for other in tried if (other.peak_bytes or 0) <= _NEARLY * lowest]
    return site, min(better, key=lambda other: (other.repeated_flops or 0, other.peak_bytes or 0))


def _no_checkpoint_there(case: Case, site: Site, best: Report) -> Advice:
    engine, report = case.facts.engine, case.report
    peak, lower = report.peak_bytes or 0, best.peak_bytes or 0
    repeats = ""
    if report.forward_flops:
        now, with_best = ((choice.repeated_flops or 0) / report.forward_flops for choice in (report, best))
        repeats = f", and {with_best:.0%} of the forward pass is repeated (now {now:.0%})"
    code, _, where = engine.select(best.policy, site.key).code.partition("  # on ")
    return Advice(
        "no-checkpoint-there",
        f"{site.function}{at_line(site.source)} runs {engine.contents()[site.key].runs} times and has no checkpoint. "
        f"With {best.policy} there the estimated peak is {units.nbytes(lower)}, not {units.nbytes(peak)}{repeats}.",
        f"Write {code}{f' on {where}' if where else ''}.",
        peak - lower,
        "bytes",
        site.source,
        best.policy,
        site.key,
        code=code,
    )


def _report(case: Case, policy: str, at: str) -> Report | None:
    try:
        report = case.facts.report(policy, at)
    except RematError:
        return None
    return None if report.backward_error or report.peak_bytes is None else report


def _bare_scans(case: Case, mended: Report | None) -> Iterator[Advice]:
    """Scans that save several values of every iteration, without a checkpoint, and do so when ``mended`` too."""
    loops = _in_scans(case.report)
    mended_loops = {} if mended is None else _in_scans(mended)
    checkpointed = bool(case.facts.engine.sites) or case.built
    total = case.report.saved_bytes
    for label, rows in loops.items():
        saved_bytes = sum(row.nbytes for row in rows)
        if checkpointed or 2 * saved_bytes < total or len(rows) < 2:
            continue
        if mended is not None and 2 * sum(row.nbytes for row in mended_loops.get(label, ())) < saved_bytes:
            continue
        largest = max(rows, key=lambda row: row.nbytes)
        yield Advice(
            "bare-scan",
            f"{units.nbytes(saved_bytes)} of the {units.nbytes(total)} saved are {len(rows)} values of every "
            f"iteration of {label}, the largest{at_line(largest.source)}.",
            "Put jax.checkpoint(..., prevent_cse=False) around the scan's body: it then saves its carry alone.",
            saved_bytes,
            "bytes",
            largest.source,
        )


def _in_scans(report: Report) -> dict[str, list[Residual]]:
    """What is saved of every iteration, by the label of the scan."""
    rows: dict[str, list[Residual]] = {}
    for row in report.residuals:
        label = next((label for label in row.path if label.startswith("scan x")), "")
        if label and row.kind == "intermediate" and row.times != 1:
            rows.setdefault(label, []).append(row)
    return rows


RULES = (no_checkpoint,)
