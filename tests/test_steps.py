"""A training step is inspected by the gradient that it takes inside, and comes back with a policy in it."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals  # the list that JAX itself prints
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from tests.eight_devices import eight

RATE = 0.1


def layer(w, x):
    return checkpoint_name(jnp.tanh(x @ w), "hidden")


def loss(params, x, y):
    for w in params:
        x = layer(w, x)
    return ((x - y) ** 2).mean()


def loss_and_accuracy(params, batch):
    value = loss(params, *batch)
    return value, {"accuracy": value > 0, "text": "no array"}


def updated(params, gradients):
    return jax.tree.map(lambda w, g: w - RATE * g, params, gradients)


def step_of_value_and_grad(params, x, y):
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return updated(params, gradients), value


def step_of_grad(params, x, y):
    return updated(params, jax.grad(loss)(params, x, y))


def step_of_vjp(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    return updated(params, *pull_back(jnp.ones_like(value))), value


def step_of_linearize(params, x, y):
    value, push_forward = jax.linearize(lambda p: loss(p, x, y), params)
    return updated(params, jax.linear_transpose(push_forward, params)(jnp.ones_like(value))[0]), value


def step_with_aux(params, x, y):
    (value, _), gradients = jax.value_and_grad(loss_and_accuracy, has_aux=True)(params, (x, y))
    return updated(params, gradients), value


def step_of_microbatches(params, x, y):
    def body(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

    batches = (x.reshape(2, -1, x.shape[-1]), y.reshape(2, -1, y.shape[-1]))
    return updated(params, lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)[0])


STEPS = [
    step_of_value_and_grad,
    step_of_grad,
    step_of_vjp,
    step_of_linearize,
    step_with_aux,
    step_of_microbatches,
]


def arguments(size=8, batch=6):
    drawn = np.random.default_rng(0).normal(size=(3 * size + 2 * batch, size)).astype(np.float32)
    *params, x, y = jnp.split(drawn, [size, 2 * size, 3 * size, 3 * size + batch])
    return [w / 4 for w in params], x, y


def saved_types(fun, *args):
    """Dtype and shape of what JAX says it saves, arguments and constants left out."""
    short = {"float32": "f32", "bool": "bool", "int32": "i32"}
    return sorted(
        (short[str(aval.dtype)], aval.shape)
        for aval, why in saved_residuals(fun, *args)
        if "from the argument" not in why and "constant" not in why
    )


def made(report):
    """The same of a report."""
    return sorted((row.dtype, row.shape) for row in report.residuals if row.kind == "intermediate")


def agree(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6), one, other))


def compute_the_same(one, other, *args):
    """Jitted, since to compile each operation by itself takes several times as long."""
    return agree(jax.jit(one)(*args), jax.jit(other)(*args))


@pytest.mark.each_once
@pytest.mark.parametrize("jitted", [False, True], ids=["as it is", "jitted"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_of_its_gradient_inside_and_comes_back_with_the_policy(step, jitted):
    params, x, y = arguments()
    step = jax.jit(step) if jitted else step
    trace = rm.trace(step, params, x, y)
    (gradient,) = trace.gradients
    assert trace.gradient == gradient
    assert gradient.times == (2 if step.__name__ == "step_of_microbatches" else 1)
    of_one = [array[: x.shape[0] // gradient.times] for array in (x, y)]
    report = trace.report()
    # JAX's own list for the loss alone, of which the parameters are what is differentiated.
    expected = saved_types(lambda p: loss(p, *of_one), params)
    assert made(report) == expected
    wanted = step(params, x, y)
    for policy in ("nothing_saveable", "save_only_these_names('hidden')", trace.plan("50%")):
        under = trace.function(policy)
        assert trace.report(policy).saved_bytes < report.saved_bytes
        assert str(jax.make_jaxpr(under)(params, x, y)).count("prevent_cse") == 1
        assert agree(jax.jit(under)(params, x, y), wanted)
    assert agree(under(params, x, y), wanted)  # one operation after another, too
    assert "prevent_cse" not in str(jax.make_jaxpr(step)(params, x, y))  # the user's own is as it was


def test_the_signature_is_the_loss_s_own():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments())
    trace = rm.trace(jax.jit(step_of_value_and_grad), *shapes)
    assert trace.signature == "loss(params: 3 leaves 768 B, x f32[6,8], y f32[6,8]) -> f32[]"
    assert trace.wrt == ("params",)
    assert {residual.argument for residual in trace.report().residuals} >= {"x", "params[1]", "params[2]"}
    assert trace.gradient.source.line == loss.__code__.co_firstlineno
    (note,) = (note for note in trace.notes if note.kind == "gradient-of-step")
    assert "step_of_value_and_grad takes the gradient of loss" in note


def test_each_policy_of_a_jitted_step_is_compiled_for_itself():
    """JAX keeps compiled functions by the function: it must not take one policy's for another's, or for the user's."""
    asked = []

    def policy_called(name):
        def policy(*_, **__):
            asked.append(name)
            return False

        return policy

    step, (params, x, y) = jax.jit(step_of_grad), arguments()
    step(params, x, y)
    trace = rm.trace(step, params, x, y)
    one, other = trace.function(policy_called("one")), trace.function(policy_called("other"))
    asked.clear()
    one(params, x, y)
    assert set(asked) == {"one"}
    asked.clear()
    other(params, x, y)
    assert set(asked) == {"other"}
    asked.clear()
    one(params, x, y), other(params, x, y), step(params, x, y)
    assert asked == []  # all three stand compiled


