"""Changing text by position, so that everything else in it stays as the user wrote it."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from remat_magic.editing.parsed_text import ParsedText, Position, first_line
from remat_magic.records import FileEdit, RematError

__all__ = ["TextChanges"]

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

    # ------------------------------------------------------------------------------------------------ the changed text

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

    # ------------------------------------------------------------------------------------------------- making changes

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

    def replace_around(self, node: ast.AST, inner: ast.AST, before: str, after: str) -> None:
        """Put text in the place of all of an expression but another one within it."""
        self._changes.append(_Change(self.text.start(node), self.text.start(inner), before, -(10**7)))
        self._changes.append(_Change(self.text.end(inner), self.text.end(node), after, 10**7))

    def replace_word(self, node: ast.AST, word: str, other: str) -> None:
        """Put another keyword in the place of that which a statement begins with."""
        line, column = self.text.start(node)
        self._changes.append(_Change((line, column), (line, column + len(word)), other))

    def set_keyword(self, call: ast.Call, name: str, value: str) -> None:
        """Give a call a keyword argument, in place of the one that it has."""
        for keyword in call.keywords:
            if keyword.arg == name:
                self.replace(keyword.value, value)
                return
        end = self.text.end(call)
        close = (end[0], end[1] - 1)
        if call.args and self.text.end(call.args[-1]) == end:  # a generator, whose brackets are those of the call
            start = self.text.start(call.args[-1])
            self._changes += [_Change(start, start, "(", -(10**8)), _Change(close, close, f"), {name}={value}", 10**8)]
        else:
            self._last_within(close, f"{name}={value}")

    def add_parameter(self, function: ast.FunctionDef, text: str) -> None:
        """Give a function another parameter, by keyword alone, after those that it has."""
        arguments = function.args
        star = "" if arguments.vararg or arguments.kwonlyargs else "*, "
        if arguments.kwarg:
            name = self.text.start(arguments.kwarg)
            stars = max(token.start for token in self._tokens if token.end <= name and token.string == "**")
            self._changes.append(_Change(stars, stars, f"{star}{text}, "))
            return
        types = getattr(function, "type_params", [])  # since Python 3.12; there are brackets in these, too
        start, depth = self.text.end(types[-1]) if types else self.text.start(function), 0
        for token in self._tokens:
            if token.start >= start and token.string in ("(", ")"):
                depth += 1 if token.string == "(" else -1
                if not depth:
                    self._last_within(token.start, f"{star}{text}")
                    return

    def _last_within(self, close: Position, argument: str) -> None:
        """Put an argument after the others, before a closing bracket."""
        before = [token for token in self._tokens if token.end <= close and token.type not in _INVISIBLE]
        last = before[-1]
        start = " " if last.string == "," else "" if last.string == "(" else ", "
        self._changes.append(_Change(last.end, last.end, f"{start}{argument}"))

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

    def lines_before(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Whole lines before a statement, as far indented as it is."""
        decorators = getattr(statement, "decorator_list", [])
        line = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        indent = self.text.indent(line)
        self._lines_at(line, "".join(f"{indent}{line}\n" if line else "\n" for line in lines), -3)

    def lines_after(self, loop: ast.For | ast.While, lines: Sequence[str]) -> None:
        """Whole lines after the steps of a loop, as far indented as it is; an ``else`` of it comes after them."""
        indent = self.text.indent(loop.lineno)
        text = "".join(f"{indent}{line}\n" if line else "\n" for line in lines)
        self._lines_at(self.text.end(loop.body[-1])[0] + 1, text, -5)

    def indent(self, loop: ast.For | ast.While, indentation: str, without: Collection[int] = ()) -> None:
        """Move a loop to the right, with what was put between its lines before, and without its ``else``.

        Args:
            loop: the loop.
            indentation: how far.
            without: the lines that stay where they are.

        Raises:
            RematError: a string goes over several of its lines.
        """
        (first, column), (last, _) = self.text.start(loop), self.text.end(loop.body[-1])
        strings = (node for node in ast.walk(loop) if isinstance(node, ast.Constant | ast.JoinedStr))
        if any(self.text.start(node)[0] != self.text.end(node)[0] <= last for node in strings):
            raise RematError(
                f"the loop at line {first} of {self.text.place} has a string over several lines, which an edit would "
                "change: write the checkpoint there by hand."
            )
        for number, change in enumerate(self._changes):
            at = change.start
            if at[1] or change.start != change.end or not change.text.endswith("\n"):
                continue
            inside = len(change.text) - len(change.text.lstrip()) > column
            if first < at[0] <= last:
                self._changes[number] = replace(change, text=textwrap.indent(change.text, indentation))
            elif at[0] == last + 1 and inside:  # before what comes after the statement
                self._changes[number] = replace(
                    change, text=textwrap.indent(change.text, indentation), order=-6 - 10**9
                )
        for line in {*range(first, last + 1)}.difference(without):
            if self.text.lines[line - 1].strip():
                self._changes.append(_Change((line, 0), (line, 0), indentation, -(10**8) - 1))

    def delete_lines(self, first: int, last: int) -> None:
        """Take whole lines out."""
        self._changes.append(_Change((first, 0), (last + 1, 0), ""))

    def add_imports(self, lines: Sequence[str]) -> None:
        """Imports after those that the source begins with; in a cell without any, at the top, below magics."""
        if lines:
            self._lines_at(_import_line(self.text), "".join(f"{line}\n" for line in lines), -2)

    def comments(self, node: ast.AST, without: Sequence[ast.AST]) -> list[str]:
        """The comments in an expression, but those in some parts of it."""
        inside, *parts = ((self.text.start(part), self.text.end(part)) for part in (node, *without))
        comments = [token for token in self._tokens if token.type == tokenize.COMMENT]
        return [
            token.string
            for token in comments
            if inside[0] <= token.start < inside[1] and not any(s <= token.start < e for s, e in parts)
        ]

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
