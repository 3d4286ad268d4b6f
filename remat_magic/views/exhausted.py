"""XLA's message that memory is exhausted, in sentences and rows."""

from __future__ import annotations

from collections import defaultdict

from remat_magic.records import Exhausted, ExhaustedBuffer
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.tables import TOP_ROWS, HeldRow, held_table

_PARTS = 4  # of what a program needs, those that are told


def exhausted_sentences(record: Exhausted) -> list[str]:
    """What could not be had, and what that means."""
    where = {"host": " of the host", "device": ""}.get(record.memory, f" in {record.memory}")
    wanted = ""
    if record.wanted_bytes is not None:
        wanted = f": {fmt.nbytes(record.wanted_bytes)} {'wanted' if record.when != 'running' else 'wanted at once'}"
    if record.available_bytes is not None and record.wanted_bytes is not None:
        over = record.wanted_bytes - record.available_bytes
        wanted += f", {fmt.nbytes(record.available_bytes)} available"
        wanted += f", {fmt.nbytes(over)} too much" if over > 0 else ", but not in one piece"
    sentences = [f"Out of memory{where} while {record.when}{wanted}."]
    largest = sorted(record.parts, key=lambda part: -part[1])[:_PARTS]
    if largest:
        sentences.append(f"XLA counts: {', '.join(f'{name} {fmt.nbytes(size)}' for name, size in largest if size)}.")
    if record.memory == "vmem":
        sentences.append("That is the fast memory of one kernel: smaller blocks in it help, and no checkpoint does.")
    elif not record.buffers:
        sentences.append("XLA lists no buffers here. %%remat on the code that ran shows what takes the memory.")
    return sentences


def exhausted_rows(record: Exhausted) -> list[HeldRow]:
    """The buffers, those that are alike together."""
    alike = defaultdict[tuple[object, ...], list[ExhaustedBuffer]](list)
    for buffer in record.buffers:
        alike[buffer.type, buffer.what, buffer.source, buffer.kind].append(buffer)
    rows = [
        HeldRow(len(group), sum(one.nbytes for one in group), first.type, first.kind, first.what, first.source)
        for group in alike.values()
        for first in group[:1]
    ]
    return sorted(rows, key=lambda row: -row.nbytes)


def exhausted_html(record: Exhausted) -> str:
    """The same as HTML."""
    sentences = " ".join(exhausted_sentences(record))
    if not record.buffers:
        return f"<p>{escape(sentences)}</p>"
    return held_table(f"{sentences} The largest buffers:", "Kind", exhausted_rows(record), TOP_ROWS, "buffer")
