"""Models of the libraries that people use: their residuals are those that JAX lists, and go by the model's own names.

The libraries are no dependencies: ``pip install '.[models]'`` brings them. A test whose library is not there is
skipped, unless REMAT_MODELS is set, as it is where they were installed to be tested with. What is not slow is one each
of linen, nnx and equinox.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

import remat_magic as rm
from remat_magic.records import FitChoice
from remat_magic.views.answer import taken
from remat_magic.views.tables import printed
from remat_magic.views.text import MOST_LINES, Answer
from tests.programs import f32
from tests.report_checks import types_of_ours

# The libraries of the day and the newest JAX warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def library(name: str):
    """The library; where it is not installed, the test is skipped."""
    if os.environ.get("REMAT_MODELS"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[models]'")


def some(shape):
    """Numbers of which no two are the same."""
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        return np.zeros(shape.shape, shape.dtype)
    size = int(np.prod(shape.shape))
    return (0.3 + 0.4 * np.sin(np.arange(size))).reshape(shape.shape).astype(shape.dtype)


def agrees(fun, *args, policy="dots_saveable", run=True):
    """Hold what is said of a model against JAX's own list and against what the model computes.

    Args:
        fun: the loss.
        args: types or arrays.
        policy: tried beside the model as it is written.
        run: whether to run it with that policy.
    """
    trace = rm.trace(fun, *args)
    chosen = getattr(jax.checkpoint_policies, policy)
    for key, under in (("as_written", fun), (policy, jax.checkpoint(fun, policy=chosen))):
        listed = saved_residuals(under, *args)
        expected = collections.Counter(
            a.str_short(short_dtypes=True) for a, source in listed if source != "from a literal"
        )
        report = trace.report(key, "function")
        assert types_of_ours(report) == expected
        assert not report.backward_error
        assert report.forward.text == trace.forward(key, "function").pretty_print(use_color=False)
        assert report.backward.text == trace.backward(key, "function").pretty_print(use_color=False)
        for row in report.residuals:
            if row.kind == "intermediate" and row.origins[0].primitive:
                # On lines of this file, not in the library, which JAX takes for the user's too.
                assert any(origin.source and Path(origin.source.file) == Path(__file__) for origin in row.origins), row
    if trace.engine.primal.table.sites:
        assert trace.report("nothing_saveable", "sites").complete
    if run:
        values = jax.tree.map(some, args)
        which = tuple(range(len(args)))

        def computed(fun):
            made = jax.jit(jax.value_and_grad(fun, which, allow_int=True), compiler_options=_QUICK)(*values)
            return jax.tree.flatten(made)

        expected, tree = computed(fun)
        found, same = computed(trace.function(policy, "sites" if trace.engine.primal.table.sites else "function"))
        assert same == tree
        for mine, theirs in zip(found, expected, strict=True):
            if theirs.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4 * max(1, np.max(np.abs(theirs))))
    return trace


_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def argument_names(trace) -> set[str]:
    return {leaf.name for leaf in trace.arguments}


def site_names(trace) -> list[str]:
    return [site.function for site in trace.engine.primal.table.sites]


def linen_stack(nn, policy=None):
    """Three blocks under a checkpoint, in a scan: how large linen models are written."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(4, name="out")(jnp.tanh(nn.Dense(8, name="into")(x))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.remat(Block, policy=policy, prevent_cse=False)
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = stack(name="layers")(x, None)
            return nn.Dense(2)(x)

    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))
    return (lambda params, x: jnp.sin(net.apply(params, x)).sum()), params


@pytest.mark.parametrize("policy", [pytest.param(None, marks=pytest.mark.slow), "dots_saveable"])
def test_a_scan_of_linen_under_remat_is_one_site(policy):
    loss, params = linen_stack(library("flax.linen"), policy and getattr(jax.checkpoint_policies, policy))
    trace = agrees(loss, params, f32(2, 4))
    (site,) = trace.engine.primal.table.sites
    assert site.times == 3  # once in each iteration
    assert site.policy == (policy or "nothing_saveable")
    assert Path(site.source.file) == Path(__file__)
    assert "params['params']['layers']['into']['kernel']" in argument_names(trace)
    scanned = [row for row in trace.report("none", "sites").residuals if row.kind == "intermediate"]
    assert any("scan x3" in row.path for row in scanned)


