"""Walking the equations of a program, those inside other equations included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax


def multiply(times: int | None, more: int | None) -> int | None:
    """The product of two counts; unknown if either is."""
    return None if times is None or more is None else times * more


@dataclass(eq=False, slots=True)
class Scope:
    """A jaxpr in its surroundings: the equation and body that it is, and the scope around that equation."""

    jaxpr: Any
    parent: Scope | None = None
    eqn: Any = None
    body: _jax.Body | None = None
    _makers: dict[Any, tuple[Any, int]] | None = None
    _inputs: dict[Any, int] | None = None
    _readers: dict[Any, list[tuple[Any, int]]] | None = None
    _inner: dict[int, tuple[Scope, ...]] = field(default_factory=dict)
    chain: tuple[int, ...] = ()
    nesting: tuple[tuple[str, ...], int | None] = ((), 1)
    turns: int = 1

    def __post_init__(self) -> None:
        # `chain`: identities of the tracebacks of the enclosing equations, outermost first.
        # `nesting`: the labels of the enclosing loops and calls, and how often they run together.
        # `turns`: the same at least: a loop of unknown length is taken to run once.
        if self.parent is not None and self.body is not None:
            self.chain = (*self.parent.chain, id(_jax.traceback_of(self.eqn)))
            path, times = self.parent.nesting
            label = self.body.label
            self.nesting = (
                path if not label or path[-1:] == (label,) else (*path, label),
                multiply(times, self.body.times),
            )
            self.turns = self.parent.turns * (1 if self.body.times is None else self.body.times)

    @property
    def makers(self) -> dict[Any, tuple[Any, int]]:
        """For each variable the equation that makes it and the output's index there."""
        if self._makers is None:
            self._makers = {var: (eqn, i) for eqn in self.jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        return self._makers

    @property
    def inputs(self) -> dict[Any, int]:
        """For each invar its index."""
        if self._inputs is None:
            self._inputs = {var: i for i, var in enumerate(self.jaxpr.invars)}
        return self._inputs

    @property
    def readers(self) -> dict[Any, list[tuple[Any, int]]]:
        """For each variable the equations that read it, with the operand's index."""
        if self._readers is None:
            self._readers = {}
            for eqn in self.jaxpr.eqns:
                for i, atom in enumerate(eqn.invars):
                    if not _jax.is_literal(atom):
                        self._readers.setdefault(atom, []).append((eqn, i))
        return self._readers

    def inner(self, eqn: Any) -> tuple[Scope, ...]:
        """The scopes inside an equation of this one."""
        scopes = self._inner.get(id(eqn))
        if scopes is None:
            scopes = tuple(Scope(body.jaxpr, self, eqn, body) for body in _jax.bodies(eqn))
            self._inner[id(eqn)] = scopes
        return scopes

    @property
    def times(self) -> int | None:
        """How often the jaxpr runs in the whole program; None in a loop of unknown length."""
        return self.nesting[1]

    def around(self) -> Iterator[Any]:
        """The equations that the jaxpr is inside of, innermost first."""
        scope: Scope | None = self
        while scope is not None and scope.eqn is not None:
            yield scope.eqn
            scope = scope.parent


def walk(top: Any, enter: Callable[[Any], bool] = lambda _: True, *, once: bool = False) -> Iterator[tuple[Scope, Any]]:
    """Every equation at any depth with the scope that it stands in, in program order.

    Args:
        top: a scope, or a jaxpr, open or closed.
        enter: tells the equations whose bodies are walked too.
        once: walk a body that several equations share for the first of them alone.
    """
    seen: set[int] = set()

    def visit(scope: Scope) -> Iterator[tuple[Scope, Any]]:
        for eqn in scope.jaxpr.eqns:
            yield scope, eqn
            for inner in scope.inner(eqn) if enter(eqn) else ():
                if not (once and id(inner.jaxpr) in seen):
                    seen.add(id(inner.jaxpr))
                    yield from visit(inner)

    return visit(top if isinstance(top, Scope) else Scope(_jax.open_jaxpr(top)))
