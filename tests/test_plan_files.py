"""Plan files: what is written in one process is applied in another, and a file that is no plan is refused."""

import dataclasses
import importlib.util
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
from remat_magic import _jax
from remat_magic.records import Plan, PlannedValue, RematError
from remat_magic.records.base import write
from tests.benchmarks import named_models
from tests.programs import PROGRAMS, f32

# ------------------------------------------------------------------------------------------------- from here to there


@pytest.mark.each_once
@pytest.mark.parametrize("name", ["attention", "nested_scan", "three_layers", "scanned_checkpoint"])
@pytest.mark.parametrize("separately", [False, True])
def test_a_plan_is_the_same_after_a_file(name, separately, tmp_path):
    fun, args = PROGRAMS[name]
    plan = rm.trace(fun, *args).plan(0.6, separately=separately)
    plan.save(tmp_path / "plan.json")
    again = rm.load_plan(tmp_path / "plan.json")
    assert again == plan
    report = rm.trace(fun, *args).report(again)
    assert (report.saved_bytes, report.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]  # nothing is left beside it


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


@pytest.mark.parametrize("at", [pytest.param("function", marks=pytest.mark.slow), "block"])
def test_a_training_script_applies_the_plan_of_a_notebook(tmp_path, at):
    (tmp_path / "model.py").write_text(MODEL)
    save = (
        "import sys, json, remat_magic as rm, model\n"
        "trace = rm.trace(model.loss, model.WS, model.X)\n"
        "plan = trace.plan(int((trace.preview('none', sys.argv[2]).saved_bytes"
        " + trace.preview('nothing_saveable', sys.argv[2]).saved_bytes) / 2), sys.argv[2])\n"
        "plan.save(sys.argv[1])\n"
        "print(json.dumps([plan.saved_bytes, plan.recomputed_flops, len(plan.names), plan.at]))\n"
    )
    saved, flops, values, where = in_another_process(save, "plan.json", at, cwd=tmp_path)
    assert values
    assert where == at
    value, gradients, again, recomputed = in_another_process(APPLY, "plan.json", cwd=tmp_path)
    if not (_jax.remat3() and at == "function"):  # where sites inside keep their own policy, which a report tells
        assert (again, recomputed) == (saved, flops)
    loss = loss_of(MODEL, tmp_path, "model")
    ws = [jnp.full((16, 16), 0.01 * (i + 1)) for i in range(2)]
    expected = jax.value_and_grad(loss)(ws, jnp.linspace(-1, 1, 64).reshape(4, 16))
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradients, expected[1], rtol=1e-4, atol=1e-6)


def test_a_plan_is_applied_without_a_trace():
    fun, args = named_models.transformer(2, 32, 16, 2, scanned=True)
    trace = rm.trace(fun, *args)
    plan = trace.plan("300 kB", "sites")
    assert plan.names
    again = rm.trace(plan.apply(fun), *args).report("as_written")
    assert (again.saved_bytes, again.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    # Other batches, and under another transformation.
    params, x = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), args)
    both = jax.jit(jax.vmap(plan.apply(fun), in_axes=(None, 0)))(params, jnp.stack([x[:1], x[:1] * 2]))
    compiled = jax.jit(fun)
    np.testing.assert_allclose(both, [compiled(params, x[:1]), compiled(params, x[:1] * 2)], rtol=1e-5)


def test_a_plan_that_is_a_policy_of_jax_is_applied():
    fun, args = PROGRAMS["three_layers"]
    plan = rm.trace(fun, *args).plan(1.0)
    assert not plan.names
    applied = rm.trace(Plan.from_json(plan.to_json()).apply(fun), *args).report("as_written")
    assert applied.saved_bytes == plan.saved_bytes


@pytest.mark.parametrize("in_rule", [False, True])
def test_a_plan_that_is_a_policy_of_the_programs_own_names_is_applied(in_rule):
    def named(x):
        return checkpoint_name(jnp.sin(x), "h")

    if in_rule:  # which only differentiating shows
        rule, named = named, jax.custom_vjp(jnp.sin)
        named.defvjp(lambda x: (rule(x), rule(x)), lambda h, g: (g * h,))

    def loss(w, x, flag):
        for _ in range(2):
            x = jax.lax.cond(flag, lambda x: jnp.tanh(named(x @ w) @ w), jnp.tanh, x)
        return x.sum()

    args = jnp.eye(8), jnp.ones((4, 8)), jnp.bool_(True)
    trace = rm.trace(loss, *args)
    key = "save_only_these_names('h')"
    plan = dataclasses.replace(trace.plan("100%"), policy=key, names=(), at="function")
    applied = Plan.from_json(plan.to_json()).apply(loss)
    assert rm.trace(applied, *args).report("as_written").saved_bytes == trace.report(key, "function").saved_bytes
    np.testing.assert_allclose(jax.jit(applied)(*args), loss(*args), rtol=1e-6)
    if not in_rule:
        with pytest.raises(RematError, match="'h' is not a checkpoint name of <lambda>; it has none"):
            jax.make_jaxpr(plan.apply(lambda w, x, flag: (x @ w).sum()))(*args)


