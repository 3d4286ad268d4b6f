"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "elements"): (0.63, 1.54),
    ("GPU", "layers"): (0.74, 1.23),
    ("GPU", "moved"): (0.74, 3.59),
    ("GPU", "products"): (0.82, 1.53),
    ("GPU", "steps"): (0.79, 2.23),
    ("TPU", "elements"): (0.58, 1.51),
    ("TPU", "layers"): (0.77, 1.22),
    ("TPU", "moved"): (0.77, 1.73),
    ("TPU", "products"): (0.73, 1.65),
    ("TPU", "steps"): (0.75, 1.27),
}
