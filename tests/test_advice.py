"""Advice: each rule speaks where its fault is, with the figure that a retrace has, and is silent elsewhere."""

import functools
import inspect
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic import _jax, units
from remat_magic.advice.rules import lines_of_part
from remat_magic.views.headline import advice_html
from tests.benchmarks import named_models
from tests.programs import KINDS, PROGRAMS, f32

POLICIES = jax.checkpoint_policies
ROWS, WIDTH, CLASSES = 256, 32, 1024
LOGITS = ROWS * CLASSES


def shapes(dtype, *sizes):
    return tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)


@functools.cache
def blocks():
    """A transformer whose blocks are sites, the same trace for all tests that only read."""
    fun, args = named_models.transformer(2, 32, 16, 2, scanned=False)
    return rm.trace(fun, *args)


# ------------------------------------------------------------------------------------------------------- the programs


def tanh_net(w, x):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    return jnp.sum(jnp.sin(h @ w))


def sin_net(w, x):
    h = checkpoint_name(x @ w, "h")
    return jnp.sum(jnp.sin(jnp.tanh(h) @ w))


@functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("h"))
def _layer(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)


def outside(w, x):
    return _layer(w, checkpoint_name(x @ w, "h")).sum()


def inside(w, x):
    @functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("h"))
    def layer(x):
        return jnp.sin(jnp.tanh(checkpoint_name(x @ w, "h")) @ w)

    return layer(x @ w).sum()


def deep(w, x):
    for _ in range(6):
        x = jnp.sin(x @ w)
    return x.sum()


def shallow(w, x):  # a third less: the sine's argument is freed before its derivative is made
    return jnp.sum(jnp.sin(x @ w))


def unnamed(w, x):
    y = x @ w
    return jnp.sum(jnp.exp(jnp.sin(y) * y))


def its_part(w, x):
    return jnp.sum(jax.checkpoint(lambda y: jnp.exp(jnp.sin(y) * y))(x @ w))


def mixed(w, x):
    y = (x @ w).astype(jnp.float32)
    return jnp.sum(jnp.sin(y * jax.nn.softmax(y)))


def half(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w).astype(jnp.float32))


def scanned(ws, x, checkpointed=False):
    def body(c, w):
        return jnp.sin(jnp.tanh(c @ w) @ w), None

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if checkpointed else body, x, ws)[0].sum()


def waves(c, wavelet, size=0):
    """A carry that is nearly all that is saved; by hand in segments of ``size`` steps."""

    def step(state, s):
        u, before = state
        new = 2 * u - before + c**2 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u) + s
        return (new, u), new[::16, 3]

    start = jnp.zeros_like(c), jnp.zeros_like(c)
    if not size:
        return (jax.lax.scan(step, start, wavelet)[1] ** 2).sum()
    segment = jax.checkpoint(lambda state, some: jax.lax.scan(step, state, some))
    return (jax.lax.scan(segment, start, wavelet.reshape(-1, size))[1] ** 2).sum()


def recurrence(w, xs, checkpointed=False):
    def step(h, x):
        return jnp.tanh(h @ w + x), None

    return (jax.lax.scan(jax.checkpoint(step) if checkpointed else step, jnp.ones((8, 64)), xs)[0] ** 2).sum()


def update(params, m, x):
    def loss(params):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x).sum()

    grads = jax.grad(loss)(params)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    step = jax.tree.map(lambda m: m / (jnp.sqrt(m * m) + 1e-8), m)
    return jax.tree.map(lambda p, u: p - 0.1 * u, params, step), m


def norm(ps, x, mend=False):
    def part(h, n, g):
        return h * (n / (n.mean(-1, keepdims=True) + 1e-6)) * g + h

    for w, g in ps:
        h = jax.nn.gelu(x @ w, approximate=False)
        n = jnp.sqrt((h**2).sum(0, keepdims=True) + 1e-6)
        x = x + (jax.checkpoint(part) if mend else part)(h, n, g) @ w.T
    return (x**2).mean()


def twice(w, x, y):
    return LOSSES["log_softmax"](w, x, y) - LOSSES["log_softmax"](w, 2 * x, y)


