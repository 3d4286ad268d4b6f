"""What users of jax.checkpoint write, one case each: the report holds together and lists what JAX itself lists."""

from __future__ import annotations

import collections
import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
import tests.programs
from tests.programs import f32
from tests.report_checks import check_report, types_of_jax, types_of_ours

P = jax.checkpoint_policies
CASES = {}


def case(*args, wrt=None, **kwargs):
    def register(fun):
        CASES[fun.__name__] = (fun, args, kwargs, wrt)
        return fun

    return register


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@case(f32(4), True, "sin")
@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def static_arguments(x, train, how):
    return (getattr(jnp, how)(x) if train else x).sum()


@case(f32(4), f32(4))
def symbolic_zeros(x, y):
    def pair(x, y):
        return jnp.sin(x), y * 2

    one, _ = jax.checkpoint(pair)(x, jax.lax.stop_gradient(y))
    return one.sum()


@case(f32(3), i32(3))
def custom_derivative_with_integers(x, at):
    @jax.custom_vjp
    def take(x, at):
        return x[at]

    take.defvjp(
        lambda x, at: (x[at], at), lambda at, g: (jnp.zeros(3).at[at].add(g), np.zeros(at.shape, jax.dtypes.float0))
    )
    return jax.checkpoint(lambda x: jnp.sin(take(jnp.sin(x), at)), policy=P.dots_saveable)(x).sum()


@case(f32(4), 2)
def nondiff_argnums(x, n):
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def power(x, n):
        return x**n

    power.defjvp(lambda n, primals, tangents: (primals[0] ** n, n * primals[0] ** (n - 1) * tangents[0]))
    return power(jnp.sin(x), n).sum()


@case({"a": f32(4), "b": f32(4)})
@functools.partial(jax.checkpoint, policy=P.save_only_these_names("tree"))
def names_in_pytrees(p):
    p = checkpoint_name(jax.tree.map(jnp.sin, p), "tree")
    return jnp.sum(jnp.sin(p["a"]) * p["b"])


@case(f32(4))
def effects_inside(x):
    def layer(x):
        jax.debug.print("{}", x.sum())
        return jnp.sin(x)

    return jax.checkpoint(layer)(x).sum()


@case(f32(4))
def debug_callback_outside(x):
    jax.debug.callback(lambda x: None, x)
    return jnp.sin(jax.checkpoint(jnp.sin)(x)).sum()


@case(f32(4))
def pure_callback(x):
    y = jax.pure_callback(np.cos, jax.ShapeDtypeStruct((4,), jnp.float32), jax.lax.stop_gradient(x))
    return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x) * y)(x))


@case(f32(3, 4, 4), f32(2, 4))
def remat_in_scan_in_vmap(ws, xs):
    def forward(x):
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(w @ c), c.sum()))
        return jax.lax.scan(layer, x, ws)

    y, sums = jax.vmap(forward)(xs)
    return y.sum() + sums.sum()


@case(f32(5, 4, 4), f32(4))
def scan_with_unroll_and_reverse(ws, x):
    return jax.lax.scan(lambda c, w: (jnp.sin(w @ c), None), x, ws, unroll=2, reverse=True)[0].sum()


@case(f32(4, 3))
def lax_map(xs):
    return jax.lax.map(jax.checkpoint(lambda x: jnp.sin(x) * x), xs, batch_size=2).sum()


@case(f32(3, 3), f32(3))
def linear_algebra(a, b):
    spd = a @ a.T + jnp.eye(3)
    _, s, _ = jnp.linalg.svd(a, full_matrices=False)
    values, _ = jnp.linalg.eigh(spd)
    solved = jnp.linalg.solve(spd, b) + jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(spd), True), b)
    return solved.sum() + s.sum() + values.sum() + jnp.linalg.slogdet(spd)[1] + jnp.linalg.qr(a)[1].sum()


@case(f32(2, 5, 2, 4), f32(2, 5, 2, 4), f32(2, 5, 2, 4))
def attention(q, k, v):
    return jax.checkpoint(functools.partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v).sum()


@case(f32(3, 4))
def random_in_the_loss(x):
    key = jax.random.key(0)
    keep = jax.checkpoint(lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0))
    return jnp.sin(keep(jnp.sin(x), key)).sum() + jax.random.gamma(key, x**2 + 1).sum()


@case(jax.ShapeDtypeStruct((2,), jnp.uint32), f32(3))
def raw_key_as_argument(key, x):
    return jnp.sum(jax.random.normal(key, x.shape) * jnp.sin(x))


class Params(typing.NamedTuple):
    w: typing.Any
    b: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: typing.Any
    step: typing.Any
    how: str = dataclasses.field(metadata={"static": True}, default="sin")


@case(State(Params(f32(4, 4), f32(4)), i32()), f32(4))
def dataclass_and_named_tuple(state, x):
    return getattr(jnp, state.how)(state.params.w @ x + state.params.b).sum() * state.step


