"""The list that a policy is chosen from by what it does, in JupyterLab."""

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.accessible import unreadable, violations
from tests.browser.inspected import LAYERS, Widget, focus, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

CELLS = (LAYERS,)


@pytest.fixture
def widget(loaded: NotebookPage) -> Widget:
    """A widget that nobody has touched."""
    widget = inspection(loaded)
    widget.shows("as_written")
    return widget


def opened_by_keyboard(widget: Widget) -> Locator:
    focus(widget.policy)
    widget.policy.press("Space")
    field = widget.root.get_by_role("combobox", name="Search policies")
    expect(field).to_be_focused()
    return field


def entries(widget: Widget) -> Locator:
    return widget.root.get_by_role("option").and_(widget.root.locator("li"))


def active(widget: Widget) -> Locator:
    """The entry that a screen reader is told of."""
    field = widget.root.get_by_role("combobox", name="Search policies")
    return widget.root.locator(f"[id='{field.get_attribute('aria-activedescendant')}']")


def test_the_keyboard_alone_chooses(widget: Widget) -> None:
    page, cells = widget.notebook.page, widget.notebook.cell_count()
    opened_by_keyboard(widget)
    expect(widget.root.locator(".remat-entry-waiting")).to_have_count(0)
    expect(active(widget)).to_contain_text("as written")
    expect(active(widget)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(active(widget)).to_contain_text("nothing_saveable")
    page.keyboard.press("End")
    expect(active(widget)).to_have_text(entries(widget).last.text_content() or "")
    page.keyboard.press("ArrowDown")
    expect(active(widget)).to_have_text(entries(widget).last.text_content() or "")
    page.keyboard.press("Home")
    expect(active(widget)).to_contain_text("as written")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    widget.shows("nothing_saveable")
    expect(widget.policy).to_be_focused()
    expect(entries(widget)).to_have_count(0)
    opened_by_keyboard(widget)
    page.keyboard.type("dd")  # which deletes the cell where the notebook hears it
    expect(widget.root.get_by_role("status").get_by_text("No policy has “dd”.")).to_be_visible()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(widget.policy).to_be_focused()
    expect(entries(widget)).to_have_count(0)
    widget.shows("nothing_saveable")
    opened_by_keyboard(widget)
    page.keyboard.press("Tab")
    expect(entries(widget)).to_have_count(0)
    expect(widget.policy).not_to_be_focused()
    assert widget.notebook.cell_count() == cells


@pytest.mark.parametrize(
    ("theme", "width"),
    [("Light", 1400), ("Dark", 720), ("Dark High Contrast", 500)],
)
def test_it_can_be_read(widget: Widget, theme: str, width: int) -> None:
    page = widget.notebook.page
    widget.notebook.set_theme(f"JupyterLab {theme}")
    page.set_viewport_size({"width": width, "height": 1000})
    try:
        opened_by_keyboard(widget)
        expect(widget.root.locator(".remat-entry-waiting")).to_have_count(0)
        assert violations(page, ".remat-widget") == []
        assert unreadable(widget.root) == []
        box = widget.root.locator(".remat-list").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        scrolled = "e => [e.scrollWidth - e.clientWidth, e.clientHeight]"
        sideways, height = widget.root.locator(".remat-list ul").evaluate(scrolled)
        assert sideways <= 1
        assert height > 100
    finally:
        page.keyboard.press("Escape")
        page.set_viewport_size({"width": 1400, "height": 1000})
        widget.notebook.set_theme("JupyterLab Light")
