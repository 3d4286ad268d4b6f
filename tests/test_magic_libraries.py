"""Gradients of libraries in a cell: the report is of the loss, and Apply puts the policy where the user has a name.

The libraries are no dependencies; see ``tests/test_models.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from tests.pretend_compiler import SIZES
from tests.test_models import library

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

JAX = """
import jax, jax.numpy as jnp
w, x = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 12).reshape(3, 4)
def loss(w, x): return jnp.tanh(x @ w).sum()
"""

NNX = """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.into, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
    def __call__(self, x): return self.drop(jnp.tanh(self.norm(self.into(x))))
def loss(model, x): return (model(x) ** 2).sum()
def with_aux(model, x): return loss(model, x), x.sum()
@nnx.value_and_grad
def decorated(model, x): return (model(x) ** 2).sum()
model = Net(nnx.Rngs(0))
"""

EQUINOX = """
import equinox as eqx
model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
def loss(model, x): return (jax.vmap(model)(x) ** 2).sum()
@eqx.filter_jit
@eqx.filter_value_and_grad
def decorated(model, x): return (jax.vmap(model)(x) ** 2).sum()
"""

OPTAX = """
import optax
state = optax.lbfgs().init(w)
"""


def numbers(value):
    """The arrays in a value, as NumPy's; keys by their data."""
    leaves = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype")]
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(leaves, keys, strict=True)]


def holds(cells, call):
    """What a call returns, and what is in the model after it; before it the model is as it was made."""
    cells.run("if 'Net' in globals(): model = Net(nnx.Rngs(0))")
    return [*numbers(eval(call, cells.ns)), *numbers(cells.ns.get("model"))]


# The library, how a gradient is written and called in the cell, and which name then has the policy in it.
GRADIENTS = [
    ("flax.nnx", NNX, "nnx.value_and_grad(loss)(model, x)", "loss"),
    ("flax.nnx", NNX, "nnx.jit(nnx.grad(with_aux, has_aux=True))(model, x)", "with_aux"),
    ("flax.nnx", NNX, "nnx.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains('kernel')))(model, x)", "loss"),
    ("flax.nnx", NNX + "stored = nnx.jit(nnx.value_and_grad(loss))", "stored(model, x)", "stored"),
    ("flax.nnx", NNX, "decorated(model, x)", "decorated"),
    ("equinox", EQUINOX, "eqx.filter_jit(eqx.filter_grad(loss))(model, x)", "loss"),
    ("equinox", EQUINOX, "decorated(model, x)", "decorated"),
    ("optax", OPTAX, "jax.jit(optax.value_and_grad_from_state(loss))(w, x, state=state)", "loss"),
    (
        "optax",
        OPTAX + "stored = optax.value_and_grad_from_state(lambda w: loss(w, x))",
        "stored(w, state=state)",
        "stored",
    ),
    ("jax", "stored = jax.jit(jax.value_and_grad(lambda w: loss(w, x)))", "stored(w)", "stored"),
    ("jax", "@jax.value_and_grad\ndef decorated(w, x): return jnp.tanh(x @ w).sum()", "decorated(w, x)", "decorated"),
]


