"""Code as it is, run until its training step is called: what is caught, and that no step runs."""

import asyncio
import gc
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit
from jax._src.ad_checkpoint import saved_residuals
from jax._src.interpreters import ad

import remat_magic as rm
from remat_magic import __main__ as command
from remat_magic.engine.catching import Watch
from tests.test_environment import run
from tests.test_models import library

# What each program begins with. RUNS counts the steps that ran, LOG what was done on the host.
BEFORE = """
import contextlib, functools, itertools, sys, threading
import jax, jax.numpy as jnp, numpy as np
RUNS, LOG = [], []
def net(params, x):
    for weight in params: x = jnp.tanh(x @ weight)
    return x
def loss_fn(params, x): return jnp.mean(net(params, x) ** 2)
def step_body(params, x):
    jax.debug.callback(lambda: RUNS.append(1))
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads)], loss
params, x = [np.ones((4, 4), np.float32)] * 3, np.ones((2, 4), np.float32)
"""
LOOP = "train_step = jax.jit(step_body)\nfor step in range(4):\n    params, loss = train_step(params, x)\n"
MAIN = """
def main(steps=3):
    global params
    @jax.jit
    def train_step(params, x): return step_body(params, x)
    for _ in range(steps): params, loss = train_step(params, x)
    return params
"""

