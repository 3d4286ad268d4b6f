"""Figures of one device of a mesh, against JAX's own types and what XLA compiles for each of eight devices."""

from __future__ import annotations

import math
from collections import Counter

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic._jax import compiling
from remat_magic.views.display import text
from remat_magic.views.html import report_html
from tests.eight_devices import eight
from tests.views_records import plain

# ------------------------------------------------------------------------------------------------------------- models

BATCH, WIDTH, HIDDEN, LAYERS = 64, 32, 128, 3


def explicit(*sizes, names=("data", "model")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(AxisType.Explicit,) * len(sizes))


def abstract(*sizes, names=("data", "model")):
    return AbstractMesh(sizes, names[: len(sizes)], axis_types=(AxisType.Explicit,) * len(sizes))


def mlp(stacked=False, out=(None, None)):
    """Layers of two matmuls, whose results are spread as ``out`` says, hidden and the layer's, or by XLA."""

    def layer(x, weights):
        hidden = jnp.tanh(jnp.einsum("bd,dh->bh", x, weights[0], out_sharding=out[0]))
        hidden = jnp.sin(checkpoint_name(hidden, "hidden"))
        return x + jnp.einsum("bh,hd->bd", hidden, weights[1], out_sharding=out[1]), None

    def loss(layers, x):
        if stacked:
            return (lax.scan(layer, x, layers)[0] ** 2).mean()
        for weights in layers:
            x, _ = layer(x, weights)
        return (x**2).mean()

    return loss


# Mesh; how the batch, the two weights, the hidden values and a layer's are spread.
LAYOUTS = {
    "data": ((8,), P("data"), P(), P(), P("data"), P("data")),
    "fsdp": ((8,), P("data"), P("data"), P(None, "data"), P("data"), P("data")),
    "tensor": ((2, 4), P("data"), P(None, "model"), P("model"), P("data", "model"), P("data")),
    "both": ((4, 2), P("data"), P("data", "model"), P("model", "data"), P("data", "model"), P("data")),
    "two axes": ((4, 2), P(("data", "model")), P(), P("model"), P(("data", "model")), P(("data", "model"))),
    "sequence": ((2, 4), P("data", "model"), P(None, "model"), P("model"), P("data", "model"), P("data", "model")),
}


def layouts(usual):
    """Each layout, every second one with stacked layers; the usual run tries one of them."""
    return [
        pytest.param(name, number % 2 == 1, marks=() if name == usual else pytest.mark.slow)
        for number, name in enumerate(LAYOUTS)
    ]


