"""A comparison of policies as an HTML table and as rich text."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table

from remat_magic.records import Comparison, ComparisonRow, GradientDifference, Places
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.html import style
from remat_magic.views.pareto import pareto_svg, stands_for
from remat_magic.views.tables import KEYS
from remat_magic.views.text import Text

__all__ = [
    "about",
    "comparison_html",
    "comparison_panel",
    "comparison_table",
    "gradients_html",
    "places_panel",
    "render",
    "unfinished_panel",
]


@dataclass(frozen=True, slots=True)
class _Cell:
    """``value`` is what a column is sorted by; None, the unknown, comes last."""

    text: str
    exact: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of numbers: ``group`` is "estimated", "measured" or, for what is counted, empty."""

    head: str
    group: str
    cell: Callable[[ComparisonRow], _Cell]
    help: str = ""


def _bytes(number: int | None) -> _Cell:
    return _Cell("") if number is None else _Cell(fmt.nbytes(number), fmt.exact(number, "bytes"), number)


def _flops(number: int | None) -> _Cell:
    return _Cell("") if number is None else _Cell(fmt.flops(number), fmt.exact(number, "FLOPs"), number)


def _seconds(number: float | None, complete: bool = True) -> _Cell:
    if number is None:
        return _Cell("unknown")
    return _Cell(f"{'' if complete else '≥ '}{fmt.seconds(number)}", f"{number:.6g} seconds", number)


def _recomputed(row: ComparisonRow) -> _Cell:
    if row.recomputed_flops is None:
        return _Cell("")
    exact = fmt.exact(row.recomputed_flops, "FLOPs")
    if row.repeated_flops is not None and row.deferred_flops is not None:
        exact += f": {row.repeated_flops:,} repeated, {row.deferred_flops:,} deferred"
    share = ""
    if row.forward_flops and row.recomputed_flops:
        share = f" +{fmt.percent(row.recomputed_flops, row.forward_flops)}"
        exact += f";{share} of the forward pass's"
    prefix = "" if row.complete else "≥ "
    text = f"{prefix}{fmt.flops(row.recomputed_flops)}{share}" if row.recomputed_flops else "none"
    return _Cell(text, exact, row.recomputed_flops)


def _time(row: ComparisonRow, name: str) -> _Cell:
    times = row.times
    return _Cell("") if times is None else _seconds(getattr(times, name), times.complete)


def _recomputing(row: ComparisonRow) -> _Cell:
    """What recomputation takes; on hover how much of it is spent telling other devices."""
    cell, times = _time(row, "recomputed"), row.times
    if times is None or not row.repeated_communicated_bytes:
        return cell
    told = "an unknown time" if times.communicated is None else fmt.seconds(times.communicated)
    return _Cell(cell.text, f"{cell.exact}, {told} of it to tell other devices", cell.value)


def _communicating(part: float | None) -> str:
    """How much of a half the links take; empty where nothing is told."""
    if part is None:
        return " without what devices tell each other"
    return f" (communication {fmt.seconds(part)} of it)" if part else ""


def _step(row: ComparisonRow) -> _Cell:
    """The whole step; its halves on hover."""
    cell, times = _time(row, "total"), row.times
    if times is None:
        return cell
    ahead, back = (_communicating(part) for part in (times.forward_communicated, times.backward_communicated))
    parts = f"forward {fmt.seconds(times.forward)}{ahead}, backward {fmt.seconds(times.backward)}{back}"
    if times.offload is None:
        parts += ", offloading unknown"
    elif times.offload:
        parts += f", offloading {fmt.seconds(times.offload)}"
    return _Cell(cell.text, f"{cell.exact}: {parts}", cell.value)


def _saved(row: ComparisonRow) -> _Cell:
    """What is saved; what is alive anyway on hover."""
    cell = _bytes(row.saved_bytes)
    if not row.argument_bytes:
        return cell
    besides = f"besides {row.argument_bytes:,} bytes of arguments, which are alive anyway"
    return _Cell(cell.text, f"{cell.exact}; {besides}", cell.value)


