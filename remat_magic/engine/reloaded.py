"""Functions that IPython's autoreload changed, with their own lines again."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from remat_magic.jaxprs.spans import codes_of
from remat_magic.user_files import is_user_file


def restore_lines() -> None:
    """Let functions that autoreload changed have the code that their file compiles to.

    It compiles a changed function from its text alone, so that the lines count from there, and names the file of a
    decorator where there is one; functions below it keep their old lines. Only code that does the same is exchanged.
    """
    if "IPython.extensions.deduperreload.deduperreload" not in sys.modules:
        return
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and is_user_file(name):
            linecache.checkcache(name)
            codes = _compiled(name, tuple(linecache.getlines(name)))
            for function in _functions(module):
                _restore(function, name, codes)


@functools.cache  # every trace asks for all files of the user's, which change seldom
def _compiled(name: str, lines: tuple[str, ...]) -> frozenset[CodeType]:
    return frozenset(codes_of(name, lines))


def _restore(function: FunctionType, name: str, codes: frozenset[CodeType]) -> None:
    own = function.__code__
    if own in codes and own.co_filename == name:
        return
    same = [code for code in codes if code.co_name == own.co_name and _content(code) == _content(own)]
    if same:
        named = (code for code in same if code.co_qualname == function.__qualname__)
        function.__code__ = next(named, min(same, key=lambda code: code.co_firstlineno))


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods of a module, and those within their decorators."""
    todo: list[Any] = list(vars(module).values())
    visited: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, type) and value.__module__ == module.__name__:
            todo += vars(value).values()
        elif isinstance(value, property):
            todo += [value.fget, value.fset]
        elif not isinstance(value, type) and callable(value):
            todo += [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            yield value


def _content(code: CodeType) -> tuple[Any, ...]:
    """What code does, wherever it stands."""
    constants = tuple(
        _content(value) if isinstance(value, CodeType) else (type(value), repr(value)) for value in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code, names, code.co_argcount, code.co_kwonlyargcount, constants
