"""An assertion about a policy, for the tests of a training repository."""

from __future__ import annotations

from typing import Any

from remat_magic.facts.facts import Traced
from remat_magic.records import RematError, Report, Residual
from remat_magic.units import parse_bytes, parse_flops

__all__ = ["assert_policy"]

_NAMED = 3


def assert_policy(
    trace_or_report: Report | Traced,
    policy: Any = "as_written",
    at: Any = None,
    *,
    saved_at_most: int | str | None = None,
    peak_at_most: int | str | None = None,
    offloaded_at_most: int | str | None = None,
    recomputed_flops_at_most: int | str | None = None,
    residuals_at_most: int | None = None,
) -> Report:
    """Assert what a policy saves, holds and recomputes. Nothing runs on a device for this.

    Args:
        trace_or_report: what ``remat_magic.trace`` gave, or a complete report.
        policy: the policy, as for ``trace.report``; not for a report, which has one.
        at: where, likewise.
        saved_at_most: bytes of intermediates saved on the device, as a number or a text (``"2 GiB"``, ``"1.5 GB"``).
        peak_at_most: bytes of the estimated peak, arguments and gradients included.
        offloaded_at_most: bytes moved to another memory.
        recomputed_flops_at_most: FLOPs of what the backward pass recomputes, likewise (``"3 TFLOPs"``).
        residuals_at_most: how many intermediates are saved or offloaded.

    Returns:
        The report.

    Raises:
        AssertionError: a limit is exceeded, or what it limits is not known; says what was found and where the largest
            residuals are made.
        RematError: a limit that is no size, no limit at all, or a policy that cannot be traced.
    """
    limits_given = {
        "saved_at_most": saved_at_most,
        "peak_at_most": peak_at_most,
        "offloaded_at_most": offloaded_at_most,
        "recomputed_flops_at_most": recomputed_flops_at_most,
        "residuals_at_most": residuals_at_most,
    }
    if all(limit is None for limit in limits_given.values()):
        raise RematError(f"assert_policy needs a limit: one of {', '.join(limits_given)}.")
    limits = {
        name: parse_flops(limit, name) if "flops" in name else parse_bytes(limit, name)
        for name, limit in limits_given.items()
        if limit is not None
    }
    report = _report(trace_or_report, policy, at)
    if report.backward_error:
        raise AssertionError(f"{report.function} under {report.policy}: {report.backward_error}")
    saved = [residual for residual in report.residuals if residual.kind in ("intermediate", "offloaded")]
    # Recomputed operations that no formula covers are not in the FLOPs; the limit cannot then be said to hold.
    unknown = sorted({equation.primitive for equation in report.recomputed if equation.flops is None})
    if any(equation.times is None for equation in report.recomputed):
        unknown.append("the further turns of a while loop")
    figures: dict[str, tuple[str, int | None]] = {
        "saved_at_most": ("saved bytes", report.saved_bytes),
        "peak_at_most": ("bytes at the estimated peak", report.peak_bytes),
        "offloaded_at_most": ("offloaded bytes", report.offloaded_bytes),
        "recomputed_flops_at_most": ("recomputed FLOPs", report.recomputed_flops),
        "residuals_at_most": ("saved residuals", len(saved)),
    }
    wrong = []
    for name, limit in limits.items():
        what, number = figures[name]
        if number is None:
            wrong.append(f"the number of {what} is not known")
        elif number > limit:
            wrong.append(f"{number:,} {what}, and at most {limit:,} are allowed")
        elif name == "recomputed_flops_at_most" and unknown:
            wrong.append(f"{number:,} recomputed FLOPs without {', '.join(unknown)}, whose cost is not known")
    if wrong:
        raise AssertionError(_sentence(report, wrong, saved))
    return report


def _report(trace_or_report: Report | Traced, policy: Any, at: Any) -> Report:
    if isinstance(trace_or_report, Report):
        if at is not None or policy not in ("as_written", trace_or_report.policy):
            raise RematError("A report has its policy already: give the trace to assert another one.")
        if not trace_or_report.complete:
            raise RematError("The report is of the forward half alone: give the trace, or a report of trace.report().")
        return trace_or_report
    if not hasattr(trace_or_report, "facts"):
        raise RematError(
            f"assert_policy needs a trace or a report, not {type(trace_or_report).__name__}: call rm.trace first."
        )
    return trace_or_report.facts.report(policy, at)


def _sentence(report: Report, wrong: list[str], saved: list[Residual]) -> str:
    at = "" if report.at in ("", "function") else f" at {report.at}"
    text = f"{report.function} under {report.policy}{at}: {'; '.join(wrong)}."
    largest = sorted(saved, key=lambda residual: -residual.nbytes)[:_NAMED]
    if largest:
        rest = len(saved) - len(largest)
        unnamed = f", and {rest:,} more" if rest else ""
        text += f" The largest residuals are {'; '.join(map(_described, largest))}{unnamed}."
    return text


def _described(residual: Residual) -> str:
    name = f" named {residual.name!r}" if residual.name else ""
    where = ""
    if residual.source is not None:
        where = f" at {residual.source.place}"
        if residual.source.expression:
            where += f" ({residual.source.expression})"
    return f"{residual.nbytes:,} bytes {residual.type} of {residual.primitive or residual.kind}{name}{where}"