def _peak(row: ComparisonRow) -> _Cell:
    """The peak; marked where less is saved and the peak is no lower, with why on hover."""
    cell = _bytes(row.peak_bytes)
    return _Cell(f"{cell.text} !", f"{cell.exact}; {row.no_gain}", cell.value) if row.no_gain else cell


def _columns(rows: Sequence[ComparisonRow]) -> Iterator[_Column]:
    """What decides comes first: estimates, then what was measured, then what was counted."""
    yield _Column("peak", "estimated", _peak, "device memory held at most")
    if any(row.times for row in rows):
        yield _Column("step", "estimated", _step, "forward, backward and offloading, one after the other")
        yield _Column("recomputing", "estimated", _recomputing, "part of the backward pass")
    yield from _measured(rows)
    yield _Column("saved", "", _saved, "intermediates kept on the device")
    if any(row.offloaded_bytes for row in rows):
        yield _Column("offloaded", "", lambda row: _bytes(row.offloaded_bytes), "moved to another memory")
    yield _Column("recomputed", "", _recomputed, "arithmetic that the backward pass does again or for the first time")
    if any(row.repeated_communicated_bytes for row in rows):
        meaning = "what a device has of the results of gathers, reductions and the like that run again"
        yield _Column("communicated again", "", lambda row: _bytes(row.repeated_communicated_bytes), meaning)


def _simulated(rows: Sequence[ComparisonRow]) -> int:
    """On how many devices runs were measured that one machine simulates; 0 for none."""
    return max((row.simulated_devices for row in rows if row.measured_seconds is not None), default=0)


def _of_runs(rows: Sequence[ComparisonRow]) -> str:
    """What the measured seconds are."""
    most = _simulated(rows)
    of_all = f"; the {most} devices are simulated: what this machine takes for all of them, no device's own time"
    return f"median of several runs{of_all if most else ''}"


def _measured(rows: Sequence[ComparisonRow]) -> Iterator[_Column]:
    columns: list[tuple[str, str, Callable[[ComparisonRow], _Cell], str]] = [
        (
            "measured_fits",
            "fits",
            _fits,
            "whether the compiled program needs no more than the device has: arguments, results and temporaries",
        ),
        (
            "measured_temp_bytes",
            "temporaries",
            _temporaries,
            "what the compiled program needs besides arguments and results, by XLA's count",
        ),
        ("measured_seconds", "run", lambda row: _known_seconds(row.measured_seconds), _of_runs(rows)),
        ("measured_compile_seconds", "compile", lambda row: _known_seconds(row.measured_compile_seconds), ""),
        (
            "measured_flops",
            "FLOPs",
            lambda row: _flops(_whole(row.measured_flops)),
            "as XLA counts them, the bodies of loops as often as they run",
        ),
    ]
    if any(row.measured_communicated_bytes for row in rows):  # on one device there is nobody to tell
        columns.append(
            (
                "measured_communicated_bytes",
                "communication",
                _communication,
                "what a device has of the results of gathers, reductions and the like, in the compiled program",
            )
        )
    for field, head, cell, meaning in columns:
        if any(getattr(row, field) is not None for row in rows):
            yield _Column(head, "measured", cell, meaning)


def _communication(row: ComparisonRow) -> _Cell:
    """What devices tell each other; by its kinds on hover."""
    cell = _bytes(row.measured_communicated_bytes)
    return _Cell(cell.text, row.measured_collectives or cell.exact, cell.value)


def _temporaries(row: ComparisonRow) -> _Cell:
    """What XLA needs inside; on hover with arguments and results."""
    cell = _bytes(row.measured_temp_bytes)
    if row.measured_bytes is None:
        return cell
    return _Cell(cell.text, f"{cell.exact}; {row.measured_bytes:,} bytes with arguments and results", cell.value)