def test_a_step_that_donates_donates_under_a_policy_too():
    step, (params, x, y) = jax.jit(step_of_value_and_grad, donate_argnums=0), arguments()
    expected = jax.jit(step_of_value_and_grad)(params, x, y)
    under = rm.trace(step, params, x, y).function("nothing_saveable")
    assert agree(under(params, x, y), expected)
    assert all(leaf.is_deleted() for leaf in params)


def test_several_gradients_are_listed_the_dearest_first():
    def generator_loss(generator, x):
        return jnp.tanh(jnp.sin(x @ generator)).sum()

    def critic_loss(critic, x):
        return jnp.sin(x[:1] @ critic).sum()

    def step(generator, critic, x):
        critic = critic - jax.grad(critic_loss)(critic, x)
        return generator - jax.grad(generator_loss)(generator, x), critic

    (generator, critic, _), x, _ = arguments()
    trace = rm.trace(step, generator, critic, x)
    assert [gradient.key for gradient in trace.gradients] == ["generator_loss", "critic_loss"]
    assert trace.function_name == "generator_loss"
    alive = {value.argument or value.source.text.strip() for value in trace.timeline().alive if value.nbytes > 64}
    assert alive >= {"generator", "critic"}
    other = rm.trace(step, generator, critic, x, gradient="critic_loss")
    assert other.step.peak_bytes == trace.step.peak_bytes  # it is one step, whichever gradient is looked at
    assert other.function_name == "critic_loss"
    with pytest.raises(
        rm.RematError, match="takes no gradient 'loss' inside: it takes 'generator_loss', 'critic_loss'"
    ):
        rm.trace(step, generator, critic, x, gradient="loss")


def penalised(w, x):
    slope = jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)
    return (slope**2).sum()


def test_a_loss_that_takes_a_gradient_inside_is_differentiated_itself():
    (w, *_), x, _ = arguments()
    trace = rm.trace(penalised, w, x)
    assert trace.gradient is None
    assert trace.function_name == "penalised"
    made = [
        (residual.dtype, residual.shape) for residual in trace.report().residuals if residual.kind == "intermediate"
    ]
    assert sorted(made) == saved_types(penalised, w, x)
    (note,) = (note for note in trace.notes if note.kind == "gradient-inside")
    assert f"gradient={trace.gradients[0].key!r}" in note
    turned = rm.trace(penalised, w, x, gradient=trace.gradients[0].key)
    assert turned.wrt == ("x",)
    assert rm.trace(step_of_grad, [w], x, x, gradient="none").function_name == "step_of_grad"


def test_a_physics_informed_loss_is_differentiated_itself_and_its_step_is_of_it():
    def residual(params, t):
        network = lambda t: jnp.tanh(jnp.tanh(t * params[0]) @ params[1]).sum()  # noqa: E731
        return jax.grad(jax.grad(network))(t) + network(t)

    def physics_loss(params, times):
        return (jax.vmap(residual, (None, 0))(params, times) ** 2).mean()

    @jax.jit
    def step(params, times):
        return updated(params, jax.grad(physics_loss)(params, times))

    (first, second, _), x, _ = arguments()
    params, times = [first[0], second], x[:, 0]
    itself = rm.trace(physics_loss, params, times)
    assert itself.function_name == "physics_loss"
    # The gradient of a gradient is of the network too, and no hash or wrapper of JAX's is taken for it.
    assert {gradient.function for gradient in itself.gradients} == {"<lambda>"}
    trace = rm.trace(step, params, times)
    assert trace.function_name == "physics_loss"
    assert made(trace.report()) == saved_types(lambda p: physics_loss(p, times), params)
    assert compute_the_same(trace.function("nothing_saveable"), step, params, times)