def layers(x, w):
    def layer(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w.T)

    for _ in range(6):
        x = layer(x, w)
    return (x**2).sum()


def gains_nothing(x, w):
    def layer(x, w):
        return jnp.sin(x) + w[:1, :1]  # saves one value either way

    for _ in range(6):
        x = layer(x, w)
    return x.sum()


def of_rows(logits, y):
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0]


def by_hand(w, x, y):
    z = (x @ w).astype(jnp.float32)
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    return (jnp.log(jnp.exp(z).sum(-1)) - z[jnp.arange(ROWS), y]).mean()


def all_but_the_last(w, x, y):
    logits = jnp.sin(x).reshape(8, -1, WIDTH) @ w
    return of_rows(logits[:, :-1].reshape(-1, CLASSES), y[:-8]).mean()


@jax.custom_vjp
def _keeps_softmax(logits, y):
    return of_rows(logits, y).mean()


_keeps_softmax.defvjp(
    lambda logits, y: (_keeps_softmax(logits, y), (jax.nn.softmax(logits), y)),
    lambda kept, g: ((kept[0] - jax.nn.one_hot(kept[1], CLASSES)) * g / ROWS, None),
)


def attention(w, x, _):
    scores = (x @ w) @ (x @ w).T
    return (jax.nn.softmax(scores) @ x).sum() + (jnp.exp(scores - jax.nn.logsumexp(scores)) @ x).sum()


def small_logits(w, x, y):  # beside what else is saved
    return sum(jnp.sin(jnp.sin(x @ w)).sum() for _ in range(9)) + of_rows(x @ w[:, :64], y).mean()


def in_turns(w, x, y, checkpointed=False):
    def body(total, xy):
        return total + of_rows(xy[0] @ w, xy[1]).sum(), None

    turns = x.reshape(4, -1, WIDTH), y.reshape(4, -1)
    return jax.lax.scan(jax.checkpoint(body) if checkpointed else body, 0.0, turns)[0]


LOSSES = {
    "log_softmax": lambda w, x, y: -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], -1).mean(),
    "logsumexp": lambda w, x, y: of_rows(x @ w, y).mean(),
    "one_hot": lambda w, x, y: -(jax.nn.one_hot(y, CLASSES) * jax.nn.log_softmax(x @ w)).sum(-1).mean(),
    "one_hot in a product": lambda w, x, y: -jnp.vdot(jax.nn.one_hot(y, CLASSES), jax.nn.log_softmax(x @ w)),
    "log of a softmax": lambda w, x, y: -jnp.log(jax.nn.softmax(x @ w)[jnp.arange(ROWS), y]).mean(),
    "by hand": by_hand,
    "with a bias, a cap and a mask": lambda w, x, y: of_rows(
        jnp.where(jnp.arange(CLASSES) < CLASSES - 7, 30 * jnp.tanh((x @ w + w[0]) / 30), -1e9), y
    ).mean(),
    "vmap": lambda w, x, y: jax.vmap(lambda x, y: of_rows((x @ w)[None], y[None])[0])(x, y).mean(),
    "jit and checkpoint": lambda w, x, y: jax.jit(jax.checkpoint(lambda w, x: of_rows(x @ w, y).mean()))(w, x),
    "a training step": lambda w, x, y: jax.value_and_grad(LOSSES["logsumexp"])(w, x, y),
}

NET = f32(64, 64), f32(64)
DEEP = f32(16, 16), f32(512, 16)
SQUARE = f32(512, 64), f32(256, 512)
SCANNED = f32(8, 64, 64), f32(16, 64)
LAYERS = f32(512, 64), f32(64, 256)
WAVES = f32(64, 64), f32(100)
STEP = [f32(256, 256)] * 4, [f32(256, 256)] * 4, f32(8, 256)
NORM = [(f32(64, 256), f32(256))] * 3, f32(2000, 64)
HEAD = f32(WIDTH, CLASSES), f32(ROWS, WIDTH), *shapes("int32", (ROWS,))
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["h"], names_which_can_be_offloaded=[], offload_src="device", offload_dst="pinned_host"
)
BY_NAME = "save_only_these_names('h')"


