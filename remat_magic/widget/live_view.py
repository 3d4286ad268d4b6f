"""The widget's view of a trace: worked out on threads, the newest wish first, and sent to the browser."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from remat_magic.api import Policy
from remat_magic.records import Plan, RematError, Report
from remat_magic.views import plans as plan_views
from remat_magic.views.html import style
from remat_magic.widget.bundle import widget_script
from remat_magic.widget.first_screen import FirstScreen
from remat_magic.widget.frame import frame
from remat_magic.widget.idle import IdleTime, Prefetch
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.panels import Panel, Request
from remat_magic.widget.rendered import Kept, Rendered
from remat_magic.widget.worker import Worker, sentence_of


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


def _subshell(_data: Any, asked: str | None) -> str | None:
    """The subshell that a message is for: the one that the browser asks for, if this kernel has it."""
    try:
        kernel = sys.modules["ipykernel.kernelbase"].Kernel.instance()
        subshells = kernel.shell_channel_thread.manager.list_subshell()
    except Exception:  # noqa: BLE001 - private to ipykernel, which may arrange it otherwise at any time
        return asked
    return asked if asked in subshells else None


@dataclass(frozen=True, slots=True)
class Wish:
    """A policy at a place; ``serial`` orders the wishes of browser and kernel."""

    policy: str
    at: str
    serial: int = 0


class Wishes:
    """Which wish is the newest, whoever made it. From any thread."""

    def __init__(self, wish: Wish) -> None:
        self._wished = wish
        self._serial = wish.serial
        self._lock = threading.RLock()
        self._settling: int | None = None

    @property
    def wished(self) -> Wish:
        """What was asked for last, which may not be shown yet."""
        return self._wished

    @property
    def serial(self) -> int:
        """The serial of the newest wish."""
        return self._serial

    @property
    def settling(self) -> bool:
        """Whether this thread is in ``settle``."""
        return self._settling == threading.get_ident()

    def wish(self, policy: str, at: str, serial: int, post: Callable[[Wish], None]) -> None:
        """Wish for something else, by the browser's serial if it is newer than all before.

        ``post`` is called with each wish in the order of the wishes: a mailbox that holds one would else be left with
        the older of two.
        """
        with self._lock:
            self._serial = max(serial, self._serial + 1)
            self._wished = Wish(policy, at, self._serial)
            post(self._wished)

    def is_newest(self, wish: Wish) -> bool:
        """Whether nothing newer is wished for."""
        return wish.serial >= self._serial

    def settle(self, wish: Wish, policy: str, at: str, assign: Callable[[], None]) -> None:
        """Say what a wish has led to, and ``assign`` it, unless something newer is wished for."""
        with self._lock:
            if not self.is_newest(wish):
                return
            self._wished = Wish(policy, at, wish.serial)
            self._settling = threading.get_ident()
            try:
                assign()
            finally:
                self._settling = None


class LiveView(Channel):
    """What the browser shows of a trace, and the copy of it that is kept with the notebook.

    Args:
        live: the inspected function.
        policy: as for ``RematWidget``, and so are ``at``, ``title`` and ``panels``.
        can_apply: whether there is an Apply button.

    Raises:
        RematError: as ``RematWidget``.
    """

    _css = style(live=True)
    _frame = traitlets.Unicode().tag(sync=True)
    _view = traitlets.Dict().tag(sync=True)
    _twin = traitlets.Unicode().tag(sync=True)  # the id of this model, and of what is kept of it with the notebook
    _live = LiveTrace(None)
    _idle: IdleTime | None = None
    policy = traitlets.Unicode("as_written")
    at = traitlets.Unicode("function")

    def __init__(
        self,
        live: LiveTrace,
        policy: Policy,
        at: str | None,
        *,
        title: str,
        can_apply: bool,
        panels: tuple[type[Panel], ...],
    ) -> None:
        self._title = title
        self._can_apply = can_apply
        self._panel_types = panels
        self._turning = threading.RLock()  # held to publish, so that nothing of what was shown before comes after
        first = self._turn_to(live, policy, at)
        self._worker = Worker[Wish](self._work)
        self._peek_worker = Worker[Wish](self._peek)
        self._turn_worker = Worker[Request](self._turn)
        self._device_worker = Worker[str](self._work_on_device)
        self._kept = Kept(self._rendered)
        self._esm = widget_script(panels)
        view, own = {**self._render(first), "serial": 0}, self._kept.id
        super().__init__(model_id=own, _frame=self._draw(), _view=view, _twin=own)
        self._settle(first, self._wishes.wished)

    def _turn_to(self, live: LiveTrace, policy: Policy, at: str | None) -> Report:
        """Make ready to show a function; what is shown first of it.

        Raises:
            RematError: the policy or the place is of no use for it; nothing has changed then.
        """
        try:
            first = live.preview(policy, live.trace.default_at if at is None else at)
        except RematError as error:
            if policy != "as_written" or str(error) not in live.trace.notes:
                raise
            first = live.preview("nothing_saveable", "sites")  # what is wrong as it is written is in the notes
        panels = tuple(panel(live, self._send_live, self._choose_plan) for panel in self._panel_types)
        screen = FirstScreen(live, self._send_live, self._choose_plan)
        screen.is_busy, screen.on_end = self._is_disturbed, self._fall_behind
        with self._turning:
            self._wishes = Wishes(Wish(first.policy, first.at))
            self._good = first
            self._panels, self._screen = panels, screen
            self._answering = {kind: panel for panel in (*panels, screen) for group in panel.asks for kind in group}
            self._prefetch = Prefetch()
            self._rendered = Rendered(self._title, panels, live)
            self._live = live
        return first

    def _draw(self) -> str:
        return frame(self._live, self._panels, title=self._title, can_apply=self._can_apply)

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

    def _choose_plan(self, plan: Plan, serial: int) -> None:
        """Show a plan like any other policy, unless something newer is wished for."""
        raise NotImplementedError

    def _settle(self, report: Report, wish: Wish) -> None:
        """Make the traits say what is shown, unless something newer is wished for."""

        def assign() -> None:
            self.policy, self.at = report.policy, report.at

        self._wishes.settle(wish, report.policy, report.at, assign)

    def close(self) -> None:
        """Let go of everything: the trace, the reports, the browser's view."""
        if self._live.closed:
            return
        self._live.close()
        for worker in (self._worker, self._peek_worker, self._turn_worker, self._device_worker):
            worker.post(None)
        for panel in (*self._panels, self._screen):
            panel.close()
        layout = self.layout
        super().close()
        layout.close()
        self._rendered = Rendered("", ())
        self._kept = Kept(self._rendered)
        self._good = Report("", "")
        self._view = {}
        self._frame = ""

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

    def _peek(self, wish: Wish) -> None:
        """Send a view that the shown one is compared with."""
        if self._live.closed:
            return
        rendered = self._rendered
        try:
            report = self._report(wish.policy, wish.at)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._send_live({"type": "peek", "policy": wish.policy, "at": wish.at, "error": sentence_of(error)})
        else:
            self._send_rendered(report, rendered, policy=wish.policy, at=wish.at)

    def _turn(self, request: Request) -> None:
        """Turn to another gradient that the function takes inside, or to the figures of one device."""
        live, panels = self._live, (*self._panels, self._screen)
        if live.closed:
            return
        policy, at = "as_written", None
        try:
            if request.kind == "gradient":
                other = LiveTrace(live.trace.of_gradient(request.text("key")), live.namespace, None, live.device)
            elif live.trace.postponed:
                wish = self._wishes.wished
                policy, at = live.policy(wish.policy, wish.at), wish.at
                other = LiveTrace(live.trace.of_one_device(), live.namespace, live.inputs, live.device)
            else:
                return  # it was asked twice
            first = self._turn_to(other, policy, at)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._say(sentence_of(error), error=True)
            return
        for panel in panels:
            panel.close()
        live.close()
        self._kept.follow(self._rendered)
        with self._turning, self.hold_sync():
            self._frame = self._draw()
            self._view = {**self._render(first), "serial": 0}
        self._settle(first, self._wishes.wished)
        # What is wished for, and then the others.
        self._worker.post(self._wishes.wished)
        if self._idle is not None:
            self._idle.resume(self)

    def _work_on_device(self, name: str) -> None:
        """Look for what fits another device, and keep a copy of that."""
        live, screen = self._live, self._screen
        if live.closed:
            return
        try:
            changed = live.choose_device(name)
        except RematError as error:
            self._send_live({"type": "device", "device": live.device})
            self._say(sentence_of(error), error=True)
            return
        if changed:
            self._fall_behind()
        self._send_live({"type": "device", "device": live.device})
        screen.search() if live.fit is None else screen.tell()

    def _fall_behind(self) -> None:
        """Have the copy that is kept replaced when the kernel is idle."""
        self._kept.fall_behind()
        if self._idle is not None:
            self._idle.resume(self)

    def prefetch(self) -> bool:
        """Compute one more policy, and bring what the notebook keeps in step once that is done for all.

        Between cells, on any thread but the main one.

        Returns:
            Whether to go on: not when all are cached and kept, or when one took longer than is felt.
        """
        if self._live.closed:
            return False
        rendered = self._rendered
        try:
            report, goes_on = self._prefetch.step(self._live, self.at, rendered.complete())
            if report is not None:
                self._send_rendered(report, rendered)
                self._kept.fall_behind()
            if goes_on:
                return True
            is_kept = self._kept.catch_up(self._shell, lambda: self._good, self._is_disturbed)
        except RematError:  # closed meanwhile
            if self._live.closed:
                return False
            raise
        return not is_kept

    def _is_disturbed(self) -> bool:
        """Whether what nobody waits for is to wait itself."""
        return self._live.closed or (self._idle is not None and self._idle.busy)

    # What is sent.

    def _render(self, report: Report) -> dict[str, Any]:
        meanings = {choice.key: choice.meaning for choice in self._live.trace.choices()}
        plans = self._live.plans()
        meanings |= {key: plan_views.plan_meaning(plan) for key, plan in plans.items()}
        instead, applying = "your source as it is", "Apply undoes an earlier Apply"
        if report.policy in plans:
            instead, applying = plan_views.UNPASTED, "Apply binds it"
        status = f"{instead}; {applying}" if self._can_apply else instead
        if donating := self._live.donating(report.policy, report.at):
            meanings[report.policy] = donating.caution
        return self._rendered.view(report, meanings, status, report.policy in plans or donating is not None)

    def _publish(self, report: Report, serial: int, rendered: Rendered) -> None:
        """Show a report, unless what is rendered has come to be of another trace than it is."""
        with self._turning:
            if rendered is not self._rendered:
                return
            self._view = {**self._render(report), "serial": serial}
            if report.complete:
                self._good = report
        if report.complete and not self._live.closed:
            self._fall_behind()

    def _send_rendered(self, report: Report, rendered: Rendered, **of: str) -> None:
        """Send a report's view, unless the trace that it is of has made way for another."""
        with self._turning:
            if rendered is self._rendered:
                self._send_view({**self._render(report), **of})

    def _say(self, sentence: str, *, error: bool = False) -> None:
        self.send({"type": "say", "text": sentence, "error": error, "serial": self._wishes.serial})

    def _send_live(self, message: dict[str, Any]) -> None:
        if not self._live.closed:
            self.send(message)

    def _send_view(self, view: dict[str, Any]) -> None:
        self.send({"type": "view", "view": {**view, "serial": 0}})
