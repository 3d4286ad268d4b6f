"""Microbatches: a step's gradient as a scan over parts of its batch, done only where that is known to be the same."""

import functools
import linecache
import random
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic import _jax
from remat_magic.views.fit import diff_html
from tests.test_models import library

B, T, D, V = 16, 6, 8, 11
F32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
_chance = np.random.RandomState(0)


def numbers(*shape):
    return jnp.asarray(0.3 * _chance.randn(*shape), "float32")


X, SCALARS = numbers(B, T, D), numbers(B)
P = {"w": numbers(D, D), "u": numbers(D, V), "e": numbers(V, D)}
TOKENS = jnp.asarray(_chance.randint(1, V, (B, T)))


def crossentropy(logits, labels):
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


def attention(h):
    causal = jnp.where(jnp.tril(jnp.ones((T, T))), 0, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h) + causal), h)


def convolved(p, x):
    kernel = jnp.ones((4, D, 3)) * p["w"][0, 0]
    return jax.lax.conv_general_dilated(x.swapaxes(1, 2), kernel, (1,), "SAME")


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def normed(h, axis):
    return (h - h.mean(axis, keepdims=True)) / jnp.sqrt(h.var(axis, keepdims=True) + 1e-5)


@jax.custom_jvp
def own_rule(x):
    return jnp.sin(x)


own_rule.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))


@jax.custom_jvp
def mixing_rule(x):
    return jnp.sin(x)


mixing_rule.defjvp(lambda xs, ts: (jnp.sin(xs[0]), ts[0] - ts[0].mean(0)))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))

