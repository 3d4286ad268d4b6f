"""The loops of Python in a source text: statements, comprehensions, and calls that repeat a function they are given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from remat_magic.parsing import parse_python

__all__ = ["Position", "SourceLoop", "loop_of", "map_loop", "nodes_with_loops"]

Position = tuple[int | None, ...]  # first and last line, first and last column in bytes
_Range = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SourceLoop:
    """A loop.

    Attributes:
        whole: where it begins and ends, lines and columns in bytes; of a generator or ``map``, where what takes from it
            does.
        body: where what it repeats does.
        is_call: whether that is a function which a call of ``functools.reduce``, ``map`` or ``jax.tree.map`` is given.
        name: what that is called.
    """

    whole: _Range
    body: _Range
    is_call: bool = False
    name: str = ""

    def repeats(self, position: Position, called: Position | None = None) -> bool | None:
        """Whether something is part of a step, and not of what the loop goes through; None where it is not in there.

        Args:
            position: where it is.
            called: where the user's code is that is called there, in the same text; None where none is.
        """
        if not _within(position, self.whole):
            return None
        if not self.is_call:
            return _within(position, self.body)
        is_loop = _range(position) == self.whole and called is not None
        return is_loop and (_within(called, self.body) or not _within(called, self.whole))


def _range(position: Position) -> _Range | None:
    line, end_line, column, end_column = position
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return (line, column), (end_line, end_column)


def _within(position: Position | None, outer: _Range) -> bool:
    inner = None if position is None else _range(position)
    return inner is not None and outer[0] <= inner[0] and inner[1] <= outer[1]


_APART = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
_REPEATING = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def nodes_with_loops(text: str) -> Iterator[tuple[ast.AST, SourceLoop | None]]:
    """All nodes of a text, each with the innermost loop of its function that repeats it, or that it is itself.

    A call that takes all from a ``map`` comes with that, too.
    """
    try:
        todo: list[tuple[ast.AST, ast.AST, SourceLoop | None]] = [(tree := parse_python(text), tree, None)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while todo:
        node, taking, around = todo.pop()
        own = loop_of(node, taking)
        if isinstance(node, ast.Call) and _name(node.func) in _TAKING_ALL:
            yield from ((node, loop) for loop in _maps_in(node, node))
        yield node, own if own is not None and own.is_call else around
        around = None if isinstance(node, _APART) else around
        taking = taking if isinstance(node, ast.Call) and isinstance(taking, ast.Call) else node
        for child in ast.iter_child_nodes(node):
            is_repeated = own is not None and not own.is_call and _within(_position(child), own.body)
            todo.append((child, taking, own if is_repeated else around))


def _position(node: Any) -> Position:
    if not hasattr(node, "lineno"):
        return None, None, None, None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def loop_of(node: ast.AST, taking: ast.AST | None = None) -> SourceLoop | None:
    """The loop that a node is.

    Args:
        node: the node.
        taking: the outermost of the calls around it that are given it, if there are any.
    """
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            first, last = node.body[0], node.body[-1]
            return SourceLoop(_between(node, last), _between(first, last))
        case ast.ListComp(elt) | ast.SetComp(elt) | ast.GeneratorExp(elt):
            lazy = isinstance(node, ast.GeneratorExp) and isinstance(taking, ast.Call)
            outer = taking if lazy else node
            return SourceLoop(_between(outer, outer), _between(elt, elt))
        case ast.DictComp(key, value):
            return SourceLoop(_between(node, node), _between(key, value))
        case ast.Call(called, [_, _, *_]) if _name(called) in ("reduce", "tree.map", "tree_map"):
            return _repeating(node, node)
        case _:
            return None


def map_loop(node: ast.AST, taking: ast.Call | None = None) -> SourceLoop | None:
    """The loop that a call of ``map`` is, for what takes all from it."""
    match node:
        case ast.Call(ast.Name("map"), [_, _, *_]):
            return _repeating(node, taking or node)
        case _:
            return None


def _repeating(call: ast.Call, whole: ast.Call) -> SourceLoop:
    function = call.args[0]
    return SourceLoop(_between(whole, whole), _between(function, function), is_call=True, name=_name(function))


def _maps_in(call: ast.Call, taking: ast.Call) -> Iterator[SourceLoop]:
    for argument in call.args:
        loop = map_loop(argument, taking)
        if loop is not None:
            yield loop
        elif isinstance(argument, ast.Call) and _name(argument.func) in ("enumerate", "zip"):
            yield from _maps_in(argument, taking)


_TAKING_ALL = ("dict", "list", "reduce", "sum", "tuple")


def _name(function: ast.expr) -> str:
    """The name of a function, with that of JAX's module of trees."""
    match function:
        case ast.Attribute(ast.Name("tree") | ast.Attribute(attr="tree"), "map"):
            return "tree.map"
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _between(first: Any, last: Any) -> _Range:
    return (first.lineno, first.col_offset), (last.end_lineno or last.lineno, last.end_col_offset or 0)