def saved(policy, at="function"):
    """What a policy saves, as the figure of a finding."""
    return lambda trace: trace.report(policy, at).saved_bytes


def part_of_unnamed(trace):
    return trace.report().saved_bytes - rm.trace(its_part, *SQUARE).report().saved_bytes


def part_of_norm(trace):
    return trace.report().saved_bytes - rm.trace(functools.partial(norm, mend=True), *NORM).report().saved_bytes


def wide_bytes(trace):
    return sum(row.nbytes for row in trace.report().residuals if row.kind == "intermediate" and row.dtype == "f32")


def lower_peak(trace):
    there = next(finding for finding in trace.advice() if finding.policy)
    return trace.report().peak_bytes - trace.report(there.policy, there.at).peak_bytes


def by_hand_in_segments(trace):
    return trace.report().peak_bytes - rm.trace(functools.partial(waves, size=10), *WAVES).report().peak_bytes


def repeated(policy):
    return lambda trace: trace.report(policy, "function").recomputed_flops


def row(fun, args, policy="as_written", at=None, **figures):
    """A program with a policy at a place, and for each kind that must be found its figure: by hand, or by JAX."""
    return fun, args, policy, at, {kind.replace("_", "-"): figure for kind, figure in figures.items()}


HH = POLICIES.save_only_these_names("hh")
HALVES = shapes("bfloat16", (64, 64), (32, 64))
with_checkpoint = functools.partial(scanned, checkpointed=True)

