"""A jaxpr as text whose lines know where they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from remat_magic import _compat
from remat_magic.analysis.bodies import bodies
from remat_magic.analysis.flow import Scope
from remat_magic.analysis.index import PrimalIndex
from remat_magic.analysis.residuals import locate
from remat_magic.model import Program, ProgramLine, Recomputation

# Where a variable can stand: bound before a colon, or read after a space, a bracket or a comma. Not in parameters
# (``axes=``), nor as the primitive after the equals sign, nor the "in (" at a body's end: these can be spelled alike.
_VARIABLE = re.compile(r"(?<![\w=.'\"])(?<!= )([a-z]+)(?![\w=.\['\"]| \()")


class _Token:
    """Stands in for an equation's traceback, so that the printer's source map gives back the very equation."""

    __slots__ = ("depth", "eqn", "number", "scope")

    def __init__(self, scope: Scope, eqn: Any, number: int, depth: int) -> None:
        self.scope, self.eqn, self.number, self.depth = scope, eqn, number, depth


class _Tagger:
    """Copies a jaxpr with tokens for tracebacks; bodies used several times stay shared, as the printer expects."""

    def __init__(self) -> None:
        self.count = 0
        self._done: dict[int, tuple[Any, Any]] = {}

    def tag(self, jaxpr: Any, scope: Scope, depth: int) -> Any:
        known = self._done.get(id(jaxpr))
        if known is not None:
            return known[1]
        eqns = []
        for eqn in scope.jaxpr.eqns:
            self.count += 1
            token = _Token(scope, eqn, self.count - 1, depth)
            inner = {id(body.body.jaxpr): body for body in scope.inner(eqn) if body.body}
            copy = eqn
            if inner:
                params = {key: self._value(value, inner, scope, eqn, depth) for key, value in eqn.params.items()}
                if _compat.is_checkpoint(eqn) and "jaxpr" not in eqn.params:
                    body = _compat.checkpoint_body(eqn)
                    copy = _compat.replace_checkpoint(
                        eqn, self._value(body, inner, scope, eqn, depth), _compat.checkpoint_policy(eqn)
                    )
                else:
                    copy = eqn.replace(params=params)
            eqns.append(_compat.with_traceback(copy, token))
        new = _compat.with_body(jaxpr, _compat.replace_eqns(jaxpr, eqns))
        self._done[id(jaxpr)] = (jaxpr, new)
        return new

    def _value(self, value: Any, inner: Mapping[int, Scope], scope: Scope, eqn: Any, depth: int) -> Any:
        if _compat.is_jaxpr(value):
            here = inner.get(id(_compat.open_jaxpr(value)))
            return self.tag(value, here or Scope(_compat.open_jaxpr(value), scope, eqn, bodies(eqn)[0]), depth + 1)
        if isinstance(value, tuple) and any(_compat.is_jaxpr(item) for item in value):
            return tuple(self._value(item, inner, scope, eqn, depth) for item in value)
        return value


def program(
    closed: Any,
    index: PrimalIndex,
    residual_of_input: Mapping[int, int],
    residual_of_output: Mapping[int, int],
    recomputation: Callable[[Any], Recomputation] = lambda eqn: "",
) -> Program:
    """The text of a jaxpr, byte for byte JAX's own, with the origin of each line.

    Args:
        closed: the jaxpr.
        index: the primal program.
        residual_of_input: for inputs of the jaxpr that are residuals, their index in the report.
        residual_of_output: the same for its outputs.
        recomputation: tells for an equation whether it is recomputation and of which kind.
    """
    top = Scope(_compat.open_jaxpr(closed))
    tagger = _Tagger()
    tagged = tagger.tag(closed, top, 0)
    source_map: list[list[tuple[int, int, Any]]] = []
    texts = _compat.pretty(tagged, source_map).split("\n")
    named = _residual_names("\n".join(texts), residual_of_input, residual_of_output)
    lines: list[ProgramLine] = []
    seen: set[int] = set()
    places: dict[int, Any] = {}
    for text, marks in zip(texts, source_map, strict=True):
        tokens = [token for _, _, token in marks if isinstance(token, _Token)]
        # The outermost equation of a line owns it, but a whole body on one line belongs to its first equation.
        token = min(tokens, key=lambda token: token.depth, default=None)
        marked = tuple(dict.fromkeys((name, named[name]) for name in _VARIABLE.findall(text) if name in named))
        if token is None:
            lines.append(ProgramLine(text, residuals=marked))
            continue
        place = places.get(token.number)
        if place is None:
            place = places[token.number] = locate(index, token.scope, token.eqn)
        first = token.number not in seen
        seen.add(token.number)
        inside: list[Recomputation] = [kind for item in tokens if (kind := recomputation(item.eqn))]
        lines.append(
            ProgramLine(
                text,
                place.source,
                _compat.primitive_name(token.eqn) if first else "",
                marked,
                inside[0] if inside else "",
                place.path,
                token.number,
            )
        )
    return Program(tuple(lines), tagger.count)


def _residual_names(
    text: str, residual_of_input: Mapping[int, int], residual_of_output: Mapping[int, int]
) -> dict[str, int]:
    """What the residuals are called in the text, read off the header and the last line of the outermost jaxpr."""
    start = [match.start() for match in re.finditer(r"^\{ lambda ", text, re.MULTILINE)][-1]
    body = text[start:]
    header = re.match(r"\{ lambda ([^;]*);(.*?)\. let\b", body, re.DOTALL)
    named: dict[str, int] = {}
    if header:
        inputs = re.findall(r"(\w+):", header.group(2))
        named.update({inputs[i]: row for i, row in residual_of_input.items() if i < len(inputs)})
    result = body.rfind("in (")
    if result >= 0:
        inside = body[result + 4 : body.rfind(")")]
        outputs = [word.strip() for word in re.split(r",\s*", inside.strip().rstrip(","))]
        for i, row in residual_of_output.items():
            if i < len(outputs) and re.fullmatch(r"[a-z]\w*", outputs[i]):
                named.setdefault(outputs[i], row)
    return named
