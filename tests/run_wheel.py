"""Tries a release: the sdist and the wheel hold their files, and the wheel alone runs a cell.

``.ci/run`` builds both and runs ``python -I tests/run_wheel.py DIST``, in an environment that holds nothing but the
wheel and what it requires.
"""

import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from IPython.core.interactiveshell import InteractiveShell

import remat_magic

TREE = Path(__file__).resolve().parents[1]
BESIDES = "LICENSE README.md CHANGELOG.md CONTRIBUTING.md pyproject.toml demo.ipynb screenshot.png"
CELL = """\
%%remat -p nothing_saveable -o widget
import jax, jax.numpy as jnp

def loss(W, x):
    return jnp.sum(jnp.sin(W @ x) ** 2)

loss(jax.ShapeDtypeStruct((4, 8), "float32"), jnp.ones(8));
"""
ARGUMENTS = [("argument", "W", "f32[4,8]"), ("argument", "x", "f32[8]")]


def files_in(folder: str, suffix: str = "") -> set[str]:
    """The files of the tree below a folder, as archives write them."""
    files = (TREE / folder).rglob(f"*{suffix}")
    return {file.relative_to(TREE).as_posix() for file in files if file.is_file() and "__pycache__" not in file.parts}


def check_files(dist: Path) -> None:
    """Hold both archives against the tree that they were made of."""
    (sdist_file,), (wheel_file,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist_file) as archive:
        sdist = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    with zipfile.ZipFile(wheel_file) as archive:
        wheel = set(archive.namelist())
    package, tests = files_in("remat_magic"), files_in("tests", ".py") | files_in("docs")
    assert not (package | tests | set(BESIDES.split())) - sdist
    assert not package - wheel
    for needed in ("/static/", ".css", ".js", "remat_magic/py.typed", "/LICENSE"):
        assert any(needed in file for file in wheel), needed
    assert not {file for file in wheel if file.startswith("tests/")}


def check_cell() -> None:
    """Run a cell with the installed package, as a notebook does."""
    assert TREE not in Path(remat_magic.__file__).parents, "this is the tree, not the wheel"
    assert version("remat_magic") == remat_magic.__version__
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "remat_magic")
    shell.run_cell(CELL, store_history=True).raise_error()
    widget = shell.user_ns["widget"]
    assert isinstance(widget, sys.modules["remat_magic.widget"].RematWidget)
    assert residuals(widget) == ARGUMENTS
    widget.policy = "none"
    # cos(W @ x) is for the derivative of sin, 2 * sin(W @ x) for that of the square
    assert residuals(widget) == [*ARGUMENTS, ("intermediate", "cos", "f32[4]"), ("intermediate", "mul", "f32[4]")]


def residuals(widget: "remat_magic.widget.RematWidget") -> list[tuple[str, str | None, str]]:
    """What is kept, in an order of our own."""
    return sorted(
        (residual.kind, residual.argument or residual.primitive, residual.type) for residual in widget.report.residuals
    )


if __name__ == "__main__":
    check_files(Path(sys.argv[1]))
    check_cell()
    print(f"remat_magic {remat_magic.__version__}: the wheel alone runs a cell")
