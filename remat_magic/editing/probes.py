"""What in the user's text can be given a name, and what values it has: each such place is named once, and traced.

Which value an expression has cannot be told from a traceback: a call of a library makes many values at one place. So
the function is traced with a probe around each expression, and after each statement that binds variables; a probe gives
the arrays that pass through it names of its own.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray, Tracer

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.editing.user_code import UserCode

__all__ = ["PROBE", "Nameable", "body_start", "is_probe", "nameables", "number_of", "probe", "probed"]

PROBE = "__remat_magic_probe__"  # the probe's name in the copied namespace
_PREFIX = "remat_magic/probe "


@dataclass(frozen=True, slots=True, eq=False)
class Nameable:
    """An expression or variable that can be given a name.

    An expression is wrapped. A ``variable`` is bound anew: after the statement ``node``, or where the body of the
    function or loop ``node`` starts. Where both are there, the expression ``node`` is the only use of the variable.
    """

    text: ParsedText
    node: ast.expr | ast.stmt
    variable: str = ""

    @property
    def rank(self) -> int:
        """Orders those that have the same values: the one next to the operation first."""
        return 1 if not self.variable else 3 if isinstance(self.node, Function) else 2


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


def nameables(code: UserCode) -> list[Nameable]:
    """All that can be named in the functions that ran."""
    return [
        Nameable(text, node, variable)
        for file, text in code.texts.items()
        for number in code.executed(file)
        for node, variable in _in_function(text.functions[number])
    ]


def _in_function(function: Function) -> Iterator[tuple[Any, str]]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if isinstance(function, ast.Lambda):
        for name in names:
            uses = [node for node in ast.walk(function.body) if isinstance(node, ast.Name) and node.id == name]
            if len(uses) == 1 and isinstance(uses[0].ctx, ast.Load):
                yield uses[0], name
        yield from _inside(function.body)
        return
    for name in names:
        if name not in ("self", "cls"):
            yield function, name
    for statement in function.body:
        yield from _inside(statement)


_VALUES = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Attribute, ast.IfExp)
# What is inside these is run elsewhere, no expression, or (formatted text) of no use.
_LEFT_OUT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.JoinedStr, ast.pattern)


def _inside(node: ast.AST) -> Iterator[tuple[Any, str]]:
    if isinstance(node, _LEFT_OUT):
        return
    if isinstance(node, ast.stmt):
        for name in _bound(node):
            yield node, name
    if isinstance(node, _VALUES) and not _is_super(node):
        if isinstance(getattr(node, "ctx", None), ast.Load | None):
            yield node, ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # the method itself is no value
            for child in (node.func.value, *node.args, *node.keywords):
                yield from _inside(child)
            return
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child)


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


def probed(code: UserCode, places: Sequence[Nameable]) -> dict[str, ast.Module]:
    """The trees of the texts with a probe at each of these places."""
    trees: dict[str, ast.Module] = {}
    for file, text in code.texts.items():
        trees[file] = copy.deepcopy(text.tree)
        copies = dict(zip(map(id, ast.walk(text.tree)), ast.walk(trees[file]), strict=True))
        numbers: dict[int, list[tuple[str, int]]] = {}
        for number, place in enumerate(places):
            if place.text is text:
                numbers.setdefault(id(copies[id(place.node)]), []).append((place.variable, number))
        ast.fix_missing_locations(_Prober(numbers).visit(trees[file]))
    return trees


class _Prober(ast.NodeTransformer):
    """Puts probes into a tree; ``numbers`` has for a node, by identity, variables and the numbers of their places."""

    def __init__(self, numbers: dict[int, list[tuple[str, int]]]) -> None:
        self._numbers = numbers

    def visit(self, node: ast.AST) -> Any:
        """The node with what it holds probed, and probed itself where it has a number."""
        numbers = self._numbers.get(id(node), [])
        new: Any = self.generic_visit(node)
        if isinstance(new, ast.expr):
            for _, number in numbers:
                new = _call(new, number)
            return new
        where = node.body[0] if isinstance(node, ast.For) else node  # it is in the steps that it is done
        after = [_bind(name, number, where) for name, number in numbers]
        if not after:
            return new
        if isinstance(new, ast.For | Function):
            body: Any = new.body
            body[body_start(new) : body_start(new)] = after
            return new
        return [new, *after]


def body_start(node: Any) -> int:
    """The index of a body's first statement after its docstring."""
    match node.body[0]:
        case ast.Expr(ast.Constant(str())) if not isinstance(node, ast.For):
            return 1
        case _:
            return 0


def _call(value: Any, number: int) -> ast.expr:
    call = ast.Call(ast.Name(PROBE, ast.Load()), [value, ast.Constant(number)], [])
    for node in (call, call.func, call.args[1]):
        ast.copy_location(node, value)
    return call


def _bind(name: str, number: int, where: ast.AST) -> ast.stmt:
    value = ast.copy_location(ast.Name(name, ast.Load()), where)
    target = ast.copy_location(ast.Name(name, ast.Store()), where)
    return ast.copy_location(ast.Assign([target], _call(value, number)), where)