# Each with what is caught and where, and what was done on the host. What stands before "# ---" has run unwatched.
PROGRAMS: dict[str, tuple[str, str, list]] = {
    # Loops by what they end in.
    "append": (LOOP + "    LOG.append(loss)", "step_body, called at line 3", []),
    "evaluate": (
        "evaluate = jax.jit(loss_fn)\nLOG.append(float(evaluate(params, x)) > 0)\n" + LOOP + "    evaluate(params, x)",
        "step_body, called at line 5",
        [True],
    ),
    "bare except": (
        "train_step = jax.jit(step_body)\nfor i in range(3):\n    try: params, loss = train_step(params, x)\n"
        "    except: LOG.append('swallowed')",
        "step_body, called at line 3",
        ["swallowed"] * 3,
    ),
    "an error is not swallowed": (
        "train_step = jax.jit(step_body)\nfor i in range(3):\n    try: params, loss = train_step(params, x)\n"
        "    except Exception: LOG.append('never')",
        "step_body, called at line 3",
        [],
    ),
    "generator": (
        "def bar(batches):\n    try:\n        for x in batches: yield x\n"
        "    finally: LOG.append(float(jax.jit(loss_fn)(params, x)) > 0)\n"
        "train_step = jax.jit(step_body)\nfor x in bar([x, x]): params, loss = train_step(params, x)",
        "step_body, called at line 6",
        [True],
    ),
    "finally": (
        "train_step, evaluate = jax.jit(step_body), jax.jit(loss_fn)\n@contextlib.contextmanager\ndef saving():\n"
        "    try: yield\n    finally: LOG.append(float(evaluate(params, x)) > 0)\n"
        "with saving():\n    for _ in range(3): params, loss = train_step(params, x)",
        "step_body, called at line 7",
        [True],
    ),
    # The forms of main().
    "main()": (MAIN + "main()", "train_step, called in main(), line 6", []),
    "guarded": (MAIN + "if True:\n    sys.exit(main() and 0)", "train_step, called in main(), line 6", []),
    # Steps of all kinds.
    "donated, called before": (
        "train_step, params = jax.jit(step_body, donate_argnums=0), jax.device_put(params)\n"
        "params, loss = train_step(params, x)\n# ---\n"
        "for _ in range(3): params, loss = train_step(params, x)",
        "step_body, called at line 1",
        [],
    ),
    "static argument": (
        "@functools.partial(jax.jit, static_argnames='scale')\ndef train_step(params, x, scale=1.0):\n"
        "    params, loss = step_body(params, x); return params, loss * scale\n"
        "for _ in range(3): params, loss = train_step(params, x, scale=2.0)",
        "train_step, called at line 4",
        [],
    ),
    "parameters named as rm.trace's": (
        "@jax.jit\ndef train_step(params, x, wrt, gradient): return step_body(params, x * wrt)\n"
        "train_step(params, x, wrt=1.0, gradient=2.0)",
        "train_step, called at line 3",
        [],
    ),
    "bound method": (
        "class Trainer:\n    def __init__(self): self.params, self.update = params, jax.jit(self._update)\n"
        "    def _update(self, params, x): return step_body(params, x)\n"
        "    def fit(self):\n        for _ in range(3): self.params, _ = self.update(self.params, x)\n"
        "Trainer().fit()",
        "_update, called in fit(), line 5",
        [],
    ),
    "method with a static self": (
        "class Model:\n    @functools.partial(jax.jit, static_argnums=0)\n"
        "    def step(self, params, x): return step_body(params, x)\n"
        "m = Model()\nfor _ in range(3): params, loss = m.step(params, x)",
        "step, called at line 5",
        [],
    ),
    "wrapper around a step": (
        "def timed(fun):\n    @functools.wraps(fun)\n    def around(*args):\n        try: return fun(*args)\n"
        "        finally: LOG.append('timed')\n    return around\n"
        "step = timed(jax.jit(functools.partial(lambda rate, p, x: step_body(p, x), 0.1)))\n"
        "for _ in range(3): params, loss = step(params, x)",
        "<lambda>, called in around(), line 4",
        ["timed"],
    ),
    "two steps in one loop": (
        "one, two = jax.jit(lambda p, x: step_body(p, x)), jax.jit(step_body)\n"
        "for _ in range(3):\n    params, _ = one(params, x)\n    params, _ = two(params, x)",
        "<lambda>, called at line 3",
        [],
    ),
    "pmap": (
        "step = jax.pmap(step_body, axis_name='b')\nparams, x = jax.tree.map(lambda w: w[None], (params, x))\n"
        "for _ in range(3): params, loss = step(params, x)",
        "step_body, called at line 3",
        [],
    ),
    "shard_map": (
        "P = jax.sharding.PartitionSpec\n"
        "mesh = jax.make_mesh((1,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "@jax.jit\ndef train_step(params, x):\n"
        "    part = lambda params, x: jax.lax.pmean(jax.grad(loss_fn)(params, x), 'd')\n"
        "    return jax.shard_map(part, mesh=mesh, in_specs=(P(), P('d')), out_specs=P())(params, x)\n"
        "for _ in range(3): params = train_step(params, x)",
        "train_step, called at line 7",
        [],
    ),
    "scan of steps, jitted, called before": (
        "train = jax.jit(lambda params: jax.lax.scan(step_body, params, jnp.stack([x] * 3)))\ntrain(params)\n# ---\n"
        "params, losses = train(params)",
        "<lambda>, called at line 1",
        [],
    ),
    "an inner jit that was called before": (
        "inner = jax.jit(lambda p, x: step_body(p, x))\ninner(params, x)\n# ---\n"
        "train_step = jax.jit(lambda p, x: inner(p, x))\ntrain_step(params, x)",
        "<lambda>, called at line 2",
        [],
    ),
    "lowered ahead of time": (
        "step = jax.jit(step_body).lower(params, x).compile()\nfor _ in range(3): params, loss = step(params, x)",
        "step_body, called at line 1",
        [],
    ),
    "eval_shape of the step": (
        "train_step = jax.jit(step_body)\njax.eval_shape(train_step, params, x)\ntrain_step(params, x)",
        "step_body, called at line 2",
        [],
    ),
    "thread": (
        "train_step = jax.jit(step_body)\ndef work():\n    for _ in range(3): train_step(params, x)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()",
        "step_body, called in work(), line 3",
        [],
    ),
    # Gradients outside of jit.
    "eager step": (
        "def train_step(params, x):\n    x = x / 2\n    loss, grads = jax.value_and_grad(loss_fn)(params, x)\n"
        "    RUNS.append(1)\n    return grads\nfor _ in range(3): train_step(params, x)",
        "loss_fn, differentiated in train_step(), line 3",
        [],
    ),
    "eager microbatches of a jitted loss": (
        "gradient = jax.value_and_grad(jax.jit(loss_fn))\n"
        "def fit(params):\n    for _ in range(2):\n        for part in (x, x): gradient(params, part); RUNS.append(1)\n"
        "fit(params)",
        "loss_fn, differentiated in fit(), line 4",
        [],
    ),
    "jitted gradient": (
        "gradient = jax.jit(jax.value_and_grad(loss_fn))\nfor _ in range(3): gradient(params, x); RUNS.append(1)",
        "loss_fn, differentiated at line 2",
        [],
    ),
    "vjp": (
        "loss, backward = jax.vjp(loss_fn, params, x)\nRUNS.append(1)",
        "vjp, called at line 1",
        [],
    ),
    "eager scan": (
        "def main(params): return jax.lax.scan(step_body, params, jnp.stack([x] * 3))\nparams, losses = main(params)",
        "scan, called in main(), line 1",
        [],
    ),
    "eager scan that ran before": (
        "def run(params): return jax.lax.scan(step_body, params, jnp.stack([x] * 3))\nrun(params)\n# ---\nrun(params)",
        "scan, called in run(), line 1",
        [],
    ),
    # What came before.
    "an error in what comes before": (
        "try: jax.jit(lambda x: x @ jnp.ones((9, 9)))(x)\nexcept TypeError: LOG.append('as always')\n" + LOOP,
        "step_body, called at line 5",
        ["as always"],
    ),
    "a table that a trace keeps": (
        "class Model:\n    table = None\n    def __call__(self, x):\n"
        "        if self.table is None: self.table = jnp.arange(4.0) * 2\n        return x * self.table\n"
        "model = Model()\nevaluate = jax.jit(lambda x: model(x))\n"
        "for _ in range(2): LOG.append(evaluate(x).shape)\n" + LOOP,
        "step_body, called at line 11",
        [(2, 4), (2, 4)],
    ),
    "a table that the step's trace keeps": (
        "class Model:\n    table = None\n    def __call__(self, x):\n"
        "        if self.table is None: self.table = jnp.arange(4.0) * 2\n        return x * self.table\n"
        "model = Model()\ntrain_step = jax.jit(jax.grad(lambda p, x: loss_fn(p, model(x))))\ntrain_step(params, x)",
        "<lambda>, differentiated at line 8",
        [],
    ),
}
OF_ANOTHER_LOSS = ("shard_map", "a table that the step's trace keeps")
AFTERWARDS = ("append", "main()", "donated, called before", "eager scan", "pmap")


