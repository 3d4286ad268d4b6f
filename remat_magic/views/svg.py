"""What the pictures share: elements, and round numbers for axes."""

from __future__ import annotations

import html
import math

from remat_magic.views.format import escape

_STEPS = 5  # on an axis at most


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


def truncate(content: str, length: int) -> str:
    """At most so many characters, the rest as an ellipsis."""
    return content if len(content) <= length else f"{content[: length - 1]}…"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first at or beyond ``most``: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not (most > 0 and math.isfinite(most)):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / _STEPS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if most / (factor * power) <= _STEPS)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]
