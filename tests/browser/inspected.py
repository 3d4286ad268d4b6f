"""The notebook that most browser tests open, and the widget in it as a person sees it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import NotebookPage

LOAD = "%load_ext remat_magic"

# Three layers x -> sin(W x): 29 floats are saved without a checkpoint, 18 under a policy that saves the dots.
LAYERS = """\
%%remat -o w
import jax
import jax.numpy as jnp

def layers(W1, W2, W3, x):
    x = jnp.sin(W1 @ x)
    x = jnp.sin(W2 @ x)
    return jnp.sin(W3 @ x)

f32 = jax.numpy.float32
layers(*(jax.ShapeDtypeStruct(shape, f32) for shape in [(5, 4), (6, 5), (7, 6), (4,)]))
"""
SAVED = {"as_written": "116 B", "dots_saveable": "72 B", "nothing_saveable": "0 B"}

# Three checkpointed blocks with a name: all the controls there are.
BLOCKS = """\
%%remat
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

@jax.checkpoint
def block(x, W):
    return jnp.tanh(checkpoint_name(x @ W, "product"))

def loss(params, x):
    for W in params:
        x = block(x, W)
    return jnp.sum(x)

loss([jax.ShapeDtypeStruct((16, 16), "float32")] * 3, jax.ShapeDtypeStruct((8, 16), "float32"))
"""
# By a tab's title: its part, and what in it has the figures.
TABS = {
    "Values": ("residuals", "tr.remat-row td.remat-num"),
    "Source": ("listing", "u"),
    "Jaxprs": ("jaxprs", "pre .remat-l"),
    "Memory": ("memory", "svg"),
    "Choices": ("tried", "tr.remat-row"),
    "Notes": ("noted", "li, p"),
}

# What a reader has unfolded on this page or another.
FORGET = """() => Object.keys(localStorage).filter(key => key.startsWith("remat_magic-"))
  .forEach(key => localStorage.removeItem(key))"""


def write_notebook(path: Path, *cells: str) -> None:
    """Write a notebook of code cells, without outputs."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source.strip()) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, path)


def focus(target: Locator) -> None:
    """Focus an element that can be seen.

    Playwright's own ``focus`` does not wait until one can be: a widget that has not heard of its kernel yet is hidden
    and takes no focus, so that the keys go to the cell, which "dd" deletes.
    """
    expect(target).to_be_visible()
    target.focus()
    expect(target).to_be_focused()


def ask_for(widget: Widget, size: str) -> None:
    """Ask whether it fits so many bytes."""
    widget.root.get_by_label("Device", exact=True).select_option("?")
    field = widget.root.get_by_label("Bytes to fit")
    field.fill(size)
    field.press("Enter")
    expect(widget.root.get_by_label("Device", exact=True)).to_have_value(size)


def inspection(notebook: NotebookPage, cell: int = 1, *, forget: bool = False) -> Widget:
    """The new widget of a cell, which nobody has touched; on a first visit if what was unfolded is forgotten."""
    notebook.page.mouse.move(0, 0)
    if forget:
        notebook.page.evaluate(FORGET)
    notebook.run(cell)
    assert notebook.errors() == []
    return Widget(notebook, cell)


def expect_report(page: Page) -> None:
    """What is kept of ``LAYERS`` under the dots, readable: the numbers, the table, the other policies' figures."""
    report = page.locator(".remat-static").first
    expect(report).to_be_visible()
    expect(report).to_contain_text("layers(W1 f32[5,4]")
    expect(report).to_contain_text(re.compile(r"Saved \d+ [A-Z]\w+ \d{4}; run the cell for the live view\."))
    expect(report).to_contain_text("saves 72 B")
    expect(report.locator("table").first).to_contain_text("dot_general")
    expect(report).to_contain_text("116 B")
    # What Jupyter says in place of a widget that it cannot show.
    expect(page.get_by_text(re.compile("Loading widget|model not found"))).to_be_hidden()


class Widget:
    """The widget below a cell."""

    def __init__(self, notebook: NotebookPage, cell: int) -> None:
        self.notebook = notebook
        self.cell_index = cell
        self.root = notebook.cell(cell).locator(".remat-widget")
        self.policy = self.root.get_by_label("Policy", exact=True)
        self.at = self.root.get_by_label("Place", exact=True)
        self.totals = self.part("totals")
        self.status = self.part("status")

    def part(self, name: str) -> Locator:
        """A part of the widget that follows the policy."""
        return self.root.locator(f'[data-part="{name}"]')

    def tab(self, name: str) -> Locator:
        """The tab of a panel."""
        return self.root.get_by_role("tab", name=name)

    def unfold(self) -> None:
        """Unfold what a first visit does not show."""
        expect(self.root.get_by_role("button", name="more", exact=True)).to_be_visible()
        for action in ("more", "arrange"):
            fold = self.root.locator(f'[data-action="{action}"]').first
            if fold.is_visible() and fold.get_attribute("aria-expanded") == "false":  # not where another tab is open
                fold.click()

    def shows(self, policy: str) -> None:
        """Wait until the widget shows a policy's residuals, in the control and in the numbers."""
        expect(self.root).to_be_visible()
        expect(self.policy).to_have_value(policy)
        expect(self.totals).to_contain_text(f"saves {SAVED[policy]}")

    def keeps(self, policy: str) -> None:
        """Wait until what a notebook keeps is a policy's report, which is written once its programs are known too."""
        self.shows(policy)
        kept = self.notebook.outputs(self.cell_index).locator(".remat-static .remat-chosen").first
        expect(kept).to_contain_text(f"Policy {policy}:")
