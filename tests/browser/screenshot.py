"""Make the README's picture from the real thing: ``python -m tests.browser.screenshot [light|dark] [FILE]``.

With the extra ``tpu``, of which the verdict at the top is.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import expect

from tests.browser.inspected import Widget, write_notebook
from tests.browser.lab import NotebookPage, browse, serve

DEMO = Path(__file__).parents[2] / "demo.ipynb"


def first_step() -> list[str]:
    """The demo's first cells of code: its imports, and the step that does not fit."""
    cells = nbformat.read(DEMO, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"][:2]


def main(theme: str = "light", file: str = "screenshot.png") -> None:
    """Take the picture."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "lab") as server, browse() as browser:
        write_notebook(server.folder / "example.ipynb", *first_step())
        page = browser.new_page(viewport={"width": 1280, "height": 2000}, device_scale_factor=1.5)
        notebook = NotebookPage(server, page)
        notebook.open("example.ipynb")
        if theme == "dark":
            notebook.set_theme("JupyterLab Dark")
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
        notebook.run_all()
        widget = Widget(notebook, 1)
        # By the compiler, where the extra ``tpu`` is there.
        expect(widget.part("verdict")).to_contain_text(re.compile("compiled|pip install"), timeout=300_000)
        expect(widget.part("changes")).not_to_contain_text(
            re.compile("Still looking|Asking the compiler"), timeout=300_000
        )
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # for the last of the layout's transitions
        widget.root.screenshot(path=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
