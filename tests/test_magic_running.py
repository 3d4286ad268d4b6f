"""A cell under ``%%remat`` runs until its training step is called, wherever that is, with the real engine."""

import pytest

from remat_magic._jax import watch
from tests.test_catching import BEFORE

SETUP = f"""{BEFORE}
import asyncio
@jax.jit
def train_step(params, x): return step_body(params, x)
def eager_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    LOG.append(loss)
    return grads, loss
def fit(params, data, steps=4):
    for x in data[:steps]:
        params, loss = train_step(params, x); LOG.append("fitted")
    return params
def train(params, data):
    for x in data: params, loss = train_step(params, x)
def main(steps=4):
    params = [jnp.ones((4, 4)) * 0.1] * 3
    for _ in range(steps): params, loss = train_step(params, x)
    return params
def no_training(): return float(evaluate(params, x))
class Trainer:
    def fit(self, steps=4):
        for _ in range(steps): self.params, loss = train_step(params, x)
evaluate = jax.jit(loss_fn)
params, x = jax.device_put((params, x))
shapes = jax.eval_shape(lambda: (params, x))
compiled = train_step.lower(params, x).compile()
batches = itertools.cycle([x])
"""
LOOP = "for step in range(40):\n    batch = next(batches)\n    params, loss = train_step(params, batch)\n"

# Cells, and what is said of the call at which they stop; "" where the call is all of the last line.
CELLS = {
    # Loops by what they end in.
    "append": (LOOP + "    LOG.append(loss)", "train_step, called at In[2]:4. Stopped at train_step, before it ran."),
    "if print": (LOOP + "    if step % 10 == 0:\n        print(step, float(loss))", "train_step, called at In[2]:4."),
    "log": (LOOP + "    LOG.append({'loss': loss.item()})", "train_step, called at In[2]:4."),
    "if log": (LOOP + "    if step % 10 == 0:\n        LOG.append(loss.item())", "train_step, called at In[2]:4."),
    "if evaluate": (LOOP + "    if step % 10 == 0:\n        LOG.append(evaluate(params, x))", "called at In[2]:4."),
    "evaluated before": ("LOG.append(evaluate(params, x))\n" + LOOP + "    print(loss)", "called at In[2]:5."),
    # The forms of main().
    "main()": ("main()", "train_step, called in main(), In[1]:29. Stopped at train_step, before it ran."),
    "main assigned": ("params = main()", "train_step, called in main()"),
    "main with arguments": ("params = main(steps=5)", "train_step, called in main()"),
    "main guarded": ("if __name__ == '__main__':\n    main()", "train_step, called in main()"),
    "main and exit": ("sys.exit(main() and 0)", "train_step, called in main()"),
    "trainer": ("Trainer().fit()", "train_step, called in fit()"),
    "printed": ("print(main())", "train_step, called in main()"),
    "arrays to train on": ("params = fit(params, jnp.stack([x] * 5))", "train_step, called in fit(), In[1]:23."),
    "an iterator": ("train(params, iter([x]))", "train_step, called in train()"),
    # Calls at the end.
    "step": ("train_step(params, x)", ""),
    "step assigned": ("params, loss = train_step(params, x)", "train_step, called at In[2]:2. Stopped at train_step"),
    "step printed": ("print(train_step(params, x)[1].item())", "train_step, called at In[2]:2."),
    "eager step": ("for _ in range(3): params, loss = eager_step(params, x)", "eager_step, called at In[2]:2."),
    "used after": ("new, loss = train_step(params, x)\nfor w in new: print(w.sum())", "train_step, called at In[2]:2."),
    "updated after": ("g = jax.grad(loss_fn)(params, x)\nparams = jax.tree.map(jnp.add, params, g)", "Stopped at "),
    "loss": ("loss_fn(params, x)", ""),
    "shapes": ("loss_fn(*shapes)", ""),
    "shapes in a loop": ("p, x = shapes\nfor _ in range(3):\n    p, loss = train_step(p, x)\n    print(loss)", "Stop"),
    "a loop of losses": ("for _ in range(3): LOG.append(float(loss_fn(params, x)))", "loss_fn, called at In[2]:2."),
    "eager steps in a function": (
        "def fit_eager(params, data):\n    for x in data:\n        params, loss = eager_step(params, x)\n"
        "        RUNS.append(1)\n"
        "fit_eager(params, jnp.stack([x] * 5))",
        "loss_fn, differentiated in eager_step()",
    ),
    "eager microbatches in a step in a function": (
        "def step(params, xs):\n    for x in xs:\n        jax.grad(loss_fn)(params, x)\n        RUNS.append(1)\n"
        "def fit(params, data):\n    for xs in data: step(params, xs)\n"
        "fit(params, [jnp.stack([x] * 2)] * 3)",
        "loss_fn, differentiated in step()",
    ),
    # Shells and concurrency.
    "%time": ("%time params, loss = train_step(params, x)", "train_step, called at line 1. Stopped"),
    "future": ("from __future__ import annotations\n" + LOOP, "train_step, called at In[2]:5."),
    "await": ("async def go(): train_step(params, x)\nawait go()\nLOG.append(1)", "train_step, called in go(), In[2]"),
    "gather": ("async def go(): train_step(params, x)\nawait asyncio.gather(go(), go())", "train_step, called in go()"),
    "task group": (
        "async def go(): train_step(params, x)\n"
        "async with asyncio.TaskGroup() as group: tasks = [group.create_task(go()) for _ in range(2)]",
        "train_step, called in go()",
    ),
    "thread": (
        "thread = threading.Thread(target=lambda: [train_step(params, x) for _ in range(3)])\n"
        "thread.start(); thread.join()",
        "train_step, called at In[2]:2.",
    ),
    # On the way out.
    "except Exception": (
        "for _ in range(3):\n    try: params, loss = train_step(params, x)\n    except Exception: LOG.append(1)",
        "train_step, called at In[2]:3.",
    ),
    "finally": ("try:\n    main()\nfinally:\n    LOG.append(float(evaluate(params, x)) > 0)", "`finally` and `with`"),
    "a finally that fails": ("try:\n    new = main()\nfinally:\n    print(new)", "train_step, called in main()"),
}  # fmt: skip


