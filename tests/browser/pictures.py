"""Make the pictures of README and docs/ from the real thing: ``python -m tests.browser.pictures [light] [dark]``.

They show the demo's step, before and after the edit that the widget offers. With the extra ``tpu``, whose compiler the
verdicts are of. It takes some minutes.
"""

from __future__ import annotations

import base64
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, FloatRect, Page, expect

from tests.browser.inspected import Widget, write_notebook
from tests.browser.lab import NotebookPage, Server, browse, serve

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "_static"

# The parts of the screen that docs/screen.md has numbers for, in its order.
NUMBERED = (
    ".remat-signature",
    ".remat-device",
    '[data-part="verdict"]',
    '[data-part="bar"]',
    '[data-part="takes"]',
    '[data-part="changes"]',
    ".remat-choosing",
    ".remat-tabs",
)
_NUMBER = """(root, selectors) => {
  root.style.cssText += "position:relative;padding-left:30px"
  selectors.forEach((selector, at) => {
    const of = root.querySelector(selector), mark = document.createElement("b")
    mark.textContent = at + 1
    mark.style.cssText = "position:absolute;width:22px;height:22px;border-radius:11px;background:#c2185b;color:#fff;" +
      "font:700 14px/22px sans-serif;text-align:center;z-index:9"
    const [outer, inner] = [root.getBoundingClientRect(), of.getBoundingClientRect()]
    mark.style.left = `${inner.left - outer.left - 26}px`
    mark.style.top = `${inner.top - outer.top + 2}px`
    root.append(mark)
  })
}"""


def first_step() -> list[str]:
    """The demo's first cells of code: its imports, and the step that does not fit."""
    cells = nbformat.read(ROOT / "demo.ipynb", as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"][:2]


def picture(page: Page, widget: Widget, name: str, last: str) -> None:
    """Keep what is on the screen from the widget's top to the end of a part."""
    page.mouse.move(0, 0)
    page.evaluate("() => document.activeElement?.blur()")
    widget.root.scroll_into_view_if_needed()
    page.wait_for_timeout(1000)  # for the last of the layout's transitions
    of, end = widget.root.bounding_box(), widget.root.locator(last).first.bounding_box()
    assert of is not None
    assert end is not None
    left, top = of["x"] - 4, of["y"] - 4
    height = end["y"] + end["height"] + 8 - top
    clip: FloatRect = {"x": left, "y": top, "width": of["width"] + 8, "height": height}
    page.screenshot(path=PICTURES / f"{name}.png", clip=clip)


def settle(widget: Widget) -> None:
    """Wait for the compiler's word, or for the line that says that it is not installed."""
    expect(widget.part("verdict")).to_contain_text(re.compile("compiled|pip install"), timeout=400_000)
    asking = re.compile("Still looking|Asking the compiler")
    expect(widget.part("changes")).not_to_contain_text(asking, timeout=400_000)


def take(theme: str, server: Server, browser: Browser) -> None:
    """Take all pictures in one theme."""
    write_notebook(server.folder / f"{theme}.ipynb", *first_step())
    context = browser.new_context(viewport={"width": 1280, "height": 1500}, device_scale_factor=1.5)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    notebook = NotebookPage(server, page)
    notebook.open(f"{theme}.ipynb")
    notebook.set_theme(f"JupyterLab {theme.title()}")
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    notebook.run_all()
    widget = Widget(notebook, 1)
    settle(widget)
    picture(page, widget, f"does-not-fit-{theme}", ".remat-two")

    row = widget.part("changes").locator("tr", has=page.get_by_role("button", name="Diff")).first
    row.get_by_role("button", name="Try").click()
    expect(widget.part("verdict")).not_to_contain_text("Does not fit")
    settle(widget)
    picture(page, widget, f"tried-{theme}", ".remat-two")

    row.get_by_role("button", name="Diff").click()
    expect(widget.part("diff").locator("ins").first).to_be_visible(timeout=60_000)
    picture(page, widget, f"diff-{theme}", '[data-part="diff"]')
    widget.part("diff").get_by_role("button", name="Copy").first.click()
    page.wait_for_timeout(500)
    edited = page.evaluate("() => navigator.clipboard.readText()")

    write_notebook(server.folder / f"{theme}-edited.ipynb", first_step()[0], edited)
    notebook.open(f"{theme}-edited.ipynb")
    notebook.run_all()
    widget = Widget(notebook, 1)
    settle(widget)
    picture(page, widget, f"fits-{theme}", ".remat-fitting")
    context.close()


def number(server: Server, browser: Browser) -> None:
    """Take the picture whose parts have numbers."""
    write_notebook(server.folder / "numbers.ipynb", *first_step())
    page = browser.new_page(viewport={"width": 1280, "height": 1500}, device_scale_factor=1.5)
    notebook = NotebookPage(server, page)
    notebook.open("numbers.ipynb")
    notebook.set_theme("JupyterLab Light")
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    notebook.run_all()
    widget = Widget(notebook, 1)
    settle(widget)
    widget.root.evaluate(_NUMBER, list(NUMBERED))
    picture(page, widget, "screen", ".remat-body table")


def before_and_after(browser: Browser) -> None:
    """Put the step that does not fit above the one that does, for the README."""
    page = browser.new_page(viewport={"width": 1108, "height": 100}, device_scale_factor=1.5)
    shown = [
        base64.b64encode((PICTURES / f"{name}-light.png").read_bytes()).decode() for name in ("does-not-fit", "fits")
    ]
    images = [f'<img style="width:1108px;display:block" src="data:image/png;base64,{one}">' for one in shown]
    between = "the same cell, after one click on Diff and one on Copy:"
    line = f'<p style="font:15px sans-serif;color:#555;margin:14px 4px 10px"><b>&darr;</b> {between}</p>'
    page.set_content(f'<body style="margin:0">{line.join(images)}')
    page.screenshot(path=ROOT / "screenshot.png", full_page=True)


def main(*themes: str) -> None:
    """Take the pictures in these themes, or in both."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "lab") as server, browse() as browser:
        for theme in themes or ("light", "dark"):
            take(theme, server, browser)
        number(server, browser)
        before_and_after(browser)


if __name__ == "__main__":
    main(*sys.argv[1:])
