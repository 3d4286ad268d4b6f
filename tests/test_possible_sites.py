"""Places that could have a checkpoint and have none: each as if the function were decorated by hand."""

import cProfile
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.engine import calls
from tests.programs import PROGRAMS
from tests.report_checks import costs_of, types_and_kinds

POLICIES = ("nothing_saveable", "dots_saveable", "everything_saveable")

W, WS, X = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 8), (3, 8, 8), (4, 8)))


def repeated(block, w, x, times=3):
    for _ in range(times):
        x = block(w, x)
    return x


# Each takes what is put around the function called `block`, and returns a function that calls it.


def unread_arguments(checkpoint):
    def block(w, *others, **unread):  # jax_remat3 has a derivative of what nobody reads, too
        return jnp.tanh(jnp.sin(others[0] @ w))

    def loss(ws, x):
        def step(carry, w):
            x, h = carry
            return (checkpoint(block)(w, x, h, sine=jnp.sin(h @ w)), jnp.exp(h)), None

        return jax.lax.scan(step, (x, x), ws)[0][0].sum()

    return loss


def unread_results(checkpoint):
    def block(w, x):  # jax_remat3 saves for the derivative of what nobody reads, too
        return jnp.tanh(jnp.sin(x @ w)), jnp.exp(jnp.sin(x) @ w) @ jnp.cos(w)

    return lambda w, x: repeated(lambda w, x: checkpoint(block)(w, x)[0], w, x).sum()


def closed_over(checkpoint):
    constant = np.linspace(0, 1, 8).astype("float32")

    def loss(w, x):
        g = jnp.exp(w)

        def block(unused, x):
            return jnp.sin(x @ g) * constant

        return repeated(checkpoint(block), w, x).sum()

    return loss


def scanned(checkpoint):
    def block(x, w):
        h = jnp.sin(x @ w)
        return jnp.tanh(h), (h * h).sum()

    def loss(ws, x):
        x, sums = jax.lax.scan(checkpoint(block), x, ws)
        return x.sum() + (sums**2).sum()

    return loss


def within_another(checkpoint):
    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    def outer(w, x):
        return checkpoint(block)(w, jnp.exp(x)) * jnp.cos(x)

    return lambda w, x: repeated(outer, w, x).sum()


def within_a_checkpoint(checkpoint):
    inner = within_another(checkpoint)
    return lambda w, x: jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)(w, x) * 2


def around_a_checkpoint(checkpoint):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def inner(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    def block(w, x):
        return inner(w, jnp.exp(x)) * jnp.cos(x)

    return lambda w, x: repeated(checkpoint(block), w, x).sum()


def jitted(checkpoint):
    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    return lambda w, x: repeated(checkpoint(jax.jit(block)), w, x).sum()


def vmapped(checkpoint):
    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w)) * x

    return lambda w, x: repeated(jax.vmap(checkpoint(block), (None, 0)), w, x).sum()


def in_a_branch(checkpoint):
    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w)) * x

    def loss(w, x):
        return jax.lax.cond(x.sum() > 0, lambda: checkpoint(block)(w, x), lambda: x * 2).sum()

    return loss


def random(checkpoint):
    def block(w, x, key):
        h = jax.nn.softmax(jax.nn.relu(x @ w))
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2, 0) + jax.nn.logsumexp(x, keepdims=True)

    def loss(w, x):
        for number in range(3):
            x = checkpoint(block)(w, x, jax.random.fold_in(jax.random.key(0), number))
        return x.sum()

    return loss


def stepped(checkpoint):
    def block(w, x):
        return jnp.sin(x @ w) * jnp.tanh(x)

    def loss(w, x):
        return repeated(checkpoint(block), w, x).sum()

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    return step


CASES = {
    make: (WS if make in (unread_arguments, scanned) else W, X)
    for make in (
        unread_arguments,
        unread_results,
        closed_over,
        scanned,
        within_a_checkpoint,
        around_a_checkpoint,
        jitted,
        vmapped,
        in_a_branch,
        random,
        stepped,
    )
}


