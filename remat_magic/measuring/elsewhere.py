"""Compiling for a device that is not here: in a process of its own, and never twice.

Answers are cached as plain data in the user's cache folder, by what they follow from: the program, the device and its
compiler. ``REMAT_MAGIC_CACHE`` names another folder; empty, nothing is cached. The folder has at most ``MOST_CACHED``
bytes: the answers that were used longest ago go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from remat_magic import _jax
from remat_magic.devices import Device
from remat_magic.records import Effort, RematError

MOST_CACHED = 10**9  # bytes
_FORMAT = 7  # of what is cached
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_OWN_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # the user's, which go on to the compiler


def compile_for(
    device: Device,
    lowered: Any,
    *,
    effort: Effort = "full",
    seconds: float = 600.0,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """What XLA says of a program lowered for a device's platform, compiled for that device, which need not be here.

    It waits so many ``seconds`` for the compiler at most, 0 for what is cached only; where ``stop`` returns True the
    compiler is killed.

    Returns:
        What ``compiler_process.compile_in`` gives, of one device where several share the work, with ``devices``: how
        many do, and ``cached``: whether it had been compiled before. Then what is alive in its ``timeline`` has no
        lines where the program's source stands elsewhere by now.

    Raises:
        RematError: the compiler is not installed, took too long, was stopped or died; the program is for devices that
            are not offered together, for more or fewer than ``device`` is, or of ``jax.pmap``.
    """
    if device.target is None or not device.compiles_here:
        raise RematError(device.why_not or f"{device.name} is this machine: leave out device=.")
    text = lowered.as_text()
    partitions, replicas = (re.search(rf"mhlo\.num_{counted} = (\d+)", text) for counted in ("partitions", "replicas"))
    devices = int(partitions[1]) if partitions else 1
    if replicas and replicas[1] != "1":
        raise RematError("a program of jax.pmap is not compiled for devices that are not here: use jax.shard_map.")
    request = {
        "platform": device.target.platform,
        "topology": device.connected(devices),
        "facts": dict(device.target.facts),
        "devices": devices,
        "options": {},
    }
    cached = _cache_file(text, request, effort)
    program = _jax.bytecode(lowered)
    lines = hashlib.sha256(program).hexdigest()
    if cached is not None and cached.is_file():
        try:
            answer = json.loads(cached.read_text(encoding="utf-8"))
            with contextlib.suppress(OSError):  # of another user
                cached.touch()  # used now: others are older
            # The bytes are the same wherever the source stands; the lines of what is alive are not.
            timeline: dict[str, Any] | None = answer["timeline"]
            if timeline is not None and answer["lines"] != lines:
                without = {"source": None, "library": None}
                timeline = timeline | {"alive": [buffer | without for buffer in timeline["alive"]]}
            return answer | {"cached": True, "devices": devices, "timeline": timeline}
        except (ValueError, KeyError, TypeError):  # half-written by a machine that went down: compiled anew
            pass
    if seconds <= 0:
        raise RematError(f"It was not compiled for {device.name} before: give it time (seconds=).")
    answer = _compiled(program, request, device.name, effort, seconds, stop) | {"lines": lines}
    if cached is not None and ("memory" in answer or "needed" in answer):
        _write(cached, answer)
    return answer | {"cached": False, "devices": devices}


def _compiled(
    program: bytes, request: Mapping[str, Any], name: str, effort: Effort, seconds: float, stop: Callable[[], bool]
) -> dict[str, Any]:
    """Run the compiler's process to its end."""
    with tempfile.TemporaryDirectory(prefix="remat_magic-", ignore_cleanup_errors=True) as where:
        folder = Path(where)
        (folder / "program").write_bytes(program)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        # What this process imports, the other one finds, wherever it was installed.
        paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
        quick = _jax.QUICK if effort == "quick" else {}
        settings = {**_jax.ENVIRONMENT, "TPU_LOG_DIR": where, "PYTHONPATH": paths, **quick}
        command = [sys.executable, "-P", "-m", "remat_magic.measuring.compiler_process", where]
        with (
            (folder / "output.txt").open("wb") as output,
            subprocess.Popen(  # noqa: S603 - this Python, on a module of this package
                command,
                cwd=where,
                env={**os.environ, **settings},
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends: the other one ends then too
                stdout=output,
                stderr=output,
                start_new_session=True,  # an interrupt of the notebook is not the compiler's
            ) as process,
        ):
            try:
                _wait(process, name, seconds, stop)
            finally:
                process.kill()
        answer = folder / "answer.json"
        if process.returncode or not answer.is_file():
            raise RematError(_death(process.returncode, (folder / "output.txt").read_text("utf-8", "replace")))
        return json.loads(answer.read_text(encoding="utf-8"))


def _wait(process: subprocess.Popen[bytes], name: str, seconds: float, stop: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None:
        if stop():
            raise RematError(f"The compiler for {name} was stopped.")
        if time.monotonic() > end:
            raise RematError(
                f"XLA has not compiled it for {name} within {seconds:g} s: allow more (seconds=), or compile with less "
                "optimization (effort='quick')."
            )
        time.sleep(0.05)


def _death(code: int, output: str) -> str:
    """Why there is no answer, with the last line of the output of the process."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    lines = [line for line in output.splitlines() if line.strip()]
    last = f": {lines[-1].strip()[:400]}" if lines else ""
    memory = ", as a machine that runs out of memory does it" if code == -signal.SIGKILL else ""
    return f"The compiler's process {how}{memory}{last}."


# ------------------------------------------------------------------------------------------------------- the cache


def compiled_folder() -> Path | None:
    """Where answers are cached: in ``REMAT_MAGIC_CACHE``, else in the user's cache folder; None for nowhere."""
    own = os.environ.get("REMAT_MAGIC_CACHE")
    if own is not None:
        return Path(own, "compiled") if own else None
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "remat_magic" / "compiled"


def _cache_file(text: str, request: Mapping[str, Any], effort: Effort) -> Path | None:
    """The file of an answer, by all that it follows from; source positions are not in the text."""
    folder = compiled_folder()
    if folder is None:
        return None
    versions = {package: version(package) for package in _PACKAGES}
    own = {name: os.environ.get(name, "") for name in _OWN_SETTINGS}
    key = json.dumps([_FORMAT, text, request, effort, versions, own], sort_keys=True)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _write(path: Path, answer: Mapping[str, Any]) -> None:
    """Write an answer whole or not at all; a folder that cannot be written to is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(answer, file)
        os.replace(file.name, path)
        _bound(path.parent)
    except OSError:
        pass


def _bound(folder: Path) -> None:
    """Drop the answers that were used longest ago, until the others are of ``MOST_CACHED`` bytes at most."""
    files = sorted(((file.stat(), file) for file in folder.iterdir()), key=lambda found: -found[0].st_mtime)
    together = itertools.accumulate(stat.st_size for stat, _ in files)
    for (_, file), bytes_so_far in zip(files, together, strict=True):
        if bytes_so_far > MOST_CACHED:
            file.unlink(missing_ok=True)


def version(package: str) -> str:
    """The version of an installed package; empty where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
