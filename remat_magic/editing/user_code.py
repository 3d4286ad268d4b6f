"""What of the user's code ran in a trace: which functions, in which texts and namespaces, and what they refer to."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from remat_magic import _jax
from remat_magic.editing.parsed_text import Function, ParsedText, number_of, parsed_text
from remat_magic.engine import signature
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError, SourceSpan
from remat_magic.user_files import STAND_IN, is_user_file

__all__ = [
    "Executed",
    "UserCode",
    "executed_codes",
    "held",
    "is_users",
    "layers",
    "reachable",
    "referent",
]


Executed = tuple[str, CodeType]  # with its file, since code of two files that is the same is equal


def executed_codes(*programs: Any) -> set[Executed]:
    """The code of the user's functions that ran while programs were traced and made operations of them."""
    codes: set[Executed] = set()
    seen: set[int] = set()
    for _, eqn in itertools.chain.from_iterable(map(walk, programs)):
        traceback = _jax.traceback_of(eqn)
        if traceback is None or id(traceback) in seen:
            continue
        seen.add(id(traceback))
        for code in traceback.raw_frames()[0]:
            if code.co_filename == signature.__file__:  # from here on outward it is whoever asked for the trace
                break
            if is_user_file(code.co_filename) and STAND_IN not in code.co_varnames:
                codes.add((code.co_filename, code))
    return codes


