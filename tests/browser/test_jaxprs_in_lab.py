"""The two panes of jaxprs follow the line of the source that is chosen."""

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.inspected import LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server

# What one line makes is far below all that a pane shows at first, and in the middle of both programs.
CELL = """\
%%remat --policy nothing_saveable
import jax, jax.numpy as jnp

def loss(W, x):
    for _ in range(80):
        x = jnp.sin(x @ W)
    x = jnp.cos(x)
    for _ in range(80):
        x = jnp.tanh(x @ W)
    return jnp.sum(x)

loss(jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((2, 4), "float32"))
"""
SINES, COSINE, TANHS = 6, 7, 9

IN_SIGHT = """\
pane => {
  const box = pane.getBoundingClientRect();
  return [...pane.querySelectorAll(".remat-picked em")].filter(word => {
    const { top, bottom } = word.getBoundingClientRect();
    return box.top <= top && bottom <= box.bottom;
  }).map(word => word.textContent);
}"""


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "jaxprs.ipynb", LOAD, CELL)
    page_of_module.open("jaxprs.ipynb")
    page_of_module.run(0)
    return page_of_module


@pytest.fixture
def widget(opened: NotebookPage) -> Widget:
    """A widget that nobody has touched, with its jaxprs open."""
    opened.page.mouse.move(0, 0)
    opened.run(1)
    widget = Widget(opened, 1)
    widget.tab("Jaxprs").click()
    for pane in panes(widget):
        expect(pane).to_contain_text("  in ")  # the end of a program, which is filled bit by bit
    return widget


def panes(widget: Widget) -> list[Locator]:
    expect(widget.part("jaxprs").locator("pre")).to_have_count(2)
    return widget.part("jaxprs").locator("pre").all()


def pick(widget: Widget, line: int) -> None:
    """Choose a line of the source where it stands."""
    widget.part("listing").get_by_role("button", name=f"line {line}", exact=True).click()


def places(widget: Widget) -> list[float]:
    """How far the panes are scrolled, when they have come to rest."""
    before = None
    while before != (now := [pane.evaluate("pane => pane.scrollTop") for pane in panes(widget)]):
        before = now
        widget.notebook.page.wait_for_timeout(200)
    return now


def test_a_chosen_line_is_brought_into_sight_in_both_programs(widget: Widget) -> None:
    left, right = panes(widget)
    left.hover()  # the pane that leads
    widget.tab("Source").click()
    pick(widget, COSINE)
    widget.tab("Jaxprs").click()
    first = places(widget)
    assert left.evaluate(IN_SIGHT) == ["cos"]
    assert right.evaluate(IN_SIGHT) == ["cos", "sin"]
    # They show the same operation at one height: scrolled together, neither jumps.
    left.hover()
    widget.notebook.page.mouse.wheel(0, 3)
    assert places(widget) == pytest.approx([place + 3 for place in first], abs=1.5)
    # Once: where the reader goes from there stays, also when another policy is looked at.
    left.evaluate("pane => pane.scrollTo(0, 0)")
    away = places(widget)
    widget.tab("Residuals").click()
    widget.tab("Jaxprs").click()
    assert places(widget) == away


def test_a_line_that_is_chosen_beside_them_moves_the_panes_alone(widget: Widget) -> None:
    page = widget.notebook.page
    page.set_viewport_size({"width": 1800, "height": 1000})
    try:
        widget.root.get_by_label("Source beside").check()
        left, right = panes(widget)
        for line, ahead in ((TANHS, "tanh"), (SINES, "sin")):
            pick(widget, line)
            places(widget)
            assert ahead in left.evaluate(IN_SIGHT)
            assert ahead in right.evaluate(IN_SIGHT)
        top = widget.root.evaluate("root => root.getBoundingClientRect().top")
        pick(widget, SINES)  # taken back
        there = places(widget)
        pick(widget, SINES)  # in sight already
        assert places(widget) == there
        assert widget.root.evaluate("root => root.getBoundingClientRect().top") == top
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})
