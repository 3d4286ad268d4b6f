"""A cell under ``%%remat`` runs as a plain cell does, but for its last call."""

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from remat_magic.notebook import cell, magic
from tests.magic_fakes import FakeWidget

F = "def f(x): return ran.append(x) or x"
LATER = ["import asyncio", "async def later(value):", "    await asyncio.sleep(0)", "    return value"]

# Cells, and the arguments of the call that is inspected.
CELLS = {
    "the last call": (["%%remat", F, "ran = []", "f(1.0)"], (1.0,), {}),
    "keywords": (["%%remat", "def f(x, *, k): pass", "f(1.0, k=2.0)"], (1.0,), {"k": 2.0}),
    "any names": (
        ["%%remat", "def f(**kwargs): pass", "f(self=1.0, fun=2, line=3)"],
        (),
        {"self": 1.0, "fun": 2, "line": 3},
    ),
    "await": (["%%remat", *LATER, "x = await later(1.0)", "(lambda x, y: x)(x, await later(2.0))"], (1.0, 2.0), {}),
    "await on the line": (
        ["%%remat f(await later())", "async def later(): return 7.0", "def f(x): return x"],
        (7.0,),
        {},
    ),
    "a call on the line": (
        ["%%remat f(x, -1.5)", "def f(x, y): return x * y", "x = 2.0", "f(x, 5.0)"],
        (2.0, -1.5),
        {},
    ),
    "the line's own Python": (
        ["f = lambda *a, **k: 0.0", "%remat f('{x}', '$x  y', -1.0)"],
        ("{x}", "$x  y", -1.0),
        {},
    ),
    "names of a function": (["def outer(local):", "    %remat (lambda x: x)(local)", "outer(5.0)"], (5.0,), {}),
    "within a cell magic": (["%%capture caught", "%%remat", "f = lambda x: x", "f(1.0)"], (1.0,), {}),
    "timed": (["%%time", "%%remat", "f = lambda x: x", "f(2.0)"], (2.0,), {}),
}


@pytest.mark.parametrize("name", CELLS)
def test_the_call_is_inspected_and_not_executed(cells, engine, name):
    lines, args, kwargs = CELLS[name]
    engine.runs = False
    cells.ok(*lines)
    assert (engine.last.args, engine.last.kwargs) == (args, kwargs)
    assert cells.ns.get("ran", []) == []


def test_every_operand_is_evaluated_once_and_in_order(cells, engine):
    cells.ok(
        "%%remat",
        "order = []",
        "def at(n, value):",
        "    order.append(n)",
        "    return value",
        "f = lambda *args, **kwargs: 0.0",
        "at(0, f)(at(1, 1.0), *at(2, [2.0, 3.0]), k=at(3, 4.0), **at(4, {'m': 5.0}))",
    )
    assert cells.ns["order"] == [0, 1, 2, 3, 4]
    assert engine.last.args == (1.0, 2.0, 3.0)
    assert engine.last.kwargs == {"k": 4.0, "m": 5.0}


def test_the_value_is_the_widget(cells, engine):
    widget = cells.ok("%%remat", "def f(x): return x", "f(1.0)")
    assert widget.trace is engine.last
    assert cells.ns["_"] is widget
    assert cells.ok("_.trace is _1.trace") is True


@pytest.fixture
def commands(cells, monkeypatch):
    """What the shell was asked to run: JAX has threads, and warns of a fork."""
    asked = []
    monkeypatch.setattr(cells.shell, "system", asked.append)
    monkeypatch.setattr(cells.shell, "getoutput", lambda command, **_: [command])
    return asked


def test_multi_line_strings_magics_and_shell_commands_are_untouched(cells, engine, commands):
    cells.ok(
        "%%remat",
        'text = """',
        "  %%remat not a magic",
        "    indented",
        '"""',
        "here = %pwd",
        "shouted = !echo hello",
        "f = lambda x: x",
        "f(1.0)",
    )
    assert cells.ns["text"] == "\n  %%remat not a magic\n    indented\n"
    assert cells.ns["shouted"] == ["echo hello"]
    assert isinstance(cells.ns["here"], str)


def test_lines_are_those_of_the_cell(cells, engine):
    result = cells.run("%%remat", "", "def f(x):", "    raise KeyError(x)", "", "f(1.0)")
    assert isinstance(result.error_in_exec, KeyError)
    assert cells.ns["f"].__code__.co_firstlineno == 3
    assert "line 6" in cells.out.splitlines()[2]
    assert "----> 4     raise KeyError(x)" in cells.out


