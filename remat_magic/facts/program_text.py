"""A jaxpr as text whose lines know where they come from."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from remat_magic import _jax
from remat_magic.engine.halves import without_gc
from remat_magic.facts.residuals import locate
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import Scope
from remat_magic.records import Program, ProgramLine, RecomputationKind

# Where a variable can stand: bound before a colon, or read after a space, a bracket or a comma. Not in parameters
# (``axes=``), nor as the primitive after the equals sign, nor the "in (" at a body's end: these can be spelled alike.
_VARIABLE = re.compile(r"(?<![\w=.'\"])(?<!= )([a-z]+)(?![\w=.\['\"]| \()")


# Stands for a line break inside a parameter's own text (arrays, named tuples of jaxprs) while JAX lays the whole out:
# its source map counts the lines that it breaks itself. As wide as a line break, and in no program's text.
_BREAK = "\x01"


class _OneLine(tuple[Any, ...]):
    """A parameter in whose text each line break is a ``_BREAK``; the jaxprs that are shared are looked for in it."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class _Token:
    """Stands in for an equation's traceback, so that the printer's source map gives back the very equation."""

    __slots__ = ("depth", "eqn", "number", "scope")

    def __init__(self, scope: Scope, eqn: Any, number: int, depth: int) -> None:
        self.scope, self.eqn, self.number, self.depth = scope, eqn, number, depth


class _Tagger:
    """Copies a jaxpr with tokens for tracebacks and, for residuals, variables that tell how they are printed.

    Bodies used several times stay shared, as the printer expects. With ``one_line`` no parameter's text has line
    breaks, nor halves of surrogate pairs, which the printer refuses.
    """

    def __init__(self, residuals: Mapping[Any, int], one_line: bool = False) -> None:
        self._one_line = one_line
        self.count = 0
        self._copies = {var: _jax.telling_var(var, partial(self._tell, var, row)) for var, row in residuals.items()}
        # By the identity of what was copied, which stays alive so. Several closed jaxprs may hold one open jaxpr
        # (jax 0.10: branches that are closed anew at each call), and that is the one whose uses the printer counts.
        self._opened: dict[int, tuple[Any, Any]] = {}
        self._closed: dict[int, tuple[Any, Any]] = {}
        self._printed: dict[Any, dict[str, int]] = {}
        self._named_by: dict[Any, Any] = {}

    def close(self) -> None:
        """Let go of the copies: their variables hold the tagger, which only the garbage collector would free."""
        for table in (self._copies, self._opened, self._closed, self._printed, self._named_by):
            table.clear()

    def _tell(self, var: Any, row: int, name: str, context: Any) -> None:
        self._printed.setdefault(context, {}).setdefault(name, row)
        self._named_by[var] = context

    def printed(self, tops: Iterable[Any]) -> Mapping[str, int]:
        """The names of the residuals in the text, found by those among ``tops``: variables of the outermost jaxpr.

        A jaxpr in a parameter that is printed as a text of its own has names of its own.
        """
        context = next((self._named_by[var] for var in tops if var in self._named_by), None)
        return self._printed.get(context, {})

    def _vars(self, atoms: Sequence[Any]) -> list[Any]:
        return [atom if _jax.is_literal(atom) else self._copies.get(atom, atom) for atom in atoms]

    def tag(self, jaxpr: Any, scope: Scope, depth: int) -> Any:
        cached = self._closed.get(id(jaxpr))
        if cached is None:
            new = _jax.with_body(jaxpr, self._open(_jax.open_jaxpr(jaxpr), scope, depth))
            cached = self._closed[id(jaxpr)] = (jaxpr, new)
        return cached[1]

    def _open(self, jaxpr: Any, scope: Scope, depth: int) -> Any:
        cached = self._opened.get(id(jaxpr))
        if cached is not None:
            return cached[1]
        eqns = []
        for eqn in scope.jaxpr.eqns:
            self.count += 1
            token = _Token(scope, eqn, self.count - 1, depth)
            inner = {id(body.body.jaxpr): body for body in scope.inner(eqn) if body.body}
            copy = eqn
            if inner:
                copy = _jax.map_jaxprs(eqn, functools.partial(self._inside, inner, scope, eqn, depth))
            if self._one_line:
                copy = _jax.map_params(copy, _on_one_line)
            if self._copies:
                copy = copy.replace(invars=self._vars(copy.invars), outvars=self._vars(copy.outvars))
            eqns.append(_jax.with_traceback(copy, token))
        opened = _jax.replace_eqns(jaxpr, eqns)
        if self._copies:
            opened = _jax.replace_vars(opened, self._vars)
        self._opened[id(jaxpr)] = (jaxpr, opened)
        return opened

    def _inside(self, inner: Mapping[int, Scope], scope: Scope, eqn: Any, depth: int, jaxpr: Any) -> Any:
        opened = _jax.open_jaxpr(jaxpr)
        return self.tag(jaxpr, inner.get(id(opened)) or Scope(opened, scope, eqn, _jax.bodies(eqn)[0]), depth + 1)


