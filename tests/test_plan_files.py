"""Plan files: what is written in one process is applied in another, and a file that is no plan is refused."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic.records import Plan, PlannedValue, RematError
from remat_magic.records.base import write
from tests.plan_helpers import transformer
from tests.programs import PROGRAMS, f32

# ------------------------------------------------------------------------------------------------- from here to there


@pytest.mark.parametrize("name", ["attention", "nested_scan"])
def test_a_plan_is_the_same_after_a_file(name, tmp_path):
    fun, args = PROGRAMS[name]
    plan = rm.trace(fun, *args).plan(0.6)
    assert plan.names
    plan.save(tmp_path / "plan.json")
    again = rm.load_plan(tmp_path / "plan.json")
    assert again == plan == Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    report = rm.trace(fun, *args).report(again)
    assert (report.saved_bytes, report.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)


MODEL = """
import functools
import jax, jax.numpy as jnp

def layer(w, x):
    h = jnp.tanh(x @ w)
    return jnp.sin(h) * x

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def block(w, x):
    return layer(w, jnp.exp(x))

def loss(ws, x, calls=3):
    for w in ws:
        x = layer(w, x)
    for _ in range(calls):
        x = block(ws[0], x)
    return jnp.sum(x ** 2)

WS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2
X = jax.ShapeDtypeStruct((4, 16), jnp.float32)
"""

APPLY = """
import json, sys
import jax, jax.numpy as jnp
import remat_magic as rm
from model import loss
plan = rm.load_plan(sys.argv[1])
planned = plan.apply(loss)
ws = [jnp.full((16, 16), 0.01 * (i + 1)) for i in range(2)]
x = jnp.linspace(-1, 1, 64).reshape(4, 16)
value, gradients = jax.jit(jax.value_and_grad(planned))(ws, x)
report = rm.trace(planned, ws, x).report("as_written")
print(json.dumps([float(value), [g.tolist() for g in gradients], report.saved_bytes, report.recomputed_flops]))
"""


def in_another_process(program, *args, cwd):
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, cwd=cwd, timeout=400
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_training_script_applies_the_plan_of_a_notebook(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    names = {}
    exec(MODEL, names)
    trace = rm.trace(names["loss"], names["WS"], names["X"])
    plan = trace.plan((trace.report("none", "block").saved_bytes + trace.report(at="block").saved_bytes) // 2, "block")
    assert plan.names
    plan.save(tmp_path / "plan.json")
    value, gradients, again, recomputed = in_another_process(APPLY, "plan.json", cwd=tmp_path)
    assert (again, recomputed) == (plan.saved_bytes, plan.recomputed_flops)
    ws = [jnp.full((16, 16), 0.01 * (i + 1)) for i in range(2)]
    expected = jax.value_and_grad(names["loss"])(ws, jnp.linspace(-1, 1, 64).reshape(4, 16))
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradients, expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_plan_is_applied_without_a_trace():
    fun, args = transformer(2, site=True)
    trace = rm.trace(fun, *args)
    plan = trace.plan("50%", "sites")
    assert plan.names
    again = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (again.saved_bytes, again.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    # Other batches, and under another transformation: the same values and gradients.
    chance = np.random.default_rng(0)
    params, x = jax.tree.map(lambda leaf: chance.normal(0, 0.1, leaf.shape).astype("f4"), args)
    batches = jnp.stack([x[:2], x[:2] * 2])
    for function in (plan.apply(fun), trace.function(plan)):
        both = jax.jit(jax.vmap(jax.value_and_grad(function), in_axes=(None, 0)))(params, batches)
        expected = jax.jit(jax.vmap(jax.value_and_grad(fun), in_axes=(None, 0)))(params, batches)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both, expected)


def test_a_plan_that_is_a_policy_of_jax_is_applied():
    fun, args = PROGRAMS["three_layers"]
    plan = rm.trace(fun, *args).plan(1.0)
    assert not plan.names
    applied = rm.trace(Plan.from_json(plan.to_json()).apply(fun), *args).report("as_written")
    assert applied.saved_bytes == plan.saved_bytes


# ------------------------------------------------------------------------------------------------- changed functions


def small(w, x):
    for _ in range(3):
        h = x @ w
        x = jnp.sin(h) * jnp.cos(h)
    return x.sum()


def test_a_plan_serves_other_shapes_and_refuses_other_operations():
    plan = rm.trace(small, f32(64, 64), f32(64)).plan(3 * 256)
    # The three products, from which sine and cosine are cheap.
    assert [value.primitive for value in plan.names] == ["dot_general"] * 3
    taller = rm.trace(plan.apply(small), f32(64, 64), f32(5, 64)).report("as_written")
    assert [r.shape for r in taller.residuals if r.kind == "intermediate"] == [(5, 64)] * 3

    def changed(w, x):
        return jnp.exp(small(w, x))

    trace = rm.trace(changed, f32(64, 64), f32(64))
    for refused in (plan, dataclasses.replace(plan, names=(PlannedValue("x", 1),))):
        with pytest.raises(RematError, match=r"other operations than changed does now: make it anew with trace\.plan"):
            trace.report(refused)
        with pytest.raises(RematError, match="make it anew"):
            jax.make_jaxpr(refused.apply(changed))(jnp.ones((64, 64)), jnp.ones(64))
    own = rm.trace(small, f32(64, 64), f32(64))
    with pytest.raises(RematError, match="make it anew"):  # the operations are the same, but no value has this name
        own.report(dataclasses.replace(plan, names=(PlannedValue("x", 1),)))
    with pytest.raises(RematError, match="no checkpoint site"):
        own.report(dataclasses.replace(plan, at="nowhere"))


def test_reports_of_a_plan_do_not_show_the_names_it_gave():
    fun, args = PROGRAMS["named_tanh"]
    trace = rm.trace(fun, *args)
    report = trace.report(trace.plan(32, "function"))
    assert {row.name for row in (*report.residuals, *report.recomputed)} <= {None, "h"}
    assert "remat_magic" not in "".join(trace.names)


def test_names_of_the_program_make_code():
    def fun(w, x):
        h = checkpoint_name(x @ w, "h")
        return jnp.sum(jnp.sin(h) * jnp.cos(h))  # autodiff alone saves four times as much

    plan = rm.trace(fun, f32(64, 64), f32(64)).plan(256)
    assert [value.name for value in plan.names] == ["h"]
    assert "save_only_these_names('h')" in plan.code
    # Where no name of the program's own reaches, there is nothing to paste.
    assert rm.trace(small, f32(64, 64), f32(64)).plan(3 * 256).code == ""


# ------------------------------------------------------------------------------------------------------ what is no plan


def good():
    value = PlannedValue("remat_magic/value 1", 16, 1, "f32[4]", "sin")
    plan = Plan("f", "function", "plan(16)", 16, 16, 0, 0, names=(value,), fingerprint="0" * 16)
    return json.loads(plan.to_json())


def with_plan(**fields):
    data = good()
    data["plan"] |= fields
    return data


def with_value(**fields):
    data = good()
    data["plan"]["names"][0] |= fields
    return data


def without(field):
    data = good()
    del data["plan"][field]
    return data


REFUSED = {
    "no text": 3,
    "empty": "",
    "no JSON": "{",
    "Python": "__import__('os').abort()",
    "a list": "[]",
    "nothing": "null",
    "NaN": json.dumps(with_plan(solve_seconds=float("nan"))),
    "infinite": json.dumps(with_plan(solve_seconds=float("inf"))),
    "overflow": json.dumps(with_plan(solve_seconds=0.25)).replace("0.25", "1e999"),
    "huge": json.dumps(with_plan(saved_bytes=2**63)),
    "too many digits": json.dumps(with_plan(saved_bytes=12345)).replace("12345", "9" * 5000),
    "nested deep": '{"format": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "names nested deep": json.dumps(with_plan(names="X")).replace('"X"', "[" * 500 + "]" * 500),
    "another format": json.dumps(good() | {"format": "pickle"}),
    "version 1": json.dumps(good() | {"version": 1}),
    "version true": json.dumps(good() | {"version": True}),
    "version 2.0": json.dumps(good() | {"version": 2.0}),
    "no version": json.dumps({k: v for k, v in good().items() if k != "version"}),
    "more beside": json.dumps(good() | {"run": "this"}),
    "no plan": json.dumps({k: v for k, v in good().items() if k != "plan"}),
    "plan is a list": json.dumps(good() | {"plan": []}),
    "missing": json.dumps(without("names")),
    "unknown": json.dumps(with_plan(extra=1)),
    "text for a number": json.dumps(with_plan(budget_bytes="16")),
    "bool for a number": json.dumps(with_plan(budget_bytes=True)),
    "fraction of a byte": json.dumps(with_plan(budget_bytes=1.5)),
    "negative": json.dumps(with_plan(budget_bytes=-1)),
    "null": json.dumps(with_plan(at=None)),
    "escape sequence": json.dumps(with_value(name="\x1b[2J")),
    "null character": json.dumps(with_plan(function="f\0")),
    "new line": json.dumps(with_plan(at="function\nx")),
    "text direction": json.dumps(with_value(name="\u202eevil")),
    "half a surrogate": json.dumps(with_value(name="\ud800")),
    "twice": json.dumps(with_plan(names=good()["plan"]["names"] * 2)),
    "number": json.dumps(with_value(number=1)),
    "an expression": json.dumps(with_plan(names=[], policy="__import__('os').abort()")),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_no_plan_is_refused_in_one_sentence(text, tmp_path):
    with pytest.raises(RematError) as caught:
        Plan.from_json(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert message.isprintable()
    if isinstance(text, str):
        (tmp_path / "plan.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(RematError):
            rm.load_plan(tmp_path / "plan.json")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    assert Plan.from_json(json.dumps(good())).names[0].primitive == "sin"  # or the refusals above would say nothing
    (tmp_path / "plan.json").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(RematError, match="no UTF-8"):
        rm.load_plan(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        rm.load_plan(tmp_path / "none.json")


def test_a_file_is_written_whole_and_nothing_else_is_touched(tmp_path):
    plan, neighbour, path = Plan.from_json(json.dumps(good())), tmp_path / "plan.json.part", tmp_path / "plan.json"
    neighbour.write_text("mine")
    plan.save(path)
    assert rm.load_plan(path) == plan
    assert neighbour.read_text() == "mine"
    blocked = tmp_path / "folder"
    blocked.mkdir()
    with pytest.raises(RematError, match="could not be written"):
        plan.save(blocked)
    with pytest.raises(UnicodeEncodeError):  # half-written when it fails
        write(path, "a" * 2**20 + "\ud800")
    assert rm.load_plan(path) == plan
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "plan.json", "plan.json.part"]


def test_what_could_not_be_read_is_not_written(tmp_path):
    plan = Plan("f\x1b", "function", "none", 1, 1, 0, 0)
    with pytest.raises(RematError, match="control characters"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_policies_of_a_file_are_looked_up_and_never_run(tmp_path):
    fun, args = PROGRAMS["three_layers"]
    for policy in ("everything", "os", "dots_saveable_"):
        plan = Plan.from_json(json.dumps(with_plan(names=[], policy=policy)))
        with pytest.raises(RematError, match="is not a policy"):
            jax.make_jaxpr(plan.apply(fun))(*args)


def test_reading_a_plan_needs_no_jax(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(good()))
    program = """
        import json, sys
        import remat_magic as rm
        print(json.dumps([rm.load_plan("plan.json").at, "jax" in sys.modules]))
    """
    assert in_another_process(textwrap.dedent(program), cwd=tmp_path) == ["function", False]
