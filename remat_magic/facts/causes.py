"""What takes memory by the way a program is written: results that are arguments, and values wider than they need be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax
from remat_magic.engine.engine import Engine
from remat_magic.engine.halves import Forward
from remat_magic.facts.residuals import locate, saved_values
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import Scope, makers
from remat_magic.records import SourceSpan

_NARROW, _WIDE = ("bf16", "f16"), "f32"


def _is(aval: Any, *kinds: str) -> bool:
    return _jax.short_dtype(aval) in kinds


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Results that are arguments, each a copy; ``source`` is the loop that stacks them again, None where none does."""

    arguments: tuple[str, ...]
    nbytes: int
    source: SourceSpan | None


def given_back(engine: Engine) -> Iterator[GivenBack]:
    """The arguments that a function, or the training step around it, gives back as they came, and not given away."""
    step = engine.step
    closed, names, provenances = engine.primal.provenances.closed, engine.primal.arguments, engine.primal.provenances
    if step is not None:
        closed, names, provenances = step.closed, step.given.arguments, step.given.provenances
    top = Scope(_jax.open_jaxpr(closed))
    found: dict[SourceSpan | None, tuple[dict[str, None], int]] = {}
    for var in top.jaxpr.outvars:
        made = [] if _jax.is_literal(var) else makers(top, var)
        arguments = {maker.argument for maker in made}
        argument = arguments.pop() if len(arguments) == 1 else None
        if argument is None or (step is not None and step.donated[argument]):
            continue
        loop = top.makers[var][0] if any(maker.copied for maker in made) else None
        source = locate(provenances, top, loop).source if loop is not None else None
        arguments_there, nbytes = found.get(source, ({}, 0))
        found[source] = arguments_there | {names[argument]: None}, nbytes + _jax.nbytes(var.aval)
    for source, (arguments_there, nbytes) in found.items():
        yield GivenBack((*arguments_there,), nbytes, source)


@dataclass(frozen=True, slots=True)
class Widened:
    """Saved values that are wide because narrow ones met wide arguments, which are given by number."""

    nbytes: int
    narrow: str
    arguments: tuple[int, ...]
    source: SourceSpan | None


@dataclass(slots=True)
class _Cause:
    """Why a value is wide: narrow values that met wide arguments, or a cast or value of the program's own.

    ``in_norm``: by a cast of a library's, and no matmul since: that may be a norm, which computes wide in any case.
    """

    narrow: set[str] = field(default_factory=set[str])
    arguments: set[int] = field(default_factory=set[int])
    own: bool = False
    in_norm: bool = False

    def add(self, other: _Cause) -> None:
        """With what another value is wide for."""
        self.narrow |= other.narrow
        self.arguments |= other.arguments
        self.own = self.own or other.own
        self.in_norm = self.in_norm or other.in_norm


def widened(half: Forward, provenances: Provenances) -> Widened | None:
    """What a forward half saves so."""
    top = Scope(_jax.open_jaxpr(half.closed))
    causes, total, first = _Causes(provenances), 0, None
    found = _Cause()
    for value in saved_values(half.closed, half.outputs):
        if _jax.is_literal(value.atom) or value.atom in top.inputs:
            continue
        cause = causes.of(top, value.atom) if _is(value.atom.aval, _WIDE) else _Cause()
        if cause.narrow and cause.arguments and not cause.own and not cause.in_norm:
            found.add(cause)
            total += _jax.nbytes(half.type_of(value.atom))
            made = next((maker for maker in makers(top, value.atom) if maker.eqn is not None), None)
            first = first or (locate(provenances, made.scope, made.eqn).source if made else None)
    if not total:
        return None
    return Widened(total, min(found.narrow), tuple(sorted(found.arguments)), first)


class _Causes:
    """Why values are wide, each found out once."""

    def __init__(self, provenances: Provenances) -> None:
        self._spans = provenances.spans
        self._known: dict[tuple[int, int], _Cause] = {}

    def of(self, scope: Scope, atom: Any) -> _Cause:
        """Of a wide value."""
        key = (id(scope), id(atom))
        if key not in self._known:
            cause = self._known[key] = _Cause()  # a loop comes back to it
            for maker in makers(scope, atom):
                if maker.argument is not None:
                    cause.arguments.add(maker.argument)
                elif maker.eqn is not None:
                    cause.add(self._of_equation(maker.scope, maker.eqn))
                else:
                    cause.own = cause.own or (not maker.literal and bool(atom.aval.shape))
        return self._known[key]

    def _of_equation(self, scope: Scope, eqn: Any) -> _Cause:
        narrow = {kind for atom in eqn.invars if (kind := _jax.short_dtype(atom.aval)) in _NARROW}
        cause = _Cause(narrow)
        wide = [atom for atom in eqn.invars if _is(atom.aval, _WIDE) and not _jax.is_literal(atom)]
        if not wide:
            cause.in_norm = self._spans.frames(_jax.traceback_of(eqn)).library is not None
            cause.own = not (narrow and (cause.in_norm or self._meets_arguments(scope, eqn)))
        for atom in wide:
            cause.add(self.of(scope, atom))
        cause.in_norm = cause.in_norm and not _jax.is_matmul(eqn)
        return cause

    def _meets_arguments(self, scope: Scope, cast: Any) -> bool:
        """Whether a value is cast because what it is combined with, in the same expression, is an argument."""
        span = self._spans.of(_jax.traceback_of(cast))
        readers = [read for read, _ in scope.readers.get(cast.outvars[0], ()) if not _jax.is_transparent(read)]
        others = [[atom for atom in read.invars if atom is not cast.outvars[0]] for read in readers]
        return bool(readers) and all(
            self._spans.of(_jax.traceback_of(read)) == span and len(other) == 1 and _are_arguments(scope, other)
            for read, other in zip(readers, others, strict=True)
        )


def _are_arguments(scope: Scope, atoms: Iterable[Any]) -> bool:
    """Whether values are arguments, or parts of them, and wide."""
    for atom in atoms:
        if _jax.is_literal(atom) or not _is(atom.aval, _WIDE):
            return False
        for maker in makers(scope, atom):
            if maker.argument is not None:
                continue
            if maker.eqn is None or not _jax.only_moves(maker.eqn):
                return False
            if not _are_arguments(maker.scope, maker.eqn.invars[:1]):
                return False
    return True
