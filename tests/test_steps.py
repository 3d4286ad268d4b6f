"""A training step is inspected by the gradient that it takes inside, and comes back with a policy in it."""

import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals  # the list that JAX itself prints
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import remat_magic as rm
from tests.eight_devices import eight
from tests.programs import some_of

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


def step_with_aux(params, x, y):
    (value, _), gradients = jax.value_and_grad(loss_and_accuracy, has_aux=True)(params, (x, y))
    return updated(params, gradients), value


def step_of_microbatches(params, x, y):
    def body(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

    batches = (x.reshape(2, -1, x.shape[-1]), y.reshape(2, -1, y.shape[-1]))
    return updated(params, lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)[0])


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


def step_that_skips_what_is_not_finite(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    none = jax.tree.map(jnp.zeros_like, params)
    return updated(params, lax.cond(jnp.isfinite(value), lambda: pull_back(jnp.ones_like(value))[0], lambda: none))


def step_that_pulls_back_in_a_loop_too(params, x, y):
    value, pull_back = jax.vjp(lambda p: loss(p, x, y), params)
    pull_back_jitted = jax.jit(lambda cotangent: pull_back(cotangent)[0])  # JAX traces it once for both
    once, several = pull_back_jitted(value), lax.map(pull_back_jitted, jnp.arange(3.0))
    return updated(params, jax.tree.map(lambda one, all_: one + all_.sum(0), once, several))


def step_that_attacks_first(params, x, y):
    def attack(_, x):
        return x + 0.01 * jnp.sign(jax.grad(loss, 1)(params, x, y))

    return updated(params, jax.grad(loss)(params, lax.fori_loop(0, 3, attack, x), y))


def step_per_example(params, x, y):
    gradients = jax.vmap(jax.grad(loss), (None, 0, 1))(params, x[:, None], y[None])  # mapped along different axes
    return updated(params, jax.tree.map(lambda g: g.mean(0), gradients))


def step_that_is_mapped_as_a_whole(params, x, y):
    """JAX traces the body of the call for one example, and maps what it traced."""
    gradients = jax.vmap(jax.jit(jax.grad(loss)), (None, 0, 0))(params, x[:, None], y[:, None])
    return updated(params, jax.tree.map(lambda g: g.mean(0), gradients))


def physics_loss(params, x, _):
    def residual(t):
        network = lambda t: jnp.tanh(jnp.tanh(t * params[0][0]) @ params[1]).sum()  # noqa: E731
        return jax.grad(jax.grad(network))(t) + network(t)

    return (jax.vmap(residual)(x[:, 0]) ** 2).mean()


def step_of_physics(params, x, y):
    return updated(params, jax.grad(physics_loss)(params, x, y))


def begins_only(params, x, y):
    return jax.vjp(lambda p: loss(p, x, y), params)


@jax.tree_util.register_pytree_node_class
class Model:
    """JAX calls the methods of such a container before it calls the loss."""

    def __init__(self, params):
        self.params = params

    def tree_flatten(self):
        return (self.params,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def loss(self, x, y):
        return loss(self.params, x, y)


def step_of_a_model(params, x, y):
    return updated(Model(params), jax.grad(Model.loss)(Model(params), x, y))


def each_example(params, x, y):
    return jax.vmap(loss, (None, 0, 0))(params, x, y)


# The name of what is differentiated; the function that JAX lists the residuals of, and what it is given; how often;
# whether the step around it is known: what the halves hold for each other is not where they are in different loops.
STEPS = {
    step_of_value_and_grad: ("loss", loss, np.s_[:], 1, True),
    step_of_grad: ("loss", loss, np.s_[:], 1, True),
    step_of_vjp: ("<lambda>", loss, np.s_[:], 1, True),
    step_with_aux: ("loss_and_accuracy", loss, np.s_[:], 1, True),
    step_of_microbatches: ("loss", loss, np.s_[:3], 2, True),
    step_that_skips_what_is_not_finite: ("<lambda>", loss, np.s_[:], 1, False),
    step_that_pulls_back_in_a_loop_too: ("<lambda>", loss, np.s_[:], 1, False),
    step_that_attacks_first: ("loss", loss, np.s_[:], 4, True),
    step_per_example: ("loss", each_example, np.s_[:, None], 1, True),
    step_that_is_mapped_as_a_whole: ("loss", each_example, np.s_[:, None], 1, True),
    step_of_physics: ("physics_loss", physics_loss, np.s_[:], 1, True),
    step_of_a_model: ("loss", loss, np.s_[:], 1, True),
    begins_only: ("<lambda>", loss, np.s_[:], 1, False),
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_is_of_its_gradient_inside_and_comes_back_with_the_policy(step):
    name, of, part, times, known = STEPS[step]
    params, x, y = arguments()
    jitted = jax.jit(step) if list(STEPS).index(step) % 2 else step
    trace = rm.trace(jitted, params, x, y)
    assert trace.function_name == trace.gradient.function == name
    assert trace.gradient.times == times
    assert (trace.step is not None) == known
    given = x[part], y[part]
    # JAX's own list for the loss alone, of which the parameters are what is differentiated.
    assert made(trace.report()) == saved_types(lambda p: of(p, *given), params)
    policy = "nothing_saveable" if step is step_of_physics else "save_only_these_names('hidden')"
    under = trace.function(policy)
    assert trace.report(policy).saved_bytes < trace.report().saved_bytes
    assert "prevent_cse" not in str(jax.make_jaxpr(step)(params, x, y))  # the user's own is as it was
    if step is begins_only:
        (value, backward), (own, own_backward) = under(params, x, y), step(params, x, y)
        assert agree((value, backward(value)), (own, own_backward(own)))
    else:
        assert str(jax.make_jaxpr(under)(params, x, y)).count("prevent_cse") >= 1
        assert compute_the_same(under, step, params, x, y)


@pytest.mark.slow
def test_a_plan_goes_into_a_step_and_its_memory_is_known():
    params, x, y = arguments(size=16, batch=512)
    trace = rm.trace(step_of_microbatches, params, x, y)
    saved = trace.report().saved_bytes
    # The gradients of microbatches are held inside their loop.
    assert 0 < trace.step.saved_bytes <= saved <= trace.step.peak_bytes
    assert trace.step.parameter_bytes == 3 * 16 * 16 * 4
    plan = trace.plan("50%")
    assert trace.report(plan).saved_bytes == plan.saved_bytes <= saved // 2
    assert agree(trace.function(plan)(params, x, y), step_of_microbatches(params, x, y))  # one operation after another


def of_linearize(use):
    def along(w, x):
        value, push_forward = jax.linearize(lambda x: jnp.tanh(x @ w), x)
        return use(push_forward, value)

    return along


@pytest.mark.parametrize(
    "use",
    [
        lambda push_forward, x: push_forward(jnp.ones_like(x)),
        lambda push_forward, x: jax.vmap(push_forward)(jnp.stack([x, x])).sum(),
        lambda push_forward, x: jnp.linalg.solve(jax.jacobian(push_forward)(x) + jnp.eye(x.size), x).sum(),
    ],
    ids=["pushed forward", "mapped", "differentiated"],
)
def test_what_is_only_pushed_forward_is_no_gradient(use):
    (w, *_), x, _ = arguments()
    trace = rm.trace(of_linearize(use), w, x[0])
    assert trace.function_name == "along"
    assert made(trace.report()) == saved_types(of_linearize(use), w, x[0])


def test_the_signature_is_the_loss_s_own():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments())
    trace = rm.trace(jax.jit(step_of_value_and_grad), *shapes)
    assert trace.signature == "loss(params: 3 leaves 768 B, x f32[6,8], y f32[6,8]) -> f32[]"
    assert trace.wrt == ("params",)
    assert {residual.argument for residual in trace.report().residuals} >= {"x", "params[1]", "params[2]"}
    assert trace.gradient.source.line == loss.__code__.co_firstlineno
    (note,) = (note for note in trace.notes if note.kind == "gradient-of-step")
    assert type(note.text) is str
    assert note.text == note
    assert "step_of_value_and_grad takes the gradient of loss" in note


def scaled(params, x, y, scale=2.0, norm="l2"):
    assert norm == "l2"
    return scale * loss(params, x, y)


def timed(fun):
    @wraps(fun)
    def inner(*args, **kwargs):
        return fun(*args, **kwargs)

    return inner


class Timed:
    def __init__(self, fun):
        update_wrapper(self, fun)

    def __call__(self, *args):
        return self.__wrapped__(*args)


# What is differentiated, and what is called before, of which JAX keeps the trace: its Python does not run again.
APART = {
    "jit": lambda: (jax.jit(scaled, static_argnames="norm"), None),
    "jit of jit": lambda: (jax.jit(jax.jit(scaled, static_argnums=(3, 4)), static_argnums=(3, 4)), None),
    "jit, traced before": lambda: 2 * (jax.jit(scaled, static_argnums=4),),
    "jit of a partial, arguments donated": lambda: (jax.jit(partial(scaled, norm="l2"), donate_argnums=1), None),
    "partial of a jit": lambda: (partial(jax.jit(scaled, static_argnames="norm"), norm="l2"), None),
    "checkpoint": lambda: (jax.checkpoint(scaled), None),
    "jit of a checkpoint": lambda: (jax.jit(jax.checkpoint(scaled)), None),
    "checkpoint, traced before": lambda: 2 * (jax.checkpoint(scaled),),
    "wrapper": lambda: (timed(timed(scaled)), None),
    "jit of a wrapper, traced before": lambda: 2 * (jax.jit(timed(scaled)),),
    "wrapper of a jit": lambda: (timed(jax.jit(scaled)), None),
    "object that wraps": lambda: (Timed(scaled), None),
}


@pytest.mark.parametrize("how", some_of(APART, "jit", "checkpoint, traced before", "partial of a jit", "wrapper"))
def test_the_signature_is_the_loss_s_own_where_jax_traces_it_apart(how):
    of, before = APART[how]()

    @jax.jit
    def step(params, inputs, targets):
        value = 0.0 if before is None else before(params, inputs, targets)
        gradients = [jax.grad(of)(params, inputs, targets) for _ in range(2)]
        return updated(updated(params, gradients[0]), gradients[1]), value

    trace = rm.trace(step, *arguments())
    assert trace.signature.startswith("scaled(params: 3 leaves 768 B, x f32[6,8], y f32[6,8]")
    assert trace.wrt == ("params",)
    assert (trace.gradient.key, trace.gradient.times) == ("scaled", 2)
    assert trace.gradient.source.line == scaled.__code__.co_firstlineno
    named = {residual.argument for residual in trace.report("none", at="function").residuals}
    assert named >= {"x", "params[1]", "params[2]"}
    assert compute_the_same(trace.function("nothing_saveable", at="function"), step, *arguments())


jitted_loss = jax.jit(loss)
# What a step asks the shapes of before it takes its gradient, of the loss that it then differentiates.
ASKED = {
    "gradient": (loss, jax.grad(loss)),
    "jitted gradient": (loss, jax.jit(jax.grad(loss))),
    "gradient of what is jitted": (jitted_loss, jax.value_and_grad(jitted_loss)),
    "gradient of each example": (loss, lambda params, x, y: jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)),
    "value of a vjp": (loss, lambda params, x, y: jax.vjp(loss, params, x, y)[0]),
    "step": (loss, step_of_grad),
}


@pytest.mark.parametrize("asked", some_of(ASKED, "jitted gradient", "value of a vjp"))
def test_a_step_that_asks_for_shapes_first_is_known(asked):
    """As for the zeros that gradients are summed on."""
    of, function = ASKED[asked]

    def step(params, x, y, ask=True):
        if ask:
            jax.eval_shape(function, params, x, y)
        batches = (x.reshape(2, -1, x.shape[-1]), y.reshape(2, -1, y.shape[-1]))
        add = lambda total, batch: (jax.tree.map(jnp.add, total, jax.grad(of)(params, *batch)), None)  # noqa: E731
        return updated(params, lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0])

    trace, without = (rm.trace(fun, *arguments()) for fun in (step, partial(step, ask=False)))
    assert trace.signature == without.signature
    assert [(gradient.key, gradient.times) for gradient in trace.gradients] == [("loss", 2)]
    for policy in ("as_written", "nothing_saveable"):
        assert trace.step_under(policy).peak_bytes == without.step_under(policy).peak_bytes
        assert trace.report(policy).saved_bytes == without.report(policy).saved_bytes
    assert compute_the_same(trace.function("nothing_saveable"), step, *arguments())


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
    assert [(site.key, site.times) for site in trace.engine.primal.table.sites] == [("layer", 3)]
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


