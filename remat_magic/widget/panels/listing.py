"""The Source tab: each line with what it saves and has computed again."""

from __future__ import annotations

from typing import Any

from remat_magic.records import Report
from remat_magic.views.source import listing_html
from remat_magic.widget.panel import Panel


class Listing(Panel):
    """The user's source."""

    key, title = "listing", "Source"

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The lines."""
        view["parts"][self.key] = listing_html(report, live=True)
