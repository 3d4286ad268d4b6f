"""A compiler for devices that are not here which does what a test tells it."""

import sys
import textwrap
from pathlib import Path

import pytest

from remat_magic import devices

NAMES = ("temp", "argument", "output", "alias", "generated_code", "host_temp", "host_argument")
SIZES = f"answer(memory=dict.fromkeys({NAMES}, 8) | {{'alias': 3}}, seconds=1.5, rematerialized=2)"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("REMAT_MAGIC_CACHE", str(folder))
    return folder


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """A compiler that does what a test tells it, and says how often it was started."""
    program, started, python = tmp_path / "compiler", tmp_path / "started", sys.executable
    started.write_text("")

    def write(body: str) -> Path:
        code = f"""\
            #!{python}
            import json, os, pathlib, signal, sys, time
            folder = pathlib.Path(sys.argv[-1])
            request = json.loads((folder / "request.json").read_text())
            started = pathlib.Path({str(started)!r})
            with started.open("a") as file:
                file.write(f"{{os.getpid()}}\\n")
            def answer(**answer):
                (folder / "answer.json").write_text(json.dumps({{"timeline": None}} | answer))
            """
        program.write_text(textwrap.dedent(code) + textwrap.dedent(body))
        program.chmod(0o755)
        return started

    monkeypatch.setattr(devices.device, "_is_installed", lambda module: True)
    monkeypatch.setattr(sys, "executable", str(program))
    return write
