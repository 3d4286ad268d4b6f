"""Programs whose specs name the axes of a mesh that is not here, against JAX's own compilation of them."""

import jax
import jax.numpy as jnp
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic import _jax
from remat_magic.records import RematError
from tests.eight_devices import eight
from tests.programs import f32

AXES = "data=4,model=2"
LAYERS, WIDTH, BATCH = 3, 128, 192


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def step(ws, x):
    value, gradient = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient), value


ARGS = [f32(WIDTH, WIDTH)] * LAYERS, f32(BATCH, WIDTH)
# How the weights and the batch are spread, and the shapes of what a device has of a weight and of the batch.
LAYOUTS = {
    "data": (P(), P("data"), (WIDTH, WIDTH), (BATCH // 4, WIDTH)),
    "fsdp": (P("data"), P(("data", "model")), (WIDTH // 4, WIDTH), (BATCH // 8, WIDTH)),
    "tensor": (P(None, "model"), P("data"), (WIDTH, WIDTH // 2), (BATCH // 4, WIDTH)),
}


def jitted(weights, batch):
    return jax.jit(step, donate_argnums=0, in_shardings=(weights, batch), out_shardings=(weights, None))


def by_hand(mesh, function, *args):
    with jax.set_mesh(mesh):
        memory = function.lower(*args).compile().memory_analysis()
    return [getattr(memory, f"{name}_size_in_bytes") for name in ("temp", "argument", "output", "alias")]


def of_xla(trace):
    measured = trace.measure("none", "function")
    assert not measured.error
    return [measured.temp_bytes, measured.argument_bytes, measured.output_bytes, measured.alias_bytes]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_arguments_are_spread_as_the_specs_of_the_jitted_step_say(name):
    weights, batch, of_weight, of_batch = LAYOUTS[name]
    mesh = rm.mesh(AXES)
    with jax.set_mesh(mesh):
        trace = rm.trace(jitted(weights, batch), *ARGS)
    assert trace.mesh_devices == 8
    report = trace.report("none", "function")
    assert (report.devices, report.per_device) == (8, True)
    shapes = {row.argument: row.shard_shape for row in report.residuals if row.kind == "argument"}
    assert shapes == {"ws[1]": of_weight, "ws[2]": of_weight, "x": of_batch}
    parts = [4 * size[0] * size[1] for size in (of_weight, of_batch)]
    assert (trace.step.parameter_bytes, trace.step.batch_bytes) == (LAYERS * parts[0], parts[1])
    assert of_xla(trace) == by_hand(mesh, jitted(weights, batch), *ARGS)
    assert not [note for note in trace.notes if note.kind in ("mesh-unused", "argument-unplaced")]


def adam(ws, state, gradient):
    count, means, squares = state
    count += 1
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradient)
    squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, squares, gradient)

    def moved(w, m, s):
        return w - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8)

    return jax.tree.map(moved, ws, means, squares), (count, means, squares)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [True, False])
def test_an_optimizers_state_is_spread_as_its_own_specs_say(spread):
    state = jax.ShapeDtypeStruct((), "int32"), ARGS[0], ARGS[0]
    specs = jax.tree.map(lambda leaf: P("data") if spread and leaf.ndim else P(), state)

    def update(ws, state, x):
        value, gradient = jax.value_and_grad(loss)(ws, x)
        ws, state = adam(ws, state, gradient)
        return ws, state, value

    function = jax.jit(update, in_shardings=(P("data"), specs, P("data")), out_shardings=(P("data"), specs, None))
    mesh = rm.mesh({"data": 4, "model": 2})
    args = ARGS[0], state, ARGS[1]
    with jax.set_mesh(mesh):
        trace = rm.trace(function, *args)
    weights = 4 * LAYERS * WIDTH * WIDTH
    assert trace.step.parameter_bytes == weights // 4
    assert trace.step.optimizer_bytes == 2 * weights // (4 if spread else 1) + 4
    assert of_xla(trace) == by_hand(mesh, function, *args)


@pytest.mark.slow
def test_what_is_spread_by_nothing_is_said():
    mesh = rm.mesh(AXES)
    with jax.set_mesh(mesh):
        some = rm.trace(jax.jit(step, in_shardings=(None, P("data"))), *ARGS)
        none = rm.trace(jax.jit(step), *ARGS)
    assert of_xla(some) == by_hand(mesh, jax.jit(step, in_shardings=(None, P("data"))), *ARGS)
    (note,) = (note for note in some.notes if note.kind == "argument-unplaced")
    assert note.startswith("ws[0], ws[1], ws[2] have neither a sharding nor a spec")
    assert some.report("none", "function").devices == 8
    (note,) = (note for note in none.notes if note.kind == "mesh-unused")
    assert note.startswith("Nothing of step is sharded over the mesh data=4, model=2: every device holds")
    report = none.report("none", "function")
    assert (report.devices, report.saved_bytes) == (1, rm.trace(step, *ARGS).report("none", "function").saved_bytes)
    assert of_xla(none) == by_hand(mesh, jax.jit(step), *ARGS)


def test_a_line_names_the_mesh(capsys):
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "remat_magic")
    shell.push({"step": jitted(P("data"), P("data")), "ARGS": ARGS})
    shell.run_line_magic("remat", f'--text --mesh "{AXES}" step(*ARGS)')
    assert "of one of 8 devices" in capsys.readouterr().out
    assert jax.sharding.get_abstract_mesh().empty  # what is set for the trace is over with it
    shell.run_cell('%remat --mesh "data:4" step(*ARGS)')
    said = capsys.readouterr()
    assert "a mesh is written by axes and sizes, such as \"data=4,model=2\", not 'data:4'." in said.out + said.err


@pytest.mark.parametrize(
    "axes",
    ["", "data", "data=0", "4", "data=2,data=4", "a b=3", {}, {"a": 0}, {1: 2}, {"a": True}, 8, None],
)
def test_what_is_no_mesh_is_a_sentence(axes):
    with pytest.raises(RematError, match='such as "data=4,model=2", not '):
        rm.mesh(axes)


def test_a_mesh_is_of_this_machines_devices_where_they_are_enough(monkeypatch):
    here = jax.devices()
    assert [*rm.mesh(f"data={len(here)}").devices] == here
    larger = rm.mesh(f" data = {2 * len(here)} ")
    assert larger.size == 2 * len(here)
    assert {device.platform for device in larger.devices} == {"cpu"}
    assert not {*larger.devices} & {*here}
    assert rm.mesh({"a": 3, "b": 5}).shape == {"a": 3, "b": 5}
    with pytest.raises(RematError, match="more than 2048 devices that are not here are not simulated"):
        rm.mesh("data=4096")
    monkeypatch.setattr(_jax.compiling, "_make_client", None)
    _jax.compiling._made.cache_clear()
    with pytest.raises(RematError, match="how XLA spreads values over a mesh that is not here"):
        rm.mesh("data=512")


@pytest.mark.slow
def test_a_program_is_asked_about_for_as_many_devices_as_are_simulated(monkeypatch, tmp_path):
    """A container that allows few threads is asked first: XLA ends the process where it gets none."""
    mesh = rm.mesh("data=256,model=8")
    with jax.set_mesh(mesh):
        function = jax.jit(step, in_shardings=(P("model"), P("data")))
        trace = rm.trace(function, [f32(WIDTH, WIDTH)], f32(512, WIDTH))
    report = trace.report("none", "function")
    assert report.of_devices == "of one of 2048 devices"
    shapes = {row.argument: row.shard_shape for row in report.residuals if row.kind == "argument"}
    assert shapes["x"] == (2, WIDTH)
    assert of_xla(trace) == by_hand(mesh, function, [f32(WIDTH, WIDTH)], f32(512, WIDTH))
    few = tmp_path / "pids.max"
    monkeypatch.setattr(_jax.compiling, "_LIMITS", (few, tmp_path / "missing"))
    _jax.compiling._made.cache_clear()
    few.write_text("max\n")
    assert rm.mesh("data=16").size == 16
    few.write_text("100\n")
    with pytest.raises(RematError, match="32 devices that are not here need 128 threads, of 100: use fewer."):
        rm.mesh("data=32")
    _jax.compiling._made.cache_clear()


def test_constraints_inside_of_bodies_and_on_numbers_say_how_arguments_are():
    mesh = rm.mesh(AXES)

    def inner(w, x):
        x = jax.lax.with_sharding_constraint(x, P("data"))
        return jnp.sin(x @ w) * jax.lax.with_sharding_constraint(1.0, P())

    with jax.set_mesh(mesh):
        report = rm.trace(lambda w, x: jax.checkpoint(inner)(w, x).sum(), f32(WIDTH, WIDTH), f32(BATCH, WIDTH)).report()
    assert report.devices == 8
    (note,) = [note for note in report.notes if note.kind == "argument-unplaced"]
    assert "w has neither a sharding nor a spec" in note  # and not x, which the checkpoint's body spreads


@eight
@pytest.mark.slow
@pytest.mark.parametrize("spread", [True, False])
def test_a_mesh_of_this_machines_devices_that_is_set_is_the_one_that_constraints_mean(spread):
    """Their own shardings name its axes alone, and simulated devices beside these would be no program."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def attention(w, x):
        x = jax.lax.with_sharding_constraint(x, P("data", "model"))
        return (jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("data")) ** 2).sum()

    function = jax.jit(jax.grad(attention), in_shardings=(P("model"), P("data"))) if spread else jax.grad(attention)
    args = f32(WIDTH, WIDTH), f32(BATCH, WIDTH)
    with jax.set_mesh(mesh):
        trace = rm.trace(function, *args)
    report = trace.report("none", "function")
    assert not [note for note in report.notes if note.kind == "devices-together"]
    assert report.of_devices == "of one of 8 devices"
    saved = {row.primitive: row.shard_shape for row in report.residuals if row.kind == "intermediate"}
    assert set(saved.values()) <= {(BATCH // 4, WIDTH), (BATCH // 4, WIDTH // 2)}
    assert of_xla(trace) == by_hand(mesh, jax.jit(function), *args)
