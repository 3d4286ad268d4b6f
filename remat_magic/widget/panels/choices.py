"""The Choices tab: all that was looked at, plans for other memory, and the edit of what is chosen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from remat_magic.records import Fit, FitChoice, Plan, RematError, WhatIf
from remat_magic.units import nbytes
from remat_magic.views.choices import of_rows, tried_html
from remat_magic.views.edit import edit_html
from remat_magic.views.plans import flip_key, what_if_html
from remat_magic.widget.panel import Panel, Request

_GONE = "That row is of a list that is no longer here: unfold the list again, and choose from the new one"
_TELL = 0.5  # seconds between two answers that tell what is known so far


class Choices(Panel):
    """What needs how much and takes how much longer, sorted by what fits where the line is."""

    key, title, parts = "choices", "Choices", ("tried", "edit", "what-if")
    asks = (("tried",), ("plan", "flip"), ("edit",), ("what-if",))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: Request | None = None  # the newest that shows the choices
        self._told = 0.0
        self._plans: list[tuple[str, FitChoice]] = []  # for budgets, each with the device that it is for
        self._flips: dict[str, WhatIf] = {}
        self._live.on_fit.append(self._grown)

    def close(self) -> None:
        """Let go of plans."""
        super().close()
        self._flips, self._plans = {}, []

    def handle(self, request: Request) -> None:
        """Take a message of the browser."""
        if request.kind == "tried":
            self._asked = request
        super().handle(request)

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """What is asked for, as HTML."""
        match request.kind:
            case "tried":
                return self._tried(request)
            case "plan":
                return self._plan(request)
            case "flip":
                row = self._flips.get(request.text("flip"))
                if row is None:
                    raise RematError(_GONE)
                self._choose(row.plan, request.serial)
                return None
            case "edit":
                return {"html": self._edit(request)}
            case _:
                policy, at, namespace = self._arguments(request)
                place = None if isinstance(policy, Plan) else at
                rows = self._live.trace.what_if(policy, place, namespace=namespace, device=request.device)
                self._flips = {flip_key(row): row for row in rows}
                return {"html": what_if_html(rows)}

    def _tried(self, request: Request) -> dict[str, Any]:
        """What is known by now of the chosen device; without one, what JAX's policies do at the shown place."""
        live = self._live
        if not live.device:
            return {"html": tried_html(of_rows(live.trace.compare(at=request.at, namespace=live.namespace).rows))}
        fit = live.fit
        if fit is None:
            return {"html": '<p class="remat-empty">Looking for what fits…</p>', "count": None}
        known = {(choice.key, choice.at) for choice in fit.tried}
        plans = [live.told(choice) for of, choice in self._plans if of == live.device]
        choices = [*fit.tried, *(plan for plan in plans if (plan.key, plan.at) not in known)]
        return {"html": tried_html(choices, fit), "count": len(choices)}

    def _grown(self, fit: Fit) -> None:
        """Tell what is known by now; on the thread that looks for it."""
        now = time.monotonic()
        if self._asked is not None and (fit.progress.finished or now - self._told > _TELL):
            self._told = now
            self.tell_again(self._asked)

    def _plan(self, request: Request) -> dict[str, Any]:
        """One plan for a budget, which is a choice like any other from then on."""
        live, budget = self._live, int(request.content["budget"])
        plan = live.trace.plan(peak=budget, device=live.like)
        choice = live.trace.fit_choice(plan, plan.at, live.device)
        live.offer([choice])
        if (live.device, choice) not in self._plans:
            self._plans.append((live.device, choice))
        if self._asked is not None:
            self.tell_again(self._asked)
        return {"said": f"A plan for {nbytes(budget)}: {choice.what}."}

    def _edit(self, request: Request) -> str:
        """The edit of the user's source that does what is shown."""
        return edit_html(self._live.trace.edit(*self._arguments(request)[:2]))
