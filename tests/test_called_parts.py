"""A called function in parts: ``jax.lax.map`` over parts of its batch, where that is known to be the same."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.report_checks import types_and_kinds
from tests.test_microbatches import EXACT, TOKENS, WRONG, P, X, assert_close, by_chance
from tests.test_models import library

F32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")


def in_a_call(fun):
    """A loss that calls a function ``head`` with what it has made, and does more with what that gives."""

    def head(p, x, t):
        return fun(p, x, t)

    def loss(p, x, t):
        return jnp.sin(head(p, jnp.tanh(1.1 * x), t)) + jnp.sum(p["w"] ** 2)

    return loss


QUICK = "batch norm", "mask by its tokens", "dropout", "cumulative", "a backward rule", "a rule that mixes"


def mostly_slow(names, quick):
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def assert_same(trace, loss, at, args=(P, X, TOKENS), **how):
    changed = trace.function("nothing_saveable", at=at, **how) if isinstance(at, str) else trace.function(at=at)
    assert_close(jax.jit(jax.value_and_grad(changed))(*args), jax.jit(jax.value_and_grad(loss))(*args))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.slow
def test_what_is_a_sum_a_mean_or_values_of_each_example_is_done(name):
    scale = 1e-3 if "sum" in name else 1.0  # of a large number the sine is any
    loss = in_a_call(lambda *args: scale * EXACT[name](*args))
    trace = rm.trace(loss, P, X, TOKENS, wrt=0)
    assert_same(trace, loss, "head in 4")
    assert trace.report("nothing_saveable", at="head in 4").repeated_flops >= 0


@pytest.mark.parametrize("name", mostly_slow([name for name in WRONG if name != "a constant"], QUICK))
def test_what_is_none_is_refused_with_its_line(name):
    trace = rm.trace(in_a_call(WRONG[name]), P, X, TOKENS, wrt=0)
    with pytest.raises(rm.RematError, match=r"head in 4 cannot be done: .+ \(test_microbatches\.py:\d+: `"):
        trace.report("nothing_saveable", at="head in 4")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_programs_by_chance_are_done_only_where_that_is_the_same(seed):
    whole, steps = by_chance(seed)
    loss, parts = in_a_call(lambda p, x, t: 0.01 * whole(p, x, t)), random.Random(seed).choice([2, 4, 8])
    trace = rm.trace(loss, P, X, TOKENS, wrt=0)
    try:
        trace.report("nothing_saveable", at=f"head in {parts}")
    except rm.RematError as error:
        assert "cannot be done" in str(error), steps
        return
    args = P, X, TOKENS
    changed = trace.function("nothing_saveable", at=f"head in {parts}")
    got, wanted = jax.jit(jax.value_and_grad(changed))(*args), jax.jit(jax.value_and_grad(loss))(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    assert all(jnp.allclose(a, b, 1e-4, 1e-4 * float(1 + jnp.max(jnp.abs(b)))) for a, b in pairs), steps


CODE = """
import functools
import jax, jax.numpy as jnp

def mlp(w, h):
    return jnp.tanh(h @ w) @ w.T

def losses(u, h, labels):
    logp = jax.nn.log_softmax(h @ u)
    return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]

{}

