"""Where no call says what to inspect: the cell's function, and the variables of its parameters' names."""

import os

import pytest

SETUP = ["import functools, jax, jax.numpy as jnp", "from jax import checkpoint as ckpt", "W, x, n = 2.0, 3.0, 4"]
LAYER = "def layer(W, x): return W * x"


@pytest.fixture
def with_jax(cells, engine):
    cells.ok(*SETUP)
    return cells


@pytest.mark.parametrize(
    "decorators",
    [
        [],
        ["@jax.checkpoint"],
        ["@jax.remat"],
        ["@ckpt"],
        ["@lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)"],
        ["@functools.partial(jax.checkpoint, static_argnums=())"],
        ["@jax.jit", "@jax.checkpoint"],
        ["@functools.partial(jax.jit, inline=True)", "@functools.partial(jax.remat, policy=None)"],
        ["@jax.named_call", "@jax.checkpoint", "@jax.named_call"],
    ],
)
def test_without_a_call_the_only_function_is_inspected(with_jax, engine, decorators):
    with_jax.ok("%%remat", *decorators, LAYER)
    assert engine.last.fun is with_jax.ns["layer"]
    assert engine.last.args == (2.0, 3.0)


def test_of_two_decorated_functions_the_last_is_inspected_and_it_is_said(with_jax, engine):
    widget = with_jax.ok("%%remat", "@ckpt", LAYER, "@jax.jit", "@ckpt", "def other(x): return x")
    assert engine.last.fun is with_jax.ns["other"]
    assert widget.title.startswith(
        "The cell defines `layer` and `other`: the last is inspected; to choose another, end the cell with its call, "
        "such as layer(...)."
    )


@pytest.mark.parametrize("helper_first", [True, False])
def test_what_calls_a_decorated_helper_is_inspected(with_jax, engine, helper_first):
    helper = ["@jax.checkpoint", LAYER]
    callers = ["def model(x): return layer(1.0, x)", "def loss(x): return model(x)"]
    plain = ["def data(n): return n", "size = len('abc')"]
    lines = [*helper, *callers, *plain] if helper_first else [*plain, *reversed(callers), *helper]
    assert with_jax.ok("%%remat", *lines).title == "Arguments: your variable x."
    assert engine.last.fun is with_jax.ns["loss"]


@pytest.mark.parametrize(
    "last", ["print(x)", "print('made', len([x]))", "print(jnp.shape(x))", "y = len([x]); print(y)"]
)
def test_a_last_call_that_only_prints_is_no_call_to_inspect(with_jax, engine, last):
    with_jax.ok("import jax.numpy as jnp", "x, y = 1.0, 2.0")
    with_jax.ok("%%remat", "@jax.checkpoint", "def layer(x, y): return x * y", last)
    assert engine.last.fun is with_jax.ns["layer"]
    assert with_jax.out


def test_of_several_functions_the_last_that_none_calls_is_inspected(with_jax, engine):
    engine.runs = False
    widget = with_jax.ok("%%remat", LAYER, "def b(x): return layer(x, c(x))", "c = lambda x: x")
    assert engine.last.fun is with_jax.ns["b"]
    assert widget.title == "Arguments: your variable x."
    widget = with_jax.ok("%%remat", LAYER, "def b(x): return x", "def again(x): return again(x)")
    assert engine.last.fun is with_jax.ns["again"]
    assert widget.title.startswith("The cell defines `layer` and `b` and `again`: the last is inspected;")
    with_jax.ok("%%remat", "def even(x): return odd(x)", "def odd(x): return even(x)")
    assert engine.last.fun is with_jax.ns["odd"]


@pytest.mark.parametrize("lines", [["z = 1"], [""], ["import math"], ["class C:", "    def f(self): return 1"]])
def test_a_cell_with_nothing_to_inspect_says_so_and_has_run(with_jax, lines):
    assert with_jax.complaint("%%remat", *lines).startswith("nothing to inspect: end the cell with a call")
    if lines == ["z = 1"]:
        assert with_jax.ns["z"] == 1


def test_an_assigned_checkpoint_counts_and_its_function_does_not(with_jax, engine):
    with_jax.ok("%%remat", LAYER, "saved = jax.checkpoint(layer)", "size = len('abc')")
    assert engine.last.fun is with_jax.ns["saved"]


