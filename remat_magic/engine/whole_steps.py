"""A training step as one program under a policy: the calls that stand for its gradients filled with their halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic.engine.gradients import half_of
from remat_magic.engine.halves import Forward
from remat_magic.engine.sites import inlined, renamed_atom
from remat_magic.jaxprs.values import is_inexact

__all__ = ["Filling", "Halves"]


class Halves(NamedTuple):
    """Both halves of one gradient under a policy; ``backward`` is closed."""

    forward: Forward
    backward: Any


class Filling:
    """Puts the halves of gradients in the place of their calls, at any depth.

    Args:
        halves: by the number of the call.

    Attributes:
        saved: the variables that hold residuals.
        gradients: those that hold gradients.
        forward: the equations of forward halves by identity, with what is in them.
        backward: those of backward halves.
        constants: what the halves have captured.
    """

    def __init__(self, halves: Mapping[int, Halves]) -> None:
        self._halves = halves
        self._done: dict[int, tuple[Any, Any]] = {}
        self.saved: set[Any] = set()
        self.gradients: set[Any] = set()
        self.forward: set[int] = set()
        self.backward: set[int] = set()
        self.constants: list[Any] = []

    def __call__(self, jaxpr: Any) -> Any:
        """The jaxpr with its gradients filled in, itself where it takes none."""
        cached = self._done.get(id(jaxpr))
        if cached is None:
            cached = self._done[id(jaxpr)] = (jaxpr, self._filled(jaxpr))  # keeps it alive: identities are reused
        return cached[1]

    def _filled(self, jaxpr: Any) -> Any:
        old = _jax.open_jaxpr(jaxpr)
        eqns: list[Any] = []
        renamed: dict[Any, Any] = {}
        residuals: dict[Any, list[Any]] = {}  # by the variable that links the halves
        for eqn in old.eqns:
            operands = [renamed_atom(renamed, atom) for atom in eqn.invars]
            part = half_of(eqn)
            if part is None:
                if renamed:
                    eqn = eqn.replace(invars=operands)
                eqns.append(_jax.map_jaxprs(eqn, self))
                continue
            half, number = part
            forward, backward = self._halves[number]
            begin = len(eqns)
            if half == "forward":
                body = _jax.open_jaxpr(forward.closed)
                results = inlined(body, operands[len(operands) - len(body.invars) :], eqns)
                residuals[eqn.outvars[-1]] = results[forward.outputs :]
                self.saved.update(atom for atom in results[forward.outputs :] if not _jax.is_literal(atom))
                renamed.update(zip(eqn.outvars[:-1], results[: forward.outputs], strict=True))
                self.forward.update(map(id, eqns[begin:]))
                self.constants += _jax.consts_of(forward.closed)
            else:
                count = len(forward.output_types)
                cotangents = [
                    atom
                    for atom, aval in zip(operands[len(operands) - count :], forward.output_types, strict=True)
                    if is_inexact(aval)
                ]
                link = next(atom for atom in eqn.invars if not _jax.is_literal(atom) and atom in residuals)
                gradients = inlined(_jax.open_jaxpr(backward), [*residuals[link], *cotangents], eqns)
                self.gradients.update(atom for atom in gradients if not _jax.is_literal(atom))
                renamed.update(zip(eqn.outvars, gradients, strict=True))
                self.backward.update(map(id, eqns[begin:]))
                self.constants += _jax.consts_of(backward)
        if not renamed and all(new is eqn for new, eqn in zip(eqns, old.eqns, strict=True)):
            return jaxpr
        outvars = [renamed_atom(renamed, atom) for atom in old.outvars]
        return _jax.with_body(jaxpr, _jax.replace_eqns(old, eqns, outvars))
