"""Bad input, with the real engine: one sentence that names the mend, and the namespace as a plain cell leaves it."""

import jax
import pytest
from IPython.core.error import UsageError

from remat_magic import devices
from remat_magic.views import format as fmt

SETUP = """
import jax, jax.experimental, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
x, n, text = jnp.ones(3), 3, "words"
def loss(x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x), "h")))
"""


@pytest.fixture
def user(cells):
    cells.ok(SETUP)
    return cells


@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ("-p dots_savable", "did you mean 'dots_saveable'?"),
        ("-p save_only_these_names", "is a factory: call it, as in save_only_these_names('h')."),
        ("-p 3", "is not a policy"),
        ("-p x", "a policy is a key such as 'dots_saveable' or a policy function"),
        ("loss(x", "is not a Python expression"),
    ],
)
def test_mistakes_in_the_line_stop_before_the_cell_runs(user, line, mend):
    before = set(user.ns)
    assert mend in user.run(f"%%remat {line}", "ran = True", "loss(x)").error_in_exec.args[0]
    assert {name for name in set(user.ns) - before if not name.startswith("_")} == set()


@pytest.mark.parametrize(
    ("line", "last", "mend"),
    [
        ("", "y = 3", "nothing to inspect: end the cell with a call"),
        ("--names nope", "loss(x)", "'nope' is not a checkpoint name of loss; it has 'h'."),
        ("--site nope", "loss(x)", "loss has no checkpoint site 'nope'"),
        ("--wrt nope", "loss(x)", "--wrt nope is not an argument of this call of loss: it has 'x'."),
        ("--wrt n", "(lambda x, n: x)(x, n)", "pass floats, or leave it out of --wrt."),
        ("--at sites", "loss(x)", "loss has no checkpoint site: use --at function."),
        ("--wrt -2", "loss(x)", "--wrt -2 asks for an argument that the call does not have: it has 1."),
        ("--wrt 3", "loss(x)", "asks for an argument that the call does not have"),
        ("", "loss(x, x)", "cannot be called so"),
        (
            "--wrt rate",
            "jax.jit(lambda x, rate: x * rate, static_argnames='rate')(x, rate=0.5)",
            "say what is, such as --wrt x.",
        ),
        ("", "print(x)", "end the cell with a call"),
        ("", "(lambda x: x > 0)(x)", "cannot be differentiated: it returns bool[3]"),
        (
            "",
            "(lambda x: 'no')(x)",
            "returns a str, which is not an array: return arrays, or return it as auxiliary data and write the call as "
            "jax.grad(f, has_aux=True)(...).",
        ),
        ("--apply", "(lambda x: x)(x)", "has no plain name to rebind"),
    ],
)
def test_other_mistakes_are_said_after_the_cell_has_run(user, line, last, mend):
    result = user.run(f"%%remat {line}", "ran = True", last)
    assert mend in str(result.error_in_exec)
    assert isinstance(result.error_in_exec, UsageError)
    assert user.err == f"UsageError: {result.error_in_exec}\n"
    assert "Traceback" not in user.out
    assert user.ns["ran"] is True


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ('--device "RTX 4090"', "loss(x)"),
        ('--device "TPU v5e:2x4" --mesh data=4', "loss(x)"),
        ("--mesh data=x", "loss(x)"),
        ("-p save_only_these_names('nope')", "loss(x)"),
        ("--at nope", "loss(x)"),
        ("--gradient nope", "loss(x)"),
        ("--apply", "(lambda x: x)(x)"),
    ],
)
@pytest.mark.parametrize("text", ["", "--text "])
def test_what_fails_fails_before_anything_is_shown_or_kept(user, text, line, last):
    user.complaint(f"%%remat {text}-o w {line}", last)
    assert user.out == ""
    assert "w" not in user.ns


