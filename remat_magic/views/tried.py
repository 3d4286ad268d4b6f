"""All choices that were looked at: a picture of what they need and take, and a table. The script sorts both."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace

from remat_magic.records import ComparisonRow, Fit, FitChoice
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.fit import with_code, words_of
from remat_magic.views.format import escape
from remat_magic.views.svg import ticks
from remat_magic.views.tables import KEYS, table, td

_PAD = 0.04  # of the range of what is needed, on both sides of it
_STEPS = 1000  # of the slider


def tried_html(choices: Sequence[FitChoice], fit: Fit | None = None) -> str:
    """The picture and the table, to stand inside an element of class ``remat``.

    Args:
        choices: those to show.
        fit: what these are to fit; None for nothing.
    """
    in_time = answer.cost_head(answer.words(choice) for choice in choices) == "time"
    rows = [_row(number, choice, fit is not None) for number, choice in enumerate(choices)]
    fits = [("Fits", "fits")] if fit else []
    saves = [] if fit else [("Saves", "num")]  # what autodiff lists, of which a device may keep less
    cost = "Time" if in_time else "Work"
    heads = [("#", "order"), ("Choice", "policy"), ("Needs", "num"), *fits, (cost, "num"), *saves]
    shown = table("All choices that were looked at", heads, rows, ("tried",))
    notes = [answer.unfinished(fit), *(fit.not_tried if fit.progress.finished else ())] if fit else []
    said = "".join(f'<p class="remat-empty">{escape(note)}</p>' for note in notes if note)
    more = f'<button type="button" data-action="what-if" {KEYS}>more: single values the other way</button>'
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


def _cost(choice: FitChoice) -> float | None:
    """What the picture and the order go by: shares of the step's time, or of its FLOPs."""
    return choice.extra_flops if choice.extra_time is None else choice.extra_time


def _row(number: int, choice: FitChoice, fits: bool) -> str:
    key, at = html.escape(choice.key), html.escape(choice.at)
    low, high = (choice.needed_bytes,) * 2 if choice.compiled else (choice.needed_low, choice.needed_high)
    numbers = {"needed": choice.needed_bytes, "low": low, "high": high, "cost": _cost(choice)}
    known = "".join(f' data-{name}="{value}"' for name, value in numbers.items() if value is not None)
    flags = f"{' data-unusable' * bool(choice.unusable)}{' data-donates' * bool(choice.donate)}"
    name = (
        f'<button type="button" class="remat-link" data-policy="{key}" data-at="{at}" '
        f'title="Show it, with its edit below" {KEYS}>{with_code(words_of(choice))}</button>'
    )
    told = f"<br><small>{escape(choice.unusable)}</small>" if choice.unusable else ""
    cells = [
        '<td class="remat-order"></td>',
        td("policy", f"{name}{told}"),
        td("num", f"{answer.needed(choice)}{', compiled' * choice.compiled}"),
        '<td class="remat-fits"></td>' if fits else "",
        td("num", answer.cost(choice) if _cost(choice) is not None else ""),
        "" if fits or choice.saved_bytes is None else td("num", fmt.nbytes(choice.saved_bytes)),
    ]
    return (
        f'<tr class="remat-row" data-choice="{number}" data-row="{key}" data-at="{at}"{known}{flags}>'
        f"{''.join(cells)}</tr>"
    )


# --------------------------------------------------------------------------------------------------------- the picture


def _picture(choices: Sequence[FitChoice], fit: Fit | None, in_time: bool) -> str:
    """A point for each choice whose figures are known, with a line where the memory ends; nothing of one size alone."""
    points = [
        (number, choice, needed, cost)
        for number, choice in enumerate(choices)
        if (needed := choice.needed_bytes) is not None and (cost := _cost(choice)) is not None and not choice.unusable
    ]
    sizes, costs = {needed for _, _, needed, _ in points}, [0.0, *(cost for *_, cost in points)]
    if len(sizes) < 2:
        return ""
    sizes |= {fit.capacity_bytes} if fit else set[int]()
    least, most = _around(min(sizes), max(sizes))
    lowest, highest = _around(min(costs), max(costs))
    dots = "".join(
        f'<button type="button" class="remat-dot" tabindex="-1" data-choice="{number}" data-policy="'
        f'{html.escape(choice.key)}" data-at="{html.escape(choice.at)}" title="{_hover(choice)}" style="left:'
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
    line, slider = (_line(fit, least, most), _slider(fit, least, most)) if fit else ("", "")
    return (
        f'<div class="remat-plot remat-plane" data-least="{least:.0f}" data-most="{most:.0f}">'
        f'<div class="remat-axis">adds, of {of}</div><div class="remat-upward" aria-hidden="true">{up}</div>'
        f'<div class="remat-area" aria-hidden="true">{line}{dots}</div>'
        f'<div class="remat-onward" aria-hidden="true">{along}</div>{slider}'
        f'<div class="remat-axis">needs at its peak{escape(on)}</div></div>'
    )


def _hover(choice: FitChoice) -> str:
    return escape(f"{words_of(choice)}: {answer.needed(choice)}, {answer.cost(choice)}")


def _line(fit: Fit, least: float, most: float) -> str:
    """Where the memory ends."""
    at = _part(fit.capacity_bytes, least, most)
    return f'<i class="remat-budget" style="left:{at}%"><span>{escape(answer.memory(fit))}</span></i>'


def _slider(fit: Fit, least: float, most: float) -> str:
    """What moves the line."""
    return (
        '<input type="range" class="remat-slide" data-control="budget" aria-label="Memory to fit" min="0" '
        f'max="{_STEPS}" value="{_STEPS * (fit.capacity_bytes - least) / (most - least):.0f}" '
        f'data-capacity="{fit.capacity_bytes}" '
        f'title="Move it to see what fits in other memory; a plan for that is added when it is let go" {KEYS}>'
    )


def _part(number: float, least: float, most: float) -> str:
    return f"{100 * (number - least) / (most - least):.2f}"


def _around(least: float, most: float) -> tuple[float, float]:
    """A range with some room around it."""
    room = _PAD * ((most - least) or 1)
    return least - room, most + room


def _marks(least: float, most: float) -> list[float]:
    """Round numbers within a range."""
    step = ticks(most - least)[1]
    return [number * step for number in range(math.ceil(least / step), math.floor(most / step) + 1)]
