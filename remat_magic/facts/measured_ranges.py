"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "elements"): (0.66, 1.50),
    ("GPU", "layers"): (0.76, 1.25),
    ("GPU", "moved"): (0.67, 3.99),
    ("GPU", "products"): (0.72, 1.92),
    ("GPU", "steps"): (0.75, 2.34),
    ("TPU", "elements"): (0.57, 2.38),
    ("TPU", "layers"): (0.78, 1.20),
    ("TPU", "moved"): (0.75, 1.76),
    ("TPU", "products"): (0.61, 1.57),
    ("TPU", "steps"): (0.71, 1.33),
}
