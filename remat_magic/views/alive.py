"""What a script needs to tell what is held at any moment, without all that is ever held."""

from __future__ import annotations

import heapq
import html
import itertools
import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from remat_magic.records import LiveValue, Moment, Timeline
from remat_magic.views import format as fmt
from remat_magic.views.linking import expression_key, line_key
from remat_magic.wording import printable

KINDS = ("arguments", "residuals", "temporaries")
_MOMENTS = 2000  # told at most: as many as a wide screen has pixels


def thinned(moments: Sequence[Moment], most: int) -> list[tuple[int, Moment]]:
    """At most so many moments with their places: of each stretch the highest one, so that no maximum is lost."""
    if len(moments) <= most:
        return list(enumerate(moments))
    edges = [number * len(moments) // most for number in range(most + 1)]
    return [
        max(((place, moments[place]) for place in range(start, end)), key=lambda pair: pair[1].bytes)
        for start, end in itertools.pairwise(edges)
    ]


def value_words(value: LiveValue) -> str:
    """What a value is, in a word or two."""
    if value.argument is not None:
        return f"{'copy of' if value.primitive == 'copy' else 'argument'} {value.argument}"
    if not value.type:
        return f"inside {value.primitive}" if value.primitive else "inside a loop"
    return value.primitive or ("constant" if value.kind == "constant" else "cotangent")


def runs(moment: Moment) -> str:
    """The pass of a moment, and what runs then: ``backward, sin In[3]:4``."""
    where = " ".join(filter(None, [moment.primitive, fmt.location(moment.source)]))
    return f"{moment.half}, {where}" if where else moment.half


def lookup(timeline: Timeline, top: int, most: int = _MOMENTS) -> dict[str, Any]:
    """What is held at each moment: all of it as sums, and the values that are among the biggest of some moment.

    Alike values are one entry. What an entry leaves out is what a moment's sum has more.

    Args:
        timeline: the estimate.
        top: so many entries of each moment are told.
        most: of so many moments at most.
    """
    shown = thinned(timeline.moments, most)
    places = [place for place, _ in shown]
    numbers: dict[LiveValue, int] = {}
    lives: list[list[int]] = []  # by the number of the value, as are the next ones
    copies_held, sizes = list[int](), list[int]()
    # At each place that is shown, the values that begin to be held and those that end.
    events: list[list[tuple[int, int]]] = [[] for _ in range(len(shown) + 1)]
    for life in timeline.lives:
        first, end = bisect_left(places, life.first), bisect_left(places, life.end)
        if first == end:
            continue
        number = numbers.setdefault(life.value, len(numbers))
        if number == len(lives):
            lives.append([])
            copies_held.append(0)
            sizes.append(life.value.nbytes)
        lives[number] += (first, end)
        events[first].append((number, 1))
        events[end].append((number, -1))
    counts, count, now, wanted = list[int](), 0, set[int](), set[int]()
    for happening in events[: len(shown)]:
        for number, change in happening:
            copies_held[number] += change
            count += change
            (now.add if copies_held[number] else now.discard)(number)
        counts.append(count)
        if happening:
            wanted.update(heapq.nlargest(top, now, key=lambda number: copies_held[number] * sizes[number]))
    sentences = list(dict.fromkeys(runs(moment) for _, moment in shown))
    place_of = {words: number for number, words in enumerate(sentences)}
    return {
        "moments": len(timeline.moments),
        "places": None if len(shown) == len(timeline.moments) else places,
        "peak": bisect_left(places, timeline.peak),
        "top": top,
        "held": [[getattr(moment, kind) for _, moment in shown] for kind in KINDS],
        "counts": counts,
        "said": [*map(printable, sentences)],
        "runs": [place_of[runs(moment)] for _, moment in shown],
        "values": [_value(value, lives[number]) for value, number in numbers.items() if number in wanted],
    }


def _value(value: LiveValue, lives: list[int]) -> dict[str, Any]:
    source = value.source
    return {
        "bytes": value.nbytes,
        "type": printable(value.type),
        "kind": value.kind,
        "what": printable(value_words(value)),
        "place": printable(fmt.location(source)),
        "code": printable(source.expression) if source else "",
        "line": line_key(source) if source else "",
        "expression": expression_key(source) if source else "",
        "lives": lives,
    }


def lookup_attribute(data: dict[str, Any]) -> str:
    """The attribute that a script reads it from."""
    return f'data-time="{html.escape(json.dumps(data, separators=(",", ":")))}"'
