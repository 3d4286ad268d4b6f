"""What of the user's code ran in a trace: functions, texts, namespaces, and where they apply a checkpoint."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

from remat_magic import _jax, libraries
from remat_magic.editing.source import Function, ParsedText, number_of, parsed_text
from remat_magic.engine import signature
from remat_magic.engine.engine import Engine
from remat_magic.engine.namespaces import Namespace
from remat_magic.engine.signature import function_name
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import attribute, layers
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
        names: what its names stood for then.
        things: all that can be reached from it and its arguments.
        texts: by file name.
        codes: for each code object of the user's that ran, and its file, its number in the text's ``functions``.
        namespaces: the globals of each file's functions.
    """

    function: Any
    names: Namespace
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
        names = engine.given.names
        code = UserCode(function, names, [*_reachable(names, function, engine.inputs_again())])
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
            self._scopes[file] = {**scope, **self.names.of(self.namespaces[file])}
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


def _reachable(then: Namespace, *roots: Any) -> Iterator[Any]:
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
                    known = then.of(value.__globals__)
                    used = [known[name] for name in names & known.keys()]
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
                todo += [attribute(value, "__wrapped__"), *gc.get_referents(value)]


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


# --------------------------------------------------------------------------------------- where a checkpoint is applied


PARTIAL = "__remat_magic_partial__"  # what functools.partial is called in copied namespaces


@dataclass(frozen=True, eq=False)
class Application:
    """A place in a text that applies a checkpoint.

    Attributes:
        text: the text.
        named: the expression that names the transformation.
        node: the call of it, that of ``functools.partial`` with it, or ``named`` where it is passed on as it is.
        whole: the call that gives it what it is applied to; None for decorators, and where that is not seen.
        inner: what it is applied to, a definition or an expression; None where that is not seen.
        transformation: ``jax.checkpoint`` or a library's, or a ``functools.partial`` of one that has a name.
    """

    text: ParsedText
    named: ast.expr
    node: ast.expr
    whole: ast.Call | None
    inner: ast.expr | Function | ast.ClassDef | None
    transformation: Any

    @functools.cached_property
    def example(self) -> Any:
        """What it makes of some function; None where that cannot be told, as flax's, which is for classes."""
        try:
            return self.transformation(_probe)
        except Exception:  # noqa: BLE001 - whatever a library says of it
            return None

    @property
    def kind(self) -> type:
        """Of what type the objects are that it makes of functions."""
        return type(self.example)

    def maker(self, policy: ast.expr) -> ast.expr:
        """What makes of a function one with this checkpoint under another policy."""
        written = self.node.keywords if isinstance(self.node, ast.Call) else []
        others = [keyword for keyword in written if keyword.arg != "policy"]
        maker = ast.Call(_name(PARTIAL), [self.named], [*others, ast.keyword("policy", policy)])
        return ast.fix_missing_locations(ast.copy_location(maker, self.node))

    @property
    def is_of_linen(self) -> bool:
        """Whether it is flax's ``nn.remat``, which makes classes of other names."""
        general = getattr(self.transformation, "func", self.transformation)
        return general is getattr(sys.modules.get("flax.linen"), "remat", ())

    def class_made_of(self, cls: Any, code: UserCode) -> type | None:
        """The class of linen of which this made another, which was there before the trace; else None."""
        base = libraries.checkpointed_by_linen(cls)
        if base is None:
            return None
        scope = code.scope(self.text.file)
        if isinstance(self.inner, ast.ClassDef):
            return base if scope.get(self.inner.name) is cls else None
        match self.text.parents.get(id(self.whole)):
            case ast.Assign([ast.Name(name)]):
                return base if scope.get(name) is cls else None
            case _:
                return base if isinstance(self.inner, ast.expr) and referent(self.inner, scope) is base else None

    def made_of(self, wrapper: Any, code: UserCode) -> Any:
        """What this was applied to if it could have made an object, which was there before the trace; else None."""
        if not _is_like(wrapper, self.example):
            return None
        steps = next((i for i, layer in enumerate(layers(self.example)) if layer is _probe), 1)
        inner = next(itertools.islice(layers(wrapper), steps, None), None)
        definition = _definition(self.text, self.inner) if isinstance(self.inner, ast.Name) else self.inner
        if isinstance(definition, Function):
            # jax.jit may be in between.
            own: Any = inner if isinstance(inner, FunctionType) else getattr(inner, "__wrapped__", None)
            number, here = code.number_of(own), self.text.functions.index(definition)
            return inner if number == here and own.__code__.co_filename == self.text.file else None
        thing = referent(self.inner, code.scope(self.text.file)) if isinstance(self.inner, ast.expr) else None
        return inner if thing is inner else None


