"""Hold what the roofline rests on against what XLA counts, compiled for devices that need not be here.

``python -m tests.benchmarks.traffic ["TPU v5e" "H100 SXM" ...]`` prints a row for each choice, then a table of FLOPs
and bytes; ``--write README.md`` puts the table between the marks in a text, where it is of a TPU v5e. The choices are
those of the table of estimates: what that one has compiled is not compiled again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

import remat_magic as rm
from tests.benchmarks import estimates
from tests.benchmarks.programs import PROGRAMS

MARKS = ("<!-- traffic: begin -->\n", "<!-- traffic: end -->\n")


class Counted(NamedTuple):
    """What a choice comes to, as reckoned and in parts of what XLA counts."""

    program: str
    checkpointed: bool
    flops: float
    bytes: float


def counted(names: Iterable[str], device: str, seconds: float) -> list[Counted]:
    """Of the choices of some programs; printed on the way."""
    found: list[Counted] = []
    for name in names:
        fun, args = PROGRAMS[name]()
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


def table(by_device: dict[str, list[Counted]]) -> str:
    """A Markdown table: FLOPs and bytes in parts of XLA's."""

    def figures(part: list[Counted]) -> str:
        flops, moved = ([getattr(each, name) for each in part] for name in ("flops", "bytes"))
        median = f"{statistics.median(flops):.2f} | {statistics.median(moved):.2f}"
        return f"{median} | {min(moved):.2f} | {max(moved):.2f}"

    head = "| compiled for | models | | choices | FLOPs | bytes | lowest | highest |\n"
    head += "|---|---|---|---:|---:|---:|---:|---:|\n"
    return head + estimates.rows_of(by_device, figures)


if __name__ == "__main__":
    estimates.run(__doc__, counted, table, ("TPU v5e",), MARKS)