@pytest.mark.slow
def test_a_transformer_of_linen_agrees_with_jax():
    """Attention of the library's own, dropout, tied embeddings, a mask, and a cross-entropy of optax."""
    nn, optax = library("flax.linen"), library("optax")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, 8)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(), (5, 8))
            for _ in range(2):
                x = nn.remat(Block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)()(x)
            return embed.attend(nn.LayerNorm()(x))

    net = Transformer()
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        logits = net.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    trace = agrees(loss, params, tokens, policy="dots_with_no_batch_dims_saveable")
    assert sum(site.times for site in trace.engine.primal.table.sites) == 2
    assert {site.policy for site in trace.engine.primal.table.sites} == {"dots_with_no_batch_dims_saveable"}
    assert any("MultiHeadDotProductAttention_0" in name for name in argument_names(trace))
    assert trace.report().wrt == ("params",)  # tokens are integers


@pytest.mark.slow
def test_a_model_of_nnx_agrees_with_jax():
    nnx = library("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.into, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.drop, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.out(self.drop(nnx.gelu(self.norm(self.into(x)))))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x).sum()  # its random numbers are counted in it

    trace = agrees(loss, params, f32(3, 4))
    assert any("into" in name and "kernel" in name for name in argument_names(trace)), argument_names(trace)


def _nnx_state(nnx, model, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return (nnx.merge(graph, params, rest, copy=True)(x) ** 2).sum()

    return loss, (params, rest, x), jax.grad


def _nnx_inputs(nnx, model, x):
    return lambda x, model: (model(x) ** 2).sum(), (x, nnx.view(model, deterministic=True)), jax.grad


def _nnx_examples(nnx, model, x):
    def loss(model, x):
        return jnp.sin(model(x)).sum()

    return loss, (nnx.view(model, deterministic=True), x), lambda fun: lambda m, x: jax.vmap(lambda x: fun(m, x))(x)


def _nnx_teacher(nnx, model, x):
    teacher = nnx.view(nnx.clone(model), deterministic=True)
    return (
        lambda model, teacher, x: ((model(x) - teacher(x)) ** 2).sum(),
        (model, teacher, x),
        lambda fun: lambda model, teacher, x: nnx.grad(lambda model: fun(model, teacher, x))(model),
    )


@pytest.mark.models
@pytest.mark.parametrize("use", [_nnx_state, _nnx_inputs, _nnx_examples, _nnx_teacher])
def test_what_is_handed_back_of_nnx_is_differentiated_as_the_model(use):
    """Each holds modules or variables from outside of the transformation, which nnx lets nobody change within."""
    nnx = library("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.into, self.drop = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.tanh(self.into(x)))

    fun, args, transformed = use(nnx, Net(nnx.Rngs(0)), some(f32(3, 4)))
    trace, expected = rm.trace(fun, *args), transformed(fun)(*args)
    _, again, _ = use(nnx, Net(nnx.Rngs(0)), some(f32(3, 4)))  # the first have drawn random numbers
    found = transformed(trace.function("dots_saveable"))(*again)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
def test_flax_nnx_remat_with_a_policy_in_scan():
    nnx = library("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.into, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

        @functools.partial(nnx.remat, policy=jax.checkpoint_policies.dots_saveable)
        def __call__(self, x):
            return x + self.out(jnp.tanh(self.into(x)))

    blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    graph, state = nnx.split(blocks)

    def loss(state, x):
        scan = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, nnx.merge(graph, state)).sum()

    trace = agrees(loss, state, f32(2, 4))
    assert [(site.times, site.policy) for site in trace.engine.primal.table.sites] == [(3, "dots_saveable")]


@pytest.mark.slow
def test_a_model_of_equinox_agrees_with_jax():
    eqx = library("equinox")
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    # The model itself, activation functions and all: what is no array is static.
    report = rm.trace(lambda model, x: jax.vmap(model)(x).sum(), model, f32(3, 4)).report()
    assert report.residuals
    assert not report.backward_error
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x).sum()

    trace = agrees(loss, arrays, f32(3, 4))
    assert {"arrays.layers[0].weight", "arrays.layers[2].bias"} <= argument_names(trace)


@pytest.mark.models
@pytest.mark.parametrize(
    "wrap", ["filter_jit", "filter_vmap", "filter_checkpoint", "filter_jit of a method", "filter_jit of vmap"]
)
def test_a_model_that_equinox_jits_or_maps_is_differentiated(wrap):
    eqx = library("equinox")
    model, x = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0)), jnp.ones((5, 4))
    wrappers = {"filter_jit of a method": lambda model: eqx.filter_jit(model.__call__)}
    wrappers["filter_jit of vmap"] = lambda model: eqx.filter_jit(jax.vmap(model))
    make = wrappers.get(wrap) or getattr(eqx, wrap)
    x = x if "vmap" in wrap else x[0]
    trace, of_all = rm.trace(make(model), x), rm.trace(lambda model, x: make(model)(x), model, x)
    assert trace.wrt == ("self", "x")
    rows, rows_of_all = (
        sorted((row.dtype, row.shape, row.kind) for row in trace.report().residuals) for trace in (trace, of_all)
    )
    assert rows == rows_of_all
    function = trace.function("nothing_saveable", at="function")
    assert jnp.allclose(function(x), make(model)(x))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_of_haiku_agrees_with_jax(checkpointed):
    hk = library("haiku")

    def forward(x):
        mlp = hk.nets.MLP([8, 2], activation=jnp.tanh)
        return (hk.remat(mlp) if checkpointed else mlp)(x).sum()

    net = hk.transform(forward)
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((3, 4)))
    trace = agrees(lambda params, x: net.apply(params, None, x), params, f32(3, 4))
    assert "params['mlp/~/linear_0']['w']" in argument_names(trace)
    assert [Path(site.source.file) for site in trace.engine.primal.table.sites] == [Path(__file__)] * checkpointed


