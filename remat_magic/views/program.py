"""A jaxpr's text as HTML: residuals and recomputation marked, in chunks that a browser lays out lazily."""

from __future__ import annotations

from remat_magic.model import Program, ProgramLine

from . import format as fmt
from .cells import KEYS
from .format import escape
from .rows import residual_words

__all__ = ["CHUNK", "chunks", "pane"]

CHUNK = 100
# Hovers on unmarked lines double the size of a big program for little.
_PLACES_UP_TO = 2000

_MARKS = {"repeated": ("R", "repeated: also ran in the forward pass"), "deferred": ("D", "deferred: runs only now")}


def _with_residuals(line: ProgramLine) -> str:
    """The escaped text with every occurrence of the line's residual variables marked."""
    if not line.residuals:
        return escape(line.text)
    numbers, words = dict(line.residuals), residual_words(line)
    parts = words.split(line.text)
    return "".join(
        f'<b class="remat-v" data-r="{numbers[part]}">{escape(part)}</b>' if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


def _line(line: ProgramLine, places: bool) -> str:
    text = _with_residuals(line)
    where = fmt.location(line.source)
    if where and line.source and line.source.text:
        where = f"{where}  {line.source.expression}"
    if line.recomputation:
        letter, meaning = _MARKS[line.recomputation]
        hover = f"{meaning}; {where}" if where else meaning
        return (
            f'<span class="remat-l remat-{line.recomputation}" title="{escape(hover)}"><i>{letter}</i>{text}\n</span>'
        )
    if places and where and line.primitive:
        return f'<span class="remat-l" title="{escape(where)}">{text}\n</span>'
    return text + "\n"


def chunks(program: Program) -> list[str]:
    """The program as HTML, ``CHUNK`` lines a piece, each complete in itself."""
    places = len(program.lines) <= _PLACES_UP_TO
    lines = [_line(line, places) for line in program.lines]
    return ["".join(lines[start : start + CHUNK]) for start in range(0, len(lines), CHUNK)]


def pane(title: str, program: Program, body: str) -> str:
    """One titled program; ``body`` is HTML, the chunks or nothing where a script will bring them."""
    size = fmt.count(program.equations, "equation") if program.lines else "not available"
    return (
        f'<section class="remat-pane"><h4>{escape(title)} <small>{size}</small></h4>'
        f'<pre class="remat-program" tabindex="0" role="region" aria-label="{escape(title)}"'
        f" {KEYS}"
        ' style="font-family: var(--jp-code-font-family, monospace); white-space: pre; overflow: auto">'
        f"{body}</pre></section>"
    )
