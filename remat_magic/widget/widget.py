"""The widget itself: what its user in Python and its reader in the browser ask of it, worked out on threads.

The newest wish comes first; what is rendered is sent to the browser, and a copy of it is saved with the notebook.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from remat_magic.api import Policy, Trace
from remat_magic.errors import printable
from remat_magic.records import Plan, RematError, Report
from remat_magic.views import plans as plan_views
from remat_magic.views.html import style
from remat_magic.widget.first_screen import FirstScreen
from remat_magic.widget.frame import frame, widget_script
from remat_magic.widget.idle import IdleTime, Prefetch, idle_time
from remat_magic.widget.live_trace import LiveTrace, shown, text_answer
from remat_magic.widget.panels import PANELS, Panel, Request
from remat_magic.widget.rendered import Rendered, SavedCopy
from remat_magic.widget.worker import Wish, Wishes, Worker, sentence_of

# By which a page knows whether the view that it has is the newest.
_NEWEST = ("policy", "at", "complete", "noted", "serial")


class Channel(anywidget.AnyWidget):
    """An anywidget whose messages are delivered while a cell runs.

    ipykernel 7.4 routes what the browser sends to the thread that published last on the channel: after a publish from a
    cell, the next toggle would wait for the running cell. Without a note of that thread, messages come on the subshell
    that the browser asks for. After a kernel was restarted from elsewhere JupyterLab 4.6 goes on asking for one of the
    kernel before, and ipykernel would drop the message: then it comes on the main thread.
    """

    def _send(self, msg: Any, buffers: Any = None) -> None:
        super()._send(msg, buffers=buffers)
        self._answer_anywhere()

    def open(self) -> None:
        """Open the channel to the browser."""
        super().open()
        self._answer_anywhere()
        if hasattr(self.comm, "_reply_subshell_for"):  # ipykernel 7.4
            vars(self.comm)["_reply_subshell_for"] = _subshell

    def _answer_anywhere(self) -> None:
        getattr(self.comm, "__dict__", {}).pop("_reply_subshell_id", None)


def _subshell(_data: Any, wanted: str | None) -> str | None:
    """The subshell that a message is for: the one that the browser asks for, if this kernel has it."""
    try:
        kernel = sys.modules["ipykernel.kernelbase"].Kernel.instance()
        subshells = kernel.shell_channel_thread.manager.list_subshell()
    except Exception:  # noqa: BLE001 - private to ipykernel, which may arrange it otherwise at any time
        return wanted
    return wanted if wanted in subshells else None


class RematWidget(Channel):
    """What a function keeps for its backward pass, and what every other policy would do.

    ``rm.show`` and the magic make it. ``apply`` is called with it by the Apply button, which None hides, and gives the
    sentence to show; it is closed when the cell of ``cell_id`` runs again. Without a ``device`` (an accelerator's name
    or so many bytes, empty for nothing) it is what the reader chose in the widget that the cell showed before, else the
    one that JAX has found.

    Attributes:
        policy: the key of the chosen policy. Assigning does what the dropdown does; a policy that fails raises
            RematError and leaves everything as it was.
        at: where it is applied: "function", a site's key or "sites".
    """

    _css = style(live=True)
    _frame = traitlets.Unicode().tag(sync=True)
    _view = traitlets.Dict().tag(sync=True)
    _copy_id = traitlets.Unicode().tag(sync=True)  # of this model, and of its copy in the notebook
    _live = LiveTrace(None)
    _idle: IdleTime | None = None
    policy = traitlets.Unicode("as_written")
    at = traitlets.Unicode("function")

    def __init__(
        self,
        trace: Trace,
        policy: Policy = "as_written",
        at: str | None = None,
        *,
        title: str = "",
        apply: Callable[[RematWidget], str] | None = None,
        namespace: Mapping[str, Any] | None = None,
        cell_id: str | None = None,
        device: str | None = None,
        panels: tuple[type[Panel], ...] = PANELS,
    ) -> None:
        self._apply = apply
        self._is_seen = _kernel() is not None  # else nobody looks until a page says so: ``report`` computes on access
        idle = idle_time(self._shell) if _kernel() else None
        if device is None and idle is not None:
            device = idle.chosen_device(cell_id)
        live = LiveTrace(trace, namespace, device)
        self._title = title
        self._panel_types = panels
        self._publishing = threading.RLock()  # locked to publish, so that nothing of what was shown before comes after
        first = self._show_trace(live, policy, at)
        self._worker = Worker[Wish](self._work)
        switch = Worker[Request](self._switch)
        other = {"peek": Worker[Request](self._peek), "device": Worker[Request](self._work_on_device)}
        self._workers = {**other, "gradient": switch, "one-device": switch}  # by the messages that they answer
        self._copy = SavedCopy()
        self._esm = widget_script(panels)
        view, own = {**self._render(first), "serial": 0}, self._copy.id
        super().__init__(model_id=own, _frame=self._draw(), _view=view, _copy_id=own)
        self._settle(first, self._wishes.wished)
        self._idle = idle
        self.on_msg(self._on_message)
        if self._idle is not None:
            self._idle.keep(self, cell_id)

    def _show_trace(self, live: LiveTrace, policy: Policy, at: str | None) -> Report:
        """Make ready to show a function; what is shown first of it. Where that fails, nothing has changed."""
        try:
            first = live.preview(policy, live.trace.default_at if at is None else at)
        except RematError as error:
            if policy != "as_written" or str(error) not in live.trace.notes:
                raise
            first = live.preview("nothing_saveable", "sites")  # what is wrong as it is written is in the notes
        panels = tuple(panel(live, self._send_live, self._choose_plan) for panel in self._panel_types)
        screen = FirstScreen(live, self._send_live, self._choose_plan)
        screen.is_busy, screen.on_end = self._is_disturbed, self._fall_behind
        with self._publishing:
            self._wishes = Wishes(Wish(first.policy, first.at))
            self._good = first
            self._panels, self._screen = panels, screen
            self._answering = {kind: panel for panel in (*panels, screen) for group in panel.asks for kind in group}
            self._prefetch = Prefetch()
            self._rendered = Rendered(self._title, panels, live)
            self._live = live
        return first

    def _draw(self) -> str:
        return frame(self._live, self._panels, title=self._title, can_apply=self._apply is not None)

    @property
    def _shell(self) -> Any:
        """The IPython that this process runs in, through which outputs are shown; None in plain Python."""
        return get_ipython()

    @property
    def chosen_device(self) -> str | None:
        """What the reader has chosen to be fitted; None where it is what the widget began with."""
        return self._live.device if self._live.was_chosen else None

    def _report(self, policy: str, at: str) -> Report:
        return self._live.trace.report(*self._live.arguments(policy, at))

    def __repr__(self) -> str:
        if self._live.closed:
            return "RematWidget(closed)"
        place = "" if self.at == "function" else f", at={self.at!r}"
        return f"RematWidget({printable(self._live.trace.function_name)}, policy={self.policy!r}{place})"

    @property
    def report(self) -> Report:
        """The report of the current choice; RematError where the widget is closed."""
        return self._report(self.policy, self.at)

    @property
    def plan(self) -> Plan | None:
        """The plan that is shown, to be saved or applied elsewhere; None where the choice is no plan."""
        return self._live.plans().get(self.policy)

    @property
    def function(self) -> Callable[..., Any]:
        """The inspected function with the current choice applied; RematError where the widget is closed."""
        return self._live.trace.function(*self._live.arguments(self.policy, self.at))

    def function_of(self, other: Callable[..., Any]) -> Callable[..., Any]:
        """Another function, such as the loss of an inspected gradient, with the current choice applied."""
        return self._live.trace.function(*self._live.arguments(self.policy, self.at), of=other)

    def close(self) -> None:
        """Let go of everything: the trace, the reports, the browser's view."""
        if self._live.closed:
            return
        self._live.close()
        for worker in (self._worker, *self._workers.values()):
            worker.post(None)
        for panel in (*self._panels, self._screen):
            panel.close()
        layout = self.layout
        super().close()
        layout.close()
        self._rendered = Rendered("", ())
        self._good = Report("", "")
        self._apply = None
        self._view = {}
        self._frame = ""

    # The selection.

    @traitlets.validate("policy", "at")
    def _validate(self, proposal: Any) -> str:
        """Raise for a choice that fails before anything changes; the trace remembers the report."""
        value: str = proposal["value"]
        name, wished = proposal["trait"].name, self._wishes.wished
        # With what was chosen last, which may not be shown yet: an assignment takes back a click just before it.
        wish = replace(wished, **{name: value})
        unchanged = wish == wished and value == getattr(self, name)
        if unchanged or self._wishes.settling:
            return value
        report = self._live.preview(wish.policy, wish.at)
        # Before the trait changes: from here on the worker does not put an older wish in its place.
        self._choose(report.policy, report.at)
        return report.policy if name == "policy" else report.at

    @traitlets.observe("policy", "at")
    def _changed(self, change: Any) -> None:
        """Ask again where threads assign in one order and were validated in another: the traits have the last word."""
        wished = self._wishes.wished
        wish = replace(wished, **{change.name: getattr(self, change.name)})
        if wish != wished and not self._wishes.settling:
            self._choose(wish.policy, wish.at)

    def _settle(self, report: Report, wish: Wish) -> None:
        """Make the traits say what is shown, unless something newer is wished for."""
        with self._wishes.settle(wish, report.policy, report.at) as newest:
            if newest:
                self.policy, self.at = report.policy, report.at

    def _choose(self, policy: str, at: str, serial: int = 0) -> None:
        self._wishes.wish(policy, at, serial, self._worker.post if self._is_seen else lambda _: None)
        if self._idle is not None:
            self._idle.resume(self)

    def _choose_plan(self, plan: Plan, serial: int) -> None:
        """Show a plan like any other policy, unless something newer is wished for."""
        if self._live.closed or serial < self._wishes.wished.serial:
            return
        report = self._live.preview(plan, plan.at)
        self._choose(report.policy, report.at, serial)

    # The browser.

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """A message from the browser, on whichever thread the kernel delivers it: nothing is traced here."""
        if self._live.closed or not isinstance(content, Mapping):
            return
        request = Request(content)
        # At once, or what takes long looks as if the kernel were gone.
        if request.kind == "hello":
            self.send({"type": "hello", "newest": {name: self._view.get(name) for name in _NEWEST}})
        else:
            self.send({"type": "heard"})
        match request.kind:
            case "hello":
                for view in self._rendered.complete().values():
                    self._send_view(view)
                if not self._is_seen:  # in marimo, and whatever else shows widgets without a kernel of IPython's
                    self._is_seen = True
                    self._worker.post(self._wishes.wished)
            case "lost":
                self.send_state(["_frame", "_view"])
            case "choose":
                self._choose(request.policy, request.at, request.serial)
            case "names":
                # The policy that saves and offloads the given names, and recomputes the rest.
                chosen = {"save": list[str](), "offload": list[str](), "recompute": list[str]()}
                for name, state in content["names"].items():
                    chosen[state].append(name)
                policy = f"names(save={chosen['save']!r}, offload={chosen['offload']!r})"
                self._choose(policy, request.at, request.serial)
            case "apply":
                self._on_apply()
            case kind if kind in self._workers:
                self._workers[kind].post(request)
            case kind if kind in self._answering:
                self._answering[kind].handle(request)
            case kind:
                raise ValueError(f"unknown message from the browser: {kind!r}")

    def _on_apply(self) -> None:
        apply = self._apply
        if apply is None:
            return

        def act() -> None:
            try:
                wish = self._wishes.wished  # which the worker may not have come to yet
                self._settle(self._live.preview(wish.policy, wish.at), wish)
                self._say(apply(self))
            except Exception as error:  # noqa: BLE001 -- shown to the reader, who pressed the button
                self._say(sentence_of(error), error=True)

        if self._idle is None:
            act()
        elif self._idle.soon(act):
            self._say("Applies when the running cell has ended.")

    # What is worked out, each on a thread of its own.

    def _wanted(self, wish: Wish, rendered: Rendered) -> bool:
        """Whether nothing newer is wished for, and what is worked out is of the trace that is shown."""
        return not self._live.closed and rendered is self._rendered and self._wishes.is_newest(wish)

    def _work(self, wish: Wish) -> None:
        """On the worker's thread: the residuals first, then everything, each published if still wanted."""
        rendered = self._rendered
        if not self._wanted(wish, rendered):
            return
        try:
            report = self._live.preview(wish.policy, wish.at)
            if self._wanted(wish, rendered):
                self._settle(report, wish)
                self._publish(report, wish.serial, rendered)
            if not report.complete and self._wanted(wish, rendered):
                report = self._report(wish.policy, wish.at)
                if self._wanted(wish, rendered):
                    self._publish(report, wish.serial, rendered)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            if self._wanted(wish, rendered):
                self._settle(self._good, wish)
                self._publish(self._good, wish.serial, rendered)
                self._say(sentence_of(error), error=True)

    def _peek(self, request: Request) -> None:
        """Send a view that the shown one is compared with."""
        rendered, of = self._rendered, {"policy": request.policy, "at": request.at}
        try:
            if not self._live.closed:
                self._send_rendered(self._report(**of), rendered, **of)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._send_live({"type": "peek", **of, "error": sentence_of(error)})

    def _switch(self, request: Request) -> None:
        """Switch to another gradient that the function takes inside, or to the figures of one device."""
        live, panels = self._live, (*self._panels, self._screen)
        if live.closed:
            return
        policy, at = "as_written", None
        try:
            if request.kind == "gradient":
                other = LiveTrace(live.trace.of_gradient(request.text("key")), live.namespace, live.device)
            elif live.trace.postponed:
                wish = self._wishes.wished
                policy, at = live.policy(wish.policy, wish.at), wish.at
                other = LiveTrace(live.trace.of_one_device(), live.namespace, live.device)
            else:
                return  # it was pressed twice
            first = self._show_trace(other, policy, at)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._say(sentence_of(error), error=True)
            return
        for panel in panels:
            panel.close()
        live.close()
        with self._publishing, self.hold_sync():
            self._frame = self._draw()
            self._view = {**self._render(first), "serial": 0}
        self._settle(first, self._wishes.wished)
        # What is wished for, and then the others.
        self._worker.post(self._wishes.wished)
        if self._idle is not None:
            self._idle.resume(self)

    def _work_on_device(self, request: Request) -> None:
        """Look for what fits another device, and keep a copy of that."""
        live, screen, said = self._live, self._screen, ""
        if live.closed:
            return
        try:
            if live.choose_device(request.text("device")):
                self._fall_behind()
        except RematError as error:
            said = str(error)
        self._send_live({"type": "device", "device": live.device})
        if said:
            self._say(said, error=True)
        else:
            screen.search() if live.fit is None else screen.tell()

    def _fall_behind(self) -> None:
        """Have the saved copy replaced when the kernel is idle."""
        self._copy.fall_behind()
        if self._idle is not None:
            self._idle.resume(self)

    def prefetch(self) -> bool:
        """Compute one more policy, and update the notebook's copy once that is done for all; whether to go on.

        Between cells, on any thread but the main one.
        """
        if self._live.closed:
            return False
        rendered = self._rendered
        try:
            report, goes_on = self._prefetch.step(self._live, self.at, rendered.complete())
            if report is not None:
                self._send_rendered(report, rendered)
                self._copy.fall_behind()
            if goes_on:
                return True
            is_current = self._copy.catch_up(self._shell, self._rendered, lambda: self._good, self._is_disturbed)
        except RematError:  # closed meanwhile
            if self._live.closed:
                return False
            raise
        return not is_current

    def _is_disturbed(self) -> bool:
        """Whether work in the background is to wait: a cell runs, or the widget is closed."""
        return self._live.closed or (self._idle is not None and self._idle.busy)

    # What is sent.

    def _render(self, report: Report) -> dict[str, Any]:
        meanings = {choice.key: choice.meaning for choice in self._live.trace.choices()}
        plans = self._live.plans()
        meanings |= {key: plan_views.plan_meaning(plan) for key, plan in plans.items()}
        instead, applying = "your source as it is", "Apply undoes an earlier Apply"
        if report.policy in plans:
            instead, applying = plan_views.UNPASTED, "Apply rebinds the function's name"
        status = f"{instead}; {applying}" if self._apply else instead
        if donating := self._live.donating(report.policy, report.at):
            meanings[report.policy] = donating.caution
        return self._rendered.view(report, meanings, status, report.policy in plans or donating is not None)

    def _publish(self, report: Report, serial: int, rendered: Rendered) -> None:
        """Show a report, unless what is rendered has come to be of another trace than it is."""
        with self._publishing:
            if rendered is not self._rendered:
                return
            self._view = {**self._render(report), "serial": serial}
            if report.complete:
                self._good = report
        if report.complete and not self._live.closed:
            self._fall_behind()

    def _send_rendered(self, report: Report, rendered: Rendered, **of: str) -> None:
        """Send a report's view, unless the trace that it is of has made way for another."""
        with self._publishing:
            if rendered is self._rendered:
                self._send_view({**self._render(report), **of})

    def _say(self, sentence: str, *, error: bool = False) -> None:
        self.send({"type": "say", "text": sentence, "error": error, "serial": self._wishes.wished.serial})

    def _send_live(self, message: dict[str, Any]) -> None:
        if not self._live.closed:
            self.send(message)

    def _send_view(self, view: dict[str, Any]) -> None:
        self.send({"type": "view", "view": {**view, "serial": 0}})

    # The output.

    def _ipython_display_(self) -> None:
        """Show a static part that is saved with the notebook, then the live one, which hides it."""
        shell = self._shell
        if shell is None or self._live.closed:
            sys.stdout.write(f"{self!r}\n")
            return
        if _kernel() is None:
            # After "Out[3]: ", which the terminal has written already.
            sys.stdout.write("\n")
            shown(text_answer(self._live, self.report, self._title))
            return
        self._copy.publish(shell, self._rendered, self._good)
        bundle = self._repr_mimebundle_()
        if bundle is not None:
            shell.display_pub.publish({**bundle[0], "text/plain": ""}, metadata=bundle[1])
        self._publish(self.report, self._wishes.wished.serial, self._rendered)
        if not self._live.closed:  # now, since no idle time may follow, as where nobody looks
            self._copy.publish(shell, self._rendered, self._good, again=True)


def _kernel() -> Any:
    """The kernel that this process is, through which a browser may look; None in a terminal and in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def show(
    trace: Trace, policy: Policy = "as_written", at: str | None = None, *, device: str | None = None
) -> RematWidget:
    """The widget of a trace, for notebooks and places in them where no magic can be, as marimo, or a function.

    Args:
        trace: what ``rm.trace`` returned.
        policy: what to show first: as for ``trace.report``.
        at: the place that it goes to. Default: the trace's own.
        device: what is to be fitted: the name of an accelerator, as in ``rm.devices``, or bytes such as ``"24 GiB"``.
            Default: an accelerator that is here.

    Returns:
        The widget, which a notebook shows where it is the last expression of a cell. Its ``policy`` and ``at`` say and
        set what is shown, ``report`` is what is shown.

    Raises:
        RematError: no trace, or ``policy`` or ``at`` is of no use for the function.
    """
    if not isinstance(trace, Trace):
        raise RematError(f"rm.show shows a trace, not {type(trace).__name__}: rm.show(rm.trace(function, *arguments)).")
    return RematWidget(trace, policy, at, device=device)