@pytest.mark.parametrize(("name", "setup", "call", "bound"), GRADIENTS)
def test_the_loss_is_shown_and_apply_reaches_a_name(cells, name, setup, call, bound):
    library(name)
    cells.ok(JAX, setup)
    before, names = holds(cells, call), dict(cells.ns)
    holds(cells, "1")  # the model as it was
    model = numbers(cells.ns.get("model"))
    cells.ok("%%remat -o seen", call)
    written = cells.ns["seen"].report
    assert written.function in ("loss", "with_aux", "decorated", "<lambda>")
    assert written.saved_bytes > 0
    assert cells.ns[bound] is names[bound]
    for is_now, was in zip(numbers(cells.ns.get("model")), model, strict=True):
        np.testing.assert_array_equal(is_now, was)
    if len(call.split(")(")) > 1 and name == "flax.nnx":
        (note,) = written.notes
        assert note.startswith(f"This is the gradient of {bound} ")

    cells.ok("%%remat --apply -p nothing_saveable -o seen", call)
    assert f"`{bound}` now runs under nothing_saveable" in cells.out
    for one, other in zip(before, holds(cells, call), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    applied = eval(f"(lambda *args, **kwargs: (args, kwargs)){_arguments(call)}", cells.ns)
    trace = rm.trace(eval(call[: -len(_arguments(call))], cells.ns), *applied[0], **applied[1])
    under = trace.report()
    assert under.saved_bytes == cells.ns["seen"].report.saved_bytes < written.saved_bytes
    assert under.recomputed_flops == cells.ns["seen"].report.recomputed_flops > 0

    cells.ok("%%remat --apply -o seen", call)  # what was applied is inspected as its original, and taken away
    assert cells.ns["seen"].report.saved_bytes == written.saved_bytes
    assert cells.ns[bound] is names[bound]


def _arguments(call):
    """The last brackets of a call."""
    return call[call.rindex("(") :]


ASSIGNED = [
    ("flax.nnx", NNX, "value, gradient = nnx.value_and_grad(loss)(model, x)", "loss"),
    ("flax.nnx", NNX, "value, pull_back = nnx.vjp(lambda m: loss(m, x), model, graph=False)", "<lambda>"),
    ("flax.nnx", NNX, "y = jnp.mean(nnx.Linear(4, 4, rngs=nnx.Rngs(0))(x))", "Linear"),
    ("equinox", EQUINOX, "y = jax.vmap(model)(x)", "MLP"),
    ("optax", OPTAX, "value, gradient = optax.value_and_grad_from_state(loss)(w, x, state=state)", "loss"),
    ("haiku", "import haiku as hk; net = hk.transform(lambda x: hk.Linear(2)(x)); p = net.init(jax.random.key(0), x)"
     "", "y = net.apply(p, None, x)", "apply_fn"),
    ("flax.linen", "import flax.linen as nn; net = nn.Dense(2); p = net.init(jax.random.key(0), x)",
     "y = net.apply(p, x)", "apply"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "setup", "last", "function"), ASSIGNED)
def test_an_assigned_call_of_a_library_is_inspected_and_does_not_run(cells, name, setup, last, function):
    library(name)
    cells.ok(JAX, setup, "value = gradient = pull_back = y = 'old'")
    cells.ok("%%remat -o seen", last)
    assert cells.ns["seen"].report.function == function
    assert all(cells.ns[name] == "old" for name in ("value", "gradient", "pull_back", "y"))


def test_what_makes_parameters_or_updates_them_runs(cells):
    library("flax.linen")
    cells.ok(
        "import flax.linen as nn, jax, jax.numpy as jnp",
        "class Net(nn.Module):",
        "    @nn.compact",
        "    def __call__(self, x): return nn.Dense(2)(x)",
        "x = jnp.ones((2, 2))",
    )
    cells.ok("%%remat -o seen", "@jax.checkpoint", "def h(x): return x * x", "p = Net().init(jax.random.key(0), x)")
    assert (cells.ns["seen"].report.function, list(cells.ns["p"])) == ("h", ["params"])


def test_a_plan_and_sites_go_into_a_loss_of_modules(cells):
    library("flax.nnx")
    cells.ok(JAX, NNX, "plain = loss", "def loss(model, x): return nnx.remat(lambda m, x: m(x))(model, x).sum()")
    call = "nnx.value_and_grad(loss)(model, x)"
    before = holds(cells, call)
    cells.ok("%%remat --at sites -p everything_saveable --apply -o seen", call)
    assert cells.ns["seen"].report.repeated_flops == 0
    under = rm.trace(eval("nnx.value_and_grad(loss)", cells.ns), cells.ns["model"], cells.ns["x"]).report()
    assert under.saved_bytes == cells.ns["seen"].report.saved_bytes > 0
    for one, other in zip(before, holds(cells, call), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    cells.ok("gradient = nnx.value_and_grad(plain)")
    trace = rm.trace(cells.ns["gradient"], cells.ns["model"], cells.ns["x"])
    plan = trace.plan("50%")
    planned = cells.ns["nnx"].value_and_grad(trace.function(plan, of=cells.ns["plain"]))
    under = rm.trace(planned, cells.ns["model"], cells.ns["x"]).report()
    assert under.saved_bytes == trace.report(plan).saved_bytes < trace.report().saved_bytes


def test_a_function_of_modules_under_a_policy_changes_them_as_it_does(cells):
    library("flax.nnx")
    cells.ok(JAX, NNX)
    loss, model, x = (cells.ns[name] for name in ("loss", "model", "x"))
    cells.ns["under"] = rm.trace(loss, model, x).function("dots_saveable")
    for one, other in zip(holds(cells, "loss(model, x=x)"), holds(cells, "under(model, x=x)"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("net.apply(variables, x, False)", ["variables", "x", "train=False"]),
        ("jax.jit(net.apply, static_argnums=2)(variables, x, False)", ["variables", "x", "train=False"]),
        ("jax.value_and_grad(net.apply)(variables, x, False)", ["variables", "x", "train=False"]),
        ("functools.partial(net.apply, variables)(x, False)", ["variables", "x", "train=False"]),
        ("functools.partial(net.apply, method='tail')(variables, x, x)", ["variables", "left", "right"]),
        ("net.apply(variables, x, x, method=Net.tail)", ["variables", "left", "right"]),
        ("net.apply(variables, x, x, method=net.tail)", ["variables", "left", "right"]),
    ],
)
def test_what_linen_applies_names_its_arguments(cells, call, names):
    """As the method of the module does that gets them, in title, table and `wrt`."""
    library("flax")
    cells.ok(
        "import functools, jax, jax.numpy as jnp, flax.linen as nn",
        "class Net(nn.Module):",
        "    def setup(self): self.dense = nn.Dense(4)",
        "    def __call__(self, x, train): return jnp.sin(self.dense(x)).sum()",
        "    def tail(self, left, right): return jnp.sin(self.dense(left) * right).sum()",
        "net, x = Net(), jnp.ones((3, 4))",
        "variables = net.init(jax.random.key(0), x, True)",
    )
    widget = cells.ok(f"%remat -p everything_saveable {call}")
    signature = widget._live.trace.signature
    assert [name for name in names if name not in signature] == []
    assert "args[" not in signature
    named = {residual.argument for residual in widget.report.residuals if residual.argument}
    assert named & set(names)
    assert not any("args[" in name for name in named)


def test_what_equinox_checks_is_left_out_of_what_is_compiled_elsewhere(pretend, cache):
    """As where it is told to check nothing: no device that is not here can call Python. What the user calls stays."""
    equinox = library("equinox")
    pretend(SIZES)

    def loss(on_error, prints):
        def checked(w, x):
            x = equinox.error_if(x, jnp.any(x > 3), "too big", on_error=on_error)
            tanh = lambda x: equinox.error_if(jnp.tanh(x @ w), x.sum() > 9, "no", on_error=on_error)  # noqa: E731
            x, _ = jax.lax.scan(lambda x, _: (tanh(x), None), x, None, length=3)
            if prints:
                jax.debug.print("{}", x.sum())
            return jnp.sum(jax.vmap(jax.checkpoint(tanh))(x[:, None]) ** 2)

        return checked

    def step(on_error, prints=False):
        def stepped(w, x):
            value, gradient = equinox.filter_jit(equinox.filter_value_and_grad(loss(on_error, prints)))(w, x)
            return w - 0.1 * gradient, value

        return rm.trace(stepped, *[jax.ShapeDtypeStruct((4, 4), "float32")] * 2)

    for on_error, kinds in (("raise", ["checks-left-out"]), ("off", [])):
        measured = step(on_error).measure(device="H100 SXM")
        assert not measured.error
        assert [finding.kind for finding in measured.findings] == kinds
    assert "callback" in step("raise").report().forward.text  # which the report still has
    engines = [step(how).engine for how in ("raise", "off")]
    programs = [it.retrace(it.select("as_written")).gradient(platform="cuda").lowered.as_text() for it in engines]
    assert programs[0].count("stablehlo.custom_call") == programs[1].count("stablehlo.custom_call")
    assert programs[0].count("stablehlo.tanh") == programs[1].count("stablehlo.tanh")
    assert step("raise", prints=True).measure(device="H100 SXM").error.endswith("take the callbacks out.")
