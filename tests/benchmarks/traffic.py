"""Hold what the roofline rests on against what XLA counts, compiled for devices that need not be here.

``python -m tests.benchmarks.traffic ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice, then a table of FLOPs
and bytes, and of how many pairs of choices the order by time is the same; ``--write README.md`` puts the table between
the marks in a text, where it is of a TPU v5e. The choices are those of the table of estimates: what that one has
compiled is not compiled again. Of time XLA says something for a TPU only, and only in what was compiled since its
cycles are kept.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import remat_magic as rm
from tests.benchmarks import estimates

MARKS = ("<!-- traffic: begin -->\n", "<!-- traffic: end -->\n")
_SAME = 0.01  # of a time: what is nearer has no order


@dataclass(frozen=True)
class Counted:
    """What a choice comes to, as reckoned and in parts of what XLA counts.

    ``seconds`` are the roofline's, ``cycles`` XLA's, None where it says nothing.
    """

    model: str
    checkpointed: bool
    flops: float
    bytes: float
    seconds: float
    cycles: int | None = None


def counted(names: Iterable[str], device: str, seconds: float) -> list[Counted]:
    """Of every place and policy that is tried of some models; printed on the way."""
    found: list[Counted] = []
    for name in names:
        fun, args = (estimates.MODELS | estimates.OTHERS)[name]()
        trace = rm.trace(fun, *args)
        for row, measured in estimates.compiled(trace, device, seconds):
            if not measured.flops or not measured.bytes_accessed or row.times is None:
                print(f"| {name} | {row.policy} | {row.at} | {measured.error or 'not counted'} |", flush=True)
                continue
            report = trace.report(row.policy, row.at)
            kernels = (*report.forward_kernels, *report.backward_kernels)
            flops = sum((kernel.flops or 0) * kernel.runs for kernel in kernels) / measured.flops
            moved = sum(kernel.bytes * kernel.runs for kernel in kernels) / measured.bytes_accessed
            took = row.times.total
            found.append(Counted(name, bool(row.recomputed_flops), flops, moved, took, measured.cycles))
            cells = f"{flops:.2f} | {moved:.2f} | {took * 1e3:.3f} ms | {measured.cycles or 0:,}"
            print(f"| {name} | {row.policy} | {row.at} | {cells} |", flush=True)
    return found


def same_order(choices: Iterable[Counted]) -> tuple[int, int]:
    """Of pairs of choices of one model that differ by either time, how many stand in the same order by both."""
    same = pairs = 0
    for a, b in itertools.combinations(choices, 2):
        if a.model == b.model and a.cycles and b.cycles:
            ours, xla = a.seconds / b.seconds - 1, a.cycles / b.cycles - 1
            if max(abs(ours), abs(xla)) > _SAME:
                pairs += 1
                same += ours * xla > 0
    return same, pairs


def table(by_device: dict[str, Sequence[Counted]]) -> str:
    """A Markdown table: FLOPs and bytes in parts of XLA's."""
    lines = ["| compiled for | models | | choices | FLOPs | bytes | lowest | highest |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---:|")
    for device, found in by_device.items():
        for models, which in (("made on", estimates.MODELS), ("others", estimates.OTHERS)):
            for what, checkpointed in (("with a checkpoint", True), ("without", False)):
                part = [each for each in found if each.checkpointed == checkpointed and each.model in which]
                if part:
                    flops, moved = ([getattr(each, name) for each in part] for name in ("flops", "bytes"))
                    figures = f"{statistics.median(flops):.2f} | {statistics.median(moved):.2f}"
                    figures += f" | {min(moved):.2f} | {max(moved):.2f}"
                    lines.append(f"| {device} | {models} | {what} | {len(part)} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=["TPU v5e", "H100 SXM"])
    parser.add_argument("--models", nargs="*", default=[*estimates.MODELS, *estimates.OTHERS])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    by_device = {device: counted(options.models, device, options.seconds) for device in options.devices}
    text = table(by_device)
    print(f"\n{text}")
    for device, found in by_device.items():
        print("{}: {} of {} pairs of choices in the same order by time".format(device, *same_order(found)))
    if options.write:
        estimates.write(text, options.write, MARKS)


if __name__ == "__main__":
    main()
