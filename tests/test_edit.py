"""Plans as edits of the user's source: the text stays the user's, and JAX does with it what the plan promised."""

import dataclasses
import gc
import subprocess
import threading
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import units
from remat_magic.api import Trace
from remat_magic.engine.engine import Engine
from remat_magic.facts import reports
from remat_magic.records import Plan, PlannedValue, RematError
from remat_magic.views import display
from remat_magic.views.plans import edit_html, plan_meaning
from tests.programs import PROGRAMS, f32
from tests.report_checks import types_of_jax, types_of_ours
from tests.test_models import library

HEAD = "import jax\nimport jax.numpy as jnp\n"
SQUARE = f32(4, 4), f32(4)
ROWS = f32(4, 4), f32(2, 4)
POLICIES = "jax.checkpoint_policies"
NAMED = f'{POLICIES}.save_only_these_names("f")'
DOTS = f"policy={POLICIES}.dots_saveable"


@pytest.fixture
def module(module):
    """Such a module, whose text begins with the usual imports."""
    return lambda text, name="", head=HEAD: module(text if isinstance(text, bytes) else head + dedent(text), name)


def keeping(trace, *expressions, at=None):
    """A plan that saves what some expressions or operations make, and nothing else."""
    at = at or trace.engine.default_at
    naming, values = trace.engine.dissect(at).naming, []
    for key, value in naming.values.items():
        place, primitive = trace.engine.primal.provenances.of(value.eqn), value.eqn.primitive.name
        source = place.source if place is not None else None
        if {primitive, source and source.expression} & {*expressions} and value.output is not None:
            values.append(PlannedValue(key, 0, primitive=primitive, source=source))
    assert len(values) >= len(expressions)
    draft = Plan(trace.engine.primal.name, at, "some", 0, 0, 0, 0, tuple(values), fingerprint=naming.fingerprint)
    report = trace.report(draft)
    return dataclasses.replace(draft, saved_bytes=report.saved_bytes, recomputed_flops=report.recomputed_flops)


def kept(fun, args, *expressions):
    trace = rm.trace(fun, *args)
    return trace.edit(keeping(trace, *expressions))


def answers(report):
    rows = sorted((row.kind, row.type) for row in report.residuals if row.kind != "literal")
    return rows, report.saved_bytes, report.repeated_flops, report.deferred_flops


# --------------------------------------------------------------------------------------------------- the table of edits


class Program(NamedTuple):
    """A text, what is asked for, and what the edit writes.

    Attributes:
        text: of a module, whose function ``f`` is traced.
        ask: a policy; or what residuals are to be kept: expressions and operations.
        lines: what the edited text contains.
        at: the place.
        args: of ``f``; None: the module's ``weights``, and two rows.
        library: that the text imports.
    """

    text: str
    ask: Any
    lines: list[str]
    at: Any = None
    args: Any = SQUARE
    library: str = ""


def place(text, at, line, args=ROWS):
    """A place of a text that has no checkpoint."""
    return Program(f"\n{text}\n", "dots_saveable", [line], at, args)


def together(forms, head=""):
    """A text with a function for each form, of which ``f`` gives the sum."""
    calls = " + ".join(f"f{number}(w, x).sum()" for number, _ in enumerate(forms))
    texts = (form.replace("NAME", f"f{number}") for number, form in enumerate(forms))
    return head + "\n\n".join(texts) + f"\n\ndef f(w, x):\n    return {calls}\n"