def applications(code: UserCode) -> list[Application]:
    """All of them in the texts of what ran."""
    return [application for text in code.texts.values() for application in _in_text(text, code.scope(text.file))]


def _in_text(text: ParsedText, scope: Mapping[str, Any]) -> Iterator[Application]:
    transformations = {id(thing) for thing in libraries.checkpoints()}
    for named in ast.walk(text.tree):
        if not isinstance(named, ast.Name | ast.Attribute) or not isinstance(named.ctx, ast.Load):
            continue
        thing = referent(named, scope)
        general = thing.func if isinstance(thing, functools.partial) else thing
        if id(general) not in transformations or (isinstance(thing, functools.partial) and thing.args):
            continue
        node: ast.expr = named
        whole: ast.Call | None = None
        inner: Any = None
        above = text.parents.get(id(named))
        if isinstance(above, ast.Call) and above.func is named:
            node = above
            if above.args:
                whole, inner = above, above.args[0]
        elif (
            isinstance(above, ast.Call)
            and above.args
            and above.args[0] is named
            and referent(above.func, scope) is functools.partial
        ):
            node = above
        if whole is None:
            above = text.parents.get(id(node))
            if isinstance(above, ast.Call) and above.func is node and above.args:
                whole, inner = above, above.args[0]
            elif node in getattr(above, "decorator_list", []):
                inner = above
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
            continue  # its policy can be among keywords that are not seen
        yield Application(text, named, node, whole, inner, thing)


def with_policies(code: UserCode, places: Sequence[tuple[Application, ast.expr]]) -> dict[str, ast.Module]:
    """The trees of the texts with other policies where checkpoints are applied, on the same lines."""
    trees: dict[str, ast.Module] = {}
    for file, text in code.texts.items():
        policies = {id(place.node): policy for place, policy in places if place.text is text}
        if not policies:
            continue
        trees[file] = copy.deepcopy(text.tree)
        for old, new in zip(ast.walk(text.tree), [*ast.walk(trees[file])], strict=True):
            if id(old) not in policies:
                continue
            policy = copy.deepcopy(policies[id(old)])
            for part in ast.walk(policy):
                ast.copy_location(part, new)
            if isinstance(new, ast.Call):
                others = [keyword for keyword in new.keywords if keyword.arg != "policy"]
                new.keywords = [*others, ast.keyword("policy", policy)]
            else:  # in place, as it is not known to those that hold it
                inside = copy.copy(new)
                new.__class__ = ast.Call
                new.__dict__.clear()
                vars(new).update(func=_name(PARTIAL), args=[inside], keywords=[ast.keyword("policy", policy)])
                ast.copy_location(new, inside)
            ast.fix_missing_locations(new)
    return trees


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _probe(x: Any) -> Any:
    return x


def _is_like(value: Any, like: Any) -> bool:
    """Whether two objects were made by the same transformation."""
    if not isinstance(value, FunctionType) or not isinstance(like, FunctionType):
        return type(value) is type(like)
    return value.__code__ is like.__code__ and _first_held(value) is _first_held(like)


def _first_held(function: Any) -> Any:
    """The code of what stands in a wrapper's closure first: under JAX's filter of tracebacks, what is filtered."""
    first = function.__closure__[0].cell_contents if function.__closure__ else None
    return None if first is getattr(function, "__wrapped__", None) else getattr(first, "__code__", None)


def _definition(text: ParsedText, name: ast.Name) -> Function | None:
    """The function that a name stands for: one that is defined around it, or in the module, or a lambda so called."""
    around: Any = name
    while around is not None:
        around = text.enclosing(around)
        for node in ast.walk(text.tree if around is None else around):
            if (text.enclosing(node) if not isinstance(node, ast.Module) else None) is not around:
                continue
            match node:
                case ast.FunctionDef(name.id) | ast.AsyncFunctionDef(name.id):
                    return node
                case ast.Assign([ast.Name(name.id)], ast.Lambda() as value):
                    return value
                case _:
                    pass
    return None
