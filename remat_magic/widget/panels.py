"""The tabs of the widget: what each adds to every view, and what it answers the browser."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from remat_magic.api import Policy
from remat_magic.records import Advice, Plan, RematError, Report, WhatIf
from remat_magic.units import is_bytes, nbytes
from remat_magic.views.choices import of_rows, tried_html
from remat_magic.views.fit import diff_html
from remat_magic.views.format import escape
from remat_magic.views.headline import advice_html, cards, notes_html, notes_of
from remat_magic.views.jaxpr_text import jaxprs, lazy_chunks
from remat_magic.views.memory import timeline_html
from remat_magic.views.plans import flip_key, what_if_html
from remat_magic.views.source import listing_html
from remat_magic.views.tables import KEYS
from remat_magic.views.values import recomputed_html, residuals_html
from remat_magic.widget.live_trace import LIKE, LiveTrace
from remat_magic.widget.worker import Worker, sentence_of

SCRIPTS = Path(__file__).parent / "scripts"
"""The folder of the scripts."""


@dataclass(frozen=True, slots=True)
class Request:
    """A message of the browser, which may hold anything."""

    content: Mapping[str, Any]

    def text(self, name: str, default: str = "") -> str:
        """The text of an entry, such as ``"device"``; the default where there is none."""
        value = self.content.get(name)
        return default if value is None else str(value)

    @property
    def kind(self) -> str:
        """Its type."""
        return self.text("type")

    @property
    def policy(self) -> str:
        """The key of a shown policy, or a text that is to be one."""
        return self.text("policy")

    @property
    def at(self) -> str:
        """A place."""
        return self.text("at")

    @property
    def device(self) -> str | None:
        """As on which device figures are; None for those on this machine's CPU."""
        name = self.text("device")
        return LIKE if is_bytes(name) else name or None

    @property
    def choice(self) -> tuple[str, str, str | None]:
        """The choice that it is of, on which device."""
        return self.policy, self.at, self.device

    @property
    def serial(self) -> int:
        """Of the reader's wish."""
        return int(self.content.get("serial", 0))


class Panel:
    """One tab of the widget. A class of it says what the tab shows, and stands in ``PANELS``.

    Its script in ``scripts/`` exports ``panel(widget, key)``: see ``scripts/shared.js`` for what that returns.

    ``send`` sends a message to the browser, from any thread; ``choose`` shows a plan, for the wish of a serial.

    Attributes:
        key: names the tab in HTML and scripts.
        title: the tab's own text.
        file: of its script, where that is not called after its key.
        parts: names of the parts of its content, where there are several.
        early: those of them whose content is known before the backward half is.
        asks: the messages that it answers; each group has a thread, where the newest request replaces the one waiting.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    file: ClassVar[str] = ""
    parts: ClassVar[tuple[str, ...]] = ()
    early: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init__(
        self, live: LiveTrace, send: Callable[[dict[str, Any]], None], choose: Callable[[Plan, int], None]
    ) -> None:
        self._live, self._send, self._choose = live, send, choose
        self._workers: dict[str, Worker[Request]] = {}
        for group in self.asks:
            self._workers |= dict.fromkeys(group, Worker[Request](self._work))

    @classmethod
    def script(cls) -> Path:
        """The file of its script."""
        return SCRIPTS / (cls.file or f"{cls.key}.js")

    def tools(self) -> str:
        """The HTML of what stays in place while the content changes."""
        return ""

    def add(self, view: dict[str, Any], report: Report) -> None:
        """Put into a report's view what is to be there when the tab is opened.

        ``view["parts"][key]`` is HTML, ``view["counts"][key]`` a number beside the tab's title, None while unknown.
        """

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """Do what a message asks for, on a thread of its own; what is returned is sent together with the message."""
        raise NotImplementedError

    def handle(self, request: Request) -> None:
        """Take a message of the browser; nothing is traced on the calling thread."""
        self._workers[request.kind].post(request)

    def close(self) -> None:
        """Begin nothing more; the trace is let go of already."""
        for worker in self._workers.values():
            worker.post(None)

    def _arguments(self, request: Request) -> tuple[Policy, str, Mapping[str, Any]]:
        """What the trace takes for the policy that a message is about."""
        return self._live.arguments(request.policy, request.at)

    def _diff(self, request: Request, closes: bool = True) -> str:
        """The edit of the user's source that does what is chosen; ``closes`` where a button takes it away."""
        live, arguments = self._live, self._arguments(request)
        choice = live.choice_of(live.trace.report(*arguments, device=live.like))
        can_apply = bool(request.content.get("can_apply"))
        return diff_html(choice, live.trace.edit(*arguments[:2]), live.device, can_apply=can_apply, closes=closes)

    def _work(self, request: Request) -> None:
        if self._live.closed:
            return
        try:
            answer = self.answer(request)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            answer = {"error": sentence_of(error)}
        if answer is not None and not self._live.closed:
            self._send({**request.content, **answer})


