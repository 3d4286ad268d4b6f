"""Where the equations of any half come from in the primal program.

Every equation of a forward or backward jaxpr carries the *same traceback object* as the primal equation that it was
derived from (measured on jax 0.10.2 and 0.12.0.1), scan bodies, rematerialised and transposed code included. So the
identity of a traceback says where a derived equation comes from, even where JAX has inlined the call around it.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.jaxprs.walk import multiply
from remat_magic.parsing import parse_source
from remat_magic.records import SourceSpan
from remat_magic.user_files import is_library_file, is_user_file


def cell_number(file: str) -> int | None:
    """The ``n`` of ``In[n]`` for a notebook cell's file name, by IPython's own table; None for other files.

    ipykernel names a cell's file by a hash of its text, so that re-running the same text moves the number: ask when
    the function is traced, not later.
    """
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    names = getattr(getattr(shell, "compile", None), "_filename_map", None)
    number = names.get(file) if isinstance(names, dict) else None
    return number if isinstance(number, int) else None


def as_typed(cell: int | None, compiled: str) -> tuple[str, int]:
    """A cell as the user typed it, with its magics, and how many lines at its start IPython has dropped.

    Of anything else, and where a magic of several lines has become one of Python, it is what was compiled.
    """
    shell = sys.modules["IPython"].get_ipython() if cell is not None and "IPython" in sys.modules else None
    inputs: Sequence[str] = getattr(getattr(shell, "history_manager", None), "input_hist_raw", ())
    if cell is None or not 0 <= cell < len(inputs):
        return compiled, 0
    typed, lines = inputs[cell].rstrip().split("\n"), compiled.rstrip().split("\n")
    shift = next((number for number, line in enumerate(typed) if line.strip()), 0)
    same = len(typed) - shift == len(lines) and all(
        "get_ipython()" in line or line.strip() == own.strip() for line, own in zip(lines, typed[shift:], strict=True)
    )
    return (inputs[cell], shift) if same else (compiled, 0)


def characters(line: str, byte_column: int | None) -> int:
    """A column in characters from one in UTF-8 bytes."""
    if byte_column is None:
        return 0
    return len(line.encode()[:byte_column].decode(errors="replace"))


def codes_of(file: str, lines: Sequence[str]) -> list[CodeType]:
    """The code objects that a text compiles to, as a whole and statement by statement; none if it does not.

    For a name whose import Python sees it writes other code.
    """
    tree = parse_source("".join(lines))
    if tree is None:
        return []
    parts = [tree, *(ast.Module([statement], []) for statement in tree.body)]
    try:
        codes = [compile(part, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True) for part in parts]
    except SyntaxError:
        return []
    for code in codes:  # which grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


_last_texts: dict[str, Any] = {}  # by file, linecache's entry when code of it was last read


def _refresh(file: str, code: CodeType) -> None:
    """Let linecache have the text that code was compiled from: of a changed file the new one, if it was reloaded.

    Whoever shows a traceback has linecache drop the text of a file that has changed: it is here too.
    """
    entries = [entry for entry in (linecache.cache.get(file), _last_texts.get(file)) if entry and len(entry) > 1]
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    others = [entry for entry in entries if entry[2] != lines]
    if others and code not in codes_of(file, lines):
        entry = next((entry for entry in others if code in codes_of(file, entry[2])), None)
        if entry is not None:
            linecache.cache[file] = entry
    now = linecache.cache.get(file)
    if now and len(now) > 1:
        _last_texts[file] = now


class Frames(NamedTuple):
    """The innermost frame of the user's own code, and that of a library called from there; None where there is none."""

    source: SourceSpan | None = None
    library: SourceSpan | None = None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.source is not None or self.library is not None

    def inside(self, outer: Frames) -> Frames:
        """With the user's frame of what is around; both frames of it where there are none here."""
        if self.source is not None:
            return self
        return Frames(outer.source, self.library or outer.library)


_NOWHERE = Frames()


