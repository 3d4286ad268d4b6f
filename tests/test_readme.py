"""What README, docs and CONTRIBUTING say is true: code runs, tables list what there is, what is linked is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remat_magic import devices, units
from remat_magic.__main__ import parser
from tests.benchmarks import estimates, programs, unseen

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES["README.md"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in sys.stdin.read().split("\\0"):
    shell.run_cell(cell, store_history=True).raise_error()
"""
PROSE = {name: re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE) for name, page in PAGES.items()}
ALL_PROSE = "\n".join(PROSE.values())


def inline_code():
    return re.findall(r"`([^`]+)`", ALL_PROSE)


def names_in_prose():
    dotted = r"(?<![\w.])(?:jax|remat_magic|rm|trace|widget|w)(?:\.[A-Za-z_]\w*)+"
    return sorted({name for code in inline_code() for name in re.findall(dotted, code)})


def blocks(language):
    """The code of all pages, the README's first."""
    return re.findall(rf"^```{language}\n(.*?)^```", "\n".join(PAGES.values()), re.DOTALL | re.MULTILINE)


def section(page, heading):
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n#")[0]


def table_keys(page, heading):
    return [
        row.split("` |")[0].removeprefix("| `").replace("\\|", "|")
        for row in section(page, heading).splitlines()
        if "| `" in row
    ]


def devices_table():
    """The accelerators as ``rm.devices`` has them, in three digits."""
    head = "| device | memory | bfloat16 FLOP/s | float32 FLOP/s | memory bandwidth | links | its compiler's extra |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---|"]
    for device in (devices.get(name) for name in devices.names() if name != devices.THIS_CPU):
        flops = (f"{round(device.matmul_flops[dtype] / 1e12):,} T" for dtype in ("bf16", "f32"))
        rates = (f"{units.nbytes(round(rate))}/s" for rate in (device.memory_bandwidth, device.interconnect))
        extra = f"`{device.extra}`" if device.extra else "none"
        lines.append(f"| {' | '.join((device.name, units.nbytes(device.memory_bytes), *flops, *rates, extra))} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_table_of_devices_is_what_there_is():
    """Another figure, or another device, is to be written there as it stands here."""
    assert (
        PAGES["accelerators.md"].split("<!-- devices: begin -->\n")[1].split("<!-- devices: end -->\n")[0]
        == devices_table()
    )


@pytest.mark.slow
def test_the_python_runs_as_cells_of_one_notebook(tmp_path):
    cells = blocks("python")
    assert len(cells) >= 3
    ran = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\0".join(cells),
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
        cwd=tmp_path,  # it writes files
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
    explained = set(re.findall(r"(?<![\w-])--?[a-z]+", section("training-step.md", "Options")))
    assert real == explained


def test_other_options_are_spelt_right():
    from remat_magic.notebook.magic import RematMagics

    quoted = {option for code in inline_code() for option in re.findall(r"(?<![\w-])--[a-z-]+", code)}
    actions = [*RematMagics.remat.parser._actions, *parser()._actions]
    assert quoted - {option for action in actions for option in action.option_strings} == {
        "--allow-root"  # JupyterLab's
    }


@pytest.mark.parametrize("name", names_in_prose())
def test_names_in_the_prose_exist(name):
    import jax

    import remat_magic as rm
    from remat_magic.widget import RematWidget

    root, *attributes = name.split(".")
    owner = {"jax": jax, "remat_magic": rm, "rm": rm, "trace": rm.Trace, "w": RematWidget, "widget": RematWidget}[root]
    for attribute in attributes:
        assert hasattr(owner, attribute)
        owner = getattr(owner, attribute)
        if isinstance(owner, property):
            break  # what it returns is no class to look further in


@pytest.mark.parametrize("label", sorted(set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", ALL_PROSE))))
def test_what_the_widget_says_is_quoted_to_the_letter(label):
    folders = [ROOT / "remat_magic" / folder for folder in ("views", "widget", "facts")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".js")]
    words = re.compile(rf"\b(?i:{label[0]}){re.escape(' '.join(label[1:].split()))}")
    assert any(words.search(file.read_text(encoding="utf-8")) for file in files)


@pytest.mark.parametrize(
    ("page", "link"), [(name, link) for name, prose in PROSE.items() for link in re.findall(r"\]\(([^)]+)\)", prose)]
)
def test_what_is_linked_is_there(page, link):
    path, _, heading = link.partition("#")
    folder = ROOT if page == "README.md" else ROOT / "docs"
    file = folder / (path or page)
    titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8") if path.endswith(".md") else "", re.MULTILINE)
    assert file.is_file()
    assert not heading or heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_page_is_linked_from_the_readme():
    assert set(re.findall(r"\(docs/([\w-]+\.md)\)", README)) == PAGES.keys() - {"README.md", "index.md"}


def test_the_page_of_the_api_has_all_public_names():
    import remat_magic as rm

    told = set(re.findall(r"::(?: remat_magic\.| )(\w+)$", PAGES["api.md"], re.MULTILINE))
    assert set(rm.__all__) - told <= set(vars(rm.records))


@pytest.mark.parametrize("message", table_keys("wrong.md", "By message"))
def test_what_goes_wrong_is_quoted_to_the_letter(message):
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / "remat_magic").rglob("*.py"))
    assert any(message in text for text in texts)


@pytest.mark.parametrize("key", table_keys("places-and-policies.md", "Policies"))
def test_all_policy_keys_can_be_used(key):
    import jax

    import remat_magic as rm

    names = ("a", "b", "attn_q", "mlp0")
    mine = jax.checkpoint_policies.dots_saveable
    assert rm.policies.resolve(key, names=names, namespace={"my_policy": mine}).meaning


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?<![\w./])(?!\.venv)[\w.]*\w/[\w./]*|\w+\.(?:py|md)\b", CONTRIBUTING)))
)
def test_files_and_folders_of_contributing_are_there(path):
    assert any((folder / path).exists() for folder in (ROOT, ROOT / "remat_magic"))


@pytest.mark.slow
def test_the_environment_is_told():
    ran = subprocess.run(
        [sys.executable, "-m", "remat_magic"], capture_output=True, text=True, timeout=400, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert "jax" in ran.stdout
    assert "devices: " in ran.stdout


def test_the_changelog_begins_with_what_is_unreleased_and_then_this_version():
    from remat_magic import __version__

    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_the_table_of_estimates_is_what_its_command_writes():
    own, other = next(iter(programs.TUNING)), next(iter(unseen.HELD_OUT))
    found = [(own, True, 150, 120, 180, 100), (own, True, 90, 70, 140, 100), (own, True, 102, 51, 204, 100)]
    found += [(other, False, 80, 80, 96, 100)]
    made = estimates.table({"A": [estimates.Estimated(*each) for each in found]})
    head, line, *rows = made.splitlines()
    assert rows == [
        "| A | of the rules | with a checkpoint | 3 | 10% | -10% | +50% | 67% | 2.0 | 4.0 |",
        "| A | others | without | 1 | 20% | -20% | -20% | 0% | 1.2 | 1.2 |",
    ]
    written = PAGES["estimates.md"].split(estimates.MARKS[0])[1].split(estimates.MARKS[1])[0]
    assert written.startswith(f"{head}\n{line}\n| ")
