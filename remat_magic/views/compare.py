"""A comparison of policies as an HTML table and as rich text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table

from remat_magic.records import Comparison, ComparisonRow, Places
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import table, td
from remat_magic.views.text import Text

_Column = tuple[str, Callable[[ComparisonRow], str]]


def _bytes(number: int | None) -> str:
    return "" if number is None else fmt.nbytes(number)


def _seconds(number: float | None) -> str:
    return "" if number is None else fmt.seconds(number)


def _flops(number: int | None) -> str:
    return "" if number is None else fmt.flops(number)


def _peak(row: ComparisonRow) -> str:
    return "" if row.peak_bytes is None else fmt.about(row.peak_bytes, row.peak_low, row.peak_high)


def _time(row: ComparisonRow, seconds: float | None) -> str:
    if row.times is None or seconds is None:
        return ""
    return f"{'' if row.times.complete else '≥ '}{fmt.seconds(seconds)}"


def _recomputed(row: ComparisonRow) -> str:
    if row.recomputed_flops is None:
        return ""
    least = "" if row.complete else "≥ "
    share = f" +{fmt.percent(row.recomputed_flops, row.forward_flops)}" if row.forward_flops else ""
    return f"{least}{fmt.flops(row.recomputed_flops)}{share}" if row.recomputed_flops else f"{least}none"


def _needs(row: ComparisonRow) -> str:
    """What the compiled program needs, and whether that is too much."""
    measured = row.measurement
    if measured is None or measured.needed_bytes is None:
        return ""
    needed, available = measured.needed_bytes, measured.available_bytes
    quickly = ", compiled quickly" if measured.effort == "quick" else ""
    if measured.fits is not False or available is None:
        return f"{fmt.nbytes(needed)}{quickly}"
    return f"{fmt.nbytes(needed)}, {fmt.nbytes(needed - available)} too much{quickly}"


_COLUMNS: tuple[_Column, ...] = (
    ("peak", _peak),
    ("step", lambda row: _time(row, row.times and row.times.total)),
    ("recomputing", lambda row: _time(row, row.times and row.times.recomputed)),
    ("needs (compiled)", _needs),
    ("temporaries (measured)", lambda row: _bytes(row.measurement and row.measurement.temp_bytes)),
    ("run (measured)", lambda row: _seconds(row.measurement and row.measurement.run_seconds)),
    ("FLOPs (measured)", lambda row: _flops(row.measurement and row.measurement.flops)),
    ("communication (measured)", lambda row: _bytes(row.measurement and row.measurement.communicated_bytes)),
    ("saved", lambda row: _bytes(row.saved_bytes)),
    ("offloaded", lambda row: _bytes(row.offloaded_bytes or None)),
    ("recomputed", _recomputed),
    ("communicated again", lambda row: _bytes(row.repeated_communicated_bytes or None)),
)


def _columns(rows: Sequence[ComparisonRow]) -> list[_Column]:
    """Those in which something is known: estimates, what was measured, what was counted."""
    return [(head, cell) for head, cell in _COLUMNS if any(map(cell, rows))]


def _sentences(row: ComparisonRow) -> list[str]:
    measured = row.measurement
    return [*filter(None, [row.error, measured and measured.error]), *(measured.findings if measured else ())]


def _about(comparison: Comparison) -> list[str]:
    """What the rows do not tell."""
    rows, device = comparison.rows, comparison.device
    told = ["◆: no other policy has both less memory and less to add."] if any(row.pareto for row in rows) else []
    if device is not None:
        told.append(f"Estimated for {device.name} ({device.source}); nothing ran for it.")
    if of_devices := next((row.of_devices for row in rows if row.of_devices), ""):
        told.append(f"Figures are {of_devices}, but for what is measured, which is of one.")
    run = (row.measurement for row in rows if row.measurement and row.measurement.run_seconds is not None)
    simulated = max((measured.devices for measured in run if measured.simulated), default=0)
    if simulated:
        told.append(f"run: the {simulated} devices are simulated, and take this machine's time for all of them.")
    return [*told, *comparison.notes, *(comparison.not_tried if isinstance(comparison, Places) else ())]


def comparison_html(comparison: Comparison) -> str:
    """The table, and what it does not tell."""
    columns, body = _columns(comparison.rows), list[str]()
    for row in comparison.rows:
        front = '<span title="on the front">◆</span> ' if row.pareto else ""
        also = "".join(f"<br><small>= <code>{escape(other)}</code></small>" for other in row.same_labels)
        told = "".join(f"<br><small>{escape(sentence)}</small>" for sentence in _sentences(row))
        name = td("policy", f"{front}<code>{escape(row.label)}</code>{also}{told}")
        body.append(f'<tr class="remat-row">{name}{"".join(td("num", escape(cell(row))) for _, cell in columns)}</tr>')
    heads = [("policy", "policy"), *((head, "num") for head, _ in columns)]
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in _about(comparison))
    shown = table(f"Policies for {comparison.function}", heads, body, ())
    return f'<div class="remat-compare">{shown}</div>' + (f'<ul class="remat-findings">{notes}</ul>' if notes else "")


def render(comparison: Comparison) -> Group:
    """The comparison as a rich renderable."""
    rows, columns = comparison.rows, _columns(comparison.rows)
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("policy", overflow="fold", min_width=min(32, max((len(row.label) for row in rows), default=0)))
    shown.add_column("")
    for head, _ in columns:
        shown.add_column(head, justify="right", overflow="fold")
    for row in rows:
        name = Text(row.label)
        for other in row.same_labels:
            name.append(f"\n= {other}", style="dim")
        shown.add_row(name, Text("◆" if row.pareto else ""), *(Text(cell(row)) for _, cell in columns))
    errors = [Text(f"{row.label}: {sentence}", "yellow") for row in rows for sentence in _sentences(row)]
    return Group(shown, *(Text(sentence, style="dim") for sentence in _about(comparison)), *errors)