class Spans:
    """The spans of one trace: each traceback is read once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Frames]] = {}
        # By identity, since code that is the same in two files, or in two texts of one, is equal. Tracebacks keep it.
        self._positions: dict[int, list[tuple[int | None, ...]]] = {}
        self._spans: dict[tuple[int, int], SourceSpan] = {}
        self._files: set[str] = set()

    def frames(self, traceback: Any) -> Frames:
        """The frames of the user's code and of a library's that a traceback ends in."""
        if traceback is None:
            return _NOWHERE
        cached = self._seen.get(id(traceback))
        if cached is None:
            cached = self._seen[id(traceback)] = (traceback, self._read(traceback))  # stays alive so: ids are reused
        return cached[1]

    def of(self, traceback: Any) -> SourceSpan | None:
        """The innermost frame of the user's own code, or None where there is none."""
        return self.frames(traceback).source

    def raised(self, traceback: TracebackType | None) -> SourceSpan | None:
        """The same of a traceback of Python's."""
        own: SourceSpan | None = None
        while traceback is not None:
            if is_user_file(traceback.tb_frame.f_code.co_filename):
                own = self._span(traceback.tb_frame.f_code, traceback.tb_lasti)
            traceback = traceback.tb_next
        return own

    def at(self, frame: FrameType) -> SourceSpan:
        """Where a frame is."""
        return self._span(frame.f_code, frame.f_lasti)

    def _read(self, traceback: Any) -> Frames:
        codes, lastis = traceback.raw_frames()
        library: SourceSpan | None = None
        for code, lasti in zip(codes, lastis, strict=True):
            if is_user_file(code.co_filename):
                return Frames(self._span(code, lasti), library)
            if library is None and is_library_file(code.co_filename):
                library = self._span(code, lasti)
        return Frames(None, library)

    def _span(self, code: CodeType, lasti: int) -> SourceSpan:
        span = self._spans.get((id(code), lasti))
        if span is None:
            span = self._spans[id(code), lasti] = self._new_span(code, lasti)
        return span

    def _new_span(self, code: CodeType, lasti: int) -> SourceSpan:
        file = code.co_filename
        if file not in self._files:
            self._files.add(file)
            _refresh(file, code)
        positions = self._positions.get(id(code))
        if positions is None:
            positions = self._positions[id(code)] = list(code.co_positions())
        line, end_line, column, end_column = positions[lasti // 2] if lasti // 2 < len(positions) else (None,) * 4
        line = line or code.co_firstlineno
        end_line = end_line or line
        text = linecache.getline(file, line).rstrip("\n")
        last = text if end_line == line else linecache.getline(file, end_line).rstrip("\n")
        return SourceSpan(
            file=file,
            function=code.co_name,
            line=line,
            column=characters(text, column),
            end_line=end_line,
            end_column=characters(last, end_column),
            cell=cell_number(file),
            text=text,
        )


# ------------------------------------------------------------------------------------------- where equations come from


@dataclass(frozen=True, slots=True, eq=False)
class Provenance:
    """Where an equation stands: its frames, the enclosing loops and calls, and how often it runs.

    ``chain`` holds the identities of the tracebacks of the enclosing equations, outermost first. ``marks`` counts how
    often the primal program itself is marked as rematerialised there: a function that takes a gradient inside is.
    ``number`` counts the tracebacks, so that an operation in a body has one number whichever call of it JAX inlined;
    None for what is not in the primal program.
    """

    primitive: str
    label: str
    frames: Frames
    path: tuple[str, ...]
    times: int | None
    chain: tuple[int, ...]
    marks: int = 0
    number: int | None = None

    @property
    def source(self) -> SourceSpan | None:
        """The innermost frame of the user's own code."""
        return self.frames.source

    @property
    def library(self) -> SourceSpan | None:
        """The innermost frame of a library that the user's code called."""
        return self.frames.library


_MARK = "rematted_computation"  # the name stack entry under which JAX evaluates what a checkpoint dropped


def marks_on(eqn: Any) -> int:
    """How often an equation is marked as rematerialised, marks that a later derivative has wrapped not counted.

    ``transpose(jvp(rematted_computation))`` is the derivative of what the program itself rematerialises.
    """
    return sum(_MARK in name for name in _jax.untransformed_scopes(eqn))


class Provenances:
    """The provenance of whatever a primal jaxpr gives rise to; keeps the jaxpr, hence the identities, alive."""

    def __init__(self, closed: Any, function: str) -> None:
        self.closed = closed
        self.spans = Spans()
        self._by_traceback: dict[int, list[Provenance]] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._under: dict[tuple[int, int], list[Provenance]] = {}  # by traceback and that of an enclosing equation
        self.rules = set[int]()  # the identities of the tracebacks of calls with a rule of the user's own
        self.has_backward_rules = False
        self._add(_jax.open_jaxpr(closed), (), 1, (), Frames(), function, 0)
        self._lend_sources()

    def _add(
        self,
        jaxpr: Any,
        path: tuple[str, ...],
        times: int | None,
        chain: tuple[int, ...],
        outer: Frames,
        own: str,
        marks: int,
    ) -> None:
        # `own` is the function's name while we are inside nothing but its own decorators (jit, checkpoint): these are
        # the function, not something around its operations.
        sole = len(jaxpr.eqns) == 1
        for eqn in jaxpr.eqns:
            traceback = _jax.traceback_of(eqn)
            frames = self.spans.frames(traceback).inside(outer)
            inside = _jax.bodies(eqn)
            here = marks + marks_on(eqn)
            if _jax.is_custom_rule(eqn):
                self.rules.add(id(traceback))
                self.has_backward_rules = self.has_backward_rules or _jax.has_backward_rule(eqn)
            provenances = self._by_traceback.setdefault(id(traceback), [])
            number = (provenances[0].number if provenances else None) or len(self._by_traceback)
            names = _jax.primitive_name(eqn), _jax.label_of(eqn)
            provenance = Provenance(*names, frames, path, times, chain, here, number)
            provenances.append(provenance)
            fewest, most = self._marks.get(id(traceback), (here, here))
            self._marks[id(traceback)] = min(fewest, here), max(most, here)
            for link in chain:
                self._under.setdefault((id(traceback), link), []).append(provenance)
            for body in inside:
                decorator = bool(own) and sole and body.kind == "call" and body.label in (own, "")
                deeper = path if decorator or not body.label or path[-1:] == (body.label,) else (*path, body.label)
                self._add(
                    body.jaxpr,
                    deeper,
                    multiply(times, body.times),
                    (*chain, id(traceback)),
                    frames,
                    own if decorator else "",
                    here,
                )

    def _lend_sources(self) -> None:
        """Where a traceback ends in JAX (``checkpoint(jnp.sin)``), the equation around tells the line.

        A gradient inside the function inlines part of such a body, and leaves the rest in its equation: one traceback,
        one operation, one line.
        """
        for provenances in self._by_traceback.values():
            frames = next((provenance.frames for provenance in provenances if provenance.source is not None), None)
            if frames is not None and any(provenance.source is None for provenance in provenances):
                provenances[:] = [replace(one, frames=one.frames.inside(frames)) for one in provenances]

    def of(self, eqn: Any, chain: Iterable[int] = ()) -> Provenance | None:
        """The provenance of an equation of a forward or backward jaxpr.

        ``chain`` has the identities of the tracebacks of the equations around it there. Where a body is shared by
        several calls, the provenance whose own chain holds all of these is taken (JAX may have inlined others).
        """
        traceback = id(_jax.traceback_of(eqn))
        provenances = self._by_traceback.get(traceback)
        if not provenances:
            return None
        if len(provenances) == 1:
            return provenances[0]
        # A loop whose steps are grouped is a loop of loops with one traceback.
        wanted = [link for link, _ in itertools.groupby(link for link in chain if link in self._by_traceback)]
        if not wanted:
            return provenances[0]
        inside = self._under.get((traceback, wanted[-1]), provenances)
        fewest = min((self._under.get((traceback, link), provenances) for link in wanted), key=len)
        return next((provenance for provenance in fewest if _subsequence(wanted, provenance.chain)), inside[0])

    def marks(self, eqn: Any) -> tuple[int, int]:
        """The fewest and the most marks of the primal equations that an equation can be derived from."""
        return self._marks.get(id(_jax.traceback_of(eqn)), (0, 0))


def _subsequence(links: list[int], chain: tuple[int, ...]) -> bool:
    position = iter(chain)
    return all(link in position for link in links)