@pytest.mark.slow
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


@jax.tree_util.register_dataclass
@dataclass
class Trainer:
    params: list
    momentum: list

    def update(self, x, y):
        state, _ = with_momentum((self.params, self.momentum), (x, y))
        return Trainer(*state)

    jitted = partial(jax.jit, donate_argnums=0)(update)

    def loss(self, x, y):
        return loss(self.params, x, y)

    __call__ = loss


DONATING = jax.jit(with_momentum, donate_argnums=0)


class Plain:
    """As people write trainers: no pytree, and its arrays are constants to JAX."""

    def __init__(self, trainer):
        self.params, self.momentum = trainer.params, trainer.momentum

    def update(self, *batch):
        return with_momentum((self.params, self.momentum), batch)

    static = partial(jax.jit, static_argnums=0)(update)
    __call__ = update


def whole(trainer, x, y):
    return with_momentum, (trainer.params, trainer.momentum), (x, y)


# What holds some of the arguments, and the same given them.
BOUND = {
    "method": lambda trainer, x, y: ((trainer.update, x, y), (Trainer.update, trainer, x, y)),
    "jitted method": lambda trainer, x, y: ((trainer.jitted, x, y), (Trainer.jitted, trainer, x, y)),
    "partial of a method": lambda trainer, x, y: ((partial(trainer.jitted, x), y), (Trainer.jitted, trainer, x, y)),
    "partial": lambda trainer, x, y: (
        (partial(DONATING, (trainer.params, trainer.momentum)), (x, y)),
        (DONATING, (trainer.params, trainer.momentum), (x, y)),
    ),
    "partial by keyword": lambda trainer, x, y: (
        (partial(with_momentum, batch=(x, y)), (trainer.params, trainer.momentum)),
        whole(trainer, x, y),
    ),
    "plain object": lambda trainer, *batch: ((Plain(trainer), *batch), whole(trainer, *batch)),
    "jit of its method": lambda trainer, *batch: ((jax.jit(Plain(trainer).update), *batch), whole(trainer, *batch)),
    "itself static": lambda trainer, *batch: ((Plain(trainer).static, *batch), whole(trainer, *batch)),
    "jit of a partial": lambda trainer, *batch: (
        (jax.jit(partial(with_momentum, (trainer.params, trainer.momentum))), batch),
        whole(trainer, *batch),
    ),
    "closure in vmap": lambda trainer, *batch: (
        (jax.vmap(Plain(trainer).update), *(leaf[None] for leaf in batch)),
        (jax.vmap(with_momentum, (None, 0)), *whole(trainer, *(leaf[None] for leaf in batch))[1:]),
    ),
    "closure in a scan": lambda trainer, *batch: (
        (jax.jit(lambda *batch: in_scan((trainer.params, trainer.momentum), batch)), *batch),
        (jax.jit(in_scan), *whole(trainer, *batch)[1:]),
    ),
}


