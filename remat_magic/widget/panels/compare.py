"""The Compare tab: all policies side by side, estimated, and measured when the reader asks for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from remat_magic import devices
from remat_magic.api import Inputs, Policy
from remat_magic.records import Measurement
from remat_magic.views.compare import comparison_panel, gradients_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.controls import button, copies, select
from remat_magic.widget.panel import Panel, Request

if TYPE_CHECKING:
    from remat_magic.api import Measuring

__all__ = ["Compare"]


class Compare(Panel):
    """The comparison of policies, and the check of their gradients."""

    key, title, parts = "compare", "Compare", ("comparison", "gradients")
    asks = (("compare",), ("gradients",), ("measure", "cancel"))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str], Measurement] = {}
        self._job: Measuring | None = None
        self._series: object = None
        self._shown = Request({"type": "compare"})

    def tools(self) -> str:
        """What stays while the content changes: what times are estimated for, and measuring."""
        machines = [("", "this machine"), *((name, name) for name in devices.names() if name != devices.THIS_CPU)]
        given = [("given", "compile, run on your inputs")] if self._live.inputs is not None else []
        runs = [("", "compile only"), *given, ("random", "compile, run on random inputs")]
        return (
            f'<div class="remat-tools">{select("device", "Estimate for", machines)}{select("inputs", "Measure", runs)}'
            f"{button('measure', 'Measure')}{button('gradients', 'Check gradients')}"
            f'<button type="button" data-action="cancel" hidden {KEYS}>Cancel</button>'
            f'<progress data-part="progress" hidden aria-label="Measured" max="1" value="0"></progress>'
            f"{copies('comparison')}</div>"
        )

    def handle(self, request: Request) -> None:
        """Take a message of the browser; to cancel waits for no thread."""
        if request.kind != "cancel":
            super().handle(request)
        elif self._job is not None:
            self._job.cancel()

    def close(self) -> None:
        """Measure nothing more."""
        if self._job is not None:
            self._job.cancel()
        self._job = None
        super().close()

    def answer(self, request: Request) -> dict[str, Any] | None:
        """The table with its picture, or the check of gradients; what is measured is sent bit by bit."""
        match request.kind:
            case "compare":
                return {"html": self._compared(request)}
            case "measure":
                self._measure(request)
                return None
            case _:
                return {"html": self._gradients(request)}

    def _compared(self, request: Request) -> str:
        self._shown = request
        with self._lock:
            measurements = tuple(self._measured.values())
        comparison = self._live.trace.compare(
            at=request.at,
            device=request.text("device") or None,
            measurements=measurements,
            namespace=self._live.namespace,
            besides=self._besides(request),
        )
        device = comparison.device
        name, published = (device.name, device.source) if device else ("", "")
        return comparison_panel(
            comparison.rows, comparison.function, name, published, request.policy, comparison.notes, live=True
        )

    def _besides(self, request: Request) -> list[Policy]:
        """What the reader chose that the dropdown does not offer: plans, and a policy by names."""
        offered = {choice.key for choice in self._live.trace.choices()}
        with self._lock:
            measured = [policy for policy, at in self._measured if at == request.at]
        chosen = dict.fromkeys((*self._live.plans(request.at), request.policy, *measured))
        return [self._live.policy(key) for key in chosen if key and key not in offered]

    def _inputs(self, request: Request) -> Inputs | None:
        asked = request.text("inputs")
        return self._live.inputs if asked == "given" else "random" if asked else None

    def _measure(self, request: Request) -> None:
        if self._job is not None:
            self._job.cancel()
        live = self._live
        rows = live.trace.compare(at=request.at, namespace=live.namespace, besides=self._besides(request)).rows
        self._shown = request
        series = self._series = object()
        self._job = live.trace.measuring(
            [live.arguments(row.policy, row.at)[:2] for row in rows if not row.error],
            inputs=self._inputs(request),
            namespace=live.namespace,
            on_update=lambda job: self._on_update(job, series),
        )

    def _on_update(self, job: Measuring, series: object) -> None:
        """On the job's thread, whenever it has come further; of an older series nothing is told."""
        if self._live.closed or series is not self._series:
            return
        with self._lock:
            self._measured |= {(result.policy, result.at): result for result in job.results}
        now = job.progress
        self._send(
            {
                "type": "progress",
                "done": now.done,
                "total": now.total,
                "current": now.current,
                "finished": now.finished,
                "cancelled": now.cancelled,
            }
        )
        self.handle(Request({**self._shown.content, "type": "compare"}))

    def _gradients(self, request: Request) -> str:
        live = self._live
        inputs = self._inputs(request) or (live.inputs if live.inputs is not None else "random")
        policies = [choice.key for choice in live.trace.choices() if choice.key != "none"]
        differences = live.trace.check_gradients(policies, inputs=inputs, at=request.at, namespace=live.namespace)
        return gradients_html(differences)