# --------------------------------------------------------------------------------------------------------- the controls


# Replaced by the script, per view: two views of one widget may be on a page, and ids must be unique there.
ID = "__remat__"

_TAUGHT = {
    "against": "Choice A, to compare with the choice shown, B",
    "apply": "Rebind the function's name to it with this choice; functions made from it before keep the old one",
    "arrange": "Search the rows (also the key / in the table)",
    "at": "Where the policy applies: the whole function, its checkpoints, or a function that it calls",
    "beside": "Show the source at the left of every tab",
    "copy": "Copy the code for this choice, to paste into your program",
    "device": "The device to fit: bytes and times are for it, and its compiler is asked if it is installed",
    "find": "Show only rows that contain this",
    "gradient": "Which of the function's gradients is shown",
    "policy": "What is saved for the backward pass and what it computes again; opens as a list with what each does",
    "state-offload": "Move it to the host's memory for the backward pass, and back",
    "state-recompute": "Let the backward pass compute it again",
    "state-save": "Keep it on the device for the backward pass",
    "tab-choices": "All choices that were tried, by memory and time, with the edit of your source",
    "tab-jaxprs": "The programs of the forward and the backward pass, as JAX prints them",
    "tab-listing": "Your source, with what each line saves and recomputes",
    "tab-memory": "The memory in use over time, by line of your source",
    "tab-notes": "Remarks on the choice shown, and advice",
    "tab-values": "The values that are saved for the backward pass, called residuals, and what it computes again",
    "whole": "Show both jaxprs in full, not only their first lines",
    "unpick": "Clear the line: show all rows, mark nothing",
}
"""What a control is for, said on hover, by its key."""


def taught(key: str) -> str:
    """The attribute that says on hover what a control is for; nothing where there is nothing to say."""
    return f' title="{html.escape(_TAUGHT[key])}"' if key in _TAUGHT else ""


def select(key: str, label: str, options: Iterable[tuple[str, str]], chosen: str | None = None) -> str:
    """A dropdown with its label; options are pairs of value and text, ``chosen`` the value that it begins with."""
    items = "".join(
        f'<option value="{html.escape(value)}"{" selected" * (value == chosen)}>{escape(text)}</option>'
        for value, text in options
    )
    described = f' aria-describedby="{ID}meaning"' if key in ("policy", "at") else ""
    return (
        f'<span class="remat-field"{taught(key)}><label for="{ID}{key}">{escape(label)}</label> '
        f'<select id="{ID}{key}" data-control="{key}"{described} {KEYS}>{items}</select></span>'
    )


def button(action: str, text: str, **attributes: str) -> str:
    """A button for one action of the script, with more attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items())
    extra += "" if "title" in attributes else taught(action)
    return f'<button type="button" data-action="{action}"{extra} {KEYS}>{escape(text)}</button>'


# ------------------------------------------------------------------------------------------------------------- the tabs


class Values(Panel):
    """One table under the other, of the same columns; ``saved-less`` is of the chosen device."""

    key, title, parts, early = "values", "Values", ("saved-less", "residuals", "recomputed"), ("residuals",)

    def tools(self) -> str:
        """What the tables are searched by."""
        return (
            '<div class="remat-tools remat-arranging-tools">'
            f"{button('arrange', 'Find', aria_expanded='false')}"
            f'<span class="remat-field"{taught("find")}><label for="{ID}find">Find</label> '
            f'<input type="search" id="{ID}find" data-find placeholder="any text of a row" autocomplete="off" '
            f'spellcheck="false" {KEYS}></span></div>'
        )

    def add(self, view: dict[str, Any], report: Report) -> None:
        """Both tables, and the length of the first."""
        # Each under a heading, in which the script says what the rows below, or those that are shown, add up to.
        head = "<h4>{} <small data-summary></small></h4>{}".format
        view["parts"]["residuals"] = head("Saved for the backward pass", residuals_html(report))
        view["parts"]["recomputed"] = head("Computed again in the backward pass", recomputed_html(report))
        view["counts"][self.key] = len(report.residuals)


class Listing(Panel):
    """The user's source."""

    key, title, file = "listing", "Source", "linking.js"

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The lines."""
        view["parts"][self.key] = listing_html(report, live=True)


class Memory(Panel):
    """What is live from operation to operation, by estimate, and over it XLA's own where it was compiled."""

    key, title = "memory", "Memory"
    asks = (("memory",),)

    def answer(self, request: Request) -> dict[str, Any]:
        """The picture and the tables of what is live."""
        device = request.text("device")
        timeline = self._live.trace.timeline(*self._arguments(request), device=request.device)
        if is_bytes(device):  # as on some device, but how fast it is nobody knows
            timeline = replace(timeline, seconds=())
        size, compiled = self._live.devices.get(device), self._live.measured(request.policy, request.at, device)
        return {"html": timeline_html(timeline, compiled, (device, size) if size else None, live=True)}