def test_a_cell_that_raises_shows_what_the_plain_cell_shows(cells, engine):
    body = ["def f(x):", "    return 1 / x", "y = f(0)", "f(y)"]
    assert not cells.run("# a comment", *body).success
    plain = cells.out.replace("In[1]", "In[n]").replace("# a comment", "FIRST")
    assert not cells.run("%%remat", *body).success
    ours = cells.out.replace("In[2]", "In[n]").replace("get_ipython().run_cell_magic('remat', '', '')", "FIRST")
    assert ours == plain
    assert cells.out.count("ZeroDivisionError: division by zero") == 1
    assert cells.err == ""
    assert engine.last is None


def test_a_failing_operand_is_the_users_error(cells, engine):
    result = cells.run("%%remat", "def f(x): return x", "f(nope)")
    assert isinstance(result.error_in_exec, NameError)
    assert "----> 3 f(nope)" in cells.out
    assert engine.last is None


@pytest.mark.parametrize("last", ["%time 1 + 1", "!true", "%pwd", "f?"])
def test_trailing_magics_are_run_and_not_inspected(cells, engine, commands, last):
    cells.ok("%%remat", "x = 1.0", "def f(x): return x", last)
    assert engine.last.fun is cells.ns["f"]
    assert commands == (["true"] if last == "!true" else [])


def test_a_last_expression_that_is_no_call_is_shown_as_always(cells, engine):
    cells.ok("%%remat --args 1.0", "def f(x): return x", "'shown'")
    assert "Out[1]: 'shown'" in cells.out
    assert engine.last.fun is cells.ns["f"]


@pytest.fixture
def before(cells, engine):
    """A cell has run; what ``ran`` holds after another shows which of its calls were made."""
    engine.runs = False
    cells.ok(
        "import contextlib, functools, jax, jax.numpy as jnp, numpy as np",
        "ran, x, y, state = [], 3.0, 'old', 'older'",
        F,
    )
    return cells


@pytest.mark.parametrize(
    "last",
    [
        "y = f(x)",
        "y: float = f(x)",
        "y += f(x)",
        "y, state = f(x)",
        "(y := f(x))",
        "print(f(x))",
        "print('value', float(f(x)), sep=' ')",
        "print(f'{f(x):.3f}')",
        "float(f(x))",
        "np.asarray(f(x))",
        "f(x).block_until_ready()",
        "f(x).mean().item()",
        "y = f(x)[0].mean().tolist()",
        "f(x)['loss'].item()",
        "f(x)[0]",
        "f(x) / 2 + 1",
        "jax.block_until_ready(f(x))",
        "jax.tree.map(np.shape, f(x))",
        "ran.append(f(x))",
        "y = float(jnp.sum(f(x)))",
        "jax.jit(f).lower(x)",
        "jax.jit(f).lower(x).compile().as_text()",
        "jax.grad(f)(x).item()",
        "jax.jit(jax.grad(f))(x).block_until_ready()",
        "y, state = jax.value_and_grad(f)(x)",
        "y, state = jax.vjp(f, x)",
        "jax.vjp(f, x)[1](1.0)",
        "jax.eval_shape(f, x)",
        "y = functools.partial(jax.vjp, f)(x)",
        "y = jax.jit(f).lower(x).compile()",
        "jnp.mean(f(x))",
        "print(jnp.mean(jnp.sin(f(x)) + 1).item())",
        "jnp.sum(f(x)).block_until_ready()",
        "y = jnp.sum(f(x)).item()",
        "with contextlib.nullcontext():\n    y = f(x)",
        "with contextlib.nullcontext():\n    print(f(x))",
        "if x:\n    f(x)",
        "if not x:\n    pass\nelif x:\n    y = f(x)\nelse:\n    f(1.0)",
    ],
)
def test_last_calls_as_people_write_them(before, engine, last):
    widget = before.ok("%%remat -o kept", last)
    assert isinstance(before.ns["kept"], FakeWidget)
    assert widget is before.ns["kept"]
    assert engine.last.args == (3.0,)
    assert getattr(engine.last.fun, "__wrapped__", engine.last.fun) is before.ns["f"]
    assert before.ns["ran"] == []
    assert (before.ns["y"], before.ns["state"]) == ("old", "older")
    assert before.out == "Out[2]: <widget>\n"


