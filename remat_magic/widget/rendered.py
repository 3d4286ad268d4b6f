"""What has been rendered: each policy once, for the browser and for the output that is kept with the notebook."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from remat_magic import devices
from remat_magic.devices import Device
from remat_magic.records import Note, Report
from remat_magic.views import html, rows, text
from remat_magic.views.headline import notes_html, totals_html
from remat_magic.views.peak_bar import peak_bar_html
from remat_magic.widget.live_trace import LiveTrace
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


def _saved(device: str) -> str:
    day = today()
    on = f", with peaks as on {device}" if device else ""
    return f"Saved {day.day} {_MONTHS[day.month - 1]} {day.year}{on}; run the cell for the live view."


def _memory(device: Device | None) -> tuple[str, int] | None:
    usable = devices.usable_bytes(device) if device else None
    return (device.name, usable) if device and usable else None


class Rendered:
    """The reports of one widget as HTML. From any thread.

    Args:
        title: a line for the kept output, of how the inspection came about.
        panels: what adds to a report's view.
        live: the inspected function, with the chosen device; None where it is let go of.
    """

    def __init__(self, title: str, panels: Sequence[Panel], live: LiveTrace | None = None) -> None:
        self._title = title
        self._panels = panels
        self._live = live
        self._lock = threading.Lock()
        self._views: dict[_Key, dict[str, Any]] = {}
        self._reports: dict[_Key, Report] = {}  # of both halves
        self._folded: dict[tuple[str, str, str], html.Folded] = {}  # by device, and as those
        self._chosen: tuple[Report | None, str, str, str] = (None, "", "", "")

    def view(
        self,
        report: Report,
        meanings: Mapping[str, str],
        unpasted: str,
        planned: bool = False,
        for_now: tuple[Note, ...] = (),
    ) -> dict[str, Any]:
        """A report's view, as the script takes it.

        Args:
            report: the report.
            meanings: one-line explanations by policy.
            unpasted: what to say where there is no code to paste.
            planned: whether it is of a plan.
            for_now: what is said of a moment, and not kept with the notebook.
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
                    "totals": totals_html(report),
                    "peak": peak_bar_html(report),
                    "notes": notes_html(replace(report, notes=(*report.notes, *for_now)), live=True),
                },
                "counts": {},
                "names": rows.name_states(report),
            }
            for panel in self._panels:
                panel.add(view, report)
            with self._lock:
                self._views[key] = view
                if report.complete:
                    self._reports[key] = report
                    self._folded = {of: folded for of, folded in self._folded.items() if of[1:] != key}
        return view

    def complete(self) -> dict[_Key, dict[str, Any]]:
        """The views of both halves, by policy and place."""
        with self._lock:
            views = list(self._views.items())
        return {key: view for key, view in views if view["complete"]}

    def fold(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Fold up every report for the output that is kept, as on the chosen device, where that is not done yet.

        Args:
            stop: asked before each, of which the report as on a device can take half a second.

        Returns:
            Whether all are.
        """
        device = self._device
        name = device.name if device else ""
        while not stop():
            with self._lock:
                waiting = ((key, report) for key, report in self._reports.items() if (name, *key) not in self._folded)
                key, report = next(waiting, (None, None))
            if key is None or report is None:
                return True
            folded = html.folded(self._on(report, device), _memory(device))
            with self._lock:
                if self._reports.get(key) is report:
                    self._folded[name, *key] = folded
        return False

    @property
    def _device(self) -> Device | None:
        return devices.get(self._live.device) if self._live and self._live.device else None

    def kept(self, report: Report, twin: str = "") -> dict[str, str]:
        """The output that needs no kernel: a report in full, every other one folded up; as a MIME bundle.

        With the peaks of the chosen device, as the widget shows them. ``twin`` is what the widget knows it by.
        """
        self.fold()
        device = self._device
        name, memory = device.name if device else "", _memory(device)
        rendered, on, chosen, plain = self._chosen
        if rendered is not report or on != name:
            on_device = self._on(report, device)
            on_device = on_device if on_device is report else on_device.remarked  # as the widget shows it
            title = " ".join(filter(None, (self._title, f"Peaks are as on {name}." if name else "")))
            chosen = html.unfolded(on_device, of_memory=memory)
            plain = text.plain(on_device, title=title, lay_out=False)
            self._chosen = (report, name, chosen, plain)
        with self._lock:
            every = {key: self._folded[name, *key] for key in self._reports if (name, *key) in self._folded}
        own = every.pop((report.policy, report.at), None)
        others = every.values()
        return {"text/html": html.static(chosen, others, self._title, own, _saved(name), twin), "text/plain": plain}

    def _on(self, report: Report, device: Device | None) -> Report:
        """A report as on a device, if its peak is another one there."""
        if self._live is None or self._live.closed or not report.complete or not (device and device.holds_otherwise):
            return report
        on_device = self._live.trace.report(*self._live.arguments(report.policy, report.at), device=device)
        return on_device.remarked if any(note.kind == "peak-no-lower" for note in report.notes) else on_device


# Each replacement is the whole output anew, whose styles a browser works out with those of the whole page: fifty
# widgets that replaced theirs for every policy looked at ahead held JupyterLab 4.6 up for half a minute, where cells
# that are scrolled away are drawn as well.
_EVERY = 1.0  # seconds


class Kept:
    """The output that is kept with the notebook, kept in step with what is rendered.

    Args:
        rendered: what it is made of.

    Attributes:
        id: what it is known by, to be replaced and to be hidden.
    """

    def __init__(self, rendered: Rendered) -> None:
        self._rendered = rendered
        self.id = uuid.uuid4().hex
        self._is_published = False
        self._behind = False
        self._updated = 0.0
        self._lock = threading.Lock()  # so that what was asked for last is what is shown last

    def follow(self, rendered: Rendered) -> None:
        """Be made of something else from here on."""
        self._rendered = rendered

    def publish(self, shell: Any, report: Report) -> None:
        """Put it into the running cell's output."""
        self._is_published, self._updated = True, time.monotonic()
        shell.display_pub.publish(self._rendered.kept(report, self.id), transient={"display_id": self.id})

    def update(self, shell: Any, shown: Callable[[], Report]) -> None:
        """Replace it there, if it was published; from any thread.

        Args:
            shell: an IPython ``InteractiveShell``, or None.
            shown: tells what is shown in full.
        """
        self._rendered.fold()  # not under the lock, for which another thread may wait
        with self._lock:
            self._behind, self._updated = False, time.monotonic()
            if self._is_published and shell is not None:
                transient = {"display_id": self.id}
                shell.display_pub.publish(self._rendered.kept(shown(), self.id), transient=transient, update=True)

    def catch_up(
        self, shell: Any, shown: Callable[[], Report], *, grown: bool, more: bool, stop: Callable[[], bool]
    ) -> bool:
        """Replace it there once what is rendered ahead has come to rest, and meanwhile now and then.

        Args:
            shell: an IPython ``InteractiveShell``.
            shown: tells what is shown in full.
            grown: whether something was rendered since the last call.
            more: whether more may come.
            stop: asked now and then: what is not done then is left to a later call.

        Returns:
            Whether it is in step with what is rendered.
        """
        self._behind |= grown
        if self._behind and not (more and time.monotonic() - self._updated < _EVERY) and self._rendered.fold(stop):
            self.update(shell, shown)
        return not self._behind