def in_scan(state, batch):
    return jax.lax.scan(lambda state, _: with_momentum(state, batch), state, length=3)


@pytest.mark.parametrize("how", some_of(BOUND, "jitted method", "jit of its method", "closure in a scan"))
def test_what_a_method_or_a_partial_holds_is_an_argument_of_the_step(how):
    params, x, y = arguments(16, 64)
    (held, *rest), (function, *whole) = BOUND[how](Trainer(params, [2 * leaf for leaf in params]), x, y)
    trace, of_all = rm.trace(held, *rest), rm.trace(function, *whole)
    sizes = ("parameter_bytes", "optimizer_bytes", "batch_bytes", "peak_bytes")
    assert [getattr(trace.step, size) for size in sizes] == [getattr(of_all.step, size) for size in sizes]
    assert trace.step.parameter_bytes == sum(leaf.nbytes for leaf in params)
    assert dict(trace.report().peak_by_kind) == dict(of_all.report().peak_by_kind)
    under = trace.function("nothing_saveable")
    assert agree(*(jax.tree.leaves(jax.jit(lambda *rest, fun=fun: fun(*rest))(*rest)) for fun in (under, held)))


def in_while(state, batch):
    body = lambda i_state: (i_state[0] + 1, with_momentum(i_state[1], batch)[0])  # noqa: E731
    return lax.while_loop(lambda i_state: i_state[0] < 3, body, (0, state))[1]


