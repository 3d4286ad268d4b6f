"""Between which parts of the estimate XLA's compilers were: made by ``tests/benchmarks/estimates.py``."""

from __future__ import annotations

RANGES = {
    ("GPU", "products"): (0.54, 1.96),
    ("GPU", "convolutions"): (0.54, 1.96),
    ("GPU", "elements"): (0.54, 1.96),
    ("GPU", "layers"): (0.54, 1.13),
    ("GPU", "moved"): (0.54, 2.26),
    ("TPU", "products"): (0.49, 1.63),
    ("TPU", "convolutions"): (0.78, 1.63),
    ("TPU", "elements"): (0.74, 2.55),
    ("TPU", "layers"): (0.81, 1.21),
    ("TPU", "moved"): (0.78, 1.64),
}
