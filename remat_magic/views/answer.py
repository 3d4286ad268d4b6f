"""The answer to "it must fit: what do I change?", in words and rows, before any view says how they look."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from remat_magic.records import Fit, FitChoice, LiveKind, LiveValue, Note, Report, SourceSpan, Timeline
from remat_magic.records.fit import asks_more
from remat_magic.views import format as fmt
from remat_magic.views.headline import notes_of

WORDS = {True: "Fits", False: "Does not fit", None: "May fit"}
_GIVEN = ("parameter", "argument", "state", "batch")  # live from the first moment to the last, whatever is chosen


def verdict(choice: FitChoice, capacity: int) -> tuple[str, str]:
    """Whether a choice fits, in a word or two; and what follows how much it needs."""
    size, rest = fmt.nbytes(capacity), fmt.nbytes(abs(capacity - (choice.needed_bytes or 0)))
    if choice.needed_bytes is None:
        return "Not known", choice.unusable
    said = {True: f"of {size}, {rest} left", False: f"needed, {rest} too much", None: f"needed, of {size}"}
    return WORDS[choice.fits], said[choice.fits]


def memory(fit: Fit) -> str:
    """The memory that is to suffice: ``TPU v5e, 16.9 GB``."""
    return f"{fit.device}, {fmt.nbytes(fit.capacity_bytes)}" if fit.device else fmt.nbytes(fit.capacity_bytes)


def heading(fit: Fit) -> tuple[str, str]:
    """The name of the step or function, and its gradient and policy: ``train_step``, ``gradient of loss``."""
    report, step = fit.report, fit.timeline.step if fit.timeline else ""
    name = step or fit.function or "the function"
    if report is None:
        return name, ""
    of = f"gradient of {report.function}" if step and report.function != step else ""
    choice = f"policy {report.label}{place_words(report.at)}" if report.policy != "as_written" else ""
    return name, ", ".join(filter(None, [of, choice, report.of_devices]))


def place_words(at: str) -> str:
    """Where a policy goes, to follow its name; nothing for the whole function."""
    return {"": "", "function": "", "sites": " at all checkpoint sites"}.get(at, f" at {at}")


def notes_of_fit(fit: Fit) -> list[str]:
    """What must be seen besides the heading, which tells of the step; and where nothing helps what was not tried."""
    of_report = notes_of(fit.report, counting=False) if fit.report else []
    notes = [note for note in of_report if not (isinstance(note, Note) and note.kind == "gradient-of-step")]
    if fit.fits or any(choice.fits is not False for choice in fit.choices):
        return notes
    return [*notes, *(f"{it.what} {fits(it)}. {it.unusable}" for it in _unusable(fit)), *fit.not_tried]


def _unusable(fit: Fit) -> list[FitChoice]:
    """The cheapest choice that fits, or may, and cannot be used, in a list; an empty one where there is none."""
    return [it for it in fit.tried if it.unusable and it.needed_bytes is not None and it.fits is not False][:1]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a line of the source holds at the peak: ``source`` is the expression that holds most of it.

    ``kind`` is that of most of its bytes, ``loops`` are those around it, ``count`` tells how many values it is.
    """

    nbytes: int
    source: SourceSpan
    kind: LiveKind
    loops: tuple[str, ...]
    count: int

    @property
    def where(self) -> str:
        """The line, and its loops or else its values: ``In[2]:14, scan x12``."""
        values = [fmt.count(self.count, "value")] if self.count > 1 else []
        return ", ".join([self.source.place, *(self.loops or values)])


def taken(timeline: Timeline, report: Report | None = None) -> list[Taken]:
    """What each line of the source holds at the peak, the most first; the report tells what loops are around it."""
    paths = {residual.source: residual.path for residual in report.residuals} if report else {}
    lines: dict[tuple[str, int | None, int], list[LiveValue]] = {}
    for value in timeline.alive:
        if value.source is not None:
            lines.setdefault((value.source.file, value.source.cell, value.source.line), []).append(value)
    found = list[Taken]()
    for values in lines.values():
        sources, kinds = Counter[SourceSpan](), Counter[LiveKind]()
        for value in values:
            kinds[value.kind] += value.nbytes
            if value.source is not None:
                sources[value.source] += value.nbytes
        ((source, _),) = sources.most_common(1)
        ((kind, _),) = kinds.most_common(1)
        loops = tuple(part for part in paths.get(source, ()) if re.search(r" x[\d,]+$", part))
        found.append(Taken(sources.total(), source, kind, loops, len(values)))
    return sorted(found, key=lambda line: -line.nbytes)


@dataclass(frozen=True, slots=True)
class Offered:
    """A choice in words: ``needed`` bytes, ``cost`` in time or FLOPs, and whether it ``fits``."""

    choice: FitChoice
    needed: str
    cost: str
    fits: str


