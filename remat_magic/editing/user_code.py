"""What of the user's code ran in a trace: which functions, in which texts and namespaces, and what they refer to."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from remat_magic import _jax
from remat_magic.editing.source import Function, ParsedText, number_of, parsed_text
from remat_magic.engine import signature
from remat_magic.engine.engine import Engine
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import layers
from remat_magic.records import RematError
from remat_magic.user_files import STAND_IN, is_user_file

Executed = tuple[str, CodeType]  # with its file, since code of two files that is the same is equal


def _executed_codes(*programs: Any) -> set[Executed]:
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
        things: all that can be reached from it and its arguments.
        texts: by file name.
        codes: for each code object of the user's that ran, and its file, its number in the text's ``functions``.
        namespaces: the globals of each file's functions.
    """

    function: Any
    things: list[Any] = field(default_factory=list)
    texts: dict[str, ParsedText] = field(default_factory=dict)
    codes: dict[Executed, int] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    _functions: list[FunctionType] = field(default_factory=list)  # those that ran
    _scopes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(engine: Engine) -> UserCode:
        """What ran of a traced function, by the programs: of a step its own, and that of its gradient.

        Raises:
            RematError: a text is not available, or not what the function was compiled from.
        """
        function = engine.given.fun
        code = UserCode(function, [*_reachable(function, engine.inputs_again())])
        by_file: dict[str, set[CodeType]] = {}
        for file, executed in _executed_codes(engine.given.closed, engine.primal.provenances.closed):
            by_file.setdefault(file, set()).add(executed)
        if not by_file:
            raise RematError(
                f"no operation of {function_name(function)} stands in source text of yours: there is nothing to edit."
            )
        ran = {id(executed) for codes in by_file.values() for executed in codes}
        for thing in code.things:
            if type(thing) is FunctionType and id(thing.__code__) in ran:
                code._functions.append(thing)
                code.namespaces.setdefault(thing.__code__.co_filename, thing.__globals__)
        for file, codes in sorted(by_file.items()):
            text = code.texts[file] = parsed_text(file, codes)
            numbers = {(file, executed): number_of(text.functions, executed) for executed in codes}
            code.codes.update((key, number) for key, number in numbers.items() if number is not None)
            if file not in code.namespaces:
                code.namespaces[file] = _module_namespace(text)
        return code

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
            for function in self._functions:
                if function.__code__.co_filename == file:
                    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                        with contextlib.suppress(ValueError):  # not yet bound
                            scope[name] = cell.cell_contents
            self._scopes[file] = {**scope, **self.namespaces[file]}
        return self._scopes[file]

    def definition(self, inside: tuple[str, str, int] | None) -> tuple[ParsedText, Function] | None:
        """The definition of the traced function itself, through whatever wraps it; None where it is not the user's.

        Args:
            inside: name, file and line of the function that it differentiates inside, if that is meant.
        """
        if inside is not None:
            _, file, line = inside
            begun = (n for (at, code), n in self.codes.items() if (at, code.co_firstlineno) == (file, line))
            number = next(begun, None)
            return None if number is None else (self.texts[file], self.texts[file].functions[number])
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


def _module_namespace(text: ParsedText) -> dict[str, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == text.file:
            return vars(module)
    raise RematError(f"the namespace of {text.place} cannot be found: define the function in a module or a cell.")


def _reachable(*roots: Any) -> Iterator[Any]:
    """What can be reached from some things: by the names in code, by closures, and by what objects hold."""
    seen: dict[int, Any] = {}
    todo: list[Any] = [*roots]
    while todo and len(seen) < 100_000:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        match value:
            case FunctionType():
                todo += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value)]
                if is_user_file(value.__code__.co_filename):
                    names = _names_of(value.__code__)
                    used = [value.__globals__[name] for name in names & value.__globals__.keys()]
                    modules = [vars(thing) for thing in used if isinstance(thing, ModuleType) and _is_users(thing)]
                    todo += [*used, *(module[name] for module in modules for name in names & module.keys())]
            case type():
                todo += [
                    *value.__mro__,
                    *(vars(value).values() if _is_users(sys.modules.get(value.__module__)) else ()),
                ]
            case ModuleType():
                pass
            case list() | tuple() | dict() | set() if len(value) > 1000:  # data
                pass
            case _:
                todo += [getattr(value, "__wrapped__", None), *gc.get_referents(value)]


def _names_of(code: CodeType) -> set[str]:
    """The names of globals and attributes that code uses, that of the functions in it included."""
    inside = (_names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inside)


def _is_users(module: ModuleType | None) -> bool:
    """Whether a module is the user's; what has no file is a notebook, or built in."""
    return (
        module is not None
        and module.__name__ != "builtins"
        and (is_user_file(getattr(module, "__file__", None) or "<cell>"))
    )


def referent(expression: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module, stands for; None for any other expression. Runs nothing."""
    match expression:
        case ast.Name(name):
            return namespace.get(name)
        case ast.Attribute(inner, name):
            owner = referent(inner, namespace)
            return getattr(owner, name, None) if isinstance(owner, ModuleType | type) else None
        case _:
            return None
