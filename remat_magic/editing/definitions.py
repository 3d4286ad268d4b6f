"""Definitions taken out of a source's tree, to be executed by themselves."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from remat_magic.editing.setting import resolved

__all__ = ["is_pure", "paired", "with_decorators", "with_given_defaults"]


def with_given_defaults(node: Any, function: FunctionType, given: dict[str, Any]) -> Any:
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


def with_decorators(node: Any, innermost: int) -> Any:
    """A definition with only so many of its decorators, those next to it."""
    new = copy.copy(node)
    new.decorator_list = node.decorator_list[len(node.decorator_list) - innermost :] if innermost > 0 else []
    return new


def paired(old: list[ast.stmt], new: list[ast.stmt]) -> Iterator[tuple[ast.stmt | None, ast.stmt]]:
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
                yield from paired(getattr(was, part, []), getattr(now, part, []))


def is_pure(value: ast.expr, space: Mapping[str, Any]) -> bool:
    """Whether evaluating an expression only makes a function: lambdas, and calls of JAX and functools."""
    match value:
        case ast.Lambda() | ast.Name() | ast.Constant():
            return True
        case ast.Attribute(inner):
            return is_pure(inner, space)
        case ast.Call(callee, args, keywords):
            owner = getattr(resolved(callee, space), "__module__", None) or ""
            known = owner.partition(".")[0] in ("jax", "jaxlib", "functools")
            return known and all(is_pure(each, space) for each in (*args, *(keyword.value for keyword in keywords)))
        case ast.IfExp(test, body, otherwise):
            return all(is_pure(each, space) for each in (test, body, otherwise))
        case ast.Tuple(items) | ast.List(items):
            return all(is_pure(each, space) for each in items)
        case _:
            return False