def prepared():
    space = {"__name__": "__main__"}
    exec(compile(BEFORE, "<before>", "exec"), space)
    return space


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_runs_and_the_step_is_caught(name):
    code, where, log = PROGRAMS[name]
    space, (*before, code) = prepared(), code.split("# ---\n")
    exec("".join(before), space)
    jax.effects_barrier()
    space["RUNS"].clear()
    cell = compile(code, "<cell>", "exec")
    with rm.catching() as caught:
        exec(cell, space)
    jax.effects_barrier()
    assert (space["RUNS"], space["LOG"], caught.head) == ([], log, where)
    other = prepared()
    listed = saved_residuals(lambda params: other["loss_fn"](params, other["x"]), other["params"])
    own = [value for value, why in listed if "from the argument" not in why and "from a constant" not in why]
    if name not in OF_ANOTHER_LOSS:
        assert caught.trace.report().saved_bytes == sum(math.prod(value.shape) * 4 for value in own)
    assert caught.trace.gradient is not None
    if name in AFTERWARDS:
        exec(cell, space)
        jax.effects_barrier()
        assert space["RUNS"]


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)


@jax.jit
def step(params, x):
    return params - 0.1 * jax.grad(loss)(params, x)


@jax.jit
def attack(x, params):
    return x + jax.grad(loss, argnums=1)(params, x)


evaluate = jax.jit(loss)
PARAMS, X = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)


def test_what_is_caught_is_the_call_itself():
    with rm.catching() as caught:
        step(PARAMS, x=X)
    assert (caught.function, caught.args, caught.kwargs) == (step, (PARAMS,), {"x": X})
    assert rm.catch(lambda width: step(np.ones((width, width)), X), 4).signature.startswith("loss(params f32[4,4], x")


def test_without_a_gradient_code_runs_to_its_end_and_that_is_said():
    with rm.catching() as caught:
        value = evaluate(PARAMS, X)
    assert float(value) > 0
    assert (caught.function, caught.head, caught.note, list(caught.ran)) == (None, "", "", ["loss"])
    with pytest.raises(rm.RematError, match="^no training step was found: nothing took a gradient: loss ran.$"):
        _ = caught.trace
    with pytest.raises(rm.RematError, match="no training step was found"):
        rm.catch(evaluate, PARAMS, X)


