"""The Compare tab: all policies side by side, estimated, and measured when the reader asks for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from remat_magic.api import Inputs, Policy
from remat_magic.records import Comparison, Measurement, Places, Progress
from remat_magic.views.compare import comparison_panel, gradients_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import button, select, taught
from remat_magic.widget.panel import Panel, Request

if TYPE_CHECKING:
    from remat_magic.api import Measuring

_PAUSE = 0.02  # seconds between two choices that are tried, in which the reader's own get their turn
_SAID = {"measure": ("Measuring", "measured"), "places": ("Trying", "tried")}  # of what takes long
_FIRST = 3  # rows that make a picture


class Compare(Panel):
    """The comparison of policies, at one place and at all, and the check of their gradients."""

    key, title, parts = "compare", "Compare", ("places", "comparison", "gradients")
    asks = (("compare",), ("gradients",), ("measure", "cancel"), ("places",))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._job: Measuring | None = None
        self._measuring: Request | None = None  # the newest request to measure; None: it was cancelled
        self._search: object = None
        self._found: Places | None = None  # by the last search over places
        self._searched = ""  # the device that it was for
        self._shown = Request({"type": "compare"})

    def tools(self) -> str:
        """What stays while the content changes: what is estimated and compiled for, and measuring."""
        given = [("given", "compile, run on your inputs")] if self._live.inputs is not None else []
        runs = [("", "compile only"), *given, ("random", "compile, run on random inputs")]
        return (
            '<div class="remat-tools">'
            f"{button('places', 'Try all places', title='Where a checkpoint should go, and with which policy')}"
            f"{select('inputs', 'Measure', runs)}{button('measure', 'Measure')}"
            f"{button('gradients', 'Check gradients')}"
            f'<button type="button" data-action="cancel" hidden{taught("cancel")} {KEYS}>Cancel</button>'
            f'<progress data-part="progress" hidden aria-label="Measured" max="1" value="0"></progress></div>'
        )

    def handle(self, request: Request) -> None:
        """Take a message of the browser; to cancel waits for no thread."""
        if request.kind in ("compare", "measure"):
            self._shown = request
        # What is asked for anew is cancelled too.
        ended = request.text("job") if request.kind == "cancel" else request.kind
        if ended == "places" and not request.content.get("redraw"):
            self._search = None
        if ended == "measure":
            self._stop_measuring(request if request.kind == "measure" else None)
        if request.kind != "cancel":
            super().handle(request)

    def _stop_measuring(self, wished: Request | None) -> None:
        self._measuring = wished
        if self._job is not None:
            self._job.cancel()

    def close(self) -> None:
        """Measure nothing more."""
        self._stop_measuring(None)
        self._job = None
        self._search = self._found = None
        super().close()

    def answer(self, request: Request) -> dict[str, Any] | None:
        """The table with its picture, or the check of gradients; what is measured or tried is sent bit by bit."""
        match request.kind:
            case "compare":
                comparison = self._comparison(request, self._besides(request))
                return {"html": comparison_panel(comparison, request.policy, live=True, width=request.width)}
            case "measure":
                self._measure(request)
                return None
            case "places" if request.content.get("redraw"):
                return self._places_again(request)
            case "places":
                self._try_places(request)
                return None
            case _:
                return {"html": self._gradients(request)}

    def _comparison(self, request: Request, besides: Sequence[Policy]) -> Comparison:
        device = request.text("device")
        return self._live.trace.compare(
            at=request.at,
            device=request.device,
            measurements=self._results(device),
            namespace=self._live.namespace,
            besides=besides,
        )

    def _results(self, device: str) -> list[Measurement]:
        """What was measured on a device or compiled for it."""
        measured = self._live.measurements().items()
        return [result for (*_, measured_on), result in measured if measured_on == device]

    def _besides(self, request: Request) -> list[Policy]:
        """What the reader chose that the dropdown does not offer: plans, and a policy by names."""
        offered = {choice.key for choice in self._live.trace.choices()}
        measured = [policy for policy, at, _ in self._live.measurements() if at == request.at]
        chosen = dict.fromkeys((*self._live.plans(request.at), request.policy, *measured))
        return [self._live.policy(key) for key in chosen if key and key not in offered]

    def _inputs(self, request: Request) -> Inputs | None:
        which = request.text("inputs")
        return self._live.inputs if which == "given" else "random" if which else None

    def _measure(self, request: Request) -> None:
        """The policies at one place, and before them the places that could be on the front, if these were tried."""
        live, device = self._live, request.text("device")
        rows = live.trace.compare(at=request.at, namespace=live.namespace, besides=self._besides(request)).rows
        places = self._places(device)
        rows = [*(places.to_compile if places else ()), *(row for row in rows if not row.error)]
        choices = dict.fromkeys((row.policy, row.at) for row in rows)

        def tell(job: Measuring) -> None:
            if live.closed or self._measuring not in (request, None):  # None: it was cancelled, which is told
                return
            live.add_measured(device, job.results)
            self._send_progress(job.progress, "measure", device)
            self._show_measured(device)

        job = live.trace.measuring(
            [live.arguments(*choice)[:2] for choice in choices],
            inputs=self._inputs(request),
            namespace=live.namespace,
            on_update=tell,
            device=device or None,
        )
        self._job = job
        if self._measuring is not request:  # in between: whoever cancelled has not seen this job
            job.cancel()
        job.wait()

    def _show_measured(self, device: str) -> None:
        """What is shown for a device with what was measured by now."""
        self._show_places(device)
        if self._shown.text("device") == device:
            self.tell_again(Request({**self._shown.content, "type": "compare"}))

    def _places(self, device: str) -> Places | None:
        """What was found of places for a device, with what was compiled for it; None where these are of another one."""
        places = self._found
        if not device or places is None or places.device is None or places.device.name != device:
            return None
        return places.with_measurements(self._results(device))

    def _places_again(self, request: Request) -> dict[str, Any] | None:
        """What was found, drawn for another width."""
        device = request.text("device")
        places = self._places(device) or (self._found if self._searched == device else None)
        if places is None:
            return None
        return {"html": _picture(places, request)}

    def _show_places(self, device: str) -> None:
        places, shown = self._places(device), self._shown
        if places is not None:
            html = _picture(places, shown)
            self._send({"type": "places", "device": device, "html": html})

    def _send_progress(self, now: Progress, job: str, device: str) -> None:
        doing, did = _SAID[job]
        about = {"type": "progress", "job": job, "device": device, "doing": doing, "did": did}
        self._send({**about, **asdict(now), "finished": now.finished})

    def _try_places(self, request: Request) -> None:
        """Which place, and which policy there; what is known is shown as it grows, until another search is begun."""
        search = self._search = object()
        rows = _FIRST - 1
        device = request.text("device")
        for places in self._live.trace.placing(device=request.device, measurements=self._results(device)):
            if self._live.closed:
                return
            cancelled = search is not self._search
            now = replace(places.progress, cancelled=True) if cancelled else places.progress
            if len(places) > rows or now.finished:
                rows = len(places)
                self._live.offer(places.plans)
                html = _picture(places, request)
                self._found, self._searched = places, device
                self._send({**request.content, "html": html})
            self._send_progress(now, "places", device)
            if cancelled:
                return
            time.sleep(_PAUSE)

    def _gradients(self, request: Request) -> str:
        live = self._live
        inputs = self._inputs(request) or (live.inputs if live.inputs is not None else "random")
        policies = [choice.key for choice in live.trace.choices() if choice.key != "none"]
        differences = live.trace.check_gradients(policies, inputs=inputs, at=request.at, namespace=live.namespace)
        return gradients_html(differences)


def _picture(places: Places, request: Request) -> str:
    """Places as a request wants them drawn, with what it shows marked."""
    return comparison_panel(places, f"{request.policy} at {request.at}", live=True, width=request.width)
