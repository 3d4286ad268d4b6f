"""The answer where no browser is: what a terminal prints of an inspection."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console, RenderableType

from remat_magic.api import Trace
from remat_magic.records import Fit, RematError, Report
from remat_magic.views.answer import offered
from remat_magic.views.tables import printed
from remat_magic.views.text import IN_CELL, Answer, is_large
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.wording import printable


def answer(live: LiveTrace, report: Report, title: str) -> Answer:
    """Whether a choice fits and what to change, looked for now; or what it saves.

    That is so where no device is chosen, and of a small function where nothing was said of one.
    """
    if not live.capacity or not (live.is_asked_for or is_large(report)):
        return Answer(report, title, IN_CELL)
    console = Console(force_jupyter=False)
    with console.status("…") if sys.stdout.isatty() else contextlib.nullcontext() as status:
        remarks = live.find_out(report, lambda what: status.update(printable(what)) if status and what else None)
    fit = live.answer(report)
    return Answer(fit or report, title, IN_CELL, remarks, change(live.trace, fit) if fit else "")


def change(trace: Trace, fit: Fit) -> str:
    """What the plan that is offered first does to the user's source; empty where it is no plan."""
    best = next((row.choice for row in offered(fit)), None)
    if best is None or best.plan is None:
        return ""
    try:
        edit = trace.edit(best.plan).best
    except RematError:
        return ""
    return edit.diff() if edit.verified else ""


def shown(part: RenderableType) -> None:
    """Print something as wide as the terminal is, without colours where none is."""
    if sys.stdout.isatty():
        Console(file=sys.stdout, force_jupyter=False).print(part)
    else:  # a notebook or a pipe, which tells no width
        sys.stdout.write(printed(part, 100))
