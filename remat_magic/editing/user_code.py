"""What of the user's code ran in a trace: which functions, in which texts and namespaces, and what they refer to."""

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

from remat_magic import _jax
from remat_magic.editing.parsed_text import Function, ParsedText, parsed_text
from remat_magic.engine import signature
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.spans import is_user_file
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError, Site, SourceSpan

__all__ = [
    "EditedCall",
    "UserCode",
    "checkpoint_calls",
    "executed_codes",
    "held",
    "is_checkpoint",
    "is_users",
    "layers",
    "names_of",
    "referent",
]


def executed_codes(closed: Any) -> set[CodeType]:
    """The code of the user's functions that ran while a program was traced and made operations of it."""
    codes: set[CodeType] = set()
    seen: set[int] = set()
    for eqn, _ in walk(closed):
        traceback = _jax.traceback_of(eqn)
        if traceback is None or id(traceback) in seen:
            continue
        seen.add(id(traceback))
        for code in traceback.raw_frames()[0]:
            if code.co_filename == signature.__file__:  # from here on outward it is whoever asked for the trace
                break
            if is_user_file(code.co_filename):
                codes.add(code)
    return codes


@dataclass(frozen=True, slots=True)
class EditedCall:
    """A call of ``jax.checkpoint`` that an edit changes: its number among those of its file, and the site it makes."""

    file: str
    number: int
    site: Site


@dataclass(eq=False)
class UserCode:
    """A function with the texts and namespaces of what it runs.

    Attributes:
        function: the one that was traced.
        texts: by file name.
        codes: for each code object of the user's that ran, its file and its number in the text's ``functions``.
        namespaces: the globals of each file's functions.
    """

    function: Any
    texts: dict[str, ParsedText] = field(default_factory=dict)
    codes: dict[CodeType, tuple[str, int]] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(function: Any, closed: Any) -> UserCode:
        """What ran of a function, by the program traced from it.

        Raises:
            RematError: a text is not available, or not what the function was compiled from.
        """
        code = UserCode(function)
        by_file: dict[str, set[CodeType]] = {}
        for executed in executed_codes(closed):
            by_file.setdefault(executed.co_filename, set()).add(executed)
        if not by_file:
            raise RematError(
                f"no operation of {function_name(function)} stands in source text of yours: there is nothing to edit."
            )
        for reached in _reachable_functions(function):
            code.namespaces.setdefault(reached.__code__.co_filename, reached.__globals__)
        for file, codes in sorted(by_file.items()):
            text = code.texts[file] = parsed_text(file, codes)
            numbers = {executed: text.number_of(executed) for executed in codes}
            code.codes.update((executed, (file, number)) for executed, number in numbers.items() if number is not None)
            if file not in code.namespaces:
                code.namespaces[file] = _module_namespace(text)
        return code

    def executed(self, file: str) -> list[int]:
        """The numbers of a text's functions that ran."""
        return sorted({number for where, number in self.codes.values() if where == file})

    def node_of(self, code: CodeType) -> tuple[ParsedText, Function]:
        """The text that a code object is of, and its function there."""
        file, number = self.codes[code]
        return self.texts[file], self.texts[file].functions[number]

    def definition(self) -> tuple[ParsedText, Function] | None:
        """The definition of the traced function itself, through whatever wraps it; None where it is not the user's."""
        for layer in layers(self.function):
            code = getattr(getattr(layer, "__func__", layer), "__code__", None)
            if code is None and not isinstance(layer, type):
                own = (vars(kind).get("__call__") for kind in type(layer).__mro__)
                code = getattr(next((call for call in own if call is not None), None), "__code__", None)
            if code in self.codes:
                return self.node_of(code)
        return None

    def around(self, span: SourceSpan, codes: set[CodeType]) -> Function | None:
        """The innermost function of some code objects that a span stands in."""
        nodes = [self.node_of(code)[1] for code in codes if self.codes[code][0] == span.file]
        inside = [node for node in nodes if self.texts[span.file].covers(node, span)]
        return max(inside, key=self.texts[span.file].start, default=None)


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


def names_of(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, that of the functions in it included."""
    inside = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inside)


def _reachable_functions(function: Any) -> Iterator[FunctionType]:
    """The user's functions that can be reached from one by closures, globals, wrappers and the user's modules."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [function]
    while todo and len(seen) < 20000:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
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
        yield value
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
            return getattr(owner, name, None) if isinstance(owner, types.ModuleType) else None
        case _:
            return None


def is_checkpoint(expression: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression is ``jax.checkpoint`` itself, by whatever name."""
    thing = referent(expression, namespace)
    return thing is jax.checkpoint or thing is jax.remat


def checkpoint_calls(tree: ast.AST, namespace: Mapping[str, Any]) -> list[ast.Call]:
    """The calls of ``jax.checkpoint`` in the order of the text."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_checkpoint(node.func, namespace))
    return sorted(calls, key=lambda call: (call.func.lineno, call.func.col_offset))
