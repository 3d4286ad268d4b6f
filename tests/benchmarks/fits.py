"""From a program to a diff that fits, applied and compiled: ``python -m tests.benchmarks.fits [PROGRAM ...]``.

Each program is written to a file, executed and traced. The edit of ``fit.best`` is applied to that file's text, the
edited text executed, and its step compiled for the device: XLA's bytes must fit, and be those that were promised. This
needs the extras ``models``, ``tpu`` and ``cuda``; without an entry in the cache a row takes up to some minutes.
"""

from __future__ import annotations

import argparse
import linecache
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import remat_magic as rm
from remat_magic.records import Fit

_STEPS = Path(__file__).parent / "steps"
_GPT = (_STEPS / "gpt.py").read_text(encoding="utf-8")
_HEAD = "import jax\nimport jax.numpy as jnp\n\n\n"
PROGRAMS = {
    "gpt scanned": _GPT,
    "gpt unrolled": _GPT.replace("SCANNED = True", "SCANNED = False"),
    "linen": (_STEPS / "linen.py").read_text(encoding="utf-8"),
    "nnx": (_STEPS / "nnx.py").read_text(encoding="utf-8"),
    "equinox": (_STEPS / "eqx.py").read_text(encoding="utf-8"),
    "fits": _GPT.replace("50304, 20, 1024", "50304, 2, 1024"),
    "cannot": f"""{_HEAD}def loss_fn(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


@jax.jit
def train_step(w, x):
    return w - 1e-3 * jax.grad(loss_fn)(w, x)


args = jax.ShapeDtypeStruct((98304, 98304), jnp.float32), jax.ShapeDtypeStruct((64, 98304), jnp.float32)
""",
    "three sines": f"""{_HEAD}def train_step(w1, w2, w3, x):
    return jnp.sin(w3 @ jnp.sin(w2 @ jnp.sin(w1 @ x)))


args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 4), (6, 5), (7, 6), (4,))]
""",
}
"""The text of a file, or of a cell, that has ``train_step`` and its ``args``."""


def executed(text: str, path: Path) -> Any:
    """A module of a text, which is written to a file."""
    path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(text, path, "exec"), vars(module))
    return module


def row(name: str, device: str, folder: Path) -> tuple[list[str], str]:
    """The figures of one program on one device, and what went wrong; empty where nothing did."""

    def by_xla(module: Any) -> Any:
        return rm.trace(module.train_step, *module.args).measure(device=device)

    stem = f"{name} {device}".replace(" ", "_")
    path = folder / f"{stem}.py"
    module = executed(PROGRAMS[name], path)
    began = time.perf_counter()
    trace = rm.trace(module.train_step, *module.args)
    stages, estimates = list[Fit](), 0.0
    for fit in trace.fitting(device):
        stages = [fit]
        if not fit.progress.current.startswith("compiling") and not fit.compiled:
            estimates = time.perf_counter() - began
    (fit,) = stages
    seconds = time.perf_counter() - began
    before, best = by_xla(module), fit.best
    figures = [name, device, _gb(before.needed_bytes), _words(fit), "" if best is None else best.what]
    wrong = [f"as written XLA says fits={before.fits}, and the answer {fit.fits}"] * (before.fits is not fit.fits)
    needed = None
    if best is not None and best.which != fit.as_written.which:
        edit = trace.edit(best)
        after = by_xla(executed(edit.apply_text(str(path)), folder / f"{stem}_edited.py"))
        needed = after.needed_bytes
        wrong += ["the edit is not verified"] * (not edit.verified)
        wrong += [f"applied it does not fit: {after}"] * (after.fits is not True)
        wrong += [f"promised were {best.needed_bytes:,}, applied it is {needed}"] * (needed != best.needed_bytes)
    times = f"{best.extra_time:+.0%}" if best is not None and best.extra_time is not None else ""
    return [*figures, times, _gb(needed), f"{estimates:.1f}", f"{seconds:.0f}"], "; ".join(wrong)


def _words(fit: Fit) -> str:
    batch = "" if fit.largest_batch is None else f", batch of {fit.largest_batch}"
    return {True: "fits", False: "does not fit", None: "may fit"}[fit.fits] + batch


def _gb(number: int | None) -> str:
    return "" if number is None else f"{number / 1e9:.2f}"


def main() -> int:
    """Print a Markdown table; the exit status says whether something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fits", description=__doc__)
    parser.add_argument("program", nargs="*", default=[*PROGRAMS], help=", ".join(PROGRAMS))
    parser.add_argument("--device", action="append", help="a name of remat_magic.devices.names()")
    chosen, failed = parser.parse_args(), 0
    print("| program | device | GB by XLA | as written | best | time | GB applied | s estimates | s fit | wrong |")
    print("|---|---|---:|---|---|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.program:
            for device in chosen.device or ("TPU v5e", "A100 40GB SXM"):
                figures, wrong = row(name, device, Path(folder))
                print(f"| {' | '.join(figures)} | {wrong} |", flush=True)
                failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
