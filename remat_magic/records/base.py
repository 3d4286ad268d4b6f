"""What records have in common: they show themselves, go by a label, and are written to files."""

from __future__ import annotations

import contextlib
import os
import secrets
from types import ModuleType
from typing import Any, SupportsIndex, TypeVar, overload

from remat_magic.errors import RematError

T = TypeVar("T")


def display() -> ModuleType:
    """What shows records: imported only when one is shown, and the one import of records from what is above them."""
    from remat_magic.views import display

    return display


class Displayed:
    """HTML in a notebook, tables in IPython's terminal and for rich, and one line where Python asks for no more."""

    __slots__ = ()

    def __repr__(self) -> str:
        return display().line(self)

    def _repr_html_(self) -> str:
        return display().html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # In a list or a dictionary a line is enough.
        printer.text(repr(self) if cycle or len(printer.stack) > 1 else display().text(self).rstrip("\n"))

    def __rich__(self) -> Any:
        return display().renderable(self)


class Labelled:
    """A record of one policy: ``policy`` is its key, ``label`` what people call it, its key unless it is a plan's."""

    __slots__ = ()
    policy: str
    label: str

    def __post_init__(self) -> None:
        """Use the key for what is called by no other name."""
        if not self.label:
            object.__setattr__(self, "label", self.policy)


class Listed(Displayed, tuple[T, ...]):
    """Records of one kind, which show themselves together, as tables also for ``repr``; a tuple in all else."""

    __slots__ = ()

    def __repr__(self) -> str:
        return display().text(self).rstrip("\n")

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, key: slice, /) -> Listed[T]: ...
    def __getitem__(self, key: Any, /) -> Any:
        records = tuple.__getitem__(self, key)
        return Listed(records) if isinstance(key, slice) else records


def write(path: str | os.PathLike[str], text: str) -> None:
    """Put ``text`` into a file in UTF-8, whole or not at all: what was there before stays until it is complete.

    Raises:
        RematError: it cannot be written: one sentence says why.
    """
    name = os.fspath(path)
    # Beside it, so that it can be moved into place; not by ``tempfile``, whose files nobody else may read.
    beside = os.path.join(os.path.dirname(name), f".{secrets.token_hex(8)}.part")
    try:
        with open(beside, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(beside, name)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if not isinstance(error, OSError):
            raise
        raise RematError(f"{name!r} could not be written ({error.strerror or error}): give another path.") from error