def offered(fit: Fit) -> list[Offered]:
    """What could be changed, the best first: what fits or may, else what comes nearest.

    Where it fits as written, it is what takes less time and fits too.
    """
    choices = [choice for choice in fit.choices if choice.policy != "as_written" or choice.donate]
    if fit.fits:
        written = fit.as_written
        known = (written.extra_seconds, written.extra_flops) != (None, None)
        choices = [choice for choice in choices if choice.fits and known and choice.cost < written.cost]
    elif any(choice.fits is not False for choice in choices):
        choices = [choice for choice in choices if choice.fits is not False]
        # What the estimate itself says is too big would fit by luck alone.
        choices.sort(key=lambda choice: not choice.fits and (choice.needed_bytes or 0) > fit.capacity_bytes)
    in_time = any(choice.extra_time is not None for choice in fit.tried)
    return [words(choice, in_time) for choice in choices]


# Of what the others need, and of the step's time or FLOPs: a difference for which one would take the other.
_CLEARLY_LESS, _CLEARLY_FASTER = 0.9, 0.05


def shortlist(rows: Iterable[Offered]) -> list[Offered]:
    """What one would take: the best, each that needs clearly less, and of what may fit what takes clearly less time.

    Beside 8.4 GB for 30% more time, 8.1 GB for 64% and what may fit for 29% are for the list of all choices. What asks
    less of the user, such as an edit beside what is written by hand, is there too; of what comes nearest all are given.
    """
    short = list[Offered]()
    for row in rows:
        needed, extra, certain = row.choice.needed_bytes or 0, share(row.choice), row.choice.fits
        others = [other.choice for other in short if not asks_more(other.choice, row.choice)]
        less = all(needed < _CLEARLY_LESS * (other.needed_bytes or 0) for other in others)
        faster = all(extra < share(other) - _CLEARLY_FASTER for other in others)
        if less or certain is False or (certain is None and faster):
            short.append(row)
    return short


def words(choice: FitChoice, in_time: bool = False) -> Offered:
    """A choice in words; if ``in_time``, its cost is a time, also where that is not known."""
    extra = "unknown" if in_time and choice.extra_time is None else cost(choice)
    size = "unknown" if choice.needed_bytes is None else fmt.nbytes(choice.needed_bytes)
    return Offered(choice, size, extra, fits(choice))


def what_to_do(fit: Fit) -> str:
    """What the choices are, to stand above them."""
    rows = offered(fit)
    if fit.fits:
        return "Takes less time, and fits too" if rows else "Nothing has to change."
    if not fit.tried:
        return ""
    given = sum(nbytes for kind, nbytes in fit.report.peak_by_kind if kind in _GIVEN) if fit.report else 0
    alone = f"Its arguments alone are {fmt.nbytes(given)}: spread them over several devices. "
    why = alone if given > fit.capacity_bytes else ""
    nothing = f"{why}Nothing that {'can be used' if _unusable(fit) else 'was tried'}"
    if not rows:
        return f"{nothing} helps." if fit.progress.finished else "Nothing that helps is known yet."
    best = rows[0].choice.fits
    return "Try" if best else "These may fit" if best is None else f"{nothing} fits; these come nearest"


def cost_head(rows: Iterable[Offered]) -> str:
    """What the costs are of."""
    return "time" if any(row.choice.extra_time is not None for row in rows) else "FLOPs"


def share(choice: FitChoice) -> float:
    """The share of the step's time that a choice adds, or of its FLOPs where no device is known; inf if unknown."""
    extra = choice.extra_flops if choice.extra_time is None else choice.extra_time
    return math.inf if extra is None else extra


def cost(choice: FitChoice) -> str:
    """The same as text: ``+23%``."""
    extra = share(choice)
    if extra == math.inf:
        return "unknown"
    return f"{extra:+.0%}" if f"{abs(extra):.0%}" != "0%" else "±0%"


def fits(choice: FitChoice) -> str:
    """Whether a choice fits, in a word or two."""
    word = {True: "fits", False: "too big", None: "may fit"}[choice.fits]
    return f"{word}, compiled" if choice.compiled else word


def batch(fit: Fit) -> str:
    """The batch that would fit, as a sentence; empty where none is known.

    Another batch was not compiled: XLA's word for this one is scaled to it.
    """
    if not fit.largest_batch:
        return ""
    by = "estimated from XLA's figure" if fit.compiled else "by estimate"
    return f"As it is written, it fits with a batch of {'up to ' * bool(fit.fits)}{fit.largest_batch:,}, {by}."


def unfinished(fit: Fit) -> str:
    """How far the search is, as a sentence; empty where it has ended."""
    progress = fit.progress
    if progress.cancelled:
        return f"The search was stopped after {progress.done:,} of {fmt.count(progress.total, 'choice')}."
    if progress.finished:
        return ""
    of_all = f"{progress.done:,} of {fmt.count(progress.total, 'choice')}"
    asking = progress.current.startswith("compiling")
    return f"{'Asking the compiler' if asking else 'Still looking'}: {of_all}."


def needed(choice: FitChoice) -> str:
    """How much a choice needs: an estimate with its range."""
    if choice.needed_bytes is None or choice.compiled:
        return "" if choice.needed_bytes is None else fmt.nbytes(choice.needed_bytes)
    return fmt.about(choice.needed_bytes, choice.needed_low, choice.needed_high)