@dataclass(eq=False)
class UserCode:
    """A function with the texts and namespaces of what it runs.

    Attributes:
        function: the one that was traced.
        texts: by file name.
        codes: for each code object of the user's that ran, and its file, its number in the text's ``functions``.
        namespaces: the globals of each file's functions.
    """

    function: Any
    texts: dict[str, ParsedText] = field(default_factory=dict)
    codes: dict[Executed, int] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    _scopes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(function: Any, *programs: Any) -> UserCode:
        """What ran of a function, by the programs traced from it: of a step its own, and that of its gradient.

        Raises:
            RematError: a text is not available, or not what the function was compiled from.
        """
        code = UserCode(function)
        by_file: dict[str, set[CodeType]] = {}
        for file, executed in executed_codes(*programs):
            by_file.setdefault(file, set()).add(executed)
        if not by_file:
            raise RematError(
                f"no operation of {function_name(function)} stands in source text of yours: there is nothing to edit."
            )
        for reached in reachable(function):
            if isinstance(reached, FunctionType):
                code.namespaces.setdefault(reached.__code__.co_filename, reached.__globals__)
        for file, codes in sorted(by_file.items()):
            text = code.texts[file] = parsed_text(file, codes)
            numbers = {(file, executed): number_of(text.functions, executed) for executed in codes}
            code.codes.update((key, number) for key, number in numbers.items() if number is not None)
            if file not in code.namespaces:
                code.namespaces[file] = _module_namespace(text)
        return code

    def executed(self, file: str) -> list[int]:
        """The numbers of a text's functions that ran."""
        return sorted({number for (where, _), number in self.codes.items() if where == file})

    def number_of(self, function: Any) -> int | None:
        """The number of a function in its text, None where it is of no text."""
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType):
            return None
        text = self.texts.get(code.co_filename)
        return None if text is None else self.codes.get((text.file, code), text.numbers.get(code))

    def scope(self, file: str) -> dict[str, Any]:
        """What the names in a text stand for, as far as they are no variables of a call."""
        if file not in self._scopes:
            scope: dict[str, Any] = {}
            for node in ast.walk(self.texts[file].tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    scope.update(_imported(node))
            for function in reachable(self.function):
                if isinstance(function, FunctionType) and function.__code__.co_filename == file:
                    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                        with contextlib.suppress(ValueError):  # not yet bound
                            scope[name] = cell.cell_contents
            self._scopes[file] = {**scope, **self.namespaces[file]}
        return self._scopes[file]

    def begun_at(self, file: str, line: int) -> list[int]:
        """The numbers of the functions that ran and begin in a line, of which a lambda may be one of several."""
        return sorted(
            {number for (at, code), number in self.codes.items() if (at, code.co_firstlineno) == (file, line)}
        )

    def definition(self, inside: tuple[str, str, int] | None, which: int = 0) -> tuple[ParsedText, Function] | None:
        """The definition of the traced function itself, through whatever wraps it; None where it is not the user's.

        Args:
            inside: name, file and line of the function that it differentiates inside, if that is meant.
            which: of those that begin in that line.
        """
        if inside is not None:
            _, file, line = inside
            numbers = self.begun_at(file, line)
            return (self.texts[file], self.texts[file].functions[numbers[which]]) if numbers else None
        for layer in layers(self.function):
            function: Any = getattr(layer, "__func__", layer)
            if not hasattr(function, "__code__") and not isinstance(layer, type):
                own = (vars(kind).get("__call__") for kind in type(layer).__mro__)
                function = next((call for call in own if call is not None), None)
            number = self.number_of(function)
            if number is not None:
                text = self.texts[function.__code__.co_filename]
                return text, text.functions[number]
        return None

    def around(self, span: SourceSpan, codes: Iterable[Executed]) -> Function | None:
        """The innermost function of some code objects that ran that a span stands in."""
        text = self.texts[span.file]
        nodes = [text.functions[self.codes[key]] for key in codes if key in self.codes and key[0] == span.file]
        return max((node for node in nodes if text.covers(node, span)), key=text.start, default=None)


def _module_namespace(text: ParsedText) -> dict[str, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == text.file:
            return vars(module)
    raise RematError(f"the namespace of {text.place} cannot be found: define the function in a module or a cell.")


def layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, outermost first, as far as wrappers tell."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        inner = function.func if isinstance(function, functools.partial) else None
        function = inner or getattr(function, "__wrapped__", None)


def is_users(kind: type) -> bool:
    """Whether a class is the user's; what has no file is a notebook's, or built in."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<cell>"
    return kind.__module__ != "builtins" and is_user_file(file)


def held(value: Any) -> list[Any]:
    """What a function, container or object of the user's holds that can be, or hold, a function."""
    match value:
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case FunctionType():
            contents = []
            for cell in value.__closure__ or ():
                try:
                    contents.append(cell.cell_contents)
                except ValueError:  # not yet bound
                    continue
            return [*contents, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case list() | tuple() if type(value) in (list, tuple) and len(value) < 1000:
            return list(value)
        case dict() if type(value) is dict and len(value) < 1000:
            return list(value.values())
        case type():
            return []
        case _:
            attributes = getattr(value, "__dict__", None)
            return list(attributes.values()) if isinstance(attributes, dict) and is_users(type(value)) else []


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
    """What an import binds, of modules that are there already."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield (
                alias.asname or alias.name.partition(".")[0],
                sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]),
            )
        elif node.module and not node.level:
            thing = getattr(sys.modules.get(node.module), alias.name, None)
            yield alias.asname or alias.name, sys.modules.get(f"{node.module}.{alias.name}") if thing is None else thing


def names_of(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, that of the functions in it included."""
    inside = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inside)


def reachable(function: Any) -> Iterator[Any]:
    """What can be reached from a function by closures, globals, wrappers and the user's classes and modules."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [function]
    while todo and len(seen) < 20000:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        todo += held(value)
        if isinstance(value, type):
            if is_users(value):
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
        names = names_of(value.__code__)
        for name in names:
            used = value.__globals__.get(name)
            if isinstance(used, types.ModuleType):
                if is_user_file(getattr(used, "__file__", None) or ""):
                    todo += [vars(used)[attribute] for attribute in names if attribute in vars(used)]
            else:
                todo.append(used)


# -------------------------------------------------------------------------------- what the user's expressions stand for


def referent(expression: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module, stands for; None for any other expression. Runs nothing."""
    match expression:
        case ast.Name(name):
            return namespace.get(name)
        case ast.Attribute(inner, name):
            owner = referent(inner, namespace)
            return getattr(owner, name, None) if isinstance(owner, types.ModuleType | type) else None
        case _:
            return None