EXACT = {
    "mean": lambda p, x, t: jnp.mean(jnp.tanh(x @ p["w"]) ** 2),
    "sum": lambda p, x, t: jnp.sum(jnp.tanh(x @ p["w"]) ** 2),
    "sum of what is divided": lambda p, x, t: jnp.sum(jnp.tanh(x @ p["w"]) ** 2 / x.shape[0]),
    "over B - 1": lambda p, x, t: jnp.sum(jnp.tanh(x @ p["w"]) ** 2) / (x.shape[0] - 1),
    "language model": lambda p, x, t: crossentropy(jnp.tanh(attention(p["e"][t]) @ p["w"]) @ p["u"], t).mean(),
    "own row": lambda p, x, t: -jax.nn.log_softmax(x[:, 0] @ p["u"])[jnp.arange(len(t)), t[:, 0]].mean(),
    "one hot": lambda p, x, t: -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ p["u"]) * jax.nn.one_hot(t, V), -1)),
    "vmap": lambda p, x, t: jax.vmap(lambda x, t: crossentropy(x @ p["u"], t).mean())(x, t).mean(),
    "layers in a scan": lambda p, x, t: jnp.mean(
        jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([p["w"]] * 3))[0]
    ),
    "steps in a scan": lambda p, x, t: jnp.mean(
        jax.lax.scan(lambda h, u: (jnp.tanh(h @ p["w"] + u),) * 2, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1]
    ),
    "sums in a scan": lambda p, x, t: jax.lax.scan(
        lambda s, u: (s + jnp.sum(jnp.sin(u @ p["w"])), None), 0.0, x.swapaxes(0, 1)
    )[0],
    "flat": lambda p, x, t: crossentropy(x.reshape(-1, D) @ p["u"], t.reshape(-1)).mean(),
    "decay beside a mean": lambda p, x, t: jnp.mean((x @ p["w"]) ** 2) + 0.1 * jnp.sum(p["w"] ** 2),
    "convolution": lambda p, x, t: jnp.mean(convolved(p, x) ** 2),
    "pool": lambda p, x, t: jnp.mean(pooled(x @ p["w"]) ** 2),
    "layer norm": lambda p, x, t: jnp.mean(normed(x, -1) @ p["w"]),
    "checkpoint": lambda p, x, t: jnp.mean(jax.checkpoint(lambda h: jnp.tanh(h @ p["w"]))(x) ** 2),
    "activations": lambda p, x, t: jnp.mean(jax.nn.relu(jax.nn.silu(jax.nn.gelu(x @ p["w"])))),
    "a rule of one's own": lambda p, x, t: jnp.mean(own_rule(x @ p["w"])),
    "a key of each example": lambda p, x, t: jnp.mean(
        jax.vmap(lambda x, t: jax.random.normal(jax.random.fold_in(jax.random.key(0), t[0]), x.shape) * x)(
            x @ p["w"], t
        )
    ),
    "a mask for all": lambda p, x, t: jnp.mean(
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (1, T, D)), jnp.tanh(x @ p["w"]), 0)
    ),
    "sorted in each": lambda p, x, t: jnp.mean(jnp.sort(x @ p["w"], -1) * jnp.arange(D)),
    "branches": lambda p, x, t: jax.lax.cond(
        p["w"][0, 0] > 0, lambda h: jnp.mean(h), lambda h: jnp.mean(h**2), x @ p["w"]
    ),
}
WRONG = {
    "decay beside a sum": lambda p, x, t: jnp.sum((x @ p["w"]) ** 2) + 0.1 * jnp.sum(p["w"] ** 2),
    "batch norm": lambda p, x, t: jnp.mean(jnp.tanh(normed(x[:, 0] @ p["w"], 0)) ** 2),
    "mask by its tokens": lambda p, x, t: (crossentropy(x @ p["u"], t) * (t > 3)).sum() / (t > 3).sum(),
    "mean of some": lambda p, x, t: jnp.mean(crossentropy(x @ p["u"], t), where=t > 3),
    "contrastive": lambda p, x, t: crossentropy((x[:, 0] @ p["w"]) @ (x[:, 1] @ p["w"]).T, jnp.arange(len(x))).mean(),
    "dropout": lambda p, x, t: jnp.mean(
        jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), jnp.tanh(x @ p["w"]), 0) ** 2
    ),
    "log of a mean": lambda p, x, t: jnp.log(jnp.mean((x @ p["w"]) ** 2)),
    "variance": lambda p, x, t: jnp.var(x @ p["w"]),
    "highest": lambda p, x, t: jnp.max(x @ p["w"]),
    "rolled": lambda p, x, t: jnp.mean((x @ p["w"]) * jnp.roll(x, 1, 0)),
    "merged the other way": lambda p, x, t: jnp.mean(
        x.swapaxes(0, 1).reshape(-1, D) @ p["w"] * jnp.tile(x[0], (len(x), 1))
    ),
    "less the first": lambda p, x, t: jnp.mean((x - x[:1]) @ p["w"]),
    "cumulative": lambda p, x, t: jnp.mean(jnp.cumsum(x[:, 0] @ p["w"], 0)),
    "weights by number": lambda p, x, t: jnp.mean((x @ p["w"]) * jnp.arange(len(x))[:, None, None]),
    "a rule that mixes": lambda p, x, t: jnp.mean(mixing_rule(x @ p["w"]) ** 2),
    "a backward rule": lambda p, x, t: jnp.mean(clipped(x @ p["w"]) ** 2),
    "a clipped sum": lambda p, x, t: jnp.minimum(jnp.sum((x @ p["w"]) ** 2), 3.0),
    "an inverse": lambda p, x, t: jnp.sum(jnp.linalg.inv(x[:, 0].T @ x[:, 0] + p["w"] @ p["w"].T)),
    "other rows": lambda p, x, t: jnp.mean((x @ p["w"])[t[:, 0]] * x),
    "a constant": lambda p, x, t: jnp.mean((x @ p["w"]) * np.linspace(0, 1, len(x))[:, None, None].astype("float32")),
    "its size in a power": lambda p, x, t: jnp.mean(jnp.tanh(x @ p["w"]) ** len(x)),
    "temperature": lambda p, x, t: jnp.mean(jnp.tanh(len(x) * (x @ p["w"]))),
    "a loop over them": lambda p, x, t: jax.lax.scan(lambda h, u: (jnp.tanh(h @ p["w"] + u), None), x[0], x)[0].sum(),
    "backwards": lambda p, x, t: jnp.mean((x @ p["w"]) * x[::-1]),
    "a rounded mean": lambda p, x, t: jnp.mean(x @ p["w"]) + jnp.round(jnp.sum(p["w"] * jnp.sum(x))).astype(int),
    "a pool over them": lambda p, x, t: jnp.mean(
        jax.lax.reduce_window(x @ p["w"], -jnp.inf, jax.lax.max, (2, 1, 1), (2, 1, 1), "VALID")
    ),
}


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("name", EXACT)
def test_what_is_a_sum_or_a_mean_over_the_examples_is_done(name):
    step = jax.jit(jax.value_and_grad(EXACT[name]))
    trace = rm.trace(step, P, X, TOKENS)
    assert_close(trace.function(at="batch in 4")(P, X, TOKENS), step(P, X, TOKENS))
    written, report = trace.report(), trace.report(at="batch in 4")
    assert report.repeated_flops == written.repeated_flops
    assert sum(row.nbytes for row in report.residuals) < sum(row.nbytes for row in written.residuals)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_none_is_refused_with_its_line(name):
    trace = rm.trace(jax.value_and_grad(WRONG[name]), P, X, TOKENS)
    with pytest.raises(rm.RematError) as refused:
        trace.report(at="batch in 4")
    told = re.fullmatch(
        r"<lambda> cannot be differentiated in microbatches: .+ \(test_microbatches\.py:(\d+): `(.+)`\)\.",
        str(refused.value),
        re.DOTALL,
    )
    assert told, str(refused.value)
    assert told[2].split("\n")[0] in linecache.getline(__file__, int(told[1]))
    assert not trace.parts


