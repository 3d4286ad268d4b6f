"""Nested scans: the figures are those of the very code that is shown, pasted into the user's function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given

import remat_magic as rm
from remat_magic.planning.loops import segment_of
from remat_magic.planning.nesting import scan_by_halves
from remat_magic.records import RematError
from tests.benchmarks import named_models
from tests.generated import programs
from tests.programs import PROGRAMS, f32
from tests.test_generated import examples, outcome, traced


def recurrence(length, scan, reverse=False):
    """A loss over a gated recurrence, with the scan to use."""

    def loss(params, xs):
        def step(h, x):
            gate = jax.nn.sigmoid(x @ params["wg"] + h @ params["ug"])
            h = (1 - gate) * h + gate * jnp.tanh(x @ params["w"] + (gate * h) @ params["u"])
            return h, (h, gate.sum())

        h, (ys, gates) = scan(step, jnp.zeros((4, 8)), xs)
        weights = jnp.linspace(0.1, 1, length)  # so that the order of the outputs matters
        return (ys**2 * weights[:, None, None]).mean() + h.sum() + (gates * weights).mean()

    params = {key: f32(8, 8) for key in ("wg", "ug", "w", "u")}
    return loss, (params, f32(length, 4, 8))


def stacked_layers(length, scan, reverse=False):
    """Layers of a dictionary of weights, each under its own checkpoint, a counter carried along."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(x, p):
        return jnp.sin(x @ p["w"]) + p["b"]

    def loss(params, x):
        def step(carry, p):
            x, count = carry
            return (layer(x, p), count + 1), None

        (x, count), _ = scan(step, (x, 0), params)
        return jnp.sum(x) * count

    return loss, ({"w": f32(length, 4, 4), "b": f32(length, 4)}, f32(3, 4))


def without_inputs(length, scan, reverse=False):
    """No scanned inputs, and the carry in two dtypes."""

    def loss(w, x):
        def step(carry, _):
            x, y = carry
            return (jnp.tanh(w @ x) + y, (y * 2).astype(jnp.float32)), None

        return sum(c.sum() for c in scan(step, (x, x * 0.5), None)[0])

    return loss, (f32(4, 4), f32(4))


def inner_loop(length, scan, reverse=False):
    """The scan stands in another one, whose steps share it."""

    def loss(ws, x):
        def step(d, w):
            return jnp.tanh(w @ d), jnp.cos(d)

        def outer(c, inner_ws):
            c, ys = scan(step, c, inner_ws)
            return jnp.sin(c), ys.sum()

        c, ys = jax.lax.scan(outer, x, ws)
        return c.sum() + ys.sum()

    return loss, (f32(3, length, 4, 4), f32(4))


MAKERS = {make.__name__: make for make in (recurrence, stacked_layers, without_inputs, inner_loop)}


def shown(code, length, reverse):
    """The scan that the code shown makes: it is run as it stands, up to the call."""
    text, call = code.rsplit("\n# instead of", 1)
    names: dict = {}
    exec(compile(text, "<pasted>", "exec"), names)
    last = call.splitlines()[-1]

    def scan(step, init, xs):
        given = {"init": init, "xs": xs}
        body = last.split("(", 1)[1].split(",", 1)[0]
        run = names | given | {body: step}
        exec(last, run)
        return run["carry"], run["ys"]

    return scan


@pytest.mark.each_once
@pytest.mark.parametrize("turns", [(4, False), (7, True), (16, True), (24, False)])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_figures_are_those_of_the_code(make, turns):
    length, reverse = turns
    plain = functools.partial(jax.lax.scan, length=length, reverse=reverse)
    fun, args = make(length, plain)
    trace = rm.trace(fun, *args)
    loop = trace.loops()[-1]
    as_it_is = trace.report("as_written")
    assert (loop.length, loop.error) == (length, "")
    assert (loop.as_written.saved_bytes, loop.as_written.recomputed_flops, loop.as_written.peak_bytes) == (
        as_it_is.saved_bytes,
        as_it_is.recomputed_flops,
        as_it_is.peak_bytes,
    )
    assert loop.as_written.code == ""
    segments, halves = loop.nested
    assert (segments.kind, halves.kind) == ("segments", "halves")
    assert segments.segment == segment_of(length)
    for nested in loop.nested:
        changed, _ = make(length, shown(nested.code, length, reverse))
        report = rm.trace(changed, *args).report("as_written")
        assert (nested.saved_bytes, nested.recomputed_flops, nested.peak_bytes) == (
            report.saved_bytes,
            report.recomputed_flops,
            report.peak_bytes,
        )
        assert nested.recomputed_flops > as_it_is.recomputed_flops
        # Reshaped inputs are views, unless steps are left over or a loop around stacks them.
        views = [r for r in report.residuals if r.primitive == "reshape" and r.kind == "intermediate"]
        first = nested.segment if nested.kind == "segments" else length // 2
        is_view = length % first == 0 and make is not inner_loop
        assert nested.view_bytes == (sum(r.nbytes for r in views) if is_view else 0)