def test_a_policy_of_a_site_inside_the_loss_goes_there():
    def checkpointed_loss(params, x, y):
        for w in params:
            x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(w, x)
        return ((x - y) ** 2).mean()

    @jax.jit
    def step(params, x, y):
        return updated(params, jax.grad(checkpointed_loss)(params, x, y))

    params, x, y = arguments()
    trace = rm.trace(step, params, x, y)
    assert [(site.key, site.times) for site in trace.engine.sites] == [("layer", 3)]
    under = trace.function("nothing_saveable", at="layer")
    assert agree(under(params, x, y), step(params, x, y))
    saved = rm.trace(under, params, x, y).report("as_written").saved_bytes
    assert saved == trace.report("nothing_saveable", "layer").saved_bytes != trace.report().saved_bytes


def loss_of_checkpointed_layers(params, x, y):
    for w in params:
        x = jax.checkpoint(layer)(w, x)
    return ((x - y) ** 2).mean()


def with_momentum(state, batch):
    params, momentum = state
    value, gradients = jax.value_and_grad(loss_of_checkpointed_layers)(params, *batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return (updated(params, momentum), momentum), value


def xla_bytes(step, donated, *args):
    """Arguments, outputs and temporaries of the compiled step, what is written over counted once."""
    compiled = jax.jit(step, donate_argnums=donated).lower(*args)
    memory = compiled.compile(
        compiler_options={"xla_cpu_enable_concurrency_optimized_scheduler": False}
    ).memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return total - memory.alias_size_in_bytes


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_the_memory_of_a_step_is_what_xla_takes(donated):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments(size=64, batch=512))
    params, *batch = shapes
    state = (params, params)
    trace = rm.trace(jax.jit(with_momentum, donate_argnums=donated), state, tuple(batch))
    for policy in ("as_written", "nothing_saveable", "save_only_these_names('hidden')"):
        memory = trace.step_under(policy)
        under = trace.function(policy)
        measured = xla_bytes(lambda state, batch, under=under: under(state, batch), donated, state, tuple(batch))
        assert memory.peak_bytes == pytest.approx(measured, rel=0.25)
        assert memory.peak_bytes == trace.report(policy).peak_bytes == trace.timeline(policy).peak_bytes
        # Everything at the peak is of one of the kinds, and the arguments are what they are.
        kinds = (memory.parameter_bytes, memory.optimizer_bytes, memory.batch_bytes)
        rest = memory.saved_bytes + memory.gradient_bytes + memory.output_bytes + memory.temporary_bytes
        assert sum(kinds) + rest == memory.peak_bytes
        by_kind = dict(trace.report(policy).peak_by_kind)
        assert by_kind == {kind: memory.timeline.alive_bytes(kind) for kind in by_kind}
        assert sum(by_kind.values()) == memory.peak_bytes
        assert memory.batch_bytes == 2 * 512 * 64 * 4
        if not donated:
            assert memory.parameter_bytes == memory.optimizer_bytes == 3 * 64 * 64 * 4
    assert trace.step_under("none").saved_bytes > trace.step.saved_bytes


def test_the_timeline_of_a_step_runs_through_its_update():
    params, x, y = arguments()
    trace = rm.trace(with_momentum, (params, params), (x, y))
    timeline = trace.timeline()
    assert timeline.step == "with_momentum"
    assert list(dict.fromkeys(moment.half for moment in timeline.moments))[:2] == ["forward", "backward"]
    assert {moment.half for moment in timeline.moments} == {"forward", "backward", "update"}
    assert rm.trace(loss, params, x, y).step is None


def test_the_timeline_of_a_step_that_takes_a_gradient_more_than_once():
    """As of microbatches without a loop, or of a step that looks at the gradient a bit further along it."""

    @jax.jit
    def step(params, x, y):
        ahead = updated(params, jax.grad(loss)(params, x, y))
        return updated(params, jax.grad(loss)(ahead, x[:3], y[:3]))

    trace = rm.trace(step, *arguments())
    for policy in ("as_written", "nothing_saveable"):
        timeline = trace.timeline(policy)
        assert timeline.peak_bytes == trace.report(policy).peak_bytes == trace.step_under(policy).peak_bytes
        there = trace.step_under(policy, device="TPU v5e").peak_bytes
        assert trace.report(policy).peak_bytes != there == trace.report(policy, device="TPU v5e").peak_bytes
        assert {moment.source.function for moment in timeline.moments if moment.source} >= {"loss", "step"}


