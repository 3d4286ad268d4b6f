"""Walking the equations of a program, those inside others included: all, those that are live, those of a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from remat_magic import _jax
from remat_magic._jax.formulas import is_operation

T = TypeVar("T")
TypeOf = Callable[[Any], Any]
"""Tells the type of a variable or literal, with how it is spread over a mesh."""

own_type: TypeOf = operator.attrgetter("aval")  # that it has itself: what is needed of programs that are on no mesh


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
    tables: dict[tuple[str, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # `chain`: identities of the tracebacks of the enclosing equations, outermost first.
        # `nesting`: the labels of the enclosing loops and calls, and how often they run together.
        # `turns`: the same at least: a loop of unknown length is taken to run once.
        # `consts`: the values of the jaxpr's own constants, as far as they are known.
        # `tables`: what is found once for all calls of one body, by name and the identity of the jaxpr.
        if self.parent is not None and self.body is not None:
            self.chain = (*self.parent.chain, id(_jax.traceback_of(self.eqn)))
            self.tables = self.parent.tables
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
        return self._table(
            "makers", lambda: {var: (eqn, i) for eqn in self.jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        )

    @cached_property
    def inputs(self) -> dict[Any, int]:
        """For each invar its index."""
        return self._table("inputs", lambda: {var: i for i, var in enumerate(self.jaxpr.invars)})

    @cached_property
    def outputs(self) -> set[Any]:
        """The variables that it gives back."""
        return {out for out in self.jaxpr.outvars if not _jax.is_literal(out)}

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
        return self._table("readers", self._readers)

    def _table(self, name: str, make: Callable[[], T]) -> T:
        key = name, id(self.jaxpr)
        if key not in self.tables:
            self.tables[key] = make()
        return self.tables[key]

    def _readers(self) -> dict[Any, list[tuple[Any, int]]]:
        readers: dict[Any, list[tuple[Any, int]]] = {}
        for eqn in self.jaxpr.eqns:
            for i, atom in enumerate(eqn.invars):
                if not isinstance(atom, _jax.Literal):
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
            inside = _jax.bodies(eqn)
            scopes = tuple([Scope(body.jaxpr, self, eqn, body) for body in inside]) if inside else ()
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
    """Every equation of a scope or jaxpr, at any depth, with the scope that it stands in, in program order.

    ``enter`` tells the equations whose bodies are walked too; ``once``: a body that several equations share is walked
    for the first of them alone.
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


