"""Executing an edited source apart from the user's session.

Nothing but definitions is executed: functions, classes, what makes a function of another one (``jax.jit(f)``), and the
imports that an edit adds; all in copies of the namespaces that they stand in. Functions that were made by other
functions are defined again with the variables that they hold.
"""

from __future__ import annotations

import ast
import copy
import functools
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import jax

from remat_magic._compat import open_jaxpr, traceback_of
from remat_magic.analysis import signature
from remat_magic.analysis.bodies import walk
from remat_magic.analysis.signature import function_name
from remat_magic.analysis.source import is_user_file
from remat_magic.model import RematError, Site
from remat_magic.tuning.edit_source import Function, Source, functions_of, read_source

__all__ = ["EditedCall", "Setting", "checkpoint_calls", "executed_codes", "is_checkpoint", "resolved"]

_SCOPE = "__remat_magic_scope__"
_DERIVATIVES = (jax.custom_jvp, jax.custom_vjp)


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
        for layer in _layers(self.fun):
            function = getattr(layer, "__func__", layer)
            code = getattr(function, "__code__", None)
            if not isinstance(code, CodeType) and not isinstance(layer, type):
                code = getattr(getattr(type(layer), "__call__", None), "__code__", None)
            if code in self.codes:
                file, number = self.codes[code]
                return self.sources[file], self.sources[file].functions[number]
        return None

    def again(
        self, trees: Mapping[str, ast.Module], given: Mapping[str, Any], calls: Sequence[EditedCall] = ()
    ) -> Any:
        """The function, made from other trees of the same sources.

        Args:
            trees: by file name; a file that is not in it is as it was.
            given: names to put into every namespace.
            calls: the calls of ``jax.checkpoint`` that are other in these trees.

        Raises:
            RematError: some definition cannot be executed again.
        """
        return _Execution(self, trees, given, calls).function()