DEF = "def NAME(w, x):\n    "
# Functions, and what becomes of `x @ w` in them.
FORMS = {
    f"{DEF}q = x @ w\n    return jnp.sin(q)": '    q = checkpoint_name(x @ w, "q")\n',
    f"{DEF}return jnp.sin(x @ w).sum()": 'return jnp.sin(checkpoint_name(x @ w, "f1")).sum()',
    f"{DEF}return-(x @ w) @ w": 'return checkpoint_name(-(checkpoint_name(x @ w, "f2")) @ w, "f2_2")',
    f"{DEF}return-jnp.exp(x @ w) @ jnp.exp(-x)if x.ndim else-x": (
        'checkpoint_name(-jnp.exp(checkpoint_name(x @ w, "f3")), "f3_2") @ jnp.exp(-x), "f3_3")if x.ndim else-x'
    ),
    f"{DEF}return (y := x @ w) * jnp.sin(y)": 'return (y := checkpoint_name(x @ w, "y")) * jnp',
    f"{DEF}return sum(jnp.cos(v @ w) for v in (x, 2 * x))": 'sum(jnp.cos(checkpoint_name(v @ w, "f5")) for v in',
    f"{DEF}return (lambda v: jnp.exp(v @ w))(x)": '(lambda v: jnp.exp(checkpoint_name(v @ w, "f6")))(x)',
    f"{DEF}return jnp.sum(a=jnp.tan(x @ w))": '(a=jnp.tan(checkpoint_name(x @ w, "f7")))',
    f'{DEF}ß = "é"; z = jnp.sin(x @ w); return z': '"é"; z = jnp.sin(checkpoint_name(x @ w, "f8")); return z',
    f"{DEF}x += x @ w\n    return jnp.sin(x)": 'x += checkpoint_name(x @ w, "f9")\n',
    f"{DEF}u = (\n        x  # left\n        @ w\n    )\n    return jnp.sin(u)": (
        '    u = (\n        checkpoint_name(x  # left\n        @ w, "u")\n    )\n'
    ),
    "NAME = lambda w, x: jnp.sin(x @ w)": 'f11 = lambda w, x: jnp.sin(checkpoint_name(x @ w, "value"))',
    "def make(n):\n    def g(w, x, *, s=n):\n        return jnp.sin(x @ w * s)\n    return g\n\nNAME = make(2.0)": (
        '        return jnp.sin(checkpoint_name(x @ w, "g") * s)\n'
    ),
    "def kind():\n    class Local:\n        def __call__(self, w, x):\n            return jnp.sin(x @ w)\n"
    "    return Local\n\nKIND = kind()\n\ndef NAME(w, x):\n    return KIND()(w, x)": "sin(checkpoint_name(x @ w, ",
}
SINE = f"{DEF}return jnp.sin(x @ w)"
APPLIED = {  # functions under a checkpoint, and what becomes of that under another policy
    f"@jax.checkpoint\n{SINE}": f"@partial(jax.checkpoint, {DOTS})\ndef f0",
    f"from jax import remat as r\n@r\n{SINE}": f"@partial(r, {DOTS})\ndef f1",
    f"import functools\n@functools.partial(\n    jax.checkpoint,\n    prevent_cse=False,  # why\n)\n{SINE}": (
        f"    {DOTS}, prevent_cse=False,  # why\n)\ndef f2"
    ),
    f"@partial(jax.checkpoint, policy={POLICIES}.everything_saveable)\n{SINE}": (
        f"@partial(jax.checkpoint, {DOTS})\ndef f3"
    ),
    "def _four(w, x):\n    return jnp.sin(x @ w)\n\nNAME = jax.checkpoint(_four)": f"f4 = jax.checkpoint(_four, {DOTS}",
    "NAME = jax.checkpoint((lambda w, x: jnp.sin(x @ w)),)": f"jax.checkpoint((lambda w, x: jnp.sin(x @ w)),{DOTS})",
    "remat = partial(jax.checkpoint, prevent_cse=False)\n\ndef _six(w, x):\n    return x * w\n\nNAME = remat(_six)": (
        f"f6 = remat(_six, {DOTS})"
    ),
    f"@jax.jit\n@jax.checkpoint\n{SINE}": f"@jax.jit\n@partial(jax.checkpoint, {DOTS})\ndef f7",
    "def of(site):\n    one = jax.checkpoint(_four) if site else _four\n\n    def g(w, x):\n        return one(w, x)\n"
    "\n    return g\n\nNAME = of(True)": f"    one = jax.checkpoint(_four, {DOTS}) if site else _four\n",
}
HELD = [  # a model that is held somewhere, and a function that uses it
    "MODEL = Model(jnp.ones((4, 4)))\n\ndef NAME(w, x):\n    return MODEL(x @ w)",
    "def of(model):\n    def g(w, x):\n        return model(x @ w)\n    return g\n\nNAME = of(Model(jnp.eye(4)))",
    "def NAME(w, x, *, model=Model(jnp.eye(4))):\n    return model(x @ w)",
    "MODELS = [Model(jnp.ones((4, 4)))]\n\ndef NAME(w, x):\n    return sum(model(x @ w) for model in MODELS)",
    "class Holder:\n    __slots__ = ('me', 'model')\n\nHELD = Holder()\nHELD.me, HELD.model = HELD, Model(jnp.eye(4))\n"
    "\ndef NAME(w, x):\n    return HELD.me.model(x @ w)",
    "CALL = Model(jnp.ones((4, 4))).__call__\n\ndef NAME(w, x):\n    return CALL(x @ w)",
]
MODEL = """
class Base:
    def mix(self, v):
        return v @ self.w


@jax.tree_util.register_pytree_node_class
class Model(Base):
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        self.seen = self.mix(x)
        return jnp.sin(self.seen).sum()

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)

"""

