"""``%%remat`` without a cell magic's drawbacks: the cell stays a plain cell.

Text run from inside a magic loses its line numbers, shows its errors twice and cannot ``await``. Instead the first
line becomes one line of Python, the marker, before IPython looks for cell magics; and once the cell is parsed, the
marker makes way for a check of the line, the cell stands in a ``with`` that runs it until its step (``running``), and
what is found there is shown. Before each call of its last statements ``running`` decides whether that is the one to
inspect: ``F(a)`` becomes ``function(F)(a)``. All else is compiled as it stands.

Both transformers are functions of the text alone, since ipykernel may transform a cell more often than it runs it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from IPython.core.error import UsageError

from remat_magic.notebook.line import parse
from remat_magic.parsing import parse_python

_FIRST_LINE = re.compile(r"%%remat(?:[ \t]+(?P<line>.*?))?\s*")
_OTHER_MAGIC = re.compile(r"%%(?!remat\b)\w")

# The marker is IPython's own translation of an empty cell, so without the AST transformer (the history replayed where
# the extension is not loaded) the user sees what is missing.
_MARKER = "get_ipython().run_cell_magic('remat', {line!r}, '')\n"


def mark(lines: list[str]) -> list[str]:
    """Replace a first line ``%%remat ...`` by the marker; an input transformer for IPython's clean-up stage.

    Other cell magics below it come first, as they stand elsewhere: they hand on the cell, and it with it.
    """
    first = _FIRST_LINE.fullmatch(lines[0]) if lines else None
    if first is None:
        return lines
    others = list(itertools.takewhile(lambda line: _OTHER_MAGIC.match(line) or line.isspace(), lines[1:]))
    magics = [line for line in others if not line.isspace()]
    if magics:
        blank = [line for line in others if line.isspace()]
        return [*magics, lines[0], *blank, *lines[1 + len(others) :]]
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
        try:
            options = parse(self.parser, line)
        except UsageError:  # which the check says
            first = ast.Expr(magic_call("check", marker, line))
            return ast.Module([ast.copy_location(first, marker), *body], module.type_ignores)
        first = ast.Expr(magic_call("check", marker, line, _may_define(body, options.policy or "")))
        first = ast.copy_location(first, marker)
        functions, watched = tuple(_functions(body)), list[ast.stmt]()
        if options.tree is not None:
            for node in ast.walk(expression := options.tree):
                ast.copy_location(node, marker)
            if not calls_something(expression):
                inspection = ast.Expr(magic_call("inspect_function", marker, line, expression))
                return ast.Module([first, *_shown(body), ast.copy_location(inspection, marker)], module.type_ignores)
            before, functions = _shown(body), ()
            watched.append(ast.copy_location(ast.Expr(watched_expression(expression)), marker))
        elif options.args is not None:
            before = _shown(body)
        else:
            before = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
            watched = _shown(watched_block([one for one in body if one not in before]))
        imports = any(isinstance(one, ast.Import | ast.ImportFrom) for one in watched)
        loops = bool(watched) and isinstance(watched[-1], BLOCKS)
        around = ast.withitem(magic_call("running", marker, line, imports, loops))
        cell = ast.With([around], watched or [ast.Pass()])
        answer = ast.Expr(magic_call("answer", marker, line, functions))
        after = [ast.copy_location(one, marker) for one in (cell, answer)]
        return ast.Module([first, *before, *after], module.type_ignores)


def _shown(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of which the expressions are shown as IPython shows them."""
    shown = list(body)
    for number, one in enumerate(body):
        if isinstance(one, ast.Expr):
            shown[number] = ast.copy_location(ast.Expr(magic_call("show", one, one.value, one is body[-1])), one)
    return shown


def _marked_line(statement: ast.stmt) -> str | None:
    """The magic's line, if the statement is the marker."""
    match statement:
        case ast.Expr(ast.Call(function, [ast.Constant("remat"), ast.Constant(str() as line), ast.Constant("")], [])):
            return line if ast.unparse(function) == "get_ipython().run_cell_magic" else None
    return None


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """The names that the cell gives to functions, or (False) to what a call returns, with the names that these use."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name) | ast.Assign([ast.Name(name)], ast.Lambda() | ast.Call()):
                used = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
                is_result = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
                yield name, not is_result, tuple(dict.fromkeys(used))


def _may_define(body: list[ast.stmt], policy: str) -> bool:
    """Whether the cell may give a meaning to a word of a policy, which can then not be judged before."""
    names = {"*", *re.findall(r"\w+", policy)}
    for node in ast.walk(ast.Module(body, [])):
        match node:
            case ast.Name(name, ast.Store()) | ast.FunctionDef(name) | ast.ClassDef(name) if name in names:
                return True
            case ast.alias(name, asname) if (asname or name.partition(".")[0]) in names:
                return True
            case ast.Name("exec" | "get_ipython"):
                return True
    return False


# -------------------------------------------------------------------------------- the calls of a cell's last statements


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
