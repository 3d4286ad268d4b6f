"""What the widget is for, in JupyterLab: by mouse, by keyboard and from Python, with and without a kernel."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.accessible import unreadable, violations
from tests.browser.inspected import BLOCKS, LAYERS, TABS, Widget, expect_report, focus, inspection
from tests.browser.lab import VIEWPORT, NotebookPage, Server

# How many values JAX itself saves for the name's present meaning.
COUNT_RESIDUALS = """\
arguments = [jax.ShapeDtypeStruct(shape, f32) for shape in [(5, 4), (6, 5), (7, 6), (4,)]]
saved = len(jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layers, *args)[1], *arguments)))
f"{saved} saved"
"""
# It runs until there is a file.
WAIT = """\
import pathlib, time
while not pathlib.Path("go-on").exists():
    time.sleep(0.05)
"""
# What a test runs besides.
SEVERAL, CHOOSE, TELL, RUNNING, COUNT, CLOSE = range(2, 8)
CELLS = (LAYERS, BLOCKS, "w.policy = 'dots_saveable'", "w.report.saved_bytes", WAIT, COUNT_RESIDUALS, "w.close()")


@pytest.fixture
def opened(loaded: NotebookPage) -> NotebookPage:
    """The notebook with a widget that nobody has touched."""
    inspection(loaded)
    return loaded


@pytest.fixture
def several(loaded: NotebookPage) -> Widget:
    """A widget of three checkpointed blocks with a name, on a first visit."""
    widget = inspection(loaded, SEVERAL, forget=True)
    expect(widget.part("recomputed")).not_to_be_empty()
    return widget


def test_the_mouse_switches_policies(opened: NotebookPage) -> None:
    widget = Widget(opened, 1)
    widget.shows("as_written")
    for policy in ("nothing_saveable", "dots_saveable"):
        widget.policy.click()
        expect(widget.root.locator(".remat-entry-waiting")).to_have_count(0)
        widget.root.locator("li").get_by_text(policy, exact=True).first.click()
        widget.shows(policy)
    expect(widget.part("code")).to_contain_text("jax.checkpoint_policies.dots_saveable")
    expect(widget.part("residuals").locator("tbody tr", has_text="dot_general")).not_to_have_count(0)


def test_the_keyboard_alone_reaches_and_turns_everything(opened: NotebookPage) -> None:
    widget, page = Widget(opened, 1), opened.page
    widget.shows("as_written")
    cells = opened.cell_count()
    focus(widget.policy)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(widget.policy).to_be_focused()
    page.keyboard.press("d")  # the first that begins so; of several letters a late machine takes each for a first one
    widget.shows("dots_saveable")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement?.getAttribute('role')") == "tab":
            break
    expect(widget.tab("Values")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(widget.tab("Source")).to_be_focused()
    expect(widget.part("listing")).to_be_visible()
    page.keyboard.type("dd")  # which deletes the cell where the notebook hears it
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement?.dataset.part") == "listing":
            break
    expect(widget.part("listing")).to_be_focused()
    page.wait_for_timeout(300)
    assert opened.cell_count() == cells


def test_the_place_is_chosen(several: Widget) -> None:
    """At the checkpoints each block's input is kept, of 8 x 16 floats, but for the first, which is an argument."""
    several.policy.select_option("nothing_saveable")
    expect(several.totals).to_contain_text("saves 1.02 kB")
    several.at.select_option("function")
    expect(several.totals).to_contain_text("saves 0 B")
    expect(several.policy).to_have_value("nothing_saveable")
    several.at.select_option("sites")
    expect(several.totals).to_contain_text("saves 1.02 kB")


def test_each_panel_has_its_figures(several: Widget) -> None:
    for name, (part, figures) in TABS.items():
        several.tab(name).click()
        expect(several.tab(name)).to_have_attribute("aria-selected", "true")
        expect(several.part(part)).to_be_visible()
        expect(several.part(part).locator(figures).first).to_be_visible(timeout=60_000)
    several.tab("Jaxprs").click()
    forward, backward = several.part("jaxprs").locator("pre").all()
    expect(forward).to_contain_text("dot_general")
    expect(backward).to_contain_text("transpose")