BLOCK = "\ndef block(w, x):\n    return jnp.sin(x @ w)\n"
TWICE = "\n\ndef f(w, x):\n    return block(w, block(w, x)).sum()\n"
EDITS = {
    "names at expressions": Program(together(FORMS), ("dot_general", "-jnp.exp(x @ w)"), [*FORMS.values()]),
    "names in methods of objects, wherever they are held": Program(
        together(HELD, MODEL), ("v @ self.w",), ['return checkpoint_name(v @ self.w, "mix")']
    ),
    "a name after a statement": Program(
        "def f(w, x):\n    x += x @ w  # why\n    if True: x *= x @ w\n    return (x * x).sum()\n",
        ("x += x @ w", "x *= x @ w"),
        [
            'x += x @ w  # why\n    x = checkpoint_name(x, "x")\n',
            '    if True: x *= x @ w; x = checkpoint_name(x, "x_2")\n',
        ],
    ),
    "names and imports that are there": Program(
        "from jax.ad_checkpoint import checkpoint_name as named\npartial = 3\n\n"
        "def f(w, x):\n    a = named(x @ w, 'q')\n    f = named(jnp.cos(a), 'f')\n"
        "    return jnp.sin(f @ w).sum() * partial\n",
        ("x @ w", "f @ w"),
        ['named(f @ w, "f_2")', 'save_only_these_names("q", "f_2")', "import partial as partial_\n"],
    ),
    "policies of checkpoints": Program(
        f"from functools import partial\n{together(APPLIED)}", "dots_saveable", [*APPLIED.values()], "sites"
    ),
    "names at a checkpoint": Program(
        f"@jax.checkpoint{BLOCK}{TWICE}",
        ("x @ w",),
        [f'policy={POLICIES}.save_only_these_names("block"))\ndef block'],
        "sites",
    ),
    "a policy of the program's own names": Program(
        f"from jax.ad_checkpoint import checkpoint_name\n\n@jax.checkpoint{BLOCK}{TWICE}".replace(
            "x @ w)", "checkpoint_name(jnp.tanh(x @ w), 'h'))"
        ),
        "dots_saveable | save_only_these_names('h')",
        [f"{POLICIES}.save_from_both_policies({POLICIES}.dots_saveable, {POLICIES}.save_only_these_names('h')))\ndef"],
    ),
    "checkpoints taken off": Program(
        f"@jax.checkpoint{BLOCK}\n\ndef f(w, x):\n    return jax.checkpoint(jnp.sin)(block(w, block(w, x))).sum()\n",
        "none",
        [f"{HEAD}{BLOCK[1:]}", "    return jnp.sin(block(w, block(w, x))).sum()"],
    ),
    "the function, with static arguments": place(
        "def f(kind, w, x, flag):\n    y = x @ w\n    return (jnp.sin(y) if kind == 'sin' and flag else y).sum()",
        "function",
        f"{DOTS}, static_argnums=(0, 3))\ndef f",
        ("sin", *SQUARE, True),
    ),
    "a function with a flag and a default": place(
        "def block(w, x, train, scale=2.0):\n    return jnp.sin(x @ w) * scale if train else x\n\n"
        "def f(w, x):\n    return block(w, block(w, x, True), True).sum()",
        "block",
        f"@partial(jax.checkpoint, {DOTS}, static_argnums=(2,))\ndef block",
    ),
    "a flag by keyword": place(
        "def block(w, x, *, train):\n    return jnp.sin(x @ w) if train else x\n\n"
        "def f(w, x):\n    return block(w, block(w, x, train=True), train=True).sum()",
        "block",
        f"jax.checkpoint(partial(block, train=True), {DOTS})(w, x)",
    ),
    "the body of a loop": place(
        "def f(w, x):\n    def body(c, _):\n        return jnp.sin(jnp.tanh(c @ w) @ w), None\n"
        "    return jax.lax.scan(body, x, None, length=3)[0].sum()",
        "body",
        f"    @partial(jax.checkpoint, {DOTS})\n    def body",
    ),
    "a lambda of a loop": place(
        "def f(w, x):\n    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(jnp.tanh(c @ w) @ w), x).sum()",
        "<lambda>",
        "3, jax.checkpoint(lambda _, c: jnp.sin(jnp.tanh(c @ w) @ w), policy=",
    ),
    "two lambdas on one line": place(
        "def f(w, x):\n    return jax.lax.cond(x[0, 0] > 0, lambda v: jnp.sin(v @ w).sum(), "
        "lambda v: jnp.exp(v @ w).sum(), x)",
        "<lambda>",
        f"0, jax.checkpoint(lambda v: jnp.sin(v @ w).sum(), {DOTS}), jax.checkpoint(",
    ),
    "an object that is held": place(
        "class Res:\n    def __call__(self, w, x):\n        return x + jnp.sin(jnp.tanh(x @ w) @ w)\n\n"
        "res = Res()\n\ndef f(w, x):\n    return res(w, res(w, x)).sum()",
        "Res.__call__",
        "static_argnums=(0,))\n    def __call__",
    ),
    "a function that another one made": place(
        "def make(act):\n    def inner(w, x):\n        return x + act(act(x @ w) @ w)\n    return inner\n\n"
        "block = make(jnp.sin)\n\ndef f(w, x):\n    return block(w, block(w, x)).sum()",
        "inner",
        f"    @partial(jax.checkpoint, {DOTS})\n    def inner",
    ),
}
OF_LINEN = """
import flax.linen as nn

DECORATOR
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4)(jnp.sin(nn.Dense(8)(x)))

RENAMED
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = USED()(x)
        return x.sum()

net = Net()
weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

def f(weights, x):
    return net.apply(weights, x)
"""
OF_NNX = """
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.into, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    DECORATOR
    def __call__(self, x):
        return x + self.out(jnp.sin(self.into(x)))

net = Block(nnx.Rngs(0))
graph, weights = nnx.split(net)

def f(weights, x):
    return nnx.merge(graph, weights)(x).sum()
"""
OF_EQUINOX = """
import equinox as eqx

class Block(eqx.Module):
    into: eqx.nn.Linear
    out: eqx.nn.Linear

    DECORATOR
    def __call__(self, x):
        return x + self.out(jnp.sin(self.into(x)))

key = jax.random.key(0)
net = Block(eqx.nn.Linear(4, 8, key=key), eqx.nn.Linear(8, 4, key=key))
weights, static = eqx.partition(net, eqx.is_array)

def f(weights, x):
    return jax.vmap(eqx.combine(weights, static))(x).sum()
"""
IN_ONE_PART = (
    OF_EQUINOX[: OF_EQUINOX.index("weights, static")]
    + "weights = net\n\ndef f(weights, x):\n    return jax.vmap(weights)(x).sum()\n"
)


def linen(decorator="", renamed="", used="Block"):
    return OF_LINEN.replace("DECORATOR\n", decorator).replace("RENAMED\n", renamed).replace("USED", used)


LIBRARIES = {
    "linen: a class that is wrapped where it is used": (
        linen(used="nn.remat(Block)"),
        (None, f"nn.remat(Block, {DOTS})()(x)"),
        "flax.linen",
    ),
    "linen: a class under a decorator": (
        linen("@nn.remat\n"),
        (None, f"@partial(nn.remat, {DOTS})\nclass Block(nn.Module)"),
        "flax.linen",
    ),
    "linen: a class with a name of its own": (
        linen(renamed="Wrapped = nn.checkpoint(Block, prevent_cse=False)\n\n", used="Wrapped"),
        (None, f"Wrapped = nn.checkpoint(Block, {DOTS}, prevent_cse=False)"),
        "flax.linen",
    ),
    "nnx: a method under a decorator": (
        OF_NNX.replace("DECORATOR", "@nnx.remat"),
        (None, f"    @partial(nnx.remat, {DOTS})\n    def __call__"),
        "flax.nnx",
    ),
    "equinox: a method under a decorator": (
        OF_EQUINOX.replace("DECORATOR", "@eqx.filter_checkpoint"),
        (None, f"    @partial(eqx.filter_checkpoint, {DOTS})\n    def __call__"),
        "equinox",
    ),
    "equinox: a call": (
        IN_ONE_PART.replace("    DECORATOR\n", "").replace(
            "vmap(weights)(x)", "vmap(lambda x: eqx.filter_checkpoint(weights)(x))(x)"
        ),
        (None, f"eqx.filter_checkpoint(weights, {DOTS})(x)"),
        "equinox",
    ),
    "equinox: the function, of a model in one part": (
        IN_ONE_PART.replace("    DECORATOR\n", "").replace(
            "weights = net", "weights = eqx.nn.MLP(4, 4, 8, 2, key=key)"
        ),
        ("function", f"@partial(eqx.filter_checkpoint, {DOTS})\ndef f"),
        "equinox",
    ),
}
LIBRARIES = {
    name: Program(text, "dots_saveable", [line], at, None, which)
    for name, (text, (at, line), which) in LIBRARIES.items()
}