def test_what_a_step_puts_into_its_arguments_is_held_as_what_it_returns():
    """As flax's nnx does with a model: the memory is that of the same step which returns the new parameters."""

    def in_place(state, x, y):
        value, gradients = jax.value_and_grad(loss)(state["params"], x, y)
        state["params"] = updated(state["params"], gradients)
        return value

    def returning(state, x, y):
        value, gradients = jax.value_and_grad(loss)(state["params"], x, y)
        return value, updated(state["params"], gradients)

    params, x, y = arguments(64, 4)
    peaks = {rm.trace(step, {"params": params}, x, y).step.peak_bytes for step in (in_place, returning)}
    assert len(peaks) == 1
    assert min(peaks) > 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))  # those given, and new ones
    trace = rm.trace(in_place, {"params": params}, x, y)
    measured = trace.measure(inputs=(({"params": params}, x, y), {}), runs=1)
    assert measured.output_bytes > sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_donated_parameters_are_written_over():
    params, *batch = arguments(size=64)
    kept = rm.trace(jax.jit(with_momentum), (params, params), batch).step
    donated = rm.trace(jax.jit(with_momentum, donate_argnums=0), (params, params), batch).step
    # The new parameters and the new momentum take the memory of the old ones.
    assert kept.peak_bytes - donated.peak_bytes > 64 * 64 * 4


def test_the_gradients_of_microbatches_are_held_inside_their_loop():
    params, x, y = arguments(size=16, batch=512)
    trace = rm.trace(step_of_microbatches, params, x, y)
    saved = trace.report().saved_bytes
    assert 0 < trace.step.saved_bytes <= saved
    assert trace.step.peak_bytes >= saved
    assert trace.step.parameter_bytes == 3 * 16 * 16 * 4


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a step"])
def test_a_gradient_per_example_is_of_all_examples(alone):
    """What each example saves is held for them all at once, since they are differentiated together."""
    params, x, y = arguments()
    x, y = x[:, None], y[None]  # mapped along different axes

    @jax.jit
    def step(params, x, y):
        gradients = jax.vmap(jax.grad(loss), (None, 0, 1))(params, x, y)
        return gradients if alone else updated(params, jax.tree.map(lambda g: g.mean(0), gradients))

    trace = rm.trace(step, params, x, y)
    assert trace.function_name == "loss"
    (note,) = (note for note in trace.notes if note.kind == "gradient-per-example")
    assert "6 examples at once" in note
    assert made(trace.report()) == saved_types(lambda p: jax.vmap(loss, (None, 0, 1))(p, x, y), params)
    assert trace.step.parameter_bytes == 3 * 8 * 8 * 4
    assert trace.step.peak_bytes > 6 * 3 * 8 * 8 * 4  # the gradients of every example
    for policy in ("nothing_saveable", "save_only_these_names('hidden')", trace.plan("50%")):
        under = trace.function(policy)
        assert trace.report(policy).saved_bytes < trace.report().saved_bytes
        assert agree(under(params, x, y), step(params, x, y))
    if alone:  # XLA makes the mean of outer products one product, without ever holding those
        assert trace.step.peak_bytes == pytest.approx(xla_bytes(lambda *args: step(*args), (), params, x, y), rel=0.25)


def in_scan(params, x, y):
    return lax.scan(lambda params, _: (jax.grad(loss)(params, x, y), None), params, length=2)[0]


@pytest.mark.parametrize(
    ("inside", "axes", "examples"),
    [
        (jax.grad(loss), [(None, 0, 0)], "6 examples"),
        (in_scan, [(0, None, None)], "5 examples"),
        (jax.grad(loss), [(None, 0, 1), (0, None, None)], "5 x 6 examples"),
    ],
    ids=["jit", "scan", "two"],
)
def test_a_call_that_is_mapped_as_a_whole_is_of_all_examples(inside, axes, examples):
    """JAX traces its body for one example, and maps what it traced."""
    params, x, y = arguments()
    if axes[-1][0] == 0:
        params = jax.tree.map(lambda p: jnp.stack([p] * 5), params)
    if axes[0][0] is None:
        x, y = x[:, None], y[:, None] if axes[0][2] == 0 else y[None]
    step, whole = jax.jit(inside), loss
    for one in axes:
        step, whole = jax.vmap(step, one), jax.vmap(whole, one)
    trace = rm.trace(step, params, x, y)
    assert trace.function_name == "loss"
    assert made(trace.report()) == saved_types(lambda p: whole(p, x, y), params)
    (note,) = (note for note in trace.notes if note.kind == "gradient-per-example")
    assert f"for {examples} at once" in note
    if inside is not in_scan:
        plain = jax.grad(loss)
        for one in axes:
            plain = jax.vmap(plain, one)
        assert trace.step.peak_bytes == rm.trace(jax.jit(plain), params, x, y).step.peak_bytes
    assert compute_the_same(trace.function("nothing_saveable"), step, params, x, y)


