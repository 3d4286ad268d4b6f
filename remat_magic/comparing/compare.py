"""Comparing policies: those that a trace offers, or that the user names, a report each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import offloading, times
from remat_magic.policies import OWN
from remat_magic.records import Comparison, ComparisonRow, Measurement, Plan, RematError, Report


def compare(
    facts: Facts,
    no_gain: Callable[[Facts, ComparisonRow], str],
    policies: Iterable[Any] | None = None,
    at: Any = None,
    device: str | devices.Device | None = None,
    measurements: Iterable[Measurement] = (),
    namespace: Mapping[str, Any] | None = None,
    besides: Iterable[Any] = (),
) -> Comparison:
    """Compare policies for a traced function.

    Args:
        facts: of the traced function.
        no_gain: what tells where a peak is no lower than without a checkpoint, and what would lower it.
        policies: keys or JAX policies; by default everything that ``trace.choices()`` offers, where policies that do
            just the same share a row.
        at: where, as for ``trace.report``.
        device: whose data sheet the times are estimated by: a name of ``remat_magic.devices.names()`` or a device; by
            default the one that JAX runs on, if it is known.
        measurements: measured policies, shown beside the estimates.
        namespace: where policies of one's own are looked up by name.
        besides: policies to compare with those that ``trace.choices()`` offers.

    Raises:
        RematError: no such device. A policy that fails is a row with its error.
    """
    chosen = devices.default() if device is None else devices.get(device)
    facts = facts if device is None else facts.on(chosen)
    everything = [*_offered(facts, namespace or {}), *besides] if policies is None else [*policies, *besides]
    rows: list[ComparisonRow] = []
    reports: list[Report | None] = []
    representatives: dict[Any, int] = {}
    plans: dict[str, Plan] = {}
    for policy in everything:
        if isinstance(policy, Plan) and policy.names:
            policy = policy.apart_from(plans)
        try:
            report = facts.report(policy, at, namespace)
        except RematError as error:
            rows.append(ComparisonRow(_text(policy), "" if at is None else _text(at), error=str(error)))
            reports.append(None)
            continue
        same = representatives.setdefault(_essence(report), len(rows)) if policies is None else len(rows)
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
    comparison = Comparison(facts.engine.primal.name, tuple(rows), chosen, of_rows).with_measurements(measurements)
    without = {row.at for row in comparison if "none" in (row.policy, *row.same_as)}
    rows = [
        replace(row, no_gain=no_gain(facts, row) or row.no_gain)
        if not row.error and (row.no_gain or row.at not in without)
        else row
        for row in comparison
    ]
    return replace(comparison, rows=tuple(rows))


def _offered(facts: Facts, namespace: Mapping[str, Any]) -> list[str]:
    """The keys that a trace offers; a policy of the user's own that was seen before only where its name leads to it."""
    return [choice.key for choice in facts.engine.choices() if choice.meaning != OWN or choice.key in namespace]


def _text(policy: Any) -> str:
    if isinstance(policy, Plan):
        return policy.policy
    return policy if isinstance(policy, str) else getattr(policy, "__name__", None) or repr(policy)


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
        times=None if device is None else times(report, device),
        offloading=offloading(report, device),
        complete=all(kernel.known for kernel in (*report.forward_kernels, *report.backward_kernels)),
    )
