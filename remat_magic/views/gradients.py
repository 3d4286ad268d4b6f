"""A check of gradients as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import GradientDifference
from remat_magic.views.format import escape

__all__ = ["gradients_html"]


def gradients_html(differences: Sequence[GradientDifference]) -> str:
    """How far values and gradients are from those without the checkpoint."""
    rows = list[str]()
    for found in differences:
        if found.absolute is None:
            cells = f'<td colspan="3">{escape(found.error)}</td>'
        else:
            relative = "" if found.relative is None else f"{found.relative:.2g}"
            cells = (
                f'<td class="remat-num">{found.absolute:.2g}</td><td class="remat-num">{relative}</td>'
                f"<td>{escape(found.where)}</td>"
            )
        rows.append(f'<tr><th scope="row"><code>{escape(found.policy)}</code></th>{cells}</tr>')
    return (
        '<div class="remat-compare"><table class="remat-table remat-comparison">'
        "<caption>Largest difference of values and gradients from those without the checkpoint</caption>"
        '<thead><tr><th scope="col">policy</th><th scope="col" class="remat-num">absolute</th>'
        '<th scope="col" class="remat-num">relative</th><th scope="col">where</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
