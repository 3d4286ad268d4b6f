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
    "output": ("returned", "returned"),
    "temporary": ("temporaries", "temporaries"),
}


def peak_bar_html(report: Report, of_memory: tuple[str, int] | None = None) -> str:
    """The bar, whose parts add up to the report's peak; nothing where that is not known.

    Of a device's memory it is shown as the part that it takes, as the widget's script does it where there is one.

    Args:
        report: of which policy.
        of_memory: the device's name and its bytes, for where no script is.
    """
    peak = report.peak_bytes
    sums = dict(report.peak_by_kind)
    parts = [(*words, sums[kind]) for kind, words in _ROLES.items() if sums.get(kind)]
    if not peak or not parts:
        return ""
    bars, items = list[str](), list[str]()
    for word, role, nbytes in parts:
        size, share = fmt.nbytes(nbytes), fmt.percent(nbytes, peak)
        title = f'title="{word} {size}, {share} of the peak"'
        bars.append(f'<i class="remat-role remat-role-{role}" style="width:{100 * nbytes / peak:.2f}%" {title}></i>')
        # The backward pass may be over with some of it by then.
        saved = fmt.nbytes(report.saved_bytes)
        of = f" of {saved}" if role == "saved" and size != saved else ""
        exact = f"{fmt.exact(nbytes, 'bytes')}, {share} of the peak"
        items.append(f'<li title="{exact}"><i class="remat-role remat-role-{role}"></i> {word} <b>{size}</b>{of}</li>')
    low, high = report.peak_low or peak, report.peak_high or peak
    caption = f"Alive at the estimated peak of {fmt.about(peak, low, high)}"
    width, mark = "", ""
    # As wide as the doubt, over the end of what is held.
    soft = f'<i class="remat-doubt" style="width:{100 * (high - low) / peak:.2f}%;left:{100 * low / peak:.2f}%"></i>'
    soft = soft if low < high else ""
    if of_memory:
        name, memory = of_memory
        width, mark, words_left = _left(peak, memory)
        words_left = f"about {words_left}" if low < high else words_left
        if low <= memory < high:
            words_left = f"may fit: {fmt.between(low, high)} of"
        items.append(f"<li>{words_left} {escape(name)}, {fmt.nbytes(memory)}</li>")
    return (
        f'<div class="remat-peak-bar"><div class="remat-stack" aria-hidden="true">'
        f'<div class="remat-held" data-value="{peak}" data-low="{low}" data-high="{high}"{width}>{"".join(bars)}{soft}'
        f"</div>{mark}</div>"
        f'<ul class="remat-roles remat-brief" aria-label="{caption}">'
        f'<li class="remat-label" aria-hidden="true">{caption}:</li>'
        f"{''.join(items)}</ul></div>"
    )


def _left(peak: int, memory: int) -> tuple[str, str, str]:
    """How wide the bar is, what stands beside or on it, and in words what is left of a memory."""
    if peak > memory:
        limit = f'<i class="remat-limit" style="left:{100 * memory / peak:.2f}%"></i>'
        return "", limit, f"{fmt.nbytes(peak - memory)} too much for"
    width = f' style="width:{100 * peak / memory:.2f}%"'
    return width, '<i class="remat-role remat-role-left"></i>', f"{fmt.nbytes(memory - peak)} left of"
