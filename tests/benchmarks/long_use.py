"""What a long session holds: ``python -m tests.benchmarks.long_use``.

Resident memory and Python objects after many inspections, toggles and widgets of the small loss of
tests/test_long_use.py, counted after a collection. Widgets are closed as their cells' next run closes them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import remat_magic as rm
from remat_magic.widget import RematWidget
from tests.test_long_use import ARGS, POLICIES, alive, fresh, inspect, resident_bytes


def told(what: str, times: int, work: Callable[[], object]) -> None:
    """Print what ``times`` runs of ``work`` leave; the first three are not counted."""
    for _ in range(3):
        work()
    objects, memory, begun = sum(alive().values()), resident_bytes(), time.perf_counter()
    for _ in range(times):
        work()
    seconds = time.perf_counter() - begun
    objects = sum(alive().values()) - objects
    mebibytes = (resident_bytes() - memory) / 2**20
    sys.stdout.write(
        f"{times:5} {what}: {objects:+,} objects, {mebibytes:+.1f} MiB of {memory / 2**20:.0f}, {seconds:.1f} s\n"
    )


def main() -> None:
    """Measure and print."""
    trace = rm.trace(fresh(), *ARGS)
    numbers = iter(range(10**6))

    def toggle() -> None:
        trace.report(*POLICIES[next(numbers) % len(POLICIES)])

    def widget() -> None:
        made = RematWidget(rm.trace(fresh(), *ARGS), "nothing_saveable")
        made._worker.join()
        made.close()

    told("toggles of one trace", 1000, toggle)
    told("inspections of fresh functions", 100, lambda: inspect(fresh()))
    told("inspections of fresh functions, once more", 100, lambda: inspect(fresh()))
    told("widgets, each closed", 50, widget)


if __name__ == "__main__":
    main()
