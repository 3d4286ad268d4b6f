"""Steps of flax's own scans under one checkpoint, as edits: the text imported again is what the place promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.records import RematError
from tests.programs import f32
from tests.test_edit import answers, module  # noqa: F401 - a fixture
from tests.test_models import library

pytestmark = pytest.mark.filterwarnings("ignore")

X = jnp.linspace(0, 1, 16).reshape(2, 8)
BLOCK = """
import functools
import flax.linen as nn

class Block(nn.Module):
    n: int = 8

    @nn.compact
    def __call__(self, x, y=None, z=1.0):
        h = nn.Dense(self.n)(jnp.sin(x)) * z
        h = h if y is None else h + y
        return x + jnp.tanh(nn.Dense(self.n)(h)), h.sum(1)
"""
SCAN = 'variable_axes={"params": 0}, split_rngs={"params": True}, length=12'
AXES = 'variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=(1, nn.broadcast), out_axes=1'


def compact(body):
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{BLOCK}\nclass Net(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n{lines}"


# What scans, and lines that the edit writes.
LINEN = {
    "a class": (
        compact(f"x, ys = nn.scan(Block, {SCAN})(name='layers')(x, None)\nreturn x.sum() + (ys**2).sum()"),
        "def scan_in_groups(target, variable_axes, split_rngs, length):\n",
    ),
    "a class that has a name": (
        compact(f"Blocks = nn.scan(Block, {SCAN}, unroll=2)\nx, ys = Blocks(8)(x, None)\nreturn x.sum() + ys.sum()"),
        "        Blocks = scan_in_groups(Block, ",
    ),
    "in setup, from its end": (
        f"{BLOCK}\nclass Net(nn.Module):\n    def setup(self):\n"
        f"        self.blocks = nn.scan(Block, {SCAN}, reverse=True)()\n\n"
        "    def __call__(self, x):\n        x, ys = self.blocks(x, None)\n        return x.sum() + (ys**2).sum()\n",
        "self.blocks = scan_in_groups(Block, ",
    ),
    "along other axes, with inputs": (
        compact(
            f"Blocks = nn.scan(Block, {AXES})\nx, ys = Blocks()(x, jnp.ones((2, 12, 8)), 2.0)\n"
            "return x.sum() + (ys**2).sum()"
        ),
        "        if axis is nn.broadcast:\n",
    ),
    "a function": (
        compact(
            f"x, ys = nn.scan(lambda block, x, _: block(x), {SCAN})(Block(), x, None)\nreturn x.sum() + (ys**2).sum()"
        ),
        "def in_groups(module, carry, *xs):",
    ),
    "a partial, without variables of its own": (
        compact(
            "KEYS = {'params': False}\n"
            "Blocks = functools.partial(nn.scan, variable_broadcast='params', split_rngs=KEYS)(Block)\n"
            "x, ys = Blocks()(x, jnp.ones((12, 2, 8)))\nreturn x.sum() + (ys**2).sum()"
        ),
        "Blocks = functools.partial(scan_in_groups, variable_broadcast='params', split_rngs=KEYS)(Block)",
    ),
    "a class that has a checkpoint": (
        compact(f"x, ys = nn.scan(nn.remat(Block), {SCAN})()(x, None)\nreturn x.sum() + (ys**2).sum()"),
        "scan_in_groups(nn.remat(Block), ",
    ),
}
PARTITIONED = "nn.Dense(self.n, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, 'model')))"
for _name in ("a class", "along other axes, with inputs"):
    _text = LINEN[_name][0].replace("nn.Dense(self.n)", PARTITIONED)
    _text = _text.replace("split_rngs=", "metadata_params={nn.PARTITION_NAME: 'layers'}, split_rngs=")
    # Arrays keep the names of their axes; within a group the axis that is scanned over is there twice.
    LINEN[f"{_name}, with names of axes"] = _text, "return nn.meta.add_axis(nn.meta.add_axis(tree, 0, metadata_params)"


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("name", LINEN)
def test_steps_of_a_scan_of_linen(module, name, size):  # noqa: F811
    library("flax.linen")
    text, line = LINEN[name]
    text = f"{text}\nnet = Net()\n\ndef f(w, x):\n    return net.apply(w, x)\n"
    made = module(text)
    key = jax.random.key(0)
    weights = made.net.init(key, X)
    trace = rm.trace(made.f, weights, f32(2, 8))
    at = f"{trace.groups[0].key.rpartition('/')[0]}/{size}"
    for policy in ("nothing_saveable", "dots_saveable"):
        edit = trace.edit(policy, at)
        assert edit.verified, (edit.differences, edit.apply_text())
        again = module(edit.apply_text().encode())
        assert answers(rm.trace(again.f, weights, f32(2, 8)).report()) == answers(trace.report(policy, at))
    assert line in edit.apply_text(), edit.apply_text()
    # What was saved of the weights, and what they begin as, is as before; and so is what is computed.
    jax.tree.map(np.testing.assert_array_equal, again.net.init(key, X), weights)
    old, new = (jax.value_and_grad(each.f)(weights, X) for each in (made, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), old, new)


MODULES = """
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.drop(self.norm(self.b(self.a(jnp.sin(x))))))

