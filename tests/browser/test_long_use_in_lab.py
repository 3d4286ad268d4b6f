"""A notebook in use for long: many widgets, cells run again, a kernel that is restarted or dies under them."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.inspected import LAYERS, LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server

pytestmark = pytest.mark.slow

ONE_MORE = "%remat -p dots_saveable layers(*(jax.ShapeDtypeStruct(s, f32) for s in [(5, 4), (6, 5), (7, 6), (4,)]))"
# What is open and held in the kernel. Of each widget there are two channels: its own and its layout's.
COUNT = """\
import comm, gc
gc.collect()
print(len(comm.get_comm_manager().comms), sum(type(each).__name__ == "Trace" for each in gc.get_objects()))
"""
CELLS = (LAYERS, "import os\nprint(os.getpid())")


def _counted(notebook: NotebookPage, cell: int) -> tuple[int, int]:
    """Open channels and traces held, as a cell with ``COUNT`` tells."""
    notebook.run(cell, seconds=240)  # the page draws fifty widgets before it hears that the cell has ended
    text = (notebook.outputs(cell).text_content() or "").split()
    return int(text[0]), int(text[1])


@pytest.mark.parametrize("many", [3, 50])
def test_many_widgets_of_which_each_goes_with_its_cell(notebook: NotebookPage, lab: Server, many: int) -> None:
    write_notebook(lab.folder / "many.ipynb", LOAD, LAYERS, COUNT, *([ONE_MORE] * (many - 1)))
    notebook.open("many.ipynb")
    notebook.leave_out_unseen_cells()
    notebook.run_all()
    assert notebook.errors() == []
    expect(notebook.page.locator(".remat-widget")).to_have_count(many)
    channels, traces = _counted(notebook, 2)
    assert (channels, traces) == (2 * many, many)
    notebook.run_all()  # every cell's widget is replaced by its next
    expect(notebook.page.locator(".remat-widget")).to_have_count(many)
    assert _counted(notebook, 2) == (2 * many, many)
    last = Widget(notebook, many + 1)
    last.shows("dots_saveable")
    last.policy.select_option("nothing_saveable")
    last.shows("nothing_saveable")
    assert notebook.errors() == []


@pytest.fixture
def opened(loaded: NotebookPage) -> NotebookPage:
    """A notebook whose widget has shown two policies; its last cell tells the kernel's process."""
    notebook = loaded
    notebook.run_all()
    assert notebook.errors() == []
    widget = Widget(notebook, 1)
    for policy in ("dots_saveable", "as_written"):
        widget.policy.select_option(policy)
        widget.shows(policy)
    return notebook


AGAIN = re.compile("run this cell again")
SOON = 40_000  # ms: the widget waits for an answer first, since no widget is told
# Ten seconds, which are one here.
IMPATIENT = """() => {
    const wait = window.setTimeout;
    window.setTimeout = (act, ms, ...more) => wait(act, ms === 10_000 ? 1_000 : ms, ...more);
    window.rematPatient = () => { window.setTimeout = wait };
}"""


def _says_that_it_is_cut_off(notebook: NotebookPage) -> None:
    """The widget says so when it is asked for more than it has shown, which it shows still."""
    widget = Widget(notebook, 1)
    for policy in ("dots_saveable", "as_written"):
        widget.policy.select_option(policy)
        widget.shows(policy)  # from what the page holds itself
    notebook.page.evaluate(IMPATIENT)
    widget.tab("Choices").click()  # for which it has to ask
    expect(widget.status).to_contain_text(AGAIN, timeout=SOON)
    notebook.page.evaluate("() => window.rematPatient()")
    widget.policy.select_option("dots_saveable")
    widget.shows("dots_saveable")


def _comes_back(notebook: NotebookPage) -> None:
    """The cell run again has a widget that answers."""
    widget = Widget(notebook, 1)
    notebook.run(0)
    notebook.run(1)
    assert notebook.errors() == []
    expect(notebook.page.locator(".remat-widget")).to_have_count(1)
    widget.policy.select_option("nothing_saveable")
    widget.shows("nothing_saveable")
    widget.tab("Choices").click()
    expect(widget.part("tried").locator("tbody tr")).not_to_have_count(0)
    expect(widget.status).not_to_contain_text(AGAIN)


def test_the_kernel_is_restarted_under_a_widget(opened: NotebookPage) -> None:
    opened.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    opened.wait_idle()
    _says_that_it_is_cut_off(opened)
    _comes_back(opened)