def _is_printed_as_jaxprs(value: Any) -> bool:
    """Whether JAX prints a parameter as part of the program around it: others, named tuples too, as their own text."""
    return _jax.is_jaxpr(value) or (type(value) is tuple and all(_jax.is_jaxpr(item) for item in value))


def _on_one_line(value: Any) -> Any:
    if isinstance(value, (int, type(None))) or _is_printed_as_jaxprs(value):
        return value
    if hasattr(value, "debug_info"):
        return value  # a function, which JAX does not print by its text
    if hasattr(value, "pp_params"):
        return _jax.printing(value, _on_one_line)
    text = str(value)
    fit = text.replace("\n", _BREAK).encode(errors="backslashreplace").decode()
    if fit == text:
        return value
    if isinstance(value, str):  # a checkpoint name, of which JAX looks at the text
        return fit
    shown = _OneLine(value if isinstance(value, tuple) else ())
    shown.text = fit
    return shown


def _inward(top: Scope, residuals: Mapping[Any, int]) -> dict[Any, int]:
    """The residuals as variables at any depth: what they are called in the bodies that they enter or leave.

    A loop's carry is left out, since only its first or last iteration's value is the residual. In a body that is
    called from several places, a variable counts where it is a residual in each of the calls.
    """
    entered: dict[int, list[Mapping[Any, int]]] = {}
    seen: set[tuple[int, frozenset[int]]] = set()
    todo: list[tuple[Scope, Mapping[Any, int]]] = [(top, residuals)]
    while todo:
        scope, here = todo.pop()
        pattern = (id(scope.jaxpr), frozenset(map(id, here)))
        if pattern in seen:
            continue
        seen.add(pattern)
        here = dict(here)
        entered.setdefault(id(scope.jaxpr), []).append(here)
        for eqn in scope.jaxpr.eqns:
            if _jax.is_barrier(eqn):  # each output is the operand itself
                pairs = zip(eqn.invars, eqn.outvars, strict=True)
                here.update(
                    (out, here[atom])
                    for atom, out in pairs
                    if not _jax.is_literal(atom) and atom in here and out not in here  # may be a residual itself
                )
            todo += [(inner, _within(inner, here)) for inner in scope.inner(eqn)]
    rows: dict[Any, int] = {}
    for calls in entered.values():
        rows.update((var, row) for var, row in calls[0].items() if all(var in other for other in calls))
    return rows


def _within(inner: Scope, residuals: Mapping[Any, int]) -> dict[Any, int]:
    """The residuals among a body's inputs and outputs, from those among the operands and results of its equation."""
    rows: dict[Any, int] = {}
    for passed in (inner.before, inner.after):
        for var, others in passed.items():
            if all(scope is inner.parent for scope, _ in others):  # else a carry
                known = (atom for _, atom in others if not _jax.is_literal(atom) and atom in residuals)
                rows.update((var, residuals[atom]) for atom in itertools.islice(known, 1))
    return rows


class LiveProgram(Program):
    """The text of a jaxpr, laid out when it is first looked into, once; the arguments are those of ``program``.

    A copy of it is plain data.
    """

    __slots__ = ("_arguments",)
    # One at a time: it is JAX's printer that lays out.
    _laying_out: ClassVar = threading.RLock()

    def __init__(self, equations: int, *arguments: Any) -> None:
        object.__setattr__(self, "equations", equations)
        object.__setattr__(self, "_arguments", arguments)

    def __getattr__(self, name: str) -> Any:
        """The lines, which are not there yet."""
        if name != "lines":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        with self._laying_out:
            if not self.laid_out:
                object.__setattr__(self, "lines", program(*self._arguments).lines)
                object.__setattr__(self, "_arguments", ())
        return object.__getattribute__(self, "lines")

    @property
    def laid_out(self) -> bool:
        """Whether somebody has looked into it."""
        return not self._arguments

    @property
    def textless(self) -> bool:
        """It has its text whenever somebody reads it."""
        return False

    def __reduce__(self) -> tuple[type[Program], tuple[Any, ...]]:
        """As ``pickle`` and ``copy`` ask."""
        return Program, (self.lines if self.laid_out else (), self.equations)