def test_args_are_evaluated_in_the_namespace_after_the_cell(with_jax, engine):
    with_jax.ok('%%remat --args "W * 2, x=[x, -1][0]"', "W = 10.0", LAYER)
    assert (engine.last.args, engine.last.kwargs) == ((20.0,), {"x": 3.0})


def test_args_let_the_last_call_run(with_jax, engine):
    with_jax.ok('%%remat --args "1.0, 2.0"', LAYER, "print(layer(3.0, 4.0))")
    assert with_jax.out.startswith("12.0\n")
    assert engine.last.args == (1.0, 2.0)


def test_a_function_on_the_line(with_jax, engine):
    with_jax.ok(LAYER)
    with_jax.ok("%remat layer")
    assert engine.last.args == (2.0, 3.0)
    with_jax.ok('%remat --args "5.0, x" layer')
    assert engine.last.args == (5.0, 3.0)


@pytest.mark.parametrize("made", ["jax.grad(layer, argnums=1)", "jax.jit(jax.value_and_grad(layer, 1))"])
def test_a_transformed_function_without_its_arguments(with_jax, engine, made):
    with_jax.ok(LAYER, f"grad = {made}", "%remat grad")
    assert (engine.last.fun, engine.last.args, engine.last.wrt) == (with_jax.ns["layer"], (2.0, 3.0), 1)
    for cell in (f"%%remat\n{made}", f"%remat {made}"):
        engine.last = None
        with_jax.ok(cell)
        assert (engine.last.fun, engine.last.args, engine.last.wrt) == (with_jax.ns["layer"], (2.0, 3.0), 1)


def test_a_missing_variable_is_named(with_jax):
    sentence = with_jax.complaint("%%remat", "def f(W, nope): return W")
    assert "`f` needs `nope`" in sentence
    assert "--args" in sentence
    assert "`nope` and `nor`" in with_jax.complaint("%%remat", "def f(W, nope, *, nor): return W")
    assert "f" in with_jax.ns


def test_an_error_within_args_is_the_users_own(with_jax):
    result = with_jax.run('%%remat --args "1 / 0"', LAYER)
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "ZeroDivisionError" in with_jax.out
    assert "remat_magic" not in with_jax.out


def test_what_is_no_function(with_jax):
    assert "`W` is a float: name a function or a call" in with_jax.complaint("%remat W")
    assert "parameters of `dict` cannot be read" in with_jax.complaint("%remat dict")


def test_without_a_cell_before_there_is_nothing_to_run_again(cells):
    assert "write a call after %remat" in cells.complaint("%remat --text")


@pytest.mark.parametrize("decorator", ["@jax.checkpoint", "@jax.jit"])
def test_an_autoreloaded_module_shows_its_own_file_and_new_text(cells, tmp_path, monkeypatch, decorator):
    """IPython compiles a changed function from its text alone, and the others keep their old lines."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"reloaded_{decorator[5:]}"
    file = tmp_path / f"{name}.py"
    text = (
        f"import jax, jax.numpy as jnp\n\n\n{decorator}\ndef layer(x):\n    return jnp.sin(x)\n\n\n"
        "class Model:\n    def loss(self, x):\n        return jnp.sum(layer(x) * x)\n"
    )
    file.write_text(text)
    cells.ok("%load_ext autoreload", "%autoreload 2", f"import {name} as module", "x = module.jnp.ones(3)")
    cells.ok("%remat --text module.Model().loss(x)")
    text = text.replace("\n\n\n", "\n\n# a line more\n\n").replace("return jnp.sin(x)", "return jnp.cos(x)  # new")
    file.write_text(text)
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime + 10))
    cells.ok("%remat --text -p everything_saveable -o w module.Model().loss(x)")
    lines = text.splitlines()
    sources = [row.source for row in cells.ns["w"].report.residuals if row.source]
    assert sources
    for span in sources:
        assert (span.file, span.text) == (str(file), lines[span.line - 1])
    assert any("# new" in span.text for span in sources)
    assert all(shown.text in text for shown in cells.ns["w"].report.sources)
    if decorator == "@jax.checkpoint":
        cells.ok("import remat_magic", "edit = remat_magic.trace(module.Model().loss, x).edit('dots_saveable')")
        assert "policy=jax.checkpoint_policies.dots_saveable" in cells.ns["edit"].diff()