def test_it_is_said_where_more_than_the_call_did_not_run(before):
    for last in ("y, state = f(x)", "print(f(x))", "f(x), f(1.0)", "f(x)\nprint('a')", "for n in range(3): f(x)"):
        assert ":2. Stopped at f, before it ran." in before.ok("%%remat", last).title
    for text in (
        "%%remat\nf(x)",
        "%%remat\nif x:\n    f(x)",
        "%remat f(x)",
        "%remat print(f(x))",
        "%%remat f(x)\nz = 1",
    ):
        assert before.ok(text).title == ""


def test_of_several_calls_the_first_is_inspected(before, engine):
    for last in ("f(x), f(1.0)", "print(f(x), f(1.0))", "len('abc'), f(x), f(1.0)", "y, state = f(x), f(1.0)"):
        before.ok("%%remat", last)
        assert engine.last.args == (3.0,)
    assert before.ns["ran"] == []


@pytest.mark.parametrize(
    "last",
    [
        "y = jnp.ones(3)",
        "y = jnp.sin(x)",
        "y = len('abc')",
        "y, state = dict(a=1), [len('ab')]",
        "y = g(3)",
        "y = jax.jit(f)",
        "y = 3",
        "y = [g(n) for n in range(3)]",
        "y = x and g(3)",
        "for y in range(3):\n    g(y)",
        "for n in range(3):\n    for y in range(3):\n        state = g(y)\n        print(state)",
        "y = 0\nwhile y < 3:\n    y += 1\n    g(y)",
        "if x:\n    y = g(1)",
        "with contextlib.nullcontext():\n    y = g(1)",
        "y = g(1) + g(g(2))",
    ],
)
def test_what_prepares_something_runs(before, engine, last):
    before.ok("%%remat", "import jax", "@jax.checkpoint", "def h(x): return x", "def g(n): return [n]", last)
    assert engine.last.fun is before.ns["h"]
    assert engine.last.args == (3.0,)
    assert before.ns["y"] != "old"


@pytest.mark.parametrize(
    "lines",
    [
        ["y = f(x)", "print(y)"],
        ["y = f(x); print(f'{y:.3f}')"],
        ["y, state = f(x)", "y"],
        ["y = f(x)", "print('a'); print(y.item(), jnp.shape(y))"],
        ["y = jax.grad(f)(x)", "jax.tree.map(jnp.shape, y)"],
        ["f(x)", "print('done')"],
        ["y = jax.block_until_ready(f(x))", "ran.append(y)"],
        ["with contextlib.nullcontext():", "    y = f(x)", "    print(y)"],
        ["y, state = jax.vjp(f, x)", "(z,) = state(1.0)"],
        ["y, state = jax.value_and_grad(f)(x)", "state = jax.tree.map(jnp.sin, state)", "x = x - state"],
        ["y, state = f(x)", "seen = [y]", "seen.append(float(y))"],
        ["y, state = f(x)", "assert y > 0"],
    ],
)
def test_what_shows_the_result_of_a_call_is_no_call_to_inspect(before, engine, lines):
    widget = before.ok("%%remat -o kept", *lines)
    assert widget is before.ns["kept"]
    assert (engine.last.fun, engine.last.args) == (before.ns["f"], (3.0,))
    assert (before.ns["ran"], before.ns["y"]) == ([], "old")
    assert "Stopped at f, before it ran." in widget.title
    assert before.out == "Out[2]: <widget>\n"


def test_what_shows_something_else_is_run_and_the_last_call_wins(before, engine, commands):
    before.ok("%%remat", "@jax.checkpoint", "def h(x): return x", "z = jnp.ones(3)", "z")
    assert engine.last.fun is before.ns["h"]
    assert "Array([1." in before.out
    before.ok("%%remat", "@jax.checkpoint", "def h(x): return x", "y = f(x)", "z = jnp.shape(y)")
    assert (engine.last.fun, before.ns["z"]) == (before.ns["h"], ())
    before.ns["ran"].clear()
    before.ok("%%remat", "y = f(x)", "f(1.0)")
    assert (engine.last.args, before.ns["y"], before.ns["ran"]) == ((1.0,), 3.0, [3.0])
    before.ok("%%remat", "y = f(2.0)", "!echo asked")
    assert (engine.last.args, before.ns["y"], before.ns["ran"], commands) == ((2.0,), 3.0, [3.0], [])


