"""The Values tab: what is saved and what is computed again, which the reader searches, sorts and groups."""

from __future__ import annotations

from typing import Any

from remat_magic.records import Report
from remat_magic.views.tables import KEYS
from remat_magic.views.values import recomputed_html, residuals_html
from remat_magic.widget.controls import ID, button, taught
from remat_magic.widget.panel import Panel

_GROUPS = [("", "nothing"), ("line", "line"), ("name", "name"), ("operation", "operation"), ("path", "loop or call")]


class Values(Panel):
    """One table under the other, of the same columns; ``kept`` is filled by the first screen, as on its device."""

    key, title, parts, early = "values", "Values", ("kept", "residuals", "recomputed"), ("residuals",)

    def tools(self) -> str:
        """What the tables are searched and grouped by."""
        options = "".join(f'<option value="{value}">{text}</option>' for value, text in _GROUPS)
        return (
            '<div class="remat-tools remat-arranging-tools">'
            f"{button('arrange', 'Find, group', aria_expanded='false')}"
            f'<span class="remat-field"{taught("find")}><label for="{ID}find">Find</label> '
            f'<input type="search" id="{ID}find" data-find placeholder="any text of a row" autocomplete="off" '
            f'spellcheck="false" {KEYS}></span>'
            f'<span class="remat-field"{taught("group")}>'
            f'<label for="{ID}group">Group by</label> '
            f'<select id="{ID}group" data-group {KEYS}>{options}</select></span></div>'
        )

    def add(self, view: dict[str, Any], report: Report) -> None:
        """Both tables, and the length of the first."""
        view["parts"]["residuals"] = f"{_head('Saved for the backward pass')}{residuals_html(report)}"
        again = recomputed_html(report)
        view["parts"]["recomputed"] = f"{_head('Computed again in the backward pass')}{again}"
        view["counts"][self.key] = len(report.residuals)


def _head(text: str) -> str:
    """A heading; the script tells what the rows below, or those of them that are shown, add up to."""
    return f"<h4>{text} <small data-summary></small></h4>"
