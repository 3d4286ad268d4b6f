"""What stands in for JAX's own functions in a retrace makes the same jaxprs, to the last traceback and name stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat_magic as rm
from remat_magic import _jax
from remat_magic.jaxprs.provenance import PrimalIndex
from tests.generated import POLICIES, programs
from tests.programs import PROGRAMS
from tests.test_generated import examples, traced

if not _jax.Generation().quick:
    pytest.skip(f"nothing stands in for functions of jax {jax.__version__}", allow_module_level=True)

from remat_magic._jax.quick import QUICK

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
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        types = tuple((str(atom.aval), getattr(atom.aval, "weak_type", None)) for atom in (*eqn.invars, *eqn.outvars))
        # JAX gives what it adds itself a traceback of the retrace; all others are those of the program.
        origin = id(_jax.traceback_of(eqn)) if index.place(eqn) else index.spans.of(_jax.traceback_of(eqn))
        yield eqn.primitive.name, origin, _jax.name_stack(eqn), types, str(eqn.ctx), str(eqn.effects)
        for body in _jax.bodies(eqn):
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
            (_jax.pretty(closed), list(equations(closed, trace.engine.index)), [str(aval) for aval in closed.out_avals])
        )
    return made


def compare(trace: rm.Trace, choices: Sequence[tuple[Any, str]]) -> None:
    """Both halves of each choice, made by us and by JAX alone, are the same."""
    assert trace.engine._primal._generation.quick

    def made(quick: bool) -> list[Any]:
        trace.engine._retraces.clear()
        # Under a new number nothing of what JAX has cached of the time before is found.
        trace.engine._primal._generation = _jax.Generation(quick)
        return [halves(trace, *choice) for choice in choices]

    # But for what JAX keeps without a number, such as the transpose of an FFT: it has the traceback of the first use.
    made(quick=False)
    assert made(quick=True) == made(quick=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_halves_are_those_that_jax_makes_by_itself(program, remat3):
    fun, args = PROGRAMS[program]
    trace = rm.trace(fun, *args)
    compare(trace, [choice for choice in CHOICES if choice[1] != "sites" or trace.sites])


@examples(5)
@given(program=programs(), policy=st.sampled_from(sorted(POLICIES)))
def test_so_they_are_of_generated_programs(remat3, program, policy):
    trace = traced(program)
    compare(trace, [("none", "function"), (POLICIES[policy], trace.default_at)])


def test_a_repeated_residual_and_several_of_one_operation_are_rounded_where_jax_rounds_them():
    """JAX puts what it adds behind the operation that makes a residual, the last one first: text tells the order."""

    def loss(x):
        low, high = jnp.split(x, 2)
        return jnp.sum(jnp.sin(low) * jnp.sin(high) * low) + jnp.sum(jnp.cos(x) * jnp.sin(x))

    trace = rm.trace(loss, jax.ShapeDtypeStruct((8,), jnp.float32))
    compare(trace, CHOICES[:-1])


def test_they_are_in_force_while_an_inspection_is_traced_and_not_after():
    own = [getattr(place, name) for place, name, _ in QUICK]
    seen: list[Any] = []

    def loss(x):
        seen.extend(getattr(place, name) for place, name, _ in QUICK)
        return jnp.sum(x)

    rm.trace(loss, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert not any(inside is outside for inside, outside in zip(seen, own, strict=True))
    assert [getattr(place, name) for place, name, _ in QUICK] == own