@case(collections.OrderedDict(b=f32(4), a=f32(4)), [f32(4), None, ()])
def containers(p, rest):
    return jnp.sum(jnp.sin(p["a"]) * p["b"] * rest[0])


@case(np.ones((4, 4), np.float32), np.float32(2.0), 3.0, True, 2, np.int32(1))
def numpy_and_python_arguments(w, scale, factor, flag, n, index):
    return (jnp.sin(w) * scale * factor).sum() * (n if flag else 1) + index


@case(jnp.ones((3,)), weak=1.0)
def weak_types(x, *, weak):
    return jnp.sin(x * weak + 2).sum() + jnp.asarray(1.0) * weak


@case(f32(4), a=f32(4), b=f32(4))
def keywords(x, **others):
    return sum(jnp.sum(jnp.sin(other) * x) for other in others.values())


@case(f32(4), f32(4))
def gradient_of_a_gradient(w, x):
    inner = jax.grad(lambda x: jnp.sin(jax.checkpoint(jnp.sin)(x * w)).sum())
    return jnp.sum(inner(x) ** 2)


@case(f32(4), f32(4))
def forward_mode_inside(w, x):
    value, tangent = jax.jvp(lambda x: jax.checkpoint(lambda y: jnp.sin(y))(w * x), (x,), (w,))
    _, linear = jax.linearize(jnp.sin, x)
    return jnp.sum(value * tangent * linear(w))


@case(f32(4, 3), i32(4))
def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


@case(f32(4))
def nothing_depends_on_it(x):
    return jnp.ones(3).sum()


def parity(trace, fun, args, kwargs, policy):
    try:
        expected = types_of_jax(fun, args, kwargs)
    except (AssertionError, TypeError) as error:  # its own: a value saved twice, a rounded literal
        assert isinstance(error, AssertionError) or "Literal" in str(error)
        return
    assert types_of_ours(trace.report(policy, at="function")) == expected


