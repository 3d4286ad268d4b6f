"""Nested scans: the figures are those of the very code that is shown, pasted into the user's function."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given

import remat_magic as rm
from remat_magic.engine.segments import segment_of
from remat_magic.planning.loops import scan_by_halves
from remat_magic.records import RematError
from tests.benchmarks import named_models
from tests.generated import programs
from tests.programs import PROGRAMS, f32
from tests.test_generated import examples, outcome, traced
from tests.volume import usually


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
    place = trace.report("nothing_saveable", at=f"step/{segments.segment}")
    assert (place.saved_bytes, place.recomputed_flops, place.peak_bytes) == (
        segments.saved_bytes,
        segments.recomputed_flops,
        segments.peak_bytes,
    )
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


def test_peaks_are_those_of_the_code_on_the_device():
    fun, args = recurrence(16, functools.partial(jax.lax.scan, length=16))
    (loop,) = rm.trace(fun, *args).loops(device="TPU v5e")
    on_cpu = rm.trace(fun, *args).loops()[0]
    for way, here in zip((loop.as_written, *loop.nested), (on_cpu.as_written, *on_cpu.nested), strict=True):
        changed = recurrence(16, shown(way.code, 16, False))[0] if way.code else fun
        assert way.peak_bytes == rm.trace(changed, *args).report(device="TPU v5e").peak_bytes != here.peak_bytes
        assert (way.saved_bytes, way.recomputed_flops) == (here.saved_bytes, here.recomputed_flops)


@pytest.mark.parametrize("steps", usually([(8, False), (7, True)], (7, True)))
@pytest.mark.parametrize("make", usually([recurrence, stacked_layers], recurrence))
def test_the_values_and_gradients_are_the_same(make, steps):
    length, reverse = steps
    plain = functools.partial(jax.lax.scan, length=length, reverse=reverse)
    fun, args = make(length, plain)
    keys = iter(jax.random.split(jax.random.key(0), 10))
    values = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.3, args)
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


def test_a_scanned_transformer_keeps_a_quarter_of_its_carries():
    fun, args = named_models.transformer(16, 32, 16, 2, scanned=True)
    trace = rm.trace(fun, *args)
    (loop,) = trace.loops()
    segments, halves = loop.nested
    # Its blocks are under a checkpoint already, so that carries are all that is saved: a quarter of them is left.
    least = loop.as_written.saved_bytes - 12 * loop.carry_bytes
    assert segments.saved_bytes - segments.view_bytes == least
    assert halves.saved_bytes - halves.view_bytes == loop.as_written.saved_bytes - 14 * loop.carry_bytes
    assert trace.report("as_written").saved_bytes == loop.as_written.saved_bytes  # the trace is as it was


def grouped(body, init, xs, size, policy, *, length=10, reverse=False, unroll=1):
    """A scan over chunks of a checkpointed scan, as one writes it; what is left over is a chunk of its own."""
    whole = length // size * size

    def chunk(carry, xs, count=size):
        return jax.lax.scan(body, carry, xs, length=count, reverse=reverse, unroll=unroll)

    def chunks(carry):
        parts = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), xs)
        carry, ys = jax.lax.scan(jax.checkpoint(chunk, policy=policy), carry, parts, whole // size, reverse)
        return carry, jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)

    def rest(carry):
        part = jax.tree.map(lambda x: x[whole:], xs)
        return jax.checkpoint(lambda carry, xs: chunk(carry, xs, length - whole), policy=policy)(carry, part)

    if whole == length:
        return chunks(init)
    if reverse:
        carry, last = rest(init)
        carry, first = chunks(carry)
    else:
        carry, first = chunks(init)
        carry, last = rest(carry)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)


# Each gives a function of the size of its groups and the policy on them; without a size it is as it is.


def carried_pytree(reverse=False, decorate=lambda body: body):
    def fun(size, policy=None):
        @decorate
        def body(carry, p):
            x, (n, y) = carry
            x = jnp.sin(x @ p["w"]) + p["b"]
            return (x, (n + 1, y * 2 + jnp.tanh(x))), {"n": n * y.sum()}

        def loss(p, x):
            init = x, (0, x * 0)
            if size:
                (x, (_, y)), out = grouped(body, init, p, size, policy, reverse=reverse)
            else:
                (x, (_, y)), out = jax.lax.scan(body, init, p, reverse=reverse)
            return (x * y).sum() + (out["n"] * jnp.linspace(0, 1, len(out["n"]))).sum()

        return loss

    return fun


def checkpointed(reverse=False):
    return carried_pytree(reverse, functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable))


def counted():
    def fun(size, policy=None):
        def body(i, x):
            return jnp.sin(x) * jnp.cos(x) + i

        def loss(p, x):
            x = x @ p["w"][0]
            if not size:
                return (jax.lax.fori_loop(0, 10, body, x) ** 2).sum()
            step = lambda carry, _: ((carry[0] + 1, body(*carry)), None)  # noqa: E731
            return (grouped(step, (0, x), None, size, policy)[0][1] ** 2).sum()

        return loss

    return fun


def mapped():
    def fun(size, policy=None):
        def body(w):
            return jnp.sin(jnp.tanh(w) @ w)

        def loss(p, x):
            if not size:
                return jax.lax.map(body, p["w"]).sum() * x.sum()
            return grouped(lambda _, w: ((), body(w)), (), p["w"], size, policy)[1].sum() * x.sum()

        return loss

    return fun


def unrolled():
    def fun(size, policy=None):
        def body(x, w):
            return jnp.tanh(x @ w), x.sum()

        def loss(p, x):
            scan = functools.partial(grouped, size=size, policy=policy) if size else jax.lax.scan
            x, sums = scan(body, x, p["w"], unroll=2)
            return x.sum() + (sums**2).sum()

        return loss

    return fun


def within_another():
    def fun(size, policy=None):
        def body(x, w):
            return jnp.tanh(x @ w), x.sum()

        def outer(x, w):
            w = jnp.stack([w] * 10)
            x, sums = grouped(body, x, w, size, policy) if size else jax.lax.scan(body, x, w)
            return jnp.sin(x), sums.sum()

        def loss(p, x):
            x, sums = jax.lax.scan(outer, x, p["w"][:3])
            return x.sum() + sums.sum()

        return loss

    return fun


GROUPED = {
    "pytree": carried_pytree(),
    "reversed": carried_pytree(reverse=True),
    "checkpointed": checkpointed(),
    "counted": counted(),
    "mapped": mapped(),
    "unrolled": unrolled(),
    "within another": within_another(),
}
P_X = {"w": f32(10, 8, 8), "b": f32(10, 8)}, f32(4, 8)


def types_of(report):
    return collections.Counter((r.dtype, r.shape, r.kind) for r in report.residuals if r.kind != "literal")


def costs_of(report):
    return report.saved_bytes, report.argument_bytes, report.repeated_flops, report.deferred_flops, report.peak_bytes


@pytest.mark.each_once
@pytest.mark.parametrize("size", [5, 4])
@pytest.mark.parametrize("fun", GROUPED.values(), ids=GROUPED)
def test_steps_in_groups_are_a_place(fun, size, remat3):
    """A checkpoint around several steps is JAX's own of the program that is written so."""
    trace = rm.trace(fun(0), *P_X)
    for key in ("nothing_saveable", "dots_saveable"):
        by_hand = rm.trace(fun(size, getattr(jax.checkpoint_policies, key)), *P_X).report("as_written")
        report = trace.report(key, at=f"body/{size}")
        assert types_of(report) == types_of(by_hand)
        assert costs_of(report) == costs_of(by_hand)
    # Whatever is made again, or saved, is told by the user's own lines.
    told = [*report.residuals, *report.recomputed]
    assert {row.source.file for row in told if row.source} == {__file__}
    assert not [row for row in told if row.source is None and getattr(row, "kind", "") == "intermediate"]