TABLE = {
    # The matmul, 2 * 64 * 64, and the tanh run again.
    "a name that there is not": row(tanh_net, NET, HH, unknown_name=None, only_costs=repeated("nothing_saveable")),
    "the memories of an offload are no names": row(sin_net, NET, OFFLOAD),
    "a name outside its checkpoint": row(outside, NET, unknown_name=None),
    "a name inside it": row(inside, NET),
    # The policy around the function sees it; the checkpoint inside is overruled, unless jax_remat3 keeps it in force.
    "a policy around both": row(
        outside, NET, BY_NAME, "function", changes_nothing=64 * 4, **({"unknown_name": None} if _jax.remat3() else {})
    ),
    "recomputed all the same": row(tanh_net, NET, BY_NAME, saved_in_vain=2 * 64 * 64),
    "saved to good effect": row(sin_net, NET, BY_NAME),
    "saves all": row(sin_net, NET, "everything_saveable", "function", changes_nothing=saved("none")),
    "a factory that ignores its names": row(
        tanh_net,
        NET,
        "save_anything_except_these_names('h')",
        "function",
        # jax_remat3 saves what the derivatives are made of, and makes them again: as many bytes, more FLOPs.
        **({} if _jax.remat3() else {"changes_nothing": saved("everything_saveable")}),
    ),
    "as written, nobody chose it": row(sin_net, NET),
    "a checkpoint around everything": row(
        deep, DEEP, "nothing_saveable", "function", only_costs=repeated("nothing_saveable")
    ),
    "which saves something": row(deep, DEEP, "dots_saveable", "function"),
    "which lowers the peak": row(shallow, (f32(8, 512), f32(64, 8)), "nothing_saveable", "function"),
    "cheap to have again": row(unnamed, SQUARE, cheap_to_recompute=part_of_unnamed),
    "its part has a checkpoint": row(its_part, SQUARE),
    "wider than the weights": row(mixed, HALVES, wide_residuals=wide_bytes, cheap_to_recompute=...),
    "as wide as the weights": row(half, HALVES),
    "wide weights": row(mixed, (f32(64, 64), f32(32, 64)), cheap_to_recompute=...),
    "a scan without a checkpoint": row(scanned, SCANNED, no_checkpoint_there=lower_peak),
    "a scan with a checkpoint": row(with_checkpoint, SCANNED),
    "layers without a checkpoint": row(layers, LAYERS, no_checkpoint_there=lower_peak),
    "layers with one": row(layers, LAYERS, "nothing_saveable", "layer"),
    "waves": row(waves, WAVES, steps_together=by_hand_in_segments),
    "a recurrence": row(recurrence, (f32(64, 64), f32(400)), steps_together=lower_peak),
    "a recurrence with a checkpoint": row(
        functools.partial(recurrence, checkpointed=True), (f32(64, 64), f32(400)), steps_together=lower_peak
    ),
    "a peak in the update": row(update, STEP, peak_in_update=None),
    "a peak that is not in it": row(update, (*STEP[:2], f32(4096, 256)), no_checkpoint_there=...),
    "a norm": row(norm, NORM, cheap_to_recompute=part_of_norm, no_checkpoint_there=lower_peak),
    "a loss of two calls": row(twice, HEAD, softmax_of_logits=..., no_checkpoint_there=...),
    "layers that gain by two together": row(gains_nothing, LAYERS, steps_together=lower_peak),
    "a softmax that is no loss": row(attention, HEAD, cheap_to_recompute=...),
    "nor this": row(lambda w, x, _: jax.nn.softplus(x @ w).sum(), HEAD),
    "logits that take little": row(small_logits, HEAD),
    "logits in a loop": row(in_turns, HEAD, softmax_of_logits=lower_peak),
    "all but the last of the logits": row(all_but_the_last, HEAD, softmax_of_logits=...),
    "a rule that keeps the softmax": row(lambda w, x, y: _keeps_softmax(x @ w, y), HEAD, softmax_of_logits=...),
    **{loss: row(fun, HEAD, softmax_of_logits=...) for loss, fun in LOSSES.items()},
    "vmap": row(LOSSES["vmap"], HEAD, softmax_of_logits=lower_peak),  # in parts
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_said_of_a_program(name):
    fun, args, policy, at, expected = TABLE[name]
    trace = rm.trace(fun, *args)
    findings = trace.advice(policy, at)
    assert {finding.kind for finding in findings} == set(expected)
    assert len({finding.sentence for finding in findings}) == len(findings)
    for finding in findings:
        figure = expected[finding.kind]
        if figure is not ...:
            right = figure(trace) if callable(figure) else figure
            assert finding.figure == (None if right is None else pytest.approx(right, rel=1e-5))
        assert finding.figure is None or finding.figure > 0


# ------------------------------------------------------------------------------------------ the lines, and the mends


@pytest.mark.parametrize(
    ("name", "kind", "line"),
    [
        ("a name outside its checkpoint", "unknown-name", "return _layer("),
        ("recomputed all the same", "saved-in-vain", "jnp.tanh"),
        ("cheap to have again", "cheap-to-recompute", "jnp.exp"),
        ("layers without a checkpoint", "no-checkpoint-there", "def layer"),
        ("log_softmax", "softmax-of-logits", '"log_softmax"'),
    ],
)
def test_the_line_of_a_finding(name, kind, line):
    fun, args, policy, at, _ = TABLE[name]
    (finding,) = (finding for finding in rm.trace(fun, *args).advice(policy, at) if finding.kind == kind)
    lines, first = inspect.getsourcelines(fun)
    assert line in lines[finding.source.line - first]


def test_the_mend_of_a_name():
    trace = rm.trace(tanh_net, *NET)
    for name, mend in {"hh": "Write 'h'.", "f(x)": "Use one of 'h'.", "it's": "Use one of 'h'."}.items():
        findings = trace.advice(POLICIES.save_only_these_names(name))
        (finding,) = (finding for finding in findings if finding.kind == "unknown-name")
        assert repr(name) in finding.sentence
        assert finding.mend == mend


def test_the_place_of_a_mend_is_what_jax_does_there():
    trace = rm.trace(layers, *LAYERS)
    first = trace.advice()[0]
    now, then = trace.report(), trace.report(first.policy, at=first.at)
    assert first.figure > 0.2 * now.peak_bytes
    assert units.nbytes(then.peak_bytes) in first.sentence
    assert f"{then.repeated_flops / now.forward_flops:.0%} of the forward pass is repeated (now 0%)" in first.sentence
    # The bytes of a scan with the mend are those of the carry, once an iteration.
    assert rm.trace(functools.partial(scanned, checkpointed=True), *SCANNED).report().saved_bytes == 8 * 16 * 64 * 4


def test_a_stale_trace_is_told_with_its_cure():
    names = {"jnp": jnp}
    exec("def inner(x): return jnp.sin(x)\ndef outer(x): return inner(x)\n", names)
    jitted = jax.jit(names["outer"])
    jax.make_jaxpr(lambda x: jitted(x).sum())(jnp.ones(4))
    exec("def inner(x): return jnp.cos(x)", names)
    (finding,) = rm.trace(lambda x: jitted(x).sum(), f32(4)).advice()
    assert finding.kind == "stale-trace"
    assert "outer" in finding.sentence
    assert "jax.clear_caches()" in finding.mend


# ---------------------------------------------------------------------------------------------------------- the logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["log_softmax", "by hand", "a training step"])
def test_what_the_softmax_of_the_logits_takes(name, dtype):
    trace = rm.trace(LOSSES[name], *shapes(dtype, (WIDTH, CLASSES), (ROWS, WIDTH)), HEAD[2])
    first, report = trace.advice()[0], trace.report()
    assert first.kind == "softmax-of-logits"
    # What it says is saved, and held at the peak, are the values of the logits' size.
    saved, alive = _of_logits(row for row in report.residuals if row.kept), _of_logits(trace.timeline().alive)
    assert first.stake == max(saved, alive) >= 0.6 * report.peak_bytes
    assert f"{units.nbytes(alive)} of the {units.nbytes(report.peak_bytes)} at the estimated peak" in first.sentence
    assert (f"{units.nbytes(saved)} of the {units.nbytes(report.saved_bytes)} saved" in first.sentence) == (saved > 0)


def _of_logits(values):
    sizes = ((value, re.findall(r"\d+", value.type.partition("[")[2])) for value in values)
    return sum(value.nbytes for value, shape in sizes if math.prod(map(int, shape)) == LOGITS)


def head(w, x, y):
    return of_rows(x @ w, y).mean()


def with_head(w, x, y):
    return head(w, jnp.sin(x), y)


def small_step(fun, w, x, y):
    value, grad = jax.value_and_grad(lambda w: fun(w, jnp.sin(x), y))(w)
    return w - grad, value


@pytest.mark.parametrize(
    ("fun", "at"),
    [
        (with_head, "head in 16"),
        (functools.partial(small_step, head), "batch in 16"),
        (functools.partial(small_step, lambda w, x, y: of_rows(x @ w, y).mean()), "batch in 16"),
        (in_turns, "body"),
    ],
)
def test_the_choice_that_helps_against_the_logits_is_said_once(fun, at):
    trace = rm.trace(fun, *HEAD)
    (finding,) = trace.advice()
    assert (finding.kind, finding.at) == ("softmax-of-logits", at)
    then = trace.report(finding.policy, at)
    assert finding.figure == trace.report().peak_bytes - then.peak_bytes > 0
    assert finding.code == then.code.partition("  # ")[0]
    assert finding.code in finding.mend
    assert _of_logits(trace.timeline(finding.policy, at).alive) == 0


def test_a_checkpoint_elsewhere_is_none_against_the_logits():
    def layer(x, w):
        return jnp.sin(jnp.tanh(jnp.sin(x @ w))) @ w.T

    def deep(ws, w, x, y):
        return head(w, functools.reduce(layer, ws, x), y)

    trace = rm.trace(deep, [f32(WIDTH, 512)] * 12, *HEAD)
    at = {finding.kind: finding.at for finding in trace.advice()}
    assert at == {"no-checkpoint-there": "layer", "cheap-to-recompute": ""}


def test_what_is_donated_is_advised_with_its_figure():
    trace = rm.trace(update, *STEP)
    (finding,) = trace.advice(device="TPU v5e")
    donating = next(choice for choice in trace.fit("TPU v5e", compile=False).tried if choice.donate)
    assert finding.code.startswith("jax.jit(update, donate_argnums=(0, 1)")  # as the source jits it below
    assert finding.figure == trace.report(device="TPU v5e").peak_bytes - donating.needed_bytes > 0
    both = {"donate_argnums": (0, 1)}  # what the source has, is no advice
    donates = rm.trace(jax.jit(update, **both), *STEP).advice(device="TPU v5e")
    assert not any(finding.code for finding in donates)


# ---------------------------------------------------------------------------------------------------------- in general


@pytest.mark.parametrize("policy", ["as_written", POLICIES.save_only_these_names("contex"), "dots_saveable"])
def test_what_has_most_at_stake_is_said_first(policy):
    trace = blocks()
    findings, report = trace.advice(policy), trace.report(policy)
    assert [finding.share for finding in findings] == sorted((finding.share for finding in findings), reverse=True)
    for finding in findings:
        flops = finding.figure / (report.forward_flops + report.backward_flops) if finding.unit == "FLOPs" else 0
        assert finding.share == min(max(flops, (finding.stake or 0) / report.peak_bytes), 1)
        assert json.loads(json.dumps(finding.to_dict()))["stake"] == finding.stake
        if finding.share:
            assert f"({units.percent(finding.share, 1)})</b> at stake" in advice_html([finding])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "complex_numbers"])
