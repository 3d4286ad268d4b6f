"""Executing an edited source apart from the user's session.

Nothing but definitions is executed: functions, classes, what makes a function of another one (``jax.jit(f)``), and the
imports that an edit adds; all in copies of the namespaces that they stand in. Functions that were made by other
functions are defined again with the variables that they hold.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from remat_magic.editing.parsed_text import ParsedText, first_line
from remat_magic.editing.remaking import DERIVATIVES, Namespaces, Remaking
from remat_magic.editing.user_code import EditedCall, UserCode, is_users, names_of, referent
from remat_magic.user_files import is_user_file

__all__ = ["executed"]


def executed(
    code: UserCode, trees: Mapping[str, ast.Module], given: Mapping[str, Any], calls: Sequence[EditedCall] = ()
) -> Any:
    """The traced function, made from other trees of the same texts.

    Args:
        code: the function with its texts.
        trees: by file name; a file that is not in it is as it was.
        given: names to put into every namespace.
        calls: the calls of ``jax.checkpoint`` that are other in these trees.

    Raises:
        RematError: some definition cannot be executed again.
    """
    namespaces = Namespaces(code, trees, given)
    sandbox = _Sandbox(code, namespaces, Remaking(code, namespaces, calls))
    # What one namespace makes of another's functions is right from the second time on.
    for _ in range(min(len(namespaces), 3)):
        sandbox.execute()
    return sandbox.remaking.traced()


class _Sandbox:
    def __init__(self, code: UserCode, namespaces: Namespaces, remaking: Remaking) -> None:
        self._code, self._namespaces, self.remaking = code, namespaces, remaking
        self._used = set[str]().union(*(names_of(executed) for _, executed in code.codes))

    def execute(self) -> None:
        """Execute the definitions of all texts, and put what they make into the namespaces that use it."""
        for text in self._code.texts.values():
            self._define(text)
        for original in self._code.namespaces.values():
            namespace = self._namespaces.copy_of(original)
            if namespace is not None:
                self._replace(original, namespace)

    def _define(self, text: ParsedText) -> None:
        original, namespace = self._namespaces.of(text.file)
        ran = {id(text.functions[number]) for number in self._code.executed(text.file)}
        # What makes a function that ran may have run as well, without an operation of its own.
        for number in self._code.executed(text.file):
            above: Any = text.functions[number]
            while (above := text.enclosing(above)) is not None:
                ran.add(id(above))
        for was, now in _paired(text.tree.body, self._namespaces.trees[text.file].body):
            match was:
                case None:
                    self._namespaces.run(text, now)
                    continue
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if id(was) in ran:
                    old = original.get(name)
                    if isinstance(old, DERIVATIVES):  # its rules stay with it
                        continue
                    if isinstance(old, FunctionType) and _is_of(was, text, old):
                        # Its decorators, if any, only took note of it: they are not to do so again.
                        namespace[name] = self.remaking.defined(old, text.functions.index(was), 0)
                        self.remaking.note(old, namespace[name])
                        continue
                case ast.ClassDef(name) if any(id(node) in ran for node in ast.walk(was)):
                    pass
                case ast.ClassDef(name) if self._inherits(original.get(name)):
                    pass
                case ast.Assign([ast.Name(name)], value) if self._makes_function(original.get(name), value, original):
                    pass
                case _:
                    continue
            self._namespaces.run(text, now)
            self.remaking.note(original.get(name), namespace.get(name))

    def _inherits(self, old: Any) -> bool:
        """Whether a class has the methods of one that is defined again."""
        return isinstance(old, type) and any(self.remaking.become(base) for base in old.__mro__[1:])

    def _makes_function(self, old: Any, value: ast.expr, namespace: Mapping[str, Any]) -> bool:
        return callable(old) and self.remaking.changes(old) and _is_pure(value, namespace)

    def _replace(self, original: Mapping[str, Any], namespace: dict[str, Any]) -> None:
        for name, value in list(namespace.items()):
            new = self.remaking.become(value)
            if new is not None:
                namespace[name] = new
            elif isinstance(value, types.ModuleType):
                namespace[name] = self._module(value, 3)
            elif value is original.get(name) and (name in self._used or not is_users(type(value))):
                namespace[name] = self.remaking.remade(value)

    def _module(self, module: types.ModuleType, depth: int) -> types.ModuleType:
        """A module that has the edited definitions, itself where there are none."""
        content = self._namespaces.copy_of(vars(module))
        if content is None:
            content = vars(module)
            inner = {}
            if depth and is_user_file(getattr(module, "__file__", None) or ""):
                for name, value in list(content.items()):
                    if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
                        part = self._module(value, depth - 1)
                        if part is not value:
                            inner[name] = part
            if not inner:
                return module
            content = {**content, **inner}
        new = types.ModuleType(module.__name__)
        vars(new).update(content)
        return new


def _is_of(node: ast.FunctionDef | ast.AsyncFunctionDef, text: ParsedText, function: FunctionType) -> bool:
    """Whether a function is what a definition itself makes, without decorators."""
    code = function.__code__
    return (code.co_filename, code.co_name, code.co_firstlineno) == (text.file, node.name, first_line(node))


def _paired(old: list[ast.stmt], new: list[ast.stmt]) -> Iterator[tuple[ast.stmt | None, ast.stmt]]:
    """Statements of a module with what they have become; None for the imports that were added."""
    waiting = list(old)
    for now in new:
        added = isinstance(now, ast.Import | ast.ImportFrom) and not (waiting and ast.dump(waiting[0]) == ast.dump(now))
        if added or not waiting:
            yield None, now
            continue
        was = waiting.pop(0)
        yield was, now
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(was, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _paired(getattr(was, part, []), getattr(now, part, []))


def _is_pure(value: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether evaluating an expression only makes a function: lambdas, and calls of JAX and functools."""
    match value:
        case ast.Lambda() | ast.Name() | ast.Constant():
            return True
        case ast.Attribute(inner):
            return _is_pure(inner, namespace)
        case ast.Call(callee, args, keywords):
            module = getattr(referent(callee, namespace), "__module__", None) or ""
            if module.partition(".")[0] not in ("jax", "jaxlib", "functools"):
                return False
            parts = [*args, *(keyword.value for keyword in keywords)]
        case ast.IfExp(test, body, otherwise):
            parts = [test, body, otherwise]
        case ast.Tuple(items) | ast.List(items):
            parts = items
        case _:
            return False
    return all(_is_pure(part, namespace) for part in parts)
