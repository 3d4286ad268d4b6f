"""Executing an edited source apart from the user's session.

Nothing but definitions is executed: functions, classes, what makes a function of another one (``jax.jit(f)``), and the
imports that an edit adds; all in copies of the namespaces that they stand in. Functions that were made by other
functions are defined again with the variables that they hold.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import jax

from remat_magic.analysis.signature import function_name
from remat_magic.analysis.source import is_user_file
from remat_magic.model import RematError
from remat_magic.tuning.edit_definitions import is_pure, paired, with_decorators, with_given_defaults
from remat_magic.tuning.edit_objects import converted, converting
from remat_magic.tuning.edit_setting import EditedCall, Setting, checkpoint_calls, held, layers
from remat_magic.tuning.edit_source import Function, Source, first_line, functions_of

__all__ = ["again"]

_SCOPE = "__remat_magic_scope__"
_DERIVATIVES = (jax.custom_jvp, jax.custom_vjp)


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
        self._setting, self._calls = setting, calls
        self._trees = {file: trees.get(file, source.tree) for file, source in setting.sources.items()}
        self._new_functions: dict[str, list[Function]] = {}
        for file, tree in self._trees.items():
            self._new_functions[file] = functions_of(tree)
        self._spaces: dict[int, dict[str, Any]] = {}
        for file in setting.sources:
            old = setting.namespaces[file]
            self._spaces.setdefault(id(old), {**old, **given})
        self._made: dict[int, tuple[Any, Any]] = {}  # by identity what was, and what it has become
        self._leads: dict[int, tuple[Any, bool]] = {}

    def function(self) -> Any:
        # What one namespace makes of another's functions is right from the second time on.
        for _ in range(min(len(self._spaces), 3)):
            for file, source in self._setting.sources.items():
                self._execute(file, source)
            self._replace_imported()
        fun = self._setting.fun
        classes = {old: new for old, new in self._made.values() if isinstance(old, type) and isinstance(new, type)}
        if not classes:
            return self._remade(fun)
        inner = fun.__func__ if isinstance(fun, types.MethodType) else None
        if inner is not None and not isinstance(fun.__self__, type):
            owner = converted(fun.__self__, classes)
            new = getattr(owner, inner.__name__, None)
            if new is None:
                raise self._refusal(inner, "is a method under another name")
            return converting(new, classes)
        owner = converted(fun, classes)
        return converting(self._remade(fun) if owner is fun else owner, classes)

    def _space(self, file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        old = self._setting.namespaces[file]
        return old, self._spaces[id(old)]

    def _run(
        self, source: Source, statement: ast.stmt, space: dict[str, Any], local: dict[str, Any] | None = None
    ) -> None:
        flags = source.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        try:
            module = ast.Module([statement], [])
            exec(compile(module, source.file, "exec", flags=flags, dont_inherit=True), space, local)  # noqa: S102 - the user's own definitions, edited
        except Exception as error:
            name = getattr(statement, "name", "a definition")
            raise RematError(
                f"{name} of {source.place} cannot be defined apart from your session, to see what an edit does: "
                f"{type(error).__name__}: {error}."
            ) from error

    # ------------------------------------------------------------------------------------------- a module's statements

    def _execute(self, file: str, source: Source) -> None:
        old, space = self._space(file)
        ran = {id(source.functions[number]) for number in self._setting.numbers(file)}
        # What makes a function that ran may have run as well, without an operation of its own.
        for number in self._setting.numbers(file):
            above: Any = source.functions[number]
            while (above := source.enclosing(above)) is not None:
                ran.add(id(above))
        for was, now in paired(source.tree.body, self._trees[file].body):
            if was is None:
                self._run(source, now, space)
                continue
            match was:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if id(was) in ran:
                    if isinstance(old.get(name), _DERIVATIVES):  # its rules stay with it
                        continue
                    self._run(source, self._definition(file, was, now, old.get(name)), space)
                case ast.ClassDef(name) if any(id(node) in ran for node in ast.walk(was)) or self._inherits(
                    old.get(name)
                ):
                    self._run(source, now, space)
                case ast.Assign([ast.Name(name)], value) if self._makes_function(old.get(name), value, old):
                    self._run(source, now, space)
                case _:
                    continue
            self._note(old.get(name), space.get(name))

    def _inherits(self, old: Any) -> bool:
        """Whether a class has the methods of one that is defined again."""
        return isinstance(old, type) and any(id(base) in self._made for base in old.__mro__[1:])

    def _definition(self, file: str, was: Any, now: Any, old: Any) -> ast.stmt:
        """A definition without the decorators that only take note of the function."""
        code = old.__code__ if isinstance(old, FunctionType) else None
        if code and (code.co_filename, code.co_name, code.co_firstlineno) == (file, was.name, first_line(was)):
            return with_decorators(now, len(now.decorator_list) - len(was.decorator_list))
        return now

    def _note(self, old: Any, new: Any) -> None:
        """What was has become what is new, and what is inside likewise, counted from the outside."""
        if old is None or new is None or old is new:
            return
        for was, now in zip(layers(old), layers(new), strict=False):
            self._made[id(was)] = was, now

    def _makes_function(self, old: Any, value: ast.expr, space: Mapping[str, Any]) -> bool:
        return callable(old) and self._leads_to_ran(old) and is_pure(value, space)

    def _replace_imported(self) -> None:
        for old in self._setting.namespaces.values():
            space = self._spaces.get(id(old))
            if space is None:
                continue
            for name, value in list(space.items()):
                if id(value) in self._made:
                    space[name] = self._made[id(value)][1]
                elif isinstance(value, types.ModuleType):
                    space[name] = self._module(value, 3)
                elif name in old and value is old[name] and self._leads_to_ran(value):
                    space[name] = self._remade(value)

    def _module(self, module: types.ModuleType, depth: int) -> types.ModuleType:
        """A module that has the edited definitions, itself where there are none."""
        content = self._spaces.get(id(vars(module)))
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

    # ------------------------------------------------------------------------------------------------ function objects

    def _leads_to_ran(self, value: Any) -> bool:
        """Whether a function is one that ran, or holds one."""
        known = self._leads.get(id(value))
        if known is not None:
            return known[1]
        self._leads[id(value)] = value, False  # of a cycle the others decide
        if isinstance(value, _DERIVATIVES):
            return False
        code = value.__code__ if isinstance(value, FunctionType) else None
        found = code in self._setting.codes or any(map(self._leads_to_ran, held(value)))
        if not found and callable(value) and not isinstance(value, type):
            found = self._leads_to_ran(getattr(value, "__wrapped__", None))
        self._leads[id(value)] = value, found
        return found

    def _remade(self, value: Any) -> Any:
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if not self._leads_to_ran(value):
            return value
        new = self._make(value)
        self._made[id(value)] = value, new
        return new

    def _make(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            keywords = {name: self._remade(each) for name, each in value.keywords.items()}
            return functools.partial(self._remade(value.func), *map(self._remade, value.args), **keywords)
        if type(value) in (list, tuple):
            return type(value)(map(self._remade, value))
        if type(value) is dict:
            return {key: self._remade(each) for key, each in value.items()}
        if isinstance(value, types.MethodType):
            raise self._refusal(value.__func__, "is a method, and the object would be of the class as it was")
        if _is_wrapper(value):
            inner = value.__wrapped__
            call = next((call for call in self._calls if _makes(call, inner)), None)
            if call is not None:
                return self._called(call, self._remade(inner))
        within = list(layers(value))
        for levels, layer in enumerate(within):
            if isinstance(layer, FunctionType) and layer.__code__ in self._setting.codes:
                made = self._defined(layer, levels)
                if made is not None:
                    return made
                break
        if isinstance(value, FunctionType):
            return self._with_closure(value)
        inner = getattr(value, "__wrapped__", None)
        if inner is not None and isinstance(value, type(jax.jit(lambda: None))):
            return jax.jit(self._remade(inner))
        raise self._refusal(value, f"is held by an object of type {type(value).__name__}")

    def _called(self, call: EditedCall, inner: Any) -> Any:
        """What an edited call of ``jax.checkpoint`` makes of a function."""
        source = self._setting.sources[call.file]
        old, space = self._space(call.file)
        now = checkpoint_calls(self._trees[call.file], old)
        before = checkpoint_calls(source.tree, old)
        if len(now) < len(before):  # the checkpoint was taken off
            return inner
        keywords: dict[str, Any] = {}
        for keyword in now[call.number].keywords:
            code = compile(ast.Expression(keyword.value), source.file, "eval", dont_inherit=True)
            try:
                keywords[keyword.arg or ""] = eval(code, space)  # noqa: S307 - an argument that the user, or the edit, wrote
            except Exception as error:
                raise RematError(
                    f"the call of jax.checkpoint on {call.site.function} cannot be executed apart from your session: "
                    f"{type(error).__name__}: {error}."
                ) from error
        return jax.checkpoint(inner, **keywords)

    def _refusal(self, value: Any, why: str) -> RematError:
        return RematError(
            f"{function_name(value)} {why}: it cannot be executed apart from your session, so make it a plain function."
        )

    def _with_closure(self, wrapper: FunctionType) -> FunctionType:
        """A function that a library's decorator made, of what the edit makes of the function inside."""
        cells = []
        for cell in wrapper.__closure__ or ():
            try:
                cells.append(types.CellType(self._remade(cell.cell_contents)))
            except ValueError:
                cells.append(cell)
        new = FunctionType(
            wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells) or None
        )
        new.__kwdefaults__ = wrapper.__kwdefaults__
        new.__dict__.update(wrapper.__dict__)
        if "__wrapped__" in new.__dict__:
            new.__dict__["__wrapped__"] = self._remade(new.__dict__["__wrapped__"])
        return new

    def _defined(self, function: FunctionType, levels: int) -> Any:
        """A function of the user's defined again, with the innermost ``levels`` of its decorators.

        None where it has not so many: something else is around it.
        """
        file, number = self._setting.codes[function.__code__]
        source = self._setting.sources[file]
        was: Any = source.functions[number]
        now: Any = self._new_functions[file][number]
        if isinstance(now, ast.Lambda) or isinstance(was, ast.Lambda):
            if levels or not isinstance(now, ast.Lambda):
                return None
            now = with_given_defaults(now, function, given := {})
            body: list[ast.stmt] = [ast.copy_location(ast.Return(now), now)]
        else:
            if levels > len(was.decorator_list):
                return None
            more = len(now.decorator_list) - len(was.decorator_list)
            definition = with_given_defaults(with_decorators(now, max(levels + more, 0)), function, given := {})
            body = [
                definition,
                ast.copy_location(ast.Return(ast.copy_location(ast.Name(was.name, ast.Load()), now)), now),
            ]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if any(layer is function for layer in layers(content)) and name == getattr(was, "name", None):
                continue  # it calls itself
            given[name] = self._remade(content)
        scope = ast.parse(f"def {_SCOPE}({', '.join(given)}): pass").body[0]
        assert isinstance(scope, ast.FunctionDef)
        scope.body = body
        _, space = self._space(file)
        local: dict[str, Any] = {}
        self._run(source, ast.fix_missing_locations(scope), space, local)
        try:
            new = local[_SCOPE](**given)
        except Exception as error:
            raise RematError(
                f"{function_name(function)} of {source.place} cannot be defined apart from your session, since it was "
                f"made inside a function whose variables are gone ({type(error).__name__}: {error}): define it at the "
                "top level."
            ) from error
        return new


def _is_wrapper(value: Any) -> bool:
    """Whether a function is what ``jax.checkpoint`` returned."""
    like = jax.checkpoint(_is_wrapper)
    return (
        isinstance(value, FunctionType)
        and value.__code__ is like.__code__
        and value.__closure__ is not None
        and _first_held(value) is _first_held(like)
    )


def _first_held(function: Any) -> Any:
    """The code of what stands in a wrapper's closure first: under JAX's filter of tracebacks, what is filtered."""
    return getattr(next(iter(held(function)), None), "__code__", function)


def _makes(call: EditedCall, inner: Any) -> bool:
    code, where = getattr(inner, "__code__", None), call.site.source
    return (
        isinstance(code, CodeType)
        and where is not None
        and (code.co_filename, code.co_firstlineno) == (where.file, where.line)
    )