def holds(module, program):
    """The edit is written, verified, and true: JAX lists for the edited text, imported, what was promised."""
    made = module(program.text)
    args = (made.weights, f32(2, 4)) if program.args is None else program.args
    before, codes = dict(vars(made)), [getattr(value, "__code__", None) for value in vars(made).values()]
    trace = rm.trace(made.f, *args)
    asked = keeping(trace, *program.ask, at=program.at) if isinstance(program.ask, tuple) else program.ask
    edit = trace.edit(asked, program.at)
    assert edit.verified, edit.differences
    assert not edit.unnamed
    assert [line for line in program.lines if line not in edit.apply_text()] == [], edit.apply_text()
    assert (dict(vars(made)), [getattr(value, "__code__", None) for value in vars(made).values()]) == (before, codes)
    again = module(edit.apply_text().encode())
    # Parameters of flax must have the names that they had; the objects of others are those of the new text.
    inputs = (
        args if program.args is not None else (made.weights if "linen" in program.library else again.weights, f32(2, 4))
    )
    report = rm.trace(again.f, *inputs).report()
    assert (report.saved_bytes, report.recomputed_flops) == (edit.saved_bytes, edit.recomputed_flops)
    if program.library not in ("flax.nnx", "equinox") and not any(isinstance(arg, str | bool) for arg in inputs):
        assert types_of_ours(report) == types_of_jax(again.f, inputs)
    if isinstance(program.ask, str):
        expected = trace.report(program.ask, program.at)
        assert Counter(row.type for row in report.residuals) == Counter(row.type for row in expected.residuals)
    else:
        assert edit.planned_bytes == edit.saved_bytes > 0
    return trace


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_it_says(module, name):
    holds(module, EDITS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_edit_of_a_model_does_what_it_says(module, name):
    program = LIBRARIES[name]
    library(program.library)
    trace = holds(module, program)
    if trace.sites[0].possible:
        assert not trace.edit("none", program.at).files
        return
    off = trace.edit("none", program.at)
    # Without its checkpoint flax calls parameters otherwise: then one that saves all.
    assert off.verified == (program.library != "flax.linen")
    assert off.best.verified
    assert off.best.saved_bytes == trace.report(off.best.policy, program.at).saved_bytes
    # What a name is given to stands in a method of a class of which there are objects already.
    kept = trace.edit(keeping(trace, "sin", at=program.at))
    assert "checkpoint_name(jnp.sin(" in kept.apply_text()
    assert kept.verified, kept.differences


# -------------------------------------------------------------------------------------------------- the text around it


@pytest.mark.parametrize(("end", "indent"), [("\n", "\t"), ("\r\n", "    ")])
def test_a_file_is_edited_line_by_line(module, tmp_path, end, indent):
    statements = ["y = jnp.sin(x @ w)  # ü", "y += x", "return y.sum()"]
    lines = [*HEAD.splitlines(), "def f(w, x):", *(indent + line for line in statements), ""]
    edit = kept(module(end.join(lines).encode()).f, SQUARE, "x @ w")
    assert edit.verified
    assert f'\n{indent}y = jnp.sin(checkpoint_name(x @ w, "f"))  # ü\n{indent}y += x\n' in edit.apply_text()
    (file,) = edit.files
    (tmp_path / "patched").write_bytes(file.old.encode())
    (tmp_path / "diff").write_bytes(file.diff().encode())
    subprocess.run(["patch", "-s", str(tmp_path / "patched"), str(tmp_path / "diff")], check=True, timeout=400)
    assert (tmp_path / "patched").read_bytes() == file.new.encode()


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            '"""A."""\nfrom __future__ import annotations\nimport jax.numpy as jnp\nimport jax; import sys\nA = 1\n',
            "import jax; import sys\nfrom jax.ad_checkpoint import checkpoint_name\nfrom functools import partial\nA",
        ),
        (
            '"""Doc."""\nif True:\n    import jax.numpy as jnp\n',
            '"""Doc."""\nfrom jax.ad_checkpoint import checkpoint_name\nimport jax\nfrom functools import partial\nif',
        ),
    ],
)
def test_imports_go_after_those_that_are_there(module, text, new):
    edit = kept(module(f"{text}\n\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n", head="").f, SQUARE, "x @ w")
    assert new in edit.apply_text()
    assert edit.verified