def arguments(mesh, batch, up, down, stacked=False):
    def of(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    x = of((BATCH, WIDTH), batch)
    if stacked:
        return (of((LAYERS, WIDTH, HIDDEN), P(None, *up)), of((LAYERS, HIDDEN, WIDTH), P(None, *down))), x
    return [(of((WIDTH, HIDDEN), up), of((HIDDEN, WIDTH), down))] * LAYERS, x


def model(name, stacked=False, make=explicit):
    sizes, batch, up, down, *out = LAYOUTS[name]
    return mlp(stacked, out), make(*sizes), arguments(make(*sizes), batch, up, down, stacked)


def types(rows):
    return Counter((row.sharding, row.shard_shape) for row in rows if row.kind != "literal")


def of_jax(fun, *args):
    """The types of what JAX itself saves, as it writes them, and the shapes of their shards."""
    saved = saved_residuals(fun, *args)
    return Counter(
        (aval.str_short(True).replace("float32", "f32"), aval.sharding.shard_shape(aval.shape))
        for aval, source in saved
        if source != "from a literal"
    )


def local(args):
    """Arguments of the shapes that one device has."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), args)


def xla(fun, *args):
    return jax.jit(fun).lower(*args).compile()


# ----------------------------------------------------------------------------------------------------- explicit meshes


@eight
@pytest.mark.parametrize(("name", "stacked"), layouts("fsdp"))
def test_residuals_have_jaxs_own_shards(name, stacked):
    loss, mesh, args = model(name, stacked)
    with jax.set_mesh(mesh):
        trace = rm.trace(loss, *args)
        report = trace.report()
        in_jaxpr = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(loss)(*args))  # where Python's scalars are literals
        assert types(report.residuals) == of_jax(in_jaxpr, *jax.tree.leaves(args))
    assert (report.devices, report.per_device) == (8, True)
    for row in report.residuals:
        assert row.nbytes == 4 * jnp.prod(jnp.array(row.shard_shape, int))
        assert row.replicated == (row.shard_shape == row.shape)
    assert report.together == 8 * report.saved_bytes


@eight
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stacked"), layouts(""))
def test_bytes_and_flops_are_what_xla_has_for_one_device(name, stacked):
    loss, mesh, args = model(name, stacked)
    with jax.set_mesh(mesh):
        trace = rm.trace(loss, *args)
        report, measured = trace.report(), trace.measure()
        assert dict(report.peak_by_kind)["argument"] == measured.argument_bytes
        if not stacked:  # XLA counts the body of a loop once
            flops = xla(loss, *args).cost_analysis()["flops"]
            assert report.forward_flops == pytest.approx(flops, rel=0.1)
            # A gradient of the weights is summed over devices: that is all that XLA has besides.
            both = xla(jax.value_and_grad(loss), *args).cost_analysis()["flops"]
            assert report.forward_flops + report.backward_flops == pytest.approx(both, rel=0.15)


def test_a_mesh_larger_than_the_machine():
    """Nothing is compiled, so that a mesh of names and sizes will do."""
    out = LAYOUTS["tensor"][-2:]
    mesh = abstract(512, 8)
    args = (
        arguments(mesh, P("data"), P(None, "model"), P("model"))[0],
        jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        report = rm.trace(mlp(out=out), *args).report()
    assert report.devices == 4096
    assert "of one of 4096 devices" in plain(report)
    (sine, *_) = (row for row in report.residuals if row.primitive == "sin")
    assert (sine.sharding, sine.shard_shape, sine.nbytes) == ("f32[8192@data,128@model]", (16, 16), 16 * 16 * 4)
    assert sine.sharding in plain(report)
    assert "of one of 4096 devices" in report_html(report)
    assert not sine.replicated
    with jax.sharding.use_abstract_mesh(mesh):
        measured = rm.trace(mlp(out=out), *args).measure()
    assert measured.error.startswith("the mesh of the arguments is abstract")


def test_what_every_device_holds_is_called_out():
    mesh = abstract(8)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def gathered(w, x):
        w = jax.sharding.reshard(w, P())
        x = jax.sharding.reshard(jnp.sin(x), P())
        return (jnp.tanh(x @ w) ** 2).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        report = rm.trace(gathered, w, x).report()
    whole = [row for row in report.residuals if row.replicated]
    assert {row.shape for row in whole} == {(WIDTH, WIDTH), (BATCH, WIDTH)}
    assert {row.primitive for row in report.residuals if not row.replicated} >= {"cos"}
    (note,) = (note for note in report.notes if note.kind == "replicated")
    assert note.startswith(f"Each of 8 devices holds all of {len(whole)} saved values, the largest f32[64,32] of ")
    assert plain(report).count("whole on every device") == len(whole)


# -------------------------------------------------------------------------------------------------- shard_map and pmap


def body(w, x):
    return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h") @ w)


def mapped(mesh, check=True):
    return jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check)


def automatic(*sizes, names=("data", "model")):
    return AbstractMesh(sizes, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


_VIEWS = ("pvary", "squeeze")  # of an argument, as shard_map and pmap hand it to their bodies


def made(report):
    return sum(row.nbytes for row in report.residuals if row.kind == "intermediate" and row.primitive not in _VIEWS)


@pytest.mark.parametrize(
    ("kind", "check", "policy"),
    [
        ("automatic", True, "none"),
        ("automatic", False, "save_only_these_names('h')"),
        ("explicit", True, "dots_saveable"),
        ("explicit", False, "nothing_saveable"),
    ],
)
def test_the_body_of_a_shard_map_is_one_devices(kind, check, policy):
    """As if the body alone were differentiated, on the shapes that one device has."""
    mesh = automatic(8) if kind == "automatic" else abstract(8)
    w, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    part = jax.ShapeDtypeStruct((BATCH // 8, WIDTH), jnp.float32)
    if kind == "explicit":
        w = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P()))
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
    alone = rm.trace(lambda w, x: (body(w, x) ** 2).sum(), w.update(sharding=None), part)
    expected = alone.report(policy, "function")
    with jax.sharding.use_abstract_mesh(mesh):
        trace = rm.trace(lambda w, x: (mapped(mesh, check)(w, x) ** 2).sum(), w, x)
        report = trace.report(policy, "function")
    assert report.devices == 8
    assert report.per_device
    assert made(report) == made(expected)
    assert report.forward_flops == expected.forward_flops
    # The gradients of what all devices have are summed over them.
    assert expected.backward_flops <= report.backward_flops <= expected.backward_flops + 3 * WIDTH * WIDTH
    assert report.recomputed_flops == expected.recomputed_flops
    assert report.argument_bytes <= expected.argument_bytes + WIDTH * WIDTH * 4
    assert report.peak_bytes <= expected.peak_bytes + 4 * WIDTH * WIDTH * 4
    assert not [note for note in report.notes if note.kind == "devices-unknown"]


@eight
def test_the_body_of_a_pmap_is_one_devices():
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((8, BATCH // 8, WIDTH))
    trace = rm.trace(lambda w, x: (jax.pmap(body, in_axes=(None, 0))(w, x) ** 2).sum(), w, x)
    alone = rm.trace(lambda w, x: (body(w, x) ** 2).sum(), w, x[0])
    for policy in ("none", "nothing_saveable"):
        report, expected = trace.report(policy, "function"), alone.report(policy, "function")
        assert report.devices == 8
        assert made(report) == made(expected)
        assert report.forward_flops == expected.forward_flops
        assert report.recomputed_flops == expected.recomputed_flops


def test_what_nothing_tells_of_outside_a_shard_map_is_said():
    mesh = automatic(8)
    w, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    report = rm.trace(lambda w, x: ((mapped(mesh)(w, x) @ w).T ** 2).sum(), w, x).report()
    (note,) = (note for note in report.notes if note.kind == "devices-unknown")
    assert "no sharding in the type: counted as if every device held all of it" in note


# ------------------------------------------------------------------------------------ choices in a device's own program


def nested(check):
    """A ``shard_map`` over one axis within one over the other."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def outer(w, x):
        within = jax.shard_map(
            body,
            in_specs=(P(), P("model")),
            out_specs=P("model"),
            axis_names={"model"},
            check_vma=check,
        )
        return jnp.sin(within(w, x))

    whole = jax.shard_map(
        outer, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=check
    )
    return lambda w, x: (whole(w, x) ** 2).sum()


def saved_by_jax(fun, *args):
    """The bytes of what JAX itself saves that is no argument, of one of eight devices."""
    saved = saved_residuals(fun, *args)
    return sum(4 * math.prod(aval.shape) // 8 for aval, source in saved if "argument" not in source)


def test_values_in_a_nested_shard_map_are_chosen_among():
    """Plans and what-if choose among what a device computes in its part, and JAX saves that and no more."""
    loss, args = nested(False), (whole((WIDTH, WIDTH)), whole((BATCH, WIDTH)))
    trace = rm.trace(loss, *args)
    share = BATCH // 8 * WIDTH * 4
    for count, expected in ((1, ["dot_general"]), (2, ["dot_general"] * 2), (3, ["dot_general", "sin", "dot_general"])):
        plan = trace.plan(count * share, "function")
        inside = [value for value in plan.names if value.nbytes == share]
        assert [value.primitive for value in inside] == expected
        assert {value.source.function for value in inside} == {"body"}
        assert plan.saved_bytes == count * share
        assert saved_by_jax(trace.function(plan, "function"), *args) == count * share
    rows = [row for row in trace.what_if("nothing_saveable", "function") if row.value.source.function == "body"]
    assert {row.change for row in rows} == {"save"}
    assert sorted(row.value.primitive for row in rows) == ["dot_general", "dot_general", "sin"]
    for row in rows:
        assert row.saved_bytes == share == saved_by_jax(trace.function(row.plan, "function"), *args)


# --------------------------------------------------------------------------------------------------- automatic sharding


def whole(shape, spec=None, mesh=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(mesh, spec))


def on_automatic(*sizes, names=("data", "model")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def asked(name, stacked):
    sizes, batch, up, down, *_ = LAYOUTS[name]
    return mlp(stacked), arguments(on_automatic(*sizes), batch, up, down, stacked)


@eight
@pytest.mark.parametrize(("name", "stacked"), layouts("both"))
def test_automatic_shardings_are_xlas_own(name, stacked):
    """Against those of the residuals where it compiles the forward half alone, and its bytes and FLOPs of the whole."""
    loss, args = asked(name, stacked)
    trace = rm.trace(loss, *args)
    report = trace.report("none", "function")
    assert (report.devices, report.per_device, report.of_devices) == (8, True, "of one of 8 devices")
    half = xla(lambda *args: jax.vjp(loss, *args)[1], *args)
    saved = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], *args)
    xlas = Counter(
        (leaf.shape, sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(jax.tree.leaves(saved), jax.tree.leaves(half.output_shardings), strict=True)
        if leaf.shape
    )
    made = Counter((row.shape, row.shard_shape) for row in report.residuals if row.shape and row.kind == "intermediate")
    assert made
    assert made <= xlas
    for row in report.residuals:
        assert row.nbytes == 4 * math.prod(row.shard_shape)
        assert row.replicated == (row.shape != () and row.shard_shape == row.shape)
    measured = trace.measure("none", "function")
    arguments = dict(report.peak_by_kind)["argument"]
    assert arguments == measured.argument_bytes
    assert report.forward_flops + report.backward_flops == pytest.approx(measured.flops, rel=0.15)
    if name != "both":  # where whole weights are gathered from two axes for a product: not in the estimate
        assert report.peak_bytes == pytest.approx(measured.total_bytes, rel=0.4)


@eight
@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_choices_on_an_automatic_mesh_are_of_one_device(stacked):
    loss, args = asked("both", stacked)
    trace = rm.trace(loss, *args)
    none, nothing = (trace.report(policy, "function") for policy in ("none", "nothing_saveable"))
    assert nothing.saved_bytes == 0
    assert 0.9 * none.forward_flops < nothing.repeated_flops <= none.forward_flops
    comparison = trace.compare(["none", "dots_saveable", "nothing_saveable"], "function")
    assert {row.of_devices for row in comparison} == {"of one of 8 devices"}
    plan = trace.plan(0.5, "function")
    applied = trace.report(plan, "function")
    assert applied.saved_bytes == plan.saved_bytes <= plan.budget_bytes == none.saved_bytes // 2
    assert applied.recomputed_flops == plan.recomputed_flops
    names = trace.report("save_only_these_names('hidden')", "function")
    hidden = sum(row.nbytes for row in names.residuals if row.kind == "intermediate")
    assert hidden == LAYERS * BATCH // 4 * HIDDEN // 2 * 4
    timeline = trace.timeline("dots_saveable", "function")
    assert timeline.peak_bytes == sum(value.nbytes for value in timeline.alive)


@eight
@pytest.mark.slow
def test_a_step_on_an_automatic_mesh_is_one_devices():
    """Parameters and optimizer state as XLA holds them, and what the gradient inside saves as of the loss alone."""
    loss, (layers, x) = asked("fsdp", True)

    def step(layers, momentum, x):
        value, gradient = jax.value_and_grad(loss)(layers, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - 0.1 * m, layers, momentum), momentum, value

    trace = rm.trace(jax.jit(step, donate_argnums=(0, 1)), layers, layers, x)
    alone = rm.trace(loss, layers, x).report("none", "function")
    report = trace.report("none", "function")
    assert (report.devices, report.per_device) == (8, True)
    assert report.saved_bytes == alone.saved_bytes
    held = 2 * LAYERS * WIDTH * HIDDEN * 4 // 8
    assert (trace.step.parameter_bytes, trace.step.optimizer_bytes) == (held, held)
    assert trace.step.batch_bytes == BATCH * WIDTH * 4 // 8
    measured = trace.measure("none", "function")
    assert measured.argument_bytes == 2 * held + BATCH * WIDTH * 4 // 8
    assert trace.step.peak_bytes == pytest.approx(measured.total_bytes - measured.alias_bytes, rel=0.4)


def heard(mesh):
    """By a program that asks for it, of an argument or of what it computes."""
    loss, spread = mlp(False), NamedSharding(mesh, P("data"))
    w, x = [(whole((WIDTH, HIDDEN)), whole((HIDDEN, WIDTH)))], whole((BATCH, WIDTH))
    for function in (
        lambda w, x: loss(w, lax.with_sharding_constraint(x, spread)),
        jax.jit(loss, in_shardings=(None, spread)),
    ):
        report = rm.trace(function, w, x).report("none", "function")
        assert (report.devices, report.per_device) == (mesh.size, True)
        hidden = [row for row in report.residuals if row.shape == (BATCH, HIDDEN)]
        assert {row.shard_shape for row in hidden} == {(BATCH // mesh.size, HIDDEN)}
        assert {row.sharding for row in hidden} == {f"f32[{BATCH}@data,{HIDDEN}]"}


@eight
@pytest.mark.slow
def test_shardings_that_the_program_asks_for_are_heard():
    mesh = on_automatic(8)
    heard(mesh)
    w = [(whole((WIDTH, HIDDEN), P(), mesh), whole((HIDDEN, WIDTH), P(), mesh))]
    nothing = rm.trace(mlp(False), w, whole((BATCH, WIDTH))).report()
    assert (nothing.devices, nothing.per_device) == (1, True)  # nothing is shared out


@pytest.mark.slow
def test_those_over_a_mesh_that_is_not_here_are_heard():
    """Eight times as many devices as can be simulated by the settings of this process, whatever they are."""
    heard(automatic(64))


@eight
@pytest.mark.slow
def test_what_does_not_divide_is_filled_up():
    """Ten numbers over four devices are three on each, and a mean that is kept as one number is one."""
    mesh = on_automatic(4, 2)

    def loss(w, x, key):
        x = x @ w
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)
        x = jax.nn.gelu(jax.nn.silu(lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)))  # silu has a custom rule
        part = jnp.tanh(x[:10] - x[:10].mean(-1, keepdims=True))
        return (part * jnp.exp(part)).sum() - jax.nn.log_softmax(x)[:, 0].mean()

    trace = rm.trace(loss, whole((32, 16), P(None, "model"), mesh), whole((64, 32), P("data"), mesh), jax.random.key(0))
    report, measured = trace.report("none", "function"), trace.measure("none", "function")
    assert (report.devices, report.per_device) == (8, True)
    assert not [note for note in report.notes if note.kind.startswith("devices")]
    shards = {row.shard_shape for row in report.residuals if row.shape == (10, 16)}
    assert shards == {(3, 8)}
    assert all(row.nbytes == 3 * 8 * 4 for row in report.residuals if row.shape == (10, 16))
    assert dict(report.peak_by_kind)["argument"] == measured.argument_bytes


def of_all_together(function, *args):
    report = rm.trace(function, *args).report()
    alone = rm.trace(function, *(whole(arg.shape) for arg in args)).report()
    assert (report.devices, report.per_device) == (8, False)
    for figure in ("saved_bytes", "argument_bytes", "peak_bytes", "forward_flops", "backward_flops", "peak_by_kind"):
        assert getattr(report, figure) == getattr(alone, figure)
    assert report.together == report.saved_bytes
    (note,) = (note for note in report.notes if note.kind == "devices-together")
    assert "arguments too, are of all 8 together" in note
    for said in (plain(report), report_html(report)):
        assert "of all 8 devices together" in said
    comparison = rm.trace(function, *args).compare(["none", "nothing_saveable"])
    assert {row.of_devices for row in comparison} == {"of all 8 devices together"}
    assert "of all 8 devices together" in comparison._repr_html_()
    return str(note)


@eight
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stacked"), [("both", True), ("sequence", False)])
def test_an_automatic_mesh_that_is_not_here_is_asked_about_as_one_that_is(name, stacked):
    """Its devices are simulated ones of the package's own; that those of this process are right is tested above."""
    sizes, batch, up, down, *_ = LAYOUTS[name]
    there, here = (
        rm.trace(mlp(stacked), *arguments(mesh, batch, up, down, stacked)).report("none", "function")
        for mesh in (automatic(*sizes), on_automatic(*sizes))
    )
    assert (there.devices, there.per_device) == (8, True)
    figures = "saved_bytes", "peak_bytes", "peak_by_kind", "forward_flops", "backward_flops", "residuals", "notes"
    assert [getattr(there, figure) for figure in figures] == [getattr(here, figure) for figure in figures]


def test_where_xla_cannot_be_asked_figures_are_of_all_devices(monkeypatch):
    """Of a mesh with more devices than are simulated, and of a program that is too large."""
    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()  # noqa: E731
    mesh = automatic(8)
    monkeypatch.setattr(compiling, "_MOST", 7)
    note = of_all_together(loss, whole((32, 16), P(), mesh), whole((64, 32), P("data"), mesh))
    assert "XLA was not asked: more than 7 devices that are not here are not simulated: use a smaller mesh." in note


# ------------------------------------------------------------------------------------------------------- communication


@pytest.mark.slow
def test_a_run_on_simulated_devices_is_called_so():
    """Whose time is this machine's for all of them; of one device it is its own."""
    mesh = rm.mesh("data=16")
    loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()  # noqa: E731
    shapes = (WIDTH, WIDTH), (BATCH, WIDTH)
    spread, alone = ([whole(size, spec, mesh) for size in shapes] for spec, mesh in ((P("data"), mesh), (None, None)))
    for args, many in ((spread, 16), (alone, 0)):
        trace = rm.trace(loss, *args)
        measured = trace.measure("none", "function", inputs="random", runs=1)
        assert (measured.error, measured.simulated) == ("", bool(many))
        found = trace.compare(["none"], "function", measurements=[measured])
        texts = found._repr_html_(), text(found)
        assert ["devices are simulated" in said for said in texts] == [bool(many)] * 2
        only_compiled = trace.compare(["none"], "function", measurements=[trace.measure("none", "function")])
        assert "simulated" not in only_compiled._repr_html_()


def test_without_a_mesh_nothing_is_said_of_devices():
    report = rm.trace(lambda x: jnp.sin(x).sum(), jnp.ones(4)).report()
    assert (report.devices, report.per_device, report.of_devices) == (1, True, "")
    assert "devices" not in plain(report)
    assert all(row.sharding == "" and row.shard_shape == row.shape and not row.replicated for row in report.residuals)


def test_axes_that_are_left_to_xla_are_named():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    part = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    w, x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        report = rm.trace(lambda w, x: (part(w, x) ** 2).sum(), w, x).report()
    assert report.devices == 4
    (note,) = (note for note in report.notes if note.kind == "devices-unknown")
    assert note.startswith("XLA decides how the values of ")


@pytest.mark.slow
def test_axes_that_xla_tells_nothing_of_inside_of_a_shard_map_are_named():
    """Outside of it XLA tells; a shard_map over all axes leaves it nothing to spread."""
    mesh = rm.mesh("data=4,model=2")
    w, x = whole((WIDTH, WIDTH), P(None, "model"), mesh), whole((BATCH, WIDTH), P("data"), mesh)
    for axes in ({"data"}, {"data", "model"}):
        part = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names=axes)
        report = rm.trace(lambda w, x, part=part: (part(w, x @ w) ** 2).sum(), w, x).report()
        assert report.of_devices == "of one of 8 devices"
        notes = [note for note in report.notes if note.kind == "devices-unknown"]
        if axes == {"data"}:
            (note,) = notes
            assert note.about == ("model",)
            assert "XLA may also shard the values of a shard_map of" in note
        else:
            assert notes == []


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_loss_gives_besides_its_value_changes_no_figure(by_hand):
    """Auxiliary outputs stand between the value and what is saved, of which XLA, or a shard_map's specs, tell."""
    mesh = rm.mesh("data=4,model=2")
    w, x = whole((WIDTH, WIDTH), P(), mesh), whole((BATCH, WIDTH), P("data"), mesh)
    if by_hand:
        w, x = whole((WIDTH, WIDTH)), whole((BATCH, WIDTH))
    part = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

    def loss(w, x):
        made = part(w, x) if by_hand else jnp.tanh(x @ w)
        return (made**2).sum()

    def more(w, x):
        return loss(w, x), (x.mean(), jnp.cos(x), w)

    for policy in ("none", "nothing_saveable"):
        with_aux = rm.trace(more, w, x, has_aux=True).report(policy, "function")
        alone = rm.trace(loss, w, x).report(policy, "function")
        assert with_aux.backward_error == ""
        assert with_aux.of_devices == alone.of_devices == "of one of 8 devices"
        assert with_aux.saved_bytes == alone.saved_bytes
        assert with_aux.backward_flops == alone.backward_flops
