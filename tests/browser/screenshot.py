"""Make the README's picture from the real thing: ``python -m tests.browser.screenshot [light|dark] [FILE]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.inspected import LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, browse, serve

CELL = """\
%%remat --policy dots_saveable
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def layer(x, w):
    return jnp.tanh(checkpoint_name(x @ w, "hidden"))

def loss(params, x, y):
    for w in params:
        x = layer(x, w)
    return jnp.mean((x - y) ** 2)

params = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 4
x = y = jax.ShapeDtypeStruct((8192, 1024), "float32")
jax.grad(loss)(params, x, y)
"""


def main(theme: str = "light", file: str = "screenshot.png") -> None:
    """Take the picture."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "lab") as server, browse() as browser:
        write_notebook(server.folder / "example.ipynb", LOAD, CELL)
        page = browser.new_page(viewport={"width": 1280, "height": 1250}, device_scale_factor=1.5)
        notebook = NotebookPage(server, page)
        notebook.open("example.ipynb")
        if theme == "dark":
            notebook.set_theme("JupyterLab Dark")
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
        notebook.run_all()
        widget = Widget(notebook, 1)
        expect(widget.part("recomputed")).not_to_be_empty()
        widget.root.get_by_label("Source beside").check()
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # for the last of the layout's transitions
        notebook.cell(1).screenshot(path=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
