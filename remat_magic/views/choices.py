"""Choices side by side: policies compared, and all that was tried as a picture and a table, which the script sorts."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic.records import Comparison, ComparisonRow, Fit, FitChoice, Places
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.fit import with_code, words_of
from remat_magic.views.format import escape, ticks
from remat_magic.views.plans import findings
from remat_magic.views.tables import KEYS, Part, Row, Table, cell, table_html

_PAD = 0.04  # of the range of what is needed, on both sides of it
_STEPS = 1000  # of the slider


def tried_html(choices: Sequence[FitChoice], fit: Fit | None = None) -> str:
    """The picture and the table of choices, in an element of class ``remat``; ``fit`` is what they are to fit."""
    in_time = answer.cost_head(answer.words(choice) for choice in choices) == "time"
    numbers = {choice.what: number for number, choice in enumerate(choices)}
    rows = [_row(number, choice, fit is not None, numbers) for number, choice in enumerate(choices)]
    fits = [("Fits", "fits")] if fit else []
    saves = [] if fit else [("Saves", "num")]  # what autodiff lists, of which a device may keep less
    cost = "Time" if in_time else "Work"
    heads = [("#", "order"), ("Choice", "policy"), ("Needs", "num"), *fits, (cost, "num"), *saves]
    shown = table_html(Table("All choices that were tried", heads, rows, "tried"))
    notes = [answer.unfinished(fit), *(fit.not_tried if fit.progress.finished else ())] if fit else []
    said = "".join(f'<p class="remat-empty">{escape(note)}</p>' for note in notes if note)
    more = f'<button type="button" data-action="what-if" {KEYS}>What if one value more, or less, is saved</button>'
    return f"{_picture(choices, fit, in_time)}{shown}{said}{more}"


def of_rows(rows: Sequence[ComparisonRow]) -> list[FitChoice]:
    """The policies of a comparison as choices, where nothing is to fit: the work is a share of the forward pass's."""
    found = list[FitChoice]()
    for row in rows:
        work = row.repeated_flops / row.forward_flops if row.repeated_flops is not None and row.forward_flops else None
        what = " = ".join([row.label, *row.same_labels])
        peaks = row.peak_bytes, row.peak_low, row.peak_high
        choice = FitChoice(what, row.policy, row.at, *peaks, None, extra_flops=work, saved_bytes=row.saved_bytes)
        found.append(replace(choice, code=row.code, unusable=row.error))
    return sorted(found, key=lambda choice: (choice.needed_bytes is None, choice.needed_bytes))


def _row(number: int, choice: FitChoice, fits: bool, number_of: Mapping[str, int]) -> Row:
    key, at = html.escape(choice.key), html.escape(choice.at)
    low, high = (choice.needed_bytes,) * 2 if choice.compiled else (choice.needed_low, choice.needed_high)
    rank = {True: 0, None: 1, False: 2}[choice.fits]  # on the device; where the line is moved, it is by the range
    numbers = {"needed": choice.needed_bytes, "low": low, "high": high, "cost": answer.share(choice), "rank": rank}
    numbers["alike"] = number_of.get(choice.alike)
    known = "".join(f' data-{name}="{value}"' for name, value in numbers.items() if value not in (None, math.inf))
    of = {"unusable": choice.unusable, "donates": choice.donate, "hand": choice.by_hand, "beaten": choice.beaten_by}
    flags = "".join(f" data-{name}" for name, holds in (*of.items(), ("compiled", choice.compiled)) if holds)
    name = (
        f'<button type="button" class="remat-link" data-policy="{key}" data-at="{at}" '
        f'title="Show it, with its edit below" {KEYS}>{with_code(words_of(choice))}</button>'
    )
    said = ("\n", Part(choice.unusable, "also")) if choice.unusable else ()
    saved = "" if choice.saved_bytes is None else fmt.nbytes(choice.saved_bytes)
    cells = (
        cell(),
        cell(Part(choice.what, html=name), *said),
        cell(f"{answer.needed(choice)}{', compiled' * choice.compiled}"),
        *([cell()] if fits else []),
        cell(answer.cost(choice) if answer.share(choice) != math.inf else ""),
        *([] if fits else [cell(saved)]),
    )
    return Row(cells, f' data-choice="{number}" data-row="{key}" data-at="{at}"{known}{flags}')