def _integer_labels(optax, logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _ctc(optax, logits, labels):
    logits, labels = logits[None], 1 + labels[None, :2]
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)).sum()


def _focal(optax, logits, labels):
    return optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 4)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("measure", [_integer_labels, _ctc, _focal])
def test_losses_of_optax_agree_with_jax(measure):
    optax = library("optax")

    @jax.checkpoint
    def model(w, x):
        return jnp.tanh(x @ w)

    def loss(w, x, labels):
        return measure(optax, model(w, x), labels)

    trace = agrees(loss, f32(3, 4), f32(5, 3), jax.ShapeDtypeStruct((5,), jnp.int32))
    assert site_names(trace) == ["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adjoint", "controller"),
    [("RecursiveCheckpointAdjoint", "PIDController"), ("DirectAdjoint", "ConstantStepSize")],
)
def test_a_solver_of_diffrax_agrees_with_jax(adjoint, controller):
    """The default adjoint is checkpointing of its own, by loops with a rule of their own, which no policy reaches."""
    diffrax = library("diffrax")
    steps = diffrax.ConstantStepSize() if controller == "ConstantStepSize" else diffrax.PIDController(1e-3, 1e-3)

    def field(t, y, w):
        return jnp.tanh(w @ y)

    def loss(w, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, y, args=w, max_steps=16,
            stepsize_controller=steps, adjoint=getattr(diffrax, adjoint)(),
        )  # fmt: skip
        return solution.ys.sum()

    trace = agrees(loss, f32(3, 3), f32(3))
    assert argument_names(trace) == {"w", "y"}
    # Its loops refuse the tangents of what they are not differentiated in: asked with these, they were lost to JAX.
    plan = trace.plan("60%", "function")
    assert plan.saved_bytes <= 0.6 * trace.report("none", "function").saved_bytes
    values = some(f32(3, 3)), some(f32(3))
    np.testing.assert_allclose(
        jax.jit(jax.grad(trace.function(plan)), compiler_options=_QUICK)(*values), jax.grad(loss)(*values), rtol=1e-4
    )


