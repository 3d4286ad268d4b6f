"""What the reader does with a report in JupyterLab: arrange, narrow, link, fold, compare."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from remat_magic import units
from tests.browser.inspected import Widget, inspection
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.slow

SCRIPTS = Path(units.__file__).parent / "widget" / "scripts"

# Two layers of one line, a scan, and a name: every kind of row there is, and an inner jaxpr.
CELL = """\
%%remat -o w
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def layer(x, W):
    return jnp.tanh(checkpoint_name(x @ W, "product"))

def loss(Ws, x):
    x, _ = jax.lax.scan(lambda x, W: (jnp.sin(x @ W), None), x, Ws)
    for W in Ws[:2]:
        x = layer(x, W)
    return jnp.sum(x ** 2)

loss(jax.ShapeDtypeStruct((3, 16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32"))
"""
LAYER_LINE = 6

TELL = """\
import json
def told(report):
    rows = [dict(nbytes=r.nbytes, primitive=r.primitive, line=r.source.line if r.source else None, kind=r.kind)
            for r in report.residuals]
    return dict(rows=rows, saved=report.saved_bytes, peak=report.peak_bytes, again=report.repeated_flops)
print(json.dumps({key: told(w._live.trace.report(key)) for key in ("as_written", "dots_saveable", "nothing_saveable")}))
"""
CELLS = (CELL, TELL)


@pytest.fixture
def widget(loaded: NotebookPage) -> Widget:
    """A widget that nobody has touched, with what a first visit does not show."""
    widget = inspection(loaded)
    widget.unfold()
    return widget


@pytest.fixture(scope="module")
def reports(loaded: NotebookPage) -> dict[str, Any]:
    """The reports as Python has them."""
    inspection(loaded)
    loaded.run(2)
    return json.loads(loaded.outputs(2).inner_text())


def rows(widget: Widget, part: str = "residuals") -> Locator:
    return widget.part(part).locator("tr.remat-row:visible")


def summary(widget: Widget, part: str = "residuals") -> Locator:
    return widget.part(part).locator("[data-summary]")


def test_the_totals_follow_the_search(widget: Widget, reports: dict[str, Any]) -> None:
    made = reports["as_written"]["rows"]
    kept = [row for row in made if row["kind"] == "intermediate"]  # as the verdict counts: arguments are alive anyway
    expect(summary(widget)).to_have_text(f"{len(kept)} values, {units.nbytes(sum(row['nbytes'] for row in kept))}")
    widget.root.get_by_label("Find").fill("TANH")
    tanh = [row for row in made if row["primitive"] == "tanh"]
    assert tanh
    # Rows that only mention it, as what reads them, are found too.
    expect(summary(widget)).to_contain_text(f"of {len(made)} values")
    for text in rows(widget).all_inner_texts():
        assert "tanh" in text
    widget.policy.select_option("nothing_saveable")  # the search stays
    expect(widget.root.get_by_label("Find")).to_have_value("TANH")
    for text in rows(widget).all_inner_texts():
        assert "tanh" in text


def test_a_line_narrows_the_tables_and_marks_the_equations(widget: Widget, reports: dict[str, Any]) -> None:
    widget.tab("Source").click()
    number = widget.part("listing").get_by_role("button", name=f"line {LAYER_LINE}", exact=True)
    number.click()
    expect(number).to_have_attribute("aria-pressed", "true")
    widget.tab("Values").click()
    here = [row for row in reports["as_written"]["rows"] if row["line"] == LAYER_LINE]
    assert here
    expect(summary(widget)).to_contain_text(f"{len(here)} of ")
    expect(summary(widget)).to_contain_text(units.nbytes(sum(row["nbytes"] for row in here)))
    widget.tab("Jaxprs").click()
    marked = widget.part("jaxprs").locator(".remat-picked em")  # which is marked a moment after the tab is shown
    expect(marked.filter(has_text=re.compile("^tanh$")).first).to_be_attached()
    expect(marked.filter(has_text=re.compile("^sin$"))).to_have_count(0)
    chip = widget.root.locator('[data-action="unpick"]')
    expect(chip).to_contain_text(f":{LAYER_LINE}")
    chip.click()
    expect(chip).to_be_hidden()
    expect(summary(widget)).not_to_contain_text(" of ")


def test_a_row_leads_to_its_line_and_its_equations(widget: Widget) -> None:
    """As choosing the line does, but that the table stays as it is; once more takes it back."""
    chip = widget.root.locator('[data-action="unpick"]')
    selected = widget.part("residuals").locator('tr[aria-selected="true"]')
    row = rows(widget).filter(has_text="tanh").first
    expect(row).to_have_attribute("aria-selected", "false")
    number = rows(widget).count()
    row.locator("td.remat-type").click()
    expect(row).to_have_attribute("aria-selected", "true")
    expect(selected).to_have_count(1)
    expect(rows(widget)).to_have_count(number)
    expect(chip).to_have_text(re.compile(rf"^Chosen: In\[\d+\]:{LAYER_LINE} .$"))
    widget.tab("Jaxprs").click()
    for pane in widget.part("jaxprs").locator("pre").all():
        marked = pane.locator(".remat-picked em")
        expect(marked.first).to_be_attached()
        expect(marked.filter(has_text=re.compile("^sin$"))).to_have_count(0)
    widget.tab("Values").click()
    row.locator("td.remat-type").click()
    expect(row).to_have_attribute("aria-selected", "false")
    expect(selected).to_have_count(0)
    expect(chip).to_be_hidden()
    expect(widget.root.locator(".remat-picked")).to_have_count(0)


def test_pointing_marks_the_same_everywhere(widget: Widget) -> None:
    widget.root.get_by_label("Source beside").check()
    row = rows(widget).filter(has_text="tanh").first
    row.hover()
    expect(row).to_have_class(re.compile("remat-same"))
    expression = widget.part("listing").locator("u.remat-same").first
    expect(expression).to_contain_text("jnp.tanh")
    widget.tab("Jaxprs").click()
    line = widget.part("jaxprs").locator("pre").first.locator(".remat-l", has_text="= tanh").first
    line.hover()
    number = line.get_attribute("data-o")
    same = widget.part("jaxprs").locator(f'pre >> nth=1 >> .remat-same[data-o="{number}"]')
    expect(same.first).to_be_attached()  # the derivative of the same call of it
    expect(widget.part("listing").locator("u.remat-same").first).to_contain_text("jnp.tanh")


def test_two_choices_are_compared_wherever_there_is_a_number(widget: Widget, reports: dict[str, Any]) -> None:
    a, b = reports["as_written"], reports["dots_saveable"]
    against = widget.root.get_by_label("Compare with", exact=True)
    against.select_option("as_written")
    widget.policy.select_option("dots_saveable")
    change = b["saved"] - a["saved"]
    text = f"{'+' if change > 0 else ''}{units.nbytes(change)} vs A"
    expect(widget.totals.locator('[data-total="saved"] .remat-against-it')).to_have_text(text)
    flops = widget.totals.locator('[data-total="repeated"] .remat-against-it')
    expect(flops).to_have_text(f"+{units.flops(b['again'] - a['again'])} vs A")
    expect(summary(widget)).to_contain_text("only in A")
    # The rows of the other policy count in none of the totals.
    kept = [row["nbytes"] for row in b["rows"] if row["kind"] == "intermediate"]
    expect(summary(widget)).to_contain_text(f"{len(kept)} values, {units.nbytes(sum(kept))}")
    against.select_option("")
    expect(widget.totals.locator(".remat-against-it")).to_have_count(0)


def test_the_browser_writes_numbers_as_python_does(browser: Browser) -> None:
    page = browser.new_page()
    drawn = random.Random(0)
    numbers = [sign * drawn.randrange(10**power) for power in range(1, 16) for sign in (1, -1) for _ in range(200)]
    numbers += [0, 999, 1000, 9995, 9996, 99_950, 100_500, 101_500, 999_499, 999_500, 10_125, 1_005, 2_675_000]
    text = (SCRIPTS / "shared.js").read_text()
    made = page.evaluate(
        "async ([text, numbers]) => {"
        " const { quantity } = await import('data:text/javascript,' + encodeURIComponent(text));"
        " return numbers.map((number) => [quantity(number, 'bytes'), quantity(number, 'FLOPs')]) }",
        [text, numbers],
    )
    assert made == [[units.nbytes(number), units.flops(number)] for number in numbers]
    page.close()