class LiveEquations:
    """The equations of a jaxpr, at any depth, that its outputs, or those ``wanted`` of them, depend on.

    Needed because jax_remat3 leaves dead code in backward jaxprs: its ``PrimalLeftTangentRight`` takes the recomputed
    value as a second operand that nothing reads.
    """

    def __init__(self, jaxpr: Any, wanted: Sequence[bool] | None = None) -> None:
        self.everything = True  # whether no equation was found to be dead
        self._live: set[int] = set()
        self._marked: dict[tuple[int, tuple[bool, ...]], list[bool]] = {}  # bodies that several calls share
        self.inputs = self._mark(jaxpr, wanted or [True] * len(jaxpr.outvars))  # those that the outputs depend on

    def __call__(self, eqn: Any) -> bool:
        """Whether the outputs depend on an equation."""
        return id(eqn) in self._live

    def _mark(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        """Mark what the wanted outputs need; says which of the invars they need."""
        needed = {out for out, want in zip(jaxpr.outvars, wanted, strict=True) if want and not _jax.is_literal(out)}
        for eqn in reversed(jaxpr.eqns):
            if needed.isdisjoint(eqn.outvars) and not eqn.effects:
                self.everything = False
                continue
            self._live.add(id(eqn))
            if _jax.is_plain(eqn):
                needed.update(_jax.read_by(eqn))
                continue
            outputs = [var in needed for var in eqn.outvars]
            for operand, read in zip(eqn.invars, self._operands(eqn, outputs), strict=True):
                if read and not _jax.is_literal(operand):
                    needed.add(operand)
        return [var in needed for var in jaxpr.invars]

    def _mark_body(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        key = (id(jaxpr), tuple(wanted))
        needed = self._marked.get(key)
        if needed is None:
            needed = self._marked[key] = self._mark(jaxpr, wanted)
        return needed

    def _operands(self, eqn: Any, outputs: Sequence[bool]) -> list[bool]:
        if _jax.is_primal_left(eqn):
            return [True] + [False] * (len(eqn.invars) - 1)
        if _jax.is_barrier(eqn):  # each output is its own operand
            return list(outputs)
        inside = _jax.bodies(eqn)
        if not inside or any(None in body.operands for body in inside):
            for body in inside:
                self._mark_body(body.jaxpr, [True] * len(body.jaxpr.outvars))
            return [True] * len(eqn.invars)
        read = [False] * len(eqn.invars)
        entering = {operand for body in inside for operand in body.operands}
        for index in range(len(eqn.invars)):
            read[index] = index not in entering  # the predicate of a cond
        # A loop's condition, of which no output is the loop's, comes first.
        for body in sorted(inside, key=lambda body: any(result is not None for result in body.results)):
            self._mark_call(body, outputs, read)
        return read

    def _mark_call(self, body: _jax.Body, outputs: Sequence[bool], read: list[bool]) -> None:
        """Mark what the wanted outputs of an equation need in a body of it, and add the operands that it reads."""
        wanted = [all(result is None for result in body.results)] * len(body.jaxpr.outvars)
        for output, result in enumerate(body.results):
            if result is not None and outputs[output]:
                wanted[result] = True
        for out, carried in body.carries:  # the next iteration's condition reads it
            operand = body.operands[carried]
            wanted[out] = wanted[out] or (operand is not None and read[operand])
        while True:
            used = self._mark_body(body.jaxpr, wanted)
            more = [out for out, carried in body.carries if used[carried] and not wanted[out]]
            if not more:
                break
            for out in more:
                wanted[out] = True
        # A loop that may not run at all gives back what it began with.
        first = {carried for out, carried in body.carries if wanted[out] and not body.times}
        for index, operand in enumerate(body.operands):
            if operand is not None and (used[index] or index in first):
                read[operand] = True


def last_reads(eqns: Sequence[Any], outputs: Sequence[Any]) -> dict[Any, int]:
    """For each variable the number of the last equation that reads it; of what is given back, that after the last."""
    last = {atom: n for n, eqn in enumerate(eqns) for atom in eqn.invars if not _jax.is_literal(atom)}
    return last | {atom: len(eqns) for atom in outputs if not _jax.is_literal(atom)}


# ------------------------------------------------------------------------------- what makes a value, and what reads it


@dataclass(frozen=True, slots=True)
class Maker:
    """The equation that really made a value (None: ``argument`` or ``constant`` of the whole program instead).

    ``names`` are the checkpoint names met on the way, ``copied`` tells that a loop stacked or carried the value on the
    way, so that it is a buffer of its own even if it began as an argument.
    """

    scope: Scope
    eqn: Any = None
    output: int = 0
    argument: int | None = None
    constant: int | None = None
    literal: bool = False
    names: tuple[str, ...] = ()
    copied: bool = False


def makers(scope: Scope, atom: Any) -> list[Maker]:
    """All the equations that can have made a value, in program order of discovery, each once.

    Loops and branches make several: a saved carry is the previous iteration's value or the initial operand, and the
    branches of a cond share their outputs.
    """
    if not _jax.is_literal(atom) and (definition := scope.makers.get(atom)) is not None:
        eqn, output = definition
        if not _jax.is_transparent(eqn) and not scope.inner(eqn):  # as most are
            return [Maker(scope, eqn, output)]
    origins: dict[tuple[int, int, int, int], Maker] = {}
    seen: set[tuple[int, int]] = set()
    todo: list[tuple[Scope, Any, tuple[str, ...], bool]] = [(scope, atom, (), False)]

    def record(maker: Maker) -> None:
        key = (
            id(maker.eqn),
            maker.output,
            -1 if maker.argument is None else maker.argument,
            -1 if maker.constant is None else maker.constant,
        )
        origins.setdefault(key, maker)

    while todo:
        here, value, names, copied = todo.pop()
        if _jax.is_literal(value):
            record(Maker(here, literal=True, names=names, copied=copied))
            continue
        if (id(here), id(value)) in seen:
            continue
        seen.add((id(here), id(value)))
        definition = here.makers.get(value)
        if definition is None:
            todo.extend(_outward(here, value, names, copied, record))
            continue
        eqn, output = definition
        if _jax.is_transparent(eqn):
            name = _jax.checkpoint_name_of(eqn)
            operand = eqn.invars[output if len(eqn.outvars) == len(eqn.invars) else 0]
            todo.append((here, operand, names if name is None else (*names, name), copied))
            continue
        entered = False
        for inner in () if is_operation(eqn) else reversed(here.inner(eqn)):  # a scatter's jaxpr is of single elements
            body = inner.body
            assert body is not None
            result = body.results[output] if output < len(body.results) else None
            if result is not None:
                todo.append((inner, inner.jaxpr.outvars[result], names, copied or body.kind != "call"))
                entered = True
        if not entered:
            record(Maker(here, eqn, output, names=names, copied=copied))
    return [maker for maker in origins.values() if not _is_placeholder(maker)] or list(origins.values())


def _is_placeholder(maker: Maker) -> bool:
    """Whether a value, or what it is a broadcast of, stands in for one that only another branch makes."""
    eqn: Any = maker.eqn
    while eqn is not None and _jax.is_broadcast(eqn) and not _jax.is_literal(eqn.invars[0]):
        eqn = maker.scope.makers.get(eqn.invars[0], (None, 0))[0]
    return eqn is not None and _jax.is_placeholder(eqn)


def _outward(
    here: Scope, value: Any, names: tuple[str, ...], copied: bool, record: Callable[[Maker], None]
) -> Iterator[tuple[Scope, Any, tuple[str, ...], bool]]:
    """From an input of a body to what it is outside, and around a loop to what it was an iteration ago."""
    index = here.inputs.get(value)
    if here.parent is None and index is not None:
        record(Maker(here, argument=index, names=names, copied=copied))
    elif index is None:  # inside a body it is none of the whole program's
        constant = here.constants.get(value, 0) if here.parent is None else -1
        record(Maker(here, constant=constant, names=names, copied=copied))
    else:
        # The last one put on the stack is followed first: the previous iteration's value before the initial operand.
        in_loop = here.body is not None and here.body.kind == "loop"
        for scope, atom in here.before.get(value, ()):
            yield scope, atom, names, copied or scope is here or in_loop


def readers(scope: Scope, var: Any, live: Callable[[Any], bool] = lambda eqn: True) -> list[tuple[Scope, Any]]:
    """All the live operations that read a value of a scope, through names, barriers and bodies; each once."""
    return list({id(eqn): (here, eqn) for here, eqn in _onward(scope, [var], live)}.values())


def dependents(scope: Scope, variables: Iterable[Any]) -> set[tuple[int, int]]:
    """All the equations, at any depth, that depend on some variables of a scope: each by its scope's and its own id."""
    return {(id(here), id(eqn)) for here, eqn in _onward(scope, variables, lambda eqn: True, through=True)}


def _onward(
    scope: Scope, variables: Iterable[Any], live: Callable[[Any], bool], *, through: bool = False
) -> Iterator[tuple[Scope, Any]]:
    """The live equations that read some values; ``through``: also those that read what these make, and so on.

    Without that, what computes nothing and what only hands a value on to its body are no readers.
    """
    seen: set[tuple[int, int]] = set()
    todo = [(scope, var) for var in variables]
    while todo:
        here, value = todo.pop()
        if (id(here), id(value)) in seen:
            continue
        seen.add((id(here), id(value)))
        for eqn, operand in here.readers.get(value, ()):
            if not live(eqn) or (operand > 0 and _jax.is_primal_left(eqn)):
                continue
            inside, transparent = here.inner(eqn), _jax.is_transparent(eqn)
            if not (inside or transparent):
                yield here, eqn
                todo += [(here, var) for var in eqn.outvars] if through else ()
                continue
            entries = (operand, None) if through else (operand,)  # None: nobody knows which operand enters there
            entered = [(inner, var) for inner in inside for entry in entries for var in inner.entered_by.get(entry, ())]
            if transparent:
                passed = [eqn.outvars[operand if len(eqn.outvars) == len(eqn.invars) else 0]]
            elif through:
                passed = [var for inner in inside for var in inner.unknown_results] if entered else eqn.outvars
            else:
                passed = []
            if through or not (entered or passed):
                yield here, eqn
            todo += entered
            todo += [(here, var) for var in passed]
        todo += here.after.get(value, ())  # a value that a body passes through is read outside, or an iteration later
