"""The Compare tab: all policies side by side, estimated, and measured when the reader asks for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from remat_magic import devices
from remat_magic.api import Inputs, Policy
from remat_magic.records import Comparison, Effort, Measurement, Places, Progress
from remat_magic.views.choices import figures
from remat_magic.views.compare import comparison_panel, gradients_html
from remat_magic.views.fits import fits_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import button, select, taught
from remat_magic.widget.panel import Panel, Request
from remat_magic.widget.rendered import glance

if TYPE_CHECKING:
    from remat_magic.api import Measuring

_PAUSE = 0.02  # seconds between two choices that are tried, in which the reader's own get their turn
_TELL = 0.1  # seconds between two answers that tell what is known so far
_SAID = {"measure": ("Measuring", "measured"), "places": ("Trying", "tried")}  # of what takes long
_FIRST = 3  # rows that make a picture


class Compare(Panel):
    """The comparison of policies, at one place and at all, and the check of their gradients."""

    key, title, parts = "compare", "Compare", ("places", "comparison", "gradients")
    asks = (("compare",), ("choices",), ("gradients",), ("measure", "cancel"), ("places",), ("fits",), ("peak",))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._job: Measuring | None = None
        self._fitting: Measuring | None = None
        self._wished: Request | None = None  # the newest request for what fits
        self._listed: Request | None = None  # and for what the policies do
        self._measuring: Request | None = None  # the newest request to measure; None: it was cancelled
        self._search: object = None
        self._found: Places | None = None  # by the last search over places
        self._searched = ""  # the device that it was for
        self._shown = Request({"type": "compare"})

    def tools(self) -> str:
        """What stays while the content changes: what is estimated and compiled for, and measuring."""
        machines = [("", "this machine"), *((name, name) for name in self._live.devices)]
        given = [("given", "compile, run on your inputs")] if self._live.inputs is not None else []
        runs = [("", "compile only"), *given, ("random", "compile, run on random inputs")]
        return (
            f'<div class="remat-tools"{" data-asked-for" * self._live.is_asked_for}>'
            f"{select('device', 'Device', machines, self._live.device)}"
            f"{button('places', 'Try all places', title='Where a checkpoint should go, and with which policy')}"
            f"{select('inputs', 'Measure', runs)}{button('measure', 'Measure')}"
            f"{button('gradients', 'Check gradients')}"
            f'<button type="button" data-action="cancel" hidden{taught("cancel")} {KEYS}>Cancel</button>'
            f'<progress data-part="progress" hidden aria-label="Measured" max="1" value="0"></progress></div>'
        )

    def handle(self, request: Request) -> None:
        """Take a message of the browser; to cancel waits for no thread."""
        if request.kind == "fits":
            self._give_up_fitting(request)
        if request.kind == "choices":
            self._listed = request
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
        self._give_up_fitting(None)
        super().close()

    def answer(self, request: Request) -> dict[str, Any] | None:
        """The table with its picture, or the check of gradients; what is measured or tried is sent bit by bit."""
        match request.kind:
            case "compare":
                comparison = self._comparison(request, self._besides(request))
                return {"html": comparison_panel(comparison, request.policy, live=True, width=request.width)}
            case "choices":
                return self._choices(request)
            case "measure":
                self._measure(request)
                return None
            case "places" if request.content.get("redraw"):
                return self._places_again(request)
            case "places":
                self._try_places(request)
                return None
            case "fits":
                return self._fits(request)
            case "peak":
                report = self._live.trace.report(*self._arguments(request), device=request.text("device"))
                return glance(report)
            case _:
                return {"html": self._gradients(request)}

    def _comparison(self, request: Request, besides: Sequence[Policy]) -> Comparison:
        device = request.text("device")
        return self._live.trace.compare(
            at=request.at,
            device=device or None,
            measurements=self._results(device),
            namespace=self._live.namespace,
            besides=besides,
        )

    def _results(self, device: str) -> list[Measurement]:
        """What was measured on a device or compiled for it."""
        measured = self._live.measurements().items()
        return [result for (*_, measured_on), result in measured if measured_on == device]

    def _choices(self, request: Request) -> dict[str, Any] | None:
        """What each policy of the dropdown does, as it is found out; then which do the same, and the front of all."""
        live = self._live
        requested = request.content.get("policies")
        keys = [key for key in requested if isinstance(key, str)] if isinstance(requested, list) else []
        rows = list[dict[str, Any]]()
        sent_at = time.monotonic()
        for key in keys:
            if live.closed or request is not self._listed:
                return None
            device = request.text("device") or None
            row = live.trace.compare([live.policy(key)], at=request.at, device=device, namespace=live.namespace).rows[0]
            # Of one alone nothing is known of the front.
            rows.append({**figures(row), "keys": [key], "front": False})
            if time.monotonic() - sent_at > _TELL:
                self._send({**request.content, "rows": [*rows], "done": False})
                time.sleep(_PAUSE)
                sent_at = time.monotonic()
        offered = {choice.key for choice in live.trace.choices()}
        besides = [live.policy(key) for key in keys if key not in offered]
        return {"rows": list(map(figures, self._comparison(request, besides).rows)), "done": True}

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

    def _give_up_fitting(self, wished: Request | None) -> None:
        """Another choice is shown: what the compiler would say of the last one nobody waits for."""
        self._wished = wished
        if self._fitting is not None:
            self._fitting.cancel()

    def _fits(self, request: Request) -> dict[str, Any] | None:
        """Whether the shown choice fits in the chosen device, by its compiler.

        For a TPU, where a full compilation takes minutes, it is compiled quickly first, unless the full answer is kept.
        """
        live, device = self._live, devices.get(request.text("device"))
        if not device.compiles_here:
            return {"html": fits_html(Measurement("", "", device=device.name, error=device.why_not), None)}
        policy, at, namespace = self._arguments(request)

        def compiled(effort: Effort, seconds: float = 600.0) -> Measurement | None:
            """None where nobody waits for it any more."""
            job = live.trace.measuring(
                [(policy, at)], device=device, namespace=namespace, effort=effort, seconds=seconds
            )
            self._fitting = job
            if self._wished is not request:  # in between: whoever wished has not seen this job
                job.cancel()
            job.wait()
            return job.results[0] if job.results else None

        full = None
        if device.target is not None and device.target.platform == "tpu":
            full = compiled("full", seconds=0)  # what is kept
            if full is not None and full.error:
                full = None
                quick = compiled("quick")
                if quick is not None and not quick.error:
                    html = fits_html(quick, devices.usable_bytes(device), unfinished=True)
                    self._send({**request.content, "html": html})
        full = full or compiled("full")
        if full is None:
            return None
        live.add_measured(device.name, [full])
        self._show_measured(device.name)
        return {"html": fits_html(full, devices.usable_bytes(device))}

    def _send_progress(self, now: Progress, job: str, device: str) -> None:
        doing, did = _SAID[job]
        about = {"type": "progress", "job": job, "device": device, "doing": doing, "did": did}
        self._send({**about, **asdict(now), "finished": now.finished})

    def _try_places(self, request: Request) -> None:
        """Which place, and which policy there; what is known is shown as it grows, until another search is begun."""
        search = self._search = object()
        rows = _FIRST - 1
        device = request.text("device")
        for places in self._live.trace.placing(device=device or None, measurements=self._results(device)):
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