def test_only_functions_are_planned():
    with pytest.raises(RematError, match="applied to a function, not to int"):
        Plan("f", "function", "none", 1, 1, 0, 0).apply(3)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------- changed functions

BEFORE = """
import jax, jax.numpy as jnp

def layer(w, x):
    h = x @ w
    return jnp.sin(h) * jnp.cos(h)

def loss(w, x):
    for _ in range(3):
        x = layer(w, x)
    return x.sum()
"""


def loss_of(text, folder, name):
    """A module's loss, imported from a file, since the lines of a function are read from its file."""
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made.loss


ARGS = (f32(64, 64), f32(64))


def planned(folder):
    plan = rm.trace(loss_of(BEFORE, folder, "before"), *ARGS).plan(3 * 256)
    # The three products, from which sine and cosine are cheap.
    assert [(v.primitive, v.occurrence, v.occurrences) for v in plan.names] == [("dot_general", i, 3) for i in range(3)]
    return plan


def test_a_change_elsewhere_does_no_harm(tmp_path):
    plan = planned(tmp_path)
    fun = loss_of(BEFORE.replace("return x.sum()", "return jnp.exp(x).sum() + jnp.sum(w * 2)"), tmp_path, "after")
    report = rm.trace(fun, *ARGS).report(plan)
    assert [r.primitive for r in report.residuals if r.kind == "intermediate"] == ["dot_general"] * 3
    assert any("found again by their lines" in note for note in report.notes)
    applied = rm.trace(plan.apply(fun), *ARGS).report("as_written")
    assert (applied.saved_bytes, applied.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"h = x @ w": "h = jnp.tanh(x) @ w"}, "the dot_general of `h = x @ w` in layer is not made any more"),
        ({"layer": "block", "return x.sum()": "return jnp.exp(x).sum()"}, "in layer is not made any more"),
        ({"range(3)": "range(4)"}, "is made 4 times now, where the plan knows it 3 times"),
        ({"    for _": "    x = jnp.stack([x, x])\n    for _"}, r"is f32\[2,64\] now, where the plan knows f32\[64\]"),
        ({"    for _": "    x, w = jnp.bfloat16(x), jnp.bfloat16(w)\n    for _"}, r"is bf16\[64\] now"),
    ],
)
def test_what_differs_is_told(tmp_path, changes, says):
    plan, text = planned(tmp_path), BEFORE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    fun = loss_of(text, tmp_path, "after")
    with pytest.raises(RematError, match=f"made for another program than loss is now: .*{says}.*make it anew"):
        rm.trace(fun, *ARGS).report(plan)
    with pytest.raises(RematError, match=says):
        jax.make_jaxpr(plan.apply(fun))(*ARGS)


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
    "version 2": json.dumps(good() | {"version": 2}),
    "version true": json.dumps(good() | {"version": True}),
    "version 1.0": json.dumps(good() | {"version": 1.0}),
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
    "occurrence": json.dumps(with_value(occurrence=1)),
    "number": json.dumps(with_value(number=1)),
    "an expression": json.dumps(with_plan(names=[], policy="__import__('os').abort()")),
}


def test_a_file_may_lack_what_came_later():
    older = good()
    for value in older["plan"]["names"]:
        del value["number"], value["alike"]
    assert Plan.from_json(json.dumps(older)) == Plan.from_json(json.dumps(good()))


@pytest.mark.parametrize(
    ("key", "of", "label"),
    [
        ("plan(120795955)", "saved", "plan within 121 MB"),
        ("plan(peak 120795955)", "peak", "plan within 121 MB of peak"),
        (
            "plan(120795955 at sites, one by one, seconds on H100 SXM)",
            "saved",
            "plan within 121 MB at sites, one by one, seconds on H100 SXM",
        ),
        ("dots_saveable + sin In[3]:4", "saved", "dots_saveable + sin In[3]:4"),
    ],
)
def test_a_plan_of_a_file_without_labels_goes_by_its_budget(key, of, label):
    older = with_plan(policy=key, of=of, budget_bytes=120795955)
    del older["plan"]["label"]
    plan = Plan.from_json(json.dumps(older))
    assert (plan.policy, plan.label) == (key, label)
    assert Plan.from_json(plan.to_json()) == plan


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


def test_the_good_one_is_read():  # or the refusals above would say nothing
    assert Plan.from_json(json.dumps(good())).names[0].primitive == "sin"


def test_bytes_that_are_no_text_are_refused(tmp_path):
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
