"""Policies side by side: what each saves, recomputes and takes, and which are worth having."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from remat_magic import devices
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import times
from remat_magic.policies import OWN
from remat_magic.records import ComparisonRow, Difference, Measurement, Plan, RematError, Report, Residual
from remat_magic.records.registered import registered
from remat_magic.units import parse_bytes
from remat_magic.wording import printable

__all__ = ["Comparison", "compare"]

_T = TypeVar("_T")

# Of the larger peak: on scanned models the estimate was within this of what XLA's compiler for CPUs needs.
_TOO_CLOSE = 0.05


class Comparison:
    """What several policies cost, a row for each; see :func:`compare`.

    In a notebook it shows itself as a table, in a terminal through rich. ``pareto_by`` says what the front is drawn
    over besides ``peak_bytes``: ``"seconds"``, what recomputation and offloading add by estimate, or
    ``"recomputed_flops"`` where no device is known. Saved bytes rank nothing: a checkpoint around a whole function
    saves fewest, and its peak is no lower.
    """

    def __init__(
        self,
        rows: Sequence[ComparisonRow],
        reports: Sequence[Report | None],
        device: devices.Device | None,
        function: str,
    ) -> None:
        self.function = function
        self.device = device
        self.pareto_by = "seconds" if device is not None else "recomputed_flops"
        self._reports = {
            (policy, row.at): report
            for row, report in zip(rows, reports, strict=True)
            if report is not None
            for policy in (row.policy, *row.same_as)
        }
        front = _front([_point(row) for row in rows])
        self.rows = tuple(replace(row, pareto=mine) for row, mine in zip(rows, front, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.rows)} policies for {printable(self.function)}>"

    def __rich__(self) -> Any:
        return registered("comparison").render(self.rows, **self._about(), notes=self.notes)

    def _repr_html_(self) -> str:
        return registered("comparison").comparison_html(self.rows, **self._about(), notes=self.notes)

    def _about(self) -> dict[str, str]:
        device = "" if self.device is None else self.device.name
        return {"function": self.function, "device": device, "source": self.device.source if self.device else ""}

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
            if policy in (row.policy, *row.same_as) and at in (None, row.at):
                return row
        known = ", ".join(row.policy for row in self.rows)
        raise RematError(f"{policy!r} is not compared here; compared are {known}.")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the estimates cannot tell.

        On scanned models the estimated peaks were within 5% of XLA's count, and so was the order of policies further
        apart than that; of closer ones it need not be.
        """
        known = sorted(
            ((row.peak_bytes, row.label) for row in self.rows if row.peak_bytes is not None), key=lambda pair: pair[0]
        )
        close = [
            f"{lower} and {higher}"
            for (less, lower), (more, higher) in itertools.pairwise(known)
            if less < more and more - less < _TOO_CLOSE * more
        ]
        if not close:
            return ()
        return (
            f"Too close for the estimate of peak memory to tell apart: {'; '.join(close)}. Measure them, or choose by "
            "what they recompute.",
        )

    def best(self, peak_bytes: int | str) -> ComparisonRow:
        """The policy that adds least (seconds by estimate, else FLOPs) with a peak of at most so many bytes.

        Args:
            peak_bytes: in bytes, or a text like ``"16 GiB"``.

        Raises:
            RematError: no policy stays below; says which comes nearest.
        """
        limit = parse_bytes(peak_bytes, "peak_bytes")
        known = [(point, row) for row in self.rows if (point := _point(row)) is not None]
        if not known:
            raise RematError(f"No compared policy of {self.function} has a known peak and cost.")
        within = [(point[1], point[0], index) for index, (point, _) in enumerate(known) if point[0] <= limit]
        if not within:
            peak, row = min(((point[0], row) for point, row in known), key=lambda pair: pair[0])
            raise RematError(
                f"No compared policy of {self.function} has a peak of at most {limit:,} bytes: "
                f"{row.label} comes nearest with {peak:,.0f}; use smaller batches, or checkpoint inside "
                "the function."
            )
        return known[min(within)[2]][1]

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
            return [replace(residual, needed_by=()) for residual in report.residuals]

        mine, theirs = _set_off(residuals(first), residuals(second))
        again, later = _set_off(first.recomputed, second.recomputed)
        return Difference(a, b, mine, theirs, again, later)

    def _report(self, policy: str, at: str | None) -> Report:
        row = self.row(policy, at)
        report = self._reports.get((policy, row.at))
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
        about = self._about()
        return {"function": self.function, "device": about["device"] or None, "device_source": about["source"],
                "pareto_by": self.pareto_by, "notes": list(self.notes), "rows": rows}  # fmt: skip

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


