"""The Plan panel: the frontier of budgets, and plans for one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remat_magic.records import Plan, WhatIf
from remat_magic.views import edit, what_if
from remat_magic.views import plan as views
from remat_magic.widget.panels import Panels

__all__ = ["Planning"]


@dataclass(frozen=True, slots=True)
class _Request:
    """What the panel asks for; ``budget`` is bytes, or a text that the reader typed, ``flip`` a row of the what-ifs.

    ``layers`` is how equal ones are decided: "together", "separately", or as the program shares them.
    """

    kind: str
    policy: str
    at: str
    budget: int | str = ""
    of: str = "saved"
    layers: str = ""
    flip: int = 0
    serial: int = 0

    @property
    def deciding(self) -> dict[str, bool]:
        """What plans and what-ifs are asked for about equal layers."""
        return {self.layers: True} if self.layers in ("together", "separately") else {}


class Planning(Panels[_Request]):
    """Answers the panel's messages, on threads of its own, by HTML that goes through ``send``.

    Args:
        trace: the inspected function.
        send: sends a message to the browser, from any thread.
        choose: shows a plan like any other policy: the plan, and the serial of the wish.
        arguments: what the trace takes for a shown policy: the policy, where, and the namespace.
    """

    def __init__(
        self,
        trace: Any,
        send: Callable[[dict[str, Any]], None],
        choose: Callable[[Plan, int], None],
        arguments: Callable[[str, str], tuple[Any, Any, Mapping[str, Any]]],
    ) -> None:
        # Two, so that a slider that moves on does not wait for the frontier.
        super().__init__(trace, send, arguments, 2)
        self._choose = choose
        self._flips: tuple[WhatIf, ...] = ()
        self._drawer, self._planner = self._workers

    def handle(self, content: Mapping[str, Any]) -> None:
        """Take a message of the browser; nothing is solved on the calling thread."""
        kind, budget = str(content["type"]), content.get("budget", "")
        request = _Request(
            kind,
            str(content.get("policy", "")),
            str(content["at"]),
            budget if isinstance(budget, int) else str(budget),
            str(content.get("of") or "saved"),
            str(content.get("layers", "")),
            int(content.get("flip", 0)),
            int(content.get("serial", 0)),
        )
        (self._drawer if kind == "frontier" else self._planner).post(request)

    def close(self) -> None:
        """Let go of the trace and the flips."""
        super().close()
        self._flips = ()

    def _do(self, trace: Any, request: _Request) -> None:
        match request.kind:
            case "frontier":
                self._frontier(trace, request)
            case "plan":
                self._plan(trace, request)
            case "flip":
                self._choose(self._flips[request.flip].plan, request.serial)
            case "what-if":
                policy, at, namespace = self._arguments(request.policy, request.at)
                place = None if isinstance(policy, Plan) else at
                self._flips = trace.what_if(policy, place, namespace=namespace, **request.deciding)
                self._answer(request, html=what_if.what_if_html(self._flips))
            case "loops":
                self._answer(request, html=what_if.loops_html(trace.loops()))
            case "edit":
                policy, at, _ = self._arguments(request.policy, request.at)
                found = trace.edit(policy, None if isinstance(policy, Plan) else at)
                self._answer(request, html=edit.edit_html(found))
            case other:
                raise AssertionError(other)

    def _about(self, request: _Request) -> dict[str, Any]:
        return {"type": request.kind, "at": request.at, "layers": request.layers, "serial": request.serial}

    def _frontier(self, trace: Any, request: _Request) -> None:
        trace.report("none", request.at)  # at one end of the frontier, and what shares of the forward pass are of
        points = trace.frontier(at=request.at, **request.deciding)
        known = [trace.cached(choice.key, request.at) for choice in trace.choices()]
        complete = [report for report in known if report is not None and report.complete and not report.backward_error]
        forward = next((report.forward_flops for report in complete), None)
        self._answer(
            request,
            html=views.frontier_svg(points, complete, together=request.layers == "together"),
            stops=[
                {
                    "budget": point.budget_bytes,
                    "text": views.point_text(point, forward),
                    "beyond": views.beyond_text(point, above, forward),
                }
                for point, above in zip(points, (*points[1:], *points[-1:]), strict=True)
            ],
        )

    def _plan(self, trace: Any, request: _Request) -> None:
        plan = trace.plan(request.budget, request.at, of=request.of, **request.deciding)
        self._choose(plan, request.serial)
        self._answer(request, html=views.plan_html(plan))
