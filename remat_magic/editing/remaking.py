"""Functions and objects of the user's made again, of what an edit makes of the definitions that ran."""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import jax

from remat_magic.editing.parsed_text import Function, ParsedText, code_objects, functions_of, number_of
from remat_magic.editing.user_code import EditedCall, UserCode, held, is_users, layers
from remat_magic.engine.signature import function_name
from remat_magic.parsing import parse_expression
from remat_magic.records import RematError

__all__ = ["DERIVATIVES", "Namespaces", "Remaking"]

DERIVATIVES = (jax.custom_jvp, jax.custom_vjp)


class Namespaces:
    """A copy of each namespace that the texts stand in, and the ``trees`` that are executed there, by file name.

    Args:
        code: the traced function with its texts.
        trees: the edited ones; a file that is not in it is as it was.
        given: names to put into every namespace.
    """

    def __init__(self, code: UserCode, trees: Mapping[str, ast.Module], given: Mapping[str, Any]) -> None:
        self._code = code
        self.trees = {file: trees.get(file, text.tree) for file, text in code.texts.items()}
        self._copies: dict[int, dict[str, Any]] = {}
        for file in code.texts:
            original = code.namespaces[file]
            self._copies.setdefault(id(original), {**original, **given})

    def __len__(self) -> int:
        return len(self._copies)

    def of(self, file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A file's namespace as it was, and its copy."""
        original = self._code.namespaces[file]
        return original, self._copies[id(original)]

    def copy_of(self, namespace: Mapping[str, Any]) -> dict[str, Any] | None:
        """The copy of a namespace, None where there is none."""
        return self._copies.get(id(namespace))

    def run(self, text: ParsedText, statement: ast.stmt) -> None:
        """Execute a definition.

        Raises:
            RematError: it raises.
        """
        _, namespace = self.of(text.file)
        flags = text.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        try:
            module = ast.Module([statement], [])
            exec(compile(module, text.file, "exec", flags=flags, dont_inherit=True), namespace)  # noqa: S102 - the user's own definitions, edited
        except Exception as error:
            name = getattr(statement, "name", "a definition")
            raise RematError(
                f"{name} of {text.place} cannot be defined apart from your session, to see what an edit does: "
                f"{type(error).__name__}: {error}."
            ) from error

    def evaluate(self, text: ParsedText, expression: ast.expr, local: Mapping[str, Any] | None = None) -> Any:
        """A decorator, or an argument of ``jax.checkpoint``, which may raise whatever it does."""
        code = compile(ast.Expression(expression), text.file, "eval", flags=text.flags, dont_inherit=True)
        return eval(code, self.of(text.file)[1], local)  # noqa: S307 - what the user, or the edit, wrote


class Remaking:
    """What has become of functions that ran, of objects whose classes are defined again, and of what holds them.

    Args:
        code: the traced function with its texts.
        namespaces: the copied namespaces.
        calls: the calls of ``jax.checkpoint`` that are other in the edited trees.
    """

    def __init__(self, code: UserCode, namespaces: Namespaces, calls: Sequence[EditedCall]) -> None:
        self._code, self._namespaces, self._calls = code, namespaces, calls
        # The functions of each tree, and the code that Python makes of them.
        self._definitions = {file: self._compiled(file, tree) for file, tree in namespaces.trees.items()}
        self._remade: dict[int, tuple[Any, Any]] = {}  # by identity what was, and what it has become
        self._changing: dict[int, tuple[Any, bool]] = {}
        self._classes: dict[type, type] = {}

    def _compiled(self, file: str, tree: ast.Module) -> tuple[list[Function], dict[int | None, CodeType]]:
        functions, flags = functions_of(tree), self._code.texts[file].flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled = compile(tree, file, "exec", flags=flags, dont_inherit=True)
        return functions, {number_of(functions, code): code for code in code_objects(compiled)}

    def note(self, old: Any, new: Any) -> None:
        """What was has become what is new, and what is inside likewise, counted from the outside."""
        if old is None or new is None or old is new:
            return
        if isinstance(old, type) and isinstance(new, type):
            self._classes[old] = new
            self._changing.clear()  # objects of it change as well
        for was, now in zip(layers(old), layers(new), strict=False):
            self._remade[id(was)] = was, now
        (*_, was), (*_, now) = layers(old), layers(new)
        if isinstance(was, FunctionType) and isinstance(now, FunctionType) and self._code.number_of(was) is not None:
            now.__defaults__ = self.remade(was.__defaults__)  # evaluated anew, they can be others by now
            now.__kwdefaults__ = self.remade(was.__kwdefaults__)

    def become(self, value: Any) -> Any:
        """What a value has become already, None where it has not."""
        return self._remade.get(id(value), (None, None))[1]

    def changes(self, value: Any) -> bool:
        """Whether a value is a function that ran or an object of a class that is defined again, or holds one."""
        if id(value) in self._changing:
            return self._changing[id(value)][1]
        self._changing[id(value)] = value, False  # of a cycle the others decide
        if isinstance(value, (type, *DERIVATIVES)):
            return False
        ran = isinstance(value, FunctionType) and self._code.number_of(value) is not None
        changes = ran or type(value) in self._classes or any(map(self.changes, held(value)))
        if not changes and callable(value):
            changes = self.changes(getattr(value, "__wrapped__", None))
        self._changing[id(value)] = value, changes
        return changes

    def remade(self, value: Any) -> Any:
        """A value made again if it changes, else itself.

        Raises:
            RematError: it cannot be.
        """
        if id(value) in self._remade:
            return self._remade[id(value)][1]
        if not self.changes(value):
            return value
        new = self._make(value)
        self._remade[id(value)] = value, new
        return new

    def traced(self) -> Callable[..., Any]:
        """The traced function made again; it takes objects of the user's classes as they were.

        Raises:
            RematError: it cannot be.
        """
        new = self.remade(self._code.function)
        if not self._classes:
            return new

        @functools.wraps(new)
        def called(*args: Any, **kwargs: Any) -> Any:
            remade, changing = self._remade.copy(), self._changing.copy()  # the arguments are not to be kept
            try:
                return new(*map(self._if_possible, args), **self._if_possible(kwargs))
            finally:
                self._remade, self._changing = remade, changing

        return called

    def _if_possible(self, value: Any) -> Any:
        """What the edit makes of a value, itself where it cannot be made again: then that part runs as it was."""
        try:
            return self.remade(value)
        except RematError:
            return value

    def _make(self, value: Any) -> Any:
        match value:
            case functools.partial():
                keywords = {name: self.remade(argument) for name, argument in value.keywords.items()}
                return functools.partial(self.remade(value.func), *map(self.remade, value.args), **keywords)
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)(map(self.remade, value))
            case dict() if type(value) is dict:
                return {key: self.remade(item) for key, item in value.items()}
            case types.MethodType():
                return self._method(value)
            case _ if not isinstance(value, FunctionType) and is_users(type(value)):
                return self._object(value)
        if _is_wrapper(value):
            inner = value.__wrapped__
            call = next((call for call in self._calls if _is_on(call, inner)), None)
            if call is not None:
                return self._checkpointed(call, self.remade(inner))
        for levels, layer in enumerate(layers(value)):
            number = self._code.number_of(layer) if isinstance(layer, FunctionType) else None
            if number is not None:
                function = self.defined(layer, number, levels)
                if function is not None:
                    return function
                break
        if isinstance(value, FunctionType):
            return self._with_closure(value)
        inner = getattr(value, "__wrapped__", None)
        if inner is not None and isinstance(value, type(jax.jit(lambda: None))):
            return jax.jit(self.remade(inner))
        raise _refusal(value, f"is held by an object of type {type(value).__name__}")

    def _method(self, method: types.MethodType) -> Any:
        owner = self.remade(method.__self__)
        if owner is method.__self__:
            raise _refusal(method, "is a method, and the object would be of the class as it was")
        new = getattr(owner, method.__name__, None)
        if new is None:
            raise _refusal(method, "is a method under another name")
        return new

    def _object(self, value: Any) -> Any:
        """The same content, with the methods of the class as it is defined again."""
        try:
            new = copy.copy(value)
            self._remade[id(value)] = value, new  # an object that holds itself
            for name, content in vars(value).items():
                changed = self._if_possible(content)
                if changed is not content:
                    object.__setattr__(new, name, changed)  # also of frozen dataclasses
            if type(value) in self._classes:
                object.__setattr__(new, "__class__", self._classes[type(value)])
        except Exception as error:
            self._remade.pop(id(value), None)
            raise _refusal(value, "is an object that cannot be copied") from error
        return new

    def _checkpointed(self, call: EditedCall, inner: Any) -> Any:
        """What an edited call of ``jax.checkpoint`` makes of a function."""
        if call.policy is None:
            return inner
        written = {keyword.arg or "": keyword.value for keyword in call.call.keywords}
        try:
            keywords = {
                name: self._namespaces.evaluate(call.text, expression)
                for name, expression in {**written, "policy": parse_expression(call.policy)}.items()
            }
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
        defaults = self.remade(wrapper.__defaults__)
        new = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, defaults, tuple(cells) or None)
        new.__kwdefaults__ = self.remade(wrapper.__kwdefaults__)
        new.__dict__.update(wrapper.__dict__)
        if "__wrapped__" in new.__dict__:
            new.__dict__["__wrapped__"] = self.remade(new.__dict__["__wrapped__"])
        return new

    def defined(self, function: FunctionType, number: int, levels: int) -> Any:
        """A function of the user's with the code that it has become.

        Args:
            function: as it was.
            number: its number in its text.
            levels: how many of its decorators are around it, those next to it; those that the edit adds are too.

        Returns:
            The function, or None where it has not so many: something else is around it.

        Raises:
            RematError: what it refers to cannot be made again.
        """
        text = self._code.texts[function.__code__.co_filename]
        functions, codes = self._definitions[text.file]
        decorators = getattr(functions[number], "decorator_list", [])
        added = len(decorators) - len(getattr(text.functions[number], "decorator_list", []))
        if levels > len(decorators) - added:
            return None
        itself = types.CellType()
        cells: dict[str, types.CellType] = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                cells[name] = cell
                continue
            calls_itself = name == function.__name__ and any(layer is function for layer in layers(content))
            cells[name] = itself if calls_itself else types.CellType(self.remade(content))
        try:
            closure = tuple(cells[name] for name in codes[number].co_freevars)
            namespace = self._namespaces.of(text.file)[1]
            defaults = self.remade(function.__defaults__)
            new: Any = FunctionType(codes[number], namespace, function.__name__, defaults, closure)
            new.__kwdefaults__ = self.remade(function.__kwdefaults__)
            held = {name: cell.cell_contents for name, cell in cells.items() if cell is not itself}
            for decorator in reversed(decorators[len(decorators) - max(levels + added, 0) :]):
                new = self._namespaces.evaluate(text, decorator, held)(new)
        except RematError:
            raise
        except Exception as error:
            raise RematError(
                f"{function_name(function)} of {text.place} cannot be defined apart from your session, since it was "
                f"made inside a function whose variables are gone ({type(error).__name__}: {error}): define it at the "
                "top level."
            ) from error
        itself.cell_contents = new
        return new


def _refusal(value: Any, why: str) -> RematError:
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


def _is_on(call: EditedCall, function: Any) -> bool:
    """Whether a call of ``jax.checkpoint`` makes the site that a function's definition is."""
    code, where = getattr(function, "__code__", None), call.site.source
    return (
        isinstance(code, CodeType)
        and where is not None
        and (code.co_filename, code.co_firstlineno) == (where.file, where.line)
    )
