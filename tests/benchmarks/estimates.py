"""Hold estimated peaks and their ranges against what XLA needs, compiled for devices that need not be here.

``python -m tests.benchmarks.estimates ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice of each program of
``programs.py`` and ``unseen.py``, and then a table; ``--write README.md`` puts that table between the marks in a text.
``compiled.jsonl`` has what XLA needs of each choice. With the extras ``tpu`` and ``cuda``, ``--seconds 60`` compiles
choices of programs that it does not have, each for so long at most, and adds them: hundreds take hours.

``--ranges`` writes ``remat_magic/facts/measured_ranges.py`` anew, from the programs that are for tuning.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from scipy.optimize import linprog

import remat_magic as rm
from remat_magic import devices
from remat_magic.facts import measured_ranges
from remat_magic.facts.buffers import memory_of
from remat_magic.facts.ranges import ON_CHIP, Doubt, What, doubt
from tests.benchmarks.programs import TUNING
from tests.benchmarks.unseen import HELD_OUT

PROGRAMS = {**TUNING, **HELD_OUT}
MARKS = ("<!-- estimates: begin -->\n", "<!-- estimates: end -->\n")
DEVICES = ("TPU v5e", "H100 SXM")
KEPT = Path(__file__).with_name("compiled.jsonl")
_MOST = 5  # choices of a program: as many as are between the dearest and the cheapest in memory


def compiled(name: str, trace: rm.Trace, device: str, seconds: float) -> Iterator[tuple[str, str, int]]:
    """Policies and places that are tried, from those of the highest peak to those of the lowest, with XLA's bytes."""
    kept = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]
    of_program = [row for row in kept if (row["program"], row["device"]) == (name, device)]
    if not of_program and seconds:
        rows = [row for row in trace.places(device="H100 SXM", most=16) if row.peak_bytes and row.policy != "mixed"]
        rows = sorted((row for row in rows if "plan" not in row.label), key=lambda row: -(row.peak_bytes or 0))
        for place in sorted({round(step * (len(rows) - 1) / (_MOST - 1)) for step in range(_MOST)}):
            row = {"program": name, "device": device, "policy": rows[place].policy, "at": rows[place].at}
            measured = trace.measure(row["policy"], row["at"], device=device, seconds=seconds)
            print(measured.error, end="")
            if measured.needed_bytes:
                of_program.append({**row, "needed": measured.needed_bytes})
        with KEPT.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in of_program)
    for row in of_program:
        yield row["policy"], row["at"], row["needed"]


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


def estimated(names: Iterable[str], device: str, seconds: float) -> list[Estimated]:
    """Of the choices of some programs; printed on the way."""
    found: list[Estimated] = []
    memory = memory_of(devices.get(device))
    for name in names:
        fun, args = PROGRAMS[name]()
        trace = rm.trace(fun, *args)
        for policy, at, needed in compiled(name, trace, device, seconds):
            variant = trace.facts.under(policy, at)
            report, schedule = variant.report(memory), variant.schedule(memory)
            doubted = doubt(schedule.held(schedule.highest()[1]), schedule.on)
            sizes = (report.peak_bytes or 0, report.peak_low or 0, report.peak_high or 0, needed)
            found.append(Estimated(name, bool(report.recomputed_flops), *sizes, doubted))
            most = max(doubted.unsure, key=doubted.unsure.__getitem__, default="")
            told = (f"{size / 1e9:.2f} |" for size in sizes)
            print(f"| {device} | {name} | {policy} | {at} |", *told, f"{most} |", flush=True)
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def table(by_device: Mapping[str, Sequence[Estimated]]) -> str:
    """A Markdown table: by how much the estimates are off, and how many are in their range."""
    head = "| compiled for | programs | | choices | off by, in the median | lowest | highest | in the range "
    lines = [f"{head}| its width, in the median | in nine of ten |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"]
    for device, found in by_device.items():
        for half, which in {"made on": TUNING, "held out": HELD_OUT}.items():
            for what, checkpointed in (("with a checkpoint", True), ("without", False)):
                part = [each for each in found if each.checkpointed == checkpointed and each.program in which]
                if part:
                    lines.append(f"| {device} | {half} | {what} | {len(part)} | {_figures(part)} |\n")
    return "".join(lines)


def _figures(part: Sequence[Estimated]) -> str:
    off = [each.off for each in part]
    within = statistics.mean(each.low <= each.needed <= each.high for each in part)
    widths = sorted(each.high / each.low for each in part)
    wide = f"{statistics.median(widths):.1f} | {widths[round(0.9 * (len(widths) - 1))]:.1f}"
    return f"{statistics.median(map(abs, off)):.0%} | {min(off):+.0%} | {max(off):+.0%} | {within:.0%} | {wide}"