def test_a_call_that_is_mapped_in_two_ways_is_told_to_be_of_one_example():
    params, x, y = arguments()
    inside = jax.jit(jax.grad(loss))

    def step(params, x, y):
        each = jax.vmap(inside, (None, 0, 0))(params, x[:, None], y[:, None])
        return updated(params, jax.tree.map(lambda g, h: g.mean(0) + h, each, inside(params, x[:1], y[:1])))

    trace = rm.trace(step, params, x, y)
    assert trace.step is None
    (note,) = (note for note in trace.notes if note.kind == "gradient-of-step")
    assert "over 6 examples: shapes and bytes are of one example" in note
    assert compute_the_same(trace.function("nothing_saveable"), step, params, x, y)


def test_a_policy_is_asked_about_one_example_as_jax_asks_it():
    """Seen from outside, the product below has a batch dimension; JAX asks the policy about it inside of ``vmap``."""

    def attention(w, x):
        keys = jnp.sin(x @ w)
        return jnp.sin(jnp.sin(keys @ keys.T) @ keys).sum()

    def step(w, x):
        return jax.vmap(jax.vmap(jax.grad(attention), (None, 0)), (None, 1))(w, x)

    w, x = jnp.ones((4, 4)), jnp.ones((2, 3, 5, 4))
    trace = rm.trace(step, w, x)
    saved = [row for row in trace.report("dots_with_no_batch_dims_saveable").residuals if row.kind == "intermediate"]
    assert sorted(sorted(row.shape) for row in saved) == [[2, 3, 4, 5]] * 2 + [[2, 3, 5, 5]]
    assert compute_the_same(trace.function("dots_with_no_batch_dims_saveable"), step, w, x)


def test_the_mean_over_a_mapped_axis_is_taken_inside_the_loss():
    def normalised(w, x):
        hidden = x @ w
        return (jnp.tanh(hidden - lax.pmean(hidden, "batch")) ** 2).sum()

    def step(w, x):
        return w - jax.vmap(jax.grad(normalised), (None, 0), axis_name="batch")(w, x).mean(0)

    (w, *_), x, _ = arguments()
    trace = rm.trace(step, w, x)
    assert trace.report("none").saved_bytes == trace.report().saved_bytes > 0
    assert agree(trace.function("nothing_saveable")(w, x), step(w, x))  # one operation after another


def test_the_step_of_a_loss_that_prints_is_known():
    @jax.jit
    def step(params, x, y):
        def printing(params):
            jax.debug.callback(lambda _: None, x[0, 0], ordered=True)
            return loss(params, x, y)

        return updated(params, jax.grad(printing)(params))

    params, x, y = arguments()
    trace = rm.trace(step, params, x, y)
    quiet = rm.trace(jax.jit(step_of_grad), params, x, y)
    assert trace.step.saved_bytes == quiet.step.saved_bytes > 0
    assert agree(trace.function("nothing_saveable")(params, x, y), step(params, x, y))


def test_a_step_that_is_not_known_says_why():
    def curvature(w, x):
        direction = jax.jvp(jax.grad(lambda w: jnp.tanh(x @ w).sum()), (w,), (w,))[1]
        return w - direction

    (w, *_), x, _ = arguments()
    trace = rm.trace(curvature, w, x)
    assert trace.step is None
    (note,) = (note for note in trace.notes if note.kind == "gradient-of-step")
    assert "the peak is of this gradient alone, since the gradient is differentiated itself" in note
    assert compute_the_same(trace.function("nothing_saveable"), curvature, w, x)


def over_four_devices(fun, **options):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), **options)