@pytest.fixture
def user(cells):
    cells.ok(SETUP)
    return cells


@pytest.mark.parametrize("name", CELLS)
def test_no_step_runs_and_it_is_inspected(user, name):
    text, said = CELLS[name]
    names = {key: value for key, value in user.ns.items() if not key.startswith("_")}
    widget = user.ok("%%remat", text) or user.ns["_"]
    user.ns["jax"].effects_barrier()
    assert user.ns["RUNS"] == []
    assert widget.report.function == "loss_fn"
    title = widget._title
    assert said in title if said else title == ""
    assert name != "append" or "finally" not in title  # none is there
    assert user.ns["params"] is names["params"]
    assert name in ("evaluated before", "eager step") or user.ns["LOG"] in ([], [True])
    assert "Traceback" not in user.out


@pytest.mark.parametrize("name", ["append", "main assigned", "%time", "await"])
def test_the_same_cell_runs_as_always_afterwards(user, name):
    text, _ = CELLS[name]
    user.ok("%%remat", text)
    user.ok(text)
    user.ns["jax"].effects_barrier()
    assert len(user.ns["RUNS"]) == {"append": 40, "main assigned": 4}.get(name, 1)


def test_a_cell_without_a_gradient_runs_to_its_end_and_says_so(user):
    assert "no_training ran, and took no gradient." in user.complaint("%%remat", "no_training()")
    assert "nothing to inspect: end the cell with a call" in user.complaint("%%remat", "z = no_training()", "z += 1")
    assert user.ns["z"] > 1
    user.ok("from jax import export", "gradient = jax.jit(jax.grad(loss_fn))")
    user.ok("made = export.export(gradient)(params, x)")
    for call in ("compiled(params, x)", "made.call(params, x)"):
        for cell in (call, f"for _ in range(3): loss = {call}", f"new = {call}\nRUNS.append(new)"):
            assert "was compiled ahead of time or exported" in user.complaint("%%remat", cell)
    assert user.ns["RUNS"] == []
    widget = user.ok("%%remat", "@jax.checkpoint", "def layer(x): return jnp.sin(x)", "z = no_training()")
    assert widget.report.function == "layer"


