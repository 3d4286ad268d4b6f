"""Models of the libraries that people use, where they are installed: the residuals are those that JAX lists."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest
from jax._src.ad_checkpoint import saved_residuals

import remat_magic as rm
from tests.programs import f32
from tests.test_parity import types_of_ours

# The libraries of the day and the newest JAX warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def agrees(fun, *args):
    trace = rm.trace(fun, *args)
    for policy, under in (
        ("as_written", fun),
        ("dots_saveable", jax.checkpoint(fun, policy=jax.checkpoint_policies.dots_saveable)),
    ):
        listed = saved_residuals(under, *args)
        expected = collections.Counter(
            a.str_short(short_dtypes=True) for a, source in listed if source != "from a literal"
        )
        report = trace.report(policy, "function")
        assert types_of_ours(report) == expected
        assert not report.backward_error
        assert report.forward.text == trace.forward(policy, "function").pretty_print(use_color=False)
    return trace


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(4)(nn.gelu(nn.LayerNorm()(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = stack()(x, None)
            return nn.Dropout(0.5, deterministic=False)(x)

    net = Net()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(net.init, rngs, jnp.ones((2, 4)))

    def loss(params, x):
        return net.apply(params, x, rngs={"dropout": jax.random.key(1)}).sum()

    trace = agrees(loss, params, f32(2, 4))
    assert [site.times for site in trace.sites] == [3]  # once in each iteration


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def loss(state, x):
        layer = nnx.remat(lambda model, x: jnp.sin(model(x)))
        return layer(nnx.merge(graph, state), x).sum()

    assert agrees(loss, state, f32(2, 4)).sites


def test_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        model = eqx.combine(arrays, static)
        return jax.vmap(eqx.filter_checkpoint(model))(x).sum()

    assert agrees(loss, arrays, f32(3, 4)).sites
    # The model itself, activation functions and all.
    report = rm.trace(lambda model, x: jax.vmap(model)(x).sum(), model, f32(3, 4)).report()
    assert report.residuals
    assert not report.backward_error


def test_haiku():
    hk = pytest.importorskip("haiku")
    net = hk.transform(lambda x: hk.remat(hk.nets.MLP([8, 2]))(x).sum())
    params = net.init(jax.random.key(0), jnp.ones((3, 4)))
    assert agrees(lambda params, x: net.apply(params, None, x), params, f32(3, 4)).sites


def test_a_step_of_optax():
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(1e-3)

    def after(w, x):
        """What a step of training leads to, differentiated: as when hyperparameters are learned."""
        gradient = jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
        update, _ = optimizer.update(gradient, optimizer.init(w), w)
        return jnp.sin(x @ optax.apply_updates(w, update)).sum()

    agrees(after, f32(4, 4), f32(3, 4))


def test_diffrax():
    diffrax = pytest.importorskip("diffrax")

    def loss(w, y):
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y))
        solution = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.25, y, args=w, max_steps=16)
        return solution.ys.sum()

    report = rm.trace(loss, f32(3, 3), f32(3)).report()
    assert report.residuals
    assert not report.backward_error