_QUICK = (scanned, within_a_checkpoint, in_a_branch, unread_results, stepped)


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=make.__name__, marks=() if make in _QUICK else pytest.mark.slow) for make in CASES]
)
def test_a_place_is_as_if_decorated(make, remat3):
    args = CASES[make]
    bare = make(lambda function: function)
    trace = rm.trace(bare, *args)
    assert [(site.possible, site.policy) for site in trace.sites if site.key == "block"] == [(True, "")]
    for key in POLICIES:
        policy = getattr(jax.checkpoint_policies, key)
        by_hand = rm.trace(make(functools.partial(jax.checkpoint, policy=policy)), *args).report()
        report = trace.report(key, at="block")
        assert types_and_kinds(report) == types_and_kinds(
            by_hand
        )  # JAX's own answer about the function that is decorated
        assert costs_of(report) == costs_of(by_hand)
    # The function that it gives back is traced once more, where JAX has kept some of what it made.
    again = rm.trace(trace.function("dots_saveable", at="block"), *args)
    assert types_and_kinds(again.report()) == types_and_kinds(trace.report("dots_saveable", at="block"))


def test_the_function_finds_its_places_in_what_jax_has_kept_for_other_shapes():
    bare = scanned(lambda function: function)
    function = rm.trace(bare, WS, X).function("nothing_saveable", at="block")
    larger = jax.ShapeDtypeStruct((6, 8), "float32")
    first, again = (rm.trace(function, WS, larger).report() for _ in range(2))
    assert (
        types_and_kinds(first)
        == types_and_kinds(again)
        == types_and_kinds(rm.trace(bare, WS, larger).report("nothing_saveable", at="block"))
    )


def test_what_is_a_place():
    def norm(x):
        return x / jnp.sqrt((x * x).mean())

    def block(w, x):
        return norm(jnp.sin(x @ w))

    @jax.checkpoint
    def decorated(w, x):
        return norm(jnp.cos(x @ w))

    def nothing(x):
        return x

    def loss(ws, x):
        for w in ws[:2]:
            x = nothing(block(w, x))
        x, _ = jax.lax.scan(lambda x, w: (decorated(w, x), None), x, ws)
        return x.sum()

    trace = rm.trace(loss, WS, X)
    assert [(site.key, site.times, site.possible) for site in trace.sites] == [
        ("decorated", 3, False),
        ("block", 2, True),
        ("norm", 5, True),  # twice in block, three times in the checkpoint
        ("<lambda>", 3, True),
    ]
    assert trace.default_at == "sites"
    assert [site.key for site in trace.report(at="sites").sites] == ["decorated"]
    site = next(site for site in trace.sites if site.key == "block")
    assert (site.source.file, site.source.function) == (__file__, "block")
    assert "def block(w, x):" in site.source.text
    assert site.code == "@jax.checkpoint  # on block"
    assert next(site.code for site in trace.sites if site.key == "<lambda>") == "jax.checkpoint(lambda x, w: ...)"


def test_functions_may_take_and_return_what_jax_cannot_flatten():
    def block(settings, x):
        return {1: None, "two": jnp.sin(x) * settings["two"]}

    trace = rm.trace(lambda x: jnp.exp(block({1: None, "two": 2.0}, x)["two"]).sum(), X)
    assert trace.report("nothing_saveable", at="block").saved_bytes


def test_static_arguments_stay_static():
    def block(w, x, train, scale=2.0):
        return jnp.sin(x @ w) * scale if train else x

    def loss(w, x):
        return block(w, block(w, x, True), train=True).sum()

    (site,) = rm.trace(loss, W, X).sites
    # JAX would trace a bool otherwise, and `if train` would fail; and it takes no static argument by keyword.
    change = "its calls give train and scale by position"
    assert site.code == f"@functools.partial(jax.checkpoint, static_argnums=(2, 3))  # on block; {change}"
    by_hand = functools.partial(jax.checkpoint, static_argnums=(2, 3))(block)
    expected = rm.trace(lambda w, x: by_hand(w, by_hand(w, x, True, 2.0), True, 2.0).sum(), W, X).report()
    assert types_and_kinds(rm.trace(loss, W, X).report("nothing_saveable", at="block")) == types_and_kinds(expected)


