"""A jaxpr as a straight line of operations: calls taken in, views looked through, each shared body looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.formulas import is_operation
from remat_magic._jax.primitives import VIEWS
from remat_magic.jaxprs.walk import TypeOf, own_type

LITERAL = 0
"""The value of every operand that is written in the jaxpr."""


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """An equation that is one step, with the bodies that it runs, if any; ``leaves``: its result is its jaxpr's."""

    eqn: Any
    name: str
    bodies: tuple[_jax.Body, ...]
    leaves: bool


class Line(NamedTuple):
    """An operation with the values that it reads and makes, one for each operand and result of its equation."""

    operation: Operation
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(eq=False, slots=True)
class StraightLine:
    """The lines of a jaxpr on numbered values.

    The ``inputs`` are the first after ``LITERAL``. ``types`` has the type of every value, ``constants`` what makes each
    constant one with another, and ``free`` the values that take no operation: literals that a call is given, and what
    dead code would have made. ``ends`` counts the lines up to the end of each equation of the jaxpr. ``apart`` has the
    values that a checkpoint makes, which its barriers keep apart from equal ones; ``fused_away`` is for who finds it.
    """

    lines: list[Line] = field(default_factory=list)
    types: list[Any] = field(default_factory=lambda: [None])
    constants: dict[int, int] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    ends: list[int] = field(default_factory=list)
    apart: set[int] = field(default_factory=set)
    fused_away: tuple[set[int], set[int]] | None = None

    def value(self, aval: Any) -> int:
        """A new value of a type."""
        self.types.append(aval)
        return len(self.types) - 1

    def constant(self, aval: Any, key: int) -> int:
        """The constant of a key."""
        if key not in self.constants:
            self.constants[key] = self.value(aval)
        return self.constants[key]

    def without_operation(self, aval: Any) -> int:
        """A new value that takes no operation."""
        number = self.value(aval)
        self.free.add(number)
        return number

    def take_in(self, call: StraightLine, operands: Sequence[int]) -> list[int]:
        """Append a called body's lines; the number here of each value there."""
        first = 1 + len(operands)
        shift = len(self.types) - first
        here = [LITERAL, *operands, *range(len(self.types), shift + len(call.types))]
        self.types += call.types[first:]
        for key, number in call.constants.items():
            here[number] = self.constants.setdefault(key, here[number])
        self.free.update(here[number] for number in call.free)
        self.apart.update(here[number] for number in call.apart)
        renumber = here.__getitem__
        self.lines += [
            Line(operation, tuple(map(renumber, reads)), tuple(map(renumber, makes)))
            for operation, reads, makes in call.lines
        ]
        return here

    def merge(self) -> None:
        """Leave out each line that does what one before it does, on the same values."""
        before: dict[tuple[str, tuple[int, ...]], list[Line]] = {}
        instead: dict[int, int] = {}
        lines: list[Line] = []
        left = [0]  # the lines that are left of the first so many
        for operation, reads, makes in self.lines:
            line = Line(operation, tuple([instead.get(number, number) for number in reads]), makes)
            equal: Line | None = None
            if not operation.bodies and not operation.eqn.effects and self.apart.isdisjoint(makes):
                alike = before.setdefault((operation.name, line.reads), [])
                equal = next((other for other in alike if _jax.do_the_same(operation.eqn, other.operation.eqn)), None)
                if equal is None:
                    alike.append(line)
            if equal is None:
                lines.append(line)
            else:
                instead.update(zip(makes, equal.makes, strict=True))
            left.append(len(lines))
        self.lines, self.ends = lines, [left[end] for end in self.ends]
        self.outputs = tuple(instead.get(number, number) for number in self.outputs)


class StraightLines:
    """The straight lines of the live code of jaxprs, each jaxpr's made once.

    ``live`` tells an equation that matters from dead code (all do if None), ``whole`` a call that is one step, and not
    taken in. ``merges``: operations that do the same are one, as XLA eliminates common subexpressions.
    """

    def __init__(
        self,
        live: Callable[[Any], bool] | None = None,
        whole: Callable[[Any], bool] = lambda _: False,
        type_of: TypeOf = own_type,
        *,
        merges: bool = False,
    ) -> None:
        self.live = live
        self._merges = merges
        self.type_of = type_of
        self._whole = whole
        self._made: dict[int, tuple[Any, StraightLine]] = {}  # by the identity of the jaxpr, which stays alive so

    def __call__(self, jaxpr: Any, consts: Sequence[Any] | None = None) -> StraightLine:
        """The straight line of a jaxpr, open or closed; ``consts`` are the constants of an open one."""
        body = _jax.open_jaxpr(jaxpr)
        key = id(body)
        if key not in self._made:
            self._made[key] = body, self._flatten(body, _jax.consts_of(jaxpr) if consts is None else consts)
        return self._made[key][1]

    def _flatten(self, body: Any, consts: Sequence[Any]) -> StraightLine:
        flat = StraightLine()
        numbers: dict[Any, int] = {var: flat.value(self.type_of(var)) for var in body.invars}
        flat.inputs = tuple(range(1, 1 + len(body.invars)))
        for var, key in _jax.constant_keys(body, consts).items():
            numbers[var] = flat.constant(self.type_of(var), key)
        leaving = {atom for atom in body.outvars if not _jax.is_literal(atom)}

        def number(atom: Any) -> int:
            assigned = None if isinstance(atom, _jax.Literal) else numbers.get(atom)
            return flat.without_operation(atom.aval) if assigned is None else assigned

        for eqn in body.eqns:
            if self.live is None or self.live(eqn):
                self._add(flat, eqn, numbers, number, leaving)
            flat.ends.append(len(flat.lines))
        flat.outputs = tuple(map(number, body.outvars))
        if self._merges:
            flat.merge()
        return flat

    def _add(
        self, flat: StraightLine, eqn: Any, numbers: dict[Any, int], number: Callable[[Any], int], leaving: set[Any]
    ) -> None:
        name = _jax.primitive_name(eqn)
        if name in VIEWS:
            paired = len(eqn.invars) == len(eqn.outvars)
            for index, var in enumerate(eqn.outvars):
                numbers[var] = number(eqn.invars[index if paired else 0] if eqn.invars else var)
            return
        inside = () if is_operation(eqn) or self._whole(eqn) else _jax.bodies(eqn)
        if len(inside) == 1 and inside[0].inlines:
            (body,) = inside
            called = self(body.jaxpr, body.consts)
            here = flat.take_in(called, [number(eqn.invars[index]) for index in body.operands if index is not None])
            if self._merges and _jax.is_checkpoint(eqn):
                flat.apart.update(here[value] for line in called.lines for value in line.makes)
            for var, result in zip(eqn.outvars, body.results, strict=True):
                numbers[var] = here[called.outputs[result or 0]]
            return
        reads = tuple([LITERAL if isinstance(atom, _jax.Literal) else number(atom) for atom in eqn.invars])
        makes = tuple([flat.value(self.type_of(var)) for var in eqn.outvars])
        numbers.update(zip(eqn.outvars, makes, strict=True))
        operation = Operation(eqn, _jax.kernel_name(eqn), inside, not leaving.isdisjoint(eqn.outvars))
        flat.lines.append(Line(operation, reads, makes))
