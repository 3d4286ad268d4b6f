"""The widget in JupyterLab, used with the mouse, with the keyboard alone and from Python."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.inspected import LAYERS, LOAD, Widget, focus, write_notebook
from tests.browser.lab import NotebookPage, Server

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
CHOOSE, TELL, RUNNING, COUNT, CLOSE = range(2, 7)
MORE = ("w.policy = 'dots_saveable'", "w.report.saved_bytes", WAIT, COUNT_RESIDUALS, "w.close()")


@pytest.fixture(scope="module")
def loaded(page_of_module: NotebookPage, lab: Server) -> NotebookPage:
    write_notebook(lab.folder / "layers.ipynb", LOAD, LAYERS, *MORE)
    page_of_module.open("layers.ipynb")
    page_of_module.run(0)
    return page_of_module


@pytest.fixture
def opened(loaded: NotebookPage) -> NotebookPage:
    """The notebook with a widget that nobody has touched."""
    loaded.page.mouse.move(0, 0)
    loaded.run(1)
    assert loaded.errors() == []
    return loaded


def test_the_mouse_switches_policies(opened: NotebookPage) -> None:
    widget = Widget(opened, 1)
    widget.shows("as_written")
    expect(widget.part("residuals").locator("tbody tr")).not_to_have_count(0)
    for policy in ("dots_saveable", "nothing_saveable", "as_written"):
        widget.policy.select_option(policy)
        widget.shows(policy)


def test_the_tables_and_jaxprs_follow_the_policy(opened: NotebookPage) -> None:
    widget = Widget(opened, 1)
    widget.policy.select_option("dots_saveable")
    widget.shows("dots_saveable")
    expect(widget.part("code")).to_contain_text("jax.checkpoint_policies.dots_saveable")
    expect(widget.part("residuals")).to_contain_text("dot_general")
    widget.tab("Recomputed").click()
    expect(widget.part("residuals")).to_be_hidden()
    expect(widget.part("recomputed")).to_contain_text("repeated")
    expect(widget.part("recomputed")).to_contain_text("deferred")
    widget.tab("Jaxprs").click()
    panes = widget.part("jaxprs").locator("pre")
    expect(panes).to_have_count(2)
    expect(panes.first).to_contain_text("dot_general")
    expect(panes.last).to_contain_text("cos")


def test_the_keyboard_alone_reaches_and_turns_everything(opened: NotebookPage) -> None:
    widget, page = Widget(opened, 1), opened.page
    widget.shows("as_written")
    before = widget.policy.input_value()
    page.evaluate("() => document.querySelector('.remat-widget').scrollIntoView()")
    # From the cell's last focusable element before the widget, Tab leads into it.
    focus(widget.policy)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(widget.policy).to_be_focused()
    page.keyboard.press("d")  # the first that begins so; of several letters a late machine takes each for a first one
    widget.shows("dots_saveable")
    assert widget.policy.input_value() != before
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement?.getAttribute('role')") == "tab":
            break
    expect(widget.tab("Residuals")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(widget.tab("Recomputed")).to_be_focused()
    expect(widget.part("recomputed")).to_be_visible()
    passed = list[str]()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement?.dataset.action") == "arrange":
            page.keyboard.press("Enter")  # which leads on to what it has unfolded
        passed.append(
            page.evaluate(
                "() => document.activeElement?.closest('label')?.textContent.trim()"
                " || document.activeElement?.dataset.part || document.activeElement?.id || ''"
            )
        )
        if passed[-1] == "recomputed":
            break
    expect(widget.part("recomputed")).to_be_focused()
    assert "Source beside" in passed  # by way of the panel's tools
    assert any("find-recomputed" in name for name in passed)


@pytest.mark.parametrize("target", ["policy", "tab"])
def test_keys_typed_in_the_widget_do_not_delete_the_cell(opened: NotebookPage, target: str) -> None:
    widget = Widget(opened, 1)
    cells = opened.cell_count()
    focused = widget.policy if target == "policy" else widget.tab("Residuals")
    focus(focused)
    opened.page.keyboard.type("dd")
    opened.page.wait_for_timeout(300)
    assert opened.cell_count() == cells
    expect(widget.root).to_be_visible()


def test_python_does_what_the_dropdown_does(opened: NotebookPage) -> None:
    opened.run(CHOOSE)
    Widget(opened, 1).shows("dots_saveable")
    opened.run(TELL)
    expect(opened.outputs(TELL)).to_contain_text("72")


# anywidget gives a script two seconds to load, and lets nothing of the kernel through to one that was later.
LATE = """() => { const of = AbortSignal.timeout.bind(AbortSignal);
  AbortSignal.timeout = ms => of(ms === 2000 ? 0 : ms); return () => { AbortSignal.timeout = of } }"""


def test_a_page_that_loads_the_script_late_hears_the_kernel(loaded: NotebookPage) -> None:
    """Also what it said before."""
    put_back = loaded.page.evaluate_handle(LATE)
    try:
        loaded.run(1)
        widget = Widget(loaded, 1)
        widget.shows("as_written")
        expect(widget.root).to_have_attribute("aria-busy", "false")  # both halves have come
        loaded.run(CHOOSE)
        widget.shows("dots_saveable")
        widget.policy.select_option("nothing_saveable")
        widget.shows("nothing_saveable")
    finally:
        put_back.evaluate("put_back => put_back()")


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
    widget.root.get_by_role("button", name="Apply").click()
    expect(widget.status).to_contain_text("under nothing_saveable")
    opened.run(COUNT)
    expect(opened.outputs(COUNT)).to_contain_text("4 saved")  # the arguments


def test_running_the_cell_again_leaves_one_widget(opened: NotebookPage) -> None:
    opened.run(1)
    expect(opened.page.locator(".remat-widget")).to_have_count(1)
    Widget(opened, 1).shows("as_written")


def test_only_one_of_the_two_outputs_is_seen(opened: NotebookPage) -> None:
    expect(opened.cell(1).locator(".remat-static")).to_have_count(1)
    expect(opened.cell(1).locator(".remat-static")).to_be_hidden()
    expect(opened.cell(1).locator(".remat-widget")).to_be_visible()
    _styled(opened, False)
    Widget(opened, 1).policy.select_option("nothing_saveable")  # for which the hidden output is replaced
    opened.page.wait_for_function("() => document.querySelectorAll('.remat-static .remat-choice').length > 2")
    _styled(opened, False)
    opened.run(CLOSE)
    expect(opened.cell(1).locator(".remat-widget")).to_have_count(0)
    expect(opened.cell(1).locator(".remat-static")).to_be_visible()
    _styled(opened, True)


def _styled(opened: NotebookPage, applies: bool) -> None:
    """Whether the static output's style sheet is matched against the page."""
    opened.page.wait_for_function(
        "applies => [...document.querySelectorAll('.remat-static > style')].map(style => !style.disabled).join()"
        " === String(applies)",
        arg=applies,
    )


def test_the_page_logs_no_error(opened: NotebookPage) -> None:
    widget = Widget(opened, 1)
    for name in ("Recomputed", "Source", "Jaxprs", "Residuals"):
        widget.tab(name).click()
    assert opened.complaints() == []