def twelve(w, x):
    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    return repeated(block, w, x, 12).sum()


@pytest.mark.parametrize(
    ("at", "checkpointed", "size"),
    [
        ("block[::2]", range(0, 12, 2), 1),
        ("block[:8]", range(8), 1),
        ("block[-3:]", range(9, 12), 1),
        ("block", range(12), 1),
        ("block/3", range(12), 3),
    ],
)
def test_some_calls_or_groups_of_them_under_a_policy_are_as_if_written(at, checkpointed, size):
    def by_hand(w, x):
        def block(w, x):
            return jnp.tanh(jnp.sin(x @ w))

        for number in range(0, 12, size):
            group = functools.partial(repeated, block, times=size)
            x = (jax.checkpoint(group) if number in checkpointed else group)(w, x)
        return x.sum()

    report = rm.trace(twelve, W, X).report("nothing_saveable", at=at)
    expected = rm.trace(by_hand, W, X).report()
    assert types_and_kinds(report) == types_and_kinds(expected)
    assert costs_of(report) == costs_of(expected)


def test_calls_in_a_loop_are_grouped_as_they_come():
    """With what is between them; what a loop of Python does around the first and after the last stays outside."""

    def block(w, x):
        return jnp.tanh(jnp.sin(x @ w))

    def loss(ws, x):
        for w in ws:
            normed = jnp.exp(x) / 2
            x = x + block(w, normed) * jnp.cos(x)
        for w in ws:
            x = block(w, x) * 3.0
        return x.sum()

    def by_hand(ws, x):
        def two_steps(v, w, x, normed):
            x = x + block(v, normed) * jnp.cos(x)
            return x, block(w, jnp.exp(x) / 2)

        def two_loops(v, w, x, normed):
            return block(w, x + block(v, normed) * jnp.cos(x))

        x, y = jax.checkpoint(two_steps)(ws[0], ws[1], x, jnp.exp(x) / 2)
        x = x + y * jnp.cos(x)
        x = jax.checkpoint(two_loops)(ws[2], ws[0], x, jnp.exp(x) / 2) * 3.0
        return (jax.checkpoint(lambda v, w, x: block(w, block(v, x) * 3.0))(ws[1], ws[2], x) * 3.0).sum()

    args = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 3, jax.ShapeDtypeStruct((2, 4), jnp.float32)
    report = rm.trace(loss, *args).report("nothing_saveable", "block/2")
    expected = rm.trace(by_hand, *args).report()
    assert types_and_kinds(report) == types_and_kinds(expected)
    assert costs_of(report) == costs_of(expected)


def test_two_places_may_have_a_policy_each():
    def inner(x):
        return jnp.cos(jnp.sin(x))

    def block(w, x):
        return inner(x @ w)

    def loss(w, x, inner_=None, block_=None):
        return repeated(block, w, x).sum()

    trace = rm.trace(loss, W, X)
    apart = trace.report(at={"block[:1]": "dots_saveable", "block[1:]": "nothing_saveable"})
    dots, nothing = (trace.report(key, at="block") for key in ("dots_saveable", "nothing_saveable"))
    assert nothing.saved_bytes < apart.saved_bytes < dots.saved_bytes
    # One inside the other: without jax_remat3 the outer policy governs, as by hand.
    both = trace.report(at={"block": "nothing_saveable", "inner": "nothing_saveable"})
    assert both.saved_bytes == nothing.saved_bytes


def test_a_plan_of_a_place_keeps_its_promise(remat3):
    trace = rm.trace(twelve, W, X)
    plan = trace.plan("40%", at="block")
    report = trace.report(plan)
    assert (plan.at, report.at) == ("block", "block")
    assert report.saved_bytes == plan.saved_bytes <= 0.4 * trace.report("none", at="block").saved_bytes
    dots = trace.report("dots_saveable", at="block")
    within = trace.plan(dots.saved_bytes, at="block")
    assert trace.report(within).repeated_flops <= dots.repeated_flops  # it can save what dots_saveable saves
    for function in (trace.function(plan), plan.apply(twelve)):
        assert types_and_kinds(rm.trace(function, W, X).report()) == types_and_kinds(report)


