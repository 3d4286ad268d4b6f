"""``%%remat`` without a cell magic's drawbacks: the cell stays a plain cell.

Text run from inside a magic loses its line numbers, shows its errors twice and cannot ``await``. Instead the first
line becomes one line of Python, the marker, before IPython looks for cell magics; and once the cell is parsed, the
marker makes way for a check of the line, and the cell's last call ``F(a, *b, k=c)`` for
``inspect_call(line, F, a, *b, k=c)``. All else is compiled as it stands.

Both transformers are functions of the text alone, since ipykernel may transform a cell more often than it runs it.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

from IPython.core.error import UsageError

from remat_magic.notebook.line import parse
from remat_magic.parsing import parse_python

__all__ = ["CellTransformer", "hooked_expression", "mark"]

_FIRST_LINE = re.compile(r"%%remat(?:[ \t]+(?P<line>.*?))?\s*")

# The marker is IPython's own translation of an empty cell, so without the AST transformer (the history replayed where
# the extension is not loaded) the user is told what is missing.
_MARKER = "get_ipython().run_cell_magic('remat', {line!r}, '')\n"
_MAGICS = "get_ipython().magics_manager.registry['RematMagics']"


def mark(lines: list[str]) -> list[str]:
    """Replace a first line ``%%remat ...`` by the marker; an input transformer for IPython's clean-up stage."""
    first = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if first is None:
        return lines
    return [_MARKER.format(line=first["line"] or ""), *lines[1:]]


# What makes IPython leave it out when it asks whether the input is complete: a terminal must see the `%%`, or it
# would run the cell after its first line.
mark.has_side_effects = True  # pyright: ignore[reportFunctionMemberAccess]


class CellTransformer(ast.NodeTransformer):
    """Turns a marked module into one that inspects; leaves all others alone, and never raises."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def visit(self, node: ast.AST) -> ast.AST:
        """The transformed module. IPython drops a transformer that raises, so nothing here may."""
        if isinstance(node, ast.Module) and node.body and (line := _marked_line(node.body[0])) is not None:
            return ast.fix_missing_locations(self._inspecting(node, line))
        return node

    def _inspecting(self, module: ast.Module, line: str) -> ast.Module:
        marker, *body = module.body
        check = f"{_MAGICS}.check({line!r}, {tuple(sorted(_bound(body)))!r})"
        first = ast.copy_location(ast.Expr(_expression(check, marker)), marker)
        try:
            options = parse(self.parser, line)
        except UsageError:
            return ast.Module([first, *body], module.type_ignores)  # the check says it before the cell runs
        last = body[-1] if body else None
        expression = options.tree
        if expression is None and options.args is None and isinstance(last, ast.Expr) and _is_user_call(last.value):
            body[-1] = ast.copy_location(ast.Expr(hooked_expression(line, last.value)), last)
        else:
            if isinstance(last, ast.Expr):
                body[-1] = _shown(last)
            inspection = (
                hooked_expression(line, _moved(expression, marker))
                if expression is not None
                else _expression(f"{_MAGICS}.inspect_defined({line!r}, *{_functions(body)!r})", marker)
            )
            body.append(ast.copy_location(ast.Expr(inspection), marker))
        return ast.Module([first, *body], module.type_ignores)


def hooked_expression(line: str, expression: ast.expr) -> ast.expr:
    """The expression with its call handed to the inspection in place of being made.

    ``F(a, *b, k=c)`` becomes ``inspect_call(line, F, a, *b, k=c)``, so that Python evaluates each operand as before;
    anything else becomes ``inspect_function(line, expression)``.
    """
    match expression:
        case ast.Call(func, args, keywords):
            hook, operands = "inspect_call", [func, *args]
        case _:
            hook, operands, keywords = "inspect_function", [expression], []
    function = _expression(f"{_MAGICS}.{hook}", expression)
    text = ast.copy_location(ast.Constant(line), expression)
    return ast.copy_location(ast.Call(function, [text, *operands], keywords), expression)


def _marked_line(statement: ast.stmt) -> str | None:
    """The magic's line, if the statement is the marker."""
    match statement:
        case ast.Expr(
            ast.Call(
                ast.Attribute(ast.Call(ast.Name("get_ipython"), [], []), "run_cell_magic"),
                [ast.Constant("remat"), ast.Constant(str() as line), ast.Constant("")],
                [],
            )
        ):
            return line
        case _:
            return None


def _is_user_call(expression: ast.expr) -> bool:
    """Whether it is a call that the user wrote; IPython writes ``%magic``, ``!command`` and ``f?`` as calls too."""
    match expression:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"), [], []), _)):
            return False
        case _:
            return isinstance(expression, ast.Call)


def _shown(last: ast.Expr) -> ast.Expr:
    """Show a last expression as the plain cell would, although it is no longer last."""
    call = ast.Call(_expression(f"{_MAGICS}.show", last), [last.value], [])
    return ast.copy_location(ast.Expr(ast.copy_location(call, last)), last)


def _expression(source: str, where: ast.AST) -> ast.expr:
    return _moved(parse_python(source, "eval").body, where)


def _moved(expression: ast.expr, where: ast.AST) -> ast.expr:
    for node in ast.walk(expression):
        ast.copy_location(node, where)
    return expression


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run in the module's own scope, those within ``if``, ``with`` and the like included."""
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _functions(body: list[ast.stmt]) -> tuple[list[str], list[str]]:
    """The names that the cell defines as functions, and those to which it assigns what a call returns."""
    defined: dict[str, None] = {}
    assigned: dict[str, None] = {}
    for statement in _statements(body):
        match statement:
            case ast.FunctionDef(name) | ast.Assign([ast.Name(name)], ast.Lambda()):
                defined[name] = None
            case ast.Assign([ast.Name(name)], ast.Call()):
                assigned[name] = None
            case _:
                pass
    return list(defined), [name for name in assigned if name not in defined]


def _bound(body: list[ast.stmt]) -> set[str]:
    """Every name that running the cell may bind; "*" where that cannot be told."""
    names: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.alias(name, asname):
                names.add(asname or name.partition(".")[0])
            case ast.Attribute(ast.Call(ast.Name("get_ipython"))) | ast.Name("exec"):
                names.add("*")
            case _:
                pass
    return names
