"""The first screen: whether the shown choice fits the chosen device, what to change, and the edits that do it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from remat_magic import devices
from remat_magic.records import ComparisonRow, Fit, FitChoice, RematError
from remat_magic.views import choices
from remat_magic.views import fit as views
from remat_magic.views import format as fmt
from remat_magic.views.headline import line_html
from remat_magic.views.tables import KEYS
from remat_magic.widget.panels import Panel, Request
from remat_magic.widget.worker import Worker, sentence_of

_PAUSE = 0.02  # seconds between two choices that are tried, in which the reader's own get their turn
_TELL = 0.3  # seconds between two answers that tell what is known so far


class FirstScreen(Panel):
    """What is above the tabs, but for what every report tells of itself."""

    key, title = "first", ""
    asks = (("screen",), ("choices",), ("diff",), ("ask",))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_busy: Callable[[], bool] = lambda: False  # whether a cell is running, for which the search waits
        self.on_end: Callable[[], None] = lambda: None  # called when all is known of a device
        self.searching = Worker[str](self._look, "remat_magic fit")
        self._compiling: Request | None = None

    def handle(self, request: Request) -> None:
        """Take a message of the browser."""
        if request.kind == "screen" and self._compiling and self._compiling.choice != request.choice:
            self._compiling = None  # the reader has gone on
        super().handle(request)

    def close(self) -> None:
        """Look for nothing more."""
        self.searching.post(None)
        self._compiling = None
        super().close()

    def answer(self, request: Request) -> dict[str, Any] | None:
        """The answer, as HTML."""
        match request.kind:
            case "screen":
                return self._screen(request)
            case "choices":
                return self._choices(request)
            case "ask":
                return self._ask(request)
            case _:
                return {"html": self._diff(request)}

    # ---------------------------------------------------------------------------------------------- the shown choice

    def _screen(self, request: Request) -> dict[str, Any] | None:
        live = self._live
        if request.text("device") != live.device or not live.device:
            return None  # another one was chosen since
        report = live.trace.report(*self._arguments(request), device=live.like)
        choice = live.choice_of(report)
        timeline = live.trace.timeline(*self._arguments(request), device=live.like)
        verdict = views.verdict_html(choice, live.fit, live.capacity, self._how(choice))
        if choice.key != "as_written" and live.fit is not None:
            verdict += f" {views.back_html(live.fit)}"
        in_xla = live.live_in_xla(choice, timeline)
        bar, takes = views.live_html(choice, report, timeline, in_xla, *live.memory)
        line, rarer = line_html(report, timeline.saved_bytes)
        return {
            "compiled": "yes" if choice.compiled else "",
            "verdict": verdict,
            "bar": bar,
            "takes": takes,
            "totals": line,
            "rarer": rarer,
            "saved-less": views.saved_less_html(report, timeline, live.device if live.is_device else "a GPU"),
        }

    def _how(self, choice: FitChoice) -> str:
        """What the compiler says besides, or how to ask it."""
        if choice.compiled:
            measured = self._live.measured(choice.key, choice.at)
            text = views.compilers_remarks(measured) if measured is not None else ""
            return f'<span class="remat-mute">{fmt.escape(text)}</span>' if text else ""
        if not self._live.is_device:
            return ""
        device = devices.get(self._live.device)
        if device.compiles_here:
            return f'<button type="button" class="remat-link" data-action="ask" {KEYS}>Ask the compiler</button>'
        why = fmt.escape(device.why_not)
        install = f"compile: <code>{fmt.escape(device.install)}</code>" if device.install else why
        return f'<span class="remat-mute" title="{why}">{install}</span>'

    def _ask(self, request: Request) -> dict[str, Any]:
        """What the compiler for the chosen device says of a choice."""
        live, device = self._live, self._live.device
        policy, at, namespace = self._arguments(request)
        self._compiling = request
        stop: Callable[[], bool] = lambda: self._compiling is not request  # noqa: E731
        measured = live.trace.measure(policy, at, device=device, namespace=namespace, stop=stop)
        if stop():
            return {}
        self._compiling = None
        if measured.error:
            raise RematError(measured.error)
        live.add_measured(device, [measured])
        if live.fit is not None:
            live.show_fit(live.fit)
            self.on_end()
        self.tell()
        return {}

    # ------------------------------------------------------------------------------------------------ what to change

    def search(self) -> None:
        """Look for what fits the chosen device, and tell what is known as it grows. From any thread."""
        if self._live.device:
            self.searching.post(self._live.device)

    def _look(self, device: str) -> None:
        try:
            with contextlib.closing(self._live.trace.fitting(device)) as stages:  # which ends a compiler that runs
                self._follow(stages, device)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            if not self._live.closed:
                self._send({"type": "fit", "device": device, "error": sentence_of(error)})

    def _follow(self, stages: Iterable[Fit], device: str) -> None:
        live, sent, sent_at = self._live, None, 0.0
        for fit in stages:
            if live.closed or device != live.device:
                return
            if fit != sent and (fit.progress.finished or time.monotonic() - sent_at > _TELL):
                live.show_fit(fit)
                self.tell()
                if fit.progress.finished:
                    self.on_end()
                sent, sent_at = fit, time.monotonic()
            time.sleep(_PAUSE)
            while self.is_busy() and not live.closed:
                time.sleep(_TELL)

    def tell(self) -> None:
        """Tell what is known of the device that is chosen: the page asks anew what it shows of that."""
        live, fit = self._live, self._live.fit
        if fit is None:
            return
        self._send(
            {
                "type": "fit",
                "device": live.device,
                "html": views.changes_html(fit, all_of=len(fit.tried)),
                "figures": views.figures(fit.tried),
            }
        )

    # ------------------------------------------------------------------------------------------------- what is listed

    def _choices(self, request: Request) -> dict[str, Any] | None:
        """What each policy of the list does, as it is found out; then which do the same, and the front of all."""
        live = self._live
        requested = request.content.get("policies")
        keys = [key for key in requested if isinstance(key, str)] if isinstance(requested, list) else []
        device, rows = live.like, list[dict[str, Any]]()
        sent_at = time.monotonic()
        for key in keys:
            if live.closed or self._workers[request.kind].waits:  # for a newer request
                return None
            row = live.trace.compare([live.policy(key)], at=request.at, device=device, namespace=live.namespace).rows[0]
            # Of one alone nothing is known of the front.
            rows.append({**self._row(row), "keys": [key], "front": False})
            if time.monotonic() - sent_at > _TELL:
                self._send({**request.content, "rows": [*rows], "done": False})
                time.sleep(_PAUSE)
                sent_at = time.monotonic()
        offered = {choice.key for choice in live.trace.choices()}
        besides = [live.policy(key) for key in keys if key not in offered]
        all_rows = live.trace.compare(at=request.at, device=device, namespace=live.namespace, besides=besides).rows
        return {"rows": list(map(self._row, all_rows)), "done": True}

    def _row(self, row: ComparisonRow) -> dict[str, Any]:
        """A policy's figures, and with a device whether it fits, as for what was tried."""
        live, text = self._live, choices.figures(row)
        if not live.capacity or row.error:
            return text
        report = live.trace.report(*live.arguments(row.policy, row.at), device=live.like)
        (fits,) = views.figures([live.choice_of(report)])
        return {**text, **{name: fits[name] for name in ("needed", "time", "fits")}}
