"""Memory over time: the same peak as the report's, and what is held there down to the byte."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.cost_helpers import S
from tests.programs import KINDS, PROGRAMS
from tests.volume import usually

N = 1000
UNIT = 4 * N


@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["as_written", "nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("name", usually(PROGRAMS, *KINDS))
def test_the_highest_moment_is_the_reported_peak(name, policy, remat3):
    fun, args = PROGRAMS[name]
    trace = rm.trace(fun, *args)
    timeline = trace.timeline(policy, "function")
    report = trace.report(policy, "function")
    assert timeline.peak_bytes == report.peak_bytes
    assert max(moment.bytes for moment in timeline.moments) == timeline.peak_bytes
    assert (timeline.policy, timeline.at, timeline.function) == (report.policy, report.at, trace.function_name)
    halves = [moment.half for moment in timeline.moments]
    assert halves == sorted(halves, key=["forward", "backward"].index)


@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["as_written", "nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("name", usually(PROGRAMS, *KINDS))
def test_what_is_held_adds_up_at_the_peak_and_at_every_moment(name, policy, remat3):
    fun, args = PROGRAMS[name]
    timeline = rm.trace(fun, *args).timeline(policy, "function")
    assert sum(value.nbytes for value in timeline.alive) == timeline.peak_bytes
    changes = [0] * (len(timeline.moments) + 1)
    for life in timeline.lives:
        changes[life.first] += life.value.nbytes
        changes[life.end] -= life.value.nbytes
    assert list(itertools.accumulate(changes))[:-1] == [moment.bytes for moment in timeline.moments]
    peak = timeline.moments[timeline.peak]
    held = {"argument": 0, "constant": 0, "residual": 0, "temporary": 0}
    for value in timeline.alive:
        held[value.kind] += value.nbytes
    assert held["argument"] + held["constant"] == peak.arguments
    assert [value.nbytes for value in timeline.alive] == sorted((v.nbytes for v in timeline.alive), reverse=True)
    report = rm.trace(fun, *args).report(policy, "function")
    by_kind = dict(report.peak_by_kind)
    assert sum(by_kind.values()) == report.peak_bytes == timeline.peak_bytes
    by_kind["temporary"] = by_kind.get("temporary", 0) + by_kind.pop("gradient", 0)
    assert {kind: nbytes for kind, nbytes in held.items() if nbytes} == {k: v for k, v in by_kind.items() if v}


def chain(x):
    for _ in range(8):
        x = jnp.sin(x)
    return x


def test_values_are_named_with_their_lines():
    """As the backward pass of a chain begins: the argument, eight cosines, the output and its cotangent."""
    timeline = rm.trace(chain, S(N)).timeline("none")
    peak = timeline.moments[timeline.peak]
    assert peak.half == "backward"
    kinds = [value.kind for value in timeline.alive]
    assert [kinds.count(kind) for kind in ("argument", "residual", "temporary")] == [1, 8, 2]
    assert {value.type for value in timeline.alive} == {f"f32[{N}]"}
    (argument,) = [value for value in timeline.alive if value.kind == "argument"]
    assert argument.argument == "x"
    assert argument.source is None
    for value in timeline.alive:
        if value.kind == "residual":
            assert value.primitive == "cos"
            assert value.source.expression == "jnp.sin(x)"
            assert value.source.file == __file__


def test_values_live_from_their_maker_to_their_last_reader():
    """Cosines are held until the backward pass reads them, the last one made first; a sine for the next one only."""
    timeline = rm.trace(chain, S(N)).timeline("none")
    cosines = sorted((life.first, life.end) for life in timeline.lives if life.value.primitive == "cos")
    assert len(cosines) == 8
    ends = [end for _, end in cosines]
    assert ends == sorted({*ends}, reverse=True)
    backward = next(number for number, moment in enumerate(timeline.moments) if moment.half == "backward")
    assert all(first < backward < end for first, end in cosines)
    assert len(timeline.alive_at(0)) < len(timeline.alive_at(timeline.peak))
    assert timeline.alive == timeline.alive_at(timeline.peak)


def test_a_report_tells_what_its_peak_is_made_of():
    """As the backward pass of a chain begins; the gradient of what reads the parameters last is alive with them."""
    by_kind = dict(rm.trace(chain, S(N)).report("none").peak_by_kind)
    assert by_kind == {"argument": UNIT, "residual": 8 * UNIT, "temporary": 2 * UNIT}

    def two(w, v, x):
        return jnp.sum(jnp.sin(w * x)) + jnp.sum(jnp.sin(v * x))

    assert dict(rm.trace(two, S(N), S(N), S(N)).report("none").peak_by_kind)["gradient"] >= UNIT


def test_moments_have_the_equations_lines(remat3):
    timeline = rm.trace(chain, S(N)).timeline("none")
    found = [(moment.half, moment.primitive) for moment in timeline.moments if moment.primitive]
    assert found.count(("forward", "sin")) == 8
    assert all(moment.source.expression == "jnp.sin(x)" for moment in timeline.moments if moment.primitive == "sin")


def test_what_a_loop_needs_inside_is_told():
    def fun(x):
        body = lambda c, _: (jnp.sin(jnp.outer(c, c) @ c), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body), x, length=4)[0].sum()

    timeline = rm.trace(fun, S(100)).timeline()
    outer = [value for value in timeline.alive if value.nbytes == 4 * 100 * 100]  # the product, in one iteration
    assert outer
    assert {(value.type, value.kind, value.source.function) for value in outer} == {
        ("f32[100,100]", "temporary", "<lambda>")
    }


def test_what_is_written_over_is_not_held_twice():
    """A loop writes its carry over the operand that dies there, and needs most inside: what is held still adds up."""

    def fun(x):
        body = lambda c, _: (jnp.sin(jnp.outer(c, c) @ c), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body), jnp.cos(x), length=4)[0]

    timeline = rm.trace(fun, S(100)).timeline()
    assert not [value for value in timeline.alive if not value.type or value.primitive == "scan"]
    assert sum(value.nbytes for value in timeline.alive) == timeline.peak_bytes


def test_captured_values_are_constants():
    captured = jnp.linspace(0, 1, N)
    timeline = rm.trace(lambda x: jnp.sin(x * captured), S(N)).timeline("none")
    assert [value.nbytes for value in timeline.alive if value.kind == "constant"] == [UNIT]


def test_saving_less_is_seen_over_time(remat3):
    fun, args = PROGRAMS["attention"]
    trace = rm.trace(fun, *args)
    most = {policy: max(m.residuals for m in trace.timeline(policy).moments) for policy in ("none", "nothing_saveable")}
    assert most["nothing_saveable"] < most["none"]


def test_without_a_backward_half_there_is_no_timeline():
    fun = lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()  # noqa: E731
    with pytest.raises(rm.RematError, match="cannot differentiate a while_loop"):
        rm.trace(fun, S(3)).timeline()
