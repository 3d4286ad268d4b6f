"""Findings about a policy as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.model import Advice

from . import format as fmt
from .format import escape

__all__ = ["advice_html"]


def advice_html(advice: Sequence[Advice]) -> str:
    """Each finding with its line, what is at stake and the mend."""
    if not advice:
        return '<p class="remat-empty">Nothing to say against this policy.</p>'
    return f'<ul class="remat-advice">{"".join(map(_item, advice))}</ul>'


def _item(found: Advice) -> str:
    stake = ""
    if found.figure is not None and found.unit:
        amount = fmt.nbytes(found.figure) if found.unit == "bytes" else fmt.flops(found.figure)
        stake = f' <b title="{escape(fmt.exact(found.figure, found.unit))}">{escape(amount)}</b> at stake.'
    place = fmt.location(found.source)
    where = f'<span class="remat-place">{escape(place)}</span> ' if place else ""
    return f"<li>{where}{escape(found.sentence)}{stake}<br><i>{escape(found.mend)}</i></li>"