@eight
@pytest.mark.parametrize("how", ["shard_map", "shard_map without vma", "pmap"])
def test_a_gradient_on_several_devices_is_of_one_of_them(how):
    params, x, y = arguments(batch=16)

    def step(params, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return updated(params, lax.pmean(gradients, "data")), lax.pmean(value, "data")

    if how == "pmap":
        whole = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), params)
        args = copies, x.reshape(4, 4, 8), y.reshape(4, 4, 8)
    else:
        whole = jax.jit(over_four_devices(step, check_vma=how == "shard_map"))
        args = params, x, y
    trace = rm.trace(whole, *args)
    assert trace.function_name == "loss"
    rows = [row for row in trace.report().residuals if row.kind == "intermediate" and row.primitive != "pvary"]
    part = x[:4], y[:4]  # what each device has of 16 rows
    expected = saved_types(lambda p: loss(p, *part), params)
    assert sorted((row.dtype, row.shape) for row in rows if row.shape) == expected
    (note,) = (note for note in trace.notes if note.kind == "gradient-per-device")
    assert "4 along 'data'" in note
    assert "of one device" in note
    assert trace.step.parameter_bytes == 3 * 8 * 8 * 4
    assert trace.step.batch_bytes == 2 * 4 * 8 * 4
    assert 0 < trace.step.saved_bytes <= sum(row.nbytes for row in rows)  # at the peak
    policy = "save_only_these_names('hidden')"
    assert trace.report(policy).saved_bytes < trace.report().saved_bytes
    before, results = jax.block_until_ready(jax.jit(whole)(*args)), jax.jit(trace.function(policy))(*args)
    assert agree(results, before)
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, results, before))


@eight
def test_the_gradient_of_a_loss_that_is_mapped_over_devices_is_of_one_of_them():
    params, x, y = arguments(batch=16)

    def mapped_loss(params, x, y):
        of_part = lambda *args: lax.pmean(loss(*args), "data")  # noqa: E731
        return over_four_devices(of_part)(params, x, y)

    whole = jax.jit(lambda params, x, y: updated(params, jax.grad(mapped_loss)(params, x, y)))
    trace = rm.trace(whole, params, x, y)
    assert trace.function_name == "mapped_loss"
    in_jaxpr = jaxpr_as_fun(jax.make_jaxpr(mapped_loss)(params, x, y))  # Python's scalars are literals
    assert made(trace.report()) == saved_types(lambda p: in_jaxpr(*p, x, y), params)
    assert trace.step.batch_bytes == 2 * 4 * 8 * 4  # as the bytes saved, of one device
    assert (trace.report().devices, trace.report().per_device) == (4, True)
    assert agree(trace.function("nothing_saveable")(params, x, y), whole(params, x, y))


def test_a_container_of_the_user_s_own_is_not_taken_for_the_function():
    """JAX calls the container's method before it calls the loss."""

    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

        def loss(self, x):
            return (jnp.tanh(x @ self.w) ** 2).mean()

    def step(model, x):
        return updated(model, jax.grad(Model.loss)(model, x))

    (w, *_), x, _ = arguments()
    assert rm.trace(jax.jit(step), Model(w), x).function_name == "loss"


def test_a_step_under_a_policy_can_be_traced_again():
    """What comes back is a step like any other: its gradient is found, under the policy that is in it."""
    params, x, y = arguments()
    trace = rm.trace(jax.jit(step_of_value_and_grad), params, x, y)
    for policy in ("nothing_saveable", "save_only_these_names('hidden')"):
        under = trace.function(policy)
        under(params, x, y)  # it stands compiled
        again = rm.trace(under, params, x, y)
        assert again.signature == trace.signature
        assert again.gradient.key == "loss"
        report, expected = again.report("as_written"), trace.report(policy)
        assert (report.saved_bytes, report.recomputed_flops) == (expected.saved_bytes, expected.recomputed_flops)
        assert again.report("none", "function").saved_bytes == trace.report().saved_bytes


def test_a_plan_is_applied_to_the_step_that_differentiates_its_function(tmp_path):
    params, x, y = arguments()
    step = jax.jit(step_of_value_and_grad)
    trace = rm.trace(step, params, x, y)
    plan = trace.plan("50%")
    plan.save(tmp_path / "plan.json")
    under = rm.load_plan(tmp_path / "plan.json").apply(step)
    assert agree(under(params, x, y), step(params, x, y))
    assert rm.trace(under, params, x, y).report("as_written").saved_bytes == plan.saved_bytes


def make_step(rate):
    def loss_of_pair(w, x):
        return (jnp.tanh(jnp.sin(x @ w)) ** 2).sum()

    def step(w, x):
        value, gradient = jax.value_and_grad(loss_of_pair)(w, x)
        return w - rate * gradient, value

    return step


