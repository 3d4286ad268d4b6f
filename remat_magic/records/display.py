"""Records that show themselves where one is the value of a cell: a page of data is no answer there."""

from __future__ import annotations

from typing import Any, SupportsIndex, TypeVar, overload

from remat_magic.records.registered import registered

__all__ = ["Displayed", "Labelled", "Listed"]

T = TypeVar("T")


class Displayed:
    """HTML in a notebook, tables in IPython's terminal and for rich, and one line where Python asks for no more."""

    __slots__ = ()

    def __repr__(self) -> str:
        return registered("display").line(self)

    def _repr_html_(self) -> str:
        return registered("display").html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # In a list or a dictionary a line is enough.
        printer.text(repr(self) if cycle or len(printer.stack) > 1 else registered("display").text(self).rstrip("\n"))

    def __rich__(self) -> Any:
        return registered("display").renderable(self)


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
        return registered("display").text(self).rstrip("\n")

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, key: slice, /) -> Listed[T]: ...
    def __getitem__(self, key: Any, /) -> Any:
        found = tuple.__getitem__(self, key)
        return Listed(found) if isinstance(key, slice) else found
