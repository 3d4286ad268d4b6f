"""A training step in JupyterLab: which of its gradients is shown, and what the whole step holds."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.inspected import inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

STEP = """\
%%remat -o kept
import jax, jax.numpy as jnp

def generator_loss(generator, x):
    return jnp.tanh(jnp.sin(x @ generator)).sum()

def critic_loss(critic, x):
    return jnp.sin(x[:4] @ critic).sum()

@jax.jit
def train_step(generator, critic, x):
    critic = critic - jax.grad(critic_loss)(critic, x)
    return generator - jax.grad(generator_loss)(generator, x), critic

generator = critic = jnp.ones((64, 64))
x = jnp.ones((128, 64))
generator, critic = train_step(generator, critic, x)
"""
CELLS = (STEP, "print(kept.report.function, kept.report.complete)")


def test_the_gradient_can_be_chosen(loaded: NotebookPage) -> None:
    widget = inspection(loaded)
    chosen = widget.root.get_by_label("Gradient of")
    expect(chosen).to_have_value("generator_loss")
    expect(widget.root).to_contain_text("generator_loss(generator f32[64,64], x f32[128,64])")
    chosen.select_option("critic_loss")
    expect(widget.root).to_contain_text("critic_loss(critic f32[64,64], x f32[128,64])")
    expect(widget.root.get_by_label("Gradient of")).to_have_value("critic_loss")
    expect(widget.part("recomputed")).not_to_be_empty()
    widget.policy.select_option("nothing_saveable")
    expect(widget.totals).to_contain_text("0 B")
    loaded.run(2)
    expect(loaded.outputs(2)).to_contain_text("critic_loss True")
    # Its own derivative, which traces the step once more.
    widget.root.get_by_label("Gradient of").select_option("none")
    expect(widget.root).to_contain_text("train_step(generator f32[64,64], critic f32[64,64], x f32[128,64])")
    expect(widget.part("residuals")).not_to_be_empty()
