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
from remat_magic.planning.choices import BUILT_IN
from remat_magic.planning.fitting_plans import plan_that_fits
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


def _norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def _attend(p: Any, x: Any, y: Any) -> Any:
    """Attention of x over y, with four heads."""
    q, k, v = ((z @ p[name]).reshape(*z.shape[:2], 4, -1) for name, z in (("q", x), ("k", y), ("v", y)))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["o"]


def _attention(width: int, *lead: int) -> dict[str, Any]:
    return {name: shape(*lead, width, width) for name in "qkvo"}


def _feed(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def decoder(layers: int = 4, width: int = 128, batch: int = 8, length: int = 128) -> _Model:
    """Scanned layers of attention over themselves and over another sequence."""

    def layer(x: Any, p: Any, beside: Any) -> Any:
        x = x + _attend(p["own"], _norm(x), _norm(x))
        x = x + _attend(p["cross"], _norm(x), beside)
        return x + _feed(p, _norm(x))

    def loss(params: Any, x: Any, beside: Any) -> Any:
        return (jax.lax.scan(lambda x, p: (layer(x, p, beside), None), x, params)[0] ** 2).mean()

    params = {
        "own": _attention(width, layers),
        "cross": _attention(width, layers),
        "up": shape(layers, width, 4 * width),
        "down": shape(layers, 4 * width, width),
    }
    return loss, (params, shape(batch, length, width), shape(batch, length, width))


def translation(layers: int = 2, width: int = 128, batch: int = 8, length: int = 128, words: int = 1024) -> _Model:
    """An encoder and a decoder, both unrolled, and a softmax over words."""

    def encode(p: Any, x: Any) -> Any:
        x = x + _attend(p["own"], _norm(x), _norm(x))
        return x + _feed(p, _norm(x))

    def decode(p: Any, x: Any, beside: Any) -> Any:
        x = x + _attend(p["own"], _norm(x), _norm(x))
        x = x + _attend(p["cross"], _norm(x), beside)
        return x + _feed(p, _norm(x))

    def loss(params: Any, source: Any, target: Any) -> Any:
        beside, x = params["embedding"][source], params["embedding"][target]
        for p in params["encoder"]:
            beside = encode(p, beside)
        for p in params["decoder"]:
            x = decode(p, x, beside)
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logits, target[..., None], -1).mean()

    one = {"own": _attention(width), "up": shape(width, 4 * width), "down": shape(4 * width, width)}
    params = {
        "embedding": shape(words, width),
        "head": shape(width, words),
        "encoder": [one] * layers,
        "decoder": [one | {"cross": _attention(width)}] * layers,
    }
    tokens = shape(batch, length, dtype=jnp.int32)
    return loss, (params, tokens, tokens)


def dropouts(layers: int = 3, width: int = 128, batch: int = 8, length: int = 128) -> _Model:
    """An encoder, unrolled, with dropout of attention weights and of what is added to each layer's input."""

    def drop(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)

    def encode(p: Any, x: Any, key: Any) -> Any:
        first, second, third = jax.random.split(key, 3)
        y = _norm(x)
        q, k, v = ((y @ p["own"][name]).reshape(*y.shape[:2], 4, -1) for name in "qkv")
        weights = drop(first, jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)))
        x = x + drop(second, jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["own"]["o"])
        return x + drop(third, _feed(p, _norm(x)))

    def loss(params: Any, x: Any, key: Any) -> Any:
        for number, p in enumerate(params):
            x = encode(p, x, jax.random.fold_in(key, number))
        return (x**2).mean()

    one = {"own": _attention(width), "up": shape(width, 4 * width), "down": shape(4 * width, width)}
    return loss, ([one] * layers, shape(batch, length, width), jax.eval_shape(lambda: jax.random.key(0)))


def dense(layers: int = 5, growth: int = 48, size: int = 24, batch: int = 16) -> _Model:
    """Convolutions of all that earlier ones gave, put beside one another, as in a DenseNet."""

    def layer(p: Any, beside: Any) -> Any:
        x = jnp.concatenate(beside, -1)
        x = jax.nn.relu((x - x.mean((1, 2), keepdims=True)) * jax.lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5))
        return jax.lax.conv_general_dilated(x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Any, images: Any) -> Any:
        beside = [images]
        for p in params:
            beside.append(layer(p, beside))
        return (jnp.concatenate(beside, -1).mean((1, 2)) ** 2).sum()

    kernels = [shape(3, 3, 16 + growth * number, growth) for number in range(layers)]
    return loss, (kernels, shape(batch, size, size, 16))


def routed(layers: int = 3, width: int = 128, experts: int = 4, tokens: int = 1024) -> _Model:
    """Each token goes to two experts of four, which take so many at most; scanned, with a norm before."""
    room = tokens

    def layer(x: Any, p: Any) -> Any:
        y = _norm(x)
        gates, chosen = jax.lax.top_k(jax.nn.softmax(y @ p["router"]), 2)
        marks = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=jnp.int32)
        place = ((jnp.cumsum(marks, 0) - 1) * marks).sum(-1)
        sent = jnp.zeros((experts, room, width)).at[chosen.reshape(-1), place].add(jnp.repeat(y, 2, 0), mode="drop")
        done = jnp.einsum("erf,efw->erw", jax.nn.silu(jnp.einsum("erw,ewf->erf", sent, p["up"])), p["down"])
        back = done.at[chosen.reshape(-1), place].get(mode="fill", fill_value=0.0)
        return x + (back.reshape(tokens, 2, width) * gates[..., None]).sum(1)

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2).mean()

    params = {
        "router": shape(layers, width, experts),
        "up": shape(layers, experts, width, 2 * width),
        "down": shape(layers, experts, 2 * width, width),
    }
    return loss, (params, shape(tokens, width))


MODELS: dict[str, Callable[[], _Model]] = {
    "GRU": lambda: other_models.gated(32, 128, 128),
    "U-net": lambda: other_models.unet(4, 32, 16),
    "mixture of experts": lambda: other_models.experts(3, 128, 4, 2048),
    "tied embeddings": lambda: other_models.tied(2, 128, 1024, 4, 128),
    "vision transformer": lambda: other_models.vision(2, 96, 100, 16),
    "long chains": chains,
    "convolutions": convolutions,
    "decoder": decoder,
    "encoder and decoder": translation,
    "dropout": dropouts,
    "dense skips": dense,
    "routed experts": routed,
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
        key = (policy.names or policy.policy, policy.separately) if isinstance(policy, Plan) else (policy, False)
        if (*key, at) not in self.measured:
            self.measured[*key, at] = compile_elsewhere(self.trace.facts, policy, at, self.device)
        return self.measured[*key, at]

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
