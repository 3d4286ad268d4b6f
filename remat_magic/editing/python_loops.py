"""The loops of Python in a text: what repeats a call, and how that ends."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.records import RematError

__all__ = [
    "KEEPING",
    "Comprehension",
    "PythonLoop",
    "guards_of",
    "has_end",
    "is_load",
    "jumps_of",
    "loaded",
    "loop_around",
    "own_counter",
    "own_parameter",
    "statement_of",
    "stored",
]

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
PythonLoop = ast.For | ast.While | Comprehension | ast.Call
"""A call is one of ``functools.reduce``, ``map`` or ``jax.tree.map``."""


def statement_of(text: ParsedText, node: ast.AST) -> ast.stmt:
    """The statement that a node stands in, which a definition can be written before.

    Raises:
        RematError: none can.
    """
    below, above = node, text.parents.get(id(node))
    while above is not None and not (isinstance(below, ast.stmt) and below in getattr(above, "body", [])):
        if isinstance(below, ast.stmt) and below in [*getattr(above, "orelse", []), *getattr(above, "finalbody", [])]:
            break
        below, above = above, text.parents.get(id(above))
    line, column = text.start(below) if isinstance(below, ast.stmt) else (1, 1)
    if text.enclosing(below) is None or text.lines[line - 1][:column].strip():
        raise RematError(
            f"the loop at line {line} of {text.place} stands where no function can be defined before it: write the "
            "checkpoint there by hand."
        )
    assert isinstance(below, ast.stmt)
    return below


def loop_around(text: ParsedText, node: ast.AST) -> ast.For | ast.While | ast.comprehension | None:
    """The innermost loop of its function that a node is repeated by, a comprehension's last one where that does it."""
    below, above = node, text.parents.get(id(node))
    while above is not None and not isinstance(above, Function):
        if isinstance(above, ast.For | ast.While) and below in above.body:
            return above
        if isinstance(above, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            if not isinstance(below, ast.comprehension):
                return above.generators[-1]
            if below is not above.generators[0] or node not in ast.walk(below.iter):
                return None
        below, above = above, text.parents.get(id(above))
    return None


def own_counter(loop: ast.While) -> str:
    """The variable that counts the steps of a loop one by one and is compared to end it; empty where none does."""
    compared = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    stores = Counter(
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    for statement in loop.body:
        match statement:
            case ast.AugAssign(ast.Name(name), ast.Add(), ast.Constant(1)):
                pass
            case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(other), ast.Add(), ast.Constant(1))) if name == other:
                pass
            case _:
                continue
        if name in compared and stores[name] == 1:
            return name
    return ""


def own_parameter(text: ParsedText, loop: ast.stmt | ast.expr) -> str:
    """What the object is called in the method that a loop stands in, or a function within it.

    Raises:
        RematError: it stands in no method, or the object has no such name there.
    """
    function, inner = text.enclosing(loop), set[str]()
    while function is not None:
        arguments, is_method = function.args, isinstance(text.parents.get(id(function)), ast.ClassDef)
        if is_method and (given := [*arguments.posonlyargs, *arguments.args]) and given[0].arg not in inner:
            return given[0].arg
        inner |= {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
        inner |= stored([function] if isinstance(function, ast.Lambda) else function.body)
        function = None if is_method else text.enclosing(function)
    raise RematError(
        f"the loop at line {loop.lineno} of {text.place} is not in a method of the module itself: write the checkpoint "
        "around some of its steps there by hand."
    )


def jumps_of(loop: ast.For | ast.While) -> Iterator[ast.Break | ast.Continue]:
    """Each ``break`` and ``continue`` of a loop, those of the loops in it left out."""
    todo: list[ast.AST] = [*loop.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Break | ast.Continue):
            yield node
        todo += node.orelse if isinstance(node, ast.For | ast.While) else ast.iter_child_nodes(node)


def has_end(loop: ast.For) -> bool:
    """Whether a loop would end without a ``break``, as far as its text tells."""
    called = [node.func for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
    return all(isinstance(function, ast.Name) and function.id in _WITH_AN_END for function in called)


_WITH_AN_END = {"enumerate", "len", "list", "range", "reversed", "sorted", "tuple", "zip"}


def guards_of(loop: ast.For) -> list[ast.stmt]:
    """The jumps that steps begin with, by which they are chosen; none where a step may have a part in that."""
    guards = [*itertools.takewhile(_is_guard, loop.body)]
    breaks = {node for node in jumps_of(loop) if isinstance(node, ast.Break)}
    nodes = [node for guard in guards for node in ast.walk(guard)]
    tests = [node.test for node in nodes if isinstance(node, ast.If)]
    others = any(isinstance(node, ast.NamedExpr | ast.Lambda) for node in nodes)
    steps = [node for statement in loop.body[len(guards) :] for node in ast.walk(statement)]
    others |= any(_changes(node, loaded(tests)) for node in steps)
    is_left = bool(breaks) and (bool(loop.orelse) or not has_end(loop) or not breaks <= {*nodes})
    return [] if others or is_left or not loaded(tests).isdisjoint(stored(loop.body)) else guards


def _changes(node: ast.AST, names: set[str]) -> bool:
    """Whether a call of a method changes what one of some variables holds."""
    match node:
        case ast.Call(ast.Attribute(of, method)) if method in KEEPING | _TAKING:
            return not loaded([of]).isdisjoint(names)
        case _:
            return False


KEEPING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}
_TAKING = {"clear", "discard", "pop", "popitem", "popleft", "remove"}


def _is_guard(node: ast.stmt) -> bool:
    match node:
        case ast.If(_, [ast.Break() | ast.Continue(), *_], others):
            return all(map(_is_guard, others))
        case _:
            return False


def is_load(node: ast.AST) -> bool:
    """Whether a node reads a variable, an attribute or an element."""
    return isinstance(getattr(node, "ctx", None), ast.Load)


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that are written; those of comprehensions are their own."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not is_load(node):
            names.add(node.id)
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        names |= stored(ast.iter_child_nodes(node))
    return names


def loaded(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that are read somewhere."""
    inside = (inner for node in nodes for inner in ast.walk(node))
    return {node.id for node in inside if isinstance(node, ast.Name) and is_load(node)}
