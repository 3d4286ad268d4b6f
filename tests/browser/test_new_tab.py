"""A new tab of the widget: a Python file, a script beside it, and its place in the list of panels."""

from playwright.sync_api import expect

from remat_magic.widget.panel import SCRIPTS
from tests.browser.inspected import LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, Server

PANEL = """\
from remat_magic.widget.panel import Panel


class Largest(Panel):
    key, title, asks = "largest", "Largest", (("largest",),)

    def tools(self):
        return '<div class="remat-tools"><button type="button" data-action="ask-largest">Ask</button></div>'

    def add(self, view, report):
        view["counts"]["largest"] = len(report.residuals)

    def answer(self, request):
        report = self._live.trace.report(*self._live.arguments(request.policy, request.at))
        return {"html": f"<p>{max(residual.nbytes for residual in report.residuals)} bytes</p>"}
"""

SCRIPT = """\
import { quantity } from "UNITS";

const keyOf = "a name that another module has";

export function panel(widget, key) {
  return {
    fill: () => widget.say(`${keyOf}, ${quantity(12_600_000, "bytes")}`),
    actions: { "ask-largest": () => widget.send({ type: key, policy: widget.shown.policy, at: widget.shown.at }) },
    messages: { largest: ({ html }) => widget.place(key, html) },
  };
}
"""

CELL = """\
import os, sys
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp
import remat_magic as rm
from remat_magic.widget import RematWidget
from remat_magic.widget.panels import PANELS
from largest import Largest
RematWidget(rm.trace(lambda x: jnp.sin(x).sum(), jax.ShapeDtypeStruct((512,), "float32")), panels=(*PANELS, Largest))
"""


def test_a_new_tab(notebook: NotebookPage, lab: Server) -> None:
    (lab.folder / "largest.py").write_text(PANEL)
    units = "./" + "../" * len(lab.folder.resolve().parts) + str(SCRIPTS / "units.js").lstrip("/")
    (lab.folder / "largest.js").write_text(SCRIPT.replace("UNITS", units))
    write_notebook(lab.folder / "tab.ipynb", LOAD, CELL)
    notebook.open("tab.ipynb")
    notebook.run_all()
    assert notebook.errors() == []
    widget = Widget(notebook, 1)
    widget.tab("Largest").click()
    expect(widget.status).to_have_text("a name that another module has, 12.6 MB")
    expect(widget.tab("Largest")).to_contain_text("1")
    widget.root.get_by_role("button", name="Ask", exact=True).click()
    expect(widget.part("largest")).to_have_text("2048 bytes")
    widget.tab("Residuals").click()
    expect(widget.part("residuals")).to_contain_text("2.05 kB")
