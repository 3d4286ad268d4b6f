"""axe-core's rules for people who cannot see well, or use no mouse, on everything that the widget shows."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.accessible import unreadable, violations
from tests.browser.inspected import BLOCKS, TABS, Widget, ask_for, focus, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

CELLS = (BLOCKS,)

# What can be scrolled sideways, but for programs, whose lines are as JAX prints them.
SIDEWAYS = """root => [root, ...root.querySelectorAll("*")].filter(e => !e.closest("pre")
  && e.clientWidth && e.scrollWidth - e.clientWidth > 1 && /auto|scroll|visible/.test(getComputedStyle(e).overflowX)
  && !["inline", "contents"].includes(getComputedStyle(e).display) && !e.closest("svg"))
  .map(e => `${e.tagName} ${e.className} ${e.scrollWidth - e.clientWidth}`)"""
# What can be scrolled up and down in what can be.
NESTED = """root => { const scrolls = e => e.scrollHeight - e.clientHeight > 1
  && /auto|scroll/.test(getComputedStyle(e).overflowY);
  return [...root.querySelectorAll("*")].filter(e => scrolls(e) && scrolls(e.parentElement.closest(".remat-panel") ?? e
  .closest("body"))).map(e => `${e.tagName} ${e.className}`) }"""
# The words of a picture that are not all in it.
CUT_OFF = """root => [...root.querySelectorAll(".remat-open svg text")].filter(text => {
  const [box, whole] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
  return box.width && (box.left < whole.left - 1 || box.right > whole.right + 1) }).map(text => text.textContent)"""


def untouched(loaded: NotebookPage) -> Widget:
    """A widget that nobody has touched, on a first visit."""
    widget = inspection(loaded, forget=True)
    expect(widget.part("residuals")).to_be_visible()  # the widget shows itself when it has heard of its kernel
    return widget


@pytest.mark.parametrize("theme", ["Light", "Dark", "Light High Contrast", "Dark High Contrast"])
def test_every_panel(loaded: NotebookPage, theme: str) -> None:
    def faults() -> list[str]:
        return [*violations(loaded.page, ".remat-widget"), *unreadable(widget.root)]

    loaded.set_theme(f"JupyterLab {theme}")
    widget = untouched(loaded)
    expect(widget.part("recomputed")).not_to_be_empty()
    assert faults() == []  # a first visit
    row = widget.part("residuals").locator("tr[aria-selected]").first
    row.click()
    expect(row).to_have_attribute("aria-selected", "true")
    assert faults() == []
    row.click()
    widget.unfold()
    for name in TABS:
        widget.tab(name).click()
        part, figures = TABS[name]
        expect(widget.part(part).locator(figures).first).to_be_visible(timeout=60_000)
        assert faults() == [], name


@pytest.mark.parametrize("theme", ["Light", "Dark", "Light High Contrast", "Dark High Contrast"])
def test_the_answer_of_what_does_not_fit(loaded: NotebookPage, theme: str) -> None:
    """With an edit and each of the lists open, also as in a window of half the size."""

    def faults() -> list[str]:
        nested = [*widget.root.evaluate(SIDEWAYS), *widget.root.evaluate(NESTED)]
        return [*violations(page, ".remat-widget"), *unreadable(widget.root), *nested]

    loaded.set_theme(f"JupyterLab {theme}")
    widget, page = untouched(loaded), loaded.page
    ask_for(widget, "2.5 kB")
    first = widget.part("changes").locator("tr").first
    expect(widget.part("changes")).not_to_contain_text(re.compile("Still looking|Asking the compiler"))
    first.get_by_role("button", name="Diff").click()
    expect(widget.part("diff").locator(":is(ins, del)").first).to_be_visible()
    try:
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        for width in (1400, 640):
            page.set_viewport_size({"width": width, "height": 1000})
            assert faults() == [], width
        for control in (widget.policy, widget.at):
            focus(control)
            control.press("Space")
            expect(widget.root.locator(".remat-list input")).to_be_focused()
            expect(widget.root.locator(".remat-entry-waiting", has_text="worked out")).to_have_count(0)
            assert violations(page, ".remat-widget") == []
            page.keyboard.press("Escape")
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})
        page.evaluate("() => window.jupyterapp.shell.expandLeft()")


def test_every_panel_at_twice_the_size(loaded: NotebookPage) -> None:
    """As in a window of 1280 pixels at 200%: nothing is cut off, scrolls sideways or scrolls in what scrolls."""
    widget, page = untouched(loaded), loaded.page
    page.set_viewport_size({"width": 640, "height": 900})
    try:
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        widget.unfold()
        for name in TABS:
            widget.tab(name).click()
            part, figures = TABS[name]
            expect(widget.part(part).locator(figures).first).to_be_visible(timeout=60_000)
            page.wait_for_timeout(500)  # until it is drawn for this width
            expect(widget.root.locator(".remat-open")).not_to_contain_text("Working it out")
            assert widget.root.evaluate(SIDEWAYS) == [], name
            assert widget.root.evaluate(NESTED) == [], name
            assert widget.root.evaluate(CUT_OFF) == [], name
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})
        page.evaluate("() => window.jupyterapp.shell.expandLeft()")
