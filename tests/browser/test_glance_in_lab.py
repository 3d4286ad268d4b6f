"""What is seen first in JupyterLab: the biggest values, the bar of the peak, and the few controls of a first visit."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import FloatRect, Locator, expect

from remat_magic import units
from tests.browser.inspected import Widget, ask_for, focus, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

# Eight layers of eight sizes and a scan: more values than are seen at first, and arguments.
CELL = """\
%%remat -o w
import jax, jax.numpy as jnp

def loss(params, x):
    for W in params:
        x = jnp.sin(x @ W)
    return jnp.sum(x ** 2)

sizes = range(64, 64 + 9)
params = [jax.ShapeDtypeStruct((rows, rows + 1), "float32") for rows in sizes[:-1]]
loss(params, jax.ShapeDtypeStruct((128, 64), "float32"))
"""

TELL = """\
import json
report = w.report
rows = [dict(nbytes=row.nbytes, kind=row.kind) for row in report.residuals]
on_tpu, on_gpu = (w._live.trace.report(w.policy, w.at, device=device).peak_bytes for device in ("TPU v5e", "H100 SXM"))
print(json.dumps(dict(rows=rows, saved=report.saved_bytes, arguments=report.argument_bytes, peak=report.peak_bytes,
                      by_kind=report.peak_by_kind, tpu=on_tpu, gpu=on_gpu)))