def in_fori(state, batch):
    return lax.fori_loop(0, 3, lambda _, state: with_momentum(state, batch)[0], state)


def in_scans(state, batch):
    return lax.scan(lambda state, _: in_scan(state, batch), state, length=2)


@pytest.mark.parametrize("epoch", some_of((in_scan, in_fori, in_while, in_scans), in_scan))
def test_donated_parameters_that_a_loop_carries_are_parameters(epoch):
    params, *batch = arguments(16, 64)
    state = params, [2 * leaf for leaf in params]
    step = rm.trace(jax.jit(epoch, donate_argnums=0), state, batch).step
    assert step.parameter_bytes == step.optimizer_bytes == sum(leaf.nbytes for leaf in params)
    assert sum(value.nbytes for value in step.timeline.alive) == step.peak_bytes


@pytest.mark.parametrize("wrapped", [jax.jit, partial(jax.vmap, in_axes=None, axis_size=1)])
def test_a_callable_object_has_the_name_of_its_class_under_a_transform(wrapped):
    params, x, y = arguments()
    assert rm.trace(wrapped(Plain(Trainer(params, params))), x, y).engine.given.name == "Plain"


def test_what_is_differentiated_of_a_method_is_its_object_and_of_a_partial_what_it_is_given():
    params, x, y = arguments()
    trainer = Trainer(params, params)
    assert rm.trace(trainer.loss, x, y).wrt == rm.trace(Trainer.loss, trainer, x, y).wrt == ("self", "x", "y")
    assert rm.trace(trainer, x, y).wrt == ("self", "x", "y")
    assert rm.trace(trainer.loss, x, y, wrt=0).wrt == rm.trace(trainer.loss, x, y, wrt="x").wrt == ("x",)
    assert rm.trace(partial(loss, params), x, y).wrt == ("x", "y")
    assert rm.trace(partial(loss, params), x, y, wrt="params").wrt == ("params",)
    with pytest.raises(rm.RematError, match="wrt=2 .* 2 positional arguments"):
        rm.trace(partial(loss, params), x, y, wrt=2)