def compare(
    facts: Facts,
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
    everything = [*_offered(facts, namespace or {}), *besides] if policies is None else [*policies, *besides]
    measured = {(each.policy, each.at): each for each in measurements}
    rows: list[ComparisonRow] = []
    reports: list[Report | None] = []
    seen: dict[Any, int] = {}
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
        same = seen.setdefault(_essence(report), len(rows)) if policies is None else len(rows)
        if same < len(rows):
            if report.policy not in (rows[same].policy, *rows[same].same_as):
                row = rows[same]
                same_as, labels = (*row.same_as, report.policy), (*row.same_labels, report.label)
                rows[same] = replace(row, same_as=same_as, same_labels=labels)
            continue
        rows.append(_row(report, chosen))
        reports.append(report)
    rows = [_with_measured(row, measured) for row in rows]
    return Comparison(rows, reports, chosen, facts.engine.function_name)


def _offered(facts: Facts, namespace: Mapping[str, Any]) -> list[str]:
    """The keys that a trace offers; a policy of the user's own that was seen before only where its name leads to it."""
    return [choice.key for choice in facts.engine.choices() if choice.meaning != OWN or choice.key in namespace]


def _text(given: Any) -> str:
    if isinstance(given, Plan):
        return given.policy
    return given if isinstance(given, str) else getattr(given, "__name__", None) or repr(given)


def _essence(report: Report) -> Any:
    """What makes two reports of one function the same, whatever their policies are called."""
    kernels = (report.forward_kernels, report.backward_kernels)
    return (report.at, report.residuals, report.recomputed, *kernels, report.peak_bytes, report.backward_error)


def _row(report: Report, device: devices.Device | None) -> ComparisonRow:
    row = ComparisonRow(
        report.policy,
        report.at,
        saved_bytes=report.saved_bytes,
        argument_bytes=report.argument_bytes,
        offloaded_bytes=report.offloaded_bytes,
        code=report.code,
        error=report.backward_error,
        label=report.label,
    )
    if report.backward_error:
        return row
    return replace(
        row,
        forward_flops=report.forward_flops,
        repeated_flops=report.repeated_flops,
        deferred_flops=report.deferred_flops,
        recomputed_flops=report.recomputed_flops,
        peak_bytes=report.peak_bytes,
        times=None if device is None else times(report, device),
        complete=all(kernel.known for kernel in (*report.forward_kernels, *report.backward_kernels)),
    )


def _with_measured(row: ComparisonRow, measured: dict[tuple[str, str], Measurement]) -> ComparisonRow:
    keys = ((policy, row.at) for policy in (row.policy, *row.same_as))
    found = next((measured[key] for key in keys if key in measured), None)
    if found is None:
        return row
    return replace(
        row,
        measured_bytes=found.total_bytes,
        measured_temp_bytes=found.temp_bytes,
        measured_seconds=found.run_seconds,
        measured_compile_seconds=found.compile_seconds,
        measured_flops=found.flops,
        measured_device=found.device,
        findings=found.findings,
        error=row.error or found.error,
    )


def _point(row: ComparisonRow) -> tuple[float, float] | None:
    """Where a row stands: its peak, and what its policy adds; None where either is unknown."""
    if row.peak_bytes is None or row.recomputed_flops is None:
        return None
    if row.times is None:
        return row.peak_bytes, row.recomputed_flops
    return None if row.times.offload is None else (row.peak_bytes, row.times.extra)


def _front(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which points no other beats: as good in both, and better in one."""
    known = [point for point in points if point is not None]
    return [
        point is not None
        and not any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in known)
        for point in points
    ]


def _set_off(mine: Iterable[_T], theirs: Iterable[_T]) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """What is left of both when equal ones are set off against each other, as often as both have them."""
    first, second = Counter(mine), Counter(theirs)
    return tuple((first - second).elements()), tuple((second - first).elements())