_EACH = {  # what is done to each example
    "matmul": lambda p, h, t: jnp.tanh(h @ p["w"]),
    "attention": lambda p, h, t: attention(h),
    "norm": lambda p, h, t: normed(h, -1),
    "embed": lambda p, h, t: h + p["e"][t % V],
    "relu": lambda p, h, t: jax.nn.relu(h),
    "scan": lambda p, h, t: jax.lax.scan(
        lambda c, u: (jnp.tanh(c + u),) * 2, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
    "vmap": lambda p, h, t: jax.vmap(lambda row, n: jnp.sin(row) * n[0])(h, t),
    "flat": lambda p, h, t: jnp.sin(h.reshape(-1, D) @ p["w"]).reshape(h.shape),
    "mask": lambda p, h, t: jnp.where(t[..., None] > 3, h, 0.0),
    "softmax": lambda p, h, t: jax.nn.softmax(h, 1) * h,
    "turned": lambda p, h, t: jnp.cumsum(h, 1)[:, ::-1],
    "sorted": lambda p, h, t: jnp.sort(h, 1),
    "own tokens": lambda p, h, t: jnp.take_along_axis(h, (t % T)[..., None], 1),
    "own row": lambda p, h, t: h + h[jnp.arange(len(h)), t[:, 0] % T][:, None],
    "noise for all": lambda p, h, t: h * jax.random.normal(jax.random.key(1), h.shape[1:]),
    "checkpoint": lambda p, h, t: jax.checkpoint(lambda h: jnp.sin(h @ p["w"]))(h),
    "less a parameter": lambda p, h, t: h - p["w"].mean(0),
    "padded": lambda p, h, t: jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1],
}
_ACROSS = {  # what mixes them, or is another thing for another batch
    "centred": lambda p, h, t: h - h.mean(0),
    "rolled": lambda p, h, t: jnp.roll(h, 1, 0),
    "scaled": lambda p, h, t: h * len(h) / 16,
    "normalised": lambda p, h, t: h / jnp.sqrt(jnp.sum(h**2) + 1),
    "others": lambda p, h, t: h[t[:, 0] % len(h)],
    "pairs": lambda p, h, t: jnp.einsum("btd,ctd->bc", h, h)[:, :1, None] + h,
    "cumulative": lambda p, h, t: jnp.cumsum(h, 0),
    "sorted across": lambda p, h, t: jnp.sort(h, 0),
    "noise": lambda p, h, t: h * jax.random.normal(jax.random.key(1), h.shape),
    "numbered": lambda p, h, t: h * jnp.arange(len(h))[:, None, None],
    "merged": lambda p, h, t: h.swapaxes(0, 1).reshape(h.shape),
}
_ENDS = {
    "mean": lambda p, h, t: jnp.mean(h**2),
    "sum": lambda p, h, t: jnp.sum(h**2),
    "over": lambda p, h, t: jnp.sum(h * 2 / len(h)),
    "crossentropy": lambda p, h, t: crossentropy(h @ p["u"], t % V).mean(),
    "decayed": lambda p, h, t: jnp.mean(h) + jnp.sum(p["w"] ** 2),
    "decayed sum": lambda p, h, t: jnp.sum(h) + jnp.sum(p["w"] ** 2),
    "two": lambda p, h, t: jnp.mean(h) + jnp.sum(h),
    "two means": lambda p, h, t: 2 * jnp.mean(h) - jnp.mean(h**2) / 3,
    "masked": lambda p, h, t: jnp.sum(h.mean(-1) * (t > 3)) / jnp.sum(t > 3),
    "root": lambda p, h, t: jnp.sqrt(jnp.mean(h**2)),
    "times": lambda p, h, t: jnp.mean(h) * jnp.sum(p["w"]),
    "product": lambda p, h, t: jnp.mean(h) * jnp.mean(h**2),
    "highest": lambda p, h, t: jnp.max(h),
    "mean of highest": lambda p, h, t: jnp.mean(jnp.max(h, (1, 2))),
    "middle": lambda p, h, t: jnp.median(h),
}


