"""The widget in Notebook 7, whose page, keys and saving are its own."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.contrast import unreadable
from tests.browser.inspected import LAYERS, LOAD, Widget, focus, write_notebook
from tests.browser.lab import NotebookPage, Server
from tests.browser.test_kept_output import POLICY_CHANGE, expect_dropdown, expect_report


@pytest.fixture(scope="module")
def opened(notebook7: Server, browser: Browser) -> Iterator[NotebookPage]:
    write_notebook(notebook7.folder / "layers.ipynb", LOAD, LAYERS, POLICY_CHANGE)
    with browser.new_context(viewport={"width": 1300, "height": 1000}) as context:
        notebook = NotebookPage(notebook7, context.new_page())
        notebook.open("layers.ipynb")
        yield notebook


@pytest.fixture
def seven(opened: NotebookPage) -> NotebookPage:
    """A notebook that was run."""
    opened.run_all()
    assert opened.errors() == []
    return opened


def test_by_mouse_and_from_python(seven: NotebookPage) -> None:
    widget = Widget(seven, 1)
    widget.shows("dots_saveable")
    widget.policy.select_option("nothing_saveable")
    widget.shows("nothing_saveable")
    for tab in widget.root.get_by_role("tab").all():
        tab.click()
        expect(tab).to_have_attribute("aria-selected", "true")
    widget.tab("Source").click()
    widget.part("listing").locator("[data-pick]").first.click()
    expect(widget.root.locator('[data-action="unpick"]')).to_be_visible()
    assert seven.errors() == []


def test_by_keyboard(seven: NotebookPage) -> None:
    widget, page = Widget(seven, 1), seven.page
    widget.shows("dots_saveable")
    cells = seven.cell_count()
    focus(widget.policy)
    page.keyboard.type("dd")  # which deletes the cell where the notebook hears it
    page.keyboard.press("Home")
    widget.shows("as_written")
    focus(widget.tab("Residuals"))
    page.keyboard.press("ArrowRight")
    expect(widget.tab("Recomputed")).to_be_focused()
    page.keyboard.press("b")
    page.keyboard.press("x")
    page.wait_for_timeout(300)
    assert seven.cell_count() == cells


def test_in_the_dark(seven: NotebookPage) -> None:
    seven.set_theme("JupyterLab Dark")
    widget = Widget(seven, 1)
    for name in ("Residuals", "Source", "Jaxprs"):
        widget.tab(name).click()
        assert unreadable(widget.root) == []


def test_kept_when_its_kernel_has_ended(seven: NotebookPage, notebook7: Server) -> None:
    Widget(seven, 1).keeps("dots_saveable")
    seven.save()
    notebook7.shut_down_kernels()
    again = NotebookPage(notebook7, seven.page.context.new_page())
    again.open("layers.ipynb")
    expect_report(again.page)
    expect_dropdown(again.page)
