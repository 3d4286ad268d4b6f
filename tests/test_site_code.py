"""What a place says to write there, pasted as it stands: what JAX saves then is what the place has promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from tests.programs import f32
from tests.test_edit import answers, module  # noqa: F401 - a fixture
from tests.test_models import library

pytestmark = pytest.mark.filterwarnings("ignore")

# How a model of linen is made and applied.
APPLIED = """
net = Net()

def made():
    return net.init(jax.random.key(0), jnp.ones((2, 4)))

def f(weights, x):
    return net.apply(weights, x)
"""
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
"""
LINEN += APPLIED
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
import functools
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
FUNCTION_IN_LINEN = """
from flax import linen as nn

def block(x, train):
    return x + jnp.tanh(nn.Dense(4)(jnp.sin(x))) * (2.0 if train else 1.0)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = CALL(self, x, True)
        return x.sum()
"""
FUNCTION_IN_LINEN += APPLIED
FUNCTION_OF_HAIKU = """
import haiku as hk

def block(x):
    return x + jnp.tanh(hk.Linear(4)(jnp.sin(x)))

def net(x):
    for _ in range(2):
        x = CALL(x)
    return x.sum()

def made():
    return hk.transform(LAYER).init(jax.random.key(0), jnp.ones((2, 4)))

def f(weights, x):
    return hk.transform(LAYER).apply(weights, None, x) * 2
"""
# A text, whose it is, the place, where what it says stands, and what stands there without it.
PASTED = {
    "a class of linen": (LINEN, "flax.linen", "Block.__call__", "DEFINITION", "pass"),
    "a layer of linen": (LINEN, "flax.linen", "Dense.__call__", "LAYER", "(lambda module, *args: module(*args))"),
    "a class of nnx": (NNX, "flax.nnx", "Block.__call__", "DEFINITION", "pass"),
    "a layer of nnx": (NNX, "flax.nnx", "Linear.__call__", "LAYER", "(lambda module, *args: module(*args))"),
    "a class of equinox": (EQUINOX, "equinox", "Block.__call__", "DEFINITION", "pass"),
    "a layer of equinox": (EQUINOX, "equinox", "Linear.__call__", "LAYER", "self.dense"),
    "a function in a module of linen": (
        FUNCTION_IN_LINEN,
        "flax.linen",
        "block",
        "CALL",
        "(lambda module, *args: block(*args))",
    ),
    "a module of haiku": (HAIKU, "haiku", "Block.__call__", "CALL", "block"),
    "a function of haiku": (FUNCTION_OF_HAIKU.replace("LAYER", "net"), "haiku", "block", "CALL", "block"),
    "a transformed function of haiku": (
        FUNCTION_OF_HAIKU.replace("CALL", "block").replace("LAYER", "lambda x: TRANSFORMED(x)"),
        "haiku",
        "net",
        "TRANSFORMED",
        "net",
    ),
    "what haiku stacks": (
        FUNCTION_OF_HAIKU.replace("range(2)", "range(1)")
        .replace("CALL", "hk.experimental.layer_stack(3)(STACKED)")
        .replace("LAYER", "net"),
        "haiku",
        "block",
        "STACKED",
        "block",
    ),
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
    pasted = with_code(**{there: expression})
    again = pasted.made()
    leaves = [jax.tree_util.tree_flatten_with_path(each)[0] for each in (weights, again)]
    for (path, old), (other, new) in zip(*leaves, strict=True):
        assert str(path) == str(other)
        np.testing.assert_array_equal(old, new)
    if name == "a function in a module of linen":  # which groups of its calls are given, too
        assert "nn.remat(group)  # group(self, ...): 2 of these" in trace.report("nothing_saveable", f"{at}/2").code
    expected = answers(trace.report(policy or "nothing_saveable", at))
    assert answers(rm.trace(pasted.f, again, f32(2, 4)).report()) == expected
    if policy and whose != "haiku" and name not in ("a function in a module of linen", "a layer of linen"):
        edit = trace.edit(policy, at)
        assert edit.verified, edit.differences
        edited = module(edit.apply_text().encode())
        inputs = weights if whose == "flax.linen" else edited.made()
        assert answers(rm.trace(edited.f, inputs, f32(2, 4)).report()) == expected


def test_what_to_write_for_some_of_the_calls_leaves_the_others(module):  # noqa: F811
    made = module(OWN.replace("DEFINITION", "pass").replace("CALL", "self.run"))
    trace = rm.trace(made.f, made.made(), f32(2, 4))
    code = trace.report("dots_saveable", "block[::2]").code
    assert code == "jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)  # for block[::2]"
    code = trace.report("dots_saveable", "block/2").code
    assert code.startswith(
        "jax.checkpoint(group, policy=jax.checkpoint_policies.dots_saveable)  # group(...): 2 of these"
    )


def test_a_lambda_is_not_called_as_what_is_given_it(module):  # noqa: F811
    made = module(
        """
        def f(w, x):
            both = jax.tree.map(lambda flag, x: jnp.tanh(jnp.sin(x) @ w) if flag else x, [True, True], [x, 2 * x])
            return (both[0] * both[1]).sum()
        """
    )
    (site,) = rm.trace(made.f, f32(4, 4), f32(4)).sites
    assert site.code.partition("  #")[0] == "jax.checkpoint(lambda flag, x: ..., static_argnums=(0,))"


# ------------------------------------------------------------------------------------ arguments that are no arrays

BODY = "return x + jnp.tanh(jnp.sin(x) @ w) * (2.0 if {} else 1.0)"
FUNCTION = """
import functools

DEFINITION
def block({}):
    {}

def f(w, x):
    x = {}
    return (x + {}).sum()
"""
CLASS = """
import functools

class Block:
    def run({}):
        {}

    def both(self, w, x):
        return {}

def f(w, x):
    return Block().both(w, x).sum()
"""


def function(parameters, *calls, flag="train"):
    return FUNCTION.format(parameters, BODY.format(flag), *calls, *calls[:1] * (2 - len(calls)))


def of_partial(parameters, call, *bound):
    """A text whose function is called by a partial of it."""
    step = f"step = functools.partial(block, {', '.join(bound)})"
    return function(parameters, call).replace("def f(", f"{step}\n\ndef f(")


# A text, and how its calls are changed as the comment says. What is to be called stands at CALL there.
STATIC = {
    "by position": (function("x, w, train", "block(x, w, True)"), {}),
    "by keyword": (
        function("x, w, train", "block(x, w, train=True)"),
        {"block(x, w, train=True)": "block(x, w, True)"},
    ),
    "a default": (function("x, w, train=True", "block(x, w)"), {"block(x, w)": "block(x, w, True)"}),
    "keyword only": (function("x, w, *, train=True", "CALL(x, w, train=train)"), {", train=train": ""}),
    "a partial by keyword": (
        of_partial("x, w, train", "step(x, w)", "train=True"),
        {"step(x, w)": "block(x, w, True)"},
    ),
    "a method by keyword": (
        CLASS.format("self, w, x, train", BODY.format("train"), "CALL(w, x, train=True)"),
        {"train=True": "True"},
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_what_to_write_for_arguments_that_are_no_arrays(module, name):  # noqa: F811
    text, changes = STATIC[name]
    at = "Block.run" if "Block" in text else "block"

    def report(text, **put):
        for word, code in {"DEFINITION": "", "CALL": "self.run" if "Block" in text else "block", **put}.items():
            text = text.replace(word, code)
        made = module(f"train = True\n{text}\n")
        return rm.trace(made.f, f32(4, 4), f32(2, 4))

    trace = report(text)
    code = next(site.code for site in trace.sites if site.key == at)
    expression, _, comment = code.partition("  #")
    put = {"DEFINITION" if expression.startswith("@") else "CALL": expression}
    assert ("CALL" in text) == ("CALL" in put), code
    assert "its calls give train by position" in comment or "without train in the call" in comment
    changed = text
    for old, new in changes.items():
        changed = changed.replace(old, new)
    assert answers(report(changed, **put).report()) == answers(trace.report("nothing_saveable", at))


def test_what_to_write_for_groups_of_calls_in_loops_of_either_kind(module):  # noqa: F811
    """In a Python loop a function of several steps, in a scan one over chunks; where there are both, both."""
    text = """
        def block(x, w):
            return jnp.tanh(jnp.sin(x) @ w), None

        def f(ws, x):
            for w in ws:
                x, _ = block(x, w)
            return SCANNED.sum()
    """
    group = "jax.checkpoint(group)"
    scan = "jax.lax.scan(jax.checkpoint("
    said = "group(...): 2 of these calls"
    for scanned, both in (("x", False), ("jax.lax.scan(block, x, jnp.stack(ws))[0]", True)):
        made = module(text.replace("SCANNED", scanned))
        trace = rm.trace(made.f, [f32(4, 4)] * 8, f32(2, 4))
        code = trace.report("nothing_saveable", "block/2").code
        expression, _, comment = code.partition("  #")
        assert (scan in expression, group in expression, said in comment) == (both, True, True), code
        if both:
            assert "chunks: xs reshaped to (4, 2, ...)" in comment
            (site,) = trace.groups
            assert scan in site.code
            assert "; jax.checkpoint(group)  #" in site.code
    alone = module(text.replace("for w in ws:", "for w in ():").replace("SCANNED", scanned))
    assert "group" not in rm.trace(alone.f, [f32(4, 4)] * 8, f32(2, 4)).report("nothing_saveable", "block/2").code


def twisted(i, x):
    return jnp.sin(i.astype("float32") * x)


def summed(carry, x):
    return jnp.sin(carry + x), {"twice": 2 * carry}


def bent(x):
    return jnp.sin(x @ jnp.ones((4, 4)))


XS = jnp.arange(64.0).reshape(16, 4)
GROUPED = {
    "fori_loop from 5": lambda carry: jax.lax.fori_loop(5, 69, twisted, carry),
    "fori_loop from -3": lambda carry: jax.lax.fori_loop(-3, 13, twisted, carry),
    "fori_loop under a checkpoint": jax.checkpoint(lambda carry: jax.lax.fori_loop(5, 69, twisted, carry)),
    "scan with ys": lambda carry: jax.lax.scan(summed, carry, XS),
    "scan with ys in reverse": lambda carry: jax.lax.scan(summed, carry, XS, reverse=True),
    "map": lambda carry: jax.lax.map(bent, XS * carry),
}


@pytest.mark.parametrize("name", GROUPED)
def test_the_code_of_a_group_computes_what_the_loop_does(name):
    """Pasted as it stands, with the names that it uses for what the loop is given."""
    loop, carry = GROUPED[name], jnp.ones(4)
    trace = rm.trace(lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(loop(x))), carry)
    (group,) = trace.groups
    size, known = int(group.key.rpartition("/")[2]), {"jax": jax, "twisted": twisted, "summed": summed, "bent": bent}
    known |= {"x": carry, "carry": carry, "chunks": XS.reshape(-1, size, 4)}
    exec(f"{'' if ' = ' in group.code.partition('(')[0] else 'found = '}{group.code}", known)
    found = (known["carry"], known["ys"]) if "ys" in known else known["found"]
    expected = loop(carry)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, expected)


def keeps(w, x, seen):
    seen["hidden"] = jnp.sin(x @ w)
    return seen["hidden"] * 2


def keeps_nothing(w, x):
    return {"hidden": jnp.sin(x @ w), "input": (x, None, 3)}


class Layers:
    def __init__(self):
        self.norms = []

    def run(self, w, x):
        self.norms.append((x**2).sum())
        return jnp.tanh(x @ w)

    def look(self, w, x):
        return jnp.tanh(x @ w)


def test_what_leaves_a_function_unreturned_is_told_of():
    """A checkpoint on such a function, as it stands, raises: what is used afterwards has not left it."""

    def loss(w, x):
        seen, layers = {}, Layers()
        for _ in range(2):
            x = layers.look(w, layers.run(w, keeps_nothing(w, keeps(w, x, seen))["hidden"]))
        return (x**2).sum() + seen["hidden"].sum() + sum(layers.norms)

    told = {site.key: "lets nothing else out" in site.code for site in rm.trace(loss, f32(4, 4), f32(3, 4)).sites}
    assert told == {"keeps": True, "keeps_nothing": False, "Layers.run": True, "Layers.look": False}

    def as_written(w, x):
        seen = {}
        return jax.checkpoint(keeps)(w, x, seen).sum() + seen["hidden"].sum()

    with pytest.raises((KeyError, jax.errors.UnexpectedTracerError)):
        jax.grad(as_written)(jnp.ones((4, 4)), jnp.ones((3, 4)))
