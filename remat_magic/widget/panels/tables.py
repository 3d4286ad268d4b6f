"""The Residuals and Recomputed tabs: tables that the reader searches, sorts and groups."""

from __future__ import annotations

from typing import Any

from remat_magic.records import Report
from remat_magic.views.report_tables import recomputed_html, residuals_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import ID, button, search, taught
from remat_magic.widget.panel import Panel

_GROUPS = [("", "nothing"), ("line", "line"), ("name", "name"), ("operation", "operation"), ("path", "loop or call")]


class _Table(Panel):
    def tools(self) -> str:
        """What the table is searched and grouped by."""
        options = "".join(f'<option value="{value}">{text}</option>' for value, text in _GROUPS)
        return (
            '<div class="remat-tools remat-arranging-tools">'
            f"{button('arrange', 'Find, group', data_arrange=self.key, aria_expanded='false')}"
            f"{search(self.key, 'Find', 'any text of a row')}"
            f'<span class="remat-field"{taught("group")}>'
            f'<label for="{ID}group-{self.key}">Group by</label> '
            f'<select id="{ID}group-{self.key}" data-group="{self.key}" {KEYS}>{options}</select></span>'
            f'<span class="remat-summary" data-summary="{self.key}"></span></div>'
        )


class Residuals(_Table):
    """What is saved for the backward pass."""

    key, title, early = "residuals", "Residuals", True

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The table, and its length."""
        view["parts"][self.key] = residuals_html(report)
        view["counts"][self.key] = len(report.residuals)


class Recomputed(_Table):
    """What the backward pass computes again, or only then."""

    key, title = "recomputed", "Recomputed"

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The table, and its length."""
        view["parts"][self.key] = recomputed_html(report)
        view["counts"][self.key] = len(report.recomputed) if report.complete else None
