"""What is alive at the estimated peak, as one stacked bar over a list that says the same in words."""

from __future__ import annotations

from remat_magic.records import Report
from remat_magic.views import format as fmt

__all__ = ["peak_bar_html"]

# What is alive anyway comes first. By the kind of a value: how it is called, and by what it is coloured.
_ROLES = {
    "parameter": ("parameters", "arguments"),
    "argument": ("arguments", "arguments"),
    "state": ("optimizer state", "state"),
    "batch": ("batch", "batch"),
    "constant": ("constants", "constants"),
    "residual": ("saved", "saved"),
    "gradient": ("gradients", "gradients"),
    "output": ("returned", "returned"),
    "temporary": ("temporaries", "temporaries"),
}


def peak_bar_html(report: Report, hover: bool = True) -> str:
    """The bar, whose parts add up to the report's peak; nothing where that is not known.

    A script that knows the memory of a device shows the bar as a part of that.

    Args:
        report: of which policy.
        hover: whether the parts of the bar say what they are, and not the list alone.
    """
    peak = report.peak_bytes
    sums = dict(report.peak_by_kind)
    parts = [(*words, sums[kind]) for kind, words in _ROLES.items() if sums.get(kind)]
    if not peak or not parts:
        return ""
    bars, items = list[str](), list[str]()
    for word, role, nbytes in parts:
        size, share = fmt.nbytes(nbytes), fmt.percent(nbytes, peak)
        told = f' title="{word} {size}, {share} of the peak"' if hover else ""
        bars.append(f'<i class="remat-role remat-role-{role}" style="width:{100 * nbytes / peak:.2f}%"{told}></i>')
        # The backward pass may be over with some of it by then.
        less = role == "saved" and nbytes < report.saved_bytes
        of = f" of {fmt.nbytes(report.saved_bytes)}" if less else ""
        exact = f"{fmt.exact(nbytes, 'bytes')}, {share} of the peak"
        items.append(f'<li title="{exact}"><i class="remat-role remat-role-{role}"></i> {word} <b>{size}</b>{of}</li>')
    caption = f"Alive at the estimated peak of {fmt.nbytes(peak)}"
    return (
        f'<div class="remat-peak-bar"><div class="remat-stack" aria-hidden="true">'
        f'<div class="remat-held" data-value="{peak}">{"".join(bars)}</div></div>'
        f'<ul class="remat-roles" aria-label="{caption}"><li class="remat-label" aria-hidden="true">{caption}:</li>'
        f"{''.join(items)}</ul></div>"
    )
