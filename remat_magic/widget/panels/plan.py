"""The Plan tab: the frontier of budgets, plans for one of them, and what could be done otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_magic.records import FrontierPoint, RematError, WhatIf
from remat_magic.records import Plan as PlanRecord
from remat_magic.views import plan as views
from remat_magic.views.edit import edit_html
from remat_magic.views.tables import KEYS
from remat_magic.views.what_if import flip_key, what_if_html
from remat_magic.widget.controls import ID, button, select, taught
from remat_magic.widget.panel import Panel, Request

__all__ = ["Plan"]

_GONE = "That row is of a list that is no longer here: press What if again, and choose from the new list"


class Plan(Panel):
    """The choice of a budget; of single values and the edit of the source besides."""

    key, title, parts = "plan", "Plan", ("frontier", "planned", "alternatives")
    # Two threads, so that a slider that moves on does not wait for the frontier.
    asks = (("frontier",), ("plan", "flip", "what-if", "edit"))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._flips: dict[str, WhatIf] = {}
        self._points: dict[str, Sequence[FrontierPoint]] = {}  # by place

    def tools(self) -> str:
        """What a budget is set by, a slider over the frontier or a text, which the script moves to Compare."""
        kinds = [("peak", "estimated peak"), ("saved", "saved bytes")]
        return (
            '<div class="remat-tools"><span class="remat-slot" data-slot="budget"><span class="remat-field remat-wide"'
            f"{taught('budget')}>"
            f'<label for="{ID}budget">Budget</label> '
            f'<input type="range" id="{ID}budget" data-control="budget" min="0" max="0" step="0.05" value="0" disabled '
            f'aria-describedby="{ID}stop" {KEYS}></span>'
            f'<output class="remat-summary" id="{ID}stop" data-part="stop"></output>'
            f'<span class="remat-field"{taught("typed")}>'
            f'<label for="{ID}typed">or</label> <input type="search" id="{ID}typed" '
            f'data-control="typed" placeholder="2 GiB, 30%" autocomplete="off" {KEYS}></span>'
            f"{select('of', 'of', kinds)}"
            f"{button('plan', 'Plan')}</span>"
            f"{button('what-if', 'What if')}{button('edit', 'Edit my source')}</div>"
        )

    def close(self) -> None:
        """Let go of the plans of single values, and of the frontier."""
        super().close()
        self._flips, self._points = {}, {}

    def answer(self, request: Request) -> dict[str, Any] | None:
        """What is asked for, as HTML; the frontier with the stops of the slider."""
        trace = self._live.trace
        match request.kind:
            case "frontier":
                return self._frontier(request)
            case "plan":
                plan = self._plan(request)
                self._choose(plan, request.serial)
                return {"html": views.plan_html(plan), "key": plan.policy, **self._picture(request, plan)}
            case "flip":
                self._flip(request)
                return None
            case "what-if":
                policy, at, namespace = self._arguments(request)
                place = None if isinstance(policy, PlanRecord) else at
                device = request.text("device") or None
                rows = trace.what_if(policy, place, namespace=namespace, device=device)
                self._flips = {flip_key(row): row for row in rows}
                return {"html": what_if_html(rows)}
            case _:
                policy, at, _ = self._arguments(request)
                return {"html": edit_html(trace.edit(policy, None if isinstance(policy, PlanRecord) else at))}

    def _flip(self, request: Request) -> None:
        row = self._flips.get(request.text("flip"))
        if row is None:
            raise RematError(_GONE)
        self._choose(row.plan, request.serial)

    def _plan(self, request: Request) -> PlanRecord:
        budget = request.content.get("budget", "")
        return self._live.trace.plan(
            budget if isinstance(budget, int) else str(budget),
            request.at,
            of="peak" if request.text("of") == "peak" else "saved",
            device=request.text("device") or None,
        )

    def _frontier(self, request: Request) -> dict[str, Any]:
        trace, at = self._live.trace, request.at
        trace.report("none", at)  # at one end of the frontier, and what shares of the forward pass are of
        self._points[at] = trace.frontier(at=at)
        policy = self._live.arguments(request.policy, at)[0] if request.policy else None
        answer = self._picture(request, policy if isinstance(policy, PlanRecord) else None)
        return {"html": answer.pop("picture"), **answer}

    def _picture(self, request: Request, chosen: PlanRecord | None) -> dict[str, Any]:
        """The frontier with what is known by now, its stops, and where among them the chosen plan is."""
        trace, at, device = self._live.trace, request.at, request.text("device") or None
        points = self._points.get(at)
        if points is None:
            return {}
        traced = [choice.key for choice in trace.choices() if (it := trace.cached(choice.key, at)) and it.complete]
        reports = [trace.report(key, at, device=device) for key in traced]
        reports = [report for report in reports if not report.backward_error]
        forward = next((report.forward_flops for report in reports), None)
        svg = views.frontier_svg(points, reports, request.width, chosen=chosen)
        points = views.known_points(points, [*reports, *([chosen] if chosen else [])])
        extremes = [trace.report(policy, at, device=device) for policy in ("none", "nothing_saveable")]
        peaks = sorted(report.peak_bytes for report in (*reports, *extremes) if report.peak_bytes is not None)
        # From the least peak that is known to that without a checkpoint.
        ends = [peaks[0], extremes[0].peak_bytes] if peaks and extremes[0].peak_bytes is not None else None
        where: dict[str, Any] = {}
        if chosen is not None:
            where = {"text": views.chosen_text(chosen), "place": views.slider_place(points, chosen)}
            if chosen.of == "peak" and ends is not None and ends[0] < ends[1]:
                share = (chosen.budget_bytes - ends[0]) / (ends[1] - ends[0])
                where["peak_place"] = (len(points) - 1) * min(max(share, 0.0), 1.0)
        return {
            "picture": svg,
            "peaks": ends,
            **where,
            "stops": [
                {
                    "budget": point.budget_bytes,
                    "text": views.point_text(point, forward),
                    "beyond": views.beyond_text(point, above, forward),
                }
                for point, above in zip(points, (*points[1:], *points[-1:]), strict=True)
            ],
        }
