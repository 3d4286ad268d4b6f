"""One of the user's files or cells: parsed, with where its nodes stand, and changed by position.

What is not changed stays as the user wrote it.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from remat_magic.jaxprs.provenance import as_typed, cell_number, codes_of
from remat_magic.parsing import parse_source
from remat_magic.records import FileEdit, RematError, SourceSpan

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Position = tuple[int, int]  # line from 1, column in characters from 0


@dataclass(eq=False, slots=True)
class ParsedText:
    """One file or notebook cell.

    ``written`` is what the user sees, ``compiled`` what Python compiled. They differ by ``shift`` lines at the start,
    which IPython drops, and by the lines that IPython translates. All positions are in ``lines``, those of
    ``compiled``. ``numbers`` has for the code of its functions their numbers in ``functions``.
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
        written = [*self.written.split("\n"), *self.lines][self.shift :]
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
    """All functions and lambdas, in an order that wrapping expressions and adding statements does not change."""
    inside = [function for child in ast.iter_child_nodes(tree) for function in functions_of(child)]
    return [tree, *inside] if isinstance(tree, Function) else inside


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def parsed_text(file: str, codes: set[CodeType]) -> ParsedText:
    """The text of a file or cell.

    ``file`` is as the code objects name it, and ``codes`` are those that must still be what the text says.
    """
    cell = cell_number(file)
    source_name = f"In[{cell}]" if cell is not None else file
    # Since Python 3.13 the text of ``python -c`` stands under this name, whatever else was compiled under it.
    linecache.checkcache(file)
    lines = [] if file == "<string>" else linecache.getlines(file)
    if not lines:
        name = next(iter(codes)).co_name
        raise RematError(
            f"the source of {name} is not available ({source_name}): define it in a file or a notebook cell to have it "
            "edited."
        )
    compiled = "".join(lines)
    tree, contents = parse_source(compiled), {_content(code): code for code in codes_of(file, lines)}
    if tree is None or not {_content(code) for code in codes} <= contents.keys():
        raise RematError(f"{source_name} has changed since it was run: run it again, and trace the function anew.")
    written, shift = as_typed(cell, compiled)
    text = ParsedText(file, cell, written, compiled, shift, tree)
    for code in {*codes, *contents.values()}:
        number = number_of(text.functions, code)
        if number is not None:
            text.numbers[code] = number
    return text


def _content(code: CodeType) -> tuple[Any, ...]:
    """What a code object does, and where it starts; functions inside it are compared for themselves."""
    constants = tuple((type(value), repr(value)) for value in code.co_consts if not isinstance(value, CodeType))
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, constants


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

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._changes)

    def compiled(self) -> str:
        """What Python is to compile of the changed text."""
        return self._applied(self.text.compiled, 0)

    def file_edit(self) -> FileEdit:
        """The changes as the user's own text."""
        text = self.text
        for change in self._changes:
            if change.start[1] or change.start != change.end:  # whole lines can be put anywhere
                for line in range(change.start[0], change.end[0] + 1):
                    if not text.is_users(line):
                        raise RematError(
                            f"line {line} of {text.place} is in IPython's own syntax, which cannot be edited."
                        )
        return FileEdit(text.file, text.cell, text.written, self._applied(text.written, text.shift))

    def _applied(self, whole: str, shift: int) -> str:
        """A text that has so many lines more at its start, with the changes."""
        offsets = [0, *itertools.accumulate(len(line) + 1 for line in whole.split("\n"))]

        def offset(position: Position) -> int:
            return offsets[position[0] - 1 + shift] + position[1]

        parts: list[str] = []
        done = 0
        for change in sorted(self._changes, key=lambda change: (offset(change.start), change.order)):
            assert offset(change.start) >= done, "changes overlap"
            parts += [whole[done : offset(change.start)], change.text]
            done = offset(change.end)
        return "".join([*parts, whole[done:]])

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
        self.put(self.text.start(node), self.text.end(node), text)

    def put(self, start: Position, end: Position, text: str) -> None:
        """Put text in the place of what stands there."""
        self._changes.append(_Change(start, end, text))

    def set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Give a call a keyword argument, in place of the one that it has."""
        for keyword in call.keywords:
            if keyword.arg == name:
                self.replace(keyword.value, value)
                return
        if call.keywords:
            start = self.text.start(call.keywords[0])
            self._changes.append(_Change(start, start, f"{name}={value}, "))
            return
        line, column = self.text.end(call)
        before = re.sub(r"#.*|\s", "", self.text.segment(call)[:-1])  # a comment may stand between them
        comma = "" if before[-1] in ",(" else ", "
        self._changes.append(_Change((line, column - 1), (line, column - 1), f"{comma}{name}={value}"))

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

    def _lines_at(self, line: int, text: str, order: int = 0) -> None:
        lines = self.text.lines
        if line > len(lines):  # after a last line that does not end
            end = (len(lines), len(lines[-1]))
            self._changes.append(_Change(end, end, f"\n{text.removesuffix(chr(10))}", 10**9))
        else:
            self._changes.append(_Change((line, 0), (line, 0), text, order - 10**9))


def names_call(function: str, names: Sequence[str], indent: str) -> str:
    """``function("a", "b")``, over several lines where there are many."""
    literals = [literal(name) for name in names]
    text = f"{function}({', '.join(literals)})"
    if len(text) <= 80:
        return text
    return f"{function}(\n{''.join(f'{indent}    {each},' + chr(10) for each in literals)}{indent})"


def literal(name: str) -> str:
    """A name as Python has it."""
    return f'"{name}"' if name.isidentifier() else repr(name)


def _import_line(text: ParsedText) -> int:
    """The line before which new imports go: after those that the text begins with, its docstring, and magics."""
    after = 0
    for number, statement in enumerate(text.tree.body):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                break
            case ast.Expr(ast.Constant(str())) if number == 0:
                after = statement.end_lineno or 1
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"))))):
                after = statement.end_lineno or 1
            case _:
                pass
    # Statements may share a line.
    return max([after, *((node.end_lineno or 1) for node in text.tree.body if node.lineno == after)]) + 1
