"""Following a value through a jaxpr: back to what made it, and on to what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax
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
        for inner in reversed(here.inner(eqn)):
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
    if here.parent is None:
        if index is not None:
            record(Maker(here, argument=index, names=names, copied=copied))
        else:
            constants = list(here.jaxpr.constvars)
            record(
                Maker(here, constant=constants.index(value) if value in constants else 0, names=names, copied=copied)
            )
        return
    body = here.body
    assert body is not None
    if index is None:  # a constant inside a body
        record(Maker(here, constant=-1, names=names, copied=copied))
        return
    loop = body.kind == "loop"
    # The last one put on the stack is followed first: the previous iteration's value before the initial operand.
    operand = body.operands[index] if index < len(body.operands) else None
    if operand is not None:
        yield here.parent, here.eqn.invars[operand], names, copied or loop
    for output, carried in body.carries:
        if carried == index:
            yield here, here.jaxpr.outvars[output], names, True


def readers(scope: Scope, var: Any, live: Callable[[Any], bool] = lambda eqn: True) -> list[tuple[Scope, Any]]:
    """All the operations that read a value, looked for through names, barriers and bodies; each once.

    Args:
        scope: where the value is bound.
        var: the variable.
        live: tells an equation that matters from dead code.
    """
    operations: dict[int, tuple[Scope, Any]] = {}
    seen: set[tuple[int, int]] = set()
    todo: list[tuple[Scope, Any]] = [(scope, var)]
    while todo:
        here, value = todo.pop()
        if (id(here), id(value)) in seen:
            continue
        seen.add((id(here), id(value)))
        for eqn, operand in here.readers.get(value, ()):
            if not live(eqn) or (_jax.is_primal_left(eqn) and operand > 0):
                continue
            if _jax.is_transparent(eqn):
                output = operand if len(eqn.outvars) == len(eqn.invars) else 0
                todo.append((here, eqn.outvars[output]))
                continue
            inside = here.inner(eqn)
            entered = False
            for inner in inside:
                assert inner.body is not None
                for index, outer in enumerate(inner.body.operands):
                    if outer == operand:
                        todo.append((inner, inner.jaxpr.invars[index]))
                        entered = True
            if not entered:
                operations.setdefault(id(eqn), (here, eqn))
        if here.parent is not None:
            _leave(here, value, todo)
    return list(operations.values())


def _leave(here: Scope, value: Any, todo: list[tuple[Scope, Any]]) -> None:
    """A value that a body passes through unchanged is read outside, or an iteration later."""
    body = here.body
    assert body is not None
    for index, out in enumerate(here.jaxpr.outvars):
        if out is not value:
            continue
        for output, result in enumerate(body.results):
            if result == index and output < len(here.eqn.outvars) and here.parent is not None:
                todo.append((here.parent, here.eqn.outvars[output]))
        for carried_out, carried_in in body.carries:
            if carried_out == index:
                todo.append((here, here.jaxpr.invars[carried_in]))
