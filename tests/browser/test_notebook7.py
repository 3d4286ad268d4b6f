"""The widget in Notebook 7, whose page, keys and saving are its own."""

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.inspected import LAYERS, LOAD, Widget, expect_report, focus, write_notebook
from tests.browser.lab import NotebookPage, Server

pytestmark = pytest.mark.slow


def test_by_mouse_by_keyboard_from_python_and_when_its_kernel_has_ended(notebook7: Server, browser: Browser) -> None:
    write_notebook(notebook7.folder / "layers.ipynb", LOAD, LAYERS, "w.policy = 'dots_saveable'")
    with browser.new_context(viewport={"width": 1300, "height": 1000}) as context:
        notebook = NotebookPage(notebook7, context.new_page())
        notebook.open("layers.ipynb")
        notebook.run_all()
        assert notebook.errors() == []
        widget, page = Widget(notebook, 1), notebook.page
        widget.shows("dots_saveable")
        widget.policy.select_option("nothing_saveable")
        widget.shows("nothing_saveable")
        for tab in widget.root.get_by_role("tab").all():
            tab.click()
            expect(tab).to_have_attribute("aria-selected", "true")
        cells = notebook.cell_count()
        focus(widget.policy)
        page.keyboard.type("dd")  # which deletes the cell where the notebook hears it
        page.keyboard.press("Home")
        widget.shows("as_written")
        widget.tab("Values").click()
        page.keyboard.press("ArrowRight")
        expect(widget.tab("Source")).to_be_focused()
        page.keyboard.press("b")
        page.keyboard.press("x")
        page.wait_for_timeout(300)
        assert notebook.cell_count() == cells
        notebook.run(2)
        widget.keeps("dots_saveable")
        notebook.save()
        notebook7.shut_down_kernels()
        again = NotebookPage(notebook7, context.new_page())
        again.open("layers.ipynb")
        expect_report(again.page)
