"""What of the user's code ran in a trace: which functions, in which files and namespaces."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import jax

from remat_magic._jax import open_jaxpr, traceback_of
from remat_magic.editing.source import Function, Source, read_source
from remat_magic.engine import signature
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.spans import is_user_file
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError, Site

__all__ = [
    "EditedCall",
    "Setting",
    "checkpoint_calls",
    "executed_codes",
    "held",
    "is_checkpoint",
    "layers",
    "resolved",
]


def executed_codes(closed: Any) -> set[CodeType]:
    """The code of the user's functions that ran while a program was traced and made operations of it."""
    found: set[CodeType] = set()
    seen: set[int] = set()
    for eqn, _ in walk(open_jaxpr(closed)):
        traceback = traceback_of(eqn)
        if traceback is None or id(traceback) in seen:
            continue
        seen.add(id(traceback))
        for code in traceback.raw_frames()[0]:
            if code.co_filename == signature.__file__:  # from here on outward it is whoever asked for the trace
                break
            if is_user_file(code.co_filename):
                found.add(code)
    return found


@dataclass(frozen=True, slots=True)
class EditedCall:
    """A call of ``jax.checkpoint`` that an edit changes: its number among those of its file, and the site it makes."""

    file: str
    number: int
    site: Site


@dataclass(eq=False)
class Setting:
    """A function with the sources and namespaces of what it runs.

    Attributes:
        fun: the function that was traced.
        sources: by file name.
        codes: for each code object of the user's that ran, its file and its number in the source's ``functions``.
        namespaces: the globals of each file's functions.
    """

    fun: Any
    sources: dict[str, Source] = field(default_factory=dict)
    codes: dict[CodeType, tuple[str, int]] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(fun: Any, closed: Any) -> Setting:
        """The setting of a function and the program traced from it.

        Raises:
            RematError: a source is not available, or not what the function was compiled from.
        """
        setting = Setting(fun)
        by_file: dict[str, set[CodeType]] = {}
        for code in executed_codes(closed):
            by_file.setdefault(code.co_filename, set()).add(code)
        for function in _functions(fun):
            setting.namespaces.setdefault(function.__code__.co_filename, function.__globals__)
        if not by_file:
            raise RematError(
                f"no operation of {function_name(fun)} stands in source text of yours: there is nothing to edit."
            )
        for file, codes in sorted(by_file.items()):
            source = setting.sources[file] = read_source(file, codes)
            for code in codes:
                number = source.number_of(code)
                if number is not None:
                    setting.codes[code] = file, number
            if file not in setting.namespaces:
                setting.namespaces[file] = _module_of(file, source)
        return setting

    def numbers(self, file: str) -> set[int]:
        """The functions of a file that ran."""
        return {number for where, number in self.codes.values() if where == file}

    def function_node(self) -> tuple[Source, Function] | None:
        """The definition of the traced function itself, through whatever wraps it; None where it is not the user's."""
        for layer in layers(self.fun):
            function = getattr(layer, "__func__", layer)
            code = getattr(function, "__code__", None)
            if not isinstance(code, CodeType) and not isinstance(layer, type):
                own = (vars(kind).get("__call__") for kind in type(layer).__mro__)
                code = getattr(next((call for call in own if call is not None), None), "__code__", None)
            if code in self.codes:
                file, number = self.codes[code]
                return self.sources[file], self.sources[file].functions[number]
        return None


def _module_of(file: str, source: Source) -> dict[str, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            return vars(module)
    raise RematError(f"the namespace of {source.place} cannot be found: define the function in a module or a cell.")


def layers(fun: Any) -> Iterator[Any]:
    """A function and what it wraps, outermost first, as far as wrappers tell."""
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)


def held(value: Any) -> list[Any]:
    """What a function or container holds that can be, or hold, a function."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        found = []
        for cell in value.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not yet bound
                continue
        return found
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if type(value) in (list, tuple):
        return list(value) if len(value) < 1000 else []
    if type(value) is dict:
        return list(value.values()) if len(value) < 1000 else []
    return []


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions(fun: Any) -> Iterator[FunctionType]:
    """The user's functions that can be reached from one by closures, globals, wrappers and the user's modules."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [fun]
    while todo and len(seen) < 20000:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        todo += held(value)
        if isinstance(value, type):
            if is_user_file(getattr(sys.modules.get(value.__module__), "__file__", None) or "<cell>"):
                todo += list(vars(value).values())
            continue
        if callable(value):
            todo.append(getattr(value, "__wrapped__", None))
        if not isinstance(value, FunctionType):
            if value is not None and not isinstance(value, types.ModuleType):
                todo.append(type(value))
            continue
        if not is_user_file(value.__code__.co_filename):
            continue
        yield value
        names = set(_names(value.__code__))
        for name in names:
            used = value.__globals__.get(name)
            if isinstance(used, types.ModuleType):
                if is_user_file(getattr(used, "__file__", None) or ""):
                    todo += [vars(used)[each] for each in names if each in vars(used)]
            else:
                todo.append(used)


# ------------------------------------------------------------------------------------ the user's names


def resolved(expression: ast.expr, space: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module, stands for; None for any other expression. Runs nothing."""
    match expression:
        case ast.Name(name):
            return space.get(name)
        case ast.Attribute(inner, name):
            owner = resolved(inner, space)
            return getattr(owner, name, None) if isinstance(owner, types.ModuleType) else None
        case _:
            return None


def is_checkpoint(expression: ast.expr, space: Mapping[str, Any]) -> bool:
    """Whether an expression is ``jax.checkpoint`` itself, by whatever name."""
    found = resolved(expression, space)
    return found is jax.checkpoint or found is jax.remat


def checkpoint_calls(tree: ast.AST, space: Mapping[str, Any]) -> list[ast.Call]:
    """The calls of ``jax.checkpoint`` in the order of the text."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_checkpoint(node.func, space))
    return sorted(calls, key=lambda call: (call.func.lineno, call.func.col_offset))