@pytest.mark.slow
def test_the_checkpoints_of_a_solver_are_its_own_and_told():
    diffrax = library("diffrax")

    def saved(checkpoints):
        adjoint = diffrax.RecursiveCheckpointAdjoint(checkpoints=checkpoints)

        def loss(w, y):
            term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
            solution = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.1, y, w, max_steps=64, adjoint=adjoint)
            return solution.ys.sum()

        report = rm.trace(loss, f32(64, 64), f32(256, 64)).report()
        assert any("checkpoints= of the loop, or of diffrax's adjoint" in note for note in report.notes)
        return report.saved_bytes

    two, four, eight = map(saved, (2, 4, 8))
    assert (four - two) / 2 == pytest.approx((eight - four) / 4, rel=0.01)  # the same for each step that is kept
    assert (four - two) / 2 >= 256 * 64 * 4


def _sites_of_equinox():
    equinox = library("equinox")

    class Net(equinox.Module):
        w: jax.Array
        inner: equinox.nn.Linear

        @functools.partial(equinox.filter_checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def heavy(self, x):
            with jax.named_scope("attention"):
                return jnp.tanh(x @ self.w)

        def light(self, x):
            return jnp.sin(x @ self.w)

        def __call__(self, x):
            for _ in range(3):
                x = self.heavy(x)
            x = equinox.filter_checkpoint(self.light)(equinox.filter_checkpoint(Net.light)(self, x))
            return equinox.filter_checkpoint(lambda x: x + 1)(jax.vmap(equinox.filter_checkpoint(self.inner))(x))

    model = Net(jnp.ones((4, 4)), equinox.nn.Linear(4, 4, key=jax.random.key(0)))
    sites = {"Net.heavy": 3, "Net.light": 2, "Linear.__call__": 1, "<lambda>": 1}
    return model, sites, {"Net.heavy": Net.heavy, "Net.light": Net.light}


def _sites_of_nnx():
    nnx = library("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.inner(x))

        @functools.partial(nnx.remat, policy=jax.checkpoint_policies.dots_saveable)
        def half(self, x):
            return jnp.sin(self.inner(x))

    def apply(x):
        block = nnx.merge(graph, state, copy=True)
        for _ in range(3):
            x = nnx.remat(Block.__call__)(block, x)
        return nnx.remat(nnx.Linear.__call__)(block.inner, block.half(x))

    graph, state = nnx.split(Block(nnx.Rngs(0)))
    return apply, {"Block.__call__": 3, "Block.half": 1, "Linear.__call__": 1}, {"Block.__call__": Block.__call__}


def _sites_of_linen():
    nn = library("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(4)(x))

    class Net(nn.Module):
        def setup(self):
            self.dense, self.block, self.last = nn.Dense(4), nn.remat(Block)(), nn.remat(Block)(name="last")

        @nn.remat
        def part(self, x):
            return jnp.sin(self.dense(x))

        def __call__(self, x):
            return self.last(self.block(self.part(self.part(x))))

    model = Net()
    weights = model.init(jax.random.key(0), jnp.ones((3, 4)))
    return lambda x: model.apply(weights, x), {"Net.part": 2, "block": 1, "last": 1}, {}


def _sites_of_lifted_linen():
    """Linen makes classes of the user's, which have made up names."""
    nn = library("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            return (jnp.tanh(nn.Dense(4)(x)), None) if _ else jnp.tanh(nn.Dense(4)(x))

    class Step(Block): ...

    class Two(nn.Module):
        def setup(self):
            self.first = nn.Dense(4)

        def half(self, x):
            return jnp.tanh(self.first(x))

        def __call__(self, x):
            return jnp.sin(self.half(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(nn.remat(Step), length=3, **each)()(x, None)
            x = nn.jit(nn.vmap(nn.remat(Block), **each))()(x)
            return nn.remat(Two, methods=["half"])()(nn.remat_scan(nn.Dense, lengths=(2, 3))(4)(x))

    model = Net()
    weights = model.init(jax.random.key(0), jnp.ones((3, 4)))
    return lambda x: model.apply(weights, x), {"Step": 3, "Block": 1, "Dense": 2, "Two.half": 1}, {}


def _sites_of_jax():
    class Obj:
        def __call__(self, x):
            return jnp.sin(x)

        @jax.checkpoint
        def half(self, x):
            return jnp.cos(x)

    def apply(x):
        obj = Obj()
        with jax.named_scope("scope"):
            return jax.checkpoint(obj)(obj.half(obj.half(x)))

    jax.tree_util.register_static(Obj)
    return apply, {"Obj.half": 2, "Obj.__call__": 1}, {"Obj.__call__": Obj.__call__}


@pytest.mark.models
@pytest.mark.parametrize(
    "made", [_sites_of_jax, _sites_of_equinox, _sites_of_nnx, _sites_of_linen, _sites_of_lifted_linen]
)
def test_a_site_is_called_as_the_function_under_a_librarys_checkpoint(made):
    apply, expected, functions = made()
    trace = rm.trace(lambda x: apply(x).sum(), some(f32(3, 4)))
    assert {site.key: site.times for site in trace.engine.primal.table.sites} == expected
    assert not any("Checkpoint" in site.key for site in trace.sites)
    for site in trace.engine.primal.table.sites:
        assert trace.report("none", at=site.key).saved_bytes >= trace.report().saved_bytes
        if site.key in functions:
            code = inspect.unwrap(functions[site.key]).__code__
            assert site.source.line == code.co_firstlineno


@pytest.mark.models
@pytest.mark.parametrize("name", ["flax.linen", "haiku"])
def test_what_a_library_calls_around_methods_and_parameters_is_no_place(name):
    of = library(name)

    def interceptor(call, args, kwargs, context):
        result = call(*args, **kwargs)
        return result if result is None else result * 2

    def getter(call, value, context):
        return call(value.astype(jnp.bfloat16)).astype(value.dtype)

    if name == "haiku":

        def net(x):
            with of.intercept_methods(interceptor), of.custom_getter(getter):
                return jnp.tanh(of.Linear(4)(x)).sum()

        model = of.without_apply_rng(of.transform(net))
        weights, apply = model.init(jax.random.key(0), jnp.ones((3, 4))), model.apply
    else:
        model = of.Dense(4)
        weights = model.init(jax.random.key(0), jnp.ones((3, 4)))

        def apply(weights, x):
            with of.intercept_methods(interceptor):
                return jnp.tanh(model.apply(weights, x)).sum()

    places = {site.key for site in rm.trace(apply, weights, some(f32(3, 4))).sites}
    assert places <= {"Linear.__call__", "Dense.__call__"}


def _is_of_the_loss(trace, name, changed, differentiated):
    """Hold a step's trace against JAX's list of what its loss saves, given what of it is differentiated.

    Args:
        trace: of the step.
        name: of the loss.
        changed: a function of the differentiated leaves alone.
        differentiated: their types.
    """
    assert trace.function_name == trace.gradient.function == name
    listed = saved_residuals(changed, *differentiated)
    expected = collections.Counter(
        aval.str_short(short_dtypes=True)
        for aval, why in listed
        if not any(source in why for source in ("from the argument", "from a constant", "from a literal"))
    )
    made = collections.Counter(row.type for row in trace.report().residuals if row.kind == "intermediate")
    assert made == expected
    assert trace.step is not None


def test_a_training_step_of_equinox():
    """Its gradient and its jit are wrappers of its own, and the model holds a number that is a setting."""
    eqx, optax = library("equinox"), library("optax")
    keys = jax.random.split(jax.random.key(0), 3)

    class Net(eqx.Module):
        first: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention
        act: collections.abc.Callable

        def __call__(self, x):
            x = jax.vmap(self.first)(x)
            return self.act(self.attention(x, x, x))

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    model = Net(eqx.nn.Linear(4, 4, key=keys[0]), eqx.nn.MultiheadAttention(2, 4, key=keys[1]), jax.nn.gelu)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = some(f32(3, 4)), some(f32(3, 4))

    @eqx.filter_jit
    def train_step(model, state, x, y):
        value, gradients = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    trace = rm.trace(train_step, model, state, x, y)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    _is_of_the_loss(trace, "loss", lambda arrays: loss(eqx.combine(arrays, rest), x, y), [arrays])
    assert "model.first.weight" in {leaf.name for leaf in trace.arguments}
    one, other = trace.function("nothing_saveable")(model, state, x, y), train_step(model, state, x, y)
    assert jnp.allclose(one[2], other[2], atol=1e-6)
    assert jnp.allclose(one[0].first.weight, other[0].first.weight, atol=1e-6)
    itself = rm.trace(train_step, model, state, x, y, gradient="none")  # which returns the model's function, too
    assert (itself.function_name, itself.report().saved_bytes > 0) == ("train_step", True)


def test_a_training_step_of_flax_nnx():
    """It changes the model that it is given: the trace must not, and the step that comes back must."""
    nnx, optax = library("flax.nnx"), library("optax")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.second = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(jax.nn.relu(self.norm(self.first(x))))

    def loss(model, x, y):
        return ((model(x) - y) ** 2).mean()

    @nnx.jit
    def train_step(model, optimizer, x, y):
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    def fresh():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)

    x, y = some(f32(3, 4)), some(f32(3, 4))
    model, optimizer = fresh()
    before = jax.tree.map(jnp.array, nnx.state(model))
    trace = rm.trace(train_step, model, optimizer, x, y)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    _is_of_the_loss(trace, "loss", lambda params: loss(nnx.merge(graph, params, others, copy=True), x, y), [params])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model)))
    under, values = trace.function("nothing_saveable"), []
    for step in (under, train_step):
        model, optimizer = fresh()
        values.append([float(step(model, optimizer, x, y)) for _ in range(3)])
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0][0] > values[0][2]  # it learns


def test_a_module_of_nnx_that_is_changed_and_no_argument_is_named():
    nnx = library("flax.nnx")
    dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    with pytest.raises(rm.RematError, match="<lambda> changes a module .* pass model, optimizer and rngs as arguments"):
        rm.trace(lambda x: dropout(x).sum(), some(f32(3)))


# ------------------------------------------------------------------------------------------------------------- donation


def _linen_state(x):
    nn, optax = library("flax.linen"), library("optax")
    train_state = library("flax.training.train_state")
    model = nn.Dense(8)
    state = jax.eval_shape(
        lambda: train_state.TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=optax.adam(1e-3)
        )
    )

    @jax.jit
    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (state, x), ("state",), "+    @jax.jit(donate_argnums=(0,))"