class Net(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=12)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
SCAN

def f(net, x):
    return net(x)
"""
NNX = {
    "a decorator": (
        "@nnx.scan(in_axes=(nnx.Carry, 0, 0, None), out_axes=(nnx.Carry, 0))\n"
        "def forward(x, block, y, z):\n    x = block(x) + y * z\n    return x, x.sum()\n\n"
        "x, ys = forward(x, self.blocks, jnp.arange(12.0), jnp.ones(8))\nreturn x.sum() + (ys**2).sum()",
        "        @scan_in_groups(in_axes=",
    ),
    "a function, from its end": (
        "forward = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry, reverse=True)\n"
        "return forward(self.blocks, x).sum()",
        "forward = scan_in_groups(lambda block, x: block(x), ",
    ),
    "a decorator alone": (
        "@nnx.scan\ndef forward(x, block):\n    return block(x), None\n\nreturn forward(x, self.blocks)[0].sum()",
        "        @scan_in_groups\n",
    ),
    "no input at all": (
        "block = Block(nnx.Rngs(0))\n"
        "forward = nnx.scan(lambda x: (jnp.sin(jnp.tanh(x)), x), in_axes=(nnx.Carry,), length=12)\n"
        "x, ys = forward(x)\nreturn x.sum() + (ys**2).sum()",
        "scan(checkpoint(scan(f, ",
    ),
}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("name", NNX)
def test_steps_of_a_scan_of_nnx(module, name, size):  # noqa: F811
    nnx = library("flax.nnx")
    scan, line = NNX[name]
    text = MODULES.replace("SCAN", "".join(f"        {each}\n" for each in scan.splitlines()))
    made = module(text)
    trace = rm.trace(made.f, made.Net(nnx.Rngs(0)), f32(2, 8))
    at = f"{trace.groups[0].key.rpartition('/')[0]}/{size}"
    edit = trace.edit("nothing_saveable", at)
    assert edit.verified, (edit.differences, edit.apply_text())
    assert line in edit.apply_text(), edit.apply_text()
    again = module(edit.apply_text().encode())
    report = rm.trace(again.f, again.Net(nnx.Rngs(0)), f32(2, 8)).report()
    assert answers(report) == answers(trace.report("nothing_saveable", at))

    def run(made):  # with what it leaves in the model
        net = made.Net(nnx.Rngs(0))
        gradients = nnx.value_and_grad(made.f)(net, X)
        return jax.tree.leaves((gradients, nnx.state(net, nnx.Not(nnx.RngKey))))

    for old, new in zip(run(made), run(again), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-4, atol=1e-4)


def test_what_is_around_the_steps_moves_outward(module):  # noqa: F811
    library("flax.linen")
    made = module(
        f"{LINEN['a class that has a checkpoint'][0]}\nnet = Net()\n\ndef f(w, x):\n    return net.apply(w, x)\n"
    )
    weights = made.net.init(jax.random.key(0), X)
    trace = rm.trace(made.f, weights, f32(2, 8))
    (site,) = (site.key for site in trace.sites if not site.possible)
    at = {site: "none", f"{site}/4": "dots_saveable"}
    edit = trace.edit("as_written", at)
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    assert answers(rm.trace(again.f, weights, f32(2, 8)).report()) == answers(trace.report("as_written", at))
    jax.tree.map(np.testing.assert_array_equal, again.net.init(jax.random.key(0), X), weights)


LEFT = {
    "before the trace": (
        f"{BLOCK}\nBlocks = nn.scan(Block, {SCAN})\n\nclass Net(nn.Module):\n    @nn.compact\n"
        "    def __call__(self, x):\n        x, ys = Blocks()(x, None)\n        return x.sum() + ys.sum()\n",
        "stands where no function can be defined before it: write the checkpoint there by hand",
    ),
    "with methods": (
        compact(f"Blocks = nn.scan(Block, {SCAN}, methods=['__call__'])\nreturn Blocks()(x, None)[0].sum()"),
        "is given methods, which no edit passes on: write the checkpoint around some of its steps by hand",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_scan_that_no_edit_can_group_is_left_to_the_user(module, name):  # noqa: F811
    library("flax.linen")
    text, sentence = LEFT[name]
    made = module(f"{text}\nnet = Net()\n\ndef f(w, x):\n    return net.apply(w, x)\n")
    trace = rm.trace(made.f, jax.eval_shape(made.net.init, jax.random.key(0), X), f32(2, 8))
    with pytest.raises(RematError, match=sentence):
        trace.edit("dots_saveable", "Block.__call__/3")


@pytest.mark.parametrize("split", [True, False])
def test_what_draws_random_numbers_is_left_to_the_user(module, split):  # noqa: F811
    """Keys are split for the groups, and again for their steps; one key of all steps would be another in each group.

    That makes other numbers of the same program, of which no residual tells.
    """
    library("flax.linen")
    scan = SCAN.replace("True", f"True, 'dropout': {split}")
    text = compact(f"Blocks = nn.scan(Block, {scan})\nreturn Blocks()(x, None)[0].sum()")
    text = text.replace("jnp.sin(x))", "nn.Dropout(0.5, deterministic=False)(x))")
    made = module(
        f"{text}\nnet = Net()\n\ndef f(w, x):\n    return net.apply(w, x, rngs={{'dropout': jax.random.key(1)}})\n"
    )
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    trace = rm.trace(made.f, jax.eval_shape(made.net.init, keys, X), f32(2, 8))
    with pytest.raises(RematError, match="draws random numbers, which are others where flax splits their keys"):
        trace.edit("dots_saveable", "Block.__call__/3")


def test_variables_that_change_come_back_and_without_steps_left_over(module):  # noqa: F811
    library("flax.linen")
    scan = SCAN.replace("0", "0, 'batch_stats': 0")
    text = compact(f"Blocks = nn.scan(Block, {scan})\nreturn Blocks()(x, None)[0].sum()")
    text = text.replace("jnp.sin(x))", "nn.BatchNorm(use_running_average=False)(jnp.sin(x)))")
    made = module(
        f"{text}\nnet = Net()\n\ndef f(w, x):\n    y, new = net.apply(w, x, mutable=['batch_stats'])\n"
        "    return y + sum(leaf.sum() for leaf in jax.tree.leaves(new))\n"
    )
    weights = made.net.init(jax.random.key(0), X)
    trace = rm.trace(made.f, weights, f32(2, 8))
    edit = trace.edit("dots_saveable", "Block.__call__/3")
    assert edit.verified
    again = module(edit.apply_text().encode())
    old, new = (each.net.apply(weights, X, mutable=["batch_stats"]) for each in (made, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), old, new)
    # What is left over is another part of the same variables.
    with pytest.raises(RematError, match="choose a number of steps that 12 is a multiple of"):
        trace.edit("dots_saveable", "Block.__call__/5")
