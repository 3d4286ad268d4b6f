"""What two policies save and recompute differently, as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.model import Difference, Equation, Report, Residual

from . import format as fmt
from .cells import table, td, what_html, where_html
from .format import escape
from .rows import recomputed_rows, residual_rows

__all__ = ["difference_html"]

_HEADS = (("Size or cost", "num"), ("Type", "type"), ("What", "what"), ("Source", "source"))


def difference_html(difference: Difference) -> str:
    """Both sides, each with what only one of the policies saves and what only it recomputes."""
    sides = (
        (difference.a, difference.residuals_only_in_a, difference.recomputed_only_in_a),
        (difference.b, difference.residuals_only_in_b, difference.recomputed_only_in_b),
    )
    if not any(residuals or recomputed for _, residuals, recomputed in sides):
        names = " and ".join(f"<code>{escape(policy)}</code>" for policy, _, _ in sides)
        return f'<p class="remat-empty">{names} save and recompute the same.</p>'
    return "".join(_side(*side) for side in sides)


def _side(policy: str, residuals: Sequence[Residual], recomputed: Sequence[Equation]) -> str:
    report = Report(policy, "", tuple(residuals), tuple(recomputed))
    name = f"<code>{escape(policy)}</code>"
    return (
        f"<h4>Only under {name}: saved, {fmt.nbytes(sum(residual.nbytes for residual in residuals))}</h4>"
        f"{_saved(report)}"
        f"<h4>Only under {name}: recomputed, {fmt.flops(report.recomputed_flops)}</h4>{_recomputed(report)}"
    )


def _saved(report: Report) -> str:
    rows = list[str]()
    for row in residual_rows(report):
        times = f' <span class="remat-times">x{row.count}</span>' if row.count > 1 else ""
        cells = [
            td("num", fmt.nbytes(row.nbytes), fmt.exact(row.nbytes, "bytes")),
            td("type", f"<code>{escape(row.type)}</code>{times}"),
            td("what", what_html(row.label, row.name, row.also)),
            td("source", where_html(row)),
        ]
        rows.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    return table("Saved", _HEADS, rows) if rows else '<p class="remat-empty">Nothing.</p>'


def _recomputed(report: Report) -> str:
    rows = list[str]()
    for row in recomputed_rows(report):
        cells = [
            td("num", fmt.flops(row.flops), "" if row.flops is None else fmt.exact(row.flops, "FLOPs")),
            td("type", f"<code>{escape(', '.join(row.outputs))}</code>"),
            td("what", f"{what_html(row.primitive, row.name)} <small>{row.kind}</small>"),
            td("source", where_html(row)),
        ]
        rows.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    return table("Recomputed", _HEADS, rows) if rows else '<p class="remat-empty">Nothing.</p>'
