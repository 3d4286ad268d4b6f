"""What the words of Python source are, so that they can be coloured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pygments.lexers.python import PythonLexer  # pyright: ignore[reportMissingTypeStubs] - it has none
from pygments.token import Comment, Keyword, Name, Number, Operator, String

Word = tuple[int, int, str]  # columns from 0, and a letter of the style sheet's: remat-hk, remat-hs, ...

COMMENT = "c"
_LETTERS: tuple[tuple[Any, str], ...] = (
    (Comment, COMMENT),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (String, "s"),
    (Number, "n"),
    (Name.Function, "d"),
    (Name.Class, "d"),
    (Name.Builtin.Pseudo, ""),
    (Name.Builtin, "b"),
    (Name.Decorator, "m"),
)
# IPython's own: a magic or a shell command, which Python's rules would take apart.
_MAGIC = re.compile(r"\s*(%%?[A-Za-z_]|!)")


def split_lines(text: str) -> list[str]:
    """The lines without their ends. Other than ``str.splitlines``, only where Python ends one."""
    return re.split(r"\r\n|\r|\n", text)


@lru_cache(maxsize=1024)
def words(text: str) -> tuple[tuple[Word, ...], ...]:
    """For each line of ``split_lines(text)`` what is to be coloured, in order and disjoint; nothing of magics."""
    lines = split_lines(text)
    coloured: list[list[Word]] = [[] for _ in lines]
    source = "\n".join("" if _MAGIC.match(line) else line for line in lines)
    try:
        for number, start, end, letter in _pieces(source):
            row = coloured[number]
            if row and row[-1][1:] == (start, letter):
                row[-1] = (row[-1][0], end, letter)
            else:
                row.append((start, end, letter))
    except Exception:  # noqa: BLE001 - colours are a comfort: whatever the lexer makes of the text, it is shown
        return tuple(() for _ in lines)
    return tuple(map(tuple, coloured))


def _pieces(source: str) -> Iterator[tuple[int, int, int, str]]:
    """Line, columns and letter of every coloured token, cut at line ends."""
    number = column = 0
    for _, kind, value in PythonLexer().get_tokens_unprocessed(source):
        letter = next((letter for parent, letter in _LETTERS if kind in parent), "")
        for index, piece in enumerate(value.split("\n")):
            if index:
                number, column = number + 1, 0
            if piece and letter:
                yield number, column, column + len(piece), letter
            column += len(piece)