def test_an_edit_of_a_function_that_a_closure_differentiates_is_verified():
    """While an edit is traced, code stands in for the closure's; to read its variables must not crash Python 3.11."""
    edit = rm.trace(make_step(0.1), jnp.ones((8, 8)), jnp.ones((4, 8))).edit("dots_saveable", "function")
    assert edit.verified
    assert edit.function == "loss_of_pair"


def test_an_edit_is_of_the_loss_where_it_is_written():
    params, x, y = arguments()
    trace = rm.trace(jax.jit(step_of_value_and_grad), params, x, y)
    edit = trace.edit("nothing_saveable")
    assert edit.verified
    added = [line for line in edit.diff().splitlines() if line.startswith("+") and "nothing_saveable" in line]
    (decorator,) = added
    after = edit.diff().splitlines()[edit.diff().splitlines().index(decorator) + 1]
    assert after == " def loss(params, x, y):"
    assert trace.edit(trace.plan("50%")).saved_bytes <= trace.report().saved_bytes


@pytest.mark.parametrize("order", ["inner", "outer"])
def test_an_edit_is_of_the_right_one_of_several_lambdas_in_a_line(order):
    """The program's order of code objects follows from their hashes, that is, from chance."""
    params, x, y = arguments()
    if order == "inner":  # is what is differentiated
        step = lambda params, x, y: (lambda p: jax.grad(lambda p: loss(p, x, y))(p))(params)  # noqa: E731
    else:
        step = lambda params, x, y: jax.grad(lambda p: jax.vmap(lambda x, y: loss(p, x, y))(x, y).mean())(params)  # noqa: E731
    edit = rm.trace(step, params, x, y).edit("nothing_saveable", "function")
    assert edit.verified
    (new,) = (line for line in edit.diff().splitlines() if line.startswith("+") and "nothing_saveable" in line)
    wrapped = "jax.checkpoint(lambda p: loss" if order == "inner" else "jax.checkpoint(lambda p: jax.vmap"
    assert wrapped in new


def test_what_is_only_pushed_forward_is_no_gradient():
    def along(w, x):
        _, push_forward = jax.linearize(lambda x: jnp.tanh(x @ w), x)
        return push_forward(jnp.ones_like(x))

    (w, *_), x, _ = arguments()
    trace = rm.trace(along, w, x[:, :8] @ w)
    assert trace.gradients == ()
    assert trace.function_name == "along"
    assert made(trace.report()) == saved_types(along, w, x)


def mapped(push_forward, x):
    return jax.vmap(push_forward)(jnp.stack([x, x])).sum()


def differentiated(push_forward, x):
    return jax.jvp(push_forward, (x,), (x,))[1].sum()


def solved(push_forward, x):
    return jnp.linalg.solve(jax.jacobian(push_forward)(x) + jnp.eye(x.size), x).sum()


@pytest.mark.parametrize("use", [mapped, differentiated, solved])
def test_what_linearize_returns_can_be_mapped_and_differentiated(use):
    def along(w, x):
        value, push_forward = jax.linearize(lambda x: jnp.tanh(x @ w), x)
        return use(push_forward, value)

    (w, *_), x, _ = arguments()
    trace = rm.trace(along, w, x[0])
    assert trace.function_name == "along"
    assert made(trace.report()) == saved_types(along, w, x[0])
    assert compute_the_same(trace.function("nothing_saveable", "function"), along, w, x[0])


def test_an_error_of_the_users_own_after_linearize_is_as_it_was_raised():
    def along(w, x):
        jax.linearize(lambda x: jnp.tanh(x @ w), x)
        raise LookupError("no such weight")

    (w, *_), x, _ = arguments()
    with pytest.raises(LookupError, match="no such weight") as raised:
        rm.trace(along, w, x)
    assert raised.value.__context__ is None