def test_a_step_by_its_name_lets_the_gradients_before_it_run():
    def train():
        x = attack(attack(X, PARAMS), PARAMS)
        jax.vjp(loss, PARAMS, x)
        step(PARAMS, x)

    for name in ("step", "train"):
        with rm.catching(name) as caught:
            train()
        came = [(met.name, met.taken) for met in caught.gradients]
        others = [("attack", False), ("attack", False), ("vjp", False)]
        assert came == ([*others, ("step", True)] if name == "step" else [("attack", True)])  # called in `train`
    with rm.catching() as caught:  # which is asked about again, as any other
        train()
    assert caught.function is attack
    with rm.catching("no_such") as caught:
        attack(X, PARAMS)
    with pytest.raises(
        rm.RematError, match="^no step named no_such was called. Gradients were taken by attack, called in"
    ):
        _ = caught.trace


def exported(fun):
    return jax.export.export(fun)(PARAMS, X).call


AHEAD = {
    "compiled": lambda fun: fun.lower(PARAMS, X).compile(),
    "exported": exported,
    "exported, jitted": lambda fun: jax.jit(exported(fun)),
    "exported, in a loop": lambda fun: lambda p, x: jax.lax.map(lambda x: exported(fun)(p, x), x[None])[0],
}


@pytest.mark.parametrize("made", AHEAD)
def test_what_was_compiled_ahead_of_time_is_stopped_at_and_named(made):
    compiled, other = AHEAD[made](step), AHEAD[made](evaluate)
    with rm.catching() as caught:
        value = other(PARAMS, X)
        value = compiled(PARAMS, X)
    assert value.shape == ()
    assert caught.head.startswith("step, called ")
    with pytest.raises(rm.RematError, match="^step, called .* cannot be traced; it did not run"):
        _ = caught.trace


def test_a_step_that_cannot_be_traced_a_second_time_does_not_run():
    traced = []

    @jax.jit
    def once(params, x):
        traced.append(1)
        assert len(traced) == 1, "a table is there already"
        return jax.grad(loss)(params, x)

    with rm.catching() as caught:
        once(PARAMS, X)
        traced.append("ran")
    assert traced == [1, 1]
    with pytest.raises(rm.RematError, match="^once, called in .* did not run, and was not inspected: a table"):
        _ = caught.trace


def test_a_step_whose_code_swallows_everything_is_stopped_at_and_traced_anew_afterwards():
    @jax.jit
    def odd(params, x):
        try:
            return params - jax.grad(loss)(params, x)
        except BaseException:  # noqa: BLE001
            return params

    with rm.catching() as caught:
        odd(PARAMS, X)
    assert caught.function is odd
    assert float(odd(PARAMS, X)[0, 0]) != 1  # what was traced without the gradient is not kept


def test_who_swallows_the_stop_is_stopped_again_and_cleaning_up_is_let_through():
    values = []
    with rm.catching() as caught:
        try:
            step(PARAMS, X)
        except BaseException:  # noqa: BLE001
            values.append(evaluate(PARAMS, X).shape)
        values.append(evaluate(PARAMS, X))
    assert values == [()]
    assert "ran before" not in caught.note


def test_nothing_is_compiled_anew():
    compiled = []

    def listen(event, _seconds, **_kwargs):
        compiled.append(event) if "backend_compile" in event else None

    jax.block_until_ready((step(PARAMS, X), evaluate(PARAMS, X), jnp.sin(X) + X))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            with rm.catching() as caught:
                jax.block_until_ready((evaluate(PARAMS, X), jnp.sin(X) + X))
                step(PARAMS, X)
            assert caught.function is step
            jax.block_until_ready((step(PARAMS, X), evaluate(PARAMS, X), jnp.sin(X) + X))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_a_watch_leaves_nothing():
    def objects():
        gc.collect()
        return len(gc.get_objects())

    def watch():
        with Watch(lambda call: call.function) as caught:
            evaluate(PARAMS, X)
            step(PARAMS, X)
        assert caught.result is step

    watch()
    before = objects()
    for _ in range(10):
        watch()
    assert objects() - before < 10
    places = [pjit._infer_params, pjit._get_fastpath_data, ad.linearize, jax.stages.Compiled.__call__]
    assert [place.__module__.partition(".")[0] for place in places] == ["jax"] * 4


