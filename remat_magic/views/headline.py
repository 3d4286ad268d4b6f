"""What is said of a report above its tables: what is inspected, its numbers, notes and advice."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from remat_magic.records import Advice, Equation, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS, with_code
from remat_magic.views.values import axes


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

    def size(key: str, label: str, values: int, more: str = "") -> Total:
        number: int = getattr(report, f"{key}_bytes")
        detail = f"{fmt.count(values, 'value')}{more}"
        return Total(key, label, fmt.nbytes(number), detail, fmt.exact(number, "bytes"), number)

    kinds = Counter(row.kind for row in report.residuals)
    read = Counter(row.kind for row in report.residuals if not row.dropped)
    headline = [size("saved", "saved", read["intermediate"])]
    if kinds["offloaded"]:
        headline.append(size("offloaded", "offloaded", read["offloaded"]))
    headline.append(size("argument", "arguments", read["argument"], " needed, alive anyway"))
    if kinds["constant"] or kinds["literal"]:
        headline.append(size("constant", "constants", read["constant"] + read["literal"]))
    if dropped := kinds.total() - read.total():
        headline.append(size("unread", "unread", dropped, ", dropped when compiled"))
    headline += [_work_total("repeated", report), _work_total("deferred", report)]
    if report.communicated_bytes:
        headline.append(_communication(report))
    if report.peak_bytes is not None:
        exact = fmt.exact(report.peak_bytes, "bytes")
        about = fmt.about(report.peak_bytes, report.peak_low, report.peak_high)
        headline.append(Total("peak", "peak", about, "estimated", exact, report.peak_bytes))
    return headline


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
    number, forward, backward = (
        getattr(report, f"{half}communicated_bytes") or 0 for half in ("", "forward_", "backward_")
    )
    exact = f"{fmt.exact(number, 'bytes')} of the results of gathers, reductions and the like, on each device"
    detail = f"forward {fmt.nbytes(forward)}, backward {fmt.nbytes(backward)}"
    return Total("communicated", "communication", fmt.nbytes(number), detail, exact, number)


def uncounted(report: Report) -> list[str]:
    """Sentences about what the FLOPs leave out."""
    uncosted = [name for name in report.uncosted if name != "while"]
    sentences = [f"Not counted in the FLOPs: {', '.join(uncosted)}."] if uncosted else []
    if "while" in report.uncosted:
        sentences.append("FLOPs are a lower bound: a while loop of unknown length counts as one step.")
    return sentences


# -------------------------------------------------------------------------------------------------------------- as HTML


def head_html(signature: str, function: str, step: str, wrt: Iterable[str], title: str = "") -> str:
    """What is inspected: a function with its signature, and the training step that takes its gradient, if there is one.

    ``title`` is how the inspection came about.
    """
    text, name = escape(signature or function), escape(function)
    shown = f"<b>{name}</b><code>{text.removeprefix(name)}</code>"
    if step:
        shown = f"<b>{escape(step)}</b> gradient of <code>{text}</code>"
    names = ", ".join(wrt)
    differentiated = f' <small class="remat-wrt">differentiated: {escape(names)}</small>' if names else ""
    came = f' <small class="remat-title">{escape(title)}</small>' if title else ""
    hover = escape(" ".join(filter(None, [signature, f"differentiated: {names}." if names else "", title])))
    return f'<span class="remat-signature" title="{hover}">{shown}{came}{differentiated}</span>'


# What the line of a choice tells, by its total, and how it says it; the others are rarer.
_SAID = {"saved": "saves", "offloaded": "offloads", "repeated": "repeats"}


def line_html(report: Report, saved_bytes: int | None = None) -> tuple[str, str]:
    """What a choice saves and repeats, as one sentence, and what else it does.

    ``saved_bytes`` is what a device keeps for the backward pass, where that is another number than the report's.
    """
    said, rarer = list[str](), list[str]()
    for total in totals(report):
        if total.key == "peak":
            continue
        if total.key == "saved" and saved_bytes is not None:
            value, exact = fmt.nbytes(saved_bytes), fmt.exact(saved_bytes, "bytes")
            total = replace(total, value=value, exact=exact, number=saved_bytes)
        value = "" if total.number is None else f' data-value="{total.number}"'
        hover = escape("; ".join(filter(None, [total.exact, total.detail])))
        attributes = f'data-total="{total.key}" data-unit="{total.unit}"{value} title="{hover}"'
        number = f"<b>{escape(total.value)}</b>"
        if total.key in _SAID:
            said.append(f'<span class="remat-total" {attributes}>{_SAID[total.key]} {number}</span>')
        else:
            detail = f" <small>{escape(total.detail)}</small>" if total.detail else ""
            rarer.append(f'<span class="remat-total" {attributes}>{escape(total.label)} {number}{detail}</span>')
    whose = f'<small class="remat-label">{report.of_devices}</small> ' if report.of_devices else ""
    return f"{whose}{', '.join(said)}", "; ".join(rarer)


def notes_of(report: Report, counting: bool = True) -> list[str]:
    """The sentences that a reader should know of, with what the FLOPs leave out if ``counting``."""
    return [*filter(None, [report.backward_error]), *report.notes, *(uncounted(report) if counting else ())]


def notes_html(sentences: Iterable[str]) -> str:
    """Sentences, a paragraph each."""
    return "".join(f'<p class="remat-note">{escape(sentence)}</p>' for sentence in sentences)


def advice_html(advice: Sequence[Advice], *, live: bool = True) -> str:
    """Each finding with its line, what is at stake and the mend; in a live widget with a button that copies it."""
    items = "".join(_item(finding, live) for finding in advice)
    return f'<ul class="remat-advice">{items}</ul>' if items else ""


def cards(advice: Sequence[Advice]) -> list[Advice]:
    """The findings that no choice mends: those stand among the choices."""
    return [finding for finding in advice if not finding.policy]


def stake(finding: Advice) -> str:
    """What is at stake, as a part of a sentence; empty where it is not known."""
    amounts = [fmt.flops(finding.figure)] if finding.unit == "FLOPs" and finding.figure is not None else []
    amounts += [fmt.nbytes(finding.stake)] if finding.stake is not None else []
    share = f" ({fmt.percent(round(finding.share * 10**6), 10**6)})" if finding.share else ""
    return f"{' and '.join(amounts)}{share}" if amounts else ""


def _item(finding: Advice, live: bool) -> str:
    at_stake, amount = "", stake(finding)
    if amount:
        exact = [fmt.exact(finding.figure or 0, "FLOPs")] if finding.unit == "FLOPs" else []
        exact += [fmt.exact(finding.stake, "bytes")] if finding.stake is not None else []
        what = "the share is of the estimated peak or of all FLOPs, whichever is more"
        at_stake = f' <b title="{escape(", ".join(exact))}; {what}">{escape(amount)}</b> at stake.'
    place = fmt.location(finding.source)
    where = f'<span class="remat-place">{escape(place)}</span> ' if place else ""
    copy = ""
    if finding.code and live:
        copied = f'data-action="copy" data-text="{html.escape(finding.code)}" title="Copy the code"'
        copy = f' <button type="button" {copied} {KEYS}>Copy</button>'
    before, code, after = finding.mend.partition(finding.code) if finding.code else (finding.mend, "", "")
    mend = f"<i>{with_code(before)}</i>{code and f'<code>{escape(code)}</code><i>{with_code(after)}</i>'}"
    return f"<li>{where}{with_code(finding.sentence)}{at_stake}<br>{mend}{copy}</li>"
