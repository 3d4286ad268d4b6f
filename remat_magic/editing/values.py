"""Which values of a program a name is given to, told in a way that is the same however the program is named.

Names compute nothing. Leave them out, and a program whose values a plan names, one whose expressions are named for a
probe, and the program itself are the same operations in the same order: a value is known by the number of the operation
that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax

__all__ = ["Skeleton", "Value", "skeleton"]

Value = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Skeleton:
    """A program without names.

    Attributes:
        operations: of each the primitive and the types of its outputs.
        names: for each name the values that it is given to, in the order of the program, and whether one of the
            checkpoints that were asked about is around them there.
        types: of each named value, as JAX writes it.
    """

    operations: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    names: dict[str, dict[Value, bool]] = field(default_factory=dict)
    types: dict[Value, str] = field(default_factory=dict)


def skeleton(closed: Any, within: Callable[[Any], bool] | None, given: Callable[[str], bool]) -> Skeleton:
    """Number the operations of a program, and find what its names are given to.

    Args:
        closed: a closed jaxpr.
        within: tells the checkpoint equations that are asked about; None where it is the whole program.
        given: tells the names that do not belong to the program itself.
    """
    walker = _Walker(within, given)
    jaxpr = _jax.open_jaxpr(closed)
    walker.visit(jaxpr, [("argument", i) for i, _ in enumerate(jaxpr.invars)], within is None)
    return walker.found


class _Walker:
    def __init__(self, within: Callable[[Any], bool] | None, given: Callable[[str], bool]) -> None:
        self.found = Skeleton()
        self._within, self._given = within or (lambda _: False), given

    def visit(self, jaxpr: Any, inputs: list[Value], inside: bool) -> list[Value]:
        number = len(self.found.operations)
        values: dict[Any, Value] = {var: ("constant", number, i) for i, var in enumerate(jaxpr.constvars)}
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Value:
            return ("literal",) if _jax.is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            name = _jax.checkpoint_name_of(eqn)
            if name is not None:
                value = values[eqn.outvars[0]] = of(eqn.invars[0])
                here = self.found.names.setdefault(name, {})
                here[value] = here.get(value, False) or inside
                self.found.types[value] = _jax.type_text(eqn.outvars[0].aval)
            if name is None or not self._given(name):
                results = self._operation(eqn, [of(atom) for atom in eqn.invars], inside)
                if name is None:
                    values.update(zip(eqn.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def _operation(self, eqn: Any, operands: list[Value], inside: bool) -> list[Value]:
        number = len(self.found.operations)
        types = tuple(_jax.type_text(var.aval) for var in eqn.outvars)
        self.found.operations.append((_jax.primitive_name(eqn), types))
        results: list[Value] = [("operation", number, i) for i, _ in enumerate(eqn.outvars)]
        deeper = inside or (_jax.is_checkpoint(eqn) and self._within(eqn))
        for which, body in enumerate(_jax.bodies(eqn)):
            # A loop's inputs are other values in each iteration; those of a call are what it is called with.
            inputs: list[Value] = [
                ("input", number, which, i) if body.kind == "loop" or operand is None else operands[operand]
                for i, operand in enumerate(body.operands)
            ]
            made = self.visit(body.jaxpr, inputs, deeper)
            if body.kind == "call":
                for i, result in enumerate(body.results):
                    if result is not None:
                        results[i] = made[result]
        return results