"""
CELLS = (CELL, TELL)


def under(policy: str) -> str:
    """What the line of code has as soon as a policy is shown."""
    return f"policy=jax.checkpoint_policies.{policy})"


@pytest.fixture
def widget(loaded: NotebookPage) -> Widget:
    """A widget as one sees it who has unfolded nothing."""
    widget = inspection(loaded, forget=True)
    expect(widget.part("recomputed")).not_to_be_empty()
    return widget


@pytest.fixture
def report(widget: Widget) -> dict[str, Any]:
    """The report as Python has it."""
    widget.notebook.run(2)
    return json.loads(widget.notebook.outputs(2).inner_text())


def box(element: Locator) -> FloatRect:
    """Where an element that can be seen is on the page, in pixels."""
    found = element.bounding_box()
    assert found is not None
    return found


def bar_width(cell: Locator) -> float:
    """Of the bar in a cell of shares, in pixels."""
    return float(cell.evaluate("e => parseFloat(getComputedStyle(e, '::before').width)"))


def rows(widget: Widget) -> Locator:
    return widget.part("residuals").locator("tr.remat-row:visible")


def fold(widget: Widget, text: str) -> Locator:
    return widget.part("residuals").get_by_role("button", name=re.compile(text))


def test_the_biggest_values_come_first(widget: Widget, report: dict[str, Any]) -> None:
    """The rest, and the arguments, are a line each, which the keyboard unfolds; what is searched is shown whole."""
    page = widget.notebook.page
    kept = sorted((row["nbytes"] for row in report["rows"] if row["kind"] == "intermediate"), reverse=True)
    arguments = [row["nbytes"] for row in report["rows"] if row["kind"] == "argument"]
    assert len(kept) > 5
    assert len(arguments) > 1
    expect(rows(widget)).to_have_count(5)
    assert rows(widget).locator("td.remat-num").all_inner_texts() == [units.nbytes(size) for size in kept[:5]]
    shares = [units.percent(size, report["saved"]) for size in kept[:5]]
    assert [text.strip() for text in rows(widget).locator("td.remat-share").all_inner_texts()] == shares
    full, *others = [bar_width(cell) for cell in rows(widget).locator("td.remat-share").all()]
    assert others == pytest.approx([full * size / kept[0] for size in kept[1:5]], rel=0.02)
    everything = fold(widget, f"^{len(kept) - 5} more values, {units.nbytes(sum(kept[5:]))}$")
    focus(everything)
    page.keyboard.press("Enter")
    expect(everything).to_have_attribute("aria-expanded", "true")
    expect(everything).to_be_focused()
    expect(rows(widget)).to_have_count(len(kept))
    held = fold(widget, f"^{len(arguments)} arguments, {units.nbytes(report['arguments'])}$")
    expect(held).to_have_attribute("aria-expanded", "false")
    focus(held)
    page.keyboard.press("Space")
    expect(rows(widget)).to_have_count(len(report["rows"]))
    widget.policy.select_option("dots_saveable")  # what is unfolded stays so
    expect(widget.root).to_contain_text(under("dots_saveable"))
    expect(held).to_have_attribute("aria-expanded", "true")
    widget.policy.select_option("as_written")
    expect(widget.root).not_to_contain_text(under("dots_saveable"))
    held.click()
    everything.click()
    expect(rows(widget)).to_have_count(5)


def test_the_answer_is_of_the_device_that_is_chosen(widget: Widget, report: dict[str, Any]) -> None:
    """Headline, bar, line and the copy that is kept; where none is chosen nothing is said of fitting."""
    screen, device = widget.root.locator(".remat-fitting"), widget.root.get_by_label("Device", exact=True)
    expect(widget.part("verdict")).to_contain_text(f"Saves {units.nbytes(report['saved'])}")
    expect(screen).to_be_hidden()
    bar = widget.part("bar")
    kept = widget.notebook.outputs(widget.cell_index).locator(".remat-static").first
    for name, told, memory in (("H100 SXM", "gpu", "63.7 GB"), ("TPU v5e", "tpu", "16.9 GB")):
        device.select_option(name)
        there = units.nbytes(report[told])
        assert there != units.nbytes(report["peak"])
        expect(widget.part("verdict")).to_contain_text(f"Fits about {there} of {memory}")
        expect(bar.get_by_role("list")).to_have_attribute("aria-label", re.compile(f"estimated peak of about {there}"))
        expect(bar).to_contain_text(f"{name} {memory}")
        expect(kept).to_contain_text(f"with peaks as on {name}; run the cell")
        expect(kept).to_contain_text(f"about {there} of {memory}")
    whole = box(bar.locator(".remat-stack"))["width"]
    parts = [box(part)["width"] for part in bar.locator(".remat-stack > .remat-role:not(.remat-role-doubt)").all()]
    assert sum(parts) < whole / 100
    size = widget.root.get_by_label("Bytes to fit")
    device.select_option("?")
    size.fill("nonsense")
    size.press("Enter")
    expect(widget.status).to_contain_text("size='nonsense' is no number of bytes")
    expect(device).to_have_value("TPU v5e")
    size.fill("1 MB")
    size.press("Enter")
    expect(device).to_have_value("1 MB")
    expect(widget.part("verdict")).to_contain_text(re.compile("needed|of 1.00 MB"))
    expect(widget.part("verdict")).not_to_contain_text("16.9 GB")
    expect(size).to_be_hidden()
    device.select_option("")
    expect(screen).to_be_hidden()
    expect(widget.part("verdict")).to_contain_text(f"Saves {units.nbytes(report['saved'])}")


def test_two_clicks_lead_to_a_diff_that_fits(widget: Widget) -> None:
    """Of what does not fit as it is written: the bytes, and the diff of the first row."""
    page, changes = widget.notebook.page, widget.part("changes")
    ask_for(widget, "1 MB")
    first = changes.locator("tr").first
    expect(first).to_be_visible()
    expect(changes).not_to_contain_text(re.compile("Still looking|Asking the compiler"))
    diff = first.get_by_role("button", name=re.compile("Diff"))
    focus(diff)
    page.keyboard.press("Enter")
    expect(widget.part("diff").locator("ins").first).to_contain_text("+")
    expect(diff).to_have_attribute("aria-expanded", "true")
    widget.part("diff").get_by_role("button", name="Copy").click()
    expect(widget.status).to_have_text("Copied.")
    assert "%%remat" in page.evaluate("() => navigator.clipboard.readText()")  # the whole cell, with its imports
    first.get_by_role("button", name=re.compile("Try")).click()
    expect(first).to_have_attribute("aria-current", "true")
    expect(widget.policy).not_to_have_value("as_written")
    diff.click()
    expect(widget.part("diff")).to_be_empty()


def test_a_first_visit_is_calm_and_what_was_unfolded_stays_so(widget: Widget) -> None:
    page = widget.notebook.page
    more = widget.root.get_by_role("button", name="more", exact=True)
    folded = [
        widget.root.get_by_label("Compare with", exact=True),
        widget.root.get_by_role("button", name="Copy", exact=True),
    ]
    for control in folded:
        expect(control).to_be_hidden()
    focus(more)
    page.keyboard.press("Enter")
    expect(more).to_have_attribute("aria-expanded", "true")
    for control in folded:
        expect(control).to_be_visible()
    assert folded[0].evaluate("select => select.selectedOptions[0].text") == "no other"
    folded[0].select_option("nothing_saveable")
    widget.notebook.run(1)
    again = Widget(widget.notebook, 1)
    against = again.root.get_by_label("Compare with", exact=True)
    expect(against).to_be_visible()
    against.select_option("nothing_saveable")
    again.root.get_by_role("button", name="more", exact=True).click()
    expect(against).to_be_hidden()
    # What it is compared with is told all the same.
    expect(again.part("against")).to_have_text("A, compared with: nothing_saveable at function. B: what is shown.")


@pytest.mark.parametrize(("width", "lines"), [(900, 2), (1280, 1)])
def test_the_head_is_a_line_and_so_are_the_controls(widget: Widget, width: int, lines: int) -> None:
    """In a small window, beside the file browser, what the choice does has a line of its own."""
    page = widget.notebook.page
    page.set_viewport_size({"width": width, "height": 1000})
    try:
        expect(page.locator("#jp-left-stack")).to_be_visible()
        line = 34  # pixels, as tall as a control with what is around it
        assert box(widget.root.locator(".remat-head"))["height"] < line
        assert box(widget.root.locator(".remat-choosing"))["height"] < lines * line
        room = widget.root.evaluate("root => root.scrollWidth - root.clientWidth")
        assert room <= 0  # and nothing is cut off
    finally:
        page.set_viewport_size({"width": 1400, "height": 1000})