def dynamic(fun, args, kwargs):
    """The call with what is no array closed over: JAX's list takes arrays only."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    which = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, (bool, int, str))]

    def call(*arrays):
        values = list(leaves)
        for i, array in zip(which, arrays, strict=True):
            values[i] = array
        args, kwargs = jax.tree.unflatten(tree, values)
        return fun(*args, **kwargs)

    return call, [leaves[i] for i in which]


@pytest.mark.parametrize("name", CASES)
def test_a_use_of_checkpoint_is_reported_as_jax_lists_it(name, remat3):
    fun, args, kwargs, wrt = CASES[name]
    call, arrays = dynamic(fun, args, kwargs)
    trace = rm.trace(fun, *args, wrt=wrt, **kwargs)
    for policy, under in (
        ("as_written", call),
        ("nothing_saveable", jax.checkpoint(call)),
        ("dots_saveable", jax.checkpoint(call, policy=P.dots_saveable)),
    ):
        for at in (None,) if trace.default_at == "function" else (None, "function"):
            try:
                report = trace.report(policy, at)
            except rm.RematError as error:
                assert name.endswith("callback_outside"), error
                with pytest.raises((NotImplementedError, TypeError)):
                    types_of_jax(under, arrays)
                continue
            assert not report.backward_error
            if name != "numpy_and_python_arguments":
                check_report(report, trace, policy, at, __file__, tests.programs.__file__)
        own = trace.default_at == "function" and trace.engine.primal.table.sites
        if policy == "as_written" or not own:
            try:
                trace.report(policy, "function")
            except rm.RematError:
                continue
            parity(trace, under, arrays, {}, policy)


class Model:
    def __init__(self):
        self.w = jnp.ones((4, 4))

    def loss(self, x):
        return jnp.sin(self.w @ x).sum()

    @classmethod
    def of_class(cls, x):
        return jnp.sin(x).sum()

    @staticmethod
    def plain(x):
        return jnp.sin(x).sum()

    def __call__(self, x):
        return self.loss(x)

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return self.loss(x)


@pytest.mark.parametrize(
    "fun",
    [
        Model().loss,
        Model(),
        Model.of_class,
        Model.plain,
        Model().jitted,
        lambda x: Model().loss(x),
        functools.partial(lambda w, x: jnp.sin(w @ x).sum(), jnp.ones((4, 4))),
        functools.partial(functools.partial(lambda a, x, b: jnp.sin(x * a + b).sum(), 2.0), b=1.0),
        jax.jit(lambda x: jnp.sin(x).sum()),
        jax.jit(jax.checkpoint(lambda x: jnp.sin(x).sum())),
        jax.named_call(lambda x: jnp.sin(x).sum(), name="n"),
        jax.tree_util.Partial(lambda a, x: jnp.sin(x * a).sum(), 2.0),
        jax.vmap(lambda x: jnp.sin(x)),
        jnp.sin,
    ],
)
def test_whatever_can_be_called_can_be_inspected(fun, remat3):
    """Whatever can be called can be inspected, and runs under a policy."""
    trace = rm.trace(fun, f32(4))
    assert trace.report().residuals
    assert trace.function_name
    x = jnp.arange(4.0)
    np.testing.assert_allclose(trace.function("nothing_saveable")(x), fun(x), rtol=1e-6)


def test_integer_arguments_have_float0_gradients(remat3):
    def loss(x, n):
        return jnp.sum(jnp.sin(x) * n)

    x, n = jnp.ones(3), jnp.arange(3)
    applied = rm.trace(loss, x, n).function("nothing_saveable")
    gradient = jax.grad(applied, argnums=(0, 1), allow_int=True)(x, n)
    assert gradient[1].dtype == jax.dtypes.float0
    # And such a gradient may itself be an argument.
    assert rm.trace(lambda x, zero: jnp.sin(x).sum(), x, gradient[1]).report().wrt == ("x",)


def spectrum(w, x):
    """A Fourier layer, of which the parts have names as well."""
    y = checkpoint_name(jnp.fft.rfft(x) @ w, "whole")
    y = jax.lax.complex(checkpoint_name(y.real, "real"), checkpoint_name(y.imag, "imaginary"))
    return jnp.sum(jnp.abs(jnp.sin(y)) ** 2)


SPECTRUM = jax.ShapeDtypeStruct((9, 9), jnp.complex64), f32(4, 16)
COMPLEX = {
    "nothing_saveable": P.nothing_saveable,
    "everything_saveable": P.everything_saveable,
    "dots_saveable": P.dots_saveable,
    "dots_with_no_batch_dims_saveable": P.dots_with_no_batch_dims_saveable,
    "save_only_these_names('whole')": P.save_only_these_names("whole"),
    "save_only_these_names('real', 'imaginary')": P.save_only_these_names("real", "imaginary"),
}


@pytest.mark.parametrize("key", COMPLEX)
def test_a_policy_that_would_save_a_complex_value_is_refused_in_a_sentence(key, remat3):
    """Just where JAX refuses it; what it can save is saved."""
    trace = rm.trace(spectrum, *SPECTRUM)
    loss = jax.checkpoint(spectrum, policy=COMPLEX[key])
    try:
        jax.eval_shape(jax.grad(loss), *SPECTRUM)
    except TypeError:
        for ask in (trace.report, trace.timeline, trace.backward):
            with pytest.raises(rm.RematError, match="JAX cannot save a complex value under a policy, as ") as raised:
                ask(key, "function")
            assert key in str(raised.value)
        with pytest.raises(rm.RematError, match="a complex value"):
            jax.grad(trace.function(key, "function"))(jnp.ones((9, 9), "complex64"), jnp.ones((4, 16)))
    else:
        assert types_of_ours(trace.report(key, "function")) == types_of_jax(loss, SPECTRUM)


def written(w, x):
    """What JAX refuses as it is written."""

    @functools.partial(jax.checkpoint, policy=P.dots_saveable)
    def block(x):
        return jnp.tanh(x @ w)

    return jnp.sum(block(block(x)).real ** 2)


WRITTEN = jax.ShapeDtypeStruct((8, 8), "complex64"), jax.ShapeDtypeStruct((4, 8), "complex64")


@pytest.mark.parametrize("fun", [written, lambda w, x: w - 0.1 * jax.grad(written)(w, x).conj()], ids=["loss", "step"])
def test_what_jax_refuses_as_it_is_written_is_shown_under_a_policy_that_it_takes(remat3, fun):
    with pytest.raises(TypeError):
        jax.eval_shape(jax.grad(written), *WRITTEN)
    trace = rm.trace(fun, *WRITTEN)
    with pytest.raises(rm.RematError, match="a complex value .* block may under dots_saveable"):
        trace.report()
    (advice,) = trace.advice()
    assert not trace.report(advice.policy, advice.at).backward_error
    widget = rm.show(trace)
    assert (widget.policy, widget.at) == (advice.policy, advice.at)
    assert advice.sentence in widget.report.notes
    widget.close()
    try:
        jax.eval_shape(jax.grad(jax.checkpoint(written)), *WRITTEN)
    except TypeError:  # the policy inside saves one once more is run
        assert "block may under dots_saveable" in trace.report("nothing_saveable", "function").backward_error
        with pytest.raises(rm.RematError, match="too few: |such as 'nothing_saveable' at 'sites'"):
            trace.plan(100)
    with pytest.raises(rm.RematError, match="a complex value"):
        rm.trace(lambda w, x: jax.linearize(written, w, x)[1](w, x), *WRITTEN)


def test_that_no_policy_saves_complex_values_is_noted():
    def step(w, x):
        return w - 0.1 * jax.grad(spectrum)(w, x)

    real = lambda w, x: jnp.sin(x @ w).sum()  # noqa: E731
    for fun, args, noted in ((spectrum, SPECTRUM, True), (step, SPECTRUM, True), (real, (f32(4, 4), f32(4, 4)), False)):
        trace = rm.trace(fun, *args)
        assert ("complex-values" in [note.kind for note in trace.notes]) == noted
        assert ("complex-values" in [note.kind for note in trace.report().notes]) == noted
