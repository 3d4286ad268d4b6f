"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "layers"): (0.70, 1.34),
    ("GPU", "plain"): (0.62, 1.78),
    ("GPU", "moved"): (0.80, 2.53),
    ("TPU", "layers"): (0.82, 1.31),
    ("TPU", "plain"): (0.62, 1.99),
    ("TPU", "moved"): (0.84, 1.64),
}
