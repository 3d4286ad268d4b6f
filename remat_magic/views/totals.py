"""The headline of a report: what every view says of it in numbers, before any of them says how it looks."""

from __future__ import annotations

from dataclasses import dataclass

from remat_magic.records import Equation, Report
from remat_magic.views import format as fmt
from remat_magic.views.rows import axes


@dataclass(frozen=True, slots=True)
class Total:
    """One number of the headline: ``value`` for reading, ``exact`` for hovering.

    ``number`` is the value itself, in ``unit``; None where it is unknown.
    """

    key: str
    label: str
    value: str
    detail: str
    exact: str
    number: int | None = None
    unit: str = "bytes"


def totals(report: Report) -> list[Total]:
    """The headline's numbers; offloaded bytes and constants only where there are any."""

    def values(*kinds: str) -> str:
        counted = [row for row in report.residuals if row.kind in kinds and not row.dropped]
        return fmt.count(len(counted), "value")

    def matters(*kinds: str) -> bool:
        return any(residual.kind in kinds for residual in report.residuals)

    headline = [_bytes_total("saved", "saved", report, values("intermediate"))]
    if matters("offloaded"):
        headline.append(_bytes_total("offloaded", "offloaded", report, values("offloaded")))
    alive = f"{values('argument')} needed, alive anyway"
    headline.append(_bytes_total("argument", "arguments", report, alive))
    if matters("constant", "literal"):
        headline.append(_bytes_total("constant", "constants", report, values("constant", "literal")))
    dropped = sum(row.dropped for row in report.residuals)
    if dropped:
        detail = f"{fmt.count(dropped, 'value')}, dropped when compiled"
        headline.append(_bytes_total("unread", "unread", report, detail))
    headline += [_work_total("repeated", report), _work_total("deferred", report)]
    if report.communicated_bytes:
        headline.append(_communication(report))
    if report.peak_bytes is not None:
        exact = fmt.exact(report.peak_bytes, "bytes")
        about = fmt.about(report.peak_bytes, report.peak_low, report.peak_high)
        headline.append(Total("peak", "peak", about, "estimated", exact, report.peak_bytes))
    return headline


def _bytes_total(key: str, label: str, report: Report, detail: str) -> Total:
    number: int = getattr(report, f"{key}_bytes")
    return Total(key, label, fmt.nbytes(number), detail, fmt.exact(number, "bytes"), number)


def _work_total(key: str, report: Report) -> Total:
    if not report.complete:
        return Total(key, key, "…", "being traced", "the backward half is not traced yet")
    if report.backward_error:
        return Total(key, key, "unknown", "no backward pass", report.backward_error)
    equations: tuple[Equation, ...] = getattr(report, key)
    number: int = getattr(report, f"{key}_flops")
    any_cost = any(equation.flops is not None for equation in equations)
    operations = fmt.count(len(equations), "operation")
    if not equations:
        return Total(key, key, "nothing", "", "no operation", number=0, unit="FLOPs")
    if not any_cost:
        return Total(key, key, operations, "cost unknown", operations, unit="FLOPs")
    detail, exact = operations, fmt.exact(number, "FLOPs")
    if key == "deferred":
        detail, exact = f"{detail}, no extra work", f"{exact} that run only now"
    elif report.forward_flops:
        share = fmt.percent(number, report.forward_flops)
        exact = f"{exact}, {share} of the forward pass's"
    if key == "repeated" and (communication := _communicated_again(report)):
        detail, exact = f"{detail}, {communication}", f"{exact}; {communication}"
    return Total(key, key, fmt.flops(number), detail, exact, number=number, unit="FLOPs")


def _communicated_again(report: Report) -> str:
    """What repeated collectives tell a device once more, ``gathers 3.1 MB again over data``; empty for nothing."""
    again = [equation for equation in report.repeated if equation.communicated_bytes]
    if not again:
        return ""
    what = "gathers" if all(equation.collective == "all-gather" for equation in again) else "communicates"
    over = axes(axis for equation in again for axis in equation.over)
    return f"{what} {fmt.nbytes(report.repeated_communicated_bytes)} again over {over}"


def _communication(report: Report) -> Total:
    number, ahead, back = (
        number_of_half or 0
        for number_of_half in (
            report.communicated_bytes,
            report.forward_communicated_bytes,
            report.backward_communicated_bytes,
        )
    )
    exact = f"{fmt.exact(number, 'bytes')} of the results of gathers, reductions and the like, on each device"
    detail = f"forward {fmt.nbytes(ahead)}, backward {fmt.nbytes(back)}"
    return Total("communicated", "communication", fmt.nbytes(number), detail, exact, number)


def uncounted(report: Report) -> list[str]:
    """Sentences about what the FLOPs leave out."""
    uncosted = [name for name in report.uncosted if name != "while"]
    sentences = [f"Not counted in the FLOPs: {', '.join(uncosted)}."] if uncosted else []
    if "while" in report.uncosted:
        sentences.append("FLOPs are what is needed at least: a while loop of unknown length counts as one turn.")
    return sentences
