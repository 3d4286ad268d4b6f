"""The widget itself: what its user in Python and its reader in the browser ask of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython

from remat_magic.api import Policy, Trace
from remat_magic.records import Plan, RematError, Report
from remat_magic.widget.idle import idle_time
from remat_magic.widget.live_text import answer, shown
from remat_magic.widget.live_trace import Inputs, LiveTrace
from remat_magic.widget.live_view import LiveView, Wish
from remat_magic.widget.panels import PANELS, Panel, Request
from remat_magic.widget.worker import sentence_of
from remat_magic.wording import printable

# By which a page knows whether the view that it has is the newest.
_NEWEST = ("policy", "at", "complete", "noted", "serial")


class RematWidget(LiveView):
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
        device: what is to be fitted, to begin with: the name of an accelerator, or a text of so many bytes; empty for
            nothing. Default: what the reader chose in the widget that the cell showed before, else the one that JAX has
            found.
        panels: the tabs.

    Attributes:
        policy: the key of the chosen policy. Assigning does what the dropdown does; a policy that fails raises
            RematError and leaves everything as it was.
        at: where it is applied: "function", a site's key or "sites".

    Raises:
        RematError: ``policy`` or ``at`` is of no use for this function; one sentence says why.
    """

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
        inputs: Inputs | None = None,
        device: str | None = None,
        panels: tuple[type[Panel], ...] = PANELS,
    ) -> None:
        self._apply = apply
        self._is_seen = _kernel() is not None  # else nobody looks until a page says so: ``report`` computes on access
        idle = idle_time(self._shell) if _kernel() else None
        if device is None and idle is not None:
            device = idle.chosen_device(cell_id)
        live = LiveTrace(trace, namespace, inputs, device)
        super().__init__(live, policy, at, title=title, can_apply=apply is not None, panels=panels)
        self._idle = idle
        self.on_msg(self._on_message)
        if self._idle is not None:
            self._idle.keep(self, cell_id)

    def __repr__(self) -> str:
        if self._live.closed:
            return "RematWidget(closed)"
        place = "" if self.at == "function" else f", at={self.at!r}"
        return f"RematWidget({printable(self._live.trace.function_name)}, policy={self.policy!r}{place})"

    @property
    def report(self) -> Report:
        """The report of the current choice.

        Raises:
            RematError: the widget is closed.
        """
        return self._report(self.policy, self.at)

    @property
    def plan(self) -> Plan | None:
        """The plan that is shown, to be saved or applied elsewhere; None where the choice is no plan."""
        return self._live.plans().get(self.policy)

    @property
    def function(self) -> Callable[..., Any]:
        """The inspected function with the current choice applied.

        Raises:
            RematError: the widget is closed.
        """
        return self._live.trace.function(*self._live.arguments(self.policy, self.at))

    def function_of(self, other: Callable[..., Any]) -> Callable[..., Any]:
        """Another function, such as the loss of an inspected gradient, with the current choice applied.

        Raises:
            RematError: the widget is closed.
        """
        return self._live.trace.function(*self._live.arguments(self.policy, self.at), of=other)

    def close(self) -> None:
        """Let go of everything: the trace, the reports, the browser's view."""
        super().close()
        self._apply = None

    # The selection.

    @traitlets.validate("policy", "at")
    def _validate(self, proposal: Any) -> str:
        """Raise for a choice that fails before anything changes; the trace remembers the report."""
        value: str = proposal["value"]
        name, wished = proposal["trait"].name, self._wishes.wished
        # With what was asked for last, which may not be shown yet: an assignment takes back a click just before it.
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

    def _choose(self, policy: str, at: str, serial: int = 0) -> None:
        self._wishes.wish(policy, at, serial, self._worker.post if self._is_seen else lambda _: None)
        if self._idle is not None:
            self._idle.resume(self)

    def _choose_plan(self, plan: Plan, serial: int) -> None:
        """Show a plan like any other policy, unless something newer is wished for."""
        if self._live.closed or serial < self._wishes.serial:
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
                self._choose(_names_policy(content["names"]), request.at, request.serial)
            case "peek":
                self._peek_worker.post(Wish(request.policy, request.at))
            case "device":
                self._device_worker.post(request.text("device"))
            case "apply":
                self._on_apply()
            case "gradient" | "one-device":
                self._turn_worker.post(request)
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

    # The output.

    def _ipython_display_(self) -> None:
        """Show a static part that is kept with the notebook, then the live one, which hides it."""
        shell = self._shell
        if shell is None or self._live.closed:
            sys.stdout.write(f"{self!r}\n")
            return
        if _kernel() is None:
            # After "Out[3]: ", which the terminal has written already.
            sys.stdout.write("\n")
            shown(answer(self._live, self.report, self._title))
            return
        self._kept.publish(shell, self._good)
        bundle = self._repr_mimebundle_()
        if bundle is not None:
            shell.display_pub.publish({**bundle[0], "text/plain": ""}, metadata=bundle[1])
        self._publish(self.report, self._wishes.serial, self._rendered)
        if not self._live.closed:  # now, since no idle time may follow, as where nobody looks
            self._kept.publish(shell, self._good, again=True)


def _kernel() -> Any:
    """The kernel that this process is, through which a browser may look; None in a terminal and in plain Python."""
    return getattr(get_ipython(), "kernel", None)


def _names_policy(names: Mapping[str, str]) -> str:
    """The policy that saves and offloads the given names and recomputes the rest."""
    save = [name for name, state in names.items() if state == "save"]
    offload = [name for name, state in names.items() if state == "offload"]
    return f"names(save={save!r}, offload={offload!r})"


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