@pytest.mark.parametrize("name", usually(GROUPED, "reversed", "counted", "within another"))
def test_steps_in_groups_compute_the_same(name):
    fun = GROUPED[name]
    keys = iter(jax.random.split(jax.random.key(0), 3))
    values = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.3, P_X)
    expected = jax.jit(jax.value_and_grad(fun(0), (0, 1)))(*values)
    function = rm.trace(fun(0), *P_X).function("dots_saveable", at="body/4")
    found = jax.jit(jax.value_and_grad(function, (0, 1)))(*values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    # The function that it gives back is traced once more.
    assert types_of(rm.trace(function, *P_X).report()) == types_of(
        rm.trace(fun(0), *P_X).report("dots_saveable", "body/4")
    )


def test_groups_in_groups_and_moved_outward(remat3):
    nothing = jax.checkpoint_policies.nothing_saveable
    trace = rm.trace(unrolled()(0), *P_X)

    def twice(p, x):
        def body(x, w):
            return jnp.tanh(x @ w), x.sum()

        def of_four(x, w):
            return grouped(body, x, w, 2, nothing, length=4, unroll=2)

        x, sums = jax.lax.scan(jax.checkpoint(of_four), x, p["w"].reshape(2, 4, 8, 8))
        return x.sum() + (sums.reshape(8) ** 2).sum()

    args = {"w": f32(8, 8, 8)}, f32(4, 8)
    both = {"body/2": "nothing_saveable", "body/4": "nothing_saveable"}
    report, by_hand = rm.trace(unrolled()(0), *args).report(at=both), rm.trace(twice, *args).report()
    assert types_of(report) == types_of(by_hand)
    assert costs_of(report) == costs_of(by_hand)
    # A checkpoint that the body has is taken off, and one put around several steps instead.
    moved = rm.trace(checkpointed()(0), *P_X).report(at={"body": "none", "body/5": "nothing_saveable"})
    assert types_of(moved) == types_of(rm.trace(carried_pytree()(0), *P_X).report("nothing_saveable", at="body/5"))
    # More steps than there are come to one group of all.
    assert costs_of(trace.report("nothing_saveable", "body/99")) == costs_of(
        trace.report("nothing_saveable", "body/10")
    )


def test_a_plan_of_steps_in_groups_keeps_its_promise(remat3):
    trace = rm.trace(carried_pytree()(0), *P_X)
    nothing, dots = (trace.report(key, at="body/5") for key in ("nothing_saveable", "dots_saveable"))
    plan = trace.plan((nothing.saved_bytes + dots.saved_bytes) // 2, at="body/5")
    report = trace.report(plan)
    assert (plan.at, report.saved_bytes) == ("body/5", plan.saved_bytes)
    assert nothing.saved_bytes < report.saved_bytes <= plan.budget_bytes
    within = trace.report(trace.plan(dots.saved_bytes, at="body/5"))
    assert within.repeated_flops <= dots.repeated_flops
    assert types_of(rm.trace(trace.function(plan), *P_X).report()) == types_of(report)


def test_which_groups_of_steps_are_offered(remat2):
    trace = rm.trace(unrolled()(0), {"w": f32(12, 64, 64)}, f32(64, 64))
    (group,) = trace.groups
    assert (group.key, group.times, group.possible) == ("body/3", 4, True)
    assert "jax.lax.scan(jax.checkpoint(lambda carry, chunk: jax.lax.scan(body, carry, chunk, unroll=2))" in group.code
    assert group.code.endswith("carry, chunks)  # chunks: xs reshaped to (4, 3, ...)")
    assert "policy=jax.checkpoint_policies.dots_saveable" in trace.report("dots_saveable", at="body/3").code
    assert rm.trace(unrolled()(0), {"w": f32(3, 8, 8)}, f32(8, 8)).groups == ()
    found = trace.places(device="A100 80GB SXM", seconds=600)
    assert {"body/3", "body=nothing_saveable, body/3=nothing_saveable"} <= {row.at for row in found}
    report = trace.report("nothing_saveable", at="body/3", device="A100 80GB SXM")
    row = found.row("nothing_saveable", "body/3")
    assert (row.saved_bytes, row.peak_bytes, row.recomputed_flops, row.code) == (
        report.saved_bytes, report.peak_bytes, report.recomputed_flops, report.code)  # fmt: skip
    decorated = rm.trace(checkpointed()(0), {"w": f32(12, 64, 64), "b": f32(12, 64)}, f32(64, 64))
    assert [site.key for site in decorated.groups] == ["body/3"]
    tried = {row.at for row in decorated.places(device="A100 80GB SXM", seconds=600)}
    assert {"body/3", "body=none, body/3=nothing_saveable"} <= tried


def test_a_loop_without_a_step_has_no_groups():
    def body(x, w):
        return jnp.sin(x @ w), None

    def loss(ws, x):
        return jax.lax.scan(body, x, ws)[0].sum()

    trace = rm.trace(loss, f32(0, 8, 8), f32(4, 8))
    assert trace.report("nothing_saveable", at="body/2").saved_bytes == trace.report("nothing_saveable").saved_bytes
    assert trace.function("nothing_saveable", at="body/2")(jnp.ones((0, 8, 8)), jnp.ones((4, 8))) == 32


def test_steps_that_cannot_be_grouped():
    def body(x):
        return x * 2

    def loss(w, x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, body, x @ w).sum()

    trace = rm.trace(loss, f32(8, 8), f32(4, 8))
    with pytest.raises(RematError, match="'body/2': body is called in a loop of unknown length, whose steps cannot"):
        trace.report("nothing_saveable", at="body/2")


def test_groups_of_calls_that_have_a_checkpoint(remat3):
    def layers(around=lambda function: function, decorate=jax.checkpoint):
        def loss(w, x):
            @decorate
            def block(w, x):
                return jnp.tanh(jnp.sin(x @ w))

            def three(w, x):
                return block(w, block(w, block(w, x)))

            return around(three)(w, around(three)(w, x)).sum()

        return loss

    args = f32(8, 8), f32(4, 8)
    trace = rm.trace(layers(), *args)
    report, by_hand = (
        trace.report("nothing_saveable", at="block/3"),
        rm.trace(layers(jax.checkpoint), *args).report("nothing_saveable", at="three"),
    )
    assert types_of(report) == types_of(by_hand)
    assert costs_of(report) == costs_of(by_hand)
    moved = trace.report(at={"block": "none", "block/3": "nothing_saveable"})
    bare = rm.trace(layers(decorate=lambda function: function), *args).report("nothing_saveable", at="block/3")
    assert types_of(moved) == types_of(bare)
    with pytest.raises(RematError, match=r"'block\[::2\]': block has a checkpoint of its own: choose all of its calls"):
        trace.report("none", at="block[::2]")


@examples(6, 6)
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
