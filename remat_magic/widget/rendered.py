"""What has been rendered: each policy once, for the browser and for the output that is kept with the notebook."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from remat_magic.records import Report
from remat_magic.views import html, rows, text
from remat_magic.views.peak_bar import peak_bar_html
from remat_magic.widget.panel import Panel

__all__ = ["Kept", "Rendered"]

_Key = tuple[str, str]

_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def today() -> date:
    """The day on which something is kept, by the clock of this machine."""
    return date.today()


def _saved() -> str:
    day = today()
    return f"Saved {day.day} {_MONTHS[day.month - 1]} {day.year}; run the cell for the live view."


class Rendered:
    """The reports of one widget as HTML. From any thread.

    Args:
        title: a line for the kept output, of how the inspection came about.
        panels: what adds to a report's view.
    """

    def __init__(self, title: str, panels: Sequence[Panel]) -> None:
        self._title = title
        self._panels = panels
        self._lock = threading.Lock()
        self._views: dict[_Key, dict[str, Any]] = {}
        self._folded: dict[_Key, html.Folded] = {}
        self._chosen: tuple[Report | None, str, str] = (None, "", "")

    def view(self, report: Report, meanings: Mapping[str, str], unpasted: str, planned: bool = False) -> dict[str, Any]:
        """A report's view, as the script takes it.

        Args:
            report: the report.
            meanings: one-line explanations by policy.
            unpasted: what to say where there is no code to paste.
            planned: whether it is of a plan.
        """
        key = (report.policy, report.at)
        view = self._views.get(key)
        if view is None or view["complete"] != report.complete or view["noted"] < len(report.notes):
            view = {
                "policy": report.policy,
                "label": report.label,
                "at": report.at,
                "complete": report.complete,
                "noted": len(report.notes),
                "meaning": meanings.get(report.policy, ""),
                "code": report.code,
                "unpasted": unpasted,
                "planned": planned,
                "parts": {
                    "totals": html.totals_html(report),
                    "peak": peak_bar_html(report),
                    "notes": html.notes_html(report),
                },
                "counts": {},
                "names": rows.name_states(report),
            }
            for panel in self._panels:
                panel.add(view, report)
            folded = {key: html.folded(report)} if report.complete else {}
            with self._lock:
                self._views[key] = view
                self._folded |= folded
        return view

    def complete(self) -> dict[_Key, dict[str, Any]]:
        """The views of both halves, by policy and place."""
        with self._lock:
            views = list(self._views.items())
        return {key: view for key, view in views if view["complete"]}

    def kept(self, report: Report) -> dict[str, str]:
        """The output that needs no kernel: a report in full, every other one folded up; as a MIME bundle."""
        rendered, chosen, plain = self._chosen
        if rendered is not report:
            chosen, plain = html.unfolded(report), text.plain(report, title=self._title, lay_out=False)
            self._chosen = (report, chosen, plain)
        with self._lock:
            own = self._folded.get((report.policy, report.at))
            others = [folded for folded in self._folded.values() if folded is not own]
        return {"text/html": html.static(chosen, others, self._title, own, _saved()), "text/plain": plain}


# Each replacement is the whole output anew, whose styles a browser works out with those of the whole page: fifty
# widgets that replaced theirs for every policy looked at ahead held JupyterLab 4.6 up for half a minute, where cells
# that are scrolled away are drawn as well.
_EVERY = 1.0  # seconds


class Kept:
    """The output that is kept with the notebook, kept in step with what is rendered.

    Args:
        rendered: what it is made of.
    """

    def __init__(self, rendered: Rendered) -> None:
        self._rendered = rendered
        self._display_id = ""
        self._behind = False
        self._updated = 0.0
        self._lock = threading.Lock()  # so that what was asked for last is what is shown last

    def follow(self, rendered: Rendered) -> None:
        """Be made of something else from here on."""
        self._rendered = rendered

    def publish(self, shell: Any, report: Report) -> None:
        """Put it into the running cell's output."""
        self._display_id, self._updated = uuid.uuid4().hex, time.monotonic()
        shell.display_pub.publish(self._rendered.kept(report), transient={"display_id": self._display_id})

    def update(self, shell: Any, shown: Callable[[], Report]) -> None:
        """Replace it there, if it was published; from any thread.

        Args:
            shell: an IPython ``InteractiveShell``, or None.
            shown: tells what is shown in full.
        """
        with self._lock:
            self._behind, self._updated = False, time.monotonic()
            if self._display_id and shell is not None:
                transient = {"display_id": self._display_id}
                shell.display_pub.publish(self._rendered.kept(shown()), transient=transient, update=True)

    def catch_up(self, shell: Any, shown: Callable[[], Report], *, grown: bool, more: bool) -> None:
        """Replace it there once what is rendered ahead has come to rest, and meanwhile now and then.

        Args:
            shell: an IPython ``InteractiveShell``.
            shown: tells what is shown in full.
            grown: whether something was rendered since the last call.
            more: whether more may come.
        """
        self._behind |= grown
        if self._behind and not (more and time.monotonic() - self._updated < _EVERY):
            self.update(shell, shown)
