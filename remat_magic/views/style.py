"""The style sheets, as they go into a page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_STATIC = Path(__file__).parent / "static"

_SHEETS = ("report.css", "source.css", "glance.css")  # in the order of the cascade


@cache
def style(live: bool = False) -> str:
    """The style sheet, without what only its authors read: every kept output repeats it.

    Args:
        live: with what only the widget needs.
    """
    names = (*_SHEETS, "widget.css", "calm.css", "choosing.css") if live else _SHEETS
    text = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)
    text = re.sub(r"/\*.*?\*/|\s+", " ", text, flags=re.DOTALL)
    return re.sub(r" ?([{};]) ?", r"\1", text).strip()
