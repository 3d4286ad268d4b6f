"""The widget itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython
from rich.console import Console

from remat_magic import devices
from remat_magic.records import Plan, RematError, Report
from remat_magic.views import controls, html, text
from remat_magic.views import plan as plans
from remat_magic.widget.ahead import Ahead
from remat_magic.widget.between import between
from remat_magic.widget.channel import Channel
from remat_magic.widget.comparing import Comparing
from remat_magic.widget.planning import Planning
from remat_magic.widget.rendered import Kept, Rendered
from remat_magic.widget.worker import Worker, sentence_of
from remat_magic.wording import printable

__all__ = ["RematWidget"]

_CLOSED = "this widget was closed, because its cell was run again or close() was called; take the newer one"


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the reader asked for; ``serial`` orders the wishes of browser and kernel."""

    policy: str
    at: str
    serial: int


class RematWidget(Channel):
    """What a function keeps for its backward pass, and what every other policy would do.

    Args:
        trace: the inspected function (a ``remat_magic.Trace``, or anything with its surface).
        policy: what to show first: a choice's key.
        at: where the policy is applied; None is the trace's own default.
        title: a line before the signature, of how the inspection came about.
        apply: called with this widget by the Apply button; returns the sentence to show. None hides the button.
        namespace: the user's namespace, in which a policy that is no key is looked up.
        cell_id: the cell that shows the widget: when it runs again, the widget is closed.
        inputs: positional and keyword arguments with values, for measured runs; held until the widget is closed.

    Attributes:
        policy: the key of the chosen policy. Assigning does what the dropdown does; a policy that fails raises
            RematError and leaves everything as it was.
        at: where it is applied: "function", a site's key or "sites".

    Raises:
        RematError: ``policy`` or ``at`` is of no use for this function; one sentence says why.
    """

    _esm = html.module()
    _css = html.style(live=True)
    _frame = traitlets.Unicode().tag(sync=True)
    _view = traitlets.Dict().tag(sync=True)
    _trace: Any = None
    policy = traitlets.Unicode("as_written")
    at = traitlets.Unicode("function")

    def __init__(
        self,
        trace: Any,
        policy: str = "as_written",
        at: str | None = None,
        *,
        title: str = "",
        apply: Callable[[RematWidget], str] | None = None,
        namespace: Mapping[str, Any] | None = None,
        cell_id: str | None = None,
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self._namespace = namespace if namespace is not None else {}
        first: Report = trace.preview(policy, trace.default_at if at is None else at, self._namespace)
        self._trace = trace
        self._asked: dict[str, Any] = {first.policy: policy}
        self._title = title
        self._apply = apply
        self._choosing = threading.RLock()
        self._serial = 0
        self._wished = _Wish(first.policy, first.at, 0)
        self._settling: int | None = None
        self._good = first
        self._ahead = Ahead()
        self._rendered = Rendered(title)
        self._worker = Worker[_Wish](self._work)
        self._bodies_worker = Worker[_Wish](self._send_bodies)
        self._peek_worker = Worker[_Wish](self._peek)
        self._comparing = Comparing(trace, self._send_live, self._arguments, inputs, self._plans)
        self._planning = Planning(trace, self._send_live, self._choose_plan, self._arguments)
        self._kept = Kept(self._rendered)
        self._between = between(get_ipython()) if _kernel() else None
        super().__init__(
            _frame=controls.frame(
                title=title,
                signature=trace.signature or trace.function_name,
                wrt=trace.wrt,
                choices=trace.choices(),
                sites=trace.sites,
                names=trace.names,
                function=trace.function_name,
                can_apply=apply is not None,
                devices=[name for name in devices.names() if name != devices.THIS_CPU],
                has_inputs=inputs is not None,
            ),
            _view={**self._render(first), "serial": 0},
        )
        self._settle(first, self._wished)
        self.on_msg(self._on_message)
        if self._between is not None:
            self._between.keep(self, cell_id)

    def __repr__(self) -> str:
        if self._trace is None:
            return "RematWidget(closed)"
        place = "" if self.at == "function" else f", at={self.at!r}"
        return f"RematWidget({printable(self._trace.function_name)}, policy={self.policy!r}{place})"

    @property
    def report(self) -> Report:
        """The report of the current choice.

        Raises:
            RematError: the widget is closed.
        """
        return self._opened().report(*self._arguments(self.policy, self.at))

    @property
    def plan(self) -> Plan | None:
        """The plan that is shown, to be saved or applied elsewhere; None where the choice is no plan."""
        asked = self._asked.get(self.policy)
        return asked if isinstance(asked, Plan) else None

    @property
    def function(self) -> Callable[..., Any]:
        """The inspected function with the current choice applied.

        Raises:
            RematError: the widget is closed.
        """
        return self._opened().function(*self._arguments(self.policy, self.at))

    def close(self) -> None:
        """Let go of everything: the trace, the reports, the browser's view."""
        if self._trace is None:
            return
        self._trace = None
        self._worker.post(None)
        self._bodies_worker.post(None)
        self._peek_worker.post(None)
        self._comparing.close()
        self._planning.close()
        layout = self.layout
        super().close()
        layout.close()
        self._rendered = Rendered("")
        self._kept = Kept(self._rendered)
        self._namespace = {}
        self._apply = None
        self._good = Report("", "")
        self._view = {}
        self._frame = ""

    def _opened(self) -> Any:
        if self._trace is None:
            raise RematError(_CLOSED)
        return self._trace

    def _arguments(self, policy: str, at: str) -> tuple[Any, str, Mapping[str, Any]]:
        """What the trace takes: a shown key need not be a text that it reads ("my_policy #2")."""
        return self._asked.get(policy, policy), at, self._namespace

    def _preview(self, policy: str, at: str) -> Report:
        report: Report = self._opened().preview(*self._arguments(policy, at))
        if report.policy != policy:
            self._asked[report.policy] = self._asked.get(policy, policy)
        return report

    # The selection.

    @traitlets.validate("policy", "at")
    def _validate(self, proposal: Any) -> str:
        """Raise for a choice that fails before anything changes; the trace remembers what was found."""
        value: str = proposal["value"]
        name, wished = proposal["trait"].name, self._wished
        # With what was asked for last, which may not be shown yet: an assignment takes back a click just before it.
        asked = replace(wished, **{name: value})
        unchanged = asked == wished and value == getattr(self, name)
        if unchanged or self._settling == threading.get_ident():
            return value
        report = self._preview(asked.policy, asked.at)
        # Before the trait changes: from here on the worker does not put an older wish in its place.
        self._choose(report.policy, report.at)
        return report.policy if name == "policy" else report.at

    @traitlets.observe("policy", "at")
    def _changed(self, change: Any) -> None:
        """Ask again where threads assign in one order and were validated in another: the traits have the last word."""
        wished = self._wished
        asked = replace(wished, **{change.name: getattr(self, change.name)})
        if asked != wished and self._settling != threading.get_ident():
            self._choose(asked.policy, asked.at)

    def _settle(self, report: Report, wish: _Wish) -> None:
        """Make the traits say what is shown, unless something newer is wished for."""
        with self._choosing:
            if wish.serial < self._serial:
                return
            self._wished = _Wish(report.policy, report.at, wish.serial)
            self._settling = threading.get_ident()
            try:
                self.policy, self.at = report.policy, report.at
            finally:
                self._settling = None

    def _want(self, wish: _Wish) -> None:
        if _kernel() is None:
            return  # nobody looks: ``report`` computes on access
        self._worker.post(wish)
        if self._between is not None:
            self._between.resume(self)

    def _wanted(self, wish: _Wish) -> bool:
        return self._trace is not None and wish.serial >= self._serial

    def _work(self, wish: _Wish) -> None:
        """On the worker's thread: the residuals first, then everything, each published if still wanted."""
        if not self._wanted(wish):
            return
        try:
            report = self._preview(wish.policy, wish.at)
            if self._wanted(wish):
                self._settle(report, wish)
                self._publish(report, wish.serial)
            if not report.complete and self._wanted(wish):
                report = self._opened().report(*self._arguments(wish.policy, wish.at))
                if self._wanted(wish):
                    self._publish(report, wish.serial)
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            if self._wanted(wish):
                self._settle(self._good, wish)
                self._publish(self._good, wish.serial)
                self._say(sentence_of(error), error=True)

    # The browser.

    def _render(self, report: Report) -> dict[str, Any]:
        meanings = {choice.key: choice.meaning for choice in self._opened().choices()}
        chosen = {key: asked for key, asked in self._asked.items() if isinstance(asked, Plan)}
        meanings |= {key: plans.plan_meaning(plan) for key, plan in chosen.items()}
        return self._rendered.view(report, meanings, dict.fromkeys(chosen, plans.UNPASTED))

    def _publish(self, report: Report, serial: int) -> None:
        self._view = {**self._render(report), "serial": serial}
        if report.complete:
            self._good = report
            self._update_static()

    def _send_bodies(self, wish: _Wish) -> None:
        """On a thread of its own, so that it does not take the place of a newer wish: a big view's programs."""
        trace = self._trace
        if trace is None:
            return
        report: Report = trace.report(*self._arguments(wish.policy, wish.at))
        frame = html.jaxprs(report, bodies=False)
        bodies = html.lazy_chunks(report)
        self.send({"type": "jaxprs", "policy": report.policy, "at": report.at, "frame": frame, "bodies": bodies})

    def _peek(self, wish: _Wish) -> None:
        """Send a view that the shown one is compared with."""
        trace = self._trace
        if trace is None:
            return
        try:
            report: Report = trace.report(*self._arguments(wish.policy, wish.at))
        except Exception as error:  # noqa: BLE001 -- a thread has nobody to raise to; the reader must see it
            self._send_live({"type": "peek", "policy": wish.policy, "at": wish.at, "error": sentence_of(error)})
        else:
            self._send_view({**self._render(report), "policy": wish.policy, "at": wish.at})

    def _say(self, sentence: str, *, error: bool = False) -> None:
        self.send({"type": "say", "text": sentence, "error": error, "serial": self._serial})

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """A message from the browser, on whichever thread the kernel delivers it: nothing is traced here."""
        if self._trace is None or not isinstance(content, Mapping):
            return
        serial = int(content.get("serial", 0))
        kind = content.get("type")
        # At once, or what takes long looks as if the kernel were gone.
        self.send({"type": "hello" if kind == "hello" else "heard"})
        match kind:
            case "hello":
                for view in self._rendered.complete().values():
                    self._send_view(view)
            case "choose":
                self._choose(str(content["policy"]), str(content["at"]), serial)
            case "names":
                self._choose(_names_policy(content["names"]), str(content["at"]), serial)
            case "jaxprs":
                self._bodies_worker.post(_Wish(str(content["policy"]), str(content["at"]), serial))
            case "frontier" | "plan" | "flip" | "what-if" | "loops" | "edit":
                self._planning.handle(content)
            case "peek":
                self._peek_worker.post(_Wish(str(content["policy"]), str(content["at"]), serial))
            case "apply":
                self._on_apply()
            case _:
                self._comparing.handle(content)

    def _choose(self, policy: str, at: str, serial: int = 0) -> None:
        with self._choosing:
            self._serial = max(serial, self._serial + 1)
            wish = self._wished = _Wish(policy, at, self._serial)
        self._want(wish)

    def _choose_plan(self, plan: Plan, serial: int) -> None:
        """Show a plan like any other policy, unless something newer is wished for."""
        if self._trace is None or serial < self._serial:
            return
        report: Report = self._trace.preview(plan, plan.at, self._namespace)
        if plan.names:
            self._asked[report.policy] = plan
        self._choose(report.policy, report.at, serial)

    def _plans(self, at: str) -> list[str]:
        """The policies of the plans that were shown at a place, oldest first."""
        return [key for key, asked in list(self._asked.items()) if isinstance(asked, Plan) and asked.at == at]

    def _on_apply(self) -> None:
        apply = self._apply
        if apply is None:
            return

        def act() -> None:
            try:
                self._say(apply(self))
            except Exception as error:  # noqa: BLE001 -- shown to the reader, who pressed the button
                self._say(sentence_of(error), error=True)

        if self._between is None:
            act()
        elif self._between.soon(act):
            self._say("Applies when the running cell has ended.")

    def _send_live(self, message: dict[str, Any]) -> None:
        if self._trace is not None:
            self.send(message)

    def _send_view(self, view: dict[str, Any]) -> None:
        self.send({"type": "view", "view": {**view, "serial": 0}})

    # Looking ahead.

    def look_ahead(self) -> bool:
        """Compute one more policy, on the main thread between cells.

        Returns:
            Whether to go on: not when all are known, or when one took longer than is felt.
        """
        trace = self._trace
        if trace is None:
            return False
        report, more = self._ahead.step(trace, self.at, self._rendered.complete(), self._namespace)
        if report is not None:
            self._send_view(self._render(report))
        self._kept.catch_up(get_ipython(), self._good, grown=report is not None, more=more)
        return more

    # The output.

    def _update_static(self) -> None:
        if self._trace is not None:
            self._kept.update(get_ipython(), self._good)

    def _ipython_display_(self) -> None:
        """Show a static part that is kept with the notebook, then the live one, which hides it."""
        shell = get_ipython()
        if shell is None or self._trace is None:
            sys.stdout.write(f"{self!r}\n")
            return
        if _kernel() is None:
            # After "Out[3]: ", which the terminal has written already.
            sys.stdout.write("\n")
            Console(file=sys.stdout, force_jupyter=False).print(text.render(self.report, title=self._title))
            return
        self._kept.publish(shell, self._good)
        bundle = self._repr_mimebundle_()
        if bundle is not None:
            shell.display_pub.publish({**bundle[0], "text/plain": ""}, metadata=bundle[1])
        self._publish(self.report, self._serial)


def _kernel() -> Any:
    """The kernel that this process is, through which a browser may look; None in a terminal and in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def _names_policy(names: Mapping[str, str]) -> str:
    """The policy that saves and offloads the given names and recomputes the rest."""
    save = [name for name, state in names.items() if state == "save"]
    offload = [name for name, state in names.items() if state == "offload"]
    return f"names(save={save!r}, offload={offload!r})"
