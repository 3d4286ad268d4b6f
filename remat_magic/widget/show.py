"""The widget without a magic."""

from __future__ import annotations

from remat_magic.api import Policy, Trace
from remat_magic.records import RematError
from remat_magic.widget.widget import RematWidget


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
