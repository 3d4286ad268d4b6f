"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "layers"): (0.71, 1.39),
    ("GPU", "plain"): (0.64, 1.79),
    ("GPU", "moved"): (0.82, 2.63),
    ("TPU", "layers"): (0.89, 1.39),
    ("TPU", "plain"): (0.74, 1.86),
    ("TPU", "moved"): (0.91, 1.83),
}