def test_a_function_of_a_library_is_inspected_where_none_of_the_users_is_in_its_brackets(before, engine):
    before.ok("%%remat", "jnp.mean(jnp.sin(x))")
    assert engine.last.fun is before.ns["jnp"].mean


def test_a_backward_pass_that_was_made_before_is_none_to_inspect(before, engine):
    before.ok("_, pull_back = jax.vjp(lambda x: x * x, x)")
    assert "inspect that, jax.vjp(f, x)" in before.complaint("%%remat", "pull_back(1.0)")
    before.ok("%%remat", "@jax.checkpoint", "def h(x): return x", "y = pull_back(1.0)")
    assert (engine.last.fun, before.ns["y"]) == (before.ns["h"], (6.0,))


def test_an_assertion_is_a_last_line_too(before, engine):
    before.ok("%%remat", "assert f(x) > 0, 'negative'")
    assert (engine.last.fun, before.ns["ran"]) == (before.ns["f"], [])
    with pytest.raises(AssertionError, match="no"):
        before.run("%%remat", "def h(x): return x", "assert len('abc') > 3, 'no'").raise_error()


@pytest.mark.parametrize(
    "loop",
    [
        "for n in range(3):\n    for z in iter([3.0]):\n        y, state = f(z)",
        "for n, z in enumerate([3.0, 4.0]):\n    y = f(z)\n    ran.append(n)",
        "for n in range(3): f(3.0)",
        "for n in range(3):\n    z = float(n + 3)\n    y = f(z)\n    if n % 2 == 0:\n        print(y)",
        "for n in range(3):\n    z = g(n + 3.0)[0]\n    y, state = f(z)\n    seen.append(y)",
        "for n in range(3):\n    with contextlib.nullcontext():\n        y = f(3.0)\n        seen.append(float(y))",
        "n = -1\nwhile n < 3:\n    n += 1\n    z = 3.0\n    f(z)",
        "for n in range(3):\n    for z in (3.0, 4.0):\n        a = z\n        y = f(a)\n        state = y",
    ],
)
def test_a_loop_runs_until_the_call_that_is_inspected(before, engine, loop):
    before.ok("seen = []", "def g(n): return [n]")
    widget = before.ok("%%remat", loop)
    assert (engine.last.fun, engine.last.args) == (before.ns["f"], (3.0,))
    assert (before.ns["ran"], before.ns["seen"], before.ns["y"], before.ns["n"]) == ([], [], "old", 0)
    assert "Stopped at f, before it ran." in widget.title


def test_a_loop_that_prepares_something_runs_over_all_items_once(before, engine):
    lines = ["taken = []", "def items():", "    for n in range(3):", "        taken.append(n)", "        yield n"]
    before.ok("%%remat", "@jax.checkpoint", "def h(x): return x", *lines, "for n in items():", "    y = f(n)")
    assert engine.last.fun is before.ns["h"]
    assert before.ns["taken"] == before.ns["ran"] == [0, 1, 2]


def test_methods_of_objects_that_a_call_makes(before, engine):
    before.ok("%%remat", "class Model:", "    def loss(self, x): return x", "Model().loss(x)")
    assert engine.last.fun is before.ns["Model"].loss
    before.ok("%%remat", "def model(): return Model()", "model().loss(x)")
    assert engine.last.fun is before.ns["Model"].loss
    before.ok("%%remat", "y = [f, f][0](x)")
    assert engine.last.fun is before.ns["f"]


def test_a_semicolon_silences(cells, engine):
    cells.ok("%%remat", "f = lambda x: x", "f(1.0);")
    assert engine.last.args == (1.0,)
    assert cells.out == ""
    for last in ("f(2.0);", "y = f(3.0);", "print(f(4.0));"):
        cells.ok("%%remat -o kept", last)
        assert cells.out == ""
        assert cells.ns["kept"].trace is engine.last


@pytest.mark.parametrize(("interactivity", "shown"), [("all", ["1", "2", "<widget>"]), ("none", [])])
def test_other_expressions_are_shown_as_ipython_is_set(cells, engine, interactivity, shown):
    cells.shell.ast_node_interactivity = interactivity
    cells.ok("%%remat (lambda x: x)(1.0)", "1", "2")
    assert [line.partition(": ")[2] for line in cells.out.splitlines() if line] == shown
    assert engine.last.args == (1.0,)