def step_that_skips_what_is_not_finite(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    none = jax.tree.map(jnp.zeros_like, params)
    return updated(params, lax.cond(jnp.isfinite(value), lambda: pull_back(jnp.ones_like(value))[0], lambda: none))


def step_that_pulls_back_in_a_loop(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    several = lax.map(lambda scale: pull_back(scale * jnp.ones_like(value))[0], jnp.arange(3.0))
    return updated(params, jax.tree.map(lambda gradients: gradients.sum(0), several))


def step_that_pulls_back_in_a_loop_too(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    pull_back_jitted = jax.jit(lambda cotangent: pull_back(cotangent)[0])  # JAX traces it once for both
    once, several = pull_back_jitted(value), lax.map(pull_back_jitted, jnp.arange(3.0))
    return updated(params, jax.tree.map(lambda one, all_: one + all_.sum(0), once, several))


def step_of_gauss_newton(params, x, y):
    value, push_forward = jax.linearize(lambda p: loss(p, x, y), params)
    pull_back = jax.linear_transpose(push_forward, params)
    (gradients,) = pull_back(jnp.ones_like(value))

    def curvature(direction):
        return jax.tree.map(jnp.add, direction, pull_back(push_forward(direction))[0])

    return updated(params, jax.scipy.sparse.linalg.cg(curvature, gradients, maxiter=3)[0])


@pytest.mark.parametrize(
    "step",
    [
        step_that_skips_what_is_not_finite,
        step_that_pulls_back_in_a_loop,
        step_that_pulls_back_in_a_loop_too,
        step_of_gauss_newton,
    ],
)
def test_a_gradient_is_shown_where_its_backward_pass_runs_in_a_loop_or_a_branch(step):
    params, x, y = arguments()
    trace = rm.trace(step, params, x, y)
    assert trace.function_name == "<lambda>"
    assert made(trace.report()) == saved_types(lambda p: loss(p, x, y), params)
    assert trace.step is None  # what its halves hold for each other is not known there
    assert "in a loop or a branch that its forward pass is outside of" in trace.notes[0]
    assert compute_the_same(trace.function("nothing_saveable"), step, params, x, y)


def test_a_step_that_attacks_its_examples_first_is_of_the_gradient_in_its_parameters():
    def step(params, x, y):
        def attack(_, x):
            return x + 0.01 * jnp.sign(jax.grad(loss, 1)(params, x, y))

        return updated(params, jax.grad(loss)(params, lax.fori_loop(0, 3, attack, x), y))

    params, x, y = arguments()
    trace = rm.trace(step, params, x, y)
    assert trace.function_name == "loss"
    assert trace.step is not None
    assert made(trace.report()) == saved_types(lambda p: loss(p, x, y), params)
    assert compute_the_same(trace.function("nothing_saveable"), step, params, x, y)


@pytest.mark.parametrize("jitted", [False, True], ids=["as it is", "jitted"])
@pytest.mark.parametrize("derivative", [jax.vjp, jax.linearize])
def test_a_gradient_is_one_too_where_its_backward_pass_is_returned(derivative, jitted):
    def begin(params, x, y):
        return derivative(lambda p: loss(p, x, y), params)

    params, x, y = arguments()
    trace = rm.trace(jax.jit(begin) if jitted else begin, params, x, y)
    assert trace.function_name == "<lambda>"
    assert made(trace.report()) == saved_types(lambda p: loss(p, x, y), params)
    assert trace.step is None
    assert "its backward pass is not in there" in trace.notes[0]
    assert trace.timeline().peak_bytes > trace.report().saved_bytes
    value, backward = begin(params, x, y)
    lean = trace.function("nothing_saveable")(params, x, y)
    along = jnp.ones_like(value) if derivative is jax.vjp else params
    assert agree((lean[0], lean[1](along)), (value, backward(along)))


def test_a_step_that_has_run_is_not_called_stale():
    """JAX holds its trace of the step, in which the gradient is written in another way."""
    params, x, y = arguments()

    @jax.jit
    def within(params, x, y):
        return jax.jit(lambda params: jax.grad(loss)(params, x, y))(params)

    for step in (jax.jit(step_of_value_and_grad), jax.jit(step_of_microbatches), within):
        step(params, x, y)
        assert rm.trace(step, params, x, y).stale == ()


def test_a_loss_with_a_gradient_inside_is_called_stale_where_it_is():
    helpers = {"activation": jnp.tanh}

    @jax.jit
    def penalty(w, x):
        return (jax.grad(lambda x: helpers["activation"](x @ w).sum())(x) ** 2).sum()

    (w, *_), x, _ = arguments()
    penalty(w, x)
    assert rm.trace(penalty, w, x).stale == ()
    helpers["activation"] = jnp.sin
    assert rm.trace(penalty, w, x).stale == ("penalty",)


def test_another_thread_turns_to_the_step_itself_under_the_settings_of_the_trace():
    """Its Python runs once more then, and asks for the precision of whoever traced it."""
    seen = []

    def step(w, x):
        seen.append(jax.config.jax_default_matmul_precision)
        return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    (w, *_), x, _ = arguments()
    with jax.default_matmul_precision("highest"):
        trace = rm.trace(step, w, x)
    with ThreadPoolExecutor(1) as threads:
        turned = threads.submit(trace.of_gradient, "none").result()
    assert turned.function_name == "step"
    assert seen == ["highest", "highest"]