# --------------------------------------------------------------------------------------------------------- the picture


def _picture(choices: Sequence[FitChoice], fit: Fit | None, in_time: bool) -> str:
    """A point for each choice whose figures are known, with a line where the memory ends; nothing of one size alone."""
    points = [
        (number, choice, needed, cost)
        for number, choice in enumerate(choices)
        if (needed := choice.needed_bytes) is not None
        and (cost := answer.share(choice)) != math.inf
        and not choice.unusable
    ]
    sizes, costs = {needed for _, _, needed, _ in points}, [0.0, *(cost for *_, cost in points)]
    if len(sizes) < 2:
        return ""
    sizes |= {fit.capacity_bytes} if fit else set[int]()
    least, most = _around(min(sizes), max(sizes))
    lowest, highest = _around(min(costs), max(costs))

    def hover(choice: FitChoice) -> str:
        return escape(f"{words_of(choice)}: {answer.needed(choice)}, {answer.cost(choice)}")

    dots = "".join(
        f'<button type="button" class="remat-dot" tabindex="-1" data-choice="{number}" data-policy="'
        f'{html.escape(choice.key)}" data-at="{html.escape(choice.at)}" title="{hover(choice)}" style="left:'
        f'{_part(needed, least, most)}%;bottom:{_part(cost, lowest, highest)}%" {KEYS}></button>'
        for number, choice, needed, cost in points
    )
    up = "".join(
        f'<span style="bottom:{_part(mark, lowest, highest)}%">{f"{mark:+.0%}" if mark else "±0"}</span>'
        for mark in _marks(lowest, highest)
    )
    along = "".join(
        f'<span style="left:{_part(mark, least, most)}%">{fmt.nbytes(round(mark))}</span>'
        for mark in _marks(least, most)
    )
    of = "the step's time" if in_time else "the step's FLOPs" if fit else "the forward pass's FLOPs"
    on = f" on {fit.device}" if fit and fit.device else ""
    line = slider = ""
    if fit:
        at = f"--remat-at:{_part(fit.capacity_bytes, least, most)}%"
        line = f'<i class="remat-budget" style="{at}"><span>{escape(answer.memory(fit))}</span></i>'
        slider = (
            '<input type="range" class="remat-slide" data-control="budget" aria-label="Memory to fit" min="0" '
            f'max="{_STEPS}" value="{_STEPS * (fit.capacity_bytes - least) / (most - least):.0f}" '
            f'data-capacity="{fit.capacity_bytes}" '
            f'title="Move it to see what fits in other memory; a plan for that is added when it is let go" {KEYS}>'
        )
    return (
        f'<div class="remat-plot remat-plane" data-least="{least:.0f}" data-most="{most:.0f}">'
        f'<div class="remat-axis">adds, of {of}</div><div class="remat-upward" aria-hidden="true">{up}</div>'
        f'<div class="remat-area" aria-hidden="true">{line}{dots}</div>'
        f'<div class="remat-onward" aria-hidden="true">{along}</div>{slider}'
        f'<div class="remat-axis">needs at its peak{escape(on)}</div></div>'
    )


def _part(number: float, least: float, most: float) -> str:
    return f"{100 * (number - least) / (most - least):.2f}"


def _around(least: float, most: float) -> tuple[float, float]:
    """A range with a margin around it."""
    margin = _PAD * ((most - least) or 1)
    return least - margin, most + margin


def _marks(least: float, most: float) -> list[float]:
    """Round numbers within a range."""
    step = ticks(most - least)[1]
    return [number * step for number in range(math.ceil(least / step), math.floor(most / step) + 1)]


# ---------------------------------------------------------------------------------------------------- policies compared


_Column = tuple[str, Callable[[ComparisonRow], str]]


