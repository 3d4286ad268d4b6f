"""Which function of the user's own is differentiated, and by what names the user calls the values in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from remat_magic import _jax
from remat_magic.engine.differentiated import Differentiated
from remat_magic.engine.signature import Leaf
from remat_magic.engine.sites import Identity
from remat_magic.user_files import is_user_file

__all__ = ["FirstCall", "Name"]

Name = tuple[str, str, int | None]  # of a leaf, of its argument, and the position of that


class FirstCall:
    """Watches for the first function of the user's own that is called, which is the one that is differentiated.

    It knows by what names the user calls the values that go in, whichever library called it.
    """

    def __init__(self) -> None:
        self.who: Identity | None = None
        self.static: tuple[Leaf, ...] = ()
        self._names: dict[int, Name] = {}
        self._values: list[Any] = []  # kept alive, so that their identity stays their own

    def begin(self, frame: FrameType) -> None:
        """A function is called."""
        code = frame.f_code
        if self.who is not None or not is_user_file(code.co_filename) or _handles_a_container(frame):
            return
        self.who = (_name_of(frame), code.co_filename, code.co_firstlineno)
        with contextlib.suppress(Exception):  # a container of the user's own that cannot be flattened has no names
            self._take_names(frame)

    def end(self, frame: FrameType, value: Any) -> None:
        """A function has returned a value."""

    def _take_names(self, frame: FrameType) -> None:
        code, local = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & _VARARGS) + bool(code.co_flags & _VARKEYWORDS)
        parameters = code.co_varnames[:count]
        static: list[Leaf] = []
        for position, name in enumerate(parameters):
            for leaf_name, value in _paths(name, local.get(name)):
                if isinstance(value, (Tracer, jax.Array, np.ndarray)):
                    self._names.setdefault(id(value), (leaf_name, name, position))
                    self._values.append(value)
                elif not callable(value):
                    static.append(Leaf(leaf_name, name, position, value, is_array=False, differentiated=False))
        self.static = tuple(static)
        # What the function closes over, and what the functions around it call what they give it.
        around: FrameType | None = frame
        while around is not None:
            if is_user_file(around.f_code.co_filename):
                for name, container in list(around.f_locals.items()):
                    for leaf_name, value in _paths(name, container) if name not in parameters else ():
                        if isinstance(value, Tracer):
                            self._names.setdefault(id(value), (leaf_name, name, None))
                            self._values.append(value)
            around = around.f_back

    def take_from(self, inner: Differentiated, values: Sequence[Any]) -> None:
        """Know what is known of a function in whose place another is differentiated, called with these values."""
        self.who, self.static = inner.who, inner.static
        constants = _jax.consts_of(inner.closed)
        outer = [(constants[index], leaf) for index, leaf in inner.constants.items()]
        for value, leaf in (*outer, *zip(values, inner.primals, strict=True)):
            self._names[id(value)] = leaf.name, leaf.argument, leaf.position
            self._values.append(value)

    def names(self, values: Sequence[Any], paths: Sequence[Any] = ()) -> list[Name]:
        """What the user calls each value; ``paths`` to them say where nobody calls it anything."""
        names: list[Name] = []
        for number, value in enumerate(values):
            path = keystr(paths[number]) if paths else f"[{number}]"
            word = "differentiated" if paths else "closed_over"
            names.append(self._names.get(id(value)) or (f"{word}{path}", word, None))
        return names


_VARARGS, _VARKEYWORDS = 0x04, 0x08


def _handles_a_container(frame: FrameType) -> bool:
    """Whether a call comes from JAX, or a library, putting a container of the user's own together again.

    Or comparing it, making its hash: no other special method than ``__call__`` is what somebody differentiates.
    """
    code = frame.f_code
    special = code.co_name.startswith("__") and code.co_name != "__call__"
    if special or code.co_varnames[:1] == ("_cls",):  # of a namedtuple
        return True
    caller = frame.f_back
    while caller is not None and is_user_file(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.endswith(("tree_util.py", "flattree.py"))


def _paths(name: str, container: Any) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(Exception):
        for path, value in tree_flatten_with_path(container)[0]:
            yield name + keystr(path), value


def _name_of(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_name == "__call__":  # of a model's class: the class is what the user knows it by
        return code.co_qualname.split(".")[-2] if "." in code.co_qualname else code.co_name
    return code.co_name
