"""What takes memory by the way a program is written, held against the program that is written otherwise, and XLA."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_magic as rm
from remat_magic.advice.rules import lines_of_part
from tests.programs import f32

BF16 = jnp.bfloat16


def narrow(*shape):
    return jax.ShapeDtypeStruct(shape, BF16)


def kinds(trace, policy="as_written"):
    return {advice.kind: advice for advice in trace.advice(policy)}


# ------------------------------------------------------------------------------------ narrow values that meet wide ones


def layers(ws, x):
    for w in ws:
        x = jax.nn.silu(x @ w).astype(BF16)
    return jnp.mean(x.astype("float32") ** 2)


def with_bias(ws, x):
    for w, b in ws:
        x = jax.nn.gelu(x @ w + b)
    return jnp.mean(x.astype("float32") ** 2)


def in_a_scan(ws, x):
    step = lambda x, w: (jnp.tanh(x @ w).astype(BF16), None)  # noqa: E731
    return jnp.mean(lax.scan(step, x, ws)[0].astype("float32") ** 2)


def attention(ws, x):
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, ws[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", q, k) / 8)
    return jnp.mean(jnp.einsum("bhts,bhse->bhte", scores, v).astype("float32") ** 2)


def norm(scale, x):
    """In float32 on purpose, as norms are."""
    wide = x.astype("float32")
    return jnp.sin(wide * lax.rsqrt((wide**2).mean(-1, keepdims=True)) * scale).astype(BF16).astype("float32").sum()


def logits(w, x):
    return jax.nn.logsumexp(x.astype("float32") @ w, -1).mean()


def carried_wide(w, x):
    """A carry of a type that narrow weights do not keep."""
    step = lambda c, _: (jnp.tanh(x @ w) * c.sum().astype(w.dtype), None)  # noqa: E731
    return lax.scan(step, jnp.zeros((512, 128)), None, length=3)[0].sum()


SQUARE, VALUE = f32(128, 128), narrow(512, 128)
HEADS = {name: f32(128, 4, 32) for name in "qkv"}
# Whether the figure is to be what the mend spares; else these are the program's own casts, of which nothing is said.
WIDE = {
    "layers": (layers, [SQUARE] * 4, VALUE, True),
    "with a bias": (with_bias, [(SQUARE, f32(128))] * 3, VALUE, True),
    "in a scan": (in_a_scan, f32(4, 128, 128), VALUE, True),
    "attention": (attention, HEADS, narrow(4, 64, 128), True),
    "wide from the first": (layers, [SQUARE] * 4, f32(512, 128), True),
    "a norm": (norm, f32(128), VALUE, False),
    "logits": (logits, SQUARE, VALUE, False),
    "narrow weights": (layers, [narrow(128, 128)] * 4, VALUE, False),
    "all wide": (lambda ws, x: jnp.sin(x @ ws).sum(), SQUARE, f32(512, 128), False),
    "what cannot be cast": (carried_wide, SQUARE, VALUE, False),
}


def cast_first(fun):
    return lambda ws, x: fun(jax.tree.map(lambda w: w.astype(BF16), ws), x)


def step_of(fun):
    return lambda ws, x: jax.tree.map(lambda w, g: w - g, ws, jax.grad(fun)(ws, x))


@pytest.mark.parametrize("within", ["function", "step"])
@pytest.mark.parametrize("name", WIDE)
def test_what_is_wide_by_its_weights_is_named_with_what_a_cast_spares(name, within):
    fun, weights, x, said = WIDE[name]
    around = step_of if within == "step" else lambda fun: fun
    trace = rm.trace(around(fun), weights, x)
    found = kinds(trace).get("wide-residuals")
    assert said == (found is not None and "Cast" in found.mend)
    if said:
        cast = rm.trace(around(cast_first(fun)), weights, x)
        assert found.figure == trace.report().saved_bytes - cast.report().saved_bytes > 0
        assert trace.report().wrt[0] in found.sentence
        assert found.source.file == __file__


def test_a_cast_of_what_a_loss_closes_over_has_no_figure():
    trace = rm.trace(lambda ws, b, x: jax.grad(lambda b: layers(ws, x + b))(b), [SQUARE] * 4, narrow(128), VALUE)
    found = kinds(trace)["wide-residuals"]
    assert (found.figure, found.unit) == (None, "")
    assert found.stake > 0


def attended(ws, x):
    for w in ws:
        q, k, v = jnp.split(x @ w, 3, -1)
        x = x + jax.nn.softmax((q @ k.T).astype("float32") / 8.0).astype(BF16) @ v
    return jnp.mean(x.astype("float32") ** 2)


def attended_by_lines(ws, x):
    """As ``attended``, with the lines that are named in a function of their own."""
    for w in ws:
        q, k, v = jnp.split(x @ w, 3, -1)
        x = jax.checkpoint(lambda x, q, k, v: x + jax.nn.softmax((q @ k.T).astype("float32") / 8.0).astype(BF16) @ v)(
            x, q, k, v
        )
    return jnp.mean(x.astype("float32") ** 2)


def test_a_part_that_is_named_is_one_that_can_be_written():
    args = [narrow(64, 192)] * 3, narrow(256, 64)
    trace, mended = rm.trace(attended, *args), rm.trace(attended_by_lines, *args)
    found = kinds(trace)["wide-residuals"]
    assert found.figure == trace.report().saved_bytes - mended.report().saved_bytes
    first = attended.__code__.co_firstlineno
    assert f"Put line {first + 3} of attended" in found.mend


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("y = x\nz = y", (1, 2)),
        ("y = x\nreturn y", (1, 2)),
        ("for _ in x:\n  y = x\nreturn y", None),
        ("for _ in x:\n  y = (\n    x)\n  z = y", (2, 4)),
        ("x[0] = y\nz = y", None),
        ("if x:\n  y = x\nelse:\n  z = x", None),
        ("x.append(y)", None),
    ],
)
def test_lines_that_can_be_a_function_of_their_own(text, lines, tmp_path):
    file = tmp_path / "text.py"
    file.write_text(text)
    first = 3 if lines == (2, 4) else 1 if lines or "for" not in text else 2
    assert lines_of_part(str(file), first, len(text.splitlines())) == lines


@pytest.mark.models
@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_a_layer_of_a_library_that_widens_is_named(library):
    """Flax casts its inputs in a line of its own, equinox multiplies what it is given."""
    if library == "flax":
        linen = pytest.importorskip("flax.linen")
        model = linen.Sequential([linen.LayerNorm(), linen.Dense(512), linen.gelu, linen.Dense(128), linen.silu])
        params = jax.eval_shape(model.init, jax.random.key(0), VALUE)
        loss = lambda params, x: model.apply(params, x).astype("float32").sum()  # noqa: E731
        trace = rm.trace(loss, params, VALUE)
        cast = rm.trace(lambda params, x: loss(jax.tree.map(lambda p: p.astype(BF16), params), x), params, VALUE)
        spared = trace.report().saved_bytes - cast.report().saved_bytes
        assert kinds(trace)["wide-residuals"].figure == spared
    else:
        equinox = pytest.importorskip("equinox")
        model = equinox.nn.MLP(128, 128, 128, 2, jax.nn.silu, key=jax.random.key(0))
        trace = rm.trace(lambda model, x: jax.vmap(model)(x).sum(), model, VALUE)
    assert "to bf16 before" in kinds(trace)["wide-residuals"].mend


@pytest.mark.models
def test_lines_that_call_modules_of_linen_are_put_into_no_checkpoint():
    """Their parameters would leak from it; lines that call none can be."""
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        called: bool

        @linen.compact
        def __call__(self, x):
            for _ in range(2):
                if self.called:
                    x = jnp.exp(jnp.sin(linen.Dense(128)(x)) * x)
                else:
                    y = linen.Dense(128)(x)
                    x = jnp.exp(jnp.sin(y) * y)
            return x

    for called in (True, False):
        model = Net(called)
        params = jax.eval_shape(model.init, jax.random.key(0), f32(512, 128))
        trace = rm.trace(lambda params, x, model=model: model.apply(params, x).sum(), params, f32(512, 128))
        assert ("cheap-to-recompute" in kinds(trace)) == (not called)


# ---------------------------------------------------------------------------------------- arguments that are given back

STACK, X = f32(8, 256, 256), f32(16, 256)


def loss(params, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0] @ params["head"]) ** 2


def net(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, ws)[0] ** 2)


def stacked(ws, x):
    x, again = lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, w), x, ws)
    return jnp.mean(x**2), again


def carried(ws, x):
    (x, again), _ = lax.scan(lambda c, w: ((jnp.tanh(c[0] @ w) + c[0], c[1]), None), (x, ws), ws)
    return jnp.mean(x**2), again


def each_step(w, x):
    x, again = lax.scan(lambda x, _: (jnp.tanh(x @ w) + x, w), x, None, length=8)
    return jnp.mean(x**2), again


# With how many copies of the stack.
COPIES = {
    "a scan stacks it": (stacked, STACK, 1),
    "jitted": (jax.jit(stacked), STACK, 1),
    "given back": (lambda ws, x: (net(ws, x), ws), STACK, 1),
    "twice": (lambda ws, x: (net(ws, x), (ws, ws)), STACK, 2),
    "a scan carries it": (carried, STACK, 1),
    "a scan stacks it in each step": (each_step, f32(256, 256), 1),
    "changed": (lambda ws, x: (net(ws, x), ws * 2), STACK, 0),
    "not given back": (lambda ws, x: (net(ws, x), x), STACK, 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_is_given_back_as_it_came_is_a_copy(name):
    """Named, and in the peak of this machine: that is XLA's, within a tenth."""
    fun, weights, copies = COPIES[name]
    trace = rm.trace(fun, weights, X, has_aux=True)
    found = kinds(trace).get("argument-given-back")
    assert (found.figure if found else 0) == copies * 8 * 256 * 256 * 4
    assert trace.report().peak_bytes == pytest.approx(trace.measure().total_bytes, rel=0.1)
    copied = [value for value in trace.timeline().alive if value.kind == "temporary" and value.argument]
    assert sum(value.nbytes for value in copied) >= copies * 8 * 256 * 256 * 4


@pytest.mark.parametrize("donated", [False, True])
def test_what_is_given_away_is_no_copy(donated):
    def step(params, x):
        rest = lambda head: loss({**params, "head": head}, x)  # noqa: E731
        return {**params, "head": params["head"] - 0.1 * jax.grad(rest)(params["head"])}

    params = {"layers": STACK, "head": f32(256, 256)}
    trace = rm.trace(jax.jit(step, donate_argnums=(0,) if donated else ()), params, X)
    assert ("argument-given-back" in kinds(trace)) == (not donated)
    assert trace.report().peak_bytes == pytest.approx(trace.measure().total_bytes, rel=0.1)
