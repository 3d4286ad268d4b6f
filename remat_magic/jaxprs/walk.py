"""Walking the equations of a program, those inside other equations included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat_magic import _jax


def multiply(times: int | None, more: int | None) -> int | None:
    """The product of two counts; unknown if either is."""
    return None if times is None or more is None else times * more


@dataclass(eq=False)
class Scope:
    """A jaxpr in its surroundings: the equation and body that it is, and the scope around that equation."""

    jaxpr: Any
    parent: Scope | None = None
    eqn: Any = None
    body: _jax.Body | None = None
    _inner: dict[int, tuple[Scope, ...]] = field(default_factory=dict)
    chain: tuple[int, ...] = ()
    nesting: tuple[tuple[str, ...], int | None] = ((), 1)
    turns: int = 1
    consts: Sequence[Any] = ()

    def __post_init__(self) -> None:
        # `chain`: identities of the tracebacks of the enclosing equations, outermost first.
        # `nesting`: the labels of the enclosing loops and calls, and how often they run together.
        # `turns`: the same at least: a loop of unknown length is taken to run once.
        # `consts`: the values of the jaxpr's own constants, as far as they are known.
        if self.parent is not None and self.body is not None:
            self.chain = (*self.parent.chain, id(_jax.traceback_of(self.eqn)))
            path, times = self.parent.nesting
            label, self.consts = self.body.label, self.body.consts
            self.nesting = (
                path if not label or path[-1:] == (label,) else (*path, label),
                multiply(times, self.body.times),
            )
            self.turns = self.parent.turns * (1 if self.body.times is None else self.body.times)

    @cached_property
    def makers(self) -> dict[Any, tuple[Any, int]]:
        """For each variable the equation that makes it and the output's index there."""
        return {var: (eqn, i) for eqn in self.jaxpr.eqns for i, var in enumerate(eqn.outvars)}

    @cached_property
    def inputs(self) -> dict[Any, int]:
        """For each invar its index."""
        return {var: i for i, var in enumerate(self.jaxpr.invars)}

    @cached_property
    def constants(self) -> dict[Any, int]:
        """For each constvar its index."""
        return {var: i for i, var in enumerate(self.jaxpr.constvars)}

    @cached_property
    def constant_keys(self) -> dict[Any, int]:
        """For each constvar what tells its value from others."""
        return _jax.constant_keys(self.jaxpr, self.consts)

    @cached_property
    def readers(self) -> dict[Any, list[tuple[Any, int]]]:
        """For each variable the equations that read it, with the operand's index."""
        readers: dict[Any, list[tuple[Any, int]]] = {}
        for eqn in self.jaxpr.eqns:
            for i, atom in enumerate(eqn.invars):
                if not _jax.is_literal(atom):
                    readers.setdefault(atom, []).append((eqn, i))
        return readers

    @cached_property
    def entered_by(self) -> dict[int | None, list[Any]]:
        """For each operand of the equation around the body the invars that it becomes."""
        entered: dict[int | None, list[Any]] = {}
        for var, operand in zip(self.jaxpr.invars, self.body.operands if self.body else (), strict=False):
            entered.setdefault(operand, []).append(var)
        return entered

    @property
    def unknown_results(self) -> list[Any]:
        """The results of the equation around the body of which it is not known what they are in the body."""
        results = self.body.results if self.body else ()
        return [var for var, result in zip(self.eqn.outvars, results, strict=False) if result is None]

    @cached_property
    def before(self) -> dict[Any, list[tuple[Scope, Any]]]:
        """For each invar of a body the operand that it is outside, and the output that it was an iteration ago."""
        before: dict[Any, list[tuple[Scope, Any]]] = {}
        if self.parent is not None and self.body is not None:
            for operand, variables in self.entered_by.items():
                if operand is not None:
                    before.update((var, [(self.parent, self.eqn.invars[operand])]) for var in variables)
            for output, carried in self.body.carries:
                before.setdefault(self.jaxpr.invars[carried], []).append((self, self.jaxpr.outvars[output]))
        return before

    @cached_property
    def after(self) -> dict[Any, list[tuple[Scope, Any]]]:
        """For each output of a body the result that it is outside, and the invar that it is an iteration later."""
        after: dict[Any, list[tuple[Scope, Any]]] = {}
        if self.parent is not None and self.body is not None:
            outputs = self.jaxpr.outvars
            passed = [
                *((r, self.parent, var) for r, var in zip(self.body.results, self.eqn.outvars, strict=False)),
                *((output, self, self.jaxpr.invars[carried]) for output, carried in self.body.carries),
            ]
            for output, scope, var in passed:
                if output is not None and not _jax.is_literal(outputs[output]):
                    after.setdefault(outputs[output], []).append((scope, var))
        return after

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

    return visit(top if isinstance(top, Scope) else Scope(_jax.open_jaxpr(top), consts=_jax.consts_of(top)))


def leaves(scope: Scope, eqn: Any) -> Iterator[tuple[Scope, Any]]:
    """The equations without bodies inside an equation of a scope, or itself, with their scopes."""
    if not scope.inner(eqn):
        yield scope, eqn
    for inner in scope.inner(eqn):
        yield from ((around, leaf) for around, leaf in walk(inner) if not around.inner(leaf))


def scopes(top: Any, enter: Callable[[Any], bool] = lambda _: True) -> Iterator[Scope]:
    """Every jaxpr at any depth, where it stands, in program order; arguments are those of ``walk``."""
    scope = top if isinstance(top, Scope) else Scope(_jax.open_jaxpr(top), consts=_jax.consts_of(top))
    yield scope
    for eqn in scope.jaxpr.eqns:
        for inner in scope.inner(eqn) if enter(eqn) else ():
            yield from scopes(inner, enter)
