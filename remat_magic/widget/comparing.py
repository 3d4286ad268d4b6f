"""The Compare, Memory and Advice panels: what is worked out, or measured, only when the reader asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_magic.records import Measurement
from remat_magic.views import advice, compare, timeline
from remat_magic.widget.panels import Panels

__all__ = ["Comparing"]


@dataclass(frozen=True, slots=True)
class _Request:
    """What a panel of the browser asks for; ``inputs`` is "", "given" or "random"."""

    kind: str
    policy: str = ""
    at: str = ""
    device: str = ""
    inputs: str = ""


class Comparing(Panels[_Request]):
    """Answers the panels' messages, on threads of its own, by HTML that goes through ``send``.

    Args:
        trace: the inspected function.
        send: sends a message to the browser, from any thread.
        arguments: what the trace takes for a shown policy: the policy, where, and the namespace.
        inputs: positional and keyword arguments to run on, or None.
        plans: the policies of the plans that were shown at a place.
    """

    def __init__(
        self,
        trace: Any,
        send: Callable[[dict[str, Any]], None],
        arguments: Callable[[str, str], tuple[Any, Any, Mapping[str, Any]]],
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
        plans: Callable[[str], list[str]],
    ) -> None:
        super().__init__(trace, send, arguments, 3)
        self._inputs, self._plans = inputs, plans
        self._measured: dict[tuple[str, str], Measurement] = {}
        self._job: Any = None
        self._series: object = None
        self._shown = _Request("compare")
        self._comparer, self._others, self._starter = self._workers

    def handle(self, content: Mapping[str, Any]) -> None:
        """Take a message of the browser; nothing is traced on the calling thread.

        Raises:
            ValueError: it is of no known type.
        """
        texts = {key: str(content.get(key, "")) for key in ("policy", "at", "device", "inputs")}
        request = _Request(str(content.get("type")), **texts)
        match request.kind:
            case "compare":
                self._comparer.post(request)
            case "memory" | "advice" | "gradients":
                self._others.post(request)
            case "measure":
                self._starter.post(request)
            case "cancel":
                if self._job is not None:
                    self._job.cancel()
            case other:
                raise ValueError(f"unknown message from the browser: {other!r}")

    def close(self) -> None:
        """Let go of the trace and the inputs, and measure nothing more."""
        if self._job is not None:
            self._job.cancel()
        self._job = self._inputs = None
        super().close()

    def _do(self, trace: Any, request: _Request) -> None:
        match request.kind:
            case "compare":
                self._compare(trace, request)
            case "measure":
                self._measure(trace, request)
            case "memory":
                found = trace.timeline(*self._arguments(request.policy, request.at))
                self._answer(request, html=timeline.timeline_html(found))
            case "advice":
                found = trace.advice(*self._arguments(request.policy, request.at))
                self._answer(request, html=advice.advice_html(found))
            case "gradients":
                self._check_gradients(trace, request)
            case other:
                raise AssertionError(other)

    def _about(self, request: _Request) -> dict[str, Any]:
        return {"type": request.kind, "policy": request.policy, "at": request.at, "device": request.device}

    def _compare(self, trace: Any, request: _Request) -> None:
        self._shown = request
        found = trace.compare(
            at=request.at,
            device=request.device or None,
            measurements=tuple(self._measured.values()),
            namespace=self._arguments("", request.at)[2],
            besides=self._beside(trace, request),
        )
        about = found.device
        device, source = (about.name, about.source) if about else ("", "")
        html = compare.comparison_panel(
            found.rows, found.function, device, source, request.policy, found.notes, live=True
        )
        self._answer(request, html=html)

    def _beside(self, trace: Any, request: _Request) -> list[Any]:
        """What the reader chose that the dropdown does not offer: plans, and a policy by names."""
        offered = {choice.key for choice in trace.choices()}
        measured = (policy for policy, at in self._measured if at == request.at)
        chosen = dict.fromkeys((*self._plans(request.at), request.policy, *measured))
        return [self._arguments(policy, request.at)[0] for policy in chosen if policy and policy not in offered]

    def _given(self, inputs: str) -> Any:
        return self._inputs if inputs == "given" else inputs or None

    def _measure(self, trace: Any, request: _Request) -> None:
        if self._job is not None:
            self._job.cancel()
        namespace = self._arguments("", request.at)[2]
        rows = trace.compare(at=request.at, namespace=namespace, besides=self._beside(trace, request)).rows
        choices = [self._arguments(row.policy, row.at)[:2] for row in rows if not row.error]
        self._shown = request
        series = self._series = object()
        self._job = trace.measuring(
            choices,
            inputs=self._given(request.inputs),
            namespace=namespace,
            on_update=lambda job: self._on_update(job, series),
        )

    def _on_update(self, job: Any, series: object) -> None:
        """On the job's thread, whenever it has come further; of an older series nothing is told."""
        if self._trace is None or series is not self._series:
            return
        for result in job.results:
            self._measured[result.policy, result.at] = result
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
        shown = self._shown
        self._comparer.post(_Request("compare", shown.policy, shown.at, shown.device))

    def _check_gradients(self, trace: Any, request: _Request) -> None:
        _, at, namespace = self._arguments("", request.at)
        inputs = self._given(request.inputs) or (self._inputs if self._inputs is not None else "random")
        policies = [choice.key for choice in trace.choices() if choice.key != "none"]
        found = trace.check_gradients(policies, inputs=inputs, at=at, namespace=namespace)
        self._answer(request, html=compare.gradients_html(found))