MAPPED_OR_JITTED = {
    "vmap": jax.vmap,
    "vmap along another axis": lambda fun: jax.vmap(fun, in_axes=1, out_axes=-1),
    "vmap of vmap": lambda fun: jax.vmap(jax.vmap(fun)),
    "jit of vmap": lambda fun: jax.jit(jax.vmap(fun)),
    "vmap of jit": lambda fun: jax.vmap(jax.jit(getattr(fun, "loss", fun))),  # an object that holds arrays has no hash
}


@pytest.mark.parametrize("how", MAPPED_OR_JITTED)
@pytest.mark.parametrize("of", [lambda trainer: trainer, lambda trainer: trainer.loss], ids=["object", "method"])
def test_what_is_held_by_what_is_mapped_is_differentiated(how, of):
    params, x, y = arguments(4, 4)
    trainer, batch = Trainer(params, params), [jnp.broadcast_to(leaf, (4, 4, *leaf.shape)) for leaf in (x, y)]
    batch = batch if how == "vmap of vmap" else [leaf[0] for leaf in batch]
    mapped = MAPPED_OR_JITTED[how](of(trainer))
    trace = rm.trace(mapped, *batch)
    whole = lambda self, *batch: MAPPED_OR_JITTED[how](of(self))(*batch)  # noqa: E731
    assert trace.wrt == ("self", "x", "y")
    assert made(trace.report("nothing_saveable")) == made(rm.trace(whole, trainer, *batch).report("nothing_saveable"))
    assert made(trace.report()) == saved_types(whole, trainer, *batch)
    assert agree(trace.function("dots_saveable")(*batch), mapped(*batch))


@dataclass(eq=False)
class Held:
    """As equinox holds arguments: in attributes, which functools.wraps and jax.jit copy to what they make of it."""

    func: object
    args: tuple
    keywords: dict

    def __call__(self, *args):
        return self.func(*self.args, *args, **self.keywords)


