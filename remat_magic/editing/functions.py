"""Function objects made again of what an edit makes of the functions that ran, with what they hold."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import jax

from remat_magic.editing.definitions import with_decorators, with_given_defaults
from remat_magic.editing.setting import EditedCall, Setting, checkpoint_calls, held, layers
from remat_magic.editing.source import Function, functions_of
from remat_magic.editing.spaces import Spaces
from remat_magic.engine.signature import function_name
from remat_magic.parsing import parse_python
from remat_magic.records import RematError

__all__ = ["DERIVATIVES", "Remaking", "refusal"]

DERIVATIVES = (jax.custom_jvp, jax.custom_vjp)

_SCOPE = "__remat_magic_scope__"


class Remaking:
    """What was and what it has become: functions, and whatever holds one that ran.

    Args:
        setting: the traced function with its sources.
        spaces: the copied namespaces.
        calls: the calls of ``jax.checkpoint`` that are other in the edited trees.
    """

    def __init__(self, setting: Setting, spaces: Spaces, calls: Sequence[EditedCall]) -> None:
        self._setting, self._spaces, self._calls = setting, spaces, calls
        self._new_functions: dict[str, list[Function]] = {
            file: functions_of(tree) for file, tree in spaces.trees.items()
        }
        self._made: dict[int, tuple[Any, Any]] = {}  # by identity what was, and what it has become
        self._leads: dict[int, tuple[Any, bool]] = {}

    def note(self, old: Any, new: Any) -> None:
        """What was has become what is new, and what is inside likewise, counted from the outside."""
        if old is None or new is None or old is new:
            return
        for was, now in zip(layers(old), layers(new), strict=False):
            self._made[id(was)] = was, now

    def known(self, value: Any) -> Any:
        """What a value has become already, None where it has not."""
        made = self._made.get(id(value))
        return None if made is None else made[1]

    def classes(self) -> dict[type, type]:
        """The new class of each that was defined again."""
        return {old: new for old, new in self._made.values() if isinstance(old, type) and isinstance(new, type)}

    def leads_to_ran(self, value: Any) -> bool:
        """Whether a function is one that ran, or holds one."""
        known = self._leads.get(id(value))
        if known is not None:
            return known[1]
        self._leads[id(value)] = value, False  # of a cycle the others decide
        if isinstance(value, DERIVATIVES):
            return False
        code = value.__code__ if isinstance(value, FunctionType) else None
        found = code in self._setting.codes or any(map(self.leads_to_ran, held(value)))
        if not found and callable(value) and not isinstance(value, type):
            found = self.leads_to_ran(getattr(value, "__wrapped__", None))
        self._leads[id(value)] = value, found
        return found

    def remade(self, value: Any) -> Any:
        """A value made again if it leads to a function that ran, else itself.

        Raises:
            RematError: it cannot be.
        """
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if not self.leads_to_ran(value):
            return value
        new = self._make(value)
        self._made[id(value)] = value, new
        return new

    def _make(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            keywords = {name: self.remade(each) for name, each in value.keywords.items()}
            return functools.partial(self.remade(value.func), *map(self.remade, value.args), **keywords)
        if type(value) in (list, tuple):
            return type(value)(map(self.remade, value))
        if type(value) is dict:
            return {key: self.remade(each) for key, each in value.items()}
        if isinstance(value, types.MethodType):
            raise refusal(value.__func__, "is a method, and the object would be of the class as it was")
        if _is_wrapper(value):
            inner = value.__wrapped__
            call = next((call for call in self._calls if _makes(call, inner)), None)
            if call is not None:
                return self._called(call, self.remade(inner))
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
            return jax.jit(self.remade(inner))
        raise refusal(value, f"is held by an object of type {type(value).__name__}")

    def _called(self, call: EditedCall, inner: Any) -> Any:
        """What an edited call of ``jax.checkpoint`` makes of a function."""
        source = self._setting.sources[call.file]
        old, space = self._spaces.of(call.file)
        now = checkpoint_calls(self._spaces.trees[call.file], old)
        before = checkpoint_calls(source.tree, old)
        if len(now) < len(before):  # the checkpoint was taken off
            return inner
        keywords: dict[str, Any] = {}
        for keyword in now[call.number].keywords:
            try:
                keywords[keyword.arg or ""] = self._spaces.evaluate(source, keyword.value, space)
            except Exception as error:
                raise RematError(
                    f"the call of jax.checkpoint on {call.site.function} cannot be executed apart from your session: "
                    f"{type(error).__name__}: {error}."
                ) from error
        return jax.checkpoint(inner, **keywords)

    def _with_closure(self, wrapper: FunctionType) -> FunctionType:
        """A function that a library's decorator made, of what the edit makes of the function inside."""
        cells = []
        for cell in wrapper.__closure__ or ():
            try:
                cells.append(types.CellType(self.remade(cell.cell_contents)))
            except ValueError:
                cells.append(cell)
        new = FunctionType(
            wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells) or None
        )
        new.__kwdefaults__ = wrapper.__kwdefaults__
        new.__dict__.update(wrapper.__dict__)
        if "__wrapped__" in new.__dict__:
            new.__dict__["__wrapped__"] = self.remade(new.__dict__["__wrapped__"])
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
            given[name] = self.remade(content)
        scope = parse_python(f"def {_SCOPE}({', '.join(given)}): pass").body[0]
        assert isinstance(scope, ast.FunctionDef)
        scope.body = body
        _, space = self._spaces.of(file)
        local: dict[str, Any] = {}
        self._spaces.run(source, ast.fix_missing_locations(scope), space, local)
        try:
            new = local[_SCOPE](**given)
        except Exception as error:
            raise RematError(
                f"{function_name(function)} of {source.place} cannot be defined apart from your session, since it was "
                f"made inside a function whose variables are gone ({type(error).__name__}: {error}): define it at the "
                "top level."
            ) from error
        return new


def refusal(value: Any, why: str) -> RematError:
    """The error about something that cannot be executed again."""
    return RematError(
        f"{function_name(value)} {why}: it cannot be executed apart from your session, so make it a plain function."
    )


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
