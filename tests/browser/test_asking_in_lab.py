"""A program about which XLA takes long to be asked, in JupyterLab: the figures turn, and nothing else does."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.inspected import LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server

# XLA answers when a reader has looked around.
SETTINGS = """\
import threading
from remat_magic.engine import primal
from remat_magic.engine.engine import Engine
primal._MOST_ASKED = 5
going, ask = threading.Event(), Engine.of_one_device
def of_one_device(engine):
    going.wait(60)
    return ask(engine)
Engine.of_one_device = of_one_device
"""
STEP = """\
%%remat --mesh "data=4,model=2" --at function
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w) * jnp.sin(x).mean() + jax.nn.softmax(x)
    return (x**2).sum()

def train_step(ws, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

step = jax.jit(train_step, in_shardings=(P("model"), P("data")))
f32 = jnp.float32
step([jax.ShapeDtypeStruct((64, 64), f32)] * 3, jax.ShapeDtypeStruct((128, 64), f32))
"""


@pytest.mark.slow  # test_asking_xla.py asks the same of the widget without a page
def test_the_figures_turn_to_one_devices(notebook: NotebookPage, lab: Server) -> None:
    write_notebook(lab.folder / "asking.ipynb", LOAD, SETTINGS, STEP)
    notebook.open("asking.ipynb")
    notebook.run_all()
    widget = Widget(notebook, 2)
    expect(widget.totals).to_contain_text("of all 8 devices together")
    expect(widget.part("notes")).to_contain_text("XLA is being asked in the background")
    widget.tab("Compare").click()
    widget.root.get_by_label("Device", exact=True).select_option("H100 SXM x8")
    widget.tab("Memory").click()
    widget.policy.select_option("nothing_saveable")
    expect(widget.totals).to_contain_text("saved 0 B")
    expect(widget.totals).to_contain_text("of all 8 devices together")
    notebook.execute("going.set()")
    expect(widget.totals).to_contain_text("of one of 8 devices", timeout=300_000)
    expect(widget.part("notes")).not_to_contain_text("XLA is being asked")
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(widget.tab("Memory")).to_have_attribute("aria-selected", "true")
    expect(widget.part("memory")).to_contain_text("Held at the peak of train_step", timeout=300_000)
    expect(widget.root.get_by_label("Device", exact=True)).to_have_value("H100 SXM x8")
    assert notebook.errors() == []
