"""Hold plans that fit a device against every built-in policy at every place, by XLA's own bytes, compiled one and all.

``python -m tests.benchmarks.fits ["H100 SXM" "TPU v5e" ...]`` compiles each model under every policy at every place,
then plans for memories between the least and the most that these need, and prints where a policy that fits recomputes
less than the plan. It needs the extras ``tpu`` and ``cuda``; what was compiled before is not compiled again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from remat_magic import devices
from remat_magic.measuring.measure import compile_elsewhere
from remat_magic.planning.fitting_plans import plan_that_fits
from remat_magic.planning.search import BUILT_IN
from remat_magic.records import Measurement, Plan, RematError, Report
from tests.benchmarks import other_models
from tests.benchmarks.named_models import shape

_Model = tuple[Callable[..., Any], tuple[Any, ...]]


def chains(layers: int = 6, width: int = 256, batch: int = 2048) -> _Model:
    """Matmuls with long chains of elementwise operations between them, the layers called one after another."""

    def chain(x: Any) -> Any:
        for _ in range(4):
            x = jnp.sin(x) * jax.nn.sigmoid(x) + jnp.tanh(x)
        return x

    def layer(w: Any, x: Any) -> Any:
        return chain(x @ w)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(w, x)
        return (x**2).mean()

    return loss, ([shape(width, width)] * layers, shape(batch, width))


def convolutions(layers: int = 4, width: int = 32, size: int = 32, batch: int = 16) -> _Model:
    """Convolutions with group normalisation, and a pooling between halves."""

    def layer(p: Any, x: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = x.reshape(*x.shape[:3], 4, -1)
        mean, variance = (f(groups, axis=(1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
        return jax.nn.silu(((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * p["scale"])

    def loss(params: Any, x: Any) -> Any:
        for number, p in enumerate(params):
            x = layer(p, x)
            if number == layers // 2:
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return (x.mean((1, 2)) ** 2).sum()

    first = {"w": shape(3, 3, 3, width), "scale": shape(width)}
    return loss, ([first, *[{"w": shape(3, 3, width, width), "scale": shape(width)}] * (layers - 1)],
                  shape(batch, size, size, 3))  # fmt: skip


MODELS: dict[str, Callable[[], _Model]] = {
    "GRU": lambda: other_models.gated(32, 128, 128),
    "U-net": lambda: other_models.unet(4, 32, 16),
    "mixture of experts": lambda: other_models.experts(3, 128, 4, 2048),
    "tied embeddings": lambda: other_models.tied(2, 128, 1024, 4, 128),
    "vision transformer": lambda: other_models.vision(2, 96, 100, 16),
    "long chains": chains,
    "convolutions": convolutions,
}


@dataclass(frozen=True)
class Held:
    """A plan for so many bytes, held against the built-in choice that recomputes least of those that need no more."""

    memory: int
    needed: int
    plan: Plan
    compilations: int
    best: Report

    @property
    def loses(self) -> bool:
        """Whether the plan does not fit, or the built-in choice recomputes less."""
        return self.needed > self.memory or self.plan.recomputed_flops > self.best.recomputed_flops


class Judge:
    """What XLA needs for choices on a device, each compiled once."""

    def __init__(self, trace: rm.Trace, device: str) -> None:
        self.trace, self.device = trace, devices.get(device)
        self.measured: dict[tuple[Any, ...], Measurement] = {}

    def __call__(self, policy: Any, at: str) -> Measurement:
        """As a device with all the memory there is says it."""
        key = (policy.names or policy.policy if isinstance(policy, Plan) else policy), at
        if key not in self.measured:
            self.measured[key] = compile_elsewhere(self.trace.facts, policy, at, self.device)
        return self.measured[key]

    def built_in(self) -> Iterator[tuple[Report, int]]:
        """Every built-in policy at every place, with the bytes that it needs."""
        sites = ("sites",) if self.trace.facts.engine.sites else ()
        places: list[str] = ["function", *sites, *(site.key for site in self.trace.sites)]
        for at in places:
            for policy in BUILT_IN:
                try:
                    report = self.trace.report(policy, at)
                except RematError:
                    continue
                needed = self(policy, at).needed_bytes
                if needed is not None:
                    yield report, needed

    def plan(self, memory: int) -> tuple[Plan, int, int]:
        """The plan that fits so many bytes, what it needs, and how many choices were compiled for it."""
        asked = []

        def compiled(policy: Any, at: str) -> Measurement:
            asked.append((policy, at))
            measured = self(policy, at)
            fits = measured.needed_bytes is not None and measured.needed_bytes <= memory
            return replace(measured, fits=fits if measured.fits is not None else None, available_bytes=memory)

        plan = plan_that_fits(self.trace.facts, replace(self.device, memory_bytes=memory), compiled)
        needed = self(plan if plan.names else plan.policy, plan.at).needed_bytes
        assert needed is not None
        return plan, needed, len(asked)


def held(fun: Callable[..., Any], args: tuple[Any, ...], device: str) -> Iterator[Held]:
    """Plans for just the memory of each built-in choice that no other one beats, held against all built-in ones."""
    trace = rm.trace(fun, *args)
    judge = Judge(trace, device)
    choices = [*judge.built_in()]
    sizes = {
        needed
        for report, needed in choices
        if not any(size < needed and other.recomputed_flops <= report.recomputed_flops for other, size in choices)
    }
    for memory in sorted(sizes):
        fitting = [report for report, needed in choices if needed <= memory]
        best = min(fitting, key=lambda report: report.recomputed_flops)
        fresh = rm.trace(fun, *args)  # nothing is known of it yet, as where the plan is the first that is asked for
        fresh_judge = Judge(fresh, device)
        fresh_judge.measured = {key: value for key, value in judge.measured.items() if isinstance(key[0], str)}
        plan, needed, compilations = fresh_judge.plan(memory)
        yield Held(memory, needed, plan, compilations, best)


def main() -> None:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=["H100 SXM", "TPU v5e"])
    parser.add_argument("--models", nargs="*", default=[*MODELS])
    options = parser.parse_args()
    print("| device | model | memory | plan | needs | recomputes | best built-in | recomputes | |\n|" + "---|" * 9)
    lost = count = 0
    for device in options.devices:
        for name in options.models:
            for row in held(*MODELS[name](), device):
                count, lost = count + 1, lost + row.loses
                plan = f"{row.plan.label} at {row.plan.at} ({row.compilations} compiled) | {row.needed:,}"
                best = f"{row.best.policy} at {row.best.at} | {row.best.recomputed_flops:,}"
                print(
                    f"| {device} | {name} | {row.memory:,} | {plan} | {row.plan.recomputed_flops:,} | {best} | "
                    f"{'LOST' if row.loses else ''} |",
                    flush=True,
                )
    print(f"\n{lost} of {count} plans lose")


if __name__ == "__main__":
    main()
