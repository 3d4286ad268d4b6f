"""Steps of loops in groups, each under one checkpoint: the figures are those of the program that is written so."""

import functools

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.records import RematError
from tests.programs import f32
from tests.report_checks import costs_of, types_and_kinds


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


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.slow if (number + size) % 2 else ())
        for number, name in enumerate(GROUPED)
        for size in (5, 4)
    ],
)
def test_steps_in_groups_are_a_place(name, size, remat3):
    """A checkpoint around several steps is JAX's own of the program that is written so."""
    fun = GROUPED[name]
    trace = rm.trace(fun(0), *P_X)
    for key in ("nothing_saveable", "dots_saveable"):
        by_hand = rm.trace(fun(size, getattr(jax.checkpoint_policies, key)), *P_X).report("as_written")
        report = trace.report(key, at=f"body/{size}")
        assert types_and_kinds(report) == types_and_kinds(by_hand)
        assert costs_of(report) == costs_of(by_hand)
    # Whatever is made again, or saved, is told by the user's own lines.
    told = [*report.residuals, *report.recomputed]
    assert {row.source.file for row in told if row.source} == {__file__}
    assert not [row for row in told if row.source is None and getattr(row, "kind", "") == "intermediate"]


def test_groups_of_steps_that_are_moved_outward_and_of_all_of_them(remat3):
    trace = rm.trace(unrolled()(0), *P_X)
    # A checkpoint that the body has is taken off, and one put around several steps instead.
    moved = rm.trace(checkpointed()(0), *P_X).report(at={"body": "none", "body/5": "nothing_saveable"})
    assert types_and_kinds(moved) == types_and_kinds(
        rm.trace(carried_pytree()(0), *P_X).report("nothing_saveable", at="body/5")
    )
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
    assert types_and_kinds(rm.trace(trace.function(plan), *P_X).report()) == types_and_kinds(report)


@pytest.mark.slow
def test_which_groups_of_steps_are_offered(remat2):
    trace = rm.trace(unrolled()(0), {"w": f32(12, 64, 64)}, f32(64, 64))
    (group,) = trace.groups
    assert (group.key, group.times, group.possible) == ("body/3", 4, True)
    assert "jax.lax.scan(jax.checkpoint(lambda carry, chunk: jax.lax.scan(body, carry, chunk))" in group.code
    assert group.code.endswith("carry, chunks)  # chunks: xs reshaped to (4, 3, ...)")
    assert "policy=jax.checkpoint_policies.dots_saveable" in trace.report("dots_saveable", at="body/3").code
    assert rm.trace(unrolled()(0), {"w": f32(3, 8, 8)}, f32(8, 8)).groups == ()
    found = trace.places(device="A100 80GB SXM")
    assert {"body/3", "body=nothing_saveable, body/3=nothing_saveable"} <= {row.at for row in found}
    report = trace.report("nothing_saveable", at="body/3", device="A100 80GB SXM")
    row = found.row("nothing_saveable", "body/3")
    assert (row.saved_bytes, row.peak_bytes, row.recomputed_flops, row.code) == (
        report.saved_bytes, report.peak_bytes, report.recomputed_flops, report.code)  # fmt: skip
    decorated = rm.trace(checkpointed()(0), {"w": f32(12, 64, 64), "b": f32(12, 64)}, f32(64, 64))
    assert [site.key for site in decorated.groups] == ["body/3"]
    tried = {row.at for row in decorated.places(device="A100 80GB SXM")}
    assert {"body/3", "body=none, body/3=nothing_saveable"} <= tried


def test_steps_that_cannot_be_grouped():
    with pytest.raises(RematError, match="'body/5': another number of steps of the same loop"):
        rm.trace(unrolled()(0), *P_X).report(at={"body/2": "nothing_saveable", "body/5": "nothing_saveable"})

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
    assert types_and_kinds(report) == types_and_kinds(by_hand)
    assert costs_of(report) == costs_of(by_hand)
    moved = trace.report(at={"block": "none", "block/3": "nothing_saveable"})
    bare = rm.trace(layers(decorate=lambda function: function), *args).report("nothing_saveable", at="block/3")
    assert types_and_kinds(moved) == types_and_kinds(bare)
    with pytest.raises(RematError, match=r"'block\[::2\]': block has a checkpoint of its own: choose all of its calls"):
        trace.report("none", at="block[::2]")
