"""The columns of a comparison: which figures its rows have, in words and in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from remat_magic.records import ComparisonRow
from remat_magic.views import format as fmt


@dataclass(frozen=True, slots=True)
class Cell:
    """``value`` is what a column is sorted by; None, the unknown, comes last."""

    text: str
    exact: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers: ``group`` is "estimated", "measured" or, for what is counted, empty."""

    head: str
    group: str
    cell: Callable[[ComparisonRow], Cell]
    help: str = ""


def _bytes(number: int | None) -> Cell:
    return Cell("") if number is None else Cell(fmt.nbytes(number), fmt.exact(number, "bytes"), number)


def _flops(number: int | None) -> Cell:
    return Cell("") if number is None else Cell(fmt.flops(number), fmt.exact(number, "FLOPs"), number)


def _seconds(number: float | None, complete: bool = True) -> Cell:
    if number is None:
        return Cell("unknown")
    return Cell(f"{'' if complete else '≥ '}{fmt.seconds(number)}", f"{number:.6g} seconds", number)


def _recomputed(row: ComparisonRow) -> Cell:
    if row.recomputed_flops is None:
        return Cell("")
    exact = fmt.exact(row.recomputed_flops, "FLOPs")
    if row.repeated_flops is not None and row.deferred_flops is not None:
        exact += f": {row.repeated_flops:,} repeated, {row.deferred_flops:,} deferred"
    share = ""
    if row.forward_flops and row.recomputed_flops:
        share = f" +{fmt.percent(row.recomputed_flops, row.forward_flops)}"
        exact += f";{share} of the forward pass's"
    prefix = "" if row.complete else "≥ "
    text = f"{prefix}{fmt.flops(row.recomputed_flops)}{share}" if row.recomputed_flops else "none"
    return Cell(text, exact, row.recomputed_flops)


def _time(row: ComparisonRow, name: str) -> Cell:
    times = row.times
    return Cell("") if times is None else _seconds(getattr(times, name), times.complete)


def _step(row: ComparisonRow) -> Cell:
    """The whole step; its halves on hover."""
    cell, times = _time(row, "total"), row.times
    if times is None:
        return cell
    parts = f"forward {fmt.seconds(times.forward)}, backward {fmt.seconds(times.backward)}"
    if times.offload is None:
        parts += ", offloading unknown"
    elif times.offload:
        parts += f", offloading {fmt.seconds(times.offload)}"
    return Cell(cell.text, f"{cell.exact}: {parts}", cell.value)


def _saved(row: ComparisonRow) -> Cell:
    """What is saved; what is alive anyway on hover."""
    cell = _bytes(row.saved_bytes)
    if not row.argument_bytes:
        return cell
    besides = f"besides {row.argument_bytes:,} bytes of arguments, which are alive anyway"
    return Cell(cell.text, f"{cell.exact}; {besides}", cell.value)


def _peak(row: ComparisonRow) -> Cell:
    """The peak, with its range."""
    if row.peak_bytes is None:
        return Cell("")
    text = fmt.about(row.peak_bytes, row.peak_low, row.peak_high)
    return Cell(text, fmt.exact(row.peak_bytes, "bytes"), row.peak_bytes)


def columns_of(rows: Sequence[ComparisonRow]) -> Iterator[Column]:
    """What decides comes first: estimates, then what was measured, then what was counted."""
    yield Column("peak", "estimated", _peak, "device memory held at most")
    if any(row.times for row in rows):
        yield Column("step", "estimated", _step, "forward, backward and offloading, one after the other")
        meaning = "part of the backward pass"
        yield Column("recomputing", "estimated", lambda row: _time(row, "recomputed"), meaning)
    yield from _measured(rows)
    yield Column("saved", "", _saved, "intermediates kept on the device")
    if any(row.offloaded_bytes for row in rows):
        yield Column("offloaded", "", lambda row: _bytes(row.offloaded_bytes), "moved to another memory")
    yield Column("recomputed", "", _recomputed, "arithmetic that the backward pass does again or for the first time")
    if any(row.repeated_communicated_bytes for row in rows):
        meaning = "what a device has of the results of gathers, reductions and the like that run again"
        yield Column("communicated again", "", lambda row: _bytes(row.repeated_communicated_bytes), meaning)


