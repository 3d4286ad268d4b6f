"""Findings about a policy as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from remat_magic.records import Advice
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS, with_code


def advice_html(advice: Sequence[Advice], *, live: bool = True) -> str:
    """Each finding with its line, what is at stake and the mend; in a live widget with buttons that try and copy it."""
    if not advice:
        return ""
    return f'<ul class="remat-advice">{"".join(_item(finding, live) for finding in advice)}</ul>'


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
    buttons = ""
    if finding.policy and live:
        chosen = f'data-policy="{html.escape(finding.policy)}" data-at="{html.escape(finding.at)}"'
        buttons = f' <button type="button" {chosen} {KEYS}>Try it</button>'
    if finding.code and live:
        copied = f'data-action="copy" data-text="{html.escape(finding.code)}" title="Copy the code"'
        buttons += f' <button type="button" {copied} {KEYS}>Copy</button>'
    return f"<li>{where}{with_code(finding.sentence)}{at_stake}<br>{_mend(finding)}{buttons}</li>"


def _mend(finding: Advice) -> str:
    """What to do, in which code looks like code."""
    if not finding.code:
        return f"<i>{with_code(finding.mend)}</i>"
    before, code, after = finding.mend.partition(finding.code)
    return f"<i>{with_code(before)}</i><code>{escape(code)}</code><i>{with_code(after)}</i>"
