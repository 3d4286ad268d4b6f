"""axe-core's rules for people who cannot see well, or use no mouse, on everything that the widget shows."""

from importlib.resources import files

import pytest
from playwright.sync_api import Page, expect

from tests.browser.contrast import unreadable
from tests.browser.inspected import FORGET, LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server
from tests.volume import usually

AXE = files("axe_playwright_python") / "axe.min.js"

# Names, a site and long jaxprs: all the controls there are.
CELL = """\
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
TABS = ("Residuals", "Recomputed", "Source", "Jaxprs", "Memory", "Advice", "Compare", "Plan")

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


def violations(page: Page, selector: str) -> list[str]:
    """What axe-core finds wrong within an element, a line each.

    Contrast is not left to it: it gives up on what another element may overlap, and says so where nobody looks.

    Raises:
        AssertionError: it checked hardly anything.
    """
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    options = {"rules": {"color-contrast": {"enabled": False}}}
    found = page.evaluate("([selector, options]) => axe.run(selector, options)", [selector, options])
    assert len(found["passes"]) > 15
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found["violations"] for node in rule["nodes"]]


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "accessible.ipynb", LOAD, CELL)
    page_of_module.open("accessible.ipynb")
    page_of_module.run(0)
    return page_of_module


def untouched(opened: NotebookPage) -> Widget:
    """A widget that nobody has touched, on a first visit."""
    opened.page.mouse.move(0, 0)
    opened.page.evaluate(FORGET)
    opened.run(1)
    assert opened.errors() == []
    widget = Widget(opened, 1)
    expect(widget.part("residuals")).to_be_visible()  # the widget shows itself when it has heard of its kernel
    return widget


# Of axe-core's rules without contrast only one looks at colours, those of links; test_demo.py looks at the dark theme.
@pytest.mark.parametrize("theme", usually(["Light", "Dark", "Light High Contrast", "Dark High Contrast"], "Light"))
def test_every_panel(opened: NotebookPage, theme: str) -> None:
    def faults() -> list[str]:
        return [*violations(opened.page, ".remat-widget"), *unreadable(widget.root)]

    opened.set_theme(f"JupyterLab {theme}")
    widget = untouched(opened)
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
        drawn = {"Memory": "memory", "Compare": "comparison", "Plan": "frontier"}
        if name in drawn:
            part = widget.part(drawn[name])
            expect(part.locator("svg")).to_be_visible(timeout=60_000)
        assert faults() == [], name


def test_every_panel_at_twice_the_size(opened: NotebookPage) -> None:
    """As in a window of 1280 pixels at 200%: nothing is cut off, scrolls sideways or scrolls in what scrolls."""
    widget, page = untouched(opened), opened.page
    page.set_viewport_size({"width": 640, "height": 900})
    try:
        page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        widget.unfold()
        for name in TABS:
            widget.tab(name).click()
            drawn = {"Memory": "memory", "Compare": "comparison", "Plan": "frontier"}
            if name in drawn:
                expect(widget.part(drawn[name]).locator("svg")).to_be_visible(timeout=60_000)
                page.wait_for_timeout(500)  # until it is drawn for this width
            expect(widget.root.locator(".remat-open")).not_to_contain_text("Working it out")
            assert widget.root.evaluate(SIDEWAYS) == [], name
            assert widget.root.evaluate(NESTED) == [], name
            assert widget.root.evaluate(CUT_OFF) == [], name
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})
        page.evaluate("() => window.jupyterapp.shell.expandLeft()")
