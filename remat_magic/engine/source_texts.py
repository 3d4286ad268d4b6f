"""The source text of the user as it was when traced, with the lines of functions that autoreload changed."""

from __future__ import annotations

import ast
import bisect
import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from remat_magic import _jax
from remat_magic.engine.namespaces import functions_in
from remat_magic.jaxprs.provenance import Provenances, as_typed, codes_of
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import layers
from remat_magic.parsing import parse_source
from remat_magic.records import SourceSpan, SourceText
from remat_magic.user_files import is_user_file


@dataclass(frozen=True, slots=True)
class _Part:
    """A function, or a statement outside of all functions: its first and last line, and its dotted name or ""."""

    first: int
    last: int
    name: str


def source_texts(provenances: Provenances, fun: Callable[..., Any]) -> tuple[SourceText, ...]:
    """The code that a program's operations come from: of a notebook whole cells, of a file only the functions.

    Cells come first, in the order of their numbers, then the functions of files. The cell that defines the traced
    function comes before all other cells, or its file before all other files.
    """
    spans: dict[tuple[int | None, str], dict[SourceSpan, None]] = {}
    for _, eqn in walk(provenances.closed, once=True):  # a body that many calls share has the same frames each time
        source, _ = provenances.spans.frames(_jax.traceback_of(eqn))
        if source is not None:
            spans.setdefault((source.cell, source.file), {})[source] = None
    home = _defining_file(fun)

    def order(key: tuple[int | None, str]) -> tuple[bool, bool, int]:
        cell, file = key
        return (not _is_cell(cell, file), file != home, sys.maxsize if cell is None else cell)

    return tuple(text for key in sorted(spans, key=order) for text in _texts(*key, tuple(spans[key])))


def _is_cell(cell: int | None, file: str) -> bool:
    """Whether the text was typed in: it is shown whole, also where its number is not known."""
    return cell is not None or file.startswith("<") or "ipykernel_" in file


def _defining_file(fun: Any) -> str:
    """The file of the innermost Python function under partials, methods, ``jit`` and the like; "" if there is none."""
    *_, innermost = itertools.islice(layers(fun), 100)
    fun = getattr(innermost, "__func__", innermost)
    call = fun if hasattr(fun, "__code__") else vars(type(fun)).get("__call__")  # a module of flax or equinox
    code = getattr(call, "__code__", None)
    return getattr(code, "co_filename", "")


def _texts(cell: int | None, file: str, spans: Sequence[SourceSpan]) -> Iterator[SourceText]:
    lines = [line.rstrip("\n") for line in linecache.getlines(file)]
    if not all(span.line <= len(lines) and lines[span.line - 1] == span.text for span in spans):
        # The file has changed since it was traced, or cannot be read: what the spans have kept is certain.
        yield from _own_lines(cell, file, spans)
        return
    if _is_cell(cell, file):
        written, shift = as_typed(cell, "\n".join(lines))
        lines = written.split("\n")[shift:]
        while lines and not lines[-1].strip():
            lines.pop()
        if lines:
            yield SourceText(file, cell, "", 1, "\n".join(lines))
        return
    tree = parse_source("\n".join(lines))
    if tree is None:
        yield from _own_lines(cell, file, spans)
        return
    parts = [*_outermost(tree, "")]
    for part in _merged(_around(parts, span) for span in spans):
        yield SourceText(file, cell, part.name, part.first, "\n".join(lines[part.first - 1 : part.last]))


def _own_lines(cell: int | None, file: str, spans: Iterable[SourceSpan]) -> Iterator[SourceText]:
    """The first lines of the spans, those that follow one another as one text."""
    by_line = {span.line: span for span in spans if span.text.strip()}
    for part in _merged((_Part(line, line, by_line[line].function) for line in by_line), apart=2):
        text = "\n".join(by_line[line].text for line in range(part.first, part.last + 1))
        yield SourceText(file, cell, "" if part.name.startswith("<") else part.name, part.first, text)


def _merged(parts: Iterable[_Part], apart: int = 1) -> list[_Part]:
    """The parts in their order, those that share a line (or are less than ``apart`` apart) as one."""
    merged: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if merged and part.first < merged[-1].last + apart:
            before = merged[-1]
            merged[-1] = _Part(before.first, max(before.last, part.last), before.name)
        else:
            merged.append(part)
    return merged


def _around(parts: Sequence[_Part], span: SourceSpan) -> _Part:
    """The part that a span stands in; its own lines where it stands between parts."""
    number = bisect.bisect(parts, span.line, key=lambda part: part.first) - 1
    inside = number >= 0 and span.line <= parts[number].last
    return parts[number] if inside else _Part(span.line, max(span.line, span.end_line), "")


def _outermost(around: ast.AST, inside: str) -> Iterator[_Part]:
    """The outermost functions and methods of a module, and its statements outside of them."""
    for node in ast.iter_child_nodes(around):
        if isinstance(node, ast.expr | ast.pattern | ast.withitem):
            continue
        last = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield _Part(first, last, inside + node.name)
        elif any(hasattr(node, block) for block in ("body", "handlers", "cases")):
            yield from _outermost(node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside)
        elif isinstance(node, ast.stmt):
            match node:
                case ast.Assign([ast.Name(name)], ast.Lambda()):
                    yield _Part(node.lineno, last, inside + name)
                case _:
                    yield _Part(node.lineno, last, inside)


def restore_lines() -> None:
    """Let functions that autoreload changed have the code that their file compiles to.

    It compiles a changed function from its text alone, so that the lines count from there, and names the file of a
    decorator where there is one; functions below it keep their old lines. Only code that does the same is exchanged.
    """
    if "IPython.extensions.deduperreload.deduperreload" not in sys.modules:
        return
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and is_user_file(name):
            linecache.checkcache(name)
            codes = _compiled(name, tuple(linecache.getlines(name)))
            for function in functions_in(vars(module).values(), vars(module)):
                _restore(function, name, codes)


@functools.cache  # every trace asks for all files of the user's, which change seldom
def _compiled(name: str, lines: tuple[str, ...]) -> frozenset[CodeType]:
    return frozenset(codes_of(name, lines))


def _restore(function: FunctionType, name: str, codes: frozenset[CodeType]) -> None:
    own = function.__code__
    if own in codes and own.co_filename == name:
        return
    same = [code for code in codes if code.co_name == own.co_name and _content(code) == _content(own)]
    if same:
        named = (code for code in same if code.co_qualname == function.__qualname__)
        function.__code__ = next(named, min(same, key=lambda code: code.co_firstlineno))


def _content(code: CodeType) -> tuple[Any, ...]:
    """What code does, wherever it stands."""
    constants = tuple(
        _content(value) if isinstance(value, CodeType) else (type(value), repr(value)) for value in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code, names, code.co_argcount, code.co_kwonlyargcount, constants