def test_python_does_what_the_dropdown_does(opened: NotebookPage) -> None:
    opened.run(CHOOSE)
    Widget(opened, 1).shows("dots_saveable")
    opened.run(TELL)
    expect(opened.outputs(TELL)).to_contain_text("72")


def test_a_running_cell_does_not_hold_up_the_widget(opened: NotebookPage, go_on: Path) -> None:
    widget, page = Widget(opened, 1), opened.page
    opened.run(CHOOSE)
    widget.shows("dots_saveable")  # published from a cell, after which ipykernel would queue what the widget sends
    opened.start(RUNNING)
    widget.policy.select_option("nothing_saveable")
    widget.shows("nothing_saveable")
    state = "cell => window.jupyterapp.shell.currentWidget.content.widgets[cell].model.executionState"
    assert page.evaluate(state, RUNNING) == "running"
    go_on.touch()
    opened.wait_idle()


@pytest.fixture
def go_on(lab: Server) -> Iterator[Path]:
    """The file that ends the running cell, whatever becomes of the test."""
    file = lab.folder / "go-on"
    file.unlink(missing_ok=True)
    yield file
    file.touch()


def test_apply_binds_the_name(opened: NotebookPage) -> None:
    opened.run(COUNT)
    expect(opened.outputs(COUNT)).to_contain_text("9 saved")
    widget = Widget(opened, 1)
    widget.policy.select_option("nothing_saveable")
    widget.shows("nothing_saveable")
    widget.unfold()
    widget.root.get_by_role("button", name="Apply").click()
    expect(widget.status).to_contain_text("under nothing_saveable")
    opened.run(COUNT)
    expect(opened.outputs(COUNT)).to_contain_text("4 saved")  # the arguments


def test_one_of_the_two_outputs_is_seen(opened: NotebookPage) -> None:
    copy = opened.cell(1).locator(".remat-static")
    for _ in range(2):  # also of a cell that runs again
        expect(opened.cell(1).locator(".remat-widget")).to_have_count(1)
        expect(opened.cell(1).locator(".remat-widget")).to_be_visible()
        expect(copy).to_have_count(1)
        expect(copy).to_be_hidden()
        opened.run(1)
    opened.run(CLOSE)
    expect(opened.cell(1).locator(".remat-widget")).to_have_count(0)
    expect(copy).to_be_visible()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_it_is_accessible(several: Widget, theme: str) -> None:
    """By axe-core's rules and the contrast of each text, also in what is kept."""
    several.notebook.set_theme(f"JupyterLab {theme}")
    try:
        for name in ("Values", "Source", "Memory", "Choices"):
            several.tab(name).click()
            part, figures = TABS[name]
            expect(several.part(part).locator(figures).first).to_be_visible(timeout=60_000)
            assert violations(several.notebook.page, ".remat-widget") == []
            assert unreadable(several.root) == []
        copy = several.notebook.cell(SEVERAL).locator(".remat-static")
        copy.evaluate("root => { root.closest('.remat-replaced')?.classList.remove('remat-replaced') }")
        copy.evaluate("root => { for (const details of root.querySelectorAll('details')) details.open = true }")
        expect(copy).to_be_visible()
        assert unreadable(copy) == []
    finally:
        several.notebook.set_theme("JupyterLab Light")


def test_the_page_logs_no_error(loaded: NotebookPage) -> None:
    """In all of the above."""
    assert loaded.complaints() == []


# The last, since it closes the notebook.
def test_what_is_kept_is_read_without_a_kernel(opened: NotebookPage, lab: Server, browser: Browser) -> None:
    """In a page that has never shown a live widget, whose styles and scripts it could owe something."""
    opened.run(CHOOSE)
    Widget(opened, 1).keeps("dots_saveable")
    opened.save()
    opened.close()
    lab.shut_down_kernels()
    without = nbformat.read(lab.folder / "test_widget_in_lab.ipynb", as_version=4)
    without.metadata.clear()  # JupyterLab would choose another kernel of the same language
    without.metadata["kernelspec"] = {"name": "gone", "display_name": "Gone", "language": "gone"}
    nbformat.write(without, lab.folder / "gone.ipynb")
    with browser.new_context(viewport=VIEWPORT) as context:
        later = NotebookPage(lab, context.new_page())
        later.open("gone.ipynb", kernel=False)
        expect_report(later.page)