def test_a_cell_magic_below_the_line(cells, engine):
    cells.ok("%%remat -p dots_saveable -o kept", "%%capture caught", "f = lambda x: x", "print('caught')", "f(1.0)")
    assert engine.last.args == (1.0,)
    assert cells.ns["kept"].policy == "dots_saveable"
    assert (cells.out, cells.ns["caught"].stdout) == ("", "caught\n")
    cells.ok("%%remat", "", "%%time", "%%capture", "f(2.0)")
    assert engine.last.args == (2.0,)
    assert "Wall time" in cells.out
    assert isinstance(cells.run("%%remat", "%%time", "", "1 / 0").error_in_exec, ZeroDivisionError)


def test_a_device_is_named_as_it_is_called(cells, engine):
    assert cells.ok('%remat --device "tpu V5E" (lambda x: x)(1.0)').device == "TPU v5e"
    assert cells.ok('%remat --device="h100 sxm X8" (lambda x: x)(1.0)').device == "H100 SXM x8"
    assert cells.ok("%remat --device 'this CPU' (lambda x: x)(1.0)").device == ""
    cells.run("%remat --device H20 (lambda x: x)(1.0)")
    assert cells.err.startswith("UsageError: No device is called 'H20': known are ")


def test_wrt_counts_as_in_the_call(cells, engine):
    cells.ok("import functools", "f = lambda a, b, c: a", "%remat --wrt 0,-1 functools.partial(f, 1.0)(2.0, 3.0)")
    assert (engine.last.args, engine.last.wrt) == ((1.0, 2.0, 3.0), (1, 2))
    cells.ok("import jax", "%remat --wrt b jax.grad(f)(1.0, 2.0, 3.0)")
    assert engine.last.wrt == ("b",)


def test_an_exported_notebook_does_the_same(cells, engine):
    exported = TransformerManager().transform_cell("%%remat -p dots_saveable\nx = 2.0\ndef f(x): return x\nf(x)\n")
    assert exported.startswith("get_ipython().run_cell_magic('remat',")
    widget = cells.ok(exported)
    assert (widget.policy, engine.last.args) == ("dots_saveable", (2.0,))
    assert cells.ns["x"] == 2.0
    result = cells.run("get_ipython().run_cell_magic('remat', '', '1 / 0\\nf(x)')")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert cells.out.count("division by zero") == 1


def test_help_names_every_option(cells):
    cells.ok("%%remat?")
    ours = cells.out
    cells.ok("%remat?")
    assert ours.split("File:")[0] == cells.out.split("File:")[0]
    for option in ("--policy", "--site", "--wrt", "--names", "--args", "-o VAR", "--text", "--apply"):
        assert option in cells.out


def test_load_unload_reload_leave_one_of_each(shell):
    def counts():
        return (
            shell.input_transformers_cleanup.count(cell.mark),
            sum(isinstance(one, cell.CellTransformer) for one in shell.ast_transformers),
            len(shell.Completer.custom_matchers),
            sum(len(callbacks) for callbacks in shell.events.callbacks.values()),
            "remat" in shell.magics_manager.magics["line"],
            "remat" in shell.magics_manager.magics["cell"],
        )

    loaded = counts()
    magic.load(shell)
    magic.load(shell)
    assert counts() == loaded
    assert loaded[:3] == (1, 1, 1)
    magic.unload(shell)
    magic.unload(shell)
    assert counts() == (0, 0, 0, loaded[3] - 2, False, False)


def test_a_terminal_waits_for_the_whole_cell(shell):
    complete = shell.input_transformer_manager.check_complete
    assert complete("%%remat\n")[0] == "incomplete"
    assert complete("%%remat\nf(x)")[0] == "incomplete"
    assert complete("%%remat\nf(x)\n\n")[0] == "complete"


@pytest.mark.parametrize("first", ["%%rematch", "%%remat?", " x = '%%remat'", "# %%remat"])
def test_other_cells_are_left_alone(first):
    lines = [f"{first}\n", "f(x)\n"]
    assert cell.mark(lines) is lines


def test_the_transformer_leaves_other_modules_alone(shell):
    transformer = next(one for one in shell.ast_transformers if isinstance(one, cell.CellTransformer))
    for text in ("", "f(x)", "get_ipython().run_cell_magic('time', '', '')\nf(x)"):
        tree = ast.parse(text)
        assert transformer.visit(tree) is tree