def test_each_file_has_its_edit(module):
    """Also where Python takes their functions' code for equal."""
    text = "\n\ndef layer(w, x):\n    return jnp.sin(x @ w)\n"
    first, second = module(text, "edited_first"), module(text, "edited_second")
    made = module(
        """
        import edited_first, edited_second

        def f(w, x):
            return (edited_first.layer(w, x) @ edited_second.layer(w, x)).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    for file in (first.__file__, second.__file__):
        plan = keeping(trace, "x @ w")
        edit = trace.edit(
            dataclasses.replace(plan, names=tuple(value for value in plan.names if value.source.file == file))
        )
        assert edit.verified, edit.differences
        assert {changed.file for changed in edit.files} == {file, made.__file__}
        assert edit.apply_text(file) != edit.apply_text(made.__file__)
    with pytest.raises(RematError, match="choose one of them"):
        edit.apply_text()
    with pytest.raises(RematError, match="it has no text for 7"):
        edit.apply_text(7)


def of_cell(cells):
    """A trace of the cells' function; ``rm.trace`` can be the fake engine's."""
    return Trace(Engine(cells.ns["f"], SQUARE, {}, None, False))


def test_cells(cells):
    cells.ok("import jax", "import jax.numpy as jnp")
    cells.ok("", "%pwd", "# the helper", "def layer(w, x):", "    return jnp.sin(x @ w)")
    cells.ok("def f(w, x):", "    here = %pwd", "    return (layer(w, x) @ w @ x)")
    trace = of_cell(cells)
    before = {name: value for name, value in cells.ns.items() if not name.startswith("_")}
    edit = trace.edit(keeping(trace, "x @ w"))
    assert edit.verified, edit.differences
    assert [file.cell for file in edit.files] == [2, 3]
    assert edit.apply_text(2) == (
        "\n%pwd\nfrom jax.ad_checkpoint import checkpoint_name\n# the helper\ndef layer(w, x):\n"
        '    return jnp.sin(checkpoint_name(x @ w, "layer"))'
    )
    assert edit.apply_text("In[3]").startswith("from functools import partial\n@partial(jax.checkpoint, policy=")
    assert "    here = %pwd\n" in edit.apply_text(3)
    assert edit.diff().startswith("--- In[2]\n+++ In[2]\n")
    assert {name: value for name, value in cells.ns.items() if not name.startswith("_")} == before
    # The text does what was said of it when it is run.
    for number in (2, 3):
        cells.ok(edit.apply_text(number))
    again = of_cell(cells).report()
    assert (again.saved_bytes, again.recomputed_flops) == (edit.saved_bytes, edit.recomputed_flops)


def test_a_cell_under_the_magic_keeps_it(cells, engine):
    cells.ok("import jax", "import jax.numpy as jnp", "w, x = jnp.ones((4, 4)), jnp.ones(4)")
    cells.ok("%%remat --args 'w, x'", "@jax.checkpoint", "def f(w, x):", "    return jnp.sin(x @ w).sum()")
    trace = of_cell(cells)
    edit = trace.edit(keeping(trace, "x @ w"))
    assert edit.apply_text() == (
        "%%remat --args 'w, x'\nfrom jax.ad_checkpoint import checkpoint_name\nfrom functools import partial\n"
        f"@partial(jax.checkpoint, policy={NAMED})\n"
        'def f(w, x):\n    return jnp.sin(checkpoint_name(x @ w, "f")).sum()'
    )
    assert edit.verified


def test_a_cell_that_imports_what_it_calls(cells, engine):
    """Python writes other code for a module's attribute where it sees the import; IPython shows it one statement."""
    cells.ok("import jax, jax.numpy as jnp", "", "def f(w, x):", "    return jnp.sin(x @ w).sum()")
    trace = of_cell(cells)
    assert trace.edit(keeping(trace, "x @ w")).verified


# --------------------------------------------------------------------------------------------------- plans, and nearest


def two_layers(module):
    """A trace and a plan of it that has a name."""
    made = module("\n\ndef f(w, x):\n    return jnp.sin(jnp.sin(x @ w) @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    plan = trace.plan(16)
    assert plan.names
    return trace, plan


# A text, the type of the arguments, which of the program's values is wanted, and what names just that.
VALUES = {
    "a carried value, in the body of its loop": (
        "def f(ws, x):\n    def step(c, w):\n        '''One.'''\n        return jnp.sin(w @ c), None\n"
        "    return jax.lax.scan(step, x, ws)[0].sum()\n",
        (f32(8, 4, 4), f32(4)),
        lambda value: value.output is None,
        "        '''One.'''\n        c = checkpoint_name(c, \"c\")\n",
    ),
    "one of two calls of a helper": (
        "def dense(w, x):\n    return x @ w\n\ndef f(w, x):\n    q = dense(w, x)\n    k = dense(w, jnp.sin(q))\n"
        "    return jnp.sin(k).sum()\n",
        SQUARE,
        lambda value: value.eqn.primitive.name == "dot_general",
        '    q = checkpoint_name(dense(w, x), "q")\n    k = dense(w, jnp.sin(q))\n',
    ),
    "one of several variables of an assignment": (
        "def f(w, x):\n    a, b = jnp.split(x @ w, [3])\n    return (a * a).sum() + b.sum()\n",
        SQUARE,
        lambda value: value.aval.shape == (3,),
        '    a, b = jnp.split(x @ w, [3])\n    a = checkpoint_name(a, "a")\n',
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_just_the_value_that_is_wanted_is_named(module, name):
    text, args, wanted, line = VALUES[name]
    trace = rm.trace(module(f"\n{text}").f, *args)
    naming = trace.engine.dissect("function").naming
    key = next(key for key, value in naming.values.items() if wanted(value))
    _, plan = two_layers(module)
    edit = trace.edit(
        dataclasses.replace(plan, status="", names=(PlannedValue(key, 1),), fingerprint=naming.fingerprint)
    )
    assert line in edit.apply_text()
    assert edit.verified


def test_what_names_more_than_the_plan_offers_the_nearest(module):
    """One expression of a loop names all of its layers, of which the plan saves some."""
    made = module(
        """
        def f(w, x):
            for _ in range(3):
                x = jnp.sin(x @ w)
            return x.sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit(trace.plan(32))
    assert (edit.verified, edit.saved_bytes, edit.excess_bytes, edit.budget_bytes) == (False, 48, 16, 32)
    assert "covers all values of its line" in edit.differences[-1]
    assert (edit.best.verified, edit.best.saved_bytes, edit.best.excess_bytes) == (True, 32, 0)
    nothing = trace.edit(trace.plan(16)).best  # one of several does not fit by itself
    assert (nothing.verified, nothing.policy, nothing.budget_bytes) == (True, "nothing_saveable", 16)
    alone = dataclasses.replace(edit, closest=None)
    for text in (display.text(alone), edit_html(alone)):
        assert f"exceeds that by {units.nbytes(16)}" in " ".join(text.split())
    kept_to = trace.edit(trace.plan(48))
    assert (kept_to.verified, kept_to.excess_bytes) == (True, 0)
    assert trace.edit("dots_saveable").budget_bytes is None  # none was asked for


def test_a_plan_without_a_verified_edit_says_so(module):
    trace, plan = two_layers(module)
    edit = dataclasses.replace(trace.edit(plan), verified=False, budget_bytes=16, differences=("why.",))
    assert edit.diff() == f"# This edit was not verified: why.\n{trace.edit(plan).diff()}"  # and keeps to its budget
    edit = dataclasses.replace(edit, budget_bytes=8)
    assert edit.diff() == "# There is no edit of the source that was verified to keep to 8 saved bytes: why.\n"
    best = dataclasses.replace(edit, closest=trace.edit(plan))
    assert best.diff().startswith("# No edit does exactly this. The nearest one: ")
    assert (best.diff().partition("\n")[2], best.apply_text()) == (best.best.diff(), trace.edit(plan).apply_text())


# Why no edit is the plan: its values are one layer's of several, or made inside a library's function or a rule.
PARTLY = {"three_layers", "dictionary", "fori", "attention", "embedding", "constant_captured", "binary8"}
PARTLY |= {"scanned_relu", "custom_jvp", "custom_vjp", "convolution"}
USUAL = {"named_layers", "nested_scan", "scanned_checkpoint", "custom_vjp"}


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_plans_of_programs(name, remat2):
    """What an edit says is complete: it is the plan or every difference is listed, and what is offered is verified."""
    fun, args = PROGRAMS[name]
    trace = rm.trace(fun, *args)
    for at in ("function", "sites")[: 1 + bool(trace.engine.primal.table.sites)]:
        try:
            plan = trace.plan(0.4, at)
        except RematError:  # less is never saved there
            continue
        edit = trace.edit(plan)
        assert (edit.planned_bytes, edit.planned_flops) == (plan.saved_bytes, plan.recomputed_flops)
        assert edit.verified or name in PARTLY
        assert edit.verified == (not edit.differences)
        assert not edit.verified or edit.saved_bytes == plan.saved_bytes
        if edit.closest is not None:
            assert edit.closest.verified
            assert edit.closest.saved_bytes <= plan.budget_bytes
            assert not edit.closest.unnamed


LAYERS = """
def attention(w, x):
    return jnp.tanh(jax.nn.softmax(x @ w) @ w)

def feed_forward(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)

DECORATOR
def block(w, x):
    x = x + attention(w, x)
    return x + feed_forward(w, x)

def f(ws, x):
    for w in ws:
        x = block(w, x)
    return x.sum()
"""
SEVERAL = {  # a policy for each place; the decorator of `block`; what the edited text has
    "two functions": (
        {"attention": "nothing_saveable", "feed_forward": "dots_saveable"},
        "",
        ["@jax.checkpoint\ndef attention", "dots_saveable)\ndef feed_forward"],
    ),
    "moved inward": (
        {"block": "none", "attention": "nothing_saveable"},
        "@jax.checkpoint",
        ["@jax.checkpoint\ndef attention"],
    ),
    "one in another": (
        {"block": "dots_saveable", "attention": "nothing_saveable"},
        "@jax.checkpoint",
        ["dots_saveable)\ndef block", "@jax.checkpoint\ndef attention"],
    ),
    "as it is written, at one of them": (
        {"block": "as_written", "attention": "nothing_saveable"},
        "@jax.checkpoint",
        ["@jax.checkpoint\ndef block"],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_policies_at_several_places_are_written(module, name):
    at, decorator, lines = SEVERAL[name]
    args = [f32(4, 4)] * 2, f32(2, 4)
    trace = rm.trace(module(LAYERS.replace("DECORATOR", decorator)).f, *args)
    edit = trace.edit("as_written", at)
    assert edit.verified, edit.differences
    assert not [line for line in lines if line not in edit.apply_text()], edit.apply_text()
    again = module(edit.apply_text().encode())
    report = trace.report("as_written", at)
    assert answers(rm.trace(again.f, *args).report()) == answers(report)
    assert trace.edit("mixed", report.at) == edit  # as a row of `places` is asked for


# A place that is no whole function, and that at which the nearest edit writes the checkpoint.
SOME = {
    "block[::2]": "block",
    "block/3": "block",
    "step/2": "step",
    "attention/2=nothing_saveable, feed_forward=dots_saveable": (
        "attention=nothing_saveable, feed_forward=dots_saveable"
    ),
    "block=none, block/2=dots_saveable": "block=dots_saveable",
    "step/2=nothing_saveable, step=nothing_saveable": "step=nothing_saveable",
}
STEPS = LAYERS.replace("DECORATOR", "") + (
    "\ndef of_loop(ws, x):\n    def step(x, w):\n        return block(w, x), None\n"
    "    return jax.lax.scan(step, x, ws)[0].sum()\n"
)


@pytest.mark.parametrize("at", SOME)
def test_places_that_are_no_whole_function_have_a_snippet_and_the_nearest_edit(module, at):
    made = module(STEPS)
    scanned = at.startswith("step")
    ws = f32(6, 4, 4) if scanned else [f32(4, 4)] * 6
    trace = rm.trace(made.of_loop if scanned else made.f, ws, f32(2, 4))
    policy, place = "dots_saveable", at
    if "=" in at:
        policy, place = "as_written", dict(part.split("=") for part in at.split(", "))
    edit = trace.edit(policy, place)
    report = trace.report(policy, place)
    assert not edit.verified
    assert not edit.files
    assert len(edit.unnamed) == 1
    assert report.code.split("; ")[0] in edit.unnamed[0]
    assert (edit.best.verified, edit.best.at, edit.planned_bytes) == (True, SOME[at], report.saved_bytes)
    comment, diff = edit.diff().split("\n", 1)
    assert comment.startswith("# ")
    assert comment.endswith(f" at {SOME[at]}.")
    assert diff == edit.best.diff() != ""


WITHIN_GELU = """
def block(x, w):
    h = jnp.tanh(x @ w)
    s = jnp.exp(-jax.nn.gelu(h @ w)) * h
    return x + jnp.sin(s @ w)

def f(ws, x):
    def step(x, w):
        return block(x, w), None
    return jnp.sum(jax.lax.scan(step, x, ws)[0] ** 2)
"""


LIBRARY = """
def f(ws, x):
    keep = jax.checkpoint  # passed on, so that it is not taken off

    def step(x, w):
        return keep(lambda x: jnp.sin(jnp.tanh(x @ w) @ w))(x), None

    return jnp.sum(jax.lax.scan(step, x, ws)[0] ** 2)
"""
# A text, a place, what the budget is of, a device, and how much of what there is to save it leaves.
BUDGETS = {
    "steps of a loop, a TPU": (WITHIN_GELU, "step/4", "peak", "TPU v5e", 0.2),
    "steps of a loop, saved": (WITHIN_GELU, "step/4", "saved", None, 0.5),
    "a function": (WITHIN_GELU, "step", "peak", "H100 SXM", 0.2),
    "a checkpoint that is not taken off": (LIBRARY, None, "peak", "H100 SXM", 1.1),
    "as here": (LIBRARY, None, "peak", None, 0.5),
    "saved, and not taken off": (LIBRARY, None, "saved", None, 1.1),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_an_edit_and_the_nearest_are_held_to_what_the_plan_was_of(module, case):
    text, at, of, device, share = BUDGETS[case]
    args = f32(16, 128, 128), f32(512, 128)
    trace = rm.trace(module(text).f, *args)

    def figure(report):
        return report.peak_bytes if of == "peak" else report.saved_bytes

    least = figure(trace.report("nothing_saveable", at, device=device))
    most = figure(trace.report("none", device=device))
    plan = trace.plan(least + round((most - least) * share), of=of, at=at, device=device)
    edit = trace.edit(plan)
    for each in (edit, edit.best):
        assert (each.budget_bytes, each.of, each.peak_device) == (plan.budget_bytes, of, plan.peak_device)
    assert edit.best.verified
    assert not edit.best.excess_bytes
    edited = rm.trace(module(edit.apply_text().encode()).f, *args).report(device=device)
    assert figure(edited) == figure(edit.best) <= plan.budget_bytes
    whose = "saved bytes" if of == "saved" else f"estimated peak{f' on {device}' if device else ''}"
    beyond = dataclasses.replace(edit.best, **{f"{of}_bytes": plan.budget_bytes + 1})
    for words in (display.text(edit), edit_html(edit), beyond.diff()):
        assert whose in " ".join(words.split())
    assert (device or "") in plan_meaning(plan)


SHARED = """
def block(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)

def other(w, x):
    return jnp.cos(jnp.tanh(x @ w) @ w)

def f(w, x):
    for layer in (block, other):
        x = jax.checkpoint(layer)(w, x)
    return x.sum()
"""


def test_a_checkpoint_of_several_places_is_written_for_all_of_them(module):
    trace = rm.trace(module(SHARED).f, *ROWS)
    one = trace.edit("dots_saveable", "block")
    assert not one.verified
    assert "covers all values of its line" in one.differences[-1]
    assert one.diff().startswith(f"# This edit was not verified: {one.differences[0]}\n--- ")
    both = trace.edit("dots_saveable", {"block": "dots_saveable", "other": "dots_saveable"})
    assert both.verified, both.differences
    assert f"x = jax.checkpoint(layer, {DOTS})(w, x)" in both.apply_text()
    with pytest.raises(RematError, match="of block, other together: choose one policy"):
        trace.edit("as_written", {"block": "none", "other": "dots_saveable"})


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_a_library_calls_has_no_verified_edit(module):
    library("equinox")
    made = module(
        """
        import equinox as eqx

        weights = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))

        def f(weights, x):
            return jax.vmap(weights)(x).sum()
        """
    )
    trace = rm.trace(made.f, made.weights, f32(2, 4))
    assert not trace.edit("dots_saveable", "Linear.__call__").verified
    edit = trace.edit("dots_saveable", "MLP.__call__")
    assert edit.verified, edit.differences


@pytest.mark.filterwarnings("ignore")
def test_of_haiku_a_place_has_a_snippet_and_the_function_an_edit(module):
    library("haiku")
    made = module(
        """
        import haiku as hk

        class Block(hk.Module):
            def __call__(self, x):
                return x + hk.Linear(4)(jnp.sin(hk.Linear(8)(x)))

        net = hk.without_apply_rng(hk.transform(lambda x: Block()(x)))
        weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(weights, x):
            return net.apply(weights, x).sum()
        """
    )
    trace = rm.trace(made.f, made.weights, f32(2, 4))
    with pytest.raises(RematError, match=r"or is haiku's: .* as in `hk\.remat\("):
        trace.edit("dots_saveable", "Block.__call__")
    assert trace.edit("dots_saveable", "function").verified


# ------------------------------------------------------------------------------------------------ what is left to users


def test_what_names_nothing_says_why(module):
    made = module("\n\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    for nothing in ("as_written", "none"):
        assert len(trace.edit(nothing).unnamed) == 1
    assert trace.edit("none").files == trace.edit("as_written").files == trace.edit("none", "function").files == ()
    assert trace.edit("dots_saveable").unnamed == ()


def test_what_cannot_be_edited_is_refused_in_one_sentence(module):
    made = module("\n\ndef f(model, x):\n    return model['act'](x @ model['w']).sum()\n")
    trace = rm.trace(made.f, {"w": SQUARE[0], "act": jnp.sin}, SQUARE[1])
    assert "TypeError" in trace.edit("dots_saveable").differences[0]
    made = module("\n\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n")

    def saves_sines(primitive, *_, **__):
        return primitive.name == "sin"

    trace = rm.trace(made.f, *SQUARE)
    for policy, name in ((saves_sines, "saves_sines"), (lambda *_, **__: True, "<lambda>")):
        with pytest.raises(RematError, match=f"{name} is a policy of your own: give it to jax.checkpoint by hand"):
            trace.edit(policy, "function")
    space = {}
    exec("import jax.numpy as jnp\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n", space)
    with pytest.raises(RematError, match=r"the source of f is not available \(<string>\)"):
        rm.trace(space["f"], *SQUARE).edit("nothing_saveable")
    with pytest.raises(RematError, match="nothing to edit"):
        rm.trace(jnp.sin, f32()).edit("nothing_saveable")


def test_what_raises_apart_from_the_session_is_refused(module):
    made = module(
        """
        RAN = []

        def f(w, x):
            RAN.append(1)
            if len(RAN) > 1:
                raise ValueError("only once\\nand no more")
            return jnp.sin(x @ w).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    with pytest.raises(RematError, match=r"apart from your session.*ValueError: only once\.$") as raised:
        trace.edit(keeping(trace, "x @ w"))
    edit = trace.edit("dots_saveable")
    assert (edit.verified, edit.differences) == (False, (str(raised.value),))


def test_a_function_that_differs_from_trace_to_trace_is_refused(module):
    made = module(
        """
        N = [0]

        def f(w, x):
            N[0] += 1
            for _ in range(N[0]):
                x = jnp.sin(x @ w)
            return x.sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    plan = keeping(trace, "x @ w")
    with pytest.raises(RematError, match="does not make the same program each time"):
        trace.edit(plan)


def test_what_is_given_must_be_a_choice(module):
    trace, plan = two_layers(module)
    with pytest.raises(RematError, match="not of int"):
        trace.edit(3)
    with pytest.raises(RematError, match="the plan is for at='function'"):
        trace.edit(plan, "sites")
    fun, args = PROGRAMS["named_tanh"]
    with pytest.raises(RematError, match="made for another program"):
        rm.trace(fun, *args).edit(plan)


def test_a_file_that_has_changed_is_refused(module):
    trace, plan = two_layers(module)
    path = Path(trace.engine.given.fun.__code__.co_filename)
    old = path.read_text()
    path.write_text(f"{old}# more\n")
    assert trace.edit(plan).verified  # the function is the same
    path.write_text(old.replace("sin", "cos"))
    with pytest.raises(RematError, match="has changed since it was run"):
        trace.edit(plan)
    path.write_text("def (")
    with pytest.raises(RematError, match="has changed since it was run"):
        trace.edit(plan)


# ------------------------------------------------------------------------------------------------------ no side effects


def test_nothing_of_the_session_changes(module, tmp_path):
    made = module(
        """
        RAN = []
        REGISTRY = {}

        def register(f):
            REGISTRY[f.__name__] = f
            return f

        RAN.append(1)

        @register
        def f(w, x, one=RAN.append(2) or 1.0):
            return jnp.sin(x @ w).sum() * one

        TABLE = {"f": f}
        RAN.append(len(RAN))
        """
    )

    def state():
        text = Path(made.__file__).read_text()
        return dict(vars(made)), list(made.RAN), dict(made.REGISTRY), made.f.__code__, text

    before = state()
    assert kept(made.f, SQUARE, "x @ w").verified
    assert state() == before
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".py"] == [f"{made.__name__}.py"]


def test_other_threads_run_what_is_written_while_an_edit_is_verified(module):
    """The user's own functions are swapped for the thread that traces the edited text, and for no other."""
    made = module(
        """
        import threading

        CALLS, GO, DONE = [], threading.Event(), threading.Event()

        def layer(w, x, *rest, scale=1.0, **more):
            return scale * jnp.sin(x @ w)

        def f(w, x):
            if CALLS:
                GO.set()
                DONE.wait(600)
            CALLS.append(threading.get_ident())
            return layer(w, x, 1, scale=2.0, other=3).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    values = jnp.ones((4, 4)), jnp.ones(4)
    seen = []

    def elsewhere():
        made.GO.wait(600)
        seen.append(jax.make_jaxpr(made.layer)(*values))
        made.DONE.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    edit = trace.edit(keeping(trace, "x @ w"))
    thread.join()
    assert edit.verified, edit.differences
    (jaxpr,) = seen
    assert "name" not in {eqn.primitive.name for eqn in jaxpr.eqns}


def test_an_edit_asks_for_one_report_and_looks_at_no_object_of_the_session(module, monkeypatch):
    """Only what the edited text does is worth a report, and the heap is the user's."""
    text = """
    import functools

    def timed(fun):
        @functools.wraps(fun)
        def inner(*args):
            return fun(*args)
        return inner

    @timed
    def loss(w, x):
        h = jnp.sin(x @ w)
        return jnp.sum(jnp.sin(h @ w))

    def step(w, x):
        return w - jax.grad(loss)(w, x)
    """
    asked = []
    for name in ("get_objects", "get_referrers", "collect"):
        monkeypatch.setattr(gc, name, lambda *args, name=name: asked.append(name) or [])
    own = reports.full
    monkeypatch.setattr(reports, "full", lambda *args: asked.append("report") or own(*args))
    trace = rm.trace(module(text).step, *SQUARE)
    plan = keeping(trace, "jnp.sin(x @ w)")
    del asked[:]
    edit = trace.edit(plan)
    assert edit.verified
    assert asked == ["report"]


def test_an_object_that_raises_errors_of_its_own_is_asked_nothing(module):
    """As a table does, of which every attribute is a model."""
    text = """
    class Table:
        def __getattr__(self, name):
            raise ValueError(f"there is no model {name}")
        def __call__(self, x):
            return x

    table = Table()

    def block(w, x):
        return jnp.sin(table(x) @ w)

    def loss(w, x):
        return jnp.sum(block(w, x) ** 2)
    """
    trace = rm.trace(module(text).loss, *SQUARE)
    assert trace.edit("nothing_saveable").verified
