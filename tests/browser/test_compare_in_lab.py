"""All policies side by side in JupyterLab: chosen in the picture and the table, sorted, measured, cancelled."""

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.inspected import LOAD, Widget, focus, write_notebook
from tests.browser.lab import NotebookPage, Server

# Real arrays, so that it can be run; large enough for the policies to differ.
CELL = """\
%%remat -o w
import jax, jax.numpy as jnp

def loss(params, x):
    for W in params:
        x = jnp.sin(x @ W)
    return jnp.sum(x)

loss([jnp.ones((64, 64))] * 3, jnp.ones((256, 64)))
"""


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "compare.ipynb", LOAD, CELL)
    page_of_module.open("compare.ipynb")
    return page_of_module


@pytest.fixture
def widget(opened: NotebookPage) -> Widget:
    """The widget with its Compare panel open."""
    opened.page.mouse.move(0, 0)
    opened.run_all()
    assert opened.errors() == []
    widget = Widget(opened, 1)
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
    expect(widget.totals).to_contain_text("saved 0 B")
    row = widget.part("comparison").locator('tr[aria-current="true"]')
    expect(row).to_contain_text("nothing_saveable")


def test_the_slider_puts_plans_into_the_picture(widget: Widget) -> None:
    page = widget.notebook.page
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_visible()
    expect(slider).to_be_enabled(timeout=60_000)
    picture = widget.part("comparison").locator("svg")
    plans = picture.locator('[data-same*="plan("]')
    chosen = picture.locator('[aria-pressed="true"]')
    expect(plans).to_have_count(0)
    focus(slider)
    page.keyboard.press("ArrowLeft")
    expect(widget.policy).to_have_value(re.compile("^plan"))
    first = widget.policy.input_value()
    expect(plans).to_have_count(1)
    expect(chosen).to_have_attribute("data-same", first)
    page.keyboard.press("End")  # the focus has stayed on the slider
    expect(widget.policy).not_to_have_value(first)
    expect(chosen).not_to_have_attribute("data-same", first)
    expect(widget.part("comparison").locator('tr[aria-current="true"]')).to_have_count(1)
    plans.and_(page.locator(f'[data-same="{first}"]')).click()  # the one before has stayed to compare with
    expect(widget.policy).to_have_value(first)
    expect(chosen).to_have_attribute("data-same", first)
    widget.tab("Plan").click()
    expect(slider).to_be_visible()
    expect(slider).to_be_enabled()
    expect(widget.part("frontier").locator("[data-stop]")).not_to_have_count(0)


def test_the_keyboard_sets_it_too(widget: Widget) -> None:
    page = widget.notebook.page
    cells = widget.notebook.cell_count()
    focus(point(widget, "dots_saveable"))
    page.keyboard.press("Enter")
    expect(widget.policy).to_have_value("dots_saveable")
    expect(point(widget, "dots_saveable")).to_be_focused()
    button = widget.part("comparison").locator('button[data-policy="nothing_saveable"]')
    focus(button)
    page.keyboard.press("Space")
    expect(widget.policy).to_have_value("nothing_saveable")
    page.keyboard.type("dd")
    assert widget.notebook.cell_count() == cells


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
    expect(widget.status).to_have_text(re.compile(r"^(\d+) of \1 measured\.$"), timeout=120_000)
    table = widget.part("comparison").locator("table")
    expect(table).to_contain_text("measured, on cpu")
    for column in ("temporaries", "run", "compile"):
        expect(table.get_by_role("button", name=column, exact=True)).to_be_visible()
    expect(widget.root.get_by_role("button", name="Cancel")).to_be_hidden()


def test_estimates_follow_the_device(widget: Widget) -> None:
    widget.root.get_by_label("Estimate for", exact=True).select_option("TPU v5e")
    expect(widget.part("comparison")).to_contain_text("estimated, for TPU v5e")


def test_memory_over_time_follows_the_policy(widget: Widget) -> None:
    widget.tab("Memory").click()
    expect(widget.part("memory")).to_contain_text("Held at the peak")
    before = widget.part("memory").locator("caption").text_content()
    widget.policy.select_option("nothing_saveable")
    expect(widget.part("memory").locator("caption")).not_to_have_text(before or "")


def test_advice_follows_the_policy(widget: Widget) -> None:
    widget.tab("Advice").click()
    expect(widget.part("advice")).not_to_be_empty()
    widget.policy.select_option("nothing_saveable")
    expect(widget.part("advice")).to_contain_text("recomputes everything")
    widget.tab("Memory").click()
    expect(widget.part("memory")).to_contain_text("Held at the peak")


def test_the_page_logs_no_error(widget: Widget) -> None:
    widget.root.get_by_role("button", name="Check gradients").click()
    expect(widget.part("gradients")).to_contain_text("Largest difference", timeout=120_000)
    ours = [entry for entry in widget.notebook.console if re.search(r"remat|anywidget", entry, re.IGNORECASE)]
    assert ours == []