def test_what_cannot_be_differentiated_runs_and_is_told(user):
    assert "cannot be differentiated" in user.complaint("%%remat", "(lambda x: LOG.append(1) or x > 0)(x)")
    assert user.ns["LOG"] == [1, 1]  # traced, and run
    result = user.run("%%remat", "def f(x): return x if x[0, 0] > 0 else -x", "f(x)")
    assert "TracerBoolConversionError" in type(result.error_in_exec).__name__
    assert "needs arrays" not in user.complaint("%%remat", "(lambda x: x > 0)(shapes[1])")


def test_gradients_that_are_taken_before_are_listed_and_the_step_is_named(user):
    cell = (
        "adversarial = x + jnp.sign(jax.grad(loss_fn, 1)(params, x))\n"
        "step = jax.jit(step_body)\n"
        "for _ in range(3): params, loss = step(params, x)"
    )
    for name in ("step_body", "step"):
        title = user.ok(f"%%remat --step {name}", cell)._title
        assert "step_body, called at In[" in title
        assert "Gradients were taken before it by loss_fn, differentiated at In[" in title
    assert user.ns["RUNS"] == []
    complaint = user.complaint("%%remat --step nope", cell)
    assert "no step named nope was called. Gradients were taken by loss_fn, differentiated at In[" in complaint
    assert "; step_body, called at In[" in complaint
    title = user.ok("%%remat", "def prepared():", "    return jax.jit(jax.grad(jnp.sum))(x)", "prepared()")._title
    assert title.endswith("name it: %%remat --step NAME.")


def test_a_failing_cell_fails_as_always(user):
    result = user.run("%%remat", "done = 1", "for _ in range(3):", "    1 / 0", "    train_step(params, x)")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "----> 4     1 / 0" in user.out
    assert "/remat_magic/" not in user.out
    assert user.ns["done"] == 1
    user.ok("%%remat", "main()")
    user.ok("main()")
    assert user.ns["RUNS"]


@pytest.mark.parametrize("where", ["cell", "evaluation", "step", "last call"])
def test_an_interrupt_ends_the_cell_and_the_next_runs_as_always(user, where):
    user.ok("import types", f"pressed = types.SimpleNamespace(where={where!r}, times=0)")
    user.ok(
        "def press(where):",
        "    if pressed.where == where and pressed.times < 2:",
        "        pressed.times += 1",
        "        raise KeyboardInterrupt",  # as Python's handler does
        "def pressing(where):",
        "    def loss(params, x): press(where); return loss_fn(params, x)",
        "    return loss",
        "measure = jax.jit(pressing('evaluation'))",
        "step = jax.jit(jax.grad(pressing('step')))",
    )
    cell = "press('cell')\nmeasure(params, x)\n"
    cell += "pressing('last call')(params, x)" if where == "last call" else "for _ in range(3): step(params, x)"
    result = user.run("%%remat", cell)
    assert user.ns["pressed"].times == 1
    inspecting = where in ("step", "last call")
    assert type(result.error_in_exec).__name__ == ("UsageError" if inspecting else "KeyboardInterrupt")
    assert ("tracing was interrupted" in str(result.error_in_exec)) == inspecting
    user.ns["pressed"].where = ""
    assert user.ok("%%remat", cell).report.function == "loss"
    user.ok(cell)


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize(
    "cell", [LOOP + "    LOG.append(evaluate(params, x) + 1)", "fitted = main()", "evaluate(params, x)"]
)
def test_nothing_is_compiled_anew(cells, cell):
    import jax

    compiled = []

    def listen(event, _seconds, **_kwargs):
        compiled.append(event) if event == COMPILED else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        cells.ok(SETUP)
        cells.ok(cell)
        assert compiled
        del compiled[:]
        for _ in range(2):
            cells.ok("%%remat", cell)
            cells.ok(cell)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_where_jax_lacks_what_it_takes_only_a_last_call_is_understood(user, monkeypatch):
    monkeypatch.setattr(watch, "_asked_for", [None, *watch._asked_for[1:]])
    assert user.ok("%%remat", "params, loss = train_step(params, x)").report.function == "loss_fn"
    for cell in ("main()", LOOP):
        assert "has no jax._src.pjit._infer_params, so that code cannot be stopped" in user.complaint("%%remat", cell)
    assert user.ns["RUNS"] == []


