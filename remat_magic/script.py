"""``python -m remat_magic script.py``: a script, run until its training step is called, and the answer about it."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback

from remat_magic import api, devices
from remat_magic.errors import RematError
from remat_magic.views.tables import printed
from remat_magic.views.text import IN_SCRIPT, Answer
from remat_magic.widget.live_trace import change
from remat_magic.wording import printable

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


def run(options: argparse.Namespace) -> int:
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
        while own is not None and own.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            own = own.tb_next
        traceback.print_exception(error.with_traceback(own))
        return False
    return True
