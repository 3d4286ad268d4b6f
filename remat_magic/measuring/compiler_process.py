"""``python -m remat_magic.measuring.compiler_process FOLDER``: compile FOLDER/program for a device that is not here.

FOLDER/request.json says for which. The answer is FOLDER/answer.json, plain data: XLA's bytes, or why there are none.
A process of its own: XLA's compilers read their settings before JAX is imported, and one that is given up is killed.
It ends when its standard input does, which is when the process that started it has ended, however that was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from remat_magic import _jax
from remat_magic.measuring.xla_memory import dump_options, read_dump, sizes_of

_TOO_BIG = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_in(folder: Path) -> dict[str, Any]:
    """Compile what stands in a folder.

    Returns:
        ``memory``: XLA's bytes by the names of ``Compiled.memory_analysis()``; ``seconds`` of compiling; ``flops`` and
        ``bytes_accessed`` as XLA counts them, with the bodies of loops as often as they run, None where unknown;
        ``rematerialized``: how many instructions XLA computes again by itself. Where it failed, ``error`` is XLA's
        text, with ``needed`` and ``available`` bytes where the program is too big, as XLA rounds them. ``timeline`` is
        the memory over time as plain data, None where XLA did not tell; a program that is too big has one, too.
    """
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    program = (folder / "program").read_bytes()
    dump = folder / "dump"
    options = {**request["options"], **dump_options(dump)}
    began = time.perf_counter()
    try:
        memory, modules = _jax.compile_program(
            program, request["platform"], request["topology"], request["facts"], request["devices"], options
        )
    except Exception as error:  # noqa: BLE001 - whatever XLA says is the answer
        text = str(error)
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"error": text, "seconds": seconds, "timeline": _timeline(dump)}
        if sizes := _TOO_BIG.search(text):
            answer["needed"] = round(float(sizes[1]) * _UNITS[sizes[2]])
            answer["available"] = round(float(sizes[3]) * _UNITS[sizes[4]])
        return answer
    seconds = time.perf_counter() - began
    return {
        "memory": sizes_of(memory),
        "seconds": seconds,
        **_jax.xla_counts(modules)._asdict(),
        "rematerialized": _jax.rematerialized(modules),
        "timeline": _timeline(dump),
    }


def _timeline(dump: Path) -> dict[str, Any] | None:
    """What XLA wrote of its schedule; whatever another XLA writes otherwise is no reason to have no bytes."""
    try:
        memory = read_dump(dump)
    except (ArithmeticError, LookupError, ValueError):
        return None
    return None if memory is None else memory.to_dict()


def end_with_the_parent(folder: Path) -> None:
    """From now on end this process, and remove its folder, when its parent ends: nobody reads the answer then."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: Python aborts where a thread still reads that when the answer is written
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    given = Path(sys.argv[1])
    end_with_the_parent(given)
    (given / "answer.json").write_text(json.dumps(compile_in(given)), encoding="utf-8")