# ------------------------------------------------------------------------------------------------------------- ranges

_KINDS: tuple[What, ...] = get_args(What)
_TAIL = 0.025  # of the choices, on either side of their range before it is made wider
_LIKE = 0.003  # so much is a kind of its own worth: few choices of it are no reason
_WITHIN = 0.95  # of the choices of a program that ranges were not made on

_Parts = dict[str, tuple[list[float], list[float]]]  # of each device, at least and at most, by kind


def _quantile(found: Sequence[Estimated], tail: float, vmem: int) -> list[float]:
    """By how much to multiply what each kind holds, so that this part of the programs needs less.

    Found by linear programming. The kinds are pulled towards one figure. A program counts once, whatever its choices.
    """
    choices = Counter(each.program for each in found)
    weights = np.array([1 / choices[each.program] / len(choices) for each in found])
    unsure = np.array([each.peak - each.doubt.sure for each in found])
    shares = np.array([[each.doubt.unsure[kind] for kind in _KINDS] for each in found]) / unsure[:, None]
    needed = np.array([each.needed - each.doubt.sure + vmem for each in found]) / unsure
    kinds, rows = len(_KINDS), np.eye(len(found))
    costs = np.concatenate([[0], np.full(2 * kinds, _LIKE), tail * weights, (1 - tail) * weights])
    equal = np.hstack([shares.sum(1, keepdims=True), shares, -shares, rows, -rows])
    bounds = [(None, None), *[(0, None)] * (2 * kinds + 2 * len(found))]
    common, *parts = linprog(costs, A_eq=equal, b_eq=needed, bounds=bounds).x[: 1 + 2 * kinds]
    return [common + more - less for more, less in zip(parts[:kinds], parts[kinds:], strict=True)]


def _parts(by_device: Mapping[str, Sequence[Estimated]], without: str = "") -> _Parts:
    parts: _Parts = {}
    for found in by_device.values():
        others = [each for each in found if each.program in TUNING and each.program != without]
        device = others[0].doubt.device
        least = _quantile(others, _TAIL, ON_CHIP if device == "TPU" else 0)
        most = _quantile(others, 1 - _TAIL, 0)
        parts[device] = [min(1.0, part) for part in least], [max(1.0, part) for part in most]
    return parts


def _is_within(each: Estimated, parts: _Parts, margin: float) -> bool:
    sure, (least, most) = each.doubt.sure, parts[each.doubt.device]
    unsure = [each.doubt.unsure[kind] for kind in _KINDS]
    vmem = ON_CHIP if each.doubt.device == "TPU" else 0
    return bool(sure + np.dot(least, unsure) / margin - vmem <= each.needed <= sure + np.dot(most, unsure) * margin)


def ranges(by_device: Mapping[str, Sequence[Estimated]]) -> str:
    """The text of ``measured_ranges.py``: of each kind what it holds at least and at most, in parts of the estimate.

    They are so much wider than what holds the programs that they are made of, that if they are made without one, its
    choices are in as often as they should be, on average.
    """
    left_out = {name: _parts(by_device, name) for name in TUNING}
    found = [each for of_device in by_device.values() for each in of_device if each.program in TUNING]
    margin, within = 1.0, 0.0
    while within < _WITHIN:
        margin += 0.01
        of_program: dict[str, list[bool]] = {}
        for each in found:
            of_program.setdefault(each.program, []).append(_is_within(each, left_out[each.program], margin))
        within = statistics.mean(map(statistics.mean, of_program.values()))
    print(f"wider by {margin:.2f}: {within:.1%} are in the ranges that are made without them")
    lines = [
        f'    ("{device}", "{kind}"): ({low / margin:.2f}, {high * margin:.2f}),\n'
        for device, parts in sorted(_parts(by_device).items())
        for kind, low, high in zip(_KINDS, *parts, strict=True)
    ]
    text = Path(measured_ranges.__file__).read_text(encoding="utf-8")
    return f"{text.partition('RANGES = {')[0]}RANGES = {{\n{''.join(lines)}}}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=DEVICES)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ranges", action="store_true")
    options = parser.parse_args()
    by_device = {device: estimated(options.programs, device, options.seconds) for device in options.devices}
    print(f"\n{table(by_device)}")
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(MARKS[0])
        text = f"{before}{MARKS[0]}{table(by_device)}{MARKS[1]}{rest.split(MARKS[1])[1]}"
        options.write.write_text(text, encoding="utf-8")
    if options.ranges:
        Path(measured_ranges.__file__).write_text(ranges(by_device), encoding="utf-8")
