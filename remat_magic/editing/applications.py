"""Where the user's texts apply a checkpoint, by JAX's own function or by a library's, and to what."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from remat_magic import libraries
from remat_magic.editing.source import Function, ParsedText
from remat_magic.editing.user_code import UserCode, referent
from remat_magic.libraries import layers

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
