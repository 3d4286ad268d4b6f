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
    rows, of_rows, representatives = list[ComparisonRow](), dict[tuple[str, str], Report](), dict[Any, int]()
    for variant in choices:
        try:
            if isinstance(variant, Unknown):
                raise RematError(variant.error)
            report = variant.report(memory)
        except RematError as error:
            of = variant if isinstance(variant, Unknown) else variant.selection
            rows.append(ComparisonRow(of.policy, of.at, error=str(error)))
            continue
        same = representatives.setdefault(_essence(report), len(rows)) if merge else len(rows)
        if same == len(rows):
            rows.append(row_of(report, chosen))
        elif report.policy not in ((row := rows[same]).policy, *row.same_as):
            same_as, labels = (*row.same_as, report.policy), (*row.same_labels, report.label)
            rows[same] = replace(row, same_as=same_as, same_labels=labels)
        of_rows.setdefault((report.policy, report.at), report)
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
    flops = report.forward_flops, report.backward_flops
    return (report.at, report.residuals, report.recomputed, *flops, report.peak_bytes, report.backward_error)


_OF_FORWARD = ("saved_bytes", "argument_bytes", "offloaded_bytes", "code", "label", "of_devices")
_OF_BOTH = ("forward_flops", "repeated_flops", "deferred_flops", "recomputed_flops", "repeated_communicated_bytes",
            "peak_bytes", "peak_low", "peak_high")  # fmt: skip


def row_of(report: Report, device: devices.Device | None) -> ComparisonRow:
    """The figures of a report, with the times that a device would take."""
    figures = {name: getattr(report, name) for name in (*_OF_FORWARD, *(() if report.backward_error else _OF_BOTH))}
    row = ComparisonRow(report.policy, report.at, error=report.backward_error, **figures)
    if report.backward_error:
        return row
    return replace(
        row,
        times=None if device is None else times(report, device),
        offloading=offloading(report, device),
        complete=all(kernel.known for kernel in (*report.forward_kernels, *report.backward_kernels)),
    )
