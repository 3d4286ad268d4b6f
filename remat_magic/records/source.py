"""Places in source text, the text itself, and the checkpoints and gradients that are there: as a program was traced."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """A range of the user's source text.

    Lines count from 1, columns are characters (not UTF-8 bytes) from 0. ``cell`` is the ``n`` of the notebook's
    ``In[n]`` when the function was traced, or None for a file. ``text`` is the first line's text as it was when
    traced, or empty where it cannot be read.
    """

    file: str
    function: str
    line: int
    column: int
    end_line: int
    end_column: int
    cell: int | None = None
    text: str = ""

    @property
    def place(self) -> str:
        """Where it starts, as short as it is unambiguous: ``In[3]:6``, ``model.py:6``."""
        name = _short_name(self.file, self.cell)
        return f"{name}:{self.line}" if name else f"line {self.line}"

    @property
    def expression(self) -> str:
        """The very expression, where it stands on one line and its text is known; else the stripped line."""
        if self.end_line == self.line and 0 <= self.column < self.end_column <= len(self.text):
            return self.text[self.column : self.end_column]
        return self.text.strip()

    @property
    def called(self) -> str:
        """What the expression does: "softmax" of ``jax.nn.softmax(s)``, "mul" of ``a * b``, else empty."""
        return _called(self.expression)


@functools.lru_cache(maxsize=4096)
def _called(expression: str) -> str:
    try:
        node: ast.AST = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    while isinstance(node, ast.Call):  # of nn.Dense(8)(x) it is Dense
        node = node.func
        if isinstance(node, ast.Attribute | ast.Name):
            return node.attr if isinstance(node, ast.Attribute) else node.id
    return _OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp | ast.UnaryOp) else ""


_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Mult: "mul",
    ast.Pow: "pow",
    ast.Sub: "sub",
    ast.USub: "neg",
}


def _short_name(file: str, cell: int | None) -> str:
    if cell is not None:
        return f"In[{cell}]"
    # A cell whose number is not known has a file name made of hashes, which tells the reader nothing.
    if file.startswith("<") or "ipykernel_" in file:
        return ""
    path = file.replace(chr(92), "/")
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in path:  # "linear.py" alone says little of a library
            return path.rpartition(packages)[2]
    return PurePath(path).name


@dataclass(frozen=True, slots=True)
class SourceText:
    """A part of the source, as it was when traced: a whole cell, or one function of a file of the user's.

    ``function`` is dotted for a method ("Model.__call__"), and empty for a cell and for statements that stand in no
    function. ``line`` is the number of the text's first line, from 1; the text's lines end in newlines but for the
    last.
    """

    file: str
    cell: int | None
    function: str
    line: int
    text: str

    @property
    def place(self) -> str:
        """The cell or the file, as short as it is unambiguous: ``In[3]``, ``model.py``; empty if it has no name."""
        return _short_name(self.file, self.cell)


@dataclass(frozen=True, slots=True)
class Site:
    """A place where ``jax.checkpoint`` is applied, or could be; calls of one function at one place are one site.

    ``policy`` is the policy as written: a choice's key where it is one of JAX's, else the callable's own name.
    ``possible`` tells that there is no checkpoint; ``code`` is then what to write for one that saves nothing.
    """

    key: str
    function: str
    times: int
    policy: str
    source: SourceSpan | None = None
    possible: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class GradientCall:
    """One function that a step differentiates inside, by ``jax.grad``, ``value_and_grad``, ``vjp`` or their like.

    ``key`` tells it from the others (``gradient=`` takes it); ``function`` is its own name, ``source`` the line of its
    definition. ``path`` holds the loops and calls around the first call, outermost first; ``times`` is how often it
    runs in one step (None: in a loop of unknown length). ``wrt`` says what is differentiated, in its own argument
    names.
    """

    key: str
    function: str
    source: SourceSpan | None
    path: tuple[str, ...]
    times: int | None
    wrt: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it is defined and how often it runs: ``line 12, x5``; empty where neither is worth saying."""
        parts = [self.source.place] if self.source else []
        if self.times != 1:
            parts.append("a loop of unknown length" if self.times is None else f"x{self.times}")
        return ", ".join(parts)
