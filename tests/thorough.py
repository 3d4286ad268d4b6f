"""Tries by volume what the usual run tries once, or not at all: ``python -m tests.thorough [PART ...]``, or all parts.

What each part needs besides ``.[test]`` stands beside it; CONTRIBUTING says which part to run when what is changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Options for pytest, and variables of the environment. Markers are those of pyproject.toml.
PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "slow": (["-n", "2", "-m", "slow and not (models or compilers)"], {}),
    "chance": (["-n", "2", "--programs", "150", "-m", "not compilers", "tests/test_generated.py"], {}),
    "remat3": (["-n", "2", "-m", "not (slow or sets_remat3)"], {"JAX_REMAT3": "1"}),  # JAX 0.12
    "models": (["-n", "2", "-m", "models"], {"REMAT_MODELS": "1"}),  # the extra models
    "compilers": (["-m", "compilers"], {"REMAT_COMPILERS": "1"}),  # the extras tpu and cuda
    "browser": (["-m", "", "tests/browser"], {}),  # the extra dev, and Chromium
    "jax-0.11": (["-n", "2"], {}),  # in an environment of its own, which it makes
}


def python_with_jax(requirement: str, folder: Path) -> str:
    """A Python of this version with that JAX and what the usual tests need."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[test]", requirement], check=True)
    return python


def main(arguments: list[str] | None = None) -> int:
    """Run the parts one after another; the exit status says whether one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.thorough", description=__doc__)
    parser.add_argument("part", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args(arguments).part or [*PARTS]
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    came_to = list[str]()
    for part in parts:
        options, variables = PARTS[part]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            python = python_with_jax("jax==0.11.*", Path(folder)) if part == "jax-0.11" else sys.executable
            environment = {**os.environ, "CI": "true", **variables}
            status = subprocess.run(
                [python, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False
            ).returncode
        came_to.append(f"{part}: {'passed' if status == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s")
    sys.stdout.write("\n".join(came_to) + "\n")
    return int(any("FAILED" in line for line in came_to))


if __name__ == "__main__":
    sys.exit(main())