def _measured(name: str, unit: Callable[[int], str] = fmt.nbytes) -> Callable[[ComparisonRow], str]:
    """A measured figure of a row; empty where it is not known."""

    def figure(row: ComparisonRow) -> str:
        number = row.measurement and getattr(row.measurement, name)
        return "" if number is None else unit(number)

    return figure


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
    ("temporaries (measured)", _measured("temp_bytes")),
    ("run (measured)", _measured("run_seconds", fmt.seconds)),
    ("allocator's peak (measured)", _measured("allocated_bytes")),
    ("FLOPs (measured)", _measured("flops", fmt.flops)),
    ("communication (measured)", _measured("communicated_bytes")),
    ("saved", lambda row: "" if row.saved_bytes is None else fmt.nbytes(row.saved_bytes)),
    ("offloaded", lambda row: fmt.nbytes(row.offloaded_bytes) if row.offloaded_bytes else ""),
    ("recomputed", _recomputed),
    ("communicated again", lambda row: fmt.nbytes(again) if (again := row.repeated_communicated_bytes) else ""),
)


def comparison_notes(comparison: Comparison) -> list[str]:
    """Notes below a comparison: the device, whose figures these are, and what was not tried."""
    rows, device = comparison.rows, comparison.device
    front = "◆: no other policy in this table has both less memory and less to add."
    said = [front] if any(row.pareto for row in rows) else []
    if device is not None:
        said.append(f"Estimated for {device.name} ({device.source}); nothing ran for it.")
    if of_devices := next((row.of_devices for row in rows if row.of_devices), ""):
        said.append(f"Figures are {of_devices}; measured ones are of one device.")
    run = (row.measurement for row in rows if row.measurement and row.measurement.run_seconds is not None)
    simulated = max((measured.devices for measured in run if measured.simulated), default=0)
    if simulated:
        said.append(f"run: the {simulated} devices are simulated: times are those of all of them on this machine.")
    return [*said, *comparison.notes, *(comparison.not_tried if isinstance(comparison, Places) else ())]


def comparison_table(comparison: Comparison) -> Table:
    """A row for each policy, with a column for what is known of any."""
    columns, body = [(head, cell) for head, cell in _COLUMNS if any(map(cell, comparison.rows))], list[Row]()
    for row in comparison.rows:
        measured = row.measurement
        sentences = [row.error, *((measured.error, *measured.findings) if measured else ())]
        front = (Part("◆", html='<span title="on the front">◆</span>'), " ") if row.pareto else ()
        also = (part for other in row.same_labels for part in ("\n", Part(f"= {other}", "also")))
        said = (part for sentence in filter(None, sentences) for part in ("\n", Part(sentence, "also")))
        name = cell(*front, Part(row.label, "code"), *also, *said)
        body.append(Row((name, *(cell(figure(row)) for _, figure in columns))))
    heads = [("policy", "policy"), *((head, "num") for head, _ in columns)]
    return Table(f"Policies for {comparison.function}", heads, body, "")


def comparison_html(comparison: Comparison) -> str:
    """The table, and what it does not tell."""
    shown = f'<div class="remat-compare">{table_html(comparison_table(comparison))}</div>'
    return shown + findings(comparison_notes(comparison))


# --------------------------------------------------------------------------- for the list that policies are chosen from


def figures(row: ComparisonRow) -> dict[str, Any]:
    """A row of a comparison as text: what is saved, the work that is done twice, the estimated peak.

    ``keys`` are those of all the policies that do just this, ``front`` is whether none is better in both peak and time.
    """
    keys = [row.policy, *row.same_as]
    if row.error:
        return {"keys": keys, "error": row.error}
    return {
        "keys": keys,
        "saved": fmt.nbytes(row.saved_bytes or 0),
        "repeated": _repeated(row),
        "peak": _peak(row) or "unknown",
        "front": row.pareto,
    }


def _repeated(row: ComparisonRow) -> str:
    if row.repeated_flops is None:
        return "unknown"
    least, again = "" if row.complete else "≥ ", row.repeated_communicated_bytes
    communicated = f"{fmt.nbytes(again)} communicated again" if again else ""
    if not row.repeated_flops:
        return f"{least}{communicated or 'nothing'}" if row.complete else communicated or "unknown"
    return f"{least}{fmt.flops(row.repeated_flops)}{communicated and f', {communicated}'}"
