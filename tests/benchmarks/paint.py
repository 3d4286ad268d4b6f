"""How soon the jaxprs of a policy seen before are on the screen, in real JupyterLab, against drawing them whole.

    python -m tests.benchmarks.paint [--rounds N] [blocks ...]

For each number of transformer blocks, unrolled: from the choice in the dropdown to the first frame (totals and tables),
to the first with the programs, until all lines are in the page, and the longest frame while a pane is scrolled from end
to end. The naive way is what a view without pieces would do: all lines of both programs at once. Frames are the
browser's own (requestAnimationFrame).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.browser.inspected import LOAD, Widget, write_notebook
from tests.browser.lab import NotebookPage, browse, serve

ROOT = Path(__file__).parents[2]

CELL = """\
%%remat --policy dots_saveable
import sys
sys.path.insert(0, {root!r})
from tests.benchmarks.models import transformer
fun, args = transformer({blocks}, site={site})
fun(*args)
"""

# Everything within one evaluation, so that the protocol's own time is in none of it.
TOGGLE = """async ([root, policy]) => {
  const frame = () => new Promise((then) => requestAnimationFrame(then));
  const painted = async () => { await frame(); await new Promise((then) => setTimeout(then)); };
  const select = root.querySelector('[data-control="policy"]');
  const part = root.querySelector('[data-part="jaxprs"]');
  const chunks = () => part.querySelectorAll(".remat-chunk").length;
  const before = part.querySelector(".remat-panes");
  await painted();
  const start = performance.now();
  select.value = policy;
  select.dispatchEvent(new Event("change", { bubbles: true }));
  await painted();
  const first = performance.now() - start;
  const late = part.querySelector(".remat-panes") === before;
  while (part.querySelector(".remat-panes") === before) await frame();
  if (late) await painted();
  const programs = late ? performance.now() - start : first;
  let count = -1, same = 0, all = programs;
  while (same < 20) {
    await frame();
    const now = chunks();
    if (now === count) same++;
    else { same = 0; count = now; all = performance.now() - start; }
  }
  return { first, programs, all, lines: part.querySelectorAll(".remat-l").length };
}"""

SCROLL = """async ([root]) => {
  const frame = () => new Promise((then) => requestAnimationFrame(then));
  const pane = root.querySelector('[data-part="jaxprs"] pre');
  const steps = 120, frames = [];
  let last = await frame();
  for (let step = 0; step <= steps; step++) {
    pane.scrollTop = pane.scrollHeight * step / steps;
    const now = await frame();
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  return { middle: frames[frames.length >> 1], longest: frames[frames.length - 1] };
}"""

NAIVE = """async ([root]) => {
  const panes = [...root.querySelectorAll('[data-part="jaxprs"] pre')];
  const whole = panes.map((pane) => pane.innerHTML);
  for (const pane of panes) pane.innerHTML = "";
  const frame = () => new Promise((then) => requestAnimationFrame(then));
  await frame();
  const start = performance.now();
  panes.forEach((pane, index) => { pane.innerHTML = whole[index]; pane.style.contentVisibility = "visible"; });
  await frame();
  await new Promise((then) => setTimeout(then));
  return performance.now() - start;
}"""


def measure(page: Any, widget: Any, rounds: int) -> None:
    """Print the times of one widget."""
    root = widget.root.element_handle()
    widget.tab("Jaxprs").click()
    policies = ["nothing_saveable", "dots_saveable"]
    for policy in policies:  # drawn once by the kernel
        widget.policy.select_option(policy)
        widget.part("jaxprs").locator(".remat-l").nth(20).wait_for(timeout=300_000)
        page.wait_for_timeout(8000)
    toggles = [page.evaluate(TOGGLE, [root, policies[turn % 2]]) for turn in range(rounds)]
    scrolls = [page.evaluate(SCROLL, [root]) for _ in range(3)]
    naive = page.evaluate(NAIVE, [root])
    first, programs, whole = (median(toggle[key] for toggle in toggles) for key in ("first", "programs", "all"))
    print(
        f"  {max(toggle['lines'] for toggle in toggles):6,} lines: first paint {first:4.0f} ms, with programs "
        f"{programs:4.0f} ms, all lines {whole:5.0f} ms; "
        f"drawn whole {naive:5.0f} ms = {naive / programs:.1f}x the first with programs; "
        f"frame while scrolling {median(s['middle'] for s in scrolls):.0f} ms, "
        f"longest {min(s['longest'] for s in scrolls):.0f} ms",
        flush=True,
    )


def main() -> None:
    """Measure as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", type=int, default=[12, 96])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "lab") as server, browse() as browser:
        for blocks in options.blocks:
            for site in (False, True):
                print(f"{blocks} blocks, {'as site' if site else 'whole function'}", flush=True)
                name = f"paint-{blocks}-{site}.ipynb"
                write_notebook(server.folder / name, LOAD, CELL.format(root=str(ROOT), blocks=blocks, site=site))
                page = browser.new_page(viewport={"width": 1400, "height": 1000})
                notebook = NotebookPage(server, page)
                notebook.open(name)
                notebook.run_all(600)
                measure(page, Widget(notebook, 1), options.rounds)
                page.close()


if __name__ == "__main__":
    main()
