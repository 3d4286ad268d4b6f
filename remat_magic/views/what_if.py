"""What could be done otherwise: single values saved or recomputed instead."""

from __future__ import annotations

import html
from collections.abc import Hashable, Sequence

from remat_magic.records import WhatIf
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import KEYS, planned_cells, table, td

_EACH = "what is told is of each of these alone, and the button is for the first"

# Beyond these the exchange is a bad one, and the list a burden.
ROWS = 40
_PART = 1000  # what changes less than one of so many is left out


def what_if_html(rows: Sequence[WhatIf], *, live: bool = True) -> str:
    """For each value what it would change to keep it, or to recompute it; each row's button does it, if ``live``."""
    if not rows:
        return '<p class="remat-empty">No single value can be saved or recomputed instead.</p>'
    body = list[str]()
    alike = alike_rows(rows)
    for number, count in alike[:ROWS]:
        row = rows[number]
        bytes_, flops = row.saved_bytes, row.recomputed_flops
        seconds = "" if row.seconds is None else fmt.signed(fmt.seconds(row.seconds), row.seconds)
        key = html.escape(flip_key(row))
        button = f'<button type="button" class="remat-link" data-flip="{key}" {KEYS}>{escape(row.change)}</button>'
        cells = [
            td("kind", button if live else escape(row.change)),
            td("num", fmt.signed(fmt.nbytes(bytes_), bytes_), fmt.exact(bytes_, "bytes")),
            td("num", fmt.signed(fmt.flops(flops), flops), fmt.exact(flops, "FLOPs")),
            td("num", seconds),
            *planned_cells(row.value, alike_text(row, count), _EACH if count > 1 else ""),
        ]
        body.append(f'<tr class="remat-row">{"".join(cells)}</tr>')
    heads = [("Instead", "kind"), ("Saved", "num"), ("Recomputed", "num"), ("Time", "num"), ("Value", "type"),
             ("Made by", "made")]  # fmt: skip
    sentences = "".join(f'<p class="remat-empty">{escape(sentence)}</p>' for sentence in left_out(rows))
    device = f", times on {rows[0].device}" if rows[0].device else ""
    against = rows[0].against if isinstance(rows[0].against, str) else rows[0].against.label
    than = f", compared with {against}{device}"
    introduction = f'<p class="remat-empty">One value alone the other way, the best exchange first{escape(than)}.</p>'
    return introduction + table("Single values the other way", heads, body, ("stacks", "flips")) + sentences


def flip_key(row: WhatIf) -> str:
    """Names a row, whatever else is listed with it: which value goes which way, and against what."""
    against = row.against if isinstance(row.against, str) else row.against.policy
    return f"{row.change} {row.value.key} {row.plan.at} {against}"


def left_out(rows: Sequence[WhatIf]) -> list[str]:
    """Sentences on the rows that are not shown."""
    not_shown = len(alike_rows(rows)) - ROWS
    idle = sum(not _changes(row) for row in rows)
    sentences = [f"and {not_shown:,} more."] if not_shown > 0 else []
    sentences += [f"To flip {fmt.count(idle, 'other value')} changes neither bytes nor work."] if idle else []
    little = sum(_small(rows))
    return sentences + ([f"To flip {fmt.count(little, 'value')} changes less than a thousandth."] if little else [])


def _changes(row: WhatIf) -> bool:
    return bool(row.saved_bytes or row.recomputed_flops or row.seconds)


def _small(rows: Sequence[WhatIf]) -> list[bool]:
    """For each row whether it changes something, but less than a thousandth of what any plan of these comes to."""
    most_bytes = max((abs(row.saved_bytes) for row in rows), default=0)
    most_bytes = max([most_bytes, *(row.plan.saved_bytes for row in rows)])
    most_flops = max((abs(row.recomputed_flops) for row in rows), default=0)
    most_flops = max([most_flops, *(row.plan.recomputed_flops for row in rows)])
    return [
        _changes(row)
        and _PART * abs(row.saved_bytes) < max(most_bytes, 1)
        and _PART * abs(row.recomputed_flops) < max(most_flops, 1)
        for row in rows
    ]


def alike_rows(rows: Sequence[WhatIf]) -> list[tuple[int, int]]:
    """The rows that change something worth a line, equal trades as one.

    The number of the first of these among all rows, and how many say so.
    """
    groups: dict[Hashable, list[int]] = {}
    small = _small(rows)
    for number, row in enumerate(rows):
        seconds = None if row.seconds is None else fmt.seconds(row.seconds)
        shown_facts = (row.change, row.saved_bytes, row.recomputed_flops, seconds)
        if _changes(row) and not small[number]:
            # What one line makes step by step (a product, its bias, its shape) is one trade where it changes as much.
            where = (row.value.source, row.value.library, row.value.path) if row.value.source else row.value.origin
            groups.setdefault((shown_facts, where), []).append(number)
    return [(numbers[0], len(numbers)) for numbers in groups.values()]


def alike_text(row: WhatIf, count: int) -> str:
    """How many values a row is of."""
    times = f"x{row.value.times:,}" if row.value.times > 1 else ""
    many = f"{count:,} alike" if count > 1 else ""
    return f"{many}, {times} each" if many and times else many or times
