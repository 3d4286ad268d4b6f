"""Another choice's memory over time, drawn over that of the one which is shown: A over B."""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.records import Timeline
from remat_magic.views import format as fmt
from remat_magic.views.alive import runs, thinned
from remat_magic.views.svg import Frame, colours, element, text, truncate

__all__ = ["OVERLAY_STYLE", "named", "overlay_curve", "overlay_legend", "stretched"]

_POINTS = 720  # moments drawn at most; of several in one place the highest is
OVERLAY_STYLE = (
    f".remat-svg .remat-against{{fill:none;stroke:{colours['fg']};stroke-width:1.5;stroke-dasharray:6 3}}"
    f".remat-svg .remat-halo{{fill:none;stroke:{colours['back']};stroke-width:4;stroke-opacity:.8}}"
    f".remat-svg .remat-against-peak{{fill:{colours['back']};stroke:{colours['fg']};stroke-width:1.5}}"
)

Passes = Sequence[tuple[str, int, int]]


def stretched(place: float, own: Passes, other: Passes) -> float | None:
    """Where a moment of one program is on the time of another, whose passes are as long as they are there.

    None in a pass that the other one has not.
    """
    for word, start, end in own:
        if start <= place <= end and (place < end or word == own[-1][0]):
            pass_there = next(((first, last) for phase, first, last in other if phase == word), None)
            return (
                None
                if pass_there is None
                else pass_there[0] + (pass_there[1] - pass_there[0]) * (place - start) / (end - start)
            )
    return None


def overlay_curve(frame: Frame, other: Timeline, own: Passes, passes: Passes) -> str:
    """The sum of what the other one holds, with its peak.

    Args:
        frame: where it is drawn.
        other: the timeline.
        own: its passes.
        passes: those of the timeline that it is drawn over.
    """
    path, end = list[str](), 0.0
    shown = thinned(other.moments, _POINTS)
    for (place, moment), (following, _) in zip(shown, [*shown[1:], (len(other.moments), None)], strict=True):
        start = stretched(place, own, passes)
        if start is None:
            continue
        after = stretched(following, own, passes)
        end = start + 1 if after is None or after < start else after
        y = frame.y(moment.bytes)
        path.append(f"{'L' if path else 'M'}{frame.x(start):.1f},{y:.1f}L{frame.x(end):.1f},{y:.1f}")
    peak = stretched(other.peak + 0.5, own, passes)
    line = "".join(path)
    # On a light edge, or it would be lost on the areas.
    lines = element("path", d=line, class_="remat-halo") + element("path", d=line, class_="remat-against")
    drawn = element("g", lines, data_stretch="")
    if peak is None:
        return drawn
    x, y = frame.x(peak), frame.y(other.peak_bytes)
    mark = element("path", d=f"M{x:.1f},{y:.1f}l-4,-7h8z", class_="remat-against-peak")
    return drawn + element("g", mark, data_place=f"{peak:.2f}")


def named(timeline: Timeline, letter: str) -> str:
    """What a timeline is of, and its peak: ``A: dots_saveable, peak 21 MB, backward, sin In[3]:4``."""
    peak = f"peak {fmt.nbytes(timeline.peak_bytes)}, {runs(timeline.moments[timeline.peak])}"
    return f"{letter}: {truncate(timeline.label or timeline.policy, 36)}, {peak}"


def overlay_legend(x: float, y: float, other: Timeline, shown: Timeline) -> str:
    """What is A and what is B, a line each."""
    return (
        element("line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, class_="remat-against")
        + element("path", d=f"M{x + 11:.1f},{y - 1:.1f}l-4,-7h8z", class_="remat-against-peak")
        + text(x + 28, y, f"{named(other, 'A')} (dashed)", class_="remat-axis")
        + element("path", d=f"M{x + 11:.1f},{y + 16:.1f}l-4,-7h8z", class_="remat-peak")
        + text(x + 28, y + 17, f"{named(shown, 'B')} (areas)", class_="remat-axis")
    )
