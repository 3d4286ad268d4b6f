"""One shell's share of the extension: what is remembered between cells, and how an inspection is shown."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.display import display

from remat_magic.errors import printable, text_of
from remat_magic.records import RematError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from remat_magic.api import Trace
    from remat_magic.notebook.callee import Inspection
    from remat_magic.notebook.line import Options
    from remat_magic.notebook.rebinding import Rebinding
    from remat_magic.widget import RematWidget


_MOMENT = 1.0  # seconds
_AGAIN = re.compile(r"\s*%remat\b.*\s*")  # a cell that may ask for the one before


class Ran(NamedTuple):
    """A cell that ran: its text, its number, who it is, and what XLA said if memory was exhausted."""

    text: str
    number: int
    cell_id: str | None
    message: str


class Session:
    """What one shell remembers and shows.

    ``offered`` is what completion offers for the values of options, as the function inspected last has it; the trace
    itself is not held. ``before`` is the cell that ran last, ``exhausted`` the last one that ran out of memory, until
    it runs without that.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.offered: dict[str, tuple[str, ...]] = dict.fromkeys(("names", "at", "gradient", "policy"), ())
        self.before: Ran | None = None
        self.exhausted: Ran | None = None
        self._cell_id: str | None = None
        self.events = (("pre_run_cell", self.pre_run_cell), ("post_run_cell", self.post_run_cell))

    @property
    def namespace(self) -> dict[str, Any]:
        """The user's namespace."""
        return self.shell.user_ns

    @property
    def variables(self) -> Mapping[str, Any]:
        """The user's namespace without what IPython itself put there."""
        hidden = self.shell.user_ns_hidden
        return {name: value for name, value in self.namespace.items() if hidden.get(name, hidden) is not value}

    def pre_run_cell(self, info: Any) -> None:
        """A cell begins."""
        self._cell_id = getattr(info, "cell_id", None)

    def post_run_cell(self, result: Any) -> None:
        """Remember a cell that has ended; where it ran out of memory, point to ``%remat``."""
        info = result.info
        if info is None or not info.store_history or _AGAIN.fullmatch(info.raw_cell):
            return
        ran = Ran(info.raw_cell, result.execution_count, getattr(info, "cell_id", None), _message(result.error_in_exec))
        before = self.exhausted
        if ran.message:
            self.exhausted = ran
            print("%remat shows what took the memory, and what to change.")  # noqa: T201
        elif before and (ran.text == before.text or (ran.cell_id and ran.cell_id == before.cell_id)):
            self.exhausted = None
        self.before = ran

    def show_message(self, message: str, *, as_text: bool) -> None:
        """Show what XLA said when memory was exhausted."""
        from remat_magic.measuring.explain import explain
        from remat_magic.views.display import text

        with contextlib.suppress(RematError):  # in words that are not known
            record = explain(message)
            print(text(record)) if as_text else display(record)  # noqa: T201

    def remember(self, trace: Trace) -> None:
        """Take over what completion offers: names, places, gradients and policies of the function."""
        keyed = {"at": trace.sites, "gradient": trace.gradients, "policy": trace.choices()}
        self.offered = {"names": trace.names} | {name: tuple(one.key for one in keyed[name]) for name in keyed}

    @contextlib.contextmanager
    def patience(self, sentence: str) -> Iterator[None]:
        """Say in a notebook's cell what is being done, if it takes longer than a moment, until it is done."""
        if getattr(self.shell, "kernel", None) is None:
            yield
            return
        publish, transient = self.shell.display_pub.publish, {"display_id": uuid.uuid4().hex}
        said = threading.Event()

        def say() -> None:
            said.set()
            publish({"text/plain": printable(sentence)}, transient=transient)

        late = threading.Timer(_MOMENT, say)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()
            if said.is_set():
                publish({"text/plain": ""}, transient=transient, update=True)

    def show(self, inspection: Inspection, options: Options, rebinding: Rebinding | None) -> RematWidget | None:
        """Show an inspection, keep and apply it as the options say, and return the widget.

        With ``--text`` nothing is returned, so that IPython displays nothing else.
        """
        whole = options.text == "full"
        if options.text and options.output is None and not options.apply:
            return self._print(inspection, whole)
        from remat_magic.widget import RematWidget

        def function(widget: RematWidget) -> Callable[..., Any]:
            return widget.function_of(inspection.loss) if rebinding and rebinding.is_inside else widget.function

        widget = RematWidget(
            inspection.trace,
            inspection.policy,
            inspection.at,
            title=inspection.title,
            apply=None if rebinding is None else lambda widget: rebinding.apply(function(widget), widget.policy),
            namespace=self.namespace,
            cell_id=self._cell_id,
            device=inspection.device,
        )
        if options.text:  # first: what fails, fails before anything has changed
            self._print(inspection, whole)
        if options.output is not None:
            self.namespace[options.output] = widget
        if options.apply and rebinding is not None:
            self._apply_later(rebinding, function(widget), widget.policy)
        return None if options.text else widget

    def _apply_later(self, rebinding: Rebinding, function: Callable[..., Any], policy: str) -> None:
        """Bind the function's name to what the widget has chosen, when the running cell has ended."""
        from remat_magic.widget.idle import idle_time

        def apply() -> None:
            try:
                print(printable(rebinding.apply(function, policy)))  # noqa: T201
            except RematError as error:
                self.shell.show_usage_error(printable(str(error)))

        idle = idle_time(self.shell)
        if idle is not None:
            idle.soon(apply)

    def _print(self, inspection: Inspection, whole: bool) -> None:
        """Print the answer, and all of the report too if ``whole``."""
        from remat_magic.views.text import render
        from remat_magic.widget.live_trace import LiveTrace, shown, text_answer

        live = LiveTrace(inspection.trace, self.namespace, device=inspection.device)
        report = live.trace.report(inspection.policy, inspection.at, self.namespace, device=live.like)
        short = text_answer(live, report, inspection.title)
        if live.device or not whole:
            shown(short)
        if whole:
            peaks = f"Peaks are as on {live.like}." if live.like else inspection.title
            print(printable(f"\n{short.diff}"))  # noqa: T201 - as it is to be applied
            shown(render(report, peaks))


def _message(error: BaseException | None) -> str:
    """What XLA says where memory is exhausted, in an error or one that led to it; empty in others."""
    while error is not None:
        text = text_of(error)
        if "RESOURCE_EXHAUSTED" in text:
            return text
        error = error.__cause__ or error.__context__
    return ""
