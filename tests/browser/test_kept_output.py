"""What is left of an inspection without trust and without scripts."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, expect

from tests.browser.inspected import LAYERS, LOAD, Widget, expect_report, write_notebook
from tests.browser.lab import VIEWPORT, NotebookPage, Server

pytestmark = pytest.mark.slow

POLICY_CHANGE = "w.policy = 'dots_saveable'"


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
    with browser.new_context(java_script_enabled=False, offline=True) as context:
        page = context.new_page()
        page.goto((tmp_path / "kept.html").as_uri())
        expect_report(page)