def _module_of(file: str, source: Source) -> dict[str, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            return vars(module)
    raise RematError(f"the namespace of {source.place} cannot be found: define the function in a module or a cell.")


def _layers(fun: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while fun is not None and id(fun) not in seen:
        seen.add(id(fun))
        yield fun
        fun = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", None)


def _held(value: Any) -> list[Any]:
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
        todo += _held(value)
        if isinstance(value, type):
            if is_user_file(getattr(sys.modules.get(value.__module__), "__file__", None) or "<cell>"):
                todo += list(vars(value).values())
            continue
        if hasattr(type(value), "__call__") and isinstance(getattr(value, "__wrapped__", None), object):
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


# ---------------------------------------------------------------------------------------------------------- executing


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
        return self._remade(self._setting.fun)

    def _space(self, file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        old = self._setting.namespaces[file]
        return old, self._spaces[id(old)]

    def _run(self, source: Source, statement: ast.stmt, space: dict[str, Any], local: dict[str, Any] | None = None) -> None:
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
        for was, now in _paired(source.tree.body, self._trees[file].body):
            if was is None:
                self._run(source, now, space)
                continue
            match was:
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) if id(was) in ran:
                    if isinstance(old.get(name), _DERIVATIVES):  # its rules stay with it
                        continue
                    self._run(source, self._definition(file, was, now, old.get(name)), space)
                case ast.ClassDef(name) if any(id(node) in ran for node in ast.walk(was)):
                    self._run(source, now, space)
                case ast.Assign([ast.Name(name)], value) if self._makes_function(old.get(name), value, old):
                    self._run(source, now, space)
                case _:
                    continue
            self._note(old.get(name), space.get(name))

    def _definition(self, file: str, was: Any, now: Any, old: Any) -> ast.stmt:
        """A definition without the decorators that only take note of the function."""
        if isinstance(old, FunctionType) and self._setting.codes.get(old.__code__) == (
            file,
            self._setting.sources[file].functions.index(was),
        ):
            return _with_decorators(now, len(now.decorator_list) - len(was.decorator_list))
        return now

    def _note(self, old: Any, new: Any) -> None:
        """What was has become what is new, and what is inside likewise, counted from the outside."""
        if old is None or new is None or old is new:
            return
        for was, now in zip(_layers(old), _layers(new), strict=False):
            self._made[id(was)] = was, now

    def _makes_function(self, old: Any, value: ast.expr, space: Mapping[str, Any]) -> bool:
        return callable(old) and self._leads_to_ran(old) and _is_pure(value, space)

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
        found = code in self._setting.codes or any(map(self._leads_to_ran, _held(value)))
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
        layers = list(_layers(value))
        for levels, layer in enumerate(layers):
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
            now = _with_given_defaults(now, function, given := {})
            body: list[ast.stmt] = [ast.copy_location(ast.Return(now), now)]
        else:
            if levels > len(was.decorator_list):
                return None
            more = len(now.decorator_list) - len(was.decorator_list)
            definition = _with_given_defaults(_with_decorators(now, max(levels + more, 0)), function, given := {})
            body = [definition, ast.copy_location(ast.Return(ast.copy_location(ast.Name(was.name, ast.Load()), now)), now)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if any(layer is function for layer in _layers(content)) and name == getattr(was, "name", None):
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


def _with_given_defaults(node: Any, function: FunctionType, given: dict[str, Any]) -> Any:
    """A definition whose defaults are those that the function has, put into ``given``, and which has no annotations."""
    new = copy.copy(node)
    new.args = copy.deepcopy(node.args)
    if not isinstance(node, ast.Lambda):
        new.returns = None

    def default(value: Any, place: ast.expr) -> ast.expr:
        name = f"__remat_magic_default_{len(given)}__"
        given[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), place)

    arguments = new.args
    values = function.__defaults__ or ()
    if len(values) == len(arguments.defaults):
        arguments.defaults = [default(value, place) for value, place in zip(values, arguments.defaults, strict=True)]
    for number, (argument, place) in enumerate(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if place is not None and argument.arg in (function.__kwdefaults__ or {}):
            arguments.kw_defaults[number] = default((function.__kwdefaults__ or {})[argument.arg], place)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return new


def _with_decorators(node: Any, innermost: int) -> Any:
    new = copy.copy(node)
    new.decorator_list = node.decorator_list[len(node.decorator_list) - innermost :] if innermost > 0 else []
    return new


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


def is_checkpoint(expression: ast.expr, space: Mapping[str, Any]) -> bool:
    """Whether an expression is ``jax.checkpoint`` itself, by whatever name."""
    found = resolved(expression, space)
    return found is jax.checkpoint or found is jax.remat


def checkpoint_calls(tree: ast.AST, space: Mapping[str, Any]) -> list[ast.Call]:
    """The calls of ``jax.checkpoint`` in the order of the text."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_checkpoint(node.func, space))
    return sorted(calls, key=lambda call: (call.func.lineno, call.func.col_offset))


def _is_wrapper(value: Any) -> bool:
    """Whether a function is what ``jax.checkpoint`` returned."""
    like = jax.checkpoint(_is_wrapper)
    return (
        isinstance(value, FunctionType)
        and value.__code__ is like.__code__
        and value.__closure__ is not None
        and getattr(value.__closure__[0].cell_contents, "__code__", None)
        is getattr((like.__closure__ or ())[0].cell_contents, "__code__", like)
    )


def _makes(call: EditedCall, inner: Any) -> bool:
    code, where = getattr(inner, "__code__", None), call.site.source
    return (
        isinstance(code, CodeType)
        and where is not None
        and (code.co_filename, code.co_firstlineno) == (where.file, where.line)
    )


def _is_pure(value: ast.expr, space: Mapping[str, Any]) -> bool:
    """Whether evaluating an expression does nothing but make a function: JAX's and functools' own calls, and lambdas."""
    match value:
        case ast.Lambda() | ast.Name() | ast.Constant():
            return True
        case ast.Attribute(inner):
            return _is_pure(inner, space)
        case ast.Call(callee, args, keywords):
            owner = getattr(resolved(callee, space), "__module__", None) or ""
            known = owner.partition(".")[0] in ("jax", "jaxlib", "functools")
            return known and all(_is_pure(each, space) for each in (*args, *(keyword.value for keyword in keywords)))
        case ast.IfExp(test, body, otherwise):
            return all(_is_pure(each, space) for each in (test, body, otherwise))
        case ast.Tuple(items) | ast.List(items):
            return all(_is_pure(each, space) for each in items)
        case _:
            return False


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
