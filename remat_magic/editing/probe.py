"""Where in the user's source a value can be named, found by naming every expression once and tracing what comes of it.

Which value an expression has cannot be told from a traceback: a call of a library makes many values at one place. So
the function is traced with a probe around each expression, and after each statement that binds variables; a probe gives
the arrays that pass through it names of its own.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray, Tracer

from remat_magic.editing.source import Function, Source

__all__ = ["PROBE", "Candidate", "candidates", "is_probe", "number_of", "probe", "probed"]

PROBE = "__remat_magic_probe__"  # the probe's name in the copied namespace
_PREFIX = "remat_magic/probe "

Kind = Literal["expression", "variable", "parameter", "argument"]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A place where a name can be given.

    An ``expression`` is wrapped; a ``variable`` is bound anew after the statement ``node``, a ``parameter`` at the
    start of the function ``node``; an ``argument`` is the only use of a lambda's parameter, and wrapped.
    """

    number: int
    source: Source
    node: ast.AST
    kind: Kind
    name: str = ""


def probe(value: Any, number: int) -> Any:
    """The value, its arrays named by the number of the place; whatever holds no array that is traced is left alone."""
    if isinstance(value, Tracer):
        return checkpoint_name(value, f"{_PREFIX}{number}") if _is_array(value) else value
    if type(value) in (tuple, list, dict) and any(map(_is_array, jax.tree.leaves(value))):
        return jax.tree.map(lambda leaf: probe(leaf, number), value)
    return value


def _is_array(value: Any) -> bool:
    # References to mutable arrays are traced as well, and are no values.
    return isinstance(value, Tracer) and type(jax.typeof(value)) is ShapedArray


def is_probe(name: str) -> bool:
    """Whether a name is one that a probe gave."""
    return name.startswith(_PREFIX)


def number_of(name: str) -> int:
    """The number of the place that a probe's name is of."""
    return int(name.removeprefix(_PREFIX))


def candidates(source: Source, functions: Iterable[int], first: int) -> list[Candidate]:
    """The places in some functions of a source.

    Args:
        source: the file or cell.
        functions: their numbers in ``source.functions``.
        first: the number of the first place.
    """
    found: list[Candidate] = []
    for number in sorted(functions):
        node = source.functions[number]
        if isinstance(node, ast.Lambda):
            found += _of_lambda(source, node, first + len(found))
            statements: list[ast.AST] = [node.body]
        else:
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            for name in (name for name in names if name not in ("self", "cls")):
                found.append(Candidate(first + len(found), source, node, "parameter", name))
            statements = list(node.body)
        for statement in statements:
            for kind, place, name in _places(statement):
                found.append(Candidate(first + len(found), source, place, kind, name))
    return found


def _of_lambda(source: Source, node: ast.Lambda, first: int) -> list[Candidate]:
    found: list[Candidate] = []
    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        uses = [use for use in ast.walk(node.body) if isinstance(use, ast.Name) and use.id == each.arg]
        if len(uses) == 1 and isinstance(uses[0].ctx, ast.Load):
            found.append(Candidate(first + len(found), source, uses[0], "argument", each.arg))
    return found


_VALUES = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute, ast.IfExp)
# What is inside these is run elsewhere, no expression, or (formatted text) of no use.
_LEFT_OUT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.JoinedStr, ast.pattern)


def _places(node: ast.AST) -> Iterator[tuple[Kind, ast.AST, str]]:
    if isinstance(node, _LEFT_OUT):
        return
    if isinstance(node, ast.stmt):
        for name in _bound(node):
            yield "variable", node, name
    if isinstance(node, _VALUES) and not _is_super(node):
        if isinstance(getattr(node, "ctx", None), ast.Load | None):
            yield "expression", node, ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # the method itself is no value
            for child in (node.func.value, *node.args, *node.keywords):
                yield from _places(child)
            return
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _places(child)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _bound(statement: ast.stmt) -> list[str]:
    """The variables to be named after a statement that binds them; not where naming what it assigns does the same."""
    match statement:
        case ast.Assign([ast.Name()], value) if isinstance(value, _VALUES):
            return []
        case ast.Assign(targets):
            pass
        case ast.AugAssign(target) | ast.For(target):
            targets = [target]
        case ast.AnnAssign(target, _, value) if value is not None and not isinstance(value, _VALUES):
            targets = [target]
        case _:
            return []
    names: dict[str, None] = {}
    todo: list[ast.AST] = list(targets)
    while todo:
        target = todo.pop(0)
        if isinstance(target, ast.Name):
            names[target.id] = None
        elif isinstance(target, ast.Tuple | ast.List):
            todo = [*target.elts, *todo]
    return list(names)


# ------------------------------------------------------------------------------------------------------ putting them in


def probed(source: Source, places: Iterable[Candidate]) -> ast.Module:
    """The source's tree with a probe at each of these places."""
    # The marks are copied with the nodes that carry them.
    for place in places:
        marked = cast("Any", place.node)
        if place.kind in ("expression", "argument"):
            marked.remat_magic_wrapped = place.number
        else:
            marked.remat_magic_bound = [*getattr(marked, "remat_magic_bound", []), (place.name, place.number)]
    tree = copy.deepcopy(source.tree)
    for node in ast.walk(source.tree):
        for mark in ("remat_magic_wrapped", "remat_magic_bound"):
            if hasattr(node, mark):
                delattr(node, mark)
    return ast.fix_missing_locations(_Prober().visit(tree))


class _Prober(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        """The node with what it holds probed, and probed itself where it is marked."""
        bound = getattr(node, "remat_magic_bound", [])
        number = getattr(node, "remat_magic_wrapped", None)
        new: Any = self.generic_visit(node)
        if number is not None:
            return _call(new, number)
        if not bound:
            return new
        after = [
            _at(
                ast.Assign([_at(ast.Name(name, ast.Store()), node)], _call(_at(ast.Name(name, ast.Load()), node), n)),
                node,
            )
            for name, n in bound
        ]
        if isinstance(new, ast.For | Function):
            body: Any = new.body
            body[body_start(new) : body_start(new)] = after
            return new
        return [new, *after]


def body_start(node: Any) -> int:
    """The index of a body's first statement after its docstring."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return int(documented and isinstance(cast("Any", first.value).value, str) and not isinstance(node, ast.For))


_Node = TypeVar("_Node", bound=ast.AST)


def _at(node: _Node, where: ast.AST) -> _Node:
    return ast.copy_location(node, where)


def _call(value: Any, number: int) -> ast.expr:
    function, which = _at(ast.Name(PROBE, ast.Load()), value), _at(ast.Constant(number), value)
    return _at(ast.Call(function, [value, which], []), value)
