"""What has been rendered: each policy once, for the browser and for the output that is kept with the notebook."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from remat_magic import devices
from remat_magic.devices import Device
from remat_magic.records import Report
from remat_magic.views import html, values
from remat_magic.views.fit import answer_html, saves_html
from remat_magic.views.headline import line_html, notes_html
from remat_magic.views.tables import Row, printed
from remat_magic.views.text import IN_CELL, Answer
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import Panel

_Key = tuple[str, str]

# What a notebook keeps for each cell, as HTML and as text.
MOST_BYTES = 60_000


def today() -> date:
    """The date that a saved copy names, by the clock of this machine."""
    return date.today()


def _saved(device: str) -> str:
    day = today()
    on = f", with peaks as on {device}" if device else ""
    return f"Saved {day.day} {day:%B} {day.year}{on}; run the cell for the live view."


def glance(report: Report) -> dict[str, Any]:
    """What is seen at first of a report, by its parts."""
    line, rarer = line_html(report)
    return {
        "verdict": saves_html(report),
        "totals": line,
        "rarer": rarer,
        "wrong": notes_html(filter(None, [report.backward_error])),
    }


class Rendered:
    """The reports of one widget as HTML, to which its panels add. From any thread.

    ``title`` is a line for the output that is kept, of how the inspection came about; without ``live`` it is closed.
    """

    def __init__(self, title: str, panels: Sequence[Panel], live: LiveTrace | None = None) -> None:
        self._title, self._panels, self._live = title, panels, live
        self._lock = threading.Lock()
        self._views: dict[_Key, dict[str, Any]] = {}
        self._others: dict[tuple[str, str, str], Row] = {}  # rows of the kept table, by device, and as those

    def view(self, report: Report, meanings: Mapping[str, str], unpasted: str, planned: bool = False) -> dict[str, Any]:
        """A report's view, as ``scripts/shared.js`` describes it; ``meanings`` are one-line explanations by policy."""
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
                "parts": glance(report),
                "counts": {},
                "names": values.name_states(report),
            }
            for panel in self._panels:
                panel.add(view, report)
            with self._lock:
                self._views[key] = view
        return view

    def complete(self) -> dict[_Key, dict[str, Any]]:
        """The views of both halves, by policy and place."""
        with self._lock:
            views = list(self._views.items())
        return {key: view for key, view in views if view["complete"]}

    def tell_figures(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Find the figures of every report as on the chosen device, for the output that is kept; whether all are found.

        ``stop`` is called before each, which can take half a second.
        """
        device = self._device
        name = device.name if device else ""
        for policy, at in self.complete():
            if (name, policy, at) in self._others:
                continue
            if stop() or self._live is None:
                return False
            report = self._live.trace.report(*self._live.arguments(policy, at))
            row = html.others_row(self._on(report, device))
            with self._lock:
                self._others[name, policy, at] = row
        return True

    @property
    def _device(self) -> Device | None:
        return devices.get(self._live.like) if self._live and self._live.like else None

    def copy(self, report: Report, copy_id: str = "") -> dict[str, str]:
        """The output that needs no kernel: what a report saves, and the figures of the others; as a MIME bundle.

        With the peaks of the chosen device, as the widget shows them. ``copy_id`` is what the widget knows it by.
        """
        device = self._device
        on_device = self._on(report, device)
        with self._lock:
            own = (device.name if device else "", report.policy, report.at)
            others = [row for key, row in self._others.items() if key[0] == own[0] and key != own]
        fit = self._live.answer(report) if self._live and report.complete else None
        plain = printed(Answer(fit or on_device, self._title, IN_CELL), 100)
        page = html.copy_html(
            on_device,
            others,
            title=self._title,
            remark=_saved(self._live.device if self._live else ""),
            copy_id=copy_id,
            answer=answer_html(fit, self._live.live_in_xla(fit.as_written, fit.timeline)) if fit and self._live else "",
            step=self._live.trace.step_name if self._live else "",
            most=MOST_BYTES - len(plain.encode()),
        )
        return {"text/html": page, "text/plain": plain}

    def _on(self, report: Report, device: Device | None) -> Report:
        """A report as on a device, if its peak is another one there."""
        if self._live is None or self._live.closed or not report.complete or not (device and device.holds_otherwise):
            return report
        return self._live.trace.report(*self._live.arguments(report.policy, report.at), device=device)


class SavedCopy:
    """The output that is kept with the notebook, brought in step with what is shown where nobody waits for it.

    Each replacement is the whole output anew, whose styles a browser works out with those of the whole page. By its
    ``id`` it is replaced and hidden.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._is_published = self._is_behind = False
        self._lock = threading.Lock()

    def fall_behind(self) -> None:
        """Know that something else is shown. From any thread."""
        self._is_behind = True

    def publish(self, shell: Any, rendered: Rendered, report: Report, *, again: bool = False) -> None:
        """Put it into the running cell's output, or in the place of what was put there."""
        with self._lock:
            self._is_published, self._is_behind = True, False
            transient = {"display_id": self.id}
            shell.display_pub.publish(rendered.copy(report, self.id), transient=transient, update=again)

    def catch_up(self, shell: Any, rendered: Rendered, shown: Callable[[], Report], stop: Callable[[], bool]) -> bool:
        """Replace it, if it was published and something else is shown since; whether it is of what is shown then.

        What is not done when ``stop`` returns True is left to a later call.
        """
        if not self._is_behind or not self._is_published or shell is None:
            return True
        if not rendered.tell_figures(stop):
            return False
        self.publish(shell, rendered, shown(), again=True)
        return not self._is_behind  # or something else was shown meanwhile
