"""Changing text by position, so that everything else in it stays as the user wrote it."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_magic.editing.source import Function, Source
from remat_magic.records import FileEdit, RematError

__all__ = ["Change", "Writer", "code_with", "file_edit", "patched", "quoted"]

Position = tuple[int, int]  # line from 1, column in characters from 0
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Change:
    """``text`` in place of what stands between two positions.

    Where several insertions meet, those of the lower ``order`` come first.
    """

    start: Position
    end: Position
    text: str
    order: int = 0


def patched(lines: Sequence[str], ends: Sequence[str], changes: Iterable[Change], shift: int) -> str:
    """Text with changes.

    Args:
        lines: its lines, without their ends.
        ends: the end of each, the last one's empty.
        changes: at positions of the compiled text.
        shift: how many lines this text has more at its start.
    """
    usual = next((end for end in ends if end), "\n")
    offsets = [0]
    for line, end in zip(lines, ends, strict=True):
        offsets.append(offsets[-1] + len(line) + len(end))
    whole = "".join(line + end for line, end in zip(lines, ends, strict=True))

    def offset(position: Position) -> int:
        return offsets[position[0] - 1 + shift] + position[1]

    made: list[str] = []
    done = 0
    for change in sorted(changes, key=lambda each: (offset(each.start), each.order)):
        start, end = offset(change.start), offset(change.end)
        assert start >= done, "changes overlap"
        made += [whole[done:start], change.text.replace("\n", usual)]
        done = end
    return "".join([*made, whole[done:]])


def file_edit(source: Source, changes: Sequence[Change]) -> FileEdit:
    """The changes of one source as the user's own text.

    Raises:
        RematError: a line is not what the user wrote, since IPython has translated it.
    """
    mark = "\ufeff" if source.text.startswith("\ufeff") else ""
    parts = re.split("(\r\n|\r|\n)", source.text.removeprefix("\ufeff"))
    lines, ends = parts[::2], [*parts[1::2], ""]
    for change in changes:
        if change.start[1] or change.start != change.end:  # whole lines can be put anywhere
            for line in range(change.start[0], change.end[0] + 1):
                if not source.typed(line):
                    raise RematError(
                        f"line {line} of {source.place} is in IPython's own syntax, which cannot be edited."
                    )
    return FileEdit(source.file, source.cell, source.text, mark + patched(lines, ends, changes, source.shift))


def code_with(source: Source, changes: Sequence[Change]) -> str:
    """What Python is to compile of the changed text."""
    return patched(source.lines, ["\n"] * (len(source.lines) - 1) + [""], changes, 0)


def quoted(text: str, quote: str) -> str:
    """A string literal, in these quotation marks where it needs no escapes for that."""
    literal = repr(text)
    other = literal[0]
    return literal if quote == other or quote in literal or other in literal[1:-1] else f"{quote}{literal[1:-1]}{quote}"


class Writer:
    """Collects the changes of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.changes: list[Change] = []
        self.tokens = _tokens(source.code)
        strings = (token for token in self.tokens if token.type == tokenize.STRING and source.typed(token.start[0]))
        marks = [token.string.lstrip("rRbBuUfF")[:1] for token in strings]
        self.quote = "'" if marks.count("'") > marks.count('"') else '"'

    def literal(self, text: str) -> str:
        """A string literal as the source writes its own."""
        return quoted(text, self.quote)

    def wrap(self, node: ast.AST, before: str, after: str) -> None:
        """Put text around an expression."""
        start, end = self.source.start(node), self.source.end(node)
        line = self.source.lines[start[0] - 1]
        # `return-x` is a return and an operator; `returnf(-x)` is not.
        if start[1] and re.match(r"\w", line[start[1] - 1]):
            before = f" {before}"
        # Of expressions that start together the longest comes first, and of those that end together last.
        length = _length(self.source, start, end)
        self.changes.append(Change(start, start, before, -length))
        self.changes.append(Change(end, end, after, length))

    def replace(self, node: ast.AST, text: str) -> None:
        """Put text in the place of an expression."""
        self.changes.append(Change(self.source.start(node), self.source.end(node), text))

    def set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Give a call a keyword argument, in place of the one that it has."""
        for keyword in call.keywords:
            if keyword.arg == name:
                self.replace(keyword.value, value)
                return
        end = self.source.end(call)
        close = (end[0], end[1] - 1)
        before = [token for token in self.tokens if token.end <= close and token.type not in _INVISIBLE]
        last = before[-1]
        if last.string == ",":
            text = f" {name}={value}"
        elif last.string == "(" and not call.args and not call.keywords:
            text = f"{name}={value}"
        else:
            text = f", {name}={value}"
        self.changes.append(Change(last.end, last.end, text))

    def add_after(self, statement: ast.stmt, line: str) -> None:
        """A statement after a simple one, on a line of its own where there is room for one."""
        start, end = self.source.start(statement), self.source.end(statement)
        indent = self.source.lines[start[0] - 1][: start[1]]
        rest = self.source.lines[end[0] - 1][end[1] :].strip()
        if indent.strip() or (rest and not rest.startswith("#")):
            self.changes.append(Change(end, end, f"; {line}", 10**8))
        else:
            self._lines_at(end[0] + 1, f"{indent}{line}\n", -1)

    def add_first(self, body: Sequence[ast.stmt], index: int, line: str) -> None:
        """A statement before the ``index``-th of a body, or after its only one."""
        if index == len(body):
            self.add_after(body[-1], line)
            return
        first = body[index]
        start = self.source.start(first)
        decorators = getattr(first, "decorator_list", [])
        if decorators:  # the column of the `@`, which is no node
            at = self.source.start(decorators[0])[0]
            text = self.source.lines[at - 1]
            start = at, len(text) - len(text.lstrip())
        indent = self.source.lines[start[0] - 1][: start[1]]
        if indent.strip():
            self.changes.append(Change(start, start, f"{line}; ", -(10**8)))
        else:
            self._lines_at(start[0], f"{indent}{line}\n", -1)

    def decorate(self, node: Function, line: str) -> None:
        """A decorator next to a definition, below those that it has."""
        at = node.lineno
        text = self.source.lines[at - 1]
        self._lines_at(at, f"{text[: len(text) - len(text.lstrip())]}{line}\n")

    def delete_lines(self, first: int, last: int) -> None:
        """Take whole lines out."""
        self.changes.append(Change((first, 0), (last + 1, 0), ""))

    def add_imports(self, lines: Sequence[str]) -> None:
        """Imports after those that the source begins with; in a cell without any, at the top, below magics."""
        if lines:
            self._lines_at(_import_line(self.source), "".join(f"{line}\n" for line in lines), -2)

    def indent_of(self, node: ast.AST) -> str:
        """What the line that a node is on starts with."""
        text = self.source.lines[self.source.start(node)[0] - 1]
        return text[: len(text) - len(text.lstrip())]

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
        # Names with spaces must not be broken.
        joined = ", ".join(literal.replace(" ", "\0").replace("-", "\1") for literal in literals) + ","
        rows = textwrap.wrap(joined, max(_WIDTH - len(indent) - 4, 40), break_long_words=False, break_on_hyphens=False)
        inside = "\n".join(f"{indent}{step}{row}" for row in rows).replace("\0", " ").replace("\1", "-")
        return f"{function}(\n{inside}\n{indent})"

    def _lines_at(self, line: int, text: str, order: int = 0) -> None:
        lines = self.source.lines
        if line > len(lines):  # after a last line that does not end
            end = (len(lines), len(lines[-1]))
            self.changes.append(Change(end, end, f"\n{text.removesuffix(chr(10))}", 10**9))
        else:
            self.changes.append(Change((line, 0), (line, 0), text, order - 10**9))


_INVISIBLE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def _length(source: Source, start: Position, end: Position) -> int:
    return sum(len(source.lines[line - 1]) + 1 for line in range(start[0], end[0])) + end[1] - start[1]


def _tokens(code: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return []


def _import_line(source: Source) -> int:
    """The line before which new imports go."""
    body = source.tree.body
    after = 0
    for number, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            after = number + 1
    if not after:
        while after < len(body) and (_is_magic(body[after]) or (after == 0 and _is_docstring(body[0]))):
            after += 1
    if after:
        line = body[after - 1].end_lineno or 1
        # Statements may share a line.
        return max([line, *((each.end_lineno or 1) for each in body if each.lineno == line)]) + 1
    line = 1
    while line < len(source.lines) and re.match(r"#(!|\||.*coding[:=]|\s*%%)", source.lines[line - 1]):
        line += 1
    return line


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_magic(statement: ast.stmt) -> bool:
    """Whether a statement is what IPython makes of a magic or a shell command."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"))))):
            return True
        case _:
            return False
