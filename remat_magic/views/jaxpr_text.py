"""A jaxpr's text as HTML: residuals and recomputation marked, in chunks that a browser lays out lazily."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from remat_magic.records import Program, ProgramLine, Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape, linked
from remat_magic.views.tables import KEYS
from remat_magic.views.values import VARIABLE

_CHUNK = 100
# Hovers on unmarked lines double the size of a big jaxpr for little.
_PLACES_UP_TO = 2000
# Arguments over more lines than this are folded.
_HEADER_LINES = 4

_MARKS = {"repeated": ("R", "repeated: also ran in the forward pass"), "deferred": ("D", "deferred: runs only now")}

# As JAX prints them: a type after its variable or literal, and a primitive after the equals sign.
_TYPE = r"(?<=[\w)]):[\w<>]+\[[^\]\s]*\](?:<[\w:]+>)?"
_PRIMITIVE = r"(?<= = )[\w.]+(?=[\[ ]|$)"
_WORD = VARIABLE.format("[a-z]+")
_TOKEN = re.compile(f"(?P<type>{_TYPE})|(?P<primitive>{_PRIMITIVE})|(?P<word>{_WORD})")
_WORDS = re.compile(f"(?P<word>{_WORD})")

_LEGEND = (
    '<p class="remat-legend"><b class="remat-v">variable</b> is a residual; '
    '<i class="remat-letter">R</i> repeated: also ran in the forward pass; '
    '<i class="remat-letter">D</i> deferred: runs only in the backward pass</p>'
)


def jaxprs(report: Report, bodies: bool = True) -> str:
    """Both jaxprs side by side; without ``bodies`` only their frames, for a script to fill chunk by chunk."""
    halves = (("Forward", report.forward), ("Backward", report.backward))
    panes = "".join(_pane(title, half, _chunks(half) if bodies else ()) for title, half in halves)
    return f'{_LEGEND}<div class="remat-panes">{panes}</div>'


def lazy_chunks(report: Report) -> dict[str, list[str]]:
    """The jaxprs for the script that fills the panes: lists of HTML, 100 lines each."""
    return {"forward": _chunks(report.forward, live=True), "backward": _chunks(report.backward, live=True)}


def _pane(title: str, jaxpr: Program, chunks: Iterable[str]) -> str:
    """One titled jaxpr, in chunks of HTML, or none where a script will bring them."""
    size = fmt.count(jaxpr.equations, "equation") if jaxpr.lines else "not available"
    body = "".join(f'<div class="remat-chunk">{chunk}</div>' for chunk in chunks)
    return (
        f"<section><h4>{escape(title)} <small>{size}</small></h4>"
        f'<pre class="remat-program" tabindex="0" role="region" aria-label="{escape(title)}"'
        f" {KEYS}"
        ' style="font-family: var(--jp-code-font-family, monospace); white-space: pre; overflow: auto">'
        f"{body}</pre></section>"
    )


def _text(line: ProgramLine, text: str, pattern: re.Pattern[str]) -> str:
    """A part of the line's text, with its residual variables and what else the pattern finds marked."""
    numbers = dict(line.residuals)
    if not numbers and pattern is _WORDS:
        return escape(text)
    pieces, at = list[str](), 0
    for match in pattern.finditer(text):
        kind, word = match.lastgroup, match.group()
        if kind == "word" and word not in numbers:
            continue
        pieces.append(escape(text[at : match.start()]))
        at = match.end()
        if kind == "word":
            pieces.append(f'<b class="remat-v" data-r="{numbers[word]}">{escape(word)}</b>')
        else:
            tag = "span" if kind == "type" else "em"
            pieces.append(f"<{tag}>{escape(word)}</{tag}>")
    pieces.append(escape(text[at:]))
    return "".join(pieces)


def _line(line: ProgramLine, content: str, places: bool, live: bool) -> str:
    """A line with its mark, and for a script what it is linked by."""
    where = fmt.location(line.source)
    if where and line.source and line.source.text:
        where = f"{where}  {line.source.expression}"
    kind, letter, hover = "", "", where if places and line.primitive else ""
    if line.recomputation:
        mark, meaning = _MARKS[line.recomputation]
        kind, letter = f" remat-{line.recomputation}", f"<i>{mark}</i>"
        hover = f"{meaning}; {where}" if where else meaning
    links = ""
    if live:
        operation = "" if line.operation is None else f' data-o="{line.operation}"'
        links = f"{linked(line.source, library=line.library)}{operation}"
    title = f' title="{escape(hover)}"' if hover else ""
    if not (kind or title or live):
        return f"{content}\n"
    return f'<span class="remat-l{kind}"{links}{title}>{letter}{content}\n</span>'


def _chunks(jaxpr: Program, live: bool = False) -> list[str]:
    """The jaxpr as HTML, ``_CHUNK`` lines a piece, each complete in itself.

    For the widget's script it has links, and long parameters are folded; else it is as small as it can be, for it is
    saved.
    """
    places, pattern = live and len(jaxpr.lines) <= _PLACES_UP_TO, _TOKEN if live else _WORDS
    pieces = list[str]()
    for line, *folded in folded_lines(jaxpr.lines) if live else ((line,) for line in jaxpr.lines):
        content = _text(line, line.text, pattern)
        if folded:
            what = f"parameters of {line.primitive}" if line.primitive else "arguments"
            *inner_lines, last = folded
            inside = "".join(f"\n{_text(inner, inner.text, pattern)}" for inner in inner_lines)
            # Not in the tab order, which a big jaxpr would fill: the arrow keys reach it.
            content += (
                '<button type="button" class="remat-fold" tabindex="-1" aria-expanded="false" '
                f'aria-label="{escape(f"Unfold the {what}")}"></button>'
                f'<span class="remat-more" hidden>{inside}\n{" " * _indent(last)}</span>'
                f"{_text(last, last.text.lstrip(), pattern)}"
            )
        pieces.append(_line(line, content, places, live))
    return ["".join(pieces[start : start + _CHUNK]) for start in range(0, len(pieces), _CHUNK)]


def folded_lines(lines: Sequence[ProgramLine]) -> Iterator[Sequence[ProgramLine]]:
    """Each line of a jaxpr; with it those up to its end, where it is an equation with long parameters."""
    indents, at = list(map(_indent, lines)), 0
    while at < len(lines):
        end = _fold(lines, indents, at) + 1
        yield lines[at:end]
        at = end


def _indent(line: ProgramLine) -> int:
    return len(line.text) - len(line.text.lstrip())


def _fold(lines: Sequence[ProgramLine], indents: Sequence[int], at: int) -> int:
    """The last of the lines that are one equation with its parameters, or a jaxpr's long list of arguments."""
    line = lines[at]
    if line.text.endswith("[") and line.equation is not None:
        end = at + 1
        while end < len(lines) and indents[end] > indents[at] and lines[end].equation in (None, line.equation):
            end += 1
        whole = end < len(lines) and indents[end] == indents[at] and lines[end].text.lstrip().startswith("]")
        # A jaxpr among the parameters has lines of its own to fold.
        if whole and not any("{ lambda" in inner.text for inner in lines[at + 1 : end]):
            return end
    elif "{ lambda" in line.text and not line.text.endswith(" let"):
        end = at + 1
        while end < len(lines) and indents[end] > indents[at] and not lines[end].text.endswith(" let"):
            end += 1
        if end < len(lines) and lines[end].text.endswith(" let") and end - at > _HEADER_LINES:
            return end
    return at