def simulated(rows: Sequence[ComparisonRow]) -> int:
    """On how many devices runs were measured that one machine simulates; 0 for none."""
    return max((row.simulated_devices for row in rows if row.measured_seconds is not None), default=0)


def _of_runs(rows: Sequence[ComparisonRow]) -> str:
    """What the measured seconds are."""
    most = simulated(rows)
    of_all = f"; the {most} devices are simulated: what this machine takes for all of them, no device's own time"
    return f"median of several runs{of_all if most else ''}"


def _measured(rows: Sequence[ComparisonRow]) -> Iterator[Column]:
    columns: list[tuple[str, str, Callable[[ComparisonRow], Cell], str]] = [
        (
            "measured_fits",
            "fits",
            _fits,
            "whether the compiled program needs no more than the device has: arguments, results and temporaries",
        ),
        (
            "measured_temp_bytes",
            "temporaries",
            _temporaries,
            "what the compiled program needs besides arguments and results, by XLA's count",
        ),
        ("measured_seconds", "run", lambda row: _known_seconds(row.measured_seconds), _of_runs(rows)),
        ("measured_compile_seconds", "compile", lambda row: _known_seconds(row.measured_compile_seconds), ""),
        (
            "measured_flops",
            "FLOPs",
            lambda row: _flops(_whole(row.measured_flops)),
            "as XLA counts them, the bodies of loops as often as they run",
        ),
    ]
    if any(row.measured_communicated_bytes for row in rows):  # on one device there is nobody to tell
        columns.append(
            (
                "measured_communicated_bytes",
                "communication",
                _communication,
                "what a device has of the results of gathers, reductions and the like, in the compiled program",
            )
        )
    for field, head, cell, meaning in columns:
        if any(getattr(row, field) is not None for row in rows):
            yield Column(head, "measured", cell, meaning)


def _communication(row: ComparisonRow) -> Cell:
    """What devices tell each other; by its kinds on hover."""
    cell = _bytes(row.measured_communicated_bytes)
    return Cell(cell.text, row.measured_collectives or cell.exact, cell.value)


def _temporaries(row: ComparisonRow) -> Cell:
    """What XLA needs inside; on hover with arguments and results."""
    cell = _bytes(row.measured_temp_bytes)
    if row.measured_bytes is None:
        return cell
    return Cell(cell.text, f"{cell.exact}; {row.measured_bytes:,} bytes with arguments and results", cell.value)


def _fits(row: ComparisonRow) -> Cell:
    """Whether it fits; how much it needs on hover."""
    if row.measured_fits is None or row.needed_bytes is None:
        return Cell("")
    needed, exact = row.needed_bytes, fmt.exact(row.needed_bytes, "bytes")
    quickly = " (quick)" if row.measured_effort == "quick" else ""
    by = "XLA's compiler with less optimization" if quickly else "XLA's compiler"
    if row.available_bytes is None:
        return Cell(f"yes: {fmt.nbytes(needed)}{quickly}", f"{exact} needed, by {by}", needed)
    exact += f" of {row.available_bytes:,} needed, by {by}"
    if row.measured_fits:
        share = fmt.percent(needed, row.available_bytes)
        return Cell(f"yes: {fmt.nbytes(needed)}{quickly}", f"{exact}, {share}", needed)
    return Cell(f"no: {fmt.nbytes(needed - row.available_bytes)} too much{quickly}", exact, needed)


def _known_seconds(number: float | None) -> Cell:
    return Cell("") if number is None else _seconds(number)


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
