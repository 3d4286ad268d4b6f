"""A trace is of what ran: a later cell that gives its names to something else changes nothing of what is found out."""

import dataclasses
import linecache
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm

_CELL = """
import functools
import jax
import jax.numpy as jnp

SCALE, WIDTH = 3.0, 64

class Squash:
    def __call__(self, x):
        return jnp.tanh(SCALE * x)

squash = Squash()

def block(w, x):
    return Squash()(x @ w)

def render(w, ray):
    return (block(w, ray) ** 2).sum()

def loss_fn(params, x):
    for w in params:
        x = block(w, x)
    return (x ** 2).mean() + jax.vmap(functools.partial(render, params[0]))(x.reshape(-1, WIDTH)).mean()

@jax.jit
def train_step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_fn)(params, x))
"""
_LATER = """
SCALE, WIDTH = "text", 7

class Squash:
    pass

def block(x):
    return x

def loss_fn(params):
    return 0.0

def train_step(x):
    return x
"""


@pytest.fixture
def module(tmp_path: Path) -> Any:
    path = tmp_path / "cell.py"
    path.write_text(_CELL, encoding="utf-8")
    linecache.checkcache(str(path))
    module = types.ModuleType("cell")
    module.__file__ = str(path)
    exec(compile(_CELL, path, "exec"), vars(module))
    return module


def _found_out(trace: rm.Trace) -> list[Any]:
    """What asks the function anew, or its text."""
    parts = trace.report("nothing_saveable", at=trace.parts[0].key)
    edit = trace.edit("nothing_saveable", at="block")
    compiled = trace.measure("nothing_saveable", at="block")
    fit = trace.fit(400_000)
    return [
        fit.largest_batch,
        [(it.what, it.unusable) for it in fit.tried],
        edit.verified,
        edit.diff(),
        compiled.error,
        compiled.needed_bytes,
        parts.saved_bytes,
        [row.type for row in trace.of_gradient(trace.gradients[0].key).report().residuals],
    ]


def test_a_later_cell_changes_nothing(module: Any) -> None:
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((256, 64), jnp.float32)
    before = _found_out(rm.trace(module.train_step, *args))
    trace = rm.trace(module.train_step, *args)
    exec(_LATER, vars(module))
    later = dict(vars(module))
    assert _found_out(trace) == before
    assert before[0]
    assert before[2]
    assert not before[4]
    assert vars(module) == later


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Settings:
    """A pytree of the user's."""

    depth: Any
    start: Any


def test_functions_are_remembered_and_arrays_are_not(module: Any) -> None:
    module.params, module.layers = [jnp.ones((64, 64))] * 2, (64, 64)
    module.config, module.state = Settings(4, None), Settings(4, jnp.ones(3))
    names = rm.trace(module.train_step, module.params, jnp.ones((8, 64))).facts.engine.given.names
    for name in ("params", "layers", "config", "state", "block", "SCALE", "train_step"):
        delattr(module, name)
    assert {"layers", "config", "block", "SCALE", "train_step"} <= names.of(vars(module)).keys()
    assert not {"params", "state"} & names.of(vars(module)).keys()