def test_a_place_that_is_not_there():
    trace = rm.trace(twelve, W, X)
    with pytest.raises(rm.RematError, match="did you mean 'block'"):
        trace.report("nothing_saveable", at="blok")
    with pytest.raises(rm.RematError, match=r"chooses none of the 12 calls of block"):
        trace.report("nothing_saveable", at="block[20:]")
    with pytest.raises(rm.RematError, match="is 1 at least"):
        trace.report("nothing_saveable", at="block/0")


def wave(x):
    return jnp.sin(jnp.cos(jnp.tanh(x)))


def differentiated_inside(w, x):  # by hand the checkpoint would be differentiated twice
    return (jax.jvp(lambda x: wave(x @ w).sum(), (x,), (x,))[1]) ** 2


def called_as_it_is_too(w, x):  # where the checkpoint would be as well
    return differentiated_inside(w, x) + wave(x @ w).sum()


def with_a_gradient_within(w, x):  # by hand the checkpoint would be in both
    return jax.grad(lambda w: wave(x @ w).sum())(w).sum() + wave(x @ w).sum()


def step_of_a_gradient_within(w, x):
    return w - jax.grad(with_a_gradient_within)(w, x)


def in_a_custom_derivative(w, x):  # whose rule is differentiated in its place, so that it would do nothing
    ruled = jax.custom_vjp(lambda x: wave(x))
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))
    return ruled(x @ w).sum()


def writing_to_a_reference(w, x):
    ref = jax.new_ref(jnp.zeros((4, 8)))

    def wave(ref, x):
        ref[...] = ref[...] + x
        return jnp.sin(x)

    return (wave(ref, x @ w) * ref[...]).sum()


NO_PLACES = (differentiated_inside, called_as_it_is_too, step_of_a_gradient_within, in_a_custom_derivative)


@pytest.mark.parametrize("loss", [*NO_PLACES, writing_to_a_reference])
def test_where_a_checkpoint_would_be_of_something_else_or_of_no_use_is_no_place(loss):
    assert [site.key for site in rm.trace(loss, W, X).sites if site.key.startswith("wave")] == []


def test_calls_that_differ_in_a_number_do_not_share_a_body():
    def block(x, power):
        return jnp.sin(x) ** power

    def loss(w, x):
        return (block(x @ w, 2) + block(x @ w, 3)).sum()

    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.standard_normal(arg.shape), "float32") for arg in (W, X)]
    function = rm.trace(loss, W, X).function("nothing_saveable", at="block")
    np.testing.assert_allclose(jax.grad(function)(*values), jax.grad(loss)(*values), rtol=1e-5, atol=1e-6)


def test_functions_that_have_a_checkpoint_in_one_place_and_none_in_another():
    fun, args = PROGRAMS["binary8"]  # all its lambdas stand on two lines
    trace = rm.trace(fun, *args)
    keys = [site.key for site in trace.sites]
    assert len(set(keys)) == len(keys) == 4
    assert [site.possible for site in trace.sites] == [False, False, True, True]
    for key in keys:
        assert not trace.report("nothing_saveable", at=key).backward_error


@pytest.mark.parametrize(("debugger", "tool"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)])
def test_tracing_under_a_profiler_or_debugger(monkeypatch, debugger, tool):
    """``%prun``: before Python 3.12 its hook is no function, and cannot be put back like one."""
    make = stepped(lambda function: function)
    expected = types_and_kinds(rm.trace(make, W, X).report("nothing_saveable", at="block"))
    if not tool:  # as before Python 3.12, or where others have taken all numbers
        monkeypatch.setattr(calls, "_tool", lambda: None)
    profile, hook, before = cProfile.Profile(), lambda *_: None, sys.gettrace()
    try:
        if debugger:
            sys.settrace(hook)
        with profile:
            report = rm.trace(make, W, X).report("nothing_saveable", at="block")
            _marker()
        assert sys.gettrace() is (hook if debugger else before)
    finally:
        sys.settrace(before)
    assert types_and_kinds(report) == expected
    assert "_marker" in {getattr(entry.code, "co_name", "") for entry in profile.getstats()}  # it goes on afterwards


def _marker():
    pass