def test_threads_that_the_block_starts_are_watched_and_others_if_asked():
    with ThreadPoolExecutor(1) as old:
        old.submit(int).result()
        with rm.catching() as caught:
            old.submit(lambda: step(PARAMS, X)).result()
        assert caught.function is None
        with rm.catching(also_threads=True) as caught:
            old.submit(lambda: step(PARAMS, X)).result()
        assert caught.function is step
    with rm.catching() as caught, ThreadPoolExecutor(1) as new:
        new.submit(lambda: step(PARAMS, X)).result()
    assert caught.function is step


def test_coroutines_are_watched():
    async def worker():
        for _ in range(2):
            step(PARAMS, X)
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(worker(), worker())

    assert rm.catch(lambda: asyncio.run(main())).function_name == "loss"


def test_an_interrupt_ends_the_watch():
    with pytest.raises(KeyboardInterrupt), rm.catching():
        raise KeyboardInterrupt
    assert step(PARAMS, X).shape == (4, 4)
    assert rm.catch(step, PARAMS, X).function_name == "loss"


def test_one_watch_at_a_time():
    with rm.catching() as caught:
        with pytest.raises(rm.RematError, match="watched already"):
            rm.catch(step, PARAMS, X)
        rm.trace(step, PARAMS, X).report()  # an inspection is not caught itself
        step(PARAMS, X)
    assert caught.function is step


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "pjit._infer_params",
        "pjit._get_fastpath_data",
        "pjit._cpp_pjit",
        "config.config_ext",
        "interpreters.ad.linearize",
    ],
)
def test_a_jax_that_cannot_be_asked_is_told_in_one_sentence(path):
    ran = run("import remat_magic as rm\nrm.catch(print)", f"jax._src.{path}")
    assert re.search(rf"RematError: jax \S+ has no jax._src.{path}, so that code cannot be stopped at", ran.stderr)


# -------------------------------------------------------------------------------------------------------- libraries

LINEN = """
import flax.linen as nn, optax
from flax.training.train_state import TrainState
model = nn.Dense(4)
state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=optax.adam(1e-3))
def loss(params, x): return jnp.mean(jnp.tanh(state.apply_fn(params, x)) ** 2)
"""
NNX = """
from flax import nnx
import optax
model = nnx.Linear(4, 4, rngs=nnx.Rngs(0)); optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
def loss(model, x): return jnp.mean(jnp.tanh(model(x)) ** 2)
def train_step(model, optimizer, x): optimizer.update(model, nnx.grad(loss)(model, x))
"""
EQUINOX = """
import equinox as eqx
model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
def loss(model, x): return jnp.mean(jnp.tanh(jax.vmap(model)(x)) ** 2)
def update(model, x): return eqx.apply_updates(model, eqx.filter_grad(loss)(model, x))
"""
OF_LIBRARIES = {
    "TrainState": (
        "flax.linen",
        LINEN + "@jax.jit\ndef train_step(state, x):\n"
        "    return state.apply_gradients(grads=jax.grad(loss)(state.params, x))\nstate = train_step(state, x)",
        "PjitFunction",
    ),
    "PyTreeNode": (
        "flax.linen",
        LINEN + "import flax\nclass Trained(flax.struct.PyTreeNode):\n    params: dict\n    @jax.jit\n"
        "    def update(self, x): return self.replace(params=jax.grad(loss)(self.params, x))\n"
        "Trained(state.params).update(x)",
        "PjitFunction",
    ),
    "nnx.jit": ("flax.nnx", NNX + "nnx.jit(train_step)(model, optimizer, x)", "JitWrapped"),
    "nnx, eager": ("flax.nnx", NNX + "train_step(model, optimizer, x)", "function"),
    "eqx.filter_jit": ("equinox", EQUINOX + "step = eqx.filter_jit(update)\nmodel = step(model, x)", "_JitWrapper"),
    "a method of eqx.filter_jit": (
        "equinox",
        EQUINOX + "class Trainer(eqx.Module):\n    model: eqx.nn.Linear\n    @eqx.filter_jit\n"
        "    def fit(self, x): return update(self.model, x)\nTrainer(model).fit(x)",
        "_JitWrapper",
    ),
    "equinox, eager": ("equinox", EQUINOX + "model = update(model, x)", "_GradWrapper"),
    "haiku": (
        "haiku",
        "import haiku as hk\nmodel = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))\n"
        "params = model.init(jax.random.key(0), x)\n"
        "def loss(params, x): return jnp.mean(jnp.tanh(model.apply(params, x)) ** 2)\n"
        "@jax.jit\ndef update(params, x): return jax.grad(loss)(params, x)\nupdate(params, x)",
        "PjitFunction",
    ),
}


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_the_object_of_a_library_is_caught(name):
    needed, code, kind = OF_LIBRARIES[name]
    library(needed)
    space = prepared()
    with rm.catching() as caught:
        exec(compile(code, "<cell>", "exec"), space)
    assert type(caught.function).__name__ == kind
    assert needed != "flax.nnx" or int(space["optimizer"].step[...]) == 0  # which a step would count
    assert caught.trace.function_name == "loss"
    listed = saved_residuals(lambda w: jnp.mean(jnp.tanh(X @ w) ** 2), PARAMS)
    own = sum(math.prod(value.shape) * 4 for value, why in listed if "output of" in why)
    assert caught.trace.report().saved_bytes == own


