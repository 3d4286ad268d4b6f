"""What a place says to write there, pasted as it stands: what JAX saves then is what the place has promised."""

import jax
import numpy as np
import pytest

import remat_magic as rm
from tests.programs import f32
from tests.test_edit import answers, module  # noqa: F401 - a fixture
from tests.test_models import library

pytestmark = pytest.mark.filterwarnings("ignore")

LINEN = """
import functools
import flax.linen as nn

class Block(nn.Module):
    DEFINITION
    @nn.compact
    def __call__(self, x, train):
        return x + jnp.tanh(LAYER(nn.Dense(4), jnp.sin(x))) * (2.0 if train else 1.0)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Block()(x, True)
        return x.sum()

net = Net()

def made():
    return net.init(jax.random.key(0), jnp.ones((2, 4)))

def f(weights, x):
    return net.apply(weights, x)
"""
NNX = """
import functools
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    DEFINITION
    def __call__(self, x, train):
        return x + jnp.tanh(LAYER(self.dense, jnp.sin(x))) * (2.0 if train else 1.0)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, True)
        return x.sum()

def made():
    return Net(nnx.Rngs(0))

def f(net, x):
    return net(x)
"""
EQUINOX = """
import functools
import equinox as eqx

class Block(eqx.Module):
    dense: eqx.nn.Linear

    DEFINITION
    def __call__(self, x, train):
        return x + jnp.tanh(LAYER(jnp.sin(x))) * (2.0 if train else 1.0)

def made():
    return [Block(eqx.nn.Linear(4, 4, key=jax.random.key(number))) for number in range(2)]

def f(net, x):
    for block in net:
        x = jax.vmap(lambda row, block=block: block(row, True))(x)
    return x.sum()
"""
HAIKU = """
import haiku as hk

class Block(hk.Module):
    def __call__(self, x, train):
        return x + jnp.tanh(hk.Linear(4)(jnp.sin(x))) * (2.0 if train else 1.0)

def net(x):
    for block in [Block() for _ in range(2)]:
        x = CALL(x, True)
    return x.sum()

def made():
    return hk.transform(net).init(jax.random.key(0), jnp.ones((2, 4)))

def f(weights, x):
    return hk.transform(net).apply(weights, None, x)
"""
OWN = """
import functools

class Block:
    def run(self, w, x, train):
        return x + jnp.tanh(jnp.sin(x) @ w) * (2.0 if train else 1.0)

    def both(self, w, x):
        return CALL(w, CALL(w, x, True), True)

DEFINITION
def block(w, x):
    return x + jnp.tanh(jnp.sin(x) @ w)

def made():
    return jnp.eye(4)

def f(w, x):
    for _ in range(4):
        x = block(w, x)
    return Block().both(w, x).sum()
"""
# A text, whose it is, the place, where what it says stands, and what stands there without it.
PASTED = {
    "a class of linen": (LINEN, "flax.linen", "Block.__call__", "DEFINITION", "pass"),
    "a layer of linen": (LINEN, "flax.linen", "Dense.__call__", "LAYER", "(lambda module, *args: module(*args))"),
    "a class of nnx": (NNX, "flax.nnx", "Block.__call__", "DEFINITION", "pass"),
    "a layer of nnx": (NNX, "flax.nnx", "Linear.__call__", "LAYER", "(lambda module, *args: module(*args))"),
    "a class of equinox": (EQUINOX, "equinox", "Block.__call__", "DEFINITION", "pass"),
    "a layer of equinox": (EQUINOX, "equinox", "Linear.__call__", "LAYER", "self.dense"),
    "a module of haiku": (HAIKU, "haiku", "Block.__call__", "CALL", "block"),
    "a method": (OWN, "", "Block.run", "CALL", "self.run"),
    "a function": (OWN, "", "block", "DEFINITION", "pass"),
}


@pytest.mark.parametrize("policy", ["", "dots_saveable"])
@pytest.mark.parametrize("name", PASTED)
def test_what_to_write_is_right_as_it_stands(module, name, policy):  # noqa: F811
    text, whose, at, there, usual = PASTED[name]
    if whose:
        library(whose)

    def with_code(**put):
        usually = {"DEFINITION": "pass", "LAYER": "(lambda module, *args: module(*args))", "CALL": "self.run"}
        new = text
        for word, code in {**usually, there: usual, **put}.items():
            new = new.replace(word, code)
        return module(new)

    if whose == "equinox":
        text = text.replace("LAYER", "LAYER" if there == "LAYER" else "self.dense")
    plain = with_code()
    weights = plain.made()
    trace = rm.trace(plain.f, weights, f32(2, 4))
    code = trace.report(policy, at).code if policy else next(site.code for site in trace.sites if site.key == at)
    expression, _, comment = code.partition("  #")
    assert expression.startswith("@") == (there == "DEFINITION"), code
    assert (at in comment) == (there == "DEFINITION"), code
    if whose == "equinox" and there == "LAYER":
        expression = expression.replace("linear", "self.dense")
    if there == "CALL" and not whose:
        assert "self.run" in expression
    pasted = with_code(**{there: expression})
    again = pasted.made()
    leaves = [jax.tree_util.tree_flatten_with_path(each)[0] for each in (weights, again)]
    for (path, old), (other, new) in zip(*leaves, strict=True):
        assert str(path) == str(other)
        np.testing.assert_array_equal(old, new)
    report = rm.trace(pasted.f, again, f32(2, 4)).report()
    assert answers(report) == answers(trace.report(policy or "nothing_saveable", at))


def test_what_to_write_for_some_of_the_calls_leaves_the_others(module):  # noqa: F811
    made = module(OWN.replace("DEFINITION", "pass").replace("CALL", "self.run"))
    trace = rm.trace(made.f, made.made(), f32(2, 4))
    code = trace.report("dots_saveable", "block[::2]").code
    assert code == "jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)  # for block[::2]"
    code = trace.report("dots_saveable", "block/2").code
    assert code.startswith(
        "jax.checkpoint(group, policy=jax.checkpoint_policies.dots_saveable)  # group(...): 2 of these"
    )
