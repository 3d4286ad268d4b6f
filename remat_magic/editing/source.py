"""One of the user's files or cells: parsed, with where its nodes stand, and changed by position.

What is not changed stays as the user wrote it.
"""

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
from remat_magic.records import FileEdit, RematError, SourceSpan

__all__ = [
    "Function",
    "ParsedText",
    "Position",
    "TextChanges",
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


def mark_added(tree: ast.AST, parameters: Collection[str]) -> None:
    """Say which lambdas of an edited text are new, around code that was there before, by their first parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.args.args and node.args.args[0].arg in parameters:
            setattr(node, _ADDED, True)


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


_WIDTH = 100
_INVISIBLE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True, slots=True)
class _Change:
    """``text`` in place of what stands between two positions.

    Where several insertions meet, those of the lower ``order`` come first.
    """

    start: Position
    end: Position
    text: str
    order: int = 0


class TextChanges:
    """Collects the changes of one text."""

    def __init__(self, text: ParsedText) -> None:
        self.text = text
        self._changes: list[_Change] = []
        try:
            self._tokens = list(tokenize.generate_tokens(io.StringIO(text.compiled).readline))
        except (tokenize.TokenError, SyntaxError):
            self._tokens = []
        strings = (token for token in self._tokens if token.type == tokenize.STRING and text.is_users(token.start[0]))
        marks = [token.string.lstrip("rRbBuUfF")[:1] for token in strings]
        self._quote = "'" if marks.count("'") > marks.count('"') else '"'

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._changes)

    def compiled(self) -> str:
        """What Python is to compile of the changed text."""
        return self._applied(self.text.lines, ["\n"] * (len(self.text.lines) - 1) + [""], 0)

    def file_edit(self) -> FileEdit:
        """The changes as the user's own text.

        Raises:
            RematError: a line is not what the user wrote, since IPython has translated it.
        """
        text = self.text
        for change in self._changes:
            if change.start[1] or change.start != change.end:  # whole lines can be put anywhere
                for line in range(change.start[0], change.end[0] + 1):
                    if not text.is_users(line):
                        raise RematError(
                            f"line {line} of {text.place} is in IPython's own syntax, which cannot be edited."
                        )
        mark = "\ufeff" if text.written.startswith("\ufeff") else ""
        parts = re.split("(\r\n|\r|\n)", text.written.removeprefix("\ufeff"))
        new = mark + self._applied(parts[::2], [*parts[1::2], ""], text.shift)
        return FileEdit(text.file, text.cell, text.written, new)

    def _applied(self, lines: Sequence[str], ends: Sequence[str], shift: int) -> str:
        """Text with the changes.

        Args:
            lines: its lines, without their ends.
            ends: the end of each, the last one's empty.
            shift: how many lines this text has more at its start.
        """
        usual = next((end for end in ends if end), "\n")
        offsets = [0]
        for line, end in zip(lines, ends, strict=True):
            offsets.append(offsets[-1] + len(line) + len(end))
        whole = "".join(line + end for line, end in zip(lines, ends, strict=True))

        def offset(position: Position) -> int:
            return offsets[position[0] - 1 + shift] + position[1]

        parts: list[str] = []
        done = 0
        for change in sorted(self._changes, key=lambda change: (offset(change.start), change.order)):
            assert offset(change.start) >= done, "changes overlap"
            parts += [whole[done : offset(change.start)], change.text.replace("\n", usual)]
            done = offset(change.end)
        return "".join([*parts, whole[done:]])

    def literal(self, text: str) -> str:
        """A string literal in the quotation marks that the source uses, where it needs no escapes for that."""
        literal, quote = repr(text), self._quote
        if quote in literal or literal[0] in literal[1:-1]:
            return literal
        return f"{quote}{literal[1:-1]}{quote}"

    def wrap(self, node: ast.AST, before: str, after: str) -> None:
        """Put text around an expression."""
        start, end = self.text.start(node), self.text.end(node)
        line = self.text.lines[start[0] - 1]
        # `return-x` is a return and an operator; `returnf(-x)` is not.
        if start[1] and re.match(r"\w", line[start[1] - 1]):
            before = f" {before}"
        # Of expressions that start together the longest comes first, and of those that end together last.
        length = len(self.text.segment(node))
        self._changes.append(_Change(start, start, before, -length))
        self._changes.append(_Change(end, end, after, length))

    def replace(self, node: ast.AST, text: str) -> None:
        """Put text in the place of an expression."""
        self._changes.append(_Change(self.text.start(node), self.text.end(node), text))

    def set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Give a call a keyword argument, in place of the one that it has."""
        for keyword in call.keywords:
            if keyword.arg == name:
                self.replace(keyword.value, value)
                return
        line, column = self.text.end(call)
        before = [token for token in self._tokens if token.end <= (line, column - 1) and token.type not in _INVISIBLE]
        last = before[-1]
        start = " " if last.string == "," else "" if last.string == "(" else ", "
        self._changes.append(_Change(last.end, last.end, f"{start}{name}={value}"))

    def add_after(self, statement: ast.stmt, line: str) -> None:
        """A statement after a simple one, on a line of its own where there is room for one."""
        start, end = self.text.start(statement), self.text.end(statement)
        indent = self.text.lines[start[0] - 1][: start[1]]
        rest = self.text.lines[end[0] - 1][end[1] :].strip()
        if indent.strip() or (rest and not rest.startswith("#")):
            self._changes.append(_Change(end, end, f"; {line}", 10**8))
        else:
            self._lines_at(end[0] + 1, f"{indent}{line}\n", -1)

    def add_first(self, body: Sequence[ast.stmt], index: int, line: str) -> None:
        """A statement before the ``index``-th of a body, or after its only one."""
        if index == len(body):
            self.add_after(body[-1], line)
            return
        start = self.text.start(body[index])
        if decorators := getattr(body[index], "decorator_list", []):  # the column of the `@`, which is no node
            at = self.text.start(decorators[0])[0]
            start = at, len(self.text.indent(at))
        indent = self.text.lines[start[0] - 1][: start[1]]
        if indent.strip():
            self._changes.append(_Change(start, start, f"{line}; ", -(10**8)))
        else:
            self._lines_at(start[0], f"{indent}{line}\n", -1)

    def decorate(self, node: ast.FunctionDef | ast.AsyncFunctionDef, line: str, above: bool = False) -> None:
        """A decorator next to a definition, below those that it has, or ``above`` them."""
        at = first_line(node) if above else node.lineno
        self._lines_at(at, f"{self.text.indent(at)}{line}\n")

    def pass_callee(self, call: ast.Call, function: str) -> None:
        """Call a function instead, with what was called as the argument before the others."""
        start, (line, column) = self.text.start(call), self.text.end(call.func)
        while (column := self.text.lines[line - 1].partition("#")[0].find("(", column)) < 0:  # a bracket is between
            line, column = line + 1, 0
        self._changes.append(_Change(start, start, f"{function}(", -len(self.text.segment(call))))
        self._changes.append(_Change((line, column), (line, column + 1), ", "))

    def drop_keywords(self, call: ast.Call) -> None:
        """Take all keyword arguments from a call, which come after the others."""
        start = self.text.end(call.args[-1] if call.args else call.func)
        line, column = self.text.end(call)
        text = "" if call.args else "("
        self._changes.append(_Change(start, (line, column - 1), text))

    def delete_lines(self, first: int, last: int) -> None:
        """Take whole lines out."""
        self._changes.append(_Change((first, 0), (last + 1, 0), ""))

    def add_imports(self, lines: Sequence[str]) -> None:
        """Imports after those that the source begins with; in a cell without any, at the top, below magics."""
        if lines:
            self._lines_at(_import_line(self.text), "".join(f"{line}\n" for line in lines), -2)

    def names_call(self, function: str, names: Sequence[str], indent: str, used: int) -> str:
        """``function("a", "b")``, over several lines where it is long.

        Args:
            function: what is called.
            names: its arguments.
            indent: of the line.
            used: how long the line is already.
        """
        literals = [self.literal(name) for name in names]
        text = f"{function}({', '.join(literals)})"
        if len(indent) + used + len(text) <= _WIDTH:
            return text
        step = "\t" if indent.startswith("\t") else "    "
        inside = "".join(f"{indent}{step}{literal},\n" for literal in literals)
        return f"{function}(\n{inside}{indent})"

    def _lines_at(self, line: int, text: str, order: int = 0) -> None:
        lines = self.text.lines
        if line > len(lines):  # after a last line that does not end
            end = (len(lines), len(lines[-1]))
            self._changes.append(_Change(end, end, f"\n{text.removesuffix(chr(10))}", 10**9))
        else:
            self._changes.append(_Change((line, 0), (line, 0), text, order - 10**9))


def _import_line(text: ParsedText) -> int:
    """The line before which new imports go."""
    body = text.tree.body
    after = 0
    for number, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            after = number + 1
    if not after:
        while after < len(body) and _is_head(body[after], after):
            after += 1
    if after:
        line = body[after - 1].end_lineno or 1
        # Statements may share a line.
        return max([line, *((statement.end_lineno or 1) for statement in body if statement.lineno == line)]) + 1
    line = 1
    while line < len(text.lines) and re.match(r"#(!|\||.*coding[:=]|\s*%%)", text.lines[line - 1]):
        line += 1
    return line


def _is_head(statement: ast.stmt, number: int) -> bool:
    """Whether a statement is the docstring, or what IPython makes of a magic or a shell command."""
    match statement:
        case ast.Expr(ast.Constant(str())):
            return number == 0
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"))))):
            return True
        case _:
            return False
