"""What stands in for JAX's own functions in a retrace makes the same jaxprs, to the last traceback and name stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

import remat_magic as rm
from remat_magic import _compat
from remat_magic.analysis.bodies import bodies
from remat_magic.analysis.index import PrimalIndex
from tests.programs import PROGRAMS

P = jax.checkpoint_policies
CHOICES: tuple[tuple[Any, str], ...] = (
    ("none", "function"),
    (P.nothing_saveable, "function"),
    (P.dots_saveable, "function"),
    (P.everything_saveable, "function"),
    (P.offload_dot_with_no_batch_dims("device", "pinned_host"), "function"),
    (P.dots_with_no_batch_dims_saveable, "sites"),
)


def equations(jaxpr: Any, index: PrimalIndex) -> Iterator[tuple[Any, ...]]:
    """Every equation at any depth by what its text does not tell: where it comes from, and its exact types."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        types = tuple((str(atom.aval), getattr(atom.aval, "weak_type", None)) for atom in (*eqn.invars, *eqn.outvars))
        # JAX gives what it adds itself a traceback of the retrace; all others are those of the program.
        origin = id(_compat.traceback_of(eqn)) if index.place(eqn) else index.spans.of(_compat.traceback_of(eqn))
        yield eqn.primitive.name, origin, _compat.name_stack(eqn), types, str(eqn.ctx), str(eqn.effects)
        for body in bodies(eqn):
            yield from equations(body.jaxpr, index)


def halves(trace: rm.Trace, policy: Any, at: str) -> list[Any]:
    """Both halves of a policy, or what JAX said instead."""
    made: list[Any] = []
    for half in (trace.forward, trace.backward):
        try:
            closed = half(policy, at)
        except rm.RematError as error:
            made.append((str(error), str(error.__cause__), repr(error.__cause__ and error.__cause__.__cause__)))
            continue
        made.append(
            (_compat.pretty(closed), list(equations(closed, trace.index)), [str(aval) for aval in closed.out_avals])
        )
    return made


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_halves_are_those_that_jax_makes_by_itself(program, remat3):
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    choices = [choice for choice in CHOICES if choice[1] != "sites" or trace.sites]
    assert trace._primal._generation.quick  # on every JAX that these tests run on
    ours = [halves(trace, *choice) for choice in choices]
    trace._retraces.clear()
    # Under a new number nothing of what JAX has cached of the first time is found.
    trace._primal._generation = _compat.Generation(quick=False)
    assert ours == [halves(trace, *choice) for choice in choices]
