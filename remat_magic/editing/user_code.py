"""What of the user's code ran in a trace: functions, texts, namespaces, and where they apply a checkpoint."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from remat_magic import _jax, libraries, units
from remat_magic.editing.source import (
    Function,
    ParsedText,
    TextChanges,
    code_objects,
    functions_of,
    number_of,
    parsed_text,
)
from remat_magic.engine import signature
from remat_magic.engine.engine import Engine
from remat_magic.engine.namespaces import Namespace, copy_of, one_at_a_time, standing_in
from remat_magic.engine.signature import function_name
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import attribute, layers, modules_as_they_were, unjitted
from remat_magic.parsing import parse_expression, parse_python
from remat_magic.records import RematError, Report, Residual, Site
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
            if code.co_filename == signature.__file__:  # outside of it are the callers of the trace
                break
            if is_user_file(code.co_filename) and STAND_IN not in code.co_varnames:
                codes.add((code.co_filename, code))
    return codes


@dataclass(eq=False)
class UserCode:
    """A function with the texts and namespaces of what it runs.

    Attributes:
        engine: of the function as it was traced.
        things: all that can be reached from it and its arguments.
        texts: by file name.
        codes: for each code object of the user's that ran, and its file, its number in the text's ``functions``.
        namespaces: the globals of each file's functions.
    """

    engine: Engine
    things: list[Any]
    texts: dict[str, ParsedText] = field(default_factory=dict)
    codes: dict[Executed, int] = field(default_factory=dict)
    namespaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    _functions: list[FunctionType] = field(default_factory=list)  # those that ran
    _scopes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(engine: Engine) -> UserCode:
        """What ran of a traced function, by the programs: of a step its own, and that of its gradient."""
        function = engine.given.fun
        code = UserCode(engine, [*_reachable(engine.given.names, function, engine.inputs_again())])
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
            self._scopes[file] = {**scope, **self.engine.given.names.of(self.namespaces[file])}
        return self._scopes[file]

    def definition(self, inside: tuple[str, str, int] | None) -> tuple[ParsedText, Function] | None:
        """The definition of the traced function itself, through whatever wraps it; None where it is not the user's.

        ``inside``: name, file and line of the function that it differentiates inside, if that is meant.
        """
        if inside is not None:
            _, file, line = inside
            begun = (n for (at, code), n in self.codes.items() if (at, code.co_firstlineno) == (file, line))
            number = next(begun, None)
            return None if number is None else (self.texts[file], self.texts[file].functions[number])
        for layer in layers(self.engine.given.fun):
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
        """What it makes of some function; None where that is not known, as flax's, which is for classes."""
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

    def set_policy(self, changes: TextChanges, policy: str, partial: str) -> None:
        """Write another policy there; ``partial`` is the name of ``functools.partial``."""
        if isinstance(self.node, ast.Call):
            changes.set_keyword(self.node, "policy", policy)
        else:
            changes.wrap(self.node, f"{partial}(", f", policy={policy})")

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


def _applications(text: ParsedText, scope: Mapping[str, Any]) -> Iterator[Application]:
    """All of them in a text, whose names stand for these things."""
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
        if isinstance(above, ast.Call):
            is_partial = above.args[:1] == [named] and referent(above.func, scope) is functools.partial
            node = above if above.func is named or is_partial else named
        if isinstance(node, ast.Call) and node.func is named and node.args:
            whole, inner = node, node.args[0]
        else:
            above = text.parents.get(id(node))
            if isinstance(above, ast.Call) and above.func is node and above.args:
                whole, inner = above, above.args[0]
            elif node in getattr(above, "decorator_list", []):
                inner = above
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
            continue  # its policy can be among keywords that are not seen
        yield Application(text, named, node, whole, inner, thing)


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _probe(x: Any) -> Any:
    return x


def _is_like(value: Any, like: Any) -> bool:
    """Whether two objects were made by the same transformation."""
    if not isinstance(value, FunctionType) or not isinstance(like, FunctionType):
        return type(value) is type(like)
    return value.__code__ is like.__code__ and _first_in_closure(value) is _first_in_closure(like)


def _first_in_closure(function: Any) -> Any:
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


_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, eq=False)
class NewWrapper:
    """What an edit puts around functions that were there before the trace.

    Attributes:
        text: where it is written.
        maker: an expression to be called with the function; None: nothing is around it any more.
        around: the number of the function in its text, or what was around it before.
    """

    text: ParsedText
    maker: ast.expr | None
    around: int | Application


