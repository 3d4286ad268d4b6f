"""What the pictures share: elements, axes with round numbers, colours of the notebook's theme."""

from __future__ import annotations

import html
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remat_magic.views.format import escape

# Average advance of a sans-serif at this size; labels are laid out by it, since no font is at hand here.
FONT = 11
_ADVANCE = 0.56
_STEPS = 5  # on an axis at most

colours = {
    "fg": "var(--jp-content-font-color1,currentColor)",
    "dim": "var(--jp-content-font-color2,currentColor)",
    "line": "var(--jp-border-color2,#8888)",
    "accent": "var(--jp-brand-color1,#1976d2)",
    "back": "var(--jp-layout-color0,Canvas)",
    "quiet": "var(--jp-content-font-color3,#888)",
    "warm": "var(--jp-warn-color1,#e07b00)",
}
"""Colours by what they are for: the theme's where there is one, else such as can be read on light and on dark."""


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element; ``content`` is markup already, attributes are escaped (``_`` in their names is ``-``).

    What a script reads, ``data_*``, it reads as it is.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{(html.escape if key.startswith("data_") else escape)(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def _number(value: object) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, /, **attributes: object) -> str:
    """A line of text, escaped."""
    return element("text", escape(content), x=x, y=y, **attributes)


def text_width(content: str) -> float:
    """About how wide a label is."""
    return len(content) * FONT * _ADVANCE


def truncate(content: str, length: int) -> str:
    """At most so many characters, the rest as an ellipsis."""
    return content if len(content) <= length else f"{content[: length - 1]}…"


def identifier(*parts: object) -> str:
    """A name for what a picture refers to inside itself, so that two pictures of one page do not meet."""
    return f"remat-{zlib.crc32(repr(parts).encode()):08x}"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first at or beyond ``most``: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not (most > 0 and math.isfinite(most)):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / _STEPS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if most / (factor * power) <= _STEPS)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Frame:
    """The part of a picture that an axis pair spans, in pixels, and the numbers at its ends."""

    left: float
    top: float
    right: float
    bottom: float
    most_x: float
    most_y: float

    def x(self, number: float) -> float:
        """Where a number is on the horizontal axis."""
        return self.left + (self.right - self.left) * number / self.most_x

    def y(self, number: float) -> float:
        """Where a number is on the vertical axis."""
        return self.bottom - (self.bottom - self.top) * number / self.most_y

    def vertical_axis(self, marks: Iterable[float], label: str, written: Callable[[float], str]) -> str:
        """Lines across with their numbers, and what they count above."""
        parts = list[str]()
        for mark in marks:
            y = self.y(mark)
            parts.append(element("line", x1=self.left, x2=self.right, y1=y, y2=y, class_="remat-grid"))
            parts.append(text(self.left - 6, y + 4, written(mark), text_anchor="end", class_="remat-tick"))
        parts.append(text(2, self.top - 12, label, class_="remat-axis"))
        return "".join(parts)

    def horizontal_axis(self, marks: Iterable[float], label: str, written: Callable[[float], str]) -> str:
        """The numbers below, and what they count."""
        parts = [element("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="remat-base")]
        for mark in marks:
            x = self.x(mark)
            parts.append(element("line", x1=x, x2=x, y1=self.bottom, y2=self.bottom + 4, class_="remat-base"))
            parts.append(text(x, self.bottom + 20, written(mark), text_anchor="middle", class_="remat-tick"))
        parts.append(text(self.right, self.bottom + 36, label, text_anchor="end", class_="remat-axis"))
        return "".join(parts)


_STYLE = (
    f".remat-svg{{max-width:100%;height:auto;font-family:var(--jp-content-font-family,system-ui,sans-serif);"
    f"font-size:{FONT}px;color:inherit}}"
    f".remat-svg text{{fill:{colours['fg']}}}"
    f".remat-svg .remat-tick,.remat-svg .remat-axis{{fill:{colours['dim']}}}"
    f".remat-svg .remat-grid{{stroke:{colours['line']};stroke-width:.5}}"
    f".remat-svg .remat-base{{stroke:{colours['dim']}}}"
)


def picture(
    name: str, width: float, height: float, title: str, description: str, parts: Sequence[str], css: str
) -> str:
    """A whole picture, with the texts that screen readers read."""
    title_id, description_id = f"{name}-title", f"{name}-desc"
    return element(
        "svg",
        element("title", escape(title), id=title_id)
        + element("desc", escape(description), id=description_id)
        + element("style", _STYLE + css)
        + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        class_="remat-svg",
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role="group",
        aria_labelledby=f"{title_id} {description_id}",
    )
