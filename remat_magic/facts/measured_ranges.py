"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "layers"): (0.71, 1.35),
    ("GPU", "plain"): (0.71, 1.65),
    ("GPU", "float32"): (0.64, 1.74),
    ("GPU", "moved"): (0.82, 2.55),
    ("TPU", "layers"): (0.85, 1.35),
    ("TPU", "plain"): (0.64, 2.33),
    ("TPU", "float32"): (0.71, 1.74),
    ("TPU", "moved"): (0.87, 1.75),
}
