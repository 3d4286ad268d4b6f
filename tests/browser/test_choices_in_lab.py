"""All that was tried for a device, in JupyterLab: sorted by what fits where the line is, chosen, and planned for."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from remat_magic.records.fit import ordered
from tests.browser.inspected import Widget, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

# Large enough for the choices to differ.
CELL = """\
%%remat --device "8 MB" -o w
import jax, jax.numpy as jnp

def layer(W, x):
    return jnp.sin(jnp.sin(x @ W) * 2)

def loss(params, x):
    for W in params:
        x = layer(W, x)
    return jnp.sum(x)

S = jax.ShapeDtypeStruct
loss([S((64, 64), "float32")] * 6, S((4096, 64), "float32"))
"""
SMALL = CELL.replace(' --device "8 MB"', "").replace("4096", "256")
CELLS = (CELL, SMALL)


@pytest.fixture
def widget(loaded: NotebookPage) -> Widget:
    """The widget with its Choices open, once all are tried."""
    widget = inspection(loaded)
    widget.tab("Choices").click()
    expect(rows(widget).first).to_be_visible()
    expect(widget.part("tried")).not_to_contain_text(re.compile("Still looking|Asking the compiler"), timeout=120_000)
    return widget


def rows(widget: Widget) -> Locator:
    return widget.part("tried").locator("tr[data-choice]:visible")


def fitting(widget: Widget) -> list[str]:
    """What is said of each row that can be seen."""
    return [text for text in widget.part("tried").locator("td.remat-fits:visible").all_inner_texts() if text]


def test_what_fits_comes_first_and_the_line_sorts_them_anew(widget: Widget) -> None:
    order = ["fits", "may fit", "too big"]
    ranks = [order.index(word) for word in fitting(widget)]
    assert ranks[:-1] == sorted(ranks[:-1])  # but for the shown one, which is beaten
    before = ranks.count(0)
    slider = widget.part("tried").locator(".remat-slide")
    line = widget.part("tried").locator(".remat-budget")
    expect(line).to_have_text("8.00 MB")
    slider.fill(slider.get_attribute("max") or "")
    expect(line).not_to_have_text("8.00 MB")
    assert "too big" not in fitting(widget)  # by the estimate itself: of some the range goes beyond the line
    assert fitting(widget).count("fits") != before
    # One number for each row, and for its point.
    numbers = [text for text in widget.part("tried").locator("td.remat-order:visible").all_inner_texts() if text]
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    dots = [text for text in widget.part("tried").locator(".remat-dot").all_inner_texts() if text]
    assert sorted(dots, key=int) == numbers


def numbered(widget: Widget) -> list[tuple[str | None, str | None]]:
    front = [row for row in rows(widget).all() if row.locator(".remat-order").inner_text()]
    return [(row.get_attribute("data-row"), row.get_attribute("data-at")) for row in front]


def test_what_is_numbered_is_the_front_of_trace_fit(widget: Widget) -> None:
    """Also for the memory where the line is moved to, before a plan is made for it."""
    code, _, call = CELL.partition("\n")[2].rstrip().rpartition("\nloss(")
    names: dict[str, Any] = {}
    exec(f"import remat_magic as rm\n{code}\ntrace = rm.trace(loss, {call}", names)
    fit = names["trace"].fit("8 MB")
    assert numbered(widget) == [(choice.key, choice.at) for choice in fit.choices]
    slider, plane = (widget.part("tried").locator(name) for name in (".remat-slide", ".remat-plane"))
    least, most = (float(plane.get_attribute(f"data-{end}") or "") for end in ("least", "most"))
    for value in range(100, 1000, 100):
        slider.evaluate(
            "(it, value) => { it.value = value; it.dispatchEvent(new Event('input', {bubbles: true})); }", value
        )
        there = int(least + value / 1000 * (most - least))
        front = [it for it in ordered(it.within(there) for it in fit.tried) if not it.beaten_by and not it.unusable]
        assert numbered(widget) == [(choice.key, choice.at) for choice in front], there


def test_letting_the_line_go_adds_one_plan(widget: Widget) -> None:
    count = widget.part("tried").locator("tr[data-choice]").count()
    slider = widget.part("tried").locator(".remat-slide")
    slider.fill("700")
    expect(widget.status).to_have_text(re.compile("^A plan for .*: "), timeout=120_000)
    expect(widget.part("tried").locator("tr[data-choice]")).to_have_count(count + 1)
    expect(widget.policy).to_have_value("as_written")  # which nobody has left


def test_a_row_and_a_point_are_shown_with_the_edit_below(widget: Widget) -> None:
    row = widget.part("tried").locator('tr[data-row="nothing_saveable"][data-at="layer"]')
    if not row.is_visible():
        widget.part("tried").get_by_role("button", name=re.compile("that another beats")).click()
    row.get_by_role("button").click()
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(widget.at).to_have_value("layer")
    expect(row).to_have_attribute("aria-current", "true")
    below = row.locator("xpath=following-sibling::tr[1]")
    expect(below.locator(".remat-diff")).to_contain_text("+@jax.checkpoint", timeout=120_000)
    widget.part("tried").locator('.remat-dot[data-policy="as_written"]').click()
    expect(widget.policy).to_have_value("as_written")
    expect(below.locator(".remat-diff")).to_have_count(0)


def test_where_nothing_is_to_fit_all_policies_are_rows(loaded: NotebookPage) -> None:
    widget = inspection(loaded, 2)
    widget.root.get_by_label("Device", exact=True).select_option("")
    widget.tab("Choices").click()
    table = widget.part("tried").locator("table.remat-tried")
    expect(table).to_contain_text("nothing_saveable")
    expect(table).to_contain_text("dots_saveable")
    expect(widget.part("tried").locator(".remat-slide")).to_have_count(0)
    expect(table.locator(".remat-fits")).to_have_count(0)