def step(p, tokens):
    value, grads = jax.value_and_grad(loss)(p, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value
"""
WAYS = {  # a program, the place, and the call in the source
    "a mean": (
        """
def head(p, h, labels):
    return losses(p["u"], h, labels).mean()

def loss(p, tokens):
    h = p["e"][tokens]
    return head(p, h + mlp(p["w"], h), labels=tokens)
""",
        "head in 4",
        'head(p, h + mlp(p["w"], h), labels=tokens)',
    ),
    "each example, called twice in another call": (
        """
def block(w, h):
    h = h + mlp(w, h)
    return h + mlp(w, h)

@jax.jit
def loss(p, tokens):
    return losses(p["u"], block(p["w"], p["e"][tokens]), tokens).mean()
""",
        "mlp in 8",
        "+ mlp(w, h)",
    ),
    "in a scan, under a checkpoint of its own": (
        """
small = jax.checkpoint(mlp)

@jax.checkpoint
def head(u, h, labels):
    return losses(u, h, labels).sum()

def loss(p, tokens):
    step = lambda h, _: (h + mlp(p["w"], h), None)
    return head(p["u"], jax.lax.scan(step, p["e"][tokens], None, 3)[0], tokens)
""",
        "head in 2",
        'head(p["u"], jax.lax.scan(step, p["e"][tokens], None, 3)[0], tokens)',
    ),
    "in a scan": (
        """
def loss(p, tokens):
    def step(h, _):
        out = mlp(p["w"], h)
        return h + out, jnp.sum(out)
    h, sums = jax.lax.scan(step, p["e"][tokens], None, 3)
    return losses(p["u"], h, tokens).mean() + 1e-3 * jnp.sum(sums)
""",
        "mlp in 4",
        'mlp(p["w"], h)',
    ),
    "along the sequence": (
        """
def loss(p, tokens):
    h = p["e"][tokens]
    h = h - h.mean(0)
    return jax.nn.logsumexp(losses(p["u"], h, tokens))
""",
        "losses in 2",
        'losses(p["u"], h, tokens)',
    ),
    "in bfloat16": (
        """
def head(u, h, labels):
    return losses(u, h, labels).mean()

def loss(p, tokens):
    p = jax.tree.map(lambda w: w.astype("bfloat16"), p)
    return head(p["u"], p["e"][tokens], tokens).astype("float32")
""",
        "head in 8",
        'head(p["u"], p["e"][tokens], tokens)',
    ),
}


def model():
    shapes = {"u": (12, 40), "e": (40, 12), "w": (12, 24)}
    return {name: jax.random.normal(jax.random.key(n), shape) for n, (name, shape) in enumerate(shapes.items())}


def tokens():
    return jax.random.randint(jax.random.key(9), (16, 6), 0, 40)


@pytest.mark.parametrize("way", mostly_slow(WAYS, ("a mean", "in bfloat16")))
def test_its_code_does_what_is_reported(way, module):
    program, at, call = WAYS[way]
    text, args = CODE.format(program), (model(), tokens())
    made = module(text)
    for traced in (made.step, made.loss):
        trace = rm.trace(traced, *args, wrt=None if traced is made.step else 0)
        report = trace.report("nothing_saveable", at=at)
        assert report.code, way
    assert call in text
    trace = rm.trace(made.step, *args)
    changed = module(text.replace(call, "+ " * call.startswith("+") + report.code))
    written = rm.trace(changed.step, *args).report()
    assert types_and_kinds(written) == types_and_kinds(report)
    assert written.repeated_flops == report.repeated_flops
    if "bfloat16" not in way:
        wanted = jax.jit(made.step)(*args)
        assert_close(jax.jit(changed.step)(*args), wanted)
        assert_close(jax.jit(trace.function("nothing_saveable", at=at))(*args), wanted)


def test_gradients_of_bfloat16_are_added_up_in_float32():
    def head(w, h):
        return jnp.mean((h @ w) ** 2)

    def loss(w, x):
        return head(w, jnp.sin(x)).astype("float32")

    w, x = jnp.ones((8, 4), "bfloat16"), jax.random.normal(jax.random.key(0), (512, 8), "bfloat16")
    exact = jax.jit(jax.grad(loss))(w.astype("float32"), x.astype("float32"))
    grad = jax.jit(jax.grad(rm.trace(loss, w, x, wrt=0).function("nothing_saveable", at="head in 256")))(w, x)
    assert grad.dtype == w.dtype
    whole = jnp.max(jnp.abs(jax.jit(jax.grad(loss))(w, x).astype("float32") - exact))
    assert jnp.max(jnp.abs(grad.astype("float32") - exact)) < 2 * whole


def block(w, h):
    return h + jnp.tanh(h @ w) @ w.T


def head(u, h, y):
    return jnp.mean((h @ u - y) ** 2)


def loss(p, x, y):
    for w in p["w"]:
        x = block(w, x)
    return head(p["u"], x, y)


def parameters(rows=16, width=8, out=64):
    p = {"w": [jnp.eye(width, 2 * width)] * 3, "u": jnp.ones((width, out))}
    return p, jnp.linspace(0, 1, rows * width).reshape(rows, width), jnp.ones((rows, out))


def test_it_stands_alone_and_with_other_places_under_every_transformation(remat3):
    args = parameters()
    trace, wanted = rm.trace(loss, *args, wrt=0), jax.jit(jax.value_and_grad(loss))(*args)
    both = {"head in 4": "nothing_saveable", "block": "nothing_saveable"}
    inner = {"block in 2": "none", "head in 8": "dots_saveable"}
    for at in ({"head in 4": "nothing_saveable"}, both, inner):
        changed, report = trace.function(at=at), trace.report(at=at)
        assert_close(jax.jit(jax.value_and_grad(changed))(*args), wanted)
        assert at is inner or report.peak_bytes < trace.report().peak_bytes
        assert any("scan x" in row.path[0] for row in report.recomputed)
    several = jax.tree.map(lambda value: jnp.stack([value, 2 * value]), args[1:])
    each, of_each = (jax.jit(jax.vmap(fun, (None, 0, 0))) for fun in (changed, loss))
    assert_close(each(args[0], *several), of_each(args[0], *several))
    one, other = (jax.jvp(lambda p, fun=fun: fun(p, *args[1:]), args[:1], args[:1]) for fun in (changed, loss))
    assert_close(one, other)
    with pytest.raises(rm.RematError, match="cannot be done"):
        trace.function("nothing_saveable", "head in 4")(args[0], args[1][:6], args[2][:6])


def _twice():
    def outer(u, h, y):
        return head(u, h, y)

    def of_two(p, x, y):
        def head(u, h):
            return jnp.sum(h @ u)

        return head(p["u"], x) + outer(p["u"], x, y)

    return of_two


@pytest.mark.parametrize(
    ("fun", "at", "why"),
    [
        (loss, "head in 3", r"16 examples are not head in 3: choose one of \[2, 4, 8, 16\]"),
        (loss, "head in 1", "16 examples are not head in 1"),
        (loss, "heads in 4", "did you mean 'head in 4'"),
        (_twice(), "head in 4", r"did you mean 'head:\d+ in 4'"),
        (_twice(), {"outer in 4": "none", "head:189 in 2": "none"}, "stands in another"),
        (lambda p, x, y: head(p["u"], x[:2], y[:2]) + jnp.sum(x), "head in 2", "nothing that it takes"),
        (lambda p, x, y: head(p["u"], x.reshape(4, -1, 8)[0], y[:4]) + jnp.sum(x), "head in 2", "cannot be"),
    ],
)
def test_what_cannot_be_is_told(fun, at, why):
    at = (
        {re.sub(r":\d+ ", f":{head.__code__.co_firstlineno} ", key): it for key, it in at.items()}
        if isinstance(at, dict)
        else at
    )
    trace = rm.trace(fun, *parameters(), wrt=0)
    with pytest.raises(rm.RematError, match=why):
        trace.report(at=at) if isinstance(at, dict) else trace.report("nothing_saveable", at=at)


def test_it_is_a_choice_of_fit_with_code(module):
    text = CODE.format(WAYS["a mean"][0])
    made, p = module(text), {"u": F32((64, 8192)), "e": F32((8192, 64)), "w": F32((64, 64))}
    trace = rm.trace(made.step, p, jax.ShapeDtypeStruct((64, 32), "int32"))
    fit = trace.fit("60 MB", compile=False)
    tried = {choice.at: choice for choice in fit.tried if choice.at.startswith("head")}
    assert {"head", "head in 8"} <= tried.keys()
    assert len(tried) <= 4  # the others are by a line through two
    choice = tried["head in 8"]
    assert choice.what == "head in 8 parts, each under a checkpoint"
    assert choice.by_hand
    assert not choice.unusable
    assert choice.needed_bytes < tried["head"].needed_bytes / 2
    assert choice.code.startswith(
        "import jax\n\njax.tree.map(lambda a: a.mean(0), jax.lax.map(jax.checkpoint(lambda x: head("
    )
    assert trace.report(choice, device="H100 SXM").peak_bytes == choice.needed_bytes
    assert "by hand it is `jax.tree.map(" in trace.edit(choice).unnamed[0]
    small = rm.trace(made.step, model(), tokens()).fit("1 MB", compile=False)
    assert trace.parts or small


def _equinox():
    eqx = library("equinox")

    class Model(eqx.Module):
        body: eqx.nn.Linear
        out: jax.Array

        def head(self, h, labels):
            return -jnp.take_along_axis(jax.nn.log_softmax(h @ self.out), labels[:, None], -1).mean()

    made = Model(eqx.nn.Linear(8, 8, key=jax.random.key(0)), jnp.ones((8, 40)))

    def loss(model, x, labels):
        h = jax.vmap(model.body)(x)
        return model.head(h, labels)

    return made, loss, "Model.head in 4"


def _linen():
    nn = library("flax.linen")
    net = nn.Sequential([nn.Dense(8), nn.tanh])

    def head(u, h, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ u), labels[:, None], -1).mean()

    def loss(p, x, labels):
        return head(p["u"], net.apply(p["net"], x), labels)

    return {"net": net.init(jax.random.key(0), jnp.ones((16, 8))), "u": jnp.ones((8, 40))}, loss, "head in 4"


@pytest.mark.parametrize("made", [_equinox, _linen])
def test_with_libraries(made):
    params, loss, at = made()
    x, labels = jax.random.normal(jax.random.key(1), (16, 8)), jnp.arange(16)
    for fun in (loss, jax.jit(lambda p, x, t: jax.value_and_grad(loss)(p, x, t))):
        trace = rm.trace(fun, params, x, labels)
        report = trace.report("nothing_saveable", at=at)
        assert report.peak_bytes < trace.report().peak_bytes
        assert "jax.lax.map" in report.code
        assert_close(trace.function("nothing_saveable", at=at)(params, x, labels), fun(params, x, labels))