def _nnx_optimizer(x):
    nnx, optax = library("flax.nnx"), library("optax")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    args = (model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), x)
    return step, args, ("model", "optimizer"), "+    @nnx.jit(donate_argnums=(0, 1))"


def _equinox_model(x):
    eqx, optax = library("equinox"), library("optax")
    model, adam = eqx.nn.Linear(8, 8, key=jax.random.key(0)), optax.adam(1e-3)

    @eqx.filter_jit
    def step(x, model, state):
        loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        updates, state = adam.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    args = (x, model, adam.init(eqx.filter(model, eqx.is_array)))
    return step, args, ("model", "state"), '+    @eqx.filter_jit(donate="all-except-first")'


@pytest.mark.models
@pytest.mark.parametrize("made", [_linen_state, _nnx_optimizer, _equinox_model])
def test_the_state_of_a_librarys_step_can_be_donated(made):
    step, args, names, line = made(jnp.ones((4, 8)))
    trace = rm.trace(step, *args)
    assert trace.engine.donation.names == names
    choice = FitChoice("donate", "as_written", trace.default_at, None, None, None, None, donate=names)
    adam_and_weights = 3 * (8 * 8 + 8) * 4
    assert 0 <= trace.measure(choice).alias_bytes - adam_and_weights <= 16  # and counters
    edit = trace.edit(choice)
    assert (edit.verified, edit.differences) == (True, ())
    assert line in edit.diff()
    if made is not _linen_state:  # whose arrays are types
        weights = jax.tree.leaves(args[names == ("model", "state")])
        trace.function(choice)(*args)
        assert all(leaf.is_deleted() for leaf in weights if isinstance(leaf, jax.Array) and leaf.ndim)


@pytest.mark.models
@pytest.mark.parametrize("made", [_linen_state, _nnx_optimizer, _equinox_model])
def test_the_text_of_a_librarys_step_names_the_users_own_lines(made):
    step, args, *_ = made(jnp.ones((4096, 8)))
    trace = rm.trace(step, *args)
    fit = trace.fit(1000)
    for width in (80, 100):
        lines = printed(Answer(fit), width).splitlines()
        assert len(lines) <= MOST_LINES
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("step: gradient of ")
        assert lines[1].startswith("DOES NOT FIT  about ")
        first = taken(fit.timeline, fit.report)[0]
        assert Path(first.source.file).name == "test_models.py"
        assert f"{first.source.place}" in lines[lines.index("Takes it") + 1]
