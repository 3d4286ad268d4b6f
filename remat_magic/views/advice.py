"""Findings about a policy as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import Advice
from remat_magic.views import format as fmt
from remat_magic.views.format import escape

__all__ = ["advice_html", "stake"]


def advice_html(advice: Sequence[Advice]) -> str:
    """Each finding with its line, what is at stake and the mend."""
    if not advice:
        return '<p class="remat-empty">Nothing to say against this policy.</p>'
    return f'<ul class="remat-advice">{"".join(map(_item, advice))}</ul>'


def stake(finding: Advice) -> str:
    """What is at stake, empty where it is not known."""
    if finding.figure is None or not finding.unit:
        return ""
    return fmt.nbytes(finding.figure) if finding.unit == "bytes" else fmt.flops(finding.figure)


def _item(finding: Advice) -> str:
    at_stake, amount = "", stake(finding)
    if amount:
        exact = fmt.exact(finding.figure or 0, finding.unit)
        at_stake = f' <b title="{escape(exact)}">{escape(amount)}</b> at stake.'
    place = fmt.location(finding.source)
    where = f'<span class="remat-place">{escape(place)}</span> ' if place else ""
    return f"<li>{where}{escape(finding.sentence)}{at_stake}<br><i>{escape(finding.mend)}</i></li>"