MESSAGE = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.
Peak buffers:
        Buffer 1:
                Size: 6.00MiB
                Operator: op_name="jit(f)/concatenate[dimension=0]" source_file="/model.py" source_line=2
                Shape: f32[4096,128,3]
"""
SAID = "%remat shows what took the memory, and what to change."
EXHAUSTED = "for turn in range(3):\n    params, loss = donating(params, x)\n    if full: raise RuntimeError(MESSAGE)"


@pytest.fixture
def exhausted(user):
    """A loop that ran out of memory in its first turn; the parameters that it was given were donated."""
    user.ns.update(MESSAGE=MESSAGE, full=True)
    user.ok("donating = jax.jit(step_body, donate_argnums=0)", "params = [w + 0 for w in params]", "old = params")
    result = user.run(EXHAUSTED)
    assert isinstance(result.error_in_exec, RuntimeError)
    user.ns["jax"].effects_barrier()
    user.ns["RUNS"].clear()
    return user


def test_after_an_out_of_memory_error_the_cell_is_inspected(exhausted):
    assert exhausted.out.endswith(f"{SAID}\n")
    exhausted.ns["params"] = exhausted.ns["old"]  # as where the error is raised before the assignment
    assert exhausted.ns["old"][0].is_deleted()
    exhausted.ok("note = 1")
    widget = exhausted.ok("%remat")
    assert widget.report.function == "loss_fn"
    assert "step_body, called at In[3]:2." in widget._title
    assert "6.29 MB wanted at once" in exhausted.out
    assert "model.py:2" in exhausted.out
    assert exhausted.ns["RUNS"] == []
    exhausted.ok('%remat --text --device "16 GiB"')
    assert "Out of memory while running: 6.29 MB wanted at once." in exhausted.out
    assert "FITS" in exhausted.out.split("at once.")[1]


def test_a_cell_that_fits_again_is_none_that_ran_out_of_memory(exhausted):
    exhausted.ns.update(full=False, params=[w + 0 for w in exhausted.ns["params"]])
    exhausted.ok(EXHAUSTED)
    exhausted.ok("main(steps=1)")
    assert "train_step, called in main()" in exhausted.ok("%remat")._title
    assert "wanted" not in exhausted.out


def test_what_was_told_of_an_error_is_found_in_what_led_to_it(user):
    user.ns["MESSAGE"] = MESSAGE
    user.run("try: raise ValueError(MESSAGE)", "except ValueError as error: raise KeyError('saving') from error")
    assert user.out.endswith(f"{SAID}\n")
    user.run("raise ValueError('no')")
    assert SAID not in user.out
    user.run("jnp.zeros((10**7, 10**7))")  # as XLA says it itself
    assert user.out.endswith(f"{SAID}\n")


def test_a_cell_with_a_magic_or_an_await_is_run_again(user):
    user.ok("%%time", "main(steps=1)")
    assert "train_step, called in main()" in user.ok("%remat")._title
    user.ok("%%remat -p nothing_saveable", "main(steps=1)")
    widget = user.ok("%remat")
    assert (widget.policy, widget.report.function) == ("as_written", "loss_fn")
    user.ok("await asyncio.sleep(0)")
    assert "put %%remat on it" in user.complaint("%remat")


def test_a_script_that_is_run_in_a_cell_is_stopped_too(user, tmp_path):
    (tmp_path / "train.py").write_text("main()")
    widget = user.ok("%%remat", f"%run -i {tmp_path / 'train.py'}")
    assert "train_step, called in main()" in widget._title
    assert user.ns["RUNS"] == []
    assert user.out.startswith("Stopped before the training step ran.\n")
