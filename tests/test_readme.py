"""What the README says is true: its code runs, its tables list what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in sys.stdin.read().split("\\0"):
    shell.run_cell(cell, store_history=True).raise_error()
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def table_keys(heading):
    section = README.split(f"\n### {heading}\n")[1].split("\n#")[0]
    return [row.split("` |")[0].removeprefix("| `").replace("\\|", "|") for row in section.splitlines() if "| `" in row]


def test_the_python_runs_as_cells_of_one_notebook(tmp_path):
    cells = blocks("python")
    assert len(cells) >= 3
    ran = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\0".join(cells),
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
        cwd=tmp_path,  # it writes files
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_commands_are_single_lines_that_need_no_preparation():
    demo, own, tests = blocks("sh")
    assert demo.startswith("python3 -m venv .venv && .venv/bin/pip install '.[lab]' && ")
    assert tests.startswith("python3 -m venv .venv && .venv/bin/pip install '.[test]' && ")
    assert [command.count("\n") for command in (demo, own, tests)] == [1, 1, 1]


def test_all_options_are_explained():
    from remat_magic.notebook.magic import RematMagics

    parser = RematMagics.remat.parser
    real = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    section = README.split("\n### Options\n")[1].split("\n### ")[0]
    explained = set(re.findall(r"(?<![\w-])--?[a-z]+", section))
    assert real == explained


@pytest.mark.parametrize("key", table_keys("Policies"))
def test_all_policy_keys_can_be_used(key):
    import jax

    import remat_magic as rm

    names = ("a", "b", "attn_q", "mlp0")
    mine = jax.checkpoint_policies.dots_saveable
    rm.policies.resolve(key, names=names, namespace={"my_policy": mine})


def test_the_picture_is_there():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert (Path(__file__).parent.parent / picture).is_file()
