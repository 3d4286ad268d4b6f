"""The text of one of the user's files or cells, parsed: where its nodes stand, and which code is which function."""

from __future__ import annotations
import __future__

import ast
import io
import linecache
import os
import re
import sys
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from remat_magic.jaxprs.spans import cell_number
from remat_magic.parsing import parse_python
from remat_magic.records import RematError, SourceSpan

__all__ = [
    "Function",
    "ParsedText",
    "Position",
    "code_objects",
    "first_line",
    "functions_of",
    "mark_added",
    "number_of",
    "parsed_text",
]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ADDED = "_remat_magic_added"
Position = tuple[int, int]  # line from 1, column in characters from 0


@dataclass(eq=False, slots=True)
class ParsedText:
    """One file or notebook cell.

    ``written`` is what the user sees, with its own line ends; ``compiled`` what Python compiled, with ``\\n``. They
    differ by ``shift`` lines at the start, which IPython drops, and by the lines that IPython translates. ``lines`` are
    those of ``compiled``, and all positions are positions there. ``numbers`` has for the code of its functions their
    numbers in ``functions``.
    """

    file: str
    cell: int | None
    written: str
    compiled: str
    shift: int
    tree: ast.Module
    lines: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    parents: dict[int, ast.AST] = field(default_factory=dict)
    numbers: dict[CodeType, int] = field(default_factory=dict)
    _translated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lines = self.compiled.split("\n")
        written = [*re.split("\r\n|\r|\n", self.written.removeprefix("\ufeff")), *self.lines][self.shift :]
        self._translated = {i for i, line in enumerate(self.lines, 1) if line != written[i - 1]}
        self.functions = functions_of(self.tree)
        self.parents = {id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def is_users(self, line: int) -> bool:
        """Whether a line of the compiled text is one that the user wrote; IPython translates others."""
        return line not in self._translated

    @property
    def place(self) -> str:
        """What to call it in a sentence."""
        return f"In[{self.cell}]" if self.cell is not None else os.path.basename(self.file)

    @property
    def flags(self) -> int:
        """The compiler's flags that the text itself asks for."""
        flags = 0
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    flags |= getattr(__future__, alias.name).compiler_flag
        return flags

    def start(self, node: Any) -> Position:
        """Where a node starts."""
        return node.lineno, self._characters(node.lineno, node.col_offset)

    def end(self, node: Any) -> Position:
        """Where it ends."""
        return node.end_lineno, self._characters(node.end_lineno, node.end_col_offset)

    def span(self, node: ast.AST) -> SourceSpan:
        """A node's range as a record."""
        around = self.enclosing(node)
        name = getattr(around, "name", "<lambda>" if around is not None else "<module>")
        start, end = self.start(node), self.end(node)
        return SourceSpan(self.file, name, *start, *end, self.cell, self.lines[start[0] - 1])

    def segment(self, node: ast.AST) -> str:
        """A node's text."""
        (first, column), (last, end_column) = self.start(node), self.end(node)
        lines = self.lines[first - 1 : last]
        lines[-1] = lines[-1][:end_column]  # first, since they may be one line
        lines[0] = lines[0][column:]
        return "\n".join(lines)

    def indent(self, line: int) -> str:
        """The white space that a line begins with."""
        return self.lines[line - 1][: len(self.lines[line - 1]) - len(self.lines[line - 1].lstrip())]

    def enclosing(self, node: ast.AST) -> Function | None:
        """The function around a node; for a function that around it."""
        above = self.parents.get(id(node))
        while above is not None and not isinstance(above, Function):
            above = self.parents.get(id(above))
        return above

    def covers(self, node: ast.AST, span: SourceSpan) -> bool:
        """Whether a span starts within a node."""
        return self.start(node) <= (span.line, span.column) < self.end(node)

    def is_formatted(self, span: SourceSpan) -> bool:
        """Whether a span is inside a formatted string, where nothing is edited."""
        return any(isinstance(node, ast.JoinedStr) and self.covers(node, span) for node in ast.walk(self.tree))

    def _characters(self, line: int, column: int) -> int:
        return len(self.lines[line - 1].encode()[:column].decode(errors="replace"))


def number_of(functions: Sequence[Function], code: CodeType) -> int | None:
    """Which of a text's functions, in the order of ``functions_of``, a code object is of."""
    for number, node in reversed([*enumerate(functions)]):  # an inner lambda stands within the outer one's body
        if isinstance(node, ast.Lambda):
            if code.co_name == "<lambda>" and node.lineno == code.co_firstlineno and _is_body(node.body, code):
                return number
        elif node.name == code.co_name and first_line(node) == code.co_firstlineno:
            return number
    return None


def _is_body(body: Any, code: CodeType) -> bool:
    """Whether all of a lambda's code stands within an expression."""
    start, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    for line, end_line, column, end_column in code.co_positions():
        if None in (line, end_line, column, end_column) or (column, end_column) == (0, 0):
            continue
        if not (start <= (line, column) and (end_line, end_column) <= end):
            return False
    return True


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The line that Python takes for a function's first: that of its first decorator."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def functions_of(tree: ast.AST) -> list[Function]:
    """All functions and lambdas, in an order that wrapping expressions and adding statements does not change.

    What an edit has added, and says so by ``mark_added``, is left out.
    """
    inside = [function for child in ast.iter_child_nodes(tree) for function in functions_of(child)]
    return [tree, *inside] if isinstance(tree, Function) and not hasattr(tree, _ADDED) else inside


def mark_added(tree: ast.AST, whole: Collection[str], outer: Collection[str]) -> None:
    """Say which functions of an edited text are new: whole, or around code that was there before.

    Functions are told by their name, a lambda by that of its last parameter.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.args.args and node.args.args[-1].arg in outer:
            setattr(node, _ADDED, True)
        if isinstance(node, ast.FunctionDef) and node.name in outer:
            setattr(node, _ADDED, True)
        if isinstance(node, ast.FunctionDef) and node.name in whole:
            for inside in ast.walk(node):
                if isinstance(inside, Function):
                    setattr(inside, _ADDED, True)


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def parsed_text(file: str, codes: set[CodeType]) -> ParsedText:
    """The text of a file or cell.

    Args:
        file: as the code objects name it.
        codes: those of its code objects that must still be what the text says.

    Raises:
        RematError: there is no text, or it is no longer that of the functions that were traced.
    """
    cell = cell_number(file)
    source_name = f"In[{cell}]" if cell is not None else file
    written = _file_text(file) if cell is None and os.path.isfile(file) else None
    if written is None:
        # Since Python 3.13 the text of ``python -c`` stands under this name, whatever else was compiled under it.
        lines = [] if file == "<string>" else linecache.getlines(file)
        if not lines:
            name = next(iter(codes)).co_name
            raise RematError(
                f"the source of {name} is not available ({source_name}): define it in a file or a notebook cell to "
                "have it edited."
            )
        compiled = "".join(lines)
        written, shift = _cell_text(cell, compiled)
    else:
        compiled, shift = re.sub("\r\n?", "\n", written.removeprefix("\ufeff")), 0
    try:
        tree = parse_python(compiled)
        # IPython compiles a cell, and what it reloads, statement by statement, and Python writes other code for a name
        # whose import it sees.
        parts = [tree, *(ast.Module([statement], []) for statement in tree.body)]
        modules = [compile(part, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True) for part in parts]
    except SyntaxError:
        raise RematError(
            f"{source_name} has changed since it was run: run it again, and trace the function anew."
        ) from None
    contents = {_content(code) for module in modules for code in code_objects(module)}
    for code in codes:
        if _content(code) not in contents:
            raise RematError(
                f"{source_name} is no longer what {code.co_name} was compiled from: load it again, and trace the "
                "function anew."
            )
    text = ParsedText(file, cell, written, compiled, shift, tree)
    for code in {*codes, *(code for module in modules for code in code_objects(module))}:
        number = number_of(text.functions, code)
        if number is not None:
            text.numbers[code] = number
    return text


def _content(code: CodeType) -> tuple[Any, ...]:
    """What a code object does, and where it starts; functions inside it are compared for themselves."""
    constants = tuple((type(value), repr(value)) for value in code.co_consts if not isinstance(value, CodeType))
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, constants


def _file_text(file: str) -> str | None:
    try:
        with open(file, "rb") as opened:
            content = opened.read()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return f"\ufeff{text}" if encoding == "utf-8-sig" else text


def _cell_text(cell: int | None, compiled: str) -> tuple[str, int]:
    """The text that the user typed into a cell, and how many lines of it IPython dropped at the start."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    inputs = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None)
    if cell is None or not isinstance(inputs, list) or not 0 <= cell < len(inputs):
        return compiled, 0
    lines = re.sub("\r\n?", "\n", inputs[cell]).rstrip().split("\n")
    shift = next((number for number, line in enumerate(lines) if line.strip()), 0)
    same = len(lines) - shift == len(compiled.rstrip().split("\n"))
    return (inputs[cell], shift) if same else (compiled, 0)