def test_a_device_without_its_compiler_is_estimated_and_how_to_install_it_is_said(user, monkeypatch):
    monkeypatch.setattr(devices.device, "_is_installed", lambda module: False)
    for device, extra in (("H100 SXM", "cuda"), ("TPU v5e", "tpu"), ("TPU v4", "")):
        user.ok(f'%%remat --text --device "{device}" -o w', "loss(x)")
        report = user.ns["w"]._live.trace.report(device=device)
        first, second, *_ = user.out.splitlines()
        assert device in first
        about = fmt.about(report.peak_bytes, report.peak_low, report.peak_high)
        assert second.startswith(f"FITS  {about} of ")
        assert (f"pip install 'remat_magic[{extra}]'" if extra else "XLA has no way to compile for") in user.out
        assert user.ns.pop("w").policy == "as_written"
        user.ok(f'%remat --device "{device}" loss(x)')  # what a terminal shows of a widget
        assert device in user.out


def test_a_policy_that_the_cell_defines_is_judged_after_it(user):
    complaint = user.complaint("%%remat -p mine", "def mine(prim, *_, **__): raise ValueError('oh')", "loss(x)")
    assert "the policy mine raised ValueError" in complaint
    complaint = user.complaint("%%remat -p mine", "def mine(prim, *_, **__): return 'nonsense'", "loss(x)")
    assert "mine returned 'nonsense'" in complaint
    complaint = user.complaint("%%remat -p mine", "mine = 3", "loss(x)")
    assert "a policy is a key such as 'dots_saveable' or a policy function" in complaint


def test_policies_of_the_users_own_may_be_attributes_or_joined(user, remat2):
    user.ok(
        "import types", "def mine(prim, *_, **__): return prim.name == 'tanh'", "own = types.SimpleNamespace(mine=mine)"
    )
    for policy in ("mine", "own.mine", '"dots_saveable | mine"'):
        widget = user.ok(f"%remat -p {policy} loss(x)")
        assert widget.policy == policy.strip('"')
        assert widget.report.saved_bytes == 12  # tanh, f32[3]


def test_stale_traces_are_reported_by_name(user):
    user.ok(
        "def helper(x): return jnp.sin(x)",
        "@jax.jit",
        "def block(x): return helper(x)",
        "def outer(x): return jnp.sum(block(x))",
        "grads = jax.grad(outer)(x)",
    )
    widget = user.ok("%%remat", "def helper(x): return jnp.tanh(x)", "outer(x)")
    assert any("an older trace of block" in note for note in widget.report.notes)
    assert "an older trace of block" in user.out


def test_an_exception_of_the_function_is_shown_once_with_the_users_frames(user):
    result = user.run(
        "%%remat",
        "def inner(x):",
        "    return x @ jnp.ones((5, 5))",
        "def outer(x):",
        "    return inner(x)",
        "outer(x)",
    )
    assert isinstance(result.error_in_exec, TypeError)
    assert user.out.count("TypeError: ") == 1
    assert "----> 6 outer(x)" in user.out
    assert "----> 5     return inner(x)" in user.out
    assert "----> 3     return x @ jnp.ones((5, 5))" in user.out
    assert "/remat_magic/" not in user.out
    assert "/jax/" not in user.out
    assert "%remat: `outer` raised this TypeError while it was traced abstractly." in user.out
    assert user.err == ""
    assert callable(user.ns["inner"])


def test_control_flow_on_a_traced_value_shows_jaxs_error_at_its_line(user):
    result = user.run("%%remat", "def f(x):", "    return x if x[0] > 0 else -x", "f(x)")
    assert isinstance(result.error_in_exec, jax.errors.TracerBoolConversionError)
    assert "----> 3     return x if x[0] > 0 else -x" in user.out


def test_the_api_speaks_of_its_own_parameters(user):
    api = "import remat_magic as rm, functools"
    for call, said in {
        "rm.trace(loss, x, wrt='nope')": "wrt='nope' is not an argument of this call of loss",
        "rm.trace(loss, x).report(at='sites')": "loss has no checkpoint site: use at='function'.",
        "rm.trace(lambda x: 'no', x)": "or set has_aux=True and return it as auxiliary data.",
    }.items():
        assert said in str(user.run(api, call).error_in_exec)
