"""Plans as edits of the user's source: the text stays the user's, and JAX does with it what the plan promised."""

import dataclasses
import importlib.util
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic import _jax, units
from remat_magic.editing.carried import carried_by
from remat_magic.editing.parsed_text import parsed_text
from remat_magic.editing.text_changes import TextChanges
from remat_magic.records import PlannedValue, RematError
from remat_magic.views import display
from remat_magic.views.edit import edit_html
from tests.benchmarks import models, named_models
from tests.programs import PROGRAMS, f32
from tests.test_models import library
from tests.volume import usually

_count = itertools.count()

HEAD = "import jax\nimport jax.numpy as jnp\n"
SQUARE = f32(4, 4), f32(4)
NAMED = 'jax.checkpoint_policies.save_only_these_names("sin_dot")'


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a file and imports it as a module, under the given name or one of its own."""

    def write(text, name=None, head=HEAD):
        name = name or f"edited_{next(_count)}"
        path = tmp_path / f"{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else (head + dedent(text)).encode())
        spec = importlib.util.spec_from_file_location(name, path)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return write


def rows(trace, *expressions):
    """The residuals, of all that could be saved, that stand at these expressions."""
    found = []
    for policy in ("everything_saveable", "dots_saveable"):
        for row in trace.report(policy, "function").residuals:
            if row.kind == "intermediate" and row.source and row.source.expression in expressions and row not in found:
                found.append(row)
    assert {row.source.expression for row in found} == set(expressions)
    return found


def kept(fun, args, *expressions, at=None):
    trace = rm.trace(fun, *args)
    return trace.edit(rows(trace, *expressions), at)


def added(edit):
    """The lines that the edit adds, and those that it takes away."""
    lines = [line for line in edit.diff().splitlines() if not line.startswith(("---", "+++", "@@"))]
    return [line[1:] for line in lines if line[0] == "+"], [line[1:] for line in lines if line[0] == "-"]


def applies(edit, tmp_path):
    """``patch`` makes the new text of the old one with the diff."""
    for file in edit.files:
        (tmp_path / "patched").write_bytes(file.old.encode())
        (tmp_path / "diff").write_bytes(file.diff().encode())
        command = ["patch", "-s", "--binary", str(tmp_path / "patched"), str(tmp_path / "diff")]
        subprocess.run(command, check=True, timeout=400)
        assert (tmp_path / "patched").read_bytes() == file.new.encode()


# -------------------------------------------------------------------------------------------------- names and policies


def test_an_assigned_value_is_called_as_its_variable(module):
    made = module(
        """
        def f(w, x):
            q = x @ w
            return jnp.sin(q).sum()
        """
    )
    edit = kept(made.f, SQUARE, "x @ w")
    assert added(edit)[0] == [
        "from jax.ad_checkpoint import checkpoint_name",
        "from functools import partial",
        '@partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("q"))',
        '    q = checkpoint_name(x @ w, "q")',
    ]
    assert (edit.verified, edit.differences, edit.saved_bytes) == (True, (), 16)
    assert [name.name for name in edit.names] == ["q"]


# The text of f's body, the expression to keep, and what becomes of that.
FORMS = {
    "inside another": ("return jnp.sin(x @ w).sum()", "x @ w", '(checkpoint_name(x @ w, "sin_dot")).sum()'),
    "returned": ("return x @ w @ x * x", "x @ w @ x", 'return checkpoint_name(x @ w @ x, "f_dot") * x'),
    "in brackets": ("return jnp.sum((x@w)**2)", "x@w", 'jnp.sum((checkpoint_name(x@w, "sum_dot"))**2)'),
    "next to a keyword": ("return-(x @ w) @ x", "x @ w", 'return-(checkpoint_name(x @ w, "f_dot")) @ x'),
    "beginning at a keyword": (
        "return-jnp.exp(x @ w) @ jnp.exp(-x)if x.ndim else-x",
        "-jnp.exp(x @ w)",
        'return checkpoint_name(-jnp.exp(x @ w), "f_neg") @ jnp.exp(-x)if x.ndim else-x',
    ),
    "a walrus": ("return ((y := x @ w) * jnp.sin(y)).sum()", "x @ w", '((y := checkpoint_name(x @ w, "y")) * jnp'),
    "in a comprehension": (
        "return sum(jnp.sin(v @ w).sum() for v in (x, 2 * x))",
        "v @ w",
        'return sum(jnp.sin(checkpoint_name(v @ w, "sin_dot")).sum() for v in (x, 2 * x))',
    ),
    "in a lambda": (
        "return (lambda v: jnp.sin(v @ w).sum())(x)",
        "v @ w",
        'return (lambda v: jnp.sin(checkpoint_name(v @ w, "sin_dot")).sum())(x)',
    ),
    "a keyword argument": (
        "return jnp.sum(a=jnp.sin(x @ w))",
        "x @ w",
        'return jnp.sum(a=jnp.sin(checkpoint_name(x @ w, "sin_dot")))',
    ),
    "a dictionary": (
        "return {'att': x @ w}['att'] @ x * x",
        "x @ w",
        "return {'att': checkpoint_name(x @ w, 'att')}['att'] @ x * x",
    ),
    "a comment": (
        "y = x @ w  # 'so'\n    return jnp.sin(y).sum()",
        "x @ w",
        "y = checkpoint_name(x @ w, \"y\")  # 'so'",
    ),
    "characters of two bytes": (
        "ß = 'é'; y = jnp.sin(x @ w); return y.sum()",
        "x @ w",
        "ß = 'é'; y = jnp.sin(checkpoint_name(x @ w, 'sin_dot')); return y.sum()",
    ),
    "a conditional": (
        "return jnp.sin(x @ w if x.ndim else x).sum()",
        "x @ w",
        'return jnp.sin(checkpoint_name(x @ w, "sin_dot") if x.ndim else x).sum()',
    ),
    "an attribute": ("return jnp.sin(w.T @ x).sum()", "w.T @ x", '(checkpoint_name(w.T @ x, "sin_dot"))'),
}


@pytest.mark.parametrize("form", FORMS)
def test_expressions_are_wrapped_where_they_stand(module, tmp_path, form):
    body, expression, line = FORMS[form]
    made = module(f"\n\ndef f(w, x):\n    {body}\n")
    edit = kept(made.f, SQUARE, expression)
    new = edit.apply_text()
    assert line in new
    assert edit.verified, edit.differences
    # Two imports and a decorator; all other lines stay lines.
    assert len(new.split("\n")) == len(edit.files[0].old.split("\n")) + 3
    applies(edit, tmp_path)


def test_an_expression_of_several_lines_keeps_its_lines(module):
    made = module(
        """
        def f(w, x):
            y = (
                x  # left
                @ w
            )
            return jnp.sin(y).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit([row for row in trace.report("dots_saveable").residuals if row.kind == "intermediate"])
    assert '    y = (\n        checkpoint_name(x  # left\n        @ w, "y")\n    )\n' in edit.apply_text()
    assert edit.verified


