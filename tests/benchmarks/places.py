"""How soon a first front of places stands, and the whole search: ``python -m tests.benchmarks.places [DEVICE]``."""

from __future__ import annotations

import sys
import time

import remat_magic as rm
from tests.benchmarks import models

FIRST = 3  # rows that make a front
MODELS = {
    "12 blocks": {},
    "12 blocks, checkpointed": {"site": True},
    "12 blocks, scanned": {"scanned": True},
    "12 blocks, scanned and checkpointed": {"scanned": True, "site": True},
}


def main(device: str = "H100 SXM") -> None:
    """Print a line for each model, and the front of each."""
    rm.trace(*flat(models.three_layers())).report("nothing_saveable")  # what is imported when it is first needed
    for name, options in MODELS.items():
        start = time.perf_counter()
        trace = rm.trace(*flat(models.transformer(12, **options)))
        traced = time.perf_counter()
        first = None
        for places in trace.placing(device=device):
            if first is None and len(places) >= FIRST:
                first = time.perf_counter() - traced
        whole = time.perf_counter() - traced
        print(
            f"{name}: traced in {traced - start:.2f} s, first front after {first:.2f} s, "
            f"all {places.progress.done} choices after {whole:.2f} s"
        )
        for row in places:
            if row.pareto:
                print(f"    {row.label}: {row.peak_bytes / 1e9:.2f} GB, +{1e3 * row.times.extra:.1f} ms")
        for sentence in places.not_tried:
            print(f"    {sentence}")


def flat(model):
    """Function and arguments as ``trace`` takes them."""
    fun, args = model
    return fun, *args


if __name__ == "__main__":
    main(*sys.argv[1:])
