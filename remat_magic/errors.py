"""The error that users see, and text of unknown origin made fit for sentences and terminals."""

from __future__ import annotations

import re
from collections.abc import Callable


class RematError(ValueError):
    """A mistake that the user can mend; its text is one sentence that says how."""


# Control characters but tab and line feed (escape sequences change a terminal), marks that turn the direction of what
# follows or hide it (those of CVE-2021-42574 among them), and halves of pairs, which no encoding takes.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with what would not be seen, or would change what is seen, written as Python escapes it: ``\\x1b``."""
    return _UNFIT.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def one_line(text: str, most: int = 300) -> str:
    """The text on one line, printable, and of ``most`` characters at most."""
    text = printable(" ".join(text[: 10 * most].split()))
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def text_of(value: object, read: Callable[[object], str] = str) -> str:
    """``read(value)``, or the type's name where that raises: an error must be shown even if its text cannot."""
    try:
        return read(value)
    except Exception:  # noqa: BLE001 - whatever a user's __repr__ does
        return type(value).__name__
