"""Runs demo.ipynb and the notebooks of docs/ and keeps what they show, in an environment with ``.[test,models]``.

``python tests/make_demo.py [NOTEBOOK ...]``. Text and code are written by hand, in the notebooks; this renews their
outputs. Kept are the static copies, with the figures of every policy that the widget would compute ahead in a notebook
that is left open. For training steps, and for the same report again, none is computed ahead. Not kept are the widgets
themselves: without their kernel they show nothing, and their state would double the file.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import site
import tempfile
from importlib.util import find_spec
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "demo.ipynb"
NOTEBOOKS = (DEMO, *sorted((ROOT / "docs").glob("*.ipynb")))

WIDGET = "application/vnd.jupyter.widget-view+json"

# Larger inspections look ahead only as far as is not felt, which differs from run to run.
_SMALL = 200

# What threads find out about a choice is kept too. They tell it as of the cell that began them, which nbclient drops
# when that cell has ended: it is told again by a cell that waits for them.
_SETTLE = """\
from remat_magic.widget import RematWidget
values = [*Out.values(), *globals().values()]
widgets = {id(value): value for value in values if isinstance(value, RematWidget)}.values()
for widget in widgets:
    widget._worker.join(600)
    live = widget._live
    if live.device and live.fit is None:  # a page asks for it; the compiler's word differs where it is not installed
        live.show_fit(live.trace.fit(live.device, compile=False))
    widget._rendered.tell_figures()
    widget._copy.publish(get_ipython(), widget._rendered, widget._good, again=True)
"""
_LOOK_AHEAD = f"""\
{_SETTLE}
from remat_magic.widget import idle
idle.UNIT = 3600
seen = set()
for widget in widgets:
    report = widget.report
    known = (report.signature, report.policy) in seen or any(note.kind == "gradient-of-step" for note in report.notes)
    seen.add((report.signature, report.policy))
    if len(report.forward.lines) < {_SMALL} and not known:
        widget._idle = None  # it does not make way for this cell, which waits for it
        while widget.prefetch():
            pass
"""


class _ThisPython(KernelSpecManager):
    """Knows one kernel: the Python that runs this, whatever kernels the machine has under the same name."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(resource_dir="", **get_kernel_dict())


def _environment() -> dict[str, str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    package = find_spec("remat_magic")
    # Not installed, the kernel must find the same package as this process.
    parent = str(Path(package.origin).parent.parent) if package and package.origin else str(DEMO.parent)
    if parent not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [parent, environment.get("PYTHONPATH")]))
    return environment


def lacks(notebook: NotebookNode) -> list[str]:
    """The libraries that a notebook imports and that are not installed."""
    text = "\n".join(cell.source for cell in notebook.cells)
    imported = re.findall(r"^(?:import|from) (equinox|flax|optax)\b", text, re.MULTILINE)
    return [name for name in imported if find_spec(name) is None]


def execute(notebook: NotebookNode, look_ahead: bool = False) -> NotebookNode:
    """A copy of a notebook, run from top to bottom in a new kernel and an empty folder.

    Args:
        notebook: what to run; its outputs are ignored.
        look_ahead: whether each small report is to hold every other policy.

    Raises:
        CellExecutionError: a cell failed.
    """
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    made.cells.append(nbformat.v4.new_code_cell(_LOOK_AHEAD if look_ahead else _SETTLE))
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            made,
            km=AsyncKernelManager(kernel_spec_manager=_ThisPython()),
            timeout=300,
            record_timing=False,
            coalesce_streams=True,
            store_widget_state=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=_environment())
    made.cells.pop()
    return made


def kept(notebook: NotebookNode, jax: str) -> NotebookNode:
    """What is worth keeping of an executed notebook: no dead widgets, nothing of this machine.

    Args:
        notebook: as ``execute`` returns it; it is changed.
        jax: the version that made its outputs.
    """
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "remat_magic": {"jax": jax}}
    notebook.metadata = NotebookNode(metadata)
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and keep what they show.")
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, metavar="NOTEBOOK")
    parser.add_argument(
        "--run-to", metavar="FOLDER", type=Path, help="leave the notebooks alone, and write all that a run shows"
    )
    arguments = parser.parse_args()
    read = {path: nbformat.read(path, as_version=4) for path in arguments.notebooks}
    if arguments.run_to:
        for path, notebook in read.items():
            if not lacks(notebook):
                nbformat.write(execute(notebook), arguments.run_to / path.name)
        return
    import jax

    if missing := {name for notebook in read.values() for name in lacks(notebook)}:
        parser.error(f"{', '.join(sorted(missing))} are not installed: pip install '.[models]'")
    for path, notebook in read.items():
        made = kept(execute(notebook, look_ahead=True), jax.__version__)
        nbformat.validate(made)
        nbformat.write(made, path)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, jax {jax.__version__}")


if __name__ == "__main__":
    main()