def by_chance(seed):
    """A loss, and whether something in it mixes the examples."""
    chance = random.Random(seed)
    steps = [chance.choice([*_EACH]) for _ in range(chance.randint(1, 4))]
    if chance.random() < 0.3:
        steps.insert(chance.randrange(len(steps) + 1), chance.choice([*_ACROSS]))
    end = _ENDS[chance.choice([*_ENDS])]

    def loss(p, x, t):
        for step in steps:
            x = {**_EACH, **_ACROSS}[step](p, x, t)
        return end(p, x, t)

    return loss, steps


def parts_add_up(loss, parts):
    """Whether the value and gradients of a loss are known to be a sum over parts, and whether they then are."""
    shapes = [jax.ShapeDtypeStruct((B // parts, *it.shape[1:]), it.dtype) for it in (X, TOKENS)]
    whole, part = jax.make_jaxpr(loss)(P, X, TOKENS), jax.make_jaxpr(loss)(P, *shapes)
    shares = [None] * (len(_jax.consts_of(whole)) + len(P)) + [_jax.Share("axis")] * 2
    try:
        (share,) = _jax.followed(whole, part, shares, parts)
    except _jax.Refused:
        return False, False
    if share is None or share.kind != "sum":
        return False, False
    wanted, step = jax.jit(jax.value_and_grad(loss))(P, X, TOKENS), jax.jit(jax.value_and_grad(loss))
    cut = [step(P, X[n : n + B // parts], TOKENS[n : n + B // parts]) for n in range(0, B, B // parts)]
    added = jax.tree.map(lambda *values: share.weight * sum(values), *cut)
    pairs = zip(jax.tree.leaves(added), jax.tree.leaves(wanted), strict=True)
    return True, all(jnp.allclose(a, b, 1e-4, 1e-4 * float(1 + jnp.max(jnp.abs(b)))) for a, b in pairs)


@pytest.mark.parametrize("seed", range(50))
def test_programs_by_chance_are_done_only_where_that_is_the_same(seed):
    loss, steps = by_chance(seed)
    known, same = parts_add_up(loss, random.Random(seed).choice([2, 4, 8]))
    assert not known or same, steps


def block(w, h):
    return h + jnp.tanh(h @ w) @ w.T


def stepping(loss, **options):
    @functools.partial(jax.jit, **options)
    def step(ws, x, y):
        value, grads = jax.value_and_grad(loss)(ws, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g.astype("float32") ** 2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: (w - 0.1 * g / norm).astype(w.dtype), ws, grads), value

    return step


def mean_error(ws, x, y):
    h = x
    for w in ws:
        h = block(w, h)
    return jnp.mean((h - y) ** 2)


def weights(layers=6, width=16, dtype="float32"):
    return [(0.3 * jax.random.normal(jax.random.key(n), (width, 2 * width))).astype(dtype) for n in range(layers)]


EXAMPLES = jax.random.normal(jax.random.key(1), (64, 16)), jax.random.normal(jax.random.key(2), (64, 16))


def test_it_is_the_scan_by_hand_with_policies_below(remat3):
    step, args = stepping(mean_error), (weights(), *EXAMPLES)
    trace, wanted = rm.trace(step, *args), step(*args)
    small = rm.trace(step, args[0], *(it[:8] for it in EXAMPLES))  # a part, by itself
    for policies in ({}, {"block": "dots_saveable"}, {"block": "nothing_saveable"}):
        at = {"batch in 8": "none", **policies}
        report, part = trace.report(at=at), small.report(at=policies) if policies else small.report()
        assert report.saved_bytes == part.saved_bytes
        assert report.recomputed_flops == 8 * part.recomputed_flops  # and what is repeated is that of all parts
        assert report.forward_flops == 8 * part.forward_flops
        assert report.peak_bytes < trace.report().peak_bytes
        changed = trace.function(at=at)
        assert_close(changed(*args), wanted)
        assert "length=8" in str(jax.make_jaxpr(changed)(*args))
    assert trace.report(at="batch in 8") == trace.report("as_written", "batch in 8")
    around = trace.report("dots_saveable", at="batch in 8")
    assert 0 < around.saved_bytes < trace.report(at="batch in 8").saved_bytes
    assert_close(trace.function("dots_saveable", at="batch in 8")(*args), wanted)
    plan = trace.plan(saved="50%", at="batch in 4")
    assert trace.report(plan).saved_bytes == plan.saved_bytes <= trace.report(at="batch in 4").saved_bytes / 2
    assert plan.bound <= plan.recomputed_flops == trace.report(plan).recomputed_flops
    assert_close(trace.function(plan)(*args), wanted)
    (site,) = trace.parts
    assert (site.key, site.times) == ("batch in 8", 8)
    assert trace.stale == ()


def test_the_handed_back_step_takes_other_batches_eager_and_jitted_and_donates():
    step, args = stepping(mean_error, donate_argnums=0), (weights(), *EXAMPLES)
    changed = rm.trace(step, *args).function(at="batch in 4")
    for size in (64, 16, 64):
        given = [it[:size] for it in EXAMPLES]
        ws = weights()
        assert_close(changed(ws, *given), stepping(mean_error)(weights(), *given))
        assert all(w.is_deleted() for w in ws)
    with pytest.raises(rm.RematError, match="10 examples, which are not 4 equal parts"):
        changed(weights(), *(it[:10] for it in EXAMPLES))

    def eager(ws, x, y):
        x, y = x[:, ::-1], y * 2.0
        return jax.value_and_grad(lambda ws: mean_error(ws, x, y))(ws)

    other = rm.trace(eager, *args).function(at="batch in 8")
    assert_close(other(*args), eager(*args))
    assert_close(jax.jit(other)(*args), eager(*args))
    twice = [jnp.stack([it, 2 * it]) for it in EXAMPLES]
    assert_close(*(jax.vmap(step, (None, 0, 0))(args[0], *twice) for step in (other, eager)))

    def squares(ws, step):
        return sum(jnp.sum(grad**2) for grad in step(ws, *EXAMPLES)[1])

    assert_close(*(jax.grad(squares)(weights(2), step) for step in (other, eager)))  # of six layers, rounding shows


def test_auxiliary_values_are_added_up_put_together_or_the_same():
    def loss(ws, x, y):
        h = mean_error(ws, x, y), jnp.tanh(x @ ws[0])
        told = {
            "mean": jnp.mean(h[1]),
            "count": jnp.sum(h[1] > 0),
            "each": h[1].T,
            "same": ws[0].sum(),
            "key": jax.random.key(3),
            "name": "a loss",
            "flag": ws[0][0, 0] > 0,
        }
        return h[0], told

    def step(ws, x, y):
        (value, told), grads = jax.value_and_grad(loss, has_aux=True)(ws, x, y)
        told = {**told, "key": jax.random.key_data(told["key"])}
        return value, {key: it for key, it in told.items() if key != "name"}, grads

    args = weights(), *EXAMPLES
    assert_close(rm.trace(step, *args).function(at="batch in 8")(*args), step(*args))

    def largest(ws, x, y):
        return mean_error(ws, x, y), jnp.max(x)

    with pytest.raises(rm.RematError, match="it goes across the examples"):
        rm.trace(jax.value_and_grad(largest, has_aux=True), *args).report(at="batch in 8")


def test_gradients_of_bfloat16_are_added_up_in_float32():
    ws, args = weights(dtype="bfloat16"), [it.astype("bfloat16") for it in EXAMPLES]
    gradient = jax.value_and_grad(mean_error)
    changed = rm.trace(gradient, ws, *args).function(at="batch in 32")
    exact = jax.grad(mean_error)([w.astype("float32") for w in ws], *(it.astype("float32") for it in args))
    (value, grads), (_, wanted) = changed(ws, *args), gradient(ws, *args)
    assert value.dtype == grads[0].dtype == jnp.bfloat16

    def error(of):
        return max(float(jnp.max(jnp.abs(a.astype("float32") - b))) for a, b in zip(of, exact, strict=True))

    assert error(grads) < 2 * error(wanted)
    sums = [eqn.params["jaxpr"] for eqn in jax.make_jaxpr(changed)(ws, *args).eqns if eqn.primitive.name == "scan"]
    assert "bf16[16,32]" not in str(sums[0].out_avals if hasattr(sums[0], "out_avals") else sums[0])


def test_what_is_computed_outside_of_the_loss_is_of_the_whole_batch():
    @jax.jit
    def step(p, x, t):
        tokens = jnp.sum(t > 3)  # of the batch: given to each part as it is

        def loss(p):
            return jnp.sum(crossentropy(x @ p["u"], t) * (t > 3)) / tokens

        return jax.value_and_grad(loss)(p)

    changed = rm.trace(step, P, X, TOKENS).function(at="batch in 4")
    assert_close(changed(P, X, TOKENS), step(P, X, TOKENS))


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("batch in 7", r"64 examples are not batch in 7: choose one of \[2, 4, 8,"),
        ("batch in 1", r"choose one of \[2, 4,"),
        ({"batch in 2": "none", "vmap(f) in 2": "none"}, r"no vmap\(f\)"),
    ],
)
def test_numbers_that_do_not_divide_are_told(at, why):
    with pytest.raises(rm.RematError, match=why):
        rm.trace(stepping(mean_error), weights(), *EXAMPLES).report(at=at)


def test_where_there_is_no_gradient_or_batch_to_be_cut_it_is_said():
    args = weights(), *EXAMPLES
    with pytest.raises(rm.RematError, match="Only a training step"):
        rm.trace(mean_error, *args, wrt=0).report(at="batch in 2")
    with pytest.raises(rm.RematError, match="No argument of"):
        rm.trace(lambda ws: jax.value_and_grad(mean_error)(ws, *EXAMPLES), args[0]).report(at="batch in 2")
    each = jax.vmap(jax.value_and_grad(mean_error), (None, 0, 0))
    with pytest.raises(rm.RematError, match="under vmap"):
        rm.trace(each, args[0], *(it[:, None] for it in EXAMPLES)).report(at="batch in 2")


def test_a_function_of_that_name_is_told_apart():
    def batch(w, h):
        return block(w, h)

    def loss(ws, x, y):
        h = x
        for w in ws:
            h = batch(w, h)
        return jnp.mean((h - y) ** 2)

    trace, args = rm.trace(stepping(loss), weights(), *EXAMPLES), (weights(), *EXAMPLES)
    with pytest.raises(
        rm.RematError, match="write at='microbatches in 8', for a checkpoint on the function at='batch'"
    ):
        trace.report(at="batch in 8")
    assert [site.key for site in trace.parts] == ["microbatches in 8"]
    assert trace.report(at="microbatches in 8").saved_bytes < trace.report().saved_bytes
    assert trace.report("nothing_saveable", at="batch").repeated_flops > 0
    assert_close(trace.function(at="microbatches in 8")(*args), stepping(loss)(*args))


HEAD = """
import jax, jax.numpy as jnp

def block(w, h):
    return h + jnp.tanh(h @ w) @ w.T

"""
WAYS = {
    "arguments": """
def loss(ws, x, y):
    for w in ws:
        x = block(w, x)
    return jnp.mean((x - y) ** 2)

@jax.jit
def step(ws, inputs, labels):
    value, grads = jax.value_and_grad(loss)(ws, inputs, labels)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value
""",
    "what it closes over, and what each example gives": """
@jax.jit
def step(ws, x, y):
    batch = {"x": x, "y": y}

    def loss(ws):
        h = batch["x"]
        for w in ws:
            h = block(w, h)
        return jnp.mean((h - batch["y"]) ** 2), h

    (value, h), grads = jax.value_and_grad(loss, has_aux=True)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value, h
""",
    "a name for the gradient, and a sum": """
def loss(ws, x, *, y):
    for w in ws:
        x = block(w, x)
    return jnp.sum((x - y) ** 2)

gradient = jax.grad(loss)

def step(ws, x, y):
    grads = gradient(ws, x * 2.0, y=y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)
""",
}


def with_code(text, code):
    """A program with code in the place of the statement that takes a gradient."""
    lines = text.splitlines()
    (number,) = [n for n, line in enumerate(lines) if re.match(r"\s+(\(?value.*, )?grads = ", line)]
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    return "\n".join([*lines[:number], textwrap.indent(code, indent), *lines[number + 1 :]])


@pytest.mark.parametrize("way", WAYS)
def test_its_code_does_what_is_reported(way, module):
    text = HEAD + WAYS[way]
    made, args = module(text), (weights(), *EXAMPLES)
    trace = rm.trace(made.step, *args)
    for policy in ("none", "dots_saveable"):
        report = trace.report(policy, at="batch in 8")
        if policy != "none" and way.startswith("a name"):  # the call does not say where the checkpoint is to be
            assert not report.code
            continue
        changed = module(with_code(text, report.code))
        assert_close(changed.step(*args), made.step(*args))
        written = rm.trace(changed.step, *args)
        assert written.report().saved_bytes == report.saved_bytes
        assert abs(written.report().peak_bytes - report.peak_bytes) < 0.05 * report.peak_bytes


def test_it_is_a_choice_of_fit_before_what_repeats_something(module):
    made = module(HEAD + WAYS["arguments"])
    shapes = [F32((64, 128))] * 8, F32((4096, 64)), F32((4096, 64))
    trace = rm.trace(made.step, *shapes)
    peaks = {n: trace.report(at=f"batch in {n}", device="H100 SXM").peak_bytes for n in (2, 4, 8)}
    assert peaks[2] > peaks[4] > peaks[8]
    fit = trace.fit(trace.report(device="H100 SXM").peak_bytes // 2, compile=False)
    first, *others = [choice for choice in fit.choices if choice.fits]
    assert first.what.startswith("the gradient in ")
    assert first.what.endswith(" microbatches")
    assert first.extra_flops == 0
    assert first.by_hand
    assert first.code.startswith("import jax\n\ndef gradient(")
    assert trace.report(first).at == first.at
    # It beats nothing that an edit writes, of which the cheapest is the best.
    assert fit.best == next((choice for choice in others if not choice.by_hand), first)
    assert fit.best.by_hand or trace.edit(fit.best).verified
    cut = [choice for choice in fit.tried if re.fullmatch(r"batch in \d+", choice.at) and choice.fits is not True]
    fewer = [int(choice.at.rpartition(" ")[2]) for choice in cut]
    assert max(fewer, default=1) < int(first.at.rpartition(" ")[2])
    on_device = trace.fit("H100 SXM", compile=False)
    (few,) = [choice for choice in on_device.tried if choice.at == "batch in 2" and not choice.donate]
    assert few.extra_seconds > 0  # each part reads the parameters again
    edit = trace.edit("none", at="batch in 8")
    assert not edit.verified
    assert "`code` of the choice or report" in edit.unnamed[0]


@pytest.mark.parametrize(
    ("parts", "device", "tile"), [(16, "TPU v5e", 0), (32, "TPU v5e", 8), (16, "H100 SXM", 16), (32, None, 0)]
)
def test_parts_of_fewer_rows_than_a_tile_are_told(parts, device, tile, module):
    made = module(HEAD + WAYS["arguments"])
    trace = rm.trace(made.step, [F32((64, 128))] * 8, F32((128, 64)), F32((128, 64)))
    choice = trace.fit_choice("none", f"batch in {parts}", device or "24 GiB")
    said = f"The largest product of a part has {128 // parts} rows, and takes {device} no less time than one of {tile}."
    assert choice.idle == choice.caution == (said if tile else "")
    html = diff_html(choice, trace.edit("none", at=choice.at), "", can_apply=False)
    assert ("largest product" in html) == bool(tile)
    assert not trace.fit_choice("none", "function", device or "24 GiB").idle


def test_fit_says_why_there_are_none():
    step = stepping(lambda ws, x, y: jnp.log(mean_error(ws, x, y)))
    fit = rm.trace(step, weights(), *EXAMPLES).fit("1 MB", compile=False)
    assert any("what is made of a sum over the batch" in why and "microbatches" in why for why in fit.not_tried)
    assert not any("microbatches" in choice.what for choice in fit.tried)


@pytest.mark.slow
def test_what_xla_needs_falls_with_the_number():
    def norm(h):
        return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)

    def layer(p, h):
        q, k, v = jnp.split(norm(h) @ p["qkv"], 3, -1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / 8 + jnp.where(jnp.tril(jnp.ones((128, 128))), 0, -1e9)
        h = h + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v) @ p["out"]
        return h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]

    def loss(ps, tokens):
        h = ps["embed"][tokens]
        for p in ps["layers"]:
            h = layer(p, h)
        return crossentropy(h @ ps["embed"].T, jnp.roll(tokens, -1, 1)).mean()

    shapes = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    ps = {"embed": F32((512, 64)), "layers": [{name: F32(shape) for name, shape in shapes.items()}] * 4}

    @jax.jit
    def step(ps, tokens):
        value, grads = jax.value_and_grad(loss)(ps, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, ps, grads), value

    trace = rm.trace(step, ps, jax.ShapeDtypeStruct((16, 128), "int32"))
    choices = [{}, *({"at": f"batch in {n}"} for n in (2, 4, 8))]
    needed = [trace.measure(**choice).temp_bytes for choice in choices]
    estimated = [trace.report(**choice).peak_bytes for choice in choices]
    for bytes_of in (needed, estimated):
        falls = [bytes_of[n + 1] / bytes_of[n] for n in range(3)]
        assert max(falls) < 0.8, (needed, estimated)


def _optax():
    optax = library("optax")
    text = """
import optax

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

def loss(ws, x, y):
    for w in ws:
        x = block(w, x)
    return optax.losses.squared_error(x, y).mean()

@jax.jit
def step(ws, x, y):
    value, grads = jax.value_and_grad(loss)(ws, x, y)
    updates, _ = optimizer.update(grads, optimizer.init(ws), ws)
    return optax.apply_updates(ws, updates), value
"""
    assert optax
    return text, weights()


def _linen():
    nn = library("flax.linen")
    text = """
import flax.linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(16)(h)

@jax.jit
def step(params, x, y):
    def loss(params):
        logits = Net().apply(params, x)
        return jnp.mean((logits - y) ** 2), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value, logits
"""
    net = nn.Sequential([nn.Dense(32), nn.relu, nn.LayerNorm(), nn.Dense(16)])
    params = net.init(jax.random.key(0), EXAMPLES[0])["params"]
    renamed = {"Dense_0": params["layers_0"], "LayerNorm_0": params["layers_2"], "Dense_1": params["layers_3"]}
    return text, {"params": renamed}


def _equinox():
    eqx = library("equinox")
    text = """
import equinox as eqx

def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)

@eqx.filter_jit
def step(model, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value
"""
    return text, eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))


@pytest.mark.models
@pytest.mark.parametrize("program", [_optax, _linen, _equinox])
def test_the_steps_of_libraries_are_cut_and_written(program, module):
    text, model = program()
    made, text = module(HEAD + text), HEAD + text
    trace = rm.trace(made.step, model, *EXAMPLES)
    wanted = jax.tree.leaves(made.step(model, *EXAMPLES))
    changed = module(with_code(text, trace.report(at="batch in 8").code))
    for step in (trace.function(at="batch in 8"), changed.step):
        pairs = zip(jax.tree.leaves(step(model, *EXAMPLES)), wanted, strict=True)
        assert_close(*zip(*((a, b) for a, b in pairs if hasattr(a, "dtype")), strict=True))


@pytest.mark.models
def test_a_step_of_nnx_is_cut():
    nnx, optax = library("flax.nnx"), library("optax")

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return jnp.mean((jnp.tanh(model(x)) - y) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def made():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    changed = rm.trace(step, *made(), *EXAMPLES).function(at="batch in 8")
    one, other = made(), made()
    values = [step(*one, *EXAMPLES) for _ in range(2)], [changed(*other, *EXAMPLES) for _ in range(2)]
    assert_close(*values)
    assert_close(*(jax.tree.leaves(nnx.state(it[0])) for it in (one, other)))


def test_where_one_example_is_another_program_more_of_them_are_tried():
    """``squeeze`` takes the axis of one example away."""

    @jax.jit
    def step(w, x):
        return w - jax.grad(lambda w, x: jnp.mean(jnp.squeeze(jnp.tanh(x @ w)[:, None]) ** 2))(w, x)

    engine = rm.trace(step, F32((4, 4)), F32((16, 4))).engine
    with pytest.raises(rm.RematError):
        engine.in_parts("none", "batch in 16")
    assert engine.in_microbatches(max) == ((2, 4, 8, 16), 4, "")
