"""Writing a file: whole, or not at all."""

from __future__ import annotations

import contextlib
import os

from remat_magic.errors import RematError

__all__ = ["write"]


def write(path: str | os.PathLike[str], text: str) -> None:
    """Put ``text`` into a file in UTF-8; what was there before stays until the new text is complete.

    Raises:
        RematError: it cannot be written: one sentence says why.
    """
    name = os.fspath(path)
    beside = f"{name}.part"
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(beside, name)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise RematError(f"{name!r} could not be written ({error.strerror or error}): give another path.") from error
