"""Records are data: frozen, free of JAX and of functions, pickled without work and read where there is no JAX."""

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.errors import RematError
from remat_magic.facts import program_text
from remat_magic.facts.facts import Variant
from tests.conftest import package_folder
from tests.programs import f32


@jax.checkpoint
def layer(w, x):
    return x + jnp.sin(jnp.tanh(x @ w))


def layers(ws, x):
    for w in ws:
        x = layer(w, x)
    return jnp.sum(x)


def step(ws, x):
    loss, grads = jax.value_and_grad(layers)(ws, x)
    return loss, ws - 0.1 * grads


@pytest.fixture(scope="module")
def records():
    args = f32(3, 16, 16), f32(8, 16)
    trace, there = rm.trace(layers, *args), "H100 SXM"
    plan = trace.plan("40%", at="function")
    read = rm.trace(layers, *args).report("none")
    assert read.forward.text
    assert read.backward.text
    return {
        "report": trace.report("nothing_saveable", "function"),
        "report on a device": trace.report("dots_saveable", "function", device=there),
        "report that was read": read,
        "preview": rm.trace(layers, *args).preview("none"),
        "report of a step": rm.trace(step, *args).report(),
        "comparison": trace.compare(device=there),
        "places": trace.places(device=there, most=3),
        "plan": plan,
        "edit": trace.edit(plan),
        "measurement": trace.measure("none"),
        "timeline": trace.timeline(),
        "step": rm.trace(step, *args).step,
        "advice": trace.advice("nothing_saveable"),
        "what if": trace.what_if("dots_saveable", "function"),
        "gradients": trace.check_gradients(["nothing_saveable"]),
        "sites": trace.sites,
        "choices": trace.choices(),
    }


@pytest.fixture(scope="module")
def pickled(records):
    """As they are pickled where nothing can be worked out; nobody has looked at them before."""

    def refuse(*args, **kwargs):
        raise AssertionError("pickling works")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((program_text, "program"), (Variant, "report")):
            patch.setattr(owner, name, refuse)
        return pickle.dumps(records)


def values_in(value):
    """A record, and all that its fields hold."""
    yield value
    if dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inside = [*value.values()] if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    for inner in inside:
        yield from values_in(inner)


def test_records_hold_data_alone(records, pickled):  # which is made first: this looks at every text
    for value in values_in(records):
        assert not type(value).__module__.startswith("jax")
        assert not callable(value)
        if dataclasses.is_dataclass(value):
            assert type(value).__dataclass_params__.frozen, value


WITHOUT_JAX = """
import pickle, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
records = pickle.load(sys.stdin.buffer)
pages = []
for record in records.values():
    if hasattr(record, "_repr_html_"):
        pages.append(record._repr_html_())
        print(repr(record), file=sys.stderr)
    if hasattr(record, "save_html"):
        record.save_html(sys.argv[1])
        pages.append(open(sys.argv[1]).read())
pickle.dump((records, pages), sys.stdout.buffer)
"""


def test_they_are_read_and_shown_without_jax_and_are_equal(records, pickled, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, tmp_path / "page.html"],
        input=pickled,
        capture_output=True,
        check=False,
        cwd=package_folder().parent,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    again, pages = pickle.loads(ran.stdout)
    assert all(pages)
    for name, record in records.items():
        assert again[name] == record, name
        assert type(again[name]) is type(record)
        assert pickle.loads(pickle.dumps(again[name])) == again[name]


def test_a_pickled_report_has_its_text_if_it_was_looked_at(records, pickled):
    again = pickle.loads(pickled)
    read, other = again["report that was read"], again["report"]
    assert read.forward.text == records["report that was read"].forward.text
    assert read.backward.lines == records["report that was read"].backward.lines
    assert other.forward.lines == ()
    assert other.forward.equations == records["report"].forward.equations
    with pytest.raises(RematError, match="report.forward.text"):
        _ = other.forward.text
    assert "nobody had looked at this text" in other._repr_html_()
    assert records["report"].forward.text
    assert other == records["report"]


def test_texts_tell_programs_apart():
    one, other = (rm.trace(lambda x, n=n: jnp.sum(x + n), f32(4)).report("none").forward for n in (1.0, 2.0))
    assert one.equations == other.equations
    assert one != other
    assert one == pickle.loads(pickle.dumps(one))
