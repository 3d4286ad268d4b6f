"""``vmap`` in parts: ``jax.lax.map`` over equal parts, each under a checkpoint, as one would write it by hand."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic import _jax
from tests.report_checks import costs_of, types_and_kinds, types_of_jax, types_of_ours
from tests.test_models import library

F32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
KEY = jax.random.key(0)


def render(p, ray):
    """A NeRF-like function of one ray."""
    points = ray[:3] + jnp.linspace(0.0, 1.0, 32)[:, None] * ray[3:6]
    h = jax.nn.relu(jnp.sin(points @ p["w0"]) @ p["w1"])
    return jnp.sum(jax.nn.softmax(h @ p["w2"], 0) * jnp.tanh(h @ p["w2"]))


def loss(p, rays, pixels):
    out = jax.vmap(render, (None, 0))(p, rays)
    return jnp.mean((out - pixels) ** 2)


def arguments(rays=64, width=8):
    shapes = {"w0": (3, width), "w1": (width, width), "w2": (width, 1)}
    p = {name: jax.random.normal(KEY, shape) for name, shape in shapes.items()}
    return p, jax.random.normal(KEY, (rays, 6)), jnp.ones(rays)


def assert_close(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(b)))))


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("parts", [2, 16])
def test_it_saves_what_jax_saves_of_the_map_by_hand(policy, parts, remat3):
    def by_hand(p, rays, pixels):
        one = jax.checkpoint(lambda ray: render(p, ray), policy=getattr(jax.checkpoint_policies, policy))
        return jnp.mean((jax.lax.map(one, rays, batch_size=64 // parts) - pixels) ** 2)

    args = arguments()
    report = rm.trace(loss, *args).report(policy, at=f"vmap(render) in {parts}")
    assert types_of_ours(report) == types_of_jax(by_hand, args)
    hand = rm.trace(by_hand, *args).report()
    assert types_and_kinds(report) == types_and_kinds(hand)
    assert costs_of(report)[:4] == costs_of(hand)[:4]  # and what is repeated is that of all parts
    assert report.sites[0].times == parts
    assert report.repeated_flops > 0


@pytest.mark.parametrize("at", ["vmap(render) in 16", {"vmap(render) in 4": "dots_saveable"}, "vmap(render) in 2"])
def test_what_is_handed_back_has_the_same_gradients(at, remat3):
    args = arguments()
    policy = "none" if at == "vmap(render) in 2" else "nothing_saveable"
    fun = rm.trace(loss, *args, wrt=0).function(policy, at=at)
    wanted = jax.value_and_grad(loss)(*args)
    assert_close(jax.value_and_grad(fun)(*args), wanted)
    assert_close(jax.jit(jax.value_and_grad(fun))(*args), wanted)
    several = [jnp.stack([value, 2 * value]) for value in args[1:]]
    assert_close(jax.vmap(fun, (None, 0, 0))(args[0], *several), jax.vmap(loss, (None, 0, 0))(args[0], *several))
    one, other = (jax.jvp(lambda p, it=it: it(p, *args[1:]), args[:1], args[:1]) for it in (fun, loss))
    assert_close(one, other)
    with pytest.raises(rm.RematError, match="equal parts"):
        fun(args[0], args[1][:7], args[2][:7])


def test_the_peak_is_that_of_a_part_by_the_estimate_and_by_xla():
    p = {"w0": F32((3, 256)), "w1": F32((256, 256)), "w2": F32((256, 1))}
    trace = rm.trace(loss, p, F32((4096, 6)), F32((4096,)), wrt=0)
    choices = ("as_written", None), ("nothing_saveable", "vmap(render) in 16")
    assert [round(trace.report(*choice).peak_bytes / 1e6) for choice in choices] == [573, 37]
    xla_as_written = 673 if _jax.JAX_VERSION < (0, 12) else 807  # measured on 0.10.2 and on 0.12.0.1
    assert [round(trace.measure(*choice).temp_bytes / 1e6) for choice in choices] == [xla_as_written, 50]
    assert trace.report("as_written", "vmap(render) in 16").saved_bytes == trace.report().saved_bytes


def layer(w, h):
    return jnp.tanh(h @ w)


def deep(w, h):
    return jnp.sum(layer(w, layer(w, jnp.sin(layer(w, h)))))


def test_a_step_takes_it_alone_and_with_other_places():
    @jax.jit
    def step(w, xs):
        value, grads = jax.value_and_grad(lambda w, xs: jnp.mean(jax.vmap(deep, (None, 0))(w, xs)))(w, xs)
        return w - 0.1 * grads, value

    w, xs = jax.random.normal(KEY, (8, 8)), jax.random.normal(KEY, (32, 8))
    trace, wanted = rm.trace(step, w, xs), step(w, xs)
    for at in ({"vmap(deep) in 8": "nothing_saveable"}, {"vmap(deep) in 4": "none", "layer": "nothing_saveable"}):
        changed = trace.function(at=at)
        assert_close(changed(w, xs), wanted)
        assert "scan" in str(jax.make_jaxpr(changed)(w, xs))
        assert trace.report(at=at).peak_bytes < trace.report().peak_bytes
        assert trace.report(at=at).saved_bytes < trace.report().saved_bytes
    assert trace.stale == ()
    alone, both = ({"vmap(deep) in 4": "none"}, {"vmap(deep) in 4": "none", "layer": "nothing_saveable"})
    assert trace.report(at=both).repeated_flops > trace.report(at=alone).repeated_flops
    plan = trace.plan(saved="50%", at="vmap(deep) in 4")
    assert plan.at == "vmap(deep) in 4"
    assert plan.saved_bytes == trace.report(plan).saved_bytes
    assert_close(trace.function(plan)(w, xs), wanted)


XS = jnp.linspace(-1.0, 1.0, 48).reshape(8, 6)


def axes(x):
    both = jax.vmap(
        lambda d, y: {"a": jnp.sin(d["u"]) * y, "b": d["v"]}, ({"u": 1, "v": None}, -2), {"a": -1, "b": None}
    )
    out = both({"u": x.T, "v": x[0]}, x)
    return jnp.sum(out["a"] * jnp.arange(8.0)) + jnp.sum(out["b"])


def nested(x):
    return jnp.sum(jax.vmap(lambda row: jnp.sum(jax.vmap(lambda one: jnp.sin(one) * jnp.cos(row))(row)))(x))


def keys(x):
    noisy = jax.vmap(lambda row, key: jnp.tanh(row) * jax.random.normal(key, row.shape))
    return jnp.sum(noisy(x, jax.random.split(jax.random.key(1), 8)))


def in_a_loop(x):
    return jnp.sum(jax.lax.fori_loop(0, 3, lambda _, c: jax.vmap(lambda row: jnp.sin(row) * 2)(c), x))


def jitted(x):
    return jnp.sum(jax.jit(jax.vmap(functools.partial(lambda s, row: jnp.sin(row) * s, 2.0)))(x))


def checkpointed(x):
    return jnp.sum(jax.checkpoint(jax.vmap(jax.checkpoint(lambda row: jnp.sin(jnp.sin(row)))))(x))


def integers(x):
    return jnp.sum(jax.vmap(lambda n, row: jnp.sin(row) * n, out_axes=-1)(jnp.arange(8), x))


@pytest.mark.parametrize("fun", [axes, nested, keys, in_a_loop, jitted, checkpointed, integers])
def test_any_axes_and_surroundings(fun):
    trace = rm.trace(fun, XS)
    (key,) = trace.engine.vmaps
    other = trace.function("nothing_saveable", at=f"{key} in 2")
    assert_close(jax.value_and_grad(other)(XS), jax.value_and_grad(fun)(XS))
    scans = [str(jax.make_jaxpr(it)(XS)).count("scan[") for it in (fun, other)]
    assert scans[1] > scans[0]


def named(x):
    return jnp.sum(jax.vmap(lambda row: jnp.sin(row) - jax.lax.pmean(row, "i"), axis_name="i")(x))


def on_a_mesh(x):
    return jnp.sum(jax.vmap(jnp.sin, spmd_axis_name="i")(x))


def rbg(x):
    noisy = jax.vmap(lambda row, key: row * jax.random.normal(key, row.shape))
    return jnp.sum(noisy(x, jax.random.split(jax.random.key(1, impl="rbg"), 8)))


def mapped_by_jax(x):
    return jnp.sum(jax.lax.map(lambda row: jnp.sin(row), x, batch_size=4))


@pytest.mark.parametrize(
    ("fun", "why"),
    [
        (named, "a name, 'i'"),
        (on_a_mesh, "mesh of devices"),
        (rbg, "keys of kind rbg"),
        (mapped_by_jax, "one of JAX's own"),
    ],
)
def test_what_would_not_be_the_same_is_refused(fun, why):
    trace = rm.trace(fun, XS)
    (key,) = trace.engine.vmaps
    with pytest.raises(rm.RematError, match=why):
        trace.report("nothing_saveable", at=f"{key} in 2")


def test_derivatives_of_jax_have_no_places():
    for of in (jax.jacrev, jax.jacfwd, jax.hessian):
        assert not rm.trace(lambda x, of=of: jnp.sum(of(lambda row: jnp.sum(jnp.sin(row)))(x[0])), XS).engine.vmaps


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("vmap(render) in 7", r"64 examples, which 7 does not divide"),
        ("vmap(render) in 1", r"choose one of \[2, 4,"),
        ("vmap(other) in 2", r"no vmap\(other\) to be in parts: it has vmap\(render\)"),
        ("vmap(render)", r"write at='vmap\(render\) in 2'"),
        ({"vmap(render) in 2": "none", "vmap(render) in 4": "none"}, "no checkpoint site"),
    ],
)
def test_a_place_that_there_is_not_says_which_there_are(at, why):
    with pytest.raises(rm.RematError, match=why):
        rm.trace(loss, *arguments(), wrt=0).report("nothing_saveable", at=at)


def test_a_jax_without_the_name_says_so(monkeypatch):
    monkeypatch.setattr(_jax.transforms._place, "own", None)
    with pytest.raises(rm.RematError, match=r"no jax\._src\.interpreters\.batching\.batch"):
        rm.trace(loss, *arguments(), wrt=0).report("nothing_saveable", at="vmap(render) in 2")


def test_it_is_a_choice_of_fit_with_code_and_an_edit(module):
    text = """
