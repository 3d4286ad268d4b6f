"""Text for terminals."""

from __future__ import annotations

from typing import Any

import rich.text

from remat_magic.wording import printable

__all__ = ["Text"]


class Text(rich.text.Text):
    """rich's text, which passes escape sequences on to the terminal, without them."""

    def __init__(self, text: str = "", style: str = "", **options: Any) -> None:
        super().__init__(printable(text), style, **options)

    def append(self, text: Any, style: Any = None) -> rich.text.Text:
        """Add text; ``Text.assemble`` does so too."""
        return super().append(printable(text) if isinstance(text, str) else text, style)
