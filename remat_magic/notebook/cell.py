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
import itertools
import re
from collections.abc import Iterator

from IPython.core.error import UsageError

from remat_magic.notebook.calls import BLOCKS, calls_something, magic_call, watched_block, watched_expression
from remat_magic.notebook.line import parse

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
