"""What is alive at the estimated peak, as one stacked bar over a list that says the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from remat_magic.records import LiveKind, LiveValue, Report, Timeline, XlaMemory
from remat_magic.views import format as fmt
from remat_magic.views.format import escape

# What is alive anyway comes first. By the kind of a value: how it is called, and by what it is coloured.
ROLES = {
    "parameter": ("parameters", "arguments"),
    "argument": ("arguments", "arguments"),
    "state": ("optimizer state", "state"),
    "batch": ("batch", "batch"),
    "constant": ("constants", "constants"),
    "residual": ("saved for backward", "saved"),
    "gradient": ("gradients", "gradients"),
    "output": ("results", "returned"),
    "temporary": ("temporaries", "temporaries"),
}


_LEAST = 1000  # what is less than one of so many is no part of the list


def peak_parts(report: Report) -> list[tuple[str, str, int]]:
    """What is alive at the peak: of each kind how it is called, by what it is coloured, and its bytes."""
    sums = dict(report.peak_by_kind)
    return [(*words, sums[kind]) for kind, words in ROLES.items() if sums.get(kind)]


def role_of(kind: str) -> str:
    """By what a kind of value is coloured."""
    return ROLES[kind][1]


def held_by_xla(memory: XlaMemory, timeline: Timeline) -> list[LiveValue]:
    """What XLA's program holds at its peak, in the estimate's kinds; the estimate tells what its arguments are."""
    arguments: dict[str, LiveKind] = {
        life.value.argument: life.value.kind for life in timeline.lives if life.value.argument
    }
    here = [buffer for buffer in memory.alive if buffer.space == "device"]
    kinds: list[LiveKind] = [
        arguments.get(buffer.op_name, "argument") if buffer.role == "argument" else _XLA_KINDS[buffer.role]
        for buffer in here
    ]
    return [
        LiveValue(buffer.type, buffer.nbytes, kind, buffer.opcode, source=buffer.source)
        for buffer, kind in zip(here, kinds, strict=True)
    ]


_XLA_KINDS: dict[str, LiveKind] = {
    "output": "output",
    "constant": "constant",
    "saved": "residual",
    "carried": "temporary",
    "temporary": "temporary",
}


def peak_bar_html(report: Report, memory: tuple[str, int] | None = None, estimate: bool = False) -> str:
    """The bar of a report's estimate; nothing where that is not known.

    Args:
        report: of which policy.
        memory: what it is to fit: what that is called, and its bytes. The bar is as long as the longer of the two.
        estimate: whether it is to be said that it is one, since a compiler's word stands above.
    """
    peak, parts = report.peak_bytes, peak_parts(report)
    if not peak or not parts:
        return ""
    caption = f"Alive at the estimated peak of {fmt.about(peak, report.peak_low, report.peak_high)}"
    lead = f"by estimate, {fmt.nbytes(peak)}:" if estimate else ""
    return _bar(parts, peak, max(peak, report.peak_high or 0), memory, caption, lead)


def compiled_bar_html(held: Sequence[LiveValue], needed: int, memory: tuple[str, int]) -> str:
    """The bar of what XLA's program holds at its peak, and of what is allocated besides."""
    sums = Counter[str]()
    for value in held:
        sums[value.kind] += value.nbytes
    parts = [(*words, sums[kind]) for kind, words in ROLES.items() if sums[kind]]
    if (idle := needed - sums.total()) > 0:
        parts.append(("allocated and not in use then", "constants", idle))
    return _bar(parts, needed, needed, memory, f"Held at the peak of the compiled program, {fmt.nbytes(needed)}")


def _bar(
    parts: Sequence[tuple[str, str, int]],
    peak: int,
    high: int,
    memory: tuple[str, int] | None,
    caption: str,
    lead: str = "",
) -> str:
    """Parts that add up to ``peak``, and how much more it may be, over a list that says the same in words."""
    scale = max(high, memory[1] if memory else 0)
    bars = [_piece(role, nbytes / scale, f"{word} {fmt.nbytes(nbytes)}") for word, role, nbytes in parts]
    if high > peak:
        bars.append(_piece("doubt", (high - peak) / scale, f"it may be {fmt.nbytes(high)}"))
    items = [f'<li class="remat-label">{lead}</li>'] if lead else []
    items += [
        f'<li title="{fmt.exact(nbytes, "bytes")}"><i class="remat-role remat-role-{role}"></i> {word} '
        f"<b>{fmt.nbytes(nbytes)}</b></li>"
        for word, role, nbytes in sorted(parts, key=lambda part: -part[2])
        if _LEAST * nbytes >= peak
    ]
    if memory:
        name, capacity = escape(memory[0]), fmt.nbytes(memory[1])
        left = f"left:{100 * memory[1] / scale:.2f}%"
        bars.append(f'<i class="remat-limit" style="{left}" title="{name} has {capacity}"></i>')
        items.append(f'<li><i class="remat-limit-key"></i> {name} <b>{capacity}</b></li>')
    return (
        f'<div class="remat-peak-bar"><div class="remat-stack" aria-hidden="true">{"".join(bars)}</div>'
        f'<ul class="remat-roles" aria-label="{caption}">{"".join(items)}</ul></div>'
    )


def _piece(role: str, share: float, title: str) -> str:
    return f'<i class="remat-role remat-role-{role}" style="width:{100 * share:.2f}%" title="{title}"></i>'
