"""Following a value through a jaxpr: back to what made it, and on to what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax
from remat_magic._jax.formulas import is_operation
from remat_magic.jaxprs.walk import Scope


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
    """All the operations that read a value, looked for through names, barriers and bodies; each once.

    Args:
        scope: where the value is bound.
        var: the variable.
        live: tells an equation that matters from dead code.
    """
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
            if not live(eqn) or (_jax.is_primal_left(eqn) and operand > 0):
                continue
            inside = here.inner(eqn)
            entries = (operand, None) if through else (operand,)  # None: nobody knows which operand enters there
            entered = [(inner, var) for inner in inside for entry in entries for var in inner.entered_by.get(entry, ())]
            if _jax.is_transparent(eqn):
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
