"""Count what the tests try, and write it down: ``python -m tests.tried [--programs N]``.

Without an option the counts that the tests themselves hold are renewed in tests/TRIED.md. With ``--programs N`` that
many programs by chance are tried in each test of tests/test_generated.py, under this Python and JAX and under each
setting of jax_remat3 that it has; their row of the table is written anew, the rows of other versions stay.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER / "TRIED.md"
# What these programs have shown and nobody has mended yet.
OPEN: tuple[str, ...] = ()
_HEAD = "| JAX | jax_remat3 | Python | seed | tried | passed | discarded | failed |"


def _tree(name: str) -> ast.Module:
    return ast.parse((FOLDER / name).read_text(encoding="utf-8"))


def _tests(name: str) -> int:
    """Test functions of a file, each once however many cases it has."""
    return sum(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in ast.walk(_tree(name)))


def _decorated(name: str, decorator: str) -> int:
    functions = (node for node in ast.walk(_tree(name)) if isinstance(node, (ast.FunctionDef, ast.Call)))
    found = 0
    for node in functions:
        if isinstance(node, ast.FunctionDef):
            found += sum(ast.unparse(each).split("(")[0] == decorator for each in node.decorator_list)
        elif isinstance(node.func, ast.Call) and ast.unparse(node.func.func) == decorator:  # case(...)(function)
            found += 1
    return found


def _size(name: str, variable: str) -> int:
    """How many entries a table at the top of a file has."""
    for node in _tree(name).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == variable:
            value = node.value  # pyright: ignore[reportAttributeAccessIssue]
            return len(value.keys if isinstance(value, ast.Dict) else value.elts)
    raise LookupError(f"{name} has no {variable}")


def _libraries() -> list[str]:
    """The third-party libraries whose models are inspected, where they are installed."""
    found = re.findall(r"library\(\"([\w.]+)\"\)", (FOLDER / "test_models.py").read_text(encoding="utf-8"))
    return sorted(set(found))


def static() -> list[tuple[str, int, str]]:
    """What is counted by reading the tests: what, how many, where."""
    programs, policies = _decorated("programs.py", "program"), _size("test_parity.py", "POLICIES")
    operations = sum(_size("generated_operations.py", table) for table in ("UNARY", "BINARY", "SHAPED"))
    nesting = _size("generated.py", "_NESTING") + 2  # and branches and checkpoints
    return [
        ("programs written by hand", programs, "tests/programs.py"),
        ("of these under a policy, against JAX's own list", programs * policies, "tests/test_parity.py"),
        ("uses of jax.checkpoint", _decorated("test_jax_cases.py", "case"), "tests/test_jax_cases.py"),
        ("settings of JAX other than its defaults", _size("test_configurations.py", "SETTINGS"),
         "tests/test_configurations.py"),
        ("third-party libraries' models", len(_libraries()), "tests/test_models.py"),
        ("element-wise, reducing and reshaping operations that programs by chance have", operations,
         "tests/generated_operations.py"),
        ("ways to nest in them, to a depth of 4", nesting, "tests/generated.py"),
        ("policies in them", _size("generated.py", "POLICIES"), "tests/generated.py"),
        ("properties that each of them is held against", _tests("test_generated.py"), "tests/test_generated.py"),
        ("programs that were shown wrongly once", _tests("test_regressions.py"), "tests/test_regressions.py"),
        ("operations interrupted at moments all over them", _size("test_faults.py", "OPERATIONS") + 3,
         "tests/test_faults.py"),
        ("tests of what goes wrong meanwhile", _tests("test_faults.py"), "tests/test_faults.py"),
        ("attack strings, each wherever a string is shown", _size("test_security.py", "ATTACKS") + 1,
         "tests/test_security.py"),
    ]  # fmt: skip


def _rows() -> list[list[str]]:
    """The table of programs by chance as it stands."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    after = text.partition(_HEAD)[2].splitlines()[2:]
    rows = []
    for line in after:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def page(rows: list[list[str]]) -> str:
    """The whole page."""
    counts = "\n".join(f"| {what} | {number:,} | `{where}` |" for what, number, where in static())
    table = "\n".join(f"| {' | '.join(row)} |" for row in sorted(rows))
    return f"""# What was tried

Written by `python -m tests.tried`; the libraries are {", ".join(f"`{name}`" for name in _libraries())}.

## Counted in the tests

| what | how many | where |
|---|---:|---|
{counts}

## Programs by chance

Each is a function that nobody wrote, of other shapes, types, loops, branches, calls, rules and checkpoints, held
against one property of `tests/test_generated.py`, JAX's own list of residuals first of all. Discarded are those that
JAX itself cannot trace, or that have nothing of what the property is about. The usual run of the tests tries some
thirty, and `.ci/run` more than a thousand (`--hypothesis-profile=thorough`), always the same ones; those of this table
are others, tried with `python -m tests.tried --programs N`.

{_HEAD}
|---|---|---|---:|---:|---:|---:|---:|
{table}
{_open()}"""


def _open() -> str:
    if not OPEN:
        return ""
    return "\nNot counted there, and open:\n\n" + "".join(f"- {sentence}\n" for sentence in OPEN)


def tally(files: list[Path]) -> dict[tuple[str, str], collections.Counter[str]]:
    """What came of the programs that lines of tests/test_generated.py tell of, by JAX's version and jax_remat3."""
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            _, version, remat3, came_to = json.loads(line)
            found.setdefault((version, "on" if remat3 else "off"), collections.Counter())[came_to] += 1
    return found


_Tally = dict[tuple[str, str], "collections.Counter[str]"]


def written(rows: list[list[str]], found: _Tally, seed: str) -> list[list[str]]:
    """The rows with new ones in the place of those of the same versions."""
    python = ".".join(platform.python_version_tuple()[:2])
    kept = {tuple(row[:2]): row for row in rows}
    for (version, remat3), came_to in found.items():
        numbers = [came_to.total(), came_to["passed"], came_to["discarded"], came_to["failed"]]
        kept[version, remat3] = [version, remat3, python, seed, *(f"{number:,}" for number in numbers)]
    return list(kept.values())


def main(arguments: list[str] | None = None) -> int:
    """Try, count and write; returns the tests' exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tried", description=__doc__)
    parser.add_argument("--programs", type=int, default=0, help="how many programs by chance to try in each test")
    parser.add_argument("--seed", default="0", help="of the programs")
    parser.add_argument("--count", nargs="*", type=Path, default=[], help="files written before under REMAT_TALLY")
    options = parser.parse_args(arguments)
    rows, status = _rows(), 0
    if options.count:
        rows = written(rows, tally(options.count), options.seed)
    if options.programs:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tally"
            command = [sys.executable, "-m", "pytest", "-q", str(FOLDER / "test_generated.py")]
            command += [f"--programs={options.programs}", f"--hypothesis-seed={options.seed}"]
            status = subprocess.run(command, env={**os.environ, "REMAT_TALLY": str(file)}, check=False).returncode
            rows = written(rows, tally([file]), options.seed)
    PAGE.write_text(page(rows), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written (jax {importlib.metadata.version('jax')}).\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
