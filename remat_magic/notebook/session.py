"""One shell's share of the extension: what is remembered between cells, and how an inspection is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remat_magic import devices
from remat_magic.records import RematError
from remat_magic.wording import printable

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from remat_magic.api import Trace
    from remat_magic.notebook.inspection import Inspection
    from remat_magic.notebook.line import Options
    from remat_magic.notebook.rebinding import Rebinding
    from remat_magic.records import Report
    from remat_magic.widget import RematWidget


class Session:
    """What one shell remembers and shows.

    ``names``, ``sites``, ``policies`` and ``gradients`` are those of the function inspected last, for completion; the
    trace itself is not kept.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.names: tuple[str, ...] = ()
        self.sites: tuple[str, ...] = ()
        self.policies: tuple[str, ...] = ()
        self.gradients: tuple[str, ...] = ()
        self._cell_id: str | None = None

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

    def remember(self, trace: Trace) -> None:
        """Keep what completion can offer next time."""
        self.names = tuple(trace.names)
        self.sites = tuple(site.key for site in trace.sites)
        self.gradients = tuple(gradient.key for gradient in trace.gradients)
        self.policies = tuple(choice.key for choice in trace.choices())

    def show(self, inspection: Inspection, options: Options, rebinding: Rebinding | None) -> RematWidget | None:
        """Show an inspection, keep and apply it as the options say, and return the widget.

        With ``--text`` nothing is returned, so that IPython displays nothing else.

        Raises:
            RematError: the function cannot be reported on under this policy.
        """
        if options.text and options.output is None and not options.apply:
            return self._print(inspection)
        from remat_magic.widget import RematWidget

        def function(widget: RematWidget) -> Callable[..., Any]:
            inside = rebinding is not None and rebinding.is_inside
            return widget.function_of(inspection.loss) if inside else widget.function

        widget = RematWidget(
            inspection.trace,
            inspection.policy,
            inspection.at,
            title=inspection.title,
            apply=None if rebinding is None else lambda widget: rebinding.apply(function(widget), widget.policy),
            namespace=self.namespace,
            cell_id=self._cell_id,
            inputs=inspection.inputs,
            device=inspection.device,
        )
        if options.text:  # first: what fails, fails before anything has changed
            self._print(inspection)
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

    def _print(self, inspection: Inspection) -> None:
        from rich.console import Console

        from remat_magic.views import text

        name = inspection.device
        report = inspection.trace.report(inspection.policy, inspection.at, self.namespace, device=name or None)
        title = " ".join(filter(None, [inspection.title, f"Peaks are as on {name}." if name else ""]))
        if title:
            print(printable(title))  # noqa: T201
        if sys.stdout.isatty():
            Console(file=sys.stdout, force_jupyter=False).print(text.render(report))
        else:  # a notebook or a pipe, which tells no width
            print(text.plain(report), end="")  # noqa: T201
        if name:
            print(printable(self._fits(inspection, report, devices.get(name))))  # noqa: T201

    def _fits(self, inspection: Inspection, report: Report, device: devices.Device) -> str:
        """Whether it fits a device by its compiler, or by estimate and why no compiler says it."""
        from remat_magic.views.fits import estimate_text, fits_text

        usable = devices.usable_bytes(device)
        if not device.compiles_here:
            return f"{estimate_text(device.name, report, usable)} {device.why_not}"
        try:
            measured = inspection.trace.measure(
                inspection.policy, inspection.at, namespace=self.namespace, device=device
            )
        except RematError as error:  # the report stands all the same
            return f"{estimate_text(device.name, report, usable)} {error}"
        return fits_text(measured, usable)