# Below this many lines the jaxprs travel with the rest, so that a policy at hand toggles without the kernel.
_SEND_LINES = 400


class Jaxprs(Panel):
    """Both jaxprs, in pieces that the script places bit by bit."""

    key, title = "jaxprs", "Jaxprs"
    asks = (("jaxprs",),)

    def tools(self) -> str:
        """What shows two long jaxprs whole: they do not scroll within the page."""
        return (
            f'<div class="remat-tools"><label class="remat-check"{taught("whole")} hidden>'
            f'<input type="checkbox" data-control="whole" {KEYS}> Show all lines</label></div>'
        )

    def add(self, view: dict[str, Any], report: Report) -> None:
        """The jaxprs, if they are small."""
        halves = (report.forward, report.backward)
        # A large one is not laid out for it: it has as many lines as equations, and more.
        small = report.complete and sum(half.equations for half in halves) <= _SEND_LINES
        small = small and sum(len(half.lines) for half in halves) <= _SEND_LINES
        view["jaxprs"] = jaxprs(report, bodies=False) if small else ""
        view["bodies"] = lazy_chunks(report) if small else None

    def answer(self, request: Request) -> Mapping[str, Any]:
        """The jaxprs, however long."""
        report = self._live.trace.report(*self._arguments(request))
        return {"frame": jaxprs(report, bodies=False), "bodies": lazy_chunks(report)}


_GONE = "That list is outdated: open it again, and choose from the new one"


class Choices(Panel):
    """What needs how much and takes how much longer, sorted by what fits where the line is."""

    key, title, parts = "choices", "Choices", ("tried", "edit", "what-if")
    asks = (("tried",), ("plan", "flip"), ("edit",), ("what-if",))

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._flips: dict[str, WhatIf] = {}

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        """The answer, as HTML."""
        match request.kind:
            case "tried":
                return self._tried(request)
            case "plan":
                return self._plan(request)
            case "flip":
                if (row := self._flips.get(request.text("flip"))) is None:
                    raise RematError(_GONE)
                return self._choose(row.plan, request.serial)
            case "edit":
                return {"html": self._diff(request, closes=False)}
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
        plans = map(live.as_compiled, live.added)
        choices = [*fit.tried, *(plan for plan in plans if (plan.key, plan.at) not in known)]
        return {"html": tried_html(choices, fit), "count": len(choices)}

    def _plan(self, request: Request) -> dict[str, Any]:
        """One plan for a budget, which is a choice like any other from then on."""
        live, budget = self._live, int(request.content["budget"])
        plan = live.trace.plan(peak=budget, device=live.like)
        choice = live.trace.fit_choice(plan, plan.at, live.device)
        live.offer([choice])
        if choice not in live.added:
            live.added.append(choice)
        return {"said": f"A plan for {nbytes(budget)}: {choice.what}."}


class Notes(Panel):
    """A badge with a count, and cards. What is a choice stands among the choices."""

    key, title, parts, file = "notes", "Notes", ("noted", "advice"), "on_demand.js"
    asks = (("advice",),)

    def add(self, view: dict[str, Any], report: Report) -> None:
        """What is known of every choice, and what is found out of it without a retrace."""
        findings: list[Advice] = []
        if report.complete and not report.backward_error:
            with contextlib.suppress(RematError):  # what cannot be advised on says so itself
                arguments = self._live.arguments(report.policy, report.at)
                findings = cards(self._live.trace.advice(*arguments, quick=True))
        mended = {finding.kind for finding in findings}  # with its mend
        notes = [note for note in notes_of(report) if getattr(note, "kind", "") not in mended]
        noted = f"{notes_html(notes)}{advice_html(findings)}"
        view["parts"]["noted"] = noted or '<p class="remat-empty">There is no note on this choice.</p>'
        view["counts"][self.key] = len(notes) + len(findings) or ""

    def answer(self, request: Request) -> Mapping[str, Any]:
        """What takes other choices to be traced."""
        arguments, trace = self._arguments(request), self._live.trace
        quick = {finding.sentence for finding in trace.advice(*arguments, quick=True)}
        findings = cards(trace.advice(*arguments, device=request.device))
        return {"html": advice_html([finding for finding in findings if finding.sentence not in quick])}


PANELS: tuple[type[Panel], ...] = (Values, Listing, Memory, Jaxprs, Choices, Notes)
"""The tabs, in their order. A new one is registered here."""