def _fits(row: ComparisonRow) -> _Cell:
    """Whether it fits; how much it needs on hover."""
    if row.measured_fits is None or row.needed_bytes is None:
        return _Cell("")
    needed, exact = row.needed_bytes, fmt.exact(row.needed_bytes, "bytes")
    quickly = " (quick)" if row.measured_effort == "quick" else ""
    by = "XLA's compiler with less optimization" if quickly else "XLA's compiler"
    if row.available_bytes is None:
        return _Cell(f"yes: {fmt.nbytes(needed)}{quickly}", f"{exact} needed, by {by}", needed)
    exact += f" of {row.available_bytes:,} needed, by {by}"
    if row.measured_fits:
        share = fmt.percent(needed, row.available_bytes)
        return _Cell(f"yes: {fmt.nbytes(needed)}{quickly}", f"{exact}, {share}", needed)
    return _Cell(f"no: {fmt.nbytes(needed - row.available_bytes)} too much{quickly}", exact, needed)


def _known_seconds(number: float | None) -> _Cell:
    return _Cell("") if number is None else _seconds(number)


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _groups(columns: Sequence[_Column]) -> list[tuple[str, int]]:
    groups = list[tuple[str, int]]()
    for column in columns:
        if groups and groups[-1][0] == column.group:
            groups[-1] = (column.group, groups[-1][1] + 1)
        else:
            groups.append((column.group, 1))
    return groups


def _heading(group: str, device: str, rows: Sequence[ComparisonRow]) -> str:
    of = _of_devices(group, rows)
    if group == "estimated":
        return f"estimated, for {device}{of}" if device and any(row.times for row in rows) else f"estimated{of}"
    if group == "measured":
        where = ", ".join(dict.fromkeys(row.measured_device for row in rows if row.measured_device))
        if any(row.measured_fits is not None for row in rows):
            return f"compiled, for {where}"
        most = _simulated(rows)
        where += f" ({most} simulated devices, run on this machine)" if most else ""
        return f"measured, on {where}{of}" if where else f"measured{of}"
    return f"counted{of}"


def _of_devices(group: str, rows: Sequence[ComparisonRow]) -> str:
    """Whose the figures of a group are, where several devices share the work."""
    said = next((row.of_devices for row in rows if row.of_devices), "")
    return said and f", {'of one device' if group == 'measured' else said}"


def _mark(row: ComparisonRow) -> str:
    return "◆" if row.pareto else ""


def _caption(function: str, rows: Sequence[ComparisonRow]) -> str:
    of = f" for {function}" if function else ""
    if not any(row.pareto for row in rows):
        return f"Policies{of}."
    if any(row.ranked_by == "compiled" for row in rows):
        return f"Policies{of}. ◆: it fits, and no other that is compiled has both less memory and less to add."
    return f"Policies{of}. ◆: no other policy has both a lower peak and less to add."


