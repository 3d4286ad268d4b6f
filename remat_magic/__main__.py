"""``python -m remat_magic`` prints the environment: versions, what this JAX lacks, compilers; or it runs a script."""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from importlib import metadata

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat_magic import _jax, api, devices, units
from remat_magic.errors import RematError, one_line, printable
from remat_magic.measuring.elsewhere import MOST_CACHED, compiled_folder, version
from remat_magic.views.tables import printed
from remat_magic.views.text import IN_SCRIPT, Answer
from remat_magic.widget.live_trace import change


def environment() -> tuple[list[str], bool]:
    """The environment in lines of text, and whether all that is needed is there."""
    tested = "tested" if _jax.is_tested() else "not a line of jax that was tested"
    lines = [
        f"remat_magic {version('remat_magic') or 'as a folder, not installed'}",
        f"Python {platform.python_version()}",
        f"jax {jax.__version__}, jaxlib {version('jaxlib')} ({tested})",
        _devices(),
    ]
    failed = _self_check()
    try:
        lines.append(f"jax_remat3 is {'on' if _jax.remat3() else 'off'}")
    except RematError as error:
        lines.append(str(error))
    if failed:
        lines.append(f"does not work: {failed}")
    lacks = _jax.lacks()
    lines += [f"this jax has no {lack.name}: {lack.effect}" for lack in lacks]
    if not lacks and not failed:
        lines.append("nothing of this jax is missing")
    # What this package requires, without its extras.
    requires = (metadata.requires("remat_magic") or ()) if version("remat_magic") else ()
    needed = [re.match(r"[\w.-]*", text) for text in requires if "extra ==" not in text]
    missing = [match[0] for match in needed if match and not version(match[0])]
    lines += [f"missing: {', '.join(missing)}"] if missing else []
    lines += _compilers()
    return lines, not (missing or failed)


def _devices() -> str:
    """What JAX runs on, with its memory where JAX knows it."""
    try:
        kinds = Counter((device.device_kind, _jax.memory_limit(device)) for device in jax.devices())
    except RuntimeError as error:  # of a driver or a plugin
        return f"JAX finds no device: {one_line(str(error))}"
    found = [f"{count} {kind}{f' of {units.nbytes(size)}' if size else ''}" for (kind, size), count in kinds.items()]
    return f"devices: {', '.join(found)}"


def _compilers() -> list[str]:
    """Which devices that are not here can be compiled for, and what would install the others' compilers."""
    accelerators = [devices.get(name) for name in devices.names() if name != devices.THIS_CPU]
    ready = [device.name for device in accelerators if device.compiles_here]
    lines = [f"compiles for {', '.join(ready)}"] if ready else []
    several = [name for name in devices.meshes(8) if devices.get(name).compiles_here]
    lines += [f"and for several of each, connected: of eight, {', '.join(several)}"] if several else []
    for command in dict.fromkeys(device.install for device in accelerators if device.install):
        lacking = [device.name for device in accelerators if device.install == command]
        lines.append(f"to compile for {', '.join(lacking)}: {command}")
    folder = compiled_folder()
    cached = [file.stat().st_size for file in folder.glob("*.json")] if folder else []
    where = f"is kept in {folder} ({units.nbytes(sum(cached))} of at most {units.nbytes(MOST_CACHED)})"
    return [*lines, f"what was compiled for them {where if folder else 'is not kept'}"]


def _self_check() -> str:
    """Trace a small function and look at it; why that fails, or nothing."""

    def probe(x: jax.Array) -> jax.Array:
        return jnp.sum(checkpoint_name(jnp.sin(jax.checkpoint(jnp.sin)(x)), "probe"))

    try:
        inspected = api.trace(probe, jax.ShapeDtypeStruct((3,), "float32"))
        complete = inspected.report("nothing_saveable", "function").complete and inspected.names == ("probe",)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user must see
        return str(error) if isinstance(error, RematError) else f"{type(error).__name__}: {error}"
    return "" if complete else "a small function is not traced as it is on the versions that were tested"


def main(arguments: Sequence[str] = ()) -> int:
    """Run a script until its training step; without one print the environment, 0 if all that is needed is there."""
    options = parser().parse_args(arguments)
    if options.script is not None:
        return _run(options)
    lines, complete = environment()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if complete else 1


# ---------------------------------------------------------------------- a script, run until its training step is called


FITS, TOO_BIG, NO_STEP, FAILED = range(4)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m remat_magic",
        allow_abbrev=False,
        usage="%(prog)s [options] [script.py [arguments] | -m module [arguments]]",
        description="Runs a script until it calls its training step, which does not run, and says what that step keeps "
        "in memory. Without a script: the environment. The exit status is 0 where the step fits or no device is named, "
        "1 where it does not fit, 2 where no step came, 3 where the script failed.",
    )
    made.add_argument("--device", metavar="DEVICE", help='whether it fits there: "TPU v5e", "H100 SXM x8", "24 GiB"')
    made.add_argument("--html", metavar="FILE", help="write the report into this file, as HTML")
    made.add_argument("--step", metavar="NAME", help="the function that is the step, where others take gradients first")
    made.add_argument("-m", dest="module", action="store_true", help="the script is a module")
    made.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    made.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def _run(options: argparse.Namespace) -> int:
    """Run the script, print the answer, and give the exit status."""
    status = FAILED
    try:
        device = devices.named(options.device) if options.device else None
        caught = api.catching(options.step, also_threads=True)
        if not _ran(options, caught) and caught.stopped_at is None:
            return FAILED
        status = NO_STEP
        trace = caught.trace
        status = FAILED
        fit = trace.fit(device) if device else None
        report = trace.report() if fit is None or fit.report is None else fit.report
        said = f"{caught.head}\n{caught.note}\n"
        sys.stdout.write(printed(Answer(fit or report, said, IN_SCRIPT, diff=change(trace, fit) if fit else ""), 100))
        if options.html:
            report.save_html(options.html)
    except RematError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return status
    except Exception:  # noqa: BLE001 - whatever it is: Python's own status would say that the step does not fit
        traceback.print_exc()
        return FAILED
    return TOO_BIG if fit is not None and fit.fits is False else FITS


def _ran(options: argparse.Namespace, caught: api.Caught) -> bool:
    """Run the script as Python would; whether it came to its end, or to its step."""
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.module else os.path.dirname(os.path.abspath(options.script))
    try:
        with caught:
            if options.module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return not end.code
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is printed as Python would
        own = error.__traceback__
        while own is not None and (
            own.tb_frame.f_globals is globals() or own.tb_frame.f_globals.get("__name__") == "runpy"
        ):
            own = own.tb_next
        traceback.print_exception(error.with_traceback(own))
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
