"""Python's own parser, from threads."""

from __future__ import annotations

import ast
import functools
import keyword
import warnings
from typing import Final, Literal, overload

_TRIES: Final = 10


def parse_expression(text: str) -> ast.expr:
    """The tree of an expression, which callers share and must not change; SyntaxError where it is none.

    What was parsed lately is remembered, and a mere name is not parsed at all: before 3.11.8 and 3.12.2, a Python
    thread that parses while the collector has interrupted another one's parsing makes that one fail (cpython 106905),
    which may be the one that runs the user's cell.
    """
    if text.isascii() and text.isidentifier() and not keyword.iskeyword(text):
        return ast.Name(text, ast.Load())
    return _parsed(text)


@functools.lru_cache(maxsize=64)  # the trees of policies with hundreds of names are large
def _parsed(text: str) -> ast.expr:
    return parse_python(text, "eval").body


@overload
def parse_python(code: str) -> ast.Module: ...
@overload
def parse_python(code: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_python(code: str, mode: str = "exec") -> ast.AST:
    """As ``ast.parse``, again where another thread's parsing made it fail."""
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(code, mode=mode)
        except SystemError:
            continue
    return ast.parse(code, mode=mode)


@functools.lru_cache(maxsize=64)
def parse_source(text: str) -> ast.Module | None:
    """The tree of a file or cell of the user's, which callers share and must not change; None if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the user's strings, of which their import has warned
            return parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
