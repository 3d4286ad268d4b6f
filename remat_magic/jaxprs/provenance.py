"""Where the equations of any half come from in the primal program.

Every equation of a forward or backward jaxpr carries the *same traceback object* as the primal equation that it was
derived from (measured on jax 0.10.2 and 0.12.0.1), scan bodies, rematerialised and transposed code included. So the
identity of a traceback says where a derived equation comes from, even where JAX has inlined the call around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.spans import Frames, Spans
from remat_magic.jaxprs.walk import multiply
from remat_magic.records import SourceSpan


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
        """The provenance of a derived equation.

        Args:
            eqn: an equation of a forward or backward jaxpr.
            chain: identities of the tracebacks of the equations around it there. Where a body is shared by several
                calls, the provenance whose own chain holds all of these is taken (JAX may have inlined others).
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
