"""Prints, as a Markdown table, what a report says beside what XLA says, policy by policy.

Run it as ``python -m tests.benchmarks.measured``; it compiles some fifteen programs, which takes minutes.
"""

from __future__ import annotations

import jax

import remat_magic as rm
from tests.benchmarks.named_models import resnet, transformer

MODELS = {
    "12 blocks, unrolled": (transformer(scanned=False), "save_only_these_names('qkv', 'up')"),
    "12 blocks, scanned": (transformer(scanned=True), "save_only_these_names('qkv', 'up')"),
    "ResNet, 6 blocks": (resnet(), "save_only_these_names('conv1', 'conv2')"),
}
POLICIES = ("none", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def main() -> None:
    """Print the table."""
    print(f"\njax {jax.__version__}, remat3 {bool(getattr(jax.config, 'jax_remat3', False))}\n")
    print(
        "| model | policy | saved | peak | XLA temp | XLA total | peak/total | growth, peak | growth, XLA | findings |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for model, ((fun, args), by_name) in MODELS.items():
        trace = rm.trace(fun, *args)
        before = None
        for policy in ("nothing_saveable", by_name, *POLICIES[3:], *POLICIES[2:3], "none"):
            report, measured = trace.report(policy), trace.measure(policy)
            peak, total = report.peak_bytes, measured.total_bytes
            cells = [model, policy, report.saved_bytes, peak, measured.temp_bytes, total]
            if peak is None or total is None:
                print("|", " | ".join(map(str, cells)), "|", measured.error, flush=True)
                continue
            grown = ("", "") if before is None else (f"{peak - before[0]:+,}", f"{total - before[1]:+,}")
            texts = [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells]
            print(
                "|", " | ".join([*texts, f"{peak / total:.2f}", *grown, " ".join(measured.findings)]), "|", flush=True
            )
            before = (peak, total)


if __name__ == "__main__":
    main()
