"""What JAX does with an edited text: the user's functions with its code, in one thread, for as long as it is traced.

While it is traced, each function that the edit changes does in this thread what the edited text says, in a copy of its
namespace.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

from remat_magic import _jax, units
from remat_magic.editing.source import ParsedText, code_objects, functions_of, number_of
from remat_magic.editing.user_code import PARTIAL, Application, UserCode, applications, with_policies
from remat_magic.engine.namespaces import copy_of, one_at_a_time, standing_in
from remat_magic.engine.signature import function_name
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import modules_as_they_were, unjitted
from remat_magic.records import RematError, Report, Residual, Site

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


@contextlib.contextmanager
def _as_edited(
    code: UserCode, trees: Mapping[str, ast.Module], given: Mapping[str, Any], wrappers: Sequence[NewWrapper] = ()
) -> Iterator[None]:
    """While this lasts, the user's functions do in this thread what other trees of their texts say.

    Args:
        code: what ran, with its texts.
        trees: by file name; a file that is not in it is as it was.
        given: names to put into every namespace.
        wrappers: what these trees put around functions that were there before the trace.

    Raises:
        RematError: something of the edit cannot be evaluated.
    """
    with one_at_a_time:
        edited = _Edited(code, trees, given).functions(code.things, wrappers)
        with standing_in(edited), modules_as_they_were(code.things):
            yield


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

    def functions(
        self, things: Sequence[Any], wrappers: Sequence[NewWrapper]
    ) -> list[tuple[FunctionType, Callable[..., Any]]]:
        """The functions among all things that are to do something else, and what does it."""
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
            namespace = self._copies[id(original)] = {**self._code.names.of(original), **self._given}
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
    """A policy that tells where it was given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


class Retraces:
    """Traces the function of one trace with other texts."""

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._engine, self._code = facts.engine, code

    def of(
        self,
        trees: Mapping[str, ast.Module],
        given: Mapping[str, Any],
        wrappers: Sequence[NewWrapper] = (),
        jitted: Callable[[Any], Any] | None = None,
        *,
        read: Callable[[Facts], _Read],
    ) -> _Read:
        """What is read of the function of other trees, traced, while the rules of its derivatives are of them too.

        ``jitted`` jits what the function jits in another way.

        Raises:
            RematError: it cannot be executed apart from the session, or raises there.
        """
        with _as_edited(self._code, trees, given, wrappers):
            try:
                fun = self._engine.given.fun
                fun = fun if jitted is None else jitted(unjitted(fun))
                return read(Facts(self._engine.retraced(fun)))
            except Exception as error:
                message = str(error).partition("\n")[0].rstrip(".")
                raise RematError(
                    f"{self._engine.primal.name} raises when it is executed apart from your session, to see what an "
                    f"edit does: {type(error).__name__}: {message}."
                ) from error

    def applied(self, sites: Sequence[Site]) -> dict[str, list[Application]]:
        """Where the source applies the checkpoints of sites: each place is given a policy that is known again."""
        if not sites:
            return {}
        places = applications(self._code)
        policies = [ast.parse(f"{_MARK}[{number}]", mode="eval").body for number, _ in enumerate(places)]
        marked = list(zip(places, policies, strict=True))
        wrappers = [NewWrapper(place.text, place.maker(policy), place) for place, policy in marked]
        marks = [_Mark(number) for number, _ in enumerate(places)]
        facts = self.of(with_policies(self._code, marked), {_MARK: marks}, wrappers, read=lambda facts: facts)
        made = ([place for place in places if place.made_of(it, self._code) is not None] for it in self._code.things)
        several = [of_one for of_one in made if len(of_one) > 1]  # it cannot be told which of them made it
        by_site: dict[str, list[Application]] = {}
        for _, eqn in walk(facts.engine.primal.provenances.closed):
            mark = _jax.checkpoint_policy(eqn) if _jax.is_checkpoint(eqn) else None
            if isinstance(mark, _Mark):
                place, of_site = places[mark.number], by_site.setdefault(facts.engine.primal.site_of(eqn), [])
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