def test_a_chain_of_methods_over_several_lines(module):
    made = module(
        """
        def f(w, x):
            y = (
                (x @ w)
                .reshape(2, 2)
                .sum(0)
            )
            return (y * y).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit([row for row in trace.report("none").residuals if row.shape == (2,)])
    assert [name.name for name in edit.names] == ["y"]
    assert '.sum(0), "y")\n    )\n' in edit.apply_text()
    assert edit.verified


@pytest.mark.each_once
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("indent", ["    ", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_tabs_and_marks_stay(module, end, indent, mark):
    body = ["y = jnp.sin(x @ w)  # ü", "y += x", "return y.sum()"]
    lines = [*HEAD.splitlines(), "def f(w, x):", *(indent + line for line in body), ""]
    made = module((mark + end.join(lines)).encode())
    edit = kept(made.f, SQUARE, "x @ w")
    new = edit.apply_text()
    assert new.startswith(mark + "import jax")
    assert new.count("\n") + new.count("\r") == (len(lines) + 2) * len(end)
    assert f'{end}{indent}y = jnp.sin(checkpoint_name(x @ w, "sin_dot"))  # ü{end}{indent}y += x{end}' in new
    assert edit.verified


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        ("x += x @ w", 'x += x @ w\n    x = checkpoint_name(x, "x")\n    return'),
        ("x += x @ w  # why", 'x += x @ w  # why\n    x = checkpoint_name(x, "x")\n    return'),
        ("if True: x += x @ w", 'if True: x += x @ w; x = checkpoint_name(x, "x")\n    return'),
    ],
)
def test_an_augmented_assignment_gets_a_statement_of_its_own(module, statement, new):
    made = module(f"\n\ndef f(w, x):\n    {statement}\n    return (x * x).sum()\n")
    edit = kept(made.f, SQUARE, "x += x @ w")
    assert f"    {new}" in edit.apply_text()
    assert edit.verified


def test_what_is_added_to_a_variable_is_not_called_as_it(module):
    made = module("\n\ndef f(w, x):\n    x += x @ w\n    return jnp.sin(x).sum()\n")
    assert '    x += checkpoint_name(x @ w, "x_dot")\n' in kept(made.f, SQUARE, "x @ w").apply_text()


def test_one_of_several_variables_of_an_assignment(module):
    made = module(
        """
        def f(w, x):
            a, b = jnp.split(x @ w, [3])
            return (a * a).sum() + b.sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit([row for row in trace.report("none").residuals if row.shape == (3,)])
    # The call gives both, and only one is wanted.
    assert '    a, b = jnp.split(x @ w, [3])\n    a = checkpoint_name(a, "a")\n' in edit.apply_text()
    assert edit.verified


def test_a_carried_value_is_named_in_the_body_of_the_loop(module):
    made = module(
        """
        def f(ws, x):
            def step(c, w):
                '''One.'''
                return jnp.sin(w @ c), None

            return jax.lax.scan(step, x, ws)[0].sum()
        """
    )
    trace = rm.trace(made.f, f32(8, 4, 4), f32(4))
    naming = trace.engine.dissect("function").naming
    (key,) = (key for key, value in naming.values.items() if value.output is None)
    draft = dataclasses.replace(two_layers(module)[1], names=(PlannedValue(key, 128),), fingerprint=naming.fingerprint)
    edit = trace.edit(draft)
    assert "        '''One.'''\n        c = checkpoint_name(c, 'c')\n" in edit.apply_text()
    assert edit.verified


def test_the_function_may_be_a_lambda_or_made_by_another(module):
    made = module(
        """
        f = lambda w, x: jnp.sin(x @ w).sum()

        def make(scale):
            def g(w, x, *, s=scale):
                return jnp.sin(s * x @ w).sum() * scale
            return g

        g = make(2.0)
        """
    )
    edit = kept(made.f, SQUARE, "x @ w")
    assert 'f = jax.checkpoint(lambda w, x: jnp.sin(checkpoint_name(x @ w, "sin_dot")).sum(), ' in edit.apply_text()
    assert edit.verified
    edit = kept(made.g, SQUARE, "s * x @ w")
    assert edit.verified
    assert added(edit)[0][2:] == [
        f"    @partial(jax.checkpoint, policy={NAMED})",
        '        return jnp.sin(checkpoint_name(s * x @ w, "sin_dot")).sum() * scale',
    ]


def test_static_arguments_stay_static(module):
    made = module(
        """
        def f(kind, w, x, flag):
            y = x @ w
            return (jnp.sin(y) if kind == "sin" and flag else y).sum()
        """
    )
    edit = kept(made.f, ("sin", *SQUARE, True), "x @ w")
    assert "static_argnums=(0, 3))" in edit.diff()
    assert edit.verified


CLASS = """
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


def f(model, x):
    return model(x) * 2
"""


def test_methods_of_objects(module):
    made = module(CLASS)
    model, held = made.Model(SQUARE[0]), made.Model(jnp.ones((4, 4)))
    before = dict(vars(made))
    for fun, args in (
        (made.f, (model, SQUARE[1])),
        (made.Model.__call__, (model, SQUARE[1])),
        (held.__call__, SQUARE[1:]),
        (held, SQUARE[1:]),
    ):
        edit = kept(fun, args, "v @ self.w")
        assert 'return checkpoint_name(v @ self.w, "mix_dot")' in edit.apply_text()
        assert edit.verified, edit.differences
    assert dict(vars(made)) == before
    assert type(model) is type(held) is made.Model


# ------------------------------------------------------------------------------------------ objects, and where they are

HOLDERS = {
    "a global": ("MODEL = Model(jnp.ones((4, 4)))", "def f(w, x):\n    return MODEL(x @ w)"),
    "a closure": (
        "def make(model):\n    def f(w, x):\n        return model(x @ w)\n    return f",
        "f = make(Model(jnp.ones((4, 4))))",
    ),
    "a default": ("MODEL = Model(jnp.ones((4, 4)))", "def f(w, x, model=MODEL):\n    return model(x @ w)"),
    "a keyword's default": ("MODEL = Model(jnp.ones((4, 4)))", "def f(w, x, *, model=MODEL):\n    return model(x @ w)"),
    "a list": ("MODELS = [Model(jnp.ones((4, 4)))]", "def f(w, x):\n    return sum(model(x @ w) for model in MODELS)"),
    "another object": (
        "class Holder:\n    pass\n\nHELD = Holder()\nHELD.me, HELD.model = HELD, Model(jnp.ones((4, 4)))",
        "def f(w, x):\n    return HELD.me.model(x @ w)",
    ),
    "a bound method": ("CALL = Model(jnp.ones((4, 4))).__call__", "def f(w, x):\n    return CALL(x @ w)"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_methods_are_edited_wherever_their_object_is_held(module, holder):
    made = module(CLASS.replace("def f(", "def unused(") + "\n\n".join(HOLDERS[holder]))
    before = dict(vars(made))
    edit = kept(made.f, SQUARE, "v @ self.w")
    assert "return checkpoint_name(v @ self.w, " in edit.apply_text()
    assert edit.verified, edit.differences
    assert dict(vars(made)) == before


# ---------------------------------------------------------------------------------------------- checkpoints as written

BODY = "\ndef block(w, x):\n    return jnp.sin(x @ w)\n"
SITES = {
    "decorator": (f"@jax.checkpoint{BODY}", f"@partial(jax.checkpoint, policy={NAMED})"),
    "another name": (f"from jax import remat as r\n@r{BODY}", f"@partial(r, policy={NAMED})"),
    "decorator with arguments": (
        f"import functools\n@functools.partial(jax.checkpoint, prevent_cse=False){BODY}",
        f"@functools.partial(jax.checkpoint, prevent_cse=False, policy={NAMED})",
    ),
    "comma and comment": (
        f"import functools\n@functools.partial(\n    jax.checkpoint,\n    prevent_cse=False,  # why\n){BODY}",
        f"    prevent_cse=False, policy={NAMED}  # why",
    ),
    "another policy": (
        f"from functools import partial\n@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable){BODY}",
        f"@partial(jax.checkpoint, policy={NAMED})",
    ),
    "call": (
        f"{BODY.replace('block', '_block')}\nblock = jax.checkpoint(_block)\n",
        f"block = jax.checkpoint(_block, policy={NAMED})",
    ),
    "lambda": (
        "block = jax.checkpoint((lambda w, x: jnp.sin(x @ w)),)\n",
        'block = jax.checkpoint((lambda w, x: jnp.sin(checkpoint_name(x @ w, "sin_dot"))), '
        'policy=jax.checkpoint_policies.save_only_these_names(\n    "sin_dot",\n))',
    ),
    "a partial with a name": (
        f"from functools import partial\nremat = partial(jax.checkpoint, prevent_cse=False)\n@remat{BODY}",
        f"@partial(remat, policy={NAMED})",
    ),
    "a call of a partial with a name": (
        f"from functools import partial\nremat = partial(jax.checkpoint, prevent_cse=False)"
        f"{BODY.replace('block', '_block')}\nblock = remat(_block)\n",
        f"block = remat(_block, policy={NAMED})",
    ),
    "a helper that applies it": (
        f"def remat(fun):\n    return jax.checkpoint(fun)\n\n@remat{BODY}",
        f"    return jax.checkpoint(fun, policy={NAMED})",
    ),
    "methods that are held": (
        "class Layer:\n    def run(self, w, x):\n        return jnp.sin(x @ w)\n\n"
        "layers = [Layer()]\ncalls = [jax.checkpoint(each.run) for each in layers]\n\n"
        "def block(w, x):\n    return calls[0](w, x)\n",
        f"calls = [jax.checkpoint(each.run, policy={NAMED}) for each in layers]",
    ),
    "jit around": (f"@jax.jit\n@jax.checkpoint{BODY}", f"@partial(jax.checkpoint, policy={NAMED})"),
}


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        ("save_only_these_names('h')", "jax.checkpoint_policies.save_only_these_names('h')"),
        (
            "dots_saveable | save_only_these_names('h')",
            "jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, "
            "jax.checkpoint_policies.save_only_these_names('h'))",
        ),
    ],
)
def test_a_policy_of_the_programs_own_names_is_written(module, policy, written):
    made = module(
        """
        from jax.ad_checkpoint import checkpoint_name

        def block(w, x):
            return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "h"))

        def f(w, x):
            return block(w, block(w, x)).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    for edit in (trace.edit(policy, "block"), trace.edit("as_written", {"block": policy})):
        assert edit.verified, edit.differences
        assert edit.saved_bytes == trace.report(policy, "block").saved_bytes
        assert any(f"(jax.checkpoint, policy={written})" in line for line in added(edit)[0])


def test_a_policy_of_the_users_own_is_not_written(module):
    made = module("def f(w, x):\n    return jnp.sin(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)

    def saves_sines(primitive, *_, **__):
        return primitive.name == "sin"

    for policy, name in ((saves_sines, "saves_sines"), (lambda *_, **__: True, "<lambda>")):
        with pytest.raises(RematError, match=f"{name} is a policy of your own: give it to jax.checkpoint by hand"):
            trace.edit(policy, "function")


@pytest.mark.parametrize("form", SITES)
def test_the_policy_of_a_checkpoint_is_set_where_it_is_applied(module, tmp_path, form):
    text, line = SITES[form]
    made = module(f"{text}\n\ndef f(w, x):\n    return block(w, block(w, x)).sum()\n")
    edit = kept(made.f, SQUARE, "x @ w", at="sites")
    assert f"\n{line}\n" in edit.apply_text()
    assert edit.verified, edit.differences
    applies(edit, tmp_path)


def test_a_checkpoint_inside_a_function_that_made_the_traced_one(module):
    made = module(
        """
        def block(w, x):
            y = x @ w
            return jnp.sin(y)

        def make(site):
            one = jax.checkpoint(block) if site else block

            def f(w, x):
                return one(w, one(w, x)).sum()

            return f
        """
    )
    edit = kept(made.make(True), SQUARE, "x @ w", at="sites")
    policy = 'policy=jax.checkpoint_policies.save_only_these_names("y")'
    assert f"one = jax.checkpoint(block, {policy}) if site else block\n" in edit.diff()
    assert edit.verified


def test_policies_without_names_and_none(module):
    made = module(f"@jax.checkpoint{BODY}\n\ndef f(w, x):\n    return block(w, x).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit("dots_saveable")
    assert "+@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n" in edit.diff()
    assert edit.verified
    edit = trace.edit("none")
    assert added(edit) == ([], ["@jax.checkpoint"])
    assert edit.verified
    assert trace.edit("as_written").files == ()
    assert trace.edit("none", "function").files == ()


def test_names_that_are_there_are_kept_and_no_new_one_is_like_them(module):
    made = module(
        """
        from jax.ad_checkpoint import checkpoint_name as named

        def f(w, x):
            a = named(x @ w, "it's \\"q\\"")
            sin_dot = named(jnp.cos(a), "sin_dot")
            return jnp.sin(sin_dot @ w).sum()
        """
    )
    edit = kept(made.f, SQUARE, "x @ w", "sin_dot @ w")
    assert [(name.name, name.existing) for name in edit.names] == [('it\'s "q"', True), ("sin_dot_2", False)]
    assert 'named(sin_dot @ w, "sin_dot_2")' in edit.diff()
    assert "import checkpoint_name\n" not in edit.diff()
    assert repr('it\'s "q"') in edit.diff()
    assert edit.verified


def test_a_variable_of_the_same_name_is_in_nobodys_way(module):
    made = module(
        """
        partial = 3

        def f(w, x):
            checkpoint_name = x @ w
            return jnp.sin(checkpoint_name).sum() * partial
        """
    )
    edit = kept(made.f, SQUARE, "x @ w")
    assert "import checkpoint_name as checkpoint_name_\n" in edit.diff()
    assert "import partial as partial_\n" in edit.diff()
    assert edit.verified


def test_many_names_go_over_several_lines(module):
    body = "".join(f"    a_rather_long_name_{i} = jnp.sin(x @ w)\n    x = a_rather_long_name_{i}\n" for i in range(6))
    edit = kept(module(f"\n\ndef f(w, x):\n{body}    return x.sum()\n").f, SQUARE, "x @ w")
    assert edit.verified
    assert max(map(len, edit.apply_text().split("\n"))) <= 100
    assert len(edit.names) == len({name.name for name in edit.names}) == 6


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
        (
            "#!/usr/bin/python\n# -*- coding: utf-8 -*-\njnp = __import__('jax').numpy\n",
            "# -*- coding: utf-8 -*-\nfrom jax.ad_checkpoint import checkpoint_name\nimport jax\n",
        ),
    ],
)
def test_imports_go_after_those_that_are_there(module, text, new):
    edit = kept(module(f"{text}\n\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n", head="").f, SQUARE, "x @ w")
    assert new in edit.apply_text()
    assert edit.verified


# ------------------------------------------------------------------------------------------- several files, and others'


def test_each_file_has_its_edit(module, tmp_path):
    helper = module("\n\ndef layer(w, x):\n    return jnp.sin(x @ w)\n", "edited_helper")
    made = module(
        """
        import edited_helper
        from edited_helper import layer

        def f(w, x):
            return (layer(w, x) + edited_helper.layer(w, 2 * x) @ w).sum()
        """
    )
    edit = kept(made.f, SQUARE, "x @ w")
    assert {file.file for file in edit.files} == {helper.__file__, made.__file__}
    assert edit.verified, edit.differences
    assert edit.apply_text(helper.__file__) != edit.apply_text(made.__file__)
    with pytest.raises(RematError, match="choose one of them"):
        edit.apply_text()
    with pytest.raises(RematError, match="it has no text for 7"):
        edit.apply_text(7)
    applies(edit, tmp_path)


def test_files_of_the_same_text_are_told_apart(module):
    """Python takes their functions' code for equal."""
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
    files = {row.source.file for row in rows(trace, "x @ w")}
    assert files == {first.__file__, second.__file__}
    for file in files:
        edit = trace.edit([row for row in rows(trace, "x @ w") if row.source.file == file])
        assert edit.verified, edit.differences
        assert file in {changed.file for changed in edit.files} <= {file, made.__file__}


def two_layers(module):
    """A trace and a plan of it that has a name."""
    made = module("\n\ndef f(w, x):\n    return jnp.sin(jnp.sin(x @ w) @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    plan = trace.plan(16)
    assert plan.names
    return trace, plan


def test_where_a_helper_is_called_twice_the_call_is_named_that_is_wanted(module):
    made = module(
        """
        def dense(w, x):
            return x @ w

        def f(w, x):
            q = dense(w, x)
            k = dense(w, jnp.sin(q))
            return jnp.sin(k).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    plan = trace.plan(16)
    edit = trace.edit(plan)
    assert len(plan.names) == len(edit.names) == 1
    assert edit.names[0].name in ("q", "k")
    assert edit.verified


def test_what_names_more_than_the_plan_says_so_and_offers_another(module):
    made = module(
        """
        def f(w, x):
            for _ in range(3):
                x = jnp.sin(x @ w)
            return x.sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    plan = trace.plan(32)
    edit = trace.edit(plan)
    assert not edit.verified
    assert edit.saved_bytes == 48 > plan.saved_bytes
    assert "f32[4] is saved 4 times by the edited text, and 3 times by the plan." in edit.differences  # x among them
    assert "executed for 1 other value besides" in edit.differences[-1]


def test_library_code_is_never_edited(module):
    made = module("\n\ndef f(w, x):\n    return jax.nn.gelu(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit([row for row in trace.report("none").residuals if row.kind == "intermediate"])
    assert {file.file for file in edit.files} == {made.__file__}
    assert edit.unnamed
    assert all(sentence.endswith(".") for sentence in (*edit.unnamed, *edit.differences))
    assert edit.closest is None or edit.closest.verified


def test_formatted_strings_are_left_alone(module):
    made = module(
        """
        def f(w, x):
            held = []
            f"{held.append(x @ w)}"
            return jnp.sin(jnp.sin(held[0]) @ w).sum()
        """
    )
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit(trace.plan(16))
    assert 'f"{held.append(x @ w)}"' in edit.apply_text()
    assert edit.verified or "inside a formatted string" in edit.unnamed[0]


# ------------------------------------------------------------------------------------------------ why there is no name

UNNAMED = "a branch of lax.cond, a loop of unknown length or a function with a derivative rule of its own"
# A function, one of its residuals by its primitive and the place to keep it at, and why it is not named there.
REASONS = {
    "a branch": (
        "def f(w, x):\n    return jax.lax.cond(x[0] > 0, lambda x: jnp.sin(jnp.sin(x) @ w), lambda x: x, x).sum()",
        ("sin", "function"),
        f"f32[4], sin, FILE:6, is made in {UNNAMED}, where no plan chooses among values.",
    ),
    "the derivative": (
        "def f(w, x):\n    return jnp.sin(x @ w).sum()",
        ("cos", "function"),
        "f32[4], cos, FILE:6, is made only by the derivative: no expression that the function itself runs has it.",
    ),
    "a rule for derivatives": (
        "@jax.custom_vjp\ndef act(x):\n    return jnp.sin(x)\n\n"
        "act.defvjp(lambda x: (jnp.sin(x), jnp.exp(x)), lambda y, g: (g * y,))\n\n"
        "def f(w, x):\n    return act(x @ w).sum()",
        ("exp", "function"),
        "f32[4], exp, FILE:12, is made only by the derivative: no expression that the function itself runs has it.",
    ),
    "a complex number": (
        "def f(w, x):\n    y = (x @ w) * (1 + 2j)\n    return (y * y).real.sum()",
        ("mul", "function"),
        "c64[4], mul, FILE:6, is complex, and JAX cannot save complex values by name.",
    ),
    "outside of the place": (
        "@jax.checkpoint\ndef block(w, x):\n    return jnp.sin(x @ w) @ w\n\n"
        "def f(w, x):\n    y = jnp.exp(x @ w)\n    return block(w, y).sum()",
        ("exp", "block"),
        "f32[4], exp, FILE:10, is made outside of what the policy at 'block' is for.",
    ),
    "an argument": (
        "def f(w, x):\n    return jnp.sin(x @ w).sum()",
        ("", "function"),
        "f32[4,4], w, is kept without a name: it is an argument.",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_no_name_can_keep_a_residual(module, case):
    text, (primitive, at), reason = REASONS[case]
    made = module(f"\n\n{text}\n")
    trace = rm.trace(made.f, *SQUARE)
    residuals = [row for row in trace.report("none", "function").residuals if row.primitive == primitive]
    edit = trace.edit(residuals[:1], at)
    assert edit.names == ()
    assert edit.unnamed == (reason.replace("FILE", f"{made.__name__}.py"),)


def test_what_is_inside_an_expression_of_a_library_is_so_called(module):
    made = module("\n\ndef f(w, x):\n    return jax.nn.gelu(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    edit = trace.edit([row for row in trace.report("none").residuals if row.primitive == "mul"])
    assert set(edit.unnamed) == {
        f"mul f32[4] is made inside `jax.nn.gelu(x @ w)`, {made.__name__}.py:6, which gives another value, and no "
        "expression that can be named has it."
    }


def test_a_plan_made_where_the_files_were_elsewhere_names_them_here(module):
    made = module("\n\ndef f(w, x):\n    return jax.nn.gelu(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    plan = trace.plan(0.9)
    elsewhere = [dataclasses.replace(value.source, file="/elsewhere.py", line=1) for value in plan.names]
    moved = [dataclasses.replace(value, source=at) for value, at in zip(plan.names, elsewhere, strict=True)]
    assert trace.edit(plan).unnamed
    assert trace.edit(dataclasses.replace(plan, names=tuple(moved))).unnamed == trace.edit(plan).unnamed


def test_a_class_that_is_made_by_a_function_is_edited(module):
    made = module(
        """
        def make():
            class Local:
                def __call__(self, w, x):
                    return jnp.sin(x @ w).sum()
            return Local

        KIND = make()

        def f(w, x):
            return KIND()(w, x)
        """
    )
    edit = kept(made.f, SQUARE, "x @ w")
    assert edit.unnamed == ()
    assert edit.verified, edit.differences


def test_a_carried_value_of_a_lambda_says_what_to_write_instead(module):
    made = module(
        "\n\ndef f(ws, x):\n    return jax.lax.scan(lambda c, w: (jnp.sin(w @ c) * c, None), x, ws)[0].sum()\n"
    )
    trace = rm.trace(made.f, f32(8, 4, 4), f32(4))
    naming = trace.engine.dissect("function").naming
    ((key, value),) = ((key, value) for key, value in naming.values.items() if value.output is None)
    source = trace.engine.provenances.of(value.eqn).source
    planned = PlannedValue(key, 128, source=source)
    draft = dataclasses.replace(two_layers(module)[1], names=(planned,), fingerprint=naming.fingerprint)
    (reason,) = trace.edit(draft).unnamed
    assert "by a lambda, whose parameters can only be named where they are used just once" in reason


def test_what_names_nothing_says_why(module):
    made = module("\n\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n")
    trace = rm.trace(made.f, *SQUARE)
    assert trace.edit([]).unnamed == ("no residual was chosen, so none is given a name.",)
    assert trace.edit("as_written").unnamed == ("the policy is the one that is written, so nothing is to be edited.",)
    assert trace.edit("none").unnamed == ("f has no jax.checkpoint of its own to be taken off.",)
    assert trace.edit("dots_saveable").unnamed == ()


def test_arguments_that_no_checkpoint_can_take_are_refused(module):
    made = module("\n\ndef f(model, x):\n    return model['act'](x @ model['w']).sum()\n")
    trace = rm.trace(made.f, {"w": SQUARE[0], "act": jnp.sin}, SQUARE[1])
    with pytest.raises(
        RematError, match=r"the argument model of f holds model\['act'\], of type .*: pass the arrays apart"
    ):
        trace.edit("dots_saveable")


def test_what_raises_apart_from_the_session_is_refused_in_one_sentence(module):
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
    with pytest.raises(RematError) as raised:
        trace.edit(rows(trace, "x @ w"))
    assert str(raised.value) == (
        "f raises when it is executed apart from your session, to see what an edit does: ValueError: only once."
    )
    edit = trace.edit("dots_saveable")
    assert edit.differences == (str(raised.value),)
    assert not edit.verified


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("remat_magic.editing"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

import jax
import jax.numpy as jnp
import remat_magic as rm

trace = rm.trace(jax.checkpoint(lambda w, x: jnp.sin(x @ w).sum()), jnp.ones((4, 4)), jnp.ones(4))
assert trace.report().residuals
plan = trace.plan("90%")
assert trace.report(plan).saved_bytes == plan.saved_bytes
assert trace.what_if() and trace.advice() is not None and trace.compare().rows
assert not any(name.startswith("remat_magic.editing") for name in sys.modules)
try:
    trace.edit(plan)
except ModuleNotFoundError as error:
    print(error)
"""


def test_editing_is_optional():
    """Traces, reports and plans are made where its folder is not there, and an edit says what is missing."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300)
    assert ran.stderr == ""
    assert ran.stdout == "No module named 'remat_magic.editing'\n"


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


def test_a_file_that_has_changed_is_refused(module):
    trace, plan = two_layers(module)
    path = Path(trace.engine.traced.__code__.co_filename)
    old = path.read_text()
    path.write_text(f"{old}# more\n")
    assert trace.edit(plan).verified  # the function is the same
    path.write_text(old.replace("sin", "cos"))
    with pytest.raises(RematError, match=r"is no longer what f was compiled from: load it again"):
        trace.edit(plan)
    path.write_text("def (")
    with pytest.raises(RematError, match="has changed since it was run"):
        trace.edit(plan)


def test_what_has_no_source_is_refused():
    space = {}
    exec("import jax.numpy as jnp\ndef f(w, x):\n    return jnp.sin(x @ w).sum()\n", space)
    trace = rm.trace(space["f"], *SQUARE)
    with pytest.raises(RematError, match=r"the source of f is not available \(<string>\)"):
        trace.edit("nothing_saveable")
    trace = rm.trace(jnp.sin, f32())
    with pytest.raises(RematError, match="nothing to edit"):
        trace.edit("nothing_saveable")


def test_what_is_given_must_be_a_choice(module):
    trace, plan = two_layers(module)
    with pytest.raises(RematError, match="not of int"):
        trace.edit(3)
    with pytest.raises(RematError, match="the plan is for at='function'"):
        trace.edit(plan, "sites")
    fun, args = PROGRAMS["named_tanh"]
    with pytest.raises(RematError, match="made for another program"):
        rm.trace(fun, *args).edit(plan)


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
    found = rows(trace, "x @ w")
    with pytest.raises(RematError, match="does not make the same program each time"):
        trace.edit(found)


# ------------------------------------------------------------------------------------------------------------- cells


def test_cells(cells):
    cells.ok("import jax", "import jax.numpy as jnp")
    cells.ok("", "%pwd", "# the helper", "def layer(w, x):", "    return jnp.sin(x @ w)")
    cells.ok("def f(w, x):", "    return (layer(w, x) @ w @ x)")
    space = cells.ns
    trace = rm.trace(space["f"], *SQUARE)
    before = {name: value for name, value in space.items() if not name.startswith("_")}
    edit = trace.edit(rows(trace, "x @ w"))
    assert edit.verified, edit.differences
    assert [file.cell for file in edit.files] == [2, 3]
    assert edit.apply_text(2) == (
        "\n%pwd\nfrom jax.ad_checkpoint import checkpoint_name\n# the helper\ndef layer(w, x):\n"
        '    return jnp.sin(checkpoint_name(x @ w, "sin_dot"))'
    )
    assert edit.apply_text("In[3]").startswith("from functools import partial\n@partial(jax.checkpoint, policy=")
    assert edit.diff().startswith("--- In[2]\n+++ In[2]\n")
    assert {name: value for name, value in space.items() if not name.startswith("_")} == before
    # The text does what was said of it when it is run.
    for number in (2, 3):
        cells.ok(edit.apply_text(number))
    again = rm.trace(space["f"], *SQUARE).report()
    assert (again.saved_bytes, again.recomputed_flops) == (edit.saved_bytes, edit.recomputed_flops)


def test_a_cell_under_the_magic_keeps_it(cells, engine):
    cells.ok("import jax", "import jax.numpy as jnp", "w, x = jnp.ones((4, 4)), jnp.ones(4)")
    cells.ok("%%remat --args 'w, x'", "@jax.checkpoint", "def f(w, x):", "    return jnp.sin(x @ w).sum()")
    edit = kept_now(cells.ns["f"], "x @ w")
    assert edit.apply_text() == (
        "%%remat --args 'w, x'\nfrom jax.ad_checkpoint import checkpoint_name\nfrom functools import partial\n"
        f"@partial(jax.checkpoint, policy={NAMED})\n"
        'def f(w, x):\n    return jnp.sin(checkpoint_name(x @ w, "sin_dot")).sum()'
    )
    assert edit.verified


def test_a_cell_that_imports_what_it_calls(cells, engine):
    """Python writes other code for a module's attribute where it sees the import; IPython shows it one statement."""
    cells.ok("import jax, jax.numpy as jnp", "", "def f(w, x):", "    return jnp.sin(x @ w).sum()")
    assert kept_now(cells.ns["f"], "x @ w").verified


def kept_now(fun, expression):
    """As ``kept``, where ``rm.trace`` is the fake engine's."""
    from remat_magic.api import Trace  # the module's own `trace` is the fake engine's here
    from remat_magic.engine.engine import Engine

    traced = Trace(Engine(fun, SQUARE, {}, None, False))
    return traced.edit(rows(traced, expression))


def test_lines_of_ipythons_own_stay_as_they_are(cells):
    cells.ok("import jax", "import jax.numpy as jnp")
    cells.ok("def f(w, x):", "    here = %pwd", "    return jnp.sin(x @ w).sum()")
    edit = kept(cells.ns["f"], SQUARE, "x @ w")
    assert "    here = %pwd\n" in edit.apply_text()
    assert edit.verified


# ------------------------------------------------------------------------------------------------------------- models


@pytest.fixture
def small(monkeypatch):
    for name, value in {"WIDTH": 48, "HEADS": 4, "VOCABULARY": 64, "LENGTH": 16, "BATCH": 2}.items():
        monkeypatch.setattr(models, name, value)


MODELS = {
    "gpt": lambda: models.transformer(2),
    "gpt, sites": lambda: models.transformer(2, site=True),
    "gpt, scanned": lambda: models.transformer(2, scanned=True),
    "transformer": lambda: named_models.transformer(2, 32, 16, 2, scanned=False),
    "scanned transformer": lambda: named_models.transformer(2, 32, 16, 2, scanned=True),
    "resnet": lambda: named_models.resnet(2, 2, 4, 8, 2),
}


def planned(trace):
    for at in ("function", "sites"):
        for budget in (0.2, 0.5):
            if at == "sites" and not trace.engine.sites:
                continue
            try:
                yield trace.plan(budget, at)
            except RematError:  # less is never saved there
                continue


def nested(trace, plan):
    """Under jax_remat3 a checkpoint inside another keeps its own policy, as no plan of the outer reckons."""
    return bool(_jax.remat3() and trace.engine.sites and plan.at == "function")


def holds(trace, plan):
    """What an edit says is complete: it is the plan or every difference is listed, and what is offered is verified."""
    edit = trace.edit(plan)
    assert (edit.planned_bytes, edit.planned_flops) == (plan.saved_bytes, plan.recomputed_flops)
    if edit.verified:
        assert edit.saved_bytes == plan.saved_bytes
        assert not edit.differences
    else:
        assert edit.differences
    if edit.closest is not None:
        assert edit.closest.verified
        assert edit.closest.saved_bytes <= plan.budget_bytes
        assert not edit.closest.unnamed
    return edit


# The others are more of the same, or unrolled, and `test_programs` has a convolution.
@pytest.mark.parametrize("model", usually(MODELS, "gpt, scanned"))
def test_models(model, small):
    fun, args = MODELS[model]()
    trace = rm.trace(fun, *args)
    for plan in planned(trace):
        edit = holds(trace, plan)
        assert edit.verified or edit.closest or nested(trace, plan)


EQUINOX = """
import equinox as eqx

class Net(eqx.Module):
    first: eqx.nn.Linear
    rest: eqx.nn.MLP

    def __init__(self, key):
        self.first, self.rest = eqx.nn.Linear(4, 4, key=key), eqx.nn.MLP(4, 4, 8, 2, key=key)

    def __call__(self, x):
        return self.rest(jnp.sin(self.first(x))).sum()

MODEL = Net(jax.random.key(0))
ARRAYS, STATIC = eqx.partition(MODEL, eqx.is_array)

def f(arrays, x):
    return jax.vmap(eqx.combine(arrays, STATIC))(x).sum()

def make(static):
    def g(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x).sum()
    return g

g = make(STATIC)

def whole(model, x):
    return jax.vmap(model)(x).sum()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fun", ["f", "g"])
def test_a_model_of_equinox_in_two_parts(module, fun):
    library("equinox")
    made = module(EQUINOX)
    trace = rm.trace(getattr(made, fun), made.ARRAYS, f32(3, 4))
    assert trace.edit("dots_saveable").verified
    edit = trace.edit([row for row in trace.report("everything_saveable").residuals if row.primitive == "sin"])
    assert "self.rest(checkpoint_name(jnp.sin(self.first(x)), " in edit.apply_text()
    assert edit.verified, edit.differences


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_equinox_in_one_part_gets_the_checkpoint_of_equinox(module):
    library("equinox")
    made = module(EQUINOX)
    for fun, args in ((made.whole, (made.MODEL, f32(3, 4))), (made.MODEL, (f32(4),))):
        edit = rm.trace(fun, *args).edit("dots_saveable")
        assert edit.verified, edit.differences
        assert "@partial(eqx.filter_checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n" in edit.diff()


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_flax_that_is_global(module):
    library("flax.linen")
    made = module(
        """
        import flax.linen as nn

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4)(jnp.sin(nn.Dense(8)(x))).sum()

        NET = Net()
        PARAMS = jax.eval_shape(NET.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(params, x):
            return NET.apply(params, x)
        """
    )
    trace = rm.trace(made.f, made.PARAMS, f32(2, 4))
    edit = trace.edit([row for row in trace.report("everything_saveable").residuals if row.primitive == "sin"])
    assert 'nn.Dense(4)(checkpoint_name(jnp.sin(nn.Dense(8)(x)), "Dense_sin"))' in edit.apply_text()
    assert edit.verified, edit.differences


LIBRARIES = {
    "a global module of flax": (
        "flax.linen",
        """
        import flax.linen as nn

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(4)(jnp.sin(nn.Dense(8)(x)))

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                for _ in range(2):
                    x = nn.remat(Block)()(x)
                return x.sum()

        net = Net()
        weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(weights, x):
            return net.apply(weights, x)
        """,
        "nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)()(x)",
    ),
    "a class of flax under a decorator": (
        "flax.linen",
        """
        import flax.linen as nn

        @nn.remat
        class Block(nn.Module):
            size: int

            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(self.size)(jnp.sin(nn.Dense(8)(x)))

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Block(4)(x).sum()

        net = Net()
        weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(weights, x):
            return net.apply(weights, x)
        """,
        "@partial(nn.remat, policy=jax.checkpoint_policies.dots_saveable)\nclass Block(nn.Module)",
    ),
    "a class of flax with a name of its own": (
        "flax.linen",
        """
        import flax.linen as nn

        class Layer(nn.Module):
            size: int

            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(self.size)(jnp.sin(nn.Dense(8)(x)))

        Block = nn.checkpoint(Layer, prevent_cse=False)

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Block(4)(x).sum()

        net = Net()
        weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(weights, x):
            return net.apply(weights, x)
        """,
        "Block = nn.checkpoint(Layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)",
    ),
    "a global module of nnx": (
        "flax.nnx",
        """
        from flax import nnx

        class Block(nnx.Module):
            def __init__(self, rngs):
                self.into, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

            @nnx.remat
            def __call__(self, x):
                return x + self.out(jnp.sin(self.into(x)))

        net = Block(nnx.Rngs(0))
        graph, weights = nnx.split(net)

        def f(weights, x):
            return nnx.merge(graph, weights)(x).sum()
        """,
        "    @partial(nnx.remat, policy=jax.checkpoint_policies.dots_saveable)\n    def __call__",
    ),
    "an object of equinox that is held": (
        "equinox",
        """
        import equinox as eqx

        class Block(eqx.Module):
            into: eqx.nn.Linear
            out: eqx.nn.Linear

            @eqx.filter_checkpoint
            def __call__(self, x):
                return x + self.out(jnp.sin(self.into(x)))

        key = jax.random.key(0)
        net = Block(eqx.nn.Linear(4, 8, key=key), eqx.nn.Linear(8, 4, key=key))
        weights, static = eqx.partition(net, eqx.is_array)

        def f(weights, x):
            return jax.vmap(eqx.combine(weights, static))(x).sum()
        """,
        "    @partial(eqx.filter_checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n    def __call__",
    ),
    "a call of equinox": (
        "equinox",
        """
        import equinox as eqx

        class Net(eqx.Module):
            into: eqx.nn.Linear
            out: eqx.nn.Linear

            def __call__(self, x):
                return eqx.filter_checkpoint(self.inner)(x).sum()

            def inner(self, x):
                return x + self.out(jnp.sin(self.into(x)))

        key = jax.random.key(0)
        weights = Net(eqx.nn.Linear(4, 8, key=key), eqx.nn.Linear(8, 4, key=key))

        def f(weights, x):
            return jax.vmap(weights)(x).sum()
        """,
        "eqx.filter_checkpoint(self.inner, policy=jax.checkpoint_policies.dots_saveable)(x)",
    ),
    "a transformed function of haiku": (
        "haiku",
        """
        import haiku as hk

        class Block(hk.Module):
            def __call__(self, x):
                return x + hk.Linear(4)(jnp.sin(hk.Linear(8)(x)))

        net = hk.without_apply_rng(hk.transform(lambda x: hk.remat(Block())(x)))
        weights = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

        def f(weights, x):
            return net.apply(weights, x).sum()
        """,
        "hk.remat(Block(), policy=jax.checkpoint_policies.dots_saveable)(x)",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_checkpoints_of_libraries_are_edited_where_they_stand(module, name):
    which, text, line = LIBRARIES[name]
    library(which)
    made = module(text)
    before = made.f.__code__, made.net.__class__.__call__ if hasattr(made, "net") else None
    trace = rm.trace(made.f, made.weights, f32(2, 4))
    (site,) = (site for site in trace.sites if not getattr(site, "possible", False))
    edit = trace.edit("dots_saveable", site.key)
    assert edit.verified, edit.differences
    assert line in edit.apply_text()
    assert edit.saved_bytes > trace.report().saved_bytes
    off = trace.edit("none", site.key)
    assert off.verified, off.differences
    # The text as a module of its own, which flax gives the parameters by the names that they have.
    again = module(off.apply_text(), head="")
    weights = made.weights if which == "flax.linen" else again.weights
    without = rm.trace(again.f, weights, f32(2, 4))
    assert not [one for one in without.sites if not one.possible]
    assert without.report().saved_bytes == trace.report("none", site.key).saved_bytes
    # What a name is given to stands in a method of a class of which there are objects already.
    kept = trace.edit([row for row in trace.report("none", site.key).residuals if row.primitive == "sin"], site.key)
    assert "checkpoint_name(jnp.sin(" in kept.apply_text()
    assert kept.verified, kept.differences
    assert before == (made.f.__code__, made.net.__class__.__call__ if hasattr(made, "net") else None)


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
    edit = trace.edit(rows(trace, "x @ w"))
    thread.join()
    assert edit.verified, edit.differences
    (jaxpr,) = seen
    assert "name" not in {eqn.primitive.name for eqn in jaxpr.eqns}


# A text, the place in it that has no checkpoint, and what the edit writes.
PLACES = {
    "a function with a flag and a default": (
        "",
        "def block(w, x, train, scale=2.0):\n    return jnp.sin(x @ w) * scale if train else x\n\n"
        "def f(w, x):\n    return block(w, block(w, x, True), True).sum()",
        "block",
        "@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, static_argnums=(2,))\ndef block",
    ),
    "a flag by keyword": (
        "",
        "def block(w, x, *, train):\n    return jnp.sin(x @ w) if train else x\n\n"
        "def f(w, x):\n    return block(w, block(w, x, train=True), train=True).sum()",
        "block",
        "jax.checkpoint(partial(block, train=True), policy=jax.checkpoint_policies.dots_saveable)(w, x)",
    ),
    "the body of a loop": (
        "",
        "def f(w, x):\n    def body(c, _):\n        return jnp.sin(jnp.tanh(c @ w) @ w), None\n"
        "    return jax.lax.scan(body, x, None, length=3)[0].sum()",
        "body",
        "    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n    def body",
    ),
    "a lambda of a loop": (
        "",
        "def f(w, x):\n    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(jnp.tanh(c @ w) @ w), x).sum()",
        "<lambda>",
        "3, jax.checkpoint(lambda _, c: jnp.sin(jnp.tanh(c @ w) @ w), policy=",
    ),
    "an object that is held": (
        "",
        "class Res:\n    def __call__(self, w, x):\n        return x + jnp.sin(jnp.tanh(x @ w) @ w)\n\n"
        "res = Res()\n\ndef f(w, x):\n    return res(w, res(w, x)).sum()",
        "Res.__call__",
        "static_argnums=(0,))\n    def __call__",
    ),
    "a function that another one made": (
        "",
        "def make(act):\n    def inner(w, x):\n        return x + act(act(x @ w) @ w)\n    return inner\n\n"
        "block = make(jnp.sin)\n\ndef f(w, x):\n    return block(w, block(w, x)).sum()",
        "inner",
        "    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n    def inner",
    ),
}
for _name, (_library, _text, _) in LIBRARIES.items():
    if "global" in _name or _library == "haiku":
        _text = dedent(_text).replace("nn.remat(Block)", "Block").replace("    @nnx.remat\n", "")
        _line = {"flax.linen": "@partial(nn.remat, ", "flax.nnx": "@partial(nnx.remat, ", "haiku": "hk.remat(Block(), "}
        PLACES[_name] = _library, _text.replace("hk.remat(Block())", "Block()"), "Block.__call__", _line[_library]
PLACES["an object of equinox"] = (
    "equinox",
    dedent(LIBRARIES["an object of equinox that is held"][1]).replace("    @eqx.filter_checkpoint\n", ""),
    "Block.__call__",
    "    @partial(eqx.filter_checkpoint, policy=jax.checkpoint_policies.dots_saveable)\n    def __call__",
)
PLACES["two lambdas on one line"] = (
    "",
    "def f(w, x):\n"
    "    return jax.lax.cond(x[0, 0] > 0, lambda v: jnp.sin(v @ w).sum(), lambda v: jnp.exp(v @ w).sum(), x)",
    "<lambda>",
    "0, jax.checkpoint(lambda v: jnp.sin(v @ w).sum(), policy=jax.checkpoint_policies.dots_saveable), jax.checkpoint(",
)
GIVEN = "nn.remat(lambda module, *args: module(*args), policy=jax.checkpoint_policies.dots_saveable)("
LINEN = dedent("""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(8)(jnp.sin(nn.Dense(8)(x)))
            x = (
                nn.MultiHeadDotProductAttention(num_heads=2)
            )(x, x, deterministic=not train)
            return nn.LayerNorm()(x).sum()

    net = Net()
    weights = jax.eval_shape(lambda: net.init(jax.random.key(0), jnp.ones((2, 4)), False))

    def f(weights, x):
        return net.apply(weights, x, False)
""")
PLACES["a layer of flax"] = (
    "flax.linen",
    LINEN,
    "Dense.__call__",
    f"x = {GIVEN}nn.Dense(8), jnp.sin({GIVEN}nn.Dense(8), x)))",
)
PLACES["a layer of flax that is called with a flag"] = (
    "flax.linen",
    LINEN,
    "MultiHeadDotProductAttention.__call__",
    "nn.MultiHeadDotProductAttention(num_heads=2)\n        ), x, x, deterministic=not train)",
)
PLACES["a layer of nnx that counts its calls"] = (
    "flax.nnx",
    dedent("""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.into, self.drop = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(jnp.sin(self.into(x)), deterministic=False).sum()

    weights = Net(nnx.Rngs(0))

    def f(weights, x):
        return weights(x)
    """),
    "Dropout.__call__",
    "nnx.remat(lambda module, *args: module(*args, deterministic=False), policy=",
)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_a_library_calls_names_the_one_that_the_source_calls(module):
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
    with pytest.raises(RematError, match=r"a library.*choose at='MLP\.__call__'"):
        trace.edit("dots_saveable", "Linear.__call__")
    edit = trace.edit("dots_saveable", "MLP.__call__")
    assert edit.verified, edit.differences


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_is_written_where_there_is_none(module, name):
    which, text, at, line = PLACES[name]
    if which:
        library(which)
    made = module(f"\n{text}\n")
    args = (made.weights, f32(2, 4)) if which else (SQUARE[0], f32(2, 4))
    trace = rm.trace(made.f, *args)
    (site,) = (site for site in trace.sites if site.key == at)
    assert site.possible
    edit = trace.edit("dots_saveable", at)
    assert edit.verified, edit.differences
    assert line in edit.apply_text()
    expected = trace.report("dots_saveable", at)
    assert edit.saved_bytes == expected.saved_bytes
    # The text itself, imported: what JAX saves then.
    again = module(edit.apply_text().encode())
    if which:  # parameters of flax must have the names that they had
        args = (made.weights if which == "flax.linen" else again.weights, f32(2, 4))
    report = rm.trace(again.f, *args).report()
    assert sorted(row.type for row in report.residuals) == sorted(row.type for row in expected.residuals)
    assert not trace.edit("none", at).files


LAYER = "def body(x, w):\n    y = jnp.sin(jnp.tanh(x @ w) @ w)\n    return y, y.sum()\n\n"
# A text, the place, and lines that the edit writes.
SOME_STEPS = {
    "calls that are written out": (
        "def block(w, x, train, scale=2.0):\n    return jnp.sin(x @ w) * scale if train else x\n\n"
        "def f(ws, x):\n    x = block(ws[0], x, True)\n    return block(ws[2], block(ws[1], x, True), True).sum()",
        "block[:2]",
        ["return block(ws[2], jax.checkpoint(block, policy=", "static_argnums=(2,))(ws[1], x, True), True).sum()"],
    ),
    "every second call": (
        f"{LAYER}def f(ws, x):\n    for i, (w) in enumerate(ws):\n        x, _ = body(x, w)\n    return (i * x).sum()",
        "body[::2]",
        ["for number, (i, (w)) in enumerate(enumerate(ws)):", "_saveable) if number % 2 == 0 else body)(x, w)"],
    ),
    # The callback is another object in each trace.
    "calls with a callback": (
        "def block(w, x):\n    scale = jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct((), jnp.int32), 2)\n"
        "    return jnp.sin(x @ w) * scale\n\n"
        "def f(ws, x):\n    for w in ws:\n        x = block(w, x)\n    return x.sum()",
        "block[::2]",
        ["for number, w in enumerate(ws):"],
    ),
    "the last calls": (
        f"{LAYER}def f(ws, x):\n    for w in ws:\n        x = body(x, w)[0]\n    return x.sum()",
        "body[-3:]",
        ["for number, w in enumerate(ws):", "if number >= 7 else body)(x, w)[0]"],
    ),
    "some in the middle": (
        f"{LAYER}def f(ws, x):\n    for w in ws:\n        x = body(x, w)[0]\n    return x.sum()",
        "body[2:8:3]",
        ["if number in range(2, 8, 3) else body)(x, w)[0]"],
    ),
    "calls of a while loop": (
        f"{LAYER}def f(ws, x):\n    i = 0\n    while i < len(ws):\n        x = body(x, ws[i])[0]  # a layer\n"
        "        i += 1\n    return x.sum()",
        "body[::2]",
        ["_saveable) if i % 2 == 0 else body)(x, ws[i])[0]  # a layer\n"],
    ),
    # The even ones of what the loop counts by are the odd calls, which save as much.
    "calls of a while loop that counts from one": (
        f"{LAYER}def f(ws, x):\n    i, ws = 1, list(ws)\n    while i <= 10:\n        x = body(x, ws[i - 1])[0]\n"
        "        i = i + 1\n    return x.sum()",
        "body[::2]",
        ["    numbers = count()\n    while", "_saveable) if next(numbers) % 2 == 0 else body)"],
    ),
    "calls of a while loop that takes from a list": (
        f"{LAYER}def f(ws, x):\n    todo = list(ws)\n    while todo: x = body(x, todo.pop(0))[0]\n    return x.sum()",
        "body[:3]",
        ["from itertools import count\n", "    numbers = count()\n    while todo: x = (jax", "next(numbers) < 3 else"],
    ),
    "calls that some steps of a loop make": (
        f"{LAYER}def f(ws, x):\n    for i, w in enumerate(ws):\n        if i == 3:\n            continue\n"
        "        x = body(x, w)[0]\n    else:\n        x = x + 1\n    return x.sum()",
        "body[-3:]",
        ["    numbers = count()\n    for i, w in enumerate(ws):\n", "(numbers) >= 6 else body)(x, w)[0]\n    else"],
    ),
    "calls of a comprehension": (
        f"{LAYER}def f(ws, x):\n    ys = [\n        body(x * i, w)[0]  # one layer\n"
        "        for i, w in enumerate(ws)\n    ]\n    return sum(y.sum() for y in ys)",
        "body[:3]",
        ["if number < 3 else body)(x * i, w)[0]  # one layer\n        for number, (i, w) in enumerate(enum"],
    ),
    "calls of a comprehension in another": (
        f"{LAYER}def f(ws, x):\n    ys = [[body(x * i, w)[0] for w in list(ws)[:3]] for i in range(3)]\n"
        "    return sum(y.sum() for row in ys for y in row)",
        "body[::2]",
        ["    numbers = count()\n    ys = [[(jax", "if next(numbers) % 2 == 0 else body)(x * i, w)[0] for w in list"],
    ),
    "calls of a generator with a condition": (
        f"import itertools\n\n{LAYER}def f(ws, x):\n    'All.'\n"
        "    return sum(body(x, w)[1] for i, w in enumerate(ws) if i != 2)",
        "body[::2]",
        ["    'All.'\n    numbers = itertools.count()\n    return sum((jax", "if next(numbers) % 2 == 0 else body)"],
    ),
    "calls of a dictionary's comprehension": (
        f"{LAYER}def f(ws, x):\n    ys = {{i: body(x, w)[0] for i, w in enumerate(ws)}}\n"
        "    return sum(ys.values()).sum()",
        "body[2:8:3]",
        ["{i: (jax", "if number in range(2, 8, 3) else body)(x, w)[0] for number, (i, w) in enumerate(enumerate(ws))}"],
    ),
    "calls of a lambda": (
        f"import functools\n\n{LAYER}def f(ws, x):\n"
        "    return functools.reduce(lambda x, w: body(x, w)[0], list(ws), x).sum()",
        "body[::2]",
        [
            "    numbers = count()\n    return functools.reduce(lambda x, w: (jax",
            "if next(numbers) % 2 == 0 else body)",
        ],
    ),
    "several calls": (
        f"{LAYER}def f(ws, x):\n    steps, total = 0, 0\n    for w in ws:\n        # one layer\n"
        "        x, y = body(\n            x, w)\n\n        if steps == 0:\n            total = total + y\n"
        "    return x.sum() + total",
        "body/4",
        [
            "    steps_ = list(ws)\n",
            "        def group(x, total):\n            for w in steps_[first : first + 4]:\n",
            "                    x, w)\n\n",
            "            return x, total\n\n        x, total = group(x, total)\n    return",
        ],
    ),
    "several calls, with what they leave behind": (
        f"{LAYER}def f(ws, x):\n    for i in range(0, 9):\n        h, y = body(x, ws[i])\n        x = h\n"
        "    return x.sum() + y + h.sum()",
        "body/3",
        ["    steps = list(range(0, 9))\n", "        def group(x):\n", "        h, y, x = group(x)\n"],
    ),
    "several calls, with rows of one array": (
        f"{LAYER}def f(ws, x):\n    for i in range(10):\n        h = jnp.exp(x) / 2\n"
        "        x = x + body(h, ws[i, :])[0] * jnp.cos(x)\n    return x.sum()",
        "body/4",
        ["        def group(x):\n", "                x = x + body(h, ws[i, :])[0] * jnp.cos(x)\n"],
    ),
    "several calls, with what is put together": (
        f"{LAYER}def f(ws, x):\n    for i, (w, v) in enumerate(zip(ws, ws[::-1])):\n        x = body(x, w + v)[0] * i\n"
        "    return x.sum()",
        "body/4",
        ["        def group(x):\n            for i, (w, v) in steps[first : first + 4]:\n"],
    ),
    "two calls in each step": (
        f"{LAYER}def f(ws, x):\n    for w in ws:\n        x = body(jnp.cos(x), w)[0]\n"
        "        x = x + body(jnp.exp(x), w)[0]\n    return x.sum()",
        "body/4",
        ["            for w in steps[first : first + 2]:\n"],
    ),
    "two loops": (
        f"{LAYER}def f(ws, x):\n    for w in ws[:5]:\n        x = body(jnp.cos(x), w)[0]\n    x = jnp.exp(x)\n"
        "    for w in ws:\n        x = x + body(x, w)[0]\n    return x.sum()",
        "body/2",
        ["        def group(x):\n", "        def group_(x):\n"],
    ),
    "steps of a while loop": (
        f"{LAYER}def f(ws, x):\n    i, ws = 0, list(ws)\n    while i < len(ws):  # all\n        h = jnp.cos(x)\n\n"
        "        # a layer\n        x = body(\n            h, ws[i])[0] * i\n        i += 1\n"
        "    return (x * i).sum() + h.sum()",
        "body/4",
        [
            "    while i < len(ws):\n\n        @partial(",
            "        def group(x):\n            nonlocal i\n            for _ in range(4):\n",
            "                if i < len(ws):  # all\n                    h = jnp.cos(x)\n\n",
            "                    # a layer\n                    x = body(\n                        h, ws[i])[0] * i\n",
            "            return h, x\n\n        h, x = group(x)\n    return (x * i)",
        ],
    ),
    "steps of a while loop that takes from a list": (
        f"{LAYER}def f(ws, x):\n    todo, k = list(ws), 0\n    while todo: x, k = body(x, todo.pop(0))[0] * k, k + 1\n"
        "    return x.sum() * k",
        "body/4",
        ["                if todo: x, k = body(x, todo.pop(0))[0] * k, k + 1\n            return x\n", "nonlocal k\n"],
    ),
    "steps of a while loop that counts down": (
        f"{LAYER}def f(ws, x):\n    i = len(ws)\n    while (i > 0 and\n           i < 99):\n        i -= 1\n"
        "        x = body(x, ws[i])[0]\n    return x.sum()",
        "body/4",
        ["    while (i > 0 and\n", "                if (i > 0 and\n"],
    ),
    "steps of a while loop that takes the list apart": (
        f"{LAYER}def f(ws, x):\n    todo = list(ws)\n    while len(todo) > 1:\n        w, v, *todo = todo\n"
        "        x = body(x, w)[0] * v.sum()\n    return x.sum()",
        "body/2",
        ["            nonlocal todo\n"],
    ),
    "steps of a for loop that count": (
        f"{LAYER}def f(ws, x):\n    k, e = 1, 0\n    for w in ws:\n        x, k, e = body(x, w)[0] * k, -k, 2\n"
        "    return x.sum() * k * e",
        "body/4",
        ["        def group(x):\n            nonlocal e, k\n"],
    ),
    "steps of a comprehension": (
        f"{LAYER}def f(ws, x):\n    ys = [\n        body(x * i, w)[0]  # one layer\n"
        "        for i, w in enumerate(ws)\n    ]\n    return sum(y.sum() for y in ys)",
        "body/4",
        [
            "        value\n        for steps in [list(enumerate(ws))]\n        for first in range(0, len(steps), 4)\n",
            "(\n            lambda group=steps[first : first + 4]: [body(x * i, w)[0] for (i, w) in group],\n",
            "_saveable,\n        )()\n    ]\n",
        ],
    ),
    "steps of a generator with conditions": (
        f"{LAYER}def f(ws, x):\n    return sum(\n        (body(x * i, w)[1]) * 2 for i in range(5) if i != 2\n"
        "        for w in (ws if i else ws[:2])[:4] if len(ws) > i)",
        "body/4",
        [
            "for steps in [((i, w) for i in range(5) if i != 2 for w in (ws if i else ws[:2])[:4] if len(ws) > i)]",
            "for group in iter(lambda steps=steps: list(islice(steps, 4)), [])",
        ],
    ),
    "steps of a comprehension in another": (
        f"{LAYER}def f(ws, x):\n    ys = [[body(x * i, w)[0] for w in list(ws)[:4]] for i in range(3)]\n"
        "    return sum(y.sum() for row in ys for y in row)",
        "body/4",
        ["    ys = [[\n        value\n        for steps in [list(list(ws)[:4])]"],
    ),
    "steps of a dictionary's comprehension": (
        f"{LAYER}def f(ws, x):\n    ys = {{f'layer {{i}}': body(x, w)[0] for i, w in enumerate(ws)}}\n"
        "    return sum(y * i for i, y in enumerate(ys.values())).sum()",
        "body/4",
        [
            "{\n        f'layer {i}': value\n",
            "for (i, w), value in zip(group, jax.checkpoint(\n            lambda group=group: [body(",
        ],
    ),
    "steps of a reduction": (
        f"import functools\n\n{LAYER}def f(ws, x):\n"
        "    return functools.reduce(lambda x, w: jnp.exp(body(x, w)[0]), list(ws), x).sum()",
        "body/4",
        [
            "    def reduce_in_groups(function, iterable, *initial):\n",
            "        value, *values = (*initial, *iterable)\n        steps = iter(values)\n",
            "                return functools.reduce(function, few, value)\n",
            "    return reduce_in_groups(lambda x, w: jnp.exp(body(x, w)[0]), list(ws), x).sum()\n",
        ],
    ),
    "steps of a reduction without a start": (
        f"from functools import reduce\n\n{LAYER}def step(x, w):\n    return body(x, w)[0] * 2\n\n"
        "def f(ws, x):\n    if True:\n        ws = [x, *ws]\n        x = reduce(step, ws)\n    return x.sum()",
        "body/4",
        ["        x = reduce_in_groups(step, ws)\n"],
    ),
    "steps of a loop that calls what calls it": (
        f"{LAYER}def inner(x, w):\n    return jnp.exp(body(jnp.cos(x), w)[0])\n\n"
        "def outer(x, *, w):\n    return inner(x, w) * body(x, w)[0]\n\n"
        "def f(ws, x):\n    for w in ws:\n        x = x + outer(x, w=w)\n    return x.sum()",
        "body/4",
        ["            for w in steps[first : first + 2]:\n                x = x + outer(x, w=w)\n"],
    ),
    "steps of a scan": (
        f"{LAYER}def f(ws, x):\n    x, ys = jax.lax.scan(body, x, ws)\n    return x.sum() + (ys ** 2).sum()",
        "body/5",
        ["    x, ys = scan_in_groups(body, x, ws)\n", "x.reshape(-1, 5, *x.shape[1:])"],
    ),
    "steps of a scan, with a rest": (
        f"{LAYER}def f(ws, x):\n    x, ys = jax.lax.scan(body, init=x, xs=ws)\n    return x.sum() + (ys ** 2).sum()",
        "body/4",
        [
            "scan_in_groups(body, init=x, xs=ws)\n",
            "x[:-2].reshape(-1, 4, *x.shape[1:])",
            "carry, last = steps(carry, rest)",
        ],
    ),
    "steps of a scan from its end": (
        f"{LAYER}def f(ws, x):\n    if True:\n        x, ys = jax.lax.scan(body, x, ws, 10, True, 2)\n"
        "    return x.sum() + (ys ** 2).sum()",
        "body/4",
        [
            "        def scan_in_groups(f, init, xs=None, length=None, reverse=False, unroll=1):\n",
            "jax.lax.scan(f, carry, xs, reverse=reverse, unroll=unroll)",
            "carry, last = steps(init, rest)\n",
        ],
    ),
    "steps without inputs": (
        "def f(ws, x):\n    def body(x, _):\n        return jnp.sin(jnp.tanh(x @ ws[0])), None\n\n"
        "    return jax.lax.scan(body, x, length=10)[0].sum()",
        "body/4",
        ["scan_in_groups(body, x, length=10)[0].sum()", "jax.lax.scan(steps(4), init, None, length // 4)"],
    ),
    "a map": (
        "def f(ws, x):\n    def body(w):\n        return jnp.sin(jnp.tanh(x @ w) @ w)\n\n"
        "    return jax.lax.map(body, ws).sum()",
        "body/4",
        ["map_in_groups(body, ws).sum()", "last = steps(rest)"],
    ),
    "a fori_loop": (
        "def f(ws, x):\n    def body(i, x):\n        return jnp.sin(jnp.tanh(x @ ws[0])) * jnp.cos(x) + i\n\n"
        "    return (jax.lax.fori_loop(0, 10, body, x) ** 2).sum()",
        "body/4",
        ["fori_loop_in_groups(0, 10, body, x) ** 2", "(upper - lower) // 4"],
    ),
    "a loop in a loop": (
        f"{LAYER}def f(ws, x):\n    def outer(x, _):\n        x, ys = jax.lax.scan(body, x, ws)\n"
        "        return x, ys.sum()\n\n    return jax.lax.scan(outer, x, None, length=3)[1].sum()",
        "body/5",
        ["        x, ys = scan_in_groups(body, x, ws)\n"],
    ),
}


MORE_STEPS = {
    "steps of a while loop that counts down",
    "steps of a while loop that takes the list apart",
    "steps of a for loop that count",
    "steps of a generator with conditions",
    "steps of a comprehension in another",
    "steps of a reduction without a start",
}


def answers(report):
    rows = sorted((row.kind, row.type) for row in report.residuals if row.kind != "literal")
    return rows, report.saved_bytes, report.repeated_flops, report.deferred_flops


def arguments(text):
    """Ten weights, in a list where the text goes through them."""
    return [f32(4, 4)] * 10 if any(part in text for part in ("in ws:", "(ws)", "ws[i]")) else f32(10, 4, 4), f32(2, 4)


EDITED: dict[str, str] = {}  # by the names of these: a text as it was edited, whatever the policy


@pytest.mark.each_once  # which policy is written changes one word
@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable"])
@pytest.mark.parametrize("name", usually(SOME_STEPS, *({*SOME_STEPS} - MORE_STEPS)))
def test_a_checkpoint_for_some_steps_is_written(module, name, policy, remat3):
    text, at, lines = SOME_STEPS[name]
    trace = rm.trace(module(f"\n{text}\n").f, *arguments(text))
    edit = trace.edit(policy, at)
    assert edit.verified, edit.differences
    assert not [line for line in lines if line not in edit.apply_text()], edit.apply_text()
    EDITED[name] = edit.apply_text()
    # The text itself, imported: what JAX saves and repeats then.
    again = module(edit.apply_text().encode())
    assert answers(rm.trace(again.f, *arguments(text)).report()) == answers(trace.report(policy, at))


@pytest.mark.parametrize(
    "name",
    [
        "several calls",
        "steps of a scan from its end",
        "steps of a scan, with a rest",
        "a map",
        "steps of a while loop that takes from a list",
        "steps of a for loop that count",
        "steps of a reduction",
    ],
)
def test_a_text_with_groups_computes_the_same(module, name):
    text, at, _ = SOME_STEPS[name]
    made = module(f"\n{text}\n")
    ws = np.random.default_rng(0).normal(size=(10, 4, 4)).astype(np.float32)
    args = list(ws) if isinstance(arguments(text)[0], list) else ws, jnp.linspace(0, 1, 8).reshape(2, 4)
    edited = EDITED.get(name) or rm.trace(made.f, *arguments(text)).edit("dots_saveable", at).apply_text()
    again = module(edited.encode())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        jax.jit(jax.value_and_grad(again.f, (0, 1)))(*args),
        jax.jit(jax.value_and_grad(made.f, (0, 1)))(*args),
    )


BLOCK = """
import itertools
import numpy as np

def block(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)

"""
WEIGHTS = [f32(4, 4)] * 7, f32(2, 4)
UNUSUAL = {
    "a variable of the module": (
        """
        def f(ws, x):
            global n
            n = 1
            for w in ws:
                x = block(x, w) * n
                n += 1
            return x.sum()
        """,
        "block/3",
    ),
    "a helper with any keywords": (
        """
        def helper(x, *rest, **others):
            return block(x, *rest)

        def f(ws, x):
            for w in ws:
                x = helper(x, w)
            return x.sum()
        """,
        "block[::2]",
    ),
    "a helper that is given a generator alone": (
        """
        def helper(pair):
            return block(*pair)

        def f(ws, x):
            for w in ws:
                x = helper(value for value in [x, w])
            return x.sum()
        """,
        "block[::2]",
    ),
    "a condition that reads an array's shape": (
        """
        def f(ws, x):
            i, y, total = 0, x, 0.0
            while i < len(ws) and y.ndim == 2:
                y = block(x, ws[i])
                total = total + y.sum()
                i += 1
            return total
        """,
        "block/3",
    ),
}
if sys.version_info >= (3, 12):
    UNUSUAL["a helper of several types"] = (
        """
        def helper[T: (int, float)](x, w):
            return block(x, w)

        def f(ws, x):
            for w in ws:
                x = helper(x, w)
            return x.sum()
        """,
        "block[::2]",
    )


@pytest.mark.parametrize("name", UNUSUAL)
def test_nothing_leaves_the_checkpoint_of_a_group_but_what_it_gives(module, name):
    text, at = UNUSUAL[name]
    trace = rm.trace(module(BLOCK + dedent(text)).f, *WEIGHTS)
    edit = trace.edit("nothing_saveable", at)
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    with jax.checking_leaks():
        assert answers(rm.trace(again.f, *WEIGHTS).report()) == answers(trace.report("nothing_saveable", at))


@pytest.mark.parametrize(
    "condition",
    ["for w in ws if masks.pop().max() >= 0", "for w in (w * masks.pop()[0] for w in ws)"],
    ids=["of the loop", "of what it goes through"],
)
def test_masks_that_steps_take_in_another_order_are_told_apart(module, condition):
    """A group tests its steps' conditions before it makes the first: each step then has another mask of NumPy's."""
    made = module(f"""{BLOCK}
def f(ws, x):
    masks = [np.full((2, 4), float(number), "float32") for number in range(20)]
    return sum([(block(x, w) * masks.pop()).sum() {condition}])
""")
    edit = rm.trace(made.f, *WEIGHTS).edit("nothing_saveable", "block/3")
    assert not edit.verified
    assert edit.differences == ("the edited text computes something else.",)


def test_a_generator_without_end_is_gone_through_as_far_as_it_is_asked(module):
    made = module(f"""{BLOCK}
def f(ws, x):
    values = (block(x, w) for w in itertools.cycle(ws))
    return sum(value.sum() for value, _ in zip(values, range(9)))
""")
    edit = rm.trace(made.f, *WEIGHTS).edit("nothing_saveable", "block/3")
    assert "for steps in [iter(itertools.cycle(ws))]" in edit.diff()  # a list of it would never end


def test_what_a_step_keeps_elsewhere_is_not_hidden_by_its_group(module):
    made = module(f"""{BLOCK}
def f(ws, x):
    values = []
    for w in ws:
        x = block(x, w)
        values.append(x)
    return x.sum() * len(values)
""")
    with pytest.raises(RematError, match=r"`values.append\(x\)`, by which a value would leave the checkpoint"):
        rm.trace(made.f, *WEIGHTS).edit("nothing_saveable", "block/3")


@pytest.mark.parametrize("name", ["several calls", "steps of a scan"])
def test_a_plan_for_groups_of_steps_is_written(module, name):
    text, at, _ = SOME_STEPS[name]
    trace = rm.trace(module(f"\n{text}\n").f, *arguments(text))
    edit = trace.edit([row for row in trace.report("none", at).residuals if row.primitive == "tanh"], at)
    assert edit.verified, edit.differences
    assert len(edit.names) == 1
    again = module(edit.apply_text().encode())
    assert rm.trace(again.f, *arguments(text)).report().saved_bytes == edit.saved_bytes


LAYERS = """
def attention(w, x):
    return jnp.tanh(jax.nn.softmax(x @ w) @ w)


def feed_forward(w, x):
    return x + jnp.sin(jnp.tanh(x @ w) @ w)


def head(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)


DECORATORdef block(w, x):
    return feed_forward(w, attention(w, x))


def f(ws, x):
    for w in ws:
        x = block(w, x)
    for w in ws[:3]:
        x = head(w, x)
    return x.sum()
"""
CHECKPOINT = "@jax.checkpoint\n"


def test_a_checkpoint_under_a_name_in_a_function_is_taken_off(module):
    made = module(
        """
        def f(w, x):
            keep = jax.checkpoint
            return keep(block)(w, keep(block)(w, x)).sum()

        def block(w, x):
            return jnp.sin(x @ w)
        """
    )
    edit = rm.trace(made.f, *SQUARE).edit("none", "sites")
    assert edit.verified, edit.differences
    assert "    keep = (lambda function: function)\n" in edit.apply_text()


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
    trace = rm.trace(module(SHARED).f, f32(4, 4), f32(2, 4))
    one = trace.edit("dots_saveable", "block")
    assert not one.verified
    assert "applies the checkpoint of other too" in one.differences[0]
    assert one.diff().startswith(f"# This edit was not verified: {one.differences[0]}\n--- ")
    both = trace.edit("dots_saveable", {"block": "dots_saveable", "other": "dots_saveable"})
    assert both.verified, both.differences
    assert "x = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(w, x)" in both.apply_text()
    with pytest.raises(RematError, match="of block, other together: choose one policy"):
        trace.edit("as_written", {"block": "none", "other": "dots_saveable"})


SEVERAL = {  # a policy for each place; the decorator of `block`; what the edited text has
    "two functions": (
        {"attention": "nothing_saveable", "feed_forward": "dots_saveable"},
        "",
        ["nothing_saveable)\ndef attention", "dots_saveable)\ndef feed_forward"],
    ),
    "moved inward": (
        {"block": "none", "attention": "nothing_saveable"},
        CHECKPOINT,
        ["\n\ndef block", ")\ndef attention"],
    ),
    "moved outward": (
        {"block": "none", "block/3": "nothing_saveable"},
        CHECKPOINT,
        [
            "\n\ndef block",
            "    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)\n        def group",
        ],
    ),
    "one in another": (
        {"block": "dots_saveable", "attention": "nothing_saveable"},
        CHECKPOINT,
        ["dots_saveable)\ndef block", "nothing_saveable)\ndef attention"],
    ),
    "within groups of steps": (
        {"block/3": "nothing_saveable", "attention": "dots_saveable"},
        "",
        ["def group", "dots_saveable)\ndef attention"],
    ),
    "two loops": (
        {"block/3": "nothing_saveable", "head/2": "dots_saveable"},
        "",
        ["def group(", "def group_(", "for first_ in range(0, len(steps_), 2):"],
    ),
    "as it is written, at one of them": (
        {"block": "as_written", "attention": "nothing_saveable"},
        CHECKPOINT,
        [CHECKPOINT],
    ),
}


@pytest.mark.parametrize(
    "name",
    usually(SEVERAL, "moved inward", "moved outward", "within groups of steps", "as it is written, at one of them"),
)
def test_policies_at_several_places_are_written(module, name, remat3):
    at, decorator, lines = SEVERAL[name]
    text = LAYERS.replace("DECORATOR", decorator)
    args = [f32(4, 4)] * 6, f32(2, 4)
    trace = rm.trace(module(text).f, *args)
    edit = trace.edit("as_written", at)
    assert edit.verified, edit.differences
    assert not [line for line in lines if line not in edit.apply_text()], edit.apply_text()
    again = module(edit.apply_text().encode())
    report = trace.report("as_written", at)
    assert answers(rm.trace(again.f, *args).report()) == answers(report)
    assert trace.edit("mixed", report.at) == edit  # as a row of `places` is asked for


def test_lines_that_are_put_into_a_loop_move_with_it(tmp_path):
    path = tmp_path / "text.py"
    path.write_text("def f(ws, x):\n    for w in ws:\n        x = x @ w\n\n        x = x + 1\n    return x\n")
    text = parsed_text(str(path), set())
    loop, last = text.tree.body[0].body
    changes = TextChanges(text)
    changes.add_after(loop.body[0], "x = named(x)")
    changes.add_after(loop.body[1], "x = last(x)")
    changes.add_first([last], 0, "x = after(x)")
    changes.wrap(loop.body[0].value, "f(", ")")
    changes.indent(loop, "  ")
    changes.lines_before(loop, ["if x:"])
    changes.lines_after(loop, ["else:", "  pass"])
    assert changes.file_edit().new == (
        "def f(ws, x):\n    if x:\n      for w in ws:\n          x = f(x @ w)\n          x = named(x)\n\n"
        "          x = x + 1\n          x = last(x)\n    else:\n      pass\n    x = after(x)\n    return x\n"
    )


def test_steps_of_modules_are_grouped_by_what_their_library_has(module):
    """A checkpoint of JAX's own around modules of linen, or haiku, would keep the parameters that they make in it."""
    hk = library("haiku")
    made = module("""
        import haiku as hk

        class Block(hk.Module):
            def __call__(self, x):
                return x + jnp.tanh(hk.Linear(4)(jnp.sin(x)))

        def net(x):
            for block in [Block() for _ in range(4)]:
                x = block(x)
            return x.sum()

        f = hk.transform(net).apply
    """)
    weights = hk.transform(made.net).init(jax.random.key(0), jnp.ones((2, 4)))
    edit = rm.trace(lambda w, x: made.f(w, None, x), weights, f32(2, 4)).edit("dots_saveable", "Block.__call__/2")
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    new = hk.transform(again.net).init(jax.random.key(0), jnp.ones((2, 4)))
    jax.tree.map(np.testing.assert_array_equal, new, weights)


@pytest.mark.parametrize(
    ("at", "line"),
    [
        ("block", "x = hk.remat(block, policy=jax.checkpoint_policies.dots_saveable, static_argnums=(1,))(x, name)"),
        ("net", "return jax.checkpoint(made.apply, policy=jax.checkpoint_policies.dots_saveable)(w, None, x) * 2"),
    ],
)
def test_functions_that_haiku_transforms_begin_as_before(module, at, line):
    """A checkpoint of JAX's own on these would keep what they ask haiku for, so that no parameter could be made."""
    library("haiku")
    text = """
        import haiku as hk

        def block(x, name):
            scale = hk.get_parameter(name, (4,), init=hk.initializers.RandomNormal())
            return x + jnp.tanh(hk.Linear(4)(jnp.sin(x * scale)))

        def net(x):
            for name in ("a", "b"):
                x = block(x, name)
            return x.sum()

        made = hk.transform(net)
        weights = made.init(jax.random.key(0), jnp.ones((2, 4)))

        def f(w, x):
            return made.apply(w, None, x) * 2
    """
    before = module(text)
    edit = rm.trace(before.f, before.weights, f32(2, 4)).edit("dots_saveable", at)
    assert edit.verified, edit.differences
    assert line in [new.strip() for new in added(edit)[0]]
    jax.tree.map(np.testing.assert_array_equal, module(edit.apply_text().encode()).weights, before.weights)


LAYERS_OF_LINEN = """
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, scale=1.0):
            return x + scale * jnp.tanh(nn.Dense(4)(jnp.sin(x)))

    class Net(nn.Module):
        {}

    def made():
        return Net().init({{"params": jax.random.key(0), "dropout": jax.random.key(1)}}, jnp.ones((2, 4)))

    def f(weights, x):
        return Net().apply(weights, x, rngs={{"dropout": jax.random.key(1)}})
"""
# What calls the layers, in a method of linen or without it.
LOOPS_OF_LINEN = {
    "made in each step": """@nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            for _ in range(5):
                x = Block()(nn.LayerNorm()(x))
                x = nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x))
            return nn.Dense(4)(x).sum()
    """,
    "under names": """@nn.compact
        def __call__(self, x):
            for number in range(5):
                layer = Block(name=f"layer_{number}")
                x = layer(x, scale=2.0)
            return x.sum()
    """,
    "in a list": """def setup(self):
            self.blocks = [Block() for _ in range(5)]

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()
    """,
    "in a function in the method": """@nn.compact
        def __call__(self, x):
            def run(x, scale):
                def stack(x):
                    for number in range(5):
                        x = nn.Dropout(0.5, deterministic=False)(Block()(x, scale))
                    return x

                return stack(nn.Dense(4)(x))

            return run(x, 2.0).sum()
    """,
}
WITHOUT_SUCH = {
    "flax.nnx": """
        from flax import nnx

        class Block(nnx.Module):
            def __init__(self, rngs):
                self.dense = nnx.Linear(4, 4, rngs=rngs)

            def __call__(self, x):
                return x + jnp.tanh(self.dense(jnp.sin(x)))

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.blocks = nnx.List([Block(rngs) for _ in range(5)])

            def __call__(self, x):
                for block in self.blocks:
                    x = block(x)
                return x.sum()

        def made():
            return Net(nnx.Rngs(0))

        def f(net, x):
            return net(x)
    """,
    "equinox": """
        import equinox as eqx

        class Block(eqx.Module):
            dense: eqx.nn.Linear

            def __call__(self, x):
                return x + jnp.tanh(jax.vmap(self.dense)(jnp.sin(x)))

        class Net(eqx.Module):
            blocks: list

            def __call__(self, x):
                for block in self.blocks:
                    x = block(x)
                return x.sum()

        def made():
            return Net([Block(eqx.nn.Linear(4, 4, key=jax.random.key(number))) for number in range(5)])

        def f(net, x):
            return net(x)
    """,
}
LAYERS_IN_LOOPS = {name: ("flax.linen", LAYERS_OF_LINEN.format(loop)) for name, loop in LOOPS_OF_LINEN.items()}
LAYERS_IN_LOOPS |= {f"of {name}": (name, text) for name, text in WITHOUT_SUCH.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some", ["[::2]", "[:3]", "/2"])
@pytest.mark.parametrize("name", LAYERS_IN_LOOPS)
def test_a_checkpoint_for_some_layers_is_written(module, name, some):
    which, text = LAYERS_IN_LOOPS[name]
    library(which)
    made = module(text)
    weights = made.made()
    trace = rm.trace(made.f, weights, f32(2, 4))
    edit = trace.edit("nothing_saveable", f"Block.__call__{some}")
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    new = again.made()
    leaves = [jax.tree_util.tree_flatten_with_path(each)[0] for each in (weights, new)]
    for (path, old), (other, value) in zip(*leaves, strict=True):
        assert str(path) == str(other)  # parameters have the names that they had, and what they began with
        np.testing.assert_array_equal(old, value)
    report = rm.trace(again.f, new, f32(2, 4)).report()
    assert answers(report) == answers(trace.report("nothing_saveable", f"Block.__call__{some}"))
    x = jnp.linspace(0, 1, 8).reshape(2, 4)
    np.testing.assert_allclose(jax.grad(again.f, 1)(new, x), jax.grad(made.f, 1)(weights, x), rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_steps_of_linen_where_the_module_has_no_name_are_left_to_the_user(module):
    """A checkpoint of flax's must be given the module, and has it from the method."""
    library("flax.linen")
    made = module(
        LAYERS_OF_LINEN.format(
            """@nn.compact
        def __call__(self, x):
            def run(x, self):
                for _ in range(4):
                    x = Block()(x)
                return self * x

            return run(x, 2.0).sum()
    """
        )
    )
    with pytest.raises(RematError, match=r"the loop at line \d+ of .* is not in a method of the module itself"):
        rm.trace(made.f, made.made(), f32(2, 4)).edit("dots_saveable", "Block.__call__/2")


LEFT_OF_LINEN = {
    "pop": "todo = [*self.blocks]\n            while todo:\n                x = todo.pop(0)(x)",
    "comprehension": "x = sum([block(x) for block in self.blocks])",
    "reduce": "x = functools.reduce(lambda x, block: block(x), self.blocks, x)",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", usually(LEFT_OF_LINEN, "reduce"))
def test_modules_of_linen_that_come_from_beside_a_group_are_left_to_the_user(module, loop):
    """They are bound to what is outside of the checkpoint, which tracing alone does not tell."""
    library("flax.linen")
    method = f"""def setup(self):
            self.blocks = [Block() for _ in range(4)]

        def __call__(self, x):
            {LEFT_OF_LINEN[loop]}
            return x.sum()
    """
    made = module("    import functools\n" + LAYERS_OF_LINEN.format(method))
    with pytest.raises(RematError, match=r"the loop at line \d+ of .* make it a for loop, and ask again"):
        rm.trace(made.f, made.made(), f32(2, 4)).edit("dots_saveable", "Block.__call__/2")


def test_what_a_step_of_a_loop_leaves(tmp_path):
    """Only what is read after it before it is written again, also in the loop around it."""
    path = tmp_path / "text.py"
    path.write_text(
        "def f(ws, x):\n    a = b = c = d = 0\n    for _ in range(3):\n        for w in ws:\n            a = x\n"
        "            b, n = a + b, 1\n            if n:\n                c = 1\n            else:\n"
        "                c = d\n            x = x + w\n            d = 2\n            if d:\n                e = 1\n"
        "        c = c + e\n        for w in ws:\n            x += w\n    n = 1\n    return x, n\n"
    )
    text = parsed_text(str(path), set())
    loop = text.tree.body[0].body[1].body[0]
    # `a` is not read later, `n` written before; `c` is written in each step, `d` is read by the next, and `e` may stay.
    assert carried_by(text, loop) == (["x", "b", "d", "e"], ["x", "b", "c", "d", "e"], [], [])


# What no function can do for the steps of a loop, and the sentence on it.
LEFT_TO_THE_USER = {
    "for w in ws:\n        x = body(x, w)[0]\n        if x.ndim == 3:\n            return x.sum()": (
        "returns in its steps: assign what it returns, `break`, return it after the loop, and ask again"
    ),
    "for w in ws:\n        global n\n        n = x = body(x, w)[0]": "declares variables",
    "d = {}\n    for w in ws:\n        x = d['x'] = body(x, w)[0]": r"assigns `d\['x'\]`",
    "for w in ws:\n        def g(x):\n            return x\n        x = g(body(x, w)[0])": "defines a function",
    "for w in ws:\n        x = body(x, w)[0] + len('''a\n    b''')": "has a string over several lines",
    "x = sum([(y := body(x, w)[0]) for w in ws])": "the comprehension .* assigns a variable",
    "n = iter(range(11))\n    while (m := next(n)) < 10:\n        x = body(x, ws[m])[0]": "a variable in its condition",
    "import functools\n    x = functools.reduce(*[lambda x, w: body(x, w)[0], ws, x])": "there by hand",
    "for y in map(lambda w: body(x, w)[0], ws):\n        x = x + y": "no loop of its function that an edit reads: ",
    "x = sum(map(lambda w: body(x, w)[0], *[ws]))": "has arguments that no edit passes on",
    "for w in ws:\n        x = body(body(x, w)[0], w)[0]": "there by hand",
    "g = lambda x, ws: jax.lax.scan(body, x, jnp.stack(ws))[0]\n    x = g(g(x, ws), ws[:7])": "there by hand",
    "x = jax.lax.scan(body, x, jnp.zeros((0, 4, 4)))[0]": "there by hand",
}


@pytest.mark.parametrize("loop", LEFT_TO_THE_USER)
def test_steps_that_no_edit_can_group_are_left_to_the_user(module, loop):
    made = module(f"\n{LAYER}def f(ws, x):\n    {loop}\n    return x.sum()\n")
    with pytest.raises(RematError, match=LEFT_TO_THE_USER[loop]):
        rm.trace(made.f, [f32(4, 4)] * 10, f32(2, 4)).edit("dots_saveable", "body/5")


IN_HELPERS = """
    def inner(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    class Layer:
        def run(self, w, x, scale=2.0):
            return x + inner(w, x) * scale

    def block(
        w, *,
        x,
    ): return Layer().run(w, x) + jnp.cos(inner(w, x))

    def f(ws, x):
        {}
        return x.sum()

    def of_one(ws, x):
        return block(ws[0], x=x).sum()
"""


@pytest.mark.parametrize("some", ["[::2]", "[:3]"])
def test_some_of_the_calls_that_helpers_of_a_loop_make_are_written(module, some):
    """A counter beside the loop is given to them; without it they do what they did."""
    made = module(IN_HELPERS.format("for w in ws:\n            x = block(w, x=x)"))
    args = [f32(4, 4)] * 4, f32(2, 4)
    trace = rm.trace(made.f, *args)
    edit = trace.edit("dots_saveable", f"inner{some}")
    assert edit.verified, edit.differences
    again = module(edit.apply_text().encode())
    assert answers(rm.trace(again.f, *args).report()) == answers(trace.report("dots_saveable", f"inner{some}"))
    assert answers(rm.trace(again.of_one, *args).report()) == answers(rm.trace(made.of_one, *args).report())
    ws, x = [*jax.random.normal(jax.random.key(0), (4, 4, 4))], jnp.linspace(0, 1, 8).reshape(2, 4)
    np.testing.assert_allclose(jax.grad(again.f, 1)(ws, x), jax.grad(made.f, 1)(ws, x), rtol=1e-5)


@pytest.mark.parametrize(
    "loop",
    [
        "x = sum(jax.tree.map(functools.partial(block, x=x), ws))",
        "for w in ws:\n            x = jax.jit(block)(w, x=x)",
    ],
)
def test_some_of_the_calls_that_one_place_makes_are_left_to_the_user(module, loop):
    """An edit there would be of all of them."""
    made = module(f"    import functools\n{IN_HELPERS}".format(loop))
    trace = rm.trace(made.f, [f32(4, 4)] * 4, f32(2, 4))
    with pytest.raises(RematError, match=r"or not for all of these calls alone: .*jax.checkpoint\(inner, "):
        trace.edit("dots_saveable", "inner[:3]")


def test_a_plan_without_a_verified_edit_says_so(module):
    trace, plan = two_layers(module)
    edit = dataclasses.replace(trace.edit(plan), verified=False, budget_bytes=16, differences=("why.",))
    assert edit.diff() == "# There is no edit of the source that was verified to keep to 16 saved bytes: why.\n"
    best = dataclasses.replace(edit, closest=trace.edit(plan))
    assert (best.diff(), best.apply_text()) == (trace.edit(plan).diff(), trace.edit(plan).apply_text())


# Why no edit is the plan: its values are one layer's of several, or made inside a library's function.
PARTLY = {"three_layers", "dictionary", "fori", "attention", "embedding", "constant_captured", "binary8"}
PARTLY |= {
    "scanned_relu",
    "custom_jvp",
    "custom_vjp",
    "convolution",
}  # in a rule, such as a relu's mask


# One of a kind: named, a loop, a checkpoint in it, branches, a rule, and values in an expression of a library's.
@pytest.mark.parametrize(
    "name",
    usually(
        PROGRAMS,
        *("named_layers", "nested_scan", "scanned_checkpoint", "conditional", "custom_vjp", "convolution"),
    ),
)
def test_programs(name):
    before = dict(PROGRAMS)
    fun, args = PROGRAMS[name]
    trace = rm.trace(fun, *args)
    for plan in planned(trace):
        edit = holds(trace, plan)
        assert edit.verified or name in PARTLY or nested(trace, plan)
        assert edit.verified or edit.unnamed or edit.differences
    assert before == PROGRAMS


def test_what_an_edit_keeps_beside_its_budget_is_said(module):
    """One expression of a loop names all of its layers, of which the plan saves some."""
    loop = module("""
        def loss(ws, x):
            for w in ws:
                x = jnp.sin(jnp.tanh(x @ w))
            return x.sum()
    """)
    trace = rm.trace(loop.loss, [f32(8, 8)] * 4, f32(8, 8))
    plan = trace.plan(3 * 256, "function")
    edit = trace.edit(plan)
    assert (edit.budget_bytes, edit.saved_bytes > 768) == (768, True)
    assert edit.excess_bytes == edit.saved_bytes - 768
    alone = dataclasses.replace(edit, closest=None)
    for text in (display.text(alone), edit_html(alone)):
        assert f"exceeds that by {units.nbytes(edit.excess_bytes)}" in " ".join(text.split())
    kept_to = trace.edit(trace.plan(4 * 256, "function"))
    assert kept_to.excess_bytes == 0
    assert "it keeps to it" in " ".join(display.text(kept_to).split())
    assert trace.edit("dots_saveable").budget_bytes is None  # none was asked for