def comparison_table(
    rows: Sequence[ComparisonRow], function: str = "", device: str = "", chosen: str = "", *, live: bool = False
) -> str:
    """The rows as an HTML table, to stand inside an element of class ``remat-compare``.

    Args:
        rows: what to show.
        function: whose policies these are.
        device: whose data sheet the estimated times are from.
        chosen: the policy to mark as the current one.
        live: whether a script is there, for which policies and headings are buttons: to choose and to sort by.
    """
    columns = list(_columns(rows))
    groups = "".join(
        f'<th scope="colgroup" colspan="{span}"{_class(number)}>{escape(_heading(group, device, rows))}</th>'
        for number, (group, span) in enumerate(_groups(columns))
    )
    heads = "".join(
        f'<th scope="col" class="remat-num{_first(columns, number)}"{_title(column.help)}>'
        f"{_sorter(column.head, number) if live else escape(column.head)}</th>"
        for number, column in enumerate(columns)
    )
    body = list[str]()
    for row in rows:
        current = ' aria-current="true"' if chosen and chosen in stands_for(row) else ""
        also = "".join(f"<br><small>= <code>{escape(other)}</code></small>" for other in row.same_labels)
        name = f"<code>{escape(row.label)}</code>"
        if live:
            value, place = html.escape(row.policy), html.escape(row.at)
            button = f'<button type="button" class="remat-link" data-policy="{value}" data-at="{place}" {KEYS}>'
            name = f"{button}{name}</button>"
        front = '<span class="remat-front" title="on the front" aria-label="on the front" role="img">◆</span>'
        # In the row itself, so that it stays with it when the table is sorted.
        failed = f"<br><small>{escape(row.error)}</small>" if row.error and row.peak_bytes is not None else ""
        failed += f"<br><small>{escape(row.no_gain)}</small>" if row.no_gain else ""
        head = f'<th scope="row">{front if row.pareto else ""}{name}{also}{failed}</th>'
        cells = "".join(_cell(column, row, _first(columns, number)) for number, column in enumerate(columns))
        if row.error and row.peak_bytes is None:
            cells = f'<td colspan="{len(columns)}">{escape(row.error)}</td>'
        same = html.escape("\n".join(stands_for(row)))
        body.append(f'<tr class="remat-row" data-same="{same}"{current}>{head}{cells}</tr>')
    return (
        f'<table class="remat-table remat-comparison"><caption>{escape(_caption(function, rows))}</caption><thead>'
        f'<tr><th scope="col" rowspan="2">policy</th>{groups}</tr>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _class(number: int) -> str:
    return ' class="remat-group"' if number else ""


def _first(columns: Sequence[_Column], number: int) -> str:
    """The class of a group's first column, which a line sets off."""
    new = number > 0 and columns[number].group != columns[number - 1].group
    return " remat-group" if new else ""


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _cell(column: _Column, row: ComparisonRow, extra: str) -> str:
    """A number, with its heading for where there is no room for columns."""
    cell = column.cell(row)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    head = f' data-head="{escape(column.head)}"' if cell.text else ""
    return f'<td class="remat-num{extra}"{head}{value}{_title(cell.exact)}>{escape(cell.text)}</td>'


def _sorter(head: str, number: int) -> str:
    return f'<button type="button" class="remat-link" data-sort="{number}" {KEYS}>{escape(head)}</button>'


def comparison_html(
    rows: Sequence[ComparisonRow],
    function: str = "",
    device: str = "",
    source: str = "",
    chosen: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Picture and table as one static fragment with its style sheet; arguments as for ``comparison_panel``."""
    panel = comparison_panel(rows, function, device, source, chosen, notes)
    return f'<div class="remat"><style>{style()}</style>{panel}</div>'


def comparison_panel(
    rows: Sequence[ComparisonRow],
    function: str = "",
    device: str = "",
    source: str = "",
    chosen: str = "",
    notes: Sequence[str] = (),
    *,
    live: bool = False,
    width: int = 680,
) -> str:
    """Picture, table and findings, to stand inside an element of class ``remat``.

    Args:
        rows: as for ``comparison_table``, and so are ``function``, ``device``, ``chosen`` and ``live``.
        function: whose policies these are.
        device: whose data sheet the estimated times are from, and
        source: where that is published.
        chosen: the policy to mark.
        notes: sentences to show with it.
        live: whether a script is there.
        width: of the picture, in pixels.
    """
    where = f'<p class="remat-empty">Estimated times: {escape(device)}; {escape(source)}.</p>' if device else ""
    table = comparison_table(rows, function, device, chosen, live=live)
    return (
        f'<div class="remat-pictured"><div class="remat-picture">{pareto_svg(rows, chosen, width)}</div>'
        f'<div><div class="remat-compare">{table}</div>{_said(rows, notes)}{where}</div></div>'
    )


def unfinished_panel(rows: Sequence[ComparisonRow], total: int, function: str = "", device: str = "") -> str:
    """The table of what is known while others are traced; what is on the front is not known before all are.

    Args:
        rows: what is known.
        total: how many policies are compared.
        function: whose policies these are.
        device: whose data sheet the estimated times are from.
    """
    table = comparison_table([replace(row, pareto=False) for row in rows], function, device, live=True)
    said = f"{len(rows)} of {total} policies; the others are being traced."
    return f'<p class="remat-empty">{said}</p><div class="remat-compare">{table}</div>'


def about(comparison: Comparison) -> dict[str, Any]:
    """What is told with the rows of a comparison."""
    device = comparison.device
    times = {"device": device.name, "source": device.source} if device else {}
    not_tried = comparison.not_tried if isinstance(comparison, Places) else ()
    return {"function": comparison.function, "notes": (*comparison.notes, *not_tried), **times}


def places_panel(places: Places, policy: str, at: str, *, live: bool = False, width: int = 680) -> str:
    """As ``comparison_panel``, of policies at several places, with the chosen one marked."""
    return comparison_panel(places.rows, chosen=f"{policy} at {at}", **about(places), live=live, width=width)


def _said(rows: Sequence[ComparisonRow], notes: Sequence[str]) -> str:
    """What the estimates cannot tell, and where compiled programs depart from what the jaxprs say."""
    items = [f"<li>{escape(note)}</li>" for note in notes]
    items += [
        f"<li><code>{escape(row.label)}</code>: {escape(finding)}</li>" for row in rows for finding in row.findings
    ]
    return f'<ul class="remat-findings">{"".join(items)}</ul>' if items else ""


def render(
    rows: Sequence[ComparisonRow],
    function: str = "",
    device: str = "",
    source: str = "",
    chosen: str = "",
    notes: Sequence[str] = (),
) -> Group:
    """The rows as a rich renderable; arguments as for ``comparison_html``."""
    columns = list(_columns(rows))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy", overflow="fold", min_width=min(32, max((len(row.label) for row in rows), default=0)))
    table.add_column("")
    for column in columns:
        head = f"{column.head} ({column.group[:3]}.)" if column.group else column.head
        table.add_column(head, justify="right", overflow="fold")
    errors = list[Text]()
    for row in rows:
        name = Text(row.label, style="bold" if chosen in stands_for(row) else "")
        for other in row.same_labels:
            name.append(f"\n= {other}", style="dim")
        table.add_row(name, Text(_mark(row)), *(Text(column.cell(row).text) for column in columns))
        said = [*filter(None, [row.error, row.no_gain]), *row.findings]
        errors += [Text(f"! {row.label}: {sentence}", style="yellow") for sentence in said]
    about = f"est.: estimated{f' for {device} ({source})' if device else ''}; nothing ran for it."
    whose = _of_devices("", rows).removeprefix(", ")
    if whose:
        about += f" Figures are {whose}, but for what is measured, which is of one."
    if most := _simulated(rows):
        about += f" run: the {most} devices are simulated; it is what this machine takes for all, no device's own time."
    return Group(
        Text(_caption(function, rows), style="dim"),
        table,
        Text(about, style="dim"),
        *(Text(note) for note in notes),
        *errors,
    )


def gradients_html(differences: Sequence[GradientDifference]) -> str:
    """How far values and gradients are from those without the checkpoint."""
    rows = list[str]()
    for difference in differences:
        if difference.absolute is None:
            cells = f'<td colspan="3">{escape(difference.error)}</td>'
        else:
            relative = "" if difference.relative is None else f"{difference.relative:.2g}"
            cells = (
                f'<td class="remat-num">{difference.absolute:.2g}</td><td class="remat-num">{relative}</td>'
                f"<td>{escape(difference.where)}</td>"
            )
        rows.append(f'<tr><th scope="row"><code>{escape(difference.policy)}</code></th>{cells}</tr>')
    return (
        '<div class="remat-compare"><table class="remat-table remat-comparison">'
        "<caption>Largest difference of values and gradients from those without the checkpoint</caption>"
        '<thead><tr><th scope="col">policy</th><th scope="col" class="remat-num">absolute</th>'
        '<th scope="col" class="remat-num">relative</th><th scope="col">where</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