def test_what_wraps_a_partial_is_traced_itself():
    params, x, y = arguments()
    held = Held(loss, (params,), {})
    assert rm.trace(held, x, y, wrt="params").wrt == ("params",)
    twice = wraps(held)(lambda x, y: held(jnp.sin(x), y) + held(x, y))
    assert compute_the_same(rm.trace(twice, x, y).function("nothing_saveable", at="function"), twice, x, y)
    donating = jax.jit(Held(step_of_grad, (params,), {}), donate_argnums=0)
    assert rm.trace(donating, x, y).engine.step.donated == (True, False)


@pytest.mark.parametrize("donated", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
def test_a_number_of_python_s_may_be_donated(donated):
    """As the count of steps in a TrainState of flax is one, which is no argument."""

    @partial(jax.jit, **donated)
    def step(state, x, y):
        return {"params": step_of_grad(state["params"], x, y), "count": state["count"] + 1}

    params, x, y = arguments()
    assert rm.trace(step, {"params": params, "count": 0}, x, y).engine.step.donated == (True,) * 3 + (False,) * 2


def test_what_is_held_and_asked_for_its_values_stays_what_it_is():
    def weighted(weights, x):
        return jnp.sin(x).sum() if weights[0] > 0 else x.sum()

    trace = rm.trace(partial(weighted, np.ones(3)), jnp.ones(4))
    assert trace.function_name == "weighted"
    assert trace.wrt == ("x",)


def test_the_timeline_of_a_step_runs_through_its_update():
    params, x, y = arguments()
    trace = rm.trace(with_momentum, (params, params), (x, y))
    timeline = trace.timeline()
    assert timeline.step == "with_momentum"
    assert list(dict.fromkeys(moment.half for moment in timeline.moments))[:2] == ["forward", "backward"]
    assert {moment.half for moment in timeline.moments} == {"forward", "backward", "update"}
    assert rm.trace(loss, params, x, y).step is None


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


@pytest.mark.parametrize("update", [False, True])
def test_a_step_may_return_what_depends_on_the_gradient_it_puts_into_its_arguments(update):
    """As nnx's do. A loss with a penalty gives all of them back, too, as they were."""

    def step(state, x, y):
        value, gradients = jax.value_and_grad(loss)(state["params"], x, y)
        state["params"] = updated(state["params"], gradients) if update else [w * 1 for w in state["params"]]
        return value + sum((g**2).sum() for g in gradients)

    params, x, y = arguments()
    trace = rm.trace(step, {"params": params}, x, y)
    assert (trace.gradient is not None, trace.step is not None) == (update, update)


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


CALLED_AT_THE_TOP = """
import jax
import jax.numpy as jnp
import remat_magic as rm

everything = globals()  # which holds itself, as IPython's Out may

def step(w, x):
    return w - jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))(w, x)

trace = rm.trace(step, jnp.ones((4, 4)), jnp.ones((2, 4)))
"""


def test_a_step_can_be_traced_where_a_container_holds_itself(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(CALLED_AT_THE_TOP)
    trace = runpy.run_path(str(path))["trace"]
    assert [residual.argument for residual in trace.report().residuals] == ["x", None]


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
@pytest.mark.parametrize("how", some_of(("shard_map", "pmap", "shard_map without vma"), "shard_map"))
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


def in_shard_map(step, mesh=("data", 1)):
    """Each device has parameters of its own, along an axis that it drops."""
    axis, size = mesh

    def alone(*args):
        return jax.tree.map(lambda leaf: leaf[None], step(*jax.tree.map(lambda leaf: leaf[0], args)))

    mesh = Mesh(np.array(jax.devices()[:size]), (axis,))
    return jax.shard_map(alone, mesh=mesh, in_specs=P(axis), out_specs=P(axis))


MAPPED = {
    "pmap": lambda step: jax.pmap(step, axis_name="data", devices=jax.devices()[:1], donate_argnums=0),
    "vmap": jax.vmap,
    "vmap of jit": lambda step: jax.jit(jax.vmap(jax.jit(step))),
    "vmap of parameters that are not mapped": lambda step: jax.vmap(step, (None, 0, 0)),
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize("how", some_of(MAPPED, "pmap", "vmap of jit", "shard_map"))
def test_a_step_that_is_mapped_over_one_is_a_step(how):
    """As on a laptop, which has one device; numbers among the parameters are given back as a row of one."""
    (w, *_), x, y = arguments()
    mapped, params = MAPPED[how](step_of_scaled), {"w": w, "scale": jnp.float32(2)}
    args = jax.tree.map(lambda leaf: leaf[None], (params, x, y))
    args = (params, *args[1:]) if "not mapped" in how else args
    trace = rm.trace(mapped, *args)
    assert trace.function_name == trace.gradient.function == "scaled_loss"
    assert trace.step.parameter_bytes == w.nbytes + 4
    assert {note.kind for note in trace.notes} == {"gradient-of-step"}
    assert trace.step.peak_bytes == rm.trace(step_of_scaled, params, x, y).step.peak_bytes
    under = trace.function("nothing_saveable")
    assert agree(jax.jit(under)(*args), jax.jit(MAPPED[how](step_of_scaled))(*args))


def scaled_loss(params, x, y):
    return ((params["scale"] * jnp.tanh(x @ params["w"]) - y) ** 2).mean()


def step_of_scaled(params, x, y):
    return updated(params, jax.grad(scaled_loss)(params, x, y))


def step_in_half_precision(params, x, y):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return updated(params, jax.grad(loss)(half, x.astype(jnp.bfloat16), y))


def step_of_a_vector(params, x, y):
    flat, unravel = ravel_pytree(params)
    return unravel(flat - 0.1 * jax.grad(lambda flat: loss(unravel(flat), x, y))(flat))


def step_that_gives_a_vector(flat, x, y):
    return flat - 0.1 * ravel_pytree(jax.grad(loss)(ravel_pytree(arguments()[0])[1](flat), x, y))[0]


@pytest.mark.parametrize("held", [False, True], ids=["given", "held"])
@pytest.mark.parametrize("step", [step_in_half_precision, step_of_a_vector, step_that_gives_a_vector])
def test_a_step_may_give_back_what_it_makes_of_what_is_differentiated(step, held):
    params, x, y = arguments()
    if step is step_that_gives_a_vector:
        params = ravel_pytree(params)[0]
    trace = rm.trace(partial(step, params), x, y) if not held else rm.trace(lambda x, y: step(params, x, y), x, y)
    assert trace.gradient is not None
    assert trace.step.parameter_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("examples", [1, 5])
def test_derivatives_of_numbers_are_no_step(examples):
    """A residual of a differential equation has their shape too."""
    w, t = arguments()[0][0], jnp.ones(examples)
    trace = rm.trace(lambda w, t: jax.vmap(jax.grad(lambda t: jnp.tanh(t * w).sum()))(t) + t, w, t)
    assert trace.gradient is None


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


def test_a_plan_is_applied_to_the_step_that_differentiates_its_function():
    params, x, y = arguments()
    step = jax.jit(step_of_value_and_grad)
    trace = rm.trace(step, params, x, y)
    plan = trace.plan("50%")
    under = plan.apply(step)
    assert agree(under(params, x, y), step(params, x, y))
    assert rm.trace(under, params, x, y).report("as_written").saved_bytes == plan.saved_bytes


@pytest.mark.slow
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


def test_a_step_that_has_run_is_not_called_stale():
    """JAX holds its trace of the step, in which the gradient is written in another way."""
    params, x, y = arguments()

    @jax.jit
    def within(params, x, y):
        return jax.jit(lambda params: jax.grad(loss)(params, x, y))(params)

    for step in (jax.jit(step_of_value_and_grad), jax.jit(step_of_microbatches), within):
        step(params, x, y)
        assert rm.trace(step, params, x, y).stale == ()


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


def test_what_a_step_differentiates_is_differentiated_for_a_report_and_not_before():
    """JAX traces a rule anew each time it differentiates, which is most of what tracing a large step takes."""
    ran = []

    @jax.custom_jvp
    def squared(x):
        return x * x

    @squared.defjvp
    def rule(primals, tangents):
        ran.append(None)
        return squared(*primals), 2 * primals[0] * tangents[0]

    def step(w):
        value, pull_back = jax.vjp(lambda w: squared(w).sum(), w)
        return w - RATE * pull_back(jnp.exp(value))[0]

    trace = rm.trace(step, jax.ShapeDtypeStruct((8,), "float32"))
    assert not ran
    held = [moment.primitive for moment in trace.timeline().moments]
    assert ran
    assert "exp" in held  # the cotangent is the step's own, and is read
