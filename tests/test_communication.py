"""What devices tell each other in the bodies of ``shard_map`` and ``pmap``, against XLA's programs and hand counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from remat_magic import _jax
from remat_magic.facts.kernels import kernels_of
from remat_magic.views.choices import figures
from remat_magic.views.html import report_html
from remat_magic.views.source import line_rows
from tests.eight_devices import eight
from tests.views_records import plain

WIDTH, BATCH, LAYERS = 32, 64, 3
H100 = rm.devices.get("H100 SXM")


def abstract(*sizes, names=("data", "model")):
    return AbstractMesh(sizes, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def simulated(*sizes, names=("data", "model")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def shape(mesh, spec, *sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))


def layer(x, w):
    return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True))


def fsdp(mesh, stacked=False, check=True):
    """Layers whose weights are sharded, and gathered where they are used."""

    def body(ws, x):
        if stacked:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        else:
            for w in ws:
                x = layer(x, w)
        return lax.psum((x**2).sum(), ("data", "model"))

    rows = P(("data", "model"))
    spec = P(None, "data") if stacked else [P("data")] * LAYERS
    loss = jax.shard_map(body, mesh=mesh, in_specs=(spec, rows), out_specs=P(), check_vma=check)
    one = shape(mesh, P("data"), WIDTH, WIDTH)
    weights = shape(mesh, P(None, "data"), LAYERS, WIDTH, WIDTH) if stacked else [one] * LAYERS
    return loss, (weights, shape(mesh, rows, BATCH, WIDTH))


GATHERED = WIDTH * WIDTH * 4


# -------------------------------------------------------------------------------------------------- against XLA's count


@eight
@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_a_program_tells_what_its_compiled_program_does(check):
    """Every kind of collective that a CPU has, over one axis and over both, in groups, and in a loop."""
    mesh = simulated(4, 2)

    def body(w, x):
        def turn(x, _):
            return lax.ppermute(jnp.sin(x), "data", [(i, (i + 1) % 4) for i in range(4)]), None

        x, _ = lax.scan(turn, x @ lax.all_gather(w, "data", tiled=True), None, 3)
        both = lax.all_gather(x, ("data", "model"))
        part = lax.psum_scatter(both.sum(0), "model", scatter_dimension=0, tiled=True)
        part = lax.all_to_all(part, "data", 0, 1, tiled=True)
        most = lax.pmax(part.max(), ("data", "model"))
        groups = lax.psum(jnp.cos(part), "data", **({} if check else {"axis_index_groups": [[0, 1], [2, 3]]}))
        return lax.psum(groups.sum(), "model") + most

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check)
    args = shape(mesh, P("data"), WIDTH, WIDTH), shape(mesh, P(), BATCH, WIDTH)
    compiled = jax.jit(fun).lower(*args).compile()
    told = _jax.xla_counts(_jax.modules_of(compiled.runtime_executable().hlo_modules())).collectives
    assert set(told) == {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
    counted = dict.fromkeys(told, 0)
    for eqn in _equations(jax.make_jaxpr(fun)(*args)):
        if talk := _jax.communication(eqn):
            counted[talk.kind] += talk.nbytes * (3 if talk.kind == "collective-permute" else 1)
    assert counted == {kind: size for kind, (_, size) in told.items()}
    report = rm.trace(lambda w, x: fun(*lax.stop_gradient((w, x))) + w.sum(), *args).report()
    assert report.forward_communicated_bytes == sum(counted.values()) + 4  # and the sum of the weights


def _equations(closed):
    for eqn in _jax.open_jaxpr(closed).eqns:
        yield eqn
        for body in _jax.bodies(eqn):
            yield from _equations(body.jaxpr)


@eight
@pytest.mark.slow
@pytest.mark.parametrize(("stacked", "check"), [(True, True), (False, False)])
def test_both_halves_tell_what_the_compiled_step_does(stacked, check):
    loss, args = fsdp(simulated(4, 2), stacked, check)
    trace = rm.trace(loss, *args)
    merges = not stacked and jax.__version_info__ < (0, 11)  # a CPU's XLA of then what unrolled code does twice
    for policy, again in (("none", 0), *([] if merges else [("nothing_saveable", LAYERS * GATHERED)])):
        report, measured = trace.report(policy, "function"), trace.measure(policy, "function")
        told = {collective.kind: (collective.runs, collective.bytes) for collective in measured.collectives}
        assert report.forward_communicated_bytes + report.backward_communicated_bytes == measured.communicated_bytes
        assert report.repeated_communicated_bytes == again
        assert told["all-gather"][1] == LAYERS * GATHERED + again


# ---------------------------------------------------------------------------------------------------------- hand counts

# Of 1,024 numbers on each of n devices: the collective, the bytes of its result, and what a device sends in a ring.
RINGS = {
    "all-gather": (lambda x: lax.all_gather(x, "data"), lambda n: 4096 * n, lambda n: 4096 * (n - 1)),
    "all-reduce": (lambda x: lax.psum(x, "data"), lambda n: 4096, lambda n: 2 * 4096 * (n - 1) // n),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "data", tiled=True), lambda n: 4096 // n, lambda n: 4096 * (n - 1) // n
    ),
    "all-to-all": (
        lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), lambda n: 4096, lambda n: 4096 * (n - 1) // n
    ),
    "collective-permute": (lambda x: lax.ppermute(x, "data", [(0, 1)]), lambda n: 4096, lambda n: 4096),
    "collective-broadcast": (lambda x: lax.pbroadcast(x, ("data",), 0), lambda n: 4096, lambda n: 4096),
}  # fmt: skip


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_sends_as_little_as_can_be(kind, devices):
    collective, result, sent = RINGS[kind]
    fun = jax.shard_map(collective, mesh=abstract(devices), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    jaxpr = jax.make_jaxpr(fun)(jnp.zeros(1024 * devices))
    (talk,) = filter(None, map(_jax.communication, _equations(jaxpr)))
    assert talk == (kind, ("data",), result(devices), sent(devices))
    (kernel,) = (kernel for kernel in kernels_of(jaxpr)[0] if kernel.sent)
    assert kernel.sent == sent(devices)


def test_along_an_axis_of_one_device_nothing_is_told():
    mesh = abstract(8, 1)
    fun = jax.shard_map(
        lambda x: lax.psum(lax.all_gather(x, "model"), "model"), mesh=mesh, in_specs=P("data"), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    assert not any(map(_jax.communication, _equations(jax.make_jaxpr(fun)(jnp.zeros(1024)))))


# ------------------------------------------------------------------------------------------------- what runs again


@pytest.mark.slow
def test_a_repeated_gather_is_shown_as_what_it_is():
    loss, args = fsdp(abstract(4, 2))
    trace = rm.trace(loss, *args)
    report = trace.report("nothing_saveable", "function")
    gathers = [equation for equation in report.recomputed if equation.collective]
    assert {row.primitive for row in gathers} == {"all_gather"}
    assert {row.collective for row in gathers} == {"all-gather"}
    assert {row.over for row in gathers} == {("data",)}
    assert sum(row.communicated_bytes for row in gathers) == LAYERS * GATHERED == report.repeated_communicated_bytes
    assert sum(row.sent_bytes for row in gathers) == LAYERS * GATHERED * 3 // 4
    (line,) = (row for row in line_rows(report) if any(equation.collective for equation in row.equations))
    assert "(4.10 kB over data)" in line.repeats or "(12.3 kB over data)" in line.repeats
    for text in (plain(report), report_html(report)):
        assert "gathers 12.3 kB again over data" in text
        assert "12.3 kB over data" in text
    assert "forward 12.3 kB, backward 27.6 kB" in plain(report)
    nothing = trace.report("none", "function")
    assert nothing.repeated_communicated_bytes == 0
    assert "again over" not in plain(nothing)


@pytest.mark.slow
def test_its_time_is_that_of_the_links():
    loss, args = fsdp(abstract(4, 2))
    trace = rm.trace(loss, *args)
    for device in ("H100 SXM", "A100 80GB SXM", "TPU v5e"):
        (row,) = trace.compare(["nothing_saveable"], "function", device=device)
        assert row.times.recomputed > LAYERS * GATHERED * 3 / 4 / rm.devices.get(device).interconnect
    (row,) = trace.compare(["nothing_saveable"], "function", device=rm.devices.THIS_CPU)
    assert not row.times.complete
    comparison = trace.compare(["none", "nothing_saveable"], "function")
    assert [row.repeated_communicated_bytes for row in comparison] == [0, LAYERS * GATHERED]
    assert "communicated again" in comparison._repr_html_()
    assert figures(comparison.rows[1])["repeated"].endswith("12.3 kB communicated again")
    assert figures(comparison.rows[0])["repeated"] == "nothing"


# ---------------------------------------------------------------------------------------------------------------- plans


def wide(mesh, n, width=256):
    """A product of few rows with a large weight that is sharded, and gathered for it."""

    def body(w, x):
        return lax.psum(((x @ lax.all_gather(w, "data", tiled=True)) ** 2).sum(), "data")

    loss = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P(), check_vma=False)
    return loss, (shape(mesh, P("data"), width, width), shape(mesh, P("data"), 8 * n, width))


def kept(fun, *args):
    """The bytes of each intermediate that JAX itself saves, of one device."""
    saved = saved_residuals(fun, *args)
    return sorted(
        int(aval.size) * 4 // args[0].sharding.mesh.size
        for aval, source in saved
        if not source.startswith("from the arg")
    )


@pytest.mark.slow
def test_a_plan_by_time_keeps_what_was_gathered_if_it_fits():
    """By hand: gathering 262,144 bytes anew takes more than three times the product, which is 8,192 bytes."""
    n = 8
    loss, args = wide(abstract(n), n)
    trace = rm.trace(loss, *args)
    gathered, product = 256 * 256 * 4, 8 * 256 * 4
    link, again = gathered * (n - 1) / n / H100.interconnect, (gathered + 2 * product) / H100.memory_bandwidth
    assert link > 3 * again
    for budget, expected, cost in (
        (gathered - 1, ["dot_general"], link),
        (gathered, ["all_gather"], again),
        (gathered + product, ["all_gather", "dot_general"], 0.0),
    ):
        plan = trace.plan(budget, "function", cost="seconds", device="H100 SXM")
        applied = trace.function(plan)
        assert sorted(value.primitive for value in plan.names) == expected or plan.policy == "none"
        assert plan.seconds == pytest.approx(cost, rel=0.1)
        sizes = {"all_gather": gathered, "dot_general": product}
        assert kept(applied, *args) == sorted(sizes[name] for name in expected)
        assert trace.report(plan).repeated_communicated_bytes == (0 if "all_gather" in expected else gathered)
    by_work = trace.plan(gathered, "function")
    assert [value.primitive for value in by_work.names] == ["dot_general"]  # to gather is no arithmetic


def test_the_peak_holds_what_is_gathered():
    """What a program gathers itself is a value of it; the whole weight here is nearly all that is held."""
    loss, args = wide(abstract(8), 8)
    trace = rm.trace(loss, *args, wrt=1)
    gathered = 256 * 256 * 4
    for policy in ("none", "nothing_saveable"):
        held = {value.primitive: value.nbytes for value in trace.timeline(policy, "function").alive}
        assert held["all_gather"] == gathered
        assert gathered < trace.report(policy, "function").peak_bytes


# ----------------------------------------------------------------------------------------------- what XLA inserts


def compiled(fun, *args):
    """What devices tell each other in a compiled program."""
    executable = jax.jit(fun).lower(*args).compile().runtime_executable()
    return _jax.xla_communicated(_jax.modules_of(executable.hlo_modules()))


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("kind", [*RINGS])
def test_a_compiled_collective_sends_what_its_operation_does(kind, devices):
    """Of one axis of two, so that the groups are some of all devices."""
    function, nbytes, sent = RINGS[kind]
    if kind == "collective-broadcast":
        pytest.skip("XLA for a CPU has none")
    for order in (("other", "data"), ("data", "other")):
        mesh = rm.mesh({axis: {"other": 2, "data": devices}[axis] for axis in order})
        fun = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        collectives = compiled(fun, shape(mesh, P("data"), 1024 * devices))
        if kind == "reduce-scatter" and {collective.kind for collective in collectives} == {"all-reduce"}:
            continue
        assert collectives == {(kind, nbytes(devices), sent(devices)): 1}


def test_a_sum_of_which_each_device_keeps_its_part_is_a_scatter():
    """As the gradients of sharded weights are; one that every device goes on with is sent twice."""
    mesh, share = rm.mesh("data=4,model=2"), WIDTH * WIDTH * 4
    w, x = shape(mesh, P("data"), WIDTH, WIDTH), shape(mesh, P("data"), BATCH, WIDTH)

    def gradient(where):
        fun = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())
        return lambda w, x: lax.with_sharding_constraint(fun(w, x), NamedSharding(mesh, where))

    for where, sent in ((P("data"), share * 3 // 4), (P(), 2 * share * 3 // 4)):
        collectives = compiled(gradient(where), w, x)
        assert collectives["all-reduce", share, sent] == 1
        assert collectives["all-gather", share, share * 3 // 4] == 1


def automatic_fsdp():
    def loss(ws, x):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).mean()

    mesh = rm.mesh("data=8")
    return loss, (shape(mesh, P(None, "data"), LAYERS, WIDTH, WIDTH), shape(mesh, P("data"), BATCH, WIDTH))


@pytest.mark.slow
def test_what_xla_inserts_takes_time_in_each_half():
    """By hand: each half gathers every weight, and recomputing does so once more."""
    loss, args = automatic_fsdp()
    trace = rm.trace(loss, *args)
    gathers = LAYERS * GATHERED * 7 / 8 / H100.interconnect
    comparison = trace.compare(["none", "nothing_saveable"], "function", device="H100 SXM")
    none, nothing = (row.times for row in comparison.rows)
    for row in (none, nothing):
        assert row.complete
        assert min(row.forward, row.backward) > gathers
    assert nothing.backward - none.backward > gathers
    assert not trace.compare(["none"], "function", device=rm.devices.THIS_CPU).rows[0].times.complete
