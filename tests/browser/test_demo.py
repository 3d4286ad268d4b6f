"""The demo as a newcomer meets it."""

import itertools
import re

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.inspected import Widget
from tests.browser.lab import NotebookPage, Server
from tests.make_demo import DEMO

pytestmark = pytest.mark.slow


def shows_a_widget(source: str) -> bool:
    """Whether a demo cell is one that ends in a widget."""
    line = next((line for line in source.splitlines() if re.match(r"%%?remat\b", line)), None)
    return line is not None and "--text" not in line


# How far the demo is run, and at least how many widgets it has until there.
@pytest.mark.parametrize(("until", "least"), [("## 2.", 2), ("the end", 14)])
def test_the_demo_runs_and_shows_its_widgets(notebook: NotebookPage, lab: Server, until: str, least: int) -> None:
    demo = nbformat.read(DEMO, as_version=4)
    demo.cells = cells = list(itertools.takewhile(lambda cell: not cell.source.startswith(until), demo.cells))
    nbformat.write(demo, lab.folder / "demo.ipynb")
    expected = [index for index, cell in enumerate(cells) if cell.cell_type == "code" and shows_a_widget(cell.source)]
    assert len(expected) >= least
    notebook.open("demo.ipynb")
    notebook.leave_out_unseen_cells()
    notebook.run_all()
    assert notebook.errors() == []
    for index in expected:
        widget = Widget(notebook, index)
        # Some thirty widgets ask one kernel at once.
        expect(widget.root).to_be_visible(timeout=300_000)
        expect(widget.totals).to_contain_text("saves")
    first = Widget(notebook, expected[0])
    first.policy.select_option("nothing_saveable")
    expect(first.totals).to_contain_text("saves 0 B")
