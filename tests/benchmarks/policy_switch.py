"""How fast a policy switch is, against re-running the cell the naive way, as ratios measured in one run.

    python -m tests.benchmarks.policy_switch [--remat3] [--rounds N] [case ...]

The naive way makes fresh function objects (as running a cell again does), and makes the jaxpr of ``jax.vjp`` and of the
backward function, abstractly. Ours is: the residual list of a new policy (``Trace.preview``), both halves as jaxprs
(``Trace.forward`` and ``Trace.backward``), the whole report, whose program text is laid out when it is read, and a
policy seen before. "own" is what a report takes besides the two retraces that JAX makes for it, as a share of these.

Times are the process's own (CPU) time, which other work on the machine moves less: tracing is one thread of Python. A
collection of garbage is part of the way that it interrupts, and each way begins without the garbage of the one before.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from tests.benchmarks import models
from tests.programs import PROGRAMS


def layers(count: int, jitted: bool = False, policy: Any = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A Python loop over calls of one checkpointed layer, too wide to be anything but types."""

    def layer(x: Any, p: Any) -> Any:
        hidden = jax.nn.gelu(jnp.tanh(x @ p["in"]) @ p["out"] + p["bias"])
        return x + hidden

    checkpointed = jax.checkpoint(layer, policy=policy)
    call = jax.jit(checkpointed) if jitted else checkpointed

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(functools.reduce(call, params, x) ** 2)

    wide = {"in": models.shape(8192, 8192), "out": models.shape(8192, 8192), "bias": models.shape(8192)}
    return loss, ([wide] * count, models.shape(32, 8192))


_blocks = functools.partial(functools.partial, models.transformer)
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "three layers": (lambda: PROGRAMS["three_layers"], "function"),
    "12 blocks, whole function": (_blocks(12), "function"),
    "12 blocks, blocks as site": (_blocks(12, site=True), "sites"),
    "12 blocks scanned, site": (_blocks(12, site=True, scanned=True), "sites"),
    "96 blocks, whole function": (_blocks(96), "function"),
    "96 blocks, blocks as site": (_blocks(96, site=True), "sites"),
    "80 layers": (functools.partial(layers, 80), "sites"),
    "80 layers, jitted": (functools.partial(layers, 80, jitted=True), "sites"),
}
"""What makes a function and its arguments, with this policy at its sites, and where the policies are put."""

# New to the trace each time, and each a policy of JAX's: equal work for both ways.
POLICIES = (
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.nothing_saveable,
)


def _seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def naive(make: Callable[..., Any], at: str, policy: Any) -> float:
    """Seconds of the naive way, with functions that JAX has not seen."""
    made, args = make(policy=policy) if at == "sites" else make()
    fun = made if at == "sites" else jax.checkpoint(lambda *args: made(*args), policy=policy)
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(args)]

    def work() -> None:
        leaves, tree = jax.tree.flatten(args)

        def flat(*chosen: Any) -> Any:
            given = iter(chosen)
            full = [next(given) if yes else leaf for yes, leaf in zip(inexact, leaves_in, strict=True)]
            return fun(*jax.tree.unflatten(tree, full))

        kept: list[Any] = []
        leaves_in: list[Any] = []

        def forward(*values: Any) -> Any:
            leaves_in[:] = values
            out, vjp = jax.vjp(flat, *(value for value, yes in zip(values, inexact, strict=True) if yes))
            residuals, vjp_tree = jax.tree.flatten(vjp)
            kept.append(vjp_tree)
            return out, residuals

        _, (out, residuals) = jax.make_jaxpr(forward, return_shape=True)(*leaves)
        jax.make_jaxpr(lambda res, ct: jax.tree.unflatten(kept[0], res)(ct))(residuals, out)

    return _seconds(work)


def measure(make: Callable[..., Any], at: str, rounds: int) -> dict[str, float]:
    """Ratios naive / ours, the median over policies and rounds."""
    figures: dict[str, list[float]] = {}

    def add(key: str, value: float) -> None:
        figures.setdefault(key, []).append(value)

    for _ in range(rounds):
        fun, args = make()
        trace = rm.trace(fun, *args)
        trace.report("as_written", at)
        for policy in POLICIES:
            slow = naive(make, at, policy)
            forward = _seconds(functools.partial(trace.forward, policy, at))
            listed = _seconds(functools.partial(trace.preview, policy, at))
            rest = _seconds(functools.partial(trace.backward, policy, at))
            residuals = forward + listed
            whole = _seconds(functools.partial(trace.report, policy, at))
            again = _seconds(functools.partial(trace.report, policy, at))
            add("naive ms", slow * 1e3)
            add("residuals ms", residuals * 1e3)
            add("halves ms", (residuals + rest) * 1e3)
            add("report ms", (residuals + rest + whole) * 1e3)
            add("residuals x", slow / residuals)
            add("both halves x", slow / (residuals + rest))
            add("whole report x", slow / (residuals + rest + whole))
            add("seen before x", slow / again)
            add("own x", (listed + whole) / (forward + rest))
    return {key: statistics.median(values) for key, values in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--remat3", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.remat3:
        jax.config.update("jax_remat3", True)
    print(f"jax {jax.__version__}, jax_remat3 {'on' if options.remat3 else 'off'}")
    for name in options.cases:
        make, at = CASES[name]
        figures = measure(make, at, max(1, options.rounds // 3) if "96" in name else options.rounds)
        print(f"{name:28}" + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
