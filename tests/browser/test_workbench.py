"""What the reader does with a report in JupyterLab: arrange, narrow, link, fold, compare, copy, undo."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from remat_magic import units
from tests.browser.inspected import LOAD, Widget, focus, write_notebook
from tests.browser.lab import NotebookPage, Server

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
LAYER_LINE, SCAN_LINE = 6, 9

TELL = """\
import json
def told(report):
    rows = [dict(nbytes=r.nbytes, primitive=r.primitive, line=r.source.line if r.source else None, kind=r.kind)
            for r in report.residuals]
    return dict(rows=rows, saved=report.saved_bytes, peak=report.peak_bytes, again=report.repeated_flops,
                forward=report.forward.text, backward=report.backward.text)
print(json.dumps({key: told(w._live.trace.report(key)) for key in ("as_written", "dots_saveable", "nothing_saveable")}))
"""

EDIT = """\
import json
print(json.dumps(w._live.trace.edit("dots_saveable").diff()))
"""

NAMES_CELL = """\
%%remat
import jax, jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

def many(x):
    for kind in ("attn", "mlp"):
        for number in range(5):
            x = checkpoint_name(jnp.sin(x), f"{kind}_{number}")
    return jnp.sum(x)

many(jax.ShapeDtypeStruct((8,), "float32"))
"""

# A library's function is folded under the lines of one's own, and leads to what it makes just as they do.
LIBRARY_CELL = """\
%%remat
import sys
sys.path.insert(0, "site-packages")
import shelf
import jax, jax.numpy as jnp

def loss(W, x):
    return jnp.sum(shelf.dense(W, shelf.dense(W, x)) * jnp.cos(x))

