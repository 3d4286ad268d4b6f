"""A comparison of policies as an HTML table and as rich text."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from remat_magic.records import Comparison, ComparisonRow, GradientDifference, Places
from remat_magic.views.comparison_columns import Column, columns_of, simulated
from remat_magic.views.format import escape
from remat_magic.views.pareto import pareto_svg, stands_for
from remat_magic.views.style import style
from remat_magic.views.tables import KEYS
from remat_magic.views.text import Text


def _groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
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
        most = simulated(rows)
        where += f" ({most} simulated devices, run on this machine)" if most else ""
        return f"measured, on {where}{of}" if where else f"measured{of}"
    return f"counted{of}"


def _of_devices(group: str, rows: Sequence[ComparisonRow]) -> str:
    """Whose the figures of a group are, where several devices share the work."""
    of_devices = next((row.of_devices for row in rows if row.of_devices), "")
    return of_devices and f", {'of one device' if group == 'measured' else of_devices}"


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
    columns = list(columns_of(rows))
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


def _first(columns: Sequence[Column], number: int) -> str:
    """The class of a group's first column, which a line sets off."""
    begins_group = number > 0 and columns[number].group != columns[number - 1].group
    return " remat-group" if begins_group else ""


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def _cell(column: Column, row: ComparisonRow, extra: str) -> str:
    """A number, with its heading for where there is no room for columns."""
    cell = column.cell(row)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    head = f' data-head="{escape(column.head)}"' if cell.text else ""
    return f'<td class="remat-num{extra}"{head}{value}{_title(cell.exact)}>{escape(cell.text)}</td>'


def _sorter(head: str, number: int) -> str:
    return f'<button type="button" class="remat-link" data-sort="{number}" {KEYS}>{escape(head)}</button>'


def comparison_html(comparison: Comparison) -> str:
    """Picture and table as one static fragment with its style sheet."""
    return f'<div class="remat"><style>{style()}</style>{comparison_panel(comparison)}</div>'


def comparison_panel(comparison: Comparison, chosen: str = "", *, live: bool = False, width: int = 680) -> str:
    """Picture, table and findings, to stand inside an element of class ``remat``.

    Args:
        comparison: of policies, or of these at several places.
        chosen: the row to mark: a policy's key, or "policy at place".
        live: as for ``comparison_table``.
        width: of the picture, in pixels.
    """
    rows, device = comparison.rows, comparison.device
    name, where = "", ""
    if device is not None:
        name = device.name
        where = f'<p class="remat-empty">Estimated times: {escape(name)}; {escape(device.source)}.</p>'
    table = comparison_table(rows, comparison.function, name, chosen, live=live)
    return (
        f'<div class="remat-pictured"><div class="remat-picture">{pareto_svg(rows, chosen, width)}</div>'
        f'<div><div class="remat-compare">{table}</div>{_said(rows, _notes(comparison))}{where}</div></div>'
    )


def _notes(comparison: Comparison) -> tuple[str, ...]:
    """What the rows do not tell."""
    return (*comparison.notes, *(comparison.not_tried if isinstance(comparison, Places) else ()))


def _said(rows: Sequence[ComparisonRow], notes: Sequence[str]) -> str:
    """What the estimates cannot tell, and where compiled programs depart from what the jaxprs say."""
    items = [f"<li>{escape(note)}</li>" for note in notes]
    items += [
        f"<li><code>{escape(row.label)}</code>: {escape(finding)}</li>" for row in rows for finding in row.findings
    ]
    return f'<ul class="remat-findings">{"".join(items)}</ul>' if items else ""


def render(comparison: Comparison) -> Group:
    """The comparison as a rich renderable."""
    rows, device = comparison.rows, comparison.device
    columns = list(columns_of(rows))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("policy", overflow="fold", min_width=min(32, max((len(row.label) for row in rows), default=0)))
    table.add_column("")
    for column in columns:
        head = f"{column.head} ({column.group[:3]}.)" if column.group else column.head
        table.add_column(head, justify="right", overflow="fold")
    errors = list[Text]()
    for row in rows:
        name = Text(row.label)
        for other in row.same_labels:
            name.append(f"\n= {other}", style="dim")
        table.add_row(name, Text(_mark(row)), *(Text(column.cell(row).text) for column in columns))
        sentences = [*filter(None, [row.error]), *row.findings]
        errors += [Text(f"! {row.label}: {sentence}", style="yellow") for sentence in sentences]
    about = f"est.: estimated{f' for {device.name} ({device.source})' if device else ''}; nothing ran for it."
    whose = _of_devices("", rows).removeprefix(", ")
    if whose:
        about += f" Figures are {whose}, but for what is measured, which is of one."
    if most := simulated(rows):
        about += f" run: the {most} devices are simulated; it is what this machine takes for all, no device's own time."
    return Group(
        Text(_caption(comparison.function, rows), style="dim"),
        table,
        Text(about, style="dim"),
        *(Text(note) for note in _notes(comparison)),
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
