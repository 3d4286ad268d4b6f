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


def stake(found: Advice) -> str:
    """What is at stake, empty where it is not known."""
    if found.figure is None or not found.unit:
        return ""
    return fmt.nbytes(found.figure) if found.unit == "bytes" else fmt.flops(found.figure)


def _item(found: Advice) -> str:
    at_stake, amount = "", stake(found)
    if amount:
        exact = fmt.exact(found.figure or 0, found.unit)
        at_stake = f' <b title="{escape(exact)}">{escape(amount)}</b> at stake.'
    place = fmt.location(found.source)
    where = f'<span class="remat-place">{escape(place)}</span> ' if place else ""
    return f"<li>{where}{escape(found.sentence)}{at_stake}<br><i>{escape(found.mend)}</i></li>"