@pytest.mark.parametrize(
    "make", [recurrence, pytest.param(stacked_layers, marks=pytest.mark.volume)], ids=lambda make: make.__name__
)
def test_the_values_and_gradients_are_the_same(make):
    for length, reverse in ((8, False), (7, True)):
        plain = functools.partial(jax.lax.scan, length=length, reverse=reverse)
        fun, args = make(length, plain)
        keys = iter(jax.random.split(jax.random.key(0), 10))
        values = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.3, args)  # noqa: B023
        expected = jax.jit(jax.value_and_grad(fun, argnums=(0, 1)))(*values)
        for nested in rm.trace(fun, *args).loops()[0].nested:
            changed, _ = make(length, shown(nested.code, length, reverse))
            found = jax.jit(jax.value_and_grad(changed, argnums=(0, 1)))(*values)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_what_one_segment_saves():
    """Working bytes against the segment traced by itself, as a user would ask for it."""
    fun, args = recurrence(24, functools.partial(jax.lax.scan, length=24))
    (loop,) = rm.trace(fun, *args).loops()
    assert (loop.function, loop.carry_bytes, loop.times, loop.path) == ("step", 4 * 8 * 4, 1, ())
    assert loop.source is not None
    assert "scan(step" in loop.source.text
    segments, halves = loop.nested

    def inside(scan, length):
        params, xs = recurrence(length, scan)[1]

        def run(params, h, xs):
            carried = []

            def one(step, _, xs):
                carried.append(scan(step, h, xs))
                return carried[0]

            recurrence(length, one)[0](params, xs)
            return carried[0]

        report = rm.trace(run, params, f32(4, 8), xs).report("none", "function")
        views = [r.nbytes for r in report.residuals if r.primitive == "reshape" and len(r.shape) == 4]
        return report.saved_bytes - sum(views)

    assert segments.working_bytes == inside(functools.partial(jax.lax.scan, length=4), 4)
    by_halves = [inside(functools.partial(scan_by_halves, length=n), n) for n in (12, 6, 3)]
    assert halves.working_bytes == sum(by_halves)
    # Segments save one carry each and nothing else of a step (whose inputs are arguments): the reshaped inputs are
    # views. What one segment saves of its steps is less than all of them saved before.
    assert segments.saved_bytes - segments.view_bytes >= 24 // 4 * loop.carry_bytes
    assert segments.working_bytes * 24 // 4 < loop.as_written.saved_bytes


def test_segments_run_the_steps_once_more_and_halves_once_more_a_level():
    """Of a scan that saves all it needs: n steps' forward FLOPs each time they run again."""
    fun, args = recurrence(64, functools.partial(jax.lax.scan, length=64))
    trace = rm.trace(fun, *args)
    (loop,) = trace.loops()
    segments, halves = loop.nested
    assert loop.as_written.recomputed_flops == 0
    once = segments.recomputed_flops
    assert once <= trace.report("as_written").forward_flops
    assert (segments.levels, halves.levels) == (2, 6)
    # The last step of a level's forward run is not needed again, and the innermost scan is differentiated as it runs.
    assert (halves.levels - 2) * once < halves.recomputed_flops <= halves.levels * once
    assert halves.working_bytes < segments.working_bytes < loop.as_written.saved_bytes


def test_segments_are_near_the_square_root():
    for length in range(4, 200):
        segment = segment_of(length)
        assert length**0.5 / 2 <= segment <= length**0.5 * 2
        if any(length % n == 0 and length**0.5 / 2 <= n <= length**0.5 * 2 for n in range(2, length)):
            assert length % segment == 0
    assert [segment_of(n) for n in (4, 12, 64, 100, 13)] == [2, 3, 8, 10, 4]


def test_which_loops_there_are():
    fun, args = PROGRAMS["nested_scan"]  # three of two: nothing to nest
    assert rm.trace(fun, *args).loops() == ()
    fun, args = inner_loop(8, functools.partial(jax.lax.scan, length=8))
    (loop,) = rm.trace(fun, *args).loops()
    assert (loop.function, loop.length, loop.times, loop.path) == ("step", 8, 3, ("scan x3",))
    assert rm.trace(fun, *args).loops(shortest=9) == ()
    fun, args = PROGRAMS["fori"]  # a fori_loop of fixed bounds is a scan
    assert [loop.length for loop in rm.trace(fun, *args).loops()] == [5]
    with pytest.raises(RematError, match="no backward pass"):
        rm.trace(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, jnp.sin, x).sum(), f32(4)).loops()


def test_a_scanned_transformer():
    fun, args = named_models.transformer(16, 32, 16, 2, scanned=True)
    trace = rm.trace(fun, *args)
    (loop,) = trace.loops()
    segments, halves = loop.nested
    # Its blocks are under a checkpoint already, so that carries are all that is saved: a quarter of them is left.
    least = loop.as_written.saved_bytes - 12 * loop.carry_bytes
    assert segments.saved_bytes - segments.view_bytes == least
    assert halves.saved_bytes - halves.view_bytes == loop.as_written.saved_bytes - 14 * loop.carry_bytes
    assert trace.report("as_written").saved_bytes == loop.as_written.saved_bytes  # the trace is as it was


@examples(6)
@given(program=programs())
def test_by_chance(remat3, program):
    trace = outcome(lambda: traced(program))
    assume(isinstance(trace, rm.Trace))
    found = outcome(trace.loops)
    if isinstance(found, Exception):
        assert isinstance(found, RematError), found
        return
    for loop in found:
        assert loop.length >= 4
        assert loop.error or len(loop.nested) == 2


def test_the_shown_code_is_what_was_tried():
    fun, args = recurrence(8, functools.partial(jax.lax.scan, length=8))
    for nested in rm.trace(fun, *args).loops()[0].nested:
        assert "instead of jax.lax.scan(step, init, xs) at test_loops.py:" in nested.code
