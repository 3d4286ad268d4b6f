"""Hold what the roofline rests on against what XLA counts, compiled for devices that need not be here.

``python -m tests.benchmarks.traffic ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice, then a table of FLOPs
and bytes; ``--write README.md`` puts the table between the marks in a text, where it is of a TPU v5e. The choices are
those of the table of estimates: what that one has compiled is not compiled again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import remat_magic as rm
from tests.benchmarks import estimates

MARKS = ("<!-- traffic: begin -->\n", "<!-- traffic: end -->\n")


@dataclass(frozen=True)
class Counted:
    """What a choice comes to, as reckoned and in parts of what XLA counts."""

    model: str
    checkpointed: bool
    flops: float
    bytes: float


def counted(names: Iterable[str], device: str, seconds: float) -> list[Counted]:
    """Of every place and policy that is tried of some models; printed on the way."""
    found: list[Counted] = []
    for name in names:
        fun, args = (estimates.MODELS | estimates.OTHERS)[name]()
        trace = rm.trace(fun, *args)
        for row, measured in estimates.compiled(trace, device, seconds):
            if not measured.flops or not measured.bytes_accessed:
                print(f"| {name} | {row.policy} | {row.at} | {measured.error or 'not counted'} |", flush=True)
                continue
            report = trace.report(row.policy, row.at)
            kernels = (*report.forward_kernels, *report.backward_kernels)
            flops = sum((kernel.flops or 0) * kernel.runs for kernel in kernels) / measured.flops
            moved = sum(kernel.bytes * kernel.runs for kernel in kernels) / measured.bytes_accessed
            found.append(Counted(name, bool(row.recomputed_flops), flops, moved))
            print(f"| {name} | {row.policy} | {row.at} | {flops:.2f} | {moved:.2f} |", flush=True)
    return found


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
    if options.write:
        estimates.write(text, options.write, MARKS)


if __name__ == "__main__":
    main()
