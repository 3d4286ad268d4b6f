"""The demo as a newcomer meets it, in every theme."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.contrast import unreadable
from tests.browser.inspected import LAYERS, LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server
from tests.make_demo import DEMO, lacks
from tests.volume import usually


def shows_a_widget(source: str) -> bool:
    """Whether a demo cell is one that ends in a widget."""
    line = next((line for line in source.splitlines() if re.match(r"%%?remat\b", line)), None)
    return line is not None and "--text" not in line and not lacks(source)


# How far the demo is run, and at least how many widgets it has until there. test_demo_notebook.py runs all of it,
# without a page.
LEAST = {"### Example 3": 4, "## 3.": 10, "the end": 15}


@pytest.mark.parametrize("until", usually(LEAST, "### Example 3"))
def test_the_demo_runs_and_shows_its_widgets(notebook: NotebookPage, lab: Server, until: str) -> None:
    demo = nbformat.read(DEMO, as_version=4)
    demo.cells = list(itertools.takewhile(lambda cell: not cell.source.startswith(until), demo.cells))
    nbformat.write(demo, lab.folder / "demo.ipynb")
    cells = demo.cells
    expected = [index for index, cell in enumerate(cells) if cell.cell_type == "code" and shows_a_widget(cell.source)]
    assert len(expected) >= LEAST[until]
    notebook.open("demo.ipynb")
    notebook.leave_out_unseen_cells()
    notebook.run_all()
    assert notebook.errors() == []
    for index in expected:
        widget = notebook.cell(index).locator(".remat-widget").first
        # Some thirty widgets ask one kernel at once, which answers between what it works out ahead.
        expect(widget).to_be_visible(timeout=300_000)
        expect(widget.locator('[data-part="totals"]')).to_contain_text("saved")
    widget = Widget(notebook, expected[0])
    before = widget.totals.text_content()
    widget.policy.select_option("nothing_saveable")
    expect(widget.totals).to_contain_text("saved 0 B")
    assert widget.totals.text_content() != before


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "theme.ipynb", LOAD, LAYERS)
    page_of_module.open("theme.ipynb")
    return page_of_module


# The first in this notebook, whose cells have no outputs yet.
def test_run_all_in_the_menu(opened: NotebookPage) -> None:
    opened.run_all_by_menu()
    Widget(opened, 1).shows("as_written")


# The two others are those of which test_accessibility.py asks the same of every panel.
@pytest.mark.parametrize(
    "theme", usually(["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"], "JupyterLab Dark")
)
def test_everything_is_readable_in_every_theme(opened: NotebookPage, theme: str, tmp_path: Path) -> None:
    opened.set_theme(theme)
    opened.run_all()
    widget = Widget(opened, 1)
    widget.policy.select_option("dots_saveable")
    widget.shows("dots_saveable")
    for tab in ("Residuals", "Recomputed", "Jaxprs"):
        widget.tab(tab).click()
        widget.root.screenshot(path=tmp_path / f"{tab}.png")
        assert unreadable(widget.root) == []
    twin = opened.cell(1).locator(".remat-static")
    show(twin)
    assert unreadable(twin) == []


def show(twin: Locator) -> None:
    """Show a static output that a widget stands for."""
    twin.evaluate("root => { root.closest('.remat-replaced')?.classList.remove('remat-replaced') }")
    twin.evaluate("root => { for (const details of root.querySelectorAll('details')) details.open = true }")
    expect(twin).to_be_visible()
