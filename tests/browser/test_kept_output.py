"""What is left of an inspection without a kernel, without trust and without scripts."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Page, expect

from tests.browser.inspected import LAYERS, LOAD, Widget, focus, write_notebook
from tests.browser.lab import VIEWPORT, NotebookPage, Server

POLICY_CHANGE = "w.policy = 'dots_saveable'"


def expect_report(page: Page) -> None:
    """The static report, readable: the numbers, the table, and the policies that were computed."""
    report = page.locator(".remat-static").first
    expect(report).to_be_visible()
    expect(report).to_contain_text("layers(W1 f32[5,4]")
    expect(report).to_contain_text(re.compile(r"Saved \d+ [A-Z]\w+ \d{4}; run the cell for the live view\."))
    expect(report).to_contain_text("saved 72 B")
    expect(report.locator("table").first).to_contain_text("dot_general")
    folded = report.locator("details", has=page.locator("summary", has_text="as_written"))
    expect(folded).to_contain_text("saved 116 B")
    # What Jupyter says in place of a widget that it cannot show.
    expect(page.get_by_text(re.compile("Loading widget|model not found"))).to_be_hidden()


def expect_dropdown(page: Page) -> None:
    """Where scripts run, the policies that were computed are a dropdown, which works by keyboard."""
    report = page.locator(".remat-static").first
    policy = report.get_by_label("Policy", exact=True)
    expect(policy.locator("option:checked")).to_have_text("dots_saveable")
    expect(report.locator(".remat-total:visible", has_text="saved 72 B")).to_be_visible()
    focus(policy)
    policy.press("a")  # as_written
    expect(policy.locator("option:checked")).to_have_text("as_written")
    expect(report.locator(".remat-total:visible", has_text="saved 116 B")).to_be_visible()
    expect(report.locator(".remat-total:visible", has_text="saved 72 B")).to_have_count(0)
    expect(report.locator("td:visible", has_text="cos").first).to_be_visible()


@pytest.fixture(scope="module")
def kept(lab: Server, page_of_module: NotebookPage) -> Path:
    """A notebook that was run and saved in JupyterLab."""
    path = lab.folder / "kept.ipynb"
    write_notebook(path, LOAD, LAYERS, POLICY_CHANGE)
    page_of_module.open(path.name)
    page_of_module.run_all()
    assert page_of_module.errors() == []
    Widget(page_of_module, 1).keeps("dots_saveable")
    page_of_module.save()
    page_of_module.close()
    lab.shut_down_kernels()
    return path


@pytest.fixture(scope="module")
def later(kept: Path, lab: Server, browser: Browser) -> Iterator[NotebookPage]:
    """A page that has never shown a live widget, whose styles and scripts it could owe something."""
    with browser.new_context(viewport=VIEWPORT) as context:
        yield NotebookPage(lab, context.new_page())


def test_both_outputs_are_saved(kept: Path) -> None:
    outputs = nbformat.read(kept, as_version=4).cells[1].outputs
    kinds = [sorted(output["data"]) for output in outputs if "data" in output]
    assert ["text/html", "text/plain"] in kinds
    assert any("application/vnd.jupyter.widget-view+json" in kind for kind in kinds)


def test_reopened_with_a_new_kernel(kept: Path, later: NotebookPage) -> None:
    later.open(kept.name)
    expect_report(later.page)
    expect_dropdown(later.page)
    later.page.keyboard.type("dd")
    assert later.cell_count() == 3  # no key reached the notebook


def test_reopened_without_a_kernel(kept: Path, later: NotebookPage) -> None:
    without = nbformat.read(kept, as_version=4)
    without.metadata.clear()  # JupyterLab would choose another kernel of the same language
    without.metadata["kernelspec"] = {"name": "gone", "display_name": "Gone", "language": "gone"}
    nbformat.write(without, kept.with_name("gone.ipynb"))
    later.open("gone.ipynb", kernel=False)
    expect_report(later.page)


def test_untrusted(kept: Path, later: NotebookPage) -> None:
    foreign = nbformat.read(kept, as_version=4)
    foreign.metadata["author"] = "someone else"
    for cell in foreign.cells:
        cell.metadata.pop("trusted", None)
        for output in cell.get("outputs", []):  # what was never signed here
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] += "<script>document.title = 'run'</script><p>foreign</p>"
    nbformat.write(foreign, kept.with_name("foreign.ipynb"))
    later.open("foreign.ipynb")
    expect(later.page.get_by_text("foreign", exact=True).first).to_be_visible()
    assert later.page.title() != "run"
    expect_report(later.page)


def test_exported_to_html(kept: Path, browser: Browser, tmp_path: Path) -> None:
    exported, _ = HTMLExporter().from_filename(str(kept))
    (tmp_path / "kept.html").write_text(exported, encoding="utf-8")
    for scripts, expected in ((False, expect_report), (True, expect_dropdown)):
        with browser.new_context(java_script_enabled=scripts, offline=True) as context:
            page = context.new_page()
            page.goto((tmp_path / "kept.html").as_uri())
            expected(page)