def live_program(
    closed: Any,
    provenances: Provenances,
    residuals: Mapping[Any, int],
    repeated: Mapping[int, bool] = MappingProxyType({}),
) -> Program:
    """The text of a jaxpr, as its source is now; arguments are those of ``program``."""
    seen: set[int] = set()

    def read_lines(jaxpr: Any) -> int:
        """Read the source now, since files and cells may have changed by then; counts the equations of the text."""
        seen.add(id(jaxpr))
        count = len(jaxpr.eqns)
        inside: list[Any] = []
        for eqn in jaxpr.eqns:
            provenances.spans.frames(_jax.traceback_of(eqn))
            if _jax.bodies(eqn):  # and what else is printed beside them
                _jax.map_jaxprs(eqn, lambda inner: inside.append(_jax.open_jaxpr(inner)) or inner)
        return count + sum(read_lines(inner) for inner in inside if id(inner) not in seen)

    equations = read_lines(_jax.open_jaxpr(closed))
    if equations:
        return LiveProgram(equations, closed, provenances, residuals, repeated)
    return program(closed, provenances, residuals, repeated)  # so that what has no lines has no equations


@without_gc()
def program(
    closed: Any,
    provenances: Provenances,
    residuals: Mapping[Any, int],
    repeated: Mapping[int, bool] = MappingProxyType({}),
) -> Program:
    """The text of a jaxpr, byte for byte JAX's own, with the origin of each line.

    ``residuals`` has for variables of the jaxpr that are residuals their index in the report, ``repeated`` of
    recomputed equations, by identity, whether they also ran in the forward half.
    """
    top = Scope(_jax.open_jaxpr(closed))
    entered = _inward(top, residuals)
    for one_line in (False, True):  # it takes a look at every parameter: only where it must be
        tagger = _Tagger(entered, one_line)
        source_map: list[list[tuple[int, int, Any]]] = []
        with contextlib.nullcontext() if one_line else contextlib.suppress(TypeError):  # half of a surrogate pair
            texts = _jax.pretty(tagger.tag(closed, top, 0), source_map).split("\n")
            if len(texts) == len(source_map):
                break
        tagger.close()
    named = tagger.printed(residuals)
    lines: list[ProgramLine] = []
    seen: set[int] = set()
    places: dict[int, Any] = {}
    for text, marks in zip(texts, source_map, strict=True):
        tokens = [token for _, _, token in marks if isinstance(token, _Token)]
        # The outermost equation of a line owns it, but a whole body on one line belongs to its first equation.
        token = min(tokens, key=lambda token: token.depth, default=None)
        text, *further = text.split(_BREAK) if one_line else (text,)
        # The text of a parameter that is broken into lines has variables of its own.
        marked = (
            ()
            if further
            else tuple(dict.fromkeys((name, named[name]) for name in _VARIABLE.findall(text) if name in named))
        )
        if token is None:
            lines += [ProgramLine(text, residuals=marked), *map(ProgramLine, further)]
            continue
        place = places.get(token.number)
        if place is None:
            place = places[token.number] = locate(provenances, token.scope, token.eqn)
        first = token.number not in seen
        seen.add(token.number)
        again = next((repeated[id(item.eqn)] for item in tokens if id(item.eqn) in repeated), None)
        kind: RecomputationKind = "" if again is None else "repeated" if again else "deferred"
        line = ProgramLine(
            text,
            place.source,
            _jax.primitive_name(token.eqn) if first else "",
            marked,
            kind,
            place.path,
            token.number,
            place.number,
            place.library,
        )
        lines += [line, *(replace(line, text=rest, primitive="", residuals=(), recomputation="") for rest in further)]
    tagger.close()
    return Program(tuple(lines), tagger.count)
