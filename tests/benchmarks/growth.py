"""How the time for a report on a device grows with the program, and what tracing a step takes, as ratios.

    python -m tests.benchmarks.growth [chain ...] [step ...]

A chain is a program of so many steps and of twice as many: the ratio of what their reports on each device take, once
the halves are traced. A step is held against ``jax.make_jaxpr`` of it. Times are the process's own, the least of three.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from tests.benchmarks import models

_Made = tuple[Callable[..., Any], tuple[Any, ...]]
DEVICES = "H100 SXM", "TPU v5e"


def leapfrog(steps: int, at_once: int = 1, checkpointed: bool = False, scanned: bool = False) -> _Made:
    """Elementwise operations one after the other, ``at_once`` steps in a function of their own."""

    def part(carry: Any, _: Any = None) -> Any:
        k, q, p = carry
        for _ in range(at_once):
            p = p - 0.01 * k * jnp.sin(q)
            q = q + 0.01 * p
        return (k, q, p), None

    def loss(k: Any, q: Any, p: Any) -> Any:
        carry = k, q, p
        for _ in range(1 if scanned else steps // at_once):
            call = functools.partial(jax.lax.scan, part, length=10) if scanned else part
            carry, _ = (jax.checkpoint(call) if checkpointed else call)(carry, None)
        return jnp.sum(carry[1] ** 2)

    return loss, (models.shape(), models.shape(100_000), models.shape(100_000))


CHAINS: dict[str, tuple[Callable[[int], _Made], tuple[int, ...]]] = {
    "unrolled": (leapfrog, (50, 100, 200, 400, 800)),
    "in a scan": (lambda n: leapfrog(n, n, scanned=True), (50, 100, 200, 400)),
    "in checkpoints of 10": (lambda n: leapfrog(n, 10, checkpointed=True), (50, 100, 200, 400, 800)),
    "in one checkpoint": (lambda n: leapfrog(n, n, checkpointed=True), (50, 100, 200, 400)),
    "transformer blocks": (lambda n: models.transformer(n, site=True), (12, 24, 48)),
}


def plain_step(layers: int = 12) -> _Made:
    """Momentum by hand, around a transformer."""
    loss, args = models.transformer(layers)

    def step(params: Any, momentum: Any, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *rest)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, momentum), momentum, value

    return step, (args[0], args[0], *args[1:])


def linen_step(layers: int = 12) -> _Made:
    """Adam around dense and attention layers of flax.linen."""
    import optax
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))

    model, adam, x = nn.Sequential([Block() for _ in range(layers)]), optax.adam(1e-3), models.shape(8, 64, 128)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda params: jnp.mean(jnp.square(model.apply(params, x))))(params)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(adam.init, params), x)


STEPS: dict[str, Callable[[], _Made]] = {"plain": plain_step, "linen": linen_step}


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def chain(name: str) -> str:
    make, sizes = CHAINS[name]
    took: dict[str | None, list[float]] = {device: [] for device in (None, *DEVICES)}
    for size in sizes:
        least: dict[str | None, float] = {}
        for _ in range(3):
            fun, args = make(size)
            trace = rm.trace(fun, *args)
            trace.backward()
            for device in took:
                spent = seconds(lambda trace=trace, device=device: trace.report(device=device))
                least[device] = min(spent, least.get(device, spent))
        for device, spent in least.items():
            took[device].append(spent)
    rows: list[str] = []
    for device, each in took.items():
        growth = ", ".join(f"{after / before:.1f}" for before, after in itertools.pairwise(each))
        rows.append(f"{device or 'no device'} {each[-1]:.2f} s, times {growth}")
    return f"{name}, {', '.join(map(str, sizes))}: " + "; ".join(rows)


def step(name: str) -> str:
    jaxpr, trace = [], []
    for _ in range(3):
        for times, way in ((jaxpr, jax.make_jaxpr), (trace, None)):
            fun, args = STEPS[name]()
            jax.clear_caches()
            work = functools.partial(way(fun), *args) if way else functools.partial(rm.trace, fun, *args)
            times.append(seconds(work))
    return f"step {name}: {min(trace) / min(jaxpr):.2f} times jax.make_jaxpr"


def main(names: list[str]) -> None:
    print(f"jax {jax.__version__}")
    for name in names or (*CHAINS, *STEPS):
        print((chain if name in CHAINS else step)(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
