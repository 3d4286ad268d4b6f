"""Findings about a policy as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from remat_magic.records import Advice
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS

__all__ = ["advice_html", "stake"]


def advice_html(advice: Sequence[Advice]) -> str:
    """Each finding with its line, what is at stake and the mend."""
    if not advice:
        return '<p class="remat-empty">Nothing to say against this policy.</p>'
    return f'<ul class="remat-advice">{"".join(map(_item, advice))}</ul>'


def stake(finding: Advice) -> str:
    """What is at stake, as a part of a sentence; empty where it is not known."""
    amounts = [fmt.flops(finding.figure)] if finding.unit == "FLOPs" and finding.figure is not None else []
    amounts += [fmt.nbytes(finding.stake)] if finding.stake is not None else []
    share = f" ({fmt.percent(round(finding.share * 10**6), 10**6)})" if finding.share else ""
    return f"{' and '.join(amounts)}{share}" if amounts else ""


def _item(finding: Advice) -> str:
    at_stake, amount = "", stake(finding)
    if amount:
        exact = [fmt.exact(finding.figure or 0, "FLOPs")] if finding.unit == "FLOPs" else []
        exact += [fmt.exact(finding.stake, "bytes")] if finding.stake is not None else []
        what = "the share is of the estimated peak or of all FLOPs, whichever is more"
        at_stake = f' <b title="{escape(", ".join(exact))}; {what}">{escape(amount)}</b> at stake.'
    place = fmt.location(finding.source)
    where = f'<span class="remat-place">{escape(place)}</span> ' if place else ""
    try_it = ""
    if finding.policy:
        chosen = f'data-policy="{html.escape(finding.policy)}" data-at="{html.escape(finding.at)}"'
        try_it = f' <button type="button" {chosen} {KEYS}>Try it</button>'
    return f"<li>{where}{escape(finding.sentence)}{at_stake}<br><i>{escape(finding.mend)}</i>{try_it}</li>"