class _Edited:
    def __init__(self, code: UserCode, trees: Mapping[str, ast.Module], given: Mapping[str, Any]) -> None:
        self._code, self._trees = code, trees
        self._given = {**given, PARTIAL: functools.partial}
        self._copies: dict[int, dict[str, Any]] = {}
        self._codes: dict[str, dict[int | None, CodeType]] = {}
        for file, text in code.texts.items():
            tree = trees.get(file, text.tree)
            try:
                compiled = compile(tree, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            except SyntaxError as error:
                raise RematError(f"the edit that was tried is no Python there ({error.msg}).") from error
            functions = functions_of(tree)
            self._codes[file] = {number_of(functions, inner): inner for inner in code_objects(compiled)}

    def functions(self, wrappers: Sequence[NewWrapper]) -> list[tuple[FunctionType, Callable[..., Any]]]:
        """The user's functions that are to do something else, and what does it."""
        things = self._code.things
        functions = [thing for thing in things if type(thing) is FunctionType]
        edited: dict[int, tuple[FunctionType, Callable[..., Any]]] = {}
        for function in functions:
            number = self._code.number_of(function)
            if number is None:
                continue
            file = function.__code__.co_filename
            new: Any = self._function(function, number)
            for wrapper in wrappers:
                if (wrapper.text.file, wrapper.around) == (file, number):
                    new = self._wrapped(wrapper, new)
            edited[id(function)] = function, new
        objects: dict[int, tuple[FunctionType, dict[int, Any]]] = {}
        for wrapper in wrappers:
            if not isinstance(wrapper.around, Application):
                continue
            for old in things:
                base = wrapper.around.class_made_of(old, self._code)
                if base is not None:  # who has the class may be anybody, and so what it calls is changed
                    call: Any = vars(old)["__call__"]
                    edited[id(call)] = call, self._wrapped(wrapper, base).__call__
            kind = wrapper.around.kind
            like = functions if kind is FunctionType else [thing for thing in things if type(thing) is kind]
            for old in like:
                inner = wrapper.around.made_of(old, self._code)
                if inner is not None:
                    new = self._wrapped(wrapper, inner)
                    if kind is FunctionType:
                        edited[id(old)] = old, new
                    else:  # an object of equinox, whose class has the call
                        call = type(old).__call__
                        objects.setdefault(id(call), (call, {}))[1][id(old)] = new
        for call, by_object in objects.values():
            edited[id(call)] = call, _call_of(by_object, copy_of(call))
        return [*edited.values()]

    def _function(self, function: FunctionType, number: int) -> FunctionType:
        """A function of what its definition has become."""
        code = self._codes[function.__code__.co_filename][number]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        closure = tuple(cells.get(name) or CellType() for name in code.co_freevars)
        return copy_of(function, code, self._namespace(function.__globals__, function.__code__.co_filename), closure)

    def _namespace(self, original: dict[str, Any], file: str) -> dict[str, Any]:
        """The copy of a file's namespace, with the imports that the edit adds."""
        namespace = self._copies.get(id(original))
        if namespace is None:
            namespace = self._copies[id(original)] = {**self._code.engine.given.names.of(original), **self._given}
            for edited, tree in self._trees.items():
                if edited == file or self._code.namespaces.get(edited) is original:
                    old = {ast.dump(statement) for statement in self._code.texts[edited].tree.body}
                    for statement in tree.body:
                        if isinstance(statement, ast.Import | ast.ImportFrom) and ast.dump(statement) not in old:
                            exec(compile(ast.Module([statement], []), edited, "exec"), namespace)  # noqa: S102 - an import that the edit adds
        return namespace

    def _wrapped(self, wrapper: NewWrapper, inner: Any) -> Any:
        if wrapper.maker is None:
            return inner
        text = wrapper.text
        scope = {**self._code.scope(text.file), **self._namespace(self._code.namespaces[text.file], text.file)}
        try:
            compiled = compile(ast.Expression(wrapper.maker), text.file, "eval", dont_inherit=True)
            return eval(compiled, scope)(inner)  # noqa: S307 - what the user, or the edit, wrote
        except Exception as error:
            raise RematError(
                f"what the edit puts around {function_name(inner)} cannot be executed apart from your session: "
                f"{type(error).__name__}: {error}."
            ) from error


def _call_of(by_object: Mapping[int, Callable[..., Any]], own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is another one for some objects."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        new = by_object.get(id(self))
        return own(self, *args, **kwargs) if new is None else new(*args, **kwargs)

    return call


# ----------------------------------------------------------------------------------------------------------- tracing it

_MARK = "__remat_magic_mark__"


class _Mark:
    """A policy that says at which of the places it was written."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


def traced(
    code: UserCode,
    trees: Mapping[str, ast.Module],
    given: Mapping[str, Any],
    wrappers: Sequence[NewWrapper] = (),
    jitted: Callable[[Any], Any] | None = None,
    *,
    read: Callable[[Facts], _Read],
) -> _Read:
    """What ``read`` makes of the function of other trees, traced, while the rules of its derivatives are of them too.

    Args:
        code: what ran, with its texts.
        trees: by file name; a file that is not in it is as it was.
        given: names to put into every namespace.
        wrappers: what these trees put around functions that were there before the trace.
        jitted: jits what the function jits in another way.
        read: is given the facts of it.
    """
    engine = code.engine
    with one_at_a_time:
        edited = _Edited(code, trees, given).functions(wrappers)
        with standing_in(edited), modules_as_they_were(code.things):
            try:
                fun = engine.given.fun
                fun = fun if jitted is None else jitted(unjitted(fun))
                return read(Facts(engine.retraced(fun)))
            except Exception as error:
                message = str(error).partition("\n")[0].rstrip(".")
                raise RematError(
                    f"{engine.primal.name} raises when it is executed apart from your session, to see what an "
                    f"edit does: {type(error).__name__}: {message}."
                ) from error


def applications_of(code: UserCode, sites: Sequence[Site]) -> dict[str, list[Application]]:
    """Where the source applies the checkpoints of sites: the program is traced with a mark as policy at each place."""
    if not sites:
        return {}
    places = [place for text in code.texts.values() for place in _applications(text, code.scope(text.file))]
    wrappers, texts = list[NewWrapper](), dict[str, TextChanges]()
    for number, place in enumerate(places):
        policy = f"{_MARK}[{number}]"
        place.set_policy(texts.setdefault(place.text.file, TextChanges(place.text)), policy, PARTIAL)
        wrappers.append(NewWrapper(place.text, place.maker(parse_expression(policy)), place))
    trees = {file: parse_python(changes.compiled()) for file, changes in texts.items()}
    marks = [_Mark(number) for number, _ in enumerate(places)]
    primal = traced(code, trees, {_MARK: marks}, wrappers, read=lambda facts: facts.engine.primal)
    made = ([place for place in places if place.made_of(it, code) is not None] for it in code.things)
    several = [of_one for of_one in made if len(of_one) > 1]  # which of them made it is not known
    by_site: dict[str, list[Application]] = {}
    for _, eqn in walk(primal.provenances.closed):
        mark = _jax.checkpoint_policy(eqn) if _jax.is_checkpoint(eqn) else None
        if isinstance(mark, _Mark):
            place, of_site = places[mark.number], by_site.setdefault(primal.site_of(eqn), [])
            alike = (other for of_one in several if place in of_one for other in of_one)
            of_site += [other for other in dict.fromkeys((place, *alike)) if other not in of_site]
    return by_site


def differences(expected: Report, traced: Report) -> list[str]:
    """What differs in what is saved, a sentence each; empty where nothing does."""
    sentences: list[str] = []
    of_plan = Counter(_kind_and_type(row) for row in expected.residuals)
    of_text = Counter(_kind_and_type(row) for row in traced.residuals)
    for key in dict.fromkeys([*of_plan, *of_text]):
        planned, saved = of_plan[key], of_text[key]
        if planned != saved:
            sentences.append(f"{key} is saved {_times(saved)} by the edited text, and {_times(planned)} by the plan.")
    if expected.saved_bytes != traced.saved_bytes:
        text, plan = units.apart(traced.saved_bytes, expected.saved_bytes)
        sentences.append(f"the edited text saves {text}, and the plan {plan}.")
    return sentences


def _kind_and_type(row: Residual) -> str:
    return row.type + (f" in {row.memory_space}" if row.memory_space else "")


def _times(number: int) -> str:
    return {0: "not", 1: "once", 2: "twice"}.get(number, f"{number} times")
