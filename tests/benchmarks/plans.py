"""Plans on whole models: the frontier, JAX's own policies beside it, solve times, and what XLA makes of three budgets.

Run it with ``python -m benchmarks.plans`` in ``tests/``; ``--no-xla`` leaves the compiling out (which takes minutes),
``--large`` takes the transformer of GPT-2-small's size, which is not compiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from remat_magic.planning.planner import planner
from tests.benchmarks import models, named_models

POLICIES = ("none", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


def recurrent(
    layers: int = 4, width: int = 128, length: int = 256, batch: int = 8
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gated recurrent layers, each scanned over time: no attention, and what is saved grows with the length."""

    def layer(p: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            gate = jax.nn.sigmoid(x @ p["wg"] + h @ p["ug"])
            h = (1 - gate) * h + gate * jnp.tanh(x @ p["w"] + h @ p["u"])
            return h, h

        return jax.lax.scan(step, jnp.zeros((batch, width)), xs)[1]

    def loss(params: Any, xs: Any) -> Any:
        for p in params:
            xs = xs + layer(p, xs)
        return (xs**2).mean()

    weights = {key: named_models.shape(width, width) for key in ("wg", "ug", "w", "u")}
    return loss, ([weights] * layers, named_models.shape(length, batch, width))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "transformer, 12 blocks": (lambda: named_models.transformer(12, scanned=False), "sites"),
    "transformer, 12 scanned": (lambda: named_models.transformer(12, scanned=True), "sites"),
    "resnet": (named_models.resnet, "sites"),
    "recurrent": (recurrent, "function"),
}
LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "GPT-2 small": (lambda: models.transformer(12), "function"),
    "GPT-2 small, blocks checkpointed": (lambda: models.transformer(12, site=True), "sites"),
    "GPT-2 small's blocks, 48 of them": (lambda: models.transformer(48), "function"),
    "GPT-2 small, scanned": (lambda: models.transformer(12, scanned=True), "function"),
}


def table(name: str, make: Callable[[], Any], at: str, xla: bool) -> None:
    """All that is measured of one model."""
    fun, args = make()
    trace = rm.trace(fun, *args)
    began = time.perf_counter()
    found = planner(trace.facts, at)
    setup = time.perf_counter() - began
    values = len(found.problem().names)
    every = len(found.every_value())
    print(f"\n{name}, at {at}: {every} values, {values} to choose from; graph in {setup:.2f} s")
    began = time.perf_counter()
    points = trace.frontier(20, at)
    print(f"  frontier of 20 in {time.perf_counter() - began:.2f} s")
    forward = trace.report("none", at).forward_flops or 1
    for point in points:
        gap = (point.recomputed_flops - point.bound) / max(point.recomputed_flops, 1)
        print(
            f"    {point.budget_bytes / 1e6:12.2f} MB  recomputed {point.recomputed_flops / forward:7.2%} of forward,"
            f" gap {gap:6.2%}"
        )
    print("  JAX's own policies, and the plan for the same bytes")
    for key in POLICIES:
        report = trace.report(key, at)
        plan = trace.plan(report.saved_bytes, at)
        print(
            f"    {key:34} {report.saved_bytes / 1e6:10.2f} MB  recomputed {report.recomputed_flops / forward:7.2%},"
            f" plan {plan.recomputed_flops / forward:7.2%} ({plan.solve_seconds:.2f} s, gap {plan.gap:.2%})"
        )
    began = time.perf_counter()
    rows = trace.what_if("nothing_saveable", at, device="H100 SXM")
    print(f"  what if: {len(rows)} values in {time.perf_counter() - began:.2f} s")
    least = trace.preview("nothing_saveable", at).saved_bytes
    for part in (0.1, 0.3, 0.6) if xla else ():
        plan = trace.plan(int(least + part * (found.most - least)), at)
        measured = trace.measure(plan)
        told = measured.error or f"XLA's temporaries {(measured.temp_bytes or 0) / 1e6:.2f} MB"
        print(
            f"  budget {plan.budget_bytes / 1e6:.2f} MB: saves {plan.saved_bytes / 1e6:.2f} MB, estimated peak"
            f" {(plan.peak_bytes or 0) / 1e6:.2f} MB, {told} (compiled in {measured.compile_seconds or 0:.1f} s)"
        )
    for key in ("none", "nothing_saveable") if xla else ():
        measured, report = trace.measure(key, at), trace.report(key, at)
        print(
            f"  {key}: saves {report.saved_bytes / 1e6:.2f} MB, estimated peak {(report.peak_bytes or 0) / 1e6:.2f} MB,"
            f" XLA's temporaries {(measured.temp_bytes or 0) / 1e6:.2f} MB"
        )


def main() -> None:
    """Print the table."""
    xla = "--no-xla" not in sys.argv
    chosen = LARGE if "--large" in sys.argv else MODELS
    for name, (make, at) in chosen.items():
        table(name, make, at, xla and chosen is MODELS)


if __name__ == "__main__":
    main()
