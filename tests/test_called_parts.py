"""A called function in parts: ``jax.lax.map`` over parts of its batch, where that is known to be the same."""

import random

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from tests.report_checks import types_and_kinds
from tests.test_microbatches import EXACT, TOKENS, WRONG, P, X, assert_close, by_chance
from tests.test_models import library


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


def assert_same(changed, fun, args=(P, X, TOKENS)):
    assert_close(jax.jit(jax.value_and_grad(changed))(*args), jax.jit(jax.value_and_grad(fun))(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_what_is_a_sum_a_mean_or_values_of_each_example_is_done(name):
    scale = 1e-3 if "sum" in name else 1.0  # of a large number the sine is any
    loss = in_a_call(lambda *args: scale * EXACT[name](*args))
    assert_same(rm.trace(loss, P, X, TOKENS, wrt=0).function("nothing_saveable", at="head in 4"), loss)


@pytest.mark.parametrize("name", mostly_slow([name for name in WRONG if name != "a constant"], QUICK))
def test_what_is_none_is_refused_with_its_line(name):
    trace = rm.trace(in_a_call(WRONG[name]), P, X, TOKENS, wrt=0)
    with pytest.raises(rm.RematError, match=r"head in 4 cannot be done: .+ \(test_microbatches\.py:\d+: `"):
        trace.report("nothing_saveable", at="head in 4")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_programs_by_chance_are_done_only_where_that_is_the_same(seed):
    whole, parts = by_chance(seed)[0], random.Random(seed).choice([2, 4, 8])
    loss = in_a_call(lambda *args: 0.01 * whole(*args))
    trace, at = rm.trace(loss, P, X, TOKENS, wrt=0), f"head in {parts}"
    try:
        trace.report("nothing_saveable", at=at)
    except rm.RematError as error:
        assert "cannot be done" in str(error)
    else:
        assert_same(trace.function("nothing_saveable", at=at), loss)


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
    "in a scan, and under checkpoints of their own": (
        """
@jax.checkpoint
def head(u, h, labels):
    return losses(u, h, labels).sum()

def loss(p, tokens):
    def step(h, _):
        out = mlp(p["w"], h)
        return h + out, jnp.sum(out)
    h, sums = jax.lax.scan(step, p["e"][tokens], None, 3)
    return head(p["u"], h, labels=tokens) / 100 + 1e-3 * jnp.sum(sums)
""",
        {"mlp in 4": "nothing_saveable", "head in 2": "dots_saveable"},
        ('mlp(p["w"], h)', 'head(p["u"], h, labels=tokens)'),
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


@pytest.mark.parametrize("way", mostly_slow(WAYS, ["in bfloat16"]))
def test_its_code_does_what_is_reported(way, module):
    program, at, calls = WAYS[way]
    at, calls = at if isinstance(at, dict) else {at: "nothing_saveable"}, [calls] if isinstance(calls, str) else calls
    text, args = CODE.format(program), (model(), tokens())
    made = module(text)
    assert rm.trace(made.loss, *args, wrt=0).report(at=at).code
    trace = rm.trace(made.step, *args)
    report, edited = trace.report(at=at), text
    for call, code in zip(calls, report.code.splitlines(), strict=True):
        assert call in text
        edited = edited.replace(call, "+ " * call.startswith("+") + code)
    changed = module(edited)
    written = rm.trace(changed.step, *args).report()
    assert types_and_kinds(written) == types_and_kinds(report)
    assert written.repeated_flops == report.repeated_flops
    if "bfloat16" not in way:
        wanted = jax.jit(made.step)(*args)
        assert_close(jax.jit(changed.step)(*args), wanted)
        assert_close(jax.jit(trace.function(at=at))(*args), wanted)


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
    trace = rm.trace(loss, *args, wrt=0)
    both = {"head in 4": "nothing_saveable", "block": "nothing_saveable"}
    inner = {"block in 2": "none", "head in 8": "dots_saveable"}
    for at in (both, inner):
        changed, report = trace.function(at=at), trace.report(at=at)
        assert_same(changed, loss, args)
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
        (loss, ["head in 3"], r"16 examples are not head in 3: choose one of \[2, 4, 8, 16\]"),
        (loss, ["head in 1"], "16 examples are not head in 1"),
        (loss, ["heads in 4"], "did you mean 'head in 4'"),
        (_twice(), ["head in 4"], r"did you mean 'head:\d+ in 4'"),
        (_twice(), ["outer in 4", f"head:{head.__code__.co_firstlineno} in 2"], "stands in another"),
        (lambda p, x, y: head(p["u"], x[:2], y[:2]) + jnp.sum(x), ["head in 2"], "nothing that it takes"),
    ],
)
def test_what_cannot_be_is_told(fun, at, why):
    trace = rm.trace(fun, *parameters(), wrt=0)
    with pytest.raises(rm.RematError, match=why):
        trace.report(at=dict.fromkeys(at, "nothing_saveable"))


def test_it_is_a_choice_of_fit_with_code(module):
    text = CODE.format(WAYS["a mean"][0])
    shapes = {"u": (64, 8192), "e": (8192, 64), "w": (64, 64)}
    made, p = module(text), {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
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
    assert choice.code.startswith("import jax\n\njax.tree.map(lambda a: a.mean(0), jax.lax.map(jax.checkpoint(")
    assert trace.report(choice, device="H100 SXM").peak_bytes == choice.needed_bytes
    assert "by hand it is `jax.tree.map(" in trace.edit(choice).unnamed[0]


MODULES = """
import jax, jax.numpy as jnp

def losses(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1)[:, 0]

x, y = jax.random.normal(jax.random.key(1), (16, 8)), jnp.arange(16) % 12
{}

def loss(model, x, y):
    return apply(model, x, y)
"""
CALLED = {  # by library: a program, the place, and the calls in the source
    "equinox": (
        """
import equinox as eqx
class Mlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    def __call__(self, x):
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
class Net(eqx.Module):
    mlp: Mlp
    out: jax.Array
    def head(self, h, y, mask):
        return (losses(h @ self.out, y) * mask).sum()
    def __call__(self, x, y):
        return self.head(x + self.mlp(x), y, jnp.where(y > 3, 1.0, 0.0))
def make():
    keys = jax.random.split(jax.random.key(0))
    return Net(Mlp(eqx.nn.Linear(8, 32, key=keys[0]), eqx.nn.Linear(32, 8, key=keys[1])), jnp.ones((8, 12)))
apply = lambda model, x, y: model(x, y)
""",
        {"Net.head in 4": "self.head(x + self.mlp(x), y, jnp.where(y > 3, 1.0, 0.0))", "Mlp in 8": "self.mlp(x)"},
    ),
    "flax.nnx": (
        """
from flax import nnx
class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(12, 8, rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
    def head(self, h, y):
        return losses(self.embed.attend(self.norm(h)), y)
    def __call__(self, x, y):
        return self.head(self.embed(y) + x, y=y).mean() + self.head(jnp.sin(x), y).mean()
make = Net
apply = lambda model, x, y: model(x, y)
""",
        {"Net.head in 4": ("self.head(self.embed(y) + x, y=y)", "self.head(jnp.sin(x), y)")},
    ),
    "flax.linen": (
        """
import flax.linen as nn
class Mlp(nn.Module):
    width: int
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(8)(nn.Dropout(0.5, deterministic=not train)(jax.nn.gelu(nn.Dense(self.width)(x))))
class Net(nn.Module):
    def setup(self):
        self.mlp, self.embed, self.drop = Mlp(32), nn.Embed(12, 8), nn.Dropout(0.5)
    def head(self, h, y, scale):
        return losses(scale * self.embed.attend(h), y).mean()
    @nn.compact
    def __call__(self, x, y):
        h = x + self.mlp(x, False) + Mlp(16, name="other")(x, train=False)
        return self.head(self.drop(h, deterministic=False), y, nn.Dense(1)(jnp.ones(3)))
make = lambda: Net().init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, x, y)
apply = lambda params, x, y: Net().apply(params, x, y, rngs={"dropout": jax.random.key(2)})
""",
        {
            "Net.head in 4": "self.head(self.drop(h, deterministic=False), y, nn.Dense(1)(jnp.ones(3)))",
            "Mlp in 8": ("self.mlp(x, False)", 'Mlp(16, name="other")(x, train=False)'),
        },
    ),
    "haiku": (
        """
import haiku as hk
class Mlp(hk.Module):
    def __call__(self, x):
        return hk.Linear(8)(jax.nn.gelu(hk.Linear(32)(x)))
class Net(hk.Module):
    def head(self, h, y):
        return losses(hk.Linear(12)(h), y).mean()
    def __call__(self, x, y):
        mlp = Mlp()
        h = mlp(jnp.sin(x))
        return self.head(mlp(h), y)
net = hk.transform(lambda x, y: Net()(x, y))
make = lambda: net.init(jax.random.key(0), x, y)
apply = lambda params, x, y: net.apply(params, None, x, y)
""",
        {"Net.head in 4": "self.head(mlp(h), y)", "Mlp in 8": ("mlp(jnp.sin(x))", "mlp(h)")},
    ),
}


@pytest.mark.models
@pytest.mark.parametrize("name", mostly_slow(CALLED, ["flax.nnx"]))
def test_the_code_for_modules_does_what_is_reported(name, module):
    library(name)
    program, places = CALLED[name]
    text = MODULES.format(program)
    made = module(text)
    wanted = jax.value_and_grad(made.loss, allow_int=True)(made.make(), made.x, made.y)
    trace = rm.trace(made.loss, made.make(), made.x, made.y, wrt=0)
    for at, calls in places.items():
        key = at if at.startswith("Net") else at.replace(" in", ".__call__ in")
        report, edited = trace.report("nothing_saveable", at=key), text
        for call, code in zip([calls] if isinstance(calls, str) else calls, report.code.splitlines(), strict=True):
            assert call in edited
            edited = edited.replace(call, code)
        changed = module(edited)
        written = rm.trace(changed.loss, changed.make(), made.x, made.y, wrt=0).report()
        assert types_and_kinds(written) == types_and_kinds(report)
        assert written.repeated_flops == report.repeated_flops
        assert_arrays_close(changed.make(), made.make())
        for fun in (changed.loss, trace.function("nothing_saveable", at=key)):
            assert_arrays_close(jax.value_and_grad(fun, allow_int=True)(made.make(), made.x, made.y), wanted)


def assert_arrays_close(*trees):
    leaves = [[leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)] for tree in trees]
    assert_close(*leaves)


UNWRITTEN = {  # what is done as a function, and cannot be written as one call: it leaves something in a module
    "flax.nnx": """
from flax import nnx
class Net(nnx.Module):
    def __init__(self):
        self.out, self.count = nnx.Linear(8, 12, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))
    def head(self, h, y):
        self.count[...] += 1
        return losses(self.out(h), y).mean()
    def __call__(self, x, y):
        return self.head(jnp.sin(x), y)
make = Net
apply = nnx.value_and_grad(lambda model, x, y: model(x, y))
""",
    "flax.linen": """
import flax.linen as nn
class Net(nn.Module):
    def setup(self):
        self.out = nn.Dense(12)
    def head(self, h, y):
        logits = self.out(h)
        self.sow("seen", "logits", logits)
        return losses(logits, y).mean()
    def __call__(self, x, y):
        return self.head(jnp.sin(x), y)
make = lambda: Net().init(jax.random.key(0), x, y)
apply = lambda params, x, y: sum(map(jnp.sum, jax.tree.leaves(Net().apply(params, x, y, mutable=["seen"]))))
""",
}


@pytest.mark.models
@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_leaves_something_in_a_module_has_no_code(name, module):
    library(name)
    made = module(MODULES.format(UNWRITTEN[name]))
    trace = rm.trace(made.loss, made.make(), made.x, made.y)
    assert not trace.report("nothing_saveable", at="Net.head in 4").code
    assert "No code is known" in trace.fit_choice("nothing_saveable", "Net.head in 4", "24 GiB").unusable


def test_what_an_argument_is_computed_by_is_computed_once(module):
    text = MODULES.format("""
def head(w, h, y):
    return losses(h @ w, y).mean()
make = lambda: jnp.ones((8, 12))
apply = lambda w, x, y: head(jnp.sin(w @ w.T) @ w, x, y)
""")
    made = module(text)
    report = rm.trace(made.loss, made.make(), made.x, made.y, wrt=0).report("nothing_saveable", at="head in 4")
    changed = module(text.replace("head(jnp.sin(w @ w.T) @ w, x, y)", report.code))
    written = rm.trace(changed.loss, made.make(), made.x, made.y, wrt=0).report()
    assert types_and_kinds(written) == types_and_kinds(report)
    assert written.repeated_flops == report.repeated_flops


def test_a_call_that_returns_the_numbers_of_its_examples_is_refused():
    def head(w, h):
        return jnp.sin(h @ w).sum(-1), jnp.arange(h.shape[0], dtype="float32")

    def loss(w, x):
        values, numbers = head(w, x)
        return (values * numbers).sum()

    trace = rm.trace(loss, jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((16, 4), "float32"))
    with pytest.raises(rm.RematError, match="head in 4 cannot be done"):
        trace.report("nothing_saveable", at="head in 4")
