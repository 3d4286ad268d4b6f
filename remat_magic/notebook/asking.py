"""Before each call of a cell's last statements the magic is asked: ``F(a)`` becomes ``running.function(F, ...)(a)``.

Python evaluates each operand as before, once and in order. Which call is meant shows only in the functions, once they
are evaluated: so each is told with what is known of it from the text.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from remat_magic.parsing import parse_python

# What is not looked into: it runs several times, later, or perhaps not at all.
_OPAQUE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_SIMPLE = (ast.Expr, ast.Assert, *_ASSIGNMENTS)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
BLOCKS = (ast.With, ast.AsyncWith, ast.If, ast.Try, *_LOOPS)
# Statements that do more than to show or use what was computed before.
_DOES_MORE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.NamedExpr, ast.Await)
_SHOWING = 4  # so many statements at the end of a cell are looked behind


def magic_call(method: str, where: ast.AST, *operands: Any) -> ast.Call:
    """A call of a method of the magic, at the place of another node; operands are expressions or constants."""
    function = parse_python(f"get_ipython().magics_manager.registry['RematMagics'].{method}", "eval").body
    for node in ast.walk(function):
        ast.copy_location(node, where)
    arguments = [operand if isinstance(operand, ast.expr) else ast.Constant(operand) for operand in operands]
    return ast.copy_location(ast.Call(function, arguments, []), where)


def watched_block(statements: Sequence[ast.stmt], after: Sequence[ast.stmt] = ()) -> list[ast.stmt]:
    """Statements with their imports and calls told to the magic.

    Args:
        statements: that run after one another, once.
        after: those that follow them.
    """
    block = list[ast.stmt]()
    for number, statement in enumerate(statements):
        rest = [*statements[number + 1 :], *after]
        block.append(_watched(statement, rest) if len(rest) <= _SHOWING else statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            block.append(ast.copy_location(ast.Expr(magic_call("now.begin", statement)), statement))
    return block


def watched_expression(expression: ast.expr) -> ast.expr:
    """An expression that stands for itself, with its calls told to the magic."""
    return _Calls(expression, []).visit(copy.deepcopy(expression))


def calls_something(expression: ast.AST) -> bool:
    """Whether an expression has a call that is told to the magic."""
    if isinstance(expression, ast.Call) and not is_command(expression):
        return True
    return not isinstance(expression, _OPAQUE) and any(map(calls_something, ast.iter_child_nodes(expression)))


def _watched(statement: ast.stmt, rest: list[ast.stmt]) -> ast.stmt:
    if isinstance(statement, BLOCKS):
        other = copy.copy(statement)
        rest = [ast.Pass(), *rest] if isinstance(statement, _LOOPS) else rest  # of the next turn
        for part in ("body", "orelse", "finalbody"):
            if hasattr(statement, part):
                setattr(other, part, watched_block(getattr(statement, part), rest))
        return other
    if isinstance(statement, _SIMPLE):
        other = copy.deepcopy(statement)
        last = other.value if isinstance(other, ast.Expr) and not rest else None
        return _Calls(last, _functions_of(rest, {*_targets(statement)})).visit(other)
    return statement


class _Calls(ast.NodeTransformer):
    """Tells of each call of a statement; see ``Running.function`` for what is told."""

    def __init__(self, last: ast.expr | None, showing: list[ast.expr] | None) -> None:
        self._numbers, self._last, self._showing = itertools.count(), last, showing
        self._around: tuple[int, ...] = ()  # the calls that the node is an operand of
        self._steps: tuple[str, ...] = ()  # what is done to its result

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _OPAQUE):
            return node
        steps, self._steps = self._steps, ()
        match node:
            case ast.Call() if is_command(node):
                pass
            case ast.Call():
                node = self._told(node, steps)
            case ast.Attribute(value, name):
                node.value = self._inside(value, (name, *steps))
            case ast.Subscript(value, index):
                node.value, node.slice = self._inside(value, ("[]", *steps)), self.visit(index)
            case _:
                node = self.generic_visit(node)
        return node

    def _inside(self, node: ast.expr, steps: tuple[str, ...]) -> ast.expr:
        self._steps = steps
        return self.visit(node)

    def _told(self, call: ast.Call, steps: tuple[str, ...]) -> ast.Call:
        if steps[:1] == ("()",):  # in grad(f)(x) the call of grad makes the function
            return call
        number, around = next(self._numbers), self._around
        call.func = self._inside(call.func, ("()", *steps))
        self._around = (*around, number)
        call.args = [self.visit(operand) for operand in call.args]
        call.keywords = [self.visit(operand) for operand in call.keywords]
        self._around = around
        showing: Any = self._showing
        if showing:
            nothing = ast.arguments([], [], None, [], [], None, [])
            showing = ast.copy_location(ast.Lambda(nothing, ast.Tuple(showing, ast.Load())), call)
        last = () if self._last is None else (call is self._last,)
        told = (number, around, steps, last, () if showing == [] else showing)
        call.func = magic_call("now.function", call, call.func, *told)
        return call


def _functions_of(statements: Sequence[ast.stmt], result: set[str]) -> list[ast.expr] | None:
    """What is called in statements that only use what is in ``result``, but for it and its methods.

    None where they do more, or where that cannot be told: where one of them assigns something else, and where the last
    is an assignment. A cell that only prepares something ends so too.
    """
    functions = list[ast.expr]()
    if statements and isinstance(statements[-1], _ASSIGNMENTS):
        return None
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, _DOES_MORE):
            return None
        if isinstance(node, _ASSIGNMENTS):
            if result.isdisjoint(name.id for name in ast.walk(node) if isinstance(name, ast.Name)):
                return None
            result.update(_targets(node))
        elif isinstance(node, ast.Call) and not is_command(node):
            root: ast.expr = node.func
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in {"get_ipython", *result}:
                continue
            if not isinstance(root, ast.Name) or any(isinstance(part, ast.Call) for part in ast.walk(node.func)):
                return None
            functions.append(node.func)
    return functions


def is_command(expression: ast.expr) -> bool:
    """Whether it is one of the calls that IPython writes for ``%magic``, ``!command`` and ``f?``."""
    match expression:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"), [], []), _)):
            return True
        case _:
            return False


def _targets(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement assigns to, or to a part of."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                yield ast.unparse(node).partition(".")[0].partition("[")[0]
            case _:
                pass