def test_every_program_can_be_advised_on(name):
    fun, args = PROGRAMS[name]
    trace = rm.trace(fun, *args)
    for policy in ("as_written", "dots_saveable"):
        for finding in trace.advice(policy):
            # A rule without a figure says that something has no effect.
            assert (
                (finding.figure is None)
                == (finding.unit == "")
                == (finding.kind in ("unknown-name", "stale-trace", "peak-in-update"))
            )


def test_a_plan_needs_no_advice():
    assert not blocks().advice(blocks().plan(0.5))
    with pytest.raises(rm.RematError, match="H1000"):
        blocks().advice(device="H1000")


def test_advice_with_code_has_a_button():
    advice = rm.trace(layers, *LAYERS).advice()
    html = advice_html(advice)
    # What is code looks like code, and is copied without the words around it: a decorator that Python takes.
    (code,) = re.findall(r'data-action="copy" data-text="([^"]*)"', html)
    assert code == advice[0].code == advice[0].mend.removeprefix("Write ").removesuffix(" on layer.")
    assert f"<code>{code}</code>" in html
    assert "<button" not in advice._repr_html_()  # where there is no widget to hear of it
    compile(f"{code}\ndef layer(): pass", "pasted", "exec")


@pytest.mark.parametrize(
    ("first", "last", "part"),
    [
        (3, 3, (3, 4)),  # a statement is taken whole
        (2, 3, None),  # a loop is more than assignments
        (4, 5, None),  # the end of a body, and what stands after the loop
        (5, 6, (5, 6)),
        (7, 7, None),  # an item of an argument is changed
    ],
)
def test_lines_that_can_be_put_in_a_function_of_their_own(first, last, part, tmp_path):
    lines = [
        "def f(p, xs):",
        "    for x in xs:",
        "        x = (x @",
        "             p)",
        "    y = x + 1",
        "    z = y * x",
    ]
    file = tmp_path / "part.py"
    file.write_text("\n".join([*lines, "    p[0] = z", "    return z", ""]))
    assert lines_of_part(str(file), first, last) == part


@pytest.mark.parametrize("device", [None, "TPU v5e", "H100 SXM"])
@pytest.mark.parametrize("width", [64, 512])
def test_lower_is_said_without_a_doubt_only_of_ranges_that_do_not_overlap(device, width):
    def layer(x, w):
        return jnp.sin(jnp.tanh(x @ w)), None

    def loss(ws, x):
        return jax.lax.scan(layer, x, ws)[0].sum()

    trace = rm.trace(loss, f32(24, width, width), f32(4096, width))
    (found,) = (it for it in trace.advice(device=device) if it.kind in ("no-checkpoint-there", "steps-together"))
    with_it, without = trace.report(found.policy, found.at, device=device), trace.report(device=device)
    assert ("XLA may need as much" in found.sentence) == (with_it.peak_high >= without.peak_low)
