"""What is alive at the estimated peak, as one stacked bar over a list that says the same in words."""

from __future__ import annotations

from remat_magic.records import Report
from remat_magic.views import format as fmt
from remat_magic.views.format import escape

# What is alive anyway comes first. By the kind of a value: how it is called, and by what it is coloured.
_ROLES = {
    "parameter": ("parameters", "arguments"),
    "argument": ("arguments", "arguments"),
    "state": ("optimizer state", "state"),
    "batch": ("batch", "batch"),
    "constant": ("constants", "constants"),
    "residual": ("saved", "saved"),
    "gradient": ("gradients", "gradients"),
    "output": ("results", "returned"),
    "temporary": ("temporaries", "temporaries"),
}


_LEAST = 1000  # what is less than one of so many is no part of the list


def peak_parts(report: Report) -> list[tuple[str, str, int]]:
    """What is alive at the peak: of each kind how it is called, by what it is coloured, and its bytes."""
    sums = dict(report.peak_by_kind)
    return [(*words, sums[kind]) for kind, words in _ROLES.items() if sums.get(kind)]


def role_of(kind: str) -> str:
    """By what a kind of value is coloured."""
    return _ROLES[kind][1]


def peak_bar_html(report: Report, memory: tuple[str, int] | None = None) -> str:
    """The bar, whose parts add up to the report's peak; nothing where that is not known.

    Args:
        report: of which policy.
        memory: what it is to fit: what that is called, and its bytes. The bar is as long as the longer of the two.
    """
    peak, parts = report.peak_bytes, peak_parts(report)
    if not peak or not parts:
        return ""
    high = max(peak, report.peak_high or 0)
    scale = max(high, memory[1] if memory else 0)
    bars = list[str]()
    for word, role, nbytes in parts:
        bars.append(_piece(role, nbytes / scale, f"{word} {fmt.nbytes(nbytes)}"))
    if high > peak:
        bars.append(_piece("doubt", (high - peak) / scale, f"it may be {fmt.nbytes(high)}"))
    items = [
        f'<li title="{fmt.exact(nbytes, "bytes")}"><i class="remat-role remat-role-{role}"></i> {word}'
        f"{' for backward' * (role == 'saved')} <b>{fmt.nbytes(nbytes)}</b></li>"
        for word, role, nbytes in sorted(parts, key=lambda part: -part[2])
        if _LEAST * nbytes >= peak
    ]
    if memory:
        name, capacity = escape(memory[0]), fmt.nbytes(memory[1])
        bars.append(
            f'<i class="remat-limit" style="left:{100 * memory[1] / scale:.2f}%" title="{name} has {capacity}"></i>'
        )
        items.append(f'<li><i class="remat-limit-key"></i> {name} <b>{capacity}</b></li>')
    caption = f"Alive at the estimated peak of {fmt.about(peak, report.peak_low, report.peak_high)}"
    return (
        f'<div class="remat-peak-bar"><div class="remat-stack" aria-hidden="true">{"".join(bars)}</div>'
        f'<ul class="remat-roles" aria-label="{caption}">{"".join(items)}</ul></div>'
    )


def _piece(role: str, share: float, title: str) -> str:
    return f'<i class="remat-role remat-role-{role}" style="width:{100 * share:.2f}%" title="{title}"></i>'
