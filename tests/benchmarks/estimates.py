"""Hold estimated peaks and their ranges against what XLA needs, compiled for devices that need not be here.

``python -m tests.benchmarks.estimates ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice of each program of
``programs.py`` and ``unseen.py``, then a table, and the text of ``remat_magic/facts/measured_ranges.py``. With
``--write docs/estimates.md`` it puts the table between the marks in that text, and writes that file. The ranges of a
choice are those that the other programs alone would give. ``compiled.jsonl`` has what XLA needs of each choice.
With the extras ``tpu`` and ``cuda``, ``--seconds 60`` compiles choices of programs that it does not have, each for so
long at most, and adds them: hundreds take hours.
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
from remat_magic.facts.reports import ON_CHIP, Doubt, What, doubt
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
    low: float
    high: float
    needed: int

    @property
    def off(self) -> float:
        """The estimate in parts of what is needed, less one."""
        return self.peak / self.needed - 1


class Choice(NamedTuple):
    """One that was compiled, with what is in doubt of it."""

    program: str
    checkpointed: bool
    peak: int
    needed: int
    doubt: Doubt

    def of_unsure(self, parts: Sequence[float]) -> float:
        """What is in doubt, each kind times its part."""
        return float(np.dot(parts, [self.doubt.unsure[kind] for kind in _KINDS]))


def choices(names: Iterable[str], device: str, seconds: float) -> list[Choice]:
    """Those of some programs; printed on the way."""
    found: list[Choice] = []
    memory = memory_of(devices.get(device))
    for name in names:
        fun, args = PROGRAMS[name]()
        trace = rm.trace(fun, *args)
        for policy, at, needed in compiled(name, trace, device, seconds):
            variant = trace.facts.under(policy, at)
            report, schedule = variant.report(memory), variant.schedule(memory)
            doubted = doubt(schedule.live_at(schedule.highest()[1]), schedule.on)
            found.append(Choice(name, bool(report.recomputed_flops), report.peak_bytes or 0, needed, doubted))
            most = max(doubted.unsure, key=doubted.unsure.__getitem__, default="")
            told = (
                f"{(size or 0) / 1e9:.2f} |" for size in (report.peak_bytes, report.peak_low, report.peak_high, needed)
            )
            print(f"| {device} | {name} | {policy} | {at} |", *told, f"{most} |", flush=True)
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def table(by_device: Mapping[str, Sequence[Estimated]]) -> str:
    """A Markdown table: by how much the estimates are off, and how many are in their range."""
    head = "| compiled for | programs | | choices | median error | lowest | highest | within the range "
    lines = [f"{head}| median width | nine of ten below |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n"]
    for device, found in by_device.items():
        for half, which in {"of the rules": TUNING, "others": HELD_OUT}.items():
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
_TAIL = 0.1  # of the choices, on either side of what their range is made of before it is made wider
_LIKE = 0.003  # so much is a kind of its own worth: few choices of it are no reason
_OUT = 0.025  # of the choices, on either side of the ranges that are made without their program


def _weights(found: Sequence[Choice]) -> np.ndarray:
    """A program counts once, whatever its choices."""
    each = Counter(choice.program for choice in found)
    return np.array([1 / each[choice.program] / len(each) for choice in found])


def _quantile(found: Sequence[Choice], tail: float, vmem: int) -> list[float]:
    """By how much to multiply what each kind holds, so that this part of the programs needs less.

    Found by linear programming. The kinds are pulled towards one figure.
    """
    weights = _weights(found)
    unsure = np.array([choice.peak - choice.doubt.sure for choice in found])
    shares = np.array([[choice.doubt.unsure[kind] for kind in _KINDS] for choice in found]) / unsure[:, None]
    needed = np.array([choice.needed - choice.doubt.sure + vmem for choice in found]) / unsure
    kinds, rows = len(_KINDS), np.eye(len(found))
    costs = np.concatenate([[0], np.full(2 * kinds, _LIKE), tail * weights, (1 - tail) * weights])
    equal = np.hstack([shares.sum(1, keepdims=True), shares, -shares, rows, -rows])
    bounds = [(None, None), *[(0, None)] * (2 * kinds + 2 * len(found))]
    common, *parts = linprog(costs, A_eq=equal, b_eq=needed, bounds=bounds).x[: 1 + 2 * kinds]
    return [common + more - less for more, less in zip(parts[:kinds], parts[kinds:], strict=True)]


def _wider(off: Sequence[float], weights: Sequence[float]) -> float:
    """By how much ends are to be wider, so that few of them are off by more."""
    out = 0.0
    for each, weight in sorted(zip(off, weights, strict=True), reverse=True):
        out += weight
        if out > _OUT:
            return max(1.0, each)
    return 1.0


def ranged(found: Sequence[Choice]) -> tuple[list[tuple[float, float]], list[Estimated]]:
    """Of each kind on a device what it holds at least and at most, in parts of the estimate; and the choices.

    Both ends are so much wider that of the ranges that are made without a program, its choices are in as often as they
    should be. These ranges are the choices' own.
    """
    vmem = ON_CHIP if found[0].doubt.device == "TPU" else 0

    def made(of: Sequence[Choice]) -> tuple[list[float], list[float]]:
        least, most = _quantile(of, _TAIL, vmem), _quantile(of, 1 - _TAIL, 0)
        return [min(1.0, part) for part in least], [max(1.0, part) for part in most]

    left_out = {
        name: made([each for each in found if each.program != name]) for name in {each.program for each in found}
    }
    ends = [tuple(map(each.of_unsure, left_out[each.program])) for each in found]
    unsure = [each.needed - each.doubt.sure for each in found]
    weights = _weights(found).tolist()
    down = _wider([low / max(need + vmem, 1) for (low, _), need in zip(ends, unsure, strict=True)], weights)
    up = _wider([need / high for (_, high), need in zip(ends, unsure, strict=True)], weights)
    held = [
        Estimated(
            each.program,
            each.checkpointed,
            each.peak,
            min(each.peak, each.doubt.sure + max(0, low / down - vmem)),
            max(each.peak, each.doubt.sure + high * up),
            each.needed,
        )
        for each, (low, high) in zip(found, ends, strict=True)
    ]
    return [(low / down, high * up) for low, high in zip(*made(found), strict=True)], held


def text_of(parts: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The text of ``measured_ranges.py``."""
    lines = [
        f'    ("{device}", "{kind}"): ({low:.2f}, {high:.2f}),\n'
        for device, of_device in sorted(parts.items())
        for kind, (low, high) in zip(_KINDS, of_device, strict=True)
    ]
    text = Path(measured_ranges.__file__).read_text(encoding="utf-8")
    return f"{text.partition('RANGES = {')[0]}RANGES = {{\n{''.join(lines)}}}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=DEVICES)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    by_device = {device: choices(options.programs, device, options.seconds) for device in options.devices}
    made = {device: ranged(found) for device, found in by_device.items()}
    rows = table({device: held for device, (_, held) in made.items()})
    text = text_of({by_device[device][0].doubt.device: parts for device, (parts, _) in made.items()})
    print(f"\n{rows}\n{text}")
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(MARKS[0])
        options.write.write_text(f"{before}{MARKS[0]}{rows}{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")
        Path(measured_ranges.__file__).write_text(text, encoding="utf-8")
