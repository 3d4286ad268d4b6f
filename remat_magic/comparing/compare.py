"""Comparing policies: those that a trace offers, or that the user names, a report each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.facts.buffers import PLAIN, memory_of
from remat_magic.facts.facts import Facts, Unknown, Variant
from remat_magic.facts.times import offloading, times
from remat_magic.policies import OWN
from remat_magic.records import Comparison, ComparisonRow, Measurement, RematError, Report


def compare(
    facts: Facts,
    choices: Iterable[Variant | Unknown],
    device: str | devices.Device | None = None,
    measurements: Iterable[Measurement] = (),
    *,
    merge: bool = False,
) -> Comparison:
    """``Trace.compare`` of some choices, of which those that do just the same share a row where it is to ``merge``."""
    chosen = devices.default() if device is None else devices.get(device)
    memory = PLAIN if device is None else memory_of(chosen)
    rows: list[ComparisonRow] = []
    reports: list[Report | None] = []
    representatives: dict[Any, int] = {}
    for variant in choices:
        try:
            if isinstance(variant, Unknown):
                raise RematError(variant.error)
            report = variant.report(memory)
        except RematError as error:
            of = variant if isinstance(variant, Unknown) else variant.selection
            rows.append(ComparisonRow(of.policy, of.at, error=str(error)))
            reports.append(None)
            continue
        same = representatives.setdefault(_essence(report), len(rows)) if merge else len(rows)
        if same < len(rows):
            if report.policy not in (rows[same].policy, *rows[same].same_as):
                row = rows[same]
                same_as, labels = (*row.same_as, report.policy), (*row.same_labels, report.label)
                rows[same] = replace(row, same_as=same_as, same_labels=labels)
            continue
        rows.append(row_of(report, chosen))
        reports.append(report)
    of_rows = {
        (key, row.at): report
        for row, report in zip(rows, reports, strict=True)
        if report is not None
        for key in (row.policy, *row.same_as)
    }
    # Of several of one choice the one for the device counts, and the full compilation before a quick one.
    results = sorted(measurements, key=lambda it: (it.device == (chosen and chosen.name), it.effort == "full"))
    measured = [replace(row, measurement=_last_of(row, results)) for row in rows]
    return Comparison(facts.engine.primal.name, tuple(measured), chosen, of_rows)


def _last_of(row: ComparisonRow, results: Iterable[Measurement]) -> Measurement | None:
    """The last of what was measured of a row's policy, else of one that does the same."""
    of_row = [it for it in results if it.at == row.at and it.policy in (row.policy, *row.same_as)]
    return max(of_row, key=lambda it: (it.policy == row.policy, of_row.index(it)), default=None)


def offered(facts: Facts, namespace: Mapping[str, Any]) -> list[str]:
    """The keys that a trace offers; a policy of the user's own that was seen before only where its name leads to it."""
    return [choice.key for choice in facts.engine.choices() if choice.meaning != OWN or choice.key in namespace]


def _essence(report: Report) -> Any:
    """What makes two reports of one function the same, whatever their policies are called."""
    kernels = (report.forward_kernels, report.backward_kernels)
    return (report.at, report.residuals, report.recomputed, *kernels, report.peak_bytes, report.backward_error)


def row_of(report: Report, device: devices.Device | None) -> ComparisonRow:
    """The figures of a report, with the times that a device would take."""
    row = ComparisonRow(
        report.policy,
        report.at,
        saved_bytes=report.saved_bytes,
        argument_bytes=report.argument_bytes,
        offloaded_bytes=report.offloaded_bytes,
        code=report.code,
        error=report.backward_error,
        label=report.label,
        of_devices=report.of_devices,
    )
    if report.backward_error:
        return row
    return replace(
        row,
        forward_flops=report.forward_flops,
        repeated_flops=report.repeated_flops,
        deferred_flops=report.deferred_flops,
        recomputed_flops=report.recomputed_flops,
        repeated_communicated_bytes=report.repeated_communicated_bytes,
        peak_bytes=report.peak_bytes,
        peak_low=report.peak_low,
        peak_high=report.peak_high,
        times=None if device is None else times(report, device),
        offloading=offloading(report, device),
        complete=all(kernel.known for kernel in (*report.forward_kernels, *report.backward_kernels)),
    )