import jax, jax.numpy as jnp

def render(p, ray):
    h = jnp.sin(ray @ p)
    return jnp.sum(jnp.tanh(h @ p.T) * jnp.cos(ray))

def loss(p, rays):
    return jnp.mean(jax.vmap(
        render, in_axes=(None, 0)
    )(p, rays))

def by_a_name(p, rays):
    batched = jax.vmap(render, (None, 0))
    return jnp.mean(batched(p, rays))
"""
    made, shapes = module(text), (F32((64, 256)), F32((4096, 64)))
    trace = rm.trace(made.loss, *shapes, wrt=0)
    fit = trace.fit("4 MB")
    assert fit.best.what.endswith("parts, each under a checkpoint")
    assert fit.best.at.startswith("vmap(render) in ")
    parts = int(fit.best.at.rpartition(" ")[2])
    call = f"jax.lax.map(jax.checkpoint(lambda x: render(p, x)), rays, batch_size={4096 // parts})"
    assert fit.best.code == f"import jax\n\n{call}"
    assert trace.report(fit.best).peak_bytes <= fit.capacity_bytes
    edit = trace.edit(fit.best)
    assert edit.verified
    assert call in edit.apply_text()
    changed = module(edit.apply_text(), "changed")
    args = jax.random.normal(KEY, (64, 256)), jax.random.normal(KEY, (4096, 64))
    assert_close(jax.grad(changed.loss)(*args), jax.grad(made.loss)(*args))
    assert_close(jax.grad(trace.function(fit.best))(*args), jax.grad(made.loss)(*args))
    few = [choice.at for choice in fit.tried if choice.at.startswith("vmap")]
    assert len(few) <= 3  # the others are by a line through two

    other = rm.trace(made.by_a_name, *shapes, wrt=0)
    fit = other.fit("4 MB")
    assert fit.best is None or not fit.best.at.startswith("vmap")
    cut = next(choice for choice in fit.tried if choice.at.startswith("vmap"))
    assert "not like jax.vmap(f)(xs)" in cut.unusable
    size = 4096 // int(cut.at.rpartition(" ")[2])
    assert f"jax.lax.map(jax.checkpoint(lambda x: render(p, x)), ray, batch_size={size})" in cut.code


def test_fit_tries_as_many_parts_as_are_to_fit_and_plans_nothing_in_a_part():
    def by_rays(p, rays):
        def render(p, ray):
            for _ in range(6):
                ray = jnp.tanh(ray @ p)
            return ray

        return jnp.mean(jax.vmap(render, (None, 0))(p, rays))

    trace = rm.trace(by_rays, F32((64, 64)), F32((4096, 64)), wrt=0)
    counts = list[int]()
    for memory in ("8 MB", "5 MB"):
        (choice,) = [choice for choice in trace.fit(memory).tried if choice.at.startswith("vmap")]
        assert choice.fits
        assert not choice.plan
        counts.append(int(choice.at.rpartition(" ")[2]))
    assert 2 < counts[0] < counts[1] < 64


def _equinox():
    eqx = library("equinox")
    model = eqx.nn.MLP(6, "scalar", 16, 2, key=KEY)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return arrays, lambda arrays, x: eqx.filter_vmap(eqx.combine(arrays, rest))(x)


def _nnx():
    nnx = library("flax.nnx")
    graph, state = nnx.split(nnx.Linear(6, 3, rngs=nnx.Rngs(0)))
    mapped = nnx.vmap(lambda model, row: jnp.sum(jnp.tanh(model(row))), in_axes=(None, 0))
    return state, lambda state, x: mapped(nnx.merge(graph, state), x)


def _linen():
    nn = library("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jnp.tanh(nn.Dense(32)(x)))[0]

    net = nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})()
    return net.init(KEY, XS), net.apply


def _haiku():
    hk = library("haiku")

    def net(x):
        mlp = hk.nets.MLP([16, 1])
        return hk.vmap(lambda row: mlp(row)[0], split_rng=False)(x)

    pure = hk.without_apply_rng(hk.transform(net))
    return pure.init(KEY, XS), pure.apply


@pytest.mark.models
@pytest.mark.parametrize("model", [_equinox, _nnx, _linen, _haiku])
def test_the_vmaps_of_libraries_are_places(model):
    params, apply = model()

    def fun(params, x):
        return jnp.mean(apply(params, x) ** 2)

    trace = rm.trace(fun, params, XS, wrt=0)
    (key,) = trace.engine.vmaps
    assert [site.times for site in trace.report("nothing_saveable", at=f"{key} in 4").sites] == [4]
    other = trace.function("nothing_saveable", at=f"{key} in 4")
    assert_close(jax.value_and_grad(other)(params, XS), jax.value_and_grad(fun)(params, XS))


@pytest.mark.models
def test_what_is_donated_in_parts_is_what_the_library_donates():
    eqx = library("equinox")
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, "scalar", 256, 2, key=KEY))

    @eqx.filter_jit
    def step(model, x):
        grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g if eqx.is_array(p) else p, model, grads)

    trace = rm.trace(step, model, jax.ShapeDtypeStruct((4096, 64), "float32"))
    (key,) = (site.key for site in trace.parts if site.function == "MLP")
    at = key.replace(key.rpartition(" ")[2], "4")
    (donated,) = {choice.donate for choice in trace.fit("4 MB").tried if choice.donate}
    choice = dataclasses.replace(trace.fit_choice("nothing_saveable", at, "4 MB"), donate=donated)
    assert (
        trace.report(choice, device="H100 SXM").peak_bytes
        <= trace.report("nothing_saveable", at, device="H100 SXM").peak_bytes
    )


@pytest.mark.parametrize("seed", range(20))
def test_programs_by_chance(seed):
    """Each maps other axes, of which some arguments have none, over a body with inner vmaps, loops, keys and jits."""
    chance = random.Random(seed)
    size, parts = chance.choice([(8, 2), (12, 3), (12, 4), (8, 8)])
    in_axes = [chance.choice([None, 0, 1, -1]) for _ in range(2)] + [chance.choice([0, 1])]
    out_axis = chance.choice([0, 1, -1])
    steps = [chance.choice(["sin", "matmul", "scan", "jit", "vmap", "sort", "key"]) for _ in range(3)]

    def body(a, b, c):
        h = a * jnp.cos(b) + c
        for step in steps:
            match step:
                case "matmul":
                    h = jnp.tanh(jnp.outer(h, h) @ c)
                case "scan":
                    h = jax.lax.scan(lambda s, x: (s * x, jnp.sin(s)), 1.0, h)[1]
                case "jit":
                    h = jax.jit(lambda x: jnp.exp(-(x**2)))(h)
                case "vmap":
                    h = jax.vmap(lambda x, h=h: jnp.sin(x) * h.sum())(h)
                case "sort":
                    h = jnp.sort(h) * jnp.arange(5.0)
                case "key":
                    h = h + jax.random.normal(jax.random.fold_in(KEY, 3), h.shape)
                case _:
                    h = jnp.sin(h)
        return h

    def program(*args):
        out = jax.vmap(body, tuple(in_axes), out_axis)(*args)
        return jnp.sum(jnp.sin(out + jnp.linspace(0.0, 1.0, out.size).reshape(out.shape)))  # where each stands matters

    shapes = [(5,) if axis is None else (size, 5) if axis == 0 else (5, size) for axis in in_axes]
    args = [jax.random.normal(jax.random.key(seed + n), shape) for n, shape in enumerate(shapes)]
    fun = rm.trace(program, *args).function("nothing_saveable", at=f"vmap(body) in {parts}")
    wrt = (0, 1, 2)
    assert_close(jax.value_and_grad(fun, wrt)(*args), jax.value_and_grad(program, wrt)(*args))


def test_a_vmap_of_which_a_call_makes_little_is_not_tried():
    def row(w, x):
        return jnp.sin(x @ w)

    def loss(w, x):
        for _ in range(20):
            x = jax.vmap(row, (None, 0))(w, x)
        return x.sum()

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (256, 64))]
    fit = rm.trace(loss, *shapes).fit("1 MiB", compile=False)
    assert any("one call makes less than a tenth of all: vmap(row)" in sentence for sentence in fit.not_tried)
    assert not any("vmap" in choice.at for choice in fit.tried)
