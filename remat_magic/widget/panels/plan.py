"""The Plan tab: plans within a budget, and what could be done otherwise."""

from __future__ import annotations

from typing import Any

from remat_magic.records import Plan as PlanRecord
from remat_magic.records import RematError, WhatIf
from remat_magic.views import plan as views
from remat_magic.views.edit import edit_html
from remat_magic.views.tables import KEYS
from remat_magic.views.what_if import flip_key, what_if_html
from remat_magic.widget.controls import ID, button, select, taught
from remat_magic.widget.panel import Panel, Request

_GONE = "That row is of a list that is no longer here: press What if again, and choose from the new list"


class Plan(Panel):
    """The choice of a budget; of single values and the edit of the source besides."""

    key, title, parts = "plan", "Plan", ("planned", "alternatives")
    asks = (("plan", "flip", "what-if", "edit"),)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._flips: dict[str, WhatIf] = {}

    def tools(self) -> str:
        """What a budget is set by, a slider over shares or a text, which the script moves to Compare."""
        kinds = [("peak", "estimated peak"), ("saved", "saved bytes")]
        return (
            '<div class="remat-tools"><span class="remat-slot" data-slot="budget"><span class="remat-field remat-wide"'
            f"{taught('budget')}>"
            f'<label for="{ID}budget">Budget</label> '
            f'<input type="range" id="{ID}budget" data-control="budget" min="0" max="100" value="50" '
            f'aria-describedby="{ID}stop" {KEYS}></span>'
            f'<output class="remat-summary" id="{ID}stop" data-part="stop">50%</output>'
            f'<span class="remat-field"{taught("typed")}>'
            f'<label for="{ID}typed">or</label> <input type="search" id="{ID}typed" '
            f'data-control="typed" placeholder="2 GiB, 30%" autocomplete="off" {KEYS}></span>'
            f"{select('of', 'of', kinds)}"
            f"{button('plan', 'Plan')}</span>"
            f"{button('what-if', 'What if')}{button('edit', 'Edit my source')}</div>"
        )

    def close(self) -> None:
        """Let go of the plans of single values."""
        super().close()
        self._flips = {}

    def answer(self, request: Request) -> dict[str, Any] | None:
        """What is asked for, as HTML."""
        trace = self._live.trace
        match request.kind:
            case "plan":
                plan = self._plan(request)
                self._choose(plan, request.serial)
                return {"html": views.plan_html(plan), "key": plan.policy}
            case "flip":
                self._flip(request)
                return None
            case "what-if":
                policy, at, namespace = self._arguments(request)
                place = None if isinstance(policy, PlanRecord) else at
                device = request.device
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
        trace, budget = self._live.trace, request.text("budget")
        kind = "peak" if request.text("of") == "peak" else "saved"
        device = request.device
        try:
            return trace.plan(budget, request.at, of=kind, device=device)
        except RematError:  # there may be one elsewhere
            return trace.plan(budget, of=kind, device=device)
