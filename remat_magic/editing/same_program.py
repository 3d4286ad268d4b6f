"""Whether an edited text computes what the user's own does, and has its checkpoints around the operations asked for.

Residuals alone do not tell: a checkpoint on each odd call of twelve equal ones saves as many as one on each even call.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from remat_magic import _jax

__all__ = ["Values"]

_Checkpoints = Counter[frozenset[int]]


class Values:
    """Numbers for the values of programs: two have the same number if the same operations make them of the arguments.

    Names, checkpoints and the calls of jitted functions are looked through.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._scalars: set[int] = set()  # those that are written in the program

    def of(self, closed: Any) -> tuple[list[int], _Checkpoints]:
        """The outputs of a program, and for each of its checkpoints the values that are made in it."""
        checkpoints, arguments = _Checkpoints(), [("argument", i) for i, _ in enumerate(_jax.open_jaxpr(closed).invars)]
        return self._add(closed, [*map(self._number, arguments)], [], checkpoints), checkpoints

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _constant(self, value: Any, aval: Any) -> int:
        is_number = isinstance(value, int | float | complex) or (hasattr(value, "item") and not value.shape)
        if is_number and not isinstance(value, jax.Array):  # whatever its type: a checkpoint makes an array of it
            number = self._number(repr(complex(value)))
            self._scalars.add(number)
            return number
        return self._number(("constant", _jax.type_text(aval), _identity(value)))

    def _add(self, jaxpr: Any, inputs: Sequence[int], made_values: list[int], checkpoints: _Checkpoints) -> list[int]:
        """The outputs of a jaxpr of such inputs; what its operations make is put after ``made_values``."""
        body = _jax.open_jaxpr(jaxpr)
        consts = _jax.consts_of(jaxpr) or [None] * len(body.constvars)
        values = {
            var: self._constant(value, var.aval) for var, value in zip(body.constvars, consts, strict=True)
        } | dict(zip(body.invars, inputs, strict=True))

        def of(atom: Any) -> int:
            return self._constant(atom.val, atom.aval) if _jax.is_literal(atom) else values[atom]

        for eqn in body.eqns:
            operands = [*map(of, eqn.invars)]
            if self._is_seen_through(eqn, operands):
                values[eqn.outvars[0]] = operands[0]
                continue
            bodies, start = _jax.bodies(eqn), len(made_values)
            if len(bodies) == 1 and bodies[0].inlines:
                given = [operands[index] for index in bodies[0].operands if index is not None]
                leaving = self._add(bodies[0].jaxpr, given, made_values, checkpoints)
                results = [leaving[result or 0] for result in bodies[0].results]
                if _jax.is_checkpoint(eqn):
                    checkpoints[frozenset(made_values[start:])] += 1
            else:
                key: Hashable = _jax.primitive_name(eqn), tuple(operands)
                inside = [
                    tuple(self._add(inner.jaxpr, self._inputs(key, which, inner), [], checkpoints))
                    for which, inner in enumerate(bodies)
                ]
                key = key, tuple(inside) or _jax.params_text(eqn)
                results = [self._number((key, i, _jax.type_text(var.aval))) for i, var in enumerate(eqn.outvars)]
                made_values += results
            values.update(zip(eqn.outvars, results, strict=True))
        return [*map(of, body.outvars)]

    def _inputs(self, key: Hashable, which: int, body: _jax.Body) -> list[int]:
        """The inputs of a loop's body, or of a branch, which are other values than those that the equation is given."""
        return [self._number((key, which, i)) for i, _ in enumerate(_jax.open_jaxpr(body.jaxpr).invars)]

    def _is_seen_through(self, eqn: Any, operands: Sequence[int]) -> bool:
        """Whether an equation only names a value, or gives what is written in the program a type."""
        if _jax.checkpoint_name_of(eqn) is not None:
            return True
        return _jax.is_conversion(eqn) and (
            operands[0] in self._scalars or _jax.type_text(eqn.invars[0].aval) == _jax.type_text(eqn.outvars[0].aval)
        )


def _identity(value: Any) -> Hashable:
    """What tells a constant from others of its type: of one that Python made in each trace anew, what it holds."""
    if isinstance(value, jax.Array):
        return id(value)
    return hashlib.blake2b(value.tobytes()).digest() if hasattr(value, "tobytes") else None
