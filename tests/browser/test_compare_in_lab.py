"""All policies side by side in JupyterLab: chosen in the picture and the table, sorted, measured, cancelled."""

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.inspected import Widget, focus, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

# Real arrays, so that it can be run; large enough for the policies to differ.
CELL = """\
%%remat -o w
import jax, jax.numpy as jnp

def layer(W, x):
    return jnp.sin(x @ W)

def loss(params, x):
    for W in params:
        x = layer(W, x)
    return jnp.sum(x)

loss([jnp.ones((64, 64))] * 3, jnp.ones((256, 64)))
"""
CELLS = (CELL,)


@pytest.fixture
def widget(loaded: NotebookPage) -> Widget:
    """The widget with its Compare panel open."""
    widget = inspection(loaded)
    widget.tab("Compare").click()
    expect(point(widget, "nothing_saveable")).to_be_visible()
    return widget


def point(widget: Widget, policy: str) -> Locator:
    return widget.part("comparison").locator(f'svg [data-policy="{policy}"]')


def policies(widget: Widget) -> list[str]:
    """The table's policies in the order shown."""
    return widget.part("comparison").locator("tbody tr [data-policy]").all_text_contents()


def test_a_click_on_a_point_sets_the_policy(widget: Widget) -> None:
    expect(widget.policy).to_have_value("as_written")
    point(widget, "nothing_saveable").click()
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(point(widget, "nothing_saveable")).to_have_attribute("aria-pressed", "true")
    expect(widget.totals).to_contain_text("saves 0 B")
    row = widget.part("comparison").locator('tr[aria-current="true"]')
    expect(row).to_contain_text("nothing_saveable")


def test_the_slider_makes_a_plan_where_it_is_let_go(widget: Widget) -> None:
    slider = widget.root.locator('[data-control="budget"]')
    slider.fill("90")
    expect(widget.root.locator('[data-part="stop"]')).to_have_text("90%")
    expect(widget.policy).to_have_value("nothing_saveable")  # which is the plan of so little a function
    widget.tab("Plan").click()
    expect(slider).to_be_visible()  # one slider for both
    expect(widget.part("planned")).to_contain_text("recomputes")


def test_the_table_sorts(widget: Widget) -> None:
    saved = widget.part("comparison").get_by_role("button", name="saved", exact=True)
    saved.click()
    ascending = policies(widget)
    # Of these three the one that recomputes all keeps least, and without a checkpoint most is kept.
    assert ascending[0] == "nothing_saveable"
    assert ascending.index("dots_saveable") < ascending.index("as_written")
    saved.click()
    descending = policies(widget)
    assert descending.index("as_written") < descending.index("dots_saveable") < descending.index("nothing_saveable")
    expect(saved.locator("xpath=..")).to_have_attribute("aria-sort", "descending")


def test_measuring_fills_the_table_while_the_kernel_works(widget: Widget) -> None:
    widget.root.get_by_label("Measure", exact=True).select_option("given")
    widget.root.get_by_role("button", name="Measure", exact=True).click()
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 measured\.$"), timeout=300_000)
    table = widget.part("comparison").locator("table")
    expect(table).to_contain_text("measured, on cpu")
    for column in ("temporaries", "run", "compile"):
        expect(table.get_by_role("button", name=column, exact=True)).to_be_visible()
    expect(widget.root.get_by_role("button", name="Cancel")).to_be_hidden()


def test_places_are_tried_and_chosen(widget: Widget) -> None:
    """By the keyboard in the table, and by a click in the picture."""
    page = widget.notebook.page
    widget.root.get_by_role("button", name="Try all places").click()
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 tried\.$"), timeout=300_000)
    places = widget.part("places")
    row = places.locator('tbody button[data-policy="nothing_saveable"][data-at="layer"]')
    focus(row)
    page.keyboard.press("Enter")
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(widget.at).to_have_value("layer")
    expect(row).to_be_focused()
    expect(places.locator('tr[aria-current="true"]')).to_contain_text("nothing_saveable at layer")
    places.locator('svg [data-policy="none"][data-at="function"] path').click()  # a label may stand far off
    expect(widget.policy).to_have_value("none")
    expect(widget.at).to_have_value("function")
    expect(places.locator('[aria-pressed="true"]')).to_have_attribute("data-at", "function")


def test_estimates_follow_the_device(widget: Widget) -> None:
    widget.root.get_by_label("Device", exact=True).select_option("TPU v5e")
    expect(widget.part("comparison")).to_contain_text("estimated, for TPU v5e")
