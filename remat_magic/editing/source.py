"""The user's source texts: what Python compiled, what stands in the file or cell, and which code is which function."""

from __future__ import annotations
import __future__

import ast
import io
import linecache
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from remat_magic.jaxprs.spans import cell_number
from remat_magic.parsing import parse_python
from remat_magic.records import RematError, SourceSpan

__all__ = ["Function", "Source", "code_objects", "first_line", "functions_of", "read_source"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(eq=False, slots=True)
class Source:
    """One file or notebook cell.

    ``text`` is what the user sees, with its own line ends; ``code`` what Python compiled, with ``\\n``. They differ by
    ``shift`` lines at the start, which IPython drops, and by the lines that IPython translates.
    """

    file: str
    cell: int | None
    text: str
    code: str
    shift: int
    tree: ast.Module
    lines: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    parents: dict[int, ast.AST] = field(default_factory=dict)
    _typed: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = self.code.split("\n")
        written = re.split("\r\n|\r|\n", self.text.removeprefix("\ufeff"))[self.shift :]
        self._typed = [i < len(written) and written[i] == line for i, line in enumerate(self.lines)]
        self.functions = functions_of(self.tree)
        self.parents = {id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def typed(self, line: int) -> bool:
        """Whether a line of the compiled text is one that the user wrote; IPython translates others."""
        return self._typed[line - 1] if line <= len(self._typed) else True

    @property
    def place(self) -> str:
        """What to call it in a sentence."""
        return f"In[{self.cell}]" if self.cell is not None else os.path.basename(self.file)

    @property
    def flags(self) -> int:
        """The compiler's flags that the text itself asks for."""
        found = 0
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    found |= getattr(__future__, alias.name).compiler_flag
        return found

    def start(self, node: ast.AST) -> tuple[int, int]:
        """Where a node starts: line from 1, column in characters from 0."""
        located: Any = node
        return located.lineno, self._characters(located.lineno, located.col_offset)

    def end(self, node: ast.AST) -> tuple[int, int]:
        """Where it ends, likewise."""
        located: Any = node
        return located.end_lineno, self._characters(located.end_lineno, located.end_col_offset)

    def span(self, node: ast.AST) -> SourceSpan:
        """A node's range as a record."""
        (line, column), (end_line, end_column) = self.start(node), self.end(node)
        around = self.enclosing(node)
        name = getattr(around, "name", "<lambda>" if around is not None else "<module>")
        return SourceSpan(self.file, name, line, column, end_line, end_column, self.cell, self.lines[line - 1])

    def segment(self, node: ast.AST) -> str:
        """A node's text."""
        (line, column), (end_line, end_column) = self.start(node), self.end(node)
        if line == end_line:
            return self.lines[line - 1][column:end_column]
        inner = self.lines[line : end_line - 1]
        return "\n".join([self.lines[line - 1][column:], *inner, self.lines[end_line - 1][:end_column]])

    def enclosing(self, node: ast.AST) -> Function | None:
        """The function around a node; for a function that around it."""
        above = self.parents.get(id(node))
        while above is not None and not isinstance(above, Function):
            above = self.parents.get(id(above))
        return above

    def is_formatted(self, line: int, column: int) -> bool:
        """Whether a position is inside a formatted string, where nothing is edited."""
        return any(
            isinstance(node, ast.JoinedStr) and self.start(node) <= (line, column) < self.end(node)
            for node in ast.walk(self.tree)
        )

    def number_of(self, code: CodeType) -> int | None:
        """Which of ``functions`` a code object is of."""
        for number, node in enumerate(self.functions):
            if isinstance(node, ast.Lambda):
                if code.co_name == "<lambda>" and node.lineno == code.co_firstlineno and self._covers(node, code):
                    return number
            elif node.name == code.co_name and first_line(node) == code.co_firstlineno:
                return number
        return None

    @staticmethod
    def _covers(node: ast.Lambda, code: CodeType) -> bool:
        body: Any = node.body
        start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        for line, end_line, column, end_column in code.co_positions():
            if None in (line, end_line, column, end_column) or (column, end_column) == (0, 0):
                continue
            if not (start <= (line, column) and (end_line, end_column) <= end):
                return False
        return True

    def _characters(self, line: int, column: int) -> int:
        return len(self.lines[line - 1].encode()[:column].decode(errors="replace"))


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line that Python takes for a function's first: that of its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def functions_of(tree: ast.Module) -> list[Function]:
    """All functions and lambdas, in an order that wrapping expressions and adding statements does not change."""
    found: list[Function] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, Function):
            found.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def read_source(file: str, codes: set[CodeType]) -> Source:
    """The source of a file or cell.

    Args:
        file: as the code objects name it.
        codes: those of its code objects that must still be what the text says.

    Raises:
        RematError: there is no text, or it is no longer that of the functions that were traced.
    """
    cell = cell_number(file)
    what = f"In[{cell}]" if cell is not None else file
    text = _file_text(file) if cell is None and os.path.isfile(file) else None
    if text is None:
        # Since Python 3.13 the text of ``python -c`` stands under this name, whatever else was compiled under it.
        lines = [] if file == "<string>" else linecache.getlines(file)
        if not lines:
            name = next(iter(codes)).co_name
            raise RematError(
                f"the source of {name} is not available ({what}): define it in a file or a notebook cell to have it "
                "edited."
            )
        code = "".join(lines)
        text, shift = _cell_text(cell, code)
    else:
        code, shift = re.sub("\r\n?", "\n", text.removeprefix("\ufeff")), 0
    try:
        tree = parse_python(code)
        # IPython compiles a cell statement by statement, and Python writes other code for a name whose import it sees.
        parts = [tree] if cell is None else [tree, *(ast.Module([each], []) for each in tree.body)]
        compiled = [compile(part, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True) for part in parts]
    except SyntaxError:
        raise RematError(f"{what} has changed since it was run: run it again, and trace the function anew.") from None
    known = {_content(each) for part in compiled for each in code_objects(part)}
    for each in codes:
        if _content(each) not in known:
            raise RematError(
                f"{what} is no longer what {each.co_name} was compiled from: load it again, and trace the function "
                "anew."
            )
    return Source(file, cell, text, code, shift, tree)


def _content(code: CodeType) -> tuple[Any, ...]:
    """What a code object does, and where it starts; functions inside it are compared for themselves."""
    constants = tuple((type(each), repr(each)) for each in code.co_consts if not isinstance(each, CodeType))
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, constants


def _file_text(file: str) -> str | None:
    try:
        with open(file, "rb") as opened:
            data = opened.read()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return f"\ufeff{text}" if encoding == "utf-8-sig" else text


def _cell_text(cell: int | None, code: str) -> tuple[str, int]:
    """The text that the user typed into a cell, and how many lines of it IPython dropped at the start."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    typed = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None)
    if cell is None or not isinstance(typed, list) or not 0 <= cell < len(typed):
        return code, 0
    raw = typed[cell]
    lines = re.sub("\r\n?", "\n", raw).split("\n")
    shift = next((number for number, line in enumerate(lines) if line.strip()), 0)
    same = len(re.sub("\r\n?", "\n", raw).rstrip().split("\n")) - shift == len(code.rstrip().split("\n"))
    return (raw, shift) if same else (code, 0)
