"""The magic decides about each call of a cell's last statements: ``F(a)`` becomes ``running.function(F, ...)(a)``.

Python evaluates each operand as before, once and in order. Which call is meant shows only in the functions, once they
are evaluated: so each is given with what is known of it from the text.
"""

from __future__ import annotations

import ast
import copy
import re
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
# Methods of results, of arrays, dicts and what is compiled: in f(x).mean() it is f that is meant, and in
# build(params).fit(x) it is fit alone.
_OF_RESULTS = re.compile(
    "all|any|argmax|argmin|astype|block_until_ready|copy|cumsum|dot|flatten|item|max|mean|min|prod|ravel|reshape|round|"
    "squeeze|std|sum|swapaxes|take|tolist|transpose|var|get|items|keys|values|as_text|compile|cost_analysis|memory_analysis"
)
_SHOWING = 4  # so many statements at the end of a cell are looked behind


def magic_call(method: str, where: ast.AST, *operands: Any) -> ast.Call:
    """A call of a method of the magic, at the place of another node; operands are expressions or constants."""
    function = parse_python(f"get_ipython().magics_manager.registry['RematMagics'].{method}", "eval").body
    for node in ast.walk(function):
        ast.copy_location(node, where)
    arguments = [operand if isinstance(operand, ast.expr) else ast.Constant(operand) for operand in operands]
    return ast.copy_location(ast.Call(function, arguments, []), where)


def watched_block(statements: Sequence[ast.stmt], after: Sequence[ast.stmt] = ()) -> list[ast.stmt]:
    """Statements that run once, with their imports and calls given to the magic; ``after`` are those that follow."""
    block = list[ast.stmt]()
    for number, statement in enumerate(statements):
        rest = [*statements[number + 1 :], *after]
        block.append(_watched(statement, rest) if len(rest) <= _SHOWING else statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            block.append(ast.copy_location(ast.Expr(magic_call("now.begin", statement)), statement))
    return block


def watched_expression(expression: ast.expr) -> ast.expr:
    """An expression that stands for itself, with its calls given to the magic."""
    expression = copy.deepcopy(expression)
    return _Calls(expression, []).visit(expression)


def calls_something(expression: ast.AST) -> bool:
    """Whether an expression has a call that is given to the magic."""
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
    """Gives each call of a statement to the magic; see ``Running.function`` for what goes with it."""

    def __init__(self, last: ast.expr | None, showing: list[ast.expr] | None) -> None:
        self._last, self._showing, self._depth = last, showing, 0

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _OPAQUE) or is_command(node) else super().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        showing: Any = self._showing
        if showing:
            nothing = ast.arguments([], [], None, [], [], None, [])
            showing = ast.copy_location(ast.Lambda(nothing, ast.Tuple(showing, ast.Load())), node)
        known = (self._depth, self._last is not None, node is self._last, () if showing == [] else showing)
        if isinstance(node.func, ast.Attribute) and _OF_RESULTS.fullmatch(node.func.attr):
            node.func = self.visit(node.func)
        self._depth += 1
        node.args = [self.visit(operand) for operand in node.args]
        node.keywords = [self.visit(operand) for operand in node.keywords]
        self._depth -= 1
        node.func = magic_call("now.function", node, node.func, *known)
        return node


def _functions_of(statements: Sequence[ast.stmt], result: set[str]) -> list[ast.expr] | None:
    """What is called in statements that only use what is in ``result``, but for it and its methods.

    None where they do more, or where that is not known: where one of them assigns something else, and where the last
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


def is_command(expression: ast.AST) -> bool:
    """Whether it is one of the calls that IPython writes for ``%magic``, ``!command`` and ``f?``."""
    inner = expression.func if isinstance(expression, ast.Call) else None
    return isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "get_ipython()"


def _targets(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement assigns to, or to a part of."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                yield ast.unparse(node).partition(".")[0].partition("[")[0]