# ---------------------------------------------------------------------------------------------------------- scripts

SCRIPT = """
import argparse, sys, jax, jax.numpy as jnp

def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--end", default="")
    options = parser.parse_args()
    if options.end == "error": raise ValueError("no data")
    if options.end: sys.exit(options.end)
    params, evaluate = jnp.ones((options.width, options.width)), jax.jit(loss)
    print("evaluated", evaluate(params, params).shape)
    @jax.jit
    def train_step(params, x): return params - jax.grad(loss)(params, x)
    for _ in range(options.width): params = train_step(params, params); print("a step ran")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs the script by the command; its exit status, what it printed, and its errors."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))

    def ran(*arguments, options=()):
        status = command.main([*options, str(path), *arguments])
        return status, *capsys.readouterr()

    return ran


def test_a_script_runs_until_its_step_and_prints_the_answer(train, tmp_path):
    status, out, _ = train("--width", "16", options=["--html", str(tmp_path / "report.html")])
    assert status == 0
    assert out.startswith("evaluated ()\ntrain_step, called in main(), line 18\n")
    assert "loss ran before" in out
    assert not any(
        f"{name}." in out.replace("report.html", "") for name in ("trace", "report", "fit")
    )  # which nobody has who runs a script
    assert "a step ran" not in out
    assert "f32[16,16]" in out
    assert "f32[16,16]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("device", "status"), [("test tpu", 1), ("1 GB", 0), ("1 kB", 1)])
def test_its_exit_status_says_whether_the_step_fits(train, monkeypatch, device, status):
    monkeypatch.setattr(rm.devices, "_KNOWN", dict(rm.devices._KNOWN))
    rm.devices.register(replace(rm.devices.get("TPU v5e"), name="Test TPU", memory_bytes=1000))
    code, out, _ = train(options=["--device", device])
    assert code == status
    assert not any(f"{name}." in out.replace("report.html", "") for name in ("trace", "report", "fit"))
    assert "--html report.html" in out


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--width", "0"], 2, "no training step was found: nothing took a gradient: loss ran."),
        (["--end", "error"], 3, "ValueError: no data"),
        (["--end", "no config"], 3, "no config"),
    ],
)
def test_its_exit_status_says_why_there_is_no_answer(train, arguments, status, told):
    code, _, error = train(*arguments)
    assert (code, error.strip().splitlines()[-1]) == (status, told)


@pytest.mark.parametrize(("device", "told"), [("TPU v5", "did you mean"), ("5 apples", "no number of bytes")])
def test_a_device_that_nobody_knows_is_told_before_the_script_runs(train, device, told):
    status, out, error = train(options=["--device", device])
    assert (status, out) == (3, "")
    assert told in error
