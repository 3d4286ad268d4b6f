"""Executing an edited source apart from the user's session.

Nothing but definitions is executed: functions, classes, what makes a function of another one (``jax.jit(f)``), and the
imports that an edit adds; all in copies of the namespaces that they stand in. Functions that were made by other
functions are defined again with the variables that they hold.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from remat_magic.editing.definitions import is_pure, paired, with_decorators
from remat_magic.editing.functions import DERIVATIVES, Remaking, refusal
from remat_magic.editing.objects import converted, converting
from remat_magic.editing.setting import EditedCall, Setting
from remat_magic.editing.source import Source, first_line
from remat_magic.editing.spaces import Spaces
from remat_magic.jaxprs.spans import is_user_file

__all__ = ["again"]


def again(
    setting: Setting, trees: Mapping[str, ast.Module], given: Mapping[str, Any], calls: Sequence[EditedCall] = ()
) -> Any:
    """The traced function, made from other trees of the same sources.

    Args:
        setting: the function with its sources.
        trees: by file name; a file that is not in it is as it was.
        given: names to put into every namespace.
        calls: the calls of ``jax.checkpoint`` that are other in these trees.

    Raises:
        RematError: some definition cannot be executed again.
    """
    return _Execution(setting, trees, given, calls).function()


class _Execution:
    def __init__(
        self,
        setting: Setting,
        trees: Mapping[str, ast.Module],
        given: Mapping[str, Any],
        calls: Sequence[EditedCall],
    ) -> None:
        self._setting = setting
        self._spaces = Spaces(setting, trees, given)
        self._remaking = Remaking(setting, self._spaces, calls)

    def function(self) -> Any:
        # What one namespace makes of another's functions is right from the second time on.
        for _ in range(min(len(self._spaces), 3)):
            for file, source in self._setting.sources.items():
                self._execute(file, source)
            self._replace_imported()
        fun = self._setting.fun
        classes = self._remaking.classes()
        if not classes:
            return self._remaking.remade(fun)
        inner = fun.__func__ if isinstance(fun, types.MethodType) else None
        if inner is not None and not isinstance(fun.__self__, type):
            owner = converted(fun.__self__, classes)
            new = getattr(owner, inner.__name__, None)
            if new is None:
                raise refusal(inner, "is a method under another name")
            return converting(new, classes)
        owner = converted(fun, classes)
        return converting(self._remaking.remade(fun) if owner is fun else owner, classes)

    # ------------------------------------------------------------------------------------------- a module's statements

    def _execute(self, file: str, source: Source) -> None:
        old, space = self._spaces.of(file)
        ran = {id(source.functions[number]) for number in self._setting.numbers(file)}
        # What makes a function that ran may have run as well, without an operation of its own.
        for number in self._setting.numbers(file):
            above: Any = source.functions[number]
            while (above := source.enclosing(above)) is not None:
                ran.add(id(above))
        for was, now in paired(source.tree.body, self._spaces.trees[file].body):
            if was is None:
                self._spaces.run(source, now, space)
                continue
            match was:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if id(was) in ran:
                    if isinstance(old.get(name), DERIVATIVES):  # its rules stay with it
                        continue
                    self._spaces.run(source, self._definition(file, was, now, old.get(name)), space)
                case ast.ClassDef(name) if any(id(node) in ran for node in ast.walk(was)) or self._inherits(
                    old.get(name)
                ):
                    self._spaces.run(source, now, space)
                case ast.Assign([ast.Name(name)], value) if self._makes_function(old.get(name), value, old):
                    self._spaces.run(source, now, space)
                case _:
                    continue
            self._remaking.note(old.get(name), space.get(name))

    def _inherits(self, old: Any) -> bool:
        """Whether a class has the methods of one that is defined again."""
        return isinstance(old, type) and any(self._remaking.known(base) for base in old.__mro__[1:])

    def _definition(self, file: str, was: Any, now: Any, old: Any) -> ast.stmt:
        """A definition without the decorators that only take note of the function."""
        code = old.__code__ if isinstance(old, FunctionType) else None
        if code and (code.co_filename, code.co_name, code.co_firstlineno) == (file, was.name, first_line(was)):
            return with_decorators(now, len(now.decorator_list) - len(was.decorator_list))
        return now

    def _makes_function(self, old: Any, value: ast.expr, space: Mapping[str, Any]) -> bool:
        return callable(old) and self._remaking.leads_to_ran(old) and is_pure(value, space)

    def _replace_imported(self) -> None:
        for old in self._setting.namespaces.values():
            space = self._spaces.copy_of(old)
            if space is None:
                continue
            for name, value in list(space.items()):
                made = self._remaking.known(value)
                if made is not None:
                    space[name] = made
                elif isinstance(value, types.ModuleType):
                    space[name] = self._module(value, 3)
                elif name in old and value is old[name] and self._remaking.leads_to_ran(value):
                    space[name] = self._remaking.remade(value)

    def _module(self, module: types.ModuleType, depth: int) -> types.ModuleType:
        """A module that has the edited definitions, itself where there are none."""
        content = self._spaces.copy_of(vars(module))
        if content is None:
            content = vars(module)
            inner = {}
            if depth and is_user_file(getattr(module, "__file__", None) or ""):
                for name, value in list(content.items()):
                    if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
                        made = self._module(value, depth - 1)
                        if made is not value:
                            inner[name] = made
            if not inner:
                return module
            content = {**content, **inner}
        new = types.ModuleType(module.__name__)
        vars(new).update(content)
        return new
