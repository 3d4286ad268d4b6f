"""Hold estimated peaks and their ranges against what XLA needs, compiled for devices that need not be here.

``python -m tests.benchmarks.estimates ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice of each program of
``programs.py``, and then a table; ``--write README.md`` puts that table between the marks in a text. It needs the
extras ``tpu`` and ``cuda``, and compiles hundreds of programs, which takes hours: what was compiled before is not
compiled again, and with ``--seconds 0`` nothing else is looked at.

``--ranges`` writes ``remat_magic/facts/measured_ranges.py`` anew, from the programs that are for tuning.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import remat_magic as rm
from remat_magic import devices
from remat_magic.facts import measured_ranges
from remat_magic.facts.buffers import memory_of
from remat_magic.facts.ranges import Doubt, doubt
from remat_magic.records import ComparisonRow, Measurement
from tests.benchmarks.programs import HELD_OUT, PROGRAMS, TUNING

MARKS = ("<!-- estimates: begin -->\n", "<!-- estimates: end -->\n")
DEVICES = ("TPU v5e", "H100 SXM")
_MOST = 6  # choices of a program: as many as are between the dearest and the cheapest in memory
_MIXED = "mixed"


def compiled(trace: rm.Trace, device: str, seconds: float) -> Iterator[tuple[ComparisonRow, Measurement]]:
    """Places and policies that are tried, from those of the highest peak to those of the lowest, with what XLA says."""
    rows = [row for row in trace.places(device="H100 SXM", most=16) if not row.error and row.policy != _MIXED]
    rows = [row for row in rows if row.peak_bytes and "plan" not in row.label]
    rows.sort(key=lambda row: -(row.peak_bytes or 0))
    if seconds and len(rows) > _MOST:
        rows = [rows[round(number * (len(rows) - 1) / (_MOST - 1))] for number in range(_MOST)]
    for row in rows:
        measured = trace.measure(row.policy, row.at, device=device, seconds=seconds)
        if seconds or measured.needed_bytes:
            yield row, measured


class Estimated(NamedTuple):
    """A choice: what was estimated, in which range, and what XLA needs, in bytes."""

    program: str
    checkpointed: bool
    peak: int
    low: int
    high: int
    needed: int
    doubt: Doubt

    @property
    def off(self) -> float:
        """The estimate in parts of what is needed, less one."""
        return self.peak / self.needed - 1

    @property
    def least(self) -> float:
        """What XLA needs, of what was in doubt, in parts of the estimate."""
        return (self.needed - self.doubt.sure) / max(1, self.peak - self.doubt.sure)

    @property
    def most(self) -> float:
        """The same without what there may be more of."""
        return (self.needed - self.doubt.sure - self.doubt.more) / max(1, self.peak - self.doubt.sure)


def estimated(names: Iterable[str], device: str, seconds: float) -> list[Estimated]:
    """Of the choices of some programs; printed on the way."""
    found: list[Estimated] = []
    for name in names:
        fun, args = PROGRAMS[name]()
        trace = rm.trace(fun, *args)
        memory = memory_of(devices.get(device))
        for row, measured in compiled(trace, device, seconds):
            choice = f"| {name} | {row.policy} | {row.at} |"
            if measured.needed_bytes is None:
                print(f"{choice} {measured.error} |", flush=True)
                continue
            variant = trace.facts.under(row.policy, row.at)
            report, schedule = variant.report(memory), variant.schedule(memory)
            doubted = doubt(schedule.held(schedule.highest()[1]), schedule.on)
            sizes = (report.peak_bytes or 0, report.peak_low or 0, report.peak_high or 0, measured.needed_bytes)
            found.append(Estimated(name, bool(report.recomputed_flops), *sizes, doubted))
            print(choice, *(f"{size / 1e9:.2f} |" for size in sizes), f"{doubted.what} |", flush=True)
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def rows_of(by_device: dict[str, Any], figures: Callable[[Any], str]) -> str:
    """The rows of a Markdown table: of each device and half of the programs, with a checkpoint and without."""
    lines = list[str]()
    for device, found in by_device.items():
        for half, which in {"made on": TUNING, "held out": HELD_OUT}.items():
            for what, checkpointed in (("with a checkpoint", True), ("without", False)):
                part = [each for each in found if each.checkpointed == checkpointed and each.program in which]
                if part:
                    lines.append(f"| {device} | {half} | {what} | {len(part)} | {figures(part)} |\n")
    return "".join(lines)


def table(by_device: dict[str, list[Estimated]]) -> str:
    """A Markdown table: by how much the estimates are off, and how many are in their range."""

    def figures(part: list[Estimated]) -> str:
        off = [each.off for each in part]
        within = statistics.mean(each.low <= each.needed <= each.high for each in part)
        widths = sorted(each.high / each.low for each in part)
        wide = f"{statistics.median(widths):.1f} | {widths[round(0.9 * (len(widths) - 1))]:.1f}"
        return f"{statistics.median(map(abs, off)):.0%} | {min(off):+.0%} | {max(off):+.0%} | {within:.0%} | {wide}"

    head = "| compiled for | programs | | choices | off by, in the median | lowest | highest | in the range "
    head += "| its width, in the median | in nine of ten |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
    return head + rows_of(by_device, figures)


def ranges(by_device: dict[str, list[Estimated]]) -> str:
    """The text of ``measured_ranges.py``: of each class what was lowest and highest, and more the fewer programs.

    By ranges made without a program, 97 of 100 of its choices are in.
    """
    classes: dict[tuple[str, str], list[Estimated]] = {}
    for each in (each for found in by_device.values() for each in found if each.program in TUNING):
        classes.setdefault((each.doubt.device, each.doubt.what), []).append(each)
    lines = list[str]()
    for key, found in sorted(classes.items()):
        margin = 1 + 1 / len({each.program for each in found})
        low = min(1.0, *(each.least for each in found)) / margin
        high = max(1.0, *(each.most for each in found)) * margin
        lines.append(f'    ("{key[0]}", "{key[1]}"): ({low:.2f}, {high:.2f}),\n')
    text = Path(measured_ranges.__file__).read_text(encoding="utf-8")
    return f"{text.partition('RANGES = {')[0]}RANGES = {{\n{''.join(lines)}}}\n"


def run(
    doc: str | None, of_device: Any, table: Any, chosen: tuple[str, ...], marks: tuple[str, str]
) -> tuple[dict[str, Any], argparse.Namespace]:
    """Print the table of what is asked for, or put it between its marks in a file; what was found of each device."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("devices", nargs="*", default=chosen)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ranges", action="store_true")
    options = parser.parse_args()
    by_device = {device: of_device(options.programs, device, options.seconds) for device in options.devices}
    print(f"\n{table(by_device)}")
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(marks[0])
        text = f"{before}{marks[0]}{table(by_device)}{marks[1]}{rest.split(marks[1])[1]}"
        options.write.write_text(text, encoding="utf-8")
    return by_device, options


if __name__ == "__main__":
    by_device, options = run(__doc__, estimated, table, DEVICES, MARKS)
    if options.ranges:
        Path(measured_ranges.__file__).write_text(ranges(by_device), encoding="utf-8")