loss(jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32"))
"""

# More lines than are sent with a choice: its programs are asked for when they are to be seen.
LARGE_CELL = """\
%%remat --policy nothing_saveable
import jax, jax.numpy as jnp

def loss(W, x):
    for _ in range(150):
        x = jnp.sin(x @ W)
    return jnp.sum(x)

loss(jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((2, 4), "float32"))
"""
# What a test runs besides.
NAMES, LIBRARY, LARGE = 3, 4, 5


@pytest.fixture(scope="module")
def opened(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "bench.ipynb", LOAD, CELL, TELL, NAMES_CELL, LIBRARY_CELL, LARGE_CELL, EDIT)
    page_of_module.open("bench.ipynb")
    page_of_module.run(0)
    return page_of_module


def inspection(opened: NotebookPage, cell: int) -> Widget:
    """The new widget of a cell."""
    opened.page.mouse.move(0, 0)
    opened.run(cell)
    assert opened.errors() == []
    widget = Widget(opened, cell)
    widget.unfold()  # what a first visit does not show
    return widget


@pytest.fixture
def widget(opened: NotebookPage) -> Widget:
    """A widget that nobody has touched."""
    return inspection(opened, 1)


@pytest.fixture(scope="module")
def reports(opened: NotebookPage) -> dict[str, Any]:
    """The reports as Python has them."""
    inspection(opened, 1)
    opened.run(2)
    return json.loads(opened.outputs(2).inner_text())


def rows(widget: Widget, part: str = "residuals") -> Locator:
    return widget.part(part).locator("tr.remat-row:visible")


def column(widget: Widget, number: int) -> list[str]:
    return rows(widget).locator(f"td:nth-child({number})").all_inner_texts()


def summary(widget: Widget, part: str = "residuals") -> Locator:
    return widget.root.locator(f'[data-summary="{part}"]')


def clipboard(page: Page) -> str:
    return page.evaluate("() => navigator.clipboard.readText()")


def scrolls_around(element: Locator) -> int:
    """How many parts of the widget around an element, and it, have a height and a scrollbar of their own."""
    return element.evaluate(
        "element => { let number = 0;"
        " for (let at = element; !at.matches('.remat-widget'); at = at.parentElement)"
        " number += getComputedStyle(at).maxHeight !== 'none' && /auto|scroll/.test(getComputedStyle(at).overflowY);"
        " return number }"
    )


def action(widget: Widget, name: str) -> Locator:
    return widget.root.get_by_role("button", name=name, exact=True)


# ----------------------------------------------------------------------------------------------------------- the tables


def test_rows_are_sorted(widget: Widget) -> None:
    head = widget.part("residuals").locator("thead")
    head.get_by_role("button", name="Size").click()
    sizes = [float(text.split()[0]) for text in column(widget, 1) if text.endswith(" B")]
    assert sizes == sorted(sizes, reverse=True)  # numbers begin with the largest
    head.get_by_role("button", name="Size").click()
    expect(head.locator('th[aria-sort="ascending"]')).to_have_text(re.compile("Size"))
    head.get_by_role("button", name="What").click()
    assert column(widget, 5) == sorted(column(widget, 5), key=str.casefold)


def test_the_totals_follow_the_search(widget: Widget, reports: dict[str, Any]) -> None:
    made = reports["as_written"]["rows"]
    everything = sum(row["nbytes"] for row in made)
    expect(summary(widget)).to_have_text(f"{len(made)} values, {units.nbytes(everything)}")
    widget.root.get_by_label("Find").first.fill("TANH")
    tanh = [row for row in made if row["primitive"] == "tanh"]
    assert tanh
    # Rows that only mention it, as what reads them, are found too.
    expect(summary(widget)).to_contain_text(f"of {len(made)} values")
    for text in rows(widget).all_inner_texts():
        assert "tanh" in text
    widget.policy.select_option("nothing_saveable")  # the search stays
    expect(widget.root.get_by_label("Find").first).to_have_value("TANH")
    for text in rows(widget).all_inner_texts():
        assert "tanh" in text


def test_rows_are_grouped_and_folded(widget: Widget, reports: dict[str, Any]) -> None:
    widget.root.get_by_label("Group by").first.select_option("operation")
    heads = widget.part("residuals").locator(".remat-grouprow")
    made = reports["as_written"]["rows"]
    by_operation: dict[str, int] = {}
    for row in made:
        by_operation[row["primitive"]] = by_operation.get(row["primitive"], 0) + row["nbytes"]
    sines = heads.filter(has_text=re.compile(r"^(▾ )?sin"))
    expect(sines).to_contain_text(units.nbytes(by_operation["sin"]))
    before = rows(widget).count()
    button = sines.get_by_role("button")
    focus(button)
    widget.notebook.page.keyboard.press("Enter")
    again = widget.part("residuals").locator(".remat-grouprow button[data-label=sin]")
    expect(again).to_have_attribute("aria-expanded", "false")
    expect(again).to_be_focused()
    assert rows(widget).count() < before
    for text in rows(widget).locator("td.remat-what code").all_inner_texts():
        assert text != "sin"


def test_a_table_is_copied_as_it_is_shown(widget: Widget, reports: dict[str, Any]) -> None:
    page, made = widget.notebook.page, reports["as_written"]["rows"]
    action(widget, "Copy TSV").first.click()
    expect(widget.status).to_have_text("Copied.")
    lines = [line.split("\t") for line in clipboard(page).split("\n")]
    assert lines[0][0] == "Size (bytes)"
    assert {len(line) for line in lines} == {len(lines[0])}
    assert sum(int(line[0]) for line in lines[1:]) == sum(row["nbytes"] for row in made)  # exact, not as shown
    widget.root.get_by_label("Find").first.fill("argument")
    action(widget, "Copy Markdown").first.click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('| Size')")
    table = clipboard(page).split("\n")
    assert re.fullmatch(r"\|( --- \|)+", table[1])
    assert len(table) == 2 + rows(widget).count()


# ----------------------------------------------------------------------------------------------------------- the source


def test_a_line_narrows_the_tables_and_marks_the_equations(widget: Widget, reports: dict[str, Any]) -> None:
    widget.tab("Source").click()
    number = widget.part("listing").get_by_role("button", name=f"line {LAYER_LINE}", exact=True)
    number.click()
    expect(number).to_have_attribute("aria-pressed", "true")
    widget.tab("Residuals").click()
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
    plain = row.evaluate(LOOKS)
    number = rows(widget).count()
    row.locator("td.remat-type").click()
    expect(row).to_have_attribute("aria-selected", "true")
    expect(selected).to_have_count(1)
    assert row.evaluate(LOOKS) != plain
    expect(rows(widget)).to_have_count(number)
    expect(chip).to_have_text(re.compile(rf"^Chosen: In\[\d+\]:{LAYER_LINE} .$"))
    widget.tab("Jaxprs").click()
    for pane in widget.part("jaxprs").locator("pre").all():
        marked = pane.locator(".remat-picked em")
        expect(marked.first).to_be_attached()
        expect(marked.filter(has_text=re.compile("^sin$"))).to_have_count(0)
    # Its line is far up in a low panel: it is brought into sight.
    style = widget.notebook.page.add_style_tag(content=".remat .remat-panel-listing { max-height: 5em }")
    widget.part("listing").evaluate("panel => panel.scrollTo(0, 9999)")
    widget.tab("Source").click()
    number_of_line = widget.part("listing").get_by_role("button", name=f"line {LAYER_LINE}", exact=True)
    expect(number_of_line).to_have_attribute("aria-pressed", "true")
    assert number_of_line.evaluate(IN_SIGHT)
    style.evaluate("style => style.remove()")
    widget.tab("Residuals").click()
    row.locator("td.remat-type").click()
    expect(row).to_have_attribute("aria-selected", "false")
    expect(selected).to_have_count(0)
    expect(chip).to_be_hidden()
    expect(widget.root.locator(".remat-picked")).to_have_count(0)


# What a row looks like, and whether an element is in sight within its panel.
LOOKS = "row => [getComputedStyle(row).backgroundColor, getComputedStyle(row).boxShadow]"
IN_SIGHT = """element => {
  const [inner, outer] = [element, element.closest(".remat-panel")].map(each => each.getBoundingClientRect());
  return outer.top <= inner.top && inner.bottom <= outer.bottom;
}"""


@pytest.mark.parametrize("part", ["residuals", "recomputed"])
def test_rows_are_chosen_by_the_keyboard(widget: Widget, part: str) -> None:
    page = widget.notebook.page
    if part == "recomputed":
        widget.policy.select_option("nothing_saveable")
        widget.tab("Recomputed").click()
        expect(widget.root).to_have_attribute("aria-busy", "false")  # or the rows are replaced once more
    shown = rows(widget, part).and_(page.locator("tr[data-e]"))
    expect(shown).not_to_have_count(0)
    first, second = shown.nth(0), shown.nth(1)
    expect(widget.part(part).locator('tr[tabindex="0"]')).to_have_count(1)  # from there the arrows lead on
    cells = widget.notebook.cell_count()
    focus(first)
    page.keyboard.press("Enter")
    expect(first).to_have_attribute("aria-selected", "true")
    expect(first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(second).to_be_focused()
    page.keyboard.type("dd")
    page.keyboard.press("Space")
    expect(second).to_have_attribute("aria-selected", "true")
    expect(first).to_have_attribute("aria-selected", "false")
    expect(widget.part(part).locator('tr[tabindex="0"]')).to_have_count(1)
    page.keyboard.press("Space")
    expect(second).to_have_attribute("aria-selected", "false")
    expect(widget.root.locator('[data-action="unpick"]')).to_be_hidden()
    assert widget.notebook.cell_count() == cells


def test_rows_stay_when_the_kernel_tells_them_once_more(widget: Widget) -> None:
    """A choice that is at hand is shown at once; the kernel's answer then replaces nothing."""
    for policy in ("dots_saveable", "as_written"):  # so that both are at hand
        widget.policy.select_option(policy)
        expect(widget.root).to_have_attribute("aria-busy", "false")
    told = "widget => widget.told"
    widget.root.evaluate("""widget => {
      widget.told = 0;
      const rows = widget.querySelector('[data-part="residuals"]');
      new MutationObserver(changes => {
        if (changes.some(({ target }) => target === rows)) widget.told += 1;
      }).observe(rows, { childList: true });
    }""")
    widget.policy.select_option("dots_saveable")
    widget.root.get_by_role("button", name="Apply").first.click()  # which the kernel answers after the choice
    expect(widget.status).to_contain_text("dots_saveable")
    assert widget.root.evaluate(told) == 1


def test_the_keyboard_stays_on_a_row_that_is_written_anew(widget: Widget) -> None:
    row = rows(widget).and_(widget.notebook.page.locator("tr[data-e]")).filter(has_text="intermediate").first
    key = row.get_attribute("data-k")
    widget.policy.select_option("everything_saveable")
    expect(widget.root).to_have_attribute("aria-busy", "false")
    same = rows(widget).and_(widget.notebook.page.locator(f"tr[data-k='{key}']"))
    focus(same)
    widget.notebook.page.keyboard.press("Control+z")
    expect(widget.policy).to_have_value("as_written")
    expect(same).to_be_focused()


def test_pointing_marks_the_same_everywhere(widget: Widget) -> None:
    widget.root.get_by_label("Source beside").check()
    row = rows(widget).filter(has_text="tanh").filter(has_text="intermediate").first
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


# --------------------------------------------------------------------------------------------------------- the programs


def test_programs_are_copied_to_the_byte(widget: Widget, reports: dict[str, Any]) -> None:
    page = widget.notebook.page
    widget.tab("Jaxprs").click()
    expect(widget.part("jaxprs").locator("pre")).to_have_count(2)
    for name, half in (("Copy left", "forward"), ("Copy right", "backward")):
        action(widget, name).click()
        expected = reports["as_written"][half]
        page.wait_for_function("async text => (await navigator.clipboard.readText()) === text", arg=expected)


def test_parameters_and_inner_jaxprs_fold(widget: Widget) -> None:
    widget.tab("Jaxprs").click()
    pane = widget.part("jaxprs").locator("pre").first
    folded = pane.locator(".remat-l", has_text="= dot_general").last
    assert "dimension_numbers" not in folded.inner_text()
    folded.locator(".remat-fold").click()
    assert "dimension_numbers" in folded.inner_text()
    opener = pane.locator(".remat-l:has(> [data-hides])").first
    inside = pane.locator(".remat-l", has_text="= sin")
    expect(inside.first).to_be_visible()
    opener.locator("[data-hides]").click()
    expect(inside.first).to_be_hidden()
    opener.locator("[data-hides]").click()
    expect(inside.first).to_be_visible()


def test_keys_move_through_a_program_and_mark_its_variables(widget: Widget) -> None:
    page = widget.notebook.page
    widget.tab("Jaxprs").click()
    pane = widget.part("jaxprs").locator("pre").first
    focus(pane)
    here = pane.locator(".remat-here")
    for _ in range(40):
        page.keyboard.press("ArrowDown")
        if "= dot_general" in here.inner_text() and "data-hides" not in here.inner_html():
            break
    expect(here).to_have_count(1)
    page.keyboard.press("ArrowRight")
    assert "dimension_numbers" in here.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "dimension_numbers" not in here.inner_text()
    name = here.inner_text().split(":")[0].strip()
    sizes = page.evaluate("() => ['remat-definition', 'remat-use'].map((name) => CSS.highlights.get(name).size)")
    text = pane.locator(".remat-l").all_inner_texts()
    words = [re.findall(rf"(?<![\w.'\"]){name}(?![\w\[=.'\"])", line) for line in text]
    assert sum(sizes) == sum(map(len, words))
    assert sizes[0] == 1  # a variable is defined once
    page.keyboard.press("Enter")
    expect(widget.part("listing")).to_be_visible()
    focused = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert focused in (f"line {LAYER_LINE}", f"line {SCAN_LINE}")


def test_the_panes_scroll_together(widget: Widget) -> None:
    page = widget.notebook.page
    low = page.add_style_tag(content=".remat.remat.remat pre.remat-program { max-height: 9em }")
    widget.tab("Jaxprs").click()
    left, right = widget.part("jaxprs").locator("pre").all()
    left.hover()
    # To the forward program's end, which is the backward one's beginning, and then to its middle.
    left.evaluate("pane => pane.scrollTo(0, pane.scrollHeight)")
    page.wait_for_timeout(200)
    left.evaluate("pane => pane.scrollTo(0, pane.scrollHeight / 2)")
    shown = "pane => { const b = pane.getBoundingClientRect();"
    shown += " return [...pane.querySelectorAll('[data-o]')].filter(l => { const r = l.getBoundingClientRect();"
    shown += " return r.bottom > b.top && r.top < b.bottom }).map(l => l.dataset.o) }"
    both = f"(panes) => {{ const [left, right] = panes.map({shown}); return left.some(o => right.includes(o)) }}"
    page.wait_for_function(both, arg=[left.element_handle(), right.element_handle()])  # an operation that both show
    widget.root.get_by_label("Scroll together").uncheck()
    stays = -1
    while stays != (stays := right.evaluate("pane => pane.scrollTop")):  # it may be on its way still
        page.wait_for_timeout(300)
    left.evaluate("pane => pane.scrollTo(0, 0)")
    page.wait_for_timeout(300)
    assert right.evaluate("pane => pane.scrollTop") == stays
    low.evaluate("style => style.remove()")


# ----------------------------------------------------------------------------------------------- one choice and another


def test_two_choices_are_compared_wherever_there_is_a_number(widget: Widget, reports: dict[str, Any]) -> None:
    a, b = reports["as_written"], reports["dots_saveable"]
    action(widget, "Pin").click()
    expect(action(widget, "Pin")).to_have_attribute("aria-pressed", "true")
    widget.policy.select_option("dots_saveable")
    change = b["saved"] - a["saved"]
    text = f"{'+' if change > 0 else ''}{units.nbytes(change)} vs A"
    expect(widget.totals.locator('[data-total="saved"] .remat-change')).to_have_text(text)
    flops = widget.totals.locator('[data-total="repeated"] .remat-change')
    expect(flops).to_have_text(f"+{units.flops(b['again'] - a['again'])} vs A")
    missing = widget.part("residuals").locator(".remat-missing")
    expect(missing.first).to_be_visible()
    shown = rows(widget).filter(has=widget.notebook.page.locator("i", has_text=re.compile("^B$")))
    expect(shown.first).to_contain_text("dot_general")  # kept only under this policy
    expect(summary(widget)).to_contain_text("only in A")
    # The rows of the other policy count in none of the totals.
    total = sum(row["nbytes"] for row in b["rows"])
    expect(summary(widget)).to_contain_text(f"{len(b['rows'])} values, {units.nbytes(total)}")
    widget.tab("Jaxprs").click()
    expect(widget.part("jaxprs").locator(".remat-only em").first).to_be_attached()
    widget.root.get_by_label("Show", exact=True).select_option("backward")
    expect(widget.part("jaxprs").locator("h4").first).to_contain_text("A, as_written: Backward")
    expect(widget.part("jaxprs").locator("h4").last).to_contain_text("B, dots_saveable: Backward")
    panes = widget.part("jaxprs").locator("pre")
    counts = [panes.nth(index).locator(".remat-l:has(em)").count() for index in (0, 1)]
    only = [panes.nth(index).locator(".remat-only").count() for index in (0, 1)]
    assert counts[0] - only[0] == counts[1] - only[1]  # what both have
    expect(summary(widget, "jaxprs")).to_contain_text(f"backward +{only[1]} \N{MINUS SIGN}{only[0]}")
    widget.root.get_by_label("vs", exact=True).select_option("")
    expect(widget.part("jaxprs").locator(".remat-only")).to_have_count(0)
    expect(widget.totals.locator(".remat-change")).to_have_count(0)


def test_groups_are_in_the_order_of_the_totals_that_they_show(widget: Widget) -> None:
    """The rows that only the other policy has count in none of them."""
    widget.policy.select_option("nothing_saveable")
    widget.root.get_by_label("vs", exact=True).select_option("as_written")
    expect(widget.part("residuals").locator(".remat-missing")).not_to_have_count(0)
    widget.root.get_by_label("Group by").first.select_option("operation")
    totals = widget.part("residuals").evaluate(
        "part => { const sums = [];"
        " for (const row of part.querySelectorAll('tbody tr')) {"
        "   if (row.matches('.remat-grouprow')) sums.push(0);"
        "   else if (!row.matches('.remat-missing')) sums[sums.length - 1] += Number(row.dataset.value); }"
        " return sums }"
    )
    assert len(set(totals)) > 1
    assert totals == sorted(totals, reverse=True)


def test_a_policy_never_seen_can_be_compared_with(widget: Widget, reports: dict[str, Any]) -> None:
    widget.root.get_by_label("vs", exact=True).select_option("nothing_saveable")
    change = reports["as_written"]["saved"] - reports["nothing_saveable"]["saved"]
    expect(widget.totals.locator('[data-total="saved"]')).to_contain_text(f"+{units.nbytes(change)} vs A")


def test_choices_are_undone_and_done_again(widget: Widget) -> None:
    undo, redo = action(widget, "Undo"), action(widget, "Redo")
    expect(undo).to_be_disabled()
    for policy in ("dots_saveable", "nothing_saveable"):
        widget.policy.select_option(policy)
        expect(widget.policy).to_have_value(policy)
    undo.click()
    expect(widget.policy).to_have_value("dots_saveable")
    focus(widget.policy)
    widget.notebook.page.keyboard.press("Control+z")
    expect(widget.policy).to_have_value("as_written")
    expect(undo).to_be_disabled()
    widget.notebook.page.keyboard.press("Control+Shift+z")
    expect(widget.policy).to_have_value("dots_saveable")
    redo.click()
    expect(widget.policy).to_have_value("nothing_saveable")
    expect(redo).to_be_disabled()
    # A name's radio button is a choice as well.
    widget.root.get_by_label("save", exact=True).check()
    expect(widget.policy).to_have_value(re.compile("names"))
    undo.click()
    expect(widget.policy).to_have_value("nothing_saveable")


# ---------------------------------------------------------------------------------------------------- a budget


def agree(widget: Widget) -> None:
    """The slider, the dot, the sentence and the headline are of one plan."""
    expect(widget.part("frontier").locator(".remat-chosen:visible")).to_have_count(1)
    expect(widget.part("frontier").locator(".remat-stop.remat-at:visible")).to_have_count(1)
    sentence = widget.part("stop").inner_text()
    again = re.search(r": (.*?) again", sentence)
    assert again is not None
    expect(widget.part("planned")).to_contain_text(f"recomputes {again[1]}")
    saves = re.search(r"Saves (\S+ \S+) of", widget.part("planned").inner_text())
    assert saves is not None
    expect(widget.part("totals")).to_contain_text(f"saved {saves[1]}")
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_have_attribute("aria-valuetext", sentence)


def test_slider_dot_and_headline_follow_a_typed_budget(widget: Widget) -> None:
    widget.tab("Plan").click()
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_enabled(timeout=60_000)
    widget.root.get_by_label("of", exact=True).select_option("saved")
    before = slider.input_value()
    widget.root.get_by_label("or", exact=True).fill("12%")
    action(widget, "Plan").click()
    expect(widget.policy).to_have_value(re.compile("plan|saveable"))
    expect(widget.part("frontier").locator(".remat-chosen")).to_have_count(1)
    assert float(slider.input_value()) < float(before)
    agree(widget)


def test_a_slider_plans_within_a_budget(widget: Widget) -> None:
    page = widget.notebook.page
    widget.tab("Plan").click()
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_enabled(timeout=60_000)
    widget.root.get_by_label("of", exact=True).select_option("saved")
    stops = widget.part("frontier").locator("[data-stop]")
    expect(stops).to_have_count(int(slider.get_attribute("max") or 0) + 1)
    before = widget.part("stop").inner_text()
    focus(slider)
    page.keyboard.press("ArrowLeft")
    expect(widget.part("stop")).not_to_have_text(before)
    expect(widget.policy).to_have_value(re.compile("plan|saveable"))
    expect(widget.part("planned")).to_contain_text("Saves ")
    agree(widget)  # after a release of the slider
    # The plan is in every pane like any other policy, and so in the history.
    policy = widget.policy.input_value()
    widget.tab("Residuals").click()
    expect(summary(widget)).to_contain_text("value")
    action(widget, "Undo").click()
    expect(widget.policy).to_have_value("as_written")
    action(widget, "Redo").click()
    expect(widget.policy).to_have_value(policy)
    widget.tab("Plan").click()
    widget.root.get_by_label("or", exact=True).fill("nonsense")
    action(widget, "Plan").click()
    expect(widget.status).to_contain_text("nonsense")
    expect(widget.policy).to_have_value(policy)


def test_a_slider_that_is_moved_on_leaves_one_entry(widget: Widget) -> None:
    """Where it ended, in the list and to undo; what was chosen before and after is as it was."""
    page = widget.notebook.page
    widget.policy.select_option("dots_saveable")
    expect(widget.policy).to_have_value("dots_saveable")
    widget.tab("Plan").click()
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_enabled(timeout=60_000)
    widget.root.get_by_label("of", exact=True).select_option("saved")
    listed = widget.policy.locator("option")
    before, seen, last = listed.count(), set[str](), ""
    focus(slider)
    while len(seen) < 3 or "plan" not in last:
        said = widget.part("stop").inner_text()
        page.keyboard.press("ArrowLeft")
        expect(widget.part("stop")).not_to_have_text(said)
        expect(widget.root).to_have_attribute("aria-busy", "false")  # each is shown before the next is asked for
        last = widget.policy.input_value()
        seen.add(last)
    assert listed.count() == before + 1
    action(widget, "Undo").click()
    expect(widget.policy).to_have_value("dots_saveable")
    action(widget, "Redo").click()
    expect(widget.policy).to_have_value(last)
    # Moved once more it is another way, which does not take the place of that.
    focus(slider)
    passed = set[str]()
    while len(passed) < 2:
        said = widget.part("stop").inner_text()
        page.keyboard.press("ArrowRight")
        expect(widget.part("stop")).not_to_have_text(said)
        expect(widget.root).to_have_attribute("aria-busy", "false")
        passed.add(widget.policy.input_value())
    expect(widget.policy).not_to_have_value(last)
    action(widget, "Undo").click()
    expect(widget.policy).to_have_value(last)


def test_the_budget_is_of_the_peak_unless_it_is_changed(widget: Widget) -> None:
    page = widget.notebook.page
    widget.tab("Plan").click()
    slider = widget.root.get_by_role("slider", name="Budget")
    expect(slider).to_be_enabled(timeout=60_000)
    expect(widget.root.get_by_label("of", exact=True)).to_have_value("peak")
    expect(widget.part("stop")).to_contain_text("of peak")
    focus(slider)
    page.keyboard.press("ArrowLeft")
    expect(widget.part("planned")).to_contain_text("Peaks at ")
    budget = re.search(r"Peaks at (\S+ \S+) of (\S+ \S+)", widget.part("planned").inner_text())
    assert budget is not None
    expect(widget.part("totals")).to_contain_text(f"peak {budget[1]}")
    expect(widget.part("stop")).to_contain_text(f"{budget[2]} of peak: ")


def test_what_if_and_the_edit_of_the_source(widget: Widget) -> None:
    widget.tab("Plan").click()
    action(widget, "What if").click()
    first = widget.part("alternatives").locator("[data-flip]").first
    expect(first).to_be_visible(timeout=60_000)
    first.click()
    expect(widget.policy).not_to_have_value("as_written")
    action(widget, "Undo").click()
    widget.root.get_by_label("Equal layers", exact=True).select_option("together")
    action(widget, "What if").click()
    together = widget.part("alternatives").locator("tr", has_text="2 together")
    expect(together.first).to_be_visible(timeout=60_000)
    together.locator("[data-flip]").first.click()
    expect(widget.policy).to_have_value(re.compile(r" x\d"))
    widget.policy.select_option("dots_saveable")
    action(widget, "Edit my source").click()  # of what is chosen, shown or not
    diff = widget.part("alternatives").locator(".remat-diff")
    expect(diff).to_contain_text(
        "+@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)", timeout=60_000
    )
    assert scrolls_around(diff) <= 1  # the panel, besides the notebook
    added, removed = (diff.locator(tag).evaluate_all(f"all => all.map({_LOOK})") for tag in ("ins", "del"))
    assert {look["sign"] for look in added} == {"+"}
    assert {look["sign"] for look in removed} <= {"-"}
    assert all(look["green"] for look in added)
    assert all(look["red"] for look in removed)
    fold = diff.locator("summary", has_text="unchanged line").last
    expect(diff.locator("pre", has_text=" loss(jax.ShapeDtypeStruct")).to_be_hidden()
    focus(fold)
    fold.press("Enter")
    expect(diff.locator("pre", has_text=" loss(jax.ShapeDtypeStruct")).to_be_visible()
    action(widget, "Copy the diff").click()
    expect(widget.status).to_have_text("Copied.")
    widget.notebook.run(6)
    assert clipboard(widget.notebook.page) == json.loads(widget.notebook.outputs(6).inner_text())
    widget.root.get_by_role("button", name=re.compile(r"Copy In\[\d+\] as edited")).click()
    cell = clipboard(widget.notebook.page)
    assert cell.startswith("%%remat")
    assert "\n@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)" in cell


_LOOK = """e => {
  const back = getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number);
  return { sign: e.textContent[0], green: back[1] > back[0], red: back[0] > back[1] };
}"""


# ----------------------------------------------------------------------------------------------------------- many names


def test_many_names_are_set_together(opened: NotebookPage) -> None:
    widget = inspection(opened, NAMES)
    names = widget.root.locator(".remat-name:visible")
    expect(names).to_have_count(10)
    widget.root.get_by_label("Names", exact=True).fill("attn_*")
    expect(names).to_have_count(5)
    action(widget, "save").click()
    expect(widget.part("code")).to_contain_text("'attn_0', 'attn_1', 'attn_2', 'attn_3', 'attn_4'")
    expect(widget.part("code")).not_to_contain_text("mlp")
    expect(widget.totals).to_contain_text("saved 160 B")  # five of eight floats


def test_a_name_without_a_state_says_why(opened: NotebookPage) -> None:
    """The last sine's value is summed, which needs nothing of it; of the others the cosine is what is saved."""
    widget = inspection(opened, NAMES)
    expect(widget.part("recomputed")).not_to_be_empty()
    for name in widget.root.locator(".remat-name").all():
        checked = name.locator("input:checked").count()
        expect(name).to_have_text(re.compile("recompute$" if checked else "not needed by the backward pass$"))
    expect(widget.root.locator(".remat-name", has_text="not needed")).not_to_have_count(0)
    widget.policy.select_option("nothing_saveable")
    expect(widget.root.locator(".remat-name", has=opened.page.locator("input:checked"))).not_to_have_count(0)
    expect(widget.root.locator(".remat-name small:visible")).to_have_count(0)


# -------------------------------------------------------------------------------------------------------------- numbers


def test_the_browser_writes_numbers_as_python_does(browser: Browser) -> None:
    page = browser.new_page()
    drawn = random.Random(0)
    numbers = [sign * drawn.randrange(10**power) for power in range(1, 16) for sign in (1, -1) for _ in range(200)]
    numbers += [0, 999, 1000, 9995, 9996, 99_950, 100_500, 101_500, 999_499, 999_500, 10_125, 1_005, 2_675_000]
    text = (SCRIPTS / "units.js").read_text()
    made = page.evaluate(
        "async ([text, numbers]) => {"
        " const { quantity } = await import('data:text/javascript,' + encodeURIComponent(text));"
        " return numbers.map((number) => [quantity(number, 'bytes'), quantity(number, 'FLOPs')]) }",
        [text, numbers],
    )
    assert made == [[units.nbytes(number), units.flops(number)] for number in numbers]
    page.close()


def test_lines_of_libraries(opened: NotebookPage, lab: Server) -> None:
    folder = lab.folder / "site-packages"
    folder.mkdir(exist_ok=True)
    (folder / "shelf.py").write_text("import jax.numpy as jnp\n\n\ndef dense(W, x):\n    return jnp.sin(x @ W)\n")
    widget = inspection(opened, LIBRARY)
    rows = widget.part("residuals").locator("tr.remat-row")
    everything, made = rows.count(), rows.filter(has_text="by shelf.py:5").count()
    assert 0 < made < everything
    widget.tab("Source").click()
    fold = widget.root.locator("details", has_text="shelf.py dense")
    expect(fold).not_to_have_attribute("open", "")
    fold.locator("summary").click()
    expression = fold.locator("u").first
    expression.hover()
    expect(widget.part("residuals").locator("tr.remat-same")).to_have_count(made)
    fold.get_by_role("button", name="line 5").click()
    expect(widget.root.locator('[data-action="unpick"]')).to_contain_text("Only shelf.py:5")
    shown = [row for row in rows.all() if row.get_attribute("hidden") is None]
    assert len(shown) == made
    widget.tab("Jaxprs").click()
    picked = widget.part("jaxprs").locator(".remat-picked")
    expect(picked.filter(has_text="sin").first).to_be_visible()
    expect(picked.filter(has_text="dot_general").first).to_be_visible()
    assert picked.filter(has_text="reduce_sum").count() == 0  # that of one's own line


def test_large_programs_follow_every_choice(opened: NotebookPage) -> None:
    widget = inspection(opened, LARGE)
    widget.tab("Jaxprs").click()
    heading = widget.part("jaxprs").get_by_role("heading", name="Backward")
    expect(heading).to_be_visible(timeout=60_000)
    nothing = heading.inner_text()
    widget.policy.select_option("everything_saveable")
    expect(heading).not_to_have_text(nothing, timeout=60_000)
    everything = heading.inner_text()
    for _ in range(2):  # now without the kernel
        widget.policy.select_option("nothing_saveable")
        expect(heading).to_have_text(nothing)
        widget.policy.select_option("everything_saveable")
        expect(heading).to_have_text(everything)
    assert opened.errors() == []
